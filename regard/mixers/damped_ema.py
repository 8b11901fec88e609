"""Mega's damped multi-dimensional moving average, which its gated attention takes queries and keys from.

    h_t[d, n] = p beta x_t[d] + (1 - p a) h_{t-1}[d, n],   p = sigmoid(delta), a = sigmoid(alpha)
    out_t[d] = silu(sum_n gamma[d, n] h_t[d, n] / sqrt(N) + omega[d] x_t[d])

Ma et al. 2022, arXiv:2209.10655, eq. 2-3.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from regard.checks import whole
from regard.decays import damped_decay, sigmoid
from regard.mixers.parts import merge_heads, split_heads
from regard.mixers.recurrent import RecurrentLayer, States
from regard.mixers.sequence import TokenSequence, scan_matrix, widened

__all__ = ["DampedEMA"]


class DampedEMA(RecurrentLayer):
    """Mega's damped, multi-dimensional moving average; ``(B, T, dim)`` in and out, causal or in both directions.

    Args:
        dim: width of the tokens.
        states: N, averages per channel.
        bidirectional: a second average, with parameters of its own, runs from the last token back and is added; both
            count the token itself. Then the layer has no cache.

    Parameters: ``delta alpha beta gamma`` (dim, N), twice as many rows where bidirectional (the second half's run
    back), and ``omega`` (dim). The state is N numbers per channel. ``M @ V`` is per channel, ``V = x``, omega is on M's
    diagonal. Cost: O(T dim N) in time and memory.

    >>> import torch
    >>> DampedEMA(32, bidirectional=True)(torch.randn(2, 10, 32)).shape
    torch.Size([2, 10, 32])
    """

    def __init__(self, dim: int, states: int = 16, *, bidirectional: bool = False) -> None:
        super().__init__()
        self.dim, self.states, self.bidirectional = whole("dim", dim, 1), whole("states", states, 1), bidirectional
        rows = 2 * dim if bidirectional else dim
        self.delta = nn.Parameter(torch.empty(rows, states))
        self.alpha = nn.Parameter(torch.empty(rows, states))
        self.beta = nn.Parameter(torch.empty(rows, states))
        self.gamma = nn.Parameter(torch.empty(rows, states))
        self.omega = nn.Parameter(torch.empty(dim))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Starts anew as the authors' code does: beta near 1, -1, 1, …, the others round 0."""
        for parameter, std in ((self.delta, 0.2), (self.alpha, 0.2), (self.beta, 0.02)):
            nn.init.normal_(parameter, std=std)
        with torch.no_grad():
            self.beta[:, 0::2].add_(1.0)
            self.beta[:, 1::2].sub_(1.0)
        nn.init.normal_(self.gamma)
        nn.init.normal_(self.omega)

    def state_shapes(self) -> dict[str, tuple[int, ...]]:
        return {"state": (self.dim, self.states)}

    def mix_tokens(self, seq: TokenSequence, states: States) -> tuple[Tensor, Tensor | None, dict[str, Tensor]]:
        log_q, write, read = self._rates()
        x = seq.x.to(write.dtype)
        first = slice(0, self.dim)
        h, state = seq.scan(log_q[:, :, first], x[..., None] * write[first], states.get("state"))
        y = (h * read[first]).sum(-1) + self.omega.to(x.dtype) * x
        if self.bidirectional:
            rest = slice(self.dim, None)
            h, _ = seq.reversed().scan(log_q[:, :, rest], x.flip(1)[..., None] * write[rest])
            return split_heads(y + (h * read[rest]).sum(-1).flip(1), self.dim), None, {}
        return split_heads(y, self.dim), None, {"state": state}

    def project_output(self, x: Tensor, mixed: Tensor, gate_input: Tensor | None) -> Tensor:
        return F.silu(merge_heads(mixed)).to(x.dtype)

    def matrix(self, seq: TokenSequence) -> tuple[Tensor, Tensor]:
        log_q, write, read = self._rates()
        x, weights = seq.x.to(write.dtype), (write * read)[..., None, None]

        def lags(line: TokenSequence, rows: slice) -> Tensor:
            each = scan_matrix(line, log_q[:, :, rows].flatten(2)).unflatten(1, (self.dim, self.states))
            out: Tensor = (each * weights[rows]).sum(2)
            return out

        matrix = lags(seq, slice(0, self.dim))
        if self.bidirectional:
            matrix = matrix + lags(seq.reversed(), slice(self.dim, None)).flip(2, 3)
        own = torch.diag_embed(self.omega.to(x.dtype)[:, None].expand(-1, x.shape[1]))
        return matrix + own, split_heads(x, self.dim)

    def _rates(self) -> tuple[Tensor, Tensor, Tensor]:
        """(log-decays (1, 1, rows, N), weights into the averages and out of them, both (rows, N))."""
        log_q, read = damped_decay(self.delta, self.alpha), widened(self.gamma) * self.states**-0.5
        return log_q[None, None], sigmoid(self.delta) * widened(self.beta), read
