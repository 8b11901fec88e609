"""Masks and biases written as text: `causal & window(256)`, `~band(-4, 4)`, `alibi`.

The text is parsed by Python's grammar and read by a table of names: nothing in it is evaluated.
"""

from __future__ import annotations

import ast
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from regard.names import nearest

__all__ = ["BIASES", "MASKS", "Shape", "read_bias", "read_mask"]


@dataclass(frozen=True)
class Shape:
    """The sizes of the call that a mask or bias belongs to."""

    batch: int
    heads: int
    queries: int
    keys: int


def _counts(value: Any) -> Any:
    """A number for every row, or one number per row."""
    import torch

    return torch.tensor(value) if isinstance(value, list) else value


def _padding(shape: Shape) -> Any:
    import torch

    from regard.masks import KeyPadding

    return KeyPadding(torch.ones(shape.batch, shape.keys, dtype=torch.bool))


def _dense(shape: Shape) -> Any:
    import torch

    return torch.ones(shape.queries, shape.keys, dtype=torch.bool)


def _mask(name: str) -> Callable[..., Any]:
    def make(shape: Shape, *arguments: Any) -> Any:
        from regard import masks

        return getattr(masks, name)(*map(_counts, arguments))

    return make


def _global(shape: Shape, *slots: int) -> Any:
    from regard.masks import Global

    return Global(slots)


def _random_blocks(shape: Shape, per_row: int, size: int = 64) -> Any:
    from regard.masks import RandomBlocks

    return RandomBlocks(per_row, size, max(shape.queries, shape.keys), heads=shape.heads)


def _packed(shape: Shape, *arguments: Any) -> Any:
    from regard.masks import Segments

    return Segments.from_lengths(*arguments)


# name: (how it is written, how it is made)
MASKS: dict[str, tuple[str, Callable[..., Any]]] = {
    "full": ("full", _mask("Full")),
    "causal": ("causal", _mask("Causal")),
    "window": ("window(256)", _mask("Window")),
    "dilated": ("dilated(window, step)", _mask("Dilated")),
    "band": ("band(left, right)", _mask("Band")),
    "prefix": ("prefix(64) or prefix([64, 32])", _mask("Prefix")),
    "key_lengths": ("key_lengths([100, 80])", _mask("KeyLengths")),
    "packed": ("packed([100, 28])", _packed),
    "global_tokens": ("global_tokens(0, 1)", _global),
    "random_blocks": ("random_blocks(per_row, size)", _random_blocks),
    "padding": ("padding", _padding),
    "dense": ("dense", _dense),
}


def _alibi(shape: Shape) -> Any:
    from regard.biases import Alibi

    return Alibi(shape.heads)


def _t5(shape: Shape, buckets: int = 32) -> Any:
    import torch

    from regard.biases import RelativeBuckets

    return RelativeBuckets(torch.zeros(buckets, shape.heads))


def _table(shape: Shape) -> Any:
    import torch

    return torch.zeros(()).expand(1, shape.heads, shape.queries, shape.keys)


BIASES: dict[str, tuple[str, Callable[..., Any]]] = {
    "alibi": ("alibi", _alibi),
    "t5": ("t5 or t5(buckets)", _t5),
    "dense": ("dense", _table),
}


def read_mask(text: str, shape: Shape) -> Any:
    """The mask that a text describes; `&`, `|`, `~` and parentheses combine.

    >>> read_mask("causal & window(2)", Shape(1, 1, 3, 3)).dense(3, 3)[0, 0].int().tolist()
    [[1, 0, 0], [1, 1, 0], [0, 1, 1]]
    """
    return _read(text, MASKS, "mask", shape)


def read_bias(text: str, shape: Shape) -> Any:
    """The bias that a text describes; `+` combines."""
    return _read(text, BIASES, "bias", shape)


def _read(text: str, table: dict[str, tuple[str, Callable[..., Any]]], what: str, shape: Shape) -> Any:
    forms = ", ".join(form for form, _ in table.values())
    combine: dict[type[ast.operator], Callable[[Any, Any], Any]] = {
        ast.BitAnd: lambda a, b: a & b,
        ast.BitOr: lambda a, b: a | b,
    }
    if what == "bias":
        combine = {ast.Add: lambda a, b: a + b}

    def visit(node: ast.expr) -> Any:
        if isinstance(node, ast.BinOp) and type(node.op) in combine:
            return combine[type(node.op)](_as_part(visit(node.left), what), _as_part(visit(node.right), what))
        if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Invert) and what == "mask":
            return ~_as_part(visit(node.operand), what)
        if isinstance(node, ast.Name) and node.id in table:
            return make(node.id, [])
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in table:
            if not node.keywords:
                return make(node.func.id, [number(argument) for argument in node.args])
        name = node.func if isinstance(node, ast.Call) else node
        meant = f" (did you mean {near!r}?)" if isinstance(name, ast.Name) and (near := nearest(name.id, table)) else ""
        raise ValueError(f"{what}: cannot read {ast.unparse(node)!r} in {text!r}{meant}; it may be {forms}")

    def make(name: str, arguments: list[Any]) -> Any:
        form, maker = table[name]
        try:
            return maker(shape, *arguments)
        except TypeError:  # the wrong number of arguments, or a list where a number belongs
            raise ValueError(f"{what}: {name} is written {form}, got {text!r}") from None

    def number(node: ast.expr) -> Any:
        try:
            value = ast.literal_eval(node)
        except ValueError:
            value = node
        plain = value if isinstance(value, list) else [value]
        if not all(item is None or (isinstance(item, int) and not isinstance(item, bool)) for item in plain):
            raise ValueError(f"{what}: arguments are whole numbers or lists of them, got {ast.unparse(node)!r}")
        return value

    try:
        tree = ast.parse(text, mode="eval")
    except (SyntaxError, ValueError):
        raise ValueError(f"{what}: cannot read {text!r}; it may be {forms}") from None
    return visit(tree.body)


def _as_part(value: Any, what: str) -> Any:
    """A bool tensor is a mask and a float one a bias, but only the objects combine."""
    from regard.biases import as_bias
    from regard.masks import as_mask

    return as_mask(value) if what == "mask" else as_bias(value)
