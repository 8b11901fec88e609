"""What a check is run on: a way to make a layer, its inputs, and the promises it gives."""

from __future__ import annotations

import copy
import dataclasses
import os
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from regard.mixers.base import Record
from regard.names import not_among
from regard.testing.call import Call, Called
from regard.testing.violation import close

__all__ = ["TOLERANCES", "Promises", "Subject", "Trace"]


# What two ways to the same numbers may differ by, of the largest entry: by another order of sums, and by the same one.
TOLERANCES: dict[torch.dtype, tuple[float, float]] = {
    torch.float64: (1e-10, 1e-12),
    torch.float32: (4e-5, 4e-6),
    torch.bfloat16: (4e-2, 2e-2),
    torch.float16: (6e-3, 3e-3),
}


@dataclass(frozen=True)
class Promises:
    """What anybody's module is said to be or do, beyond how it is called.

    Args:
        vocabulary: its tokens are ids below this number, instead of vectors.
        window: a token reads itself and the ``window - 1`` tokens before it, and none further back. A stack of n layers
            of windows W reads ``n * (W - 1) + 1``.
        averages: weights sum to one over what is read, and nothing else depends on where tokens stand; so a sequence of
            equal tokens gives at each what one token alone gives. True of softmax attention, rotary positions included;
            not of positions added to tokens, sinks, or sums without a division.
    """

    vocabulary: int | None = None
    window: int | None = None
    averages: bool = False

    def __post_init__(self) -> None:
        for name, least in (("vocabulary", 2), ("window", 1)):
            value = getattr(self, name)
            if value is not None and (not isinstance(value, int) or value < least):
                raise ValueError(f"{name}: expected a whole number from {least} on, got {value!r}")


@dataclass
class Trace:
    """What a check did to a subject so far: the tokens it drew last, and the largest difference it saw.

    "Largest" is in terms of what was allowed.
    """

    inputs: str | None = None
    effect: float | None = None
    allowed: float | None = None

    def saw(self, effect: float, allowed: float) -> None:
        """Remember a difference, where it is the largest so far."""
        if self.effect is None or self.allowed is None or effect * self.allowed > self.effect * allowed:
            self.effect, self.allowed = effect, allowed


@dataclass(frozen=True)
class Subject:
    """A layer under test.

    Args:
        name: how results call it.
        make: makes one layer that takes ``(B, T, dim)`` and the contract's keyword arguments.
        dim: its width.
        causal: token t never depends on a later one.
        cached: it decodes with a cache from its ``init_cache``.
        counts_slots: padding between real tokens may move its masks or biases (padding before or after never may).
        context: it is called with a context of ``layer.context_dim`` channels.
        exempt: checks that do not apply, each with the reason in one sentence.
        off_kernels: why the library's CPU kernels need not run it; empty where they must, being built.
        dtype: what its parameters and tokens are made in.
        call: how it is called, where it is not one of the library's: `Subject.around` makes such a subject.
        promises: what `Subject.around` is told of such a module besides.
        trace: what the check that runs has done so far.
    """

    name: str
    make: Callable[[], nn.Module]
    dim: int
    causal: bool = True
    cached: bool = True
    counts_slots: bool = True
    context: bool = False
    exempt: dict[str, str] = field(default_factory=dict)
    off_kernels: str = "it is not said to be made of the library's operations"
    dtype: torch.dtype = torch.float64
    call: Call | None = None
    promises: Promises = field(default_factory=Promises)
    trace: Trace = field(default_factory=Trace, compare=False, repr=False)

    @classmethod
    def of(cls, record: Record, dim: int = 16, heads: int = 4) -> Subject:
        """A catalogue record as a subject."""
        promises = dataclasses.asdict(record.traits)
        del promises["kind"]
        return cls(record.name, lambda: record.build(dim, heads), dim, **promises)

    @classmethod
    def around(
        cls,
        module: nn.Module | Callable[[], nn.Module],
        call: Call | None = None,
        *,
        name: str | None = None,
        dim: int | None = None,
        causal: bool | None = None,
        counts_slots: bool = True,
        dtype: torch.dtype | None = None,
        exempt: dict[str, str] | None = None,
        **promises: Any,
    ) -> Subject:
        """Anybody's module as a subject, with its own weights, in its own dtype.

        Each check works on a copy. What is not said, in `call` or here, is not checked.

        Args:
            module: the module, or a function that makes one (then a copy is a new one).
            call: how it is called; by default as `Call.read` finds in the names of its arguments.
            name: how results call it; the name of its class by default.
            dim: the width of its tokens; by default what the module says itself.
            causal: token t never depends on a later one; by default where the call tells the module to be causal.
            counts_slots: padding between real tokens may move what it computes.
            dtype: of weights and tokens; by default that of the first parameter.
            exempt: checks that do not apply, each with the reason in one sentence.
            promises: `vocabulary`, `window` and `averages`: see `Promises`.

        Raises TypeError for what is no module or makes none and for unknown promises, ValueError where the width cannot
        be told.
        """
        first: Any = module if isinstance(module, nn.Module) or not callable(module) else module()
        if not isinstance(first, nn.Module):
            raise TypeError(f"module: expected a torch.nn.Module or what makes one, got {type(first).__name__}")
        given = Call.read(first) if call is None else call
        known = [one.name for one in dataclasses.fields(Promises)]
        for one in promises:
            if one not in known:
                raise TypeError(f"promises: {not_among(one, known)}")
        rest = Promises(**promises)
        if isinstance(module, nn.Module):
            try:
                copy.deepcopy(module)
            except Exception as error:
                raise TypeError(f"module: it cannot be copied ({error}); give a function that makes it") from error
        return cls(
            type(first).__name__ if name is None else name,
            lambda: Called(copy.deepcopy(module) if isinstance(module, nn.Module) else module(), given),
            0 if rest.vocabulary is not None else _width(first) if dim is None else dim,
            causal=given.causal is not None if causal is None else causal,
            cached=given.cache is not None,
            counts_slots=counts_slots,
            exempt=exempt or {},
            dtype=_dtype(first) if dtype is None else dtype,
            call=given,
            promises=rest,
        )

    def at(self, dtype: torch.dtype) -> Subject:
        """The same subject in another dtype."""
        return dataclasses.replace(self, dtype=dtype)

    @property
    def padded(self) -> bool:
        """Whether it takes flags of the padding among its own tokens."""
        return not self.context and (self.call is None or self.call.padding is not None)

    @property
    def lengths_alone(self) -> bool:
        """Whether it is told of padding by lengths, so that padding can only follow the real tokens."""
        return self.call is not None and self.call.padding is not None and self.call.padding.means == "lengths"

    @property
    def tolerance(self) -> float:
        """What two ways to the same numbers may differ by, of the largest entry."""
        return TOLERANCES[self.dtype][0]

    def close(self, what: str, got: Tensor, want: Tensor, *, same_order: bool = False) -> None:
        """Raise `ContractViolation` unless two tensors agree as closely as the dtype lets two ways to them agree.

        `same_order`: both were summed in the same order.
        """
        self.trace.saw(*close(what, got, want, TOLERANCES[self.dtype][same_order]))

    @property
    def device(self) -> torch.device:
        """The device that the environment variable REGARD_DEVICE names; the CPU by default."""
        return torch.device(os.environ.get("REGARD_DEVICE", "cpu"))

    def layer(self, seed: int = 0) -> nn.Module:
        """A fresh layer in evaluation mode with random parameters, biases and norms included.

        Anybody's module keeps its own weights, but for other seeds than 0.
        """
        layer = self.make()
        if self.call is not None and seed == 0:
            return (layer if _dtype(layer) == self.dtype else layer.to(self.dtype)).to(self.device).eval()
        generator = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for parameter in layer.parameters():
                noise = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
                wide = parameter.ndim > 1
                parameter.copy_(noise / parameter.shape[-1] ** 0.5 if wide else parameter.double() + 0.3 * noise)
        return layer.to(self.device, self.dtype).eval()

    def tokens(self, batch: int, length: int, seed: int = 1) -> Tensor:
        """Random tokens (B, T, dim), or ids (B, T) below the vocabulary."""
        self.trace.inputs = f"tokens({batch}, {length}, seed={seed})"
        generator = torch.Generator().manual_seed(seed)
        if self.promises.vocabulary is not None:
            ids = torch.randint(self.promises.vocabulary, (batch, length), generator=generator)
            return ids.to(self.device)
        tokens = torch.randn(batch, length, self.dim, generator=generator, dtype=torch.float64)
        return tokens.to(self.device, self.dtype)

    def others(self, x: Tensor, size: float = 1.0) -> Tensor:
        """As many other tokens as `x` has, `size` times as large where they are vectors."""
        if self.promises.vocabulary is not None:
            return (x + torch.randint_like(x, 1, self.promises.vocabulary)) % self.promises.vocabulary
        return size * torch.randn_like(x)

    def context_for(self, layer: Any, x: Tensor, length: int = 7) -> dict[str, Tensor]:
        """``{"context": …}`` where the layer takes one, the same in every row, else nothing."""
        if not self.context:
            return {}
        generator = torch.Generator().manual_seed(2)
        one = torch.randn(1, length, layer.context_dim, generator=generator, dtype=torch.float64)
        return {"context": one.to(x.device, x.dtype).expand(x.shape[0], -1, -1)}

    def run(self, layer: nn.Module, x: Tensor, **arguments: Any) -> Tensor:
        """Call the layer, with a context where it takes one."""
        if "context" not in arguments:
            arguments |= self.context_for(layer, x)
        out: Tensor = layer(x, **arguments)
        return out

    def seeded(self, layer: nn.Module, x: Tensor, seed: int = 0) -> Tensor:
        """`run` on a copy of the layer, with torch's random numbers set: dropout and the like draw the same again."""
        with torch.random.fork_rng(devices=[x.device] if x.is_cuda else []):
            torch.manual_seed(seed)
            return self.run(copy.deepcopy(layer), x)


def _dtype(module: nn.Module) -> torch.dtype:
    found = (one.dtype for one in module.parameters() if one.is_floating_point())
    return next(found, torch.get_default_dtype())


def _width(module: nn.Module) -> int:
    """What the module, its config or its first part that says so calls its width."""
    names = ("dim", "embed_dim", "d_model", "hidden_size", "input_size", "in_features")
    for part in module.modules():
        for holder in (part, getattr(part, "config", None)):
            for name in names:
                if isinstance(found := getattr(holder, name, None), int):
                    return found
    raise ValueError(f"dim: expected the width of the tokens, for {type(module).__name__} does not say it")
