"""Checkpoints as they lie on the disk, read lazily and written whole."""
