"""Replacing the contents of tensor objects that optimizers, hooks, caches and user code refer to."""
