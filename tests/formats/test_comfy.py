"""ComfyUI's files: each kind of weight from tensors made here, decoded here in float64; faults by name."""

import json
import re

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file
from torch import nn

import torchtether as tt
from tests.formats.folders import fault, opened

E2M1 = torch.tensor([0.0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6], dtype=torch.float64)
E4M3, E8M0 = torch.float8_e4m3fn, torch.float8_e8m0fnu
FLOAT8 = {"float8_e4m3fn": E4M3, "float8_e5m2": torch.float8_e5m2}
WIDTH = {"nvfp4": 16, "mxfp8": 32}


def up(count, multiple):
    return -(-count // multiple) * multiple


def tiled(scales):
    """Scales (rows, columns) as cuBLAS wants them: tiles of 128 x 4, each of which is 32 rows of 16.

    A tile is laid out so that its row r and column c are at row ``r % 32``, column ``r // 32 * 4 + c``; tiles follow
    each other along the columns first.
    """
    rows, columns = up(scales.shape[0], 128), up(scales.shape[1], 4)
    flat = torch.zeros(rows * columns, dtype=torch.uint8)
    held = scales.view(torch.uint8)
    r, c = torch.arange(scales.shape[0])[:, None], torch.arange(scales.shape[1])
    tile = r // 128 * (columns // 4) + c // 4
    flat[tile * 512 + r % 128 % 32 * 16 + r % 128 // 32 * 4 + c % 4] = held
    return flat.view(rows, columns).view(scales.dtype)


def made(kind, rows=6, columns=40, lead=(), scale="one", seed=0):
    """Tensors of one weight by suffix, and what they decode to; nvfp4 and mxfp8 as padded as they are stored."""
    draw = torch.Generator().manual_seed(seed)
    if lead:
        each = [made(kind, rows, columns, scale=scale, seed=seed + n) for n in range(*lead)]
        stacked = {suffix: torch.stack([one[suffix] for one, _ in each]) for suffix in each[0][0]}
        return stacked, torch.stack([values for _, values in each])
    if kind in WIDTH:
        width = WIDTH[kind]
        shape = up(rows, width), up(columns, width)
        counts = shape[0], shape[1] // width
        inside = torch.zeros(shape, dtype=torch.bool)
        inside[:rows, :columns] = True
        if kind == "nvfp4":
            codes = torch.randint(0, 16, shape, generator=draw) * inside
            scales, second = torch.rand(counts, generator=draw).to(E4M3), torch.rand((), generator=draw)
            tensors = {"": (codes[:, ::2] << 4 | codes[:, 1::2]).to(torch.uint8), "_scale_2": second}
            # float32 holds a product of e4m3 and a float32 rounded once, which is what the package multiplies by
            wide, elements = (scales.float() * second).double(), E2M1[codes]
        else:
            codes = (torch.randn(shape, generator=draw) * inside).to(E4M3)
            exponents = torch.randint(100, 140, counts, generator=draw)
            scales, tensors = exponents.to(torch.uint8).view(E8M0), {"": codes}
            wide, elements = torch.ldexp(torch.ones(counts, dtype=torch.float64), exponents - 127), codes.double()
        return {**tensors, "_scale": tiled(scales)}, elements * wide.repeat_interleave(width, -1)
    shape = rows, columns
    if kind in FLOAT8:
        codes = torch.randn(shape, generator=draw).to(FLOAT8[kind])
    else:
        codes = torch.randint(-128, 128, shape, generator=draw).to(torch.int8)
    group = 16 if kind == "int8_blockwise" else None
    counts = (-(-rows // 16), -(-columns // 16)) if group else {"one": (), "row": (rows, 1)}[scale]
    scales = torch.rand(counts, generator=draw)
    wide = scales.repeat_interleave(16, 0).repeat_interleave(16, 1)[:rows, :columns] if group else scales
    return {"": codes, "_scale": scales}, codes.double() * wide.double()


def named(tensors, layer="m", **said):
    """The tensors of a layer, and with ``said`` its settings too."""
    given = {f"{layer}.weight{suffix}": tensor for suffix, tensor in tensors.items()}
    return {**given, f"{layer}.comfy_quant": text(said)} if said else given


def text(said):
    written = said if isinstance(said, bytes) else json.dumps(said).encode()
    return torch.tensor(list(written), dtype=torch.uint8)


def more(kind):
    return {"format": kind, **({"group_size": 16} if kind == "int8_blockwise" else {})}


def is_that(weight, values):
    """Whether it decodes to ``values``, rounded once to float32."""
    return torch.equal(weight.to(torch.float32).dequantize(), values.float())


def bits(part):
    return part.reshape(-1).view(torch.uint8)


KINDS = (*FLOAT8, *WIDTH, "int8_tensorwise", "int8_blockwise")


@given(
    kind=st.sampled_from(KINDS),
    rows=st.sampled_from((2, 31, 130, 300)),
    columns=st.sampled_from((32, 64, 160, 33)),
    scale=st.sampled_from(("one", "row")),
    prefix=st.sampled_from(("m", "model.diffusion_model.blocks.0.m")),
    seed=st.integers(0, 999),
)
def test_every_kind(kind, rows, columns, scale, prefix, seed):
    tensors, values = made(kind, rows, columns, scale=scale, seed=seed)
    side = {f"{prefix}.input_scale": torch.tensor(0.5), f"{prefix}.bias": torch.ones(rows)}
    with opened({**named(tensors, prefix, **more(kind)), **side}) as checkpoint:
        assert checkpoint.format == "comfy"
        assert not checkpoint.faults
        assert list(checkpoint) == [f"{prefix}.bias", f"{prefix}.weight"]
        weight = checkpoint[f"{prefix}.weight"]
        assert weight.dtype == torch.float32  # that of the bias: the file says nothing
        assert is_that(weight, values)
        if kind != "int8_blockwise" and not (kind in (*FLOAT8, "int8_tensorwise") and scale == "one"):
            some = slice(rows // 2, rows // 2 + 1)
            assert is_that(checkpoint.get_slice(f"{prefix}.weight")[some], values[some])


@pytest.mark.parametrize("kind", [*FLOAT8, "mxfp8", "int8_tensorwise"])
@pytest.mark.parametrize("scale", ["one", "row"])
def test_banks_of_experts(kind, scale):
    tensors, values = (one for one in made(kind, 20, 64, lead=(3,), scale=scale))
    with opened(named(tensors, num_experts=3, **more(kind))) as checkpoint:
        assert not checkpoint.faults
        whole = checkpoint["m.weight"]
        assert is_that(whole, values)
        if kind == "mxfp8" or scale == "row":
            given = checkpoint.read_rows("m.weight", tuple(values.shape), 1, 3)
            assert all(torch.equal(bits(part), bits(whole.parts[role][1:3])) for role, part in given.items())


def test_a_bank_under_one_global_scale():
    tensors, values = made("nvfp4", 20, 64, lead=(1,))
    with opened(named(tensors, format="nvfp4")) as checkpoint:
        assert is_that(checkpoint["m.weight"], values)
    tensors, _ = made("nvfp4", 20, 64, lead=(2,))
    assert "global_scale has shape (2,)" in fault(named(tensors, format="nvfp4"))


@given(
    kind=st.sampled_from(sorted(WIDTH)),
    rows=st.integers(1, 270),
    columns=st.integers(1, 140),
    seed=st.integers(0, 999),
)
def test_padding_is_cut_to_the_model(kind, rows, columns, seed):
    """Which alone knows the shape; and rows of it are those rows, whatever tile their scales lie in."""
    tensors, values = made(kind, rows, columns, seed=seed)
    with opened(named(tensors, format=kind)) as checkpoint:
        assert checkpoint.spec("m.weight").shape == tuple(values.shape)
        model = nn.ModuleDict({"m": nn.Linear(columns, rows, bias=False, device="meta")})
        tt.load(model, checkpoint.path)
        assert tuple(model["m"].weight.shape) == (rows, columns)
        assert is_that(model["m"].weight, values[:rows, :columns])
        assert checkpoint.fit("m.weight", (rows, columns)) == (rows, columns)
        start, stop = rows * 2 // 3, rows * 2 // 3 + 1
        given = checkpoint.read_rows("m.weight", (rows, columns), start, stop)
        for role, part in given.items():
            whole = model["m"].weight.parts[role]
            assert torch.equal(bits(part), bits(whole[start:stop] if role != "global_scale" else whole))
        if rows > 2 * WIDTH[kind]:
            nbytes = checkpoint.rows_nbytes("m.weight", (rows, columns), start, stop)
            assert nbytes < checkpoint.nbytes("m.weight") - tensors[""].nbytes // 2
        other = nn.ModuleDict({"m": nn.Linear(columns + WIDTH[kind], rows, bias=False, device="meta")})
        with pytest.raises(tt.LoadError, match=r"m\.weight"):
            tt.load(other, checkpoint.path)


@pytest.mark.parametrize("kind", ["nvfp4", "mxfp8"])
def test_nothing_is_left_of_the_padding(kind):
    """A Weight cut from what is stored has the parts that its layout says, and no bit of a code beyond its columns."""
    tensors, _ = made(kind, 5, 7)
    tensors[""] = torch.full_like(tensors[""].view(torch.uint8), 0x55).view(tensors[""].dtype)
    model = nn.ModuleDict({"m": nn.Linear(7, 5, bias=False, device="meta")})
    with opened(named(tensors, format=kind)) as checkpoint:
        tt.load(model, checkpoint.path)
    weight = model["m"].weight
    held = {role: tuple(part.shape) for role, part in weight.parts.items()}
    assert held == {role: tuple(part.shape) for role, part in weight.scheme.layout((5, 7)).items()}
    if kind == "nvfp4":
        assert weight.parts["qdata"].tolist() == [[0x55, 0x55, 0x55, 0x05]] * 5


@pytest.mark.parametrize("kind", [*FLOAT8, *WIDTH])
def test_bytes_are_read_as_what_the_format_says(kind):
    """float8 and e8m0 in containers of uint8, which is how safetensors without those dtypes were written."""
    tensors, values = made(kind, 32, 64)
    contained = {s: t.view(torch.uint8) if t.element_size() == 1 else t for s, t in tensors.items()}
    with opened(named(contained, format=kind)) as checkpoint:
        assert is_that(checkpoint["m.weight"], values)
        assert is_that(checkpoint.get_slice("m.weight")[3:5], values[3:5])


@pytest.mark.parametrize("prefix", ["", "model.diffusion_model.", "net."])
def test_metadata_have_precedence_and_may_leave_out_the_prefix_of_the_model(prefix):
    a, b = made("float8_e4m3fn"), made("nvfp4", 16, 32)
    layers = {"a.0": {"format": "float8_e4m3fn"}, "b": {"format": "nvfp4"}, "elsewhere": {"format": "nvfp4"}}
    said = {"_quantization_metadata": json.dumps({"format_version": "1.0", "layers": layers})}
    tensors = {**named(a[0], f"{prefix}a.0", format="mxfp8"), **named(b[0], f"{prefix}b"), "c.weight": torch.ones(2, 2)}
    with opened(tensors, said) as checkpoint:
        assert checkpoint.format == "comfy"
        assert not checkpoint.faults
        assert is_that(checkpoint[f"{prefix}a.0.weight"], a[1])
        assert is_that(checkpoint[f"{prefix}b.weight"], b[1])
        assert type(checkpoint["c.weight"]) is torch.Tensor
        assert len(checkpoint) == 3


@pytest.mark.parametrize("marker", ["scaled_fp8", "model.diffusion_model.scaled_fp8", None])
@pytest.mark.parametrize("kind", FLOAT8)
def test_older_files_have_a_marker_and_scale_weight(marker, kind):
    tensors, values = made(kind)
    old = {
        "m.weight": tensors[""],
        "m.scale_weight": tensors["_scale"],
        "m.scale_input": torch.ones(()),
        "m.bias": torch.ones(6).half(),
        "n.weight": torch.ones(2, 2).half(),
        **({marker: torch.zeros(2).to(FLOAT8[kind])} if marker else {}),
    }
    with opened(old) as checkpoint:
        assert checkpoint.format == "comfy"
        assert not checkpoint.faults
        assert list(checkpoint) == ["m.bias", "m.weight", "n.weight"]
        assert checkpoint["m.weight"].dtype == torch.float16
        assert is_that(checkpoint["m.weight"], values)


@pytest.mark.parametrize("name", ["m.weight_scale", "m.scale_weight", "comfy.weight", "comfy_quantity"])
def test_a_float_model_with_such_names_is_no_file_of_this_format(name):
    with opened({"m.weight": torch.ones(2, 2), name: torch.ones(2, 2)}) as checkpoint:
        assert checkpoint.format == "safetensors"
        assert name in checkpoint


def test_a_float_weight_may_stand_beside_what_is_called_a_scale():
    tensors, _ = made("float8_e4m3fn")
    with opened(
        {**named(tensors, **more("float8_e4m3fn")), "n.weight": torch.ones(2), "n.weight_scale": torch.ones(2)}
    ):
        pass


def nvfp4(said=None, **changes):
    tensors = {**named(made("nvfp4", 16, 64)[0], format="nvfp4"), **changes}
    tensors |= {} if said is None else {"m.comfy_quant": text(said)}
    return {key: tensor for key, tensor in tensors.items() if tensor is not None}


SCALE, SECOND, SETTINGS = "m.weight_scale", "m.weight_scale_2", "m.comfy_quant"
INT8 = named(made("int8_tensorwise")[0], format="int8_tensorwise")
OTHER = named(made("float8_e4m3fn")[0], "n", format="float8_e4m3fn")
BLOCKS = named(made("int8_blockwise")[0], **more("int8_blockwise"))


@pytest.mark.parametrize(
    ("tensors", "said"),
    [
        (
            nvfp4({"format": "svdquant_w4a4"}),
            "m.weight: the format of its layer m is 'svdquant_w4a4', not one of float8_",
        ),
        (nvfp4({"format": ["nvfp4"]}), r"the format of its layer m is \['nvfp4'\], not one of"),
        (nvfp4({}), "the format of its layer m is None"),
        (nvfp4(b"[" * 90000), "m.weight: its settings m.comfy_quant are torch.uint8 of 90000 bytes, not at most"),
        (nvfp4(b"[" * 9000), "m.weight: the JSON in m.comfy_quant is nested too deeply"),
        (nvfp4(b"[]"), "m.weight: the JSON in m.comfy_quant is a list, not an object"),
        (nvfp4(b""), "m.weight: the JSON in m.comfy_quant is not JSON"),
        (nvfp4(b"\xff\xfe"), "m.weight: the JSON in m.comfy_quant is not UTF-8"),
        (nvfp4(**{SETTINGS: torch.ones(9)}), "its settings m.comfy_quant are torch.float32 of 36 bytes"),
        (
            {**OTHER, **nvfp4(**{SETTINGS: None, SECOND: None})},
            r"it has a scale \(m.weight_scale\), but no settings \(m.comfy_quant\)",
        ),
        (nvfp4(**{SCALE: None}), "its format is nvfp4, which requires m.weight_scale, which is absent"),
        (nvfp4(**{SECOND: None}), "its format is nvfp4, which requires m.weight_scale_2, which is absent"),
        (nvfp4(**{"m.weight": None}), "its format is nvfp4, which requires m.weight, which is absent"),
        (nvfp4(**{"m.weight": torch.ones(16, 32)}), "its qdata is torch.float32, not torch.uint8"),
        (nvfp4(**{"m.weight": torch.ones(16).byte()}), r"its codes have shape \(16,\), and at least 2 dimensions"),
        (nvfp4(**{"m.weight": torch.ones(0, 32).byte()}), r"its codes have shape \(0, 32\)"),
        (nvfp4(**{"m.weight": torch.ones(16, 20).byte()}), "its 40 columns are not a multiple of 16"),
        (
            nvfp4(**{SCALE: torch.ones(16, 4).to(E4M3)}),
            r"shape \(16, 4\), but the tiles for shape \(16, 64\) need \(128, 4\)",
        ),
        (
            nvfp4(**{SCALE: torch.ones(128, 4)}),
            "its tiled_scale is torch.float32, not torch.float8_e4m3fn or torch.uint8",
        ),
        (nvfp4(**{SECOND: torch.ones(()).half()}), "its global_scale is torch.float16, not torch.float32"),
        (nvfp4(**{"m.pre_quant_scale": torch.ones(64)}), "its layer has a pre_quant_scale"),
        (nvfp4({"format": "mxfp8"}), "its format is mxfp8, which has no m.weight_scale_2"),
        (
            nvfp4({"format": "mxfp8"}, **{SECOND: None}),
            "its tiled_scale is torch.float8_e4m3fn, not torch.float8_e8m0fnu",
        ),
        (
            {**INT8, SCALE: torch.ones(40)},
            r"its scale has shape \(40,\); codes of shape \(6, 40\) need one scale for all",
        ),
        ({**INT8, SCALE: torch.ones(()).int()}, "its scale is torch.int32, not torch.float16 or"),
        ({**INT8, SECOND: torch.ones(())}, "its format is int8_tensorwise, which has no m.weight_scale_2"),
        ({**INT8, SETTINGS: text({"format": "float8_e5m2"})}, "its qdata is torch.int8, not torch.float8_e5m2"),
        (
            {**INT8, SETTINGS: text({"format": "int8_tensorwise", "convrot": True})},
            r"its columns are rotated \(convrot\)",
        ),
        ({**INT8, SETTINGS: text({"format": "int8_tensorwise", "params": {"convrot": 1}})}, "its columns are rotated"),
        ({**BLOCKS, SETTINGS: text({"format": "int8_blockwise"})}, r"its scale has shape \(1, 3\), not \(1, 1\)"),
        (
            {**BLOCKS, SETTINGS: text({**more("int8_blockwise"), "group_size": 0})},
            "its group_size is 0, not a positive",
        ),
        (
            {"m.scale_weight": torch.ones(()), "scaled_fp8": torch.ones(2)},
            "float8_e4m3fn, which requires m.weight, which is absent",
        ),
        ({"m.weight": torch.ones(2, 2), "m.scale_weight": torch.ones(()), "scaled_fp8": torch.ones(2)}, "is 'float32'"),
    ],
)
def test_what_is_wrong(tensors, said):
    found = fault(tensors)
    assert re.search(said, found), found


def test_what_the_metadata_say_of_a_layer_may_be_wrong():
    tensors = named(made("float8_e4m3fn")[0])
    said = json.dumps({"layers": {"m": "float8_e4m3fn"}})
    found = fault(tensors, {"_quantization_metadata": said})
    assert found == "m.weight: its settings are 'float8_e4m3fn', not an object"


@pytest.mark.parametrize("said", ["", "[]", "{", "{}", '{"layers": []}', '{"layers": null}', "[" * 100_000])
def test_metadata_that_are_none(said):
    with pytest.raises(tt.CheckpointError, match="_quantization_metadata: ") as caught:
        fault(named(made("float8_e4m3fn")[0]), {"_quantization_metadata": said})
    assert "\n" not in str(caught.value)


# -- writing ------------------------------------------------------------------------------------------------------

WRITTEN = {
    "float8_e4m3fn": tt.fp8("tensor"),
    "float8_e5m2": tt.ScaledFloat("e5m2", (None, None), torch.bfloat16),
    "int8_tensorwise": tt.int8(),
    "mxfp8": tt.mxfp8(),
    "nvfp4": tt.nvfp4(),
}


@pytest.mark.parametrize("is_folder", [True, False])
@pytest.mark.parametrize("shape", [(32, 64), (160, 96), (288, 416)])
@pytest.mark.parametrize("kind", WRITTEN)
def test_written_and_read_again(tmp_path, kind, shape, is_folder):
    weight = tt.Weight.encode(torch.randn(shape, generator=torch.Generator().manual_seed(0)), WRITTEN[kind])
    path = tmp_path if is_folder else tmp_path / "x.safetensors"
    tt.save({"a.m.weight": weight, "a.m.bias": torch.ones(shape[0])}, path, format="comfy")
    with tt.open(path) as checkpoint:
        assert (checkpoint.format, sorted(checkpoint)) == ("comfy", ["a.m.bias", "a.m.weight"])
        assert torch.equal(checkpoint["a.m.weight"].dequantize(), weight.dequantize())
    stored = load_file(next(tmp_path.glob("*.safetensors")))
    assert json.loads(bytes(stored["a.m.comfy_quant"].tolist())) == {"format": kind}
    scales = weight.parts["scale"].float().reshape(-1, 1) if kind == "int8_tensorwise" else weight.parts["scale"]
    assert torch.equal(bits(stored["a.m.weight_scale"]), bits(tiled(scales) if kind in WIDTH else scales.float()))


@pytest.mark.parametrize(
    ("scheme", "shape", "words"),
    [
        (tt.fp8(), (32, 64), 'Quantize matrices with tt.fp8("tensor")'),
        (tt.int8(32), (32, 64), "cannot store"),
        (tt.int4(), (32, 64), "cannot store"),
        (tt.mxfp4(), (32, 64), "cannot store"),
        (tt.nvfp4(global_divides=True), (32, 64), "cannot store"),
        (tt.Affine(symmetric=False), (32, 64), "cannot store"),
        (tt.Affine(signed=False), (32, 64), "cannot store"),
        (tt.int8(), (2, 32, 64), "cannot store"),
        (tt.nvfp4(), (32, 40), "ComfyUI stores nvfp4 only in multiples of 16 rows and columns, got shape"),
        (tt.mxfp8(), (40, 64), "ComfyUI stores mxfp8 only in multiples of 32"),
    ],
)
def test_there_are_no_words_for_others(tmp_path, scheme, shape, words):
    weight = tt.Weight.encode(torch.randn(shape), scheme)
    with pytest.raises(tt.SchemeError, match=r"m\.weight: ") as caught:
        tt.save({"m.weight": weight}, tmp_path / "x", format="comfy")
    assert words in str(caught.value)
    assert not (tmp_path / "x").exists()
