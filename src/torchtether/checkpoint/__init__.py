"""Checkpoints on disk: lazy reading and atomic saving."""
