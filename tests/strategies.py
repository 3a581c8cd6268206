"""The public strategies of ``tt.testing``, imported for the tests."""

from torchtether.testing.draws import FLOATS, PATTERNS, filled
from torchtether.testing.strategies import matrices, shapes, tensors

__all__ = ["FLOATS", "PATTERNS", "filled", "matrices", "shapes", "tensors"]
