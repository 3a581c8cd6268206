"""The table of module_load: held x given x assign x meta or real x tied or not x swap flag on or off x scheme."""

import itertools
import warnings

import pytest
import torch
from torch import nn

import torchtether as tt
from tests.catalog import few_schemes
from torchtether.exchange.exchange import add_load_hook, keep_policy

OTHER = tt.Affine(bits=8, block=(1, 32), symmetric=False)
"""A scheme that no row of the catalog has."""

NAMES = ("emb.weight", "head.weight")


def _model(held, scheme, device, tied):
    with torch.device(device):
        model = nn.ModuleDict({"emb": nn.Embedding(16, 64), "head": nn.Linear(64, 16, bias=False)})
    if tied:
        model["head"].weight = model["emb"].weight
    if held == "weight":
        tt.quantize(model, {"*": scheme})
    for module in (model["emb"], model["head"]):
        add_load_hook(module)
        module.weight.requires_grad_(False)
    return model


def _given(kind, scheme, tied):
    """Tensors in bfloat16, so that one sees whose dtype wins; tied ones under both names, as in a state dict."""
    made = {}
    for name in NAMES:
        values = torch.randn(16, 64).bfloat16()
        made[name] = values if kind == "plain" else tt.Weight.encode(values, scheme if kind == "same" else OTHER)
    return {name: made["emb.weight"] for name in NAMES} if tied else made


def _load(model, given, assign, flag):
    torch.__future__.set_swap_module_params_on_conversion(flag)
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message=".*copying from a non-meta parameter", category=UserWarning)
            return model.load_state_dict(given, assign=assign)
    finally:
        torch.__future__.set_swap_module_params_on_conversion(False)


def _values(tensor):
    return tensor.detach().dequantize() if isinstance(tensor, tt.Weight) else tensor.detach()


def _parts(tensor):
    return [p.data_ptr() for p in tensor.parts.values()] if isinstance(tensor, tt.Weight) else [tensor.data_ptr()]


ROWS = [row for row in itertools.product(["weight", "plain"], ["plain", "same", "other"]) if row != ("plain", "plain")]


@pytest.mark.parametrize("flag", [False, True], ids=["flag-off", "flag-on"])
@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize("device", ["cpu", "meta"])
@pytest.mark.parametrize("assign", [False, True], ids=["copy", "assign"])
@pytest.mark.parametrize(("held", "given"), ROWS, ids=lambda value: value)
@few_schemes
def test_the_table(row, held, given, assign, device, tied, flag):
    scheme = row.scheme
    model = _model(held, scheme, device, tied)
    before = {name: model.get_parameter(name) for name in NAMES}
    ties, records = tt.find_ties(model), {name: getattr(p, "tie", None) for name, p in before.items()}
    memory = {name: _parts(parameter) for name, parameter in before.items()}
    state = _given(given, scheme, tied)
    copies = {name: tensor.clone() for name, tensor in state.items()}
    _load(model, state, assign, flag)

    for name in NAMES:
        now, source = model.get_parameter(name), copies[name]
        assert now is before[name]
        assert isinstance(now, nn.Parameter)
        assert not now.requires_grad
        assert (getattr(now, "tie", None) or records[name]) == records[name]
        stays_weight = held == "weight" or (assign and given != "plain")
        assert isinstance(now, tt.Weight) == stays_weight
        if device == "meta" and not assign:
            assert now.is_meta
            continue
        assert now.dtype == (torch.bfloat16 if assign else torch.float32)
        if not assign:
            assert _parts(now) == memory[name]
        if stays_weight:
            expected_scheme = source.scheme if assign and given != "plain" else scheme
            assert now.scheme == expected_scheme
            if given != "plain" and source.scheme == expected_scheme:
                assert all(torch.equal(now.parts[p], source.parts[p]) for p in source.parts)
                expected = _values(source).to(now.dtype) if row.id == "plain" else _values(source.to(now.dtype))
            else:
                expected = tt.Weight.encode(_values(source).to(now.dtype), expected_scheme).dequantize()
        else:
            expected = _values(source).to(now.dtype)
        assert torch.equal(_values(now), expected)
    assert [(tie.names, tie.objects) for tie in tt.find_ties(model)] == [(tie.names, tie.objects) for tie in ties]
    tt.check_ties(model)


@pytest.mark.parametrize("flag", [False, True], ids=["flag-off", "flag-on"])
def test_plain_into_plain_is_torchs(flag):
    model = _model("plain", None, "cpu", False)
    weight, given = model["emb"].weight, _given("plain", None, False)
    _load(model, given, False, flag)
    assert model["emb"].weight is weight
    _load(model, given, True, flag)
    assert (model["emb"].weight is weight) == flag
    assert model["emb"].weight.dtype == torch.bfloat16


@pytest.mark.parametrize("assign", [False, True])
@pytest.mark.parametrize("flag", [False, True])
def test_a_wrong_shape_is_torchs_error(assign, flag):
    model = _model("weight", tt.int8(), "cpu", False)
    before = _values(model["emb"].weight)
    with pytest.raises(RuntimeError, match=r"size mismatch for emb\.weight"):
        _load(model, {"emb.weight": torch.ones(3, 3), "head.weight": torch.ones(16, 64)}, assign, flag)
    assert torch.equal(_values(model["emb"].weight), before)
    assert isinstance(model["emb"].weight, tt.Weight)


@pytest.mark.parametrize("assign", [False, True])
@pytest.mark.parametrize("flag", [False, True])
@pytest.mark.parametrize("bad", ["missing", "nan"])
def test_bad_input_names_the_parameter_and_keeps_the_weight(assign, flag, bad):
    model = _model("weight", tt.int8(), "cpu", False)
    weight = model["emb"].weight
    before = _values(weight)
    state = _given("plain", None, False)
    if bad == "missing":
        del state["emb.weight"]
    else:
        state["emb.weight"][0, 0] = float("nan")
    with pytest.raises(RuntimeError, match=r"emb\.weight"):
        _load(model, state, assign, flag)
    assert model["emb"].weight is weight
    assert torch.equal(_values(weight), before)


@pytest.mark.parametrize("flag", [False, True])
def test_integers_are_not_values(flag):
    model = _model("weight", tt.int8(), "cpu", False)
    state = {name: torch.ones(16, 64, dtype=torch.int8) for name in NAMES}
    with pytest.raises(RuntimeError, match=r"gives torch\.int8, the module holds"):
        _load(model, state, True, flag)


def test_a_held_graph_is_an_error_not_a_new_parameter():
    model = _model("weight", tt.int8(), "cpu", False)
    weight = model["head"].weight.requires_grad_()
    loss = model["head"](torch.ones(2, 64)).sum()
    with pytest.raises(RuntimeError, match=r'"head\.weight", an exception occurred : .*held by a live graph'):
        model.load_state_dict(_given("plain", None, False), assign=True)
    assert model["head"].weight is weight
    loss.backward()


@pytest.mark.parametrize("kind", ["sgd", "adamw"])
def test_the_optimizer_built_before_still_trains(kind):
    model = nn.Sequential(nn.Linear(64, 64, bias=False))
    optimizer = {"sgd": torch.optim.SGD, "adamw": torch.optim.AdamW}[kind](model.parameters(), lr=0.1)
    tt.quantize(model, "int8", optimizer=optimizer)
    model.load_state_dict({"0.weight": torch.randn(64, 64)}, assign=True)
    tt.check_optimizer(model, optimizer)
    before = _values(model[0].weight)
    model(torch.ones(2, 64)).sum().backward()
    optimizer.step()
    assert not torch.equal(_values(model[0].weight), before)


def test_hooks_stay():
    model = tt.quantize(nn.Sequential(nn.Linear(8, 8, bias=False)), "int8")
    fired = []
    model[0].weight.register_post_accumulate_grad_hook(lambda p: fired.append(p is model[0].weight))
    model.load_state_dict({"0.weight": torch.randn(8, 8)}, assign=True)
    model(torch.ones(2, 8)).sum().backward()
    assert fired == [True]


@pytest.mark.parametrize("flag", [False, True])
@pytest.mark.parametrize("assign", [False, True])
def test_six_names(assign, flag):
    model = nn.ModuleDict({f"h{i}": nn.Linear(8, 8, bias=False) for i in range(6)})
    for i in range(1, 6):
        model[f"h{i}"].weight = model["h0"].weight
    weight = model["h0"].weight
    tt.quantize(model, "int8")
    values = torch.randn(8, 8)
    _load(model, {f"h{i}.weight": values for i in range(6)}, assign, flag)
    assert all(model[name].weight is weight for name in model)
    assert torch.equal(_values(weight), tt.Weight.encode(values, tt.int8()).dequantize())
    tt.check_ties(model)


def _with_view():
    model = nn.ModuleDict({"emb": nn.Embedding(16, 64), "down": nn.Linear(16, 64, bias=False)})
    model["down"].weight = nn.Parameter(model["emb"].weight.data.t())
    return tt.quantize(model, {"emb.weight": "int8"})


@pytest.mark.parametrize("assign", [False, True])
def test_a_view_tie_is_written_in_place(assign):
    model = _with_view()
    values = torch.randn(16, 64)
    model.load_state_dict({"emb.weight": values, "down.weight": values.t()}, assign=assign)
    tt.check_ties(model)
    assert torch.equal(_values(model["down"].weight), tt.Weight.encode(values, tt.int8()).dequantize().t())


def test_a_view_tie_that_assign_would_break_is_an_error():
    model = _with_view()
    values = torch.randn(16, 64).bfloat16()
    with pytest.raises(RuntimeError, match=r"is torch\.float32 on cpu and shares memory .* assigning torch\.bfloat16"):
        model.load_state_dict({"emb.weight": values, "down.weight": values.t()}, assign=True)
    tt.check_ties(model)


def test_the_models_own_state_dict_goes_back():
    model = tt.quantize(nn.Sequential(nn.Linear(8, 8)), "int8")
    before = _values(model[0].weight)
    for assign in (False, True):
        model.load_state_dict(model.state_dict(), assign=assign)
        model.load_state_dict(model.state_dict(keep_vars=True), assign=assign)
    assert torch.equal(_values(model[0].weight), before)


def test_the_callers_state_dict_is_not_changed():
    model = tt.quantize(nn.Sequential(nn.Linear(8, 8, bias=False)), "int8")
    state = {"0.weight": torch.randn(8, 8)}
    given = state["0.weight"]
    model.load_state_dict(state, assign=True)
    assert state == {"0.weight": given}


@pytest.mark.parametrize("is_swapping", [False, True])
def test_under_the_flag_the_hook_leaves_it_to_module_load(is_swapping):
    """With the flag on torch itself calls ``Tensor.module_load``: the hook changes neither state dict nor values."""
    model = tt.quantize(nn.Linear(8, 8, bias=False), "int8")
    given, before, errors = torch.randn(8, 8), _values(model.weight), []
    state, was = {"weight": given}, torch.__future__.get_swap_module_params_on_conversion()
    torch.__future__.set_swap_module_params_on_conversion(is_swapping)
    try:
        keep_policy(model, state, "", {"assign_to_params_buffers": True}, True, [], [], errors)
    finally:
        torch.__future__.set_swap_module_params_on_conversion(was)
    assert errors == []
    assert state["weight"] is (given if is_swapping else model.weight)
    assert torch.equal(_values(model.weight), before) is is_swapping


def test_buffers_follow_the_policy():
    module = nn.Module()
    module.register_buffer("table", torch.randn(8, 8))
    module.scale = nn.Parameter(module.table)
    tt.quantize(module, {"scale": tt.Plain()})
    buffer = module.table
    assert isinstance(buffer, tt.Weight)
    module.load_state_dict({"table": torch.ones(8, 8), "scale": torch.ones(8, 8)}, assign=True)
    assert module.table is buffer
    assert isinstance(buffer, tt.Weight)
    assert torch.equal(_values(buffer), torch.ones(8, 8))


@pytest.mark.parametrize("swap", [False, True])
def test_assigning_to_a_weight_under_other_tensors_reaches_them_too(swap):
    """A transposed alias lies over the same parts: the given values go into them, or the load says why not."""
    model = nn.Module()
    model.one = nn.Parameter(torch.randn(4, 8))
    model.two = nn.Parameter(model.one.data.t())
    tt.quantize(model, {"one": "int8"})
    before, held = tt.find_ties(model), (model.one, model.two)
    given = {"one": torch.ones(4, 8), "two": torch.ones(8, 4)}
    torch.__future__.set_swap_module_params_on_conversion(swap)
    try:
        model.load_state_dict(given, assign=True)
        with pytest.raises(RuntimeError, match="shares memory"):
            model.load_state_dict({name: value.double() for name, value in given.items()}, assign=True)
    finally:
        torch.__future__.set_swap_module_params_on_conversion(False)
    assert model.one is held[0]
    assert model.two is held[1]
    assert tt.find_ties(model) == before
    torch.testing.assert_close(model.two.dequantize(), torch.ones(8, 4), atol=0.01, rtol=0)
