"""Rotary position embedding of queries and keys."""

from __future__ import annotations

from torch import Tensor

from golden_adapters.case import Case, Paths, Peer
from regard.positions import Rotary, interleaved_to_half

# Which channels make a pair, by the peer's module; for another peer the case's own description must say it.
INTERLEAVED = {"gptj", "codegen", "cohere", "cohere2", "deepseek_v2", "glm", "glm4", "llama4", "ernie4_5", "helium"}
HALF = {"llama", "mistral", "gpt_neox", "falcon", "phi", "phi3", "stablelm", "persimmon", "gpt_oss", "modernbert"}
HALF |= {"qwen2", "qwen3", "qwen3_next", "gemma", "gemma2", "gemma3", "olmo", "olmo2", "olmo_hybrid", "bamba"}


def paths(case: Case) -> Paths | None:
    if not case.has("input.q", "input.positions"):
        return None
    return {"function": lambda peer, wanted: rotate(case, peer)}


def rotate(case: Case, peer: Peer) -> dict[str, Tensor]:
    config = case.config
    unknown = set(config) - {"theta", "rotary_dims"}
    case.refuse_unless(not unknown, f"options {sorted(unknown)}")
    interleaved, reordered = pairing(case)
    positions = peer["input.positions"]
    found = {}
    for name in ("q", "k"):
        x = peer[f"input.{name}"]
        width = int(config.get("rotary_dims", x.shape[-1]))
        rotary = Rotary(width, base=float(config["theta"]), style="interleaved" if interleaved else "half")
        turned = rotary(x, positions)
        found[f"{name}_rot"] = interleaved_to_half(turned) if reordered else turned
    return found


def pairing(case: Case) -> tuple[bool, bool]:
    """(are pairs interleaved, rather than half-split; is the result then laid out half-split)."""
    name = str(case.meta["peer"].get("object", ""))
    if name.endswith("apply_rotary_pos_emb_interleave"):
        return True, True
    modules = set(name.split("."))
    if modules & (INTERLEAVED | HALF):
        return bool(modules & INTERLEAVED), False
    told = " ".join([str(case.meta.get("covers", "")), *case.meta.get("notes", [])]).lower()
    words = {word for word in ("interleaved", "half-split") if word in told}
    case.refuse_unless(len(words) == 1, f"the pairing of channels of {name}")
    return "interleaved" in words, False
