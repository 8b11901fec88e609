"""`Handed`: a mask that stays a rule as long as a transformers model only passes it on."""

from __future__ import annotations

import dataclasses
import operator
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree

from regard.masks import Dense, Mask

__all__ = ["Handed"]

CPU = torch.device("cpu")


@dataclasses.dataclass(eq=False)
class Handed:
    """A mask, where its queries stand, and the tensor that transformers' eager attention would get in its place.

    Models may treat it as that tensor, float ``(B, 1, Tq, Tk)`` with 0 where a query may attend and the dtype's minimum
    where it may not: index it, add to it, compare it, give it to torch's functions. Each of these gives plain tensors.
    Written in place, it is a tensor from then on.
    """

    mask: Mask
    q_start: int | Tensor
    sizes: tuple[int, int, int]  # of the batch, the queries, the keys
    dtype: torch.dtype = torch.float32
    device: torch.device = CPU
    free: bool = False  # allows everything and may meet any number of keys: eager attention would get no mask at all
    _tensor: Tensor | None = dataclasses.field(default=None, init=False, repr=False)
    _version: int = dataclasses.field(default=0, init=False, repr=False)

    # ---- what attention reads --------------------------------------------------------------------------------------

    def allowed(self) -> Tensor:
        """The rule alone as bool ``(B, 1, Tq, Tk)``."""
        batch, rows, columns = self.sizes
        dense = self.mask.dense(rows, columns, batch=batch, q_start=self.q_start).to(self.device)
        return dense.expand(batch, -1, -1, -1)

    def dense(self) -> Tensor:
        """The tensor, made when first asked for."""
        if torch.compiler.is_compiling():
            return self._made()
        if self._tensor is None:
            # an inference tensor would not count what is written into it
            with torch.inference_mode(False), torch.no_grad():
                self._tensor = self._made()
            self._version = self._tensor._version
        return self._tensor

    @property
    def is_rule(self) -> bool:
        """Whether nobody wrote into its tensor, or a view of that."""
        return self._tensor is None or self._tensor._version == self._version

    def _made(self) -> Tensor:
        zero = torch.zeros((), dtype=self.dtype, device=self.device)
        return torch.where(self.allowed(), zero, torch.finfo(self.dtype).min)

    def _rows(self, index: Any) -> Handed | None:
        """The rule for a range of query rows, where `index` takes just that, as for the tokens whose logits count."""
        if not isinstance(index, tuple) or torch.compiler.is_compiling() or not self.is_rule or _holds_rows(self.mask):
            return None
        if Ellipsis in [part for part in index if not isinstance(part, Tensor)]:
            if len(index) > 4 or index.count(Ellipsis) > 1:
                return None
            at = index.index(Ellipsis)
            index = (*index[:at], *[slice(None)] * (5 - len(index)), *index[at + 1 :])
        if len(index) > 4 or not all(isinstance(part, slice) and part.step is None for part in index):
            return None
        shape = self.shape
        bounds = [part.indices(size)[:2] for part, size in zip(index, shape, strict=False)]
        bounds += [(0, size) for size in shape[len(bounds) :]]
        first, last = bounds[2]
        if last <= first or any(bounds[axis] != (0, shape[axis]) for axis in (0, 1, 3)):
            return None
        return dataclasses.replace(self, q_start=self.q_start + first, sizes=(shape[0], last - first, shape[3]))

    # ---- what a model may ask of a tensor -------------------------------------------------------------------------

    @property
    def shape(self) -> torch.Size:
        """``(B, 1, Tq, Tk)``."""
        batch, rows, columns = self.sizes
        return torch.Size((batch, 1, rows, columns))

    @property
    def ndim(self) -> int:
        """Its number of axes."""
        return 4

    def dim(self) -> int:
        """Its number of axes."""
        return 4

    def size(self, dim: int | None = None) -> Any:
        """Its shape, or one of its sizes."""
        return self.shape if dim is None else self.shape[dim]

    def contiguous(self) -> Handed:
        """Itself."""
        return self

    def to(self, *args: Any, **options: Any) -> Any:
        """On another device, still a rule; of another dtype, a tensor."""
        if not self.is_rule:
            return self.dense().to(*args, **options)
        wanted = torch.empty(0, dtype=self.dtype, device=self.device).to(*args, **options)
        if wanted.dtype != self.dtype:
            return self.dense().to(*args, **options)
        if wanted.device == self.device:
            return self
        start = self.q_start.to(wanted.device) if isinstance(self.q_start, Tensor) else self.q_start
        return dataclasses.replace(self, mask=self.mask.to(wanted.device), q_start=start, device=wanted.device)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_") or not hasattr(Tensor, name):
            raise AttributeError(f"'{type(self).__name__}' object has no attribute '{name}'")
        if name.endswith("_"):
            self._refuse_writing_while_traced(name)
        return getattr(self.dense(), name)

    def __getitem__(self, index: Any) -> Any:
        rows = self._rows(index)
        return self.dense()[_plain(index)] if rows is None else rows

    def __setitem__(self, index: Any, value: Any) -> None:
        self._refuse_writing_while_traced("assignment")
        self.dense()[_plain(index)] = _plain(value)

    def __len__(self) -> int:
        return self.sizes[0]

    def __iter__(self) -> Iterator[Tensor]:
        return iter(self.dense())

    def __bool__(self) -> bool:
        return bool(self.dense())

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        args, kwargs = _plain(args), _plain(kwargs or {})
        return func(*args, **kwargs)

    def __deepcopy__(self, memo: dict[int, Any]) -> Handed:
        return dataclasses.replace(self) if self.is_rule else _written(self)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_tensor": None if self.is_rule else self._tensor, "_version": -1}

    def _refuse_writing_while_traced(self, name: str) -> None:
        if torch.compiler.is_compiling():
            raise NotImplementedError(
                f"attention_mask: the model writes into its mask ({name}) while it is compiled; "
                'compile it with attn_implementation="eager"'
            )


def _written(handed: Handed) -> Handed:
    """A copy of one that somebody wrote into."""
    copy = dataclasses.replace(handed)
    copy._tensor, copy._version = handed.dense().clone(), -1
    return copy


def _plain(tree: Any) -> Any:
    """The same nest of arguments with tensors."""
    return _pytree.tree_map(lambda each: each.dense() if isinstance(each, Handed) else each, tree)


def _holds_rows(mask: Mask) -> bool:
    """Whether a mask has a tensor that lies over the rows of its call."""
    return isinstance(mask, Dense) or any(_holds_rows(part) for part in mask.children())


def _operator(apply: Callable[..., Any]) -> Callable[..., Any]:
    def method(self: Handed, *others: Any) -> Any:
        return apply(self.dense(), *_plain(others))

    return method


def _reflected(apply: Callable[..., Any]) -> Callable[..., Any]:
    def method(self: Handed, other: Any) -> Any:
        return apply(_plain(other), self.dense())

    return method


def _in_place(apply: Callable[..., Any]) -> Callable[..., Any]:
    def method(self: Handed, other: Any) -> Any:
        self._refuse_writing_while_traced(apply.__name__)
        return apply(self.dense(), _plain(other))

    return method


for _name in ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "matmul", "and", "or", "xor"):
    _call = getattr(operator, f"__{_name}__")
    setattr(Handed, f"__{_name}__", _operator(_call))
    setattr(Handed, f"__r{_name}__", _reflected(_call))
    setattr(Handed, f"__i{_name}__", _in_place(getattr(operator, f"__i{_name}__")))
for _name in ("eq", "ne", "lt", "le", "gt", "ge", "neg", "pos", "abs", "invert"):
    setattr(Handed, f"__{_name}__", _operator(getattr(operator, f"__{_name}__")))
Handed.__hash__ = object.__hash__  # type: ignore[method-assign]  # as tensors, by identity
