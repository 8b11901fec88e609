"""Recurrences that mechanisms compose from the library's.

RWKV-6 reads a state before it writes to it; gated slot attention has two of them, and a softmax between.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from golden_adapters.case import Case, Paths, Peer
from regard.mixers.gsa import slot_scores
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


# The peer's pair of states, (B, H, K, slots) and (B, H, slots, V), under the names that cases may give them.
BOTH = (("initial_hk", "initial_hv"), ("initial_state_k", "initial_state_v"), ("initial_state_0", "initial_state_1"))


def shares_of(s: Tensor, g: Tensor | None) -> tuple[Tensor, Tensor]:
    """(what a token writes to a slot, log-decays); without decays a slot's weights are a softmax over time of s."""
    if g is not None:
        return s, g
    total = s.logcumsumexp(2)
    return torch.exp(s - total), torch.cat((total[:, :, :1], total[:, :, :-1]), 2) - total


def gsa(case: Case, peer: Peer, wanted: frozenset[str]) -> dict[str, Tensor]:
    first, scale = heads_first(case, "q"), options_of(case)[0]
    given = {name: peer[f"input.{name}"] for name in "qkvsg" if f"input.{name}" in peer}
    given = {name: x if first else x.transpose(1, 2) for name, x in given.items()}
    q, k, v = (given[name] for name in "qkv")
    share, decay = shares_of(given["s"], given.get("g"))
    groups = q.shape[1] // k.shape[1]  # query heads that share slots: each carries them
    k, v, share, decay = (x.repeat_interleave(groups, 1) for x in (k, v, share, decay))

    def run(at: slice, state: Any) -> tuple[Tensor, Any]:
        q_, k_, v_, s_, g_ = (x[:, :, at] for x in (q, k, v, share, decay))
        seq, (keys, values) = sequence_like(v_), state
        scores, keys = slot_scores(seq, q_, k_, s_, g_, keys, scale)
        out, values = seq.recur(scores.softmax(-1), s_, v_, Decay(g_), values, 1.0)
        return out, (keys, values)

    state: tuple[Any, Any] = (None, None)
    for names in BOTH:
        if all(f"input.{name}" in peer for name in names):
            keys, values = (peer[f"input.{name}"].repeat_interleave(groups, 1) for name in names)
            state = keys.transpose(2, 3), values
    found, (keys, values) = outputs(case, wanted, run, q.shape[2], state)
    found = {name: out if first else out.transpose(1, 2) for name, out in found.items()}
    return found | {"final_hk": keys[:, ::groups].transpose(2, 3), "final_hv": values[:, ::groups]}


def gsa_paths(case: Case) -> Paths | None:
    return {"function": partial(gsa, case)} if case.has("input.q", "input.k", "input.v", "input.s") else None


ADAPTERS: dict[str, Callable[[Case], Paths | None]] = {"gsa": gsa_paths, "rwkv6_core": rwkv6_paths}
