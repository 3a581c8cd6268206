"""``materialize`` keeps objects and ties, and initialises each tensor once."""

from functools import partial

import pytest
import torch
from torch import nn

import torchtether as tt
from tests.catalog import few_schemes
from tests.ties.models import MODELS
from torchtether.ties.names import named_tensors


def _meta(make):
    with torch.device("meta"):
        return make()


def _ids(model):
    return {name: id(tensor) for name, tensor in named_tensors(model).items()}


LAYERS = [
    lambda: nn.Linear(4, 4),
    lambda: nn.Embedding(6, 4, padding_idx=1),
    lambda: nn.LSTM(4, 4, num_layers=2),
    lambda: nn.BatchNorm1d(4),
    lambda: nn.LayerNorm(4),
    lambda: nn.Conv2d(2, 2, 3),
    lambda: nn.MultiheadAttention(4, 2),
    lambda: nn.TransformerEncoderLayer(8, 2, 16),
]


@pytest.mark.parametrize("make", LAYERS)
def test_torch_layers_are_reset(make):
    model = _meta(make)
    ids = _ids(model)
    optimizer = torch.optim.AdamW(model.parameters())
    tt.materialize(model)
    assert _ids(model) == ids
    tt.check_optimizer(model, optimizer)
    for tensor in named_tensors(model).values():
        assert tensor.device.type == "cpu"
        assert torch.isfinite(tensor).all()


@pytest.mark.parametrize("make", [torch.optim.AdamW, partial(torch.optim.SGD, lr=0.1, momentum=0.9)])
def test_an_optimizer_that_has_stepped_steps_again(make):
    """State on meta would stop AdamW, and others go on with nothing in it."""
    model = nn.Linear(4, 4)
    optimizer = make(model.parameters())

    def step():
        optimizer.zero_grad()
        model(torch.ones(2, 4)).square().sum().backward()
        optimizer.step()

    step()
    tt.convert(model, device="meta", optimizer=optimizer)
    tt.materialize(model, optimizer=optimizer)
    before = model.weight.detach().clone()
    step()
    assert not torch.equal(model.weight, before)
    with torch.device("meta"):
        other = nn.Linear(4, 4)
    with pytest.raises(tt.errors.OptimizerError):
        tt.materialize(other, optimizer=optimizer)
    assert other.weight.is_meta
    with pytest.raises(tt.errors.OptimizerError):
        tt.materialize(nn.Linear(4, 4), optimizer=optimizer)  # also where nothing is on meta


def test_state_that_stayed_on_meta_is_found():
    model = nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    model(torch.ones(2, 4)).sum().backward()
    optimizer.step()
    tt.convert(model, device="meta", optimizer=optimizer)
    tt.check_optimizer(model, optimizer)  # neither has values
    tt.materialize(model)
    with pytest.raises(tt.OptimizerError, match=r"^weight: has values, and its state in the optimizer is on meta"):
        tt.check_optimizer(model, optimizer)
    for parameter in model.parameters():
        del optimizer.state[parameter]
    tt.check_optimizer(model, optimizer)


def test_an_lstm_runs():
    output, _ = tt.materialize(_meta(lambda: nn.LSTM(4, 4)))(torch.ones(2, 4))
    assert output.shape == (2, 4)


@pytest.mark.parametrize("make", MODELS, ids=lambda make: make.__name__)
def test_ties_hold(make):
    model = _meta(make)
    ties, ids = tt.find_ties(model), _ids(model)
    with torch.no_grad():
        tt.materialize(model, init=_fill)
    assert tt.find_ties(model) == ties
    assert _ids(model) == ids
    recorded = _recorded(make)
    assert tt.find_ties(recorded) == ties


def _fill(module):
    for tensor in (*module.parameters(recurse=False), *module.buffers(recurse=False)):
        tensor.fill_(1)


def _recorded(make):
    with tt.on_meta():
        model = make()
    return tt.materialize(model)


class Counting(nn.Linear):
    count = 0

    def reset_parameters(self):
        Counting.count += 1
        with torch.no_grad():
            self.weight.fill_(Counting.count)
            if self.bias is not None:
                self.bias.fill_(Counting.count)


def test_each_tensor_is_initialised_once_by_its_owner():
    with torch.device("meta"):
        model = nn.ModuleDict({"a": Counting(4, 4), "b": Counting(4, 4), "c": Counting(4, 4, bias=False)})
    model["b"].weight = model["c"].weight = model["a"].weight
    Counting.count = 0
    tt.materialize(model)
    assert torch.equal(model["c"].weight, torch.ones(4, 4))  # by a, the first; c has nothing of its own
    assert torch.equal(model["a"].bias, torch.full((4,), 1.0))
    assert torch.equal(model["b"].bias, torch.full((4,), 2.0))  # b only its bias


def test_an_owner_without_reset_is_initialised_by_its_alias():
    with torch.device("meta"):
        model = nn.Module()
        model.table = nn.Parameter(torch.empty(4, 4))
        model.head = nn.Linear(4, 4)
    model.head.weight = model.table
    tt.materialize(model)
    assert model.head.weight is model.table
    assert model.table.abs().max() <= 0.5


def test_what_cannot_be_initialised_is_named_and_nothing_changes():
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(2, 2))
        model.register_buffer("inv", torch.ones(2))
        model.scale = nn.Parameter(torch.ones(2))
    ids = _ids(model)
    with pytest.raises(
        tt.ConversionError, match=r"^scale, inv: on meta, .*Build the model inside tt\.on_meta\(\)"
    ) as error:
        tt.materialize(model)
    assert "\n" not in str(error.value)
    assert _ids(model) == ids
    assert all(tensor.is_meta for tensor in named_tensors(model).values())


def test_a_reset_that_forgets_a_tensor_is_found():
    class Forgets(nn.Linear):
        def __init__(self):
            super().__init__(2, 2)
            self.register_buffer("table", torch.zeros(2))
            self.register_buffer("index", torch.zeros(2, dtype=torch.int64))

    with pytest.raises(tt.ConversionError, match=r"^table, index: on cpu now, but reset_parameters did not set it"):
        tt.materialize(_meta(Forgets))


def test_init_is_called_once_per_module_children_first():
    model = _meta(lambda: nn.Sequential(nn.Linear(2, 2), nn.ReLU(), nn.BatchNorm1d(2)))
    seen = []

    def init(module):
        seen.append(module)
        with torch.no_grad():
            _fill(module)

    tt.materialize(model, init=init)
    assert seen == [model[0], model[2], model]
    with pytest.raises(tt.ConversionError, match=r"^weight, bias: on cpu now, but init did not set it"):
        tt.materialize(_meta(lambda: nn.Linear(2, 2)), init=lambda module: None)


def test_a_seeded_init_draws_what_apply_draws():
    def make():
        return nn.Sequential(nn.Linear(2, 3), nn.Sequential(nn.Sequential(nn.Linear(3, 2)), nn.ReLU()), nn.Linear(2, 2))

    def init(module):
        for parameter in module.parameters(recurse=False):
            nn.init.normal_(parameter)

    expected = make()
    torch.manual_seed(0)
    expected.apply(init)
    torch.manual_seed(0)
    made = tt.materialize(_meta(make), init=init)
    for name, parameter in made.named_parameters():
        assert torch.equal(parameter, expected.get_parameter(name)), name


def test_init_leaves_a_tied_tensor_to_its_owner_and_a_parent_has_the_last_word():
    with torch.device("meta"):
        model = nn.ModuleDict({"head": nn.Linear(4, 4), "deep": nn.ModuleDict({"emb": nn.Embedding(4, 4)})})
    model["head"].weight = model["deep"]["emb"].weight

    def init(module):
        with torch.no_grad():
            if isinstance(module, nn.Linear):
                module.weight.fill_(1)
                module.bias.fill_(1)
            if isinstance(module, nn.Embedding):
                module.weight.fill_(2)
            if module is model:
                module["head"].bias.fill_(3)

    tt.materialize(model, init=init)
    assert tt.find_ties(model)[0].owner == "head.weight"
    assert torch.equal(model["head"].weight, torch.ones(4, 4))
    assert torch.equal(model["head"].bias, torch.full((4,), 3.0))


def test_init_comes_after_the_record():
    with tt.on_meta():
        model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))

    def init(module):
        if isinstance(module, nn.Linear):
            nn.init.constant_(module.weight, 4.0)

    tt.materialize(model, init=init)
    assert torch.equal(model[0].weight, torch.full((2, 2), 4.0))
    assert torch.equal(model[1].running_var, torch.ones(2))


def test_what_is_real_is_left_alone():
    model = nn.Sequential(nn.Linear(2, 2), _meta(lambda: nn.Linear(2, 2)))
    values, memory = model[0].weight.detach().clone(), model[0].weight.data_ptr()
    tt.materialize(model)
    assert torch.equal(model[0].weight, values)
    assert model[0].weight.data_ptr() == memory
    before = model[1].weight.detach().clone()
    tt.materialize(model)
    assert torch.equal(model[1].weight, before)


def test_hooks_attributes_and_requires_grad_stay():
    model = _meta(lambda: nn.Linear(2, 2))
    fired = []
    model.weight.register_post_accumulate_grad_hook(lambda p: fired.append(p))
    model.weight.note = "mine"
    model.bias.requires_grad_(False)
    tt.materialize(model)
    assert model.weight.note == "mine"
    assert not model.bias.requires_grad
    model(torch.ones(1, 2)).sum().backward()
    assert fired == [model.weight]


@few_schemes
@pytest.mark.parametrize("recorded", [False, True])
def test_quantized_on_meta(row, recorded):
    """What the constructor or reset_parameters makes, in the scheme; a transposed alias over the same parts."""
    with tt.on_meta() if recorded else torch.device("meta"):
        model = nn.ModuleDict({"emb": nn.Embedding(16, 64), "down": nn.Linear(16, 64, bias=False)})
    tt.tie(model, "emb.weight", "down.weight", transpose=True)
    tt.quantize(model, {"emb.weight": row.scheme})
    weight = model["emb"].weight
    tt.materialize(model)
    assert model["emb"].weight is weight
    assert weight.scheme == row.scheme
    assert weight.device.type == "cpu"
    values = weight.detach().dequantize()
    assert 0.7 < values.std() < 1.3
    assert torch.equal(model["down"].weight.detach().dequantize(), values.t())
    tt.check_ties(model)


def test_meta_and_lazy_are_refused():
    with pytest.raises(tt.ConversionError, match="cannot materialize on meta"):
        tt.materialize(_meta(lambda: nn.Linear(2, 2)), "meta")
    with torch.device("meta"):
        model = nn.LazyLinear(2)
    with pytest.raises(tt.ConversionError, match=r"are lazy, without a shape yet: weight, bias"):
        tt.materialize(model)


def test_a_weak_reference_to_one_parameter_changes_nothing():
    model = _meta(lambda: nn.Linear(2, 2))
    reference = torch._C._WeakTensorRef(model.weight)
    with pytest.raises(tt.ConversionError, match=r"^weight: held by"):
        tt.materialize(model)
    assert not reference.expired()
    assert model.weight.is_meta
    assert model.bias.is_meta
