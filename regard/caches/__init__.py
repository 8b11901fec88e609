"""Caches: what a layer remembers of the tokens it has seen, owned by the caller and updated in place by the call.

`KVCache` holds keys and values of up to `capacity` tokens; `WindowCache` holds the latest ones in a ring; `LatentCache`
holds one short vector a token that all heads share; `StateCache` holds a state of fixed size. All caches share the
rules of `Cache`. What is stored is detached; storage is allocated once. A call first looks, and changes the cache only
when it has succeeded (`commit`). Caches are pytrees whose tensors are leaves.

>>> import torch, regard
>>> layer = regard.nn.MultiHeadAttention(16, 4, kv_heads=2, mask=regard.masks.Causal())
>>> cache = layer.init_cache(batch=1, capacity=8)
>>> x = torch.randn(1, 5, 16)
>>> y = torch.cat([layer(x[:, :3], cache=cache), layer(x[:, 3:], cache=cache)], 1)
>>> torch.allclose(y, layer(x), atol=1e-6), cache.length, cache.nbytes
(True, 5, 512)
"""

from regard.caches.base import Cache, KVView
from regard.caches.keys import KVCache, WindowCache
from regard.caches.latent import LatentCache
from regard.caches.states import StateCache

__all__ = ["Cache", "KVView", "KVCache", "LatentCache", "StateCache", "WindowCache"]
