"""A line plot with logarithmic axes as SVG text: nothing to install, readable on light and dark pages."""

from __future__ import annotations

import math

__all__ = ["lines"]

COLORS = ("#4477aa", "#ee6677", "#228833", "#ccbb44", "#66ccee", "#aa3377")
WIDTH, HEIGHT, LEFT, RIGHT, TOP, BOTTOM = 760, 440, 64, 210, 16, 48


def lines(curves: dict[str, list[tuple[int, float]]], x_label: str, y_label: str) -> str:
    """One curve a name, its name at its end; ticks at powers of 2 (x) and 10 (y)."""
    xs = [x for points in curves.values() for x, _ in points]
    ys = [y for points in curves.values() for _, y in points]
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
        out.append(f'<text x="{LEFT - 6}" y="{y + 4:.1f}" text-anchor="end">{10.0**power:g}</text>')
    for x in sorted(set(xs)):
        out.append(f'<text x="{across(x):.1f}" y="{HEIGHT - BOTTOM + 16}" text-anchor="middle">{_short(x)}</text>')
    out.append(f'<text x="{(LEFT + WIDTH - RIGHT) / 2}" y="{HEIGHT - 8}" text-anchor="middle">{x_label}</text>')
    out.append(
        f'<text transform="translate(14 {(HEIGHT - BOTTOM) / 2}) rotate(-90)" text-anchor="middle">{y_label}</text>'
    )
    taken: list[float] = []
    ends = sorted(curves.items(), key=lambda curve: -curve[1][-1][1])
    for name, points in ends:
        color = COLORS[list(curves).index(name) % len(COLORS)]
        path = "L".join(f"{across(x):.1f} {up(y):.1f}" for x, y in points)
        out.append(f'<path d="M{path}" fill="none" stroke="{color}" stroke-width="2"/>')
        height = max([up(points[-1][1]) + 4, *(t + 14 for t in taken[-1:])])  # below the name above it
        taken.append(height)
        out.append(f'<text x="{across(points[-1][0]) + 8:.1f}" y="{height:.1f}" fill="{color}">{name}</text>')
    return "\n".join([*out, "</svg>"]) + "\n"


def _short(x: int) -> str:
    return f"{x // 1024}k" if x >= 1024 else str(x)
