"""What every layer shares: the call's signature and its checks, and the catalogue record."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor, nn
from torch.nn.modules import module as torch_modules
from torch.nn.modules.linear import NonDynamicallyQuantizableLinear
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from regard.checks import describe, is_dense, is_number_type

__all__ = ["Record", "Traits", "check_dtype", "check_tokens", "floating", "is_plain", "no_context"]

LINEAR = (nn.Linear, NonDynamicallyQuantizableLinear)


@dataclass(frozen=True)
class Traits:
    """What a layer is and promises, as its `traits` say. A check of the contract runs where its promise is given.

    Args:
        kind: the family in the tables: "softmax", "latent", "recurrent" or "kernel".
        causal: token t never depends on a later one.
        cached: it decodes with a cache from its ``init_cache``.
        counts_slots: its masks or biases count slots, so padding between real tokens moves them.
        context: it takes a context (cross-attention).
        off_kernels: why the CPU kernels do not run it, in a sentence; empty where they do.
    """

    kind: str
    causal: bool
    cached: bool
    counts_slots: bool = False
    context: bool = False
    off_kernels: str = ""


@dataclass(frozen=True)
class Record:
    """One mechanism in the catalogue: what it is, where it comes from, and how to build a layer of it.

    `build(dim, heads)` makes a layer with the published defaults; what else there is to know, the layer's own `traits`
    say.

    >>> from regard.nn import Retention
    >>> Record("mine", "retention under my name", "Sun et al. 2023", lambda dim, heads: Retention(dim, heads)).causal
    True
    """

    name: str
    summary: str
    source: str
    build: Callable[[int, int], nn.Module]

    @cached_property
    def traits(self) -> Traits:
        """Those of a small layer, built without memory."""
        with torch.device("meta"):
            layer = self.build(16, 4)
        traits = getattr(layer, "traits", None)
        if not isinstance(traits, Traits):
            raise TypeError(f"build: expected a layer with traits, got {type(layer).__name__}")
        return traits

    @property
    def kind(self) -> str:
        """The family in the tables."""
        return self.traits.kind

    @property
    def causal(self) -> bool:
        """Token t never depends on a later one."""
        return self.traits.causal

    @property
    def cached(self) -> bool:
        """It decodes with a cache."""
        return self.traits.cached

    @property
    def counts_slots(self) -> bool:
        """Its masks or biases count slots, so padding between real tokens moves them."""
        return self.traits.counts_slots

    @property
    def context(self) -> bool:
        """It takes a context (cross-attention)."""
        return self.traits.context

    @property
    def off_kernels(self) -> str:
        """Why the CPU kernels do not run it, in a sentence; empty where they do."""
        return self.traits.off_kernels


def check_tokens(layer: nn.Module, name: str, x: Tensor, dim: int, like: Tensor | None = None) -> None:
    """Raise unless `x` is a floating tensor (B, T, dim) that `layer` takes, with the batch size of `like`."""
    if not isinstance(x, Tensor) or not x.is_floating_point():
        raise TypeError(f"{name}: expected a float tensor (B, T, {dim}), got {describe(x)}")
    is_dense(name, x)
    is_number_type(name, x)
    if x.ndim != 3 or x.shape[-1] != dim:
        raise ValueError(f"{name}: expected (B, T, {dim}), got shape {tuple(x.shape)}")
    if like is not None and x.shape[0] != like.shape[0]:
        raise ValueError(f"{name}: expected {like.shape[0]} rows, as x has, got {x.shape[0]}")
    if not torch.compiler.is_compiling():
        check_dtype(layer, name, x)


def check_dtype(layer: nn.Module, name: str, x: Tensor) -> None:
    """Raise TypeError for tokens of a dtype that none of the layer's linear maps takes."""
    first = next(layer.parameters(), None)
    if first is None or first.dtype == x.dtype or torch.is_autocast_enabled(x.device.type):
        return
    own = {module.weight.dtype for module in layer.modules() if type(module) in LINEAR}
    if own and x.dtype not in own:
        kinds = " or ".join(sorted(str(dtype).removeprefix("torch.") for dtype in own))
        raise TypeError(f"{name}: expected {kinds}, as the layer's weights are, got {describe(x)}")


def no_context(layer: nn.Module, context: object) -> None:
    """Raise ValueError where a layer of one sequence is given a context."""
    if context is not None:
        raise ValueError(f"context: {type(layer).__name__} mixes one sequence and takes no context")


def floating(*modules: nn.Module) -> Tensor:
    """The first floating parameter or buffer of these modules, for its dtype and device.

    Where there is none, as in a quantised layer, an empty float32 tensor on the CPU: what such layers give.
    """
    for module in modules:
        for group in (module.parameters(), module.buffers()):
            for tensor in group:
                if tensor.is_floating_point():
                    return tensor
    return torch.empty(0, dtype=torch.float32, device="cpu")


def is_plain(module: nn.Module, kind: type[nn.Module]) -> bool:
    """Whether a call of `module` does what `kind` does with its parameters and no more: these may be read instead.

    Not so with a wrapper, an adapter, a quantised form, a hook (a module's own or one on all modules), and weights that
    are a tensor subclass of parts. Parametrised weights are read as they are meant.
    """
    own, hooks = type(module), (module._forward_hooks, module._forward_pre_hooks)
    if own.forward is not kind.forward or own.__call__ is not kind.__call__ or "forward" in module.__dict__:
        return False
    if any(hooks) or module._backward_hooks or module._backward_pre_hooks or torch_modules._has_any_global_hook():
        return False
    return not any(is_traceable_wrapper_subclass(parameter) for parameter in module.parameters())
