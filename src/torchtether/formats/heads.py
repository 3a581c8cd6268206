"""Heads that a config excludes from quantization, although the checkpoint may have no tensor of theirs."""

from __future__ import annotations

from collections.abc import Collection

_HEADS = (
    "lm_head",
    "cls.predictions.decoder",  # BERT
    "lm_head.decoder",  # RoBERTa
    "predictions.decoder",  # ALBERT
    "generator_lm_head",  # ELECTRA
    "vocab_projector",  # DistilBERT
    "pred_layer.proj",  # XLM
    "proj_out",  # Whisper
)
"""The names, or ends of names, that transformers gives to linear layers that may be tied to an embedding."""


def plain_heads(quantized: Collection[str]) -> list[str]:
    """Return the names of heads that are part of no name in ``quantized``, the modules with a quantized weight.

    A tied head is stored under no name of its own, and a file by others does not say that it exists. Another is stored
    under a name that readers change: ``language_model.lm_head`` is ``lm_head`` in transformers. A reader that builds it
    as a quantized module would leave it without values.

    >>> "lm_head" in plain_heads(["layers.0.q_proj"]), "lm_head" in plain_heads(["language_model.lm_head"])
    (True, False)
    """
    return [head for head in _HEADS if not any(head in module for module in quantized)]
