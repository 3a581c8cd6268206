"""Print the results of ``quantize`` and ``convert``: the changes of tensors by kind, and the other files."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from .._checks import describe_some
from ..conversion.sizing import QuantizePlan
from ..pictures.drawing import clean, describe_bytes
from .transform import Kind, TransformReport

_SHOWN = 8
"""The largest number of files of one kind that are named."""


def print_made(target: Path | str, report: TransformReport, *, is_quantized: bool = False) -> None:
    """Print the checkpoint written at ``target``: a line of totals, then one for each kind of tensors and files."""
    before, after = describe_bytes(report.bytes_before), describe_bytes(report.bytes_after)
    count = (
        f"{len(report.changed)} of {report.tensors} tensors quantized" if is_quantized else f"{report.tensors} tensors"
    )
    print(f"{target}: {count}, {before} -> {after}, format {report.formats[1]}")
    for (old, new), many in sorted(report.kinds.items(), key=lambda one: (-one[1], one[0])):
        print(f"  {many} {_describe_change(old, new, report.formats)}")
    carried = report.carried
    if carried.files:
        print(f"  copied: {len(carried.files)} other files")
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
