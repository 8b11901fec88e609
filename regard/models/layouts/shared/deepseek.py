"""DeepSeek's decoder: latent attention, some layers with a feed-forward part, then layers with experts."""

from __future__ import annotations

from regard.models.config import Config
from regard.models.experts import Routing
from regard.models.feedforward import ACTIVATIONS
from regard.models.layouts.base import Plan
from regard.models.layouts.shared.latent import LatentPart
from regard.models.layouts.shared.options import Sizes, from_zero, read_eps
from regard.models.layouts.shared.parts import ExpertsPart, GatedPart
from regard.models.layouts.shared.stacks import Layer, rms_decoder

__all__ = ["TRAINING", "deepseek_plan"]

TRAINING = frozenset({"aux_loss_alpha", "ep_size", "seq_aux"})
"""Options of the routers' training and of how experts lie on devices."""


def deepseek_plan(
    c: Config,
    latent: LatentPart,
    routing: Routing | None,
    *,
    vocab: int,
    layers: int,
    dense: int,
    shared: int,
    hidden: int,
    expert: int,
) -> Plan:
    """`dense` layers with a feed-forward part each, then layers with experts, of which `shared` serve every token."""
    dim, act = latent.dim, c.name("hidden_act", "silu", ACTIVATIONS)
    count = layers if routing is None else min(from_zero(c, "first_k_dense_replace", dense), layers)
    c.only("moe_layer_freq", (1, None), "experts in every layer behind the dense ones")
    plain = GatedPart(dim, c.count("intermediate_size", hidden), act, c.flag("mlp_bias", False))
    if plain.bias and count < layers:
        raise c.error("mlp_bias", True, "false in a model with experts, which have none")
    parts = [Layer(latent.part(), plain.part())] * count
    if routing is not None:
        width = c.count("moe_intermediate_size", expert)
        moe = ExpertsPart(dim, width, act, routing, width * from_zero(c, "n_shared_experts", shared))
        parts += [Layer(latent.part(), moe.part())] * (layers - count)
    sizes = Sizes(vocab, dim, layers, latent.heads, latent.heads, latent.sizes.value_dim)
    return rms_decoder(c, sizes, read_eps(c), parts)
