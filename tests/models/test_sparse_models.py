"""Longformer, BigBird, LED and BigBird-Pegasus against transformers, over the options that their families have."""

import json

import pytest
import torch

from regard.errors import CheckpointError
from regard.models import Encoder, from_config, load

transformers = pytest.importorskip("transformers")

VOCAB = 61
ENCODER = {
    "vocab_size": VOCAB,
    "hidden_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 3,
    "intermediate_size": 20,
    "max_position_embeddings": 96,
}
PAIR = {
    "vocab_size": VOCAB,
    "d_model": 24,
    "encoder_layers": 2,
    "decoder_layers": 1,
    "encoder_attention_heads": 3,
    "decoder_attention_heads": 2,
    "encoder_ffn_dim": 20,
    "decoder_ffn_dim": 30,
}


def drawn(length):
    """Ids, which are real (the second row ends in padding), and which are global."""
    generator = torch.Generator().manual_seed(length)
    ids = torch.randint(4, VOCAB, (2, length), generator=generator)
    keep = torch.ones_like(ids, dtype=torch.bool)
    keep[1, length - 5 :] = False
    flags = torch.zeros_like(keep)
    flags[:, 0] = flags[0, 7] = True
    return ids, keep, flags


@torch.no_grad()
def peer_of(cls, config, folder):
    """A model of transformers whose weights are far enough from 0 for its options to matter, and its folder."""
    torch.manual_seed(0)
    peer = getattr(transformers, cls)(config).eval()
    for parameter in peer.parameters():
        parameter.add_(0.3 * torch.randn_like(parameter) / parameter.shape[-1] ** 0.5)
    if hasattr(peer, "final_logits_bias"):
        peer.final_logits_bias.normal_()
    peer.save_pretrained(folder)
    return peer


def close(found, want):
    torch.testing.assert_close(found, want, rtol=0, atol=1e-5 * float(want.abs().max()))


@torch.no_grad()
@pytest.mark.parametrize(
    ("cls", "length", "options"),
    [
        ("LongformerModel", 23, {"attention_window": 6, "pad_token_id": 3, "type_vocab_size": 1}),
        ("LongformerForMaskedLM", 30, {"attention_window": [4, 8], "hidden_act": "relu", "layer_norm_eps": 1e-5}),
        ("LongformerForQuestionAnswering", 17, {"attention_window": [16, 4]}),
        ("LongformerForSequenceClassification", 17, {"attention_window": 4}),
    ],
)
@pytest.mark.parametrize("some", [False, True], ids=["local", "global"])
def test_longformer(cls, length, options, some, tmp_path):
    peer = peer_of(cls, transformers.LongformerConfig(**ENCODER, **options), tmp_path)
    ids, keep, flags = drawn(length)
    inner, padded = getattr(peer, "longformer", peer), ids.masked_fill(~keep, peer.config.pad_token_id)
    want = inner(padded, attention_mask=keep.long(), global_attention_mask=flags.long() if some else None)
    model = load(tmp_path)
    found = model(ids, keep=keep, global_tokens=flags if some else None)
    close(found[keep], want.last_hidden_state[keep])
    if want.pooler_output is not None:
        close(model.pool(found), want.pooler_output)


@torch.no_grad()
@pytest.mark.parametrize(
    ("cls", "length", "options"),
    [
        ("BigBirdModel", 40, {"block_size": 4, "num_random_blocks": 1}),
        ("BigBirdForMaskedLM", 61, {"block_size": 4, "num_random_blocks": 2, "use_bias": False}),
        ("BigBirdModel", 23, {"block_size": 2, "num_random_blocks": 3, "rescale_embeddings": True}),
        ("BigBirdForQuestionAnswering", 33, {"attention_type": "original_full", "use_bias": False}),
        ("BigBirdModel", 56, {"block_size": 8, "num_random_blocks": 1}),  # just read whole
        ("BigBirdForSequenceClassification", 57, {"block_size": 8, "num_random_blocks": 1}),  # just not
    ],
)
def test_big_bird(cls, length, options, tmp_path):
    peer = peer_of(cls, transformers.BigBirdConfig(**ENCODER, **options), tmp_path)
    ids, keep, _ = drawn(length)
    want = getattr(peer, "bert", peer)(ids, attention_mask=keep.long())
    model = load(tmp_path)
    found = model(ids, keep=keep)
    close(found[keep], want.last_hidden_state[keep])
    if want.pooler_output is not None:
        close(model.pool(found), want.pooler_output)


@torch.no_grad()
@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize(
    ("family", "options"),
    [
        ("LED", {"attention_window": [4, 8], "activation_function": "relu", "max_encoder_position_embeddings": 50}),
        ("LED", {"attention_window": 6, "max_decoder_position_embeddings": 9, "encoder_layerdrop": 0.1}),
        ("BigBirdPegasus", {"block_size": 4, "num_random_blocks": 1, "use_bias": True, "scale_embedding": False}),
        ("BigBirdPegasus", {"attention_type": "original_full", "activation_dropout": 0.1}),
    ],
)
def test_pairs(family, options, tied, tmp_path):
    config = getattr(transformers, f"{family}Config")(**PAIR, **options, tie_word_embeddings=tied)
    cls = f"{family}ForConditionalGeneration"
    peer = peer_of(cls, config, tmp_path / "peer")
    ids, keep, flags = drawn(42)
    written = torch.randint(4, VOCAB, (2, 7), generator=torch.Generator().manual_seed(7))
    real = torch.tensor([[True] * 5 + [False] * 2, [True] * 7])
    theirs = {"global_attention_mask": flags.long()} if family == "LED" else {}
    theirs |= {"attention_mask": keep.long(), "decoder_attention_mask": real.long(), "decoder_input_ids": written}
    ours = {"source_global": flags} if family == "LED" else {}
    model, want = load(tmp_path / "peer"), peer(ids, **theirs).logits
    close(model(written, keep=real, source=ids, source_keep=keep, **ours)[real], want[real])
    model.save(tmp_path / "ours")
    again = getattr(transformers, cls).from_pretrained(tmp_path / "ours").eval()
    assert torch.equal(again(ids, **theirs).logits[real], want[real])


# ---- what is refused -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "options", "words"),
    [
        ("longformer", {"attention_window": 5}, "attention_window: expected an even number above 0, or a list of 2"),
        ("longformer", {"attention_window": [4]}, r"attention_window: expected .*, got \[4\]"),
        ("longformer", {"attention_window": True}, "attention_window: expected .*, got True"),
        ("longformer", {"attention_mode": "tvm"}, "attention_mode: expected 'longformer'"),
        ("longformer", {"attention_dilation": [1, 2]}, r"attention_dilation: expected \[1, 1\]"),
        ("longformer", {"pad_token_id": 95}, "max_position_embeddings: expected more than 96"),
        ("big_bird", {"attention_type": "dense"}, "attention_type: expected block_sparse, original_full, got 'dense'"),
        ("big_bird", {"block_size": 0}, "block_size: expected a positive integer"),
        ("big_bird", {"num_random_blocks": -1}, "num_random_blocks: expected a positive integer"),
        ("big_bird", {"is_decoder": True}, "is_decoder: expected False"),
        ("led", {"encoder_attention_heads": 5}, "encoder_attention_heads: expected a divisor of d_model=24, got 5"),
        ("led", {"decoder_attention_heads": 5}, "decoder_attention_heads: expected a divisor of d_model=24, got 5"),
        ("led", {"scale_embedding": True}, "unknown option scale_embedding=True"),
        ("bigbird_pegasus", {"is_encoder_decoder": False}, "is_encoder_decoder: expected True"),
    ],
)
def test_options_that_cannot_be_placed(kind, options, words):
    sizes = ENCODER if kind in ("longformer", "big_bird") else PAIR
    with pytest.raises(CheckpointError, match=words):
        from_config({"model_type": kind, **sizes, **options})


def test_a_tensor_of_another_part_is_named(tmp_path):
    peer_of("LongformerModel", transformers.LongformerConfig(**ENCODER, attention_window=4), tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "model_type": "bert"}))
    with pytest.raises(CheckpointError, match=r"unknown option attention_window=\[4, 4\]"):
        load(tmp_path)


def test_global_tokens_need_a_layer_that_has_them():
    model = from_config({"model_type": "big_bird", **ENCODER, "block_size": 4})
    assert isinstance(model, Encoder)
    ids, _, flags = drawn(12)
    with pytest.raises(ValueError, match="global_tokens: expected None, for no layer"):
        model(ids, global_tokens=flags)
    pair = from_config({"model_type": "led", **PAIR, "attention_window": 4})
    with pytest.raises(ValueError, match="source_global: expected None without a source"):
        pair(ids, source_global=flags)


def test_the_pair_shares_one_table_where_it_is_tied():
    model = from_config({"model_type": "led", **PAIR, "attention_window": 4, "init_std": 0.5})
    assert model.encoder.embedding.tokens is model.decoder.embedding.tokens and model.decoder.head is None
    assert float(model.encoder.embedding.tokens.weight.detach().std()) == pytest.approx(0.5, rel=0.1)
    assert not model.decoder.finish.bias.any()
    loose = from_config({"model_type": "led", **PAIR, "attention_window": 4, "tie_word_embeddings": False})
    assert loose.encoder.embedding.tokens is not loose.decoder.embedding.tokens
