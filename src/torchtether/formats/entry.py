"""Types that formats share: the contents of a checkpoint, and an entry for each weight in it."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from typing import Any, NamedTuple, NoReturn, Protocol, runtime_checkable

import torch
from torch import Tensor

from ..errors import CheckpointError, SchemeError
from ..files import Packing, Pairs, Record, Stored
from ..geometry.views import Shape
from ..schemes import Plain, ScaledFloat, Scheme
from ..weights.spec import WeightSpec

NOTHING: Mapping[str, Any] = {}

_AS_IT_IS = Plain()

FLOATS = (torch.float16, torch.bfloat16, torch.float32)
"""The dtypes that models compute in, and that most scales have."""

FLOAT8 = {torch.float8_e4m3fn: "e4m3", torch.float8_e5m2: "e5m2"}
"""The element type of each dtype of float8 codes."""

GUESSED = "is_shape_guessed"
"""The option of an entry whose shape no file tells, only the model that it is loaded into; see ``Format.fit``."""

Wanted = tuple[tuple[torch.dtype, ...], Shape]
"""The allowed dtypes and the shape of a stored tensor."""


class Entry(NamedTuple):
    """Describe one tensor of a checkpoint. ``keys`` maps each of its roles to a stored key.

    A plain tensor has one role, ``tensor``; ``stride`` is the stride that it had in memory. A quantized tensor has
    ``spec``, and roles of its format; ``options`` holds what ``unpack`` needs besides. If the roles have the names,
    dtypes and shapes of the scheme's parts, the stored tensors are the parts, and rows can be read alone.
    """

    keys: Mapping[str, str]
    shape: Shape
    stride: Shape
    dtype: torch.dtype
    spec: WeightSpec | None = None
    options: Mapping[str, Any] = NOTHING

    @staticmethod
    def of(keys: Mapping[str, str], spec: WeightSpec, **options: Any) -> Entry:
        """Return the entry of a quantized weight that ``spec`` describes, stored under ``keys``."""
        return Entry(keys, spec.shape, spec.stride, spec.dtype, spec, options)

    @property
    def kind(self) -> WeightSpec:
        """Return the spec of the tensor; the scheme of a plain tensor is ``Plain()``."""
        return self.spec or _plain(self.shape, self.stride, self.dtype)


@lru_cache(maxsize=4096)
def _plain(shape: Shape, stride: Shape, dtype: torch.dtype) -> WeightSpec:
    """Return the spec of a plain tensor, cached because thousands of tensors have few shapes."""
    return WeightSpec(shape, stride, dtype, _AS_IT_IS)


def is_in_parts(entry: Entry, tensors: Mapping[str, Stored]) -> bool:
    """Return whether the stored tensors of a quantized weight are its parts, so that rows can be read alone."""
    assert entry.spec is not None
    layout = entry.spec.scheme.layout(entry.spec.base)
    stored = {role: (tensors[key].dtype, tensors[key].shape) for role, key in entry.keys.items()}
    return stored == {role: (part.dtype or entry.dtype, tuple(part.shape)) for role, part in layout.items()}


@dataclass(frozen=True)
class Contents:
    """Hold the headers and JSON files of a checkpoint, from which a format recognises it.

    tensors   dtype and shape of each stored tensor, by key
    metadata  strings that the writer put into the files
    record    the record of our own files
    beside    the JSON objects of the same folder, by file name, such as ``config.json``
    read      reads the values of a stored tensor; meant for small tensors that describe others
    """

    tensors: Mapping[str, Stored]
    metadata: Mapping[str, str]
    record: Record
    beside: Mapping[str, Mapping[str, Any]]
    read: Callable[[str], Tensor]

    @property
    def config(self) -> Mapping[str, Any]:
        """Return ``config.json``; empty if there is none."""
        return self.beside.get("config.json", NOTHING)

    @property
    def quantization(self) -> Mapping[str, Any]:
        """Return ``quantization_config`` of ``config.json``, or of the config of its text model; empty without one."""
        for config in (self.config, self.config.get("text_config"), self.config.get("llm_config")):
            found = config.get("quantization_config") if isinstance(config, Mapping) else None
            if isinstance(found, Mapping):
                return found
        return NOTHING

    @property
    def method(self) -> str:
        """Return ``quant_method`` in lower case; empty if there is none."""
        return str(self.quantization.get("quant_method") or "").lower()

    @cached_property
    def leaves(self) -> frozenset[str]:
        """Return the distinct last components of all keys: a small set, which every format searches."""
        return frozenset([key.rpartition(".")[2] for key in self.tensors])

    @cached_property
    def key_text(self) -> str:
        """Return all keys, each followed by a newline, so that one search finds a substring or an end of any key."""
        return "".join([f"{key}\n" for key in self.tensors])

    @cached_property
    def is_packed(self) -> bool:
        """Return whether any tensor is stored in GGUF blocks."""
        return any(stored.packing for stored in self.tensors.values())

    @cached_property
    def dtypes(self) -> frozenset[torch.dtype]:
        """Return the dtypes of all stored tensors."""
        return frozenset([stored.dtype for stored in self.tensors.values()])

    @cached_property
    def dtype(self) -> torch.dtype:
        """Return the dtype that the model computes in, from ``config.json``.

        Without it, return the dtype of the plain weights and biases if they share one, because a product combines them
        with the quantized weights. Otherwise return bfloat16.
        """
        for config in (self.config, self.config.get("text_config")):
            if isinstance(config, Mapping):
                named = str(config.get("dtype") or config.get("torch_dtype") or "").removeprefix("torch.")
                if named in ("float16", "bfloat16", "float32"):
                    return getattr(torch, named)  # type: ignore[no-any-return]
        leaves = ((key.rpartition(".")[2], stored.dtype) for key, stored in self.tensors.items())
        found = {dtype for leaf, dtype in leaves if leaf in ("weight", "bias") and dtype in FLOATS}
        return found.pop() if len(found) == 1 else torch.bfloat16


@dataclass
class Found:
    """Hold what a format found in a checkpoint. A weight with a fault cannot be read; all others can.

    weights  an entry for each quantized weight, by name
    faults   a message for each weight that cannot be read, by name
    spare    keys that belong to the format and are no tensors of the model
    padding  names of plain tensors that the format stores even for modules without them; these are all 0 then
    """

    weights: dict[str, Entry] = field(default_factory=dict)
    faults: dict[str, str] = field(default_factory=dict)
    spare: set[str] = field(default_factory=set)
    padding: set[str] = field(default_factory=set)

    def add(self, name: str, keys: Mapping[str, str], read: Callable[..., Entry], *arguments: Any) -> None:
        """Record the entry that ``read(*arguments)`` returns for ``name``, or its CheckpointError as a fault.

        ``keys`` become spare.
        """
        self.spare.update(keys.values())
        try:
            self.weights[name] = read(*arguments)
        except CheckpointError as error:
            self.fault(name, f"{error.what}. {error.fix}" if error.fix else error.what)

    def fault(self, name: str, what: str, keys: Mapping[str, str] | None = None) -> None:
        """Record that ``name`` cannot be read because of ``what``, and that its ``keys`` are spare."""
        line = " ".join(what.split())  # text from a file may contain newlines
        self.faults.setdefault(name, line.encode(errors="backslashreplace").decode())
        self.spare.update((keys or {}).values())


class Format(Protocol):
    """Describe a published format of quantized weights: pure functions on tensors and strings, without file access."""

    @property
    def name(self) -> str:
        """Return the name of the format, as users write it."""

    def recognise(self, contents: Contents) -> Found | None:
        """Return the quantized weights of a checkpoint in this format; ``None`` if it is not in this format.

        Raises CheckpointError for a variant that is known and not read; the error names it and says what to do.
        """

    def unpack(self, entry: Entry, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return the parts of the Weight that ``entry`` describes, without rounding, from stored tensors by role."""


@runtime_checkable
class Fitting(Protocol):
    """Describe a format with weights whose shape only the model knows."""

    def fit(self, entry: Entry, shape: Shape) -> Entry | None:
        """Return ``entry`` with ``shape``; ``None`` if the file gives its shape or its tensors do not fit."""


class Writable(Format, Protocol):
    """Describe a format that can also be written. ``dtype`` of a spec is the compute dtype.

    All three functions raise SchemeError, naming a scheme that is supported, for a spec that the format cannot express.
    """

    def layout(self, name: str, spec: WeightSpec) -> dict[str, tuple[torch.dtype, Shape]]:
        """Return dtype and shape, by key, of each tensor that ``pack`` stores for a Weight of this spec."""

    def pack(self, name: str, weight: Tensor) -> dict[str, Tensor]:
        """Return the tensors to store for the Weight ``weight``, by key.

        The inverse of ``recognise`` and ``unpack``.
        """

    def announce(self, specs: Mapping[str, WeightSpec], plain: Iterable[str]) -> dict[str, Mapping[str, Any]]:
        """Return the JSON objects that describe weights of these specs, by file name, such as ``config.json``.

        Each object is merged into the file of that name, key by key. ``plain`` names the tensors that are stored
        unquantized, for formats that list the modules they leave out.
        """


@runtime_checkable
class ForLinear(Protocol):
    """Describe a writable format whose readers build quantized modules in place of ``nn.Linear`` alone."""

    @property
    def holds_embeddings(self) -> bool:
        """Return whether the readers can read quantized weights of other modules, such as embeddings, at all."""

    def announce_others(
        self, announced: Mapping[str, Mapping[str, Any]], names: Sequence[str]
    ) -> dict[str, Mapping[str, Any]]:
        """Return ``announced``, the result of ``announce``, changed so that readers accept weights of other modules.

        ``names`` are quantized weights of modules that are no ``nn.Linear``: embeddings, ``Conv1D`` of transformers.
        Raises SchemeError, which says what to do, if the readers cannot read them.
        """
        ...


@runtime_checkable
class Variant(Protocol):
    """Describe a writable format that stores some schemes as a variant of its own."""

    def variant_of(self, scheme: Scheme) -> Scheme:
        """Return the scheme to encode with for this format: ``scheme`` itself, or the format's variant of it."""
        ...


@runtime_checkable
class Indexed(Protocol):
    """Describe a writable format whose readers need an index file even if there is only one file of tensors."""

    @property
    def is_indexed(self) -> bool:
        """Return whether a single file is named like the first of several shards, and has an index."""


@runtime_checkable
class Contained(Writable, Protocol):
    """Describe a format with its own file type, one file for a checkpoint; all others write safetensors files."""

    @property
    def suffix(self) -> str:
        """Return the suffix of its file names."""

    def packing(self, name: str, spec: WeightSpec) -> Packing:
        """Return the packing in which the file stores a Weight of ``spec``. Raise SchemeError if there is none."""

    def pairs(self, config: Mapping[str, Any], given: Pairs | None = None) -> Pairs:
        """Return the key-value pairs of the file: those made from ``config.json``, overridden by ``given``."""


def refuse_other(name: str, what: str) -> NoReturn:
    """Raise SchemeError for the quantized weight ``name`` of no ``nn.Linear``; its fix says how to decode it."""
    what = f"its module is not nn.Linear (but an embedding or Conv1D, for example), and {what}"
    fix = f"Decode it with tt.quantize(model, {{{name!r}: tt.Plain()}}), or save as 'native'."
    raise SchemeError(what, name=name, fix=fix)


def expect(tensors: Mapping[str, Stored], keys: Mapping[str, str], wanted: Mapping[str, Wanted]) -> None:
    """Raise CheckpointError unless the stored tensors of one weight are as ``wanted``, by role.

    Dimensions of size 1 are ignored, because writers differ there.
    """
    for role, (dtypes, shape) in wanted.items():
        if role not in keys:
            raise CheckpointError(f"its {role} is absent")
        stored = tensors[keys[role]]
        check_dtype(role, stored.dtype, dtypes)
        if stored.shape != shape and [n for n in stored.shape if n != 1] != [n for n in shape if n != 1]:
            raise CheckpointError(f"its {role} has shape {stored.shape}, not {shape}")


def check_dtype(role: str, dtype: torch.dtype, known: Iterable[torch.dtype]) -> None:
    """Raise CheckpointError unless ``dtype``, that of the stored tensor called ``role``, is one of ``known``."""
    if dtype not in known:
        raise CheckpointError(f"its {role} is {dtype}, not {' or '.join(map(str, known))}")


def check_rows(shape: Shape) -> None:
    """Raise CheckpointError unless ``shape``, that of codes, has rows and columns."""
    if len(shape) < 2:
        raise CheckpointError(f"its codes have shape {shape}, and at least 2 dimensions are required")


def float8_scheme(
    codes: torch.dtype,
    scale: Stored,
    shape: Shape,
    block: tuple[int, int] | None = None,
    known: tuple[torch.dtype, ...] = FLOATS,
) -> ScaledFloat:
    """Return the scheme of float8 codes of ``shape`` under one scale for each ``block``, for each row, or for all.

    Raise CheckpointError if the dtype of ``scale`` is not ``known``, or its shape does not fit.
    """
    check_dtype("scale", scale.dtype, known)
    *lead, rows, columns = shape
    if block is not None:
        wanted = (*lead, -(-rows // block[0]), -(-columns // block[1]))
        if scale.shape != wanted:
            raise CheckpointError(
                f"its scale has shape {scale.shape}, but blocks of {block} over {shape} need {wanted}"
            )
        return ScaledFloat(FLOAT8[codes], block, scale.dtype)
    if math.prod(scale.shape) == 1:
        return ScaledFloat(FLOAT8[codes], (None, None), scale.dtype)
    if scale.shape in (shape[:-1], (*shape[:-1], 1)):
        return ScaledFloat(FLOAT8[codes], (1, None), scale.dtype)
    raise CheckpointError(
        f"its scale has shape {scale.shape}; codes of shape {shape} need one scale for all or one per row, "
        "or a block size in the config"
    )


def spec_of(shape: Shape, dtype: torch.dtype, scheme: Scheme, *, name: str) -> WeightSpec:
    """Return the spec of a contiguous weight. Raise CheckpointError under ``name`` if the scheme does not fit it."""
    try:
        return WeightSpec.of(shape, dtype, scheme)
    except Exception as error:
        raise CheckpointError(f"{scheme} does not fit shape {shape}: {error}", name=name) from None


class Evidence(NamedTuple):
    """Describe by which traits a format recognises a checkpoint: it is not tried on one that has none of them.

    methods   ``quant_method`` of ``config.json``, in lower case
    files     names of JSON files beside the tensors
    config    keys of ``config.json``
    metadata  keys of the metadata in the files
    keys      substrings of the keys of tensors, where each key ends with a newline: ``".qweight\\n"``
    dtypes    dtypes of stored tensors
    packings  whether tensors in GGUF blocks are evidence
    record    whether Weights in our own record are evidence
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
        """Return whether ``contents`` has any of these traits."""
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
    """Return whether to try ``format``: ``contents`` has its evidence, or it declares none."""
    evidence = getattr(format, "evidence", None)
    return not isinstance(evidence, Evidence) or evidence.is_in(contents)
