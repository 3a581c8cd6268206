"""Laws that need other processes: shared memory, and sharding."""

from __future__ import annotations

import faulthandler
import os
import pickle
import select
import signal
import tempfile
import time
from collections.abc import Callable
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ..law import Broken, Law, NotApplicable, law, require
from .facts import equal, leaves
from .subject import Subject

LAWS: list[Law] = []

_PATIENCE = 60.0  # seconds
_FSDP_PATIENCE = 180.0


@law(
    LAWS,
    "share-memory",
    "share_memory_() moves it to shared memory, and does not crash the process",
    "model.share_memory(), or handing the model to another process, crashes Python without a traceback",
)
def _share_memory(subject: Subject) -> None:
    """Run in a child process, because torch's own ``share_memory_`` crashes on the null storage of a wrapper."""
    if not hasattr(os, "fork"):  # then the child process must make its own tensor
        _check_sendable(subject)
        _finished(*_spawned(_share_fresh, (subject,), _PATIENCE))
        return
    given = subject.make_tensor()  # before the fork: a forked process must not start torch's threads
    before = [leaf.detach().clone() for leaf in leaves(given)]
    _finished(*_forked(lambda: _share(given, before)))


def _share_fresh(subject: Subject) -> str:
    given = subject.make_tensor()
    return _share(given, [leaf.detach().clone() for leaf in leaves(given)])


def _share(given: Tensor, before: list[Tensor]) -> str:
    """Return the fault, empty if there is none. Decodes nothing, because a forked process must not start threads."""
    given.share_memory_()
    if not given.is_shared():
        return "is_shared() is False after share_memory_()"
    kept = all(equal(leaf.detach(), held) for leaf, held in zip(leaves(given), before, strict=True))
    return "" if kept else "share_memory_() changes the values"


@law(
    LAWS,
    "fsdp2",
    "fully_shard on two processes gives each its rows, and computes what one process computes",
    "a model that is too large for one machine cannot be split over several",
    optional=True,
)
def _fsdp2(subject: Subject) -> None:
    if not torch.distributed.is_available():
        raise NotApplicable("this torch has no torch.distributed")
    _check_sendable(subject)
    with tempfile.TemporaryDirectory() as folder:
        _finished(*_spawned(_sharded, (subject, folder), _FSDP_PATIENCE, processes=2))


def _sharded(rank: int, subject: Subject, folder: str) -> str:  # pragma: no cover - in other processes
    return _grouped(rank, folder, lambda: _product_of_shards(subject))


def _grouped(rank: int, folder: str, task: Callable[[], str]) -> str:  # pragma: no cover - in other processes
    """Run ``task`` in a process group of two, which meet in ``folder``; return its result."""
    store = torch.distributed.FileStore(str(Path(folder) / "store"), 2)  # type: ignore[attr-defined]
    torch.distributed.init_process_group("gloo", store=store, rank=rank, world_size=2)
    try:
        return task()
    finally:
        torch.distributed.destroy_process_group()


def _product_of_shards(subject: Subject) -> str:  # pragma: no cover - in other processes
    """Return the fault of the product and gradient of a sharded module, empty if there is none."""
    from torch.distributed.fsdp import fully_shard

    weight = subject.parameter()
    values = subject.values(weight)
    x = torch.ones(2, values.shape[-1], dtype=values.dtype, requires_grad=True)
    wanted = x.detach() @ values.t()
    module = _Product(subject, weight)
    fully_shard(module)
    held = getattr(module.weight, "to_local", lambda: None)()
    if held is None:
        return "fully_shard leaves it whole: it is no DTensor afterwards"
    if held.shape[0] >= values.shape[0]:
        return f"each process holds {held.shape[0]} of {values.shape[0]} rows"
    made = module(x)
    made.sum().backward()
    made = made if type(made) is torch.Tensor else subject.values(made)
    for what, got, want in (
        ("product", made.detach(), wanted),
        ("gradient of its input", x.grad, values.sum(0).expand(x.shape)),
    ):
        if got is None:
            return f"there is no {what}"
        off = (got - want).abs().max().item()
        if off > 64 * torch.finfo(values.dtype).eps * want.abs().max().item():
            return f"sharded, the {what} is off by {off:.2g}"
    return ""


class _Product(nn.Module):
    def __init__(self, subject: Subject, weight: nn.Parameter) -> None:
        super().__init__()
        self.subject, self.weight = subject, weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.subject.product(x, self.weight)


def _check_sendable(subject: Subject) -> None:
    try:
        pickle.dumps(subject)
    except Exception as error:
        raise NotApplicable(f"make must be a function of a module, to be sent to other processes: {error}") from None


# -- processes ---------------------------------------------------------------------------------------------------------


def _finished(code: int, complaint: str) -> None:
    if code < 0:
        name = signal.Signals(-code).name if -code in set(signal.Signals) else str(-code)
        raise Broken(f"the process ends with {name}")
    require(not complaint, complaint)
    require(code == 0, f"the process ends with status {code}")


def _forked(task: Callable[[], str]) -> tuple[int, str]:
    """Run ``task`` in a forked child; return its exit code and result. The child never returns into the caller's code.

    With a fork nothing needs to be pickled. The child has one thread, and only copies small tensors.
    """
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:  # pragma: no cover - coverage does not see the child
        code = 1
        try:
            os.close(reading)
            faulthandler.disable()
            silence = os.open(os.devnull, os.O_WRONLY)
            os.dup2(silence, 1)
            os.dup2(silence, 2)
            os.write(writing, _answer_of(task).encode()[:4096])
            code = 0
        finally:
            os._exit(code)
    os.close(writing)
    deadline = time.monotonic() + _PATIENCE
    complaint = b""
    try:
        while select.select([reading], [], [], max(0.0, deadline - time.monotonic()))[0]:
            more = os.read(reading, 4096)
            if not more:
                break
            complaint += more
        else:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
            return 0, f"the process does not end within {_PATIENCE:.0f} seconds"
    finally:
        os.close(reading)
    _, status = os.waitpid(child, 0)
    return os.waitstatus_to_exitcode(status), complaint.decode(errors="replace")


def _spawned(task: Callable[..., str], args: tuple, patience: float, processes: int = 1) -> tuple[int, str]:
    """Run ``task`` in new processes; return an exit code that is not 0, if there is one, and the first fault."""
    context = get_context("spawn")
    pipes, children = [], []
    for rank in range(processes):
        ours, theirs = context.Pipe(duplex=False)
        given = (rank, *args) if processes > 1 else args
        child = context.Process(target=_answer, args=(theirs, task, given), daemon=True)
        child.start()
        theirs.close()
        pipes.append(ours)
        children.append(child)
    deadline = time.monotonic() + patience
    complaint, code = "", 0
    for pipe, child in zip(pipes, children, strict=True):
        try:
            if pipe.poll(max(0.0, deadline - time.monotonic())):
                complaint = complaint or pipe.recv()
            else:
                complaint = complaint or f"the processes do not end within {patience:.0f} seconds"
                child.kill()
        except EOFError:  # it died
            pass
        child.join(10)
        code = code or (child.exitcode or 0)
        if complaint or code:
            for other in children:
                other.kill()
    return (0 if complaint else code), complaint


def _answer(pipe: Any, task: Callable[..., str], args: tuple) -> None:  # pragma: no cover - in other processes
    pipe.send(_answer_of(lambda: task(*args)))
    pipe.close()
    os._exit(0)  # at interpreter shutdown a gloo thread may free a tensor, which aborts the process


def _answer_of(task: Callable[[], str]) -> str:
    try:
        return task()
    except BaseException as error:
        return f"raises {type(error).__name__}: {' '.join(str(error).split())[:200]}"
