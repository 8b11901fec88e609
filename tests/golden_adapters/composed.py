"""Recurrences that mechanisms compose from the library's: RWKV-6, which reads a state before it writes to it."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from golden_adapters.case import Case, Paths, Peer
from regard.mixers.rwkv6 import read_then_write
from regard.mixers.sequence import TokenSequence
from regard.transitions import Decay

FORMS = {"out", "out_chunkwise", "out_parallel", "out_recurrent"}  # the peer's forms of one function
PIECES = {"out_by_steps", "out_by_cache_steps"}
WITHOUT_EFFECT = {"output_final_state", "chunk_size"}

Run = Callable[[slice, Any], tuple[Tensor, Any]]  # (tokens, the state before them) -> their output, the state after


def options_of(case: Case) -> tuple[float | None, list[int] | None]:
    """(scale, splits); None for the scale is the peer's default, the inverse root of the keys' size."""
    config = {**case.config.get("kwargs", {}), **case.config}
    config.pop("kwargs", None)
    scale, splits = config.pop("scale", None), config.pop("splits", None)
    unknown = set(config) - WITHOUT_EFFECT
    case.refuse_unless(not unknown, f"options {sorted(unknown)}")
    return scale, splits


def heads_first(case: Case, name: str) -> bool:
    """Whether the peer's tensors are (B, H, T, D), not (B, T, H, D): the case says it, or else it is so."""
    return not str(case.meta.get("shapes", {}).get(f"input.{name}", "B,H,T")).startswith("B,T,H")


def sequence_like(v: Tensor) -> TokenSequence:
    """As many tokens as v (B, H, T, D) has, all real and of one segment."""
    tokens = v.transpose(1, 2).flatten(2)
    return TokenSequence(tokens, torch.arange(v.shape[2], device=v.device).expand(v.shape[0], -1))


def outputs(case: Case, wanted: frozenset[str], run: Run, tokens: int, state: Any) -> tuple[dict[str, Tensor], Any]:
    """(the outputs by name, whole and in pieces, the last state)."""
    whole, last = run(slice(0, tokens), state)
    found = dict.fromkeys(FORMS & wanted, whole)
    for name in PIECES & wanted:
        splits = options_of(case)[1]
        case.refuse_unless(splits is not None and sum(splits) == tokens, f"splits: {splits}")
        assert splits is not None
        parts, start, now = [], 0, state
        for length in splits:
            part, now = run(slice(start, start + length), now)
            parts.append(part)
            start += length
        found[name] = torch.cat(parts, 2)
    return found, last


def rwkv6(case: Case, peer: Peer, wanted: frozenset[str]) -> dict[str, Tensor]:
    first, scale = heads_first(case, "q"), options_of(case)[0]
    query = "q" if "input.q" in peer else "r"
    q, k, v, w = (x if first else x.transpose(1, 2) for x in (peer[f"input.{name}"] for name in (query, "k", "v", "w")))

    def run(at: slice, state: Tensor | None) -> tuple[Tensor, Tensor]:
        cut = [x[:, :, at] for x in (q, k, v)]
        return read_then_write(sequence_like(cut[2]), *cut, Decay(w[:, :, at]), peer["input.u"], state, scale)

    found, last = outputs(case, wanted, run, q.shape[2], peer.get("input.initial_state"))
    return {name: out if first else out.transpose(1, 2) for name, out in found.items()} | {"final_state": last}


def rwkv6_paths(case: Case) -> Paths | None:
    covered = {"k", "v", "w", "u"} <= case.names("input") and not case.names("weight")
    return {"function": partial(rwkv6, case)} if covered else None


ADAPTERS: dict[str, Callable[[Case], Paths | None]] = {"rwkv6_core": rwkv6_paths}
