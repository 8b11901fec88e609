"""DeBERTa's second and third versions: buckets, shared keys, a convolution (He et al. 2021, arXiv:2111.09543)."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from regard.mixers.disentangled import TERMS
from regard.models.blocks import PostNorm
from regard.models.config import Config
from regard.models.feedforward import ACTIVATIONS, activation
from regard.models.layouts.base import Layout, Plan
from regard.models.layouts.shared.bert_like import BertLike, Extent, bert_words, encoder_sizes
from regard.models.layouts.shared.deberta_like import IGNORED, INERT, PREFIX, family, read_places
from regard.models.layouts.shared.options import from_zero, read_eps
from regard.models.layouts.shared.rows import BOTH, MIXER, module_rows
from regard.tokens import TokenLayout, resolve_tokens

__all__ = ["DEBERTA_V2", "ConvolvedPostNorm"]

CLS = "DebertaV2ForMaskedLM"
FAMILY = BertLike(
    PREFIX, vocab=128100, places=512, act="gelu", words=bert_words(PREFIX, (CLS,)), hidden=6144, eps=1e-7, pooler=None
)


class ConvolvedPostNorm(PostNorm):
    """``norm(post_norm(x) + act(conv(x)))``: a convolution over the tokens beside the block, as in the first layer of
    the largest models of DeBERTa's second version.

    It runs over slots, within a segment, and reads 0 where padding stands.
    """

    def __init__(
        self, *parts: nn.Module, conv: nn.Conv1d, conv_norm: nn.Module, act: nn.Module, **dropout: float
    ) -> None:
        super().__init__(*parts, **dropout)  # type: ignore[arg-type]
        self.conv, self.conv_norm, self.act = conv, conv_norm, act

    def forward(self, x: Tensor, **call: Any) -> Tensor:
        given: dict[str, Any] = {name: call.get(name) for name in ("keep", "positions", "segments")}
        layout: TokenLayout = resolve_tokens(x.shape[0], x.shape[1], x.device, **given)
        local = self._convolved(layout.real(x).transpose(1, 2), layout.segments).transpose(1, 2)
        out: Tensor = self.conv_norm(super().forward(x, **call) + self.act(self._drop(local, self.ff_dropout)))
        return out

    def _convolved(self, x: Tensor, segments: Tensor | None) -> Tensor:
        """``conv(x)`` of (B, dim, T); with segments tap by tap, each over those pairs that lie in one segment."""
        if segments is None:
            y: Tensor = self.conv(x)
            return y
        taps = self.conv.kernel_size[0]
        half, length = taps // 2, x.shape[2]
        padded, places = F.pad(x, (half, half)), F.pad(segments, (half, half), value=-1)
        found = torch.zeros_like(x)
        for tap in range(taps):
            same = (places[:, tap : tap + length] == segments)[:, None]
            part = F.conv1d(
                padded[..., tap : tap + length], self.conv.weight[..., tap : tap + 1], groups=self.conv.groups
            )
            found = found + torch.where(same, part, 0.0)
        assert self.conv.bias is not None
        return found + self.conv.bias[:, None]


def _first_block(c: Config, dim: int, extent: dict[str, Any]) -> None:
    """The convolution, where the options have one."""
    taps = from_zero(c, "conv_kernel_size", 0)
    groups, act = c.count("conv_groups", 1), c.name("conv_act", "tanh", ACTIVATIONS)
    if not taps:
        return
    if taps % 2 == 0:
        raise c.error(
            "conv_kernel_size", taps, "an odd number, so that as many tokens come out as go in, or 0 for none"
        )
    if dim % groups:
        raise c.error("conv_groups", groups, f"a divisor of hidden_size={dim}")
    eps = read_eps(c, 1e-7, "layer_norm_eps")

    def block(*parts: nn.Module, **dropout: float) -> nn.Module:
        conv = nn.Conv1d(dim, dim, taps, padding=taps // 2, groups=groups)
        norm = nn.LayerNorm(dim, eps)
        return ConvolvedPostNorm(*parts, conv=conv, conv_norm=norm, act=activation(act), **dropout)

    extent["first_block"] = block
    extent["rows"] += module_rows(
        {"encoder.conv.conv": "layers.0.conv", "encoder.conv.LayerNorm": "layers.0.conv_norm"}, BOTH
    )


def _deberta_v2(c: Config) -> Plan:
    sizes = encoder_sizes(c, dim=1536, layers=24, heads=24)
    places = read_places(c, buckets=True, places=512, eps=1e-7)
    share = c.flag("share_att_key", False)
    c.only("embedding_size", (sizes.dim, None), "tables as wide as the layers")
    c.only("attention_head_size", (sizes.dim // sizes.heads, None), "hidden_size over num_attention_heads")
    maps = {f"{name}_proj": f"{MIXER}.{name[0]}_proj" for name in ("query", "key", "value")}
    if places.span is not None and not share:
        own = {"pos_key_proj": "place_k_proj", "pos_query_proj": "place_q_proj"}
        maps |= {
            stored: f"{MIXER}.{name}"
            for (stored, name), term in zip(own.items(), TERMS, strict=True)
            if term in places.terms
        }
    extent: dict[str, Any] = {"rows": places.rows(sizes.layers)}
    _first_block(c, sizes.dim, extent)
    found = Extent(c.flag("position_biased_input", True), 0, module_rows(maps, BOTH), **extent)
    return family(c, FAMILY, CLS).plan(c, sizes, places.mixers(sizes, share=share), extent=found)


DEBERTA_V2 = Layout(
    "deberta-v2",
    "DebertaV2Model",
    _deberta_v2,
    prefix=PREFIX,
    headless=True,
    ignored=IGNORED,
    inert=INERT,
)
