"""Hypothesis strategies: Hypothesis draws facts (shape, dtype, pattern, seed), torch draws the numbers."""

import torch
from hypothesis import strategies as st

FLOATS = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
PATTERNS = ("normal", "zeros", "constant", "spike", "tiny", "large", "positive", "negative", "zero_rows", "mixed_rows")


def filled(shape, dtype, pattern, seed):
    """A tensor of ``shape`` and ``dtype`` that shows ``pattern``; finite in every float dtype."""
    generator = torch.Generator().manual_seed(seed)
    values = torch.randn(shape, generator=generator)
    if pattern == "zeros":
        values = torch.zeros(shape)
    elif pattern == "constant":
        values = torch.full(shape, 0.37)
    elif pattern == "spike" and values.numel():
        values = values * 1e-3
        values.view(-1)[seed % values.numel()] = 50.0
    elif pattern == "tiny":
        values = values * 1e-6
    elif pattern == "large":
        values = values * 1e3
    elif pattern == "positive":
        values = values.abs() + 0.1
    elif pattern == "negative":
        values = -values.abs() - 0.1
    elif pattern == "zero_rows" and values.dim():
        values[::2] = 0
    elif pattern == "mixed_rows" and values.dim():
        values = values * torch.logspace(-4, 2, values.shape[0]).view(-1, *[1] * (values.dim() - 1))
    return values.to(dtype)


@st.composite
def tensors(draw, ranks=(1, 2, 3), dtypes=FLOATS, patterns=PATTERNS, smallest=1, largest=70):
    """A float tensor of any rank in ``ranks`` and any pattern; leading sizes stay small."""
    rank = draw(st.sampled_from(ranks))
    leading = [draw(st.integers(smallest, 12)) for _ in range(rank - 1)]
    last = draw(st.integers(smallest, largest))
    return filled(
        (*leading, last),
        draw(st.sampled_from(dtypes)),
        draw(st.sampled_from(patterns)),
        draw(st.integers(0, 2**31 - 1)),
    )


def matrices(**kwargs):
    """A float matrix of any pattern."""
    return tensors(ranks=(2,), **kwargs)
