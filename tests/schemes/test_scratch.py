"""Encoding and decoding work in small pieces, without a float32 copy of a large tensor."""

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from torchtether.schemes import Affine, Biased, Codebook, fp8, int4, int8, mxfp4, nf4, nvfp4, sinq
from torchtether.schemes.tables import NF4

MIB = 1 << 20
SHAPE = (2048, 8192)  # 64 MiB of float32
SCHEMES = {
    "int8": int8(),
    "int8 tensor": Affine(block=(None, None)),
    "int4": int4(),
    "int3 ragged": Affine(bits=3, block=(1, 100)),
    "biased": Biased(8, (1, 64), torch.bfloat16, torch.bfloat16),
    "sinq": sinq(),
    "fp8": fp8(),
    "fp8 block": fp8("block"),
    "mxfp4": mxfp4(),
    "nvfp4": nvfp4(),
    "nf4": nf4(double_quant=True),
    "nf4 rows": Codebook(NF4, flat=False),
}


class Watch(TorchDispatchMode):
    """Remembers the largest storage, in bytes, that an op made a float32 or wider tensor in."""

    def __init__(self):
        super().__init__()
        self.largest = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for tensor in out if isinstance(out, tuple | list) else (out,):
            if isinstance(tensor, torch.Tensor) and tensor.dtype.itemsize >= 4:
                self.largest = max(self.largest, tensor.untyped_storage().nbytes())
        return out


@pytest.mark.parametrize(("name", "turned"), [(n, False) for n in SCHEMES] + [("int8", True), ("nf4", True)])
def test_scratch_is_bounded(name, turned):
    scheme = SCHEMES[name]
    generator = torch.Generator().manual_seed(0)
    w = torch.empty(SHAPE, dtype=torch.bfloat16).normal_(generator=generator)
    w = w.t().contiguous().t() if turned else w
    with Watch() as watch:
        parts = scheme.encode(w)
    assert watch.largest <= 8 * MIB
    if not turned:
        with Watch() as watch:
            scheme.decode(parts, SHAPE, torch.bfloat16)
        assert watch.largest <= 8 * MIB


def test_the_watch_sees_a_copy():
    with Watch() as watch:
        torch.ones(1024, dtype=torch.bfloat16).float()
    assert watch.largest == 4096
