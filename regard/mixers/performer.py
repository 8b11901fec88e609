"""Performer: softmax attention estimated by positive random features, in linear time.

    o_t = sum_s phi(q_t) . phi(k_s) v_s / sum_s phi(q_t) . phi(k_s),   E[phi(q) . phi(k)] = exp(q . k / sqrt(Dk))

A factor of all keys cancels in o, and keeps their features within range: the largest of the keys so far is 1. So

    phi'(k_t) = phi(k_t) exp(-top_t),   S_t = exp(top_{t-1} - top_t) S_{t-1} + phi'(k_t) [v_t | 1]^T

where top_t is the largest exponent of the tokens up to t: no later token counts, and a state with its top goes on.

Choromanski et al. 2020, arXiv:2009.14794.
"""

from __future__ import annotations

from functools import partial
from typing import Literal

import torch
from torch import Tensor

from regard.mixers.base import Record
from regard.mixers.kernel_layer import LinearAttention
from regard.mixers.matrix_state import MatrixInputs
from regard.mixers.parts import split_heads
from regard.mixers.recurrent import States
from regard.mixers.sequence import TokenSequence
from regard.ops.checks import without_autocast
from regard.random_features import PositiveFeatures, PublishedPositiveFeatures, RandomFeatures, ReluFeatures
from regard.transitions import Decay

__all__ = ["Performer", "records"]

KERNELS: dict[str, type[RandomFeatures]] = {
    "softmax": PositiveFeatures,
    "relu": ReluFeatures,
    "published softmax": PublishedPositiveFeatures,
}


class Performer(LinearAttention):
    """FAVOR+ attention over the layer's own tokens, causal or not; `LinearAttention` with random features.

    Args:
        dim: width of the tokens.
        heads: heads H.
        features: random features M of a head; ``Dk ln Dk`` by default. The error falls as 1 / sqrt(M).
        kernel: "softmax" estimates softmax attention; "relu" is the paper's generalised attention; "published softmax"
            has the published code's stabiliser, which leaks: a causal layer's weights then depend on later tokens.
        seed: of the projection, a buffer ``feature_map.projection`` that checkpoints keep;
            `regard.random_features.RedrawSchedule` draws it anew in training.
        bidirectional: every token reads all real tokens of its segment; then there is neither a cache nor a mask.

    Parameters: ``q_proj k_proj v_proj o_proj``. The state is (M, Dv + 1) per head and, for "softmax", ``top``. A query
    whose weights sum to less than 1e-30 (both entries of q and of k several times larger than N(0, 1) gives, where the
    estimate is of no use) gives less than the mean of values, down to 0.
    Raises ValueError and TypeError for sizes and names out of range.
    Cost 2 T H (C (M + Dv) + 2 M Dv) FLOPs beside the projections with chunks of C tokens, and 4 T H M Dk for features.

    >>> import torch
    >>> Performer(64, 4, features=128)(torch.randn(2, 10, 64)).shape
    torch.Size([2, 10, 64])
    """

    conv_states = ("top",)  # no memory to be priced

    def __init__(
        self,
        dim: int,
        heads: int,
        *,
        features: int | None = None,
        kernel: Literal["softmax", "relu", "published softmax"] = "softmax",
        seed: int = 0,
        bidirectional: bool = False,
    ) -> None:
        if kernel not in KERNELS:
            raise ValueError(f"kernel: expected {', '.join(map(repr, KERNELS))}, got {kernel!r}")
        made = partial(KERNELS[kernel], features=features, seed=seed)
        super().__init__(dim, heads, feature_map=made, eps=1e-30, bidirectional=bidirectional)
        self.decays = self.rescales and not bidirectional

    @property
    def rescales(self) -> bool:
        """Whether the keys' features are measured by the largest so far."""
        return isinstance(self.feature_map, PositiveFeatures)

    def state_shapes(self) -> dict[str, tuple[int, ...]]:
        return {**super().state_shapes(), **({"top": (self.heads,)} if self.rescales else {})}

    def inputs(self, seq: TokenSequence, states: States) -> MatrixInputs:
        if not isinstance(self.feature_map, PositiveFeatures):
            return super().inputs(seq, states)
        k = split_heads(self.k_proj(seq.x), self.heads)
        with without_autocast(k):
            exponents = self.feature_map.key_exponents(self._wide(k))
        before = None
        if states:  # a state without keys has no largest: the sums of weights in it are 0
            empty = states["state"][..., -1].sum(-1) == 0
            before = torch.where(empty, -torch.inf, states["top"])[..., None]
        own = exponents.detach().amax(-1)
        own = own if seq.real is None else torch.where(seq.real[:, None], own, -torch.inf)
        top, decay = self._tops(own, seq, before)
        # in place where nothing but the tokens themselves made `top`, so that vmap over states works
        k = exponents.sub_(top[..., None]) if before is None else exponents - top[..., None]
        k = k if seq.real is None else k.clamp(max=0)  # padding, whose values are 0, may stand above every real token
        k = k.exp_()
        last = top[..., -1] if top.shape[2] else states.get("top", top.new_zeros(top.shape[:2]))
        return MatrixInputs(self.query_features(seq.x), k, self.values(seq.x), Decay(decay), states={"top": last})

    def _tops(self, own: Tensor, seq: TokenSequence, before: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """(what each token's exponents are measured by (B, H, T), the state's log-decays where it moves)."""
        if self.bidirectional:
            top = _largest_so_far(_largest_so_far(own, seq.segments).flip(2), _flipped(seq.segments)).flip(2)
            return _finite(top), None
        opened = (
            own if before is None or not own.shape[2] else torch.cat((own[..., :1].maximum(before), own[..., 1:]), -1)
        )
        top = _largest_so_far(opened, seq.segments)
        earlier = torch.cat((top[..., :1] if before is None else before, top[..., :-1]), -1)[..., : top.shape[2]]
        fresh = earlier == -torch.inf  # nothing is in the state
        if seq.segment_starts is not None:
            fresh = fresh | seq.segment_starts[:, None]
        return _finite(top), torch.where(fresh, 0.0, earlier - top)

    def redraw(self, seed: int) -> None:
        """Draws other features, of the same kernel; a cache filled before cannot be read after."""
        assert isinstance(self.feature_map, RandomFeatures)
        self.feature_map.redraw(seed)


def _largest_so_far(x: Tensor, segments: Tensor | None) -> Tensor:
    """The running maximum along the last axis of (B, H, T), anew in each segment."""
    if segments is None:
        return x.cummax(-1).values if x.shape[-1] else x
    reach = 1
    while reach < x.shape[-1]:  # the maximum of 1, 2, 4, ... tokens
        same = (segments[:, reach:] == segments[:, :-reach])[:, None]
        longer = torch.where(same, x[..., reach:].maximum(x[..., :-reach]), x[..., reach:])
        x, reach = torch.cat((x[..., :reach], longer), -1), 2 * reach
    return x


def _flipped(segments: Tensor | None) -> Tensor | None:
    return None if segments is None else segments.flip(1)


def _finite(top: Tensor) -> Tensor:
    """0 where there is no real token."""
    return torch.where(top == -torch.inf, 0.0, top)


records = (
    Record(
        name="performer",
        summary="Performer: softmax attention estimated by positive random features (FAVOR+), causal",
        source="Choromanski et al. 2020, arXiv:2009.14794",
        build=lambda dim, heads: Performer(dim, heads, features=24),
    ),
    Record(
        name="performer_bidirectional",
        summary="FAVOR+ over all tokens",
        source="Choromanski et al. 2020, arXiv:2009.14794",
        build=lambda dim, heads: Performer(dim, heads, features=24, bidirectional=True),
    ),
    Record(
        name="performer_relu",
        summary="Performer's generalised attention: random features under a ReLU, causal",
        source="Choromanski et al. 2020, arXiv:2009.14794",
        build=lambda dim, heads: Performer(dim, heads, features=24, kernel="relu"),
    ),
)
