"""torch's `nn.MultiheadAttention`, its signature, parameters and meanings, run by `regard.attention`."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from regard.biases import Bias
from regard.checks import describe, is_number_type
from regard.masks import Causal, KeyLengths, Mask
from regard.mixers.base import check_dtype
from regard.mixers.parts import merge_heads, split_heads
from regard.nn.torch_masks import from_torch_masks
from regard.ops.attention import attention, attention_weights

__all__ = ["TorchMultiheadAttention"]


@contextlib.contextmanager
def _as_torch(module: nn.Module) -> Iterator[None]:
    """A block in which `module` is of torch's class, whose own methods ask it which weights it has."""
    kind = module.__class__
    module.__class__ = nn.MultiheadAttention
    try:
        yield
    finally:
        module.__class__ = kind


class TorchMultiheadAttention(nn.MultiheadAttention):
    """`torch.nn.MultiheadAttention` through `regard.attention`: the same arguments, parameters and results.

    It takes the place of torch's module anywhere, as in ``nn.TransformerEncoderLayer``; `regard.nn.swap` puts it there
    in a whole model. Arguments of the constructor and of the call are torch's, and so are their meanings: a bool mask's
    True means *may not attend*, a float mask is added, ``is_causal`` is a hint beside `attn_mask`. Unlike torch's:

    - A query whose keys are all masked gives 0 before the output projection, and weights of 0; torch gives NaN.
    - The weights are those before dropout, and asking for them changes no output. Dropout draws this library's bits.
    - The two masks may be of different types, and a nested tensor (for self-attention) may need gradients.
    - A key that `add_bias_kv` or `add_zero_attn` appends is read by every query, with ``is_causal`` too.

    In eval mode torch's encoder layers compute with the weights of a plain module and never call it. They do call this
    one, always: it says no to their question whether its weights may be used so. A ``TransformerEncoder`` goes on
    turning padded batches into nested tensors where it did before.

    Raises ValueError and TypeError for arguments that do not fit, naming them.

    >>> import torch
    >>> theirs = torch.nn.MultiheadAttention(16, 4, batch_first=True)
    >>> ours = TorchMultiheadAttention(16, 4, batch_first=True)
    >>> ours.load_state_dict(theirs.state_dict())
    <All keys matched successfully>
    >>> x, padding = torch.randn(2, 5, 16), torch.tensor([[False] * 5, [False] * 3 + [True] * 2])
    >>> all(torch.allclose(*pair, atol=1e-6) for pair in zip(ours(x, x, x, padding), theirs(x, x, x, padding)))
    True
    """

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        dropout: float = 0.0,
        bias: bool = True,
        add_bias_kv: bool = False,
        add_zero_attn: bool = False,
        kdim: int | None = None,
        vdim: int | None = None,
        batch_first: bool = False,
        device: Any = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        options = (dropout, bias, add_bias_kv, add_zero_attn, kdim, vdim, batch_first, device, dtype)
        with _as_torch(self):
            nn.MultiheadAttention.__init__(self, embed_dim, num_heads, *options)

    @property
    def _qkv_same_embed_dim(self) -> bool:
        """False: what torch's encoder layers ask before they pass a module by and compute with its weights."""
        return False

    @_qkv_same_embed_dim.setter
    def _qkv_same_embed_dim(self, value: bool) -> None:
        self.__dict__["_qkv_same_embed_dim"] = value  # for when the module is of torch's class

    def _reset_parameters(self) -> None:
        with _as_torch(self):
            self._reset_parameters()

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        key_padding_mask: Tensor | None = None,
        need_weights: bool = True,
        attn_mask: Tensor | None = None,
        average_attn_weights: bool = True,
        is_causal: bool = False,
    ) -> tuple[Tensor, Tensor | None]:
        """(the output, the weights or None), shaped as torch's: ``(T, B, embed_dim)``, or with `batch_first` (B, T, …).

        Args:
            query, key, value: (T, B, embed_dim), (S, B, kdim), (S, B, vdim); with `batch_first` (B, T, …); or without
                a batch (T, …).
            key_padding_mask: (B, S), or (S,) without a batch; bool, True = ignored, or float, added.
            need_weights: return the weights (B, T, S) too, the mean over the heads. They are computed after the output,
                in O(B H T S) memory: slower than torch's, so say False where they are not used.
            attn_mask: (T, S) or (B * H, T, S); bool, True = may not attend, or float, added.
            average_attn_weights: False returns the weights of each head, (B, H, T, S).
            is_causal: `attn_mask` is the causal mask; where torch trusts this, without padding and weights, the mask is
                not read.
        """
        if is_causal and attn_mask is None:
            raise ValueError(
                "is_causal: it is a hint that attn_mask is the causal mask; expected attn_mask too, got None"
            )
        self._check_tokens(query, key, value)
        if query.is_nested:
            return self._forward_nested(query, key_padding_mask, attn_mask, need_weights, average_attn_weights)
        batched = query.ndim == 3
        rows_first = self.batch_first or not batched
        q, k, v = self._project(query, key, value)
        if not batched:
            q, k, v = (x[None] for x in (q, k, v))
            if isinstance(key_padding_mask, Tensor):
                key_padding_mask = key_padding_mask[None]
        if not rows_first:
            q, k, v = (x.transpose(0, 1) for x in (q, k, v))
        appended = int(self.bias_k is not None)
        mask: Mask | None = Causal()
        bias: Bias | None = None
        if not is_causal or key_padding_mask is not None or need_weights or appended:
            sizes = q.shape[0], self.num_heads, q.shape[1], k.shape[1]
            mask, bias = from_torch_masks(key_padding_mask, attn_mask, sizes, appended=appended)
        out, weights = self._attend(q, k, v, mask, bias, need_weights, average_attn_weights)
        if not rows_first:
            out = out.transpose(0, 1).contiguous()
        out = self.out_proj(out)
        return (out, weights) if batched else (out[0], None if weights is None else weights[0])

    def _forward_nested(
        self,
        x: Tensor,
        key_padding_mask: Tensor | None,
        attn_mask: Tensor | None,
        need_weights: bool,
        average: bool,
    ) -> tuple[Tensor, Tensor | None]:
        """Self-attention in sequences of their own lengths: only what lies between the projections is padded."""
        if key_padding_mask is not None or attn_mask is not None:
            raise ValueError(
                "key_padding_mask, attn_mask: a nested tensor has lengths of its own; expected None beside it"
            )
        lengths = [one.shape[0] for one in x.unbind()]
        q, k, v = F.linear(x, self.in_proj_weight, self.in_proj_bias).to_padded_tensor(0.0).chunk(3, -1)
        mask = KeyLengths(torch.tensor(lengths, device=x.device))
        out, weights = self._attend(q, k, v, mask, None, need_weights, average)
        rows = [row[:length] for row, length in zip(out, lengths, strict=True)]
        return self.out_proj(torch.nested.as_nested_tensor(rows)), weights

    def _check_tokens(self, query: Tensor, key: Tensor, value: Tensor) -> None:
        widths = {"query": self.embed_dim, "key": self.kdim, "value": self.vdim}
        for (name, width), x in zip(widths.items(), (query, key, value), strict=True):
            if not isinstance(x, Tensor):
                raise TypeError(f"{name}: expected a float tensor of {width} channels, got {describe(x)}")
            is_number_type(name, x)
            if not torch.compiler.is_compiling():
                check_dtype(self, name, x)
            if x.is_nested:
                self._check_nested(name, query, key, value)
                continue
            if x.ndim not in (2, 3) or x.ndim != query.ndim or x.shape[-1] != width:
                shape = ("B, T" if self.batch_first else "T, B") if query.ndim == 3 else "T"
                raise ValueError(f"{name}: expected ({shape}, {width}), got shape {tuple(x.shape)}")
        if query.is_nested:
            return
        if key.shape[:-1] != value.shape[:-1]:
            raise ValueError(
                f"value: expected {tuple(key.shape[:-1])} before the width, as key has, got {tuple(value.shape)}"
            )
        rows = 0 if self.batch_first else 1
        if query.ndim == 3 and key.shape[rows] != query.shape[rows]:
            raise ValueError(f"key: expected a batch of {query.shape[rows]}, as query has, got {key.shape[rows]}")

    def _check_nested(self, name: str, query: Tensor, key: Tensor, value: Tensor) -> None:
        if query is not key or key is not value or self.in_proj_weight is None or not self.batch_first:
            raise ValueError(f"{name}: a nested tensor is expected only in self-attention with batch_first=True")
        if query.layout is not torch.strided:
            raise TypeError(f"{name}: expected a nested tensor of strided layout, got {query.layout}")

    def _project(self, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, ...]:
        """Queries, keys and values, laid out as they came; products that share their input are one."""
        if self.in_proj_weight is None:
            weights = self.q_proj_weight, self.k_proj_weight, self.v_proj_weight
            parts = [1, 1, 1]
        else:
            parts = [3] if query is key and key is value else [1, 2] if key is value else [1, 1, 1]
            weights = self.in_proj_weight.split([n * self.embed_dim for n in parts])
        biases: Any = [None] * len(parts)
        if self.in_proj_bias is not None:
            biases = self.in_proj_bias.split([n * self.embed_dim for n in parts])
        inputs = (query, key, value)
        return tuple(
            one
            for n, x, weight, bias in zip(parts, inputs, weights, biases, strict=False)
            for one in F.linear(x, weight, bias).chunk(n, -1)
        )

    def _attend(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        mask: Mask | None,
        bias: Bias | None,
        need_weights: bool,
        average: bool,
    ) -> tuple[Tensor, Tensor | None]:
        """The mixed heads (B, T, embed_dim) of projected tokens (B, T, embed_dim), and the weights if wanted."""
        if self.bias_k is not None and self.bias_v is not None:
            k, v = (
                torch.cat([x, b.to(x.dtype).expand(x.shape[0], 1, -1)], 1)
                for x, b in ((k, self.bias_k), (v, self.bias_v))
            )
        heads = [split_heads(x, self.num_heads) for x in (q, k, v)]
        options: dict[str, Any] = {"mask": mask, "bias": bias, "q_start": 0}
        options["dropout_p"] = self.dropout if self.training else 0.0
        if self.add_zero_attn:  # a key and a value of 0: a sink with the logit 0
            options["sink"] = q.new_zeros(self.num_heads)
        if not need_weights:
            return merge_heads(attention(*heads, **options)), None
        out, weights, lse = attention_weights(*heads, **options)
        if self.add_zero_attn:
            weights = torch.cat([weights, torch.sigmoid(-lse)[..., None]], -1)
        weights = weights.to(q.dtype)
        return merge_heads(out), weights.mean(1) if average else weights
