"""Rename rules from llama.cpp's names of tensors to those of transformers, and for its order of rows."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from .._checks import check_path
from ..checkpoint.reader import Checkpoint
from ..errors import CheckpointError, RuleError
from ..files import PAIRS
from .joining import Concat
from .named_tensors import NamedTensor, Rule, broken, change_found
from .pieces import CompositeTensor, increased, stacked
from .reordering import Rotary
from .steps import Naming, Substitution

Rules = list[Rule | Substitution | Naming]

_DECODER: Rules = [
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


@dataclass(frozen=True)
class _Increase(Rule):
    """Add ``plus`` to plain tensors: llama.cpp multiplies by norms as they are, and Gemma by one more."""

    source: str
    plus: float

    def apply(self, names: Sequence[NamedTensor]) -> list[NamedTensor] | None:
        return change_found(names, self.source, lambda one, _: [replace(one, tensor=self._increased(one))])

    def _increased(self, one: NamedTensor) -> CompositeTensor:
        if not one.tensor.scheme.transparent or not one.tensor.dtype.is_floating_point:
            return broken([one], wrong=f"{one.name}: it is quantized, and {self.plus} cannot be added to it")
        return increased(one.tensor, self.plus)


@dataclass(frozen=True)
class _AsRow(Rule):
    """Make a matrix of one row of a vector: llama.cpp drops dimensions of size 1."""

    source: str

    def apply(self, names: Sequence[NamedTensor]) -> list[NamedTensor] | None:
        return change_found(names, self.source, lambda one, _: [replace(one, tensor=self._row(one.tensor))])

    def _row(self, given: CompositeTensor) -> CompositeTensor:
        return stacked([given], 0) if len(given.shape) == 1 and not given.is_broken else given


_EXPERTS: Rules = [
    Concat(
        [r"^blk\.(\d+)\.ffn_gate_exps\.weight$", r"^blk\.(\d+)\.ffn_up_exps\.weight$"],
        r"model.layers.\1.mlp.experts.gate_up_proj",
        dim=1,
    ),
    (r"^blk\.(\d+)\.ffn_down_exps\.weight$", r"model.layers.\1.mlp.experts.down_proj"),
    (r"^blk\.(\d+)\.ffn_gate_inp\.", r"model.layers.\1.mlp.gate."),
]

_SHARED_EXPERT: Rules = [
    _AsRow(r"^blk\.(\d+)\.ffn_gate_inp_shexp\.weight$"),
    (r"^blk\.(\d+)\.ffn_gate_inp_shexp\.", r"model.layers.\1.mlp.shared_expert_gate."),
    (r"^blk\.(\d+)\.ffn_(gate|up|down)_shexp\.", r"model.layers.\1.mlp.shared_expert.\2_proj."),
]

_GEMMA: Rules = [
    _Increase(r"^(blk\.\d+\.\w+|output)_norm\.weight$", -1.0),  # not those that have transformers' names already
    (r"^blk\.(\d+)\.post_attention_norm\.", r"model.layers.\1.post_attention_layernorm."),
    (r"^blk\.(\d+)\.ffn_norm\.", r"model.layers.\1.pre_feedforward_layernorm."),
    (r"^blk\.(\d+)\.post_ffw_norm\.", r"model.layers.\1.post_feedforward_layernorm."),
]

_PHI: Rules = [
    (r"^blk\.(\d+)\.attn_qkv\.", r"model.layers.\1.self_attn.qkv_proj."),
    (r"^blk\.(\d+)\.ffn_up\.", r"model.layers.\1.mlp.gate_up_proj."),
]

_STARCODER: Rules = [
    (r"^blk\.(\d+)\.ffn_up\.", r"model.layers.\1.mlp.c_fc."),
    (r"^blk\.(\d+)\.ffn_down\.", r"model.layers.\1.mlp.c_proj."),
]

_OWN: dict[str, Rules] = {
    "llama": [], "qwen2": [], "qwen3": [], "qwen2moe": _EXPERTS + _SHARED_EXPERT, "qwen3moe": _EXPERTS,
    "gemma2": _GEMMA, "gemma3": _GEMMA, "phi3": _PHI, "starcoder2": _STARCODER,
}  # fmt: skip
"""The rules for what the architectures do not have in common."""

_PAIRED = {"llama"}
"""The architectures with the rows of queries and keys in Meta's pairs."""


def gguf_names(source: Checkpoint | Path | str) -> Rules:
    """Return the ``rename`` argument with which ``tt.load`` loads the GGUF file ``source`` into a transformers model.

    The architectures are llama (Mistral, Mixtral and others are stored as llama), qwen2, qwen2moe, qwen3, qwen3moe,
    gemma2, gemma3 (the text model), phi3 and starcoder2, with the names of transformers 5. llama.cpp stores the rows of
    llama's queries and keys in pairs; they are reordered into halves, and gates and ups of experts are joined, without
    decoding quantized ones. Norms of Gemma, which llama.cpp stores with one added, get their own values. Frequencies
    are left out, because the model computes them. A file without a head belongs to a tied model.

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
    if not isinstance(family, str) or family not in _OWN:
        raise RuleError(
            f"there are no rename rules for the architecture {family!r}, only for {', '.join(_OWN)}",
            name=str(source.path),
            fix="Write the rules yourself.",
        )
    rules: Rules = [_without_frequencies]
    if family in _PAIRED:
        heads = _count(source, pairs, f"{family}.attention.head_count", None)
        kv_heads = _count(source, pairs, f"{family}.attention.head_count_kv", heads)
        _check_heads(source, heads, kv_heads)
        rules += [Rotary(rf"\.attn_{one}\.(weight|bias)$", n) for one, n in (("q", heads), ("k", kv_heads))]
    if family == "llama" and pairs.get("llama.expert_count"):
        rules += _EXPERTS
    return rules + _OWN[family] + _DECODER


def is_of_llama_cpp(source: Checkpoint) -> bool:
    """Return whether the tensors have llama.cpp's names."""
    return "token_embd.weight" in source and any(name.startswith("blk.0.") for name in source)


def _without_frequencies(name: str) -> str | None:
    return None if re.search(r"(^|\.)rope_(freqs|factors_long|factors_short)\.", name) else name


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
        rows, of_keys = ((*source.spec(one).shape, 0)[0] for one in (queries, name))
        if rows * kv_heads != of_keys * heads:
            raise CheckpointError(
                f"it has {of_keys} rows and {queries} has {rows}, which are not {kv_heads} and {heads} equal heads",
                name=f"{source.path}: {name}",
                fix="Write the rules yourself, with tt.Rotary.",
            )
