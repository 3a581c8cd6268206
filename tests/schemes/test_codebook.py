"""Codebook: the laws over its fields, nested scales, and tables in any order."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import torchtether
from tests.schemes import laws
from tests.strategies import examples
from torchtether.errors import ArgumentError, RuleError, SchemeError
from torchtether.schemes import Codebook, fp4, int4, nf4, resolve
from torchtether.schemes.bits import pack, unpack
from torchtether.schemes.named import NAMED
from torchtether.schemes.tables import DYNAMIC, FP4, NF4

SHORT = (0.5, -1.0, 0.0, -0.25, 0.125, 1.0)  # 3 bits, in no order
SCHEMES = (
    nf4(),
    nf4(block_size=8),
    nf4(double_quant=True),
    Codebook(NF4, block_size=8, nested=True, nested_block_size=4),
    fp4(),
    Codebook(NF4, block_size=32, flat=False),
    Codebook(FP4, block_size=10, flat=False),
    Codebook(SHORT, block_size=16),
    Codebook(SHORT, block_size=16, flat=False),
    Codebook((-1, 1), block_size=8),
    Codebook(DYNAMIC, block_size=32),
    Codebook((0.9, 0.1, -0.3), block_size=7),
    nf4(block_size=16, fit="mse"),
    Codebook((0.9, 0.1, -0.3), block_size=7, flat=False, fit="mse"),
)
every_scheme = pytest.mark.parametrize(
    "scheme",
    laws.slow_if_searching(SCHEMES),
    ids=lambda s: f"{len(s.table)}-{s.block_size}{'-rows' * (not s.flat)}{'-nested' * s.nested}-{s.fit}",
)


def test_tables_are_the_same_on_older_processors():
    code = "from torchtether.schemes.tables import *; print(DYNAMIC, FP4, NF4)"
    paths = str(Path(torchtether.__file__).parents[1])
    environment = {**os.environ, "PYTHONPATH": paths, "ATEN_CPU_CAPABILITY": "default"}
    printed = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    assert printed.stdout.strip() == f"{DYNAMIC} {FP4} {NF4}"


@every_scheme
@examples(12)
@given(w=laws.values(), data=st.data())
def test_laws(scheme, w, data):
    laws.check_layout(scheme, w)
    laws.check_bound(scheme, w)
    laws.check_dtypes(scheme, w)
    laws.check_like(scheme, w)
    laws.check_gather(scheme, w, 0)
    laws.check_decode_into(scheme, w)
    laws.check_cuts(scheme, w)
    laws.check_strides(scheme, w)
    laws.check_views(
        scheme, w, data.draw(st.sampled_from(((*w.shape[:-1], 1, w.shape[-1]), (w.numel(),), (1, *w.shape))))
    )


@every_scheme
@pytest.mark.parametrize("shape", [(7, 40), (3, 5, 24), (33,)], ids=str)
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


@pytest.mark.parametrize("scheme", laws.slow_after_the_first([SCHEMES[0], SCHEMES[2], SCHEMES[5], SCHEMES[7]]))
def test_encode_and_decode_are_one_graph_each(scheme):
    laws.check_compiles(scheme, laws.make((6, 40), "normal", 1))


@pytest.mark.parametrize("scheme", [SCHEMES[0], SCHEMES[1], SCHEMES[4], SCHEMES[5], SCHEMES[7]])
@given(w=laws.values(dtypes=(torch.float32,)))
def test_encoding_decoded_values_afresh_keeps_every_part(scheme, w):
    """The largest value of a block is -1 or 1 times absmax, exactly."""
    w = torch.where(w.abs() < 1e-37, 0.0, w)  # below, absmax is held at the smallest normal number
    parts = scheme.encode(w)
    laws.assert_same_parts(parts, scheme.encode(scheme.decode(parts, tuple(w.shape), torch.float32)))


@given(seed=st.integers(0, 2**31 - 1), size=st.integers(2, 40))
def test_any_table_gives_the_nearest_value(seed, size):
    generator = torch.Generator().manual_seed(seed)
    table = (torch.rand(size, generator=generator) * 2 - 1).tolist()
    scheme = Codebook((*table, 1.0), block_size=64)
    w = torch.rand(64, generator=generator) * 2 - 1
    w[0] = 1.0
    decoded = scheme.decode(scheme.encode(w), (64,), torch.float32)
    nearest = (w[:, None] - torch.tensor(scheme.table)).abs().min(1).values
    torch.testing.assert_close((decoded - w).abs(), nearest, rtol=0, atol=1e-7)


def test_blocks_run_over_rows_where_flat():
    w = laws.make((5, 10), "mixed", 0)
    parts = Codebook(NF4, block_size=8).encode(w)
    assert parts["absmax"].tolist() == [piece.abs().max().item() for piece in w.view(-1).split(8)]
    rows = Codebook(NF4, block_size=8, flat=False).encode(w)
    assert torch.equal(rows["absmax"], torch.stack((w[:, :8].abs().amax(1), w[:, 8:].abs().amax(1)), 1))


def test_flat_streams_are_cut_only_between_blocks():
    assert [part.span for part in nf4().layout((6, 32)).values()] == [2, 64]
    assert [part.span for part in nf4(True).layout((6, 32)).values()] == [2, 64, 64 * 256, 0]
    assert laws.check_cuts(nf4(), laws.make((6, 32), "normal", 0)) == 6  # rows 0, 2, 4 begin a block; 6 ends the last
    assert nf4().can_view((6, 32), (64, 3))
    assert not nf4().can_view((6, 32), (64, 4))


def test_gather_reads_only_the_named_slices():
    """A huge table with one hot row costs a row: the other codes are not touched."""
    scheme, shape = nf4(double_quant=True), (512, 128)
    parts = scheme.encode(laws.make(shape, "normal", 0))
    seen = []

    class Watch(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            out = func(*args, **(kwargs or {}))
            if isinstance(out, torch.Tensor) and out.is_floating_point():
                seen.append(out.numel())
            return out

    with Watch():
        scheme.gather(parts, shape, torch.tensor([3, 500]), torch.float32)
    assert max(seen) <= 512  # two rows of 128, or a table of 256 bytes by two codes


@pytest.mark.parametrize("height", [1e3, 1e6])
def test_one_huge_row_does_not_drown_the_others_in_double_quantization(height):
    """With the mean absmax as offset the other rows would be noise; here they keep most of their precision."""
    w = laws.make((256, 256), "normal", 0)
    w[7] *= height
    decoded = nf4(double_quant=True).decode(nf4(double_quant=True).encode(w), (256, 256), torch.float32)
    far = torch.cat((w[64:] - decoded[64:], w[64:] * 0))  # rows outside the nested block of the huge one
    assert float(20 * torch.log10(w[64:].norm() / far.norm())) > 19


def test_a_table_may_be_in_any_order():
    w = laws.make((4, 32), "normal", 0)
    shuffled = (*NF4[5:], *NF4[:5])
    a, b = Codebook(NF4), Codebook(shuffled)
    assert torch.equal(a.decode(a.encode(w), (4, 32), torch.float32), b.decode(b.encode(w), (4, 32), torch.float32))


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"table": (1.0,)}, "2 to 256 numbers"),
        ({"table": [0.0, 1.0]}, "2 to 256 numbers"),
        ({"table": (0.0, 2.0)}, "within"),
        ({"table": (0.0, float("nan"))}, "within"),
        ({"table": NF4, "block_size": 0}, "block_size must be a positive int, got 0"),
        ({"table": NF4, "flat": "no"}, "flat must be True or False, got 'no'"),
        ({"table": NF4, "nested": True, "flat": False}, "nested needs flat blocks"),
    ],
)
def test_fields_are_checked(fields, said):
    with pytest.raises(SchemeError, match=said):
        Codebook(**fields)


def test_rank_zero_is_refused():
    with pytest.raises(SchemeError, match="without dimensions"):
        nf4().encode(torch.tensor(1.0))


@pytest.mark.parametrize("name", NAMED)
def test_every_name_means_a_scheme(name):
    scheme = resolve(name)
    assert scheme == NAMED[name]()
    assert resolve(scheme) is scheme
    assert scheme.decode(scheme.encode(torch.ones(4, 128)), (4, 128), torch.float32).shape == (4, 128)


def test_an_unknown_name_is_answered_with_the_nearest():
    with pytest.raises(RuleError, match="Did you mean 'int4'"):
        resolve("int-4")
    with pytest.raises(RuleError, match=r"^unknown scheme '[?]{80}', known are .* Give one of these\.$"):
        resolve("?" * 10_000)
    with pytest.raises(RuleError, match="got an int"):
        resolve(4)


@pytest.mark.parametrize("magnitude", [1e36, 1e38, 1.7e38])
def test_the_mean_of_huge_absmax_stays_within_float32(magnitude):
    scheme, w = nf4(double_quant=True), torch.linspace(-1, 1, 128 * 1024).view(128, 1024) * magnitude
    parts = scheme.encode(w)
    error = (scheme.decode(parts, w.shape, torch.float32) - w).abs()
    assert (error <= scheme.bound(parts, w.shape)).all()
    assert error.max() < 0.2 * magnitude


@pytest.mark.parametrize("bits", range(2, 9))
@pytest.mark.parametrize("flat", [True, False])
def test_a_code_beyond_the_table_decodes_to_0_with_any_number_of_bits(bits, flat):
    """Other writers' streams may hold such; 0 is what the padded tables of 4 and 8 bits have there."""
    number = (1 << bits) - 1
    scheme = Codebook(tuple(torch.linspace(-1, 1, number).tolist()), block_size=16, flat=flat)
    assert scheme.bits == bits
    parts = scheme.encode(torch.linspace(-3, 3, 64).view(2, 32))
    expected = scheme.decode(parts, (2, 32), torch.float32).clone()
    stream = parts["qdata"].view(1 if flat else 2, -1)
    codes = unpack(stream, bits, 64 // stream.shape[0])
    codes[0, 3] = codes[0, 20] = number
    parts["qdata"].copy_(pack(codes, bits).view(parts["qdata"].shape))
    expected[0, 3] = expected[0, 20] = 0
    for dtype in (torch.float32, torch.bfloat16):
        assert torch.equal(scheme.decode(parts, (2, 32), dtype), expected.to(dtype))
        rows = scheme.gather(parts, (2, 32), torch.tensor([1, 0]), dtype)
        assert torch.equal(rows, expected[[1, 0]].to(dtype))


@pytest.mark.parametrize(
    ("make", "why"),
    [
        (lambda: nf4(128), r"^double_quant: is 128, not a bool\. Give True or False\.$"),
        (lambda: fp4(64), "^double_quant: is 64, not a bool"),
        (lambda: int4(64, 128), "^symmetric: is 128, not a bool"),
        (lambda: nf4("no"), "^double_quant: is a str, not a bool"),
        (lambda: torchtether.nvfp4(global_divides="no"), "^global_divides: is a str, not a bool"),
    ],
)
def test_a_size_is_no_flag(make, why):
    with pytest.raises(ArgumentError, match=why):
        make()
    assert nf4(1) == nf4(True)
