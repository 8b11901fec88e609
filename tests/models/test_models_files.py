"""Damaged, hostile and unknown files: one clear error each, that names the file and what is accepted."""

import json
import os
import resource
import shutil
import struct
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer as Backend
from tokenizers.models import WordLevel

from regard.errors import CheckpointError
from regard.models import Origin, load, save
from regard.models.gguf import GGUFSource
from regard.models.layouts import LAYOUTS

LLAMA = Path(__file__).parents[1] / "checkpoints" / "llama"


@pytest.fixture
def folder(tmp_path):
    shutil.copytree(LLAMA, tmp_path / "model")
    return tmp_path / "model"


def configure(folder, drop=(), **options):
    config = json.loads((folder / "config.json").read_text())
    config.update(options)
    for name in drop:
        del config[name]
    (folder / "config.json").write_text(json.dumps(config))


def refuses(folder, text):
    with pytest.raises(CheckpointError, match=text) as caught:
        load(folder)
    assert "\n" not in str(caught.value)


def shard(folder, **weight_map):
    """Splits the weights into two files, with an index; ``weight_map`` overrides entries."""
    tensors = load_file(folder / "model.safetensors")
    names = sorted(tensors)
    halves = {"a.safetensors": names[::2], "b.safetensors": names[1::2]}
    for file, held in halves.items():
        save_file({n: tensors[n] for n in held}, folder / file)
    (folder / "model.safetensors").unlink()
    table = {n: file for file, held in halves.items() for n in held} | weight_map
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": table}))


def test_paths_that_are_no_checkpoint(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"path: expected a folder with config\.json, .*, got no file"):
        load(tmp_path / "absent")
    refuses(tmp_path, "path: expected a folder with config.json, got .*, which has none")
    (tmp_path / "weights.bin").write_bytes(b"x")
    refuses(tmp_path / "weights.bin", "path: expected a folder with config.json, or a .gguf file, got .*weights.bin")


def test_pickles_are_never_opened(folder):
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    refuses(folder, "expected model.safetensors, .*, got pytorch_model.bin, which are never opened")


@pytest.mark.parametrize(
    "content", [b"", b"{", b"[1]", b"\xff\xfe", b"[" * 100_000], ids=["empty", "cut", "list", "bytes", "deep"]
)
def test_config_that_is_no_json_object(folder, content):
    (folder / "config.json").write_bytes(content)
    refuses(folder, "config.json")


def test_unknown_family(folder):
    configure(folder, model_type="unheard-of")
    refuses(folder, "model_type: expected one of .*bert, big_bird.*, got 'unheard-of'")
    configure(folder, drop=["model_type"])
    refuses(folder, "model_type: expected .*, got None")


@pytest.mark.parametrize("damage", ["truncated", "header", "length", "garbage", "empty"])
def test_damaged_safetensors(folder, damage):
    path = folder / "model.safetensors"
    data = bytearray(path.read_bytes())
    if damage == "truncated":
        data = data[:-10]
    elif damage == "header":
        data[8:12] = b"!!!!"
    elif damage == "length":
        data[:8] = struct.pack("<Q", 2**60)
    else:
        data = bytearray(b"not a checkpoint at all" if damage == "garbage" else b"")
    path.write_bytes(data)
    refuses(folder, "model.safetensors: damaged or not a safetensors file")


def test_shards(folder):
    want = load(folder)(torch.tensor([[1, 2, 3]]))
    shard(folder)
    assert torch.equal(load(folder)(torch.tensor([[1, 2, 3]])), want)
    (folder / "b.safetensors").unlink()
    refuses(folder, "names the shard 'b.safetensors', which is absent")


@pytest.mark.parametrize("path", ["../x.safetensors", "/etc/passwd", "sub/x.safetensors", "..", "", "a\\b"])
def test_an_index_cannot_leave_its_folder(folder, path):
    shard(folder, **{"model.norm.weight": path})
    refuses(folder, "weight_map: expected names of files in the folder, got ")


def test_an_index_that_lies(folder):
    shard(folder, **{"model.surprise": "a.safetensors"})
    refuses(folder, r"does not say what a.safetensors holds; named but absent: \['model.surprise'\]")
    (folder / "model.safetensors.index.json").write_text('{"weight_map": [1]}')
    refuses(folder, "weight_map: expected an object")


OPTIONS = {
    "unknown": ({"rope_mirror": 3}, "unknown option rope_mirror=3"),
    "window": ({"sliding_window": 8}, "unknown option sliding_window=8"),
    "activation": ({"hidden_act": "bump"}, "hidden_act: expected gelu.*, got 'bump'"),
    "negative": ({"num_hidden_layers": -1}, "num_hidden_layers: expected a positive integer.*, got -1"),
    "text": ({"hidden_size": "wide"}, "hidden_size: expected.*, got 'wide'"),
    "flag": ({"attention_bias": "yes"}, "attention_bias: expected.*, got 'yes'"),
    "heads": (
        {"num_key_value_heads": 3},
        "num_key_value_heads: expected a divisor of num_attention_heads=4.*, got 3",
    ),
    "rope": (
        {"rope_parameters": {"rope_type": "su"}},
        "rope_type: expected default, .*, got 'su'",
    ),
    "rope option": ({"rope_parameters": {"rope_type": "default", "twist": 2}}, "unknown option twist=2"),
    "rope factor": ({"rope_parameters": {"rope_type": "linear"}}, "factor is missing"),
    "partial": ({"rope_parameters": {"partial_rotary_factor": 0.5}}, "partial_rotary_factor: expected.*, got 0.5"),
    "quantised": ({"quantization_config": {"bits": 4}}, "unknown option quantization_config"),
    "eos": ({"eos_token_id": "end"}, "eos_token_id: expected.*, got 'end'"),
    "dtype": ({"dtype": "int8"}, "dtype: expected.*, got 'int8'"),
    "layers": ({"num_hidden_layers": 4}, "missing tensors: model.layers.3.input_layernorm.weight"),
    "shape": ({"intermediate_size": 47}, r"model.layers.0.mlp.gate_proj.weight is \(48, 32\), expected \(47, 32\)"),
}


@pytest.mark.parametrize("case", OPTIONS)
def test_options_are_never_passed_over(folder, case):
    options, text = OPTIONS[case]
    configure(folder, **options)
    refuses(folder, text)


def test_options_that_change_nothing(folder):
    configure(
        folder,
        sliding_window=None,
        some_flag=False,
        rope_scaling=None,
        num_key_value_heads=2,
        use_cache=False,
        _name_or_path="x",
    )
    load(folder)


def test_end_tokens(folder):
    configure(folder, eos_token_id=[5, 6])
    assert load(folder).end_ids == (5, 6)
    (folder / "generation_config.json").write_text('{"eos_token_id": [7, 8, 9]}')
    assert load(folder).end_ids == (7, 8, 9)
    configure(folder, eos_token_id=None)
    (folder / "generation_config.json").unlink()
    assert load(folder).end_ids == ()


def test_dtype_device_and_progress(folder):
    seen = []
    model = load(folder, dtype=torch.bfloat16, progress=lambda done, total: seen.append((done, total)))
    assert {p.dtype for p in model.parameters()} == {torch.bfloat16}
    assert not model.training
    assert seen == [(i + 1, len(seen)) for i in range(len(seen))]
    with pytest.raises(TypeError, match=r"torch\.int8"):
        load(folder, dtype=torch.int8)
    configure(folder, dtype="float64")
    assert load(folder).embedding.tokens.weight.dtype == torch.float64
    configure(folder, drop=["dtype"])
    assert load(folder).embedding.tokens.weight.dtype == torch.float32


def test_a_broken_tokenizer_is_named(folder):
    (folder / "tokenizer.json").write_text("{}")
    refuses(folder, "tokenizer.json: not a readable tokenizer")


LOCKED = """
import os, sys
from pathlib import Path
from regard.errors import CheckpointError
from regard.models import load
path = Path(sys.argv[1])
load(path)  # everything is imported, and all is well
for name in sys.argv[2:]:
    mode = (path / name).stat().st_mode
    (path / name).chmod(0)
    os.seteuid(65534)
    try:
        load(path)
    except CheckpointError as error:
        print(error)
    os.seteuid(0)
    (path / name).chmod(mode)
"""


@pytest.mark.skipif(os.name != "posix" or os.geteuid() != 0, reason="takes the rights of root away for a moment")
def test_what_may_not_be_read_is_named(folder):
    shard(folder)
    (folder / "generation_config.json").write_text("{}")
    Backend(WordLevel({"a": 0}, unk_token="a")).save(str(folder / "tokenizer.json"))
    files = sorted(path.name for path in folder.iterdir() if not path.name.startswith("expected"))
    assert {"config.json", "a.safetensors", "model.safetensors.index.json", "tokenizer.json"} < set(files)
    copied = Path(tempfile.mkdtemp())  # whose parents everyone may search
    try:
        copied.chmod(0o755)
        place = shutil.copytree(folder, copied / "model")
        for path in place.iterdir():
            path.chmod(0o644)
        command = [sys.executable, "-c", LOCKED, str(place), ".", "..", *files]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
    finally:
        shutil.rmtree(copied)
    named = [place / "config.json", place, *(place / name for name in files)]
    assert done.stdout.splitlines() == [f"{path}: cannot be read (Permission denied)" for path in named]


def test_a_file_that_cannot_be_opened_is_named(folder, monkeypatch):
    shard(folder)
    (folder / "tokenizer.json").write_text("{}")
    whole = Path.open

    def refusing(path, *arguments, **options):
        if path.name == closed:
            raise PermissionError(13, "Permission denied", str(path))
        return whole(path, *arguments, **options)

    (folder / "llama.gguf").write_bytes(b"GGUF")
    monkeypatch.setattr(Path, "open", refusing)
    for closed in ("config.json", "b.safetensors", "tokenizer.json"):
        refuses(folder, rf"^{folder / closed}: cannot be read \(Permission denied\)$")
    closed = "llama.gguf"
    refuses(folder / closed, r"llama\.gguf: cannot be read \(Permission denied\)$")


def test_without_a_tokenizer_texts_are_refused(folder):
    with pytest.raises(ValueError, match=r"no tokenizer: the folder has no tokenizer\.json; pass token ids"):
        load(folder).tokenizer  # noqa: B018


def test_saving_leaves_nothing_half_written(folder, tmp_path, monkeypatch):
    model = load(folder)
    with pytest.raises(ValueError, match="folder: expected a folder, existing or not, got the file"):
        save(model, folder / "config.json")
    target = tmp_path / "target"
    model.save(target)
    before = {p.name: p.read_bytes() for p in target.iterdir()}
    with torch.no_grad():
        model.norm.weight.add_(1)

    def full(*_, **__):
        raise OSError("no space left")

    monkeypatch.setattr(Path, "write_text", full)
    with pytest.raises(OSError, match="no space"):
        model.save(target)
    monkeypatch.undo()
    assert {p.name: p.read_bytes() for p in target.iterdir()} == before
    model.save(folder)  # over the file that its own tensors may be mapped from
    assert torch.equal(load(folder).norm.weight, model.norm.weight)
    assert torch.equal(load(folder).head.weight, model.head.weight)


def test_a_full_disk_leaves_nothing_behind(folder, tmp_path):
    model = load(folder)
    targets = tmp_path / "new" / "deep", tmp_path / "old"
    targets[1].mkdir()
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, limits[1]))
    try:
        for target in targets:
            with pytest.raises(OSError, match=r"model\.safetensors: cannot be written"):
                model.save(target)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert not (tmp_path / "new").exists()
    assert list(targets[1].iterdir()) == []


def test_what_fails_at_the_last_move_leaves_nothing_behind(folder, tmp_path, monkeypatch):
    model, move, shifted = load(folder), os.replace, []

    def second_fails(*paths):
        if shifted:
            raise OSError("no space left")
        shifted.append(paths)
        move(*paths)

    monkeypatch.setattr(os, "replace", second_fails)
    with pytest.raises(OSError, match="no space"):
        model.save(tmp_path / "new")
    assert shifted
    assert not (tmp_path / "new").exists()


def test_what_a_killed_save_left_is_removed(folder):
    model = load(folder)
    names = {p.name for p in folder.iterdir()}
    for name in (".model.safetensors.123.tmp", ".tokenizer.json.4.tmp"):
        (folder / name).write_text("left")
    (folder / ".notes.tmp").write_text("not ours")
    model.save(folder)
    assert {p.name for p in folder.iterdir()} == names | {".notes.tmp"}


def test_saving_a_model_of_no_known_layout(folder):
    model = load(folder)
    model.origin = None
    with pytest.raises(CheckpointError, match=r"model: expected one that was loaded.*torch\.save or safetensors"):
        model.save(folder)
    model.origin = Origin(LAYOUTS["falcon"], {"num_hidden_layers": 1})
    with pytest.raises(CheckpointError, match="do not fit the layout 'falcon'"):
        model.save(folder)


# ---- GGUF, written here by hand -------------------------------------------------------------------------------------


def text(s):
    return struct.pack("<Q", len(s.encode())) + s.encode()


def value(v):
    if isinstance(v, bool):
        return struct.pack("<I?", 7, v)
    if isinstance(v, int):
        return struct.pack("<II", 4, v)
    if isinstance(v, float):
        return struct.pack("<If", 6, v)
    if isinstance(v, str):
        return struct.pack("<I", 8) + text(v)
    inner = 8 if isinstance(v[0], str) else 5
    items = b"".join(text(x) if inner == 8 else struct.pack("<i", x) for x in v)
    return struct.pack("<IIQ", 9, inner, len(v)) + items


def gguf(path, metadata, tensors, *, magic=b"GGUF", version=3, kind=0):
    """Float32 tensors in GGUF's layout."""
    head = magic + struct.pack("<IQQ", version, len(tensors), len(metadata))
    head += b"".join(text(k) + value(v) for k, v in metadata.items())
    data, infos = b"", b""
    for name, t in tensors.items():
        dims = t.shape[::-1]
        infos += text(name) + struct.pack(f"<I{len(dims)}QIQ", len(dims), *dims, kind, len(data))
        data += t.contiguous().numpy().tobytes()
        data += b"\0" * (-len(data) % 32)
    head += infos
    path.write_bytes(head + b"\0" * (-len(head) % 32) + data)
    return path


METADATA = {
    "general.architecture": "llama",
    "llama.block_count": 3,
    "llama.context_length": 128,
    "llama.embedding_length": 32,
    "llama.feed_forward_length": 48,
    "llama.attention.head_count": 4,
    "llama.attention.head_count_kv": 2,
    "llama.attention.layer_norm_rms_epsilon": 1e-6,
    "llama.rope.freq_base": 10000.0,
    "llama.rope.dimension_count": 8,
    "llama.vocab_size": 97,
    "tokenizer.ggml.eos_token_id": 2,
}
NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


@pytest.fixture
def tensors():
    """The tiny Llama under GGUF's names, its query and key rows in the order of interleaved pairs."""
    out = {}
    for name, t in load_file(LLAMA / "model.safetensors").items():
        own = name.removesuffix(".weight")
        for theirs, ours in NAMES.items():
            own = own.replace(theirs, ours)
        own = own.replace("model.layers", "blk")
        if "attn_q" in own or "attn_k" in own:
            heads = 4 if "attn_q" in own else 2
            t = t.view(heads, 2, -1, t.shape[1]).transpose(1, 2).reshape(t.shape)
        out[f"{own}.weight"] = t
    return out


def test_gguf_is_the_same_llama(tmp_path, tensors):
    model = load(gguf(tmp_path / "m.gguf", METADATA, tensors))
    ids = torch.tensor([[1, 5, 9, 2]])
    assert torch.equal(model(ids), load(LLAMA)(ids))
    assert model.end_ids == (2,)
    with pytest.raises(ValueError, match="no tokenizer"):
        model.tokenizer  # noqa: B018
    model.save(tmp_path / "folder")
    read, written = load_file(LLAMA / "model.safetensors"), load_file(tmp_path / "folder" / "model.safetensors")
    assert set(read) == set(written)
    assert all(torch.equal(read[n], written[n]) for n in read)


@pytest.mark.parametrize("cut", [0, 3, 10, 30, 200, 900, -1])
def test_gguf_cut_short(tmp_path, tensors, cut):
    path = gguf(tmp_path / "m.gguf", METADATA, tensors)
    path.write_bytes(path.read_bytes()[:cut])
    refuses(path, "m.gguf: (ends too early|expected a GGUF file)")


def test_gguf_of_other_kinds(tmp_path, tensors):
    path = tmp_path / "m.gguf"
    refuses(gguf(path, METADATA, tensors, magic=b"GGML"), "expected a GGUF file, .*, got b'GGML'")
    refuses(gguf(path, METADATA, tensors, version=1), "version: expected 2 or 3, little endian, got 1")
    refuses(gguf(path, METADATA, tensors, kind=77), "unknown quantisation 77")
    refuses(
        gguf(path, {**METADATA, "general.architecture": "mamba"}, tensors),
        "architecture: expected granite, llama, olmo2, phi3, qwen2, qwen3, got 'mamba'",
    )
    refuses(gguf(path, {**METADATA, "llama.expert_used_count": 8}, tensors), "expert_used_count: expected .*, got 8")
    refuses(gguf(path, {**METADATA, "llama.odd": 1}, tensors), "unknown option odd=1")
    refuses(gguf(path, METADATA, {**tensors, "rope_freqs.bias": torch.ones(4)}), "unused tensors: rope_freqs.bias")
    del tensors["blk.1.ffn_up.weight"]
    refuses(gguf(path, METADATA, tensors), "missing tensors: blk.1.ffn_up.weight")


def test_gguf_huge_counts_do_not_allocate(tmp_path):
    path = tmp_path / "m.gguf"
    path.write_bytes(b"GGUF" + struct.pack("<IQQ", 3, 2**40, 2**40) + b"\0" * 40)
    refuses(path, "m.gguf")
    path.write_bytes(b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + text("k") + struct.pack("<IIQ", 9, 8, 2**50))
    refuses(path, "an array of")


BPE = {
    "tokenizer.ggml.model": "gpt2",
    "tokenizer.ggml.pre": "gpt-2",
    "tokenizer.ggml.tokens": ["<s>", "a", "b", "ab", "Ġ"],
    "tokenizer.ggml.merges": ["a b"],
    "tokenizer.ggml.token_type": [3, 1, 1, 1, 1],
    "tokenizer.ggml.bos_token_id": 0,
    "tokenizer.ggml.add_bos_token": True,
}


def test_gguf_tokenizers(tmp_path):
    from regard.models import Tokenizer

    metadata = GGUFSource(gguf(tmp_path / "m.gguf", BPE, {})).metadata
    tokenizer = Tokenizer.from_gguf(metadata)
    assert tokenizer.encode("ab b") == [0, 3, 4, 2]
    assert tokenizer.decode([0, 3, 4, 2]) == "ab b"
    assert tokenizer.bos_id == 0
    for changes, reason in (
        (
            {"tokenizer.ggml.model": "llama"},
            "with tokens and merges, got 'llama'",
        ),
        ({"tokenizer.ggml.pre": "unheard-of"}, "pre: expected gpt-2 or smollm, got 'unheard-of'"),
        ({"tokenizer.ggml.merges": ["ab"]}, "merges are not pairs"),
    ):
        assert reason in Tokenizer.from_gguf({**metadata, **changes})
