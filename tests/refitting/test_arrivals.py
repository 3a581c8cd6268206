"""Pieces that arrive one after the other: in any order, in reused memory, and without omissions."""

import itertools
import random

import pytest
import torch
from torch import nn

import torchtether as tt
from tests.refitting.nets import build, copied, is_same, is_unchanged
from tests.refitting.test_refit import RULES, Qkv, published


@pytest.mark.parametrize("seed", range(8))
def test_any_order_gives_the_same(seed):
    state = list(published().items())
    wanted = tt.quantize(Qkv(), {"*weight": "int8", "experts": "nf4"})
    tt.refit(wanted, dict(state), rename=RULES)
    random.Random(seed).shuffle(state)
    found = tt.quantize(Qkv(), {"*weight": "int8", "experts": "nf4"})
    tt.refit(found, state, rename=RULES)
    assert is_same(found, wanted)


def test_the_sender_may_use_its_memory_again():
    state = published()
    room = torch.empty(2 * max(tensor.numel() for tensor in state.values()))

    def sent():
        for name, tensor in state.items():
            made = room[: tensor.numel()].view(tensor.shape)
            yield name, made.copy_(tensor)
            room.fill_(float("nan"))

    wanted, found = (tt.quantize(Qkv(), "int8") for _ in range(2))
    tt.refit(wanted, state, rename=RULES)
    report = tt.refit(found, sent(), rename=RULES)
    assert is_same(found, wanted)
    assert 0 < report.waiting < sum(tensor.nbytes for tensor in state.values())


def test_what_comes_complete_does_not_wait():
    assert tt.refit(build(1, "int8"), build(2).state_dict().items()).waiting == 0


def test_a_name_that_comes_twice_is_a_fault_and_the_first_counts():
    state = build(2).state_dict()
    again = ("mid.weight", torch.zeros(64, 64))
    rollout = build(1, "int8")
    with pytest.raises(tt.LoadError, match="mid.weight: the source has sent it twice") as caught:
        tt.refit(rollout, itertools.chain(state.items(), [again]))
    assert len(caught.value.faults) == 1
    assert is_same(rollout, build(2, "int8"))


def test_two_names_that_become_one_are_a_fault():
    state = build(2).state_dict() | {"also.weight": torch.zeros(64, 64)}
    with pytest.raises(tt.LoadError, match=r"mid.weight: the checkpoint's .* are both renamed to it"):
        tt.refit(build(1, "int8"), state.items(), rename=[("also", "mid")])


def test_a_tied_name_may_come_alone_or_under_both_names_in_any_order():
    state = build(2).state_dict()
    for left in ((), ("emb.weight",), ("head.weight",)):
        for order in (list, lambda items: list(reversed(list(items)))):
            rollout = build(1, "int8")
            tt.refit(rollout, order((n, t) for n, t in state.items() if n not in left))
            assert is_same(rollout, build(2, "int8"))


def test_items_that_are_no_tensors_are_faults():
    state = list(build(2).state_dict().items())
    odd = [3, ("a", "b", "c"), ("x", 4), (None, torch.ones(1)), ("y", torch.ones(1, device="meta"))]
    with pytest.raises(tt.LoadError) as caught:
        tt.refit(build(1, "int8"), [*state, *odd])
    assert len(caught.value.faults) == len(odd)


def test_a_source_that_raises_says_what_was_written():
    def failing():
        yield from list(build(2).state_dict().items())[:3]
        raise ConnectionError("the trainer is gone")

    rollout = build(1, "int8")
    with pytest.raises(tt.LoadError, match=r"the refit stopped: ConnectionError: the trainer is gone") as caught:
        tt.refit(rollout, failing())
    assert "3 tensors have been written (emb.weight, mid.weight, mid.bias)" in str(caught.value)
    assert isinstance(caught.value.__cause__, ConnectionError)
    assert torch.equal(rollout.mid.bias, build(2).mid.bias)

    def failing_at_once():
        raise ConnectionError("no trainer")
        yield

    before = copied(rollout)
    with pytest.raises(ConnectionError):
        tt.refit(rollout, failing_at_once())
    assert is_unchanged(rollout, before)


def test_a_bad_piece_is_not_written_and_the_others_are():
    state = published()
    state["k_proj.weight"][0, 0] = float("inf")
    rollout = tt.quantize(Qkv(), "int8")
    before = copied(rollout)
    with pytest.raises(tt.LoadError, match=r"qkv.weight: 1 of 3072 values are not finite") as caught:
        tt.refit(rollout, state.items(), rename=RULES)
    assert len(caught.value.faults) == 1
    after = copied(rollout)
    assert torch.equal(after["qkv.weight qdata"], before["qkv.weight qdata"])
    assert not torch.equal(after["up.weight qdata"], before["up.weight qdata"])


def test_numbered_pieces_of_a_split_and_functions_that_leave_names_out():
    model = nn.ModuleDict({f"e{i}": nn.Linear(4, 4, bias=False) for i in range(3)})
    state = {"all": torch.randn(3, 4, 4), "optimizer.step": torch.ones(1)}
    rename = [lambda name: None if name.startswith("optimizer") else name, tt.Split("all", "e{}.weight")]
    tt.refit(model, state.items(), rename=rename)
    assert all(torch.equal(model[f"e{i}"].weight, state["all"][i]) for i in range(3))
