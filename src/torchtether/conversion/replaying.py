"""Replaying recorded ops on a real device."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from ..errors import ConversionError
from ..geometry.views import extent
from ..torch_private.dispatching import tree_leaves, tree_map
from ..torch_private.initialisers import INITIALISERS
from ..torch_private.tensors import storage_id
from .programs import Const, Copy, Program, Recipe, RecordedOp, Ref


class Replay:
    """Compute the tensors of ``recipes`` on ``device``: run each step that they need once, in the recorded order."""

    def __init__(self, recipes: Iterable[Recipe], device: torch.device) -> None:
        self.device = device
        self._memory: dict[tuple[int, int], torch.UntypedStorage] = {}
        self._copies: dict[tuple[int, int], dict[Copy, torch.UntypedStorage]] = {}
        self._taken: set[int] = set()
        recipes = list(recipes)
        for program in {id(recipe.program): recipe.program for recipe in recipes}.values():
            self._run(program, {recipe.ref.memory for recipe in recipes if recipe.program is program})

    def tensor(self, recipe: Recipe) -> Tensor:
        """Return the tensor of ``recipe``. Tensors of recipes over one memory share it, if they are of one copy."""
        place = id(recipe.program), recipe.ref.memory
        copies = self._copies.setdefault(place, {})
        if recipe.copy not in copies:
            copies[recipe.copy] = self._memory[place].clone() if copies else self._memory[place]
        return _over(copies[recipe.copy], recipe.ref, self.device)

    def _run(self, program: Program, targets: set[int]) -> None:
        numbers = program.slice(targets)
        last = {
            m: n for n in numbers for m in (*program.steps[n].touches, *(r.memory for _, r in program.steps[n].makes))
        }
        done: dict[int, list[int]] = {}
        for memory, number in last.items():
            if memory not in targets:
                done.setdefault(number, []).append(memory)
        used = targets.union(*(program.steps[number].touches for number in numbers))
        for number in numbers:
            with torch.no_grad(), _by_default(program.steps[number].default_dtype):
                self._step(id(program), program.steps[number], used)
            for memory in done.get(number, ()):
                self._memory.pop((id(program), memory), None)

    def _step(self, program: int, step: RecordedOp, used: set[int]) -> None:
        """Run ``step``, and keep its outputs over memories in ``used``; others may have another shape than on meta."""
        # numbers that a seed determines are drawn on the CPU: the same seed gives others on other devices
        device = self.device if step.state is None else torch.device("cpu")
        moved: list[tuple[Tensor, Tensor]] = []

        def real(value: Any) -> Any:
            if isinstance(value, Ref):
                held = self._tensor(program, value)
                if held.device != device:
                    moved.append((held, held.to(device)))
                    return moved[-1][1]
                return held
            if isinstance(value, Const):
                return value.tensor
            if isinstance(value, torch.Generator) and step.state is not None:
                return None
            return device if isinstance(value, torch.device) and value.type == "meta" else value

        args, kwargs = tree_map(real, step.args), tree_map(real, step.kwargs)
        if step.state is not None:
            with _drawing(self._tensor(program, step.state)):
                out = _op(step.op)(*args, **kwargs)
        else:
            out = _op(step.op)(*args, **kwargs) if step.op else args[0].to(self.device, copy=True)
        for held, copy in moved:
            held.copy_(copy)
        outputs = tree_leaves(out)
        for i, ref in step.makes:
            if ref.memory in used and (program, ref.memory) not in self._memory:
                self._memory[program, ref.memory] = self._laid_out(outputs[i].to(self.device), ref, step)

    def _laid_out(self, tensor: Tensor, ref: Ref, step: RecordedOp) -> torch.UntypedStorage:
        """Return memory of ``tensor`` with the geometry of ``ref``: a copy if the real op chose another geometry."""
        if tensor.dtype != ref.dtype or tuple(tensor.shape) != ref.size:
            on_meta, real = f"{ref.dtype} {ref.size}", f"{tensor.dtype} {tuple(tensor.shape)}"
            raise ConversionError(
                f"{step.op} made {on_meta} on meta, but {real} on {self.device}",
                fix="Build the model on the device itself.",
            )
        laid = (tuple(tensor.stride()), tensor.storage_offset(), tensor.is_conj(), tensor.is_neg())
        if laid == (ref.stride, ref.offset, ref.is_conj, ref.is_neg) and storage_id(tensor) not in self._taken:
            self._taken.add(storage_id(tensor))
            return tensor.untyped_storage()
        memory = torch.empty(
            ref.offset + extent(ref.size, ref.stride), dtype=ref.dtype, device=self.device
        ).untyped_storage()
        _over(memory, ref, self.device).copy_(tensor)
        return memory

    def _tensor(self, program: int, ref: Ref) -> Tensor:
        return _over(self._memory[program, ref.memory], ref, self.device)


@contextmanager
def _by_default(dtype: torch.dtype | None) -> Iterator[None]:
    """Make ``dtype`` the default inside the block, unless it is ``None``: in all threads, so for few ops only."""
    before = torch.get_default_dtype()
    if dtype is None or dtype == before:
        yield
        return
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


@contextmanager
def _drawing(state: Tensor) -> Iterator[None]:
    """Draw from a generator with ``state`` inside the block, and leave its new state there."""
    with torch.random.fork_rng(devices=()):
        torch.set_rng_state(state.cpu())
        yield
        state.copy_(torch.get_rng_state())


def _over(memory: torch.UntypedStorage, ref: Ref, device: torch.device) -> Tensor:
    made = torch.empty(0, dtype=ref.dtype, device=device)
    made.set_(memory, ref.offset, ref.size, ref.stride)
    made = made.conj() if ref.is_conj else made
    return torch.ops.aten._neg_view(made) if ref.is_neg else made  # type: ignore[no-any-return]


def _op(name: str) -> Callable[..., Any]:
    space, _, rest = name.partition("::")
    if space == INITIALISERS:
        return getattr(nn.init, rest)  # type: ignore[no-any-return]
    packet, _, overload = rest.partition(".")
    op: Callable[..., Any] = getattr(getattr(getattr(torch.ops, space), packet), overload)
    return op
