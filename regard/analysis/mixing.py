"""Y = M X: the mixing matrix of a layer, or of every layer of a model, exactly; and a look at one."""

from __future__ import annotations

import contextlib
import math
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from regard.checks import whole

__all__ = ["Mixing", "mixing_matrix"]

SHADES = " .:-=+*#%@"


class Mixing(NamedTuple):
    """M ``(B, G, Tq, Tk)`` and V ``(B, G, Tk, D)``: ``matrix @ values`` is what a layer mixes."""

    matrix: Tensor
    values: Tensor

    def draw(self, head: int = 0, row: int = 0, *, most: int = 60) -> str:
        """One head's matrix of one batch row as text: a line a query, darker for larger weights, ``x`` for
        negative ones, ``?`` for what is not finite.

        Shades are parts of the largest weight's size. Longer axes than `most` are drawn by the largest weight of
        each stretch. Raises ValueError and IndexError where there is nothing of that number.

        >>> import torch
        >>> print(Mixing(torch.tensor([[[[1.0, 0.0], [-0.25, 0.5]]]]), torch.zeros(1, 1, 2, 1)).draw())
        @ ·
        x =
        """
        whole("most", most, 1)
        picked = self.matrix.detach()[row, head].double().cpu()
        for axis in (0, 1):
            step = -(-picked.shape[axis] // most)
            if step > 1:
                parts = picked.split(step, axis)
                picked = torch.stack([_largest(part, axis) for part in parts], axis)
        top = float(picked[picked.isfinite()].abs().max()) if bool(picked.isfinite().any()) else 0.0
        return "\n".join(" ".join(_mark(float(value), top) for value in line) for line in picked)

    def plot(self, path: str | Path, head: int | None = None, row: int = 0) -> None:
        """A picture of one head's matrix, or of all heads', in a file (PNG, SVG, PDF). Needs matplotlib.

        Blue is positive and red negative; the scale is the same for all heads.
        """
        try:
            from matplotlib.figure import Figure
        except ModuleNotFoundError as missing:
            raise ModuleNotFoundError(
                "plot: it needs matplotlib: pip install matplotlib", name="matplotlib"
            ) from missing
        chosen = self.matrix.detach()[row].double().cpu()
        chosen = chosen if head is None else chosen[head][None]
        wide = min(len(chosen), 4)
        high = -(-len(chosen) // wide)
        figure = Figure(figsize=(3 * wide, 2.6 * high), layout="constrained")
        axes = figure.subplots(high, wide, squeeze=False).flat
        top = float(chosen.abs().max()) if chosen.numel() else 1.0
        for number, (axis, one) in enumerate(zip(axes, chosen, strict=False)):
            axis.imshow(one.numpy(), cmap="RdBu", vmin=-top, vmax=top, interpolation="nearest", aspect="auto")
            axis.set(title=f"head {number if head is None else head}", xlabel="key", ylabel="query")
        for axis in list(axes)[len(chosen) :]:
            axis.set_visible(False)
        figure.savefig(path, dpi=120)


def mixing_matrix(module: nn.Module, *inputs: Any, **arguments: Any) -> Any:
    """What a layer, or every layer of a model, mixes with: a `Mixing` (M, V), or a dict of them by the layers' names.

    ``M @ V`` is what the layer mixes, before norm, gate and output projection. M is ``(B, G, Tq, Tk)`` for G heads (or
    channels), V ``(B, G, Tk, D)``; before dropout; differentiable. The arguments are the layer's own (x, mask, keep,
    positions, segments, context, cache) or the model's (ids, images, …); a cache of a layer is left as it is. A model
    runs once; a layer that it calls again is named again, with ``#2``. O(Tq Tk) memory for each layer.

    Raises TypeError for a module that has no ``mixing`` method, and no part that has one.

    >>> import torch, regard
    >>> layer = regard.nn.MultiHeadAttention(8, 2, mask=regard.masks.Causal())
    >>> M, V = mixing_matrix(layer, torch.randn(1, 4, 8))
    >>> M.shape, (M @ V).shape, bool((M.triu(1) == 0).all())
    (torch.Size([1, 2, 4, 4]), torch.Size([1, 2, 4, 4]), True)
    >>> model = regard.models.decoder(11, 8, ["gated_deltanet", "gqa"], heads=2)
    >>> for name, found in mixing_matrix(model, torch.tensor([[1, 2, 3]])).items():
    ...     print(name, tuple(found.matrix.shape))
    layers.0.mixer (1, 2, 3, 3)
    layers.1.mixer (1, 2, 3, 3)
    """
    if callable(getattr(module, "mixing", None)):
        return Mixing(*module.mixing(*inputs, **arguments))  # type: ignore[operator]
    layers = {name: part for name, part in module.named_modules() if callable(getattr(part, "mixing", None))}
    inside = {id(part) for layer in layers.values() for part in layer.modules() if part is not layer}
    layers = {name: layer for name, layer in layers.items() if id(layer) not in inside}  # a layer's parts are its own
    if not layers:
        raise TypeError(
            f"module: expected a layer with a mixing method, or a model of such layers, got {type(module).__name__}"
        )
    found: dict[str, Mixing] = {}

    def watched(name: str) -> Any:
        def look(layer: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            times = sum(one.partition("#")[0] == name for one in found)
            found[f"{name}#{times + 1}" if times else name] = Mixing(*layer.mixing(*args, **kwargs))

        return look

    with contextlib.ExitStack() as hooks:
        for name, layer in layers.items():
            hooks.callback(layer.register_forward_pre_hook(watched(name), with_kwargs=True).remove)
        module(*inputs, **arguments)
    return found


def _largest(part: Tensor, axis: int) -> Tensor:
    """Of each stretch the weight that is largest in size."""
    return part.gather(axis, part.abs().argmax(axis, keepdim=True)).squeeze(axis)


def _mark(value: float, top: float) -> str:
    if not math.isfinite(value):
        return "?"
    if value < 0:
        return "x"
    return "·" if value == 0 else SHADES[max(1, round(value / top * (len(SHADES) - 1)))]
