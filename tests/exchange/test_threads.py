"""Conversions in several threads take turns, and conversions or loads of other models are not affected."""

import threading

import torch

from tests.conversion.models import KINDS, kept, rig, tensors_of
from torchtether.conversion.converting import convert
from torchtether.exchange.scope import swapping

ROUNDS = 15


def run_all(*workers):
    """Every worker in a thread of its own; the first error of any."""
    errors = []

    def guarded(worker):
        try:
            worker()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=guarded, args=(worker,)) for worker in workers]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]


def test_stock_conversions_in_another_thread_do_not_see_ours():
    """They keep their hooks, which the swap flag would drop, and never see the flag set."""
    ours, theirs = rig(KINDS["lstm"]), rig(KINDS["tied_3"])
    state = rig(KINDS["tied_3"]).model.state_dict()
    done = threading.Event()
    flags = []

    def convert_ours():
        try:
            for dtype in (torch.float64, torch.float32) * ROUNDS:
                convert(ours.model, dtype=dtype, optimizer=ours.optimizer)
        finally:
            done.set()

    def convert_theirs():
        while not done.is_set() or not flags:  # once at least, also if this thread begins late
            for dtype in (torch.float64, torch.float32):
                theirs.model.to(dtype)
                theirs.model.load_state_dict(state)
                flags.append(torch.__future__.get_swap_module_params_on_conversion())

    before = kept(theirs.model)
    run_all(convert_ours, convert_theirs)
    assert flags
    assert not any(flags)
    assert kept(theirs.model) == before
    theirs.seen.clear()
    theirs.step(update=False)
    assert theirs.seen
    ours.step()


def test_converters_of_one_model_take_turns():
    made = rig(KINDS["view_transposed"])
    before = kept(made.model)

    def to(dtype):
        for _ in range(ROUNDS):
            convert(made.model, dtype=dtype, optimizer=made.optimizer)
            assert len({p.dtype for p in made.model.parameters()}) >= 1

    def stock():
        for _ in range(3):
            with swapping(made.model, optimizer=made.optimizer):
                made.model.to(torch.float16)
                assert {t.dtype for t in tensors_of(made.model).values()} == {torch.float16}

    run_all(lambda: to(torch.float64), lambda: to(torch.float32), stock)
    convert(made.model, dtype=torch.float32, optimizer=made.optimizer)
    assert kept(made.model) == before
    assert {v.dtype for s in made.optimizer.state.values() for v in s.values()} == {torch.float32}
    made.step()
