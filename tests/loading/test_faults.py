"""All faults of a load are found before any change, and reported together."""

import ast
import contextlib
import gc
import pickle
import weakref

import pytest
import torch
from torch import nn

import torchtether as tt
from tests.loading.models import Tied, build
from torchtether.ties.names import named_tensors


def state(drop=(), **changes):
    made = {name: tensor.clone() for name, tensor in build(Tied).state_dict().items() if name not in drop}
    return {**made, **{name.replace("__", "."): tensor for name, tensor in changes.items()}}


FLOAT = torch.ones(8, 8)

FAULTS = {
    "missing": (state(drop=["mid.bias"]), {}, "mid.bias: the checkpoint does not have it, the nearest is"),
    "unexpected": (state(more=FLOAT), {}, "more: the model does not have it, the nearest is"),
    "shape": (
        state(mid__weight=torch.ones(4, 8)),
        {},
        r"mid.weight: the checkpoint has shape \(4, 8\), the model has \(8, 8\)",
    ),
    "int8": (
        state(mid__weight=FLOAT.to(torch.int8)),
        {},
        "mid.weight: the checkpoint has torch.int8 and no scale that this package",
    ),
    "packed": (
        state(mid__weight=FLOAT.to(torch.uint8)),
        {},
        "mid.weight: the checkpoint has torch.uint8 and no scale",
    ),
    "int32": (
        state(mid__weight=FLOAT.to(torch.int32)),
        {},
        "mid.weight: the checkpoint has torch.int32 and no scale",
    ),
    "float8": (
        state(mid__weight=FLOAT.to(torch.float8_e4m3fn)),
        {},
        "mid.weight: the checkpoint has torch.float8_e4m3fn and no scale",
    ),
    "complex": (
        state(mid__weight=FLOAT.to(torch.complex64)),
        {},
        "mid.weight: the checkpoint has torch.complex64, which",
    ),
    "float_for_int": (state(steps=torch.tensor(1.5)), {}, "steps: the checkpoint has torch.float32, which torch.int64"),
    "dtype_integer": (state(), {"dtype": torch.int32}, "dtype: torch.int32 is not a dtype to compute in"),
    "dtype_float8": (state(), {"dtype": torch.float8_e4m3fn}, "dtype: torch.float8_e4m3fn is .* Use quantize="),
    "dtype_text": (state(), {"dtype": "float32"}, "dtype: 'float32' is not a dtype to compute in. Give one such as"),
    "scheme_fit": (state(), {"quantize": {"norm.weight": tt.fp8("block")}}, "norm.weight: blocks of 128 rows need"),
    "scheme_name": (state(), {"quantize": "int9"}, "quantize: unknown scheme 'int9'"),
    "rule": (
        state(),
        {"quantize": {"middle.*": "int8"}},
        "middle.*: this rule matches no parameter, the nearest is 'mid.",
    ),
    "conflict": (state(), {"quantize": {"head.weight": "int8", "emb.weight": "nf4"}}, "to which it is tied"),
    "ties_word": (state(), {"ties": "mine"}, "ties: 'mine' is none of"),
    "collision": (state(), {"rename": [(r"norm\.(weight|bias)", "norm.weight")]}, "norm.weight: .* both renamed to it"),
    "missing_beside": (
        state(drop=["mid.bias"]),
        {"rename": [tt.Concat(["norm.weight", "none.weight"], "norm.weight", dim=0)]},
        "mid.bias: the checkpoint does not have it",
    ),
    "tie": (state(head__weight=torch.zeros(12, 8)), {}, "head.weight: the model ties it to emb.weight"),
}


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("meta", [True, False])
def test_each_fault_is_one_line_and_leaves_the_model_untouched(tmp_path, fault, meta):
    named, options, what = FAULTS[fault]
    tt.save(named, tmp_path / "x")
    model = build(Tied, meta=meta, seed=4)
    before = {name: (tensor, tensor.clone()) for name, tensor in named_tensors(model).items()}
    with pytest.raises(tt.LoadError, match=what) as caught:
        tt.load(model, tmp_path / "x", **options)
    assert "\n" not in str(caught.value)
    assert str(pickle.loads(pickle.dumps(caught.value))) == str(caught.value)
    for name, tensor in named_tensors(model).items():
        assert tensor is before[name][0]
        assert type(tensor) in (torch.Tensor, nn.Parameter)
        assert tensor.is_meta == meta
        assert meta or torch.equal(tensor, before[name][1])


def test_all_faults_are_said_at_once(tmp_path):
    named = state(drop=["mid.bias"], more=FLOAT, mid__weight=torch.ones(4, 8), steps=torch.tensor(1.5))
    tt.save(named, tmp_path / "x")
    options = {"dtype": torch.int8, "quantize": {"nope": "int8"}, "optimizer": torch.optim.SGD([torch.ones(2, 2)])}
    plan = tt.plan_load(build(Tied), tmp_path / "x", **options)
    plan.close()
    assert {fault.partition(":")[0] for fault in plan.faults} == {
        "mid.bias",
        "more",
        "mid.weight",
        "steps",
        "dtype",
        "nope",
        ", ".join(name for name, _ in build(Tied).named_parameters()),
    }
    with pytest.raises(tt.LoadError) as caught:
        plan.apply()
    assert all(fault in str(caught.value) for fault in plan.faults)
    assert all(fault in str(plan) for fault in plan.faults)


@pytest.mark.parametrize("surplus", ["", "module.", "_orig_mod.module."])
@pytest.mark.parametrize("lacking", ["", "model.", "a.b.", r"a\1."])
def test_a_prefix_that_only_one_side_has_is_named_with_the_rule_for_it(tmp_path, surplus, lacking):
    tt.save({surplus + name: tensor for name, tensor in state().items()}, tmp_path / "x")
    model = build(Tied)
    for word in lacking.split(".")[-2::-1]:
        model = nn.ModuleDict({word: model})
    with contextlib.closing(tt.plan_load(model, tmp_path / "x")) as plan:
        found = [fault for fault in plan.faults if "lack this prefix" in fault]
    assert len(found) == (bool(surplus) != bool(lacking))
    for fault in found:
        assert fault.startswith(f"{surplus or lacking}*: the names of the {'model' if surplus else 'checkpoint'} lack")
        tt.load(model, tmp_path / "x", rename=ast.literal_eval(fault.partition("rename=")[2]))
    one = {f"more.{name}": tensor for name, tensor in state().items() if name == "mid.bias"}
    tt.save({**state(drop=["mid.bias"]), **one}, tmp_path / "y")
    with contextlib.closing(tt.plan_load(build(Tied), tmp_path / "y")) as plan:
        assert not any("lack this prefix" in fault for fault in plan.faults)


def test_names_of_modules_that_torch_compile_wraps_are_explained(tmp_path):
    plain, partly = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)), nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    partly[1] = torch.compile(partly[1])
    tt.save(dict(partly.state_dict()), tmp_path / "compiled")
    tt.save(plain, tmp_path / "plain")
    with contextlib.closing(tt.plan_load(plain, tmp_path / "compiled")) as plan:
        assert plan.faults[0].startswith("_orig_mod.*: torch.compile put this into names.")
    tt.load(plain, tmp_path / "compiled", rename=ast.literal_eval(plan.faults[0].partition("rename=")[2]))
    assert torch.equal(plain[1].weight, partly[1].weight)
    with pytest.raises(tt.LoadError, match="torch.compile has wrapped a module in the model.* keeps its names"):
        tt.load(partly, tmp_path / "plain")
    partly = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    partly[1].compile()
    tt.load(partly, tmp_path / "plain")


@pytest.mark.parametrize(
    ("model", "names"),
    [
        (nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)), ["weight", "bias"]),  # 0. and 1. fit alike
        (nn.ModuleDict({"emb": nn.Embedding(2, 2), "mid": nn.Linear(2, 2)}), ["weight"]),
    ],
)
def test_no_prefix_is_named_where_several_fit(tmp_path, model, names):
    tt.save({name: torch.zeros((2, 2) if "weight" in name else (2,)) for name in names}, tmp_path / "x")
    with contextlib.closing(tt.plan_load(model, tmp_path / "x")) as plan:
        assert not any("lack this prefix" in fault for fault in plan.faults)


def layers(joined, *, bias=True, prefix=""):
    """Attention and a gated MLP, with projections joined or one by one; heads of keys and values are fewer."""
    names = {"qkv_proj": {"q_proj": 8, "k_proj": 4, "v_proj": 4}, "gate_up_proj": {"gate_proj": 6, "up_proj": 6}}
    made = []
    for _ in range(3):
        parts = []
        for whole, pieces in names.items():
            rows = {whole: sum(pieces.values())} if joined else pieces
            parts.append(nn.ModuleDict({name: nn.Linear(8, count, bias=bias) for name, count in rows.items()}))
        parts[0]["o_proj"], parts[1]["down_proj"] = nn.Linear(8, 8, bias=False), nn.Linear(6, 8)
        made.append(nn.ModuleDict({"attn": parts[0], "mlp": parts[1]}))
    model = nn.ModuleDict({"layers": nn.ModuleList(made)})
    return nn.ModuleDict({prefix: model}) if prefix else model


@pytest.mark.parametrize("quantize", [None, "int8"])
@pytest.mark.parametrize("bias", [True, False], ids=["bias", "no bias"])
@pytest.mark.parametrize("prefix", ["", "model"])
@pytest.mark.parametrize("joined", [True, False], ids=["joined", "pieces"])
def test_layers_that_one_side_has_in_pieces_are_named_with_the_rules_for_them(tmp_path, joined, prefix, bias, quantize):
    stored = layers(joined, bias=bias)
    if quantize:
        tt.quantize(stored, {"*proj.weight": quantize})
    tt.save(stored, tmp_path / "x")
    model, rename = layers(not joined, bias=bias, prefix=prefix), []
    for _ in range(2 if prefix else 1):
        with contextlib.closing(tt.plan_load(model, tmp_path / "x", rename=rename or None)) as plan:
            hint = plan.faults[0]
        assert "\n" not in hint
        rules = hint.partition("rename=[")[2][:-1] or hint.partition("Add ")[2].partition(" at the end")[0]
        rename += eval(f"[{rules}]", {"tt": tt})
    tt.load(model, tmp_path / "x", rename=rename)

    def rows(model, joined):
        attention = model["layers"][1]["attn"]
        held = [attention[name].weight for name in (["qkv_proj"] if joined else ["q_proj", "k_proj", "v_proj"])]
        return torch.cat([weight.detach().to(torch.float32) for weight in held])

    assert torch.equal(rows(model[prefix] if prefix else model, not joined), rows(stored, joined))


@pytest.mark.parametrize(
    ("stored", "lacking"),
    [
        ({"a.w": (6, 4)}, {"b": (3, 4)}),  # one piece
        ({"a.w": (6, 4)}, {"b": (3, 4), "c": (4, 4)}),  # too many rows
        ({"a.w": (6, 4)}, {"b": (3, 4), "c": (3, 5)}),  # other columns
        ({"a.w": (6, 4)}, {"b": (3, 4), "c": (3, 4), "d": (1, 4)}),  # another layer that the file lacks
        ({"x.a.w": (6, 4)}, {"b": (3, 4), "c": (3, 4)}),  # elsewhere
        ({"a.w": ()}, {"b": (), "c": ()}),
    ],
)
def test_layers_whose_rows_do_not_add_up_have_no_rule(tmp_path, stored, lacking):
    tt.save({name: torch.zeros(shape) for name, shape in stored.items()} | {"k": torch.ones(1)}, tmp_path / "x")
    model = nn.ParameterDict({"k": torch.zeros(1)})
    for name, shape in lacking.items():
        module = nn.Module()
        module.w = nn.Parameter(torch.zeros(shape))
        model.add_module(name, module)
    with contextlib.closing(tt.plan_load(model, tmp_path / "x")) as plan:
        assert not any("rename=" in fault for fault in plan.faults)


@pytest.mark.parametrize(
    "names",
    [
        ["a." * 500 + f"x{i}.weight" for i in range(8000)],  # many prefixes, and long names
        ["weight", *(f"x{i}" for i in range(20000))],  # one that ends the names of all layers
    ],
    ids=["long", "short"],
)
def test_names_of_a_hostile_file_are_refused_without_a_hint(tmp_path, names):
    """Few prefixes are tried, each only up to the first name that does not fit, and long names are not compared."""
    tt.save({name: torch.ones(1) for name in names}, tmp_path / "x")
    model = nn.ModuleDict({"model": nn.ModuleDict({f"l{i}": nn.Linear(1, 1, bias=False) for i in range(2000)})})
    with contextlib.closing(tt.plan_load(model, tmp_path / "x")) as plan:
        assert len(plan.faults) == len(names) + 2000
        assert not any("rename=" in fault for fault in plan.faults)


LINEAR = {"m.weight": (2, 2), "m.bias": (2,)}


@pytest.mark.parametrize(
    ("model", "stored", "rename"),
    [
        (nn.Linear(2, 2), LINEAR, [("^m", "n")]),
        (nn.Sequential(nn.Linear(2, 2)), LINEAR, [("^m.", "")]),
        (nn.Linear(2, 2), LINEAR, [("none", "n")]),
        (nn.Sequential(nn.Linear(2, 2)), {f"_orig_mod.{name}": LINEAR[name] for name in LINEAR}, [("m.", "0.")]),
        (
            nn.ModuleDict({"a": nn.ModuleDict({name: nn.Linear(2, 2, bias=False) for name in "qk"})}),
            {"qk.weight": (4, 2)},
            [tt.Split("qk", ["q", "k"])],
        ),
    ],
    ids=["changed", "cut", "unchanged", "compiled", "split"],
)
def test_where_rules_are_given_the_hint_is_a_rule_to_add(tmp_path, model, stored, rename):
    tt.save({name: torch.zeros(stored[name]) for name in stored}, tmp_path / "x")
    with contextlib.closing(tt.plan_load(model, tmp_path / "x", rename=rename)) as plan:
        (hint,) = [fault for fault in plan.faults if "at the end of rename=" in fault]
    rule = ast.literal_eval(hint.partition("Add ")[2].partition(" at the end")[0])
    tt.load(model, tmp_path / "x", rename=[*rename, rule])


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_an_optimizer_of_another_model_is_a_fault(tmp_path, device):
    tt.save(nn.Linear(2, 2), tmp_path)
    model, optimizer = nn.Linear(2, 2, device=device), torch.optim.AdamW(nn.Linear(2, 2).parameters())
    before = model.weight.clone()
    with contextlib.closing(tt.plan_load(model, tmp_path, optimizer=optimizer)) as plan:
        (fault,) = plan.faults
        assert fault.startswith("weight, bias: are trainable, but not in the optimizer, and the optimizer holds 2 ")
        assert fault in str(plan)
        with pytest.raises(tt.OptimizerError) as caught:
            plan.apply()
    assert str(caught.value) == fault
    for load in (tt.load, tt.distributed.load):
        with pytest.raises(tt.OptimizerError, match="the optimizer holds 2"):
            load(model, tmp_path, optimizer=optimizer)
    assert model.weight.is_meta if device == "meta" else torch.equal(model.weight, before)


def test_a_long_list_of_faults_is_cut_and_says_where_the_rest_is(tmp_path):
    tt.save({f"n{i}": torch.ones(1) for i in range(200)}, tmp_path / "x")
    with pytest.raises(tt.LoadError, match=r"and \d+ more\. All of them are in tt.plan_load") as caught:
        tt.load(build(Tied), tmp_path / "x")
    assert len(str(caught.value)) < 3000


@pytest.mark.parametrize("meta", [True, False])
def test_values_that_cannot_be_encoded_are_found_before_anything_changes(tmp_path, meta):
    bad = torch.ones(8, 8)
    bad[3, 3] = float("nan")
    tt.save(state(mid__weight=bad), tmp_path / "x")
    model = build(Tied, meta=meta, seed=4)
    before = named_tensors(model)
    with pytest.raises(tt.TetherError, match="mid.weight.*finite"):
        tt.load(model, tmp_path / "x", quantize={"mid.weight": "int8", "emb.weight": "int8"})
    for name, tensor in named_tensors(model).items():
        assert tensor is before[name]
        assert type(tensor) in (torch.Tensor, nn.Parameter)
        assert tensor.is_meta == meta


def test_a_quantized_file_is_not_quantized_again(tmp_path):
    model = build(Tied)
    tt.quantize(model, {"mid.weight": "int8"})
    tt.save(model, tmp_path / "x")
    again = build(Tied, meta=True)
    tt.load(again, tmp_path / "x", quantize={"mid.weight": "int8"})
    with pytest.raises(tt.LoadError, match=r"mid.weight: the checkpoint holds it as int8, the rules ask for nf4"):
        tt.load(build(Tied, meta=True), tmp_path / "x", quantize={"mid.weight": "nf4"})


def test_half_of_a_weight_is_an_error(tmp_path):
    model = build(Tied)
    tt.quantize(model, {"mid.weight": "int8"})
    tt.save(model, tmp_path / "x.safetensors")
    from tests.written import write_tensors
    from torchtether.files import TensorFile, replacing

    with TensorFile(tmp_path / "x.safetensors") as file:
        metadata = dict(file.header.metadata)
        tensors = {key: file.read(key) for key in file.header.tensors if key != "mid.weight.scale"}
    with replacing(tmp_path / "y.safetensors") as (out,):
        write_tensors(out, tensors, metadata, name="y")
    with pytest.raises(
        tt.CheckpointError, match=r"y.safetensors: mid.weight: its part 'mid.weight.scale' is not stored"
    ):
        tt.load(build(Tied), tmp_path / "y.safetensors")


def test_a_parameter_that_is_held_is_named_and_nothing_changes(tmp_path):
    tt.save(state(), tmp_path / "x")
    model = build(Tied, seed=4)
    before = {name: tensor.clone() for name, tensor in named_tensors(model).items()}
    view = model.mid.weight[1:]
    with pytest.raises(tt.ConversionError, match=r"mid.weight"):
        tt.load(model, tmp_path / "x", dtype=torch.bfloat16)
    assert view is not None
    for name, tensor in named_tensors(model).items():
        assert torch.equal(tensor, before[name])


@pytest.mark.parametrize("meta", [True, False])
def test_a_lazy_parameter_is_a_fault(tmp_path, meta):
    tt.save({"weight": torch.ones(2, 2), "bias": torch.ones(2)}, tmp_path / "x")
    with torch.device("meta" if meta else "cpu"):
        model = nn.LazyLinear(2)
    with pytest.raises(tt.LoadError, match="weight: it is lazy"):
        tt.load(model, tmp_path / "x")


def test_an_error_that_was_caught_does_not_keep_the_model(tmp_path):
    tt.save(nn.Linear(2, 3), tmp_path)
    gc.collect()
    gc.disable()
    try:
        model = nn.Linear(2, 4)
        held = weakref.ref(model)
        with contextlib.suppress(tt.LoadError):
            tt.load(model, tmp_path)
        del model
        assert held() is None
    finally:
        gc.enable()


@pytest.mark.parametrize(
    ("given", "held", "fits"),
    [
        (torch.uint8, torch.uint16, True),
        (torch.bool, torch.uint64, True),
        (torch.uint16, torch.int32, True),
        (torch.uint32, torch.int64, True),
        (torch.int64, torch.uint16, False),
        (torch.uint64, torch.int64, False),
        (torch.int8, torch.uint32, False),
        (torch.uint16, torch.bool, False),
    ],
)
def test_integers_are_loaded_where_all_of_their_values_fit(given, held, fits, tmp_path):
    values, model = torch.tensor([0, 1, 1]).to(given), nn.Module()
    model.register_buffer("steps", torch.zeros(3, dtype=held))
    tt.save({"steps": values}, tmp_path / "a.safetensors")
    if fits:
        tt.load(model, tmp_path / "a.safetensors")
        assert torch.equal(model.steps, values.to(held))
    else:
        with pytest.raises(tt.LoadError, match=rf"steps: the checkpoint has {given}, which {held} in the model cannot"):
            tt.load(model, tmp_path / "a.safetensors")
        assert model.steps.tolist() == [0, 0, 0]


def test_a_folder_of_models_names_the_folders_in_it_that_hold_them(tmp_path):
    """As a pipeline of diffusers is stored."""
    for name in ("vae", "unet", ".cache"):
        tt.save(nn.Linear(2, 2), tmp_path / name)
    (tmp_path / "scheduler").mkdir()
    with pytest.raises(tt.CheckpointError, match=r"Give the path of a folder in it that does: unet, vae\.$"):
        tt.open(tmp_path)
