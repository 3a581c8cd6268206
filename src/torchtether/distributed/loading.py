"""Loading on many ranks: each rank reads the rows that it holds, and all ranks succeed, or none."""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Mapping
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from .._checks import as_module, check_path
from ..conversion.materializing import forget_recipes, tell_filled
from ..conversion.selection import Rules
from ..errors import LoadError
from ..exchange.exchange import Exchange
from ..exchange.optimizer_state import Optimizers, check_belongs, optimizers_of
from ..geometry.shards import box_of
from ..loading.options import Device, Dtype, LoadOptions, Ties
from ..loading.plan import LoadPlan, make_plan
from ..loading.report import LoadReport
from ..loading.restricting import Box, restrict
from ..loading.steps import Draft, Step, names_of_weights
from ..loading.stream import set_extra_states
from ..progress import Progress
from ..renaming.steps import Rename
from ..ties.names import named_tensors
from ..torch_private.fsdp2 import fsdp2_states, offloaded_parameters, renew_shards
from .optimizers import OptimizerLoad
from .ranks import Ranks
from .shadows import (
    check_unwrapped,
    device_of,
    local_shadow,
    reshard,
    sharded_tensors,
    stand_in,
    whole_shadow,
    with_local,
)


def load(
    model: nn.Module,
    path: Path | str,
    *,
    quantize: Rules = None,
    dtype: Dtype = None,
    device: Device = None,
    strict: bool = True,
    ties: Ties = "match",
    rename: Rename = None,
    progress: Progress = None,
    optimizer: Optimizers = None,
    process_group: Any = None,
) -> LoadReport:
    """Load this rank's part of the values at ``path`` into the model's Parameter objects.

    The arguments are those of ``tt.load``, except ``mmap`` and ``revision``; every rank of ``process_group`` (by
    default all) calls it with the same arguments. Sharded parameters (``fully_shard``, any DTensor) on ``meta`` get
    memory for this rank's rows alone, on the device of their mesh (on the CPU with ``CPUOffloadPolicy``). Sharded
    parameters with memory are filled in place, before or after the first forward. An optimizer built before or after
    holds the same parameters. Every rank reads tensors that are not sharded whole.

    If a tensor is stored row by row (floats, Weights that ``tt.save`` wrote, and so on), a rank reads only the bytes of
    its own rows, and encodes only those with ``quantize``. This holds for published formats too, also for GPTQ and
    AWQ, which store rows as columns: runs of 4 KiB and more are read separately. Exceptions: two formats (quanto's
    qint2 and qint4, HQQ) have codes of distant rows in one byte and are read whole, and a scheme with one scale for
    all rows is encoded from all rows on every rank. Both hold one whole tensor at a time. Afterwards FSDP2 gathers the
    loaded values in ``forward``, also where torch's own ``load_state_dict(assign=True)`` had left it with older ones.

    ``path`` may also be a folder by ``torch.distributed.checkpoint``, from this library or another. The state of
    ``optimizer`` follows its parameters' device and dtype; if the checkpoint holds an optimizer's state, that is
    loaded into it.

    All faults are found before anything changes. If one rank fails, all ranks raise with its text, and tensors that
    were on ``meta`` still are, on every rank.

    Raises:
        CheckpointError: a file is absent or damaged.
        LoadError: the checkpoint does not fit the model, rows cut a block, another rank failed, or ranks would load
            different schemes or dtypes.
        SchemeError: values to be quantized are not finite.
        OptimizerError: the optimizer belongs to another model.
        ConversionError: something holds a parameter that must be exchanged, such as FSDP2 after its first forward; or
            the model is under DDP or FSDP1.

    >>> import torch, torchtether as tt, tempfile
    >>> from torchtether import distributed
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     tt.save(torch.nn.Linear(2, 3), folder)
    ...     print(distributed.load(torch.nn.Linear(2, 3), folder).bytes)
    36
    """
    ranks = Ranks(process_group)
    options = LoadOptions(quantize, dtype, device, strict, ties, rename)
    work: _Whole | _Sharded | None = None
    state: OptimizerLoad | None = None
    try:
        with ranks.all_or_none(LoadError):
            model = as_module(model)
            check_path(path)
            check_unwrapped(model, "load")
            optimizer = optimizers_of(optimizer)  # once: it may be a generator
            reshard(model)
            is_sharded = bool(sharded_tensors(model))
            work = (_Sharded if is_sharded else _Whole)(model, path, options, optimizer)
            state = OptimizerLoad.find(model, optimizer, Path(path))
        stored = {} if not optimizer else {"optimizer": "not stored" if state is None else "stored"}
        _check_alike(ranks, work.outcome | stored)
        with ranks.all_or_none(LoadError, _AGAIN):
            report = work.read(progress)
        with ranks.all_or_none(LoadError, _AGAIN):
            work.finish()
            nbytes = 0 if state is None else state.read()
        if state is not None:
            state.finish()
        return dataclasses.replace(report, bytes=report.bytes + nbytes)
    finally:
        for one in (work, state):
            if one is not None:
                one.close()


_AGAIN = "Load again on all ranks: the other ranks may have new values."


def _outcome(draft: Draft) -> dict[str, str]:
    """Return what each name of the model becomes: its scheme and dtype, or missing."""
    made = dict.fromkeys(draft.missing, "missing")
    for step in draft.steps:
        made |= dict.fromkeys(step.component.names, f"{step.scheme or ''} {step.dtype}".strip())
    return made


def _check_alike(ranks: Ranks, outcome: Mapping[str, str]) -> None:
    """Raise LoadError on every rank if ranks have different outcomes for a name. Their models may differ."""
    if len(set(ranks.gather(hashlib.sha256(repr(sorted(outcome.items())).encode()).hexdigest()))) == 1:
        return
    first: dict[str, tuple[str, int]] = {}
    for rank, found in enumerate(ranks.gather(outcome)):
        for name, what in found.items():
            before, other = first.setdefault(name, (what, rank))
            if what != before:
                raise LoadError(
                    f"is {before} on rank {other} and {what} on rank {rank}",
                    name=name,
                    fix="Give all ranks the same checkpoint and arguments.",
                )


def find_boxes(held: Mapping[str, Tensor], draft: Draft) -> tuple[dict[str, Box], list[str]]:
    """Return this rank's box of each sharded tensor of ``held`` that ``draft`` fills, by each name, and the faults."""
    boxes, faults = dict[str, Box](), []
    filled = [(step.name, step.component.names) for step in draft.steps]
    for first, names in [*filled, *((name, (name,)) for name in draft.computed)]:
        tensor = held[first]
        if isinstance(tensor, DTensor):
            try:
                boxes.update(dict.fromkeys(names, box_of(tensor)))
            except NotImplementedError as error:
                faults.append(f"{first}: {error}. Redistribute it first.")
    return boxes, faults


class _Whole:
    """Load a model without sharded tensors, as one process does."""

    def __init__(self, model: nn.Module, path: Path | str, options: LoadOptions, optimizer: Optimizers) -> None:
        self._plan = make_plan(model, path, options, optimizer)
        self.outcome = _outcome(self._plan.draft)
        try:
            self._plan.check()
        except BaseException:
            self.close()
            raise

    def read(self, progress: Progress) -> LoadReport:
        """Read all values into the model."""
        return self._plan.apply(progress=progress)

    def finish(self) -> None:
        """Do nothing: ``read`` has filled the model."""

    def close(self) -> None:
        """Close the files."""
        self._plan.close()


class _Sharded:
    """Load a model with DTensors: plan on a shadow of whole tensors, read into a shadow of the local tensors."""

    def __init__(self, model: nn.Module, path: Path | str, options: LoadOptions, optimizer: Optimizers) -> None:
        self._model, self._optimizer = model, optimizers_of(optimizer)
        check_belongs(model, self._optimizer)
        self._held = named_tensors(model)
        self._part = stand_in(model, local_shadow)
        whole = make_plan(stand_in(model, whole_shadow, views=True), path, options)
        self.outcome = _outcome(whole.draft)
        try:
            boxes, faults = self._boxes(whole)
            draft = restrict(whole.draft, self._part, boxes, self._place, faults)
            self._extra, draft.extra = draft.extra, []  # for the modules of the model, not of its shadow
            self._plan = LoadPlan(self._part, whole.checkpoint, draft, options)
            self._plan.check()
            self._check_exchange()
        except BaseException:
            whole.close()
            raise

    def close(self) -> None:
        """Close the files."""
        self._plan.close()

    # -- planning -------------------------------------------------------------------------------------------------

    def _boxes(self, whole: LoadPlan) -> tuple[dict[str, Box], list[str]]:
        """Return this rank's box of each sharded tensor that ``whole`` loads, by each name, and the faults."""
        draft = whole.draft
        boxes, faults = find_boxes(self._held, draft)
        tied = [
            f"{name}: the checkpoint ties it differently, and ties of a sharded model cannot change. "
            "Change them before fully_shard, or load with ties='model'."
            for name in (*draft.untie, *(alias for _, alias in draft.tie))
        ]
        return boxes, tied + faults

    def _place(self, name: str) -> torch.device:
        """Return the device of the tensor ``name``: where FSDP2 keeps it, or where the ranks of its mesh compute."""
        held = self._held[name]
        if isinstance(held, DTensor):
            return torch.device("cpu") if name in self._offloaded else device_of(held.device_mesh)
        return device_of(next(iter(sharded_tensors(self._model).values())).device_mesh)

    @cached_property
    def _offloaded(self) -> set[str]:
        """Return the names of the parameters that FSDP2 keeps on the CPU."""
        held = {id(param) for state in fsdp2_states(self._model) for param in offloaded_parameters(state)}
        return {name for name, tensor in self._held.items() if id(tensor) in held}

    def _changed(self) -> list[Step]:
        """Return the steps that exchange tensors of this rank, rather than fill them in place."""
        return [step for step in self._plan.steps if not step.in_place]

    def _check_exchange(self) -> None:
        """Raise ConversionError, before anything is read, if a tensor could not be exchanged afterwards."""
        held = [self._held[name] for step in self._changed() for name in step.component.names]
        if held:
            with Exchange(self._model, optimizer=self._optimizer, verb="load") as exchange:
                exchange.check(held)

    # -- reading --------------------------------------------------------------------------------------------------

    def read(self, progress: Progress) -> LoadReport:
        """Read this rank's part into the shadow: in place, or into new memory, which the model does not have yet."""
        return self._plan.apply(progress=progress)

    # -- afterwards -----------------------------------------------------------------------------------------------

    def finish(self) -> None:
        """Exchange the model's tensors for those that were read, and make FSDP2 gather the new ones."""
        read, changed = named_tensors(self._part), self._changed()
        names = [name for step in changed for member in step.component.members for name in member.names[:1]]
        draft = self._plan.draft
        names += [n for n in (*draft.recorded, *draft.computed) if self._held[n].is_meta and not read[n].is_meta]
        if names:
            with Exchange(self._model, optimizer=self._optimizer, verb="load") as exchange:
                exchange.check([self._held[name] for name in names])
                for name in names:
                    held, new = self._held[name], read[name].detach()
                    exchange.put(held, with_local(held, new) if isinstance(held, DTensor) else new)
                exchange.know_weights(names_of_weights(changed))
        if not any(read[name].is_meta for name in draft.recorded):  # else tt.materialize needs them
            forget_recipes(self._model)
        tell_filled(self._model, draft.missing)
        set_extra_states(self._model, draft.given, self._extra)
        for state in fsdp2_states(self._model):
            renew_shards(state)
