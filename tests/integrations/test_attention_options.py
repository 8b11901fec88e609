"""What models pass to the attention function: each option counts, is known not to, or is refused by name."""

from __future__ import annotations

import pytest
import torch
import transformers

import regard.integrations.transformers as integration
from regard.integrations.options import documents

SMALL = {
    "vocab_size": 50,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
PLAIN = {name: value for name, value in SMALL.items() if name != "num_key_value_heads"}


def ids(length=9, batch=2):
    return torch.randint(3, 50, (batch, length), generator=torch.Generator().manual_seed(1))


def shaken(model):
    torch.manual_seed(3)
    with torch.no_grad():
        for weight in model.parameters():
            weight.copy_(weight + torch.randn(weight.shape) * 0.2)
    return model.eval()


def attend(**options):
    torch.manual_seed(0)
    q = torch.randn(2, 2, 4, 3)
    return integration.attention_forward(torch.nn.Module(), q, q, q, None, **options)


@pytest.mark.parametrize(
    "option",
    [
        {"head_mask": torch.ones(2)},
        {"relative_position": torch.ones(4, 4)},
        {"cache": object()},
        {"block_table": torch.zeros(1, 2, dtype=torch.long)},
        {"temperature": 0.5},
        {"alibi_slopes": torch.ones(2)},
        {"window_left": 3},
        {"mode": "sparse"},
    ],
    ids=lambda option: next(iter(option)),
)
def test_an_unknown_option_is_refused_by_name(option):
    name = next(iter(option))
    with pytest.raises(ValueError, match=rf"^{name}: Module passes an option"):
        attend(**option)
    assert attend(**{name: None})[0].equal(attend()[0]) and attend(**{name: False})[0].equal(attend()[0])


def test_the_model_is_named():
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**SMALL)).eval()
    model.set_attn_implementation("regard")
    with pytest.raises(ValueError, match=r"^bias_of_mine: llama's LlamaAttention passes an option"):
        model(ids(), bias_of_mine=torch.ones(3))


@torch.no_grad()
def test_known_options_change_nothing():
    model = shaken(transformers.MistralForCausalLM(transformers.MistralConfig(**SMALL, sliding_window=4)))
    options = {
        "cu_seq_lens_q": torch.tensor([0, 9]),
        "cu_seq_lens_k": torch.tensor([0, 9]),
        "max_length_q": 9,
        "max_length_k": 9,
        "num_items_in_batch": torch.tensor(18),
        "output_hidden_states": True,
    }
    model.set_attn_implementation("eager")
    want = model(ids(), **options).logits
    model.set_attn_implementation("regard")
    torch.testing.assert_close(model(ids(), **options).logits, want, rtol=0, atol=1e-5)


def inkling():
    return transformers.CONFIG_MAPPING["inkling2_text"](
        **SMALL, head_dim=8, moe_intermediate_size=16, num_experts_per_tok=2, n_routed_experts=4, sliding_window=4
    )


def sinks_for_each_query():
    config = inkling()
    return transformers.MODEL_FOR_CAUSAL_LM_MAPPING[type(config)](config)


def test_sinks_for_each_query():
    """Their logits differ by query and head, and the model trains them."""
    torch.manual_seed(0)
    q, k, v = torch.randn(3, 2, 2, 5, 4, dtype=torch.float64).unbind()
    sinks = torch.randn(2, 2, 5, 1, dtype=torch.float64, requires_grad=True)
    scores = torch.cat([(0.7 * q @ k.mT).masked_fill(~torch.ones(5, 5).tril().bool(), -torch.inf), sinks], -1)
    weights = scores.softmax(-1)[..., :-1]
    want = (weights @ v).transpose(1, 2)
    module = torch.nn.Module()
    mask = integration.make_mask(2, 5, 5)
    out, seen = integration.attention_forward(
        module, q, k, v, mask, scaling=0.7, sinks=sinks, output_attentions=True, sliding_window=9
    )
    torch.testing.assert_close(out, want, rtol=0, atol=1e-12)
    torch.testing.assert_close(seen, weights, rtol=0, atol=1e-12)
    (got,) = torch.autograd.grad(out.square().sum(), sinks)
    torch.testing.assert_close(got, torch.autograd.grad(want.square().sum(), sinks)[0], rtol=0, atol=1e-11)


def test_chosen_keys():
    torch.manual_seed(0)
    q, k, v = torch.randn(3, 2, 2, 5, 4, dtype=torch.float64).unbind()
    indices = torch.stack([torch.stack([torch.randperm(5)[:2] for _ in range(5)]) for _ in range(2)]).int()
    chosen = torch.zeros(2, 5, 5, dtype=torch.bool).scatter(-1, indices.long(), True)[:, None]
    chosen |= torch.eye(5).bool()
    indices = torch.cat([indices, torch.arange(5).int()[None, :, None].expand(2, -1, -1)], -1)
    allowed = chosen & torch.ones(5, 5).tril().bool()
    want = ((q @ k.mT / 2).masked_fill(~allowed, -torch.inf).softmax(-1) @ v).transpose(1, 2)
    for mask in (integration.make_mask(2, 5, 5), integration.make_mask(2, 5, 5).dense()):
        got, _ = integration.attention_forward(torch.nn.Module(), q, k, v, mask, indices=indices)
        torch.testing.assert_close(got, want, rtol=0, atol=1e-12)
    with pytest.raises(ValueError, match="block_indices: Module does not say how large"):
        integration.attention_forward(torch.nn.Module(), q, k, v, None, block_indices=indices[:, None])


def encoder_decoder():
    return transformers.T5ForConditionalGeneration(
        transformers.T5Config(vocab_size=50, d_model=24, d_kv=6, d_ff=32, num_layers=2, num_heads=4, dropout_rate=0.0)
    )


def bart():
    return transformers.BartForConditionalGeneration(
        transformers.BartConfig(
            vocab_size=50,
            d_model=32,
            encoder_layers=2,
            decoder_layers=2,
            encoder_attention_heads=4,
            decoder_attention_heads=4,
            encoder_ffn_dim=48,
            decoder_ffn_dim=48,
            dropout=0.0,
            pad_token_id=0,
        )
    )


MODELS = {
    "llama": lambda: transformers.LlamaForCausalLM(transformers.LlamaConfig(**SMALL)),
    "gpt2": lambda: transformers.GPT2LMHeadModel(
        transformers.GPT2Config(vocab_size=50, n_embd=32, n_layer=2, n_head=4, bos_token_id=1, eos_token_id=2)
    ),
    "opt": lambda: transformers.OPTForCausalLM(
        transformers.OPTConfig(
            vocab_size=50,
            hidden_size=32,
            num_hidden_layers=2,
            num_attention_heads=4,
            ffn_dim=48,
            word_embed_proj_dim=32,
        )
    ),
    "gpt_bigcode": lambda: transformers.GPTBigCodeForCausalLM(
        transformers.GPTBigCodeConfig(vocab_size=50, n_embd=32, n_layer=2, n_head=4, bos_token_id=1, eos_token_id=2)
    ),
    "stablelm": lambda: transformers.StableLmForCausalLM(transformers.StableLmConfig(**SMALL)),
    "persimmon": lambda: transformers.PersimmonForCausalLM(transformers.PersimmonConfig(**PLAIN)),
    "gemma2": lambda: transformers.Gemma2ForCausalLM(transformers.Gemma2Config(**SMALL, head_dim=8)),
    "gpt_oss": lambda: transformers.GptOssForCausalLM(
        transformers.GptOssConfig(**SMALL, head_dim=8, num_local_experts=2, num_experts_per_tok=1)
    ),
    "granite_swa": lambda: transformers.MODEL_FOR_CAUSAL_LM_MAPPING[type(granite_swa())](granite_swa()),
    "inkling2": sinks_for_each_query,
    "bert": lambda: transformers.BertModel(transformers.BertConfig(**PLAIN)),
    "vit": lambda: transformers.ViTModel(
        transformers.ViTConfig(
            hidden_size=32,
            intermediate_size=48,
            num_hidden_layers=2,
            num_attention_heads=4,
            image_size=16,
            patch_size=8,
        )
    ),
    "t5": encoder_decoder,
    "bart": bart,
}


def granite_swa():
    return transformers.CONFIG_MAPPING["granite_swa"](**SMALL, sliding_window=4)


@torch.no_grad()
@pytest.mark.parametrize("how", ["argument", "configuration"])
@pytest.mark.parametrize("name", MODELS)
def test_returned_weights_are_those_of_eager_attention(name, how):
    model = shaken(MODELS[name]())
    call = {"pixel_values": torch.randn(2, 3, 16, 16)} if name == "vit" else {"input_ids": ids()}
    if name in ("t5", "bart"):
        call["decoder_input_ids"] = ids(6)
    model.set_attn_implementation("eager")
    if how == "argument":
        call["output_attentions"] = True
    else:
        model.config.output_attentions = True
    want = model(**call)
    model.set_attn_implementation("regard")
    got = model(**call)
    kinds = [key for key in want if key.endswith("attentions")]
    assert [key for key in got if key.endswith("attentions")] == kinds
    assert any(len(want[kind]) == 2 for kind in kinds) or (name, how) == (
        "t5",
        "configuration",
    )  # its stacks' own count
    for kind in kinds:
        for mine, theirs in zip(got[kind], want[kind], strict=True):
            torch.testing.assert_close(mine, theirs, rtol=0, atol=1e-5)
    torch.testing.assert_close(got[0], want[0], rtol=0, atol=2e-5)


@torch.no_grad()
def test_weights_that_a_compiled_model_returns():
    model = shaken(MODELS["llama"]())
    model.set_attn_implementation("eager")
    want = model(ids(), output_attentions=True).attentions
    model.set_attn_implementation("regard")
    step = torch.compile(
        lambda tokens: model(tokens, output_attentions=True, use_cache=False).attentions, backend="aot_eager"
    )
    for mine, theirs in zip(step(ids()), want, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=0, atol=1e-5)


@torch.no_grad()
def test_a_compiled_model():
    model = shaken(MODELS["llama"]())
    model.set_attn_implementation("regard")
    keep = torch.ones(2, 9, dtype=torch.long)
    keep[1, 7:] = 0
    step = torch.compile(
        lambda tokens, keep: model(tokens, attention_mask=keep, use_cache=False).logits,
        fullgraph=True,
        backend="aot_eager",
    )
    want = model(ids(), attention_mask=keep).logits
    torch.testing.assert_close(step(ids(), keep)[keep.bool()], want[keep.bool()], rtol=0, atol=1e-5)


def test_documents_by_their_borders():
    borders = torch.tensor([0, 2, 5, 8])
    assert documents(borders, 1, 8).tolist() == [[1, 1, 2, 2, 2, 3, 3, 3]]
    assert documents(borders, 2, 4).tolist() == [[1, 1, 2, 2], [2, 3, 3, 3]]  # counted through all rows
    assert documents(borders, 1, 11, before=True).tolist() == [[1, 1, 1, 1, 1, 2, 2, 2, 3, 3, 3]]
    for batch, tokens in ((1, 9), (1, 7), (3, 3)):
        with pytest.raises(ValueError, match="cu_seq_lens_q: expected borders that end at"):
            documents(borders, batch, tokens)
    with pytest.raises(ValueError, match="cu_seq_lens_q"):
        documents(borders, 1, 7, before=True)
