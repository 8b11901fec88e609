"""torch's own counter of floating-point operations sees the native operators."""

import subprocess
import sys

import pytest
import torch
from attention_calls import made
from native_calls import needs_native
from torch.utils.flop_counter import FlopCounterMode, sdpa_backward_flop_count, sdpa_flop_count

import regard
from regard.biases import Alibi
from regard.masks import Causal
from regard.transitions import Decay, Delta

pytestmark = needs_native


def counted(function, *leaves, **counter):
    """[forward, backward] of a call and of the gradients of its results."""
    leaves = [x.detach().requires_grad_() for x in leaves]
    with FlopCounterMode(display=False, **counter) as flops:
        found = function(*leaves)
        forward = flops.get_total_flops()
        torch.autograd.grad(sum(x.sum() for x in found), leaves)
    return [forward, flops.get_total_flops() - forward]


@pytest.mark.parametrize(("q_len", "k_len"), [(1, 9), (7, 9), (40, 40)])
@pytest.mark.parametrize("options", [{}, {"mask": Causal(), "bias": Alibi(4), "sink": made(4).float()}])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_attention_counts_as_torch_counts_its_own(q_len, k_len, options, dtype):
    q, k, v = (made(2, heads, n, d).to(dtype) for heads, n, d in ((4, q_len, 8), (2, k_len, 8), (2, k_len, 5)))
    shapes = q.shape, k.shape, v.shape
    want = [sdpa_flop_count(*shapes), sdpa_backward_flop_count((2, 4, q_len, 5), *shapes)]
    assert counted(lambda *x: [regard.attention(*x, backend="native", **options)], q, k, v) == want


def test_the_reference_counts_the_same_forward():
    q, k, v = (made(2, 4, n, d).float() for n, d in ((7, 8), (9, 8), (9, 5)))
    ours, dense = (
        counted(lambda *x, name=name: [regard.attention(*x, backend=name)], q, k, v)[0]
        for name in ("native", "reference")
    )
    assert ours == dense


@pytest.mark.parametrize("tokens", [1, 5, 70])
def test_states_count_by_their_closed_forms(tokens):
    q, k, v = made(2, 2, tokens, 8).float(), made(2, 2, tokens, 8).float(), made(2, 4, tokens, 6).float()
    beta, decay = made(2, 4, tokens).sigmoid().float(), -made(2, 4, tokens).abs().float()
    chunk = min(tokens, 32)
    plain = 2 * tokens * (2 * chunk * 8 + 4 * (chunk * 6 + 2 * 8 * 6))
    delta = 2 * (4 * tokens * (chunk * (3 * 8 + 2 * 6) + 3 * 8 * 6) + 4 * tokens * chunk * chunk // 3)
    if tokens == 1:
        plain, delta = 2 * 4 * 8 * 6 * 3, 2 * 4 * 8 * 6 * 4
    for macs, transition, rest in ((plain, Decay, (decay,)), (delta, Delta, (beta, decay))):

        def run(q, k, v, *rest, transition=transition):
            return regard.recurrence(q, k, v, transition(*rest), backend="native")

        assert counted(run, q, k, v, *rest) == [2 * macs, 6 * macs]


def test_scans_and_convolutions_count_by_their_closed_forms():
    x, dt, log_a, A, B = (made(*shape).abs().float() for shape in ((2, 9, 4), (2, 9, 4), (2, 9, 4), (4, 3), (2, 9, 3)))
    found = counted(lambda *leaves: regard.scan(*leaves, backend="native"), -log_a, x)
    assert found == [2 * 2 * 9 * 4, 4 * 2 * 9 * 4]
    found = counted(lambda *x: regard.selective_scan(*x, backend="native"), x, dt, -A, B, B)
    assert found == [2 * 3 * 2 * 9 * 4 * 3, 6 * 3 * 2 * 9 * 4 * 3]
    found = counted(lambda *leaves: regard.short_conv(*leaves), x, A)
    assert found == [2 * 2 * 9 * 4 * 3, 4 * 2 * 9 * 4 * 3]


def test_the_counter_s_own_formula_goes_first():
    q = made(1, 1, 5, 4).float()
    own = {torch.ops.regard.attention_forward: lambda *_, **__: 7}
    assert counted(lambda q: [regard.attention(q, q, q, backend="native")], q, custom_mapping=own)[0] == 7


def test_a_counter_that_is_imported_last_still_counts():
    code = """
import sys, torch, regard
q = torch.randn(1, 2, 20, 4, requires_grad=True)
out = regard.attention(q, q, q, backend="native")
assert "torch.utils.flop_counter" not in sys.modules
from torch.utils.flop_counter import FlopCounterMode
with FlopCounterMode(display=False) as backward:
    out.sum().backward()
with FlopCounterMode(display=False) as forward:
    regard.attention(q, q, q, backend="native")
print(forward.get_total_flops(), backward.get_total_flops())
"""
    process = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert process.returncode == 0, process.stderr
    pairs = 2 * 20 * 20
    assert process.stdout.split() == [str(2 * pairs * 8), str(2 * pairs * 20)]
