"""Packed sequences of unequal lengths carry the states and gradients that each has alone."""

import math

import pytest
import torch

import regard
from regard import Decay, Delta
from regard.backends import without_kernels
from regard.masks import Segments

DECAYS = {
    "none": lambda *_: None,
    "constant": lambda heads, tokens, size: torch.full((heads,), -math.log(2.0)),
    "per token": lambda heads, tokens, size: -torch.rand(1, heads, tokens),
    "per channel": lambda heads, tokens, size: -torch.rand(1, heads, tokens, size),
}


@pytest.mark.parametrize("backend", ["native", "chunked", "reference"])
@pytest.mark.parametrize("delta", [False, True])
@pytest.mark.parametrize("decay", DECAYS)
@pytest.mark.parametrize("lengths", [(3, 4), (1, 0, 5, 7, 6, 2), (33, 40, 64)])
def test_states_and_gradients(lengths, decay, delta, backend):
    if backend == "native" and without_kernels():
        pytest.skip(f"native not built: {without_kernels()}")
    torch.manual_seed(0)
    heads, tokens, size = 2, sum(lengths), 4
    dtype = torch.float32 if backend == "native" else torch.float64
    given = {
        "q": torch.randn(1, heads, tokens, size),
        "k": torch.nn.functional.normalize(torch.randn(1, heads, tokens, size), dim=-1),
        "v": torch.randn(1, heads, tokens, size),
    }
    if delta:
        given["beta"] = torch.rand(1, heads, tokens)
    if (made := DECAYS[decay](heads, tokens, size)) is not None:
        given["decay"] = made
    given = {name: x.to(dtype).requires_grad_() for name, x in given.items()}

    def run(parts, **options):
        kind = Delta(parts["beta"], parts.get("decay")) if delta else Decay(parts.get("decay"))
        return regard.recurrence(parts["q"], parts["k"], parts["v"], kind, backend=backend, **options)

    out, states = run(given, segments=Segments.from_lengths(lengths))
    outs, alone, start = [], [], 0
    for length in lengths:
        cut = {n: x if x.ndim == 1 else x.narrow(2, start, length) for n, x in given.items()}
        one, state = run(cut)
        outs.append(one)
        alone.append(state)
        start += length
    tolerance = 1e-5 if dtype == torch.float32 else 1e-12
    torch.testing.assert_close(out, torch.cat(outs, 2), rtol=tolerance, atol=tolerance)
    torch.testing.assert_close(states, torch.cat(alone), rtol=tolerance, atol=tolerance)
    weights = torch.linspace(-1, 1, states.numel(), dtype=dtype).view(states.shape)
    got = torch.autograd.grad((states * weights).sum() + out.sin().sum(), list(given.values()))
    want = torch.autograd.grad(
        (torch.cat(alone) * weights).sum() + torch.cat(outs, 2).sin().sum(), list(given.values())
    )
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a, b, rtol=20 * tolerance, atol=20 * tolerance)
