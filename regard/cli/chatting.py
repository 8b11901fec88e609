"""`regard chat`: a conversation with a model in the terminal."""

from __future__ import annotations

import contextlib
import io
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from regard.cli.generating import load_model, use_threads
from regard.errors import CacheFull

__all__ = ["ChatRequest", "run"]

HELP = "Ctrl-C stops an answer, and at the prompt it leaves; so do /exit and the end of input. /reset starts anew."


@dataclass(frozen=True)
class ChatRequest:
    """With which model, and how."""

    model: Path | None
    system: str | None
    template: str | None
    context: int
    sampling: dict[str, Any]
    dtype: str | None
    threads: int | None


def run(request: ChatRequest) -> None:
    """Carry the conversation on until the user leaves: answers on stdout, all else on stderr."""
    from regard.models import Conversation

    use_threads(request.threads)
    if isinstance(sys.stdin, io.TextIOWrapper):
        sys.stdin.reconfigure(errors="replace")
    path, model = load_model(request.model, request.dtype)
    told: dict[str, Any] = {"system": request.system, "template": request.template, "context": request.context}
    try:
        talk = Conversation(model, **told, **request.sampling)
    except RuntimeError as error:
        if "allocate" not in str(error):
            raise
        raise ValueError(f"--context: there is no memory for a cache of {request.context} tokens") from None
    if sys.stdin.isatty():
        with contextlib.suppress(ImportError):
            import readline  # noqa: F401  line editing and history at the prompt
        print(f"{path.name}. {HELP}", file=sys.stderr)
    for text in _turns():
        if text == "/reset":
            talk.reset()
        elif text == "/help":
            print(HELP, file=sys.stderr)
        elif text.startswith("/"):
            print(f"regard: expected /exit, /reset or /help, got {text}", file=sys.stderr)
        elif text:
            _answer(talk, text)


def _turns() -> Iterator[str]:
    """What the user says, line by line, until they leave."""
    while True:
        try:
            text = input("> ") if sys.stdin.isatty() else sys.stdin.readline()
        except (EOFError, KeyboardInterrupt):
            print(file=sys.stderr)
            return
        if (not text and not sys.stdin.isatty()) or text.strip() in ("/exit", "/quit"):
            return
        yield text.strip()


def _answer(talk: Any, text: str) -> None:
    try:
        pieces = talk.say(text)
    except CacheFull:
        print(
            f"regard: there is no room for this turn in --context {talk.context} tokens; /reset starts anew",
            file=sys.stderr,
        )
        return
    try:
        for piece in pieces:
            sys.stdout.write(piece)
            sys.stdout.flush()
    except KeyboardInterrupt:
        pieces.close()
    sys.stdout.write("\n")
    sys.stdout.flush()
