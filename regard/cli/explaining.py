"""`regard explain`: a call described by its sizes, and what every backend says to it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from regard.cli.expressions import Shape, read_bias, read_mask

__all__ = ["Description", "explanation"]


@dataclass(frozen=True)
class Description:
    """A call of `regard.attention`, in numbers and words."""

    batch: int
    heads: int
    kv_heads: int
    queries: int
    keys: int
    head_dim: int
    value_dim: int
    dtype: str
    device: str
    mask: str | None
    bias: str | None
    softcap: float | None
    sink: bool
    dropout: float
    q_start: int | None
    grad: bool
    lse: bool
    backend: str | None


def explanation(what: Description) -> Any:
    """What every backend says to the described call; nothing is computed and next to no memory is taken."""
    import torch

    import regard

    for name in ("batch", "heads", "kv_heads", "queries", "keys", "head_dim", "value_dim"):
        if getattr(what, name) < 0:
            raise ValueError(f"--{name.replace('_', '-')} must be 0 or more, got {getattr(what, name)}")
    shape = Shape(what.batch, what.heads, what.queries, what.keys)
    try:
        one = torch.empty((), dtype=getattr(torch, what.dtype), device=what.device)
    except (RuntimeError, AssertionError) as error:
        raise ValueError(f"--device {what.device}: not available here ({str(error).splitlines()[0]})") from None

    def tensor(heads: int, length: int, width: int) -> Any:
        # Every element is the same one: choosing a backend reads sizes, not values.
        return one.expand(what.batch, heads, length, width).detach().requires_grad_(what.grad)

    return regard.explain(
        tensor(what.heads, what.queries, what.head_dim),
        tensor(what.kv_heads, what.keys, what.head_dim),
        tensor(what.kv_heads, what.keys, what.value_dim),
        mask=None if what.mask is None else read_mask(what.mask, shape).to(what.device),
        bias=None if what.bias is None else read_bias(what.bias, shape).to(what.device),
        softcap=what.softcap,
        sink=torch.zeros(what.heads, device=what.device) if what.sink else None,
        dropout_p=what.dropout,
        q_start=what.q_start,
        return_lse=what.lse,
        backend=what.backend,
    )
