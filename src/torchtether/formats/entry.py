"""What a format sees of a checkpoint, and what it says about each quantized weight in it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from typing import Any, NamedTuple, NoReturn, Protocol, runtime_checkable

import torch
from torch import Tensor

from ..errors import CheckpointError, SchemeError
from ..files import Packing, Pairs, Record, Stored
from ..geometry.views import Shape
from ..schemes import Plain, Scheme
from ..weights.spec import WeightSpec

NOTHING: Mapping[str, Any] = {}

_AS_IT_IS = Plain()

_COMPUTED = (torch.float16, torch.bfloat16, torch.float32)
"""The dtypes that models compute in."""


class Entry(NamedTuple):
    """Describe one tensor as a checkpoint holds it. ``keys`` maps each of its roles to a stored key.

    A plain tensor has one role, ``tensor``; ``stride`` is then how it lay in memory. A quantized one has ``spec``, the
    roles are those of its format, and ``options`` is what ``unpack`` has to know besides. Where all roles are named
    like the parts of the scheme, with their dtypes and shapes, they are the parts, and rows can be read alone.
    """

    keys: Mapping[str, str]
    shape: Shape
    stride: Shape
    dtype: torch.dtype
    spec: WeightSpec | None = None
    options: Mapping[str, Any] = NOTHING

    @staticmethod
    def of(keys: Mapping[str, str], spec: WeightSpec, **options: Any) -> Entry:
        """Return a quantized weight that ``spec`` describes, stored under ``keys``."""
        return Entry(keys, spec.shape, spec.stride, spec.dtype, spec, options)

    @property
    def kind(self) -> WeightSpec:
        """Return what the tensor is; the scheme of a plain one is ``Plain()``."""
        return self.spec or _plain(self.shape, self.stride, self.dtype)


@lru_cache(maxsize=4096)
def _plain(shape: Shape, stride: Shape, dtype: torch.dtype) -> WeightSpec:
    """Return the spec of a plain tensor, shared by the thousands of tensors that have a few shapes."""
    return WeightSpec(shape, stride, dtype, _AS_IT_IS)


def is_in_parts(entry: Entry, tensors: Mapping[str, Stored]) -> bool:
    """Return whether the parts of a quantized weight are stored as they are, so that rows can be read alone."""
    assert entry.spec is not None
    layout = entry.spec.scheme.layout(entry.spec.base)
    stored = {role: (tensors[key].dtype, tensors[key].shape) for role, key in entry.keys.items()}
    return stored == {role: (part.dtype or entry.dtype, tuple(part.shape)) for role, part in layout.items()}


@dataclass(frozen=True)
class Contents:
    """Hold what a checkpoint stores and says: what a format is recognised by.

    tensors   what is stored, by key: dtype and shape
    metadata  strings that the writer put into the files
    record    what our own files remember
    beside    the JSON objects that stand beside the files, by file name: ``config.json`` and its like
    read      the values of a stored tensor; for the few bytes that say how others are to be read
    """

    tensors: Mapping[str, Stored]
    metadata: Mapping[str, str]
    record: Record
    beside: Mapping[str, Mapping[str, Any]]
    read: Callable[[str], Tensor]

    @property
    def config(self) -> Mapping[str, Any]:
        """Return ``config.json``; empty where there is none."""
        return self.beside.get("config.json", NOTHING)

    @property
    def quantization(self) -> Mapping[str, Any]:
        """Return ``quantization_config`` of ``config.json``, also where a model of parts has it under its text."""
        for config in (self.config, self.config.get("text_config"), self.config.get("llm_config")):
            found = config.get("quantization_config") if isinstance(config, Mapping) else None
            if isinstance(found, Mapping):
                return found
        return NOTHING

    @property
    def method(self) -> str:
        """Return ``quant_method``, in lower case; empty where none is named."""
        return str(self.quantization.get("quant_method") or "").lower()

    @cached_property
    def leaves(self) -> frozenset[str]:
        """Return the last components of the keys. Every format looks for some, and few tensors have many."""
        return frozenset([key.rpartition(".")[2] for key in self.tensors])

    @cached_property
    def key_text(self) -> str:
        """Return all keys, each with a newline behind it: one search finds a part or an end of any of them."""
        return "".join([f"{key}\n" for key in self.tensors])

    @cached_property
    def is_packed(self) -> bool:
        """Return whether some tensor is in blocks of GGUF."""
        return any(stored.packing for stored in self.tensors.values())

    @cached_property
    def dtypes(self) -> frozenset[torch.dtype]:
        """Return the dtypes that are stored."""
        return frozenset([stored.dtype for stored in self.tensors.values()])

    @cached_property
    def dtype(self) -> torch.dtype:
        """Return the dtype that the model computes in, as ``config.json`` has it.

        Where it does not say, that of the plain weights and biases, if all have one: a quantized weight must meet them
        in a product. Otherwise bfloat16.
        """
        for config in (self.config, self.config.get("text_config")):
            if isinstance(config, Mapping):
                named = str(config.get("dtype") or config.get("torch_dtype") or "").removeprefix("torch.")
                if named in ("float16", "bfloat16", "float32"):
                    return getattr(torch, named)  # type: ignore[no-any-return]
        leaves = ((key.rpartition(".")[2], stored.dtype) for key, stored in self.tensors.items())
        found = {dtype for leaf, dtype in leaves if leaf in ("weight", "bias") and dtype in _COMPUTED}
        return found.pop() if len(found) == 1 else torch.bfloat16


@dataclass
class Found:
    """Hold what a format found in a checkpoint. Weights with a fault cannot be read, the others can.

    weights  the quantized weights by name
    faults   what is wrong, by the name of the weight concerned
    spare    keys that belong to the format and make no tensor of the model
    padding  names of plain tensors that the format also stores where the model has none, and which are all 0 then
    """

    weights: dict[str, Entry] = field(default_factory=dict)
    faults: dict[str, str] = field(default_factory=dict)
    spare: set[str] = field(default_factory=set)
    padding: set[str] = field(default_factory=set)

    def fault(self, name: str, what: str, keys: Mapping[str, str] | None = None) -> None:
        """Record that ``name`` cannot be read because of ``what``; its ``keys`` are no tensors of the model either."""
        line = " ".join(what.split())  # one, whatever the file has put into it
        self.faults.setdefault(name, line.encode(errors="backslashreplace").decode())
        self.spare.update((keys or {}).values())


class Format(Protocol):
    """Describe a published way to spell quantized weights: pure functions on tensors and strings, no files."""

    @property
    def name(self) -> str:
        """Return the name that people give the format."""

    def recognise(self, contents: Contents) -> Found | None:
        """Return the quantized weights of a checkpoint in this format; ``None`` if it is not in this format.

        Raises CheckpointError for a variant that is known and not read, by name and with what to do.
        """

    def unpack(self, entry: Entry, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return the parts of the Weight that ``entry`` describes, without rounding, from stored tensors by role."""


@runtime_checkable
class Fitting(Protocol):
    """Describe a format with weights whose shape only the model knows."""

    def fit(self, entry: Entry, shape: Shape) -> Entry | None:
        """Return ``entry`` in ``shape``; ``None`` if its shape is known, or what is stored cannot have this one."""


class Writable(Format, Protocol):
    """Describe a format that can be written too, by names of weights; ``dtype`` of a spec is the compute dtype.

    All three raise SchemeError, saying which scheme would do, for a spec that the format has no words for.
    """

    def layout(self, name: str, spec: WeightSpec) -> dict[str, tuple[torch.dtype, Shape]]:
        """Return what ``pack`` will store for a Weight of this spec: dtype and shape by key."""

    def pack(self, name: str, weight: Tensor) -> dict[str, Tensor]:
        """Return the tensors to store for the Weight ``weight``, by key.

        The inverse of ``recognise`` and ``unpack``.
        """

    def announce(self, specs: Mapping[str, WeightSpec], plain: Iterable[str]) -> dict[str, Mapping[str, Any]]:
        """Return what JSON files such as ``config.json`` must say about weights of these specs, by file name.

        ``plain`` names the tensors that are stored as they are; formats that list what they leave out list them.
        An object is merged into the file of that name, key by key.
        """


@runtime_checkable
class AboutEmbeddings(Protocol):
    """Describe a writable format whose readers build modules for linear layers, not always for embeddings."""

    @property
    def holds_embeddings(self) -> bool:
        """Return whether they read quantized embeddings at all."""

    def announce_embeddings(
        self, said: Mapping[str, Mapping[str, Any]], names: Sequence[str]
    ) -> dict[str, Mapping[str, Any]]:
        """Return what ``announce`` said so that the readers take the weights ``names``, which are embeddings'.

        Raise SchemeError, which says what to do, if they cannot.
        """
        ...


@runtime_checkable
class Variant(Protocol):
    """Describe a writable format that holds some schemes in a spelling of its own."""

    def variant_of(self, scheme: Scheme) -> Scheme:
        """Return ``scheme`` as values are encoded for this format: it, or the one of the same kind that it holds."""
        ...


@runtime_checkable
class Indexed(Protocol):
    """Describe a writable format whose readers want an index of the files, whatever their number."""

    @property
    def is_indexed(self) -> bool:
        """Return whether one file has an index too, and the name of the first of several."""


@runtime_checkable
class Contained(Writable, Protocol):
    """Describe a format with files of its own, one for a checkpoint, where others are written as safetensors files."""

    @property
    def suffix(self) -> str:
        """Return how the names of its files end."""

    def packing(self, name: str, spec: WeightSpec) -> Packing:
        """Return the type of the file that holds a Weight of ``spec``; SchemeError if there is none."""

    def pairs(self, config: Mapping[str, Any], given: Pairs | None = None) -> Pairs:
        """Return what the file says besides its tensors, by ``config.json`` and by what is ``given``."""


def refuse_embedding(name: str, what: str) -> NoReturn:
    """Raise SchemeError that says what to do with the quantized weight ``name`` of an embedding."""
    fix = f"Decode it with tt.quantize(model, {{{name!r}: tt.Plain()}}), or save as 'native'."
    raise SchemeError(what, name=name, fix=fix)


def expect(
    tensors: Mapping[str, Stored],
    keys: Mapping[str, str],
    wanted: Mapping[str, tuple[tuple[torch.dtype, ...], Shape]],
) -> str:
    """Return what is wrong with the stored tensors of one weight: empty if each has one of its dtypes and its shape.

    A shape matches with its dimensions of 1 left out too, because writers differ there.
    """
    for role, (dtypes, shape) in wanted.items():
        if role not in keys:
            return f"its {role} is absent"
        stored = tensors[keys[role]]
        if stored.dtype not in dtypes:
            return f"its {role} is {stored.dtype}, not {' or '.join(map(str, dtypes))}"
        if stored.shape != shape and [n for n in stored.shape if n != 1] != [n for n in shape if n != 1]:
            return f"its {role} has shape {stored.shape}, not {shape}"
    return ""


def spec_of(shape: Shape, dtype: torch.dtype, scheme: Scheme, *, name: str) -> WeightSpec:
    """Return the spec of a contiguous weight.

    Raise CheckpointError, naming ``name``, if the scheme does not fit the shape.
    """
    try:
        return WeightSpec.of(shape, dtype, scheme)
    except Exception as error:
        raise CheckpointError(f"{scheme} does not fit shape {shape}: {error}", name=name) from None


class Evidence(NamedTuple):
    """Say, as data, what a format needs to see: it recognises nothing in a checkpoint that shows none of this.

    methods   ``quant_method`` of ``config.json``, in lower case
    files     names of JSON files beside the tensors
    config    keys of ``config.json``
    metadata  keys of the metadata in the files
    keys      text in the keys of tensors, each of which ends with a newline: ``".qweight\\n"``
    dtypes    dtypes of stored tensors
    packings  whether tensors in blocks of GGUF are evidence
    record    whether Weights in our own record are
    """

    methods: tuple[str, ...] = ()
    files: tuple[str, ...] = ()
    config: tuple[str, ...] = ()
    metadata: tuple[str, ...] = ()
    keys: tuple[str, ...] = ()
    dtypes: tuple[torch.dtype, ...] = ()
    packings: bool = False
    record: bool = False

    def is_in(self, contents: Contents) -> bool:
        """Return whether ``contents`` show any of it."""
        return (
            contents.method in self.methods
            or any(name in contents.beside for name in self.files)
            or any(key in contents.config for key in self.config)
            or any(key in contents.metadata for key in self.metadata)
            or any(text in contents.key_text for text in self.keys)
            or not contents.dtypes.isdisjoint(self.dtypes)
            or (self.packings and contents.is_packed)
            or (self.record and bool(contents.record.weights))
        )


def may_recognise(format: Format, contents: Contents) -> bool:
    """Return whether ``format`` is to be asked: its ``evidence`` is there, or it does not say what that is."""
    evidence = getattr(format, "evidence", None)
    return not isinstance(evidence, Evidence) or evidence.is_in(contents)
