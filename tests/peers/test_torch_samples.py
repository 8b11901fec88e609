"""torch's own samples of scaled_dot_product_attention, read from the installed torch, through the drop-in function.

The function that makes them is taken out of its file: importing that needs a package that torch does not bring.
Then come the grid of torch's tests of masks on the CPU, and the calls that torch refuses.
"""

from __future__ import annotations

import ast
import functools
import importlib.util
import itertools
import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from grids import DTYPES, made, named, on_each_backend, spread, uniform, with_gradients
from torch import Tensor

from regard import use_backend
from regard.nn.functional import scaled_dot_product_attention

ALL = (*DTYPES, torch.float64)
NAME = "sample_inputs_scaled_dot_product_attention"


class Sample:
    """What torch's function makes: tensors, and the options of the call."""

    def __init__(self, *tensors: Tensor, **options: Any) -> None:
        self.tensors, self.options = tensors, options

    def __str__(self) -> str:
        shapes = " ".join("x".join(map(str, x.shape)) for x in self.tensors)
        return f"{shapes} {' '.join(self.options)} {self.options['dropout_p']} {self.options['is_causal']}"


def samples_of(dtype: torch.dtype) -> list[Sample]:
    spec = importlib.util.find_spec("torch.testing")
    assert spec is not None and spec.origin is not None
    text = (Path(spec.origin).parent / "_internal" / "common_methods_invocations.py").read_text()
    start = text.index(f"def {NAME}(")
    tree = ast.parse(text[start : text.index("\ndef ", start)])
    scope = {
        "partial": functools.partial,
        "product": itertools.product,
        "make_tensor": torch.testing.make_tensor,
        "SampleInput": Sample,
    }
    exec(compile(tree, NAME, "exec"), scope)
    torch.manual_seed(0)
    return list(scope[NAME](None, "cpu", dtype, False))


COUNT = 25  # as of torch 2.13; more are welcome


LOW = (torch.bfloat16, torch.float16)
SMALLEST = {torch.float32: (5e-5, 5e-6), torch.float64: (1e-12, 1e-12)}  # torch's tolerance for these samples; ours


def written_out(q, k, v, attn_mask=None, is_causal=False, scale=None, enable_gqa=False, dropout_p=0.0):
    """The formula in the dtype of the inputs."""
    if enable_gqa:
        k, v = (x.repeat_interleave(q.shape[-3] // x.shape[-3], -3) for x in (k, v))
    scores = q @ k.transpose(-1, -2) * (q.shape[-1] ** -0.5 if scale is None else scale)
    if is_causal:
        attn_mask = torch.ones(scores.shape[-2:], dtype=torch.bool).tril()
    if attn_mask is not None and attn_mask.dtype == torch.bool:
        scores = scores.masked_fill(~attn_mask, -math.inf)
    elif attn_mask is not None:
        scores = scores + attn_mask
    dead = (scores == -math.inf).all(-1, keepdim=True)
    return torch.softmax(scores, -1).masked_fill(dead, 0.0) @ v


def on_four_axes(q, k, v, **options):
    """torch's function where it has a fused kernel: three axes are one row of the batch."""
    if {x.ndim for x in (q, k, v)} != {3}:
        return F.scaled_dot_product_attention(q, k, v, **options)
    return F.scaled_dot_product_attention(q[None], k[None], v[None], **options)[0]


def within(got: Tensor, want: Tensor, *others: Tensor) -> None:
    """No further from the value than twice what torch's results in the same dtype are, and a rounding."""
    assert got.dtype == others[0].dtype and got.shape == others[0].shape
    if not got.numel():
        return
    assert torch.isfinite(got).all()
    size = float(want.abs().max())
    bound = 2 * max(float((other.double() - want).abs().max()) for other in others)
    near, share = (0.0, torch.finfo(got.dtype).eps) if got.dtype in LOW else SMALLEST[got.dtype]
    assert float((got.double() - want).abs().max()) <= bound + near + share * size


def check(tensors: tuple[Tensor, ...], options: dict[str, Any], trained: bool = True) -> None:
    """Results and gradients (a float mask's too, where trained) beside torch's: on the chosen backend, and on each."""
    mask, dtype = options.get("attn_mask"), tensors[0].dtype
    trained = trained and isinstance(mask, Tensor) and mask.is_floating_point()
    rest = {name: x for name, x in options.items() if not (trained and name == "attn_mask")}
    inputs = (*tensors, mask) if trained else tensors

    def called(function, *x, widened=False):
        given = {**rest, "attn_mask": x[3]} if trained else dict(rest)
        if widened and not trained and mask is not None and mask.is_floating_point():
            given["attn_mask"] = mask.double()
        return [function(*x[:3], **given)]

    weight = made(*F.scaled_dot_product_attention(*tensors, **options).shape, dtype=dtype, seed=1)

    def results(function, given=inputs, **how):
        return with_gradients(lambda *x: called(function, *x, **how), given, [weight])

    want = results(F.scaled_dot_product_attention, [x.double() for x in inputs], widened=True)
    others = [results(each) for each in (F.scaled_dot_product_attention, on_four_axes, written_out)]
    expected = () if dtype == torch.float64 else ("native",)
    named_results = on_each_backend(lambda: results(scaled_dot_product_attention), expected=expected)
    for _, got in itertools.chain([("chosen", results(scaled_dot_product_attention))], named_results):
        for one, right, *near in zip(got, want, *others, strict=True):
            within(one, right, *near)
    with torch.no_grad():
        for _, got in on_each_backend(lambda: called(scaled_dot_product_attention, *inputs), expected=expected):
            within(got[0], want[0], *(other[0] for other in others))


@pytest.mark.parametrize("dtype", ALL)
def test_samples(dtype):
    samples = samples_of(dtype)
    assert len(samples) >= COUNT
    for sample in samples:
        if not sample.options["dropout_p"]:
            check(sample.tensors, sample.options)


@pytest.mark.parametrize("dtype", ALL)
def test_samples_with_dropout(dtype):
    """The bits are the library's, the law is torch's: what is kept is doubled, so the mean over many rows stays."""
    for sample in samples_of(dtype):
        if not sample.options["dropout_p"]:
            continue
        want = F.scaled_dot_product_attention(*sample.tensors, **{**sample.options, "dropout_p": 0.0})
        many = [x.expand(200, *want.shape[:-2], *x.shape[-2:]) for x in sample.tensors]
        like = F.scaled_dot_product_attention(*many, **sample.options)
        for name in (None, "chunked"):
            with use_backend(name):
                draws = scaled_dot_product_attention(*many, **sample.options)
            assert draws.dtype == like.dtype and draws.shape == like.shape
            error = (draws.double().mean(0) - want.double()).abs()
            assert bool((error <= 6 * draws.double().std(0) / 200**0.5 + 1e-2).all())


@pytest.mark.parametrize("dtype", ALL)
def test_a_value_size_of_its_own(dtype):
    """The sample that torch makes and leaves out."""
    q, k, v = (made(4, 4, *shape, dtype=dtype) for shape in ((3, 8), (6, 8), (6, 16)))
    for causal in (False, True):
        check((q, k, v), {"is_causal": causal})


# ---- torch's grid of masks on the CPU ------------------------------------------------------------------------------


MASKS = ("batch", "q_len", "k_len", "heads", "head_dim", "mask_dim", "of_bool", "dtype")


def mask_grid(count, seed, q_lens, k_lens):
    return spread(
        count,
        seed,
        batch=(2, 3),
        q_len=q_lens,
        k_len=k_lens,
        heads=(1, 3),
        head_dim=(8, 16, 10),
        mask_dim=(2, 4),
        of_bool=(False, True),
        dtype=ALL,
    )


def check_mask(batch, q_len, k_len, heads, head_dim, mask_dim, of_bool, dtype):
    """Views with heads behind the tokens, as a projection gives them; masks of two and four axes, sizes of 1."""
    q, k, v = (
        made(batch, length, heads * head_dim, dtype=dtype, seed=n).view(batch, length, heads, head_dim).transpose(1, 2)
        for n, length in enumerate((q_len, k_len, k_len))
    )
    shapes = [(q_len, k_len), (1, k_len), (q_len, 1)]
    if mask_dim == 4:
        shapes = [(batch, heads, q_len, k_len), (1, 1, 1, k_len), (batch, 1, 1, k_len), (1, heads, q_len, 1)]
    for n, shape in enumerate(shapes):
        mask = uniform(*shape, seed=n) > 0.2 if of_bool else made(*shape, dtype=dtype, seed=n)
        if of_bool and shape[-1] == k_len:
            mask[..., 0] = True  # no row without any key here: those are below
        # what a mask of one column adds is nothing: its gradient is 0, and in half precision the noise of a sum
        check((q, k, v), {"attn_mask": mask}, trained=shape[-1] > 1 or dtype not in LOW)


@pytest.mark.parametrize(MASKS, mask_grid(24, 31, (1, 11, 30), (11, 17, 65)))
def test_masks(batch, q_len, k_len, heads, head_dim, mask_dim, of_bool, dtype):
    check_mask(batch, q_len, k_len, heads, head_dim, mask_dim, of_bool, dtype)


@pytest.mark.slow
@pytest.mark.parametrize(MASKS, mask_grid(48, 32, (11, 103, 514, 1030), (17, 100, 514)))
def test_more_masks(batch, q_len, k_len, heads, head_dim, mask_dim, of_bool, dtype):
    check_mask(batch, q_len, k_len, heads, head_dim, mask_dim, of_bool, dtype)


@pytest.mark.parametrize("dtype", ALL)
def test_rows_without_any_key(dtype):
    q, k, v = (made(2, 3, 9, 8, dtype=dtype, seed=n) for n in range(3))
    mask = uniform(2, 1, 9, 9, seed=4) > 0.3
    mask[0, :, 2], mask[1, :, 8] = False, False
    check((q, k, v), {"attn_mask": mask})
    check((q, k, v), {"attn_mask": torch.where(mask, 0.0, -torch.inf).to(dtype)})


@pytest.mark.parametrize(("heads", "dtype"), named([(h, d) for h in ((9, 3), (8, 1), (4, 4), (6, 2)) for d in ALL]))
def test_grouped_heads(heads, dtype):
    q = made(2, heads[0], 11, 8, dtype=dtype)
    k, v = (made(2, heads[1], 17, 8, dtype=dtype, seed=n) for n in (1, 2))
    for options in ({}, {"is_causal": True}, {"scale": 0.3}, {"scale": -1.0}, {"attn_mask": made(11, 17, dtype=dtype)}):
        check((q, k, v), {"enable_gqa": True, **options})


# ---- what torch refuses --------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Refused:
    q: Any = (2, 3, 5, 8)
    k: Any = (2, 3, 7, 8)
    v: Any = (2, 3, 7, 8)
    dtypes: tuple[torch.dtype, ...] = (torch.float32,) * 3
    options: dict[str, Any] = field(default_factory=dict)


REFUSED = {
    "one axis": Refused(q=(8,), k=(8,), v=(8,)),
    "one axis of the key": Refused(k=(8,)),
    "a dtype of its own": Refused(dtypes=(torch.float32, torch.float16, torch.float32)),
    "a value's dtype of its own": Refused(dtypes=(torch.float32, torch.float32, torch.float64)),
    "integers": Refused(dtypes=(torch.int64,) * 3),
    "a mask of integers": Refused(options={"attn_mask": torch.ones(5, 7).long()}),
    "a mask of other sizes": Refused(options={"attn_mask": torch.ones(5, 6).bool()}),
    "a mask of too many rows": Refused(options={"attn_mask": torch.ones(4, 7)}),
    "another size of heads": Refused(k=(2, 3, 7, 9)),
    "another batch": Refused(k=(3, 3, 7, 8), v=(3, 3, 7, 8)),
    "another number of heads": Refused(k=(2, 2, 7, 8), v=(2, 2, 7, 8)),
    "heads that do not divide": Refused(k=(2, 2, 7, 8), v=(2, 2, 7, 8), options={"enable_gqa": True}),
    "a share above one": Refused(options={"dropout_p": 1.5}),
    "a share below zero": Refused(options={"dropout_p": -0.5}),
}


@pytest.mark.parametrize("case", list(REFUSED))
def test_what_torch_refuses_is_refused(case):
    one = REFUSED[case]
    tensors = [torch.ones(shape, dtype=dtype) for shape, dtype in zip((one.q, one.k, one.v), one.dtypes, strict=True)]
    with pytest.raises(RuntimeError):
        F.scaled_dot_product_attention(*tensors, **one.options)
    for name in (None, "chunked", "reference"):
        with use_backend(name), pytest.raises((ValueError, TypeError, RuntimeError)):
            scaled_dot_product_attention(*tensors, **one.options)


def test_what_torch_says_it_refuses():
    """Its documentation does, or its kernels read past the end; not all of its kernels notice."""
    q, k = torch.ones(2, 3, 5, 8), torch.ones(2, 3, 7, 8)
    with pytest.raises(ValueError, match="is_causal"):
        scaled_dot_product_attention(q, k, k, torch.ones(5, 7).bool(), is_causal=True)
    with pytest.raises(ValueError, match="v: expected"):
        scaled_dot_product_attention(q, k, k[:, :, :6])


@pytest.mark.parametrize("number", [np.float32(0.5), np.float64(0.5)])
def test_a_scale_of_numpy(number):
    q = made(2, 3, 5, 8)
    torch.testing.assert_close(
        scaled_dot_product_attention(q, q, q, scale=number), F.scaled_dot_product_attention(q, q, q, scale=0.5)
    )
