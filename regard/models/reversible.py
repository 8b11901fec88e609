"""Reversible layers: two streams whose values before a layer follow from those behind it.

    y1 = x1 + mixer(norm(x2)),   y2 = x2 + ff(norm(y1))          x2 = y2 - ff(norm(y1)),   x1 = y1 - mixer(norm(x2))

So a training step keeps the last layer's output alone and forms the others anew in the backward pass. Gomez, Ren,
Urtasun, Grosse 2017, arXiv:1707.04585; Kitaev, Kaiser, Levskaya 2020, arXiv:2001.04451, sec. 3.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.utils import _pytree as pytree

from regard.backends.call import inside_transform, may_be_transformed
from regard.models.blocks import PreNorm
from regard.models.cache import ModelCache

__all__ = ["ReversibleBlock", "ReversibleLayers"]


class ReversibleBlock(PreNorm):
    """``y1 = x1 + mixer(norm(x2))``, then ``y2 = x2 + ff(norm(y1))``, of ``x = [x1, x2]`` ``(B, T, 2 dim)``.

    A mixer that chooses what to read by sharp limits, as hashes do, may have a method ``choices(x)`` and take its
    result as an argument of that name: then a pass that runs it again on slightly rounded numbers chooses alike.
    """

    def forward(self, x: Tensor, **call: Any) -> Tensor:
        x1, x2 = x.chunk(2, -1)
        y1 = x1 + self.mixed(x2, **call)
        return torch.cat((y1, x2 + self.fed(y1)), -1)

    def mixed(self, x2: Tensor, **call: Any) -> Tensor:
        """What the mixer adds to the first stream."""
        return self._drop(self.mixer(self.mixer_norm(x2), **call), self.mixer_dropout)

    def fed(self, y1: Tensor) -> Tensor:
        """What the feed-forward part adds to the second stream."""
        return self._drop(self.ff(self.ff_norm(y1)), self.ff_dropout)

    def choices(self, x2: Tensor) -> dict[str, Any]:
        """What the mixer chooses of its input, as an argument of its call; nothing for most mixers."""
        choose: Any = getattr(self.mixer, "choices", None)
        return {} if choose is None else {"choices": choose(self.mixer_norm(x2))}


class ReversibleLayers(nn.Module):
    """A stack of reversible blocks over ``x`` twice: ``(B, T, dim)`` to ``[y1, y2]`` ``(B, T, 2 dim)``.

    Where a gradient is recorded, the memory of a step does not grow with the number of blocks: activations are formed
    anew from the output, which costs about a third more time and rounds them once (a relative 1e-7 in float32). Parts
    run twice then, so batch norms count twice. Compiled graphs, transforms of torch.func, blocks with hooks and calls
    whose further arguments want gradients take the ordinary pass; there are no second derivatives otherwise.

    Args:
        blocks: one factory a block, called with its number.
        recompute: False keeps activations as other layers do.

    >>> norms = lambda: (nn.LayerNorm(8), nn.LayerNorm(8))
    >>> from regard.nn import MultiHeadAttention
    >>> layers = ReversibleLayers([lambda i: ReversibleBlock(MultiHeadAttention(8, 2), nn.Linear(8, 8), *norms())] * 3)
    >>> layers(torch.zeros(2, 5, 8)).shape
    torch.Size([2, 5, 16])
    """

    def __init__(self, blocks: Sequence[Callable[[int], nn.Module]], *, recompute: bool = True) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([make(i) for i, make in enumerate(blocks)])
        self.recompute = recompute

    def forward(self, x: Tensor, *, cache: ModelCache | None = None, **call: Any) -> Tensor:
        """Both streams behind the last block; `call` goes to every mixer."""
        x = torch.cat((x, x), -1)
        if cache is None and self._recomputes(x, call):
            given, tree = pytree.tree_flatten(call)
            held = [item for item in given if isinstance(item, Tensor)]
            rest = [None if isinstance(item, Tensor) else item for item in given]
            parts = (self, _Given(rest, [isinstance(item, Tensor) for item in given], tree))
            out: Tensor = _Recomputed.apply(*parts, x, *held, *self.parameters())  # type: ignore[no-untyped-call]
            return out
        caches: Any = [None] * len(self.blocks) if cache is None else cache.layers
        for block, own in zip(self.blocks, caches, strict=True):
            x = block(x, **call) if own is None else block(x, cache=own, **call)
        return x

    def init_cache(
        self, batch: int, capacity: int, *, dtype: torch.dtype | None = None, device: torch.device | str | None = None
    ) -> ModelCache:
        """A cache of every block."""
        made = [block.init_cache(batch, capacity, dtype=dtype, device=device) for block in self.blocks]  # type: ignore[operator]
        return ModelCache(made)

    def _recomputes(self, x: Tensor, call: dict[str, Any]) -> bool:
        if not self.recompute or torch.compiler.is_compiling() or not torch.is_grad_enabled():
            return False
        if may_be_transformed() and inside_transform((x,)):
            return False
        own = list(self.parameters())
        if any(not isinstance(p, nn.Parameter) for p in own):  # others stand in their places for this call
            return False
        if any(isinstance(item, Tensor) and item.requires_grad for item in pytree.tree_leaves(call)):
            return False
        if any(block._forward_hooks or block._forward_pre_hooks for block in self.blocks):
            return False
        return x.requires_grad or any(p.requires_grad for p in own)


class _Recomputed(torch.autograd.Function):
    """The stack, of which the output is kept; each block's input is formed anew from its output."""

    @staticmethod
    def forward(ctx: Any, layers: ReversibleLayers, given: _Given, x: Tensor, *tensors: Tensor) -> Tensor:
        ctx.layers, ctx.given, ctx.memos, ctx.parameters = layers, given, [], tensors[given.count :]
        ctx.training = [module.training for module in layers.modules()]
        call = given.call(tensors[: given.count])
        for block in layers.blocks:
            assert isinstance(block, ReversibleBlock)
            x1, x2 = x.chunk(2, -1)
            memo: dict[str, Any] = {"choices": block.choices(x2), "autocast": _autocast(x.device.type)}
            memo["mixer"] = _generators(x.device)
            y1 = x1 + block.mixed(x2, **call, **memo["choices"])
            memo["ff"] = _generators(x.device)
            x = torch.cat((y1, x2 + block.fed(y1)), -1)
            ctx.memos.append(memo)
        ctx.save_for_backward(x, *tensors)
        return x

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        y, *tensors = ctx.saved_tensors  # an error where one was changed in place
        count, parameters = ctx.given.count, ctx.parameters
        call = ctx.given.call(tensors[:count])
        own = list(ctx.layers.parameters())
        if len(own) != len(parameters) or any(p is not q for p, q in zip(own, parameters, strict=True)):
            raise RuntimeError("ReversibleLayers: parameters were replaced between a call and its gradient")
        place = {id(p): n for n, p in enumerate(ctx.layers.parameters())}
        found: list[Tensor | None] = [None] * len(parameters)

        def branch(part: Any, given: Tensor, module: nn.Module, grad: Tensor, generators: Any, autocast: Any) -> Any:
            """(the branch's value, the gradient of what it was given); gradients of parameters are added to `found`."""
            leaf = given.detach().requires_grad_()
            with (
                torch.enable_grad(),
                _replayed(generators, given.device),
                modes(),
                _as_before(given.device.type, autocast),
            ):
                value = part(leaf)
            own = [p for p in module.parameters() if p.requires_grad]
            first, *others = torch.autograd.grad(value, [leaf, *own], grad.to(value.dtype), allow_unused=True)
            for p, g in zip(own, others, strict=True):
                if g is not None:
                    n, old = place[id(p)], found[place[id(p)]]
                    found[n] = g if old is None else old + g
            return value.detach(), torch.zeros_like(leaf) if first is None else first

        y1, y2 = y.chunk(2, -1)
        d1, d2 = grad.chunk(2, -1)
        modes = _training(ctx.layers, ctx.training)
        for block, memo in zip(reversed(ctx.layers.blocks), reversed(ctx.memos), strict=True):
            added, more = branch(block.fed, y1, _Part(block.ff_norm, block.ff), d2, memo["ff"], memo["autocast"])
            x2, d1 = y2 - added, d1 + more

            def mix(x: Tensor, block: Any = block, memo: Any = memo) -> Tensor:
                out: Tensor = block.mixed(x, **call, **memo["choices"])
                return out

            added, more = branch(mix, x2, _Part(block.mixer_norm, block.mixer), d1, memo["mixer"], memo["autocast"])
            y1, y2, d2 = y1 - added, x2, d2 + more
        return None, None, torch.cat((d1, d2), -1), *[None] * count, *found


@dataclass(frozen=True)
class _Given:
    """A call's further arguments apart from their tensors."""

    rest: list[Any]
    is_tensor: list[bool]
    tree: Any

    @property
    def count(self) -> int:
        return sum(self.is_tensor)

    def call(self, tensors: Sequence[Tensor]) -> dict[str, Any]:
        """The arguments, with these tensors in their places."""
        left = iter(tensors)
        items = [next(left) if held else item for held, item in zip(self.is_tensor, self.rest, strict=True)]
        call: dict[str, Any] = pytree.tree_unflatten(items, self.tree)
        return call


class _Part(nn.Module):
    """The modules of a branch, for their parameters."""

    def __init__(self, *modules: nn.Module) -> None:
        super().__init__()
        self.modules_ = nn.ModuleList(modules)


def _training(layers: nn.Module, modes: list[bool]) -> Any:
    """A context in which every module is in the mode that it had."""

    @contextlib.contextmanager
    def as_they_were() -> Iterator[None]:
        now = [(module, module.training) for module in layers.modules()]
        for (module, _), mode in zip(now, modes, strict=True):
            module.training = mode
        try:
            yield
        finally:
            for module, mode in now:
                module.training = mode

    return as_they_were


def _autocast(device: str) -> dict[str, Any] | None:
    """The autocast that a pass runs under, where the device has one."""
    if not torch.amp.is_autocast_available(device):
        return None
    return {"enabled": torch.is_autocast_enabled(device), "dtype": torch.get_autocast_dtype(device)}


def _as_before(device: str, autocast: dict[str, Any] | None) -> Any:
    return contextlib.nullcontext() if autocast is None else torch.autocast(device, **autocast)


def _generators(device: torch.device) -> tuple[Tensor, Tensor | None]:
    """Where torch's random numbers stand, so that dropout drops the same again."""
    return torch.get_rng_state(), torch.cuda.get_rng_state(device) if device.type == "cuda" else None


@contextlib.contextmanager
def _replayed(generators: tuple[Tensor, Tensor | None], device: torch.device) -> Iterator[None]:
    """Random numbers as they were; afterwards as they are now."""
    own, cuda = generators
    with torch.random.fork_rng([] if cuda is None else [device]):
        torch.set_rng_state(own)
        if cuda is not None:
            torch.cuda.set_rng_state(cuda, device)
        yield
