"""Loading with Concat, Split, Stack and Transpose gives the values of torch.cat, split, stack and transpose."""

import re

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import torchtether as tt
from tests.checkpoint.test_round_trip import bits
from tests.strategies import filled
from torchtether.ties.names import named_tensors

DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.float8_e4m3fn)


def holder(tensors, *, meta=True):
    """A module with these names, dotted ones too, that holds other values."""
    root = nn.Module()
    for name, tensor in tensors.items():
        *path, leaf = name.split(".")
        module = root
        for part in path:
            if part not in module._modules:
                module.add_module(part, nn.Module())
            module = module._modules[part]
        made = torch.empty_like(tensor, device="meta") if meta else torch.zeros_like(tensor)
        module.register_buffer(leaf, made)
    return root


def check(path, stored, expected, rename, **options):
    """Loading ``stored`` with the rules fills a model of ``expected``, on meta and in place, to the bit."""
    tt.save({name: tensor.clone() for name, tensor in stored.items()}, path)
    for meta in (True, False):
        model = holder(expected, meta=meta)
        told = []
        report = tt.load(model, path, rename=rename, progress=lambda *counts, told=told: told.append(counts), **options)
        for name, tensor in named_tensors(model).items():
            given = expected[name]
            assert (tensor.dtype, tensor.shape) == (given.dtype, given.shape), name
            assert torch.equal(bits(tensor), bits(given)), name
        assert report.bytes == 0 or told[-1] == (report.bytes, report.bytes)


@st.composite
def pieces(draw, equal=False, smallest=0):
    """Tensors that torch.cat takes along the dim drawn with them (or torch.stack, if equal)."""
    shape = draw(st.lists(st.integers(1, 5), min_size=1, max_size=4))
    dim = draw(st.integers(-len(shape), len(shape) - 1))
    count = draw(st.integers(1, 4))
    dtype, seed = draw(st.sampled_from(DTYPES)), draw(st.integers(0, 2**31 - 1))
    made = []
    for i in range(count):
        if not equal:
            shape[dim] = draw(st.integers(smallest, 5))
        made.append(filled(tuple(shape), torch.float32, "normal", seed + i).mul(100).to(dtype))
    return made, dim


def cat(tensors, dim):
    """torch.cat, for dtypes that it does not know too."""
    kinds = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    return torch.cat([t.view(kinds[t.itemsize]) for t in tensors], dim).view(tensors[0].dtype)


NAMES = ["q_proj", "k_proj", "v_proj", "o_proj"]


@given(pieces())
def test_concat_is_cat_and_split_undoes_it(tmp_path_factory, drawn):
    given, dim = drawn
    separate = {f"h.{i}.{name}.weight": t for i in (0, 1) for name, t in zip(NAMES, given, strict=False)}
    fused = {f"h.{i}.qkv.weight": cat(given, dim) for i in (0, 1)}
    rule = tt.Concat(NAMES[: len(given)], "qkv", dim=dim, sizes=[t.shape[dim] for t in given])
    check(tmp_path_factory.mktemp("x") / "x", separate, fused, rule)
    check(tmp_path_factory.mktemp("x") / "x", fused, separate, rule.inverse)
    assert rule.inverse.inverse == rule


@given(pieces(equal=True), st.integers(1, 3))
def test_groups_alternate(tmp_path_factory, drawn, groups):
    given, dim = drawn
    given = [cat([t] * groups, dim) for t in given]
    chunks = [t.view(torch.uint8) if t.itemsize == 1 else t for t in given]
    chunks = [c for group in zip(*(t.chunk(groups, dim) for t in chunks), strict=True) for c in group]
    fused = {"qkv": torch.cat(chunks, dim).view(given[0].dtype)}
    separate = dict(zip(NAMES, given, strict=False))
    rule = tt.Concat(list(separate), "qkv", dim=dim, groups=groups)
    check(tmp_path_factory.mktemp("x") / "x", separate, fused, rule)
    check(tmp_path_factory.mktemp("x") / "x", fused, separate, rule.inverse)


@given(pieces(equal=True), st.data())
def test_stack_is_stack_and_split_unbinds(tmp_path_factory, drawn, data):
    given, _ = drawn
    given = given * 4  # more than ten, so that the order of names is not that of numbers
    dim = data.draw(st.integers(-given[0].dim() - 1, given[0].dim()))
    separate = {f"h.0.experts.{i}.w1.weight": t for i, t in enumerate(given)}
    stacked = cat([t.unsqueeze(dim) for t in given], dim)
    rule = tt.Stack(r"(.*)\.experts\.(\d+)\.w1\.weight", r"\1.experts.w1", dim=dim)
    check(tmp_path_factory.mktemp("x") / "x", separate, {"h.0.experts.w1": stacked}, rule)
    check(tmp_path_factory.mktemp("x") / "x", {"h.0.experts.w1": stacked}, separate, rule.inverse)
    assert rule.inverse.targets == r"\1.experts.{}.w1.weight"
    assert rule.inverse.inverse == rule


@given(pieces(equal=True), st.data())
def test_transpose_is_transpose(tmp_path_factory, drawn, data):
    (tensor, *_), _ = drawn
    dims = [data.draw(st.integers(-tensor.dim(), tensor.dim() - 1)) for _ in range(2)]
    rule = tt.Transpose(r"old\.(\w+)", r"new.\1", dims=dims)
    expected = {"new.w": tensor.transpose(*dims).contiguous()}
    check(tmp_path_factory.mktemp("x") / "x", {"old.w": tensor}, expected, rule)
    back = {"old.w": tensor.contiguous()}
    check(tmp_path_factory.mktemp("x") / "x", expected, back, rule.inverse)


@given(st.data())
def test_any_chain_of_rules_is_the_chain_of_functions(tmp_path_factory, data):
    """Each step is drawn, done by torch on tensors, and given as a rule; what the model gets is what torch made."""
    count, shape = data.draw(st.integers(2, 4)), data.draw(st.lists(st.integers(1, 4), min_size=2, max_size=3))
    now = {f"x.{i}": torch.randint(0, 10**6, shape) for i in range(count)}
    stored, rules = dict(now), []
    for _ in range(data.draw(st.integers(1, 5))):
        (first, *_), same = list(now.values()), len({t.shape for t in now.values()}) == 1
        kinds = ["transpose"] + ["split"] * (first.dim() > 0) + ["stack", "concat"] * (same and first.dim() > 0)
        kind = data.draw(st.sampled_from(kinds))
        if first.dim() == 0:
            break
        dim = data.draw(st.integers(0, first.dim() - 1))
        if kind == "transpose":
            other = data.draw(st.integers(0, first.dim() - 1))
            if not same:
                continue
            rules.append(tt.Transpose(r"^x\.\d+$", dims=(dim, other)))
            now = {name: t.transpose(dim, other) for name, t in now.items()}
        elif kind == "stack" and first.dim() < 5:
            rules.append(tt.Stack(r"^x\.(\d+)$", "x.0", dim=dim))
            now = {"x.0": torch.stack(list(now.values()), dim)}
        elif kind == "concat":
            rules.append(tt.Concat([rf"^x\.{i}$" for i in range(len(now))], "x.0", dim=dim))
            now = {"x.0": torch.cat(list(now.values()), dim)}
        elif kind == "split" and len(now) == 1:
            if data.draw(st.booleans()):
                rules.append(tt.Split(r"^x\.0$", "x.{}", dim=dim))
                now = {f"x.{i}": t for i, t in enumerate(first.unbind(dim))}
            else:
                cut = data.draw(st.integers(0, first.shape[dim]))
                sizes = [cut, first.shape[dim] - cut]
                rules.append(tt.Split(r"^x\.0$", ["x.0", "x.1"], dim=dim, sizes=sizes))
                now = {f"x.{i}": t for i, t in enumerate(first.split(sizes, dim))}
    check(tmp_path_factory.mktemp("x") / "x", stored, {name: t.contiguous() for name, t in now.items()}, rules)


def test_rules_see_what_the_steps_before_them_left(tmp_path):
    """Pairs, mappings and functions stand beside rules; order matters."""
    stored = {"model.a.wq": torch.ones(2, 3), "model.a.wk": torch.zeros(1, 3), "model.b": torch.ones(1)}
    steps = [
        (r"^model\.", ""),
        {"a.wq": "a.q", "a.wk": "a.k"},
        tt.Concat([r"\.q$", r"\.k$"], ".qk"),
        tt.Transpose("qk"),
        lambda name: None if name == "b" else name,
    ]
    expected = {"a.qk": torch.cat([torch.ones(2, 3), torch.zeros(1, 3)]).t().contiguous()}
    check(tmp_path / "x", stored, expected, steps)
    plan = tt.plan_load(holder(expected), tmp_path / "x", rename=[steps[2], steps[0], steps[1]])
    assert any("matches no name of the checkpoint, the nearest is 'model." in fault for fault in plan.faults)
    plan.close()


def test_the_plan_says_which_keys_fill_a_name(tmp_path):
    stored = {f"e.{i}.{w}": torch.full((2, 2), float(i)) for i in range(12) for w in ("w1", "w3")}
    expected = {"e.gate_up": torch.stack([torch.full((4, 2), float(i)) for i in range(12)])}
    rules = [tt.Concat(["w1", "w3"], "gate_up"), tt.Stack(r"e\.(\d+)\.", "e.")]
    check(tmp_path / "x", stored, expected, rules)
    plan = tt.plan_load(holder(expected), tmp_path / "x", rename=rules)
    assert "e.gate_up from e.0.w1, e.0.w3, e.1.w1, e.1.w3, e.2.w1, e.2.w3 and 18 more: [12, 4, 2]" in str(plan)
    report = plan.apply(only="e.gate*")
    assert (report.tensors, report.on_meta) == (1, ())
    plan.close()


# -- faults -----------------------------------------------------------------------------------------------------------

Q, K, V = torch.ones(4, 4), torch.ones(2, 4), torch.ones(2, 4)
QKV = tt.Concat(["q_proj", "k_proj", "v_proj"], "qkv")
EXPERTS = tt.Stack(r"e\.(\d+)\.w", "e.w")


def qkv(**changes):
    return {"q_proj.weight": Q, "k_proj.weight": K, "v_proj.weight": V} | {
        name.replace("__", "."): t for name, t in changes.items()
    }


FAULTS = {
    "piece": (
        {"q_proj.weight": Q, "v_proj.weight": V},
        QKV,
        {"qkv.weight": (8, 4)},
        [r"qkv.weight: Concat finds q_proj.weight, v_proj.weight, but no tensor of the checkpoint for 'k_proj'"],
    ),
    "shape": (
        qkv(k_proj__weight=torch.ones(2, 3)),
        QKV,
        {"qkv.weight": (8, 4)},
        [r"qkv.weight: Concat cannot join q_proj.weight of shape \(4, 4\) and k_proj.weight of shape \(2, 3\)"],
    ),
    "dtype": (
        qkv(v_proj__weight=V.half()),
        QKV,
        {"qkv.weight": (8, 4)},
        [r"qkv.weight: Concat cannot join q_proj.weight .torch.float32. and v_proj.weight .torch.float16., which"],
    ),
    "total": (
        qkv(),
        QKV,
        {"qkv.weight": (9, 4)},
        [r"qkv.weight: the checkpoint has shape \(8, 4\), the model has \(9, 4\)"],
    ),
    "concat_sizes": (
        qkv(),
        tt.Concat(QKV.sources, "qkv", sizes=[4, 4, 4]),
        {"qkv.weight": (8, 4)},
        [r"qkv.weight: its pieces have sizes \(4, 2, 2\) along dim 0, not \(4, 4, 4\)"],
    ),
    "concat_groups": (
        qkv(),
        tt.Concat(QKV.sources, "qkv", groups=4),
        {"qkv.weight": (8, 4)},
        [r"qkv.weight: sizes \(4, 2, 2\) along dim 0 cannot all be divided into 4 groups"],
    ),
    "concat_dim": (
        qkv(),
        tt.Concat(QKV.sources, "qkv", dim=2),
        {"qkv.weight": (8, 4)},
        [r"qkv.weight: q_proj.weight has shape \(4, 4\), which has no dim 2"],
    ),
    "split_sizes": (
        {"qkv.weight": torch.ones(9, 4)},
        tt.Split("qkv", ["q_proj", "k_proj", "v_proj"], sizes=[4, 2, 2]),
        {name: tuple(t.shape) for name, t in qkv().items()},
        [r"qkv.weight: sizes \(4, 2, 2\) add up to 8, it has 9 along dim 0"],
    ),
    "split_equal": (
        {"qkv.weight": torch.ones(8, 4)},
        tt.Split("qkv", ["q_proj", "k_proj", "v_proj"]),
        {name: tuple(t.shape) for name, t in qkv().items()},
        [r"qkv.weight: size 8 along dim 0 does not split in 3 equal pieces. Give sizes="],
    ),
    "split_groups": (
        {"qkv.weight": torch.ones(8, 4)},
        tt.Split("qkv", ["q_proj", "k_proj", "v_proj"], sizes=[4, 2, 2], groups=4),
        {name: tuple(t.shape) for name, t in qkv().items()},
        [r"qkv.weight: sizes \(4, 2, 2\) along dim 0 cannot all be divided into 4 groups"],
    ),
    "split_dim": (
        {"w": torch.tensor(1.0)},
        tt.Split("w", "w.{}"),
        {"w.0": (1,)},
        [r"w: w has shape \(\), which has no dim 0", "w.0: the checkpoint does not have it"],
    ),
    "number": (
        {"e.0.w": Q, "e.1.w": Q, "e.3.w": Q},
        EXPERTS,
        {"e.w": (4, 4, 4)},
        [r"e.w: Stack finds 3 tensors up to number 3, but not number 2"],
    ),
    "numbers": (
        {"e.2.w": Q, "e.4.w": Q},
        EXPERTS,
        {"e.w": (5, 4, 4)},
        [r"e.w: Stack finds 2 tensors up to number 4, but not number 0 and 2 more"],
    ),
    "same_number": (
        {"e.0.w": Q, "e.00.w": Q},
        EXPERTS,
        {"e.w": (1, 4, 4)},
        [r"e.w: Stack finds e.0.w and e.00.w for the same piece"],
    ),
    "stack_shape": (
        {"e.0.w": Q, "e.1.w": K},
        EXPERTS,
        {"e.w": (2, 4, 4)},
        [r"e.w: Stack cannot join e.0.w of shape \(4, 4\) and e.1.w of shape \(2, 4\)"],
    ),
    "stack_dim": (
        {"e.0.w": Q, "e.1.w": Q},
        tt.Stack(EXPERTS.source, "e.w", dim=3),
        {"e.w": (2, 4, 4)},
        [r"e.w: Stack makes a tensor of 3 dimensions, which has no dim 3"],
    ),
    "transpose": (
        {"c.weight": K, "c.bias": torch.ones(4)},
        tt.Transpose("c"),
        {"c.weight": (4, 2), "c.bias": (4,)},
        [r"c.bias: it has shape \(4,\), and Transpose would exchange dims 0 and 1. Make the rule match fewer names."],
    ),
    "one_name": (
        {"a": Q, "b": Q},
        [tt.Transpose("^a$", "w"), tt.Transpose("^b$", "w")],
        {"w": (4, 4)},
        ["w: the checkpoint's a and b are both renamed to it"],
    ),
    "one_name_composed": (
        {**qkv(), "old": torch.ones(8, 4)},
        [QKV, ("^old$", "qkv.weight")],
        {"qkv.weight": (8, 4)},
        ["qkv.weight: the checkpoint's .* and .* are both renamed to it"],
    ),
    "nothing": (
        qkv(),
        [QKV, tt.Transpose("qvk")],
        {"qkv.weight": (8, 4)},
        [r"rename: Transpose\('qvk'\) matches no name of the checkpoint, the nearest is 'qkv.weight'"],
    ),
    "chain": (
        {"e.0.w1": Q, "e.1.w1": Q, "e.0.w3": Q},
        [tt.Concat(["w1", "w3"], "w"), EXPERTS],
        {"e.w": (2, 8, 4)},
        ["e.1.w: Concat finds e.1.w1, but no tensor of the checkpoint for 'w3'"],
    ),
    "unused_piece": (
        {"qkv.weight": torch.ones(6, 2)},
        tt.Split("qkv", ["q", "k", "v"]),
        {"q.weight": (2, 2), "v.weight": (2, 2)},
        ["qkv.weight: the model does not have k.weight, to which the rules of rename= change it, the nearest is"],
    ),
}


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("meta", [True, False])
def test_each_fault_is_one_line_and_leaves_the_model_untouched(tmp_path, fault, meta):
    stored, rename, shapes, expected = FAULTS[fault]
    tt.save({name: tensor.clone() for name, tensor in stored.items()}, tmp_path / "x")
    model = holder({name: torch.empty(shape) for name, shape in shapes.items()}, meta=meta)
    before = named_tensors(model)
    plan = tt.plan_load(model, tmp_path / "x", rename=rename)
    plan.close()
    assert len(plan.faults) == len(expected), plan.faults
    for text, pattern in zip(plan.faults, expected, strict=True):
        assert re.match(pattern, text), text
        assert "\n" not in text
    with pytest.raises(tt.LoadError, match=expected[0]):
        tt.load(model, tmp_path / "x", rename=rename)
    for name, tensor in named_tensors(model).items():
        assert tensor is before[name]
        assert tensor.is_meta == meta
        assert meta or not tensor.any()


@pytest.mark.parametrize("fault", ["piece", "number", "chain", "unused_piece"])
@pytest.mark.parametrize("meta", [True, False])
def test_not_strict_reports_an_incomplete_group_and_leaves_its_target(tmp_path, fault, meta):
    stored, rename, shapes, _ = FAULTS[fault]
    tt.save({name: tensor.clone() for name, tensor in {**stored, "other": torch.ones(2)}.items()}, tmp_path / "x")
    model = holder({**{name: torch.empty(shape) for name, shape in shapes.items()}, "other": torch.empty(2)}, meta=meta)
    before = named_tensors(model)
    report = tt.load(model, tmp_path / "x", rename=rename, strict=False)
    assert model.other.tolist() == [1, 1]
    assert set(report.unexpected_keys) == set(stored)
    if fault == "unused_piece":
        assert report.missing_keys == ()
        return
    assert report.missing_keys == tuple(shapes)
    for name in shapes:
        assert named_tensors(model)[name] is before[name]
        assert meta or not before[name].any()


@pytest.mark.parametrize("fault", ["shape", "dtype", "split_sizes", "transpose"])
def test_not_strict_still_refuses_what_does_not_fit_a_name_of_the_model(tmp_path, fault):
    stored, rename, shapes, expected = FAULTS[fault]
    tt.save({name: tensor.clone() for name, tensor in {**stored, "other": torch.ones(2)}.items()}, tmp_path / "x")
    for names, count in ((shapes, len(expected)), ({}, 0)):
        model = holder({**{name: torch.empty(shape) for name, shape in names.items()}, "other": torch.empty(2)})
        plan = tt.plan_load(model, tmp_path / "x", rename=rename, strict=False)
        plan.close()
        assert len(plan.faults) == count
        assert count or set(plan.unexpected_keys) == set(stored)


@pytest.mark.parametrize(
    "make",
    [
        lambda: tt.Concat("q_proj", "qkv"),
        lambda: tt.Concat([], "qkv"),
        lambda: tt.Concat(["q", "q"], "qkv"),
        lambda: tt.Concat(["q("], "qkv"),
        lambda: tt.Concat(["q"], r"\1.qkv"),
        lambda: tt.Concat(["q"], "qkv", groups=0),
        lambda: tt.Concat({"q", "k"}, "qk"),
        lambda: tt.Split("qk", {"q", "k"}),
        lambda: tt.Split("qkv", "q"),
        lambda: tt.Split("qkv", "q.{}", sizes=[1]),
        lambda: tt.Split("qkv", ["q", "k"], sizes=[1]),
        lambda: tt.Split("qkv", ["q", "k"], sizes=[1.0, 2]),
        lambda: tt.Stack(r"e\.w", "w"),
        lambda: tt.Stack(r"(e)\.(\d+)\.w", "w"),
        lambda: tt.Transpose("w", dims=(0, 1, 2)),
        lambda: tt.Concat([r"q\w+"], "qkv").inverse,
        lambda: tt.Concat([r"(.*)\.q"], "qkv").inverse,
        lambda: tt.Concat([r"(.*)\.q", r"(\w+)\.k"], r"\1.qkv").inverse,
        lambda: tt.Split(r"(\w+)\.(\d)", [r"\1.\2.a", r"\2.\1.b"]).inverse,
        lambda: tt.plan_load(nn.Linear(1, 1), "nowhere", rename=[("(", "")]),
    ],
)
def test_a_rule_that_makes_no_sense_is_refused(make, tmp_path, monkeypatch):
    tt.save(nn.Linear(1, 1), tmp_path / "nowhere")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(tt.RuleError) as caught:
        make()
    assert "\n" not in str(caught.value)


def test_a_rule_is_a_value():
    assert tt.Concat(["q", "k"], "qk") == tt.Concat(("q", "k"), "qk")
    assert len({QKV, tt.Concat(QKV.sources, "qkv"), QKV.inverse}) == 2
    anchored = tt.Concat([r"^h\.(\d+)\.q\.(weight|bias)$", r"^h\.(\d+)\.k\.(weight|bias)$"], r"l.\1.qk.\2")
    assert anchored.inverse.source == r"^l\.(\d+)\.qk\.(weight|bias)$"
    assert anchored.inverse.targets == (r"h.\1.q.\2", r"h.\1.k.\2")
    assert anchored.inverse.inverse == anchored


def test_the_keys_of_a_dictionary_have_an_order():
    pieces = {"q": 1, "k": 2}
    assert tt.Concat(pieces.keys(), "qk") == tt.Concat(["q", "k"], "qk")
    assert tt.Split("qk", pieces.keys()) == tt.Split("qk", ["q", "k"])


def test_text_alone_is_no_list_of_rules(tmp_path):
    """Its letters would be taken for the rules."""
    tt.save(nn.Linear(2, 2), tmp_path)
    with pytest.raises(tt.RuleError, match="^rename: is a str, not a list of rules. Give pairs"):
        tt.plan_load(nn.Linear(2, 2), tmp_path, rename="weight")
