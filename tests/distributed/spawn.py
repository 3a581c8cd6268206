"""Runs a function on several processes in a gloo group, and returns or raises their results.

Processes are forked from a server that has imported PRELOADED once, so that a group of four costs tenths of a second.
"""

import faulthandler
import multiprocessing
import os
import pickle
import signal
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import timedelta
from multiprocessing.connection import wait
from pathlib import Path

_GRACE = 3.0
"""Seconds that the other ranks have to say what went wrong with them, after the first has failed."""


PRELOADED = ["torch.distributed.tensor", "torch.distributed.fsdp", "torch._dynamo", "pytest", "torchtether"]
"""What every rank imports: FSDP2 imports ``torch._dynamo`` with the first module, which alone takes a second."""


class RankError(AssertionError):
    """Raised if a rank raised, died or hung; the text has its traceback."""


class _ForeignCrashError(RankError):
    """Raised if a fatal signal hit a thread of a rank that Python has not made: one of gloo's."""


class ForeignCrashWarning(UserWarning):
    """Issued if ranks start again, because a thread of gloo had crashed in one of them."""


def spawn(function: Callable, world: int, *args, timeout: float = 120.0, dies: Sequence[int] = ()) -> list:
    """Run ``function(*args)`` on ``world`` ranks of a gloo group; return their results, by rank.

    ``function`` is a module-level function; it, ``args`` and the results must be picklable.  It gets its rank from
    ``torch.distributed``.  After ``timeout`` seconds every process is killed.  Ranks in ``dies`` may end without a
    result (``None``).  Ranks start again, once, after a crash in a thread that Python has not made: gloo has
    aborted there, once in some ten thousand groups, and each rank runs our code and its kernels in its main thread.

    Raises:
        The error of a rank, if it can be pickled, from a RankError with its traceback; else the RankError.
    """
    try:
        return _spawn(function, world, args, timeout, dies)
    except _ForeignCrashError as error:
        warnings.warn(f"ranks started again: {error}", ForeignCrashWarning, stacklevel=2)
    return _spawn(function, world, args, timeout, dies)


def _spawn(function, world, args, timeout, dies):
    context = _context()
    with tempfile.TemporaryDirectory(prefix="gloo") as folder:
        pipes = [context.Pipe(duplex=False) for _ in range(world)]
        processes = [
            context.Process(target=_work, args=(pipes[rank][1], rank, world, Path(folder), timeout, function, args))
            for rank in range(world)
        ]
        try:
            for process, (_, writer) in zip(processes, pipes, strict=True):
                process.start()
                writer.close()
            return _collect(processes, [reader for reader, _ in pipes], timeout, set(dies), Path(folder))
        finally:
            for process in processes:
                if process.is_alive():
                    process.kill()
                process.join()


def imagine(function: Callable, world: int, *args, rank: int = 0, timeout: float = 120.0):
    """Run ``function(*args)`` in one process with torch's fake group as ``rank`` of ``world``; return its result.

    The fake group completes every collective at once, with whatever is in memory: shapes and bytes are right, values
    are not.
    """
    context = _context()
    reader, writer = context.Pipe(duplex=False)
    process = context.Process(target=_work_alone, args=(writer, rank, world, function, args))
    try:
        process.start()
        writer.close()
        return _collect([process], [reader], timeout, set())[0]
    finally:
        if process.is_alive():
            process.kill()
        process.join()


def _hide_gpus():
    """Hide all GPUs from this process: on a machine with one, ``fully_shard`` without a mesh moves models to it."""
    os.environ["CUDA_VISIBLE_DEVICES"] = ""


def _work_alone(pipe, rank, world, function, args):
    _hide_gpus()
    import torch
    import torch.distributed as dist
    from torch.testing._internal.distributed.fake_pg import FakeStore

    torch.set_num_threads(1)
    torch.manual_seed(0)
    try:
        dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world)
        _send(pipe, (True, function(*args)))
    except BaseException:
        _send(pipe, (False, (None, f"rank {rank} of a fake {world}:\n{traceback.format_exc()}")))


def _send(pipe, answer):
    """Send ``answer`` with the values of its tensors; ``pipe.send`` sends handles, which end with this process."""
    pipe.send_bytes(pickle.dumps(answer))


def _context():
    if "forkserver" not in multiprocessing.get_all_start_methods():
        return multiprocessing.get_context("spawn")
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOADED)
    return context


def _work(pipe, rank, world, folder, timeout, function, args):
    _hide_gpus()
    import torch
    import torch.distributed as dist

    stacks = _stacks(folder, rank).open("w")
    faulthandler.enable(file=stacks)
    faulthandler.register(signal.SIGUSR1, file=stacks)
    errors = _errors(folder, rank).open("w")
    os.dup2(errors.fileno(), 2)  # what C++ says before it aborts
    torch.set_num_threads(1)
    torch.manual_seed(0)
    try:
        dist.init_process_group(
            "gloo",
            store=dist.FileStore(str(folder / "store"), world),
            rank=rank,
            world_size=world,
            timeout=timedelta(seconds=timeout),
        )
        result = function(*args)
        _send(pipe, (True, result))
        dist.barrier()  # the one that holds the store does not leave first
        dist.destroy_process_group()
    except BaseException as error:
        text = f"rank {rank} of {world}:\n{traceback.format_exc()}"
        try:
            pickle.loads(pickle.dumps(error))
        except Exception:
            error = None
        _send(pipe, (False, (error, text)))


def _stacks(folder, rank):
    """Return the file to which a rank that hangs or receives a fatal signal writes the stacks of its threads."""
    return folder / f"stacks{rank}"


def _errors(folder, rank):
    """Return the file that takes the standard error of a rank."""
    return folder / f"stderr{rank}"


def _written(folder, ranks):
    files = [file(folder, rank) for rank in ranks for file in (_stacks, _errors)] if folder else []
    return "\n".join(f"{file.name}:\n{file.read_text()}" for file in files if file.exists())


def _ask_for_stacks(processes):
    """Let processes that hang write where they are. A watchdog that reads the stacks of running code may crash it."""
    for process in processes:
        with suppress(ProcessLookupError):
            os.kill(process.pid, signal.SIGUSR1)
    time.sleep(1)


def _collect(processes, readers, timeout, dies, folder=None):
    end = time.monotonic() + timeout
    world = len(processes)
    answers, failures = {}, {}
    is_foreign = False
    while len(answers) + len(failures) < world:
        left = end - time.monotonic()
        if left <= 0:
            break
        waiting = {reader: rank for rank, reader in enumerate(readers) if rank not in answers and rank not in failures}
        for reader in wait(list(waiting), timeout=left):
            rank = waiting[reader]
            try:
                is_good, answer = reader.recv()
            except EOFError:
                processes[rank].join(timeout=5)
                if rank in dies:
                    answers[rank] = None
                    continue
                text = f"rank {rank} of {world} died with exit code {processes[rank].exitcode}"
                written = _written(folder, [rank])
                is_foreign |= "Fatal Python error" in written and "Current thread" not in written
                is_good, answer = False, (None, f"{text}\n{written}")
            if is_good:
                answers[rank] = answer
            else:
                failures[rank] = answer
                end = min(end, time.monotonic() + _GRACE)
    if failures:
        # a rank that others wait for fails first; what they then say of the lost connection matters less
        error, text = next(iter(failures.values()))
        told = "\n".join(text for _, text in failures.values())
        if is_foreign:
            raise _ForeignCrashError(told)
        said = RankError(told)
        raise (said if error is None else error) from (None if error is None else said)
    silent = [rank for rank in range(world) if rank not in answers]
    if silent:
        _ask_for_stacks([processes[rank] for rank in silent])
        raise RankError(f"ranks {silent} of {world} gave no answer in {timeout} s\n{_written(folder, silent)}")
    return [answers[rank] for rank in range(world)]
