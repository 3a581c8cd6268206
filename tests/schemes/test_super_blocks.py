"""SuperBlocks: the laws over its fields, and its own promises."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.schemes import laws
from tests.strategies import examples
from torchtether.errors import SchemeError
from torchtether.schemes import SuperBlocks

FP32 = torch.float32
TABLE = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)
SCHEMES = (
    SuperBlocks(4, 32, minimum=True),
    SuperBlocks(5, 8, 16, minimum=True),
    SuperBlocks(2, 16, scale_bits=4, minimum=True),
    SuperBlocks(3, 16, 32, offset=4),
    SuperBlocks(6, 16, scale_bits=8, offset=32),
    SuperBlocks(1, 8, 8, offset=1),
    SuperBlocks(4, 8, 32, table=TABLE),
    SuperBlocks(4, 32, 32, 0, table=TABLE),
    SuperBlocks(3, 8, 8, 0, table=(0.5, -1, 0, -0.25, 1)),
    SuperBlocks(8, 24, 48, 5, offset=100),
)
every_scheme = pytest.mark.parametrize("scheme", SCHEMES, ids=lambda s: "-".join(map(str, s.to_json().values()))[:40])


def fits(w):
    return float(w.abs().max()) < 10000


def keeps_values(scheme, w):
    """Encoding decoded values, with the held scales or as an op writes them, keeps the values."""
    shape, parts = tuple(w.shape), scheme.encode(w)
    for dtype in (FP32, w.dtype):
        decoded = scheme.decode(parts, shape, dtype)
        if not bool(decoded.isfinite().all()):
            continue
        for again in (scheme.encode(decoded, like=parts), scheme.reencode(decoded, parts)):
            assert laws.same(scheme.decode(again, shape, dtype), decoded)


@every_scheme
@examples(12)
@given(w=laws.values(), data=st.data())
def test_laws(scheme, w, data):
    if not fits(w):
        w = laws.make((4, 40), "normal", 0)
    laws.check_parts(scheme, w)
    keeps_values(scheme, w)
    laws.check_views(
        scheme, w, data.draw(st.sampled_from(((*w.shape[:-1], 1, w.shape[-1]), (w.numel(),), (1, *w.shape))))
    )


@every_scheme
@pytest.mark.parametrize("shape", [(7, 40), (3, 5, 24), (2, 1, 16), (33,), (3, 300)], ids=str)
@pytest.mark.parametrize("chunk", [1, 90])
def test_small_pieces_change_no_bit(scheme, shape, chunk, monkeypatch):
    laws.check_chunks(scheme, laws.make(shape, "mixed", 3), monkeypatch, chunk)


@every_scheme
def test_values_that_are_not_finite_are_refused_by_count(scheme):
    laws.check_not_finite(scheme)


@every_scheme
def test_records_survive_json(scheme):
    laws.check_json(scheme)


@every_scheme
def test_empty_tensors(scheme):
    laws.check_empty(scheme)


@pytest.mark.parametrize("scheme", laws.slow_after_the_first([SCHEMES[0], SCHEMES[4], SCHEMES[6], SCHEMES[7]]))
def test_encode_and_decode_are_one_graph_each(scheme):
    laws.check_compiles(scheme, laws.make((6, 40), "normal", 1))


def foreign(scheme, shape, seed):
    """Parts that ``encode`` would not choose: any codes, scales and minima of any sign."""
    generator = torch.Generator().manual_seed(seed)
    parts = scheme.empty(shape, FP32, "cpu")
    for name, part in parts.items():
        if part.dtype == torch.float16:
            part.normal_(generator=generator)
        elif name == "qdata":
            part.random_(0, 256, generator=generator)
        else:
            low = 0 if scheme.minimum else -(1 << (scheme.scale_bits - 1))
            part.random_(low, low + (1 << scheme.scale_bits), generator=generator)
    return parts


@every_scheme
@given(seed=st.integers(0, 2**31 - 1))
def test_foreign_parts_keep_their_values(scheme, seed):
    if len(scheme._levels) < 1 << scheme.bits:
        return  # codes beyond the table
    shape = (4, 288)
    parts = foreign(scheme, shape, seed)
    decoded = scheme.decode(parts, shape, FP32)
    again = scheme.reencode(decoded, parts)
    assert torch.equal(scheme.decode(again, shape, FP32), decoded)
    assert all(laws.same(again[name], part) for name, part in parts.items() if name != "qdata")


@every_scheme
@given(seed=st.integers(0, 2**31 - 1))
def test_decoding_is_the_formula_in_float32(scheme, seed):
    """Element by element with numpy, each step rounded to float32: (d * sc) * q - (dmin * m)."""
    if len(scheme._levels) < 1 << scheme.bits:
        return
    shape = (3, 288)
    parts = foreign(scheme, shape, seed)
    bits = np.unpackbits(parts["qdata"].numpy(), axis=-1, bitorder="little")[:, : 288 * scheme.bits]
    codes = (bits.reshape(3, 288, scheme.bits).astype(np.int64) << np.arange(scheme.bits)).sum(-1)
    level = np.array(scheme.table or np.arange(1 << scheme.bits) - scheme.offset, dtype=np.float32)[codes]
    block, over = np.arange(288) // scheme.block_size, np.arange(288) // scheme.super_block_size
    numbers = {name: part.numpy().astype(np.float32) for name, part in parts.items() if name != "qdata"}
    scale = numbers["super_scale"][:, over]
    if scheme.scale_bits:
        scale = scale * numbers["scale"][:, block]
    expected = scale * level
    if scheme.minimum:
        expected = expected - numbers["super_min"][:, over] * numbers["min"][:, block]
    assert laws.same(scheme.decode(parts, shape, FP32), torch.from_numpy(expected))


@pytest.mark.parametrize(("scheme", "least"), [(SCHEMES[0], 19.5), (SCHEMES[4], 30.5), (SCHEMES[7], 18.5)])
def test_the_error_of_gaussian_weights(scheme, least):
    """In dB, on what llama.cpp's own search makes 21 to 33 of."""
    w = laws.make((64, 1024), "normal", 0)
    error = scheme.decode(scheme.encode(w), (64, 1024), FP32) - w
    assert float(20 * torch.log10(w.norm() / error.norm())) > least


def test_a_small_block_beside_a_large_one_keeps_its_own_scale():
    w = torch.cat((laws.make((1, 32), "normal", 0) * 30, laws.make((1, 32), "normal", 1)), -1)
    scheme = SuperBlocks(4, 32, minimum=True)
    error = (scheme.decode(scheme.encode(w), (1, 64), FP32) - w).abs()
    assert float(error[:, 32:].max()) < float(error[:, :32].max()) / 5


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"bits": 9, "minimum": True}, "bits must be an int from 1 to 8, got 9"),
        ({"scale_bits": -1, "minimum": True}, "scale_bits must be an int from 0 to 8"),
        ({"super_block_size": 40, "minimum": True}, "must be a multiple of block_size 32, got 40"),
        ({"scale_bits": 0, "offset": 8}, "must be without scale_bits block_size 32, got 256"),
        ({}, "it needs one of minimum=True, an offset and a table"),
        ({"minimum": True, "offset": 4}, "it needs one of"),
        ({"offset": 16}, "offset must be from 1 to 15, got 16"),
        ({"offset": -1}, "offset must be from 1 to 15, got -1"),
        ({"scale_bits": 0, "super_block_size": 32, "minimum": True}, "minimum needs scale_bits"),
        ({"table": (1.0,)}, "a tuple of 2 to 16 numbers"),
        ({"table": (1.0, 2.0)}, "both signs"),
        ({"table": (float("nan"), 2.0)}, "below"),
    ],
)
def test_fields_are_checked(fields, said):
    with pytest.raises(SchemeError, match=said):
        SuperBlocks(**fields)


def test_values_beyond_float16_scales_are_refused():
    with pytest.raises(SchemeError, match="does not fit float16"):
        SuperBlocks(offset=8).encode(torch.full((2, 32), 1e30))


@pytest.mark.parametrize(("bits", "block_size", "scale_bits"), [(4, 32, 6), (5, 32, 6), (3, 32, 6), (2, 16, 4)])
def test_errors_have_no_common_sign_where_values_lie_on_levels(bits, block_size, scale_bits):
    """As those do that another quantizer of as many bits has rounded; a sum over columns would keep what is common."""
    generator, top = torch.Generator().manual_seed(0), (1 << bits) - 1
    codes = torch.randint(0, top + 1, (64, 512 // block_size, block_size), generator=generator).float()
    codes[..., 0], codes[..., 1] = 0, top
    step = 0.5 + 0.5 * torch.rand(64, 512 // block_size, 1, generator=generator)
    values = ((codes - top / 2) * step).view(64, 512)
    scheme = SuperBlocks(bits, block_size, scale_bits=scale_bits, minimum=True)
    off = scheme.decode(scheme.encode(values), (64, 512), torch.float32) - values
    off = off.view(64, -1, block_size) / step
    assert off.mean().abs() < 0.02
    assert off.abs().mean() < 0.12
