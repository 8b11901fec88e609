"""Words behind masks: `regard.models.fill` and `regard fill`."""

import json
from dataclasses import asdict

import pytest
import torch

from regard.cli import main
from regard.errors import NoTokenizer
from regard.models import Encoder, fill, from_config, load

WORDS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "the", "capital", "of", "france", "is", "paris", "##s", "."]
TEXT = "The capital of [MASK] is [MASK]."


def tokenizer():
    """BERT's, of thirteen words."""
    backends = pytest.importorskip("tokenizers")
    backend = backends.Tokenizer(
        backends.models.WordPiece({word: i for i, word in enumerate(WORDS)}, unk_token="[UNK]")
    )
    backend.normalizer = backends.normalizers.BertNormalizer(lowercase=True)
    backend.pre_tokenizer = backends.pre_tokenizers.BertPreTokenizer()
    backend.decoder = backends.decoders.WordPiece()
    backend.post_processor = backends.processors.BertProcessing(("[SEP]", 3), ("[CLS]", 2))
    backend.add_special_tokens(WORDS[:5])
    return backend


FAMILIES = {
    "bert": ("BertForMaskedLM", {}),
    "modernbert": ("ModernBertForMaskedLM", {}),
    "deberta-v2": ("DebertaV2ForMaskedLM", {"relative_attention": True, "pos_att_type": ["c2p"], "type_vocab_size": 2}),
    "longformer": ("LongformerForMaskedLM", {"attention_window": 4}),
    "big_bird": ("BigBirdForMaskedLM", {"block_size": 2}),
}


def write(kind, folder, **about):
    """A random model with a head of words, and a tokenizer."""
    cls, options = FAMILIES[kind]
    sizes = {"vocab_size": 13, "hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2, "pad_token_id": 0}
    torch.manual_seed(0)
    config = {"model_type": kind, "architectures": [cls], **sizes, "intermediate_size": 6, "initializer_range": 0.7}
    from_config({**config, "max_position_embeddings": 24, **options}).save(folder)
    tokenizer().save(str(folder / "tokenizer.json"))
    named = {"mask_token": "[MASK]", **about}
    (folder / "tokenizer_config.json").write_text(json.dumps({k: v for k, v in named.items() if v is not None}))
    return folder


@pytest.mark.parametrize("kind", FAMILIES)
def test_the_likeliest_words_of_each_mask(kind, tmp_path):
    model = load(write(kind, tmp_path), dtype=torch.float64)
    assert isinstance(model, Encoder)
    masks = fill(model, TEXT, top=3)
    ids = torch.tensor([[2, 5, 6, 7, 4, 9, 4, 12, 3]])
    with torch.no_grad():
        shares = model.logits(model(ids))[0, [4, 6]].double().softmax(-1)
    for mask, share in zip(masks, shares, strict=True):
        best = share.argsort(descending=True)[:3].tolist()
        assert [candidate.id for candidate in mask] == best
        assert [candidate.text for candidate in mask] == [WORDS[i] for i in best]
        assert [candidate.probability for candidate in mask] == pytest.approx(share[best].tolist(), rel=1e-12)
    everything = fill(model, TEXT, top=99)[0]
    assert len(everything) == 13 and sum(c.probability for c in everything) == pytest.approx(1, abs=1e-12)


def test_a_model_in_training_answers_as_in_evaluation_and_goes_on_training(tmp_path):
    model = load(write("bert", tmp_path)).train()
    assert fill(model, TEXT) == fill(load(tmp_path), TEXT)
    assert all(module.training for module in model.modules())


def test_what_cannot_be_filled_is_named(tmp_path):
    model = load(write("bert", tmp_path))
    with pytest.raises(
        ValueError, match=r"text: expected \[MASK\] at least once, where a token is asked for, got 'the'"
    ):
        fill(model, "the")
    with pytest.raises(TypeError, match="text: expected a text with masks, got list"):
        fill(model, [4])
    with pytest.raises((TypeError, ValueError), match="top"):
        fill(model, TEXT, top=0)
    with pytest.raises(TypeError, match="model: expected an Encoder with a head of masked words, got"):
        fill(load("tests/checkpoints/llama"), TEXT)
    with pytest.raises(ValueError, match="got one that ends at its last hidden state; a head is read where"):
        fill(load("tests/checkpoints/bert"), TEXT)
    (tmp_path / "tokenizer_config.json").unlink()
    with pytest.raises(
        ValueError, match="model: expected a tokenizer with a mask token, got one whose files name none"
    ):
        fill(load(tmp_path), TEXT)
    (tmp_path / "tokenizer.json").unlink()
    with pytest.raises(NoTokenizer, match=r"the folder has no tokenizer\.json"):
        fill(load(tmp_path), TEXT)


def test_the_command_prints_tables_and_json(tmp_path, capsys):
    model = load(write("bert", tmp_path))
    assert main(["fill", TEXT, "--model", str(tmp_path), "--top", "2"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split() == ["mask", "token", "probability"]
    masks = fill(model, TEXT, top=2)
    want = [[str(n), c.text, f"{c.probability:.4f}"] for n, mask in enumerate(masks, 1) for c in mask]
    assert [line.split() for line in lines[1:]] == want
    assert main(["fill", "[MASK]", "--model", str(tmp_path), "--json", "--top", "1"]) == 0
    assert json.loads(capsys.readouterr().out) == [[asdict(c) for c in mask] for mask in fill(model, "[MASK]", top=1)]
    assert main(["fill", "Paris [MASK].", "--model", str(tmp_path), "--dtype", "float64"]) == 0
    assert capsys.readouterr().out.splitlines()[0].split() == ["token", "probability"]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["fill", TEXT], "Missing option '--model'"),
        (["fill", TEXT, "--model", "nowhere"], "path: expected a folder with config.json"),
        (
            ["fill", TEXT, "--model", "tests/checkpoints/llama"],
            "--model: expected an encoder with a head of masked words",
        ),
        (["fill", TEXT, "--model", "tests/checkpoints/bert"], "got one that ends at its last hidden state"),
    ],
)
def test_mistakes_of_the_command_are_one_line(arguments, said, capsys):
    assert main(arguments) == 2
    assert said in capsys.readouterr().err


def test_regard_generate_tells_of_regard_fill(tmp_path, capsys):
    write("bert", tmp_path)
    assert main(["generate", "The", "--model", str(tmp_path)]) == 2
    assert "does not continue texts; regard fill finds the words behind its masks" in capsys.readouterr().err
