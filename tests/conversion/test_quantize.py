"""quantize and dequantize: in place, once per tied group, all or nothing."""

import copy
import gc
import io
import pickle
from dataclasses import dataclass

import pytest
import torch
from torch import nn

import torchtether as tt
from tests.catalog import few_schemes, rand
from torchtether.schemes import SCHEMES
from torchtether.ties.names import named_tensors


def _model(device="cpu"):
    """A tied pair, a view of it, a plain layer, a norm with buffers."""
    with torch.device(device):
        model = nn.ModuleDict(
            {
                "emb": nn.Embedding(12, 64),
                "mid": nn.Linear(64, 64),
                "norm": nn.BatchNorm1d(64),
                "head": nn.Linear(64, 12, bias=False),
                "down": nn.Linear(12, 64),
            }
        )
    model["head"].weight = model["emb"].weight
    model["down"].weight = nn.Parameter(model["emb"].weight.data.t())
    return model


def _ids(model):
    return {name: id(tensor) for name, tensor in named_tensors(model).items()}


def _values(model):
    """Everything that a failed call must leave: ids, types, and bits."""
    return {
        name: (
            id(t),
            type(t),
            t.requires_grad,
            t.detach().dequantize() if isinstance(t, tt.Weight) else t.detach().clone(),
        )
        for name, t in named_tensors(model).items()
    }


def _same(one, two):
    return one.keys() == two.keys() and all(
        a[:3] == b[:3] and torch.equal(a[3], b[3]) for a, b in zip(one.values(), two.values(), strict=True)
    )


@few_schemes
def test_a_tied_group_is_one_weight(row):
    model = _model()
    ids = _ids(model)
    values = model["emb"].weight.detach().clone()
    assert tt.quantize(model, {"emb.weight": row.scheme}) is model
    assert _ids(model) == ids
    weight = model["emb"].weight
    assert isinstance(weight, tt.Weight)
    assert isinstance(weight, nn.Parameter)
    assert model["head"].weight is weight
    assert torch.equal(weight.dequantize(), tt.Weight.encode(values, row.scheme).dequantize())
    down = model["down"].weight
    assert isinstance(down, tt.Weight)
    assert torch.equal(down.detach().dequantize(), weight.detach().dequantize().t())
    assert [p.data_ptr() for p in down.parts.values()] == [p.data_ptr() for p in weight.parts.values()]
    assert weight.tie == down.tie == tt.find_ties(model)[0]
    assert weight.tie.names == ("emb.weight", "head.weight", "down.weight")
    tt.check_ties(model)


@few_schemes
def test_embedding_and_head_use_the_same_storage(row):
    model = tt.quantize(_model(), {"emb.weight": row.scheme})
    rows = torch.tensor([3, 0, 3])
    values = model["emb"].weight.dequantize()
    with torch.no_grad():
        hidden = model["emb"](rows)
        assert torch.equal(hidden, values[rows])
        assert torch.allclose(model["head"](hidden), hidden @ values.t(), atol=1e-4)


@few_schemes
def test_dequantize_gives_the_values_and_the_ties_back(row):
    model = _model()
    ids, ties = _ids(model), tt.find_ties(model)
    tt.quantize(model, {"*.weight": row.scheme, "norm.*": None} if row.id != "plain" else {"*": row.scheme})
    decoded = {
        n: t.detach().dequantize() if isinstance(t, tt.Weight) else t.detach() for n, t in named_tensors(model).items()
    }
    assert tt.dequantize(model) is model
    assert _ids(model) == ids
    assert tt.find_ties(model) == ties
    for name, tensor in named_tensors(model).items():
        assert not isinstance(tensor, tt.Weight)
        assert torch.equal(tensor, decoded[name])


def test_plain_wraps_without_copying():
    model = _model()
    before = model["emb"].weight.data_ptr()
    tt.quantize(model, {"emb.weight": tt.Plain()})
    assert model["emb"].weight.parts["tensor"].data_ptr() == before
    state = {key: value.cpu() for key, value in model.state_dict().items()}
    assert state["head.weight"].tie.owner == "emb.weight"
    assert pickle.loads(pickle.dumps(state["head.weight"])).tie == model["emb"].weight.tie
    tt.dequantize(model)
    assert model["emb"].weight.data_ptr() == before


def test_a_slice_of_a_plain_group_is_wrapped_in_place():
    model = nn.Module()
    model.qkv = nn.Parameter(torch.randn(12, 4))
    model.q = nn.Parameter(model.qkv.data[:4])
    tt.quantize(model, {"q": tt.Plain()})
    with torch.no_grad():
        model.qkv.zero_()
    assert not model.q.dequantize().any()
    assert model.q.tie.owner == "qkv"
    tt.check_ties(model)


def test_the_same_scheme_is_left_alone_and_another_one_encodes_again():
    model = tt.quantize(_model(), "int8")
    parts = {name: t.parts["qdata"].data_ptr() for name, t in named_tensors(model).items() if isinstance(t, tt.Weight)}
    tt.quantize(model, "int8")
    assert parts == {
        n: t.parts["qdata"].data_ptr() for n, t in named_tensors(model).items() if isinstance(t, tt.Weight)
    }
    decoded = model["mid"].weight.detach().dequantize()
    tt.quantize(model, {"mid.weight": "fp8"})
    assert torch.equal(model["mid"].weight.detach().dequantize(), tt.Weight.encode(decoded, tt.fp8()).dequantize())
    assert model["emb"].weight.scheme == tt.int8()


def test_a_tied_group_is_encoded_again_in_another_scheme():
    model = tt.quantize(_model(), "int8")
    ids = _ids(model)
    tt.quantize(model, "fp8")
    assert _ids(model) == ids
    assert model["down"].weight.scheme == tt.fp8()
    tt.check_ties(model)


@few_schemes
def test_on_meta(row):
    model = tt.quantize(_model("meta"), {"emb.weight": row.scheme})
    assert model["emb"].weight.is_meta
    assert model["head"].weight is model["emb"].weight
    assert model["emb"].weight.scheme == row.scheme
    tt.check_ties(model)
    assert not isinstance(tt.dequantize(model)["emb"].weight, tt.Weight)
    assert model["emb"].weight.is_meta


def test_requires_grad_grads_hooks_and_attributes_stay():
    model = _model()
    weight = model["mid"].weight
    model["emb"].weight.requires_grad_(False)
    fired = []
    weight.register_hook(lambda grad: fired.append("hook"))
    weight.register_post_accumulate_grad_hook(lambda param: fired.append("post"))
    weight.note = "mine"
    weight.grad = torch.ones(64, 64)
    for change in (lambda: tt.quantize(model, "int8"), lambda: tt.dequantize(model)):
        change()
        assert weight is model["mid"].weight
        assert weight.requires_grad
        assert not model["emb"].weight.requires_grad
        assert weight.note == "mine"
        assert torch.equal(weight.grad, torch.ones(64, 64))
        fired.clear()
        model["mid"](torch.ones(2, 64)).sum().backward()
        assert sorted(fired) == ["hook", "post"]
        weight.grad = torch.ones(64, 64)


@pytest.mark.parametrize("kind", ["sgd", "adamw"])
def test_an_optimizer_goes_on(kind):
    model = _model()
    make = {"sgd": lambda p: torch.optim.SGD(p, 0.1, momentum=0.9), "adamw": lambda p: torch.optim.AdamW(p, 0.1)}[kind]
    optimizer = make(model.parameters())

    def step():
        optimizer.zero_grad()
        model["head"](model["mid"](model["emb"](torch.arange(12)))).square().sum().backward()
        optimizer.step()

    step()
    tt.quantize(model, "int8", optimizer=optimizer)
    tt.check_optimizer(model, optimizer)
    before = model["mid"].weight.detach().dequantize()
    step()
    assert isinstance(model["mid"].weight, tt.Weight)
    assert not torch.equal(model["mid"].weight.detach().dequantize(), before)
    tt.dequantize(model, optimizer=optimizer)
    before = model["mid"].weight.detach().clone()
    step()
    assert not torch.equal(model["mid"].weight, before)


def test_an_optimizer_of_another_model_is_refused():
    model = _model()
    before = _values(model)
    with pytest.raises(tt.OptimizerError):
        tt.quantize(model, "int8", optimizer=torch.optim.SGD(_model().parameters(), 0.1))
    assert _same(before, _values(model))


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("name", ["emb.weight", "mid.weight"])
def test_values_that_are_not_finite_change_nothing(bad, name):
    model = _model()
    with torch.no_grad():
        model.get_parameter(name)[-1, -1] = bad
    ids = _ids(model)
    with pytest.raises(tt.SchemeError, match=rf"^{name.replace('.', '[.]')}: .* not finite .*rule of None\.$"):
        tt.quantize(model, "int8")
    assert _ids(model) == ids
    assert not any(isinstance(t, tt.Weight) for t in named_tensors(model).values())


def test_doubles_that_float32_cannot_hold_change_nothing():
    model = nn.Linear(4, 4).double()
    with torch.no_grad():
        model.weight[0, 0] = 1e300
    with pytest.raises(tt.SchemeError, match=r"^weight: 1 or more of its 16 values are not finite in float32"):
        tt.quantize(model, "int8")
    assert type(model.weight) is nn.Parameter


@pytest.mark.parametrize(
    "scheme",
    [
        tt.Affine(scale_dtype=torch.float16),
        tt.Affine(bits=1, block=(1, 8), scale_dtype=torch.float16),
        tt.ScaledFloat(element="e4m3", block=(1, 16), scale_dtype=torch.float8_e4m3fn),
        tt.int8(),
    ],
    ids=str,
)
def test_values_whose_scale_does_not_fit_change_nothing(scheme):
    """They are finite, and only their encoding tells."""
    model = nn.Sequential(nn.Linear(16, 4), nn.Linear(16, 4))
    with torch.no_grad():
        model[1].weight[2, 3] = 3.3e38
    with pytest.raises(tt.SchemeError, match=r"^1\.weight: "):
        tt.quantize(model, scheme)
    assert not any(isinstance(t, tt.Weight) for t in named_tensors(model).values())


@pytest.mark.parametrize("verb", ["quantize", "dequantize"])
def test_a_live_graph_is_refused_and_nothing_changes(verb):
    model = _model()
    call = {"quantize": lambda: tt.quantize(model, "int8"), "dequantize": lambda: tt.dequantize(model)}[verb]
    if verb == "dequantize":
        tt.quantize(model, "int8")
    before = _values(model)
    loss = model["mid"](torch.ones(2, 64, requires_grad=True)).sum()
    with pytest.raises(tt.ConversionError, match=r"mid\.weight: held by"):
        call()
    assert _same(before, _values(model))
    loss.backward()
    call()


@dataclass(frozen=True)
class _Breaks(tt.Scheme):
    """A scheme whose encoding fails for one shape, after every check has passed."""

    kind = "test-breaks"

    def layout(self, shape):
        return tt.Plain().layout(shape)

    def encode(self, values):
        if values.shape[0] == 5:
            raise MemoryError("no room")
        return tt.Plain().encode(values.clone())

    def decode(self, parts, shape, dtype):
        return parts["tensor"].to(dtype, copy=True)


SCHEMES.pop("test-breaks")  # the catalog has a row for every kind that is registered


def test_atomic_full_takes_everything_back():
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 5))
    before = _values(model)
    with pytest.raises(MemoryError, match="no room"):
        tt.quantize(model, _Breaks(), atomic="full")
    assert _same(before, _values(model))


def test_two_weights_over_some_of_the_parts_are_refused():
    model = nn.Module()
    model.a = nn.Parameter(tt.Weight.encode(torch.randn(8, 4), tt.int8()))
    model.b = nn.Parameter(model.a.detach()[2:4])
    before = _values(model)
    with pytest.raises(tt.TieError, match=r"^b: shares only a part of its memory with a"):
        tt.dequantize(model)
    assert _same(before, _values(model))


def test_copies_and_pickles_of_a_quantized_model():
    model = tt.quantize(_model(), "int8")
    stream = io.BytesIO()
    torch.save(model, stream)
    stream.seek(0)
    for other in (copy.deepcopy(model), torch.load(stream, weights_only=False)):
        tt.check_ties(other)
        assert _ids(other).keys() == _ids(model).keys()
        assert torch.equal(other["mid"].weight.dequantize(), model["mid"].weight.detach().dequantize())
        assert len(other["mid"]._load_state_dict_pre_hooks) == 1
    pickle.loads(pickle.dumps(model["mid"]))


def test_the_hook_is_added_once():
    model = _model()
    for _ in range(3):
        tt.quantize(model, "int8")
        tt.dequantize(model)
    assert [len(model[name]._load_state_dict_pre_hooks) for name in model] == [1, 1, 0, 1, 1]


def test_old_contents_are_freed_one_by_one():
    model = nn.Sequential(*(nn.Linear(32, 32, bias=False) for _ in range(5)))
    alive = []
    encode = tt.Weight.encode.__func__

    def counting(cls, values, *args, **kwargs):
        gc.collect()
        floats = {t.untyped_storage()._cdata for t in gc.get_objects() if type(t) in (torch.Tensor, nn.Parameter)
                  and t.dtype == torch.float32 and t.shape == (32, 32)}  # fmt: skip
        alive.append(len(floats))
        return encode(cls, values, *args, **kwargs)

    tt.Weight.encode = classmethod(counting)
    try:
        tt.quantize(model, "int8")
    finally:
        tt.Weight.encode = classmethod(encode)
    assert alive == [5, 4, 3, 2, 1]


def test_a_buffer_tied_to_a_parameter_and_six_names():
    model = nn.ModuleDict({f"h{i}": nn.Linear(8, 8, bias=False) for i in range(6)})
    for i in range(1, 6):
        model[f"h{i}"].weight = model["h0"].weight
    model["h0"].register_buffer("cache", model["h0"].weight, persistent=False)
    weight = model["h0"].weight
    tt.quantize(model, "int8")
    assert all(model[name].weight is weight for name in model)
    assert model["h0"].cache is weight
    assert weight.tie.names == (*(f"h{i}.weight" for i in range(6)), "h0.cache")
    tt.check_ties(model)


def test_an_lstm_and_a_custom_module():
    model = nn.LSTM(4, 4)
    tt.quantize(model, {"weight_*": tt.Plain()})
    assert isinstance(model.weight_ih_l0, tt.Weight)
    tt.dequantize(model)
    model(torch.ones(2, 4))


@pytest.mark.parametrize("share", [lambda t: t, torch.Tensor.t], ids=["storage", "transposed"])
@pytest.mark.parametrize("first", [tt.int8(), tt.nf4(), tt.Plain()], ids=str)
@pytest.mark.parametrize("second", [tt.int8(), tt.int4(32), tt.Plain()], ids=str)
def test_quantizing_again_keeps_what_shares_memory_together(share, first, second):
    model = nn.Module()
    model.weight = nn.Parameter(rand(64, 64), requires_grad=False)
    model.alias = nn.Parameter(share(model.weight.data), requires_grad=False)
    ties = [tie.names for tie in tt.find_ties(model)]
    for scheme in (first, second):
        tt.quantize(model, {"weight": scheme})
        assert [tie.names for tie in tt.find_ties(model)] == ties == [("weight", "alias")]
        assert torch.equal(share(model.weight.dequantize()), model.alias.dequantize())
        assert model.weight.scheme == model.alias.scheme == scheme
    with torch.no_grad():
        model.weight.zero_()
    assert not model.alias.dequantize().any()


def test_codes_that_take_more_memory_than_values_warn():
    def model():
        return nn.Sequential(nn.Conv2d(64, 64, 3), nn.Conv1d(256, 256, 1), nn.Linear(256, 256)).bfloat16()

    words = r"quantization makes 0\.weight, 1\.weight larger \(0\.weight: 86,016 bytes instead of 73,728, in rows of 3"
    with pytest.warns(UserWarning, match=words):
        made = tt.quantize(model(), {"*.weight": "int8"})
    assert made[0].weight.nbytes == 86_016
    with pytest.warns(UserWarning, match=words):  # planned as codes, with masters beside them
        tt.quantize(model(), {"*.weight": "int8"}, master=torch.float32)
    tt.quantize(model(), {"*.weight": "nf4"})
    tt.quantize(model(), "int8")


def test_progress_is_told_of_what_is_encoded(capsys):
    model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.Linear(64, 32, bias=False), torch.nn.Linear(64, 8))
    model[2].weight, seen = model[0].weight, []
    tt.quantize(model, "int8", progress=lambda done, total: seen.append((done, total)))
    assert seen == [(64 * 64 * 4, 96 * 64 * 4), (96 * 64 * 4, 96 * 64 * 4)]
    tt.quantize(model, "int4", progress=True)
    assert "quantize: 100%" in capsys.readouterr().err
    with pytest.raises(tt.ArgumentError, match="progress"):
        tt.quantize(model, "int8", progress=7)
    assert model[1].weight.scheme == tt.int4()
