"""The catalogue: every mechanism, one line a file. It lists what there is, and the tests run over it.

>>> from regard.catalog import find
>>> find("gqa").source
'Ainslie et al. 2023, arXiv:2305.13245'
"""

from __future__ import annotations

import importlib

from regard.mixers.base import Record, Traits
from regard.names import not_among

__all__ = ["MECHANISMS", "RECORDS", "Record", "Traits", "find"]

# The files of regard/mixers/ that define mechanisms, in the order of the tables.
MECHANISMS = (
    "softmax",
    "softmax_relatives",
    "additive",
    "bigbird",
    "delta_net",
    "disentangled",
    "ema",
    "gated_delta_net",
    "gla",
    "griffin",
    "gsa",
    "hgrn",
    "hyena",
    "kda",
    "kernel_linear",
    "latent",
    "lightning",
    "linformer",
    "longformer",
    "luong",
    "mamba1",
    "mamba2",
    "mega",
    "multi_token",
    "performer",
    "reformer",
    "retention",
    "rwkv6",
)

RECORDS: tuple[Record, ...] = tuple(
    record for name in MECHANISMS for record in importlib.import_module(f"regard.mixers.{name}").records
)


def find(name: str) -> Record:
    """The record of that name; ValueError lists the names there are."""
    for record in RECORDS:
        if record.name == name:
            return record
    raise ValueError(f"name: {not_among(name, [record.name for record in RECORDS])}")
