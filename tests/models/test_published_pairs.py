"""T5 and its relatives, and Whisper, against transformers' own models over the options that change their answers."""

import json

import pytest
import torch

from regard.errors import CheckpointError
from regard.models import EncoderDecoder, from_config, load

transformers = pytest.importorskip("transformers")

VOCAB = 61
T5 = {
    "vocab_size": VOCAB,
    "d_model": 24,
    "d_kv": 5,
    "d_ff": 20,
    "num_layers": 2,
    "num_heads": 3,
    "relative_attention_num_buckets": 8,
    "relative_attention_max_distance": 12,
    "decoder_start_token_id": 0,
}
WHISPER = {
    "vocab_size": VOCAB,
    "num_mel_bins": 7,
    "d_model": 24,
    "encoder_layers": 2,
    "decoder_layers": 1,
    "encoder_attention_heads": 3,
    "decoder_attention_heads": 2,
    "encoder_ffn_dim": 20,
    "decoder_ffn_dim": 30,
    "max_source_positions": 11,
    "max_target_positions": 12,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "decoder_start_token_id": 3,
    "begin_suppress_tokens": None,
}
CASES = {
    "t5": ("T5", T5),
    "t5-uneven-stacks": ("T5", {**T5, "num_decoder_layers": 3, "feed_forward_proj": "silu"}),
    "t5-version-1.1": ("T5", {**T5, "feed_forward_proj": "gated-gelu", "tie_word_embeddings": False}),
    "t5-gated-relu": ("T5", {**T5, "feed_forward_proj": "gated-relu", "layer_norm_epsilon": 1e-2}),
    "mt5": ("MT5", T5),
    "umt5": ("UMT5", {**T5, "num_decoder_layers": 3}),
    "whisper": ("Whisper", WHISPER),
    "whisper-relu-untied": (
        "Whisper",
        {**WHISPER, "activation_function": "relu", "decoder_layers": 3, "tie_word_embeddings": False},
    ),
}


@torch.no_grad()
def write(case, folder, heads_apart=False):
    """A model of transformers whose weights are far enough from 0 for its options to matter."""
    family, options = CASES[case]
    torch.manual_seed(0)
    config = getattr(transformers, f"{family}Config")(**options)
    peer = getattr(transformers, f"{family}ForConditionalGeneration")(config).eval()
    if heads_apart:
        peer.lm_head.weight = torch.nn.Parameter(peer.lm_head.weight.clone())
    for parameter in peer.parameters():
        parameter.add_(0.3 * torch.randn_like(parameter) / parameter.shape[-1] ** 0.5)
    peer.save_pretrained(folder)
    return peer


def close(found, want):
    torch.testing.assert_close(found, want, rtol=0, atol=1e-5 * float(want.abs().max()))


def call(case):
    """A call under transformers' names, and under the library's: sources and texts that end in padding."""
    generator = torch.Generator().manual_seed(1)
    written = torch.randint(4, VOCAB, (2, 9), generator=generator)
    real = torch.ones_like(written, dtype=torch.bool)
    real[0, 6:] = False
    theirs, ours = {"decoder_input_ids": written, "decoder_attention_mask": real.long()}, {"keep": real}
    if CASES[case][0] == "Whisper":
        features = torch.randn(2, 7, 22, generator=generator)
        return {**theirs, "input_features": features}, written, {**ours, "source": features}
    ids = torch.randint(4, VOCAB, (2, 31), generator=generator)
    keep = torch.ones_like(ids, dtype=torch.bool)
    keep[1, 20:] = False
    theirs |= {"input_ids": ids, "attention_mask": keep.long()}
    return theirs, written, {**ours, "source": ids, "source_keep": keep}


@torch.no_grad()
@pytest.mark.parametrize("case", CASES)
def test_logits_pieces_and_round_trip(case, tmp_path):
    peer = write(case, tmp_path / "peer")
    theirs, written, ours = call(case)
    model, want = load(tmp_path / "peer"), peer(**theirs)
    assert isinstance(model, EncoderDecoder)
    keep = ours["keep"]
    close(model(written, **ours)[keep], want.logits[keep])
    hidden = model.encoder(ours["source"], keep=ours.get("source_keep"))
    real = ours.get("source_keep", torch.ones(hidden.shape[:2], dtype=torch.bool))
    close(hidden[real], want.encoder_last_hidden_state[real])

    whole = peer(**{**theirs, "decoder_attention_mask": None}).logits
    cache, given = model.init_cache(2, 9, source=hidden.shape[1]), {n: t for n, t in ours.items() if n != "keep"}
    pieces = []
    for part in written.split([3, 1, 5], 1):
        pieces.append(model(part, cache=cache, **given))
        given = {}  # the source is read once
    close(torch.cat(pieces, 1), whole)

    model.save(tmp_path / "ours")
    again = type(peer).from_pretrained(tmp_path / "ours").eval()
    assert torch.equal(again(**theirs).logits, want.logits)


@torch.no_grad()
def test_a_text_without_its_padding_in_front(tmp_path):
    """Padding in front of source and text changes nothing, although relative places count slots."""
    write("t5", tmp_path)
    model, ids = load(tmp_path), torch.randint(4, VOCAB, (2, 10), generator=torch.Generator().manual_seed(2))
    keep = torch.ones_like(ids, dtype=torch.bool)
    keep[1, :4] = False
    padded = model(ids, keep=keep, source=ids, source_keep=keep)
    close(padded[1:, 4:], model(ids[1:, 4:], source=ids[1:, 4:]))


@torch.no_grad()
@pytest.mark.parametrize("stated", ["as transformers 4 writes it", "as transformers 5 writes it"])
def test_a_head_apart_from_the_table(stated, tmp_path):
    """Version 1.1 was trained with one; an option says so, or says tied although the file holds it."""
    peer = write("t5-version-1.1", tmp_path, heads_apart=True)
    config = json.loads((tmp_path / "config.json").read_text())
    if stated.endswith("4 writes it"):
        del config["scale_decoder_outputs"]
        config["tie_word_embeddings"] = False
        (tmp_path / "config.json").write_text(json.dumps(config))
    else:
        assert config["tie_word_embeddings"] and not config["scale_decoder_outputs"]
    theirs, written, ours = call("t5")
    model = load(tmp_path)
    assert not torch.equal(model.decoder.head.weight, model.decoder.embedding.tokens.weight)
    close(model(written, **ours)[ours["keep"]], peer(**theirs).logits[ours["keep"]])
    model.save(tmp_path / "ours")
    assert torch.equal(load(tmp_path / "ours")(written, **ours), model(written, **ours))


def test_a_head_that_differs_where_it_is_tied_is_named(tmp_path):
    write("t5", tmp_path, heads_apart=True)
    with pytest.raises(CheckpointError, match=r"tied by the options .* but different in the file: shared\.weight"):
        load(tmp_path)


def test_layers_share_their_tables_of_places_or_not():
    model = from_config({"model_type": "t5", **T5})
    tables = [layer.self_mixer.bias for layer in model.decoder.layers]
    assert tables[0] is tables[1] and tables[0] is not model.encoder.layers[0].mixer.bias
    own = from_config({"model_type": "umt5", **T5})
    assert len({id(layer.mixer.bias) for layer in own.encoder.layers}) == 2


@torch.no_grad()
def test_t5_starts_as_published():
    """Matrices by their number of inputs; queries so that their unscaled products with keys are of order 1."""
    sizes = {"d_model": 64, "d_kv": 32, "num_heads": 8, "d_ff": 256, "vocab_size": 500, "initializer_factor": 0.5}
    model = from_config({"model_type": "t5", **T5, **sizes})
    layer = model.decoder.layers[0]
    found = {
        0.5 * 64**-0.5: [layer.self_mixer.k_proj, layer.cross_mixer.v_proj, layer.ff.up_proj],
        0.5 * (64 * 32) ** -0.5: [layer.self_mixer.q_proj, layer.cross_mixer.q_proj],
        0.5 * (8 * 32) ** -0.5: [layer.self_mixer.o_proj],
        0.5 * 256**-0.5: [layer.ff.down_proj],
        0.5: [model.encoder.embedding.tokens],
    }
    for std, parts in found.items():
        assert [float(part.weight.std()) for part in parts] == pytest.approx([std] * len(parts), rel=0.05)


@pytest.mark.parametrize("family", ["T5", "MT5", "UMT5", "Whisper"])
def test_options_that_are_absent_mean_what_the_family_says(family):
    config = getattr(transformers, f"{family}Config")()
    with torch.device("meta"):
        peer = getattr(transformers, f"{family}ForConditionalGeneration")(config)
        peer.tie_weights()
    model = from_config({"model_type": config.model_type}, device="meta")
    fixed = sum(b.numel() for b in model.buffers())  # Whisper's sines and cosines
    assert sum(p.numel() for p in model.parameters()) + fixed == sum(p.numel() for p in peer.parameters())


@torch.no_grad()
def test_the_sines_and_cosines_of_whisper():
    transformers_table = transformers.models.whisper.modeling_whisper.sinusoids(30, 24)
    model = from_config({"model_type": "whisper", **WHISPER, "max_source_positions": 30})
    torch.testing.assert_close(model.encoder.embedding.places, transformers_table, rtol=0, atol=1e-5)


@pytest.mark.parametrize(
    ("features", "words"),
    [
        (torch.zeros(1, 7, 20), r"features: expected a float tensor \(B, 7, 22\), mel bins and frames, got"),
        (torch.zeros(1, 8, 22), r"features: expected a float tensor \(B, 7, 22\)"),
        (torch.zeros(7, 22), r"features: expected a float tensor \(B, 7, 22\)"),
        (torch.zeros(1, 7, 22, dtype=torch.int64), r"features: expected a float tensor \(B, 7, 22\)"),
    ],
)
def test_features_of_another_shape_are_refused(features, words):
    model = from_config({"model_type": "whisper", **WHISPER})
    with pytest.raises(ValueError, match=words):
        model(torch.zeros(1, 2, dtype=torch.int64), source=features)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"model_type": "t5", **T5, "feed_forward_proj": "gated"}, "feed_forward_proj: expected gated-ACT or ACT"),
        ({"model_type": "t5", **T5, "feed_forward_proj": "gated-x"}, "feed_forward_proj: expected gated-ACT or ACT"),
        ({"model_type": "t5", **T5, "feed_forward_proj": None}, "feed_forward_proj: expected gated-ACT or ACT"),
        ({"model_type": "t5", **T5, "dense_act_fn": "silu"}, "dense_act_fn: expected 'relu'"),
        ({"model_type": "t5", **T5, "is_gated_act": True}, "is_gated_act: expected False"),
        ({"model_type": "t5", **T5, "relative_attention_num_buckets": 3}, "num_buckets: expected at least 4, got 3"),
        ({"model_type": "t5", **T5, "relative_attention_max_distance": 4}, "max_distance: expected more than 4"),
        ({"model_type": "t5", **T5, "is_encoder_decoder": False}, "is_encoder_decoder: expected True"),
        ({"model_type": "umt5", **T5, "is_decoder": True}, "is_decoder: expected False"),
        ({"model_type": "whisper", **WHISPER, "scale_embedding": True}, "scale_embedding: expected False"),
        ({"model_type": "whisper", **WHISPER, "encoder_attention_heads": 5}, "encoder_attention_heads: expected a div"),
        (
            {"model_type": "whisper", **WHISPER, "d_model": 15, "decoder_attention_heads": 3},
            "d_model: expected an even number",
        ),
    ],
)
def test_options_without_a_place_are_named(options, words):
    with pytest.raises(CheckpointError, match=words):
        from_config(options)
