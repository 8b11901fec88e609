"""GGUF models split over files: read whole from any of them, or refused by what is missing."""

import pytest
import torch
from safetensors.torch import load_file, save_file
from test_models_files import LLAMA, METADATA, folder, gguf, shard, tensors  # noqa: F401

from regard.errors import CheckpointError
from regard.models import load

IDS = torch.tensor([[1, 5, 9, 2]])


def split(place, tensors, count, *, metadata=METADATA, later=None, name="m", **stated):  # noqa: F811
    """Writes shards as gguf-split does: metadata in the first, the tensors in order over all of them."""
    names = list(tensors)
    size = -(-len(names) // count)
    paths = []
    for i in range(count):
        own = metadata if i == 0 else (later or {})
        numbers = {"split.no": i, "split.count": count, "split.tensors.count": len(names), **stated}
        held = {n: tensors[n] for n in names[i * size : (i + 1) * size]}
        paths.append(gguf(place / f"{name}-{i + 1:05d}-of-{count:05d}.gguf", {**own, **numbers}, held))
    return paths


@pytest.fixture
def headless_first(tensors):  # noqa: F811
    """With the head in the last shard."""
    return {n: tensors[n] for n in sorted(tensors, key=lambda n: n == "output.weight")}


@pytest.mark.parametrize("count", [1, 2, 3, 7])
def test_every_shard_opens_the_whole_model(tmp_path, headless_first, count):
    want = load(LLAMA)(IDS)
    for path in split(tmp_path, headless_first, count):
        model = load(path)
        assert torch.equal(model(IDS), want)
        assert model.head is not None
        assert model.end_ids == (2,)
    model.save(tmp_path / "folder")
    assert torch.equal(load(tmp_path / "folder")(IDS), want)


def test_a_first_shard_without_tensors(tmp_path, headless_first):
    numbers = {"split.count": 2, "split.tensors.count": len(headless_first)}
    first = gguf(tmp_path / "m-00001-of-00002.gguf", {**METADATA, **numbers, "split.no": 0}, {})
    gguf(tmp_path / "m-00002-of-00002.gguf", {**numbers, "split.no": 1}, headless_first)
    assert torch.equal(load(first)(IDS), load(LLAMA)(IDS))


def test_a_tied_model_stays_tied(tmp_path, headless_first):
    del headless_first["output.weight"]
    whole = load(gguf(tmp_path / "whole.gguf", METADATA, headless_first))
    assert whole.head is None
    for path in split(tmp_path, headless_first, 2):
        assert torch.equal(load(path)(IDS), whole(IDS))


def test_shards_align_their_own_tensors(tmp_path, headless_first):
    later = {"general.alignment": 32, "general.architecture": "llama"}
    paths = split(tmp_path, headless_first, 2, later=later)
    assert torch.equal(load(paths[0])(IDS), load(LLAMA)(IDS))


def refuses(path, text):
    with pytest.raises(CheckpointError, match=text):
        load(path)


def test_a_lone_shard_under_another_name(tmp_path, headless_first):
    first, _ = split(tmp_path, headless_first, 2)
    alone = first.rename(tmp_path / "m.gguf")
    refuses(alone, r"m\.gguf: split\.count: expected .* names that end in -00001-of-N\.gguf.*, got 2")


@pytest.mark.parametrize("gone", [0, 1, 2])
def test_absent_shards_are_named(tmp_path, headless_first, gone):
    paths = split(tmp_path, headless_first, 3)
    paths[gone].unlink()
    for path in paths:
        if path != paths[gone]:
            refuses(path, f"the model is split over 3 files; absent: {paths[gone].name}$")


def test_shards_that_are_not_what_they_say(tmp_path, headless_first):
    first, second = split(tmp_path, headless_first, 2)
    held = second.read_bytes()
    second.write_bytes(first.read_bytes())
    refuses(first, r"m-00002-of-00002\.gguf: split\.no: expected 1, as its name says.*, got 0")
    second.write_bytes(held[:-40])
    refuses(first, r"m-00002-of-00002\.gguf: ends too early")
    (tmp_path / "other").mkdir()
    three = split(tmp_path / "other", headless_first, 3)
    second.write_bytes(three[1].read_bytes())
    refuses(first, r"m-00002-of-00002\.gguf: split\.count: expected 2, as its name says, got 3")
    refuses(second, r"m-00002-of-00002\.gguf: split\.count: expected .*, got 3")


def test_names_and_metadata_contradict(tmp_path, headless_first):
    path = gguf(tmp_path / "m-00001-of-00002.gguf", METADATA, headless_first)
    refuses(path, r"split\.count: expected the N of names that end in .*, got None")
    path = gguf(path, {**METADATA, "split.count": True}, headless_first)
    refuses(path, r"split\.count: expected an integer, got True")


def test_the_number_of_tensors_is_counted(tmp_path, headless_first):
    first, _ = split(tmp_path, headless_first, 2, **{"split.tensors.count": 99})
    refuses(first, rf"split\.tensors\.count=99, but there are {len(headless_first)} tensors")
    del headless_first["output.weight"]
    path = gguf(tmp_path / "one.gguf", {**METADATA, "split.count": 1, "split.tensors.count": 30}, headless_first)
    refuses(path, rf"split\.tensors\.count=30, but there are {len(headless_first)} tensors")


def test_a_tensor_in_two_shards(tmp_path, headless_first):
    numbers = {"split.count": 2, "split.tensors.count": len(headless_first) + 1}
    first = gguf(tmp_path / "m-00001-of-00002.gguf", {**METADATA, **numbers, "split.no": 0}, headless_first)
    twice = {"output.weight": headless_first["output.weight"]}
    gguf(tmp_path / "m-00002-of-00002.gguf", {**numbers, "split.no": 1}, twice)
    refuses(first, r"m-00002-of-00002\.gguf: holds output\.weight, which .*m-00001-of-00002\.gguf holds too")


def test_a_later_shard_states_nothing_of_its_own(tmp_path, headless_first):
    for later in ({"llama.rope.freq_base": 500.0}, {"tokenizer.ggml.eot_token_id": 5}):
        first, _ = split(tmp_path, headless_first, 2, later=later)
        refuses(first, f"m-00002-of-00002.gguf: states {next(iter(later))}, which .* does not state so")


@pytest.mark.parametrize("content", ["adapter", "mmproj", "imatrix", 3])
def test_files_that_hold_no_whole_model(tmp_path, headless_first, content):
    del headless_first["output.weight"]
    path = gguf(tmp_path / "m.gguf", {**METADATA, "general.type": content}, headless_first)
    refuses(path, f"general.type: expected model.*, got {content!r}")
    load(gguf(path, {**METADATA, "general.type": "model"}, headless_first))


def test_safetensors_shards_that_do_not_fit_their_index(folder):  # noqa: F811
    shard(folder)
    held = load_file(folder / "b.safetensors")
    name = next(iter(load_file(folder / "a.safetensors")))
    save_file({**held, name: torch.zeros(2)}, folder / "b.safetensors")
    refuses(folder, rf"does not say what b\.safetensors holds; .*present but not named: \['{name}'\]")
    shorter = dict(held)
    del shorter[next(iter(held))]
    save_file(shorter, folder / "b.safetensors")
    refuses(folder, rf"named but absent: \['{next(iter(held))}'\]")
    (folder / "b.safetensors").unlink()
    refuses(folder, r"names the shard 'b\.safetensors', which is absent")
