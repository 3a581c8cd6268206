"""Reports of ``quantize`` and ``convert``: the changes of tensors by kind, and the other files."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from .._checks import describe_some
from ..conversion.sizing import QuantizePlan
from ..files import CarriedOver
from ..pictures.drawing import clean, describe_bytes
from ..pictures.rows import counted

Kind = tuple[str, str]
"""The name of a scheme, empty for a plain tensor, and the dtype of the values."""

_SHOWN = 8
"""The largest number of files of one kind that are named."""


@dataclass(frozen=True)
class TransformReport:
    """Report of a written checkpoint: its tensors, which of them changed, and the bytes before and after."""

    tensors: int
    changed: tuple[str, ...]
    bytes_before: int
    bytes_after: int
    kinds: Mapping[tuple[Kind, Kind], int]
    """The number of stored tensors, by their kind before and their kind now."""
    formats: tuple[str, str]
    """The format of the source, and that of the target."""
    carried: CarriedOver
    padding: tuple[str, ...]
    """The names of tensors that were left out: zeros that the format of the source adds to those of a model."""


def print_made(target: Path | str, report: TransformReport, *, is_quantized: bool = False) -> None:
    """Print the checkpoint written at ``target``: a line of totals, then one for each kind of tensors and files."""
    before, after = describe_bytes(report.bytes_before), describe_bytes(report.bytes_after)
    count = (
        f"{len(report.changed)} of {report.tensors} tensors quantized" if is_quantized else f"{report.tensors} tensors"
    )
    print(f"{clean(str(target))}: {count}, {before} -> {after}, format {report.formats[1]}")
    for (old, new), many in sorted(report.kinds.items(), key=lambda one: (-one[1], one[0])):
        print(f"  {many} {_describe_change(old, new, report.formats)}")
    if report.padding:
        print(f"  left out, zeros that {report.formats[0]} adds to a model: {_names(report.padding)}")
    carried = report.carried
    if carried.files:
        print(f"  copied: {counted(len(carried.files), 'other file')}")
    if carried.weights:
        print(f"  copied weights, unchanged: {_names(carried.weights)}")
    for why in sorted(set(carried.left_out.values())):
        print(f"  left out, {why}: {_names(path for path, one in carried.left_out.items() if one == why)}")


def _describe_change(old: Kind, new: Kind, formats: tuple[str, str]) -> str:
    """Return a description of the change of tensors of one kind, such as ``float32 -> int8``."""
    (scheme, dtype), (now, computed) = old, new
    if not now and not scheme:
        return f"{dtype}, unchanged" if dtype == computed else f"{dtype} -> {computed}"
    if not now:
        return f"{scheme} -> {computed}, decoded"
    if now != scheme:
        return f"{scheme or dtype} -> {now}" + (", decoded and encoded again" if scheme else "")
    words = f"{now}, the same codes"
    words += f", {formats[0]} -> {formats[1]}" if formats[0] != formats[1] else ""
    return words + (f", to compute in {computed} instead of {dtype}" if dtype != computed else "")


def _names(paths: Iterable[str]) -> str:
    return describe_some([clean(path) for path in paths], _SHOWN)


def print_plan(plan: QuantizePlan) -> None:
    """Print a plan as a table: the scheme, the bytes and the error of each weight, and the totals."""
    print("\n".join(map(clean, str(plan).split("\n"))))
