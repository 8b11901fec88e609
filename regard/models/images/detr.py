"""DETR: objects of an image as a set, from learned queries that read what an encoder made of a convolutional map.

    encoder:  q, k = x + places, v = x                                   in every layer
    decoder:  q, k = y + queries, v = y;  then q = y + queries, k = x + places, v = x;  y starts at 0
    heads:    logits = W y,  boxes = sigmoid(MLP(y)),  y normed

Carion et al. 2020, arXiv:2005.12872.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from regard.checks import describe, is_bool, is_dense, whole
from regard.masks import KeyPadding
from regard.mixers.base import check_dtype
from regard.mixers.parts import merge_heads, split_heads
from regard.models.images.matching import Detections, SetLoss, corners
from regard.models.model import Model
from regard.ops.attention import attention
from regard.positions import image_positions

__all__ = ["DETR", "BoxHead", "LearnedPlaces", "PlacedAttention", "QueryBlock", "SinePlaces"]


class PlacedAttention(nn.Module):
    """Softmax attention whose places are added to what asks and what answers, never to the values; ``(B, T, dim)``.

    Args:
        dim: width of the tokens.
        heads: heads H, a divisor of `dim`.
        dropout: of the weights, in training.

    Parameters: ``q_proj k_proj v_proj o_proj``. A row whose context is all padding reads nothing: it gives ``o_proj``'s
    bias.

    >>> layer = PlacedAttention(16, 4)
    >>> layer(torch.randn(2, 5, 16), torch.randn(2, 9, 16), places=torch.randn(5, 16)).shape
    torch.Size([2, 5, 16])
    """

    def __init__(self, dim: int, heads: int, *, dropout: float = 0.0) -> None:
        super().__init__()
        self.dim, self.heads = whole("dim", dim, 1), whole("heads", heads, 1)
        if dim % heads:
            raise ValueError(f"heads: expected a divisor of dim={dim}, got {heads}")
        if not 0 <= dropout <= 1:
            raise ValueError(f"dropout: expected a probability from 0 to 1, got {dropout}")
        self.dropout = dropout
        self.q_proj, self.k_proj, self.v_proj, self.o_proj = (nn.Linear(dim, dim) for _ in range(4))

    def forward(
        self,
        x: Tensor,
        context: Tensor | None = None,
        *,
        places: Tensor | None = None,
        context_places: Tensor | None = None,
        keep: Tensor | None = None,
        grid: tuple[int, int] | None = None,
    ) -> Tensor:
        """The mixed tokens.

        Args:
            context: ``(B, S, dim)`` that is read; x itself by default.
            places: of x, which broadcasts to it.
            context_places: of the context; x's by default where x is the context.
            keep: bool ``(B, S)``, which tokens of the context are real.
            grid: the map's (height, width), which layers that sample it need, and this one does not.
        """
        asks = x if places is None else x + places
        if context is None:
            answers, values = asks, x
        else:
            answers, values = context if context_places is None else context + context_places, context
        q, k, v = (
            split_heads(proj(given), self.heads)
            for proj, given in ((self.q_proj, asks), (self.k_proj, answers), (self.v_proj, values))
        )
        mask = None if keep is None else KeyPadding(keep)
        mixed = attention(q, k, v, mask=mask, dropout_p=self.dropout if self.training else 0.0)
        out: Tensor = self.o_proj(merge_heads(mixed))
        return out

    def extra_repr(self) -> str:
        return f"{self.dim}, {self.heads} heads"


class QueryBlock(nn.Module):
    """A layer of the decoder: queries read each other, then the context; then a feed-forward part. Norms follow sums.

    Args:
        self_mixer: a `PlacedAttention` among queries.
        cross_mixer: one that reads the context, or a guided `DeformableAttention`.
        ff: the feed-forward part.
        norms: of the three, in this order.
        dropout: of what each part adds, in training.
    """

    def __init__(
        self,
        self_mixer: nn.Module,
        cross_mixer: nn.Module,
        ff: nn.Module,
        norms: tuple[nn.Module, nn.Module, nn.Module],
        *,
        dropout: float = 0.0,
    ) -> None:
        super().__init__()
        self.self_mixer, self.cross_mixer, self.ff = self_mixer, cross_mixer, ff
        self.self_norm, self.cross_norm, self.ff_norm = norms
        self.dropout = dropout

    def forward(
        self,
        y: Tensor,
        context: Tensor,
        *,
        queries: Tensor,
        places: Tensor | None = None,
        keep: Tensor | None = None,
        grid: tuple[int, int] | None = None,
    ) -> Tensor:
        y = self.self_norm(y + self._drop(self.self_mixer(y, places=queries)))
        crossed = self.cross_mixer(y, context, places=queries, context_places=places, keep=keep, grid=grid)
        y = self.cross_norm(y + self._drop(crossed))
        out: Tensor = self.ff_norm(y + self._drop(self.ff(y)))
        return out

    def _drop(self, y: Tensor) -> Tensor:
        return F.dropout(y, self.dropout, self.training) if self.dropout and self.training else y


class SinePlaces(nn.Module):
    """Sines and cosines of the share of a line's real pixels, `regard.positions.image_positions`.

    >>> SinePlaces(8)(torch.ones(1, 2, 3, dtype=torch.bool), torch.float32).shape
    torch.Size([1, 2, 3, 8])
    """

    def __init__(self, dim: int) -> None:
        super().__init__()
        if dim % 4:
            raise ValueError(f"dim: expected a multiple of 4 (sines and cosines of two axes), got {dim}")
        self.dim = dim

    def forward(self, real: Tensor, dtype: torch.dtype) -> Tensor:
        return image_positions(real, self.dim // 2, dtype=dtype)


class LearnedPlaces(nn.Module):
    """A learned vector of each column, then one of each row: ``(B, height, width, dim)``; `most` of either."""

    def __init__(self, dim: int, most: int = 50) -> None:
        super().__init__()
        if dim % 2:
            raise ValueError(f"dim: expected an even number, got {dim}")
        self.most = whole("most", most, 1)
        self.rows, self.columns = nn.Embedding(most, dim // 2), nn.Embedding(most, dim // 2)

    def forward(self, real: Tensor, dtype: torch.dtype) -> Tensor:
        batch, height, width = real.shape
        if max(height, width) > self.most:
            most = f"{self.most} by {self.most}"
            raise ValueError(f"images: expected a map of at most {most} places, got {height} by {width}")
        columns = self.columns(torch.arange(width, device=real.device)).expand(height, -1, -1)
        rows = self.rows(torch.arange(height, device=real.device))[:, None].expand(-1, width, -1)
        return torch.cat([columns, rows], -1).expand(batch, -1, -1, -1)


class BoxHead(nn.Module):
    """``sigmoid(MLP(y))``: three maps with ReLUs between them, to (centre x, centre y, width, height)."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(dim, dim), nn.Linear(dim, dim), nn.Linear(dim, 4)])

    def forward(self, y: Tensor) -> Tensor:
        for layer in self.layers[:-1]:
            y = F.relu(layer(y))
        return torch.sigmoid(self.layers[-1](y))


class DETR(Model):
    """Detections of a fixed number of queries in images ``(B, channels, Y, X)`` of any size.

    Args:
        backbone: from images to a map ``(B, C, height, width)``.
        neck: a convolution from C to ``dim`` channels.
        places: a `SinePlaces` or `LearnedPlaces` of ``dim``.
        encoder: one factory a layer, called with its number; `regard.models.PostNorm` round a `PlacedAttention` or a
            `DeformableAttention`.
        decoder: the same, of `QueryBlock`.
        queries: how many objects are found at most.
        classes: how many there are, without "no object".
        norm_between: whether each layer of the decoder gives its normed output to the next one, as transformers does
            where ``auxiliary_loss`` is on; otherwise norms stand before the heads alone.

    `objective` is the `SetLoss` that the options of a checkpoint state, or the published one. A batch of images of
    several sizes is padded on the right and below, and `keep` tells the real pixels.

    >>> from regard.models import MLP, PostNorm, activation
    >>> def encoding(i):
    ...     ff = MLP(16, 32, activation("relu"))
    ...     return PostNorm(PlacedAttention(16, 2), ff, nn.LayerNorm(16), nn.LayerNorm(16))
    >>> def decoding(i):
    ...     norms = (nn.LayerNorm(16), nn.LayerNorm(16), nn.LayerNorm(16))
    ...     return QueryBlock(PlacedAttention(16, 2), PlacedAttention(16, 2), MLP(16, 32, activation("relu")), norms)
    >>> parts = nn.Conv2d(3, 8, 8, stride=8), nn.Conv2d(8, 16, 1), SinePlaces(16)
    >>> model = DETR(*parts, [encoding], [decoding], queries=5, classes=3)
    >>> found = model(torch.randn(2, 3, 32, 40))
    >>> found.logits.shape, found.boxes.shape
    (torch.Size([2, 5, 4]), torch.Size([2, 5, 4]))
    """

    def __init__(
        self,
        backbone: nn.Module,
        neck: nn.Module,
        places: nn.Module,
        encoder: Sequence[Callable[[int], nn.Module]],
        decoder: Sequence[Callable[[int], nn.Module]],
        queries: int,
        classes: int,
        *,
        norm_between: bool = False,
    ) -> None:
        super().__init__()
        dim = getattr(neck, "out_channels", None)
        if not isinstance(dim, int):
            raise TypeError(f"neck: expected a convolution with out_channels, got {describe(neck)}")
        whole("decoder", len(decoder), 1)
        self.backbone, self.neck, self.places = backbone, neck, places
        self.encoder = nn.ModuleList([make(i) for i, make in enumerate(encoder)])
        self.decoder = nn.ModuleList([make(i) for i, make in enumerate(decoder)])
        self.number = whole("queries", queries, 1)
        self.queries = nn.Embedding(queries, dim)
        self.norm = nn.LayerNorm(dim)
        self.class_head = nn.Linear(dim, whole("classes", classes, 1) + 1)
        self.box_head = BoxHead(dim)
        self.norm_between = norm_between
        self.objective = SetLoss()

    def forward(self, images: Tensor, *, keep: Tensor | None = None) -> Detections:
        """What the last layer finds.

        Args:
            images: ``(B, channels, Y, X)``, in the parameters' dtype. What stands at padded pixels is read by
                convolutions that reach across the edge, as in the released code, which puts zeros there.
            keep: bool ``(B, Y, X)``, which pixels are real; all by default. An image without any gives finite answers
                that mean nothing.

        Raises:
            ValueError, TypeError: for tensors that do not fit.
        """
        return self._heads(self._layers(images, keep)[-1])

    def steps(self, images: Tensor, *, keep: Tensor | None = None) -> list[Detections]:
        """What every layer of the decoder finds, for a loss over all of them."""
        return [self._heads(y) for y in self._layers(images, keep)]

    def _heads(self, y: Tensor) -> Detections:
        return Detections(self.class_head(y), self.box_head(y))

    def _layers(self, images: Tensor, keep: Tensor | None) -> list[Tensor]:
        """The normed output of every layer of the decoder, (B, Q, dim)."""
        self._check(images, keep)
        features = self.neck(self.backbone(images))
        batch, _, *size = features.shape
        grid = (size[0], size[1])
        real = torch.ones(batch, *size, dtype=torch.bool, device=images.device)
        if keep is not None:  # the pixel that each place of the map begins with
            real = F.interpolate(keep[None].float(), size, mode="nearest")[0] > 0
        places = self.places(real, features.dtype).flatten(1, 2)
        x, seen = features.flatten(2).transpose(1, 2), None if keep is None else real.flatten(1)
        for layer in self.encoder:
            x = layer(x, places=places, keep=seen, grid=grid)
        queries = self.queries(torch.arange(self.number, device=x.device))
        y, found = torch.zeros_like(queries).expand(batch, -1, -1), []
        for layer in self.decoder:
            y = layer(y, x, queries=queries, places=places, keep=seen, grid=grid)
            if self.norm_between:
                y = self.norm(y)
            found.append(self.norm(y))
        return found

    def _check(self, images: Tensor, keep: Tensor | None) -> None:
        if not isinstance(images, Tensor) or images.ndim != 4 or 0 in images.shape[1:]:
            raise ValueError(f"images: expected (B, channels, height, width), got {describe(images)}")
        is_dense("images", images)
        check_dtype(self, "images", images)
        if keep is not None:
            is_bool("keep", keep, (3,), "(B, height, width)")
            if keep.shape != (images.shape[0], *images.shape[2:]):
                raise ValueError(f"keep: expected {(images.shape[0], *images.shape[2:])}, got {tuple(keep.shape)}")


def pixel_boxes(boxes: Tensor, sizes: Sequence[tuple[int, int]]) -> Tensor:
    """(left, top, right, bottom) in pixels of boxes ``(B, Q, 4)`` in shares; `sizes` are the images' (height, width).

    >>> pixel_boxes(torch.tensor([[[0.5, 0.5, 0.5, 1.0]]]), [(10, 20)]).tolist()
    [[[5.0, 0.0, 15.0, 10.0]]]
    """
    scale = torch.tensor([[w, h, w, h] for h, w in sizes], dtype=boxes.dtype, device=boxes.device)
    return corners(boxes) * scale[:, None]
