"""Added and special tokens: every place where a folder may state them, against transformers; contradictions."""

import json
import shutil
from pathlib import Path

import pytest
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers
from tokenizers import Tokenizer as Backend

from regard.errors import CheckpointError
from regard.models import generate, load

LLAMA = Path(__file__).parents[1] / "checkpoints" / "llama"
TEXTS = [
    "ab<tool>c",
    "ab <tool>  c",
    "<tool>",
    "x<TOOL>y",
    "a<s>b</s>",
    "<pad><tool><image>a",
    "<tool><tool>",
    "atoolb",
]


def letters(*added):
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet(), key=lambda c: (not c.isascii(), c))[:80]
    backend = Backend(models.BPE({"<s>": 0, "</s>": 1} | {c: i + 2 for i, c in enumerate(alphabet)}, []))
    backend.normalizer = normalizers.Lowercase()
    backend.pre_tokenizer, backend.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    backend.add_tokens(list(added))
    return backend


@pytest.fixture
def folder(tmp_path):
    shutil.copytree(LLAMA, tmp_path / "model")
    return tmp_path / "model"


def write(folder, *added, **files):
    """The tokenizer's files; those given as None are absent."""
    letters(*added).save(str(folder / "tokenizer.json"))
    files = {"tokenizer_config": {}, **files}
    files["tokenizer_config"] = {"tokenizer_class": "PreTrainedTokenizerFast", **files["tokenizer_config"]}
    for name, content in files.items():
        (folder / f"{name}.json").write_text(json.dumps(content))


def described(content, **flags):
    off = dict.fromkeys(("lstrip", "rstrip", "single_word", "normalized", "special"), False)
    return {"content": content, **off, **flags}


NEW = 82  # the first id behind the vocabulary
PLACES = {
    "added_tokens_decoder": {"tokenizer_config": {"added_tokens_decoder": {str(NEW): described("<tool>")}}},
    "added_tokens_decoder, special": {
        "tokenizer_config": {"added_tokens_decoder": {str(NEW): described("<tool>", special=True)}}
    },
    "added_tokens_decoder, all flags": {
        "tokenizer_config": {
            "added_tokens_decoder": {str(NEW): described("<tool>", lstrip=True, rstrip=True, normalized=True)}
        }
    },
    "added_tokens_decoder, whole words": {
        "tokenizer_config": {"added_tokens_decoder": {str(NEW): described("tool", single_word=True)}}
    },
    "several, not in order": {
        "tokenizer_config": {
            "added_tokens_decoder": {str(NEW + 1): described("<image>"), str(NEW): described("<tool>", special=True)}
        }
    },
    "of the vocabulary": {
        "tokenizer_config": {
            "added_tokens_decoder": {"0": described("<s>", special=True), str(NEW): described("<tool>")}
        }
    },
    "additional_special_tokens": {"tokenizer_config": {"additional_special_tokens": ["<tool>", "<image>"]}},
    "extra_special_tokens": {"tokenizer_config": {"extra_special_tokens": ["<tool>"]}},
    "extra_special_tokens by name": {"tokenizer_config": {"extra_special_tokens": {"tool_token": "<tool>"}}},
    "a name of its own": {"tokenizer_config": {"image_token": "<image>", "pad_token": "<pad>"}},
    "names": {"tokenizer_config": {"bos_token": "<s>", "eos_token": "</s>", "pad_token": "<tool>", "mask_token": None}},
    "a described name": {
        "tokenizer_config": {"mask_token": {"__type": "AddedToken", **described("<tool>", lstrip=True)}}
    },
    "a name that is numbered too": {
        "tokenizer_config": {
            "eos_token": "<tool>",
            "added_tokens_decoder": {str(NEW): described("<tool>", rstrip=True)},
        }
    },
    "special_tokens_map": {"special_tokens_map": {"eos_token": "<tool>", "bos_token": described("<s>")}},
    "special_tokens_map, further": {
        "special_tokens_map": {"additional_special_tokens": ["<tool>"], "pad_token": "<pad>"}
    },
    "added_tokens": {"added_tokens": {"<tool>": NEW, "<image>": NEW + 1}},
    "added_tokens, special": {"added_tokens": {"<tool>": NEW}, "tokenizer_config": {"eos_token": "<tool>"}},
    "added_tokens and the map": {"added_tokens": {"<tool>": NEW}, "special_tokens_map": {"eos_token": "<tool>"}},
}


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("own", [(), (AddedToken("<tool>", normalized=False, rstrip=True),)], ids=["only", "also"])
def test_every_place_is_read_as_transformers_reads_it(folder, place, own):
    transformers = pytest.importorskip("transformers")
    if own and place == "added_tokens_decoder, whole words":
        own = (AddedToken("tool", normalized=False),)
    write(folder, *own, **PLACES[place])
    peer = transformers.AutoTokenizer.from_pretrained(folder)
    mine = load(folder).tokenizer
    for text in TEXTS:
        ids = mine.encode(text)
        assert ids == peer(text).input_ids
        assert mine.decode(ids) == peer.decode(ids, skip_special_tokens=True)
    assert mine.eos_id == peer.eos_token_id
    assert mine.bos_id == (1 if peer.bos_token_id is None else peer.bos_token_id)  # 1: by config.json


@pytest.mark.parametrize("place", PLACES)
def test_a_saved_folder_says_the_same(folder, tmp_path, place):
    write(folder, **PLACES[place])
    model = load(folder)
    model.save(tmp_path / "saved")
    again = load(tmp_path / "saved")
    for text in TEXTS:
        assert again.tokenizer.encode(text) == model.tokenizer.encode(text)
    assert again.end_ids == model.end_ids
    for name in PLACES[place]:
        assert json.loads((tmp_path / "saved" / f"{name}.json").read_text()) == json.loads(
            (folder / f"{name}.json").read_text()
        )


def test_one_id_for_one_token(folder):
    write(folder, tokenizer_config={"added_tokens_decoder": {str(NEW): described("<tool>")}})
    tokenizer = load(folder).tokenizer
    ids = tokenizer.encode("ab<tool>c")
    assert len(ids) == 4
    assert ids[2] == NEW
    assert tokenizer.decode(ids) == "ab<tool>c"


def test_a_file_of_the_older_kind_is_read_beside_numbered_tokens(folder):
    write(
        folder,
        tokenizer_config={"added_tokens_decoder": {str(NEW): described("<tool>")}},
        special_tokens_map={"pad_token": "<pad>"},
        added_tokens={"<image>": NEW + 1, "<tool>": NEW},
    )
    assert load(folder).tokenizer.encode("<image><tool><pad>") == [NEW + 1, NEW, NEW + 2]


def test_an_added_token_that_another_file_calls_special(folder):
    write(folder, added_tokens={"<tool>": NEW}, special_tokens_map={"additional_special_tokens": ["<tool>"]})
    tokenizer = load(folder).tokenizer
    assert tokenizer.encode("a<tool>")[1] == NEW
    assert tokenizer.decode(tokenizer.encode("a<tool>b")) == "ab"


def test_special_tokens_in_a_text_may_be_split(folder):
    transformers = pytest.importorskip("transformers")
    files = {"tokenizer_config": {"split_special_tokens": True, "pad_token": "<pad>"}}
    write(folder, AddedToken("<tool>", special=False), AddedToken("<image>", special=True), **files)
    peer, mine = transformers.AutoTokenizer.from_pretrained(folder), load(folder).tokenizer
    for text in TEXTS:
        assert mine.encode(text) == peer(text).input_ids
    write(folder, tokenizer_config={"split_special_tokens": "yes"})
    with pytest.raises(CheckpointError, match=r"tokenizer_config\.json: split_special_tokens: expected true or false"):
        load(folder)


CONTRADICTIONS = {
    "another token's id": (
        {"tokenizer_config": {"added_tokens_decoder": {"5": described("<tool>")}}},
        "tokenizer_config.json: added_tokens_decoder.5: '<tool>' has the id 5; by tokenizer.json 5 is",
    ),
    "another id": (
        {"tokenizer_config": {"added_tokens_decoder": {str(NEW): described("<s>")}}},
        f"'<s>' has the id {NEW}; by tokenizer.json it has the id 0",
    ),
    "a gap": (
        {"tokenizer_config": {"added_tokens_decoder": {str(NEW + 5): described("<tool>")}}},
        f"'<tool>' has the id {NEW + 5}; by tokenizer.json it has the id {NEW}",
    ),
    "the older file": (
        {"added_tokens": {"<tool>": 3}},
        "added_tokens.json: <tool>: '<tool>' has the id 3; by tokenizer.json 3 is",
    ),
    "two files": (
        {
            "tokenizer_config": {"added_tokens_decoder": {str(NEW): described("<tool>")}},
            "added_tokens": {"<tool>": NEW + 1},
        },
        f"added_tokens.json: <tool>: '<tool>' has the id {NEW + 1}; by .*added_tokens_decoder.{NEW} it is {NEW}",
    ),
    "two tokens of one id": (
        {"added_tokens": {"<tool>": NEW, "<image>": NEW}},
        f"'<image>' has the id {NEW}; by .*<tool> that is '<tool>'",
    ),
    "no id": (
        {"tokenizer_config": {"added_tokens_decoder": {"x": described("<tool>")}}},
        "added_tokens_decoder.x: expected a token id.*, got 'x'",
    ),
    "a fraction": ({"added_tokens": {"<tool>": 1.5}}, "added_tokens.json: <tool>: expected a token id, got 1.5"),
    "no text": (
        {"tokenizer_config": {"added_tokens_decoder": {str(NEW): {"lstrip": True}}}},
        f"added_tokens_decoder.{NEW}: expected a text, or an object with a text",
    ),
    "no flag": (
        {"tokenizer_config": {"added_tokens_decoder": {str(NEW): described("<tool>", lstrip="yes")}}},
        "expected true or false for lstrip",
    ),
    "an unknown flag": (
        {"tokenizer_config": {"added_tokens_decoder": {str(NEW): described("<tool>", twist=True)}}},
        "expected content and lstrip, .*, not twist",
    ),
    "no object": ({"tokenizer_config": {"added_tokens_decoder": [1]}}, r"added_tokens_decoder: expected.*, got \[1\]"),
    "no list": (
        {"tokenizer_config": {"additional_special_tokens": "x"}},
        "additional_special_tokens: expected",
    ),
    "a name of no text": (
        {"special_tokens_map": {"eos_token": 5}},
        "special_tokens_map.json: eos_token: expected",
    ),
}


@pytest.mark.parametrize("case", CONTRADICTIONS)
def test_contradictions_are_named(folder, case):
    files, text = CONTRADICTIONS[case]
    write(folder, **files)
    with pytest.raises(CheckpointError, match=text):
        load(folder)


def test_an_id_that_tokenizer_json_itself_contradicts(folder):
    write(folder, AddedToken("<tool>"))
    raw = json.loads((folder / "tokenizer.json").read_text())
    raw["added_tokens"][0]["id"] = 90
    (folder / "tokenizer.json").write_text(json.dumps(raw))
    with pytest.raises(CheckpointError, match=f"added_tokens gives '<tool>' the id 90; by its vocabulary it is {NEW}"):
        load(folder)


def test_thousands_of_added_tokens_take_no_time(folder):
    entries = {str(NEW + i): described(f"<unused{i}>", special=True) for i in range(5000)}
    write(folder, tokenizer_config={"added_tokens_decoder": entries})
    assert load(folder).tokenizer.encode("<unused4999>a<unused7>")[::2] == [NEW + 4999, NEW + 7]


def test_the_tokens_that_begin_and_end_a_text(folder):
    def options(file, **values):
        path = folder / file
        known = json.loads(path.read_text()) if path.exists() else {}
        path.write_text(json.dumps(known | values))

    def ends():
        return load(folder).end_ids

    options("config.json", eos_token_id=None, bos_token_id=None)
    write(folder)
    assert ends() == ()
    write(folder, tokenizer_config={"eos_token": "</s>"})
    assert ends() == (1,)
    write(folder, special_tokens_map={"eos_token": "b"})
    own = load(folder).tokenizer.eos_id
    assert ends() == (own,)
    options("config.json", eos_token_id=[5, 6])
    assert ends() == (5, 6, own)
    options("generation_config.json", eos_token_id=[own, 7])
    assert ends() == (own, 7)
    assert generate(load(folder), [3], max_tokens=1)[0].finish in ("end", "length")
    assert load(folder).tokenizer.bos_id is None
    options("config.json", bos_token_id=4)
    assert load(folder).tokenizer.bos_id == 4
    options("generation_config.json", bos_token_id=9)
    assert load(folder).tokenizer.bos_id == 9
    write(folder, tokenizer_config={"bos_token": "<s>"})
    assert load(folder).tokenizer.bos_id == 0
    options("config.json", bos_token_id="x")
    options("generation_config.json", bos_token_id="x")
    write(folder)
    with pytest.raises(CheckpointError, match=r"bos_token_id: expected.*, got 'x'"):
        load(folder)
