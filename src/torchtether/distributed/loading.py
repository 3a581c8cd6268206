"""Loading on many ranks: each reads the rows that it holds, and all have them, or none."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from ..conversion.materializing import forget_recipes
from ..conversion.quantizing import keep_loading
from ..conversion.selection import Rules
from ..errors import LoadError, TetherError
from ..exchange.exchange import Exchange
from ..geometry.views import Shape
from ..loading.contents import LoadPlan, names_of_weights, plan_load
from ..loading.matching import Device, Draft, Dtype, Step, Ties, is_filled
from ..loading.report import LoadReport
from ..progress import Progress
from ..renaming.pieces import Range
from ..renaming.renamed_checkpoint import RenamedCheckpoint as Arranged
from ..renaming.steps import Rename
from ..schemes import Scheme
from ..ties.components import Component, find_components
from ..ties.names import named_tensors
from ..torch_private.fsdp2 import fsdp2_state, offloaded_parameters, renew_shards
from ..weights.ops.rows import part_rows
from ..weights.weight import Weight
from .optimizers import OptimizerLoad
from .ranks import Ranks
from .shadows import box_of, device_of, local_shadow, redone, reshard, sharded_tensors, stand_in, whole_shadow


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
    optimizer: Any = None,
    process_group: Any = None,
) -> LoadReport:
    """Every rank holds its part of the values at ``path``, in the Parameter objects that it had before.

    The arguments are those of ``tt.load``; every rank of ``process_group`` (by default all) calls it, with the same
    ones. Sharded parameters (``fully_shard``, any DTensor) on ``meta`` get memory for this rank's rows alone, on the
    device of their mesh (on the CPU with ``CPUOffloadPolicy``); real ones are filled where they are, before or after
    the first forward. An optimizer built before or after holds the same parameters. What is not sharded every rank
    reads whole.

    Of a tensor that is stored as its rows are (floats; Weights that ``tt.save`` wrote; and so on) a rank reads the
    bytes of its own rows and no others, and encodes those with ``quantize``. Of published formats too, whichever way
    their words lie: of the columns of GPTQ and AWQ pieces of 4 KiB and more are read by themselves. Two have codes of
    rows far apart in one byte (quanto's qint2 and qint4, HQQ) and are read whole; a scheme with one scale for all rows
    is encoded from all of them on every rank; both hold one tensor at a time. Afterwards what FSDP2 gathers in
    ``forward`` is what was loaded, also where torch's own ``load_state_dict(assign=True)`` had left it at something
    older.

    ``path`` may also be a folder by ``torch.distributed.checkpoint``, ours or another's. With ``optimizer`` its state
    follows its parameters' device and dtype, and if the checkpoint holds the state of one, that is what it has after.

    All faults are found before anything changes. If one rank fails, all do, with its text; what was on ``meta`` still
    is then, on every rank.

    Raises:
        CheckpointError: a file is absent or damaged.
        LoadError: the checkpoint does not fit the model, rows cut a block, or another rank failed.
        ConversionError: something holds a parameter that must be exchanged, such as FSDP2 after its first forward.

    >>> import torch, torchtether as tt, tempfile
    >>> from torchtether import distributed
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     tt.save(torch.nn.Linear(2, 3), folder)
    ...     print(distributed.load(torch.nn.Linear(2, 3), folder).bytes)
    36
    """
    ranks = Ranks(process_group)
    options: dict[str, Any] = {
        "quantize": quantize,
        "dtype": dtype,
        "device": device,
        "strict": strict,
        "ties": ties,
        "rename": rename,
    }
    work: _Whole | _Sharded | None = None
    state: OptimizerLoad | None = None
    try:
        with ranks.all_or_none(LoadError):
            reshard(model)
            is_sharded = bool(sharded_tensors(model))
            work = (_Sharded if is_sharded else _Whole)(model, path, options, optimizer)
            state = OptimizerLoad.find(model, optimizer, Path(path))
        with ranks.all_or_none(LoadError):
            report = work.read(progress)
        with ranks.all_or_none(LoadError):
            work.finish()
            nbytes = 0 if state is None else state.read()
        if state is not None:
            state.finish()
        return dataclasses.replace(report, bytes=report.bytes + nbytes)
    finally:
        for one in (work, state):
            if one is not None:
                one.close()


class _Whole:
    """The load of a model of which every rank has all, so that it is that of one process."""

    def __init__(self, model: nn.Module, path: Path | str, options: dict[str, Any], optimizer: Any) -> None:
        self._plan = plan_load(model, path, optimizer=optimizer, **options)
        try:
            self._plan.check()
        except BaseException:
            self.close()
            raise

    def read(self, progress: Progress) -> LoadReport:
        return self._plan.apply(progress=progress)

    def finish(self) -> None:
        pass

    def close(self) -> None:
        self._plan.close()


class _Sharded:
    """The load of a model with DTensors: planned on a shadow of the whole, read into a shadow of this rank's part."""

    def __init__(self, model: nn.Module, path: Path | str, options: dict[str, Any], optimizer: Any) -> None:
        self._model, self._options, self._optimizer = model, options, optimizer
        self._held = named_tensors(model)
        self._whole = plan_load(stand_in(model, whole_shadow, views=True), path, **options)
        try:
            found = self._whole.draft
            found.faults += self._faults_of_ties(found)
            found.steps = [self._without_views(step, found) for step in found.steps]
            self._part = stand_in(model, local_shadow)
            self._boxes = self._cut(found)
            self._plan, self._together = self._localized(found)
            self._whole.faults = tuple(found.faults)
            self._whole.check()
            self._check_exchange()
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        self._whole.close()

    # -- planning -------------------------------------------------------------------------------------------------

    def _faults_of_ties(self, found: Draft) -> list[str]:
        names = [*found.untie, *(alias for _, alias in found.tie)]
        return [
            f"{name}: the checkpoint ties it otherwise, and ties of a sharded model cannot change. "
            "Change them before fully_shard, or load with ties='model'."
            for name in names
        ]

    def _without_views(self, step: Step, found: Draft) -> Step:
        """``step`` reads the owner alone; names that are views of it have been compared with it, or were left out."""
        sources = tuple(source for source in step.sources if source.name in self._held)
        if not sources:
            name = step.sources[0].name
            found.faults.append(
                f"{step.name}: the checkpoint has only {name}, a view of it. "
                "Load it in one process, or store the owner too: save with tt.save."
            )
        return step._replace(sources=sources or step.sources)

    def _cut(self, found: Draft) -> dict[str, tuple[Range, ...]]:
        """The box of this rank, by every name of each sharded tensor that is loaded."""
        boxes: dict[str, tuple[Range, ...]] = {}
        for step in found.steps:
            held = self._held[step.name]
            if not isinstance(held, DTensor) or step.sources[0].name not in self._held:
                continue
            try:
                box = box_of(held)
            except NotImplementedError as error:
                found.faults.append(f"{step.name}: {error}. Redistribute it first.")
                continue
            boxes.update((source.name, box) for source in step.sources)
        return boxes

    def _localized(self, found: Draft) -> tuple[LoadPlan, list[Step]]:
        """The plan for this rank's part, and the steps for which every rank needs all rows."""
        given = found.given.cut(self._boxes)
        components = find_components(self._part)
        home = {name: component for component in components for name in component.names}
        steps: list[Step] = []
        together: list[Step] = []
        for step in found.steps:
            held, name = self._held[step.name], step.sources[0].name
            if not isinstance(held, DTensor):
                steps.append(step._replace(component=home[step.name], device=self._device(step)))
            elif name in self._boxes:
                mine = self._local(step, home[step.name], given, found)
                is_together = not step.is_given and step.scheme is not None and _needs_all(step.scheme, held.shape)
                (together if is_together else steps).append(mine)
        local = dataclasses.replace(found, given=given, steps=steps, components=components)
        options = {**self._options, "device": self._options["device"] or self._home_device()}
        return LoadPlan(self._part, self._whole.checkpoint, local, options), together

    def _local(self, step: Step, component: Component, given: Arranged, found: Draft) -> Step:
        name = step.sources[0].name
        spec = self._whole.draft.given.spec(name)
        if step.is_given and not spec.is_contiguous:
            found.faults.append(
                f"{step.name}: the checkpoint holds it with the strides {spec.stride}, and FSDP2 shards contiguous "
                "Weights. Dequantize the checkpoint first, and quantize it as it is loaded."
            )
            return step
        try:
            if step.is_given:
                given.check(name)
            elif step.scheme is not None and not step.scheme.transparent:
                _check_rows(step.scheme, tuple(self._held[step.name].shape), self._boxes[name])
        except TetherError as error:
            found.faults.append(
                f"{step.name}: {error.what}. Use another number of ranks, a scheme with other blocks, or no scheme."
            )
            return step
        local = step._replace(component=component, device=self._device(step), nbytes=given.nbytes(name))
        return local._replace(in_place=is_filled(local))

    def _device(self, step: Step) -> torch.device:
        """Where it goes: as asked, else where it is, else (from ``meta``) where its ranks compute."""
        if not step.held.is_meta or any(name in self._whole.draft.devices for name in step.component.names):
            return step.device
        held = self._held[step.name]
        if isinstance(held, DTensor):
            return torch.device("cpu") if step.name in self._offloaded else device_of(held.device_mesh)
        return self._home_device()

    def _home_device(self) -> torch.device:
        return device_of(next(iter(sharded_tensors(self._model).values())).device_mesh)

    @property
    def _offloaded(self) -> set[str]:
        """The parameters that FSDP2 keeps on the CPU."""
        states = [fsdp2_state(module) for module in self._model.modules()]
        held = {id(param) for state in states if state is not None for param in offloaded_parameters(state)}
        return {name for name, tensor in self._held.items() if id(tensor) in held}

    def _changed(self) -> list[Step]:
        return [step for step in (*self._plan.steps, *self._together) if not step.in_place]

    def _check_exchange(self) -> None:
        """Raises, before anything is read, what would refuse to be exchanged when it has been read."""
        held = [self._held[name] for step in self._changed() for name in step.component.names]
        if held:
            with Exchange(self._model, optimizer=self._optimizer, verb="load") as exchange:
                exchange.check(held)

    # -- reading --------------------------------------------------------------------------------------------------

    def read(self, progress: Progress) -> LoadReport:
        """This rank's part is read, into new memory where it was on ``meta``; the model knows nothing of it yet."""
        for step in self._together:
            self._encode_together(step)
        report = self._plan.apply(progress=progress)
        return dataclasses.replace(
            report,
            tensors=report.tensors + len(self._together),
            bytes=report.bytes + sum(self._all_bytes(step) for step in self._together),
            quantized={**report.quantized, **{step.name: str(step.scheme) for step in self._together}},
            tied=(*report.tied, *(step.tie for step in self._together if step.tie is not None)),
        )

    def _all_bytes(self, step: Step) -> int:
        return self._whole.draft.given.nbytes(step.sources[0].name)

    def _encode_together(self, step: Step) -> None:
        """All rows are read and encoded, as one process would, and this rank's kept."""
        name, held = step.sources[0].name, step.held
        values = self._whole.draft.given.read_briefly(name).to(step.device)
        assert step.scheme is not None
        made = Weight.encode(values, step.scheme, tie=step.tie)
        del values
        (start, stop), *_ = self._boxes[name]
        rows = made.narrow(0, start, stop - start).to(step.dtype)
        assert isinstance(rows, Weight)
        parts = {role: part.clone() for role, part in rows.parts.items()}
        mine = Weight(parts, rows.spec.replace(tie=step.tie))
        if step.in_place and isinstance(held, Weight):
            held.set_parts(mine.parts)
            return
        with Exchange(self._part, verb="load") as exchange:
            exchange.put(held, mine)

    # -- afterwards -----------------------------------------------------------------------------------------------

    def finish(self) -> None:
        """The model's tensors are what has been read, and FSDP2 gathers those."""
        read, changed = named_tensors(self._part), self._changed()
        names = [name for step in changed for member in step.component.members for name in member.names[:1]]
        names += [name for name in self._whole.draft.recorded if self._held[name].is_meta and not read[name].is_meta]
        if names:
            with Exchange(self._model, optimizer=self._optimizer, verb="load") as exchange:
                exchange.check([self._held[name] for name in names])
                for name in names:
                    held, new = self._held[name], read[name].detach()
                    exchange.put(held, redone(held, new) if isinstance(held, DTensor) else new)
                keep_loading(self._model, exchange, names_of_weights(changed))
        if self._whole.draft.recorded:
            self._take_attributes()
        for module in self._model.modules():
            state = fsdp2_state(module)
            if state is not None:
                renew_shards(state)

    def _take_attributes(self) -> None:
        """Tensors that are mere attributes of modules, which ``tt.on_meta`` recorded too."""
        for module, part in zip(self._model.modules(), self._part.modules(), strict=True):
            for name, value in vars(part).items():
                before = vars(module).get(name)
                if isinstance(value, Tensor) and isinstance(before, Tensor) and before.is_meta and not value.is_meta:
                    vars(module)[name] = value
        forget_recipes(self._model)


def _needs_all(scheme: Scheme, shape: Sequence[int]) -> bool:
    """Whether the values of some rows cannot be encoded without the others."""
    return not scheme.transparent and any(part.span == 0 for part in scheme.layout(tuple(shape)).values())


def _check_rows(scheme: Scheme, shape: Shape, box: Sequence[Range]) -> None:
    start, stop = box[0]
    part_rows(scheme.layout(shape), shape, start, stop)
