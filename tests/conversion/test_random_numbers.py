"""Models on ``meta`` get the random numbers that their constructors draw: by seeds, generators and ``nn.init``."""

import copy
import pickle
import threading

import pytest
import torch
from torch import nn

import torchtether as tt
from torchtether.conversion.recording import recording

F = torch.nn.functional


def seeded():
    torch.manual_seed(42)
    return torch.randn(3)


def after_others():
    torch.manual_seed(42)
    torch.rand(5)
    nn.Linear(2, 3)
    return torch.randn(3)


def seeded_twice():
    torch.manual_seed(42)
    first = torch.rand(3)
    torch.manual_seed(42)
    return torch.stack([first, torch.rand(3), torch.rand(3)])


def with_the_callers_seed():
    torch.manual_seed(7)
    return torch.randn(3)


def forked():
    with torch.random.fork_rng():
        torch.manual_seed(1)
        first = torch.randn(3)
    with torch.random.fork_rng():
        torch.manual_seed(1)
        return torch.stack([first, torch.randn(3)])


def set_again():
    state = torch.get_rng_state()
    torch.manual_seed(1)
    made = torch.randn(3)
    torch.set_rng_state(state)
    return made


def by_a_generator():
    generator = torch.Generator().manual_seed(3)
    torch.rand(2, generator=generator)  # is needed, although nothing holds it
    made = nn.init.trunc_normal_(torch.empty(4, 3), generator=generator)
    generator.manual_seed(3)
    return made + torch.rand(3, generator=generator)


def of_many_kinds():
    torch.manual_seed(42)
    dropped = F.dropout(torch.ones(6)) + torch.empty(6).normal_() + torch.randperm(6)
    return dropped + torch.bernoulli(torch.full((6,), 0.5)) + torch.multinomial(torch.ones(8), 6)


def of_two_numbers():
    torch.manual_seed(42)
    return torch.normal(0.0, 0.1, (3,)) + torch.normal(mean=1.0, std=2.0, size=(3,), dtype=torch.float32)


def of_a_random_size():
    torch.manual_seed(42)
    return torch.randn(int(torch.randint(3, 9, ())))


SEEDED = [
    seeded, after_others, seeded_twice, with_the_callers_seed, forked, set_again, by_a_generator, of_many_kinds,
    of_two_numbers, of_a_random_size,
]  # fmt: skip


class Model(nn.Module):
    def __init__(self, make):
        super().__init__()
        self.before = nn.Linear(2, 2)
        self.register_buffer("made", make(), persistent=False)
        self.after = nn.Linear(2, 2)


def same(model, expected):
    tensors = dict(model.named_parameters()) | dict(model.named_buffers())
    return {name for name, tensor in (*expected.named_parameters(), *expected.named_buffers())
            if torch.equal(tensor, tensors[name])}  # fmt: skip


@pytest.mark.parametrize("make", SEEDED)
def test_seeds_of_constructors_determine_their_numbers(make, tmp_path):
    torch.manual_seed(7)
    expected = Model(make)
    torch.manual_seed(7)
    state = torch.get_rng_state()
    with tt.on_meta():
        model = Model(make)
        again = Model(make)
    changes = torch.initial_seed() == 42
    assert changes or torch.equal(torch.get_rng_state(), state)  # nothing was drawn
    for copied in (model, copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        torch.manual_seed(7)
        tt.materialize(copied)
        assert same(copied, expected) == {"before.weight", "before.bias", "made", "after.weight", "after.bias"}
    tt.save(expected, tmp_path)
    torch.manual_seed(8)
    tt.load(again, tmp_path)  # other numbers are not needed
    assert torch.equal(again.made, expected.made)
    assert b"torchtether" not in pickle.dumps(again)


def test_normal_of_two_numbers_is_on_meta_like_others():
    """``torch.device`` does not know it: it would be drawn at once, and move the generator on."""
    torch.manual_seed(7)
    expected = Model(lambda: torch.normal(0.0, 0.1, size=(3,)))
    with tt.on_meta():
        model = Model(lambda: torch.normal(0.0, 0.1, size=(3,)))
        assert torch.normal(0.0, 0.1, size=(3,), device="cpu").device.type == "cpu"
    assert model.made.is_meta
    torch.manual_seed(7)
    assert len(same(tt.materialize(model), expected)) == 5


def test_later_draws_after_the_same_seed_are_not_needed():
    with recording() as recorder:
        torch.manual_seed(42)
        first, second = torch.rand(2), torch.rand(3)
    early, late = (recorder.program.slice([recorder.ref(tensor).memory]) for tensor in (first, second))
    assert set(early) < set(late)


def test_numbers_of_the_caller_are_drawn_when_they_are_needed():
    with tt.on_meta():
        model = Model(lambda: torch.randn(3))
    first, second = copy.deepcopy(model), copy.deepcopy(model)
    assert not torch.equal(tt.materialize(first).made, tt.materialize(second).made)


def test_a_generator_goes_on_in_the_next_model():
    def models(generator):
        return [Model(lambda: torch.randn(3, generator=generator)) for _ in range(2)]

    expected = models(torch.Generator().manual_seed(5))
    generator = torch.Generator().manual_seed(5)
    made = []
    for _ in range(2):
        with tt.on_meta():
            made.append(Model(lambda: torch.randn(3, generator=generator)))
    assert generator.initial_seed() == 5
    torch.rand(9, generator=generator)  # what comes later changes nothing
    for model, wanted in zip(reversed(made), reversed(expected), strict=True):
        assert torch.equal(tt.materialize(model).made, wanted.made)


def test_the_default_generator_is_as_it_was():
    """Also after an error, within another block, and beside other threads, which draw from the same generator."""
    torch.manual_seed(11)
    state = torch.get_rng_state()
    with pytest.raises(ValueError, match="stop"), tt.on_meta():
        Model(_stop)
    with tt.on_meta():
        with tt.on_meta():
            inner = Model(lambda: torch.randn(3))
        outer = Model(lambda: torch.randn(3))
    built = [[] for _ in range(4)]
    threads = [threading.Thread(target=_build, args=(made,)) for made in built]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert torch.initial_seed() == 11
    assert torch.equal(torch.get_rng_state(), state)
    expected = Model(lambda: torch.randn(3))
    for model in (inner, outer, *(made[0] for made in built)):
        torch.manual_seed(11)
        assert len(same(tt.materialize(model), expected)) == 5


def _stop():
    torch.randn(3)
    raise ValueError("stop")


def _build(made):
    for _ in range(20):
        with tt.on_meta():
            model = Model(lambda: torch.randn(3))
    made.append(model)


class Initialised(nn.Module):
    def __init__(self, fill, shape):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(shape))
        fill(self.weight)
        self.after = nn.Linear(2, 2)


INIT = {
    "trunc_normal": (lambda w: nn.init.trunc_normal_(w, std=0.02), (4, 6)),
    "trunc_normal, wide": (lambda w: nn.init.trunc_normal_(w, std=2.0), (4, 6)),
    "trunc_normal, far": (lambda w: nn.init.trunc_normal_(w, std=1.0, a=-0.1, b=0.1), (4, 6)),
    "trunc_normal, rows": (lambda w: nn.init.trunc_normal_(w.detach()[1:3]), (4, 6)),
    "orthogonal": (nn.init.orthogonal_, (4, 6)),
    "orthogonal, square": (lambda w: nn.init.orthogonal_(w, gain=2.0), (5, 5)),
    "orthogonal, transposed": (lambda w: nn.init.orthogonal_(w.detach().t()), (6, 4)),
    "dirac": (nn.init.dirac_, (4, 4, 3)),
    "dirac, groups": (lambda w: nn.init.dirac_(w, groups=2), (4, 2, 3, 3)),
    "sparse": (lambda w: nn.init.sparse_(w, sparsity=0.5), (4, 6)),
    "kaiming": (nn.init.kaiming_normal_, (4, 6)),
    "xavier": (nn.init.xavier_uniform_, (4, 6)),
    "eye": (nn.init.eye_, (4, 6)),
    "one after the other": (lambda w: nn.init.orthogonal_(w).detach().mul_(3), (4, 6)),
    "a generator": (lambda w: nn.init.orthogonal_(w, generator=torch.Generator().manual_seed(2)), (4, 6)),
}


@pytest.mark.parametrize(("fill", "shape"), INIT.values(), ids=INIT)
def test_initialisers_fill_what_they_are_given(fill, shape):
    """Of torch's own, four return at once on ``meta``."""
    torch.manual_seed(3)
    expected = Initialised(fill, shape)
    with tt.on_meta():
        model = Initialised(fill, shape)
    torch.manual_seed(3)
    tt.materialize(model)
    assert len(same(model, expected)) == 3
