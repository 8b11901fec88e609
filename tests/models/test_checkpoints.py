"""Every tiny checkpoint below $REGARD_CHECKPOINTS (default tests/checkpoints), against what another library answered.

A folder holds a checkpoint, ``expected.safetensors`` (``input.*``: arguments of the call, ``output.*``: the answer) and
``expected.json``. Its name is a label; ``config.json`` says what it is. A folder whose family has no layout is skipped
and named in the summary.
"""

import json
import os
from functools import lru_cache
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from regard.models import LAYOUTS, Decoder, EncoderDecoder, generate, load

HERE = Path(__file__).parents[1]
ROOT = Path(os.environ.get("REGARD_CHECKPOINTS", HERE / "checkpoints"))
FOLDERS = sorted(p.parent for p in ROOT.glob("**/expected.safetensors"))


@lru_cache
def model_type(folder):
    return json.loads((folder / "config.json").read_text())["model_type"]


@lru_cache
def model_of(folder, dtype=torch.float32):
    return load(folder, dtype=dtype)


@lru_cache
def case(folder):
    """The tensors, and the tolerance: 20 times the peer's own float32-float64 spread, at least 1e-5 of its size."""
    tensors = load_file(folder / "expected.safetensors")
    about = json.loads((folder / "expected.json").read_text())
    spread = about.get("float32_vs_float64") or 0.0
    largest = about.get("max_abs") or max(
        float(t.abs().max()) for n, t in tensors.items() if n.startswith(("output.logits", "output.last"))
    )
    return tensors, max(20 * spread, 1e-5 * largest)


def covered(folder):
    return model_type(folder) in LAYOUTS


def is_decoder(folder):
    return any(name.startswith("output.greedy_from_9") for name in case(folder)[0])


def over(folders):
    """One test a folder."""
    return pytest.mark.parametrize("folder", folders, ids=[str(f.relative_to(ROOT)) for f in folders])


COVERED = [f for f in FOLDERS if covered(f)]
DECODERS = [f for f in COVERED if is_decoder(f)]
PAIRS = [f for f in COVERED if "output.greedy_from_start_without_cache" in case(f)[0]]


@pytest.fixture
def decoder(folder):
    model = model_of(folder)
    assert isinstance(model, Decoder)
    return model


@pytest.fixture
def expected(folder):
    return case(folder)


def error(got, want):
    assert got.shape == want.shape
    assert torch.isfinite(got).all()
    return float((got.double() - want.double()).abs().max())


def arguments(tensors):
    """The call's tensors under this library's names: (ids, keyword arguments)."""
    names = {"attention_mask": "keep", "token_type_ids": "types", "position_ids": "positions"}
    names, first = names | {"global_attention_mask": "global_tokens"}, "input_ids"
    if "input.pixel_values" in tensors:
        names, first = {"pixel_mask": "keep"}, "pixel_values"
    if "input.decoder_input_ids" in tensors:
        names = {"input_ids": "source", "attention_mask": "source_keep", "global_attention_mask": "source_global"}
        names |= {"input_features": "source"}
        names, first = names | {"decoder_attention_mask": "keep"}, "decoder_input_ids"
    unknown = {n for n in tensors if n.startswith("input.")} - {f"input.{n}" for n in (first, *names)}
    assert not unknown, f"inputs that this test does not know: {unknown}"
    given = {own: tensors[f"input.{name}"] for name, own in names.items() if f"input.{name}" in tensors}
    for name in ("keep", "global_tokens", "source_keep", "source_global"):
        if name in given:
            given[name] = given[name].bool()
    return tensors[f"input.{first}"], given


def answers(model, tensors):
    """Pairs (a real answer, what was expected), and the same of the peer's float64 answer where there is one."""
    inputs, given = arguments(tensors)
    found = model(inputs, **given)
    found = found._asdict() if hasattr(found, "_asdict") else dict.fromkeys(("logits", "last_hidden_state"), found)
    names = {"pred_boxes": "boxes"}
    real = ... if "input.pixel_values" in tensors else given.get("keep", torch.ones_like(inputs, dtype=torch.bool))
    if "output.pooler_output" in tensors:
        found["pooler_output"] = model.pool(found["last_hidden_state"])
    for kind in ("logits", "last_hidden_state", "pooler_output", "pred_boxes"):
        for given_out in (f"output.{kind}", f"output64.{kind}"):
            if given_out in tensors:
                yield found[names.get(kind, kind)][real], tensors[given_out][real]


@torch.no_grad()
@over(FOLDERS)
def test_forward(folder, expected):
    if not covered(folder):
        pytest.skip(f"not covered: {folder.relative_to(ROOT)}")
    tensors, tolerance = expected
    compared = list(answers(model_of(folder), tensors))
    assert compared and all(error(got, want) <= tolerance for got, want in compared)


@torch.no_grad()
@over(COVERED)
def test_float64(folder, expected):
    """float64 throughout: as close to the peer's float64 answer, or to its float32 one, as that allows."""
    tensors, tolerance = expected
    if "input.pixel_values" in tensors:
        tensors = tensors | {"input.pixel_values": tensors["input.pixel_values"].double()}
    model = model_of(folder, torch.float64)
    assert all(p.dtype == torch.float64 for p in model.parameters())
    for got, want in answers(model, tensors):
        assert got.dtype == torch.float64
        assert error(got, want) <= tolerance


@torch.no_grad()
@over(PAIRS)
def test_the_encoder_of_a_pair(folder, expected):
    tensors, tolerance = expected
    model, (_, given) = model_of(folder), arguments(tensors)
    assert isinstance(model, EncoderDecoder)
    more = {"global_tokens": given["source_global"]} if "source_global" in given else {}
    want = tensors["output.encoder_last_hidden_state"]
    keep = given.get("source_keep")
    hidden = model.encoder(given["source"], keep=keep, **more)
    keep = torch.ones(want.shape[:2], dtype=torch.bool) if keep is None else keep
    assert error(hidden[keep], want[keep]) <= tolerance


@torch.no_grad()
@over(PAIRS)
def test_greedy_from_the_start(folder, expected):
    """The greedy text of row 0, with a cache; and the whole in pieces."""
    tensors, tolerance = expected
    model, (ids, given) = model_of(folder), arguments(tensors)
    want = tensors["output.greedy_from_start_without_cache"][0]
    source = {name: tensor[:1] for name, tensor in given.items() if name.startswith("source")}
    places = tensors["output.encoder_last_hidden_state"].shape[1]
    cache = model.init_cache(1, len(want), source=places)
    found = want[:1]
    for _ in want[1:]:
        logits = model(found[-1:][None], cache=cache, **source)
        source = {}  # read once
        found = torch.cat([found, logits[0, -1:].argmax(-1)])
    assert torch.equal(found, want)
    cache, pieces = model.init_cache(len(ids), ids.shape[1], source=places), []
    for n, part in enumerate(ids.split([3, 1, ids.shape[1] - 4], 1)):
        pieces.append(model(part, cache=cache, **(given if n == 0 else {})))
    assert error(torch.cat(pieces, 1), tensors["output.logits"]) <= tolerance


@torch.no_grad()
@over(DECODERS)
def test_left_padding(folder, decoder, expected):
    """Row 1 behind padding, beside a longer row, gives what it gives alone."""
    tensors, tolerance = expected
    if "output.logits_row1_tail_alone" not in tensors:
        pytest.skip("no such output in this folder")
    ids, want = tensors["input.input_ids"], tensors["output.logits_row1_tail_alone"]
    padding = ids.shape[1] - want.shape[1]
    keep = torch.ones_like(ids, dtype=torch.bool)
    keep[1, :padding] = False
    for filler in (0, ids.max().item()):
        padded = ids.masked_fill(~keep, filler)
        assert error(decoder(padded, keep=keep)[1:, padding:], want) <= tolerance
    assert error(decoder(ids[1:, padding:]), want) <= tolerance


@over(DECODERS)
def test_greedy(folder, decoder, expected):
    """The greedy continuation, with a cache, is the one that the peer found without."""
    tensors, _ = expected
    want = tensors["output.greedy_from_9_without_cache"][0].tolist()
    prompt = tensors["input.input_ids"][0, :9].tolist()
    assert want[:9] == prompt
    got = generate(decoder, prompt, max_tokens=len(want) - 9, end_ids=())
    assert prompt + got[0].ids == want


@torch.no_grad()
@pytest.mark.parametrize("sizes", [(1,), (7, 10), (5, 1, 4), (16, 1)], ids=str)
@over(DECODERS)
def test_pieces(folder, decoder, expected, sizes):
    """Any split into calls gives what the whole gives, in float32 and with padding in front."""
    tensors, tolerance = expected
    ids = tensors["input.input_ids"]
    keep = torch.ones_like(ids, dtype=torch.bool)
    keep[1, :3] = False
    whole = decoder(ids, keep=keep)
    cache = decoder.init_cache(*ids.shape)
    pieces, at = [], 0
    while at < ids.shape[1]:
        part = slice(at, at + sizes[min(len(pieces), len(sizes) - 1)])
        pieces.append(decoder(ids[:, part], keep=keep[:, part], cache=cache))
        at += pieces[-1].shape[1]
        assert cache.length == at
    assert error(torch.cat(pieces, 1)[keep], whole[keep]) <= tolerance


@torch.no_grad()
@over(DECODERS)
def test_two_caches(folder, decoder, expected):
    """Two texts continued in turn do not mix."""
    tensors, tolerance = expected
    ids = tensors["input.input_ids"]
    whole = decoder(ids)
    caches = [decoder.init_cache(1, ids.shape[1]) for _ in range(2)]
    for part in (slice(0, 6), slice(6, 7), slice(7, ids.shape[1])):
        for row, cache in enumerate(caches):
            got = decoder(ids[row : row + 1, part], cache=cache)
            assert error(got, whole[row : row + 1, part]) <= tolerance


@torch.no_grad()
@over(DECODERS)
def test_reorder_and_clone(folder, decoder, expected):
    tensors, tolerance = expected
    ids = tensors["input.input_ids"]
    cache = decoder.init_cache(2, ids.shape[1])
    decoder(ids[:, :9], cache=cache)
    kept = cache.clone()
    index = torch.tensor([1, 0, 0])
    cache.reorder(index)
    texts = torch.cat([ids[index, :9], torch.stack([ids[0, 9:11], ids[1, 9:11], ids[1, 10:12]])], 1)
    want = decoder(texts)
    assert error(decoder(texts[:, 9:], cache=cache), want[:, 9:]) <= tolerance
    assert kept.length == 9
    assert error(decoder(ids[:, 9:], cache=kept), decoder(ids)[:, 9:]) <= tolerance


@torch.no_grad()
@over(DECODERS)
def test_reset(folder, decoder, expected):
    tensors, tolerance = expected
    ids = tensors["input.input_ids"]
    cache = decoder.init_cache(2, ids.shape[1])
    decoder(ids.flip(1), cache=cache)
    cache.reset()
    assert cache.length == 0
    want = decoder(ids)
    assert error(decoder(ids, cache=cache), want) <= tolerance


@torch.no_grad()
@over(DECODERS)
def test_last_only(folder, decoder, expected):
    tensors, tolerance = expected
    ids = tensors["input.input_ids"]
    want = decoder(ids)[:, -1:]
    assert error(decoder(ids, last_only=True), want) <= tolerance


@over(COVERED)
def test_saved_and_loaded_again(folder, tmp_path):
    """The file that is written holds the tensors that were read, bit by bit, under the same names."""
    model = model_of(folder)
    model.save(tmp_path / "again")
    read, written = load_file(folder / "model.safetensors"), load_file(tmp_path / "again" / "model.safetensors")
    assert set(written) == set(read)
    for name, tensor in read.items():
        assert torch.equal(written[name], tensor), name
    again = load(tmp_path / "again")
    assert type(again) is type(model)
    for (name, a), b in zip(model.state_dict().items(), again.state_dict().values(), strict=True):
        assert torch.equal(a, b), name


def test_some_folders_were_found():
    assert FOLDERS, f"no checkpoints below {ROOT}"
