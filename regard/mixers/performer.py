"""Performer: softmax attention estimated by positive random features, in linear time.

    o_t = sum_s phi(q_t) . phi(k_s) v_s / sum_s phi(q_t) . phi(k_s),   E[phi(q) . phi(k)] = exp(q . k / sqrt(Dk))

Choromanski et al. 2020, arXiv:2009.14794.
"""

from __future__ import annotations

from functools import partial
from typing import Literal

from regard.mixers.base import Record
from regard.mixers.kernel_layer import LinearAttention
from regard.random_features import PositiveFeatures, PublishedPositiveFeatures, RandomFeatures, ReluFeatures

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

    Parameters: ``q_proj k_proj v_proj o_proj``. The state is (M, Dv + 1) per head. Raises ValueError and TypeError for
    sizes and names out of range. Cost 2 T H (C (M + Dv) + 2 M Dv) FLOPs beside the projections with chunks of C tokens.

    >>> import torch
    >>> Performer(64, 4, features=128)(torch.randn(2, 10, 64)).shape
    torch.Size([2, 10, 64])
    """

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
        super().__init__(dim, heads, feature_map=made, eps=1e-20, bidirectional=bidirectional)

    def redraw(self, seed: int) -> None:
        """Draws other features, of the same kernel; a cache filled before cannot be read after."""
        assert isinstance(self.feature_map, RandomFeatures)
        self.feature_map.redraw(seed)


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
