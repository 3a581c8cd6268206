"""``tt.refit``: write a trainer's floats into a quantized rollout, in place."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, closing
from os import PathLike
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from .._checks import as_module, describe
from .._interruptions import Deferred, uncollected
from ..checkpoint.reader import Checkpoint
from ..errors import ArgumentError
from ..exchange.exchange import Atomic
from ..exchange.optimizer_state import Optimizers, check_optimizer, optimizers_of
from ..exchange.refusals import is_on_disk, refuse_groups
from ..integrations.imported import names_of_library
from ..loading.options import LoadOptions, fault
from ..loading.report import raise_faults
from ..loading.steps import Draft
from ..renaming.renamed_checkpoint import RenamedCheckpoint
from ..renaming.steps import Rename, with_wrappers
from ..ties.names import is_sharded, named_tensors
from ..torch_private.modules import transient_names
from .arrivals import Arrivals, fault_of_tensor
from .report import RefitReport
from .target import Target
from .writing import Writer

Source = Path | str | Checkpoint | Mapping[str, Tensor] | Iterable[tuple[str, Tensor]]


_ALL = "All of them are in the error's faults."
_END: Any = object()


def refit(
    model: nn.Module,
    source: Source,
    *,
    rename: Rename = None,
    optimizer: Optimizers = None,
    atomic: Atomic = "checked",
) -> RefitReport:
    """Write the values of ``source`` into ``model``, in the memory that it has, and report what was written.

    ``source``     a path for ``tt.load``, or the result of ``tt.open``; a state dict; or an iterable of (name, tensor)
                   pairs in any order. Tensors are plain, Weights or DTensors, on any device, of any float dtype
    ``rename``     rules from the source's names to the model's, as of ``tt.load``: pieces may be joined and split;
                   a model of transformers takes its published names without rules
    ``optimizer``  is checked by ``tt.check_optimizer`` before the first change. Its state does not change: it belongs
                   to the same Parameters, and the source has no state
    ``atomic``     ``"full"`` keeps the old values of all written tensors until the end, twice the model's memory: an
                   error, a fault or an interrupt at any point leaves the model as it was, bit for bit

    Parameters stay the same objects, and the parts of a ``Weight`` stay at their addresses (``data_ptr``), so compiled
    graphs, CUDA graphs and optimizers continue with the new values. Values are encoded in the Weight's own scheme, as
    ``tt.quantize`` encodes them. A source Weight of the same scheme is copied part by part; one of another scheme is
    decoded and encoded. Plain parameters and buffers are filled in their own dtype. The scratch is one tensor.

    Every tensor must come once; tied tensors come under one name or several, and their values must agree.
    Non-persistent buffers (rotary frequencies), and tensors that a transformers model declares optional, are written if
    the source has them; otherwise they keep their values, and the report names them. Any other tensor that does not
    come, comes twice, does not fit, or has non-finite values that the scheme cannot hold, is a fault. A path or a state
    dict is listed and read completely first, so that faults are found before the first change.

    An iterable cannot be listed first. Each tensor is written when it is complete, and faults are reported at the end,
    together with what was written. Tensors that do not fit, or that their scheme cannot hold, are not written. A piece
    of a fused tensor is copied and waits until the last piece has come, so send the pieces of one tensor close together
    (the report has the peak of waiting bytes). Names that are views of one memory wait for each other, too. All other
    tensors are read before the next item is requested.

    DTensors are read one at a time, shard by shard, and all ranks of their mesh must call this with the same names in
    the same order. For a model with DTensors (``fully_shard``) all ranks call it, and each reads its own rows, from a
    path, from whole tensors, or from DTensors that are sharded alike. If only some ranks of the source's mesh have a
    model, the others call ``.full_tensor()`` for each name, while those with a model iterate over the same names.

    Raises:
        LoadError: the source does not fit; ``faults`` lists everything.
        CheckpointError: a file is absent or damaged.
        OptimizerError: the optimizer does not belong to the model.
        ConversionError: diffusers' group offloading keeps the values of the model in files.

    >>> import torch, torchtether as tt
    >>> trainer, rollout = torch.nn.Linear(4, 4), tt.quantize(torch.nn.Linear(4, 4), "int8")
    >>> weight, place = rollout.weight, rollout.weight.parts["qdata"].data_ptr()
    >>> report = tt.refit(rollout, trainer.state_dict())
    >>> report.names, rollout.weight is weight, weight.parts["qdata"].data_ptr() == place
    (('weight', 'bias'), True, True)
    >>> torch.equal(weight.dequantize(), tt.quantize(trainer, "int8").weight.dequantize())
    True
    """
    model = as_module(model)
    if atomic not in ("checked", "full"):
        raise ArgumentError(f"is {atomic!r}, neither 'checked' nor 'full'", name="atomic")
    if is_on_disk(model.modules()):
        refuse_groups("refit")
    start = time.perf_counter()
    optimizers = optimizers_of(optimizer)
    if optimizers:
        check_optimizer(model, optimizers)
    target = _target_of(model)
    with Deferred() as signals, closing(Writer(signals, atomic == "full")) as writer:
        work = _Refit(model, target, rename, writer, signals)
        if isinstance(source, (str, PathLike)):
            with ExitStack() as files:
                with target.together():  # a rank that cannot open it must not leave the others waiting
                    path = Path(source) if isinstance(source, PathLike) else source
                    checkpoint = files.enter_context(Checkpoint(path))
                work.listed(checkpoint)
        elif isinstance(source, Checkpoint):
            work.listed(source)
        elif isinstance(source, Mapping):
            work.listed_tensors(source)
        elif isinstance(source, Iterable) and not isinstance(source, (bytes, bytearray, Tensor, nn.Module, type)):
            work.streamed(iter(source))
        else:
            fix = "Give a path, a state dict, or pairs of names and tensors."
            raise ArgumentError(f"is {describe(source)}, not a source of named tensors", name="source", fix=fix)
        return writer.report(time.perf_counter() - start, work.left(), work.waited)


def _target_of(model: nn.Module) -> Target:
    """Return the target for ``model``, sharded or not."""
    if any(map(is_sharded, named_tensors(model).values())):
        from .sharded import ShardedTarget

        return ShardedTarget(model)
    return Target(model)


class _Refit:
    """One refit: its target, its rules, and its progress."""

    def __init__(self, model: nn.Module, target: Target, rename: Rename, writer: Writer, signals: Deferred) -> None:
        self._model, self._target, self._rename = model, target, rename
        self.writer, self._signals = writer, signals
        self.waited = 0
        self._filled: set[str] = set()
        self._optional: set[str] = set()

    def left(self) -> list[str]:
        """Return the non-persistent buffers, and the optional tensors, that were not written."""
        return sorted((transient_names(self._model) | self._optional) - self._filled)

    # -- sources that can be listed -------------------------------------------------------------------------------

    def listed_tensors(self, source: Mapping[Any, Any]) -> None:
        """Write the values of a state dict."""
        wrong = {name: fault_of_tensor(value) for name, value in source.items() if isinstance(name, str)}
        faults = [fault(name, what) for name, what in wrong.items() if what]
        faults += [
            fault("source", f"it has {describe(n)} as a key, not a name") for n in source if not isinstance(n, str)
        ]
        tensors = {name: source[name].detach() for name, what in wrong.items() if not what}
        self.listed(self._target.hold(tensors), faults)

    def listed(self, checkpoint: Checkpoint, faults: Iterable[str] = ()) -> None:
        """Write the values of ``checkpoint`` after checking that all of them fit."""
        target, rename = self._target, self._rename
        with target.together(), uncollected():
            if rename is None:
                rename = names_of_library(target.whole, checkpoint)
            given = RenamedCheckpoint(checkpoint, with_wrappers(rename, target.whole))
            draft = target.match(given, LoadOptions(is_refit=True))
            if hasattr(checkpoint, "store"):
                checkpoint.store.check_sizes()
            found = [*faults, *draft.faults, *self.writer.check(draft.steps, draft.given)]
            raise_faults(found, str(checkpoint.path), _ALL)
        self._write(lambda: self.writer.write(draft.steps, draft.given))
        self._filled, self._optional = _names_of(draft), draft.optional

    # -- iterables ----------------------------------------------------------------------------------------------------

    def streamed(self, source: Iterator[Any]) -> None:
        """Write the pairs of ``source`` as they come."""
        arrivals = Arrivals(self._target, with_wrappers(self._rename, self._target.whole), self.writer)

        def take_all() -> None:
            while (pair := self._signals.during(next, source, _END)) is not _END:
                arrivals.take(pair)
                del pair
            draft = arrivals.end()
            done = "" if self.writer.is_atomic else self.writer.describe()
            raise_faults(draft.faults, "the source", _ALL, done)
            self._filled, self._optional = _names_of(draft), draft.optional

        self._write(take_all)
        self.waited = arrivals.waited

    # -- the changes --------------------------------------------------------------------------------------------------

    def _write(self, change: Callable[[], None]) -> None:
        """Call ``change``; after an error undo it if possible, otherwise raise an error that says what was written."""
        try:
            with self._target.together(is_undone=self.writer.is_atomic):
                change()
                self._signals.during(self.writer.finish)
                self._signals.deliver()
        except BaseException as error:
            is_whole = self.writer.undo()
            if is_whole or bool(getattr(error, "faults", False)):
                raise
            if not isinstance(error, Exception):  # Ctrl-C stays Ctrl-C, but the model is no longer the old one
                error.add_note(f"the refit stopped: {self.writer.describe_stop()}")
                raise
            self.writer.stopped(error)


def _names_of(draft: Draft) -> set[str]:
    """Return all names of the tensors that ``draft`` fills."""
    return {name for step in draft.steps for name in step.component.names}
