"""``tie``, ``untie``, and ``check_ties`` against the record."""

import copy
import dataclasses

import pytest
import torch
from torch import nn

import torchtether as tt
from tests.ties.models import fused, six_way, transposed, two_way
from torchtether.ties.edit import tie, untie
from torchtether.ties.records import check_ties, find_ties, recorded_ties


def _pair():
    return nn.ModuleDict({"emb": nn.Embedding(6, 4), "head": nn.Linear(4, 6, bias=False), "down": nn.Linear(6, 4)})


def _wrapped(model, *names):
    """The model with a Weight under each name that carries the live tie."""
    (live,) = find_ties(model)
    for name in names:
        path, _, leaf = name.rpartition(".")
        module = model.get_submodule(path)
        module._parameters[leaf] = nn.Parameter(tt.Weight.encode(module._parameters[leaf], tt.Plain(), tie=live))
    return model


def test_tie_makes_one_object():
    model = _pair()
    weight = model["emb"].weight
    tie(model, "emb.weight", "head.weight")
    assert model["head"].weight is weight
    assert str(*find_ties(model)) == "emb.weight = head.weight"
    tie(model, "emb.weight", "head.weight")


def test_tie_transposed_and_by_rows():
    model = _pair()
    tie(model, "emb.weight", "down.weight", transpose=True)
    model["emb"].weight.data[1, 2] = 7.0
    assert model["down"].weight[2, 1] == 7.0
    assert model["down"].weight.is_leaf
    model = fused()
    untie(model, "k")
    assert find_ties(model)[0].names == ("qkv", "q", "v")
    tie(model, "qkv", "k", rows=slice(4, 8))
    assert find_ties(model) == find_ties(fused())


def test_a_frozen_alias_stays_frozen():
    model = _pair()
    model["down"].weight.requires_grad_(False)
    tie(model, "emb.weight", "down.weight", transpose=True)
    assert not model["down"].weight.requires_grad


def test_untie_gives_equal_values_and_own_memory():
    model = two_way()
    owner = model["emb"].weight
    untie(model, "head.weight")
    assert model["emb"].weight is owner
    assert isinstance(model["head"].weight, nn.Parameter)
    assert torch.equal(model["head"].weight, owner)
    assert find_ties(model) == ()
    untie(model, "head.weight")
    model = two_way()
    untie(model, "emb.weight")
    assert find_ties(model) == ()


def test_untie_a_view_keeps_the_rest():
    model = transposed()
    model.b.requires_grad_(False)
    untie(model, "b")
    assert torch.equal(model.b, model.a.t())
    assert not model.b.requires_grad
    assert find_ties(model) == ()


def test_untie_a_weight_drops_its_record():
    model = _wrapped(two_way(), "emb.weight")
    model["head"].weight = model["emb"].weight
    check_ties(model)
    untie(model, "head.weight")
    assert model["head"].weight.tie is None
    assert model["emb"].weight.tie is None
    assert isinstance(model["head"].weight, tt.Weight)


@pytest.mark.parametrize("name", ["head.weight", "emb.weight"])
@pytest.mark.parametrize("scheme", [tt.int8(), tt.Plain()], ids=str)
def test_untie_makes_a_model_whose_head_was_replaced_fit_to_be_saved(name, scheme, tmp_path):
    model = two_way()
    tt.quantize(model, {"emb.weight": scheme})
    model.head = nn.Linear(model.head.in_features, model.head.out_features, bias=False)
    with pytest.raises(tt.TieError, match=r"head.weight: its record says that it is tied to emb.weight.*tt\.untie"):
        tt.save(model, tmp_path / "x")
    values = model.head.weight.detach().clone()
    untie(model, name)
    check_ties(model)
    tt.save(model, tmp_path / "x")
    assert torch.equal(tt.open(tmp_path / "x")["head.weight"], values)


def test_untie_leaves_the_others_of_a_record_tied():
    model = nn.ModuleList(nn.Linear(4, 4, bias=False) for _ in range(3))
    model[1].weight = model[2].weight = model[0].weight
    tt.quantize(model, {"0.weight": tt.int8()})
    for name, rest in (("2.weight", ("0.weight", "1.weight")), ("0.weight", None)):
        model.get_submodule(name[0]).weight = nn.Parameter(torch.randn(4, 4))
        untie(model, name)
        check_ties(model)
        assert [tie.names for tie in recorded_ties(model)] == ([rest] if rest else [])


def test_tie_keeps_the_records():
    model = _wrapped(two_way(), "emb.weight")
    model["head"].weight = model["emb"].weight
    model["third"] = nn.Linear(4, 6)
    tie(model, "emb.weight", "third.weight")
    assert model["emb"].weight.tie.names == ("emb.weight", "head.weight", "third.weight")
    check_ties(model)


def test_an_lstm_uses_its_new_weight():
    model = nn.LSTM(4, 1, bias=False)
    tie(model, "weight_ih_l0", "weight_ih_l0")
    model.extra = nn.Parameter(torch.zeros(4, 4))
    tie(model, "extra", "weight_ih_l0")
    assert model._flat_weights[0] is model.extra
    output, _ = model(torch.ones(2, 4))
    assert output.shape == (2, 1)


def test_a_buffer_may_be_the_parameter_not_the_reverse():
    model = nn.Module()
    model.p = nn.Parameter(torch.ones(3))
    model.register_buffer("b", torch.zeros(3))
    with pytest.raises(tt.TieError, match=r"^p: is a parameter, b is a buffer\. Call tt\.tie\(model, 'p', 'b'\)\.$"):
        tie(model, "b", "p")
    tie(model, "p", "b")
    assert model.b is model.p
    assert [name for name, _ in model.named_parameters()] == ["p"]


@pytest.mark.parametrize(
    ("call", "text"),
    [
        (lambda m: tie(m, "emb.wieght", "head.weight"), r"^emb\.wieght: is not in the model\. .*'emb\.weight'"),
        (lambda m: tie(m, "emb.weight", "__class__"), r"^__class__: is not in the model"),
        (
            lambda m: tie(m, "emb.weight", "down.weight"),
            r"^down\.weight: has shape \(4, 6\), the tensor from emb\.weight has \(6, 4\)",
        ),
        (lambda m: tie(m.double(), "emb.weight", "x"), r"^x: has dtype torch\.float32, .* torch\.float64"),
        (lambda m: untie(m, "nothing"), r"^nothing: is not in the model"),
    ],
)
def test_what_cannot_be_tied(call, text):
    model = _pair()
    before = {name: id(p) for name, p in model.named_parameters()}
    double, model.double = (
        model.double,
        lambda: (double(), model.register_parameter("x", nn.Parameter(torch.ones(6, 4))))[0],
    )
    with pytest.raises(tt.TieError, match=text) as caught:
        call(model)
    assert "\n" not in str(caught.value)
    assert {name: id(p) for name, p in model.named_parameters() if name != "x"} == before


def test_a_shared_module_cannot_be_tied_by_one_name():
    block = nn.Linear(4, 4)
    model = nn.Sequential(block, block, nn.Linear(4, 4))
    with pytest.raises(tt.TieError, match=r"^0\.weight: its module is registered as '1' too"):
        untie(model, "0.weight")


# -- the record ---------------------------------------------------------------------------------------------------


def test_records_of_weights_are_checked():
    model = _wrapped(two_way(), "emb.weight")
    with pytest.raises(tt.TieError, match=r"^head\.weight: is another tensor over .* of emb\.weight, .* same object"):
        check_ties(model)
    model["head"].weight = nn.Parameter(torch.ones(6, 4))
    with pytest.raises(
        tt.TieError,
        match=r"^head\.weight: is not tied to emb\.weight.* tt\.tie.* To forget .* tt\.untie\(model, 'head\.weight'\)",
    ):
        check_ties(model)
    apart = copy.deepcopy(model)
    tt.untie(apart, "head.weight")
    check_ties(apart)
    model["head"].weight = model["emb"].weight
    check_ties(model)
    assert [str(record) for record in recorded_ties(model)] == ["emb.weight = head.weight"]


def test_a_deepcopy_passes_and_a_split_copy_fails():
    model = _wrapped(two_way(), "emb.weight")
    model["head"].weight = model["emb"].weight
    check_ties(copy.deepcopy(model))
    model["head"].weight = nn.Parameter(model["emb"].weight.detach().clone())
    with pytest.raises(tt.TieError, match=r"^head\.weight: is not tied"):
        check_ties(model)


def test_a_module_around_or_inside_may_have_other_names():
    """While the tie is live the record need not have its names; once it is gone, the record says so."""
    model = _wrapped(two_way(), "emb.weight")
    model["head"].weight = model["emb"].weight
    outer = nn.ModuleDict({"inner": model, "other": nn.Linear(2, 2)})
    check_ties(outer)
    assert recorded_ties(outer) == ()
    tt.tie(outer, "inner.emb.weight", "inner.head.weight")  # renews the record
    assert [str(record) for record in recorded_ties(outer)] == ["inner.emb.weight = inner.head.weight"]
    check_ties(outer)
    check_ties(model)
    for part in (nn.ModuleDict({"emb": model["emb"]}), nn.ModuleList([model["emb"], model["emb"], model["head"]])):
        with pytest.raises(tt.TieError, match=r"^inner\.emb\.weight: is not in the model, but in a tie record"):
            check_ties(part)
    model["head"].weight = nn.Parameter(model["head"].weight.detach().clone())
    with pytest.raises(tt.TieError, match=r"^inner\.emb\.weight: is not in the model, but in a tie record"):
        check_ties(model)


@pytest.mark.parametrize("layers", [(1, 3), (1, 2), (2, 3, 5)], ids=str)
@pytest.mark.parametrize("scheme", [tt.int8(), tt.Plain()], ids=str)
def test_layers_that_follow_a_deleted_one_have_new_names(layers, scheme, tmp_path):
    """The names of the record exist, and are those of other layers."""
    model = nn.Sequential(*(nn.Linear(4, 4, bias=False) for _ in range(6)))
    for i in layers:
        model[i].weight = model[layers[0]].weight
    tt.quantize(model, {"*": scheme})
    del model[0]
    check_ties(model)
    tt.save(model, tmp_path / "x")
    names = tuple(f"{i - 1}.weight" for i in layers)
    with tt.open(tmp_path / "x") as stored:
        assert [tie.names for tie in stored.ties] == [names]
        for name, value in model.state_dict().items():
            assert torch.equal(stored[name].dequantize(), value.dequantize())


def test_an_alias_that_the_record_does_not_know():
    model = _wrapped(two_way(), "emb.weight")
    model["head"].weight = model["emb"].weight
    model["third"] = nn.Linear(4, 6)
    model["third"].weight = model["emb"].weight
    with pytest.raises(tt.TieError, match=r"^third\.weight: is tied to emb\.weight, but the record has emb"):
        check_ties(model)


def test_expected_is_all_there_is():
    model = six_way()
    check_ties(model, find_ties(model))
    with pytest.raises(tt.TieError, match=r"^head1\.bias: is tied to head0\.bias, but no record has this tie"):
        check_ties(model, find_ties(model)[:1])
    with pytest.raises(
        tt.TieError, match=r"^head9\.weight: is not in the model, .* The nearest name is 'head\d\.weight'"
    ):
        check_ties(model, [tt.Tie(("head0.weight", "head9.weight"))])


def test_the_owner_of_a_record_may_be_another_one():
    check_ties(two_way(), [tt.Tie(("head.weight", "emb.weight"))])


def test_geometry_and_objects_are_compared():
    with pytest.raises(
        tt.TieError, match=r"^b: is a view \(size \(4, 6\), stride \(1, 4\), offset 0\) of a, .* same object"
    ):
        check_ties(transposed(), [tt.Tie(("a", "b"))])
    (live,) = find_ties(fused())
    moved = dataclasses.replace(live.views[2], offset=12)
    with pytest.raises(
        tt.TieError, match=r"^k: is a view .* offset 16\) of qkv, but recorded as a view .* offset 12\)"
    ):
        check_ties(fused(), [dataclasses.replace(live, views=(*live.views[:2], moved, live.views[3]))])
    with pytest.raises(tt.TieError, match=r"^head\.weight: is the same object as emb\.weight, .* another tensor"):
        check_ties(two_way(), [tt.Tie(("emb.weight", "head.weight"), objects=(True, False))])


def test_a_record_outlives_a_dtype_conversion():
    before = find_ties(fused())
    model = fused()
    for name in "qkv":
        model._parameters.pop(name)
    model.qkv = nn.Parameter(model.qkv.data.bfloat16())
    for i, name in enumerate("qkv"):
        model.register_parameter(name, nn.Parameter(model.qkv.data[4 * i : 4 * i + 4]))
    check_ties(model, before)


def test_disagreeing_records_are_named():
    model = _wrapped(two_way(), "emb.weight")
    model["head"].weight = model["emb"].weight
    model["other"] = nn.Linear(2, 2)
    wrong = tt.Tie(("head.weight", "other.weight"))
    model["other"].weight = nn.Parameter(tt.Weight.encode(torch.ones(2, 2), tt.Plain(), tie=wrong))
    with pytest.raises(tt.TieError, match=r"^head\.weight: two records disagree"):
        check_ties(model)


@pytest.mark.parametrize(
    ("shape", "options", "text"),
    [
        ((), {"rows": slice(0, 1)}, r"^a: has shape \(\), of which"),
        ((4, 2), {"rows": slice(None, None, -1)}, r"^a: has shape \(4, 2\), of which rows=slice"),
        ((2, 2, 2), {"transpose": True}, r"^a: has 3 dimensions, transpose= takes two"),
    ],
)
def test_what_no_view_can_be_taken_of(shape, options, text):
    model = nn.ParameterDict({"a": torch.zeros(shape), "b": torch.zeros(shape)})
    with pytest.raises(tt.TieError, match=text):
        tt.tie(model, "a", "b", **options)
    assert model["a"] is not model["b"]
    assert tt.find_ties(model) == ()


def test_a_tensor_of_no_dimension_is_its_own_transpose():
    model = nn.ParameterDict({"a": torch.zeros(()), "b": torch.ones(())})
    tt.tie(model, "a", "b", transpose=True)
    assert len(tt.find_ties(model)) == 1


@pytest.mark.parametrize("change", [lambda m: tt.tie(m, "0.weight", "1.weight"), lambda m: tt.untie(m, "2.weight")])
def test_lazy_tensors_are_refused_by_name(change):
    model = nn.Sequential(*(nn.LazyLinear(4) for _ in range(4)))
    model[3].weight = model[2].weight
    with pytest.raises(tt.TieError, match=r"^[02]\.weight: is lazy and has no shape yet\. Run one forward first\.$"):
        change(model)
    assert model[3].weight is model[2].weight
