"""The recurrent family against transformers' plain-torch code, and against softmax attention over the length.

    python benchmarks/bench_recurrence.py [--threads 1 2] [--rounds 5] [--only TEXT] [--longest 65536] [--write]

A ratio is the peer's time over regard's (above 1: regard is faster), the median over rounds that take turns in one
process; on one thread CPU time counts, on more wall time. `--write` puts tables into docs/benchmarks.md, and the plot
of time against length beside it. Run it on a machine that does nothing else.
"""

from __future__ import annotations

import argparse
import resource
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import page
import torch
import torch.nn.functional as F
from bench_attention import Row, measure
from bench_machine import best, operations
from torch import Tensor

import regard
from regard.analysis.plot import lines as drawn
from regard.masks import Causal, Window
from regard.transitions import Decay, Delta

HEADS = 8
LENGTHS = (256, 512, 1024, 2048, 4096, 8192, 16384, 32768, 65536)
SHORT = (32, 64, 96, 128, 160, 192, 256, 384, 512)
SELECTIVE = (4096, 2048, 16)  # tokens, channels, states


def arguments(length: int, dim: int, grad: bool = False, batch: int = 1) -> dict[str, Tensor]:
    q, k, v = (torch.randn(batch, HEADS, length, dim) for _ in range(3))
    found = {"q": q, "k": F.normalize(k, dim=-1), "v": v, "beta": torch.rand(batch, HEADS, length)}
    found |= {"scalar": -torch.rand(batch, HEADS, length), "channel": -torch.rand(batch, HEADS, length, dim)}
    return {name: x.requires_grad_(grad) for name, x in found.items()}


def ours(given: dict[str, Tensor], kind: str, backend: str | None = None, **options: object) -> Callable[[], Tensor]:
    """One call: "gdn", "kda", "ssd" (a scalar decay alone)."""
    decay = given["channel" if kind == "kda" else "scalar"]
    transition = Decay(decay) if kind == "ssd" else Delta(given["beta"], decay)
    q, k, v = (given[name] for name in "qkv")
    return lambda: regard.recurrence(q, k, v, transition, backend=backend, **options)[0]


def theirs(given: dict[str, Tensor], kind: str, step: bool = False) -> Callable[[], Tensor]:
    """The same by transformers' functions, on tensors in its own layout."""
    from transformers.models.kimi_linear import modeling_kimi_linear as kimi
    from transformers.models.qwen3_next import modeling_qwen3_next as qwen

    names = ("q", "k", "v", "channel" if kind == "kda" else "scalar", "beta")
    q, k, v, g, beta = (given[name].detach().transpose(1, 2).contiguous() for name in names)
    inputs = [x.requires_grad_(given["q"].requires_grad) for x in (q, k, v, g, beta)]
    if step:
        function = kimi.recurrent_kimi_delta_attention if kind == "kda" else qwen.torch_recurrent_gated_delta_rule
        state = torch.randn(q.shape[0], HEADS, q.shape[3], v.shape[3])
        return lambda: function(*inputs, initial_state=state, output_final_state=True)[0]
    function = kimi.chunk_kimi_delta_attention if kind == "kda" else qwen.torch_chunk_gated_delta_rule
    return lambda: function(*inputs, initial_state=None, output_final_state=False)[0]


def compared(kind: str, length: int, dim: int, backend: str | None = None, grad: bool = False) -> Row:
    given = arguments(length, dim, grad)
    mine, peer = ours(given, kind, backend), theirs(given, kind)
    label = {"gdn": "Gated DeltaNet", "kda": "KDA"}[kind] + (f" ({backend})" if backend else "")
    name = f"{label} forward{' + backward' if grad else ''}, T={length}, D={dim}"
    if not grad:
        return Row(name, "transformers", mine, peer)
    names = ("q", "k", "v", "beta", "channel" if kind == "kda" else "scalar")
    leaves, cotangent = [given[n] for n in names], torch.randn_like(given["v"])
    cells = [cell.cell_contents for cell in peer.__closure__ or ()]
    others = next(c for c in cells if isinstance(c, list))
    turned = cotangent.transpose(1, 2).contiguous()
    return Row(
        name,
        "transformers' autograd",
        lambda: torch.autograd.grad(mine(), leaves, cotangent),
        lambda: torch.autograd.grad(peer(), others, turned),
    )


def step(kind: str, batch: int) -> Row:
    given = arguments(1, 128, batch=batch)
    state = torch.randn(batch, HEADS, 128, 128)
    label = {"gdn": "Gated DeltaNet", "kda": "KDA"}[kind]
    return Row(
        f"one decode step, {label}, batch {batch}, D=128, in place",
        "transformers' recurrent code",
        ours(given, kind, state=state, state_out=state),
        theirs(given, kind, step=True),
    )


def state_space() -> Row:
    """Mamba-2 with 8 heads of 64 channels, 128 states, one group."""
    from transformers.models.mamba2.modeling_mamba2 import mamba2_chunk_scan

    x, dt, a = torch.randn(1, 4096, HEADS, 64), torch.rand(1, 4096, HEADS), -torch.rand(HEADS)
    b, c = (torch.randn(1, 4096, 1, 128) for _ in range(2))

    def mine() -> Tensor:
        q, k, v = (each.transpose(1, 2) for each in (c, b, x * dt.unsqueeze(-1)))
        return regard.recurrence(q, k, v, Decay((dt * a).transpose(1, 2)), scale=1.0)[0]

    return Row(
        "Mamba-2 SSD forward, T=4096, 64 channels x 128 states",
        "transformers",
        mine,
        lambda: mamba2_chunk_scan(x, dt, a, b, c, chunk_size=256),
    )


def selective_pair() -> tuple[Callable[[], object], Callable[[], object]]:
    from transformers.models.mamba.modeling_mamba import mamba_selective_scan

    tokens, width, states = SELECTIVE
    x, dt, a = torch.randn(1, tokens, width), torch.rand(1, tokens, width), -torch.rand(width, states)
    b, c = (torch.randn(1, tokens, states) for _ in range(2))
    turned = [each.transpose(1, 2).contiguous() for each in (x, dt, b, c)]

    def peer() -> object:
        return mamba_selective_scan(turned[0], turned[1], a, turned[2], turned[3])

    return lambda: regard.selective_scan(x, dt, a, b, c), peer


def selective() -> Row:
    tokens, width, states = SELECTIVE
    return Row(
        f"selective scan forward, T={tokens}, {width} channels x {states} states", "transformers", *selective_pair()
    )


def linear_unit() -> Row:
    """RG-LRU's scan of width 2560."""
    from transformers.models.recurrent_gemma.modeling_recurrent_gemma import RecurrentGemmaRglru

    x, a = torch.randn(1, 4096, 2560), torch.rand(1, 4096, 2560)
    reset = torch.zeros(1, 4096, 1, dtype=torch.bool)
    log_a = a.log()
    return Row(
        "RG-LRU scan, T=4096, width 2560",
        "transformers' loop",
        lambda: regard.scan(log_a, x),
        lambda: RecurrentGemmaRglru._rnn_scan(None, x, a, reset, None),
    )


def rows() -> Iterator[Callable[[], Row]]:
    for dim in (64, 128):
        yield lambda dim=dim: compared("gdn", 4096, dim)
        yield lambda dim=dim: compared("gdn", 4096, dim, grad=True)
    yield lambda: compared("kda", 512, 64)
    yield lambda: compared("gdn", 4096, 64, "chunked")
    yield lambda: compared("kda", 512, 64, "chunked")
    yield state_space
    yield selective
    yield linear_unit
    for kind in ("gdn", "kda"):
        for batch in (1, 4):
            yield lambda kind=kind, batch=batch: step(kind, batch)


# ---- against softmax attention, and alone ----------------------------------------------------------------------------


def facts(rounds: int) -> list[str]:
    """Crossovers, shares of the multiply-add rate, KDA beside Gated DeltaNet, the scaling with length; one thread."""
    torch.set_num_threads(1)
    lines = ["| what | value |", "|---|---|"]
    for kind, dim in (("gdn", 64), ("kda", 64), ("ssd", 64), ("gdn", 128)):
        lines.append(f"| smallest T where {NAMES[kind]} beats SDPA-causal, D={dim} | {crossover(kind, dim, rounds)} |")
    for dim in (64, 128):
        given, peak = arguments(4096, dim), operations(torch.float32)
        own, plain = best([ours(given, "gdn"), peak], rounds)
        share = HEADS * 4096 * (4 * 32 * dim + 6 * dim * dim) / own / (peak() / plain)
        lines.append(f"| share of the multiply-add rate, Gated DeltaNet forward, T=4096, D={dim} | {share:.0%} |")
    given = arguments(4096, 64)
    gdn, kda = best([ours(given, "gdn"), ours(given, "kda")], rounds)
    lines.append(f"| KDA's time over Gated DeltaNet's, T=4096, D=64 | {kda / gdn:.2f} |")
    short, long = best([ours(arguments(8192, 64), "gdn"), ours(arguments(65536, 64), "gdn")], rounds)
    lines.append(f"| Gated DeltaNet's time at T=65,536 over that at T=8,192, D=64 | {long / short:.2f} |")
    mine, peer = (selective_memory(which) for which in ("regard", "transformers"))
    lines.append(f"| extra memory of the selective scan, transformers' and regard's | {peer:.0f} and {mine:.0f} MB |")
    return lines


NAMES = {"gdn": "Gated DeltaNet", "kda": "KDA", "ssd": "a scalar decay"}


def crossover(kind: str, dim: int, rounds: int) -> int | str:
    for length in SHORT:
        given = arguments(length, dim)
        row = Row("", "", ours(given, kind), softmax(given))
        if measure(row, rounds, time.process_time)[0] > 1:
            return length
    return f"above {SHORT[-1]}"


def softmax(given: dict[str, Tensor]) -> Callable[[], Tensor]:
    q, k, v = (given[name] for name in "qkv")
    return lambda: F.scaled_dot_product_attention(q, k, v, is_causal=True)


def selective_memory(which: str) -> float:
    """MB that the selective scan's peak lies above what a fresh process held."""
    found = subprocess.run([sys.executable, __file__, "--memory-of", which], capture_output=True, text=True, check=True)
    return float(found.stdout)


def print_memory(which: str) -> None:
    pair = selective_pair()
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with torch.no_grad():
        pair[which == "transformers"]()
    print((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1e3)


def over_length(longest: int) -> dict[str, list[tuple[int, float]]]:
    """(T, milliseconds) of each mechanism: the better of two calls, one where it takes seconds."""
    found: dict[str, list[tuple[int, float]]] = {}
    for length in (n for n in LENGTHS if n <= longest):
        given = arguments(length, 64)
        q, k, v = (given[name] for name in "qkv")
        runs = {
            "softmax, causal (SDPA)": softmax(given),
            "softmax, causal (regard)": lambda q=q, k=k, v=v: regard.attention(q, k, v, mask=Causal()),
            "window 256 (regard)": lambda q=q, k=k, v=v: regard.attention(q, k, v, mask=Window(256)),
        }
        runs |= {NAMES[kind]: ours(given, kind) for kind in ("gdn", "kda", "ssd")}
        for name, run in runs.items():
            times = []
            while len(times) < 3 and sum(times) < 2:
                start = time.perf_counter()
                run()
                times.append(time.perf_counter() - start)
            found.setdefault(name, []).append((length, min(times) * 1e3))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--only", default="", help="rows whose text holds this; no other tables")
    parser.add_argument("--longest", type=int, default=65536, help="last length of the plot")
    parser.add_argument("--memory-of", choices=["regard", "transformers"], help=argparse.SUPPRESS)
    parser.add_argument("--write", action="store_true")
    options = parser.parse_args()
    torch.manual_seed(0)
    if options.memory_of:
        return print_memory(options.memory_of)
    lines = ["| work | against | " + " | ".join(f"× on {n} thread{'s' * (n > 1)} (ms)" for n in options.threads) + " |"]
    lines.append("|---" * (2 + len(options.threads)) + "|")
    print("\n".join(lines))
    for make in rows():
        row = make()
        if options.only not in f"{row.work} {row.peer}":
            continue
        cells = []
        for threads in options.threads:
            torch.set_num_threads(threads)
            with torch.set_grad_enabled("backward" in row.work):
                ratio, own = measure(row, options.rounds, time.process_time if threads == 1 else time.perf_counter)
            cells.append(f"{ratio:.1f} ({own:.2f})")
        lines.append(f"| {row.work} | {row.peer} | {' | '.join(cells)} |")
        print(lines[-1], flush=True)
    if options.only:
        return None
    with torch.no_grad():
        lone = facts(options.rounds)
        print("\n".join(lone), flush=True)
        curves = over_length(options.longest)
    if options.write:
        page.write("recurrence", [*lines, "", *lone])
        picture = drawn(curves, "tokens T (H=8, D=64, float32, one thread)", "milliseconds")
        (Path(page.PAGE).parent / "time_over_length.svg").write_text(picture, encoding="utf-8")
    return None


if __name__ == "__main__":
    main()
