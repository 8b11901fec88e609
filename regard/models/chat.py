"""Conversations as a model's own chat template writes them."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from regard.errors import CheckpointError
from regard.models.files import is_file, is_folder, read_text

__all__ = [
    "Message",
    "chat_templates_of",
    "choose_template",
    "stated_in_files",
    "stated_in_metadata",
    "write_chat",
]

Message = Mapping[str, Any]
DEFAULT, WITH_TOOLS = "default", "tool_use"


def chat_templates_of(stated: object, where: str) -> dict[str, str]:
    """The templates that an option ``chat_template`` gives, by name: a text, or a list of named ones.

    Raises:
        CheckpointError: for anything else.
    """
    if stated is None:
        return {}
    if isinstance(stated, str):
        return {DEFAULT: stated}
    if isinstance(stated, Sequence) and all(
        isinstance(t, dict) and isinstance(t.get("name"), str) and isinstance(t.get("template"), str) for t in stated
    ):
        return {t["name"]: t["template"] for t in stated}
    raise CheckpointError(
        f"{where}: chat_template: expected a text, or a list of objects with a name and a template, got {stated!r:.200}"
    )


def choose_template(templates: Mapping[str, str], asked: str | None, tools: object) -> str:
    """The text of the template to use: a name or a text that was asked for, else the checkpoint's own."""
    if asked is not None and not isinstance(asked, str):
        raise TypeError(f"template: expected a name, a template's text, or None for the checkpoint's, got {asked!r}")
    if asked is not None:
        if asked in templates or "{" in asked:
            return templates.get(asked, asked)
        known = f"a name ({', '.join(templates)})" if templates else "a name (the checkpoint has none)"
        raise ValueError(f"template: expected {known} or a template's text, got {asked!r}")
    if not templates:
        raise ValueError(
            "template: the checkpoint states no chat_template; give one, or continue a plain text instead of a chat"
        )
    name = WITH_TOOLS if tools is not None and WITH_TOOLS in templates else DEFAULT
    if name not in templates:
        raise ValueError(f"template: expected one of {', '.join(templates)}, since none of them is the default")
    return templates[name]


def write_chat(
    template: str,
    messages: Sequence[Message],
    tokens: Mapping[str, str],
    *,
    add_generation_prompt: bool,
    tools: Sequence[Mapping[str, Any]] | None,
) -> str:
    """The text that a template makes of a conversation; see `Tokenizer.chat`.

    Args:
        tokens: what the template's variables ``bos_token``, ``eos_token`` and so on hold.
    """
    variables = {
        **tokens,
        "messages": _checked_messages(messages),
        "tools": _checked_tools(tools),
        "documents": None,
        "add_generation_prompt": add_generation_prompt,
    }
    from regard.models.chat_sandbox import SecurityError, TemplateError, render

    try:
        return render(template, variables)
    except SecurityError as e:
        raise ValueError(f"template: expected one that the sandbox lets run, got one it stops: {e.message}") from None
    except TemplateError as e:
        line = getattr(e, "lineno", None)
        if line is not None:
            raise ValueError(f"template: expected a jinja template, got an error in line {line}: {e.message}") from None
        raise ValueError(f"messages: the chat template does not take them: {e.message}") from None
    except RecursionError:
        raise ValueError("template: expected one that ends, got one whose macros call themselves too often") from None
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as e:  # the template's own operations
        raise ValueError(f"messages: the chat template fails on them: {type(e).__name__}: {e}") from None


def _checked_messages(messages: Sequence[Message]) -> list[dict[str, Any]]:
    """The messages as plain dictionaries of the template's own, without values that are None, as in transformers."""
    if not isinstance(messages, Sequence) or isinstance(messages, (str, bytes)):
        raise TypeError(f"messages: expected a list of messages, got {type(messages).__name__}")
    if not messages:
        raise ValueError("messages: expected at least one message, got none")
    checked = []
    for i, message in enumerate(messages):
        if not isinstance(message, Mapping):
            raise TypeError(f"messages[{i}]: expected an object with role and content, got {message!r}")
        given = {key: copy.deepcopy(value) for key, value in message.items() if value is not None}
        if not isinstance(given.get("role"), str):
            raise ValueError(f"messages[{i}]: expected a role as text, got {given.get('role')!r}")
        if "content" not in given and "tool_calls" not in given:
            raise ValueError(f"messages[{i}]: expected content, got {', '.join(given)} alone")
        if not isinstance(given.get("content", ""), (str, list, tuple)):
            raise TypeError(f"messages[{i}]: expected content as text or a list of parts, got {given['content']!r}")
        checked.append(given)
    return checked


def _checked_tools(tools: Sequence[Mapping[str, Any]] | None) -> list[dict[str, Any]] | None:
    if tools is None:
        return None
    if not isinstance(tools, Sequence) or not all(isinstance(tool, Mapping) for tool in tools):
        raise TypeError(f"tools: expected a list of JSON schemas as objects, or None, got {tools!r}")
    return [dict(copy.deepcopy(tool)) for tool in tools]


def stated_in_files(folder: Path) -> object:
    """The templates that stand in a folder's files of their own, as the option ``chat_template`` gives them, or None.

    Raises:
        CheckpointError: for a file that cannot be read.
    """
    more = folder / "additional_chat_templates"
    paths = sorted(more.glob("*.jinja")) if is_folder(more) else []
    named = {DEFAULT: folder / "chat_template.jinja"} | {path.stem: path for path in paths}
    return _as_option({name: read_text(path) for name, path in named.items() if is_file(path)})


def stated_in_metadata(metadata: Mapping[str, Any]) -> object:
    """The templates of a GGUF file's metadata, as the option ``chat_template`` gives them, or None."""
    key = "tokenizer.chat_template"
    named = {DEFAULT: metadata[key]} if key in metadata else {}
    named |= {k.removeprefix(f"{key}."): v for k, v in metadata.items() if k.startswith(f"{key}.")}
    return _as_option(named)


def _as_option(named: Mapping[str, Any]) -> object:
    if named.keys() <= {DEFAULT}:
        return named.get(DEFAULT)
    return [{"name": name, "template": template} for name, template in named.items()]
