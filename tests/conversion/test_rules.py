"""Rules: from the user's arguments to one scheme for each tied group."""

import pytest
import torch
from torch import nn

import torchtether as tt
from torchtether.conversion.selection import schemes_for
from torchtether.ties.records import find_ties


def _model():
    model = nn.ModuleDict(
        {
            "emb": nn.Embedding(12, 8),
            "mid": nn.Linear(8, 8),
            "norm": nn.LayerNorm(8),
            "head": nn.Linear(8, 12, bias=False),
        }
    )
    model["head"].weight = model["emb"].weight
    return model


def _schemes(rules, model=None):
    model = model or _model()
    return schemes_for(model, rules, find_ties(model))


def test_none_asks_for_nothing():
    assert _schemes(None) == {}


def test_a_bare_scheme_means_every_linear_and_what_is_tied_to_it():
    assert _schemes("int8") == _schemes(tt.int8()) == {"mid.weight": tt.int8(), "emb.weight": tt.int8()}


def test_a_linear_by_itself():
    assert _schemes("nf4", nn.Linear(8, 8)) == {"weight": tt.nf4()}


@pytest.mark.parametrize("attribute", ["num_experts", "total_experts", "num_routed_experts", "n_shared_experts"])
def test_a_bare_scheme_means_experts_by_any_name_of_their_number(attribute):
    """LongCat-Flash counts its experts as ``total_experts``, Inkling those that it shares as ``n_shared_experts``."""
    sizes = {"up": (3, 16, 8), "one": (1, 8, 8), "two": (2, 8, 8), "matrix": (3, 8)}
    model = nn.ParameterDict({name: torch.zeros(size) for name, size in sizes.items()})
    model.is_of_experts, model.experts_per_token = True, 2
    setattr(model, attribute, 3)
    assert _schemes("int8", model) == {"up": tt.int8()}


def test_a_list_of_numbers_of_experts_is_no_number():
    model = nn.Sequential(nn.Linear(8, 8))
    model.num_experts = [3, 3]
    model.up = nn.Parameter(torch.zeros(3, 16, 8))
    assert _schemes("int8", model) == {"0.weight": tt.int8()}


def test_the_first_glob_wins():
    assert _schemes({"mid.*": None, "*.weight": "int8", "*": "fp8"}, nn.ModuleDict({"mid": nn.Linear(8, 8)})) == {}
    rules = {"norm.*": None, "*.bias": None, "mid.weight": "fp8", "*": tt.int4(8)}
    assert _schemes(rules) == {"mid.weight": tt.fp8(), "emb.weight": tt.int4(8)}


def test_one_name_of_a_tied_group_is_enough():
    assert _schemes({"head.weight": "int8"}) == {"emb.weight": tt.int8()}
    assert _schemes({"emb.weight": "int8", "head.*": "int8"}) == {"emb.weight": tt.int8()}


def test_a_glob_is_case_sensitive_and_matches_parameters_only():
    model = nn.BatchNorm1d(4)
    with pytest.raises(tt.RuleError, match=r"^running_mean: this rule matches no parameter"):
        _schemes({"running_mean": "int8"}, model)
    with pytest.raises(tt.RuleError, match=r"^MID\.weight: .* the nearest is 'mid\.weight'\. Correct or remove it\.$"):
        _schemes({"MID.weight": "int8"})


@pytest.mark.parametrize(
    ("rules", "text"),
    [
        ({"emb.wieght": "int8"}, r"^emb\.wieght: this rule matches no parameter, the nearest is 'emb\.weight'"),
        ("int9", r"^rules: unknown scheme 'int9', known are .* Did you mean 'int8'\?$"),
        ({"emb.weight": "int9"}, r"^emb\.weight: unknown scheme 'int9'"),
        ({"emb.weight": 8}, r"^emb\.weight: a scheme or its name is needed, got an int"),
        (8, r"^rules: a scheme or its name is needed, got an int\. Try 'int8', or tt\.int8\(\)\.$"),
        ("int4(32)", r"^rules: 'int4\(32\)' is text with options, .*\. Give tt\.int4\(32\)\.$"),
        ({"emb.weight": "fp8('row')"}, r"^emb\.weight: .* Give tt\.fp8\('row'\)\.$"),
        (
            {"emb.weight": "int8", "head.weight": "fp8"},
            r"^head\.weight: the rules give it fp8, and int8 to emb\.weight",
        ),
        ({"head.weight": None, "*.weight": "int8"}, r"^head\.weight: the rules give it no scheme, and int8 to emb"),
    ],
)
def test_rules_that_cannot_be_followed(rules, text):
    with pytest.raises(tt.RuleError, match=text) as caught:
        _schemes(rules)
    assert "\n" not in str(caught.value)


def test_linears_whose_weights_are_computed():
    layer = torch.nn.utils.parametrizations.weight_norm(torch.nn.Linear(64, 64))
    with pytest.raises(tt.RuleError, match=r"^0: the weight of every nn\.Linear is computed .*remove_parametrizations"):
        tt.quantize(torch.nn.Sequential(layer), "int8")
    torch.nn.utils.parametrize.remove_parametrizations(layer, "weight")
    assert isinstance(tt.quantize(torch.nn.Sequential(layer), "int8")[0].weight, tt.Weight)


def test_a_model_without_linears():
    with pytest.raises(tt.RuleError, match=r"^the model has no nn\.Linear"):
        _schemes("int8", nn.Sequential(nn.Embedding(4, 4)))


def test_a_scheme_that_does_not_fit_names_the_parameter():
    with pytest.raises(tt.SchemeError, match=r"^mid\.bias: "):
        _schemes({"mid.bias": tt.Affine(block=(4, 16))})


def test_what_cannot_become_a_weight():
    model = nn.Module()
    model.ints = nn.Parameter(torch.ones(4, 4, dtype=torch.int32), requires_grad=False)
    with pytest.raises(tt.SchemeError, match=r"^ints: is torch\.int32, which int8 cannot hold\. Exclude it"):
        _schemes({"*": "int8"}, model)
    assert _schemes({"*": tt.Plain()}, model) == {"ints": tt.Plain()}
    model.ints = nn.Parameter(torch.eye(4).to_sparse())
    with pytest.raises(tt.SchemeError, match=r"^ints: is a torch\.sparse_coo tensor"):
        _schemes({"*": "int8"}, model)
    with pytest.raises(tt.SchemeError, match=r"^weight: is lazy and has no shape yet"):
        _schemes("int8", nn.LazyLinear(4))


def test_slices_of_a_quantized_owner_are_refused():
    model = nn.Module()
    model.qkv = nn.Parameter(torch.randn(12, 4))
    model.q = nn.Parameter(model.qkv.data[:4])
    with pytest.raises(
        tt.RuleError, match=r"^q: is a view of qkv \(size \(4, 4\), .*Call tt\.untie\(model, 'q'\) first"
    ):
        _schemes({"q": "int8"}, model)
    assert _schemes({"q": tt.Plain()}, model) == {"qkv": tt.Plain()}


def test_a_parametrized_linear_has_no_weight_to_quantize():
    model = nn.Sequential(nn.Linear(4, 4), nn.utils.parametrizations.weight_norm(nn.Linear(4, 4)))
    assert _schemes("int8", model) == {"0.weight": tt.int8()}
