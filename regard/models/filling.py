"""The words that a model of masked words finds for the masks of a text."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from regard.checks import describe, whole
from regard.mixers.base import floating
from regard.models.encoder import Encoder

__all__ = ["Candidate", "fill"]


@dataclass(frozen=True)
class Candidate:
    """A token that may stand behind a mask: its id, its text, and its probability among all of the vocabulary."""

    id: int
    text: str
    probability: float


def fill(model: Encoder, text: str, *, top: int = 5) -> list[list[Candidate]]:
    """For every mask of a text, in their order, its most probable tokens, the likeliest first.

    The masks are filled each by itself, as if the others stayed masked.

    Args:
        model: an encoder with a head of masked words and a tokenizer: BERT, ModernBERT, DeBERTa, Longformer, BigBird.
        text: with the tokenizer's mask token (``[MASK]`` or ``<mask>``) wherever a token is asked for.
        top: tokens a mask, at most the vocabulary's.

    Raises:
        TypeError, ValueError: naming the argument, for a model that is no encoder or has no such head, for one whose
            tokenizer has no mask token, and for a text without a mask.
        NoTokenizer: for a model without a tokenizer.
    """
    if not isinstance(model, Encoder):
        raise TypeError(f"model: expected an Encoder with a head of masked words, got {describe(model)}")
    if model.head is None:
        raise ValueError(
            "model: expected an Encoder with a head of masked words, got one that ends at its last hidden state; a head"
            " is read where config.json's architectures name its class, such as BertForMaskedLM, and the file holds it"
        )
    if not isinstance(text, str):
        raise TypeError(f"text: expected a text with masks, got {describe(text)}")
    tokenizer = model.tokenizer
    mask = tokenizer.named_tokens.get("mask_token")
    mask_id = None if mask is None else tokenizer.backend.token_to_id(mask)
    if mask_id is None:
        raise ValueError("model: expected a tokenizer with a mask token, got one whose files name none (mask_token)")
    ids = tokenizer.encode(text)
    places = [place for place, token in enumerate(ids) if token == mask_id]
    if not places:
        raise ValueError(f"text: expected {mask} at least once, where a token is asked for, got {text!r}")
    whole("top", top, 1)
    was_training = [module for module in model.modules() if module.training]
    model.eval()
    try:
        with torch.no_grad():
            hidden = model(torch.tensor([ids], device=floating(model).device))
            shares = model.logits(hidden[0, places]).double().softmax(-1)
            found = shares.topk(min(top, shares.shape[-1]))
    finally:
        for module in was_training:
            module.training = True
    decode = tokenizer.backend.decode
    return [
        [
            Candidate(token, decode([token], skip_special_tokens=False), probability)
            for token, probability in zip(tokens, row, strict=True)
        ]
        for tokens, row in zip(found.indices.tolist(), found.values.tolist(), strict=True)
    ]
