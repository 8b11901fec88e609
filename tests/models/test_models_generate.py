"""Generation: choosing tokens, padding, endings, streaming, and what is refused."""

import inspect
from pathlib import Path

import pytest
import torch

from regard.models import Decoder, Embedding, Origin, Sampling, TextStream, Tokenizer, generate, load, stream
from regard.models.layouts import LAYOUTS

CHECKPOINTS = Path(__file__).parents[1] / "checkpoints"


@pytest.fixture(scope="module")
def model():
    return load(CHECKPOINTS / "llama")


def letters():
    """A byte-level tokenizer over 97 tokens: all single bytes it can hold, so that characters are split over tokens."""
    from tokenizers import Tokenizer as Backend
    from tokenizers import decoders, models, pre_tokenizers

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet(), key=lambda c: (not c.isascii(), c))[:96]
    backend = Backend(models.BPE({"<s>": 0} | {c: i + 1 for i, c in enumerate(alphabet)}, []))
    backend.pre_tokenizer, backend.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    backend.add_special_tokens(["<s>"])
    return Tokenizer(backend, bos_id=0)


@pytest.fixture
def speaking():
    model = load(CHECKPOINTS / "mistral")
    model.origin = Origin(LAYOUTS["mistral"], model.origin.config, letters(), (2,))
    return model


@torch.no_grad()
def test_greedy_equals_the_loop_without_a_cache(model):
    ids = [5, 9, 11]
    text = torch.tensor([ids])
    for _ in range(10):
        text = torch.cat([text, model(text)[:, -1:].argmax(-1)], 1)
    got = generate(model, ids, max_tokens=10, end_ids=())
    assert got[0].ids == text[0, 3:].tolist()
    assert got[0].finish == "length"
    assert got[0].text is None
    s = got.statistics
    assert (s.prompt_tokens, s.new_tokens, s.steps, s.cache_tokens) == (3, 10, 9, 12)


@pytest.mark.parametrize("how", [{}, {"temperature": 0.9, "seed": 3, "top_k": 20}], ids=["greedy", "sampled"])
def test_ragged_batches_equal_single_rows(model, how):
    prompts = [[5, 9, 11, 4, 4, 8], [7], [3, 3, 3]]
    together = generate(model, prompts, max_tokens=8, end_ids=(), **how)
    greedy = [generate(model, p, max_tokens=8, end_ids=(), **how)[0].ids for p in prompts]
    first = 1 if how else 3  # row r of a batch has draws of its own; row 0's are those of a single prompt
    assert [c.ids for c in together.continuations][:first] == greedy[:first]
    assert generate(model, torch.tensor([[5, 9], [7, 3]]), max_tokens=2).continuations == (
        generate(model, [[5, 9], torch.tensor([7, 3])], max_tokens=2).continuations
    )


def test_several_end_tokens(model):
    free = generate(model, [5, 9], max_tokens=12, end_ids=())[0].ids
    ends = [free[7], free[3]]
    stopped = generate(model, [5, 9], max_tokens=12, end_ids=ends)[0]
    at = min(free.index(e) for e in ends)
    assert stopped.ids == free[: at + 1]
    assert stopped.finish == "end"
    both = generate(model, [[5, 9], [8, 8, 8]], max_tokens=12, end_ids=ends)
    assert both[0].ids == stopped.ids


def test_sampling_repeats_by_seed_and_leaves_the_global_generator_alone(model):
    torch.manual_seed(5)
    state = torch.get_rng_state()
    how = {"max_tokens": 12, "end_ids": (), "temperature": 1.5}
    a, b, c = (generate(model, [5, 9], seed=s, **how)[0].ids for s in (1, 1, 2))
    assert a == b != c
    assert generate(model, [5, 9], **how)[0].ids != generate(model, [5, 9], **how)[0].ids
    assert torch.equal(torch.get_rng_state(), state)


def test_sampling_follows_the_distribution():
    logits = torch.tensor([2.0, 1.0, 0.0, -1.0, -30.0])
    rows, n = 4000, 5
    for how in (
        {"temperature": 1.0},
        {"temperature": 0.5},
        {"temperature": 1.0, "top_k": 2},
        {"temperature": 1.0, "top_p": 0.7},
        {"temperature": 2.0, "top_k": 3, "top_p": 0.9},
    ):
        want = (logits.double() / how["temperature"]).softmax(-1)
        if "top_k" in how:
            want[how["top_k"] :] = 0
            want /= want.sum()
        if "top_p" in how:
            before = want.cumsum(0) - want
            want[before >= how["top_p"]] = 0
            want /= want.sum()
        drawn = Sampling(**how, seed=0).chooser(rows)(logits.expand(rows, n))
        share = torch.bincount(drawn, minlength=n).double() / rows
        assert (share - want).abs().max() <= 4 * (0.25 / rows) ** 0.5
        assert (share[want == 0] == 0).all()


def test_a_small_top_p_and_top_k_of_one_are_greedy(model):
    greedy = generate(model, [5, 9], max_tokens=6, end_ids=())[0].ids
    for how in ({"top_k": 1}, {"top_p": 1e-9}, {"temperature": 1e-308}, {"temperature": 5e-324, "top_p": 0.9}):
        assert generate(model, [5, 9], max_tokens=6, end_ids=(), **{"temperature": 3.0} | how)[0].ids == greedy


def test_a_tiny_temperature_is_its_limit():
    rows = 40
    for how in ({}, {"top_k": 3}, {"top_p": 0.5}):
        for temperature in (1e-20, 1e-308, 5e-324):
            choose = Sampling(temperature, seed=0, **how).chooser(rows)
            logits = torch.tensor([1.0, 5.0, -2.0, -float("inf"), 4.9])
            assert (choose(logits.expand(rows, -1)) == 1).all()
            assert (choose(-logits[[0, 1, 2, 4]].expand(rows, -1)) == 2).all()
            assert set(choose(torch.tensor([7.0, 2.0, 7.0]).expand(rows, -1)).tolist()) <= {0, 2}


def test_text_streams_and_stop_strings(speaking):
    whole = generate(speaking, "ab", max_tokens=40, end_ids=())[0]
    assert len(whole.text) > 4
    running = stream(speaking, "ab", max_tokens=40, end_ids=())
    assert "".join(running) == whole.text
    assert running.ids == whole.ids
    assert running.finish == "length"
    for stop in (whole.text[2:5], whole.text[3], ["zzzzzz", whole.text[1:4], whole.text[2:3]]):
        ends = [
            (whole.text.find(s) + len(s), whole.text.find(s))
            for s in ([stop] if isinstance(stop, str) else stop)
            if s in whole.text
        ]
        _, first = min(ends)  # the one that is complete first
        cut = generate(speaking, "ab", max_tokens=40, end_ids=(), stop=stop)[0]
        assert (cut.text, cut.finish) == (whole.text[:first], "stop")
        assert len(cut.ids) < 40
        assert "".join(stream(speaking, "ab", max_tokens=40, end_ids=(), stop=stop)) == cut.text


def test_characters_over_several_tokens_come_whole():
    class Bytes:
        """One byte a token."""

        def decode(self, ids):
            return bytes(ids).decode("utf-8", errors="replace")

    for text in ("naïve 你好 🙂!", "\ufffd stays", "end 🙂"):
        pieces, decoder = [], TextStream(Bytes())
        for byte in text.encode():
            pieces.append(decoder.push(byte))
        pieces.append(decoder.flush())
        assert "".join(pieces) == text
        assert all(p == "" or p in text for p in pieces)
    cut = TextStream(Bytes())
    assert [cut.push(b) for b in "🙂".encode()[:3]] == ["", "", ""]
    assert cut.flush() == "\ufffd"


def test_an_empty_prompt(model, speaking):
    with pytest.raises(ValueError, match="expected at least one token a prompt, got none"):
        generate(model, [[]], max_tokens=1)
    with pytest.raises(ValueError, match="expected at least one token a prompt, got none"):
        generate(model, torch.zeros(0, dtype=torch.long), max_tokens=1)
    assert generate(speaking, "", max_tokens=3)[0].ids == generate(speaking, [0], max_tokens=3)[0].ids


BAD = {
    "max_tokens": [0, -1, 2.5, True],
    "temperature": [-0.1, float("nan"), float("inf"), 10**400, True, "x", None],
    "top_k": [0, -3, 1.5],
    "top_p": [0, 1.01, -1, float("nan"), "x"],
    "seed": [-1, 1.5],
    "stop": ["", ["a", ""], [3], 5, b"x", None],
    "end_ids": [5, ("a",), "a", b"a", [1.5], [True], torch.tensor([1])],
}


@pytest.mark.parametrize(("name", "value"), [(n, v) for n, vs in BAD.items() for v in vs])
def test_arguments_out_of_range_are_named(speaking, name, value):
    for run in (generate, stream):
        with pytest.raises(ValueError, match=f"^{name}: expected .*, got "):
            run(speaking, "ab", **{"max_tokens": 2, name: value})


@pytest.mark.parametrize("prompts", [None, 5, 1.5, [1, "a"], [1.5], [None], b"x", [b"x"], {1: 2}, [[1], 2], [True]])
def test_prompts_of_another_kind_are_named(speaking, prompts):
    for run, name in ((generate, "prompts"), (stream, "prompt")):
        with pytest.raises(TypeError, match=f"^{name}: expected a text, token ids or a tensor for a prompt, got "):
            run(speaking, prompts, max_tokens=1)


def test_no_prompts(speaking):
    with pytest.raises(ValueError, match="prompts: expected at least one prompt, got none"):
        generate(speaking, [], max_tokens=1)
    assert generate(speaking, [[]], max_tokens=3)[0].ids == generate(speaking, [0], max_tokens=3)[0].ids
    running = stream(speaking, [], max_tokens=3)  # one prompt, without tokens
    assert "".join(running) == generate(speaking, [[]], max_tokens=3)[0].text


def test_each_module_stays_in_its_own_mode(speaking):
    speaking.train()
    speaking.layers[0].eval()
    before = [m.training for m in speaking.modules()]
    generate(speaking, [5, 9], max_tokens=2)
    assert [m.training for m in speaking.modules()] == before
    for _ in stream(speaking, [5, 9], max_tokens=3):
        break
    assert [m.training for m in speaking.modules()] == before


def test_prompts_that_cannot_be(model):
    with pytest.raises(ValueError, match="no tokenizer"):
        generate(model, "text", max_tokens=1)
    with pytest.raises(ValueError, match="no tokenizer"):
        generate(model, [1], max_tokens=1, stop="x")
    with pytest.raises(ValueError, match="no tokenizer"):
        stream(model, [1], max_tokens=1)
    with pytest.raises(ValueError, match="prompts: expected at least one prompt, got none"):
        generate(model, torch.zeros(0, 3, dtype=torch.long), max_tokens=1)
    with pytest.raises(TypeError, match=r"got a list with 1\.5"):
        generate(model, [[1.5]], max_tokens=1)
    with pytest.raises(ValueError, match="ids: expected 0 to 96, the vocabulary, got 5 to 97"):
        generate(model, [5, 97], max_tokens=1)
    with pytest.raises(TypeError, match="model: expected a Decoder or an EncoderDecoder, got Encoder"):
        generate(load(CHECKPOINTS / "bert"), [1], max_tokens=1)
    assert isinstance(model, Decoder)


def test_probing_finds_no_tokenizer(model, speaking):
    for without in (model, Decoder(Embedding(torch.nn.Embedding(5, 4)), [])):
        assert not hasattr(without, "tokenizer")
        assert "tokenizer" not in dict(inspect.getmembers(without))
        with pytest.raises(ValueError, match=r"no tokenizer: .*pass token ids"):
            without.tokenizer  # noqa: B018
        with pytest.raises(AttributeError, match="no attribute 'tokenized'"):
            without.tokenized  # noqa: B018
    assert hasattr(speaking, "tokenizer")
