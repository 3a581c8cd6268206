"""The command line, which works on checkpoints without the code of their models."""
