"""From torch's own attention module to this library's layer, with the same parameters."""

from __future__ import annotations

import torch
from torch import nn

from regard.checks import describe
from regard.mixers.parts import Projections, Scores
from regard.mixers.softmax import MultiHeadAttention

__all__ = ["from_torch"]


def from_torch(module: nn.MultiheadAttention) -> MultiHeadAttention:
    """A `MultiHeadAttention` that gives what ``torch.nn.MultiheadAttention`` gives; its parameters are copied.

    Mind the differences: the layer is always batch-first; a mask's True means *may attend* (torch's means blocked: pass
    ``~mask``); a query whose keys are all blocked gives 0 where torch gives NaN. ``key_padding_mask`` is
    ``keep=~key_padding_mask``. Where `kdim` or `vdim` differ from the width, the context is
    ``torch.cat([key, value], -1)``. `add_zero_attn` becomes a sink of 0.

    To keep torch's signature, as inside a model of torch's, use `regard.nn.swap`.

    Raises TypeError for other modules, ValueError for `add_bias_kv`, whose learned key has no counterpart here.

    >>> import torch
    >>> theirs = torch.nn.MultiheadAttention(16, 4, batch_first=True).eval()
    >>> x = torch.randn(2, 5, 16)
    >>> torch.allclose(from_torch(theirs)(x), theirs(x, x, x)[0], atol=1e-6)
    True
    """
    if not isinstance(module, nn.MultiheadAttention):
        raise TypeError(f"module: expected a torch.nn.MultiheadAttention, got {describe(module)}")
    if module.bias_k is not None or module.bias_v is not None:
        raise ValueError("module: add_bias_kv appends a learned key and value, which this layer has no part for")
    dim, heads = module.embed_dim, module.num_heads
    split = module.in_proj_weight is None
    kdim, vdim = module.kdim or dim, module.vdim or dim
    weight = module.q_proj_weight if split else module.in_proj_weight
    projections = Projections(
        bias=module.in_proj_bias is not None,
        out_bias=module.out_proj.bias is not None,
        context_dim=kdim + vdim if split else None,
    )
    scores = Scores(sink=module.add_zero_attn, dropout=module.dropout)
    with torch.device("meta"):
        layer = MultiHeadAttention(dim, heads, projections=projections, scores=scores)
    layer.to_empty(device=weight.device).to(weight.dtype)
    with torch.no_grad():
        if split:
            layer.q_proj.weight.copy_(module.q_proj_weight)
            for own, theirs, first in (
                (layer.k_proj, module.k_proj_weight, 0),
                (layer.v_proj, module.v_proj_weight, kdim),
            ):
                own.weight.zero_()
                own.weight[:, first : first + theirs.shape[1]].copy_(theirs)
        else:
            for own, part in zip(
                (layer.q_proj, layer.k_proj, layer.v_proj), module.in_proj_weight.chunk(3), strict=True
            ):
                own.weight.copy_(part)
        if module.in_proj_bias is not None:
            for own, part in zip((layer.q_proj, layer.k_proj, layer.v_proj), module.in_proj_bias.chunk(3), strict=True):
                own.bias.copy_(part)
        assert layer.o_proj is not None
        layer.o_proj.weight.copy_(module.out_proj.weight)
        if module.out_proj.bias is not None:
            layer.o_proj.bias.copy_(module.out_proj.bias)
        if layer.sink is not None:
            layer.sink.zero_()
            layer.sink.requires_grad_(False)  # torch's zero key is not learned
    return layer.train(module.training)
