"""The matrix-state recurrences as functions: linear attention, its decays, the delta rules."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor

import regard
from golden_adapters.case import Case, Paths, Peer
from regard.decays import retention_slopes
from regard.mixers.parts import l2_normalized

CHUNK = 16  # for the chunked form of a case that does not say its chunk; it changes no result
# the peer's forms of one function; asking for a final state changes nothing
FORMS = ("out_chunkwise", "out_parallel", "out_recurrent")
WITHOUT_EFFECT = {"output_final_state", "chunk_size"}


@dataclass(frozen=True)
class Family:
    """How a family's function takes its arguments."""

    heads_first: bool = False  # (B, H, T, ...), not (B, T, H, ...)
    decay: str | None = None  # the name of the log-decay
    delta: bool = False
    keys: tuple[str, str] | None = None  # of the generalised delta rule: what reads the old state, where it is written
    fixed: Callable[[int], Tensor] | None = None  # decay rates from the number of heads


@dataclass(frozen=True)
class Call:
    """One call of `recurrence`, as the case asks for it."""

    q: Tensor
    k: Tensor
    v: Tensor
    beta: Tensor | None
    decay: Tensor | None
    scale: float | None
    read_key: Tensor | None = None
    write_key: Tensor | None = None

    @property
    def transition(self) -> regard.Decay | regard.Delta | regard.GeneralizedDelta:
        if self.read_key is not None:
            return regard.GeneralizedDelta(self.read_key, self.write_key, self.decay)
        return regard.Decay(self.decay) if self.beta is None else regard.Delta(self.beta, self.decay)

    def run(
        self, state: Tensor | None, chunk_size: int | None = None, backend: str | None = None
    ) -> tuple[Tensor, Tensor]:
        given, options = self.transition, {"scale": self.scale, "chunk_size": chunk_size, "backend": backend}
        return regard.recurrence(self.q, self.k, self.v, given, state=state, **options)

    def piece(self, start: int, stop: int) -> Call:
        """The same call on some of its tokens."""
        cut = {}
        for name in ("q", "k", "v", "beta", "decay", "read_key", "write_key"):
            x = getattr(self, name)
            cut[name] = x if x is None or x.ndim == 1 else x[:, :, start:stop]
        return replace(self, **cut)

    def in_pieces(self, splits: list[int], state: Tensor | None) -> Tensor:
        outs, start = [], 0
        for length in splits:
            out, state = self.piece(start, start + length).run(state)
            outs.append(out)
            start += length
        return torch.cat(outs, 2)


def paths(family: Family, case: Case) -> Paths | None:
    have = case.names("input")
    if not ({"q", "k", "v"} <= have or {"query", "key", "value"} <= have) or case.names("weight"):
        return None
    return {"function": partial(function, family, case)}


def function(family: Family, case: Case, peer: Peer, wanted: frozenset[str]) -> dict[str, Tensor]:
    config = dict(case.config)
    splits, chunk = config.pop("splits", None), config.pop("chunk_size", None) or CHUNK
    unit_length = bool(config.pop("use_qk_l2norm_in_kernel", False))
    kwargs = {**config.pop("kwargs", {}), **config}
    scale, normalize = kwargs.pop("scale", None), bool(kwargs.pop("normalize", False))
    unknown = set(kwargs) - WITHOUT_EFFECT
    case.refuse_unless(not unknown, f"options {sorted(unknown)}")

    def turned(x: Tensor) -> Tensor:
        return x if family.heads_first else x.transpose(1, 2)

    def given(name: str) -> Tensor | None:
        return turned(peer[f"input.{name}"]) if f"input.{name}" in peer else None

    q, k, v = (turned(peer.get(f"input.{a}", peer.get(f"input.{b}"))) for a, b in zip("qkv", LONG, strict=True))
    if unit_length:
        q, k = l2_normalized(q), l2_normalized(k)
    decay = None if family.decay is None else given(family.decay)
    if family.fixed is not None:
        decay = -family.fixed(q.shape[1])
    state = peer.get("input.initial_state")
    if normalize:  # the sum of the weights is what a value of ones would give
        v = torch.cat((v, torch.ones_like(v[..., :1])), -1)
        state = None if state is None else torch.cat((state, torch.zeros_like(state[..., :1])), -1)
    keys = () if family.keys is None else tuple(given(name) for name in family.keys)
    call = Call(q, k, v, given("beta") if family.delta else None, decay, scale, *keys)

    def output(out: Tensor) -> Tensor:
        return turned(out[..., :-1] / (out[..., -1:] + 1e-10) if normalize else out)

    out, last = call.run(state)
    found = {"out": output(out), "final_state": last[..., :-1] if normalize else last}
    if normalize:
        found["final_normaliser"] = last[..., -1].unsqueeze(1)
    for name in wanted.intersection(FORMS):
        form = {"backend": "reference"} if name == "out_recurrent" else {"chunk_size": int(chunk)}
        found[name] = output(call.run(state, **form)[0])
    for name in wanted & {"out_by_steps", "out_by_cache_steps"}:
        case.refuse_unless(bool(splits) and sum(splits) == q.shape[2], f"splits: {splits}")
        found[name] = output(call.in_pieces(splits, state))
    return found


LONG = ("query", "key", "value")

FAMILIES = {
    "linear_attn_core": Family(),
    "retention": Family(heads_first=True, fixed=retention_slopes),
    "simple_gla": Family(decay="g"),
    "gla": Family(decay="gk"),
    "delta_rule": Family(heads_first=True, delta=True),
    "gated_delta_rule": Family(decay="g", delta=True),
    "kda": Family(decay="g", delta=True),
    "dplr_rwkv7_core": Family(heads_first=True, decay="gk", keys=("alpha", "beta")),
}
ADAPTERS: dict[str, Callable[[Case], Paths | None]] = {
    name: partial(paths, family) for name, family in FAMILIES.items()
}
