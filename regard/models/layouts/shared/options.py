"""Options that many families state the same way."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from regard.masks import Causal, Mask, Window
from regard.models.config import Config
from regard.models.experts import Routing
from regard.models.feedforward import ACTIVATIONS

__all__ = [
    "Sizes",
    "attention_reaches",
    "from_zero",
    "kinds_of",
    "like_layers",
    "layer_masks",
    "qwen_masks",
    "read_eps",
    "read_routing",
    "read_sizes",
    "read_window",
    "silu_only",
    "window_mask",
]


@dataclass(frozen=True)
class Sizes:
    """The sizes that every decoder with attention states."""

    vocab: int
    dim: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int


def read_sizes(
    c: Config,
    *,
    vocab: int,
    dim: int,
    layers: int,
    heads: int,
    kv_heads: int | None = None,
    head_dim: int | None = None,
) -> Sizes:
    """The sizes, with the family's defaults; ``None`` for what follows from the others."""
    width, count = c.count("hidden_size", dim), c.count("num_attention_heads", heads)
    own_kv = c.get("num_key_value_heads", kv_heads)
    own_head_dim = c.get("head_dim", head_dim)
    if own_head_dim is None and width % count:
        raise c.error("num_attention_heads", count, f"a divisor of hidden_size={width}, where head_dim is not given")
    sizes = Sizes(
        c.count("vocab_size", vocab),
        width,
        c.count("num_hidden_layers", layers),
        count,
        count if own_kv is None else c.count("num_key_value_heads", own_kv),
        width // count if own_head_dim is None else c.count("head_dim", own_head_dim),
    )
    if sizes.heads % sizes.kv_heads:
        raise c.error("num_key_value_heads", sizes.kv_heads, f"a divisor of num_attention_heads={sizes.heads}")
    return sizes


def read_eps(c: Config, default: float = 1e-6, name: str = "rms_norm_eps") -> float:
    """What norms add to the mean square."""
    return c.number(name, default, least=0.0)


def read_window(c: Config, default: int | None = None) -> int | None:
    """``sliding_window``, or ``None`` where it is ``null`` (or absent with that default)."""
    return None if c.get("sliding_window", default) is None else c.count("sliding_window", default or 1)


def window_mask(window: int | None) -> Mask:
    """A causal mask over the ``window`` latest tokens, the token itself too; ``None`` for all earlier ones."""
    return Causal() if window is None else Window(window)


def layer_masks(c: Config, layers: int, window: int | None, default: Callable[[int], str]) -> list[Mask]:
    """One mask a layer from ``layer_types``, or by a family's rule."""
    masks = {"full_attention": Causal(), "sliding_attention": window_mask(window)}
    return [masks[kind] for kind in kinds_of(c, "layer_types", layers, list(masks), default)]


def attention_reaches(c: Config, layers: int, default: int = 512) -> list[int]:
    """Tokens on either side that each layer of a Longformer reads: half of ``attention_window``, a number or a list."""
    given = c.get("attention_window", default)
    windows = given if isinstance(given, list) else [given] * layers
    fine = all(isinstance(w, int) and not isinstance(w, bool) and w > 0 and w % 2 == 0 for w in windows)
    if not fine or len(windows) != layers:
        raise c.error("attention_window", given, f"an even number above 0, or a list of {layers} of them, one a layer")
    return [w // 2 for w in windows]


def like_layers(c: Config, layers: int, window: int | None = None) -> None:
    """Refuses ``layer_types`` that say anything but what a family of like layers does under this window."""
    kind = "full_attention" if window is None else "sliding_attention"
    kinds_of(c, "layer_types", layers, (kind,), lambda i: kind)


def qwen_masks(c: Config, layers: int) -> list[Mask]:
    """One mask a layer as Qwen's options say it: a window from layer ``max_window_layers`` on, if one is in use."""
    window, first = read_window(c, 4096), from_zero(c, "max_window_layers", 28)
    if not c.flag("use_sliding_window", False):
        window = None
    types = c.get("layer_types")
    if window is None and isinstance(types, list) and "sliding_attention" in types:
        raise c.error("layer_types", types, "full_attention alone, without use_sliding_window and a sliding_window")
    windowed = layers if window is None else first
    return layer_masks(c, layers, window, lambda i: "sliding_attention" if i >= windowed else "full_attention")


def from_zero(c: Config, option: str, default: int) -> int:
    """A whole number of 0 or more."""
    given = c.get(option, default)
    return 0 if given == 0 and not isinstance(given, bool) else c.count(option, default or 1)


def kinds_of(c: Config, option: str, layers: int, known: Sequence[str], default: Callable[[int], str]) -> list[str]:
    """One kind a layer, from a list in the options or by a family's rule."""
    given = c.get(option)
    if given is None:
        return [default(i) for i in range(layers)]
    if not isinstance(given, list) or len(given) != layers or any(kind not in known for kind in given):
        raise c.error(option, given, f"a list of num_hidden_layers={layers} entries, each {' or '.join(known)}")
    return given


def silu_only(c: Config, where: str = "the convolutions") -> str:
    """The activation, in a family whose mixers use it too."""
    act = c.name("hidden_act", "silu", ACTIVATIONS)
    if ACTIVATIONS[act] != "silu":
        raise c.error("hidden_act", act, f"silu, which follows {where} too")
    return act


def read_routing(
    c: Config, option: str, experts: int, chosen: int, *, groups: Mapping[str, int] | None = None, **rule: Any
) -> Routing:
    """The routing that the options state, with a family's own rule and defaults; `option` names the experts' number.

    `groups` has two options with their defaults: the number of groups, and of those that are open to a token.
    """
    experts, chosen = c.count(option, experts), c.count("num_experts_per_tok", chosen)
    if chosen > experts:
        raise c.error("num_experts_per_tok", chosen, f"at most {option}={experts}")
    if groups is None:
        return Routing(experts, chosen, **rule)
    (all_of, parts), (some_of, opened) = ((name, c.count(name, default)) for name, default in groups.items())
    if experts % parts:
        raise c.error(all_of, parts, f"a divisor of {option}={experts}")
    if opened > parts:
        raise c.error(some_of, opened, f"at most {all_of}={parts}")
    most = experts // parts * opened
    if chosen > most:
        raise c.error(
            "num_experts_per_tok", chosen, f"at most {most}, the experts in {some_of}={opened} of {parts} groups"
        )
    return Routing(experts, chosen, groups=parts, open_groups=opened, **rule)
