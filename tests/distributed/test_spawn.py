"""The helper that runs ranks reports results, errors, deaths and hangs, and in time."""

import ctypes
import os
import signal
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

import torchtether as tt
from tests.distributed.spawn import ForeignCrashWarning, RankError, spawn


def _sum():
    value = torch.tensor([dist.get_rank() + 1.0])
    dist.all_reduce(value)
    return dist.get_rank(), value.item()


def _fails(rank):
    if dist.get_rank() == rank:
        raise tt.TieError("is not tied", name="head.weight")
    dist.barrier()


def _dies(rank):
    if dist.get_rank() == rank:
        os._exit(7)
    return dist.get_rank()


def _faults(rank):
    if dist.get_rank() == rank:
        os.kill(os.getpid(), signal.SIGSEGV)
    return dist.get_rank()


def _crashes_beside(folder, times):
    """Abort in a thread that Python has not made, as gloo does, the first ``times`` times."""
    if dist.get_rank() == 1 and len(list(Path(folder).iterdir())) < times:
        (Path(folder) / str(os.getpid())).touch()
        os.write(2, b"gloo says why\n")
        libc, thread = ctypes.CDLL(None), ctypes.c_ulong()
        libc.pthread_create(ctypes.byref(thread), None, libc.abort, None)
        time.sleep(60)
    dist.barrier()
    return dist.get_rank()


def _hangs():
    if dist.get_rank() == 0:
        time.sleep(600)
    dist.barrier()


def _sleeps():
    time.sleep(600)


def test_ranks_answer_in_order():
    assert spawn(_sum, 3) == [(0, 6.0), (1, 6.0), (2, 6.0)]


def test_an_error_of_one_rank_is_the_tests_error():
    with pytest.raises(tt.TieError, match=r"head\.weight: is not tied") as caught:
        spawn(_fails, 2, 1)
    assert "rank 1 of 2" in str(caught.value.__cause__)


def test_a_death_is_told():
    with pytest.raises(RankError, match="rank 1 of 2 died with exit code 7"):
        spawn(_dies, 2, 1)


def test_a_fatal_signal_shows_where():
    with pytest.raises(RankError, match=r"rank 1 of 2 died with exit code -11\nstacks1:\nFatal(?s:.*)in _faults"):
        spawn(_faults, 2, 1)


def test_a_crash_in_a_thread_of_gloo_is_tried_again(tmp_path):
    with pytest.warns(ForeignCrashWarning, match=r"rank 1 of 2 died with exit code -6(?s:.*)gloo says why"):
        assert spawn(_crashes_beside, 2, tmp_path, 1) == [0, 1]


def test_a_second_crash_in_a_thread_of_gloo_is_an_error(tmp_path):
    with pytest.warns(ForeignCrashWarning), pytest.raises(RankError, match="rank 1 of 2 died with exit code -6"):
        spawn(_crashes_beside, 2, tmp_path, 2)


def test_a_crash_of_the_main_thread_is_an_error_at_once(recwarn):
    with pytest.raises(RankError):
        spawn(_faults, 2, 1)
    assert not recwarn


@pytest.mark.slow
def test_a_hang_ends():
    before = time.monotonic()
    with pytest.raises(RankError):
        spawn(_hangs, 2, timeout=3)
    assert time.monotonic() - before < 30


@pytest.mark.slow
def test_ranks_that_hang_show_where():
    with pytest.raises(RankError, match=r"ranks \[0, 1\] of 2 gave no answer in 6 s\nstacks0:(?s:.*)in _sleeps"):
        spawn(_sleeps, 2, timeout=6)
