"""Fixtures that tests of several peers share."""

from functools import partial
from types import SimpleNamespace

import pytest
import torch


@pytest.fixture
def unpacked(monkeypatch):
    """Keep bitsandbytes from rounding scales to bfloat16 in the first forward, as it does with AVX512-BF16.

    Its ``state_dict()`` then gives the scales in another order than it had taken them.
    """
    pytest.importorskip("bitsandbytes")
    monkeypatch.setattr("bitsandbytes.nn.modules.has_avx512bf16", lambda: False)


@pytest.fixture
def quanto_uncompiled(monkeypatch):
    """Let quanto unpack codes by its torch ops, as on other devices, not by an extension that it would build."""
    module = pytest.importorskip("optimum.quanto.library.extensions.cpp")
    everywhere = partial(torch.ops.quanto.unpack.default._op_dk, torch._C.DispatchKey.CompositeExplicitAutograd)
    monkeypatch.setattr(module.ext, "_lib", SimpleNamespace(unpack=everywhere))
