"""What models with an encoder write: greedy and sampled texts from sources of several lengths, with one cache."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from test_models_generate import letters

from regard.cli import main
from regard.models import Origin, from_config, generate, load, stream
from regard.models.layouts import LAYOUTS

CHECKPOINTS = Path(__file__).parents[1] / "checkpoints"
FOLDERS = ["t5_v1_1", "whisper", "led", "bigbird_pegasus"]


def read(folder):
    """What the encoder reads in row 0, the text that is to be written, and its first token."""
    tensors = load_file(CHECKPOINTS / folder / "expected.safetensors")
    source = tensors["input.input_features" if folder == "whisper" else "input.input_ids"][:1]
    if "input.attention_mask" in tensors:
        source = source[:, tensors["input.attention_mask"][0].bool()]
    want = tensors["output.greedy_from_start_without_cache"][0].tolist()
    return source, want[1:], want[0], tensors


@pytest.mark.parametrize("folder", [f for f in FOLDERS if f != "led"])  # whose answer has global tokens
def test_greedy_texts_are_those_of_whole_runs(folder):
    source, want, first, _ = read(folder)
    model = load(CHECKPOINTS / folder)
    assert model.origin.config["decoder_start_token_id"] == first
    got = generate(model, source, max_tokens=10, end_ids=())
    assert got[0].ids == want and got[0].finish == "length"
    assert got.statistics.cache_tokens == 10 and got.statistics.steps == 9
    if folder == "whisper":
        assert generate(model, source[0], max_tokens=10, end_ids=())[0].ids == want
        assert generate(model, [source[0], source[0]], max_tokens=10, end_ids=())[1].ids == want
        assert got.statistics.prompt_tokens == 1 + 20
    else:
        assert generate(model, source[0].tolist(), max_tokens=10, end_ids=(), start=[first])[0].ids == want
        assert got.statistics.prompt_tokens == 1 + source.shape[1]


@torch.no_grad()
@pytest.mark.parametrize("folder", ["t5_v1_1", "led", "bigbird_pegasus"])
def test_the_loop_without_a_cache(folder):
    model, source = load(CHECKPOINTS / folder), [5, 9, 11, 4, 8]
    text = torch.tensor([[3, 7]])
    for _ in range(6):
        text = torch.cat([text, model(text, source=torch.tensor([source]))[:, -1:].argmax(-1)], 1)
    assert generate(model, source, max_tokens=6, end_ids=(), start=[3, 7])[0].ids == text[0, 2:].tolist()


@pytest.mark.parametrize("how", [{}, {"temperature": 0.9, "seed": 3, "top_k": 20}], ids=["greedy", "sampled"])
def test_sources_of_several_lengths_together(how):
    model, sources = load(CHECKPOINTS / "t5_v1_1"), [[5, 9, 11, 4, 4, 8], [7], [3, 3, 3]]
    together = generate(model, sources, max_tokens=8, end_ids=(), **how)
    alone = [generate(model, source, max_tokens=8, end_ids=(), **how)[0].ids for source in sources]
    first = 1 if how else 3  # row r of a batch has draws of its own; row 0's are those of a single source
    assert [c.ids for c in together.continuations][:first] == alone[:first]
    assert together.statistics.prompt_tokens == 10 + 3


def test_a_row_ends_and_training_goes_on():
    model = load(CHECKPOINTS / "t5_v1_1").train()
    source, want, _, _ = read("t5_v1_1")
    got = generate(model, source, max_tokens=10, end_ids=[want[4]])
    assert got[0].ids == want[: want.index(want[4]) + 1] and got[0].finish == "end"
    assert all(module.training for module in model.modules())


def test_texts_and_streams():
    model = load(CHECKPOINTS / "t5_v1_1")
    model.origin = Origin(LAYOUTS["t5"], model.origin.config, letters(), (1,))
    whole = generate(model, "a question", max_tokens=9, end_ids=())[0]
    pieces = stream(model, "a question", max_tokens=9, end_ids=())
    assert "".join(pieces) == whole.text and pieces.ids == whole.ids
    ids = model.tokenizer.encode("a question")
    assert generate(model, ids, max_tokens=9, end_ids=())[0].ids == whole.ids


def test_where_a_text_starts():
    model = load(CHECKPOINTS / "t5_v1_1")
    config = {k: v for k, v in model.origin.config.items() if k != "decoder_start_token_id"}
    model.origin = Origin(model.origin.layout, config)
    with pytest.raises(
        ValueError, match="start: expected the token ids that a text starts with, for this model states no"
    ):
        generate(model, [5], max_tokens=2)
    model.origin = Origin(model.origin.layout, config, extras={"generation_config.json": {"decoder_start_token_id": 3}})
    assert (
        generate(model, [5], max_tokens=4).continuations == generate(model, [5], max_tokens=4, start=[3]).continuations
    )
    for start in ([], [True], "ab", 3, [0.5]):
        with pytest.raises(
            ValueError, match="start: expected token ids, at least one, or None for the checkpoint's, got"
        ):
            generate(model, [5], max_tokens=2, start=start)
    with pytest.raises(ValueError, match=r"ids: expected 0 to 96, the vocabulary, got 97 to 97"):
        generate(model, [5], max_tokens=2, start=[97])
    llama = load(CHECKPOINTS / "llama")
    with pytest.raises(ValueError, match="start: expected None for a Decoder, which continues the prompts themselves"):
        generate(llama, [5], max_tokens=2, start=[1])


def test_sources_that_cannot_be_read_are_named():
    model = load(CHECKPOINTS / "whisper")
    with pytest.raises(ValueError, match=r"features: expected a float tensor \(B, 10, 40\), mel bins and frames"):
        generate(model, torch.zeros(1, 10, 39), max_tokens=2)
    with pytest.raises(ValueError, match=r"prompts: expected features of one shape, got \[\(10, 40\), \(10, 39\)\]"):
        generate(model, [torch.zeros(10, 40), torch.zeros(10, 39)], max_tokens=2)
    with pytest.raises(ValueError, match=r"features: expected a float tensor .*, got int64"):
        generate(model, [5, 6], max_tokens=2)
    with pytest.raises(ValueError, match="prompts: expected at least one prompt, got none"):
        generate(load(CHECKPOINTS / "t5_v1_1"), [], max_tokens=2)


def test_the_command_prints_the_answer_alone(tmp_path, capsys):
    config = json.loads((CHECKPOINTS / "t5_v1_1" / "config.json").read_text())
    torch.manual_seed(1)
    from_config(config).save(tmp_path)
    letters().backend.save(str(tmp_path / "tokenizer.json"))
    model = load(tmp_path)
    want = generate(model, "a question", max_tokens=6)[0].text
    assert main(["generate", "a question", "--model", str(tmp_path), "--max-tokens", "6"]) == 0
    said = capsys.readouterr()
    assert said.out == f"{want}\n"
    assert "with room for 6 tokens" in said.err and "multi-head" not in said.err
