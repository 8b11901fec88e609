"""Runs a chat template, which is a program from a checkpoint's author: in jinja2's sandbox, with bounded work.

A template sees its variables and nothing of the process. Every round of a loop, every call and every character that an
operator, a filter or a method makes counts as work, and work has a limit: an endless template ends with an error.
What templates may use beside jinja2's own is what transformers gives them.
"""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Callable, Mapping
from datetime import datetime
from typing import Any

from jinja2 import TemplateError, nodes
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.visitor import NodeTransformer

__all__ = ["SecurityError", "TemplateError", "render"]

MOST_WORK = 2**25
ROUND = 64
"""Work of one round of a loop, call or operation; that of a text is its characters."""
MOST_DIGITS = 10_000
WIDTHS = ("batch", "center", "indent", "round", "slice", "truncate", "wordwrap")  # filters that take a size
GROWING = ("center", "expandtabs", "join", "ljust", "replace", "rjust", "translate", "zfill")  # such methods of texts
WHOLE = ("escape", "format", "join", "pprint", "string", "tojson")  # filters that write out what they are given


def render(template: str, variables: Mapping[str, Any]) -> str:
    """What a template writes.

    Raises:
        jinja2.TemplateError: where it is no template, raises an error itself, reaches for what the sandbox forbids, or
            does not end within its limit of work.
    """
    sandbox = _Sandbox()
    tree = _Counted().visit(sandbox.parse(template))
    return sandbox.from_string(tree).render(**variables)


class _Generation(Extension):
    """``{% generation %}``, which marks what an assistant says, for training: what stands in it is written as it is."""

    tags = frozenset({"generation"})  # type: ignore[assignment]  # jinja2 asks only what is in it

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method("_said"), [], [], body).set_lineno(line)

    def _said(self, caller: Callable[[], str]) -> str:
        return caller()


class _Dict:
    """The global ``dict``, without the class's attributes."""

    def __call__(self, *args: Any, **kwargs: Any) -> dict[Any, Any]:
        return dict(*args, **kwargs)

    def fromkeys(self, *args: Any) -> dict[Any, Any]:
        return dict.fromkeys(*args)


class _Counted(NodeTransformer):
    """Makes loops and macros count their rounds, and ``~`` an operation that the sandbox sees."""

    def _with_round(self, node: Any) -> Any:
        self.generic_visit(node)
        count = nodes.Call(nodes.EnvironmentAttribute("count_round"), [], [], None, None)
        node.body.insert(0, nodes.ExprStmt(count).set_lineno(node.lineno))
        return node

    visit_For = visit_Macro = visit_CallBlock = _with_round

    def visit_Concat(self, node: nodes.Concat) -> nodes.Node:
        self.generic_visit(node)
        return nodes.Call(nodes.EnvironmentAttribute("join_texts"), node.nodes, [], None, None).set_lineno(node.lineno)


class _Sandbox(ImmutableSandboxedEnvironment):
    intercepted_binops = frozenset({"+", "*", "**", "%"})

    def __init__(self) -> None:
        super().__init__(
            trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols], finalize=self._finalized
        )
        self.work = 0
        self.filters["tojson"] = _tojson
        self.filters = {name: self._counted_filter(name, f) for name, f in self.filters.items()}
        self.globals |= {"raise_exception": _raise_exception, "strftime_now": _strftime_now, "dict": _Dict()}
        del self.globals["lipsum"]

    def spend(self, work: int) -> None:
        """Counts work, before it is done."""
        self.work += ROUND + work
        if self.work > MOST_WORK:
            raise SecurityError("it does not end within its limit of work")

    def count_round(self) -> None:
        self.spend(0)

    def join_texts(self, *parts: Any) -> str:
        self._spend_whole(parts)
        return "".join(map(str, parts))

    def _finalized(self, value: Any) -> Any:
        self._spend_whole(value)
        return value

    def _spend_whole(self, value: Any) -> None:
        """Counts what a value takes written out; what is held twice is written twice."""
        waiting = [value]
        while waiting:
            item = waiting.pop()
            if isinstance(item, Mapping):
                waiting += [*item.keys(), *item.values()]
            elif isinstance(item, (list, tuple, set, frozenset)):
                waiting += item
            self.spend(len(item) if isinstance(item, str) else 0)

    def _counted_filter(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)  # with its mark of what it is passed first
        def counted(*args: Any, **kwargs: Any) -> Any:
            given = [*args, *kwargs.values()]
            self.spend(sum(len(item) for item in given if isinstance(item, str)))
            if name in WHOLE:
                self._spend_whole([item for item in given if isinstance(item, (str, list, tuple, Mapping))])
            if name in WIDTHS or name in ("join", "replace"):
                self._spend_grown(given)
            if name == "format":
                _check_format(given[0])
            return function(*args, **kwargs)

        return counted

    def _spend_grown(self, given: list[Any]) -> None:
        """Counts what a text may become that is padded to a width, repeated, or put in the place of characters."""
        sizes = [len(g) for g in given if isinstance(g, (str, list, tuple))]
        sizes += [abs(g) for g in given if isinstance(g, int)]
        product = 1
        for size in sorted(sizes)[-2:]:
            product *= max(size, 1)
        self.spend(product)

    def call(__self, __context: Context, __obj: Any, *args: Any, **kwargs: Any) -> Any:
        self = __self
        # the sandbox wraps the methods that format
        owner = getattr(getattr(__obj, "__wrapped__", __obj), "__self__", None)
        self.spend(0)
        if isinstance(owner, str):
            name = getattr(__obj, "__name__", "")
            self.spend(len(owner))
            if name in GROWING:
                self._spend_grown([owner, *args, *kwargs.values()])
            if name in ("format", "format_map"):
                _check_format(owner)
                self._spend_whole([owner, args, kwargs])
        return super().call(__context, __obj, *args, **kwargs)

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        if operator == "%" and isinstance(left, str):
            _check_format(left)
            self._spend_whole((left, right))
        elif operator == "+":
            self.spend(sum(len(side) for side in (left, right) if isinstance(side, (str, list, tuple))))
        elif operator in ("*", "**") and isinstance(left, int) and isinstance(right, int):
            digits = left.bit_length() * (abs(right) if operator == "**" else 1) + right.bit_length()
            if digits > MOST_DIGITS:
                raise SecurityError("it asks for a number of too many digits")
        elif operator == "*":
            self._spend_grown([left, right])
        return super().call_binop(context, operator, left, right)


def _check_format(form: Any) -> None:
    """Raises for a width of many digits, or one that is an argument: what it makes would not be counted."""
    plain = re.sub(r"\{\{|\}\}|%%", "", str(form))
    if re.search(r"\d{5,}|%[^a-zA-Z%]*\*|\{[^{}]*\{", plain):
        raise SecurityError("it formats a text to a width that is too large, or not known beforehand")


def _tojson(
    x: Any, ensure_ascii: bool = False, indent: Any = None, separators: Any = None, sort_keys: bool = False
) -> str:
    if isinstance(indent, int) and indent > 64:
        raise SecurityError("it indents JSON by more than 64")
    return json.dumps(x, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str) -> None:
    raise TemplateError(message)


def _strftime_now(form: str) -> str:
    _check_format(form)
    return datetime.now().strftime(form)
