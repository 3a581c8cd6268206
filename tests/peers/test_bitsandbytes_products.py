"""bitsandbytes' 4-bit kernels on our parts: decoded values equal the scheme's bit for bit, products are accurate."""

import pytest
import torch

import torchtether as tt
from torchtether.schemes.tables import FP4
from torchtether.weights.products import bitsandbytes_4bit, decoding
from torchtether.weights.products.table import kernels_for

pytestmark = pytest.mark.peers
pytest.importorskip("bitsandbytes")

SCHEMES = [
    tt.nf4(),
    tt.nf4(block_size=128),
    tt.nf4(double_quant=True),
    tt.Codebook(FP4),
    tt.Codebook(FP4, block_size=32, nested=True),
    tt.Codebook(tt.nf4().table, flat=False),
]
DTYPES = {torch.float32: 1e-5, torch.bfloat16: 2.0**-7, torch.float16: 2.0**-10}
each_scheme = pytest.mark.parametrize("scheme", SCHEMES, ids=str)
each_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=str)


def weight_of(scheme, dtype=torch.float32):
    values = torch.randn(48, 256, generator=torch.Generator().manual_seed(1))
    return tt.Weight.encode(values, scheme).to(dtype)


@each_scheme
@each_dtype
def test_decoded_bits_are_the_schemes(scheme, dtype):
    weight = weight_of(scheme)
    layout = weight.kernel_layout
    wanted = weight.to(dtype).dequantize()
    for start, stop in ((0, 48), (16, 31)):
        made = bitsandbytes_4bit.decode(layout, layout.pick_from(weight), dtype, (start, stop))
        assert made.dtype is dtype
        assert torch.equal(made, wanted[start:stop])


@each_scheme
@each_dtype
@pytest.mark.parametrize("shape", [(256,), (1, 256), (2, 3, 256), (20, 256)], ids=str)
def test_products_read_the_codes_as_they_lie(scheme, dtype, shape):
    weight, x = weight_of(scheme, dtype), torch.randn(shape, generator=torch.Generator().manual_seed(2)).to(dtype)
    layout = weight.kernel_layout
    for bias in (None, torch.randn(48).to(dtype)):
        made = bitsandbytes_4bit.linear(layout, layout.pick_from(weight), x, bias)
        wanted = x.double() @ weight.to(torch.float32).dequantize().double().T
        wanted = wanted if bias is None else wanted + bias.double()
        assert made.shape == (*shape[:-1], 48)
        assert made.dtype is dtype
        assert (made.double() - wanted).norm() <= DTYPES[dtype] * wanted.norm()


def test_what_it_does_not_know_is_left_to_others():
    for scheme in (
        tt.Codebook(tt.nf4().table, block_size=16, flat=False),
        tt.Codebook(tuple(torch.linspace(-1, 1, 16).tolist())),
        tt.int4(),
        tt.mxfp4(),
    ):
        layout = weight_of(scheme).kernel_layout
        assert "bitsandbytes" not in dict(kernels_for(layout, torch.bfloat16, "cuda"))
        assert bitsandbytes_4bit.decode(layout, layout.pick_from(weight_of(scheme)), torch.bfloat16) is None


def test_values_come_of_it_where_it_is_the_decoder(monkeypatch):
    """On a GPU; here the CPU's tensors say that they lie on one."""
    weight = weight_of(tt.nf4())
    wanted = weight.dequantize()
    monkeypatch.setitem(decoding.DECODERS, "cpu", decoding.DECODERS["cuda"])
    layout = weight.kernel_layout
    assert torch.equal(decoding.decode(layout, layout.pick_from(weight), torch.float32), wanted)
