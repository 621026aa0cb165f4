"""Checkpoints: `model` (a model ready to be served), `orbax` (the folder on disk); `tiny/` is the one that ships."""
