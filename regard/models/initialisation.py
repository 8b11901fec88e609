"""Weights of a model that is to be trained: every part's own start, and the normal distribution of its matrices."""

from __future__ import annotations

import inspect
from collections.abc import Iterator

import torch
from torch import Tensor, nn

from regard.checks import positive
from regard.models.blocks import Block, MixerOnly, Parallel, PreNorm
from regard.models.cross import CrossBlock, CrossPreNorm

__all__ = ["initialise"]

# The maps whose output is added to the residual stream, by the names that layers and feed-forward parts give them.
BRANCH_ENDS = ("o_proj", "out_proj", "down_proj")
# Blocks that add each branch to the stream itself. Where a norm follows the sum, or the branch, a factor would vanish.
ADDING = (PreNorm, Parallel, MixerOnly, CrossPreNorm)


def initialise(model: nn.Module, *, std: float = 0.02, depth_scaled: bool = True, linear_std: bool = True) -> nn.Module:
    """Gives every parameter and buffer of a model the value that training starts from, in place; returns the model.

    Every module's ``reset_parameters`` is called, the inner ones first. Then the matrices of linear maps and the tables
    of embeddings are drawn from a normal distribution, biases are 0, and what Mamba's steps, rates of decay, norms and
    the like start from stays what their mechanism publishes. So a decoder of pre-norm blocks starts at a loss of about
    the logarithm of its vocabulary, tied or not. It is also the last step after building without memory:

    >>> from regard.models import GatedMLP, PreNorm, activation
    >>> from regard.nn import GatedDeltaNet, RMSNorm
    >>> with torch.device("meta"):
    ...     block = PreNorm(GatedDeltaNet(8, 2), GatedMLP(8, 16, activation("silu")), RMSNorm(8), RMSNorm(8))
    >>> block = initialise(block.to_empty(device="cpu"))
    >>> all(bool(p.isfinite().all()) for p in block.parameters())
    True

    Args:
        model: any module; a part of the user's own that holds parameters needs a ``reset_parameters``, as torch's
            have one, and is given ``std=`` where that takes it.
        std: the standard deviation of matrices and tables.
        depth_scaled: the maps whose output is added to the residual stream are divided by the root of the number of
            branches in their stack, two a block (Radford et al. 2019, GPT-2). Blocks with a norm behind the sum or
            behind the branch are left out.
        linear_std: whether linear maps are drawn with `std`, or keep torch's own start, as Mamba's do.

    Raises:
        TypeError: for a part that holds parameters and cannot start them anew; nothing is changed.
        ValueError: for a tensor without memory (on the meta device), and an `std` out of range.
    """
    std = positive("std", std)
    parts = list(_inner_first(model, "", set()))
    for name, part in parts:
        _check(name or "the model itself", part)
    for _, part in parts:
        if not _owned(part):
            continue
        reset = part.reset_parameters
        assert callable(reset)
        if "std" in inspect.signature(reset).parameters:
            reset(std=std)
            continue
        reset()
        if isinstance(part, nn.Linear) and linear_std and _starts_as(part, nn.Linear):
            nn.init.normal_(part.weight, std=std)
        if isinstance(part, nn.Linear) and part.bias is not None and _starts_as(part, nn.Linear):
            nn.init.zeros_(part.bias)
        if isinstance(part, nn.Embedding) and _starts_as(part, nn.Embedding):
            nn.init.normal_(part.weight, std=std)
            part._fill_padding_idx_with_zero()
    if depth_scaled:
        for _, part in parts:
            stack = getattr(part, "layers", None)
            if isinstance(stack, nn.ModuleList):
                _scale_ends(stack)
    return model


def _inner_first(module: nn.Module, name: str, seen: set[nn.Module]) -> Iterator[tuple[str, nn.Module]]:
    """Every module once, behind its children: in the order in which constructors draw."""
    if module in seen:
        return
    seen.add(module)
    for key, child in module.named_children():
        yield from _inner_first(child, f"{name}.{key}" if name else key, seen)
    yield name, module


def _owned(part: nn.Module) -> dict[str, Tensor]:
    """The tensors that a module itself holds."""
    held = {**part._parameters, **part._buffers}
    return {name: tensor for name, tensor in held.items() if tensor is not None}


def _starts_as(part: nn.Module, kind: type[nn.Module]) -> bool:
    """Whether a module's start is that of torch's class, and no mechanism's own."""
    if "reset_parameters" in vars(part):
        return False
    return getattr(type(part), "reset_parameters", None) is getattr(kind, "reset_parameters", None)


def _check(name: str, part: nn.Module) -> None:
    owned = _owned(part)
    if not owned:
        return
    if not callable(getattr(part, "reset_parameters", None)):
        raise TypeError(
            f"model: expected parts with reset_parameters, got {name}, a {type(part).__name__}, which holds"
            f" {', '.join(owned)} and has none"
        )
    if any(tensor.is_meta for tensor in owned.values()):
        raise ValueError(
            f"model: expected tensors with memory, got {name} on the meta device; call to_empty(device=...) first"
        )


def _branches(block: nn.Module) -> int:
    """How many branches a block adds to the residual stream."""
    return 3 if isinstance(block, CrossBlock) else 2 if isinstance(block, Block) else 1


def _scale_ends(stack: nn.ModuleList) -> None:
    factor = sum(_branches(block) for block in stack) ** -0.5 if len(stack) else 1.0
    seen: set[nn.Parameter] = set()  # layers may share their parts
    for block in stack:
        if type(block) not in ADDING:
            continue
        for part in block.modules():
            for name in BRANCH_ENDS:
                end = getattr(part, name, None)
                weight = end.weight if isinstance(end, nn.Linear) else end
                if isinstance(weight, nn.Parameter) and weight not in seen:
                    seen.add(weight)
                    with torch.no_grad():
                        weight.mul_(factor)
