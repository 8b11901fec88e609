"""OLMo Hybrid: three layers of Gated DeltaNet with strengths up to 2, one of OLMo's attention (OLMo team 2025)."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

from torch import nn

from regard.mixers.parts import GatedRMSNorm, Projections, RMSNorm
from regard.models.blocks import PreNorm
from regard.models.config import Config
from regard.models.layouts.base import Layout, Plan
from regard.models.layouts.shared.options import kinds_of, read_eps, read_sizes, silu_only
from regard.models.layouts.shared.parts import AttentionPart, GatedPart, Part, read_scores
from regard.models.layouts.shared.rotary import rotary_from_config
from regard.models.layouts.shared.rows import MIXER, ROTARY_BUFFER, conv_rows
from regard.models.layouts.shared.stacks import POST_BRANCH_NORM, Layer, Wiring, rms_decoder
from regard.models.tables import one_to_one
from regard.nn import GatedDeltaNet

__all__ = ["OLMO_HYBRID"]

KINDS = ("linear_attention", "full_attention")
CONVOLUTIONS = ("q_conv1d", "k_conv1d", "v_conv1d")
# files keep the names that the layers were trained under
PRE = Wiring(PreNorm, {"attention_layer_norm": "mixer_norm", "feedforward_layer_norm": "ff_norm"})
POST = Wiring(
    POST_BRANCH_NORM.block,
    {"feedforward_layer_norm": "mixer_post_norm", "post_feedforward_layernorm": "ff_post_norm"},
)


@dataclass(frozen=True)
class _DeltaPart:
    dim: int
    key_heads: int
    heads: int
    key_dim: int
    value_dim: int
    conv_size: int
    beta_max: float
    cuts: tuple[int, ...]

    def __call__(self) -> nn.Module:
        return GatedDeltaNet(
            self.dim,
            self.heads,
            key_heads=self.key_heads,
            key_dim=self.key_dim,
            value_dim=self.value_dim,
            conv_size=self.conv_size,
            beta_max=self.beta_max,
            norm=partial(GatedRMSNorm, eps=1e-5),  # whatever rms_norm_eps says
        )

    def part(self, stored: str = "model.layers.{i}.linear_attn") -> Part:
        """With its table: every projection and every kernel of the convolutions is a tensor of its own."""
        names = {name: name for name in ("A_log", "dt_bias", "o_proj.weight")}
        names |= {f"{name}_proj.weight": f"{name}_proj.weight" for name in "qkvabg"} | {"o_norm.weight": "norm.weight"}
        rows = one_to_one({f"{stored}.{theirs}": f"{MIXER}.{ours}" for theirs, ours in names.items()})
        return Part(self, rows + conv_rows(stored, dict(zip(CONVOLUTIONS, self.cuts, strict=True))))


def _delta(c: Config, dim: int) -> _DeltaPart:
    key_heads, heads = c.count("linear_num_key_heads", 30), c.count("linear_num_value_heads", 30)
    if heads % key_heads:
        raise c.error("linear_num_value_heads", heads, f"a multiple of linear_num_key_heads={key_heads}")
    key_dim, value_dim = c.count("linear_key_head_dim", 96), c.count("linear_value_head_dim", 192)
    most = 2.0 if c.flag("linear_allow_neg_eigval", True) else 1.0
    cuts = _cuts(c, key_heads * key_dim, heads * value_dim)
    return _DeltaPart(dim, key_heads, heads, key_dim, value_dim, c.count("linear_conv_kernel_dim", 4), most, cuts)


def _cuts(c: Config, keys: int, values: int) -> tuple[int, ...]:
    """Channels in each of the three tensors that hold a convolution's kernels, end to end.

    They are those of queries, keys and values; but transformers saves thirds of the whole, whatever the widths.
    """
    right = (keys, keys, values)
    for i in range(c.count("num_hidden_layers", 32)):
        names = [f"model.layers.{i}.linear_attn.{name}.weight" for name in CONVOLUTIONS]
        if all(name in c.shapes for name in names):
            found = tuple(c.shapes[name][0] for name in names)
            return found if sum(found) == sum(right) else right
    return right


def _olmo_hybrid(c: Config) -> Plan:
    sizes = read_sizes(c, vocab=100352, dim=3840, layers=32, heads=30)
    act, eps = silu_only(c), read_eps(c)
    rope = c.get("rope_parameters", {})
    plain = rope is None or (isinstance(rope, dict) and "rope_theta" in rope and rope["rope_theta"] is None)
    attention = AttentionPart(
        sizes,
        Projections(bias=c.flag("attention_bias", False), norm=partial(RMSNorm, eps=eps), norm_over="all"),
        read_scores(c),
        rotary=None if plain else rotary_from_config(c, sizes.head_dim),
    )
    ff = GatedPart(sizes.dim, c.count("intermediate_size", 11008), act).part()
    every = {
        "linear_attention": Layer(_delta(c, sizes.dim).part(), ff, PRE),
        "full_attention": Layer(attention.part(), ff, POST),
    }
    types = kinds_of(c, "layer_types", sizes.layers, KINDS, lambda i: KINDS[i % 4 == 3])
    return rms_decoder(c, sizes, eps, [every[kind] for kind in types])


OLMO_HYBRID = Layout(
    "olmo_hybrid",
    "OlmoHybridForCausalLM",
    _olmo_hybrid,
    prefix="model.",
    ignored=(ROTARY_BUFFER,),
    # how a fresh model's weights are drawn
    inert=frozenset({"linear_a_log_max", "linear_a_log_min", "linear_dt_init_floor", "linear_dt_max", "linear_dt_min"}),
)
