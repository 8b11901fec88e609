"""What a tokenizer's file stores beside the tokenisation changes no encoding, and is written back."""

import json
import shutil
from pathlib import Path

import pytest
from tokenizers import Tokenizer as Backend
from tokenizers import models, pre_tokenizers, processors

from regard.models import Tokenizer, generate, load

LLAMA = Path(__file__).parents[1] / "checkpoints" / "llama"


def words():
    backend = Backend(models.WordLevel({"[PAD]": 0} | {c: i + 1 for i, c in enumerate("abcdef")}, unk_token="[PAD]"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    return backend


def truncated(backend, **how):
    backend.enable_truncation(3, **how)


def padded(backend, **how):
    backend.enable_padding(**how)


STATES = {
    "truncation": lambda b: truncated(b),
    "truncation on the left": lambda b: truncated(b, direction="left"),
    "truncation with a stride": lambda b: truncated(b, stride=1),
    "truncation of the first only": lambda b: truncated(b, strategy="only_first"),
    "padding to a length": lambda b: padded(b, length=9),
    "padding on the left": lambda b: padded(b, length=9, direction="left"),
    "padding to a multiple": lambda b: padded(b, pad_to_multiple_of=8),
    "padding to the longest": lambda b: padded(b),
    "both": lambda b: (truncated(b), padded(b, length=5)),
}


@pytest.mark.parametrize("state", STATES)
def test_texts_are_encoded_whole(tmp_path, state):
    backend = words()
    STATES[state](backend)
    shutil.copytree(LLAMA, tmp_path / "model")
    backend.save(str(tmp_path / "model" / "tokenizer.json"))
    model = load(tmp_path / "model")
    for tokenizer in (model.tokenizer, Tokenizer(backend)):
        assert tokenizer.encode("a b c d e f") == [1, 2, 3, 4, 5, 6]
        assert tokenizer.encode("a") == [1]
        assert tokenizer.encode("") == []
        assert [e.ids for e in tokenizer.backend.encode_batch(["a b c d", "e"])] == [[1, 2, 3, 4], [5]]
    together = generate(model, ["a b c d e f", "c"], max_tokens=2, end_ids=())
    assert together.statistics.prompt_tokens == 7
    apart = [generate(model, ids, max_tokens=2, end_ids=())[0].ids for ids in ([1, 2, 3, 4, 5, 6], [3])]
    assert [c.ids for c in together.continuations] == apart


@pytest.mark.parametrize("state", STATES)
def test_the_state_is_written_back(tmp_path, state):
    backend = words()
    STATES[state](backend)
    before = backend.to_str()
    tokenizer = Tokenizer(backend)
    tokenizer.encode("a b c d e f")
    assert backend.to_str() == before  # the caller's own is left as it was
    assert json.loads(tokenizer.to_json()) == json.loads(before)


def test_special_tokens_round_a_text_stay():
    backend = words()
    backend.add_special_tokens(["<s>", "</s>"])
    backend.post_processor = processors.TemplateProcessing(
        single="<s> $A </s>", special_tokens=[("<s>", 7), ("</s>", 8)]
    )
    truncated(backend)
    assert Tokenizer(backend).encode("a b c d") == [7, 1, 2, 3, 4, 8]


def test_merges_are_not_left_out_at_random(tmp_path):
    merges = [("a", "b"), ("ab", "c"), ("abc", "d")]
    vocab = {"a": 0, "b": 1, "c": 2, "d": 3, "ab": 4, "abc": 5, "abcd": 6}
    backend = Backend(models.BPE(vocab, merges, dropout=0.7))
    backend.save(str(tmp_path / "tokenizer.json"))
    for tokenizer in (Tokenizer.from_file(tmp_path / "tokenizer.json", {}), Tokenizer(backend)):
        assert all(tokenizer.encode("abcd") == [6] for _ in range(60))
        assert json.loads(tokenizer.to_json())["model"]["dropout"] == pytest.approx(0.7)
    assert backend.model.dropout == pytest.approx(0.7)


def test_what_tokenizer_config_says_of_begin_and_end_is_read_as_transformers_reads_it(tmp_path):
    transformers = pytest.importorskip("transformers")
    backend = words()
    backend.add_special_tokens(["<s>", "</s>"])
    for processor in (
        None,
        processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 7)]),
        processors.TemplateProcessing(single="$A </s>", special_tokens=[("</s>", 8)]),
    ):
        if processor is not None:
            backend.post_processor = processor
        backend.save(str(tmp_path / "tokenizer.json"))
        for flags in ({}, {"add_bos_token": True, "add_eos_token": True}, {"add_bos_token": False}):
            about = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<s>", "eos_token": "</s>", **flags}
            (tmp_path / "tokenizer_config.json").write_text(json.dumps(about))
            peer = transformers.AutoTokenizer.from_pretrained(tmp_path)
            mine = Tokenizer.from_file(tmp_path / "tokenizer.json", about)
            assert mine.encode("a b") == peer("a b").input_ids
            assert (mine.bos_id, mine.eos_id) == (peer.bos_token_id, peer.eos_token_id) == (7, 8)
