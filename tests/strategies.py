"""The strategies of ``tt.testing``, which are public, under the names that the tests use."""

from torchtether.testing.draws import FLOATS, PATTERNS, filled
from torchtether.testing.strategies import matrices, shapes, tensors

__all__ = ["FLOATS", "PATTERNS", "filled", "matrices", "shapes", "tensors"]
