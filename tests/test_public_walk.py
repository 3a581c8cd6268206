"""Every public function with wrong arguments and with odd models: a right result, or an error of one line."""

import inspect
import traceback
import typing
from pathlib import Path

import pytest
import torch
from torch import nn

import torchtether as tt
from torchtether import distributed

SOURCE = Path(tt.__file__).parent

WRONG = {
    "None": lambda: None,
    "an int": lambda: 3,
    "text": lambda: "x",
    "bytes": lambda: b"y",
    "a float": lambda: 3.5,
    "an object": object,
    "a list": lambda: [1],
    "a generator": lambda: (x for x in [1]),
    "a dict": lambda: {1: 2},
    "a class": lambda: nn.Linear,
    "a tensor": lambda: torch.zeros(2),
    "a dtype": lambda: torch.float32,
    "a bool": lambda: True,
}


def pair(device=None):
    return nn.Sequential(nn.Linear(4, 4, device=device), nn.Linear(4, 4, device=device))


@pytest.fixture(scope="module")
def stored(tmp_path_factory):
    path = tmp_path_factory.mktemp("walk") / "a.safetensors"
    tt.save(pair(), path)
    return path


def _swapping(**options):
    with tt.swapping(**options):
        pass


LOAD = ("quantize", "dtype", "device", "strict", "ties", "rename", "progress", "optimizer", "mmap")
SCHEMES = (tt.int8, tt.int4, tt.fp8, tt.nf4, tt.mxfp4, tt.nvfp4)

CALLS = {
    "load(model)": lambda v, s, t: tt.load(v, s),
    "load(path)": lambda v, s, t: tt.load(pair(), v),
    **{f"load({k}=)": lambda v, s, t, k=k: tt.load(pair(), s, **{k: v}) for k in LOAD},
    "plan_load(model)": lambda v, s, t: tt.plan_load(v, s),
    **{f"plan_load({k}=)": lambda v, s, t, k=k: tt.plan_load(pair(), s, **{k: v}) for k in LOAD if k != "progress"},
    "apply(only=)": lambda v, s, t: tt.plan_load(pair(), s).apply(only=v),
    "apply(progress=)": lambda v, s, t: tt.plan_load(pair(), s).apply(progress=v),
    "refit(model)": lambda v, s, t: tt.refit(v, s),
    "refit(source)": lambda v, s, t: tt.refit(pair(), v),
    "refit({name: value})": lambda v, s, t: tt.refit(pair(), pair().state_dict() | {"0.weight": v}),
    "refit([value])": lambda v, s, t: tt.refit(pair(), [*pair().state_dict().items(), v]),
    **{f"refit({k}=)": lambda v, s, t, k=k: tt.refit(pair(), s, **{k: v}) for k in ("rename", "optimizer", "atomic")},
    "save(model)": lambda v, s, t: tt.save(v, t / "o.safetensors"),
    "save(path)": lambda v, s, t: tt.save(pair(), v),
    **{
        f"save({k}=)": lambda v, s, t, k=k: tt.save(pair(), t / "o", **{k: v})
        for k in ("format", "aliases", "max_shard_size", "metadata", "progress")
    },
    "open(path)": lambda v, s, t: tt.open(v).close(),
    "gguf_names(source)": lambda v, s, t: tt.gguf_names(v),
    "convert(model)": lambda v, s, t: tt.convert(v, dtype=torch.float64),
    **{
        f"convert({k}=)": lambda v, s, t, k=k: tt.convert(pair(), **{"dtype": torch.float64, k: v})
        for k in ("dtype", "device", "optimizer", "atomic")
    },
    "quantize(model)": lambda v, s, t: tt.quantize(v, "int8"),
    "quantize(rules)": lambda v, s, t: tt.quantize(pair(), v),
    "quantize({'*': rule})": lambda v, s, t: tt.quantize(pair(), {"*": v}),
    "dequantize(model)": lambda v, s, t: tt.dequantize(v),
    **{f"quantize({k}=)": lambda v, s, t, k=k: tt.quantize(pair(), "int8", **{k: v}) for k in ("optimizer", "atomic")},
    **{
        f"dequantize({k}=)": lambda v, s, t, k=k: tt.dequantize(tt.quantize(pair(), "int8"), **{k: v})
        for k in ("optimizer", "atomic")
    },
    **{f"swapping({k}=)": lambda v, s, t, k=k: _swapping(**{k: v}) for k in ("model", "optimizer")},
    "materialize(model)": lambda v, s, t: tt.materialize(v),
    "materialize(device=)": lambda v, s, t: tt.materialize(pair("meta"), v),
    "materialize(init=)": lambda v, s, t: tt.materialize(pair("meta"), init=v),
    "find_ties(model)": lambda v, s, t: tt.find_ties(v),
    "check_ties(model)": lambda v, s, t: tt.check_ties(v),
    "check_ties(expected)": lambda v, s, t: tt.check_ties(pair(), v),
    "tie(model)": lambda v, s, t: tt.tie(v, "0.weight", "1.weight"),
    "tie(owner)": lambda v, s, t: tt.tie(pair(), v, "1.weight"),
    "tie(alias)": lambda v, s, t: tt.tie(pair(), "0.weight", v),
    "tie(transpose=)": lambda v, s, t: tt.tie(pair(), "0.weight", "1.weight", transpose=v),
    "tie(rows=)": lambda v, s, t: tt.tie(pair(), "0.weight", "1.weight", rows=v),
    "untie(model)": lambda v, s, t: tt.untie(v, "0.weight"),
    "untie(name)": lambda v, s, t: tt.untie(pair(), v),
    "check_optimizer(model)": lambda v, s, t: tt.check_optimizer(v, torch.optim.SGD(pair().parameters())),
    "check_optimizer(optimizer)": lambda v, s, t: tt.check_optimizer(pair(), v),
    "map(model)": lambda v, s, t: tt.storage_map(v),
    "diff(earlier)": lambda v, s, t: tt.storage_map(pair()).diff(v),
    "Weight.encode(values)": lambda v, s, t: tt.Weight.encode(v, tt.int8()),
    "Weight.encode(scheme)": lambda v, s, t: tt.Weight.encode(torch.zeros(4, 4), v),
    **{
        f"{f.__name__}({k}=)": lambda v, s, t, f=f, k=k: f(**{k: v})
        for f in SCHEMES
        for k in inspect.signature(f).parameters
    },
    "Concat(sources)": lambda v, s, t: tt.Concat(v, "c"),
    "Concat(target)": lambda v, s, t: tt.Concat(["a", "b"], v),
    "Concat(sizes=)": lambda v, s, t: tt.Concat(["a", "b"], "c", sizes=v),
    "Concat(dim=)": lambda v, s, t: tt.Concat(["a", "b"], "c", dim=v),
    "Split(source)": lambda v, s, t: tt.Split(v, ["a", "b"]),
    "Split(targets)": lambda v, s, t: tt.Split("c", v),
    "Split(dim=)": lambda v, s, t: tt.Split("c", "a{}", dim=v),
    "Stack(source)": lambda v, s, t: tt.Stack(v, "c"),
    "Stack(target)": lambda v, s, t: tt.Stack(r"a\.(\d+)", v),
    "Stack(dim=)": lambda v, s, t: tt.Stack(r"a\.(\d+)", "c", dim=v),
    "Transpose(dims=)": lambda v, s, t: tt.Transpose("a", dims=v),
    "Transpose(source)": lambda v, s, t: tt.Transpose(v),
    "Rotary(source)": lambda v, s, t: tt.Rotary(v, heads=2),
    "Rotary(heads=)": lambda v, s, t: tt.Rotary("a", heads=v),
    "Rotary(to_pairs=)": lambda v, s, t: tt.Rotary("a", 2, to_pairs=v),
    **{
        f"plan_quantize({k}=)": lambda v, s, t, k=k: tt.plan_quantize(
            pair(), **{"bits": 9, k: v, **({"bits": None} if k == "bytes" else {})}
        )
        for k in ("bytes", "bits", "schemes", "only", "progress")
    },
    "plan_quantize(model)": lambda v, s, t: tt.plan_quantize(v, bits=9),
    "map.to_text(limit=)": lambda v, s, t: tt.storage_map(pair()).to_text(limit=v),
    "map.to_text(width=)": lambda v, s, t: tt.storage_map(pair()).to_text(width=v),
    "map.to_svg(path)": lambda v, s, t: tt.storage_map(pair()).to_svg(v),
    "map.to_svg(limit=)": lambda v, s, t: tt.storage_map(pair()).to_svg(limit=v),
    "map.to_html(path)": lambda v, s, t: tt.storage_map(pair()).to_html(v),
    "diff.to_html(path)": lambda v, s, t: tt.storage_map(pair()).diff(tt.storage_map(pair())).to_html(v),
    "report.to_svg(path)": lambda v, s, t: tt.LoadReport().to_svg(v),
    "Tie(names)": lambda v, s, t: tt.Tie(v),
    "distributed.plan_units(model)": lambda v, s, t: distributed.plan_units(v, nn.Linear),
    "distributed.plan_units(unit_types)": lambda v, s, t: distributed.plan_units(pair(), v),
    **{
        f"distributed.plan_units({k}=)": lambda v, s, t, k=k: distributed.plan_units(pair(), "0", **{k: v})
        for k in ("mesh", "policy", "inputs", "ties")
    },
    "distributed.shard(model)": lambda v, s, t: distributed.shard(v, distributed.plan_units(pair(), "0")),
    "distributed.shard(plan)": lambda v, s, t: distributed.shard(pair(), v),
    **{
        f"distributed.shard({k}=)": lambda v, s, t, k=k: distributed.shard(
            pair(), distributed.plan_units(pair(), "0"), **{k: v}
        )
        for k in ("optimizer", "mesh")
    },
    "distributed.load(model)": lambda v, s, t: distributed.load(v, s),
    "distributed.load(path)": lambda v, s, t: distributed.load(pair(), v),
    **{
        f"distributed.load({k}=)": lambda v, s, t, k=k: distributed.load(pair(), s, **{k: v})
        for k in (*LOAD[:-1], "process_group")
    },
    "distributed.save(model)": lambda v, s, t: distributed.save(v, t / "o.safetensors"),
    "distributed.save(path)": lambda v, s, t: distributed.save(pair(), v),
    "distributed.save(model, 'dcp')": lambda v, s, t: distributed.save(v, t / "o", format="dcp"),
    **{
        f"distributed.save({k}=)": lambda v, s, t, k=k: distributed.save(pair(), t / "o", **{k: v})
        for k in ("format", "aliases", "masters", "max_shard_size", "optimizer", "progress", "process_group")
    },
    "distributed.state_dict(model)": lambda v, s, t: distributed.state_dict(v),
    "distributed.state_dict(optimizer)": lambda v, s, t: distributed.state_dict(pair(), v),
    "distributed.state_dict(aliases=)": lambda v, s, t: distributed.state_dict(pair(), aliases=v),
    "distributed.restore_ties(model)": lambda v, s, t: distributed.restore_ties(v, []),
    "distributed.restore_ties(ties)": lambda v, s, t: distributed.restore_ties(pair(), v),
    "distributed.resync(model)": lambda v, s, t: distributed.resync(v),
}


@pytest.mark.parametrize("call", CALLS)
def test_a_wrong_argument_is_one_line_that_says_so(call, stored, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)  # where a path is asked for, text is one
    for word, make in WRONG.items():
        folder = tmp_path / word
        folder.mkdir()
        try:
            CALLS[call](make(), stored, folder)
        except tt.TetherError as error:
            assert "\n" not in str(error), (call, word)
            assert len(str(error)) < 1500, (call, word)
        except Exception as error:
            where = traceback.extract_tb(error.__traceback__)[-1].filename
            raise AssertionError(f"{call} with {word}: {type(error).__name__}: {error} ({where})") from error
    assert "Traceback" not in capsys.readouterr().err


TAKES = {"None", "a bool"}
"""What is right in many places: no optimizer, no rules, a flag."""


@pytest.mark.parametrize(
    "call",
    ["load(model)", "load(optimizer=)", "save(model)", "convert(model)", "convert(optimizer=)", "quantize(model)",
     "dequantize(model)", "swapping(model=)", "materialize(model)", "materialize(init=)", "find_ties(model)",
     "check_ties(model)", "tie(model)", "tie(owner)", "untie(name)", "check_optimizer(model)", "map(model)",
     "Weight.encode(values)", "Weight.encode(scheme)", "load(strict=)", "load(progress=)", "apply(only=)",
     "check_ties(expected)", "distributed.plan_units(model)", "distributed.plan_units(unit_types)",
     "distributed.plan_units(inputs=)", "distributed.plan_units(ties=)", "distributed.shard(model)",
     "distributed.shard(plan)", "distributed.shard(mesh=)", "distributed.load(model)", "distributed.load(path)",
     "distributed.load(process_group=)", "distributed.save(model)", "distributed.save(path)",
     "distributed.save(progress=)", "distributed.save(process_group=)", "distributed.state_dict(model)",
     "distributed.state_dict(optimizer)", "distributed.restore_ties(model)", "distributed.restore_ties(ties)",
     "distributed.resync(model)", "gguf_names(source)", "Rotary(to_pairs=)", "plan_quantize(model)",
     "plan_quantize(progress=)", "plan_quantize(only=)", "map.to_text(limit=)", "map.to_text(width=)",
     "map.to_svg(path)", "map.to_svg(limit=)", "map.to_html(path)", "diff.to_html(path)", "report.to_svg(path)"],
)  # fmt: skip
def test_a_wrong_argument_is_named(call, stored, tmp_path):
    """The error is also a TypeError, and begins with the name of the argument."""
    argument = call.partition("(")[2].rstrip("=)")
    with pytest.raises(tt.ArgumentError, match=rf"^{argument}: ") as caught:
        CALLS[call](object(), stored, tmp_path)
    assert isinstance(caught.value, TypeError)


@pytest.mark.parametrize(
    ("rename", "said"),
    [
        (lambda name: 3, r"^rename: the function returns an int for '0\.(weight|bias)', not a name\. Give a function"),
        (lambda name: {}[name], r"^rename: the function fails for '0\.(weight|bias)' with KeyError: "),
        (nn.Linear, r"^rename: the function fails for .* with TypeError: "),
        ([("^", "x."), nn.Linear], r"^rename: the function fails for 'x\.0.* with TypeError: "),
    ],
)
def test_a_function_for_names_that_fails_is_named(rename, said, stored):
    with pytest.raises(tt.RuleError, match=said):
        tt.plan_load(pair(), stored, rename=rename)
    assert tt.plan_load(pair(), stored, rename=str).faults == ()


@pytest.mark.parametrize(
    "verb",
    [tt.convert, tt.quantize, tt.dequantize, tt.adopt, tt.quantize_activations, tt.materialize, distributed.shard],
)
def test_the_class_of_the_model_is_kept_for_type_checkers(verb):
    hints = typing.get_type_hints(verb)
    assert isinstance(hints["model"], typing.TypeVar)
    assert hints["return"] is hints["model"]
    assert hints["model"].__bound__ is nn.Module


def test_ties_of_another_model_are_named():
    with pytest.raises(tt.TieError, match=r"^a: is not in the model, but in the tie a = b\. "):
        distributed.restore_ties(pair(), [tt.Tie(("a", "b"))])
    for none in ([None], None, (x for x in [None])):
        with pytest.raises(tt.ArgumentError, match="^ties: holds None, not ties"):
            distributed.restore_ties(pair(), none)
    with pytest.raises(tt.ArgumentError, match="^expected: holds None, not ties"):
        tt.check_ties(pair(), [None])


def test_a_shard_needs_a_process_group():
    model = pair()
    with pytest.raises(tt.ConversionError, match="^there is no process group"):
        distributed.shard(model, distributed.plan_units(model, "0"))
    assert type(model[0]) is nn.Linear


def test_a_forward_that_cannot_be_called_leaves_no_hooks():
    model = pair()
    plan = distributed.plan_units(model, "0", inputs={1: 2})
    assert len(plan.warnings) == 1
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())


def test_a_state_dict_is_no_optimizer():
    state = torch.optim.SGD(pair().parameters()).state_dict()
    with pytest.raises(tt.ArgumentError, match=r"^optimizer: is a dict, not an optimizer\. "):
        tt.convert(pair(), dtype=torch.float64, optimizer=state)


@pytest.mark.parametrize("wrong", [{"make": torch.zeros(2, 2)}, {"values": 5}, {"linear": "x"}])
def test_laws_of_a_tensor_instead_of_a_function(wrong):
    (name,) = wrong
    with pytest.raises(tt.ArgumentError, match=rf"^{name}: is .*, not a function\. "):
        tt.testing.check_tensor_subclass(**{"make": lambda: torch.zeros(2, 2), **wrong})


def test_a_class_does_not_initialise():
    with pytest.raises(tt.ArgumentError, match=r"^init: is the class Linear, not a function\. "):
        tt.materialize(pair("meta"), init=nn.Linear)


def test_generators_do_where_lists_are_expected(stored):
    """And are used once only, however often a plan is applied."""
    model = pair()
    optimizers = [torch.optim.SGD(model[0].parameters(), 0.1), torch.optim.SGD(model[1].parameters(), 0.1)]
    tt.check_optimizer(model, (one for one in optimizers))
    tt.convert(model, dtype=torch.float64, optimizer=(one for one in optimizers))
    with pytest.raises(tt.OptimizerError, match="but not in the optimizer"):
        tt.check_optimizer(model, (one for one in optimizers[:1]))
    plan = tt.plan_load(model, stored, optimizer=(one for one in optimizers))
    plan.apply(only=(name for name in ["0.*"]))
    plan.apply(only=(name for name in ["1.weight", "1.bias"]))
    plan.close()
    tt.check_optimizer(model, optimizers)
    tied = pair()
    tied[1].weight = tied[0].weight
    tt.check_ties(tied, (tie for tie in tt.find_ties(tied)))
    assert tt.Concat((name for name in "ab"), "c") == tt.Concat(["a", "b"], "c")
    assert tt.Split("c", (name for name in "ab"), sizes=(size for size in (1, 2))) == tt.Split(
        "c", ["a", "b"], sizes=(1, 2)
    )
    assert tt.Tie(name for name in "ab") == tt.Tie(("a", "b"))


# -- odd models -------------------------------------------------------------------------------------------------------


def _holding(*tensors, buffers=False):
    def make():
        model = nn.Module()
        for i, tensor in enumerate(tensors):
            if buffers:
                model.register_buffer(f"t{i}", tensor.clone())
            else:
                own = nn.Parameter(tensor.clone(), requires_grad=tensor.is_floating_point() or tensor.is_complex())
                model.register_parameter(f"t{i}", own)
        return model

    return make


def _twice():
    block = nn.Linear(3, 3)
    return nn.Sequential(block, nn.Sequential(block, block), nn.LayerNorm(3))


def _own_child():
    model = nn.Linear(2, 2)
    model.register_module("again", nn.ModuleList([nn.Linear(2, 2), None]))
    return model


ODD = {
    "no modules": nn.Module,
    "no parameters": lambda: nn.Sequential(nn.ReLU(), nn.Dropout()),
    "an empty list": nn.ModuleList,
    "a bare identity": nn.Identity,
    "rank 0": _holding(torch.tensor(1.5), torch.tensor(2.0, dtype=torch.float64)),
    "no elements": _holding(torch.zeros(0), torch.zeros(3, 0), torch.zeros(0, 3)),
    "integers": _holding(torch.arange(4), torch.tensor(3, dtype=torch.uint8), torch.tensor([True, False])),
    "complex": _holding(torch.randn(3, 3, dtype=torch.complex64), torch.randn(2, dtype=torch.complex64)),
    "double complex": _holding(torch.randn(2, dtype=torch.complex128)),
    "buffers": _holding(torch.zeros(2), torch.arange(3), torch.tensor(True), buffers=True),
    "half": _holding(torch.ones(2, dtype=torch.float16), torch.ones(2, dtype=torch.bfloat16)),
    "a module three times": _twice,
    "a None child": _own_child,
    "strides": _holding(torch.randn(4, 3).t(), torch.randn(6)[::2]),
    "one element": lambda: nn.Linear(1, 1, bias=False),
}

VERBS = {
    "convert": lambda model: tt.convert(model, dtype=torch.float64),
    "convert device": lambda model: tt.convert(model, device="cpu"),
    "convert full": lambda model: tt.convert(model, dtype=torch.bfloat16, atomic="full"),
    "quantize": lambda model: tt.quantize(model, "int8"),
    "quantize none": lambda model: tt.quantize(model, None),
    "quantize all": lambda model: tt.quantize(model, {"*": "int8"}),
    "wrap all": lambda model: tt.quantize(model, {"*": tt.Plain()}),
    "dequantize": tt.dequantize,
    "materialize": tt.materialize,
    "find_ties": tt.find_ties,
    "check_ties": lambda model: tt.check_ties(model, tt.find_ties(model)),
    "storage_map": lambda model: (
        str(tt.storage_map(model)),
        tt.storage_map(model).to_html(),
        tt.storage_map(model).diff(tt.storage_map(model)),
    ),
    "swapping": lambda model: _stock(model),
}


def _stock(model):
    with tt.swapping(model):
        model.load_state_dict(model.state_dict(), assign=True)


def _facts(model):
    named = {
        **dict(model.named_parameters(remove_duplicate=False)),
        **dict(model.named_buffers(remove_duplicate=False)),
    }
    return {
        name: (id(one), one.dtype, tuple(one.shape), one.requires_grad, one.detach().clone())
        for name, one in named.items()
    }


def _same(one, other):
    assert one.keys() == other.keys()
    for name, (*facts, values) in one.items():
        *others, again = other[name]
        assert facts == others, name
        assert torch.equal(values, again), name


@pytest.mark.parametrize("odd", ODD)
@pytest.mark.parametrize("verb", VERBS)
def test_an_odd_model_is_converted_or_refused_whole(odd, verb):
    """Objects and names stay; what is refused is refused in one line, and nothing has changed."""
    model = ODD[odd]()
    before, objects = _facts(model), tt.find_ties(model)
    try:
        VERBS[verb](model)
    except tt.TetherError as error:
        assert "\n" not in str(error)
        _same(before, _facts(model))
        return
    after = _facts(model)
    assert after.keys() == before.keys()
    for name in before:
        if "buffer" not in odd:
            assert after[name][0] == before[name][0], f"{name} is another object"
    assert [tie.names for tie in tt.find_ties(model)] == [tie.names for tie in objects]
    for name, (_, dtype, shape, grad, values) in before.items():
        _, dtype_now, shape_now, grad_now, now = after[name]
        assert (shape_now, grad_now) == (shape, grad)
        if not dtype.is_floating_point:
            assert torch.equal(now, values)
            assert dtype_now == dtype or dtype.is_complex
        elif "convert" not in verb and "quantize" not in verb:
            assert torch.equal(now, values)


@pytest.mark.parametrize("odd", ODD)
def test_an_odd_model_comes_back_from_a_file(odd, tmp_path):
    model = ODD[odd]()
    if odd == "double complex":
        with pytest.raises(tt.CheckpointError, match=r"^t0: safetensors has no dtype for torch.complex128\."):
            tt.save(model, tmp_path)
        return
    tt.save(model, tmp_path)
    tt.storage_map(tmp_path).to_svg()
    with tt.open(tmp_path) as checkpoint:
        for name, tensor in model.state_dict().items():
            assert torch.equal(checkpoint[name], tensor), name
            assert checkpoint[name].dtype == tensor.dtype
    again = ODD[odd]()
    with torch.no_grad():
        for tensor in (*again.parameters(), *again.buffers()):
            tensor.zero_()
    report = tt.load(again, tmp_path)
    assert report.missing_keys == report.unexpected_keys == ()
    for name, tensor in model.state_dict().items():
        assert torch.equal(again.state_dict()[name], tensor), name
    with tt.on_meta():
        built = ODD[odd]()
    tt.load(built, tmp_path)
    for name, tensor in model.state_dict().items():
        assert torch.equal(built.state_dict()[name], tensor), name
    assert [tie.names for tie in tt.find_ties(built)] == [tie.names for tie in tt.find_ties(model)]


def test_models_without_anything_to_train_and_optimizers_that_hold_something():
    with pytest.raises(tt.OptimizerError, match="holds"):
        tt.check_optimizer(nn.Identity(), torch.optim.SGD(pair().parameters()))
    for none in (None, [], ()):
        tt.check_optimizer(nn.Identity(), none)
        tt.check_optimizer(pair().requires_grad_(False), none)
