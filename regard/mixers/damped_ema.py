"""Mega's damped multi-dimensional moving average, which its gated attention takes queries and keys from.

    h_t[d, n] = p beta x_t[d] + (1 - p a) h_{t-1}[d, n],   p = sigmoid(delta), a = sigmoid(alpha)
    out_t[d] = silu(sum_n gamma[d, n] h_t[d, n] / sqrt(N) + omega[d] x_t[d])

A channel's N averages come to one number, so a channel is a convolution with a fixed kernel of lags,
``k_l = sum_n gamma p beta (1 - p a)^l / sqrt(N)``: tokens of a block of 64 meet through it, and blocks through their
averages alone, so that no tensor holds the averages of every token.

Ma et al. 2022, arXiv:2209.10655, eq. 2-3.
"""

from __future__ import annotations

import dataclasses

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from regard.checks import whole
from regard.decays import damped_decay, sigmoid
from regard.mixers.parts import merge_heads, split_heads
from regard.mixers.recurrent import RecurrentLayer, States
from regard.mixers.sequence import TokenSequence, scan_matrix, widened
from regard.ops.checks import without_autocast
from regard.ops.states import ScanCall, run_state_call

__all__ = ["DampedEMA"]

BLOCK = 64  # tokens that meet through the kernel of lags


class DampedEMA(RecurrentLayer):
    """Mega's damped, multi-dimensional moving average; ``(B, T, dim)`` in and out, causal or in both directions.

    Args:
        dim: width of the tokens.
        states: N, averages per channel.
        bidirectional: a second average, with parameters of its own, runs from the last token back and is added; both
            count the token itself. Then the layer has no cache.
        truncation: lags from so many tokens on count nothing; the state is then the inputs of that many tokens.

    Parameters: ``delta alpha beta gamma`` (dim, N), twice as many rows where bidirectional (the second half's run
    back), and ``omega`` (dim). The state is N numbers per channel. ``M @ V`` is per channel, ``V = x``, omega is on M's
    diagonal. Cost: O(T dim (N + 64)) time, O(T dim (1 + N / 64)) memory; truncated O(T dim truncation) time; with
    packed segments O(T dim N) of both.

    >>> import torch
    >>> DampedEMA(32, bidirectional=True)(torch.randn(2, 10, 32)).shape
    torch.Size([2, 10, 32])
    """

    def __init__(
        self, dim: int, states: int = 16, *, bidirectional: bool = False, truncation: int | None = None
    ) -> None:
        super().__init__()
        self.dim, self.states, self.bidirectional = whole("dim", dim, 1), whole("states", states, 1), bidirectional
        self.truncation = None if truncation is None else whole("truncation", truncation, 1)
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
        if self.truncation is not None:
            return {"conv": (self.truncation - 1, self.dim)}
        return {"state": (self.dim, self.states)}

    def mix_tokens(self, seq: TokenSequence, states: States) -> tuple[Tensor, Tensor | None, dict[str, Tensor]]:
        with without_autocast(seq.x):
            seq = dataclasses.replace(seq, x=widened(seq.x))  # once: gradients of its uses add up in the compute dtype
            y, new = self._averaged(seq, slice(0, self.dim), states)
            y = y + self.omega.to(y.dtype) * seq.x
            if self.bidirectional:
                y, new = y + self._averaged(seq.reversed(), slice(self.dim, None), {})[0].flip(1), {}
        return split_heads(y, self.dim), None, new

    def _averaged(self, seq: TokenSequence, rows: slice, states: States) -> tuple[Tensor, dict[str, Tensor]]:
        """What the averages of one direction come to (B, T, dim), and the state behind the last token."""
        log_q, write, read = self._rates(rows)
        x = seq.mask_padding(seq.x.to(write.dtype))
        if self.truncation is not None:
            kernel = torch.einsum("ldn,dn->dl", powers(log_q, self.truncation - 1), write * read)
            y, last = seq.conv(x, kernel.flip(1), None, states.get("conv"))
            return y, {"conv": last}
        if x.shape[1] < 2 or seq.segments is not None:
            h, state = seq.scan(log_q[None, None], x[..., None] * write, states.get("state"))
            return (h * read).sum(-1), {"state": state}
        y, state = averaged_in_blocks(x, log_q, write, read, states.get("state"), seq.lengths)
        return y, {"state": state}

    def project_output(self, x: Tensor, mixed: Tensor, gate_input: Tensor | None) -> Tensor:
        return F.silu(merge_heads(mixed)).to(x.dtype)

    def matrix(self, seq: TokenSequence) -> tuple[Tensor, Tensor]:
        matrix = self._lags(seq, slice(0, self.dim))
        if self.bidirectional:
            matrix = matrix + self._lags(seq.reversed(), slice(self.dim, None)).flip(2, 3)
        x = seq.x.to(matrix.dtype)
        own = torch.diag_embed(self.omega.to(x.dtype)[:, None].expand(-1, x.shape[1]))
        return matrix + own, split_heads(x, self.dim)

    def _lags(self, seq: TokenSequence, rows: slice) -> Tensor:
        """The averages of one direction as matrices (B, dim, T, T)."""
        log_q, write, read = self._rates(rows)
        each = scan_matrix(seq, log_q[None, None].flatten(2)).unflatten(1, (self.dim, self.states))
        matrix: Tensor = (each * (write * read)[..., None, None]).sum(2)
        return matrix if self.truncation is None else matrix.triu(1 - self.truncation)

    def _rates(self, rows: slice) -> tuple[Tensor, Tensor, Tensor]:
        """(log-decays, weights into the averages, weights out of them) of one direction, (dim, N) each."""
        delta, alpha, beta, gamma = (one[rows] for one in (self.delta, self.alpha, self.beta, self.gamma))
        return damped_decay(delta, alpha), sigmoid(delta) * widened(beta), widened(gamma) * self.states**-0.5


def powers(log_q: Tensor, last: int) -> Tensor:
    """``q^0 … q^last`` (last + 1, dim, N)."""
    steps = torch.arange(1, last + 1, device=log_q.device, dtype=log_q.dtype)
    return torch.cat([torch.ones_like(log_q)[None], torch.exp(steps[:, None, None] * log_q)])


def averaged_in_blocks(
    x: Tensor, log_q: Tensor, write: Tensor, read: Tensor, state: Tensor | None, lengths: Tensor | None
) -> tuple[Tensor, Tensor]:
    """``y_t = sum_n read h_t``, ``h_t = q h_{t-1} + write x_t`` of (B, T, dim), and h behind `lengths` tokens.

    Later tokens don't touch earlier results: within a block the kernel reads back only, and blocks are scanned.
    """
    batch, tokens, dim = x.shape
    blocks = -(-tokens // BLOCK)
    q = powers(log_q, BLOCK)
    kernel = torch.einsum("ldn,dn->dl", q[:BLOCK], write * read)
    padded = F.pad(x, (0, 0, 0, (blocks + 1) * BLOCK - tokens))  # one block more, for the end of the last one
    cut = padded[:, : blocks * BLOCK].reshape(batch, blocks, BLOCK, dim)
    near = F.conv1d(F.pad(cut.flatten(0, 1).transpose(1, 2), (BLOCK - 1, 0)), kernel.flip(1).unsqueeze(1), groups=dim)
    added = torch.einsum("bkcd,cdn->bkdn", cut, q[:BLOCK].flip(0) * write)
    behind, _ = run_state_call(ScanCall(added, BLOCK * log_q[None, None], state, None))
    first = added.new_zeros(batch, 1, dim, log_q.shape[1]) if state is None else state[:, None].to(added.dtype)
    before = torch.cat([first, behind], 1)  # the averages at the start of every block, and behind the last
    far = torch.einsum("bkdn,cdn->bkcd", before[:, :-1], q[1:] * read)
    y = (near.transpose(1, 2).unflatten(0, (batch, blocks)) + far).flatten(1, 2)[:, :tokens]
    return y, _behind(padded, before, q, write, lengths if lengths is not None else x.new_full((1,), tokens).long())


def _behind(padded: Tensor, before: Tensor, q: Tensor, write: Tensor, lengths: Tensor) -> Tensor:
    """The averages behind the first `lengths` tokens (B,) or (1,): those of the block, and the tokens of its part."""
    block, part = lengths // BLOCK, lengths % BLOCK
    rows = torch.arange(padded.shape[0], device=padded.device)
    place = torch.arange(BLOCK, device=padded.device)
    tokens = padded[rows[:, None], (block[:, None] * BLOCK + place).expand(len(rows), -1)]
    age = part[:, None] - 1 - place  # (1 or B, block)
    weights = torch.where((age >= 0)[..., None, None], q[age.clamp(min=0)], 0.0) * write
    tail = (
        (tokens[..., None] * weights).sum(1) if len(weights) > 1 else torch.einsum("bcd,cdn->bdn", tokens, weights[0])
    )
    return q[part] * before[rows, block.expand(len(rows))] + tail
