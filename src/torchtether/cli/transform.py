"""Quantize and convert checkpoints without the model's code, one tensor in memory at a time.

Ties and strides are kept.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from .._checks import check_path
from .._dtypes import dtype_name
from ..checkpoint.aliases import view_of
from ..checkpoint.reader import Checkpoint
from ..checkpoint.saver import Aliases
from ..checkpoint.writer import ShardGroup, check_target, plan_files, write_groups
from ..conversion.sizing import QuantizePlan
from ..errors import CheckpointError, SchemeError
from ..files import HIDDEN, SUFFIX, CarriedOver, carry_over, is_folder, local_path, new_folder, stem_like
from ..formats import GUESSED, Contained, Entry, ForLinear, Indexed, Variant, Writable, writable
from ..geometry.views import View, contiguous_stride
from ..progress import Progress
from ..schemes import ColumnScaled, Plain, Scheme, resolve, scheme_to_text
from ..weights.spec import Tie, WeightSpec
from ..weights.weight import Weight
from .choosing import choose, is_linear, weights_matched
from .made import Kind, TransformReport
from .pairs import pairs_of
from .sizing import TO_PLAN, plan_for


def quantize_checkpoint(
    source: Path | str,
    target: Path | str,
    scheme: Scheme | str | None,
    *,
    rules: Mapping[str, Scheme | str | None] | None = None,
    fit: str | None = None,
    include: Sequence[str] = (),
    exclude: Sequence[str] = (),
    format: str = "native",
    max_shard_size: int | str | None = None,
    progress: Progress = None,
    target_size: int | str | None = None,
    show: Callable[[QuantizePlan], None] | None = None,
) -> TransformReport:
    """Write ``source`` to ``target`` with its matrices in ``scheme``, encoded as by ``tt.load(quantize=)``.

    Without the model's code, names and shapes determine which tensors are weights of linear layers. By default these
    are the 2-D float tensors called ``*.weight`` with both sides of at least ``SMALLEST``. Heads are among them.
    Embeddings (a module called ``*emb*``, ``wte``, ``wpe`` or ``shared``) are not, unless one is tied to a name that is
    no embedding's, nor are routers of experts (below a module called ``gate`` or ``router``). A glob that matches any
    name of a tied group selects the group, which is quantized once.

    - ``rules`` give tensors another scheme, or ``None`` to leave them. They take precedence, and the first match wins.
      With a ``scheme`` of ``None`` only they select tensors.
    - ``include`` are globs that replace the default selection; ``exclude`` removes tensors from any selection.
    - ``fit`` sets the field of that name in all schemes, which must have it.
    - ``target_size`` (bytes of all tensors, or "4GB") chooses a scheme for each tensor that would get ``scheme``, as
      ``tt.plan_quantize`` does. ``show`` is called with the plan before anything is written.

    If ``format`` has its own variant of a scheme (int8 of bitsandbytes), values are encoded in that.

    See ``convert_checkpoint`` for the rest. Raises also RuleError for a glob that matches nothing, or matches a tensor
    that cannot be quantized, and SchemeError if a scheme does not fit a shape or values are not finite.
    """
    written = writable(format)

    def resolved(one: Scheme | str | None) -> Scheme | None:
        made = None if one is None else resolve(one)
        if made is not None and isinstance(written, Variant):
            made = written.variant_of(made)
        return made if made is None or fit is None else _fitted(made, fit)

    default, asked = resolved(scheme), {glob: resolved(one) for glob, one in (rules or {}).items()}
    holds_embeddings = not isinstance(written, ForLinear) or written.holds_embeddings

    def groups_of(checkpoint: Checkpoint) -> list[_Streamed]:
        ties = ties_of(checkpoint)
        wanted = default if target_size is None else TO_PLAN
        chosen = choose(checkpoint, ties, wanted, asked, include, exclude, holds_embeddings=holds_embeddings)

        def groups_in(schemes: Mapping[str, Scheme | None]) -> list[_Streamed]:
            return [
                _Streamed.of(checkpoint, name, ties.get(name), written, scheme=schemes.get(name))
                for name in checkpoint.entries
            ]

        if target_size is None:
            return groups_in(chosen)

        def planned(plan: QuantizePlan) -> list[_Streamed]:
            return groups_in({**chosen, **{name: option.scheme for name, option in plan.choices.items()}})

        def check(plan: QuantizePlan) -> None:
            plan_files(planned(plan), Path(target), written)

        plan = plan_for(checkpoint, chosen, written, target_size, progress, check)
        if show is not None:
            show(plan)
        return planned(plan)

    return _transform(source, target, written, groups_of, max_shard_size, progress, "quantize")


def _fitted(scheme: Scheme, fit: str) -> Scheme:
    if isinstance(scheme, ColumnScaled):
        return replace(scheme, scheme=_fitted(scheme.scheme, fit))
    if not hasattr(scheme, "fit"):
        what = f"the scheme has no option fit, got fit {fit!r}"
        raise SchemeError(what, name=scheme_to_text(scheme), fix="Use int8, int4, sinq or nf4, or omit the fit.")
    return replace(scheme, fit=fit)  # type: ignore[type-var]


def convert_checkpoint(
    source: Path | str,
    target: Path | str,
    *,
    dtype: torch.dtype | None = None,
    format: str = "native",
    requantize: Scheme | str | None = None,
    dequantize: Sequence[str] = (),
    aliases: Aliases = "drop",
    max_shard_size: int | str | None = None,
    progress: Progress = None,
) -> TransformReport:
    """Write ``source`` to ``target`` in another ``format`` or dtype, in other shards, or with stored aliases.

    Ties, strides and schemes are kept. For a quantized weight, ``dtype`` is the compute dtype, and its codes stay.
    Names that other writers only note as ``alias: owner`` in the metadata become ties. Biases of zeros that GPTQ stores
    even for modules without a bias are left out. One tensor is in memory at a time.

    - A weight that ``format`` cannot express is an error. With ``requantize`` it is decoded and encoded in that scheme
      instead: its values change, and the report names it.
    - Weights that a glob of ``dequantize`` matches are decoded, exactly, and stored plain.
    - ``target`` is a ``.safetensors`` file that does not exist, or a folder that does not exist or is empty. A folder
      appears complete, by one rename. It also gets the other files of a source folder (``files/companions.py`` lists
      the exceptions).

    Raises CheckpointError if ``source`` is damaged or does not tell a shape, ``target`` exists, the disk refuses, or
    ``dtype`` cannot apply: 8-bit floats without a scale, memory that is shared in two dtypes, numbers too large.
    """
    if dtype is not None and not (dtype.is_floating_point and dtype.itemsize > 1):
        what = f"{dtype_name(dtype)} is not a float dtype of 16 bits or more"
        raise CheckpointError(what, name="dtype", fix="Use 'bfloat16', for example.")

    written = writable(format)
    fallback = None if requantize is None else resolve(requantize)
    if fallback is not None and isinstance(written, Variant):
        fallback = written.variant_of(fallback)

    def groups_of(checkpoint: Checkpoint) -> list[_Streamed]:
        ties = ties_of(checkpoint)
        decoded = weights_matched(checkpoint, ties, dequantize)
        return [
            _Streamed.of(
                checkpoint,
                name,
                ties.get(name),
                written,
                scheme=Plain() if name in decoded else _other_scheme(entry, name, written, fallback),
                dtype=dtype,
                copy=aliases == "copy",
            )
            for name, entry in checkpoint.entries.items()
        ]

    return _transform(source, target, written, groups_of, max_shard_size, progress, "convert")


def _other_scheme(entry: Entry, name: str, format: Writable, fallback: Scheme | None) -> Scheme | None:
    """Return ``fallback`` if ``format`` cannot express the Weight ``name``, else ``None``.

    Raise SchemeError if it cannot and ``fallback`` is ``None``.
    """
    if entry.spec is None:
        return None
    try:
        format.layout(name, entry.spec)
    except SchemeError as error:
        if fallback is None:
            raise SchemeError(error.what, name=name, fix=f"{error.fix} Or use --requantize.") from None
        return fallback
    return None


def _transform(
    source: Path | str,
    target: Path | str,
    format: Writable,
    groups_of: Callable[[Checkpoint], list[_Streamed]],
    max_shard_size: int | str | None,
    progress: Progress,
    verb: str,
) -> TransformReport:
    check_path(target)
    target = Path(target)
    check_target(target, format, max_shard_size=max_shard_size)
    is_file = target.suffix == SUFFIX or isinstance(format, Contained)
    if is_file and target.exists():
        raise CheckpointError("it is there already", name=str(target), fix="Remove it, or choose another name.")
    if is_file and max_shard_size is not None:
        raise CheckpointError(
            "a single file has no shards", name=str(target), fix="Give a folder or no max_shard_size."
        )
    source = local_path(source, is_whole=not is_file)
    with Checkpoint(source) as checkpoint:
        for name, what in checkpoint.faults.items():
            raise CheckpointError(what, name=f"{source}: {name}")
        for name, entry in checkpoint.entries.items():
            if entry.options.get(GUESSED):
                what = f"{checkpoint.format} does not store its shape, which only the model knows"
                fix = "Load it into the model with tt.load, and save that with tt.save."
                raise CheckpointError(what, name=f"{source}: {name}", fix=fix)
        padding = _without_padding(checkpoint)
        groups = groups_of(checkpoint)
        carried = CarriedOver()
        for alias in checkpoint.copies:
            checkpoint.check_copy(alias)
        if is_file:
            pairs = pairs_of(checkpoint, format) if isinstance(format, Contained) else None
            write_groups(groups, target, format=format, progress=progress, verb=verb, metadata=pairs)
        else:
            read = _read_files(checkpoint)
            stem = "model" if isinstance(format, Indexed) else stem_like(read)
            write = partial(write_groups, format=format, max_shard_size=max_shard_size, progress=progress, verb=verb)
            with new_folder(target) as folder:
                if is_folder(source) or source.suffix == ".json":
                    carried = carry_over(source if is_folder(source) else source.parent, folder, read)
                write(groups, folder, stem=stem)
        return TransformReport(
            len(checkpoint),
            tuple(group.name for group in groups if group.is_changed),
            sum(checkpoint.nbytes(name) for name in checkpoint.entries),
            sum(group.nbytes for group in groups),
            Counter(group.kinds for group in groups),
            (checkpoint.format, format.name),
            carried,
            padding,
        )


def _without_padding(checkpoint: Checkpoint) -> tuple[str, ...]:
    """Remove the zeros that its format adds to a model from the entries of ``checkpoint``; return their names."""
    names = tuple(name for name in checkpoint.entries if checkpoint.is_padding(name))
    for name in names:
        del checkpoint.entries[name]
    return names


def _read_files(checkpoint: Checkpoint) -> frozenset[str]:
    """Return the names of the files of ``checkpoint``, including its index."""
    index = checkpoint.store.index
    return frozenset(file.path.name for file in checkpoint.store.files) | ({index.path.name} if index else set())


def ties_of(checkpoint: Checkpoint) -> dict[str, Tie]:
    """Return the ties of a checkpoint by owner: those of its record, and those that another writer noted."""
    noted: dict[str, list[str]] = {}
    for alias, owner in sorted(checkpoint.flat.items()):
        is_name = alias not in ("", "format") and not alias.startswith(HIDDEN)  # "format: pt" is no tie
        if is_name and owner in checkpoint.entries and alias not in checkpoint.entries:
            noted.setdefault(owner, []).append(alias)
    return {tie.owner: tie for tie in checkpoint.ties} | {
        owner: Tie((owner, *aliases)) for owner, aliases in noted.items()
    }


# -- one group --------------------------------------------------------------------------------------------------------


@dataclass
class _Streamed(ShardGroup):
    """One stored tensor with its ties, which is read and changed only when it is written."""

    name: str = ""
    kinds: tuple[Kind, Kind] = (("", ""), ("", ""))
    is_changed: bool = False
    made: Callable[[], Iterator[tuple[str, Tensor]]] = field(default=lambda: iter(()))

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        return self.made()

    @staticmethod
    def of(
        checkpoint: Checkpoint,
        name: str,
        tie: Tie | None,
        format: Writable,
        *,
        scheme: Scheme | None = None,
        dtype: torch.dtype | None = None,
        copy: bool = False,
    ) -> _Streamed:
        """Return the group of ``name``, in ``scheme`` and ``dtype`` if given; ``copy`` stores its aliases too."""
        entry = checkpoint.entries[name]
        dtype = _dtype(entry, name, tie, dtype)
        group = _Streamed(format, name=name, is_changed=scheme is not None or dtype != entry.dtype)
        spec = entry.spec
        if scheme is not None:
            spec = None if scheme.transparent else WeightSpec.of(entry.shape, entry.dtype, scheme)
        spec = None if spec is None else spec.replace(dtype=dtype, tie=None)
        group.is_linear = is_linear(checkpoint.entries, name, tie.names if tie else (name,))
        group.kinds = _kind(entry.spec, entry.dtype), _kind(spec, dtype)
        group._add(name, entry.shape, dtype, spec)
        if spec is None and entry.stride != contiguous_stride(entry.shape) and 0 not in entry.shape:
            group.strides[name] = entry.stride
        if tie is not None:
            tie = Tie(tie.names, tuple(_retyped(view, entry.dtype, dtype) for view in tie.views), tie.objects)
            group.put_tie(tie)
        stored: list[tuple[str, View | None]] = [(name, None)]
        if copy and tie is not None:
            for alias, view in zip(tie.aliases, tie.views[1:], strict=True):
                size, stride = (entry.shape, entry.stride) if view is None else (view.size, view.stride)
                part = spec if spec is None or view is None else spec.replace(shape=size, stride=stride)
                group._add(alias, size, dtype if view is None else view.dtype, part)
                group.copies.add(alias)
                stored.append((alias, view))

        def made() -> Iterator[tuple[str, Tensor]]:
            whole = _read(checkpoint, name, scheme, dtype)
            for key, view in stored:
                tensor = whole if view is None else view_of(whole, view)
                yield from format.pack(key, tensor).items() if isinstance(tensor, Weight) else [(key, tensor)]

        group.made = made
        return group

    def _add(self, name: str, shape: tuple[int, ...], dtype: torch.dtype, spec: WeightSpec | None) -> None:
        if spec is None:
            self.layout[name] = (dtype, tuple(shape))
        else:
            self.put_weight(name, spec)


def _kind(spec: WeightSpec | None, dtype: torch.dtype) -> Kind:
    return "" if spec is None else scheme_to_text(spec.scheme), dtype_name(dtype)


def _dtype(entry: Entry, name: str, tie: Tie | None, dtype: torch.dtype | None) -> torch.dtype:
    """Return the dtype of ``name`` after floats become ``dtype``. Raise CheckpointError if it cannot become that."""
    shared = {entry.dtype} | {view.dtype for view in (tie.views if tie else ()) if view is not None}
    if dtype is None or shared == {dtype} or not any(one.is_floating_point for one in shared):
        return entry.dtype
    if entry.spec is None and entry.dtype.itemsize == 1 and entry.dtype.is_floating_point:
        raise CheckpointError(
            f"it is {dtype_name(entry.dtype)} without a known scale, and cannot become {dtype_name(dtype)}", name=name
        )
    if len(shared) > 1:
        raise CheckpointError(
            f"its memory is shared as {' and '.join(sorted(map(dtype_name, shared)))}, and cannot become "
            f"{dtype_name(dtype)}",
            name=name,
            fix="Untie its names in the model first.",
        )
    return dtype


def _retyped(view: View | None, old: torch.dtype, new: torch.dtype) -> View | None:
    if view is None or view.dtype != old:
        return view
    return View(new, view.size, view.stride, view.offset)


def _read(checkpoint: Checkpoint, name: str, scheme: Scheme | None, dtype: torch.dtype) -> Tensor:
    """Read ``name`` into new memory with its own strides, and change it to ``scheme`` and ``dtype``."""
    if scheme is not None:
        try:
            values = checkpoint.read_briefly(name)
            values = values.dequantize() if isinstance(values, Weight) else values
            return (values if scheme.transparent else Weight.encode(values, scheme)).to(dtype)
        except SchemeError as error:
            raise error.named(name) from None
    stored = checkpoint.read(name)
    made = stored.to(dtype)
    if made is not stored and not isinstance(made, Weight) and _overflows(stored, made):
        raise CheckpointError(f"it holds numbers too large for {dtype_name(dtype)}", name=name)
    return made


def _overflows(before: Tensor, made: Tensor) -> bool:
    """Return whether finite numbers became infinite. Memory is allocated only if ``made`` has an infinity or NaN."""
    if not made.numel() or all(bool(end.isfinite()) for end in made.aminmax()):
        return False
    return bool((made.isinf() & ~before.isinf()).any())
