"""ModernBERT and DeBERTa, and heads of masked words, against transformers' own models over their options."""

import json

import pytest
import torch

from regard.errors import CheckpointError
from regard.models import Encoder, from_config, load

transformers = pytest.importorskip("transformers")

VOCAB = 61
SIZES = {
    "vocab_size": VOCAB,
    "hidden_size": 24,
    "num_hidden_layers": 3,
    "num_attention_heads": 3,
    "intermediate_size": 20,
    "max_position_embeddings": 40,
}
ENDS = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "cls_token_id": 1, "sep_token_id": 2}
BIASES = {"norm_bias": True, "attention_bias": True, "mlp_bias": True, "classifier_bias": True}
MODERN = {**SIZES, **ENDS, "local_attention": 6}
TURNS = {
    "full_attention": {"rope_type": "linear", "rope_theta": 500.0, "factor": 2.0},
    "sliding_attention": {"rope_type": "default", "rope_theta": 50.0},
}
RELATIVE = {**SIZES, "relative_attention": True, "position_biased_input": False, "type_vocab_size": 2}
BUCKETS = {"position_buckets": 8, "norm_rel_ebd": "layer_norm"}
BOTH = {"pos_att_type": ["p2c", "c2p"]}
CASES = {
    "modernbert": ("ModernBert", "Model", MODERN),
    "modernbert-biased": ("ModernBert", "ForMaskedLM", {**MODERN, **BIASES, "hidden_activation": "silu"}),
    "modernbert-odd-window-every-second": (
        "ModernBert",
        "ForMaskedLM",
        {**MODERN, "local_attention": 7, "global_attn_every_n_layers": 2, "decoder_bias": False, "norm_eps": 1e-2},
    ),
    "modernbert-turns": (
        "ModernBert",
        "ForSequenceClassification",
        {
            **MODERN,
            "rope_parameters": TURNS,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        },
    ),
    "modernbert-untied": (
        "ModernBert",
        "ForMaskedLM",
        {**MODERN, "tie_word_embeddings": False, "classifier_activation": "relu"},
    ),
    "deberta": ("Deberta", "Model", {**RELATIVE, **BOTH}),
    "deberta-absolute-too-clipped": (
        "Deberta",
        "ForMaskedLM",
        {**RELATIVE, **BOTH, "position_biased_input": True, "max_relative_positions": 5, "type_vocab_size": 0},
    ),
    "deberta-one-term": ("Deberta", "ForMaskedLM", {**RELATIVE, "pos_att_type": "p2c", "legacy": False}),
    "deberta-other-term": ("Deberta", "ForSequenceClassification", {**RELATIVE, "pos_att_type": "c2p"}),
    "deberta-no-term": ("Deberta", "Model", {**RELATIVE, "hidden_act": "relu", "layer_norm_eps": 1e-2}),
    "deberta-not-relative": ("Deberta", "ForMaskedLM", {**SIZES, **BOTH}),
    "deberta-talking-heads": ("Deberta", "Model", {**RELATIVE, **BOTH, "talking_head": True}),
    "deberta-v2": ("DebertaV2", "ForMaskedLM", {**RELATIVE, **BOTH, **BUCKETS}),
    "deberta-v3": ("DebertaV2", "Model", {**RELATIVE, **BOTH, **BUCKETS, "share_att_key": True, "type_vocab_size": 0}),
    "deberta-v3-untied": (
        "DebertaV2",
        "ForMaskedLM",
        {**RELATIVE, **BOTH, **BUCKETS, "share_att_key": True, "tie_word_embeddings": False},
    ),
    "deberta-v3-present-head": (
        "DebertaV2",
        "ForMaskedLM",
        {**RELATIVE, **BUCKETS, "pos_att_type": "c2p", "share_att_key": True, "legacy": False},
    ),
    "deberta-v2-without-buckets": (
        "DebertaV2",
        "ForTokenClassification",
        {**RELATIVE, **BOTH, "max_relative_positions": 7, "position_biased_input": True},
    ),
    "deberta-v2-one-term": ("DebertaV2", "Model", {**RELATIVE, **BUCKETS, "pos_att_type": "p2c"}),
    "deberta-v2-not-relative": ("DebertaV2", "Model", {**SIZES, "pos_att_type": "c2p"}),
    "deberta-v2-convolved": (
        "DebertaV2",
        "ForMaskedLM",
        {**RELATIVE, **BOTH, **BUCKETS, "conv_kernel_size": 3, "conv_act": "gelu"},
    ),
    "deberta-v2-wide-convolution-in-groups": (
        "DebertaV2",
        "Model",
        {**RELATIVE, **BOTH, "conv_kernel_size": 5, "conv_groups": 4},
    ),
    "bert": ("Bert", "ForMaskedLM", SIZES),
    "bert-two-heads": ("Bert", "ForPreTraining", {**SIZES, "hidden_act": "relu"}),
    "bert-untied": ("Bert", "ForMaskedLM", {**SIZES, "tie_word_embeddings": False}),
    "big-bird": ("BigBird", "ForMaskedLM", {**SIZES, "attention_type": "original_full"}),
    "longformer": ("Longformer", "ForMaskedLM", {**SIZES, "attention_window": 4, "hidden_act": "relu"}),
}


@torch.no_grad()
def write(case, folder, **further):
    """A model of transformers whose weights are far enough from 0 for its options to matter."""
    family, cls, options = CASES[case]
    torch.manual_seed(0)
    config = getattr(transformers, f"{family}Config")(**options, **further)
    peer = getattr(transformers, f"{family}{cls}")(config).eval()
    for parameter in peer.parameters():
        parameter.add_(0.3 * torch.randn_like(parameter))
    peer.save_pretrained(folder)
    return peer


def close(found, want):
    torch.testing.assert_close(found, want, rtol=0, atol=1e-5 * float(want.abs().max()))


@pytest.fixture
def call():
    """Ids, and which are real: the second row ends in padding."""
    ids = torch.randint(4, VOCAB, (2, 19), generator=torch.Generator().manual_seed(1))
    keep = torch.ones_like(ids, dtype=torch.bool)
    keep[1, 13:] = False
    return ids, keep


def inner(peer):
    return getattr(peer, peer.base_model_prefix, peer)


@torch.no_grad()
@pytest.mark.parametrize("case", CASES)
def test_hidden_states_words_and_round_trip(case, call, tmp_path):
    ids, keep = call
    peer = write(case, tmp_path / "peer")
    padded = ids.masked_fill(~keep, peer.config.pad_token_id)
    model, given = load(tmp_path / "peer"), {"attention_mask": keep.long()}
    assert isinstance(model, Encoder)
    hidden, want = model(ids, keep=keep), inner(peer)(padded, **given).last_hidden_state
    close(hidden[keep], want[keep])
    close(model(ids[1:, :13])[0], hidden[1, :13])  # padding changes nothing
    words = CASES[case][1] in ("ForMaskedLM", "ForPreTraining")
    assert (model.head is not None) == words
    model.save(tmp_path / "ours")
    stated = json.loads((tmp_path / "ours" / "config.json").read_text())["architectures"]
    if words:
        theirs = peer(padded, **given)
        logits = theirs.prediction_logits if "prediction_logits" in theirs else theirs.logits
        close(model.logits(hidden)[keep], logits[keep])
        assert stated == [f"{CASES[case][0]}ForMaskedLM"]
        again = getattr(transformers, stated[0]).from_pretrained(tmp_path / "ours").eval()
        assert torch.equal(again(padded, **given).logits[keep], logits[keep])
    else:
        assert stated == [f"{CASES[case][0]}Model"]
        again = getattr(transformers, stated[0]).from_pretrained(tmp_path / "ours").eval()
        assert torch.equal(again(padded, **given).last_hidden_state[keep], want[keep])


@torch.no_grad()
@pytest.mark.parametrize("case", ["modernbert", "deberta-v2-convolved", "deberta-v2-wide-convolution-in-groups"])
def test_documents_packed_into_a_row_do_not_see_each_other(case, call, tmp_path):
    write(case, tmp_path)
    model, ids = load(tmp_path), call[0]
    segments = (torch.arange(19) >= 8).long().expand(2, -1)
    packed = model(ids, segments=segments)
    close(packed[:, :8], model(ids[:, :8]))
    close(packed[:, 8:], model(ids[:, 8:]))


@torch.no_grad()
@pytest.mark.parametrize("local", [300.0, None])
def test_older_spellings_of_modernbert(local, call, tmp_path):
    """Released folders state the two bases by themselves; where the windows' is null it is that of the whole text."""
    turns = {"full_attention": {"rope_type": "default", "rope_theta": 70.0}}
    turns["sliding_attention"] = {"rope_type": "default", "rope_theta": 70.0 if local is None else local}
    peer = write("modernbert", tmp_path, rope_parameters=turns)
    config = json.loads((tmp_path / "config.json").read_text())
    del config["rope_parameters"], config["layer_types"]
    config |= {"global_rope_theta": 70.0, "local_rope_theta": local, "global_attn_every_n_layers": 3}
    (tmp_path / "config.json").write_text(json.dumps(config))
    close(load(tmp_path)(call[0]), peer(call[0]).last_hidden_state)


@torch.no_grad()
def test_a_table_of_positions_that_is_not_in_use_stands_unused(call, tmp_path):
    """The folder of DeBERTa's first release holds one."""
    from safetensors.torch import load_file, save_file

    peer = write("deberta", tmp_path)
    for prefix in ("", "deberta."):
        tensors = load_file(tmp_path / "model.safetensors")
        tensors["embeddings.position_embeddings.weight"] = torch.ones(40, 24)
        save_file({prefix + name: tensor for name, tensor in tensors.items()}, tmp_path / "model.safetensors")
        close(load(tmp_path)(call[0]), peer(call[0]).last_hidden_state)


def test_relative_places_are_one_table_with_dropout_in_training():
    options = {"model_type": "deberta-v2", **RELATIVE, **BOTH, **BUCKETS, "attention_probs_dropout_prob": 0.0}
    model = from_config({**options, "hidden_dropout_prob": 0.5})
    table = model.layers[0].mixer.relative
    assert all(layer.mixer.relative is table for layer in model.layers)
    assert table.training and not torch.equal(table(), table())
    table.eval()
    assert torch.equal(table(), table())


@pytest.mark.parametrize("architecture", [None, "BertModel"])
def test_a_head_that_no_class_reads_stands_unused(architecture, tmp_path):
    write("bert", tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    config["architectures"] = architecture and [architecture]
    (tmp_path / "config.json").write_text(json.dumps(config))
    model = load(tmp_path)
    assert model.head is None
    with pytest.raises(ValueError, match="head: expected an encoder that was built or loaded with a head of words"):
        model.logits(torch.zeros(1, 1, 24))


def test_a_new_model_has_the_head_that_its_class_has():
    options = {"model_type": "modernbert", **MODERN}
    assert from_config(options).head is None
    model = from_config({**options, "architectures": ["ModernBertForMaskedLM"]})
    assert model.head is not None and model.head.weight is None and not model.head.bias.any()


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"model_type": "modernbert", **MODERN, "num_attention_heads": 5}, "num_attention_heads: expected a divisor"),
        ({"model_type": "modernbert", **MODERN, "layer_types": ["full_attention"]}, "layer_types: expected a list"),
        (
            {"model_type": "modernbert", **MODERN, "rope_parameters": {"rope_theta": 1e4}},
            "rope_parameters: expected an object of full_attention and sliding_attention",
        ),
        (
            {"model_type": "modernbert", **MODERN, "rope_parameters": {"full_attention": {"rope_type": "su"}}},
            "config: full_attention: rope_parameters: rope_type: expected default",
        ),
        (
            {"model_type": "deberta", **RELATIVE, "pos_att_type": "c2p|p2p"},
            "pos_att_type: expected some of c2p and p2c",
        ),
        ({"model_type": "deberta", **RELATIVE, "pos_att_type": ["c2p"] * 2}, "pos_att_type: expected some of c2p"),
        ({"model_type": "deberta", **RELATIVE, "pos_att_type": 2}, "pos_att_type: expected some of c2p"),
        ({"model_type": "deberta", **SIZES, "talking_head": True}, "talking_head: expected false without relative"),
        ({"model_type": "deberta", **RELATIVE, "embedding_size": 12}, "embedding_size: expected 24"),
        ({"model_type": "deberta", **RELATIVE, "position_buckets": 8}, "unknown option position_buckets=8"),
        ({"model_type": "deberta-v2", **RELATIVE, "position_buckets": 41}, "position_buckets: expected -1 for none"),
        ({"model_type": "deberta-v2", **RELATIVE, "norm_rel_ebd": "rms"}, "norm_rel_ebd: expected none, or layer_norm"),
        ({"model_type": "deberta-v2", **SIZES, "norm_rel_ebd": "layer_norm"}, "norm_rel_ebd: expected none, or"),
        ({"model_type": "deberta-v2", **RELATIVE, "conv_kernel_size": 4}, "conv_kernel_size: expected an odd number"),
        (
            {"model_type": "deberta-v2", **RELATIVE, "conv_kernel_size": 3, "conv_groups": 5},
            "conv_groups: expected a divisor of hidden_size=24, got 5",
        ),
        ({"model_type": "deberta-v2", **RELATIVE, "attention_head_size": 4}, "attention_head_size: expected 8"),
        ({"model_type": "modernbert", **MODERN, "hidden_act": "relu"}, "unknown option hidden_act='relu'"),
    ],
)
def test_options_without_a_place_are_named(options, words):
    with pytest.raises(CheckpointError, match=words):
        from_config(options)
