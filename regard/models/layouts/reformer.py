"""Reformer: reversible layers of hashed and of local attention, positions on two axes (Kitaev et al. 2020,
arXiv:2001.04451).

A loaded model gives the numbers of the released code, chunks that leak included. With a cache every call computes with
the whole text so far, so that it gives what one call with that text gives. The rotations of a file without a
``hash_seed``, which that code draws anew at every call, are those of seed 0, and buckets that a file does not count
follow from the tokens of each call. ``lm_head.bias`` is kept and not added, as transformers 5 has it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from regard.caches import KVCache, KVView
from regard.coordinates import has_values
from regard.mixers.base import floating
from regard.mixers.reformer_published import Hashing, PublishedHashedAttention, PublishedLocalAttention
from regard.models.blocks import Embedding
from regard.models.config import Config
from regard.models.decoder import Decoder
from regard.models.encoder import Encoder
from regard.models.feedforward import ACTIVATIONS, MLP, activation
from regard.models.layouts.base import Layout, Plan
from regard.models.layouts.shared.options import read_eps
from regard.models.layouts.shared.rows import BOTH, WEIGHT, module_rows
from regard.models.reversible import ReversibleBlock, ReversibleLayers
from regard.models.tables import Ignored, Row, one_to_one, per_layer
from regard.ops.reformer_chunks import Chunks
from regard.positions import AxialPositions, LearnedPositions
from regard.tokens import resolve_tokens

__all__ = ["REFORMER"]

PREFIX = "reformer."
STORED = PREFIX + "encoder.layers.{i}"
OWN = "layers.0.blocks.{i}"
MAPS = {
    "local": {"query": "q_proj", "key": "k_proj", "value": "v_proj"},
    "lsh": {"query_key": "qk_proj", "value": "v_proj"},
}
NORMED = {
    "attention.layer_norm": "mixer_norm",
    "feed_forward.layer_norm": "ff_norm",
    "feed_forward.dense.dense": "ff.up_proj",
    "feed_forward.output.dense": "ff.down_proj",
}
HEAD = "lm_head"


class _DroppedNorm(nn.LayerNorm):
    """A layer norm, then dropout."""

    def __init__(self, dim: int, eps: float, dropout: float) -> None:
        super().__init__(dim, eps)
        self.dropout = dropout

    def forward(self, x: Tensor) -> Tensor:
        return F.dropout(super().forward(x), self.dropout, self.training and self.dropout > 0)


class _WordsHead(nn.Linear):
    """Logits by a table of its own; the bias of the file is kept, and not added."""

    unused: Tensor

    def __init__(self, dim: int, vocab: int) -> None:
        super().__init__(dim, vocab, bias=False)
        self.register_buffer("unused", torch.zeros(vocab))

    def reset_parameters(self, std: float = 0.02) -> None:
        """Starts the table anew, from N(0, std^2)."""
        nn.init.normal_(self.weight, std=std)
        if hasattr(self, "unused"):
            nn.init.zeros_(self.unused)

    def forward(self, hidden: Tensor, table: Tensor | None = None) -> Tensor:
        return super().forward(hidden)


class _Layers(ReversibleLayers):
    """The stack, which reads whole chunks of the whole text: padded behind it, and kept where there is a cache.

    Padding behind a text is read as the released code reads it. Where any stands before a token, each row is read
    alone, without padding.
    """

    def __init__(self, dim: int, blocks: Sequence[Callable[[int], nn.Module]], sizes: list[int]) -> None:
        super().__init__(blocks)
        self.dim, self.least, self.multiple = dim, min(sizes), math.lcm(*sizes)

    def forward(  # type: ignore[override]
        self,
        x: Tensor,
        *,
        keep: Tensor | None = None,
        positions: Tensor | None = None,
        segments: Tensor | None = None,
        cache: KVCache | None = None,
    ) -> Tensor:
        """Both streams of the call's tokens."""
        if segments is not None:
            raise ValueError("segments: expected None, the chunks of a Reformer reach over the ends of texts")
        resolve: Any = resolve_tokens if cache is None else cache.resolve_tokens
        layout = resolve(x.shape[0], x.shape[1], x.device, keep=keep, positions=positions, segments=None)
        new = x[:, None]
        view = KVView.alone(new, new[..., :0], layout) if cache is None else cache.extend(new, new[..., :0], layout)
        seen, known = view.k[:, 0], view.keep
        if known is not None and has_values(known) and bool((known[:, 1:] & ~known[:, :-1]).any()):
            out = seen.new_zeros(*seen.shape[:2], 2 * self.dim)
            rows = [self._whole(row[real][None], None)[0] for row, real in zip(seen, known, strict=True)]
            out[known] = torch.cat(rows)
        else:
            out = self._whole(seen, known)
        if cache is not None:
            cache.commit(*view.fresh)
        return out[:, seen.shape[1] - x.shape[1] :]

    def _whole(self, x: Tensor, keep: Tensor | None) -> Tensor:
        tokens = x.shape[1]
        more = -tokens % self.multiple if tokens > self.least else 0
        if more:
            keep = x.new_ones(x.shape[:2], dtype=torch.bool) if keep is None else keep
            x, keep = F.pad(x, (0, 0, 0, more)), F.pad(keep, (0, more))
        return super().forward(x, keep=keep)[:, :tokens]

    def init_cache(  # type: ignore[override]
        self, batch: int, capacity: int, *, dtype: torch.dtype | None = None, device: torch.device | str | None = None
    ) -> KVCache:
        """An empty cache for `batch` rows of up to `capacity` tokens: what enters the stack."""
        like = floating(self)
        return KVCache(batch, capacity, 1, self.dim, 0, dtype or like.dtype, device or like.device)


@dataclass(frozen=True)
class _Parts:
    """What a Reformer is made of."""

    dim: int
    vocab: int
    eps: float
    dropout: float
    causal: bool
    places: Callable[[], nn.Module]
    blocks: Sequence[Callable[[int], nn.Module]]
    chunks: list[int]

    def make(self, headed: bool) -> Decoder | Encoder:
        embedding = Embedding(nn.Embedding(self.vocab, self.dim), places=self.places(), dropout=self.dropout)
        norm = _DroppedNorm(2 * self.dim, self.eps, self.dropout)

        def layers(i: int) -> nn.Module:
            return _Layers(self.dim, self.blocks, self.chunks)

        if self.causal:
            return Decoder(embedding, [layers], norm, _WordsHead(2 * self.dim, self.vocab))
        head: Any = _WordsHead(2 * self.dim, self.vocab) if headed else None
        return Encoder(embedding, [layers], norm, head=head)


def _chunks(c: Config, kind: str, causal: bool) -> Chunks:
    size, before = c.count(f"{kind}_attn_chunk_length", 64), _number(c, f"{kind}_num_chunks_before", 1)
    after = _number(c, f"{kind}_num_chunks_after", 0)
    if causal and after:
        raise c.error(f"{kind}_num_chunks_after", after, "0 in a decoder")
    return Chunks(size, before, after)


def _number(c: Config, name: str, default: int) -> int:
    value = c.get(name, default)
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        raise c.error(name, value, "a whole number from 0 on")
    return value


def _hashing(c: Config, chunks: Chunks, places: int) -> Hashing:
    stated, seed = c.get("num_buckets"), c.get("hash_seed")
    factors = [stated] if isinstance(stated, int) and not isinstance(stated, bool) else stated
    even = isinstance(factors, list) and all(type(n) is int and n >= 2 and n % 2 == 0 for n in factors)
    if factors is not None and not (even and factors):
        raise c.error("num_buckets", stated, "an even number, a list of them, or null")
    if seed is not None and type(seed) is not int:
        raise c.error("hash_seed", seed, "a whole number or null")
    limit = 2 * max(int((places // chunks.size) ** 0.5), chunks.size)
    return Hashing(c.count("num_hashes", 1), factors, seed or 0, limit)


def _places(c: Config, dim: int, places: int) -> tuple[Callable[[], nn.Module], list[Row]]:
    stored = f"{PREFIX}embeddings.position_embeddings"
    if not c.flag("axial_pos_embds", True):
        for name in ("axial_pos_shape", "axial_pos_embds_dim", "axial_norm_std"):
            c.get(name)
        rows = one_to_one({f"{stored}.embedding.weight": "embedding.places.weight"})
        return partial(LearnedPositions, places, dim), rows
    shape, dims = c.get("axial_pos_shape", [64, 64]), c.get("axial_pos_embds_dim", [64, 192])
    for name, value in (("axial_pos_shape", shape), ("axial_pos_embds_dim", dims)):
        if not (isinstance(value, list) and len(value) == 2 and all(type(n) is int and n > 0 for n in value)):
            raise c.error(name, value, "two numbers above 0")
    if sum(dims) != dim:
        raise c.error("axial_pos_embds_dim", dims, f"two numbers whose sum is hidden_size={dim}")
    own = {"weights.0": "rows", "weights.1": "columns"}
    names = {f"{stored}.{theirs}": f"embedding.places.{ours}" for theirs, ours in own.items()}
    return partial(AxialPositions, *shape, *dims, std=c.amount("axial_norm_std", 1.0)), one_to_one(names)


def _reformer(c: Config) -> Plan:
    dim, heads = c.count("hidden_size", 256), c.count("num_attention_heads", 12)
    head_dim, places = c.count("attention_head_size", 64), c.count("max_position_embeddings", 4096)
    kinds = c.get("attn_layers", ["local", "lsh"] * 3)
    if not isinstance(kinds, list) or not kinds or set(kinds) - set(MAPS):
        raise c.error("attn_layers", kinds, "a list of 'local' and 'lsh'")
    c.only("num_hidden_layers", (len(kinds), None), "one for each of attn_layers")
    c.only("tie_word_embeddings", (False, None), "the head reads two streams")
    causal, dropout = c.flag("is_decoder", False), c.dropout("hidden_dropout_prob", 0.05)
    chunks = {kind: _chunks(c, kind, causal) for kind in MAPS}
    lost = {kind: c.dropout(f"{kind}_attention_probs_dropout_prob", p) for kind, p in (("local", 0.05), ("lsh", 0.0))}
    hashing, eps = _hashing(c, chunks["lsh"], places), read_eps(c, 1e-12, "layer_norm_eps")
    act, hidden = c.name("hidden_act", "relu", ACTIVATIONS), c.count("feed_forward_size", 512)
    table, rows = _places(c, dim, places)

    def mixer(kind: str) -> nn.Module:
        sizes, p = (dim, heads, head_dim, chunks[kind]), lost[kind]
        if kind == "local":
            return PublishedLocalAttention(*sizes, causal=causal, dropout=p)
        return PublishedHashedAttention(*sizes, hashing, causal=causal, dropout=p)

    def block(kind: str, i: int) -> nn.Module:
        ff = MLP(dim, hidden, nn.Sequential(nn.Dropout(dropout), activation(act)))
        norms = (nn.LayerNorm(dim, eps) for _ in range(2))
        return ReversibleBlock(mixer(kind), ff, *norms, mixer_dropout=dropout, ff_dropout=dropout)

    rows += one_to_one({f"{PREFIX}embeddings.word_embeddings.weight": "embedding.tokens.weight"})
    rows += module_rows({f"{PREFIX}encoder.layer_norm": "norm"}, BOTH)
    for i, kind in enumerate(kinds):
        maps = {f"{STORED}.attention.self_attention.{n}": f"{OWN}.mixer.{own}" for n, own in MAPS[kind].items()}
        maps[f"{STORED}.attention.output.dense"] = f"{OWN}.mixer.o_proj"
        both = {f"{STORED}.{n}": f"{OWN}.{own}" for n, own in NORMED.items()}
        rows += per_layer(module_rows(maps, WEIGHT) + module_rows(both, BOTH), i)
    headed = causal or bool(c.holds(f"{HEAD}.decoder.weight"))
    rows += one_to_one({f"{HEAD}.decoder.weight": "head.weight", f"{HEAD}.bias": "head.unused"} if headed else {})
    made = [partial(block, kind) for kind in kinds]
    used = [chunks[kind].size for kind in kinds]
    parts = _Parts(dim, c.count("vocab_size", 320), eps, dropout, causal, table, made, used)
    saved = "" if not headed else "ReformerModelWithLMHead" if causal else "ReformerForMaskedLM"
    return Plan(partial(parts.make, headed), rows, headed=saved)


REFORMER = Layout(
    "reformer",
    "ReformerModel",
    _reformer,
    prefix=PREFIX,
    headless=True,
    ignored=(
        Ignored("classifier.*", "a task's head"),
        Ignored("qa_outputs.*", "a task's head"),
        Ignored("*mask_value_float*", "old files store the scores of what is hidden"),
    ),
    inert=frozenset({"chunk_size_feed_forward", "chunk_size_lm_head", "classifier_dropout"}),
)
