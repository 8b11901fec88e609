"""What models cost: released dimensions, closed forms, published numbers."""

import json
from fractions import Fraction
from functools import cache
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

import regard
from regard.analysis import Setting, estimate
from regard.analysis.alternatives import HYBRID, OWN
from regard.analysis.costs import experts_touched, footprint, matrix_macs, prefill_macs, step_macs, tokens_like
from regard.analysis.layer_names import mixer_label
from regard.errors import CheckpointError
from regard.masks import Causal, Window
from regard.mixers.costs import attention_macs, causal_pairs, window_of
from regard.mixers.griffin import BlockDiagonal
from regard.mixers.parts import ShortConv
from regard.models import Decoder, MixtureOfExperts, experts
from regard.models.presets import PRESETS, preset, skeleton

ROOT = Path(__file__).parents[2]
NAMES = sorted(PRESETS)


@cache
def planned(name, **setting):
    return estimate(preset(name).build(), Setting(**setting))


def other(found, name):
    return next(one for one in found.others if one.name.startswith(name))


# ---- published dimensions --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", NAMES)
def test_a_preset_builds_without_memory_and_every_kind_of_layer_has_its_costs(name):
    model = planned(name).model
    assert isinstance(model, Decoder)
    assert {p.device.type for p in model.parameters()} == {"meta"}
    assert model.origin.config == preset(name).config
    for kind in planned(name).own.kinds:
        assert kind.prefill_macs > 0
        assert kind.step_macs > 0
        assert kind.macs_per_token > 0


@pytest.mark.parametrize(
    ("name", "unit", "total", "active"),
    [
        # totals as the releases state them, to all their digits
        ("deepseek-v2", 1e9, "236", "21"),
        ("deepseek-v2-lite", 1e9, "15.7", None),
        ("deepseek-v3", 1e9, "671", "37"),
        ("kimi-k2", 1e12, "1", "0"),
        ("qwen3-next-80b-a3b", 1e9, "80", None),
        ("minimax-text-01", 1e9, "456", None),
        ("jamba-v0.1", 1e9, "52", "12"),
        ("mamba2-2.7b", 1e9, "2.7", "2.7"),
        ("recurrentgemma-9b", 1e9, "9", "9"),
        ("llama-2-70b", 1e9, "69", "69"),
        ("mistral-7b", 1e9, "7", "7"),
    ],
)
def test_parameters_are_the_published_ones(name, unit, total, active):
    found = planned(name)
    digits = len(total.partition(".")[2])
    assert f"{found.parameters / unit:.{digits}f}" == total
    if active is not None:
        assert f"{found.active / unit:.{digits}f}" == active


@pytest.mark.parametrize(
    ("name", "parameters"),
    [
        ("llama-2-70b", 68_976_648_192),
        ("mistral-7b", 7_241_732_096),
        ("deepseek-v2", 235_741_434_880),
        ("deepseek-v2-lite", 15_706_484_224),
        ("deepseek-v3", 671_026_419_200 - 58 * 256),  # the routers' corrections are buffers here
        ("jamba-v0.1", 51_570_323_328),
        ("kimi-linear-48b-a3b", 49_122_675_072),
        ("recurrentgemma-2b", 2_682_862_080),
    ],
)
def test_parameters_to_the_last_one(name, parameters):
    assert planned(name).parameters == parameters


def test_active_parameters_where_the_published_number_counts_otherwise():
    """MiniMax-01's 45.9B leave out embedding and head; V2-Lite's 2.4B, Kimi's 3B and Qwen's 3B are cut, not rounded."""
    minimax = planned("minimax-text-01")
    assert f"{(minimax.active - minimax.model.head.weight.numel()) / 1e9:.1f}" == "45.9"
    assert planned("deepseek-v2-lite").active == 2_451_435_008
    for name in ("kimi-linear-48b-a3b", "qwen3-next-80b-a3b"):
        assert planned(name).active // 10**9 == 3


def test_one_latent_layer_of_deepseek_v2():
    assert planned("deepseek-v2").own.kinds[0].parameters == 149_227_520


def test_kimi_k3_is_its_attention_layers_and_says_so():
    item, found = preset("kimi-k3"), planned("kimi-k3")
    assert (item.parameters, item.active, item.partial) == ("2.8T", "104B", True)
    assert "only" in item.note
    assert "Unverified" in item.note
    assert [(kind.layers, kind.name.split(",")[0]) for kind in found.own.kinds] == [
        (69, "Kimi Delta Attention"),
        (24, "latent attention"),
    ]
    types = [type(layer.mixer).__name__ for layer in found.model.layers]
    full = [i for i, name in enumerate(types, 1) if name == "MultiHeadLatentAttention"]
    assert full == [*range(4, 93, 4), 93]
    mixers = [layer.mixer for layer in found.model.layers]
    assert mixers[0].low == -5.0
    assert isinstance(mixers[0].g_proj, nn.Linear)
    assert mixers[3].gate_proj.weight.shape == (96 * 128, 7168)
    assert mixers[3].rotary is None


# ---- caches and states -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "per_token", "multi_head"),
    [
        ("deepseek-v2", 34_560, 1_966_080),
        ("deepseek-v2-lite", 15_552, 110_592),
        ("deepseek-v3", 35_136, 1_998_848),
        ("kimi-k2", 35_136, 999_424),
        ("llama-2-70b", 163_840, 1_310_720),
        ("falcon-40b", 61_440, 983_040),
        ("jamba-v0.1", 8_192, 262_144),
        ("qwen3-next-80b-a3b", 12_288, 393_216),
        ("minimax-text-01", 20_480, 1_310_720),
        ("kimi-linear-48b-a3b", 4_032, 221_184),
        ("kimi-k3", 13_824, 2_285_568),
    ],
)
def test_elements_of_cache_a_token(name, per_token, multi_head):
    found = planned(name)
    assert found.own.per_token == per_token
    assert other(found, "multi-head").per_token == multi_head


def test_latent_attention_against_multi_head_attention_of_its_dimensions():
    v2, lite = planned("deepseek-v2"), planned("deepseek-v2-lite")
    assert Fraction(v2.own.per_token, other(v2, "multi-head").per_token) == Fraction(9, 512)
    assert lite.own.per_token / other(lite, "multi-head").per_token == 0.140625
    assert v2.own.kinds[0].holds.per_token == 576
    assert Fraction(576, 2 * 128) == Fraction(9, 4)  # as many groups of keys and values of 128


DEEPSEEK_67B = {
    "model_type": "llama",
    "vocab_size": 102400,
    "hidden_size": 8192,
    "num_hidden_layers": 95,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "intermediate_size": 22016,
}


def test_how_the_published_93_percent_come_about():
    """DeepSeek-67B has grouped heads: 82.24 % fewer elements, and 93.3 % fewer bytes with 6 bits against 16."""
    dense = estimate(skeleton(DEEPSEEK_67B, "DeepSeek-67B"))
    six, half = planned("deepseek-v2", cache_bits=6), planned("deepseek-v2")
    assert dense.own.per_token == 194_560
    assert 1 - half.own.per_token / dense.own.per_token == pytest.approx(0.822368, abs=5e-7)
    per_token = [one.as_dict()["cache"]["bytes_per_token"] for one in (six, half, dense)]
    assert per_token == [25_920, 69_120, 389_120]
    assert 1 - per_token[0] / per_token[2] == pytest.approx(0.933388, abs=5e-7)
    eight = planned("deepseek-v2", cache_bits=8).as_dict()["cache"]["bytes_per_token"]
    assert 1 - eight / per_token[2] == pytest.approx(0.911184, abs=5e-7)


def test_other_published_caches():
    assert estimate(skeleton({"model_type": "llama"}, "Llama-2-7B")).own.per_token == 262_144
    larger = {"model_type": "llama", "hidden_size": 5120, "num_hidden_layers": 40, "num_attention_heads": 40}
    assert estimate(skeleton(larger, "Llama-2-13B")).own.per_token == 409_600
    llama = planned("llama-2-70b")
    assert llama.as_dict()["cache"]["bytes_per_token"] == 327_680
    falcon = planned("falcon-40b")
    assert other(falcon, "multi-head").per_token == 16 * falcon.own.per_token
    assert falcon.own.per_token == 8 * other(falcon, "multi-query").per_token


def test_windows_are_of_fixed_size():
    mistral = planned("mistral-7b").own
    assert (mistral.per_token, mistral.window_per_token, mistral.ring) == (0, 65_536, 268_435_456)
    assert mistral.cache_bytes(100) == mistral.cache_bytes(10**6) == 2 * 268_435_456
    for name, ring, fixed in (("2b", 8_388_608, 184_320), ("9b", 12_582_912, 425_984)):
        own = planned(f"recurrentgemma-{name}").own
        assert (own.per_token, own.ring, own.state + own.conv_state) == (0, ring, fixed)
        assert own.ring == sum(k.layers * 2 * 256 * 2048 for k in own.kinds if k.holds.slots)


@pytest.mark.parametrize(
    ("name", "state", "tail"),
    [
        ("qwen3-next-80b-a3b", 18_874_368, 36 * 24_576),
        ("minimax-text-01", 73_400_320, 0),
        ("kimi-linear-48b-a3b", 10_485_760, 20 * 36_864),
        ("kimi-k3", 108_527_616, 69 * 110_592),
        ("mamba2-2.7b", 64 * 655_360, 64 * 3 * (5120 + 2 * 128)),
        ("recurrentgemma-2b", 18 * 2560, 18 * 3 * 2560),
        ("jamba-v0.1", 28 * 8192 * 16, 28 * 3 * 8192),
        ("deepseek-v2", 0, 0),
    ],
)
def test_states_do_not_grow_and_stay_in_float32(name, state, tail):
    for setting in ({}, {"context": 2**20, "dtype": torch.float16, "cache_bits": 4}):
        own = planned(name, **setting).own
        assert (own.state, own.conv_state) == (state, tail)
        assert own.state_bytes == 4 * (state + tail)


def test_states_of_kimi_k3_in_megabytes():
    assert round(4 * planned("kimi-k3").own.state / 1e6, 2) == 434.11


def test_mamba2_holds_as_much_a_layer_as_published():
    holds = planned("mamba2-2.7b").own.kinds[0].holds
    # the table's 21,504 columns of a convolution are four taps; three suffice
    assert (holds.state, holds.conv_state * 4 // 3) == (655_360, 21_504)


def test_hybrids_against_their_attention_in_every_layer():
    kimi = planned("kimi-linear-48b-a3b")
    assert 1 - kimi.own.per_token / other(kimi, OWN).per_token == pytest.approx(0.740741, abs=5e-7)
    assert other(kimi, OWN).per_token == 15_552
    assert other(planned("kimi-k3"), OWN).per_token == 53_568
    assert other(planned("minimax-text-01"), OWN).per_token == 163_840 == 8 * 20_480
    jamba = planned("jamba-v0.1", context=2**18)
    assert jamba.own.cache_bytes(2**18) == 4 * 2**30
    assert other(jamba, OWN).cache_bytes(2**18) == 32 * 2**30
    assert HYBRID in {one.name for one in planned("llama-2-70b").others}
    assert OWN not in {one.name for one in planned("llama-2-70b").others}


def test_a_built_cache_holds_what_is_planned():
    """A real cache of a small checkpoint of every family of decoders takes the planned bytes."""
    for folder in sorted((ROOT / "tests" / "checkpoints").iterdir()):
        config = json.loads((folder / "config.json").read_text())
        model = regard.load(folder, dtype=torch.float32)
        if not isinstance(model, Decoder):
            continue
        setting = Setting(context=50, batch=3, dtype=torch.float32)
        if not all(hasattr(layer, "mixer") for layer in model.layers):  # a stack that keeps one cache for all layers
            with pytest.raises(TypeError, match="whose costs are not known"):
                estimate(model, setting)
            continue
        found = estimate(skeleton(config, str(folder)), setting)
        assert model.init_cache(3, 50).nbytes == found.own.bytes(50), folder
        assert sum(p.numel() for p in model.parameters()) == found.parameters, folder


@pytest.mark.parametrize(
    ("name", "elements", "in_bytes"),
    [("kimi-linear-48b-a3b", 910, 1820), ("minimax-text-01", 512, 1024), ("qwen3-next-80b-a3b", 512, 1024)],
)
def test_where_a_state_equals_a_cache(name, elements, in_bytes):
    (found,) = planned(name).crossovers
    assert (found.tokens_by_elements, found.tokens_by_bytes) == (elements, in_bytes)


def test_where_a_state_equals_a_cache_of_8_heads():
    assert tokens_like(524_288, 2 * 8 * 128) == 256
    assert tokens_like(524_288, 2 * 8 * 128, 32, 16) == 512


@pytest.mark.parametrize("name", NAMES)
def test_every_plan_compares_a_state_with_a_cache(name):
    assert all(one.tokens_by_elements > 0 for one in planned(name).crossovers)
    assert planned(name).crossovers


# ---- work ------------------------------------------------------------------------------------------------------------


def test_causal_pairs_are_those_that_masks_allow():
    for tokens in (1, 2, 5, 9):
        assert causal_pairs(tokens) == int(Causal().dense(tokens, tokens).sum())
        for window in (1, 3, 20):
            assert causal_pairs(tokens, window) == int(Window(window).dense(tokens, tokens).sum())


def test_work_of_softmax_attention():
    layer = regard.nn.MultiHeadAttention(64, 8, kv_heads=2, mask=Causal())
    assert prefill_macs(layer, 100) == 8 * 100 * 101 * 8  # H T (T + 1) D
    assert step_macs(layer, 100) == 2 * 8 * 8 * 100
    local = regard.nn.MultiHeadAttention(64, 8, mask=Window(16))
    assert prefill_macs(local, 100) == 2 * 8 * 8 * (100 * 16 - 16 * 15 // 2)
    assert step_macs(local, 100) == 2 * 8 * 8 * 16
    assert attention_macs(1, 192, 128, 1) == 320


def test_work_of_latent_attention():
    layer = planned("deepseek-v2").model.layers[0].mixer
    tokens, heads = 4096, 128
    pairs = tokens * (tokens + 1) // 2
    assert prefill_macs(layer, tokens) == heads * (pairs * 320 + tokens * 512 * 256)  # expanded
    assert step_macs(layer, tokens) == heads * (tokens * 1088 + 512 * 256)  # absorbed
    layer.form = "expanded"
    assert step_macs(layer, tokens) == heads * (tokens * 320 + tokens * 512 * 256)
    layer.form = None


def test_a_window_bounds_the_work_of_latent_attention():
    sizes = regard.nn.LatentSizes(16, 8, 4, 8)
    full, local = (regard.nn.MultiHeadLatentAttention(64, 8, sizes, mask=mask) for mask in (Causal(), Window(8)))
    assert window_of(full) is None and window_of(local) == 8
    pairs = 1000 * 8 - 8 * 7 // 2
    assert prefill_macs(local, 1000) == 8 * (pairs * (12 + 8) + 1000 * 16 * 16)  # expanded, as the layer does
    assert step_macs(local, 1000) == step_macs(full, 8) == 8 * (8 * (20 + 16) + 16 * 16)  # absorbed
    assert prefill_macs(local, 8) == prefill_macs(full, 8) and step_macs(local, 5) == step_macs(full, 5)
    assert footprint(local).held(1000) == footprint(full).held(1000) == 1000 * 20  # all are kept
    assert footprint(local).read(1000) == 8 * 20 and footprint(full).read(1000) == 1000 * 20
    assert mixer_label(local) == mixer_label(full) + ", window 8"


@pytest.mark.parametrize(
    ("make", "prefill", "step"),
    [
        (lambda: regard.nn.LightningAttention(64, 4), 4 * 1000 * (2 * 32 * 16 + 2 * 16 * 16), 3 * 4 * 16 * 16),
        (lambda: regard.nn.GatedLinearAttention(64, 4), 4 * 1000 * (32 * 24 + 2 * 8 * 16), 3 * 4 * 8 * 16),
        (lambda: regard.nn.LinearAttention(64, 4, eps=None), None, 2 * 4 * 16 * 16),
        (lambda: regard.nn.DeltaNet(64, 4), 4 * 1000 * (5 * 32 * 16 + 3 * 256) + 4 * 1000 * 1024 // 3, 3 * 4 * 256),
        (lambda: regard.nn.KimiDeltaAttention(64, 4), None, 4 * 4 * 256),
        (
            lambda: regard.nn.Mamba2(64, 4, state_dim=16, groups=2),
            2 * 1000 * 32 * 16 + 4 * 1000 * (32 * 32 + 2 * 16 * 32),
            3 * 4 * 32 * 16,
        ),
        (lambda: regard.nn.Mamba(64), 3 * 1000 * 128 * 16, 3 * 128 * 16),
        (lambda: regard.nn.GriffinRecurrent(64, 4), 1000 * 64, 64),
    ],
)
def test_work_of_layers_with_states(make, prefill, step):
    layer = make()
    assert step_macs(layer, 1000) == step_macs(layer, 10**6) == step
    if prefill is not None:
        assert prefill_macs(layer, 1000) == prefill
    assert prefill_macs(layer, 2000) == 2 * prefill_macs(layer, 1000)


def test_growth_with_length():
    dense, local = (regard.nn.MultiHeadAttention(64, 8, mask=mask) for mask in (Causal(), Window(16)))
    assert prefill_macs(dense, 2**16) / prefill_macs(dense, 2**15) == pytest.approx(4, rel=1e-4)
    assert prefill_macs(local, 2**16) / prefill_macs(local, 2**15) == pytest.approx(2, rel=1e-3)


@pytest.mark.parametrize("name", NAMES)
def test_every_matrix_is_counted_but_tables_and_states_of_rates(name):
    """MACs of a token are the weights of matrices and convolutions, each once, of experts those that are chosen."""
    model = planned(name).model
    for layer in model.layers:
        owners = {id(w): m for m in layer.modules() for w in m.parameters(recurse=False)}
        for key, weight in layer.named_parameters():
            owner = owners[id(weight)]
            counted = isinstance(owner, (nn.Linear, ShortConv, BlockDiagonal)) or ".experts." in key or "router" in key
            assert counted or weight.ndim < 2 or key.endswith("A_log"), key
    mixers = sum(matrix_macs(layer) for layer in model.layers)
    assert 0 < mixers < planned(name).active


def test_flops_are_twice_the_active_parameters_and_the_mixing():
    found = planned("llama-2-70b", context=1)
    vectors = sum(p.numel() for p in found.model.parameters() if p.ndim == 1)
    mixing = 2 * 80 * 64 * 2 * 128
    assert found.prefill_flops == found.decode_flops == 2 * (found.active - vectors) + mixing


def test_rows_multiply_work_and_caches_but_weights_are_read_once():
    one, many = planned("llama-2-70b"), planned("llama-2-70b", batch=8)
    assert many.decode_flops == 8 * one.decode_flops
    assert many.own.cache_bytes(1000) == 8 * one.own.cache_bytes(1000)
    assert many.decode_bytes - one.decode_bytes == 7 * one.own.decode_bytes
    assert one.decode_bytes == 2 * one.active + one.own.cache_bytes(32768)


def test_experts_that_rows_touch():
    assert experts_touched(16, 2, 1) == 2
    assert experts_touched(16, 2, 10**6) == 16
    one, many, all_of_them = (planned("jamba-v0.1", batch=batch, context=1) for batch in (1, 4, 10**6))
    assert one.decode_bytes == 2 * one.active + one.own.decode_bytes
    rows = all_of_them.decode_bytes - all_of_them.own.decode_bytes
    assert one.decode_bytes < many.decode_bytes - many.own.decode_bytes + one.own.decode_bytes
    assert rows == 2 * (all_of_them.parameters - all_of_them.model.embedding.tokens.weight.numel())


@pytest.mark.parametrize("family", ["deepseek_v2", "qwen3_next", "llama", "jamba", "falcon"])
def test_matrices_multiply_as_often_as_torch_counts(family, monkeypatch):
    """torch counts the products of feed-forward parts as they run; experts compute their own tokens alone."""
    monkeypatch.setattr(experts, "SPARED", -1)
    model = regard.load(ROOT / "tests" / "checkpoints" / family, dtype=torch.float32)
    for layer in model.layers:
        width = model.embedding.tokens.weight.shape[1]
        with torch.no_grad(), FlopCounterMode(display=False) as counter:
            layer.ff(torch.randn(2, 5, width))
        assert counter.get_total_flops() == 2 * 10 * matrix_macs(layer.ff)


def test_what_attention_is_called_follows_from_its_heads():
    words = {(4, 4): "multi-head", (4, 2): "grouped-query", (4, 1): "multi-query", (1, 1): "multi-head"}
    for (heads, kv_heads), kind in words.items():
        assert mixer_label(regard.nn.MultiHeadAttention(8, heads, kv_heads=kv_heads)).startswith(f"{kind} attention")


def test_layers_whose_costs_are_not_known_are_refused():
    with pytest.raises(TypeError, match="Linear are not known"):
        prefill_macs(nn.Linear(2, 2), 1)
    with pytest.raises(TypeError, match="Linear are not known"):
        step_macs(nn.Linear(2, 2), 1)
    with pytest.raises(TypeError, match="init_cache"):
        footprint(nn.Linear(2, 2))
    with pytest.raises(TypeError, match="up to three axes"):
        prefill_macs(_Deep(), 1)
    with pytest.raises(TypeError, match="Decoder"):
        estimate(nn.Linear(2, 2))
    with pytest.raises(TypeError, match="router"):
        matrix_macs(MixtureOfExperts(nn.Linear(2, 2), nn.Linear(2, 2)))


class _Deep(regard.nn.Mamba):
    def __init__(self):
        super().__init__(8)

    def state_shapes(self):
        return {"a": (2, 3, 4, 5)}


@pytest.mark.parametrize(
    ("given", "error", "words"),
    [
        ({"context": 0}, ValueError, "context"),
        ({"context": 1.5}, TypeError, "context"),
        ({"batch": -1}, ValueError, "batch"),
        ({"dtype": torch.int8}, TypeError, "dtype"),
        ({"cache_bits": 0}, ValueError, "cache_bits"),
        ({"cache_bits": 1e-300}, ValueError, "cache_bits: expected a number from 0.01 to 64"),
        ({"cache_bits": 65}, ValueError, "cache_bits"),
        ({"cache_bits": "6"}, TypeError, "cache_bits"),
        ({"cache_bits": float("nan")}, ValueError, "cache_bits"),
    ],
)
def test_settings_that_mean_nothing_are_refused(given, error, words):
    with pytest.raises(error, match=words):
        Setting(**given)


def test_unknown_presets_and_options_are_refused():
    with pytest.raises(ValueError, match="llama-2-70b"):
        preset("gpt-5")
    with pytest.raises(CheckpointError, match=r"num_hidden_layers: expected at most 4096.*got 1000000000"):
        skeleton({"model_type": "llama", "num_hidden_layers": 10**9}, "mine")
