"""Saving of a model, with its ties, strides and schemes, in formats of this and other tools."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from .._checks import check_callable, check_path, check_unicode, describe, describe_some
from .._warnings import warn
from ..errors import ArgumentError, CheckpointError, TieError
from ..exchange.refusals import ON_DISK, is_on_disk
from ..files import CODES, HIDDEN, Pairs, check_writable, is_weight_view
from ..formats import Contained, Writable, native, writable
from ..geometry.blocks import blocks_of, has_values, is_strided
from ..geometry.views import View, contiguous_stride
from ..progress import Progress
from ..ties.components import Component, find_components, tie_of
from ..ties.names import is_sharded
from ..ties.spans import member_view, plain_values
from ..torch_private.modules import uncompiled
from ..weights.spec import Tie, tie_among
from ..weights.weight import Weight
from .aliases import view_of
from .writer import ShardGroup, write_groups

Aliases = Literal["drop", "copy"]
Masters = Literal["keep", "drop"]


def save(
    model: nn.Module | Mapping[str, Tensor],
    path: Path | str,
    *,
    format: str = "native",
    aliases: Aliases = "drop",
    masters: Masters = "keep",
    max_shard_size: int | str | None = None,
    metadata: Pairs | None = None,
    progress: Progress = None,
) -> None:
    """Save the tensors of ``model`` (or of a state dict) to ``path``, each once, with ties, strides and schemes.

    ``path``            ``name.safetensors``, or a folder, which gets ``model.safetensors``; ``name.gguf`` for GGUF
    ``format``          ``"native"`` stores a quantized weight ``n`` as plain tensors, ``n.qdata`` and so on. Others
                        store quantized weights as another package does: ``"compressed-tensors"``, ``"bitsandbytes"``
                        and ``"sinq"`` describe them in the ``config.json`` of the folder, and keep its other entries;
                        if there is none, the config of a transformers model is written, too; ``"comfy"``, for ComfyUI,
                        describes them in the tensor file. Only this package reads the ties of whole tensors (other
                        readers take them from their config); views are an error
    ``aliases``         ``"drop"`` stores tied tensors once, and records the other names; ``"copy"`` stores all names,
                        for readers that need every key. This package reads both as one tensor
    ``masters``         ``"keep"`` stores the float masters of ``Mastered`` Weights, ``"drop"`` only their codes
    ``max_shard_size``  a number of bytes, or ``"5GB"``: more are written as shards and an index. No tensor is cut
    ``metadata``        for GGUF, its key-value pairs: text, numbers, bools and lists of them. Without it,
                        ``general.architecture`` is "unknown". Names are not converted; a tied tensor has its first name
    ``progress``        ``True`` for a bar, or a function of (bytes done, bytes in all)

    Equal tensors give equal bytes. Each file is written beside its target and renamed when all are written. If the
    process dies, the old or the new checkpoint is there: after a death between the renames of several files, a mark
    (``model.safetensors.torn``) says what is left to do, and the next ``tt.open`` or save of the folder does it. Two
    saves to one folder take turns at the renames; a save that waits for more than a minute raises. A file without
    write permission is not replaced. A save to a folder removes the shards of an older one, and files that say only
    how that was quantized, such as ``quant_config.json``.

    If you pass a mapping, pass ``model.state_dict(keep_vars=True)`` rather than ``state_dict()``.
    A scheme that changes no value (``Plain``) is not recorded: its tensor is stored unchanged.

    Raises:
        CheckpointError: a tensor has no values, keeps them in files (diffusers' offloading to a disk) or in other
            tensors (a DTensor, a class of another library) or has a dtype that the format lacks, two keys collide, the
            system cannot write, or another save does not end.
        TieError: tie records of Weights in a state dict tie names with different values; or ``format`` cannot record a
            view.
        SchemeError: ``format`` cannot store the scheme of a Weight, or its readers load only those of ``nn.Linear``.

    >>> import torch, torchtether as tt, tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     tt.save({"a": torch.ones(2, 3), "b": torch.ones(3).expand(2, 3)}, folder + "/x.safetensors")
    ...     tt.open(folder + "/x.safetensors")["a"].tolist()
    [[1.0, 1.0, 1.0], [1.0, 1.0, 1.0]]
    """
    check_path(path)
    check_callable(progress, "progress", or_flag=True)
    target = writable(format)
    groups = plan_groups(as_saved(model), target, aliases, masters)
    pairs = target.pairs({}, metadata) if isinstance(target, Contained) else metadata
    write_groups(
        groups,
        Path(path),
        format=target,
        max_shard_size=max_shard_size,
        progress=progress,
        metadata=pairs,
        config=partial(config_of, model),
    )


CONFIGS: dict[str, Callable[[nn.Module], dict[str, Any]]] = {}
"""Functions that return the entries of ``config.json`` for a model of a library, by a module that is imported then.

They return no entries for other models, and raise CheckpointError for a config that JSON cannot hold.
"""


def config_of(model: nn.Module | Mapping[str, Tensor]) -> dict[str, Any]:
    """Return the entries of ``config.json`` that the library of ``model`` gives it; none for other models."""
    found = uncompiled(model)
    if not isinstance(found, nn.Module):
        return {}
    made = (entries_of(found) for library, entries_of in CONFIGS.items() if library in sys.modules)
    return next(filter(None, made), {})


# -- the tensors to store ---------------------------------------------------------------------------------------------


def as_saved(model: nn.Module | Mapping[str, Tensor]) -> nn.Module | Mapping[str, Tensor]:
    """Return ``model``, without the wrapper of ``torch.compile``.

    Raise ArgumentError if it is no module or mapping, CheckpointError if diffusers keeps its values in files.
    """
    if not isinstance(model, (nn.Module, Mapping)):
        what = f"is {describe(model)}, not a module or a state dict"
        raise ArgumentError(what, name="model", fix="Give one of these.")
    if isinstance(model, nn.Module) and is_on_disk(model.modules()):
        raise CheckpointError(ON_DISK, name="model", fix="Save it before it is offloaded.")
    return uncompiled(model)


def plan_groups(
    model: nn.Module | Mapping[str, Tensor], format: Writable, aliases: Aliases, masters: Masters = "keep"
) -> list[HeldGroup]:
    """Return the groups of tensors that ``save`` stores, each in one shard. Raise the errors of ``save``."""
    if aliases not in ("drop", "copy"):
        raise CheckpointError(f"{aliases!r} is neither 'drop' nor 'copy'", name="aliases")
    if masters not in ("keep", "drop"):
        raise CheckpointError(f"{masters!r} is neither 'keep' nor 'drop'", name="masters")
    named = _named(model)
    if masters == "drop":
        alone = {id(tensor): _without_master(tensor) for tensor in named.values()}  # tied names share one object
        named = {name: alone[id(tensor)] for name, tensor in named.items()}
    groups = _groups(named, format, copy=aliases == "copy")
    found = model.named_modules(remove_duplicate=False) if isinstance(model, nn.Module) else ()
    others = {f"{path}.weight" if path else "weight" for path, one in found if not isinstance(one, nn.Linear)}
    for group in groups:
        names = {*group.weights, *(name for tie in group.ties for name in tie.names)}
        group.is_linear = others.isdisjoint(names)
    rounded = [name for group in groups for name, spec in group.weights.items() if spec.activations is not None]
    if rounded and format is not native:
        what = f"{format.name} does not store that inputs of these layers are rounded"
        warn(f"{describe_some(rounded)}: {what}. Call tt.quantize_activations after a load.")
    return groups


@dataclass
class HeldGroup(ShardGroup):
    """One component with its tensors: ``stored``, plain tensors by key, and ``packed``, Weights by name."""

    stored: dict[str, Tensor] = field(default_factory=dict)
    packed: dict[str, Weight] = field(default_factory=dict)

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        yield from self.stored.items()
        for name, weight in self.packed.items():
            if not isinstance(weight, Weight) or weight.spec.replace(tie=None) != self.weights[name]:
                what = "it was converted while it was saved"
                raise CheckpointError(what, name=name, fix="Change the model before the save or after it.")
            yield from self.format.pack(name, weight).items()

    def add(self, name: str, tensor: Tensor) -> None:
        """Add ``tensor`` as ``name``: a Weight, or a plain tensor with its strides."""
        if isinstance(tensor, Weight) and not tensor.scheme.transparent:
            self.put_weight(name, tensor.spec.replace(tie=None))
            self.packed[name] = tensor
            return
        tensor = plain_values(tensor)
        self.put(name, tensor)
        if tensor.numel() and not tensor.is_contiguous():
            # a tensor with gaps becomes dense in the same order, as by ``clone``
            stride = tuple(torch.empty_like(tensor, device="meta").stride())
            if stride != contiguous_stride(tuple(tensor.shape)):
                self.strides[name] = stride

    def put(self, key: str, tensor: Tensor) -> None:
        """Add the plain ``tensor`` under ``key``."""
        check_writable(key, tensor)
        self.stored[key] = tensor
        self.layout[key] = (tensor.dtype, tuple(tensor.shape))


def _named(model: nn.Module | Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the tensor objects of ``model`` (not detached) by name. Raise an error if one cannot be saved."""
    found: Mapping[str, Any] = model.state_dict(keep_vars=True) if isinstance(model, nn.Module) else model
    for name, tensor in found.items():
        if not isinstance(name, str) or not name:
            raise CheckpointError("the name of a tensor must be text, and not empty", name=repr(name))
        check_unicode(name)
        if isinstance(tensor, Tensor) and is_lazy(tensor):
            raise CheckpointError("it is lazy and has no values yet", name=name, fix="Run the model once, then save.")
        check_values(name, tensor)
        if name.startswith(HIDDEN):
            raise CheckpointError(f"names that begin with {HIDDEN} are reserved", name=name, fix="Rename it.")
    return dict(found)


def check_values(name: str, tensor: Tensor) -> None:
    """Raise CheckpointError, naming ``name``, unless ``tensor``, or each part of a Weight, has memory to be written."""
    for part in tensor.parts.values() if isinstance(tensor, Weight) else (tensor,):
        check_writable(name, part)
        if is_sharded(part):
            raise CheckpointError("it is a DTensor", name=name, fix="Use tt.distributed.save.")
        if not is_strided(part):
            library = type(part).__module__.partition(".")[0]
            what = f"it is {describe(part)} of {library}, which keeps its values in other tensors"
            fix = "Save its values as a plain tensor; tt.adopt(model) takes those of quanto, torchao and bitsandbytes."
            raise CheckpointError(what, name=name, fix=fix)
        if not has_values(part):
            raise CheckpointError("its memory is freed or fake, so it has no values", name=name, fix="Load it first.")


def _without_master(tensor: Tensor) -> Tensor:
    """Return the codes of a Weight with a master, over the same memory; return any other tensor unchanged."""
    if not isinstance(tensor, Weight) or tensor.scheme.decoder is tensor.scheme:
        return tensor
    codes = tensor.scheme.decoder
    parts = {name: tensor.parts[name] for name in codes.layout(tensor.spec.base)}
    return Weight(parts, tensor.spec.replace(scheme=codes))


def _groups(named: Mapping[str, Tensor], format: Writable, *, copy: bool) -> list[HeldGroup]:
    components = find_components(named)
    claimed = _recorded(named, components)
    taken = {name for tie in claimed for name in tie.aliases}
    extra = {tie.owner: tie for tie in claimed}
    return [
        _group(component, named, extra, format, copy=copy)
        for component in components
        if taken.isdisjoint(component.names)
    ]


def _group(
    component: Component, named: Mapping[str, Tensor], extra: Mapping[str, Tie], format: Writable, *, copy: bool
) -> HeldGroup:
    group = HeldGroup(format)
    tie = tie_of(component)
    if tie is None and component.names[0] in extra:
        tie = extra[component.names[0]]
    if tie is None:
        group.add(component.names[0], component.members[0].tensor)
        return group
    _check_recordable(component)
    _check_views_of_weight(tie, named[tie.owner])
    if _is_whole(component, tie.owner, named):
        group.add(tie.owner, named[tie.owner])
    else:
        hidden = HIDDEN + component.names[0]
        group.put(hidden, _span(component))
        views = {name: member.view for member in component.members for name in member.names}
        tie = Tie((hidden, *views), (None, *views.values()), (True, *(False for _ in views)))
    group.put_tie(tie)
    if copy:
        for alias in tie.aliases:
            group.add(alias, named[alias])
            group.strides.pop(alias, None)
            group.copies.add(alias)
    return group


def _check_recordable(component: Component) -> None:
    """Raise TieError or CheckpointError for a member whose view a record cannot hold: readers would refuse it."""
    for member in component.members if component.nbytes else ():
        name = member.names[0]
        others = [other for other in component.names if other not in member.names]
        if others and member.view.overlaps_itself:
            size, stride = member.view.size, member.view.stride
            raise TieError(
                f"it shares memory with {others[0]}, and with size {size} and stride {stride} it overlaps itself",
                name=name,
                fix=f"Call tt.untie(model, {name!r}), or save a contiguous copy.",
            )
        if member.view.dtype not in CODES:
            raise CheckpointError(
                f"safetensors has no dtype for {member.view.dtype}", name=name, fix="Convert the tensor first."
            )


def _check_views_of_weight(tie: Tie, owner: Tensor) -> None:
    """Raise TieError for a view of a quantized tensor that a record cannot hold: readers would refuse the file."""
    if not isinstance(owner, Weight) or owner.scheme.transparent:
        return
    for name, view in zip(tie.names, tie.views, strict=True):
        if view is not None and not is_weight_view(view, owner.spec, owner.numel()):
            raise TieError(
                f"is a view of {tie.owner} (size {view.size}), which is quantized: only the whole tensor with permuted "
                "dimensions, or some of its rows, can be stored as a tie of it",
                name=name,
                fix=f"Call tt.untie(model, {name!r}).",
            )


def _is_whole(component: Component, owner: str, named: Mapping[str, Tensor]) -> bool:
    """Return whether the owner covers the component without a gap, so that the other members need no storage."""
    if component.nbytes == 0 or len(component.members) == 1:
        return True
    (block,) = blocks_of(named[owner])
    return block.is_dense and block.start == component.start and block.nbytes == component.nbytes


def _span(component: Component) -> Tensor:
    """Return the memory that the members cover as one flat tensor; gaps between members are zeros."""
    dtype = component.dtype or torch.uint8
    made = torch.zeros(component.nbytes // dtype.itemsize, dtype=dtype, device="cpu")
    for member in component.members:
        plain_values(member_view(made, member)).copy_(plain_values(member.tensor).detach())
    return made


# -- ties in records alone --------------------------------------------------------------------------------------------


def _recorded(named: Mapping[str, Tensor], components: tuple[Component, ...]) -> list[Tie]:
    """Return recorded ties of Weights that no longer share memory: a state dict was moved tensor by tensor.

    A recorded tie is used if its tensors are still equal. Raises TieError if they differ. A record that lacks the name
    of its own Weight is left out: a layer before it was deleted, and its names are those of others now.
    """
    home = {name: component for component in components for name in component.names}
    found: dict[str, Tie] = {}
    for own, tensor in named.items():
        tie = tensor.tie if isinstance(tensor, Weight) else None
        if tie is None or own not in tie.names or tie.owner not in named or tie.owner in found:
            continue
        if len(home[tie.owner].names) > 1:
            continue
        kept = tie_among(tie, [name for name in tie.names if name in named and len(home[name].names) == 1])
        if kept is None:
            continue
        for name, view in zip(kept.aliases, kept.views[1:], strict=True):
            _check_still(tie.owner, named[tie.owner], name, named[name], view)
        found[tie.owner] = kept
    return list(found.values())


def _check_still(owner: str, whole: Tensor, name: str, alias: Tensor, view: View | None) -> None:
    try:
        seen = plain_values(whole) if isinstance(whole, Weight) and whole.scheme.transparent else whole
        wanted = whole if view is None else view_of(seen, view)
        one, two = (_bits(tensor) for tensor in (wanted, alias))
        same = len(one) == len(two) and all(torch.equal(a, b) for a, b in zip(one, two, strict=True))
    except RuntimeError:  # the view reaches past the end of its owner
        same = False
    if not same:
        raise TieError(
            f"its record says that it is tied to {owner}, but their values differ",
            name=name,
            fix="Call tt.tie or tt.untie before saving.",
        )


def _bits(tensor: Tensor) -> list[Tensor]:
    if isinstance(tensor, Weight) and not tensor.scheme.transparent:
        return [bits for part in tensor.parts.values() for bits in _bits(part)]
    tensor = plain_values(tensor).detach()
    return [tensor.contiguous().reshape(-1).view(torch.uint8)]
