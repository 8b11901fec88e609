"""A head for an encoder's last hidden state: logits of the words behind masks."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

__all__ = ["MaskedWordsHead"]


class MaskedWordsHead(nn.Module):
    """``norm(act(W x + b)) T^T + c``: logits of the vocabulary for every token, T being its table.

    Devlin et al. 2018, arXiv:1810.04805.

    Args:
        dense: the linear map W.
        act, norm: what follows it.
        vocab: tokens of the vocabulary.
        tied: T is the embedding's table, which the call brings; otherwise it is ``weight`` (vocabulary, dim).
        bias: whether there is a number c for each token.

    >>> head = MaskedWordsHead(nn.Linear(8, 8), nn.GELU(), nn.LayerNorm(8), 11)
    >>> head(torch.zeros(2, 5, 8), torch.zeros(11, 8)).shape
    torch.Size([2, 5, 11])
    """

    def __init__(
        self,
        dense: nn.Linear,
        act: nn.Module,
        norm: nn.Module,
        vocab: int,
        *,
        tied: bool = True,
        bias: bool = True,
    ) -> None:
        super().__init__()
        self.dense, self.act, self.norm = dense, act, norm
        self.weight = None if tied else nn.Parameter(torch.empty(vocab, dense.out_features))
        self.bias = nn.Parameter(torch.empty(vocab)) if bias else None
        self.reset_parameters()

    def reset_parameters(self, std: float = 0.02) -> None:
        """Starts the own table anew, from N(0, std^2), and the bias at 0."""
        if self.weight is not None:
            nn.init.normal_(self.weight, std=std)
        if self.bias is not None:
            nn.init.zeros_(self.bias)

    def forward(self, hidden: Tensor, table: Tensor | None = None) -> Tensor:
        """Logits ``(..., vocabulary)`` of hidden states ``(..., dim)``; a tied head reads `table`."""
        weight = table if self.weight is None else self.weight
        if weight is None:
            raise ValueError("table: expected the embedding's (vocabulary, dim), for this head is tied to it, got None")
        return F.linear(self.norm(self.act(self.dense(hidden))), weight, self.bias)
