"""Blocked online softmax in plain torch, forward and backward: O(T) memory, any device, every mask and bias.

Rows and columns are cut into tiles; a tile that the mask leaves empty is skipped, one that it allows whole is not
masked.

    m' = max(m, max_j S_ij),   l' = l e^(m - m') + sum_j e^(S_ij - m'),   a' = a e^(m - m') + sum_j e^(S_ij - m') v_j,
    Y = a / l

Backward recomputes each tile from the log-sum-exp: ``dS = P (dP - rowsum(dY Y) + dlse)``. When the backward pass is
itself recorded, it goes through the dense definition, which is differentiable. (Milakov and Gimelshein 2018,
arXiv:1805.02867; Rabe and Staats 2021, arXiv:2112.05682; Dao et al. 2022, arXiv:2205.14135.)
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from regard.backends import reference
from regard.backends.call import AttentionCall, is_batched, recorded_gradients
from regard.backends.dropout import dropout_factor
from regard.coordinates import TileIndices
from regard.masks.base import tensors_of
from regard.masks.block_layout import EMPTY, PARTIAL, tile_kind, tiles

__all__ = ["defer", "reject", "run"]

ROWS, COLUMNS = 128, 128  # a tile of scores for all heads stays in the outer caches
FEW = 16384  # with few rows, columns are widened to about this many scores


def reject(call: AttentionCall) -> str | None:
    """Its loop needs sizes that are numbers, and its backward pass is its own."""
    lengths: tuple[Any, ...] = (call.q.shape[2], call.k.shape[2])
    if any(isinstance(length, torch.SymInt) for length in lengths):
        return "its loop over tiles needs sizes that are numbers, and these are symbols"
    if torch._C._get_tracing_state() is not None:
        return "its own backward pass cannot be recorded by torch.jit.trace"
    if call.transformed:
        return "its own backward pass takes no function transforms (vmap, jvp, jacrev)"
    if call.under_derivatives:
        return "its own backward pass takes no forward-mode derivatives"
    return None


def defer(call: AttentionCall) -> str | None:
    """Whatever it can run, it runs."""
    return None


def run(call: AttentionCall) -> tuple[Tensor, Tensor, Tensor]:
    """(output before the sink takes its share, log-sum-exp, what that lost by rounding), in the compute dtype."""
    tensors = (call.q, call.k, call.v, *(call.bias.tensors() if call.bias is not None else ()))
    if not (torch.is_grad_enabled() and any(t.requires_grad for t in tensors)):
        return _forward(call)
    out, lse, low = _Chunked.apply(call, *tensors)  # type: ignore[no-untyped-call]
    return out, lse, low


class _Chunked(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, call: AttentionCall, *tensors: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        call = dataclasses.replace(call, sink=None).with_tensors(tensors)
        out, lse, low = _forward(call)
        ctx.call, ctx.count = call, len(tensors)
        # the mask's own tensors only so that torch notices where they change before the backward pass reads them;
        # a compiler's graph keeps the values of the forward pass
        watched = call.mask is not None and not torch.compiler.is_compiling()
        read = [t for t in tensors_of(call.mask) if not t.is_inference()] if watched else []
        ctx.save_for_backward(*tensors, out, lse, low, *read)
        ctx.mark_non_differentiable(low)
        return out, lse, low

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        saved = ctx.saved_tensors
        tensors, (out, lse, low) = saved[: ctx.count], saved[ctx.count : ctx.count + 3]
        grads = grads[:2]
        call = ctx.call.with_tensors(tuple(tensors))
        if not torch.compiler.is_compiling() and (torch.is_grad_enabled() or is_batched(grads)):
            with torch.enable_grad():  # through the definition, whose operations torch can batch
                return None, *recorded_gradients(
                    lambda own: reference.run(call.with_tensors(own))[:2], tensors, grads, ctx.needs_input_grad[1:]
                )
        found = _backward(call, out, lse, low, *grads)
        return None, *(g if wanted else None for g, wanted in zip(found, ctx.needs_input_grad[1:], strict=True))


# ---- tiles -----------------------------------------------------------------------------------------------------------


class _Tile:
    """One tile: scores (B, Hkv, G, R, C) of query rows against key columns, and what its gradients need."""

    def __init__(
        self,
        call: AttentionCall,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        rows: tuple[int, int],
        cols: tuple[int, int],
        kind: int,
    ) -> None:
        self.call, self.rows, self.cols = call, rows, cols
        self.k, self.v = k[:, :, cols[0] : cols[1]], v[:, :, cols[0] : cols[1]]
        self._site: TileIndices | None = None
        allowed = self.grouped(call.effective_mask.allows_at(self.indices)) if kind == PARTIAL else None
        if allowed is not None:
            read = allowed.any(-2).any(2).unsqueeze(-1)  # a key that no row here reads may hold anything
            self.k, self.v = (
                torch.where(read, x, torch.zeros((), dtype=x.dtype, device=x.device)) for x in (self.k, self.v)
            )
        products = torch.matmul(q, self.k.transpose(-1, -2)).unflatten(2, (call.group, -1))
        scores = call.scores.apply(products)
        self.slope = call.scores.slope(scores)
        if call.bias is not None:
            scores = scores + self.grouped(call.bias.scores(self.indices, scores.dtype))
        self.scores = scores if allowed is None else scores.masked_fill_(~allowed, -torch.inf)

    @property
    def indices(self) -> TileIndices:
        if self._site is None:
            self._site = self.call.coordinates.indices(self.rows, self.cols)
        return self._site

    def grouped(self, x: Tensor) -> Tensor:
        """(B | 1, Hq | 1, R, C) as (B | 1, Hkv | 1, G | 1, R, C)."""
        while x.ndim < 4:
            x = x.unsqueeze(0)
        return x.unsqueeze(2) if x.shape[1] == 1 else x.unflatten(1, (self.call.k.shape[1], self.call.group))

    def dropout(self, dtype: torch.dtype) -> Tensor | None:
        call = self.call
        if call.dropout_p == 0:
            return None
        assert call.seed is not None
        return self.grouped(dropout_factor(self.indices, call.seed, call.dropout_p, dtype))


def _prepare(call: AttentionCall) -> tuple[Tensor, Tensor, Tensor]:
    """q scaled and grouped (B, Hkv, G, Tq, D), k, v; all in the compute dtype."""
    dtype = call.compute_dtype
    q = (call.q.to(dtype) * call.scale).unflatten(1, (call.k.shape[1], call.group))
    return q, call.k.to(dtype), call.v.to(dtype)


def _tiles(call: AttentionCall) -> Iterator[tuple[tuple[int, int], list[tuple[tuple[int, int], int]]]]:
    """For every range of rows, the ranges of columns that it may read, each with its kind."""
    q_len, k_len = call.q.shape[2], call.k.shape[2]
    rows = min(ROWS, max(q_len, 1))
    columns = max(COLUMNS, FEW // rows)
    mask, coordinates = call.effective_mask, call.coordinates
    for r in tiles(q_len, rows):
        kinds = ((c, tile_kind(mask, coordinates, r, c)) for c in tiles(k_len, columns))
        yield r, [(c, kind) for c, kind in kinds if kind != EMPTY]


def _forward(call: AttentionCall) -> tuple[Tensor, Tensor, Tensor]:
    batch, _, kv_heads, q_len, _, v_dim = call.sizes
    q, k, v = _prepare(call)
    out = q.new_zeros(batch, kv_heads, call.group, q_len, v_dim)
    lse = q.new_full((batch, kv_heads, call.group, q_len), -torch.inf)
    low = torch.zeros_like(lse)
    for rows, line in _tiles(call):
        q_rows = q[..., rows[0] : rows[1], :].flatten(2, 3)
        top: Tensor | None = None
        total = acc = None
        for cols, kind in line:
            tile = _Tile(call, q_rows, k, v, rows, cols, kind)
            peak = tile.scores.amax(-1, keepdim=True)
            new = peak if top is None else torch.maximum(top, peak)
            shift = torch.where(new == -torch.inf, 0.0, new)
            p = (tile.scores.sub_(shift)).exp_()
            part = p.sum(-1, keepdim=True)
            factor = tile.dropout(p.dtype)
            value = torch.matmul((p if factor is None else p * factor).flatten(2, 3), tile.v).unflatten(
                2, (call.group, -1)
            )
            if top is None:
                total, acc = part, value
            else:
                assert total is not None and acc is not None
                fade = torch.exp(top - shift)
                total, acc = total * fade + part, acc * fade + value
            top = new
        if top is None or total is None or acc is None:
            continue
        dead = total == 0
        total = torch.where(dead, 1.0, total)
        out[..., rows[0] : rows[1], :] = acc / total
        log_total = torch.log(total)
        whole = top + log_total  # top is -inf where no key is allowed
        lse[..., rows[0] : rows[1]] = whole.squeeze(-1)
        # weights from a rounded log-sum-exp alone would be off by its last bit: log(total), where scores are large
        low[..., rows[0] : rows[1]] = torch.where(dead, 0.0, (top - whole) + log_total).squeeze(-1)
    return out.flatten(1, 2), lse.flatten(1, 2), low.flatten(1, 2)


def _backward(call: AttentionCall, out: Tensor, lse: Tensor, low: Tensor, d_out: Tensor, d_lse: Tensor) -> list[Tensor]:
    """Gradients of q, k, v and the bias's tensors, in their own dtypes."""
    q, k, v = _prepare(call)
    shape = (call.k.shape[1], call.group)
    delta = (d_out * out).sum(-1) - d_lse
    lse = torch.where(lse == -torch.inf, 0.0, lse)
    d_out, lse, low, delta = (x.unflatten(1, shape) for x in (d_out, lse, low, delta))
    dq, dk, dv = torch.zeros_like(q), torch.zeros_like(k), torch.zeros_like(v)
    bias_tensors = call.bias.tensors() if call.bias is not None else ()
    d_bias = [torch.zeros_like(t, dtype=q.dtype) for t in bias_tensors]
    for rows, line in _tiles(call):
        part = slice(*rows)
        q_rows, d_rows = (x[..., part, :].flatten(2, 3) for x in (q, d_out))
        lse_rows, low_rows, delta_rows = (x[..., part].unsqueeze(-1) for x in (lse, low, delta))
        for cols, kind in line:
            tile = _Tile(call, q_rows, k, v, rows, cols, kind)
            p = tile.scores.sub_(lse_rows).sub_(low_rows).exp_()
            dp = torch.matmul(d_rows, tile.v.transpose(-1, -2)).unflatten(2, (call.group, -1))
            factor = tile.dropout(p.dtype)
            kept = p
            if factor is not None:
                kept, dp = p * factor, dp * factor
            box = slice(*cols)
            dv[:, :, box] += torch.matmul(kept.flatten(2, 3).transpose(-1, -2), d_rows)
            ds = dp.sub_(delta_rows).mul_(p)
            if call.bias is not None:
                call.bias.accumulate(tile.indices, ds.flatten(1, 2), d_bias)
            if tile.slope is not None:
                ds = ds * tile.slope
            ds = ds.flatten(2, 3)
            dq[..., part, :] += torch.matmul(ds, tile.k).unflatten(2, (call.group, -1))
            dk[:, :, box] += torch.matmul(ds.transpose(-1, -2), q_rows)
    grads = [(dq * call.scale).flatten(1, 2), dk, dv, *d_bias]
    return [g.to(t.dtype) for g, t in zip(grads, (call.q, call.k, call.v, *bias_tensors), strict=True)]
