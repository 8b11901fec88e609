"""Masks: which query may attend to which key, as small values that can be read, combined and drawn.

``True`` means *may attend*. ``i`` is the query's slot, ``j`` the key's (see `regard.coordinates`). Masks combine with
``&``, ``|`` and ``~``, compare by identity and never change. From a mask's one definition on positions come its dense
form (`Mask.dense`), its block layout (`Mask.block_layout`), FlexAttention's predicate (`Mask.mask_mod`) and a picture
(`Mask.draw`).

>>> from regard.masks import Causal, Prefix, Window
>>> print((Causal() | Prefix(2)).draw(4))
##..
##..
###.
####
>>> (Window(3) & Causal()).block_layout(6, 6, 2)[0, 0].tolist()  # 0 empty, 1 partial, 2 full
[[1, 0, 0], [1, 1, 0], [0, 1, 1]]
"""

from regard.masks.base import And, Mask, Not, Or, split_packing
from regard.masks.blocks import BlockColumns, Blocks, Global, RandomBlocks
from regard.masks.positional import Band, Causal, Dilated, Full, KeyLengths, Prefix, Window
from regard.masks.segments import Buckets, Segments
from regard.masks.tensor_masks import Dense, Edges, KeyPadding, Predicate, as_mask

__all__ = [
    "And",
    "Band",
    "BlockColumns",
    "Blocks",
    "Buckets",
    "Causal",
    "Dense",
    "Dilated",
    "Edges",
    "Full",
    "Global",
    "KeyLengths",
    "KeyPadding",
    "Mask",
    "Not",
    "Or",
    "Predicate",
    "Prefix",
    "RandomBlocks",
    "Segments",
    "Window",
    "as_mask",
    "split_packing",
]
