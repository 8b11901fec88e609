"""`regard explain`: a call described by its sizes, and what every backend says to it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from regard.cli.expressions import Shape, read_bias, read_mask

__all__ = ["Tensors", "explanation"]


@dataclass(frozen=True)
class Tensors:
    """What q, k and v of a call of `regard.attention` are like."""

    batch: int
    heads: int
    kv_heads: int
    queries: int
    keys: int
    head_dim: int
    value_dim: int
    dtype: str
    device: str
    grad: bool


def explanation(tensors: Tensors, mask: str | None, bias: str | None, sink: bool, **options: Any) -> Any:
    """What every backend says to a call; nothing is computed and next to no memory is taken.

    `mask` and `bias` are expressions, `sink` says whether there is one; `options` go to `regard.explain` as they are.
    """
    import torch

    import regard

    sizes = ("batch", "heads", "kv_heads", "queries", "keys", "head_dim", "value_dim")
    for name in sizes:
        if getattr(tensors, name) < 0:
            raise ValueError(f"--{name.replace('_', '-')}: expected 0 or more, got {getattr(tensors, name)}")
    device = tensors.device
    try:
        one = torch.empty((), dtype=getattr(torch, tensors.dtype), device=device)
    except (RuntimeError, AssertionError) as error:
        raise ValueError(f"--device {device}: not available here ({str(error).splitlines()[0]})") from None

    def tensor(heads: int, length: int, width: int) -> Any:
        # Every element is the same one: choosing a backend reads sizes, not values.
        return one.expand(tensors.batch, heads, length, width).detach().requires_grad_(tensors.grad)

    shape = Shape(tensors.batch, tensors.heads, tensors.queries, tensors.keys)
    return regard.explain(
        tensor(tensors.heads, tensors.queries, tensors.head_dim),
        tensor(tensors.kv_heads, tensors.keys, tensors.head_dim),
        tensor(tensors.kv_heads, tensors.keys, tensors.value_dim),
        mask=None if mask is None else read_mask(mask, shape).to(device),
        bias=None if bias is None else read_bias(bias, shape).to(device),
        sink=torch.zeros(tensors.heads, device=device) if sink else None,
        **options,
    )
