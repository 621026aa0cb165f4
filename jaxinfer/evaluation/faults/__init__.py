"""Faults put into a running engine on purpose, and what became of each: see `campaign`."""
