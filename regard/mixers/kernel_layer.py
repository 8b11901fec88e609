"""The layer of kernel linear attention over its own tokens; `regard.mixers.kernel_linear` tells the formula.

Any feature map makes a layer of it: elu + 1 and polynomials there, random features in `regard.mixers.performer`.
"""

from __future__ import annotations

from torch import Tensor

from regard.feature_maps import EluPlusOne
from regard.mixers.base import Traits
from regard.mixers.kernel_sums import KernelHeads, MapFactory, read, written
from regard.mixers.matrix_state import MatrixInputs, MatrixStateLayer
from regard.mixers.recurrent import States
from regard.mixers.sequence import TokenSequence, compute_dtype
from regard.ops.checks import without_autocast
from regard.transitions import Decay

__all__ = ["CANCELLING", "PLAIN_PRODUCTS", "LinearAttention"]

PLAIN_PRODUCTS = "it mixes all tokens in two plain products, which are torch's own"
CANCELLING = "its features cancel, so they are summed in float64, and the kernels compute in float32"


class LinearAttention(KernelHeads, MatrixStateLayer):
    """Kernel linear attention over the layer's own tokens; ``(B, T, dim)`` in and out, causal or not.

    Args:
        dim: width of the tokens.
        heads: value heads H.
        key_heads: heads of queries and keys, a divisor of `heads`; `heads` by default.
        key_dim: Dk of a head, before the feature map; ``dim // heads`` by default.
        value_dim: Dv of a head; ``dim // heads`` by default.
        feature_map: ``feature_map(key_heads, key_dim)`` gives the `regard.feature_maps.FeatureMap`; elu + 1 by default.
        eps: added to the sum of the weights, which divides: a row whose weights sum to n is a mean of values times
            ``n / (n + eps)``, so 0 where n is 0. None divides by nothing; an RMS norm of each head follows instead.
        bidirectional: every token reads all real tokens of its segment; then there is neither a cache nor a mask.

    Parameters: ``q_proj k_proj v_proj o_proj`` (heads contiguous), ``feature_map.*``, ``norm`` (Dv) without `eps`. The
    state is (F, Dv + 1) per head for F features, its last column the sum of the keys' features. Features, sums and the
    division are float32, or float64 in float64 layers and for maps whose products cancel (`Quadratic`, `Rebased`); a
    cache's state is float32 outside float64 layers. Raises ValueError for sizes below 1 and numbers out of range.

    Cost: 2 T H (C (F + Dv) + 2 F Dv) FLOPs beside the projections with chunks of C tokens; 4 T H F Dv where
    bidirectional, without segments.

    >>> import torch
    >>> LinearAttention(64, 4)(torch.randn(2, 10, 64)).shape
    torch.Size([2, 10, 64])
    """

    scale = 1.0  # it stands in the feature map
    decays = False

    def __init__(
        self,
        dim: int,
        heads: int,
        *,
        key_heads: int | None = None,
        key_dim: int | None = None,
        value_dim: int | None = None,
        feature_map: MapFactory = EluPlusOne,
        eps: float | None = 1e-6,
        bidirectional: bool = False,
    ) -> None:
        super().__init__(dim, dim, heads, key_heads, key_dim, value_dim, feature_map, eps)
        self.bidirectional = bidirectional

    @property
    def traits(self) -> Traits:
        """What the layer promises."""
        causal = not self.bidirectional
        kind, off = ("recurrent", "") if causal else ("kernel", PLAIN_PRODUCTS)
        off = CANCELLING if self.feature_map.cancels else off
        return Traits(kind, causal=causal, cached=causal, off_kernels=off)

    def inputs(self, seq: TokenSequence, states: States) -> MatrixInputs:
        return MatrixInputs(self.query_features(seq.x), self.key_features(seq.x), self.values(seq.x), Decay())

    def recur(
        self, seq: TokenSequence, given: MatrixInputs, v: Tensor, state: Tensor | None
    ) -> tuple[Tensor, Tensor | None]:
        q, k, values = given.q, given.k, self.summed(v)
        with without_autocast(values):
            if self.bidirectional and seq.segments is None:
                return self.finished(read(q, written(k, seq.mask_padding(values, 2))), v), None
            sums, state = super().recur(seq, given, values, state)
            return self.finished(sums, v), None if state is None else state.to(compute_dtype(v))
