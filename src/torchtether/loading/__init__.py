"""A load as a plan: what goes where, every fault before the first change, then the bytes."""
