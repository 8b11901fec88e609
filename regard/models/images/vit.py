"""Vision transformers: patches as tokens, blocks that read all of them, one vector an image, scores of classes.

    x = tokens(images);   x = x + attention(norm(x)),  x = x + mlp(norm(x));   scores = W pool(norm(x)) + b

ViT (Dosovitskiy et al. 2020, arXiv:2010.11929), DeiT (Touvron et al. 2020, arXiv:2012.12877), SigLIP's images (Zhai et
al. 2023, arXiv:2303.15343) and BEiT (Bao et al. 2021, arXiv:2106.08254) are these parts with other heads and places.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from regard.biases import Bias, ClassTable
from regard.caches import KVView
from regard.checks import describe, whole
from regard.mixers.base import check_tokens
from regard.mixers.image_windows import resized
from regard.mixers.parts import Projections, Scores
from regard.models.model import Model
from regard.nn import MultiHeadAttention
from regard.positions import Rotary
from regard.tokens import resolve_tokens

__all__ = [
    "AttentionPooler",
    "ClassPlaces",
    "DistilledClassifier",
    "FirstTokens",
    "GridRotary",
    "ImageEncoder",
    "MeanPooler",
    "PatchAttention",
]


class ClassPlaces(nn.Module):
    """BEiT's learned bias of a class token and a grid: ``forward(size)`` is its `ClassTable`.

    ``table ((2 H - 1) (2 W - 1) + 3, heads)`` starts at 0. Other grids resize the grid's rows bilinearly, as published.

    >>> ClassPlaces(2, (4, 4))((3, 5)).table.shape
    torch.Size([48, 2])
    """

    def __init__(self, heads: int, size: tuple[int, int]) -> None:
        super().__init__()
        self.size = (whole("size", size[0], 1), whole("size", size[1], 1))
        self.table = nn.Parameter(torch.empty((2 * self.size[0] - 1) * (2 * self.size[1] - 1) + 3, heads))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.zeros_(self.table)

    def forward(self, size: tuple[int, int]) -> Bias:
        if size == self.size:
            return ClassTable(self.table, size)
        return ClassTable(torch.cat((resized(self.table[:-3], self.size, size), self.table[-3:])), size)


class GridRotary:
    """Rotary positions on a grid: the first half of a head's channels turn by the row, the others by the column.

    Tokens before the grid are not turned. Heo et al. 2024, arXiv:2403.13298 (axial frequencies).

    Args:
        dim: of a head; 4 divides it.
        base: of the frequencies of each half, as in `regard.positions.Rotary`.

    >>> GridRotary(8)(torch.randn(1, 2, 7, 8), (2, 3)).shape
    torch.Size([1, 2, 7, 8])
    """

    def __init__(self, dim: int, *, base: float = 100.0) -> None:
        if whole("dim", dim, 4) % 4:
            raise ValueError(f"dim: expected a multiple of 4, got {dim}")
        self.dim = dim
        # One for each axis: each remembers the angles of its own positions.
        self.rows, self.columns = Rotary(dim // 2, base=base), Rotary(dim // 2, base=base)

    def __call__(self, x: Tensor, grid: tuple[int, int]) -> Tensor:
        """Turn x (B, H, P + rows * columns, dim) by its places."""
        if x.shape[-1] != self.dim:
            raise ValueError(f"x: expected heads of {self.dim} channels, got {x.shape[-1]}")
        rows, columns = grid
        before = x.shape[2] - rows * columns
        if before < 0:
            raise ValueError(f"grid: expected at most {x.shape[2]} places, the tokens, got {rows} × {columns}")
        row, column = (torch.arange(n, device=x.device) for n in grid)
        first = row.new_zeros(before)
        y = torch.cat((first, row.repeat_interleave(columns)))
        z = torch.cat((first, column.repeat(rows)))
        halves = x.split(self.dim // 2, -1)
        return torch.cat((self.rows(halves[0].contiguous(), y), self.columns(halves[1].contiguous(), z)), -1)


class PatchAttention(MultiHeadAttention):
    """`MultiHeadAttention` of tokens that stand on a grid, ``(B, P + N, dim)``, all of which read all.

    Args:
        dim, heads, head_dim, projections, scores: as for `MultiHeadAttention`.
        key_bias: False for keys without a bias beside queries and values with one (BEiT).
        places: from the grid's (rows, columns) to a bias, such as `ClassPlaces`.
        turn: a `GridRotary` for queries and keys.

    A call names the grid: ``layer(x, grid=(rows, columns))``; a bias that all layers share is given as ``bias=``.

    >>> PatchAttention(16, 4, places=ClassPlaces(4, (2, 3)))(torch.randn(1, 7, 16), grid=(2, 3)).shape
    torch.Size([1, 7, 16])
    """

    takes_grid = True

    def __init__(
        self,
        dim: int,
        heads: int,
        *,
        head_dim: int | None = None,
        projections: Projections | None = None,
        scores: Scores | None = None,
        key_bias: bool = True,
        places: nn.Module | None = None,
        turn: GridRotary | None = None,
    ) -> None:
        super().__init__(dim, heads, head_dim=head_dim, projections=projections, scores=scores)
        if not key_bias:
            self.k_proj = nn.Linear(dim, self.k_proj.out_features, bias=False)
        self.places, self.turn = places, turn

    def forward(
        self,
        x: Tensor,
        context: Tensor | None = None,
        *,
        grid: tuple[int, int] | None = None,
        bias: Bias | None = None,
        **call: Any,
    ) -> Tensor:
        """The mixed tokens (B, P + N, dim)."""
        x, q, view, options = self._read(x, context, grid=grid, bias=bias, **call)
        return self._write(x, self._mix(q, view, options))

    def _read(
        self,
        x: Tensor,
        context: Tensor | None = None,
        *,
        grid: tuple[int, int] | None = None,
        bias: Bias | None = None,
        **call: Any,
    ) -> tuple[Tensor, Tensor, KVView, dict[str, Any]]:
        call.pop("positions", None)  # counts along the row, which nothing here reads
        given = {name: value for name, value in (("context", context), *call.items()) if value is not None}
        if given:
            raise TypeError(f"{', '.join(given)}: expected None, for every patch reads every patch of its image")
        if grid is None and (self.places is not None or self.turn is not None):
            raise TypeError("grid: expected (rows, columns) of the patches, got None")
        check_tokens(self, "x", x, self.dim)
        layout = resolve_tokens(x.shape[0], x.shape[1], x.device)
        q, (k, v) = self._queries(x, None), self._keys(x, None)
        if self.turn is not None and grid is not None:
            q, k = self.turn(q, grid), self.turn(k, grid)
        if self.places is not None:
            own: Bias = self.places(grid)
            bias = own if bias is None else bias + own
        options: dict[str, Any] = {**self.scores.arguments(), "sink": self.sink, "bias": bias}
        return x, q, KVView.alone(k, v, layout), options


class FirstTokens(nn.Module):
    """The class token's vector ``(B, dim)``; of several first tokens theirs, ``(B, count, dim)``."""

    def __init__(self, count: int = 1) -> None:
        super().__init__()
        self.count = whole("count", count, 1)

    def forward(self, hidden: Tensor) -> Tensor:
        return hidden[:, 0] if self.count == 1 else hidden[:, : self.count]


class MeanPooler(nn.Module):
    """``norm(mean of the tokens behind the first `skip`)``, ``(B, dim)``; the norm may be None."""

    def __init__(self, norm: nn.Module | None = None, *, skip: int = 0) -> None:
        super().__init__()
        self.norm, self.skip = norm, whole("skip", skip, 0)

    def forward(self, hidden: Tensor) -> Tensor:
        mean = hidden[:, self.skip :].mean(1)
        return mean if self.norm is None else self.norm(mean)


class AttentionPooler(nn.Module):
    """One learned query reads all tokens: ``y = attention(probe, x);  y + ff(norm(y))``, ``(B, dim)`` (SigLIP).

    Args:
        attention: a layer that reads a context, ``(B, 1, dim)`` in and out.
        ff, norm: of the feed-forward part.

    Parameters: ``probe`` (dim), ``attention.*``, ``norm.*``, ``ff.*``. Zhai et al. 2022, arXiv:2106.04560.

    >>> from regard.models import MLP, activation
    >>> attention = MultiHeadAttention(8, 2, projections=Projections(bias=True, context_dim=8))
    >>> AttentionPooler(8, attention, MLP(8, 16, activation("gelu")), nn.LayerNorm(8))(torch.randn(2, 5, 8)).shape
    torch.Size([2, 8])
    """

    def __init__(self, dim: int, attention: nn.Module, ff: nn.Module, norm: nn.Module) -> None:
        super().__init__()
        self.probe = nn.Parameter(torch.empty(dim))
        self.attention, self.ff, self.norm = attention, ff, norm
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.normal_(self.probe, std=0.02)

    def forward(self, hidden: Tensor) -> Tensor:
        y: Tensor = self.attention(self.probe.to(hidden.dtype).expand(len(hidden), 1, -1), hidden)
        out: Tensor = (y + self.ff(self.norm(y)))[:, 0]
        return out


class DistilledClassifier(nn.Module):
    """DeiT's two linear maps, of the class token and of the distillation token; the scores are their mean.

    ``separate`` gives both, for training: the one learns from labels, the other from a teacher's.

    >>> DistilledClassifier(8, 5)(torch.randn(2, 2, 8)).shape
    torch.Size([2, 5])
    """

    def __init__(self, dim: int, classes: int) -> None:
        super().__init__()
        self.labels, self.teacher = nn.Linear(dim, classes), nn.Linear(dim, classes)

    def separate(self, pooled: Tensor) -> tuple[Tensor, Tensor]:
        """(scores by the class token, scores by the distillation token), each ``(B, classes)``, of ``(B, 2, dim)``."""
        return self.labels(pooled[:, 0]), self.teacher(pooled[:, 1])

    def forward(self, pooled: Tensor) -> Tensor:
        labels, teacher = self.separate(pooled)
        return (labels + teacher) / 2


class ImageEncoder(Model):
    """Tokens of images, blocks, a norm, a pooler, and a linear map to classes; each but the first two may be None.

    Args:
        embedding: a `PatchTokens`, or any module from images to ``(B, T, dim)``.
        layers: one factory a layer, called with the layer's number; a block with a `PatchAttention` is told the grid.
        norm: of the last hidden state.
        pooler: from the hidden state to one vector an image: `FirstTokens`, `MeanPooler`, `AttentionPooler`, …
        classifier: from what the pooler gives to scores ``(B, classes)``.
        places: makes a bias of the grid that all layers share, such as `ClassPlaces`.

    Made by `regard.load` and `regard.models.from_config` for ``vit``, ``deit``, ``siglip_vision_model``, ``siglip`` and
    ``beit``; by hand of any parts:

    >>> from regard.models import MLP, PreNorm, activation
    >>> from regard.models.images.patches import PatchTokens, TokenPlaces
    >>> def block(i):
    ...     ff = MLP(16, 32, activation("gelu"))
    ...     return PreNorm(PatchAttention(16, 4), ff, nn.LayerNorm(16), nn.LayerNorm(16))
    >>> tokens = PatchTokens(3, 16, (4, 4), image=(8, 8), tokens=1, places=TokenPlaces((2, 2), 16, tokens=1))
    >>> model = ImageEncoder(tokens, [block] * 2, nn.LayerNorm(16), FirstTokens(), nn.Linear(16, 5))
    >>> model(torch.randn(2, 3, 8, 8)).shape, model.hidden(torch.randn(2, 3, 12, 8), interpolate=True).shape
    (torch.Size([2, 5]), torch.Size([2, 7, 16]))
    """

    def __init__(
        self,
        embedding: nn.Module,
        layers: Sequence[Callable[[int], nn.Module]],
        norm: nn.Module | None = None,
        pooler: nn.Module | None = None,
        classifier: nn.Module | None = None,
        *,
        places: nn.Module | None = None,
    ) -> None:
        super().__init__()
        if classifier is not None and pooler is None:
            raise ValueError("pooler: expected a module that gives the classifier its vectors, got None")
        self.embedding = embedding
        self.layers = nn.ModuleList([make(i) for i, make in enumerate(layers)])
        self.norm, self.pooler, self.classifier, self.places = norm, pooler, classifier, places

    def forward(self, images: Tensor, *, interpolate: bool = False) -> Tensor:
        """Scores ``(B, classes)`` of images ``(B, channels, height, width)``; without a classifier `hidden`.

        Args:
            interpolate: take images of another size than the model was made for, and resize its places.

        Raises:
            ValueError, TypeError: for images of another size, shape or dtype.
        """
        hidden = self.hidden(images, interpolate=interpolate)
        scores: Tensor = hidden if self.classifier is None else self.classifier(self.pool(hidden))
        return scores

    def hidden(self, images: Tensor, *, interpolate: bool = False) -> Tensor:
        """The last hidden state, normed: ``(B, T, dim)``, the patches row by row behind the learned tokens."""
        x = self.embedding(images, **({"interpolate": True} if interpolate else {}))
        if not isinstance(x, Tensor) or x.dim() != 3:
            raise ValueError(f"embedding: expected one that gives (B, T, dim), got one that gives {describe(x)}")
        find = getattr(self.embedding, "grid", None)
        call: dict[str, Any] = {} if find is None else {"grid": find(images)}
        if self.places is not None:
            if find is None:
                raise TypeError(
                    "places: expected None, for the embedding has no method grid that says where patches stand"
                )
            call["bias"] = self.places(call["grid"])
        for layer in self.layers:
            x = layer(x, **(call if getattr(getattr(layer, "mixer", layer), "takes_grid", False) else {}))
        out: Tensor = x if self.norm is None else self.norm(x)
        return out

    def pool(self, hidden: Tensor) -> Tensor:
        """One vector an image from the last hidden state: ``(B, dim)``, or what the pooler gives.

        Raises:
            ValueError: where the model has no pooler.
        """
        if self.pooler is None:
            raise ValueError("pooler: expected a model that was built or loaded with one, got none")
        out: Tensor = self.pooler(hidden)
        return out
