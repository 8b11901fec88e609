"""ResNet: residual convolutions in four stages, as the backbone of a detector (He et al. 2015, arXiv:1512.03385).

Strides stand in the 3 × 3 convolutions of bottlenecks, as in all current releases.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from regard.models.feedforward import activation

__all__ = ["RESNETS", "ConvNorm", "FrozenBatchNorm", "ResNet", "ResNetShape"]


class FrozenBatchNorm(nn.Module):
    """``(x - mean) / sqrt(var + 1e-5) * weight + bias`` per channel, with constants: batches of a detector are small.

    All four are buffers, kept in at least float32 and never trained. ``(B, C, Y, X)`` in and out.

    >>> FrozenBatchNorm(2)(torch.ones(1, 2, 1, 1)).flatten()
    tensor([1.0000, 1.0000])
    """

    weight: Tensor
    bias: Tensor
    running_mean: Tensor
    running_var: Tensor

    def __init__(self, channels: int, eps: float = 1e-5) -> None:
        super().__init__()
        self.eps = eps
        for name in ("weight", "bias", "running_mean", "running_var"):
            self.register_buffer(name, torch.empty(channels))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Starts as the identity, but for `eps`."""
        for ones in (self.weight, self.running_var):
            nn.init.ones_(ones)
        for zeros in (self.bias, self.running_mean):
            nn.init.zeros_(zeros)

    def forward(self, x: Tensor) -> Tensor:
        scale = self.weight * torch.rsqrt(self.running_var + self.eps)
        shift = self.bias - self.running_mean * scale
        return x * scale[:, None, None].to(x.dtype) + shift[:, None, None].to(x.dtype)


class ReluConv(nn.Conv2d):
    """A convolution in front of a ReLU: its start keeps the size of gradients (He et al. 2015, arXiv:1502.01852)."""

    def reset_parameters(self) -> None:
        nn.init.kaiming_normal_(self.weight, mode="fan_out", nonlinearity="relu")
        if self.bias is not None:
            nn.init.zeros_(self.bias)


class ConvNorm(nn.Module):
    """``act(norm(conv(x)))``; the convolution has no bias and keeps the size, but for its stride."""

    def __init__(
        self,
        channels: tuple[int, int],
        kernel: int,
        *,
        norm: Callable[[int], nn.Module],
        act: nn.Module | None = None,
        stride: int = 1,
        dilation: int = 1,
    ) -> None:
        super().__init__()
        padding = kernel // 2 * dilation
        self.conv = ReluConv(*channels, kernel, stride=stride, padding=padding, dilation=dilation, bias=False)
        self.norm = norm(channels[1])
        self.act = act

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(self.conv(x))
        return x if self.act is None else self.act(x)


@dataclass(frozen=True)
class ResNetShape:
    """The sizes of a ResNet.

    Args:
        widths: channels of the stages' maps.
        depths: blocks of the stages.
        bottleneck: blocks of 1 × 1, 3 × 3 and 1 × 1 convolutions with a quarter of the channels inside; otherwise of
            two of 3 × 3.
        stem: channels of the first convolution.
        channels: of the images.
        act: the activation behind the stem and the sums; it is a ReLU inside of blocks.
        strides: of the stages.
        dilations: of the stages' 3 × 3 convolutions, but for those of a stage's first block.
        stride_first: whether a bottleneck's stride stands in its first convolution, and not in that of 3 × 3.
    """

    widths: tuple[int, ...] = (256, 512, 1024, 2048)
    depths: tuple[int, ...] = (3, 4, 6, 3)
    bottleneck: bool = True
    stem: int = 64
    channels: int = 3
    act: str = "relu"
    strides: tuple[int, ...] = (1, 2, 2, 2)
    dilations: tuple[int, ...] = (1, 1, 1, 1)
    stride_first: bool = False

    def __post_init__(self) -> None:
        lengths = {len(self.widths), len(self.depths), len(self.strides), len(self.dilations)}
        if len(lengths) != 1 or not self.widths:
            raise ValueError(f"widths: expected as many as depths, strides and dilations, got {self}")
        if self.bottleneck and any(n % 4 for n in self.widths):
            raise ValueError(f"widths: expected multiples of 4 for bottlenecks, got {self.widths}")


_BASIC = (64, 128, 256, 512)
RESNETS = {
    "resnet18": ResNetShape(_BASIC, (2, 2, 2, 2), bottleneck=False),
    "resnet34": ResNetShape(_BASIC, (3, 4, 6, 3), bottleneck=False),
    "resnet50": ResNetShape(),
    "resnet101": ResNetShape(depths=(3, 4, 23, 3)),
    "resnet152": ResNetShape(depths=(3, 8, 36, 3)),
}
"""The published sizes, by name."""


class Residual(nn.Module):
    """``act(shortcut(x) + layers(x))``."""

    def __init__(self, layers: Sequence[nn.Module], shortcut: nn.Module | None, act: nn.Module) -> None:
        super().__init__()
        self.layers = nn.Sequential(*layers)
        self.shortcut = shortcut
        self.act = act

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.act(self.layers(x) + (x if self.shortcut is None else self.shortcut(x)))
        return out


class ResNet(nn.Module):
    """Images ``(B, channels, Y, X)`` to the last stage's map ``(B, widths[-1], Y / 32, X / 32)``, rounded up.

    Args:
        shape: a `ResNetShape`; `RESNETS` has the published ones.
        norm: makes the norm of so many channels.

    >>> small = ResNetShape((8, 16), (1, 1), bottleneck=False, stem=8, strides=(1, 2), dilations=(1, 1))
    >>> ResNet(small)(torch.ones(1, 3, 33, 64)).shape
    torch.Size([1, 16, 5, 8])
    """

    def __init__(self, shape: ResNetShape, norm: Callable[[int], nn.Module] = FrozenBatchNorm) -> None:
        super().__init__()
        self.shape = shape
        self.stem = ConvNorm((shape.channels, shape.stem), 7, norm=norm, act=activation(shape.act), stride=2)
        self.pool = nn.MaxPool2d(3, stride=2, padding=1)
        before = (shape.stem, *shape.widths)
        self.stages = nn.ModuleList([self._stage(shape, i, before[i], norm) for i in range(len(shape.depths))])

    @staticmethod
    def _stage(shape: ResNetShape, i: int, before: int, norm: Callable[[int], nn.Module]) -> nn.Sequential:
        width, blocks = shape.widths[i], []
        for n in range(shape.depths[i]):
            given, stride = (before, shape.strides[i]) if n == 0 else (width, 1)
            dilation = 1 if n == 0 else shape.dilations[i]
            changed = given != width or stride != 1
            shortcut = ConvNorm((given, width), 1, norm=norm, stride=stride) if changed else None
            blocks.append(Residual(_convolutions(shape, (given, width), stride, dilation, norm), shortcut,
                                   activation(shape.act)))  # fmt: skip
        return nn.Sequential(*blocks)

    def forward(self, images: Tensor) -> Tensor:
        """The last stage's map."""
        x: Tensor = self.pool(self.stem(images))
        for stage in self.stages:
            x = stage(x)
        return x


def _convolutions(
    shape: ResNetShape, channels: tuple[int, int], stride: int, dilation: int, norm: Callable[[int], nn.Module]
) -> list[nn.Module]:
    given, width = channels
    relu = nn.ReLU()
    if not shape.bottleneck:
        first = ConvNorm((given, width), 3, norm=norm, act=relu, stride=stride, dilation=dilation)
        return [first, ConvNorm((width, width), 3, norm=norm, dilation=dilation)]
    inner = width // 4
    early, late = (stride, 1) if shape.stride_first else (1, stride)
    return [
        ConvNorm((given, inner), 1, norm=norm, act=relu, stride=early),
        ConvNorm((inner, inner), 3, norm=norm, act=relu, stride=late, dilation=dilation),
        ConvNorm((inner, width), 1, norm=norm),
    ]
