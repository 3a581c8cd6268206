"""The command line: checkpoints without the code of their models."""
