"""Kimi K3's attention layers: Kimi Delta Attention with a bounded decay, and gated latent attention without positions.

No family that can be loaded: the release's other parts are not public in enough detail.
"""

from __future__ import annotations

from functools import partial

from torch import nn

from regard.mixers.parts import RMSNorm
from regard.models.blocks import Embedding, MixerOnly
from regard.models.config import Config
from regard.models.decoder import Decoder
from regard.models.layouts.base import Layout, Plan
from regard.models.layouts.shared.kimi import SYNONYMS, KimiDeltaPart, kinds_from, older_options
from regard.models.layouts.shared.latent import FOLLOWING, read_latent
from regard.models.layouts.shared.options import read_eps
from regard.models.layouts.shared.parts import Make
from regard.nn import KDAGates

__all__ = ["KIMI_K3"]


def _kimi_k3(c: Config) -> Plan:
    dim, heads = c.count("hidden_size", 7168), c.count("num_attention_heads", 96)
    layers, vocab = c.count("num_hidden_layers", 93), c.count("vocab_size", 163840)
    eps = read_eps(c, 1e-5)
    c.only("mla_use_nope", (True, None), "nothing rotates")
    older = older_options(c, gate_lower_bound="linear_gate_lower_bound", use_full_rank_gate="linear_full_rank_gate")
    size = c.count("linear_head_dim", 128)
    full = c.flag("linear_full_rank_gate", True)
    low = c.number("linear_gate_lower_bound", -5.0)
    gates = KDAGates(low=low, decay_rank=size, gate_rank=None if full else size, eps=eps)
    delta = KimiDeltaPart(dim, c.count("linear_num_heads", heads), size, c.count("linear_conv_kernel_dim", 4), gates)
    gate = "channel" if c.flag("mla_use_output_gate", True) else None
    latent = read_latent(c, dim=dim, heads=heads, q_rank=1536, gate=gate, rotary=None)
    makes: dict[str, Make] = {"linear_attention": delta, "full_attention": latent}
    norm = partial(RMSNorm, dim, eps)

    def layer(kind: str, i: int) -> nn.Module:
        return MixerOnly(makes[kind](), norm())

    def decoder() -> Decoder:
        table = Embedding(nn.Embedding(vocab, dim))
        return Decoder(table, [partial(layer, kind) for kind in kinds_from(c, older, layers)], norm())

    return Plan(decoder, [])


KIMI_K3 = Layout(
    "kimi_k3",
    "KimiK3ForCausalLM",
    _kimi_k3,
    synonyms=SYNONYMS,
    inert=FOLLOWING | {"model_max_length"},
)
