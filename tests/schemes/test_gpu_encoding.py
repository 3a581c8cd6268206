"""Encoding on a GPU, tested without one: shapes, bits under Triton's interpreter, and compilation."""

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path
from unittest import mock

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

import torchtether as tt
from tests.catalog import FEW, SCHEMES, few_schemes, slow_but
from tests.schemes import laws
from tests.weights.triton_cases import unasked_fusions
from torchtether.gpu import encoding, serving
from torchtether.schemes import Affine, ScaledFloat, fp4, fp8, int4, int8, mxfp4, nf4
from torchtether.schemes.looking import unchecked

needs_triton = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not installed")
DEVICE = "cuda" if torch.backends.cuda.is_built() else "cpu"  # a torch built for the CPU cannot slice a fake of CUDA
each_scheme = pytest.mark.parametrize("row", slow_but(SCHEMES, {row.id for row in FEW}))


# -- fakes: nothing asks for a number, and all parts are where the values are ---------------------------------------


@each_scheme
def test_no_scheme_asks_fake_values_for_numbers(row):
    scheme, shape = row.scheme, (8, 64)
    with FakeTensorMode():
        values = torch.empty(shape, dtype=torch.bfloat16, device=DEVICE)
        parts = scheme.encode(values)
        for made in (parts, scheme.reencode(values, parts), scheme.update(values, parts)):
            if made is not None:
                assert {name: (tuple(p.shape), p.device.type) for name, p in made.items()} == {
                    name: (tuple(part.shape), DEVICE) for name, part in scheme.layout(shape).items()
                }
        scheme.encode_into(values, parts)
        index = torch.zeros(3, dtype=torch.int64, device=DEVICE)
        for made, size in (
            (scheme.decode(parts, shape, torch.float32), shape),
            (scheme.gather(parts, shape, index, torch.float32), (3, 64)),
        ):
            assert (tuple(made.shape), made.device.type) == (size, DEVICE)
        assert scheme.bound(parts, shape).device.type == DEVICE


@each_scheme
def test_what_no_scheme_holds_is_a_flag_where_nothing_may_wait(row):
    values = laws.make((8, 64), "normal", 1, torch.bfloat16)
    with unchecked() as fine:
        row.scheme.encode(values)
    values[5, 7] = torch.nan
    with unchecked() as doubtful:
        row.scheme.encode(values)
    assert all(map(bool, fine))
    assert row.scheme.transparent or not all(map(bool, doubtful))
    if doubtful:
        with pytest.raises(tt.SchemeError, match="1 of 512 values are not finite"):
            row.scheme.encode(values)


@few_schemes
def test_writes_to_fake_weights(row):
    with FakeTensorMode(), torch.no_grad():
        weight = tt.Weight.encode(torch.empty(8, 64, dtype=torch.bfloat16, device=DEVICE), row.scheme)
        weight.mul_(2)
        weight.copy_(torch.empty(8, 64, device=DEVICE))
        if row.id != "nf4-double":  # its blocks of blocks are larger than some rows
            weight[2:4] = 1.0
        assert {part.device.type for part in weight.parts.values()} == {DEVICE}


@pytest.mark.parametrize("scheme", ["int8", "int4", "fp8", "nf4", "mxfp4", "nvfp4"])
def test_a_fake_model_is_quantized(scheme):
    with FakeTensorMode():
        model = torch.nn.Linear(64, 32, device=DEVICE, dtype=torch.bfloat16)
        tt.quantize(model, scheme)
        assert isinstance(model.weight, tt.Weight)
        assert {part.device.type for part in model.weight.parts.values()} == {DEVICE}
        assert model(torch.empty(3, 64, device=DEVICE, dtype=torch.bfloat16)).shape == (3, 32)


# -- Triton --------------------------------------------------------------------------------------------------------


@needs_triton
def test_interpreted_kernels_give_the_bits_of_torch_ops():
    """In a process of its own: Triton reads ``TRITON_INTERPRET`` when it is imported."""
    root = Path(__file__).parents[2]
    path = os.pathsep.join(
        [str(Path(tt.__file__).parents[1]), str(root), *filter(None, [os.environ.get("PYTHONPATH")])]
    )
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "pytest",
            "-q",
            "-p",
            "no:cacheprovider",
            Path(__file__).with_name("interpreted_encoding.py"),
        ],
        env=os.environ | {"TRITON_INTERPRET": "1", "PYTHONPATH": path},
        cwd=root,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout[-5000:] + done.stderr[-2000:]


LAUNCHES = {
    "int8": (int8(), (8, 4096)),
    "int4": (int4(), (8, 256)),
    "fp8 of long rows": (fp8(), (2, 12288)),
    "nf4": (nf4(), (8, 256)),
    "int8 reciprocal": (Affine(symmetric=False, reciprocal=True, scale_dtype=torch.bfloat16), (8, 20000)),
    "e5m2 by tensor": (ScaledFloat("e5m2", block=(None, None)), (8, 256)),
    "fp4 ragged": (fp4(), (3, 50)),
    "mxfp4": (mxfp4(), (8, 256)),
    "mxfp8": (ScaledFloat("e4m3", (1, 32), torch.float8_e8m0fnu, scale_rounding="rceil"), (8, 256)),
}


def launches(monkeypatch, scheme, values):
    """What encoding ``values`` starts: kernels, their arguments and constants."""
    found = []

    def launch(name, _, *args, **constants):
        found.append((name, args, constants))
        if name == "find_extremes":  # the scheme looks whether they are finite
            args[1].zero_(), args[2].zero_()

    with monkeypatch.context() as patch:
        patch.setattr(serving, "DEVICES", {"cuda", "cpu"})
        patch.setattr(serving, "runs_on", lambda device: True)
        patch.setattr(encoding, "_launch", launch)
        scheme.encode(values)
    return found


def compiled_for(target, name, args, constants):
    """The PTX of a kernel as these arguments would have it; ptxas comes with Triton and takes it, too."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource
    from triton.language import target_info

    from torchtether.gpu import encoding_kernels

    kernel = getattr(encoding_kernels, name)
    pointers = {torch.float32: "*fp32", torch.bfloat16: "*bf16", torch.float16: "*fp16", torch.uint8: "*u8"}
    pointers |= {torch.int32: "*i32"}
    kinds = [
        pointers[a.dtype] if isinstance(a, torch.Tensor) else "fp32" if isinstance(a, float) else "i32" for a in args
    ]
    signature = dict(zip(kernel.arg_names, kinds, strict=False)) | dict.fromkeys(constants, "constexpr")
    source = ASTSource(fn=kernel, signature=signature, constexprs=constants)
    options = {"num_warps": 4, "enable_fp_fusion": False}
    gpu = GPUTarget("cuda", target, 32)
    current = mock.Mock(return_value=gpu, __triton_builtin__=True)
    with mock.patch.object(target_info, "current_target", current):
        return triton.compile(source, target=gpu, options=options).asm


@needs_triton
@pytest.mark.parametrize("target", [pytest.param(80, marks=pytest.mark.slow), 90])
@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=[pytest.mark.slow] * (n not in ("int8", "int4", "nf4"))) for n in LAUNCHES]
)
def test_kernels_compile_and_divide_as_torch_does(name, target, monkeypatch):
    scheme, shape = LAUNCHES[name]
    found = launches(monkeypatch, scheme, laws.make(shape, "normal", 1, torch.bfloat16))
    assert found
    divisions = 0
    for kernel in found:
        made = compiled_for(target, *kernel)
        assert made["cubin"]
        assert not re.search(r"div\.(approx|full)|\.ftz|rcp\.approx", made["ptx"])
        assert unasked_fusions(made) == 0
        divisions += made["ptx"].count("div.rn.f32")
        has_e4m3 = name.startswith(("fp8", "mxfp8")) and target >= 89
        assert ("e4m3x2.f32" in made["ptx"]) is (has_e4m3 and kernel[0] == "encode")
    assert divisions or name in ("int8 reciprocal", "mxfp4")
