"""The mask that transformers models get: a rule while they pass it on, a tensor when they compute with it."""

from __future__ import annotations

import copy
import operator
import pickle
from pathlib import Path

import pytest
import torch
import transformers
from torch.nn import functional as F
from transformers import masking_utils

import regard.integrations.transformers as integration
from regard.masks import Causal

FOLDERS = Path(__file__).parents[1] / "checkpoints"
KINDS = {
    "causal": masking_utils.causal_mask_function,
    "sliding": masking_utils.sliding_window_causal_mask_function(2),
    "chunked": masking_utils.chunked_causal_mask_function(2, torch.zeros(2, dtype=torch.long)),
    "bidirectional": masking_utils.bidirectional_mask_function,
    "packed": masking_utils.and_masks(
        masking_utils.packed_sequence_mask_function(torch.tensor([[0, 0, 1, 1]]).expand(2, -1)),
        masking_utils.causal_mask_function,
    ),
}


def made(kind="causal", keep=None, maker=integration.make_mask, q_length=4, kv_length=4, q_offset=0, **options):
    options |= {"mask_function": KINDS[kind], "attention_mask": keep, "dtype": torch.float64}
    return maker(2, q_length, kv_length, q_offset, 0, **options)


def attend(mask, queries=4, keys=4, **options):
    q, k = torch.randn(2, 2, queries, 3).double(), torch.randn(2, 2, keys, 3).double()
    return integration.attention_forward(torch.nn.Module(), q, k, k, mask, **options)


def attend_to_all(queries, keys):
    torch.manual_seed(1)
    q, k = torch.randn(2, 2, queries, 3).double(), torch.randn(2, 2, keys, 3).double()
    return F.scaled_dot_product_attention(q, k, k).transpose(1, 2)


PADDING = torch.tensor([[True] * 4, [True, True, True, False]])


@pytest.mark.parametrize("keep", [None, PADDING], ids=["whole", "padded"])
@pytest.mark.parametrize("kind", KINDS)
def test_its_tensor_is_that_of_eager_attention(kind, keep):
    mine, theirs = made(kind, keep), made(kind, keep, masking_utils.eager_mask)
    assert torch.equal(mine.dense(), theirs)
    assert (mine.shape, mine.dtype, mine.ndim, mine.dim()) == (theirs.shape, theirs.dtype, theirs.ndim, theirs.dim())
    assert mine.size() == theirs.size() and mine.size(-1) == 4 and len(mine) == 2


@pytest.mark.parametrize("keep", [None, PADDING], ids=["whole", "padded"])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("keys", [3, 6])
def test_keys_of_another_number_are_an_error(kind, keep, keys):
    mask = made(kind, keep)
    for queries in (4, keys):
        with pytest.raises(ValueError, match="attention_mask"):
            attend(mask, queries, keys)
        with pytest.raises(ValueError, match="attention_mask"):
            attend(mask + 0, queries, keys)
    with pytest.raises(ValueError, match="attention_mask"):
        attend(mask, 3, 4)


def test_keys_of_another_number_behind_a_static_cache_are_an_error():
    keep = torch.tensor([[True] * 8, [True] * 7 + [False]])
    mask = made(keep=keep, kv_length=8, q_length=1, q_offset=torch.tensor(3))
    attend(mask, 1, 8)
    for keys in (7, 9):
        with pytest.raises(ValueError, match="attention_mask"):
            attend(mask, 1, keys)


def test_no_mask_at_all_for_eager_attention_lets_any_keys_pass():
    assert made("bidirectional", allow_is_bidirectional_skip=True) is None
    decoder = transformers.LlamaConfig(is_causal=False)  # whose layers take no mask for a causal one
    mask = made("bidirectional", allow_is_bidirectional_skip=True, config=decoder)
    for each in (mask, None):
        torch.manual_seed(1)
        torch.testing.assert_close(attend(each, 4, 6)[0], attend_to_all(4, 6), rtol=0, atol=1e-15)


@torch.no_grad()
def test_a_decoder_that_is_told_not_to_be_causal():
    torch.manual_seed(3)
    model = transformers.LlamaModel(transformers.LlamaConfig(**SMALL, is_causal=False)).eval()
    results = []
    for attention in ("eager", "regard"):
        model.set_attn_implementation(attention)
        results.append(model(torch.arange(3, 10)[None]).last_hidden_state)
    torch.testing.assert_close(*results, rtol=0, atol=1e-5)


@torch.no_grad()
def test_a_model_that_shortens_its_keys():
    """Informer halves its sequence between layers of the encoder; no mask was made for them."""
    torch.manual_seed(3)
    sizes = {f"{side}_{name}": 2 for side in ("encoder", "decoder") for name in ("layers", "attention_heads")}
    config = transformers.InformerConfig(
        prediction_length=4, context_length=8, d_model=16, lags_sequence=[1, 2], num_time_features=1, **sizes
    )
    model = transformers.InformerModel(config).eval()
    call = {"past_values": (2, 10), "past_time_features": (2, 10, 1), "past_observed_mask": (2, 10)}
    call |= {"future_values": (2, 4), "future_time_features": (2, 4, 1)}
    call = {name: torch.rand(shape) for name, shape in call.items()}
    results = []
    for attention in ("eager", "regard"):
        model.set_attn_implementation(attention)
        torch.manual_seed(1)  # it draws the keys that it measures
        results.append(model(**call).last_hidden_state)
    torch.testing.assert_close(*results, rtol=0, atol=1e-5)


def test_one_row_spreads_over_queries_as_a_tensor_does():
    torch.manual_seed(1)
    want = attend(made(keep=PADDING, q_length=1, q_offset=2).dense())[0]
    torch.manual_seed(1)
    torch.testing.assert_close(attend(made(keep=PADDING, q_length=1, q_offset=2))[0], want, rtol=0, atol=1e-15)


OPERATIONS = {
    "add": lambda m: torch.ones(4).double() + m,
    "radd": lambda m: m + torch.ones(4).double(),
    "compare": lambda m: m == 0,
    "less": lambda m: m < -1,
    "bool": lambda m: ~(m == 0),
    "index": lambda m: m[:, 0, 1:, :3],
    "none": lambda m: m[:, :, None],
    "keys": lambda m: m[..., :2],
    "pick": lambda m: m[torch.tensor([1])],
    "where": lambda m: torch.where(m == 0, m, torch.ones(()).double()),
    "concatenate": lambda m: torch.cat([m, torch.zeros(2, 1, 4, 2).double()], -1),
    "pad": lambda m: F.pad(m, (0, 2)),
    "cast": lambda m: m.to(torch.float32),
    "double": lambda m: m.double(),
    "method": lambda m: m.masked_fill(m < 0, -9.0),
    "fill": lambda m: torch.zeros(2, 1, 4, 4).masked_fill(m != 0, 3.0),
    "expand": lambda m: m.expand(2, 5, 4, 4),
    "repeat": lambda m: m.repeat(1, 2, 1, 1),
    "unsqueeze": lambda m: m.squeeze(1).unsqueeze(0),
    "sum": lambda m: (m == 0).sum(-1),
    "negate": lambda m: -m,
    "subtract": lambda m: 1.0 - m,
    "matmul": lambda m: (m / 1e300) @ torch.ones(4, 4).double(),
    "clone": lambda m: m.clone(),
    "max": lambda m: torch.maximum(m, torch.full((), -5.0).double()),
    "iterate": lambda m: torch.stack(list(m)),
    "all": lambda m: m.eq(0).all(),
}


@pytest.mark.parametrize("name", OPERATIONS)
def test_arithmetic_gives_what_a_tensor_gives(name):
    mask = made(keep=PADDING)
    got, want = OPERATIONS[name](mask), OPERATIONS[name](made(keep=PADDING, maker=masking_utils.eager_mask))
    assert type(got) is torch.Tensor and got.dtype == want.dtype and torch.equal(got, want)
    assert mask.is_rule


def test_it_stays_a_rule_where_nothing_is_computed():
    mask = made(keep=PADDING)
    assert mask.contiguous() is mask and mask.to("cpu") is mask and mask.to(mask.dtype) is mask
    assert mask.to(device="cpu", dtype=torch.float64) is mask
    assert isinstance(made().mask, Causal) and mask._tensor is None
    assert {mask: 1}[mask] == 1
    for other in (copy.deepcopy(mask), pickle.loads(pickle.dumps(mask))):
        assert other.is_rule and torch.equal(other.dense(), mask.dense())
    with pytest.raises(AttributeError):
        mask.no_such_thing  # noqa: B018


def test_rows_of_a_rule_are_a_rule():
    """Models that keep the last tokens' logits alone cut their mask; no tensor of all rows is made."""
    for kind, keep in ((kind, keep) for kind in ("causal", "sliding", "bidirectional") for keep in (None, PADDING)):
        mask, whole = made(kind, keep), made(kind, keep, masking_utils.eager_mask)
        for index in (slice(-2, None), slice(1, 3), slice(None)):
            part = mask[:, :, index, :]
            assert isinstance(part, integration.Handed) and mask._tensor is None
            assert torch.equal(part.dense(), whole[:, :, index, :])
            assert torch.equal(mask[..., index, :].dense(), whole[..., index, :])
    assert torch.equal(made("chunked")[:, :, 1:3], made("chunked", maker=masking_utils.eager_mask)[:, :, 1:3])


@pytest.mark.parametrize("write", ["item", "method", "operator", "view"])
def test_what_is_written_into_it_counts(write):
    mask = made()
    whole = made(maker=masking_utils.eager_mask).clone()
    for each in (mask, whole):
        if write == "item":
            each[:, :, 2:, 0] = -50.0
        elif write == "method":
            each.mul_(0.0).add_(torch.arange(4))
        elif write == "operator":
            operator.iadd(each, torch.arange(4))
        else:
            each[:, 0, 1].fill_(-2.0)
    assert not mask.is_rule and torch.equal(mask + 0, whole)
    for other in (mask, copy.deepcopy(mask), pickle.loads(pickle.dumps(mask))):
        torch.manual_seed(1)
        got = attend(other)[0]
        torch.manual_seed(1)
        torch.testing.assert_close(got, attend(whole)[0], rtol=0, atol=1e-15)


def test_what_is_written_in_inference_mode_counts():
    with torch.inference_mode():
        mask = made()
        mask[:, 0, 1].fill_(-2.0)
        assert not mask.is_rule


def test_a_compiled_model_may_compute_with_it():
    def step(q):
        mask = integration.make_mask(2, 4, 4, dtype=q.dtype)
        scores = q @ q.mT + mask
        chosen = torch.where(mask == 0, scores, mask[:, :, :1].mT)
        return F.softmax(scores, -1) + torch.cat([chosen, mask.to(q.dtype)], 1).sum(1, keepdim=True).clamp(-9, 9)

    q = torch.randn(2, 2, 4, 3).double()
    torch.testing.assert_close(torch.compile(step, fullgraph=True, backend="aot_eager")(q), step(q))

    def write(q):
        mask = integration.make_mask(2, 4, 4, dtype=q.dtype)
        mask[..., 0] = 0
        return q @ q.mT + mask

    with pytest.raises(Exception, match="writes into its mask"):
        torch.compile(write, fullgraph=True, backend="eager")(q)


SMALL = {
    "vocab_size": 50,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
LATENT = {
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 8,
    "v_head_dim": 8,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "n_group": 1,
    "topk_group": 1,
    "index_topk": 4,
    "index_n_heads": 2,
    "index_head_dim": 16,
}


def sparse(kind):
    """Models that choose keys for each query, or cut or extend their mask."""
    torch.manual_seed(3)
    if kind == "deepseek_v32":
        model = transformers.DeepseekV32ForCausalLM(transformers.DeepseekV32Config(**SMALL, **LATENT))
    elif kind == "glm_moe_dsa":
        model = transformers.GlmMoeDsaForCausalLM(transformers.GlmMoeDsaConfig(**SMALL, **LATENT))
    elif kind == "doge":
        config = {**SMALL, "num_key_value_heads": 2, "keep_window_size": 5}
        model = transformers.DogeForCausalLM(transformers.DogeConfig(**config))
    elif kind == "git":
        config = transformers.GitConfig(**{k: v for k, v in SMALL.items() if k != "num_key_value_heads"})
        model = transformers.GitForCausalLM(config)
    else:
        model = transformers.BigBirdPegasusForCausalLM(
            transformers.BigBirdPegasusConfig(
                vocab_size=50, d_model=32, decoder_layers=2, decoder_attention_heads=4, decoder_ffn_dim=48
            )
        )
    with torch.no_grad():
        for weight in model.parameters():
            if weight.ndim > 1:
                weight.copy_(torch.randn(weight.shape) * 0.2)
    return model.eval().double()


@torch.no_grad()
@pytest.mark.parametrize("kind", ["deepseek_v32", "glm_moe_dsa", "doge", "git", "bigbird_pegasus"])
def test_models_that_compute_with_their_mask(kind):
    model = sparse(kind)
    ids = torch.randint(3, 50, (2, 11), generator=torch.Generator().manual_seed(1))
    keep = torch.ones(2, 11, dtype=torch.long)
    keep[1, 9:] = 0
    results = []
    for attention in ("eager", "regard"):
        model.set_attn_implementation(attention)
        results.append([model(ids).logits, model(ids, attention_mask=keep).logits[keep.bool()]])
    for got, want in zip(*results, strict=True):
        torch.testing.assert_close(got, want, rtol=0, atol=1e-5)
    if kind in ("deepseek_v32", "glm_moe_dsa"):  # the choice of keys counts
        for layer in model.modules():
            if hasattr(layer, "index_topk"):
                layer.index_topk = 11
        assert float((model(ids).logits - results[0][0]).abs().max()) > 1e-3


@torch.no_grad()
def test_blocks_of_chosen_keys():
    """MiniMax-M3 chooses blocks of keys for each group of heads."""
    torch.manual_seed(3)
    config = transformers.CONFIG_MAPPING["minimax_m3_vl_text"](
        **{**SMALL, "num_key_value_heads": 2, "head_dim": 8, "num_hidden_layers": 4},
        dense_intermediate_size=48,
        shared_intermediate_size=16,
        num_local_experts=4,
        num_experts_per_tok=2,
        index_n_heads=2,
        index_head_dim=8,
        index_topk_blocks=2,
        index_block_size=2,
        index_local_blocks=1,
        layer_types=["full_attention", "minimax_m3_sparse"] * 2,
        mlp_layer_types=["dense"] * 4,
        rotary_dim=4,
    )
    model = transformers.MiniMaxM3VLForCausalLM(config).eval().double()
    for weight in model.parameters():
        weight.copy_(torch.randn(weight.shape) * 0.2)
    ids = torch.randint(3, 50, (2, 11), generator=torch.Generator().manual_seed(1))
    model.set_attn_implementation("eager")
    want = model(ids).logits
    model.set_attn_implementation("regard")
    torch.testing.assert_close(model(ids).logits, want, rtol=0, atol=1e-5)


@torch.no_grad()
def test_keys_that_a_model_appends_after_its_mask_was_made():
    """DeepSeek-V4 appends compressed keys, and extends its mask if that is a tensor."""
    torch.manual_seed(3)
    latent = {name: LATENT[name] for name in ("q_lora_rank", "qk_rope_head_dim", "n_routed_experts")}
    config = transformers.DeepseekV4Config(
        **{**SMALL, "num_key_value_heads": 1, "num_hidden_layers": 3},
        **latent,
        num_experts_per_tok=2,
        moe_intermediate_size=16,
        head_dim=16,
        o_groups=2,
        o_lora_rank=8,
        sliding_window=6,
        index_topk=2,
        index_n_heads=2,
        index_head_dim=16,
        num_hash_layers=0,
    )
    model = transformers.DeepseekV4ForCausalLM(config).eval()
    ids = torch.randint(3, 50, (2, 11), generator=torch.Generator().manual_seed(1))
    model.set_attn_implementation("eager")
    want = model(ids).logits
    model.set_attn_implementation("regard")
    torch.testing.assert_close(model(ids).logits, want, rtol=0, atol=1e-5)


@torch.no_grad()
@pytest.mark.parametrize("name", ["bloom", "codegen", "xglm", "megatron"])
def test_models_with_attention_of_their_own_run_it(name):
    """They add to their mask what eager attention would get."""
    small = {"vocab_size": 50, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
    kind, config = {
        "bloom": ("BloomForCausalLM", transformers.BloomConfig(hidden_size=32, n_layer=2, n_head=4, **small)),
        "codegen": (
            "CodeGenForCausalLM",
            transformers.CodeGenConfig(n_embd=32, n_layer=2, n_head=4, rotary_dim=4, n_positions=32, **small),
        ),
        "xglm": (
            "XGLMForCausalLM",
            transformers.XGLMConfig(d_model=32, num_layers=2, attention_heads=4, ffn_dim=48, **small),
        ),
        "megatron": (
            "MegatronBertModel",
            transformers.MegatronBertConfig(
                hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=48, **small
            ),
        ),
    }[name]
    ours = getattr(transformers, kind)._from_config(config, attn_implementation="regard").eval()
    eager = getattr(transformers, kind)._from_config(copy.deepcopy(config), attn_implementation="eager").eval()
    eager.load_state_dict(ours.state_dict())
    ids, keep = torch.randint(3, 50, (2, 7)), torch.ones(2, 7, dtype=torch.long)
    keep[1, 5:] = 0
    for got, want in zip(ours(ids, attention_mask=keep)[:1], eager(ids, attention_mask=keep)[:1], strict=True):
        torch.testing.assert_close(got[keep.bool()], want[keep.bool()], rtol=0, atol=1e-5)


@torch.no_grad()
@pytest.mark.parametrize("cache", [None, "static"])
@pytest.mark.parametrize("kind", ["Bert", "Roberta", "Electra", "XLMRoberta", "BertGeneration"])
def test_padded_generation_of_encoders_that_decode(kind, cache):
    torch.manual_seed(3)
    small = {name: value for name, value in SMALL.items() if name != "num_key_value_heads"}
    config = getattr(transformers, f"{kind}Config")(**small, is_decoder=True, max_position_embeddings=40)
    heads = {"Bert": "BertLMHeadModel", "BertGeneration": "BertGenerationDecoder"}
    model = getattr(transformers, heads.get(kind, f"{kind}ForCausalLM"))(config).eval()
    keep = torch.ones(2, 7, dtype=torch.long)
    keep[1, :3] = 0
    ids = torch.randint(3, 50, (2, 7))
    options = {"max_new_tokens": 6, "do_sample": False, "output_logits": True, "return_dict_in_generate": True}
    if cache:
        options["cache_implementation"] = cache
    results = []
    for attention in ("eager", "regard"):
        model.set_attn_implementation(attention)
        results.append(model.generate(ids, attention_mask=keep, **options).logits)
    torch.testing.assert_close(torch.stack(results[1]), torch.stack(results[0]), rtol=0, atol=1e-5)
