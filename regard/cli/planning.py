"""`regard plan`: what a model costs to run, as tables, JSON and a plot."""

from __future__ import annotations

import json
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.table import Table

from regard.names import nearest

if TYPE_CHECKING:
    from regard.analysis import Estimate
    from regard.models.presets import Preset

__all__ = ["PlanRequest", "list_presets", "run"]

MOST = 10**12  # tokens or rows


@dataclass(frozen=True)
class PlanRequest:
    """Which model to plan, for what, and how to say it."""

    model: str
    context: int
    batch: int
    dtype: str
    cache_bits: float | None
    plot: Path | None
    as_json: bool


def list_presets(as_json: bool) -> None:
    """Print the presets."""
    from regard.models.presets import PRESETS

    if as_json:
        print(json.dumps([_facts(item) for item in PRESETS.values()], indent=2))
        return
    table = _table("name", "parameters", "active", "source")
    for item in PRESETS.values():
        table.add_row(item.name, item.parameters, item.active or "", item.source)
    Console(markup=False).print(table)


def run(request: PlanRequest) -> None:
    """Carry the request out, writing to stdout; the plot goes to its file first."""
    import torch

    from regard.analysis import Setting, estimate
    from regard.analysis.layer_costs import BITS
    from regard.errors import CheckpointError
    from regard.models.config import naming

    for option, value in (("--context", request.context), ("--batch", request.batch)):
        if not 1 <= value <= MOST:
            raise ValueError(f"{option}: expected a whole number from 1 to {MOST:,}, got {value}")
    if request.cache_bits is not None and not BITS[0] <= request.cache_bits <= BITS[1]:
        raise ValueError(f"--cache-bits: expected a number from {BITS[0]} to {BITS[1]}, got {request.cache_bits:g}")
    if request.plot is not None and request.plot.suffix != ".svg":
        raise ValueError(f"--plot: expected a file whose name ends in .svg, got {str(request.plot)!r}")
    subject = _subject(request.model)
    setting = Setting(request.context, request.batch, getattr(torch, request.dtype), request.cache_bits)
    try:
        with naming(request.model):
            found = estimate(subject.model, setting)
    except CheckpointError as error:  # options that are fine one by one, and together overflow
        raise ValueError(f"MODEL: {error}") from None
    if request.plot is not None:
        request.plot.write_text(_picture(found), encoding="utf-8")
    if request.as_json:
        facts = {"model": subject.title, "note": subject.note} if subject.preset is None else _facts(subject.preset)
        print(json.dumps(facts | found.as_dict(), indent=2))
        return
    _print(subject, found)


@dataclass(frozen=True)
class PlannedModel:
    """What is planned: its name, the model without weights, the preset if it is one, what is to be said of it."""

    title: str
    model: Any
    preset: Preset | None = None
    note: str | None = None


def _subject(name: str) -> PlannedModel:
    from regard.errors import CheckpointError
    from regard.models import Decoder
    from regard.models.files import is_file, is_folder, read_json
    from regard.models.presets import PRESETS, preset, skeleton

    accepted = f"expected a preset ({', '.join(PRESETS)}), or the path of a config.json"
    if not name:
        raise ValueError(f"MODEL is missing; {accepted}")
    if name.lower() in PRESETS:
        chosen = preset(name)
        return PlannedModel(chosen.release, chosen.build(), chosen, chosen.note or None)
    path = Path(name)
    if is_folder(path):
        inside = f" (such as {path / 'config.json'})" if is_file(path / "config.json") else ""
        raise ValueError(f"MODEL: {name} is a folder; {accepted}{inside}")
    if not is_file(path):
        meant = f" (did you mean {near!r}?)" if (near := nearest(name, PRESETS)) else ""
        raise ValueError(f"MODEL: there is no preset and no file {name!r}{meant}; {accepted}")
    try:
        config = read_json(path)
        quantized = (
            config.pop("quantization_config", None) is not None
        )  # how a file stores weights, of which none is read
        model = skeleton(config, name)
    except CheckpointError as error:
        raise ValueError(f"MODEL: {error}") from None
    if not isinstance(model, Decoder):
        family = config["model_type"]
        raise ValueError(f"MODEL: expected a decoder, got {name}, whose model_type={family!r} keeps no cache")
    note = "weights are planned in --dtype, not as quantization_config stores them" if quantized else None
    return PlannedModel(f"{name} ({config['model_type']})", model, None, note)


def _facts(preset: Preset) -> dict[str, Any]:
    return {
        "model": preset.release,
        "preset": preset.name,
        "source": preset.source,
        "published": {"parameters": preset.parameters, "active": preset.active},
        "partial": preset.partial,
        "note": preset.note or None,
    }


# ---- tables ----------------------------------------------------------------------------------------------------------


def _print(subject: PlannedModel, found: Estimate) -> None:
    s, own, preset = found.setting, found.own, subject.preset
    console = Console(highlight=False, markup=False, soft_wrap=True)
    console.print(subject.title if preset is None else f"{subject.title} ({preset.source})")
    if preset is not None:
        active = f", {preset.active} active" if preset.active else ""
        console.print(f"published    {preset.parameters} parameters{active}")
    if subject.note:
        console.print(f"note         {subject.note}")
    dtype = str(s.dtype).removeprefix("torch.")
    what = "parameters" if preset is None or not preset.partial else "built parts"
    console.print(
        f"{what:<12} {found.parameters:,}, {found.active:,} for one token; {size(found.weight_bytes)} in {dtype}"
    )
    console.print(f"\n{s.batch:,} row{'s' * (s.batch > 1)} of {s.context:,} tokens, caches of {float(s.bits):g} bits")
    if own.per_token:
        each = f"{own.per_token:,} elements a token ({exact(own.per_token * s.bits / 8)} bytes)"
        console.print(f"cache        {each}: {size(own.cache_bytes(s.context) - s.cache_bytes(s.batch * own.ring))}")
    if own.ring:
        slots = sorted({kind.holds.slots for kind in own.kinds if kind.holds.slots})
        where = f"{own.window_per_token:,} elements a token, {' or '.join(f'{n:,}' for n in slots)} tokens"
        console.print(f"windows      {where}: {own.ring:,} elements, {size(s.cache_bytes(s.batch * own.ring))}")
    if own.state:
        tails = f" and {own.conv_state:,} of convolutions" if own.conv_state else ""
        console.print(f"states       {own.state:,} elements{tails} a row, in float32: {size(own.state_bytes)}")
    for name, flops, moved in (
        ("prefill", found.prefill_flops, found.prefill_bytes),
        ("decode step", found.decode_flops, found.decode_bytes),
    ):
        console.print(f"{name:<12} {scaled(flops)}FLOP, {size(moved)} read and written")
    console.print()
    _print_layers(console, found)
    _print_others(console, found)
    for one in found.crossovers:
        console.print(f"\n{one.state}: its state is as large as the cache of {one.cache},")
        console.print(f"at {one.tokens_by_elements:,} tokens in elements, {one.tokens_by_bytes:,} in bytes")


def _print_layers(console: Console, found: Estimate) -> None:
    """What stands in the layers, and what one of each kind holds of a row."""
    table = _table("layers", "of", "parameters each", "elements each, of a row")
    for kind in found.own.kinds:
        holds = kind.holds
        parts = [
            f"{holds.per_token:,} a token" * bool(holds.per_token),
            f"{holds.window:,} x {holds.slots:,} tokens" * bool(holds.ring),
            f"{holds.state:,} of state" * bool(holds.state),
            f"{holds.conv_state:,} of convolution" * bool(holds.conv_state),
        ]
        table.add_row(str(kind.layers), kind.name, f"{kind.parameters:,}", ", ".join(filter(None, parts)))
    for name, layers, parameters in found.feedforwards:
        table.add_row(str(layers), name, f"{parameters:,}", "")
    console.print(table)


def _print_others(console: Console, found: Estimate) -> None:
    """The model's own mixing layers beside others of its size."""
    tokens = found.setting.context
    table = _table("mixing layers", "parameters", "a token", "cache", "states", "prefill", "decode step")
    for one in (found.own, *found.others):
        each = f"{one.per_token or one.window_per_token:,}" if one.per_token or one.ring else "0"
        table.add_row(
            one.name,
            scaled(one.parameters).strip(),
            each,
            size(one.cache_bytes(tokens)),
            size(one.state_bytes),
            f"{scaled(one.prefill_flops)}FLOP",
            f"{scaled(one.decode_flops)}FLOP",
        )
    console.print()
    console.print(table)


def _table(*columns: str) -> Table:
    table = Table(box=None, pad_edge=False)
    for place, column in enumerate(columns):
        table.add_column(column, no_wrap=not place)
    return table


def exact(count: Fraction) -> str:
    """A number of bytes, which need not be whole.

    >>> exact(Fraction(2621440)), exact(Fraction(7, 4))
    ('2,621,440', '1.75')
    """
    return f"{count.numerator:,}" if count.denominator == 1 else f"{float(count):,.2f}"


def size(count: int) -> str:
    """Bytes in binary units.

    >>> size(0), size(2048), size(3 * 2**29)
    ('0', '2 KiB', '1.5 GiB')
    """
    for power, unit in ((50, "PiB"), (40, "TiB"), (30, "GiB"), (20, "MiB"), (10, "KiB")):
        if count >= 2**power:
            return f"{count / 2**power:,.4g} {unit}"
    return f"{count} B" if count else "0"


def scaled(count: int) -> str:
    """A count in decimal units, the unit's letter last.

    >>> scaled(2_500_000), scaled(7)
    ('2.5 M', '7 ')
    """
    for power, letter in ((24, "Y"), (21, "Z"), (18, "E"), (15, "P"), (12, "T"), (9, "G"), (6, "M"), (3, "k")):
        if count >= 10**power:
            return f"{count / 10**power:.4g} {letter}"
    return f"{count} "


# ---- plot ------------------------------------------------------------------------------------------------------------


def _picture(found: Estimate) -> str:
    """Memory of caches and states over the length of all rows, of the model and of the alternatives."""
    from regard.analysis.plot import lines

    last = max(20, (found.setting.context - 1).bit_length())
    lengths = [2**power for power in range(last, 7, -max(1, (last - 8) // 6))][::-1]
    curves = {one.name: [(n, float(one.bytes(n))) for n in lengths] for one in (found.own, *found.others)}
    rows = found.setting.batch
    x_label = f"tokens in each of {rows:,} rows" if rows > 1 else "tokens"
    return lines(curves, x_label, "caches and states", lambda y: f"{scaled(round(y))}B")
