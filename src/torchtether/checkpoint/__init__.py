"""Checkpoints on disk: lazy reading, and saving so that readers never see a half-written one as whole."""
