"""Rename rules from llama.cpp's names of tensors to those of transformers, and for its order of rows."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from .._checks import check_path
from ..checkpoint.reader import Checkpoint
from ..errors import CheckpointError, RuleError
from ..files import PAIRS
from .named_tensors import Rule
from .reordering import Rotary
from .steps import Naming, Substitution

_DECODER: list[Substitution] = [
    (r"^token_embd\.", "model.embed_tokens."),
    (r"^output_norm\.", "model.norm."),
    (r"^output\.", "lm_head."),
    (r"^blk\.(\d+)\.attn_norm\.", r"model.layers.\1.input_layernorm."),
    (r"^blk\.(\d+)\.ffn_norm\.", r"model.layers.\1.post_attention_layernorm."),
    (r"^blk\.(\d+)\.attn_(q|k)_norm\.", r"model.layers.\1.self_attn.\2_norm."),
    (r"^blk\.(\d+)\.attn_(q|k|v)\.", r"model.layers.\1.self_attn.\2_proj."),
    (r"^blk\.(\d+)\.attn_output\.", r"model.layers.\1.self_attn.o_proj."),
    (r"^blk\.(\d+)\.ffn_(gate|up|down)\.", r"model.layers.\1.mlp.\2_proj."),
]

_PAIRED = {"llama": True, "qwen2": False, "qwen3": False}
"""The architectures with these names, and whether the rows of their queries and keys are in Meta's pairs."""


def gguf_names(source: Checkpoint | Path | str) -> list[Rule | Substitution | Naming]:
    """Return the ``rename`` argument with which ``tt.load`` loads the GGUF file ``source`` into a transformers model.

    The architectures are llama (Mistral and others are stored as llama), qwen2 and qwen3. llama.cpp stores the rows
    of llama's queries and keys in pairs; they are reordered into halves, without decoding quantized ones. Frequencies
    (``rope_freqs``) are left out, because the model computes them. A file without a head belongs to a tied model.

    Raises CheckpointError if ``source`` is not a GGUF file, or if its queries and keys do not have the heads that it
    records, and RuleError for another architecture: write the rules for it yourself, with ``tt.Rotary`` and others.

        tt.load(model, "model.gguf", rename=tt.gguf_names("model.gguf"))
    """
    if not isinstance(source, Checkpoint):
        check_path(source, "source")
        with Checkpoint(source) as opened:
            return gguf_names(opened)
    pairs = _pairs(source)
    family = pairs.get("general.architecture")
    if not isinstance(family, str) or family not in _PAIRED:
        raise RuleError(
            f"there are no rename rules for the architecture {family!r}, only for {', '.join(_PAIRED)}",
            name=str(source.path),
            fix="Write the rules yourself.",
        )
    rules: list[Rule | Substitution | Naming] = [_without_frequencies]
    if _PAIRED[family]:
        heads = _count(source, pairs, f"{family}.attention.head_count", None)
        kv_heads = _count(source, pairs, f"{family}.attention.head_count_kv", heads)
        _check_heads(source, heads, kv_heads)
        rules += [Rotary(rf"\.attn_{one}\.(weight|bias)$", n) for one, n in (("q", heads), ("k", kv_heads))]
    return rules + _DECODER


def _without_frequencies(name: str) -> str | None:
    return None if name.startswith("rope_freqs.") or ".rope_freqs." in name else name


def _pairs(source: Checkpoint) -> dict[str, Any]:
    text = source.store.header.metadata.get(PAIRS)
    if source.format != "gguf" or text is None:
        raise CheckpointError(f"it is {source.format}, not a GGUF file", name=str(source.path))
    found: dict[str, Any] = json.loads(text)
    return found


def _count(source: Checkpoint, pairs: dict[str, Any], key: str, default: int | None) -> int:
    value = pairs.get(key, default)
    if type(value) is not int or value < 1:
        raise CheckpointError(f"its value is {value!r}, not a number of heads", name=f"{source.path}: {key}")
    return value


def _check_heads(source: Checkpoint, heads: int, kv_heads: int) -> None:
    """Raise CheckpointError unless the heads of queries and of keys have as many rows, in every layer.

    Otherwise rows would be reordered among other heads: a file may record no number of heads of keys, or an array with
    one for each layer, which is not read.
    """
    for name in source:
        queries = name.replace(".attn_k.", ".attn_q.")
        if queries == name or queries not in source:
            continue
        rows, of_keys = (source.spec(one).shape[0] for one in (queries, name))
        if rows * kv_heads != of_keys * heads:
            raise CheckpointError(
                f"it has {of_keys} rows and {queries} has {rows}, which are not {kv_heads} and {heads} equal heads",
                name=f"{source.path}: {name}",
                fix="Write the rules yourself, with tt.Rotary.",
            )
