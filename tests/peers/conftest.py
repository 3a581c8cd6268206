"""Fixtures that tests of several peers share."""

import pytest


@pytest.fixture
def unpacked(monkeypatch):
    """Keep bitsandbytes from rounding scales to bfloat16 in the first forward, as it does with AVX512-BF16.

    Its ``state_dict()`` then gives the scales in another order than it had taken them.
    """
    pytest.importorskip("bitsandbytes")
    monkeypatch.setattr("bitsandbytes.nn.modules.has_avx512bf16", lambda: False)
