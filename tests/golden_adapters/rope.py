"""Rotary position embedding of queries and keys."""

from __future__ import annotations

from torch import Tensor

from golden_adapters.case import Case, Paths, Peer
from regard.positions import Rotary, interleaved_to_half

# The name of the peer's module says how it pairs channels; a new one must be looked at, not guessed.
INTERLEAVED = {"gptj", "codegen", "cohere", "cohere2", "deepseek_v2", "glm", "glm4", "ernie4_5", "helium"}
HALF = {
    "llama",
    "mistral",
    "gpt_neox",
    "falcon",
    "phi",
    "phi3",
    "stablelm",
    "persimmon",
    "gpt_oss",
    "modernbert",
    "bamba",
}
HALF |= {"qwen2", "qwen3", "qwen3_next", "gemma", "gemma2", "gemma3", "olmo", "olmo2", "olmo_hybrid", "recurrent_gemma"}


def paths(case: Case) -> Paths | None:
    if not case.has("input.q", "input.positions"):
        return None
    return {"function": lambda peer, wanted: rotate(case, peer)}


def rotate(case: Case, peer: Peer) -> dict[str, Tensor]:
    config = case.config
    unknown = set(config) - {"theta", "rotary_dims"}
    case.refuse_unless(not unknown, f"options {sorted(unknown)}")
    name = str(case.meta["peer"].get("object", ""))
    modules = set(name.split("."))
    reordered = name.endswith("apply_rotary_pos_emb_interleave")  # reads interleaved pairs, leaves them half-split
    interleaved = reordered or bool(modules & INTERLEAVED)
    case.refuse_unless(interleaved or bool(modules & HALF), f"the pairing of channels of {name}")
    positions = peer["input.positions"]
    found = {}
    for name in ("q", "k"):
        x = peer[f"input.{name}"]
        width = int(config.get("rotary_dims", x.shape[-1]))
        rotary = Rotary(width, base=float(config["theta"]), style="interleaved" if interleaved else "half")
        turned = rotary(x, positions)
        found[f"{name}_rot"] = interleaved_to_half(turned) if reordered else turned
    return found
