"""What GGUF metadata say of tokens: ends, starts, kinds; honoured, or refused by name."""

import json

import pytest
import torch
from test_models_files import BPE, METADATA, gguf, tensors  # noqa: F401

from regard.errors import CheckpointError
from regard.models import Tokenizer, generate, load

OWN = "tokenizer.ggml."


@pytest.fixture
def opened(tmp_path, tensors):  # noqa: F811
    """Loads the tiny Llama with further metadata."""
    return lambda **more: load(
        gguf(tmp_path / "m.gguf", {**METADATA, **{OWN + k: v for k, v in more.items()}}, tensors)
    )


def test_every_token_that_ends_a_text(opened):
    assert opened(eos_token_id=256, eot_token_id=257).end_ids == (256, 257)
    assert opened(eos_token_id=5, eot_token_id=5).end_ids == (5,)
    assert opened(eot_token_id=5, eom_token_id=6).end_ids == (2, 5, 6)
    assert opened(fim_pad_token_id=7, fim_rep_token_id=8, fim_sep_token_id=9).end_ids == (2, 7, 8, 9)
    assert opened(eos_token_ids=[2, 11, 12]).end_ids == (2, 11, 12)
    others = dict.fromkeys(("bos_token_id", "padding_token_id", "unknown_token_id", "seperator_token_id"), 3)
    others |= dict.fromkeys(("mask_token_id", "cls_token_id", "fim_pre_token_id", "fim_mid_token_id"), 4)
    assert opened(**others).end_ids == (2,)


def test_the_ends_are_written_with_the_folder(tmp_path, opened):
    model = opened(eot_token_id=5, eom_token_id=6, bos_token_id=1, padding_token_id=4)
    model.save(tmp_path / "folder")
    assert load(tmp_path / "folder").end_ids == (2, 5, 6)
    config = json.loads((tmp_path / "folder" / "config.json").read_text())
    assert (config["eos_token_id"], config["bos_token_id"], config["pad_token_id"]) == ([2, 5, 6], 1, 4)


def test_generation_ends_at_each(opened):
    free = generate(opened(), [5, 9], max_tokens=8, end_ids=())[0].ids
    got = generate(opened(eos_token_id=96, eot_token_id=free[2]), [5, 9], max_tokens=8)[0]
    assert got.ids == free[: free.index(free[2]) + 1]
    assert got.finish == "end"


@pytest.mark.parametrize(
    "key", ["eos", "eot", "eom", "bos", "padding", "unknown", "seperator", "mask", "cls", "fim_pre", "fim_sep"]
)
def test_ids_that_are_no_tokens_of_the_file(opened, key):
    for bad in (5, "x", True):
        with pytest.raises(CheckpointError, match=f"{OWN}{key}_token_id: expected a token id below 5.*, got {bad!r}"):
            opened(**{"tokens": ["a", "b", "c", "d", "e"], "eos_token_id": 2, f"{key}_token_id": bad})
    for bad in ([1, 5], 3):
        with pytest.raises(CheckpointError, match=f"{OWN}eos_token_ids: expected .*, got "):
            opened(tokens=["a", "b", "c", "d", "e"], eos_token_ids=bad)


TOKENS = ["<s>", "a", "b", "ab", "Ġ", "</s>", "<tool>", "<unk>", "c", "<|x|>"]
TYPES = [3, 1, 1, 1, 1, 3, 4, 2, 1, 5]


def bpe(**changes):
    own = {"tokens": TOKENS, "token_type": TYPES, "eos_token_id": 5, "add_bos_token": False, **changes}
    metadata = {**BPE, **{OWN + k: v for k, v in own.items()}}
    return {k: v for k, v in metadata.items() if v is not None}


def test_kinds_of_tokens():
    tokenizer = Tokenizer.from_gguf(bpe())
    assert tokenizer.encode("ab<tool>c") == [3, 6, 8]
    assert tokenizer.encode("a<tool><tool>ab") == [1, 6, 6, 3]
    assert tokenizer.encode("a<s>b</s>c<unk>") == [1, 0, 2, 5, 8, 7]
    assert tokenizer.decode([3, 6, 8, 0, 5, 7]) == "ab<tool>c"  # what users defined is text, the others are not
    assert 9 not in tokenizer.encode("<|x|>")


def test_tokens_that_stand_round_every_text(tmp_path):
    for begin in (True, False):
        for end in (True, False):
            tokenizer = Tokenizer.from_gguf(bpe(add_bos_token=begin, add_eos_token=end))
            assert tokenizer.encode("ab") == [0] * begin + [3] + [5] * end
            (tmp_path / "tokenizer.json").write_text(tokenizer.to_json())
            assert Tokenizer.from_file(tmp_path / "tokenizer.json", {}).encode("ab") == tokenizer.encode("ab")
    assert (tokenizer.bos_id, tokenizer.eos_id) == (0, 5)


def test_a_begin_whose_text_is_no_word(tmp_path):
    tokens = ["$A <s>:1", *TOKENS[1:]]
    assert Tokenizer.from_gguf(bpe(tokens=tokens, add_bos_token=True)).encode("ab") == [0, 3]


def test_a_leading_space():
    assert Tokenizer.from_gguf(bpe(add_space_prefix=True)).encode("ab") == [4, 3]
    assert Tokenizer.from_gguf(bpe(add_space_prefix=False)).encode("ab") == [3]


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"add_bos_token": True, "bos_token_id": None}, "add_bos_token: expected false without bos_token_id, got True"),
        ({"add_eos_token": True, "eos_token_id": None}, "add_eos_token: expected false without eos_token_id, got True"),
        ({"add_eos_token": 1}, "add_eos_token: expected true or false, got 1"),
        ({"add_sep_token": True}, "add_sep_token: expected false for this kind of tokenizer, got True"),
        (
            {"remove_extra_whitespaces": True},
            "remove_extra_whitespaces: expected false for this kind",
        ),
        (
            {"token_type": [1, 6, *TYPES[2:]]},
            "for this kind of tokenizer, got 6",
        ),
        (
            {"token_type": [1, 0, *TYPES[2:]]},
            "for this kind of tokenizer, got 0",
        ),
        (
            {"token_type": [1, 7, *TYPES[2:]]},
            "for this kind of tokenizer, got 7",
        ),
        ({"token_type": TYPES[:-1]}, "token_type does not give each of the 10 tokens its kind"),
        ({"normalizer.lowercase": True}, "tokenizer.ggml.normalizer.lowercase, which is not known here"),
        ({"precompiled_charsmap": [1, 2]}, "precompiled_charsmap, which is not known here"),
        ({"twist_token_id": 0}, "twist_token_id, which is not known here"),
    ],
)
def test_what_is_not_known_is_refused_by_name(opened, changes, reason):
    assert reason in Tokenizer.from_gguf(bpe(**changes))


def test_a_model_whose_tokenizer_is_refused_says_so(opened):
    more = {k.removeprefix(OWN): v for k, v in bpe(add_sep_token=True).items()}
    model = opened(**more)
    assert model(torch.tensor([[1, 2]])).shape == (1, 2, 97)
    with pytest.raises(ValueError, match=r"no tokenizer: .*add_sep_token: expected false.*, got True"):
        model.tokenizer  # noqa: B018


def test_a_saved_folder_has_the_same_tokenizer(tmp_path, opened):
    more = {k.removeprefix(OWN): v for k, v in bpe(add_bos_token=True, eot_token_id=9).items()}
    model = opened(**more)
    model.save(tmp_path / "folder")
    again = load(tmp_path / "folder")
    for text in ("ab<tool>c", "a<s>b</s>c<unk>", ""):
        assert again.tokenizer.encode(text) == model.tokenizer.encode(text)
        assert again.tokenizer.decode(again.tokenizer.encode(text)) == model.tokenizer.decode(
            model.tokenizer.encode(text)
        )
    assert (again.tokenizer.bos_id, again.end_ids) == (0, (5, 9)) == (model.tokenizer.bos_id, model.end_ids)
    transformers = pytest.importorskip("transformers")
    peer = transformers.AutoTokenizer.from_pretrained(tmp_path / "folder")
    assert peer("ab<tool>c").input_ids == model.tokenizer.encode("ab<tool>c") == [0, 3, 6, 8]


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"llama.attention.causal": False}, "attention.causal"),
        ({"llama.foo": False}, "foo=False"),
        ({"llama.bar": 0}, "bar=0"),
        ({"llama.baz": ""}, "baz=''"),
        ({"adapter.type": "lora"}, "adapter.type: expected.*, got 'lora'"),
    ],
)
def test_options_that_are_not_known_are_refused_whatever_they_say(tmp_path, tensors, changes, words):  # noqa: F811
    with pytest.raises(CheckpointError, match=words):
        load(gguf(tmp_path / "m.gguf", {**METADATA, **changes}, tensors))
    assert load(gguf(tmp_path / "n.gguf", {**METADATA, "llama.attention.causal": True}, tensors)).layers
