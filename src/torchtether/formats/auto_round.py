"""AutoRound: the tensors of GPTQ, AWQ or compressed-tensors, under a ``quant_method`` of its own.

    packing_format    "auto_round:auto_gptq"                      GPTQ, zero points stored less one
                      "auto_round", "auto_round:gptqmodel", ...   GPTQ, zero points as they are
                      "auto_round:auto_awq"                       AWQ, gemm
                      "auto_round:llm_compressor"                 compressed-tensors
    extra_config      options of some modules, by name or pattern

Others have ``format``, or older ones ``backend``, instead of ``packing_format``, with the same values.
Source: AutoRound 0.16.1, inference/convert_model.py and export/export_to_autoround.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from torch import Tensor

from ..errors import CheckpointError
from ..files import Stored
from . import awq, compressed_tensors, gptq
from .entry import Contents, Entry, Evidence, Found
from .linears import Settings, dynamic_overrides, extra_overrides, options_of
from .refused import find_codes
from .rows import Along

name = "auto-round"
evidence = Evidence(
    methods=tuple(who + word for who in ("", "intel/") for word in ("auto-round", "auto_round", "autoround"))
)

_DEFAULT = "auto_round:auto_gptq"
_AS_STORED = ("auto_round", "auto_round:gptqmodel", "auto_round:exllamav2", "auto_round:tritonv2", "auto_round:triton")
_FILE = "config.json"


def recognise(contents: Contents) -> Found | None:
    """Return every module with a ``qweight``, read as GPTQ or as AWQ."""
    method = contents.method.removeprefix("intel/").replace("_", "-")
    if method not in (name, "autoround"):
        return None
    config = contents.quantization
    stated = str(config.get("format")).startswith("auto_round") and config["format"]  # others have other uses of it
    packing = str(config.get("packing_format") or stated or config.get("backend") or _DEFAULT).lower()
    packing = _DEFAULT if packing == "auto" else packing.replace("autoround", "auto_round")
    if packing.endswith("llm_compressor"):
        return compressed_tensors.recognise(_restated(contents))
    kind, codes = _kind(packing), find_codes(contents)
    if kind is None and codes is not None:
        raise CheckpointError(
            f"AutoRound with the packing_format {packing[:60]!r} is not supported, and {codes} is packed",
            name=_FILE,
            fix="Use or export a checkpoint in auto_round:auto_gptq, auto_round:auto_awq or llm_compressor.",
        )
    for field in ("rotation_config", "spinquant_config"):
        if config.get(field):
            raise CheckpointError(
                f"the weights are rotated ({field}), and the model would have to undo the rotation",
                name=_FILE,
                fix="Load the model with auto-round, or use a checkpoint without rotations.",
            )
    names = {key.rpartition(".")[0] for key in contents.tensors}
    rules = (*extra_overrides(config, names, file=_FILE), *dynamic_overrides(config, file=_FILE))
    settings = Settings(options_of(config, file=_FILE), rules)
    if kind == awq.name:
        return awq.read(contents, settings)
    return gptq.read(contents, settings, version=1 if kind == "gptq_v1" else 2)


def unpack(entry: Entry, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the parts, unpacked by the format whose packing the entry has."""
    if "dense" in entry.options:
        return compressed_tensors.unpack(entry, tensors)
    return awq.unpack(entry, tensors) if "version" in entry.options else gptq.unpack(entry, tensors)


def rows(entry: Entry, tensors: Mapping[str, Stored]) -> Mapping[str, Along] | None:
    """Return where the rows lie, by the format whose packing the entry has."""
    if "dense" in entry.options:
        return compressed_tensors.rows(entry, tensors)
    return awq.rows(entry, tensors) if "version" in entry.options else gptq.rows(entry, tensors)


def _restated(contents: Contents) -> Contents:
    """Return ``contents`` with the config that compressed-tensors would write for the same weights."""
    config = contents.quantization
    size = config.get("group_size")
    is_group = type(size) is int and size > 0
    weights = {
        "num_bits": config.get("bits"),
        "type": "int",
        "symmetric": config.get("sym") is not False,
        "strategy": "group" if is_group else "channel",
        "group_size": size if is_group else None,
    }
    config = {
        "format": "pack-quantized",
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": weights}},
        **config,
        "quant_method": compressed_tensors.name,
    }
    return replace(contents, beside={**contents.beside, _FILE: {"quantization_config": config}})


def _kind(packing: str) -> str | None:
    """Return the packing that ``packing`` names: awq, gptq_v1 or gptq_v2; ``None`` if it is not read."""
    words = packing.split(":")
    if words[0] not in ("auto_round", "auto_gptq", "auto_awq", "gptq", "gptqmodel", "awq"):
        return None
    if "auto_awq" in words or "awq" in words:
        return awq.name
    if "auto_gptq" in words or "gptq" in words:
        return "gptq_v1"
    return "gptq_v2" if packing in _AS_STORED else None
