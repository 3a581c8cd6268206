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


def absent_heads(modules: Collection[str]) -> list[str]:
    """Return the names of heads that are part of no name in ``modules``, the modules with a stored weight.

    A tied head is stored under no name of its own, and a file by others does not say that it exists. A reader that
    builds it as a quantized module would leave it without values.

    >>> "lm_head" in absent_heads(["model.embed_tokens"]), "lm_head" in absent_heads(["language_model.lm_head"])
    (True, False)
    """
    return [head for head in _HEADS if not any(head in module for module in modules)]
