"""The public strategies of ``tt.testing``, and how many examples a test takes."""

from hypothesis import settings

from torchtether.testing.draws import FLOATS, PATTERNS, filled
from torchtether.testing.strategies import matrices, shapes, tensors

__all__ = ["FLOATS", "PATTERNS", "examples", "filled", "matrices", "shapes", "tensors"]


def examples(count, **others):
    """Return settings of ``count`` examples in the profile "default", and of as many times more or fewer in others."""
    in_profile, in_default = settings().max_examples, settings.get_profile("default").max_examples
    return settings(max_examples=max(1, count * in_profile // in_default), **others)
