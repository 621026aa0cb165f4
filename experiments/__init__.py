"""One file for each table or artefact; run as `python -m experiments.NAME`."""
