"""Tensors change under the objects that others hold: optimizers, hooks, caches, user code."""
