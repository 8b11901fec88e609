"""The commands and their options. What they do stands in the files named after what they are doing: filling.py, …"""

from __future__ import annotations

import json
import sys
from enum import Enum
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Column, Table

__all__ = ["command"]

app = typer.Typer(
    name="regard",
    help="Attention mechanisms behind one contract.",
    add_completion=False,
    pretty_exceptions_enable=False,
    no_args_is_help=False,
)


def _show_version(asked: bool) -> None:
    if asked:
        from regard import __version__

        print(f"regard {__version__}")
        raise typer.Exit


Version = Annotated[bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Print the version.")]


@app.callback()
def main(version: Version = False) -> None:
    """Attention mechanisms behind one contract."""


class Dtype(str, Enum):
    """The floating dtypes."""

    float64 = "float64"
    float32 = "float32"
    bfloat16 = "bfloat16"
    float16 = "float16"


def command() -> Any:
    """The command line as one object with a `main`."""
    return typer.main.get_command(app)


Model = Annotated[Path | None, typer.Option(help="A folder, or a .gguf file (default: SmolLM2-135M).")]
Temperature = Annotated[float, typer.Option(min=0, help="0 takes the most probable token.")]
TopK = Annotated[int | None, typer.Option(min=1, help="Draw among so many most probable tokens.")]
TopP = Annotated[float | None, typer.Option(min=0, max=1, help="Draw among the fewest that reach this probability.")]
MinP = Annotated[
    float | None, typer.Option(min=0, max=1, help="Draw among those at least this likely, beside the likeliest.")
]
Penalty = Annotated[float | None, typer.Option(help="Above 1, tokens that have come before come more rarely.")]
Seed = Annotated[int | None, typer.Option(min=0, help="Draws the same again.")]
Stop = Annotated[list[str] | None, typer.Option(help="A text to end before; may be given again.")]
OwnDtype = Annotated[Dtype | None, typer.Option(help="Of the weights (default: the checkpoint's).")]
Threads = Annotated[int | None, typer.Option(min=1, help="Threads for torch.")]
System = Annotated[str | None, typer.Option(help="What the model is told before the first message.")]


@app.command()
def generate(
    prompt: Annotated[str | None, typer.Argument(help="The text to continue (default: what is piped in).")] = None,
    file: Annotated[Path | None, typer.Option(help="Read the text from this file.")] = None,
    model: Model = None,
    max_tokens: Annotated[int, typer.Option(min=1, help="New tokens at most.")] = 48,
    temperature: Temperature = 0.0,
    top_k: TopK = None,
    top_p: TopP = None,
    min_p: MinP = None,
    repetition_penalty: Penalty = None,
    seed: Seed = None,
    stop: Stop = None,
    dtype: OwnDtype = None,
    backend: Annotated[str | None, typer.Option(help="An attention backend by name.")] = None,
    threads: Threads = None,
    chat: Annotated[bool, typer.Option("--chat", help="Take the prompt as one message to a chat model.")] = False,
    system: System = None,
    output: Annotated[Path | None, typer.Option(help="Write to this file instead of stdout, when all is done.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Give text, ids, finish and costs as JSON.")] = False,
    report: Annotated[bool, typer.Option(help="End with a table of what it cost, on stderr.")] = True,
) -> None:
    """Continue a text with a language model, and tell what that cost."""
    from regard.cli.generating import Generation, run

    if prompt is not None and file is not None:
        raise ValueError("prompt: expected a text or --file, got both")
    if system is not None and not chat:
        raise ValueError("--system: expected --chat beside it, for a plain text has no messages")
    if file is not None:
        try:
            prompt = file.read_text(encoding="utf-8")
        except UnicodeDecodeError as error:
            raise ValueError(f"--file: {file} is no text in UTF-8: {error.reason} at byte {error.start}") from None
    elif prompt is None:
        if sys.stdin.isatty():
            raise ValueError("no prompt: give one as an argument, with --file, or pipe a text in")
        prompt = sys.stdin.read()
    if not prompt:
        raise ValueError("no prompt: expected a text, got an empty one")
    run(
        Generation(
            prompt=prompt,
            model=model,
            max_tokens=max_tokens,
            temperature=temperature,
            top_k=top_k,
            top_p=top_p,
            min_p=min_p,
            repetition_penalty=repetition_penalty,
            seed=seed,
            stop=stop or [],
            dtype=None if dtype is None else dtype.value,
            backend=backend,
            threads=threads,
            chat=chat,
            system=system,
            output=output,
            as_json=as_json,
            report=report,
        )
    )


@app.command()
def chat(
    model: Model = None,
    system: System = None,
    template: Annotated[str | None, typer.Option(help="A chat template of the checkpoint, by its name.")] = None,
    context: Annotated[str, typer.Option(help="Tokens to make room for, such as 4096 or 8k (of 1024).")] = "4096",
    max_tokens: Annotated[int, typer.Option(min=1, help="Tokens of an answer at most.")] = 512,
    temperature: Temperature = 0.0,
    top_k: TopK = None,
    top_p: TopP = None,
    min_p: MinP = None,
    repetition_penalty: Penalty = None,
    seed: Seed = None,
    stop: Stop = None,
    dtype: OwnDtype = None,
    threads: Threads = None,
) -> None:
    """Talk with a chat model. Ctrl-C stops an answer; at the prompt it leaves, as /exit does; /reset starts anew."""
    from regard.cli.chatting import ChatRequest, run
    from regard.cli.counts import tokens_of

    sampling: dict[str, Any] = {"temperature": temperature, "top_k": top_k, "top_p": top_p, "min_p": min_p}
    sampling |= {"repetition_penalty": repetition_penalty, "seed": seed, "stop": stop or [], "max_tokens": max_tokens}
    own = None if dtype is None else dtype.value
    run(ChatRequest(model, system, template, tokens_of("--context", context), sampling, own, threads))


@app.command()
def detect(
    images: Annotated[list[Path], typer.Argument(help="Pictures: PNG, JPEG, and what else Pillow reads.")],
    model: Annotated[Path, typer.Option(help="A folder of a detector (model_type detr).")],
    threshold: Annotated[float, typer.Option(min=0, max=1, help="Show what is surer than this.")] = 0.7,
    output: Annotated[
        Path | None, typer.Option(help="Draw boxes into this .png; of several pictures, into this folder.")
    ] = None,
    threads: Annotated[int | None, typer.Option(min=1, help="Threads for torch.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")] = False,
) -> None:
    """Find objects in pictures: what each is, how sure that is, and where it is in pixels."""
    from regard.cli.detecting import DetectRequest, run

    run(DetectRequest(images, model, threshold, output, threads, as_json))


@app.command()
def classify(
    images: Annotated[list[Path], typer.Argument(help="Pictures: PNG, JPEG, and what else Pillow reads.")],
    model: Annotated[Path, typer.Option(help="A folder of a classifier of images (vit, deit, beit, swin, …).")],
    top: Annotated[int, typer.Option(min=1, help="Show that many classes of each picture.")] = 5,
    threads: Annotated[int | None, typer.Option(min=1, help="Threads for torch.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")] = False,
) -> None:
    """Say what pictures show: the most probable classes of a model, with their probabilities."""
    from regard.cli.classifying import ClassifyRequest, run

    run(ClassifyRequest(images, model, top, threads, as_json))


@app.command()
def fill(
    text: Annotated[
        str, typer.Argument(help="A text with the model's mask, [MASK] or <mask>, where words are asked for.")
    ],
    model: Annotated[Path, typer.Option(help="The folder of a model of masked words.")],
    top: Annotated[int, typer.Option(min=1, help="Words for each mask.")] = 5,
    dtype: Annotated[Dtype | None, typer.Option(help="Of the weights (default: the checkpoint's).")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")] = False,
) -> None:
    """Find the words behind the masks of a text, with their probabilities."""
    from regard.cli.filling import FillRequest, run

    run(FillRequest(text, model, top, None if dtype is None else dtype.value, as_json))


@app.command()
def check(
    target: Annotated[
        str,
        typer.Argument(help="A mechanism (regard list), or package.module:factory, which makes a module or Subject."),
    ],
    only: Annotated[list[str] | None, typer.Option(help="A check to run alone; may be given again.")] = None,
    dtype: Annotated[Dtype | None, typer.Option(help="Of weights and tokens (default: the subject's).")] = None,
    slow: Annotated[bool, typer.Option("--slow", help="Run what takes minutes too.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")] = False,
    junit: Annotated[Path | None, typer.Option(help="Write JUnit's XML into this file.")] = None,
) -> int:
    """Check a mechanism or anybody's module against the contract; exit code 1 where a promise is broken."""
    from regard.cli.checking import CheckRequest, run

    return run(CheckRequest(target, only or [], None if dtype is None else dtype.value, slow, as_json, junit))


@app.command("list")
def list_mechanisms(
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")] = False,
) -> None:
    """List every mechanism of the catalogue."""
    from regard.catalog import RECORDS

    rows = [
        {
            "name": record.name,
            "summary": record.summary,
            "kind": record.kind,
            "causal": record.causal,
            "source": record.source,
        }
        for record in RECORDS
    ]
    if as_json:
        print(json.dumps(rows, indent=2))
        return
    table = Table(Column("name", no_wrap=True), "in one line", "kind", "causal", "source", box=None, pad_edge=False)
    for row in rows:
        table.add_row(*(("yes" if cell else "no") if isinstance(cell, bool) else str(cell) for cell in row.values()))
    Console().print(table)


@app.command()
def explain(
    batch: Annotated[int, typer.Option(help="Rows.")] = 1,
    heads: Annotated[int, typer.Option(help="Query heads.")] = 8,
    kv_heads: Annotated[int | None, typer.Option(help="Key and value heads (default: as many as --heads).")] = None,
    queries: Annotated[int, typer.Option(help="Queries, Tq.")] = 1024,
    keys: Annotated[int | None, typer.Option(help="Keys, Tk (default: as many as --queries).")] = None,
    head_dim: Annotated[int, typer.Option(help="Channels of a query or key.")] = 64,
    value_dim: Annotated[int | None, typer.Option(help="Channels of a value (default: --head-dim).")] = None,
    dtype: Annotated[Dtype, typer.Option(help="Of q, k and v.")] = Dtype.float32,
    mask: Annotated[str | None, typer.Option(help="Such as 'causal & window(256)'; & | ~ combine.")] = None,
    bias: Annotated[str | None, typer.Option(help="alibi, t5, t5(32) or dense; + combines.")] = None,
    softcap: Annotated[float | None, typer.Option(help="Bound on the scores.")] = None,
    sink: Annotated[bool, typer.Option("--sink", help="With a sink logit per head.")] = False,
    dropout: Annotated[float, typer.Option(help="Share of weights dropped.")] = 0.0,
    q_start: Annotated[int | None, typer.Option(help="Key slot of query 0 (default: Tk - Tq).")] = None,
    grad: Annotated[bool, typer.Option("--grad", help="Gradients are wanted.")] = False,
    lse: Annotated[bool, typer.Option("--lse", help="The log-sum-exp is wanted too.")] = False,
    device: Annotated[str, typer.Option(help="Where the tensors are.")] = "cpu",
    backend: Annotated[str | None, typer.Option(help="A backend asked for by name.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")] = False,
) -> None:
    """Say which backend runs a call of `regard.attention`, and why the others do not."""
    from regard.cli.explaining import Tensors, explanation

    kv_heads = heads if kv_heads is None else kv_heads
    keys, value_dim = (queries if keys is None else keys), (head_dim if value_dim is None else value_dim)
    answer = explanation(
        Tensors(batch, heads, kv_heads, queries, keys, head_dim, value_dim, dtype.value, device, grad),
        mask,
        bias,
        sink,
        softcap=softcap,
        dropout_p=dropout,
        q_start=q_start,
        return_lse=lse,
        backend=backend,
    )
    if as_json:
        rows = [{"name": row.name, "chosen": row.chosen, "reason": row.reason} for row in answer.rows]
        print(json.dumps({"chosen": answer.chosen, "backends": rows}, indent=2))
        return
    print(answer)


@app.command()
def plan(
    model: Annotated[
        str, typer.Argument(help="A preset by name (regard plan --list), or the path of a config.json.")
    ] = "",
    context: Annotated[str, typer.Option(help="Tokens of a row, N, such as 4096 or 128k (of 1024).")] = "32768",
    batch: Annotated[int, typer.Option(help="Rows, B.")] = 1,
    dtype: Annotated[Dtype, typer.Option(help="Of the weights, and of caches without --cache-bits.")] = Dtype.bfloat16,
    cache_bits: Annotated[
        float | None, typer.Option(help="Bits of an element of keys, values or latents, such as 6 or 4.5; 0.01 to 64.")
    ] = None,
    plot: Annotated[Path | None, typer.Option(help="Draw memory over length into this .svg file.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of tables.")] = False,
    names: Annotated[bool, typer.Option("--list", help="List the presets instead.")] = False,
) -> None:
    """Tell what a model costs to run, without its weights: parameters, caches, states, work, and alternatives."""
    from regard.cli.counts import tokens_of
    from regard.cli.planning import PlanRequest, list_presets, run

    if names:
        list_presets(as_json)
        return
    run(PlanRequest(model, tokens_of("--context", context), batch, dtype.value, cache_bits, plot, as_json))
