"""The matrix-state recurrence: linear attention, its decays, and the delta rules."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from regard import backends
from regard.backends import RecurrenceCall
from regard.checks import describe, whole
from regard.coordinates import can_read
from regard.ops.checks import check_float, check_shape, check_state, lowered, scale_of, tied, widened, without_autocast
from regard.ops.packing import Ids, by_sequence, packed_lengths, segment_starts_of
from regard.ops.states import run_state_call
from regard.transitions import TRANSITIONS, Transition

__all__ = ["recurrence"]


def recurrence(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    transition: Transition,
    *,
    state: Tensor | None = None,
    scale: float | None = None,
    segments: Ids | None = None,
    chunk_size: int | None = None,
    state_out: Tensor | None = None,
    backend: str | None = None,
) -> tuple[Tensor, Tensor]:
    """A matrix state that decays, is written to, and is read: ``o_t = scale * S_t^T q_t``.

    ``S_t = a_t * S_{t-1} + k_t v_t^T`` with `Decay`; with `Delta`, ``S' = a_t * S_{t-1}`` and
    ``S_t = S' + beta_t k_t (v_t - S'^T k_t)^T``; with `GeneralizedDelta`,
    ``S_t = S' + w_t (S_{t-1}^T r_t)^T + k_t v_t^T``; ``a_t = exp(log_decay_t)``. Sums and states are kept in
    float32, or float64 for float64 inputs.

    Args:
        q, k: ``(B, Hk, T, Dk)``, v: ``(B, Hv, T, Dv)``, one floating dtype, any strides; Hv is a multiple of Hk, and
            value head h reads key head ``h // (Hv // Hk)``.
        transition: `Decay`, `Delta` or `GeneralizedDelta`; its tensors have Hv heads and any floating dtype.
        state: ``(B, Hv, Dk, Dv)`` before the first token, any floating dtype; zeros by default. Differentiable.
        scale: factor on q; ``Dk ** -0.5`` by default.
        segments: ids ``(B, T)``, never falling: where they change the state starts from 0 (`state` enters the first
            segment, the last one's is returned). Or ``Segments.from_lengths`` with B = 1: then there is one state
            ``(sequences, Hv, Dk, Dv)`` per sequence, in and out, empty ones included.
        chunk_size: tokens that `chunked` takes together, rounded down to a power of two; it changes no result.
        state_out: where to put the last state, a contiguous tensor of its shape and dtype, which may be `state` itself:
            a decode step then updates a state in place. Only where no gradient is recorded.
        backend: a backend by name instead of the first that can.

    Returns:
        out ``(B, Hv, T, Dv)`` in q's dtype, and the state after the last token in the compute dtype.

    Raises:
        ValueError, TypeError: an argument of the wrong shape, type or range; the text names it.
        BackendUnsupported: `backend` (or `use_backend`) names one that cannot run the call.

    Cost: chunks of C tokens take about 2 T (C (Dk + Dv) + 2 Dk Dv) FLOPs a head, the delta rule half as many again;
        memory O(T (C + Dk + Dv)).

    Katharopoulos et al. 2020, arXiv:2006.16236; Yang et al. 2024, arXiv:2406.06484 and 2412.06464; Kimi team 2025,
    arXiv:2510.26692.

    >>> import torch, regard
    >>> q, k, v = (torch.randn(1, 2, 10, 4) for _ in range(3))
    >>> decay = regard.Decay(torch.tensor([-0.1, -0.2]))
    >>> out, state = regard.recurrence(q, k, v, decay)
    >>> parts = [x.split([7, 3], 2) for x in (q, k, v)]
    >>> first, middle = regard.recurrence(*(x[0] for x in parts), decay)
    >>> rest, end = regard.recurrence(*(x[1] for x in parts), decay, state=middle)
    >>> torch.allclose(torch.cat([first, rest], 2), out, atol=1e-5), torch.allclose(end, state, atol=1e-5)
    (True, True)
    """
    batch, tokens = _check(q, k, v, transition)
    heads, sizes = v.shape[1], (k.shape[3], v.shape[3])
    lengths = packed_lengths(segments, batch, tokens)
    check_state(state, (batch if lengths is None else len(lengths), heads, *sizes), q)
    if chunk_size is not None:
        whole("chunk_size", chunk_size, 1)
    factor = scale_of(scale, sizes[0], q.dtype)
    q, k, v = lowered(q, k, v)
    beta, decay = transition.beta, transition.log_decay
    keys = (transition.read_key, transition.write_key)
    call = RecurrenceCall(q, k, v, beta, decay, state, None, factor, chunk_size, state_out, *keys)
    if state_out is not None:
        _check_state_out(state_out, (batch if lengths is None else len(lengths), heads, *sizes), call)
    if not lengths:
        call.segment_starts = None if lengths is not None else segment_starts_of(segments, batch, tokens)
        out, last = run_state_call(call, backend)
        last = last if lengths is None else last[:0]
        return out, last if state_out is None else _put(last, state_out)
    with without_autocast(q):
        if decay is not None and decay.ndim == 1:
            # with a time axis: padding must not fade the state
            (decay,) = widened(q, decay[None, :, None].expand(1, heads, tokens))
        optional = (beta, decay, *keys)
        timed = [(x, 2) for x in (q, k, v, *optional) if x is not None]

        def body(parts: list[Tensor], state: Tensor | None, _: Tensor) -> tuple[Tensor, Tensor]:
            q, k, v, *rest = parts
            given = [None if x is None else rest.pop(0) for x in optional]
            strength, decay, *keys = given
            return backends.dispatch(
                RecurrenceCall(q, k, v, strength, decay, state, None, factor, chunk_size, None, *keys), backend
            )

        out, last = by_sequence(lengths, timed, state, body, axis=2)
        out = out if out.numel() else tied(out, [x for x in (q, k, v, *optional, state) if x is not None])
        return out.to(q.dtype), last if state_out is None else _put(last, state_out)


def _put(state: Tensor, state_out: Tensor) -> Tensor:
    """The state in `state_out`, where a backend may have put it already."""
    return state_out if state is state_out else state_out.copy_(state)


def _check_state_out(state_out: Any, shape: tuple[int, ...], call: RecurrenceCall) -> None:
    """Raise unless the last state may be written to `state_out`."""
    check_float("state_out", state_out, 4, shape, call.q)
    check_shape("state_out", state_out, shape)
    if state_out.dtype != call.compute_dtype or not state_out.is_contiguous():
        raise ValueError(f"state_out: expected a contiguous {call.compute_dtype} tensor, got {describe(state_out)}")
    if can_read(state_out):
        home = state_out.untyped_storage().data_ptr()
        for name in ("q", "k", "v", "beta", "log_decay", "read_key", "write_key", "state"):
            x = getattr(call, name)
            if x is not None and x.untyped_storage().data_ptr() == home and _clash(state_out, x, name == "state"):
                raise ValueError(f"state_out: it shares memory with {name}; give a tensor of its own, or state itself")
    if state_out.requires_grad or call.wants_grad:
        raise ValueError("state_out: an overwritten state has no gradient; use torch.no_grad, or take the new state")


def _clash(state_out: Tensor, x: Tensor, itself: bool) -> bool:
    """Whether writing `state_out` while `x` is read would mix them up; `itself`: they may be the same numbers."""
    if itself and (state_out.data_ptr(), state_out.dtype, state_out.stride()) == (x.data_ptr(), x.dtype, x.stride()):
        return False
    (first, end), (begin, stop) = _stretch(state_out), _stretch(x)
    return first < stop and begin < end


def _stretch(x: Tensor) -> tuple[int, int]:
    """The addresses from a tensor's first byte to behind its last."""
    start = x.data_ptr()
    if not x.numel():
        return start, start
    extent = sum((size - 1) * step for size, step in zip(x.shape, x.stride(), strict=True))
    return start, start + (extent + 1) * x.element_size()


def _check(q: Any, k: Any, v: Any, transition: Any) -> tuple[int, int]:
    """Raise unless the tensors and the transition fit together: (B, T)."""
    for name, x in (("q", q), ("k", k), ("v", v)):
        check_float(name, x, 4, "(B, H, T, D)", q)
    if not q.dtype == k.dtype == v.dtype:
        raise TypeError(f"q, k, v: expected one dtype, got {q.dtype}, {k.dtype}, {v.dtype}")
    check_shape("k", k, q.shape)
    batch, key_heads, tokens, _ = k.shape
    if (v.shape[0], v.shape[2]) != (batch, tokens):
        raise ValueError(f"v: expected ({batch}, Hv, {tokens}, Dv) to go with k {tuple(k.shape)}, got {tuple(v.shape)}")
    if not key_heads or v.shape[1] % key_heads:
        raise ValueError(f"v: expected a multiple of the {key_heads} key heads, got {v.shape[1]} value heads")
    if not isinstance(transition, TRANSITIONS):
        raise TypeError(f"transition: expected Decay, Delta or GeneralizedDelta, got {describe(transition)}")
    transition.check(batch, v.shape[1], tokens, k.shape[3])
    for name in ("beta", "log_decay", "read_key", "write_key"):
        given = getattr(transition, name)
        if given is not None and given.device != q.device:
            raise ValueError(f"{name}: expected device {q.device}, got {given.device}")
    return batch, tokens
