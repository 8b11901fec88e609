"""GPT-2 and MPT against transformers' own models, over the options that change what they compute."""

import pytest
import torch

from regard.errors import CheckpointError
from regard.models import Decoder, from_config, generate, load

transformers = pytest.importorskip("transformers")

VOCAB = 61
GPT2 = {"vocab_size": VOCAB, "n_embd": 24, "n_layer": 3, "n_head": 3, "n_positions": 40}
MPT = {"vocab_size": VOCAB, "d_model": 24, "n_layers": 3, "n_heads": 3, "max_seq_len": 40}
CASES = {
    "gpt2": ("GPT2", "GPT2LMHeadModel", GPT2),
    "gpt2-inner-width-relu-untied": (
        "GPT2",
        "GPT2LMHeadModel",
        {**GPT2, "n_inner": 20, "activation_function": "relu", "tie_word_embeddings": False},
    ),
    "gpt2-unscaled": ("GPT2", "GPT2LMHeadModel", {**GPT2, "scale_attn_weights": False, "layer_norm_epsilon": 1e-2}),
    "gpt2-scaled-by-layer": (
        "GPT2",
        "GPT2LMHeadModel",
        {**GPT2, "scale_attn_by_inverse_layer_idx": True, "reorder_and_upcast_attn": True},
    ),
    "mpt": ("Mpt", "MptForCausalLM", MPT),
    "mpt-clipped-untied": (
        "Mpt",
        "MptForCausalLM",
        {**MPT, "attn_config": {"clip_qkv": 0.5}, "tie_word_embeddings": False},
    ),
    "mpt-scaled-eight-heads": (
        "Mpt",
        "MptForCausalLM",
        {
            **MPT,
            "n_heads": 8,
            "layer_norm_epsilon": 1e-2,
            "attn_config": {"softmax_scale": 0.9},
        },
    ),
}


@torch.no_grad()
def write(case, folder):
    """A model of transformers whose weights are far enough from 0 for its options to matter."""
    family, cls, options = CASES[case]
    torch.manual_seed(0)
    peer = getattr(transformers, cls)(getattr(transformers, f"{family}Config")(**options)).eval()
    for parameter in peer.parameters():
        parameter.add_(0.3 * torch.randn_like(parameter))
    peer.save_pretrained(folder)
    return peer


def close(found, want):
    torch.testing.assert_close(found, want, rtol=0, atol=1e-5 * float(want.abs().max()))


@pytest.fixture
def ids():
    return torch.randint(4, VOCAB, (2, 13), generator=torch.Generator().manual_seed(1))


@torch.no_grad()
@pytest.mark.parametrize("case", CASES)
def test_logits_padding_pieces_and_round_trip(case, ids, tmp_path):
    peer = write(case, tmp_path / "peer")
    model, want = load(tmp_path / "peer"), peer(ids).logits
    assert isinstance(model, Decoder)
    close(model(ids), want)
    keep = torch.ones_like(ids, dtype=torch.bool)
    keep[1, :4] = False
    close(model(ids, keep=keep)[1:, 4:], peer(ids[1:, 4:]).logits)
    cache = model.init_cache(2, ids.shape[1])
    close(torch.cat([model(part, cache=cache) for part in ids.split([5, 1, 1, 6], 1)], 1), want)
    model.save(tmp_path / "ours")
    again = type(peer).from_pretrained(tmp_path / "ours")
    assert torch.equal(again(ids).logits, want)


@torch.no_grad()
@pytest.mark.parametrize("case", ["gpt2-scaled-by-layer", "mpt"])
def test_greedy_texts_are_those_of_whole_runs(case, ids, tmp_path):
    peer = write(case, tmp_path)
    want = ids[:1]
    for _ in range(6):
        want = torch.cat([want, peer(want).logits[:, -1:].argmax(-1)], 1)
    got = generate(load(tmp_path), ids[0].tolist(), max_tokens=6, end_ids=())
    assert got[0].ids == want[0, ids.shape[1] :].tolist()


@torch.no_grad()
def test_old_files_with_masks_and_without_a_prefix(ids, tmp_path):
    """The files of 2019 hold the causal mask of each layer, and no prefix."""
    from safetensors.torch import load_file, save_file

    peer = write("gpt2", tmp_path)
    tensors = {n.removeprefix("transformer."): t for n, t in load_file(tmp_path / "model.safetensors").items()}
    tensors |= {f"h.{i}.attn.bias": torch.ones(1, 1, 40, 40).tril() for i in range(3)}
    tensors |= {f"h.{i}.attn.masked_bias": torch.tensor(-1e4) for i in range(3)}
    save_file(tensors, tmp_path / "model.safetensors")
    close(load(tmp_path)(ids), peer(ids).logits)


@pytest.mark.parametrize("case", ["gpt2", "mpt"])
def test_options_that_are_absent_mean_what_the_family_says(case):
    family, cls, _ = CASES[case]
    config = getattr(transformers, f"{family}Config")()
    with torch.device("meta"):
        peer = getattr(transformers, cls)(config)
    model = from_config({"model_type": config.model_type}, device="meta")
    assert sum(p.numel() for p in model.parameters()) == sum(p.numel() for p in peer.parameters())
    assert model.layers[0].mixer.heads == config.num_attention_heads


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"model_type": "gpt2", **GPT2, "n_head": 5}, "n_head: expected a divisor of n_embd=24, got 5"),
        ({"model_type": "gpt2", **GPT2, "add_cross_attention": True}, "add_cross_attention: expected False"),
        ({"model_type": "gpt2", **GPT2, "rotary_dim": 4}, "unknown option rotary_dim=4"),
        ({"model_type": "mpt", **MPT, "n_heads": 5}, "n_heads: expected a divisor of d_model=24, got 5"),
        ({"model_type": "mpt", **MPT, "no_bias": False}, "no_bias: expected True"),
        ({"model_type": "mpt", **MPT, "logit_scale": 0.5}, "logit_scale: expected None"),
        ({"model_type": "mpt", **MPT, "norm_type": "rmsnorm"}, "norm_type: expected 'low_precision_layernorm'"),
        ({"model_type": "mpt", **MPT, "attn_config": {"alibi": False}}, "attn_config: alibi: expected True"),
        ({"model_type": "mpt", **MPT, "attn_config": {"alibi_bias_max": 4}}, "attn_config: alibi_bias_max: expected 8"),
        ({"model_type": "mpt", **MPT, "attn_config": {"qk_ln": True}}, "attn_config: qk_ln: expected False"),
        ({"model_type": "mpt", **MPT, "attn_config": {"prefix_lm": True}}, "attn_config: prefix_lm: expected False"),
        (
            {"model_type": "mpt", **MPT, "attn_config": {"attn_type": "multiquery_attention"}},
            "attn_config: attn_type: expected 'multihead_attention'",
        ),
        ({"model_type": "mpt", **MPT, "attn_config": {"rope": True}}, "attn_config: unknown option rope=True"),
    ],
)
def test_options_without_a_place_are_named(options, words):
    with pytest.raises(CheckpointError, match=words):
        from_config(options)


def test_a_position_past_the_table_is_refused(tmp_path):
    write("gpt2", tmp_path)
    model = load(tmp_path)
    with pytest.raises(ValueError, match=r"positions: expected numbers in \[0, 40\), got 0 to 40"):
        model(torch.zeros(1, 41, dtype=torch.int64))
