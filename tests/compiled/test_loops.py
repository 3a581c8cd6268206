"""The compiled loops give the same bits as torch ops, and are not used where torch must observe the ops."""

import shutil
import subprocess
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from tests.schemes import laws
from tests.strategies import examples
from torchtether import compiled
from torchtether.schemes import Affine, Codebook, ScaledFloat, codebook, fp4, fp8, int4, int8, mxfp4, mxfp8, nf4, nvfp4
from torchtether.schemes.blocks import Grid
from torchtether.schemes.tables import NF4

LOOPS = {
    "int8": int8(),
    "int8 groups": int8(32),
    "int8 tensor": Affine(block=(None, None)),
    "uint8": Affine(signed=False, symmetric=False),
    "int8 narrow": Affine(narrow_range=True, unit=1 / 127),
    "int8 reciprocal": Affine(reciprocal=True, symmetric=False, block=(1, 5)),
    "int8 tall": Affine(block=(2, 16)),
    "int4": int4(),
    "int4 ragged": int4(24),
    "int4 symmetric": int4(None, True),
    "uint4": Affine(bits=4, signed=False, symmetric=False, scale_dtype=torch.bfloat16, block=(1, 32)),
    "fp8": fp8(),
    "fp8 tensor": fp8("tensor"),
    "fp8 block": fp8("block"),
    "e5m2": ScaledFloat("e5m2", block=(1, 32)),
    "nf4": nf4(),
    "nf4 nested": nf4(double_quant=True),
    "nf4 blocks of 5": nf4(block_size=5),
    "nf4 rows": Codebook(NF4, flat=False),
    "fp4": fp4(),
    "mxfp8": mxfp8(),
    "mxfp4": mxfp4(),
    **{
        f"{element} {rounding}": ScaledFloat(element, (1, 32), torch.float8_e8m0fnu, scale_rounding=rounding)
        for element, rounding in (("e4m3", "even"), ("e5m2", "floor"), ("e2m1", "floor"), ("e2m1", "rceil"))
    },
    "mx rows": ScaledFloat("e2m1", (1, None), torch.float8_e8m0fnu),
    "mx blocks of 5": ScaledFloat("e4m3", (1, 5), torch.float8_e8m0fnu),
    "nvfp4": nvfp4(),
    "nvfp4 divides": nvfp4(global_divides=True),
    "reciprocal": Affine(block=(1, 48), scale_dtype=torch.bfloat16, reciprocal=True),
}
OUT = (torch.float32, torch.bfloat16, torch.float16)


@pytest.fixture(scope="module", autouse=True)
def _compiled():
    if compiled.native() is None:
        pytest.skip(compiled.state())


def without(work):
    """What ``work`` gives with torch ops."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("torchtether.compiled.room._module", None)
        return work()


@pytest.fixture
def no_ops(monkeypatch):
    """The loops over chunks, which torch ops need, fail."""

    def chunks(*_):
        raise AssertionError("it was computed with torch ops")

    monkeypatch.setattr(Grid, "chunks", chunks)
    monkeypatch.setattr(codebook, "flat_ranges", chunks)


def shrink(part, factor):
    is_scale = part.dtype == torch.float32
    return torch.where(part > 2.0**-60, part * factor, part) if is_scale else part


def check(scheme, w):
    shape, parts = tuple(w.shape), scheme.encode(w)
    laws.assert_same_parts(parts, without(lambda: scheme.encode(w)))
    for factor in (0.5, 2.0**-40):  # values clip a little, or are far beyond the range of integers
        less = {name: shrink(part, factor) for name, part in parts.items()}
        laws.assert_same_parts(scheme.encode(w, like=less), without(lambda less=less: scheme.encode(w, like=less)))
    for dtype in OUT:
        decoded = without(lambda dtype=dtype: scheme.decode(parts, shape, dtype))
        assert laws.same(scheme.decode(parts, shape, dtype), decoded)
    laws.check_decode_into(scheme, w)


@pytest.mark.parametrize("scheme", LOOPS.values(), ids=LOOPS)
@given(w=laws.values(dtypes=OUT))
def test_bits_are_those_of_torch_ops(scheme, w):
    if w.dim() < 2 and getattr(scheme, "block", (1,))[0] not in (1, None):
        w = w.unsqueeze(0)
    check(scheme, w)


@pytest.mark.parametrize("name", LOOPS)
@pytest.mark.parametrize("dtype", OUT)
def test_every_number_of_sixteen_bits(name, dtype):
    """Each bfloat16 (float16) there is, in rows long enough for several stretches."""
    kind = torch.float16 if dtype == torch.float16 else torch.bfloat16
    w = torch.arange(1 << 16, dtype=torch.int32).to(torch.int16).view(kind).to(dtype)
    w = torch.where(w.isfinite() & (w.abs() < 2.0**100), w, 0)
    order = torch.randperm(1 << 16, generator=torch.Generator().manual_seed(0))
    check(LOOPS[name], w[order].view(16, 4096))
    check(LOOPS[name], torch.where(w.abs() <= 1, w, w / 2.0**99).view(16, 4096)[:, :3001].contiguous())


@pytest.mark.parametrize("name", LOOPS)
def test_rows_that_several_threads_share(name):
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    try:
        for shape in ((601, 480), (1, 288_480)):
            check(LOOPS[name], laws.make(shape, "normal", 0, torch.bfloat16))
    finally:
        torch.set_num_threads(before)


STEPPED = {
    "int8": (int8(), torch.arange(-127.5, 127)),
    "int8 narrow": (Affine(narrow_range=True, unit=1 / 127), torch.arange(-126.5, 127)),
    "uint8": (Affine(signed=False, symmetric=False), torch.arange(0.5, 255)),
    "int4": (int4(), torch.arange(0.5, 15)),
    "int4 long": (int4(2048), torch.arange(0.5, 15)),
    "int4 symmetric": (int4(None, True), torch.arange(-7.5, 7)),
    "fp8": (fp8(), torch.arange(8.5, 16)),
    "e5m2": (ScaledFloat("e5m2", block=(1, None)), torch.arange(4.5, 8)),
}
"""Schemes, and where quotients step from one code to the next: of float8 within one binade."""


@pytest.mark.parametrize("name", STEPPED)
@examples(12)
@given(seed=st.integers(0, 2**32), is_plain=st.booleans())
def test_numbers_next_to_every_step_are_rounded_as_quotients_are(name, seed, is_plain):
    """Where a product by the reciprocal of the scale is most likely to give another code; ``is_plain``: also ties."""
    (scheme, steps), draw = STEPPED[name], torch.Generator().manual_seed(seed)
    shape, is_float8 = (24, 2048), isinstance(scheme, ScaledFloat)
    top = torch.rand(24, 1, generator=draw) * 4 + 0.25
    top = (2.0 ** top.round() * steps.abs().max() if is_plain else top).bfloat16()
    if getattr(scheme, "symmetric", True):
        low, scale = -top, scheme.encode(top.expand(24, 128).contiguous())["scale"][:, :1].float()
        zero = 0
    else:
        low = (top * -torch.rand(24, 1, generator=draw)).bfloat16()
        scale = (top.float() - low.float()) / len(steps)
        zero = (-low / scale).round()
    x = (steps[torch.randint(len(steps), shape, generator=draw)] - zero).double() * scale
    if is_float8:
        x = x * 2.0 ** torch.randint(-9, 9, shape, generator=draw)
        x[:, 1792:] *= 2.0**-10  # subnormal ones, and not everywhere: what stands beside them is divided, too
    sign = torch.randint(2, shape, generator=draw) * 2 - 1 if is_float8 else 1
    x = (x * sign * (1 + torch.randint(-1, 2, shape, generator=draw) / 256)).bfloat16()  # or the number beside it
    x = torch.minimum(torch.maximum(x, low), top)
    x[:, ::128], x[:, 1::128] = top, low
    parts = scheme.encode(x)
    laws.assert_same_parts(parts, without(lambda: scheme.encode(x)))


@pytest.mark.parametrize(
    "name", [name for name, scheme in LOOPS.items() if getattr(scheme, "scale_dtype", None) == torch.float8_e8m0fnu]
)
def test_every_power_of_two_as_a_scale(name):
    """Also subnormal ones; blocks whose largest number lies just before, on and after the middle of two; ties, -0.0."""
    tops = torch.tensor([1.0, 1 + 2.0**-23, 1.75, 1.75 - 2.0**-23, 1.5, 1.9375, 2 - 2.0**-23, -1.25]).double()
    sizes = torch.arange(-149, 127).double().exp2()
    rest = torch.cat([torch.arange(-15, 16) / 16, torch.tensor([-0.0])]).double()
    x = (tops.view(-1, 1, 1) * sizes.view(1, -1, 1) * rest).float()
    x[..., 0] = (tops.view(-1, 1) * sizes).float()
    x = x.view(-1, 32)
    check(LOOPS[name], x[x.abs().amax(1) < 2.0**127].repeat(1, 2))


@pytest.mark.usefixtures("no_ops")
@pytest.mark.parametrize("scheme", LOOPS.values(), ids=LOOPS)
@pytest.mark.parametrize("dtype", OUT)
def test_the_loops_do_it_alone(scheme, dtype):
    w = laws.make((32, 96), "normal", 0, dtype)
    scheme.decode(scheme.encode(w), (32, 96), dtype)


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("scheme", LOOPS.values(), ids=LOOPS)
def test_what_is_not_finite_is_refused_in_the_same_words(scheme, bad):
    for dtype in OUT:
        w = laws.make((8, 64), "normal", 0, dtype)
        w[3, 5] = bad
        said = []
        for encode in (lambda w=w: scheme.encode(w), lambda w=w: without(lambda: scheme.encode(w))):
            with pytest.raises(ValueError, match="1 of 512 values are not finite") as error:
                encode()
            said.append(str(error.value))
        assert said[0] == said[1]


class Seen(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += func.overloadpacket in (torch.ops.aten.div_, torch.ops.aten.mul_, torch.ops.aten.mul)
        return func(*args, **(kwargs or {}))


def test_whoever_records_ops_sees_them():
    w = laws.make((8, 64), "normal", 0)
    with Seen() as seen:
        parts = int8().encode(w)
        assert seen.count
        seen.count = 0
        int8().decode(parts, (8, 64), torch.float32)
    assert seen.count


def test_traces_hold_ops():
    from torch.fx.experimental.proxy_tensor import make_fx

    parts = int8().encode(laws.make((8, 64), "normal", 0))
    graph = make_fx(lambda q, s: int8().decode({"qdata": q, "scale": s}, (8, 64), torch.float32))(*parts.values())
    other = int8().encode(laws.make((8, 64), "normal", 1))
    assert laws.same(graph(*other.values()), int8().decode(other, (8, 64), torch.float32))


def test_gradients_pass_a_decode():
    parts = int8().encode(laws.make((8, 64), "normal", 0))
    scale = parts["scale"].requires_grad_()
    int8().decode({**parts, "scale": scale}, (8, 64), torch.float32).sum().backward()
    assert scale.grad is not None


def test_writing_into_a_buffer_is_seen_by_autograd():
    parts, out = int8().encode(laws.make((8, 64), "normal", 0)), torch.zeros(8, 64)
    x = torch.ones(8, 64, requires_grad=True)
    product = x * out
    int8().decode_into(parts, (8, 64), 0, 8, out)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        product.sum().backward()


def test_inference_mode():
    w = laws.make((8, 64), "normal", 0)
    with torch.inference_mode():
        parts = nf4().encode(w)
        decoded = nf4().decode(parts, (8, 64), torch.bfloat16)
        nf4().decode_into(parts, (8, 64), 0, 8, decoded)
    assert laws.same(decoded, nf4().decode(nf4().encode(w), (8, 64), torch.bfloat16))


def test_memory_that_is_not_aligned():
    """As in a file whose header has an odd length."""
    w = laws.make((8, 64), "normal", 0, torch.bfloat16)
    raw = torch.zeros(w.nbytes + 1, dtype=torch.uint8)
    raw[1:] = w.view(-1).view(torch.uint8)
    odd = torch.frombuffer(bytearray(raw.numpy().tobytes()), dtype=torch.bfloat16, offset=1, count=w.numel())
    laws.assert_same_parts(int8().encode(odd.view(8, 64)), int8().encode(w))


SOURCES = Path(compiled.__file__).parent / "sources"
NOT_FINITE = """
#include <string.h>
#include "encoders.h"
extern const encoders encoders_portable;

int main(void) {
    recipe r = {.kind = FLOAT8, .columns = 32, .width = 32, .stride = 32, .span = 448, .lowest = -448, .highest = 448,
                .is_symmetric = 1, .bits = 8, .mantissa = 3, .bias = 7, .top = 8, .whole = 1};
    float x[32];
    uint8_t scale[4], codes[32];
    memset(x, 0x7f, sizeof x);  /* all of them NaN */
    memset(x, 0xff, 4);
    for (r.scales = FLOATS; r.scales <= OVER_WHOLE; r.scales++)
        if (encoders_portable.encode(&r, x, 1, scale, 0, codes)) return 1;
    return 0;
}
"""


@pytest.mark.slow
@pytest.mark.skipif(not SOURCES.is_dir() or shutil.which("gcc") is None, reason="it is compiled from the sources")
def test_numbers_that_are_not_finite_are_refused_without_overflow(tmp_path):
    """Compilers assume that signed integers do not overflow; where they do, this program traps."""
    (tmp_path / "main.c").write_text(NOT_FINITE)
    traps = ("-fno-wrapv", "-fsanitize=signed-integer-overflow", "-fsanitize-undefined-trap-on-error")
    flags = ("-O0", "-w", "-std=c11", "-DLEVEL=portable", f"-I{SOURCES}", *traps)
    files = (tmp_path / "main.c", SOURCES / "encoders.c", "-lm", "-o", tmp_path / "main")
    subprocess.run(["gcc", *flags, *files], check=True)
    assert subprocess.run([tmp_path / "main"]).returncode == 0
