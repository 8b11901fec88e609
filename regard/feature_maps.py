"""Feature maps of kernel attention: functions phi with ``phi(q) . phi(k)`` a similarity of q and k.

A layer takes a factory: ``feature_map(heads, dim)`` gives the `FeatureMap` of its queries and keys, each
``(B, heads, T, dim)``. Layers call it in at least float32.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from regard.checks import norm_eps, whole

__all__ = ["EluPlusOne", "FeatureMap", "Quadratic", "Rebased", "Taylor", "positive_features", "symmetric_square"]


STEEPEST = 1e12  # a scale past it would take squares of ordinary scores beyond float32


class FeatureMap(nn.Module):
    """``phi``: (B, heads, T, dim) to (B, heads, T, features), a token at a time.

    Subclasses set `features` and write `forward`, or `queries` and `keys` where the two differ. A layer that divides by
    sums of weights wants ``phi(q) . phi(k) >= 0``.
    """

    cancels = False  # phi(q) . phi(k) may be far below its terms, so layers take features and sums in float64

    def __init__(self, heads: int, dim: int) -> None:
        super().__init__()
        self.heads, self.dim = whole("heads", heads, 1), whole("dim", dim, 1)
        self.features = self.dim

    def queries(self, q: Tensor) -> Tensor:
        """The features of queries."""
        features: Tensor = self(q)
        return features

    def keys(self, k: Tensor) -> Tensor:
        """The features of keys."""
        features: Tensor = self(k)
        return features

    def extra_repr(self) -> str:
        return f"{self.heads} heads, {self.dim} channels, {self.features} features"


class EluPlusOne(FeatureMap):
    """``elu(x) + 1``: ``x + 1`` above 0, ``exp(x)`` below. `dim` features, all positive; no scale.

    ``exp`` keeps its relative precision far below 0, where adding 1 to ``elu`` would round it away. Note phi(0) = 1.

    Katharopoulos et al. 2020, arXiv:2006.16236.

    >>> EluPlusOne(1, 3)(torch.tensor([-50.0, 0.0, 2.0])).tolist()
    [1.9287498933537385e-22, 1.0, 3.0]
    """

    def forward(self, x: Tensor) -> Tensor:
        return torch.where(x > 0, x + 1, torch.exp(x.clamp(max=0)))


class _Polynomial(FeatureMap):
    """A map whose kernel is a polynomial of ``s = scale * q . k``; ``dim ** -0.5`` by default."""

    def __init__(self, heads: int, dim: int, *, scale: float | None = None) -> None:
        super().__init__(heads, dim)
        if scale is not None and not 0 < scale <= STEEPEST:
            raise ValueError(f"scale: expected a number > 0 and at most {STEEPEST:.0e}, or None, got {scale}")
        self.root = math.sqrt(self.dim**-0.5 if scale is None else scale)
        self.features = self.dim * (self.dim + 1) // 2


class Quadratic(_Polynomial):
    """The kernel ``s^2`` with ``s = scale * q . k`` (`dim ** -0.5` by default). `dim (dim + 1) / 2` features.

    Where q and k are nearly orthogonal the products of features cancel; float32 would leave noise of either sign, which
    as the first key's weight divides itself. So layers sum them in float64.

    >>> q, k, phi = torch.randn(4), torch.randn(4), Quadratic(1, 4)
    >>> torch.allclose(phi(q) @ phi(k), (q @ k / 2) ** 2), phi.features
    (True, 10)
    """

    cancels = True

    def forward(self, x: Tensor) -> Tensor:
        return symmetric_square(self.root * x)


class Taylor(_Polynomial):
    """The kernel ``1 + s + s^2 / 2`` >= 1/2, near ``exp(s)``; ``s = scale * q . k`` (`dim ** -0.5` by default).

    ``1 + dim + dim (dim + 1) / 2`` features. Arora et al. 2024 (Based), arXiv:2402.18668.

    >>> q, k, phi = torch.randn(4), torch.randn(4), Taylor(1, 4)
    >>> s = q @ k / 2
    >>> torch.allclose(phi(q) @ phi(k), 1 + s + s * s / 2), phi.features
    (True, 15)
    """

    def __init__(self, heads: int, dim: int, *, scale: float | None = None) -> None:
        super().__init__(heads, dim, scale=scale)
        self.features += 1 + self.dim

    def forward(self, x: Tensor) -> Tensor:
        x = self.root * x
        return torch.cat((torch.ones_like(x[..., :1]), x, symmetric_square(x) * 0.5**0.5), -1)


class Rebased(Quadratic):
    """The kernel ``s^2`` of ``norm(q) * q_weight + q_bias`` with ``norm(k) * k_weight + k_bias``: a learned parabola.

    ``norm`` is the layer norm, over all heads together as in the authors' code; `eps`, at least 1e-25, is added to its
    variance.
    Parameters: ``q_weight q_bias k_weight k_bias`` (heads, dim).

    Aksenov et al. 2024, arXiv:2402.10644.

    >>> Rebased(2, 4).keys(torch.randn(1, 2, 7, 4)).shape
    torch.Size([1, 2, 7, 10])
    """

    def __init__(self, heads: int, dim: int, *, scale: float | None = None, eps: float = 1e-5) -> None:
        super().__init__(heads, dim, scale=scale)
        self.eps, shape = norm_eps(eps, 1e-25), (self.heads, self.dim)
        self.q_weight, self.k_weight = nn.Parameter(torch.empty(shape)), nn.Parameter(torch.empty(shape))
        self.q_bias, self.k_bias = nn.Parameter(torch.empty(shape)), nn.Parameter(torch.empty(shape))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        for weight, bias in ((self.q_weight, self.q_bias), (self.k_weight, self.k_bias)):
            nn.init.ones_(weight)
            nn.init.zeros_(bias)

    def queries(self, q: Tensor) -> Tensor:
        return super().queries(self._normed(q, self.q_weight, self.q_bias))

    def keys(self, k: Tensor) -> Tensor:
        return super().keys(self._normed(k, self.k_weight, self.k_bias))

    def _normed(self, x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        rows = x.transpose(1, 2)
        return F.layer_norm(rows, weight.shape, weight.to(x.dtype), bias.to(x.dtype), self.eps).transpose(1, 2)


def symmetric_square(x: Tensor) -> Tensor:
    """(..., n) to (..., n (n + 1) / 2) with ``symmetric_square(x) . symmetric_square(y) = (x . y)^2``.

    >>> symmetric_square(torch.tensor([3.0, 2.0])).tolist()  # x_1^2, sqrt(2) x_1 x_2, x_2^2
    [9.0, 8.485280990600586, 4.0]
    """
    rows, columns = torch.triu_indices(x.shape[-1], x.shape[-1], device=x.device)
    twice = torch.where(rows == columns, x.new_ones(()), x.new_full((), math.sqrt(2)))
    return x.index_select(-1, rows) * x.index_select(-1, columns) * twice


def positive_features(x: Tensor, projection: Tensor, *, hyperbolic: bool = False) -> Tensor:
    """Random features, in expectation over rows of `projection` from N(0, I) of the kernel ``exp(q . k / sqrt(dim))``.

    With ``z = x dim^(-1/4)``: ``exp(W z - |z|^2 / 2) / sqrt(m)`` for ``projection`` W (m, dim), and with `hyperbolic`
    ``exp(-W z - |z|^2 / 2)`` beside it, both divided by ``sqrt(2 m)``. x is (..., dim); the result (..., m) or
    (..., 2 m). Nothing keeps the exponents from overflowing.

    Choromanski et al. 2020, arXiv:2009.14794.

    >>> positive_features(torch.zeros(2), torch.randn(4, 2)).tolist()
    [0.5, 0.5, 0.5, 0.5]
    """
    z = x.to(torch.promote_types(x.dtype, torch.float32)) * x.shape[-1] ** -0.25
    u, half = z @ projection.to(z.dtype).transpose(-1, -2), z.square().sum(-1, keepdim=True) / 2
    u = torch.cat((u, -u), -1) if hyperbolic else u
    features: Tensor = torch.exp(u - half) * u.shape[-1] ** -0.5
    return features.to(x.dtype)
