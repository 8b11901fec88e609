"""What the reported failures' recipes share: every backend that accepts a call, and layers with known weights."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

import regard
from regard import backends
from regard.errors import BackendUnsupported
from regard.nn import MultiHeadAttention

WIDE = torch.float64
COMPILED = ("flex",)  # a compilation of many seconds for each kind of call
MUST_RUN = (None, "chunked", "reference")  # None: whichever is chosen


def paths(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Iterator[tuple[str | None, Any]]:
    """(backend, result) on every code path that accepts the call: the chosen one, then each by name."""
    for backend in (None, *backends.names()):
        if backend in COMPILED:
            continue
        try:
            yield backend, regard.attention(q, k, v, backend=backend, **options)
        except BackendUnsupported:
            assert backend not in MUST_RUN, backend


def made(*shape: int, dtype: torch.dtype = WIDE, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed + sum(shape)), dtype=dtype)


def leaves(*tensors: Tensor) -> list[Tensor]:
    return [x.detach().clone().requires_grad_() for x in tensors]


def close(got: Tensor, want: Tensor, tolerance: float = 1e-11) -> None:
    torch.testing.assert_close(got.to(want.dtype), want, rtol=tolerance, atol=tolerance)


def drawn(layer: nn.Module, dtype: torch.dtype = WIDE) -> Any:
    """The layer with weights drawn from a fixed seed, in evaluation."""
    generator = torch.Generator().manual_seed(11)
    layer = layer.to(dtype).eval()
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.copy_(0.4 * torch.randn(parameter.shape, generator=generator, dtype=WIDE))
    return layer


def mixer(width: int, mask: Any = None, **parts: Any) -> MultiHeadAttention:
    """One head whose queries are 0 and whose values are the tokens: on one-hot tokens its rows are the weights."""
    layer = MultiHeadAttention(width, 1, mask=mask, **parts).to(WIDE).eval()
    with torch.no_grad():
        for name, parameter in layer.named_parameters():
            parameter.copy_(torch.eye(width) if name.startswith(("v_proj", "o_proj")) else torch.zeros(width, width))
    return layer


def step_by_step(layer: Any, x: Tensor, splits: list[int], **rows: Tensor) -> Tensor:
    """x fed in pieces of these lengths through a new cache; `rows` are keep, positions or segments (B, T)."""
    cache = layer.init_cache(x.shape[0], x.shape[1])
    outs, start = [], 0
    for length in splits:
        piece = slice(start, start + length)
        outs.append(layer(x[:, piece], cache=cache, **{name: given[:, piece] for name, given in rows.items()}))
        start += length
        assert cache.length == start
    return torch.cat(outs, 1)
