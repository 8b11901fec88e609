"""This library's attention in the place of torch's in a whole model, and back."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import nn
from torch.nn.modules.linear import NonDynamicallyQuantizableLinear
from torch.nn.utils import parametrize

from regard.checks import describe
from regard.mixers.base import is_plain
from regard.nn.torch_attention import TorchMultiheadAttention

__all__ = ["SwapReport", "swap", "unswap"]


@dataclass(frozen=True)
class SwapReport:
    """What `swap` did to a model; print it to read it.

    Attributes:
        changed: names of the modules that run on `regard.attention` now; a shared one has several.
        left: names of the attention modules of torch that are as they were, with the reason.
    """

    changed: tuple[str, ...]
    left: dict[str, str]
    _modules: dict[str, nn.Module] = field(repr=False)

    def undo(self) -> None:
        """Let these modules be torch's again; those that are already stay so.

        Raises ValueError, with nothing undone, for a module whose class another library has changed since.
        """
        _restore(self._modules)

    def __str__(self) -> str:
        lines = [f"{len(self.changed)} swapped, {len(self.left)} left"]
        lines += [f"  swapped  {_shown(name)}" for name in self.changed]
        lines += [f"  left     {_shown(name)}: {reason}" for name, reason in self.left.items()]
        return "\n".join(lines)


def swap(model: nn.Module) -> SwapReport:
    """Run every `torch.nn.MultiheadAttention` of a model by `regard.attention`, in place.

    A module stays the object that it is, with its parameters, its mode and its names; only its class becomes
    `TorchMultiheadAttention`, which tells what is the same (everything but rows that are masked whole, dropout's bits,
    and when weights are taken). So optimisers, references and saved states go on, and shared modules stay shared. The
    model can be copied, pickled, compiled and exported; a copy is swapped too, and `unswap` takes it back.

    Left as they are, with a reason in the report: subclasses (quantised, sharded and parametrised ones too), modules
    with hooks, and those whose forward, weights or output projection another library has replaced.

    Args:
        model: any module; it may be the attention module itself.

    Returns:
        a `SwapReport`: what was changed, what was left and why; its ``undo()`` gives the modules back.

    Raises:
        TypeError: `model` is no module.

    >>> import torch
    >>> model = torch.nn.TransformerDecoderLayer(16, 4)
    >>> report = swap(model)
    >>> print(report)
    2 swapped, 0 left
      swapped  self_attn
      swapped  multihead_attn
    >>> report.undo()
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"model: expected a torch.nn.Module, got {describe(model)}")
    found: dict[str, nn.Module] = {}
    left: dict[str, str] = {}
    for name, module in model.named_modules(remove_duplicate=False):
        if not isinstance(module, nn.MultiheadAttention):
            if isinstance(module, torch.jit.ScriptModule) and module.original_name == "MultiheadAttention":
                left[name] = "it is compiled by TorchScript"
            continue
        reason = _reason_to_leave(module)
        if "_fsdp_wrapped_module" in name.split("."):
            reason = reason or "FullyShardedDataParallel holds its weights"
        if reason is None:
            found[name] = module
        else:
            left[name] = reason
    for module in found.values():
        module.__class__ = TorchMultiheadAttention
    return SwapReport(tuple(found), left, found)


def unswap(model: nn.Module) -> None:
    """Let every `TorchMultiheadAttention` of a model be `torch.nn.MultiheadAttention` again: of a copy, say.

    Raises ValueError, with nothing changed, where another library has changed such a module's class.
    """
    _restore(dict(model.named_modules()))


def _restore(modules: dict[str, nn.Module]) -> None:
    for name, module in modules.items():
        if isinstance(module, TorchMultiheadAttention) and type(module) is not TorchMultiheadAttention:
            raise ValueError(f"model: {_shown(name)} is a {_kind(module)} since it was swapped; undo that change first")
    for module in modules.values():
        if isinstance(module, TorchMultiheadAttention):
            plain: nn.Module = module
            plain.__class__ = nn.MultiheadAttention


def _reason_to_leave(module: nn.MultiheadAttention) -> str | None:
    """Why a call of `module` may do something else than torch's own code with its parameters."""
    if isinstance(module, TorchMultiheadAttention):
        return "it runs on regard.attention already"
    if any(map(parametrize.is_parametrized, module.modules())):
        return "its weights are parametrised"
    if type(module) is not nn.MultiheadAttention:
        return f"it is a {_kind(module)}, a subclass"
    if not is_plain(module, nn.MultiheadAttention):
        if "forward" in module.__dict__:
            return "its forward was replaced"
        plain = all(type(parameter) is nn.Parameter for parameter in module.parameters())
        return "it has hooks" if plain else "its weights are tensors of another class"
    if not is_plain(module.out_proj, NonDynamicallyQuantizableLinear):
        return f"its out_proj is more than a linear map ({_kind(module.out_proj)}), and torch reads the weight alone"
    return None


def _kind(module: nn.Module) -> str:
    return f"{type(module).__module__}.{type(module).__qualname__}"


def _shown(name: str) -> str:
    return name or "(the model itself)"
