"""The dense little-endian stream of codes."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from torchtether.schemes.bits import lookup, pack, packed_size, same_bits, unpack

every_width = pytest.mark.parametrize("bits", range(1, 9))


def codes_of(lead, count, bits, seed):
    return torch.randint(0, 1 << bits, (*lead, count), generator=torch.Generator().manual_seed(seed), dtype=torch.uint8)


counts, leads, seeds = st.integers(0, 70), st.lists(st.integers(0, 3), max_size=2), st.integers(0, 2**31 - 1)


@every_width
@given(lead=leads, count=counts, seed=seeds)
def test_unpack_inverts_pack(bits, lead, count, seed):
    codes = codes_of(lead, count, bits, seed)
    packed = pack(codes, bits)
    assert packed.shape == (*lead, packed_size(count, bits))
    assert packed.dtype == torch.uint8
    assert torch.equal(unpack(packed, bits, count), codes)
    padded = torch.nn.functional.pad(packed, (0, 3), value=255)  # what follows the stream is not read
    assert torch.equal(unpack(padded, bits, count), codes)


@every_width
@given(count=st.integers(1, 40), seed=seeds)
def test_a_row_is_one_little_endian_number(bits, count, seed):
    """The law of the layout, in Python integers: the row is the sum of ``code << (bits * i)``."""
    codes = codes_of((), count, bits, seed).tolist()
    number = sum(code << (bits * i) for i, code in enumerate(codes))
    assert bytes(pack(torch.tensor(codes, dtype=torch.uint8), bits).tolist()) == number.to_bytes(
        packed_size(count, bits), "little"
    )


@every_width
@given(lead=leads, count=counts, seed=seeds)
def test_lookup_reads_the_table_at_every_code(bits, lead, count, seed):
    codes = codes_of(lead, count, bits, seed)
    table = torch.randn(1 << bits, generator=torch.Generator().manual_seed(seed))
    assert torch.equal(lookup(pack(codes, bits), table, bits, count), table[codes.long()])


@every_width
def test_without_the_view_of_wider_integers_it_is_the_same_stream(bits, monkeypatch):
    codes = codes_of((3,), 37, bits, 0)
    packed = pack(codes, bits)
    monkeypatch.setattr("torchtether.schemes.bits._VIEWABLE", False)
    assert torch.equal(pack(codes, bits), packed)
    assert torch.equal(unpack(packed, bits, 37), codes)


@every_width
def test_meta_has_the_same_shapes(bits):
    codes = torch.empty(3, 21, dtype=torch.uint8, device="meta")
    packed = pack(codes, bits)
    assert packed.shape == (3, packed_size(21, bits))
    assert unpack(packed, bits, 21).shape == (3, 21)
    assert packed.is_meta


@every_width
def test_strided_codes_and_streams_are_read_as_they_are(bits):
    codes = codes_of((21,), 16, bits, 1).t()
    packed = pack(codes, bits)
    assert torch.equal(packed, pack(codes.contiguous(), bits))
    assert torch.equal(unpack(packed.t().contiguous().t(), bits, 21), codes)


def test_same_bits_compares_bits_of_any_dtype_and_stride():
    grid = torch.arange(12.0).view(3, 4)
    assert same_bits(grid[:, ::2], grid[:, ::2].clone())
    assert not same_bits(grid[:, ::2], grid[:, 1::2])
    assert same_bits(torch.tensor(float("nan")), torch.tensor(float("nan")))
    assert not same_bits(torch.tensor(0.0), torch.tensor(-0.0))
    assert not same_bits(torch.zeros(2), torch.zeros(2, 1))
    for dtype in (torch.float8_e4m3fn, torch.float8_e8m0fnu, torch.complex64, torch.bool):
        assert same_bits(torch.ones(3).to(dtype), torch.ones(3).to(dtype))
        assert not same_bits(torch.ones(3).to(dtype), torch.ones(3))
