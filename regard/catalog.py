"""The catalogue: every mechanism, one line a file. It lists and tests; it never constructs behind anybody's back.

>>> from regard.catalog import find
>>> find("gqa").source
'Ainslie et al. 2023, arXiv:2305.13245'
"""

from __future__ import annotations

from regard.mixers import (
    delta_net,
    ema,
    gated_delta_net,
    gla,
    griffin,
    hgrn,
    kda,
    kernel_linear,
    latent,
    lightning,
    mamba1,
    mamba2,
    retention,
    softmax,
)
from regard.mixers.base import Record

__all__ = ["RECORDS", "Record", "find"]

RECORDS: tuple[Record, ...] = (
    *softmax.records,
    *delta_net.records,
    *ema.records,
    *gated_delta_net.records,
    *gla.records,
    *griffin.records,
    *hgrn.records,
    *kda.records,
    *kernel_linear.records,
    *latent.records,
    *lightning.records,
    *mamba1.records,
    *mamba2.records,
    *retention.records,
)


def find(name: str) -> Record:
    """The record of that name; ValueError lists the names there are."""
    for record in RECORDS:
        if record.name == name:
            return record
    raise ValueError(f"name: expected one of {', '.join(record.name for record in RECORDS)}, got {name!r}")
