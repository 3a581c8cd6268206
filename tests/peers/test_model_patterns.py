"""Every way in which real models tie, from ``meta`` to bfloat16 and through a file, under an optimizer.

The reference is the same model, built eagerly, trained and converted by stock torch; results are equal bit for bit.
"""

from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from torch import nn

import torchtether as tt
from tests.peers.patterns import PATTERNS, TRANSFORMERS, build, outputs_of
from torchtether.ties.names import named_tensors

pytestmark = [pytest.mark.peers, pytest.mark.filterwarnings("ignore")]  # what peers warn about


def _stock(model, optimizer):
    with tt.swapping(model, optimizer=optimizer):
        model.bfloat16()


def _verb(model, optimizer):
    tt.convert(model, dtype=torch.bfloat16, optimizer=optimizer)


ROUTES = {"swapping": _stock, "convert": _verb}


def optimizer_of(model):
    return torch.optim.AdamW(model.parameters(), lr=0.01)


def train(model, optimizer, name):
    """One step towards outputs of zero."""
    loss = sum(output.float().square().mean() for output in outputs_of(model, name) if output.requires_grad)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()


class Watch:
    """Holds what must not change: which objects the model and its optimizer hold, and what is tied."""

    def __init__(self, model, optimizer, ties):
        self.model, self.optimizer, self.ties = model, optimizer, ties
        self.objects = {name: id(tensor) for name, tensor in named_tensors(model).items()}
        self.held = [id(parameter) for group in optimizer.param_groups for parameter in group["params"]]

    def check(self):
        tensors = named_tensors(self.model)
        assert {name: id(tensor) for name, tensor in tensors.items()} == self.objects
        held = [id(parameter) for group in self.optimizer.param_groups for parameter in group["params"]]
        assert held == self.held == [id(parameter) for parameter in self.model.parameters()]
        tt.check_optimizer(self.model, self.optimizer)
        assert [tie.names for tie in tt.find_ties(self.model)] == self.ties
        for tie in tt.find_ties(self.model):
            for alias, is_object in zip(tie.names, tie.objects, strict=True):
                assert (tensors[alias] is tensors[tie.owner]) == is_object


def assert_same_bits(model, other):
    one, two = named_tensors(model), named_tensors(other)
    assert one.keys() == two.keys()
    for name, tensor in one.items():
        assert tensor.dtype == two[name].dtype, name
        assert torch.equal(tensor, two[name]), name


def assert_same_outputs(model, other, name):
    with torch.no_grad():
        ours, theirs = outputs_of(model, name), outputs_of(other, name)
    assert len(ours) == len(theirs) > 0
    for one, two in zip(ours, theirs, strict=True):
        assert torch.equal(one.nan_to_num(), two.nan_to_num())
        assert two.isfinite().any()


@dataclass(frozen=True)
class Reference:
    """A model that stock torch built eagerly, trained for one step and converted: what it was after each."""

    name: str
    path: Path
    ties: list[tuple[str, ...]]
    full: nn.Module
    trained: nn.Module
    half: nn.Module
    optimizer: torch.optim.Optimizer


@pytest.fixture(scope="module", params=PATTERNS)
def reference(request, tmp_path_factory):
    name, path = request.param, tmp_path_factory.mktemp("full")
    full, trained, half = (build(name) for _ in range(3))
    tt.save(full, path)
    optimizer = optimizer_of(trained)
    train(trained, optimizer, name)
    half.load_state_dict(trained.state_dict())
    return Reference(name, path, [t.names for t in tt.find_ties(full)], full, trained, half.bfloat16(), optimizer)


@pytest.mark.parametrize("route", ROUTES)
def test_meta_load_train_convert_save_load(tmp_path, reference, route):
    name, ties, runs_half = reference.name, reference.ties, PATTERNS[reference.name].half
    assert sorted(map(len, ties)) == PATTERNS[name].ties

    model = build(name, meta=True, seed=1)
    optimizer = optimizer_of(model)
    watch = Watch(model, optimizer, ties)
    watch.check()
    report = tt.load(model, reference.path)
    assert (report.missing_keys, report.unexpected_keys, report.on_meta) == ((), (), ())
    watch.check()
    assert_same_bits(model, reference.full)
    assert_same_outputs(model, reference.full, name)

    train(model, optimizer, name)
    assert_same_bits(model, reference.trained)

    ROUTES[route](model, optimizer)
    watch.check()
    assert_same_bits(model, reference.half)
    check_state(model, optimizer, reference)
    if runs_half:
        assert_same_outputs(model, reference.half, name)
    for parameter in optimizer.state:
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    watch.check()

    tt.save(model, tmp_path / "half", max_shard_size=20_000)
    again = build(name, meta=True, seed=2)
    second = Watch(again, optimizer_of(again), ties)
    ROUTES[route](again, second.optimizer)  # also what no file stores is of the new dtype
    tt.load(again, tmp_path / "half")
    second.check()
    assert_same_bits(again, model)
    if runs_half:
        assert_same_outputs(again, model, name)


def check_state(model, optimizer, reference):
    """Moments are those of the reference in the parameters' new dtype, steps are as they were."""
    followed = 0
    for mine, theirs in zip(model.parameters(), reference.trained.parameters(), strict=True):
        state, other = optimizer.state.get(mine, {}), reference.optimizer.state.get(theirs, {})
        assert state.keys() == other.keys()
        for key, value in state.items():
            wanted = other[key] if key == "step" else other[key].bfloat16()
            assert value.dtype == wanted.dtype
            assert torch.equal(value, wanted)
            followed += 1
    assert followed


def test_at_least_thirty_patterns_of_transformers():
    assert len(TRANSFORMERS) >= 30
