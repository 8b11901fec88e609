"""A line plot with logarithmic axes as SVG text: nothing to install, readable on light and dark pages."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from html import escape

__all__ = ["lines"]

COLORS = ("#4477aa", "#ee6677", "#228833", "#ccbb44", "#66ccee", "#aa3377", "#999933")
WIDTH, HEIGHT, LEFT, RIGHT, TOP, BOTTOM = 760, 440, 64, 210, 16, 48


def lines(
    curves: Mapping[str, Sequence[tuple[int, float]]],
    x_label: str,
    y_label: str,
    tick: Callable[[float], str] = "{:g}".format,
) -> str:
    """One curve a name, its name at its end; ticks at powers of 2 (x) and 10 (y), which `tick` writes.

    Raises ValueError where there is nothing to draw, or a number that has no logarithm.

    >>> lines({"a line": [(1024, 1.0), (2048, 2.0)]}, "tokens", "bytes").splitlines()[0][:30]
    '<svg xmlns="http://www.w3.org/'
    """
    xs = [x for points in curves.values() for x, _ in points]
    ys = [y for points in curves.values() for _, y in points]
    if not xs or not all(0 < value < math.inf for value in (*xs, *ys)):
        raise ValueError("curves: expected points whose coordinates are finite and above 0")
    low, high = math.floor(math.log10(min(ys))), math.ceil(math.log10(max(ys)))
    first, last = math.log2(min(xs)), math.log2(max(xs))

    def across(x: float) -> float:
        return LEFT + (math.log2(x) - first) / max(last - first, 1) * (WIDTH - LEFT - RIGHT)

    def up(y: float) -> float:
        return HEIGHT - BOTTOM - (math.log10(y) - low) / max(high - low, 1) * (HEIGHT - TOP - BOTTOM)

    out = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" font-family="sans-serif"'
        ' font-size="12" fill="#888">'
    ]
    for power in range(low, high + 1):
        y = up(10.0**power)
        out.append(f'<path d="M{LEFT} {y:.1f}H{WIDTH - RIGHT}" stroke="#888" stroke-opacity=".3"/>')
        out.append(f'<text x="{LEFT - 6}" y="{y + 4:.1f}" text-anchor="end">{escape(tick(10.0**power))}</text>')
    for x in sorted(set(xs)):
        out.append(f'<text x="{across(x):.1f}" y="{HEIGHT - BOTTOM + 16}" text-anchor="middle">{_short(x)}</text>')
    middle = (LEFT + WIDTH - RIGHT) / 2
    out.append(f'<text x="{middle}" y="{HEIGHT - 8}" text-anchor="middle">{escape(x_label)}</text>')
    turned = f'transform="translate(14 {(HEIGHT - BOTTOM) / 2}) rotate(-90)"'
    out.append(f'<text {turned} text-anchor="middle">{escape(y_label)}</text>')
    taken: list[float] = []
    ends = sorted(curves.items(), key=lambda curve: -curve[1][-1][1])
    for name, points in ends:
        color = COLORS[list(curves).index(name) % len(COLORS)]
        path = "L".join(f"{across(x):.1f} {up(y):.1f}" for x, y in points)
        out.append(f'<path d="M{path}" fill="none" stroke="{color}" stroke-width="2"/>')
        height = max([up(points[-1][1]) + 4, *(t + 14 for t in taken[-1:])])  # below the name above it
        taken.append(height)
        end = across(points[-1][0]) + 8
        out.append(f'<text x="{end:.1f}" y="{height:.1f}" fill="{color}">{escape(name)}</text>')
    return "\n".join([*out, "</svg>"]) + "\n"


def _short(x: int) -> str:
    for size, letter in ((2**30, "G"), (2**20, "M"), (2**10, "k")):
        if x >= size:
            return f"{x / size:.3g}{letter}"
    return str(x)
