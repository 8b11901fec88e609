"""Random features: feature maps whose products estimate a kernel, FAVOR+ of the Performer.

    phi(x)_m = exp(w_m . z - |z|^2 / 2),  z = x dim^(-1/4),  w_m ~ N(0, I)
    E[phi(q) . phi(k)] / M = exp(q . k / sqrt(dim))

Choromanski et al. 2020, arXiv:2009.14794.
"""

from __future__ import annotations

import math
from typing import Literal

import torch
from torch import Tensor, nn

from regard.checks import positive, whole
from regard.coordinates import has_values, plain_tensors
from regard.feature_maps import FeatureMap

__all__ = [
    "PositiveFeatures",
    "PublishedPositiveFeatures",
    "RandomFeatures",
    "RedrawSchedule",
    "ReluFeatures",
    "orthogonal_rows",
    "redraw_features",
]

Lengths = Literal["gaussian", "equal"]


def orthogonal_rows(count: int, dim: int, *, seed: int = 0, lengths: Lengths = "gaussian") -> Tensor:
    """Random rows (count, dim), orthogonal within blocks of `dim`, float32.

    Each row points anywhere with equal chance; its length is that of a vector from N(0, I) ("gaussian": then each row
    alone is from N(0, I)), or sqrt(dim) ("equal"). From a generator of its own. (Choromanski et al. 2020, section 2.4.)

    >>> rows = orthogonal_rows(5, 4)
    >>> torch.allclose(rows[:4] @ rows[:4].T, torch.diag(rows[:4].square().sum(1)), atol=1e-5)
    True
    """
    whole("count", count, 1)
    whole("dim", dim, 1)
    if lengths not in ("gaussian", "equal"):
        raise ValueError(f"lengths: expected 'gaussian' or 'equal', got {lengths!r}")
    with plain_tensors():
        generator = torch.Generator().manual_seed(seed)
        blocks = []
        for first in range(0, count, dim):
            turned, upper = torch.linalg.qr(torch.randn(dim, dim, generator=generator, dtype=torch.float64))
            signs = torch.where(upper.diagonal() < 0, -1.0, 1.0)  # without them the directions are not uniform
            blocks.append((turned * signs).T[: count - first])
        norms = torch.full((count,), math.sqrt(dim), dtype=torch.float64)
        if lengths == "gaussian":
            norms = torch.randn(count, dim, generator=generator, dtype=torch.float64).norm(dim=1)
        return (torch.cat(blocks) * norms[:, None]).float()


class RandomFeatures(FeatureMap):
    """A feature map over a random projection (features, dim), which is kept in a buffer and can be drawn anew.

    Args:
        heads, dim: as every map's; heads share the projection.
        features: how many; ``dim ln dim`` by default, at least 1.
        seed: of the projection.
        lengths: of its rows, see `orthogonal_rows`.
    """

    projection: Tensor

    def __init__(
        self, heads: int, dim: int, *, features: int | None = None, seed: int = 0, lengths: Lengths = "gaussian"
    ) -> None:
        super().__init__(heads, dim)
        usual = max(int(dim * math.log(dim)), 1)
        self.features = usual if features is None else whole("features", features, 1)
        self.seed, self.lengths = whole("seed", seed, None), lengths
        self.register_buffer("projection", torch.empty(self.features, self.dim))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """The projection of the map's seed."""
        self._draw(self.seed)

    def redraw(self, seed: int) -> None:
        """Another projection; the kernel that is estimated stays the same."""
        self._draw(whole("seed", seed, None))

    @torch.no_grad()
    def _draw(self, seed: int) -> None:
        if has_values(self.projection):
            self.projection.copy_(orthogonal_rows(self.features, self.dim, seed=seed, lengths=self.lengths))

    def _projected(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """(W z, z) in x's dtype."""
        z = x * self.dim**-0.25
        return z @ self.projection.to(x.dtype).T, z


class PositiveFeatures(RandomFeatures):
    """FAVOR+: positive features of the softmax kernel ``exp(q . k / sqrt(dim))``, a token at a time.

    ``phi(k)_m = exp(w_m . z - |z|^2 / 2 - c_m)`` and ``phi(q)_m = exp(w_m . z - |z|^2 / 2 + c_m - top)`` with
    ``c_m = (|w_m|^2 - dim) / 2`` and ``top`` the largest exponent of the query: the c_m cancel in every product, and a
    factor of the query in the division by the sum of weights. So no exponent runs away (a key's is ``-|z - w_m|^2 / 2``
    plus a constant), and no token's features depend on another token, as those of the published stabiliser do.
    Far keys (``|z|^2`` of 100 and more) may have no feature above 0 in float32: `regard.nn.Performer` measures keys by
    each other.

    >>> phi = PositiveFeatures(1, 8, features=4096)
    >>> q, k = torch.randn(2, 1, 1, 3, 8) * 0.5
    >>> weights = phi.queries(q) @ phi.keys(k).mT
    >>> exact = torch.exp(q @ k.mT / 8**0.5)
    >>> bool(((weights / weights.sum(-1, keepdim=True)) - exact / exact.sum(-1, keepdim=True)).abs().max() < 0.1)
    True
    """

    def queries(self, q: Tensor) -> Tensor:
        exponents = self._exponents(q, 1)
        return exponents.sub_(exponents.detach().amax(-1, keepdim=True)).exp_()

    def keys(self, k: Tensor) -> Tensor:
        return self.key_exponents(k).exp_()

    def key_exponents(self, k: Tensor) -> Tensor:
        """The logarithms of `keys`, a new tensor, for who subtracts a constant of all keys before `exp`."""
        return self._exponents(k, -1)

    def _exponents(self, x: Tensor, sign: int) -> Tensor:
        """``W z - |z|^2 / 2 +- c`` as one product, which passes over (.., T, M) once."""
        rows = self.projection.to(x.dtype)
        shift = (rows.square().sum(-1, keepdim=True) - min(self.dim, 160)) / 2  # e^80 is far within float32
        z = x * self.dim**-0.25
        half = z.square().sum(-1, keepdim=True) / -2
        weights = torch.cat((rows, sign * shift, torch.ones_like(shift)), -1)
        return torch.cat((z, torch.ones_like(half), half), -1) @ weights.T


class ReluFeatures(RandomFeatures):
    """``phi(x) = relu(W z) + eps``: generalised attention, whose kernel is not the softmax's.

    Choromanski et al. 2020, section 4.2, where eps is 1e-3.

    >>> bool((ReluFeatures(1, 4, features=6)(torch.randn(1, 1, 3, 4)) > 0).all())
    True
    """

    def __init__(
        self,
        heads: int,
        dim: int,
        *,
        features: int | None = None,
        seed: int = 0,
        lengths: Lengths = "gaussian",
        eps: float = 1e-3,
    ) -> None:
        super().__init__(heads, dim, features=features, seed=seed, lengths=lengths)
        self.eps = positive("eps", eps)

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(self._projected(x)[0]) + self.eps


class PublishedPositiveFeatures(RandomFeatures):
    """FAVOR+ with the published code's stabiliser: ``phi(x)_m = (exp(w_m . z - |z|^2 / 2 - top) + eps) / sqrt(M)``.

    A query's ``top`` is its own largest exponent, a key's is the largest of *all keys* of its head: with `eps` inside,
    a causal layer's weights then depend a little on later tokens, and on how a text is cut into calls. For comparison
    with published numbers; `PositiveFeatures` has neither fault.
    """

    def __init__(
        self,
        heads: int,
        dim: int,
        *,
        features: int | None = None,
        seed: int = 0,
        lengths: Lengths = "gaussian",
        eps: float = 1e-4,
    ) -> None:
        super().__init__(heads, dim, features=features, seed=seed, lengths=lengths)
        self.eps = positive("eps", eps)

    def queries(self, q: Tensor) -> Tensor:
        return self._stabilised(q, (-1,))

    def keys(self, k: Tensor) -> Tensor:
        return self._stabilised(k, (-1, -2))

    def _stabilised(self, x: Tensor, axes: tuple[int, ...]) -> Tensor:
        u, z = self._projected(x)
        if not u.numel():
            return u
        top = u.detach().amax(axes, keepdim=True)
        powers = torch.exp(u - z.square().sum(-1, keepdim=True) / 2 - top)
        return torch.mul(powers + self.eps, self.features**-0.5)


def redraw_features(model: nn.Module, seed: int) -> int:
    """Draw the random features of every layer of a model anew, each from a seed of its own; how many there were."""
    maps = [module for module in model.modules() if isinstance(module, RandomFeatures)]
    with plain_tensors():
        generator = torch.Generator().manual_seed(whole("seed", seed, None))
        seeds = torch.randint(2**62, (len(maps),), generator=generator).tolist()
    for one, own in zip(maps, seeds, strict=True):
        one.redraw(own)
    return len(maps)


class RedrawSchedule:
    """Draws a model's random features anew every `every` training steps; call `step` after each.

    The features that are drawn follow from `seed` and the step; `state_dict` keeps the number of steps for a training
    that is taken up again. A cache filled before a step cannot be read after it: its sums are of the features before.

    >>> from regard.nn import Performer
    >>> layer = Performer(16, 2)
    >>> schedule, before = RedrawSchedule(layer, every=2), layer.feature_map.projection.clone()
    >>> [schedule.step() for _ in range(3)], torch.equal(before, layer.feature_map.projection)
    ([False, True, False], False)
    """

    def __init__(self, model: nn.Module, every: int = 1000, *, seed: int = 1) -> None:
        self.model, self.every, self.seed, self.steps = model, whole("every", every, 1), whole("seed", seed, None), 0

    def step(self) -> bool:
        """Counts a step; whether features were drawn."""
        self.steps += 1
        drawn = self.steps % self.every == 0
        if drawn:
            redraw_features(self.model, self.seed + self.steps)
        return drawn

    def state_dict(self) -> dict[str, int]:
        """The number of steps counted."""
        return {"steps": self.steps}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Goes on from the steps of a `state_dict`."""
        self.steps = whole("steps", state["steps"], 0)
