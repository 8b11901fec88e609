"""Mixed stacks with latent attention, states and experts: splits, beams, refusals, files."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from regard.errors import CacheError, CacheFull, CheckpointError
from regard.masks import Causal
from regard.mixers.parts import ShortConv
from regard.mixers.sequence import TokenSequence
from regard.models import (
    Decoder,
    Embedding,
    GatedExperts,
    GatedMLP,
    MixtureOfExperts,
    PreNorm,
    Router,
    Routing,
    ScaledResidual,
    activation,
    generate,
    load,
)
from regard.models.presets import skeleton
from regard.nn import (
    GatedDeltaNet,
    KimiDeltaAttention,
    LatentProjections,
    LatentSizes,
    LightningAttention,
    Mamba,
    MultiHeadAttention,
    MultiHeadLatentAttention,
    RMSNorm,
)
from regard.positions import Rotary

HERE = Path(__file__).parents[1] / "checkpoints"
FAMILIES = ["bailing_hybrid", "deepseek_v2", "deepseek_v3", "jamba", "kimi_linear", "minimax", "qwen3_next"]
WIDE = torch.float64
CORRECTED = Routing(6, 2, "sigmoid", normalized=True, factor=2.5, corrected=True)


# ---- stacks from factories -------------------------------------------------------------------------------------------

LATENT = LatentSizes(8, 4, 4, 4, 6)
MIXERS = (
    lambda: KimiDeltaAttention(16, 4),
    lambda: MultiHeadLatentAttention(16, 4, LATENT, mask=Causal(), rotary=Rotary(4, style="interleaved")),
    lambda: GatedDeltaNet(16, 4, key_heads=2),
    lambda: Mamba(16, state_dim=2, norm=RMSNorm),
    lambda: MultiHeadAttention(16, 4, kv_heads=2, mask=Causal()),
    lambda: LightningAttention(16, 4),
    lambda: MultiHeadLatentAttention(16, 4, LATENT, projections=LatentProjections(gate="channel"), mask=Causal()),
)


def stack(mixers=MIXERS):
    """Every mixer once; experts or a plain feed-forward part; two wirings."""
    torch.manual_seed(0)

    def layer(i):
        act = activation("silu")
        ff = MixtureOfExperts(
            Router(16, CORRECTED),
            GatedExperts(16, 8, 6, act),
            GatedMLP(16, 8, act),
        )
        parts = mixers[i](), ff if i % 2 else GatedMLP(16, 24, act), RMSNorm(16), RMSNorm(16)
        if i % 3 == 2:
            return ScaledResidual(*parts, mixer_scales=(1.5, 0.5), ff_scales=(2.0, 1.0))
        return PreNorm(*parts)

    return Decoder(Embedding(torch.nn.Embedding(11, 16)), [layer] * len(mixers), RMSNorm(16)).double().eval()


@torch.no_grad()
def test_any_layer_in_any_place_with_its_own_cache():
    model, ids = stack(), torch.randint(0, 11, (3, 12))
    keep = torch.ones(3, 12, dtype=torch.bool)
    keep[1, :4] = False
    whole = model(ids, keep=keep)
    for sizes in ([1] * 12, [5, 1, 6], [0, 11, 1]):
        cache = model.init_cache(3, 12)
        parts = zip(ids.split(sizes, 1), keep.split(sizes, 1), strict=True)
        steps = torch.cat([model(part, keep=real, cache=cache) for part, real in parts], 1)
        torch.testing.assert_close(steps[keep], whole[keep], rtol=0, atol=1e-10)
    torch.testing.assert_close(whole[1:2, 4:], model(ids[1:2, 4:]), rtol=0, atol=1e-10)
    assert {type(one).__name__ for one in cache} == {"KVCache", "LatentCache", "StateCache"}
    packed = model(ids[:1], segments=torch.tensor([[0] * 5 + [1] * 3 + [4] * 4]))
    alone = torch.cat([model(part) for part in ids[:1].split([5, 3, 4], 1)], 1)
    torch.testing.assert_close(packed, alone, rtol=0, atol=1e-10)


@torch.no_grad()
def test_two_texts_continued_in_turn_do_not_mix():
    model, ids = stack(), torch.randint(0, 11, (2, 9))
    caches = [model.init_cache(1, 9) for _ in range(2)]
    for part in (slice(0, 4), slice(4, 5), slice(5, 9)):
        for row in (1, 0):
            got = model(ids[row : row + 1, part], cache=caches[row])
            torch.testing.assert_close(got, model(ids[row : row + 1])[:, part], rtol=0, atol=1e-10)


@torch.no_grad()
def test_beams_take_latents_and_states_along():
    model, ids = stack(), torch.randint(0, 11, (3, 6))
    cache = model.init_cache(3, 8)
    model(ids, cache=cache)
    index = torch.tensor([2, 0, 0])
    cache.reorder(index)
    texts = ids[index]
    for last in (torch.tensor([[4], [5], [6]]), torch.tensor([[1], [2], [3]])):
        texts = torch.cat([texts, last], 1)
        torch.testing.assert_close(model(last, cache=cache), model(texts)[:, -1:], rtol=0, atol=1e-10)
    with pytest.raises(CacheFull):
        model(last, cache=cache)
    with pytest.raises(CacheError):
        cache.crop(3)
    assert cache.length == 8


# ---- checkpoints -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", FAMILIES)
@torch.no_grad()
def test_a_prompt_in_two_pieces_to_a_warm_cache(family):
    """The cache has served another text before; in float64, every place of the cut."""
    model = load(HERE / family, dtype=WIDE)
    ids = torch.randint(3, 97, (1, 12), generator=torch.Generator().manual_seed(4))
    whole, cache = model(ids), model.init_cache(1, 20)
    model(ids.flip(1), cache=cache)
    for cut in range(13):
        cache.reset()
        parts = [model(part, cache=cache) for part in ids.split([cut, 12 - cut], 1)]
        torch.testing.assert_close(torch.cat(parts, 1), whole, rtol=0, atol=1e-10)


@pytest.mark.parametrize("family", FAMILIES)
def test_texts_of_different_lengths_are_continued_as_each_alone(family):
    model = load(HERE / family, dtype=WIDE)
    prompts = [[5, 9, 11, 80, 3, 41, 7], [8, 9], [3, 1, 4, 1]]
    together = generate(model, prompts, max_tokens=5, end_ids=())
    for i, prompt in enumerate(prompts):
        assert together[i].ids == generate(model, prompt, max_tokens=5, end_ids=())[0].ids


@pytest.mark.parametrize("family", ["bailing_hybrid", "deepseek_v3", "kimi_linear"])
@torch.no_grad()
def test_a_correction_stays_float32_in_a_bfloat16_model(family, tmp_path):
    model = load(HERE / family, dtype=torch.bfloat16)
    router = model.layers[-1].ff.router
    assert router.correction.dtype == torch.float32 and router.weight.dtype == torch.bfloat16
    assert "router.correction" not in {name.split("ff.")[-1] for name, _ in model.named_parameters()}
    assert model(torch.tensor([[1, 5, 9]])).isfinite().all()
    model.save(tmp_path)
    again = load(tmp_path)
    assert again.layers[-1].ff.router.correction.dtype == torch.float32
    for a, b in zip(model.state_dict().values(), again.state_dict().values(), strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize(
    ("family", "dtype", "kept"),
    [
        ("bailing_hybrid", torch.bfloat16, {"mixer.A_log", "mixer.dt_bias", "mixer.conv.weight"}),
        ("bailing_hybrid", torch.float16, {"mixer.A_log", "mixer.dt_bias", "mixer.conv.weight"}),
        ("bailing_hybrid", WIDE, set()),
        ("gpt_oss", torch.float16, {"mixer_norm.weight", "ff_norm.weight", "norm.weight"}),
        ("gpt_oss", torch.bfloat16, set()),
        ("kimi_linear", torch.bfloat16, set()),
    ],
)
@torch.no_grad()
def test_parameters_that_a_family_keeps_in_float32(family, dtype, kept, tmp_path):
    model, exact = load(HERE / family, dtype=dtype), load(HERE / family, dtype=torch.float32).state_dict()
    names = {n for n, p in model.named_parameters() if p.dtype == torch.float32}
    assert {n.split(".", 2)[-1] if n.startswith("layers.") else n for n in names} == kept
    assert all(torch.equal(model.get_parameter(n), exact[n]) for n in names)  # never rounded on the way
    assert {p.dtype for n, p in model.named_parameters() if n not in names} == {dtype}
    assert model(torch.tensor([[1, 5, 9]])).isfinite().all()
    model.save(tmp_path)
    for again in (load(tmp_path).state_dict(), load(tmp_path, dtype=dtype).state_dict()):
        for name, tensor in model.state_dict().items():
            assert again[name].dtype == tensor.dtype and torch.equal(again[name], tensor)


@torch.no_grad()
def test_a_wider_convolution_rounds_once():
    conv = ShortConv(6, 3).float()
    x = torch.randn(2, 9, 6, dtype=torch.bfloat16)
    padded = torch.nn.functional.pad(x.float().mT, (2, 0))
    exact = torch.nn.functional.silu(torch.nn.functional.conv1d(padded, conv.weight[:, None], groups=6).mT)
    y, tail = conv(TokenSequence(x, torch.arange(9).expand(2, -1)), x, None)
    assert y.dtype == torch.bfloat16 and tail.dtype == torch.float32
    assert torch.equal(tail, x[:, -2:].float())
    gap = (y.float() - exact).abs() / exact.abs()
    assert gap.max() <= 2**-8  # half of a unit in the last place


def changed(folder, tmp_path, **options):
    """A copy of a checkpoint with other options; None takes one away."""
    tmp_path.mkdir(exist_ok=True)
    config = json.loads((HERE / folder / "config.json").read_text()) | options
    config = {name: value for name, value in config.items() if value is not None or name not in options}
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "model.safetensors").write_bytes((HERE / folder / "model.safetensors").read_bytes())
    return tmp_path


def retold(folder, tmp_path, tell):
    """A copy of a checkpoint with its tensors changed by a function of their dictionary."""
    changed(folder, tmp_path)
    tensors = load_file(HERE / folder / "model.safetensors")
    tell(tensors)
    save_file(tensors, tmp_path / "model.safetensors")
    return tmp_path


REFUSED = [
    ("deepseek_v2", {"topk_method": "noaux_tc"}, "topk_method: expected.*, got 'noaux_tc'"),
    ("deepseek_v2", {"norm_topk_prob": True}, "norm_topk_prob: expected.*, got True"),
    ("deepseek_v2", {"scoring_func": "sigmoid"}, "scoring_func: expected.*, got 'sigmoid'"),
    ("deepseek_v2", {"num_key_value_heads": 2}, "num_key_value_heads: expected.*, got 2"),
    ("deepseek_v2", {"num_experts_per_tok": 5}, "num_experts_per_tok: expected.*, got 5"),
    ("deepseek_v2", {"moe_layer_freq": 2}, "moe_layer_freq: expected.*, got 2"),
    ("deepseek_v2", {"first_k_dense_replace": -1}, "first_k_dense_replace: expected.*, got -1"),
    ("deepseek_v2", {"first_k_dense_replace": 2}, "missing tensors: .*unused tensors"),
    ("deepseek_v2", {"kv_lora_rank": 12}, "tensors of another shape: "),
    ("deepseek_v2", {"q_lora_rank": 6}, "missing tensors: .*q_a_proj"),
    ("deepseek_v2", {"n_routed_experts": 10**9}, "n_routed_experts: expected at most.*, got 1000000000"),
    ("deepseek_v2", {"mlp_bias": True}, "mlp_bias: expected.*, got True"),
    ("deepseek_v2", {"swirl": 1}, "unknown option swirl"),
    (
        "deepseek_v2",
        {"topk_method": "group_limited_greedy", "n_group": 3},
        "n_group: expected a divisor of n_routed_experts=4, got 3$",
    ),
    ("deepseek_v3", {"n_group": 3}, "n_group: expected a divisor of n_routed_experts=4, got 3$"),
    ("deepseek_v3", {"topk_group": 3}, "topk_group: expected at most n_group=2, got 3$"),
    (
        "deepseek_v3",
        {"num_experts_per_tok": 3},
        "num_experts_per_tok: expected at most 2, the experts in topk_group=1 of 2 groups, got 3$",
    ),
    ("kimi_linear", {"num_expert_group": 3}, "num_expert_group: expected a divisor of num_experts=4, got 3$"),
    ("kimi_linear", {"topk_group": 2}, "topk_group: expected at most num_expert_group=1, got 2$"),
    (
        "bailing_hybrid",
        {"num_experts_per_token": 3},
        "num_experts_per_token: expected at most 2, the experts in",
    ),
    (
        "bailing_hybrid",
        {"num_expert_group": None, "n_group": 3},
        ": n_group: expected a divisor of num_experts=4",
    ),
    ("deepseek_v3", {"quantization_config": {"quant_method": "fp8"}}, "unknown option quantization_config"),
    ("deepseek_v3", {"qk_rope_head_dim": 7}, "head_dim: expected.*, got 7"),
    ("deepseek_v3", {"n_shared_experts": 0}, "unused tensors: .*shared_experts"),
    ("qwen3_next", {"hidden_act": "gelu"}, "hidden_act: expected.*, got 'gelu'"),
    ("qwen3_next", {"layer_types": ["full_attention"] * 3}, "layer_types: expected"),
    ("qwen3_next", {"layer_types": ["waves"] * 4}, "layer_types: expected"),
    ("qwen3_next", {"mlp_only_layers": [1]}, "missing tensors: model.layers.1.mlp.down_proj"),
    ("qwen3_next", {"mlp_only_layers": "1"}, "mlp_only_layers: expected.*, got '1'"),
    ("qwen3_next", {"linear_num_value_heads": 3}, "linear_num_value_heads: expected.*, got 3"),
    ("qwen3_next", {"linear_value_head_dim": 4}, "in_proj_qkvz.weight is"),
    ("kimi_linear", {"mla_use_nope": False}, "mla_use_nope: expected.*, got False"),
    ("kimi_linear", {"moe_router_activation_func": "softmax"}, "moe_router_activation_func: expected"),
    ("kimi_linear", {"linear_attn_config": {"swirl": 1}}, "linear_attn_config: expected"),
    ("kimi_linear", {"mlp_layer_types": ["dense", "wet", "dense", "dense"]}, "mlp_layer_types: expected"),
    ("kimi_linear", {"tie_word_embeddings": True}, "tie_word_embeddings: expected.*, got True"),
    ("kimi_linear", {"linear_conv_kernel_dim": 3}, "q_conv1d.weight is"),
    ("bailing_hybrid", {"q_lora_rank": 8}, "q_lora_rank: expected.*, got 8"),
    ("bailing_hybrid", {"kda_lower_bound": 0.5}, "kda_lower_bound: expected .*a number below 0.*, got 0.5"),
    (
        "bailing_hybrid",
        {"kda_lower_bound": 0, "kda_safe_gate": None},
        "kda_lower_bound: expected a number below 0.*, got 0.0",
    ),
    ("bailing_hybrid", {"linear_head_dim": 4}, "tensors of another shape"),
    ("minimax", {"rotary_dim": 10}, "rotary_dim: expected.*, got 10"),
    ("minimax", {"block_size": 5}, "not as the options say: .*diagonal_decay"),
    ("minimax", {"hidden_act": "relu"}, "hidden_act: expected.*, got 'relu'"),
    ("minimax", {"layer_types": ["linear_attention"] * 4}, "missing tensors: .*layers.3.self_attn"),
    ("jamba", {"mamba_inner_layernorms": False}, "mamba_inner_layernorms: expected.*, got False"),
    ("jamba", {"attn_layer_offset": 4}, "attn_layer_offset: expected.*, got 4"),
    ("jamba", {"expert_layer_offset": 0}, "missing tensors: .*layers.0.feed_forward.experts"),
    ("jamba", {"mamba_dt_rank": "auto"}, "dt_proj.weight is"),
    ("jamba", {"mamba_conv_bias": False}, "unused tensors: .*conv1d.bias"),
]


@pytest.mark.parametrize(("folder", "options", "words"), REFUSED)
def test_options_that_do_not_fit_are_refused(folder, options, words, tmp_path):
    with pytest.raises(CheckpointError, match=words):
        load(changed(folder, tmp_path, **options))


KIMI_LISTS = {"full_attn_layers": [4], "kda_layers": [1, 2, 3], "head_dim": 8, "num_heads": 4}
OTHERWISE = [
    ("deepseek_v2", {"rope_parameters": None, "rope_theta": 10000.0, "scoring_func": "softmax", "moe_layer_freq": 1}),
    ("deepseek_v2", {"n_group": None, "topk_group": None, "aux_loss_alpha": 0.001, "seq_aux": True, "ep_size": 1}),
    ("deepseek_v2", {"n_routed_experts": None, "num_experts": 4, "num_key_value_heads": None}),
    ("deepseek_v3", {"topk_method": "noaux_tc", "scoring_func": "sigmoid", "rope_interleave": None}),
    ("deepseek_v3", {"num_nextn_predict_layers": None, "num_mtp_layers": 0}),
    ("qwen3_next", {"layer_types": None, "full_attention_interval": 4, "mlp_only_layers": None}),
    ("qwen3_next", {"rope_parameters": None, "rope_theta": 10000.0, "partial_rotary_factor": 0.25}),
    ("qwen3_next", {"rope_parameters": {"rope_theta": 10000.0, "rope_type": "default"}, "use_sliding_window": False}),
    ("kimi_linear", {"layer_types": None, "linear_attn_config": KIMI_LISTS | {"short_conv_kernel_size": 4}}),
    ("kimi_linear", {"mlp_layer_types": None, "first_k_dense_replace": 1, "moe_layer_freq": 1, "mla_use_nope": True}),
    ("kimi_linear", {"num_experts_per_token": None, "num_experts_per_tok": 2, "use_grouped_topk": True}),
    ("bailing_hybrid", {"layer_types": None, "layer_group_size": 4, "mlp_layer_types": None}),
    ("bailing_hybrid", {"rope_parameters": None, "linear_num_heads": None, "linear_head_dim": None}),
    ("minimax", {"num_local_experts": None, "num_experts": 4, "rotary_dim": 8, "mlp_alpha_factor": 1.0}),
    ("jamba", {"use_mamba_kernels": True, "num_logits_to_keep": 1, "mamba_inner_layernorms": True}),
]


@pytest.mark.parametrize(("folder", "options"), OTHERWISE)
@torch.no_grad()
def test_other_spellings_of_the_same_options(folder, options, tmp_path):
    ids = torch.tensor([[1, 5, 9, 2]])
    assert torch.equal(load(changed(folder, tmp_path, **options))(ids), load(HERE / folder)(ids))


def test_layers_named_twice_or_never_are_refused(tmp_path):
    lists = KIMI_LISTS | {"kda_layers": [1, 2]}
    with pytest.raises(CheckpointError, match="each of 1 to 4 once"):
        load(changed("kimi_linear", tmp_path, layer_types=None, linear_attn_config=lists))


@torch.no_grad()
def test_a_dense_layer_by_its_first_name(tmp_path):
    def tell(tensors):
        for part in ("gate", "up", "down"):
            name = f"model.layers.0.block_sparse_moe.{part}_proj.weight"
            tensors[name.replace("block_sparse_moe", "mlp")] = tensors.pop(name)

    ids = torch.tensor([[1, 5, 9]])
    assert torch.equal(load(retold("kimi_linear", tmp_path, tell))(ids), load(HERE / "kimi_linear")(ids))


def test_an_expert_that_is_absent_or_too_many(tmp_path):
    name = "model.layers.1.mlp.experts.{}.up_proj.weight"

    def tell(tensors):
        tensors[name.format(4)] = tensors.pop(name.format(2))

    with pytest.raises(CheckpointError, match=r"missing tensors: .*experts\.2\.up.*unused tensors: .*experts\.4\.up"):
        load(retold("deepseek_v2", tmp_path, tell))


def test_experts_of_another_shape(tmp_path):
    def tell(tensors):
        tensors["model.layers.1.mlp.experts.3.up_proj.weight"] = torch.zeros(16, 31)

    with pytest.raises(CheckpointError, match=r"experts\.3\.up_proj\.weight is \(16, 31\), expected \(16, 32\)"):
        load(retold("deepseek_v2", tmp_path, tell))


@torch.no_grad()
def test_modules_for_several_tokens_ahead_are_left(tmp_path):
    def tell(tensors):
        tensors["model.layers.61.enorm.weight"] = torch.ones(32)

    ids = torch.tensor([[1, 5, 9]])
    assert torch.equal(load(retold("deepseek_v3", tmp_path, tell))(ids), load(HERE / "deepseek_v3")(ids))


@torch.no_grad()
def test_decays_that_follow_from_the_options(tmp_path):
    """Absent they are not missed, wrong they are refused, and saving writes them."""
    names = ("slope_rate", "query_decay", "key_decay", "diagonal_decay")

    def without(tensors):
        for name in [key for key in tensors if key.endswith(names)]:
            del tensors[name]

    def wrong(tensors):
        tensors["model.layers.1.self_attn.slope_rate"] *= 1.01

    ids = torch.tensor([[1, 5, 9]])
    model = load(retold("minimax", tmp_path, without))
    assert torch.equal(model(ids), load(HERE / "minimax")(ids))
    model.save(tmp_path / "again")
    written, stored = (load_file(folder / "model.safetensors") for folder in (tmp_path / "again", HERE / "minimax"))
    assert set(written) == set(stored) and all(torch.equal(written[name], stored[name]) for name in stored)
    with pytest.raises(CheckpointError, match=r"not as the options say: model\.layers\.1\.self_attn\.slope_rate"):
        load(retold("minimax", tmp_path, wrong))


def test_sizes_that_no_tensor_can_fill_cost_nothing(tmp_path):
    """Rotary frequencies and decays between blocks would be gigabytes."""
    with pytest.raises(CheckpointError, match=r"qk_rope_head_dim: expected at most.*, got 2147483648"):
        load(changed("deepseek_v3", tmp_path / "rope", qk_rope_head_dim=2**31))
    with pytest.raises(CheckpointError, match=r"not as the options say: .*diagonal_decay"):
        load(changed("minimax", tmp_path / "block", block_size=60000))


@pytest.mark.parametrize(("family", "options"), [("deepseek_v3", {"is_causal": False}), ("jamba", {"use_rope": False})])
def test_what_is_always_on_may_not_be_switched_off(family, options, tmp_path):
    with pytest.raises(CheckpointError, match=f"unknown option {next(iter(options))}=False"):
        load(changed(family, tmp_path, **options))


@torch.no_grad()
def test_null_is_false_where_code_asks_for_truth(tmp_path):
    ids = torch.arange(3, 20)[None]
    off = load(changed("deepseek_v3", tmp_path / "off", norm_topk_prob=False, rope_interleave=False))(ids)
    folder = changed("deepseek_v3", tmp_path / "null")
    config = json.loads((folder / "config.json").read_text()) | {"norm_topk_prob": None, "rope_interleave": None}
    (folder / "config.json").write_text(json.dumps(config))
    null = load(folder)(ids)
    assert torch.equal(off, null) and not torch.allclose(load(HERE / "deepseek_v3")(ids), null)


@pytest.mark.parametrize("family", ["mistral", "minimax", "jamba"])
def test_key_heads_that_a_file_does_not_state(family):
    """The family's own 8, not one for every query head."""
    model = skeleton({"model_type": family}, "bare")
    heads = [layer.mixer.kv_heads for layer in model.layers if isinstance(layer.mixer, MultiHeadAttention)]
    assert heads and set(heads) == {8}


@pytest.mark.parametrize(("family", "size"), [("qwen3_next", 256), ("gemma2", 256), ("gpt_oss", 64)])
def test_sizes_of_heads_that_a_file_does_not_state(family, size):
    model = skeleton({"model_type": family}, "bare")
    assert {layer.mixer.head_dim for layer in model.layers if isinstance(layer.mixer, MultiHeadAttention)} == {size}
