"""Attention by the instruction sets below this machine's best, in processes of their own: REGARD_ISA is read once."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from native_calls import needs_native

from regard.backends.native import library

X86 = ["portable", "x86-64-v3", "x86-64-v4", "x86-64-v4+bf16"]
SETS = X86[: X86.index(library.ISA)] if library.ISA in X86 else ["portable"]
SCRIPT = """
import sys
sys.path[:0] = sys.argv[1:3]
import torch
import test_native_score_range as score_range
from attention_calls import BIASES, MASKS, inputs
from native_calls import agrees
from regard.masks import Causal
from regard.backends.native import library
assert library.ISA == sys.argv[3], library.ISA
for mask in ("window", "documents", "by head"):
    for dtype in (torch.float32, torch.bfloat16):
        options = {"mask": MASKS[mask], "bias": BIASES["dense"], "softcap": 2.0, "dropout_p": 0.4}
        agrees(*inputs(), dtype, **options)
        agrees(*inputs(70, 100), dtype, mask=Causal())
for lengths in ((1, 9), (33, 1100)):
    score_range.test_products_that_are_exact(*lengths, 1e37)
for size in (1e9, 1e36):
    score_range.test_gradients_of_equal_keys(40, 300, size)
for pair in score_range.PRODUCTS[3:6:2]:
    score_range.test_gradients_whatever_the_scale(3, 7, *pair)
    score_range.test_gradients_whatever_the_scale(40, 300, *pair)
    score_range.test_gradients_whatever_the_scale_in_half_precision(*pair)
    score_range.test_gradients_whatever_the_scale_under_every_term(40, *pair)
    score_range.test_gradients_of_packed_rows_whatever_the_scale(*pair)
for rows in (3, 40):
    score_range.test_scores_beyond_float32_take_everything(rows)
"""


@needs_native
@pytest.mark.parametrize("isa", SETS)
def test_masks_biases_and_large_scores(isa):
    here = Path(__file__).parent
    process = subprocess.run(
        [sys.executable, "-c", SCRIPT, str(here), str(here.parent), isa],
        env=os.environ | {"REGARD_ISA": isa},
        capture_output=True,
        text=True,
    )
    assert process.returncode == 0, process.stderr[-2000:]
