"""Recording how tensors on ``meta`` are computed while a model is built, so that a real device can replay it.

Each op that makes or writes memory on ``meta`` is a step.  A step refers to a tensor by a ``Ref``: the number of its
memory, and the geometry over it.  So views need no steps, and the record keeps no tensor on ``meta`` alive.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from collections.abc import Set as AbstractSet
from contextlib import contextmanager
from numbers import Integral
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from ..geometry.blocks import is_strided
from ..torch_private.dispatching import TorchDispatchMode, schema_of, tree_leaves, tree_map
from ..torch_private.initialisers import INITIALISERS, initialiser_that_asks
from ..torch_private.tensors import storage_id
from .generators import Generators, labelled
from .programs import Const, Program, Recipe, RecordedOp, Ref
from .replaying import Replay

_SMALL = 2**20
"""Elements up to which a real tensor that enters the record is copied at once; larger ones are copied by ``close``."""

_NO_MEMORY = -1
"""The number of no memory: what depends on it has no recipe."""


class Recorder(TorchDispatchMode):
    """Record every op on ``meta`` in ``program`` while active; ``close`` keeps only the steps that are needed."""

    def __init__(self) -> None:
        super().__init__()
        self.program = Program()
        self._numbers: dict[int, int] = {}
        self._memories: list[torch.UntypedStorage] = []  # kept alive while recording, so that no id is reused
        self._large: list[Const] = []
        self.failed: dict[str, None] = {}
        """The names of the ops that raised because torch cannot run them on ``meta``, in order."""
        self.generators: Generators = Generators(self.program, self.state)

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # if True, torch imports its compiler at the first op, which takes seconds

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None) -> Any:
        kwargs = kwargs or {}
        if not hasattr(func, "_schema"):  # a higher-order op
            return func(*args, **kwargs)
        try:
            out = func(*args, **kwargs)
        except (NotImplementedError, RuntimeError) as error:
            real = self._result_on_values(func, args, kwargs)
            if real is None:
                if isinstance(error, NotImplementedError):
                    self.failed[func.name()] = None
                raise
            out = tree_map(lambda x: x.to("meta") if isinstance(x, Tensor) else x, real)
        self._record(func, args, kwargs, out)
        return out

    def ref(self, tensor: Tensor) -> Ref:
        """Return the Ref of ``tensor``, whose memory gets a number if it has none."""
        key = storage_id(tensor)
        if key not in self._numbers:
            self._numbers[key] = len(self._numbers)
            self._memories.append(tensor.untyped_storage())
        return Ref(
            self._numbers[key],
            tensor.dtype,
            tuple(tensor.shape),
            tuple(tensor.stride()),
            int(tensor.storage_offset()),
            tensor.is_conj(),
            tensor.is_neg(),
        )

    def recipe(self, tensor: Tensor) -> Recipe | None:
        """Return the recipe of ``tensor``; ``None`` if the record does not determine its values."""
        if not _is_meta(tensor) or storage_id(tensor) not in self._numbers:
            return None
        ref = self.ref(tensor)
        return Recipe(self.program, ref) if self.program.knows(ref.memory) else None

    def add_constant(self, made: Tensor, value: Tensor) -> None:
        """Record that ``made``, on ``meta``, has the values of ``value``: ``torch.tensor`` shows them to no op."""
        ref = self.ref(made)
        if ref.memory not in self.program.history:
            self._put(ref, self._const(value))

    def initialise(self, name: str, arguments: dict[str, Any]) -> None:
        """Record a call of the function ``name`` of ``torch.nn.init``, which fills the argument ``tensor``."""
        memory = {self.ref(arguments["tensor"]).memory}
        self._append(f"{INITIALISERS}::{name}", (), arguments, (), memory, memory, "generator" in arguments)

    def state(self, value: Tensor) -> Ref:
        """Return the Ref of a memory with the bytes ``value``, the state of a random generator."""
        ref = self.ref(value)
        self._put(ref, Const(value.clone()))
        return ref

    def _put(self, ref: Ref, const: Const) -> None:
        self.program.append(RecordedOp("", (const,), {}, ((0, ref),), frozenset(), None))

    def overwrite(self, made: Tensor, value: Tensor | None) -> None:
        """Record that ``made``, on ``meta``, has the values of ``value`` from here on; ``None`` if they are unknown."""
        if value is not None:
            with torch.no_grad():
                made.copy_(value)
            return
        memory = self.ref(made).memory
        self.program.append(RecordedOp("", (), {}, (), frozenset({_NO_MEMORY}), None), [memory])

    def value_of(self, tensor: Tensor) -> Tensor | None:
        """Return the values that ``tensor`` would have on the CPU, for constructors that read them.

        Return ``None`` if the record does not determine them, or they are random.
        """
        recipe = self.recipe(tensor)
        if recipe is None or self.program.is_random(recipe.ref.memory):
            return None
        return Replay([recipe], torch.device("cpu")).tensor(recipe)

    def close(self, kept: Iterable[Recipe]) -> None:
        """Keep the steps that the recipes ``kept`` need, and release every tensor and memory of the model."""
        self.program.keep({recipe.ref.memory for recipe in kept})
        for step in self.program.steps.values():
            for const in tree_leaves((step.args, step.kwargs)):
                if isinstance(const, Const) and const.version is not None:
                    const.tensor, const.version = const.tensor.detach().clone(), None
        self._numbers.clear()
        self._memories.clear()

    def is_stale(self, recipe: Recipe) -> bool:
        """Return whether a large real tensor in ``recipe`` was written to after it was recorded."""
        if all(const.version == const.tensor._version for const in self._large):
            return False
        steps = (self.program.steps[number] for number in self.program.slice([recipe.ref.memory]))
        consts = (x for step in steps for x in tree_leaves((step.args, step.kwargs)) if isinstance(x, Const))
        return any(const.version not in (None, const.tensor._version) for const in consts)

    def _record(self, func: Any, args: Any, kwargs: dict[str, Any], out: Any) -> None:
        inputs = [x for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
        outputs = [x if isinstance(x, Tensor) else None for x in tree_leaves(out)]
        if not any(x is not None and x.is_meta for x in (*inputs, *outputs)):
            return
        if any(x is not None and x.is_meta and not is_strided(x) for x in (*inputs, *outputs)):
            return  # the memory of wrappers and sparse tensors cannot be recorded
        own = {storage_id(x) for x in inputs if _is_meta(x)}  # ``lift_fresh`` returns its input
        memories = [None if x is None or not _is_meta(x) else storage_id(x) for x in outputs]
        new = [i for i, m in enumerate(memories) if m is not None and m not in self._numbers and m not in own]
        written = [x for x in _written(func, args, kwargs) if _is_meta(x)]
        if not new and not written:
            return  # a view, or an op whose result is not a tensor
        touched = {self.ref(x).memory for x in inputs if _is_meta(x)}
        changed = {self.ref(x).memory for x in written}
        makes = tuple((i, self.ref(x)) for i in new if (x := outputs[i]) is not None)
        kwargs, by_default = _settled(func, kwargs, inputs, {ref.dtype for _, ref in makes})
        name = func.name() if "." in func.name().partition("::")[2] else f"{func.name()}.default"
        draws = torch.Tag.nondeterministic_seeded in func.tags
        self._append(name, args, kwargs, makes, touched, changed, draws, by_default)

    def _append(
        self,
        name: str,
        args: Sequence[Any],
        kwargs: dict[str, Any],
        makes: tuple[tuple[int, Ref], ...],
        touched: set[int],
        changed: set[int],
        draws: bool,
        by_default: bool = False,
    ) -> None:
        """Append the op ``name``; ``draws`` if it draws random numbers, ``by_default`` if the default dtype matters."""
        state = self.generators.state_for(args, kwargs) if draws else None
        drawn = set() if state is None else {state.memory}
        step = RecordedOp(
            name,
            tuple(tree_map(self._note, args)),
            tree_map(self._note, kwargs),
            makes,
            frozenset(touched | drawn),
            torch.get_default_dtype() if by_default else None,
            draws and state is None,
            state,
        )
        self.program.append(step, changed | drawn)

    def _note(self, value: Any) -> Any:
        if not isinstance(value, Tensor):
            return value
        return self.ref(value) if _is_meta(value) else self._const(value)

    def _const(self, value: Tensor) -> Const:
        if value.numel() <= _SMALL or value.is_inference():
            return Const(value.detach().clone())
        # not detached: inside a dispatch mode ``detach`` returns a tensor with a version counter of its own
        self._large.append(Const(value, value._version))
        return self._large[-1]

    def _result_on_values(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        """Return the result of ``func`` on real values, for ops like ``nonzero``; ``None`` if values are unknown."""
        tensors = [x for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor) and x.is_meta]
        values = {id(x): self.value_of(x) for x in tensors}
        if not tensors or any(value is None for value in values.values()) or _written(func, args, kwargs):
            return None
        args, kwargs = tree_map(lambda x: values.get(id(x), x) if isinstance(x, Tensor) else x, (args, kwargs))
        return func(*args, **kwargs)


def _settled(
    func: Any, kwargs: dict[str, Any], inputs: Sequence[Tensor], made: AbstractSet[torch.dtype]
) -> tuple[dict[str, Any], bool]:
    """Return ``kwargs``, with the dtype of a new tensor, and whether the result still depends on the default dtype.

    ``made`` are the dtypes of new tensors. Ops of other libraries may read the default, or mean another by ``dtype``.
    """
    arguments = schema_of(func).arguments
    if func.namespace != "aten" or any(argument.is_out for argument in arguments):  # one that is given says nothing
        return kwargs, True
    if "dtype" not in {argument.name for argument in arguments}:
        return kwargs, bool(made) and not any(x.is_floating_point() for x in inputs)
    if not inputs and kwargs.get("dtype") is None and len(made) == 1 and not any(x.is_complex for x in made):
        kwargs = {**kwargs, "dtype": next(iter(made))}
    return kwargs, bool(made) and kwargs.get("dtype") is None


_FROM_DATA: dict[Any, int] = {torch.tensor: 0, torch.as_tensor: 0, torch.asarray: 0, Tensor.new_tensor: 1}
"""Functions that read Python data, and the index of that argument."""

_VALUE_READERS = {
    getattr(Tensor, name)
    for name in "item tolist numpy __bool__ __int__ __float__ __complex__ __index__ __array__ __contains__".split()
}
"""Methods that need values, and that raise on ``meta`` before any op is dispatched."""

_FORMAT = Tensor.__format__
"""A reader of the value of a tensor without dimensions; others are formatted as ``repr`` does."""

_INDEXED = {Tensor.__getitem__, Tensor.__setitem__}
"""Methods that make a tensor of each list in an index, on the device of the indexed tensor, without an op."""

_IS_META = {Tensor.is_meta.__get__}  # type: ignore[attr-defined]
"""The question that functions of ``torch.nn.init`` ask."""

_BATCH_NORM = torch.ops.aten.native_batch_norm.default
"""An op whose schema does not say that it writes to the running statistics."""

_ELEMENTWISE = {Tensor.apply_, Tensor.map_, Tensor.map2_}
"""Methods that call a Python function for each element, and that do nothing on ``meta``."""


class DataReader(TorchFunctionMode):
    """Give a Recorder what never becomes an op: Python data of new tensors, and reads of values."""

    def __init__(self, recorder: Recorder) -> None:
        super().__init__()
        self.recorder = recorder

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None) -> Any:
        kwargs = kwargs or {}
        if func is torch.normal and not any(isinstance(x, Tensor) for x in (*args, *kwargs.values())):
            kwargs = {"device": torch.get_default_device()} | kwargs  # which torch.device gives all others
        if (func in _VALUE_READERS or (func is _FORMAT and args[0].dim() == 0)) and _is_meta(args[0]):
            value = self.recorder.value_of(args[0])
            if value is not None:
                return func(value, *args[1:], **kwargs)
        if func in _IS_META and _is_meta(args[0]) and (call := initialiser_that_asks(args[0])) is not None:
            self.recorder.initialise(*call)
        if func in _INDEXED and _is_meta(args[0]):
            args = (args[0], _index_tensors(args[1]), *args[2:])
        out = func(*args, **kwargs)
        if func in _ELEMENTWISE and _is_meta(out):
            values = [self._value(x) for x in args]
            known = all(x is not None for x in values)
            self.recorder.overwrite(out, func(*values, **kwargs) if known else None)
        where = _FROM_DATA.get(func)
        if where is not None and _is_meta(out):
            data = args[where] if len(args) > where else kwargs.get("data", kwargs.get("obj"))
            data = None if isinstance(data, Tensor) else tree_map(self._value, data)
            if data is not None and all(x is not None for x in tree_leaves(data)):
                self.recorder.add_constant(out, torch.tensor(data, dtype=out.dtype, device="cpu"))
        return out

    def _value(self, x: Any) -> Any:
        """Return ``x``, or the values of a tensor on ``meta``, which are ``None`` if they are not known."""
        return self.recorder.value_of(x) if _is_meta(x) else x


def _index_tensors(index: Any) -> Any:
    """Return ``index`` with its lists of integers or bools as tensors on the CPU, whose values are seen by an op.

    A list of lists that is the whole index stays as it is: torch reads some of these as tuples.
    """
    if isinstance(index, tuple):
        return tuple(_as_tensor(x) for x in index)
    is_nested = isinstance(index, list) and any(isinstance(x, list | tuple) for x in index)
    return index if is_nested else _as_tensor(index)


def _as_tensor(index: Any) -> Any:
    if not isinstance(index, list | tuple | range) or not all(isinstance(x, Integral) for x in tree_leaves([*index])):
        return index
    values = torch.tensor([*index], device="cpu")
    return values if values.numel() else values.long()


def _is_meta(tensor: Any) -> bool:
    return isinstance(tensor, Tensor) and tensor.is_meta and is_strided(tensor)


def _written(func: Any, args: Any, kwargs: dict[str, Any]) -> list[Tensor]:
    """Return the tensors that ``func`` writes to."""
    arguments = schema_of(func).arguments
    values = dict(zip((argument.name for argument in arguments), args, strict=False)) | kwargs
    names = {
        argument.name for argument in arguments if argument.alias_info is not None and argument.alias_info.is_write
    }
    if func is _BATCH_NORM and values["training"]:
        names |= {"running_mean", "running_var"}
    return [x for name, value in values.items() if name in names for x in tree_leaves(value) if isinstance(x, Tensor)]


@contextmanager
def recording() -> Iterator[Recorder]:
    """Put new tensors on ``meta`` inside the block, and record how they were computed."""
    recorder = Recorder()
    with labelled(), recorder.generators, torch.device("meta"), DataReader(recorder), recorder:
        yield recorder
