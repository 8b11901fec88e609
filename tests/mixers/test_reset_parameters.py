"""A layer built without memory and reset is the layer that its constructor builds: no tensor keeps what memory held."""

import copy

import pytest
import torch
from torch import nn

from regard.catalog import RECORDS
from regard.feature_maps import Rebased
from regard.mixers.griffin import BlockDiagonal
from regard.mixers.parts import GatedRMSNorm, RelativePositionBias, RMSNorm, Scores, ShortConv
from regard.mixers.rwkv6 import HeadLayerNorm
from regard.models import (
    MLP,
    ClampedSwiGLU,
    CrossPreNorm,
    Decoder,
    Embedding,
    Encoder,
    EncoderDecoder,
    FirstTokenPooler,
    GatedExperts,
    GatedMLP,
    MixerOnly,
    MixtureOfExperts,
    PostNorm,
    PreNorm,
    Router,
    Routing,
    StackedExperts,
    activation,
)
from regard.nn import (
    ForgetBounds,
    KDAGates,
    KimiDeltaAttention,
    LatentSizes,
    Mamba2,
    MambaConfig,
    MultiHeadAttention,
    MultiHeadLatentAttention,
    Projections,
)
from regard.positions import LearnedPositions

DIM = 16


def norm():
    return RMSNorm(DIM)


def feed():
    return GatedMLP(DIM, 24, activation("silu"))


def attention(**parts):
    return MultiHeadAttention(DIM, 4, **parts)


def experts():
    routing = Routing(4, 2, "sigmoid", corrected=True)
    return MixtureOfExperts(
        Router(DIM, routing, bias=True), GatedExperts(DIM, 8, 4, nn.SiLU()), feed(), nn.Linear(16, 1)
    )


def decoder():
    layers = [
        lambda i: PreNorm(attention(), experts(), norm(), norm()),
        lambda i: MixerOnly(Mamba2(DIM, 4), norm()),
        lambda i: CrossPreNorm(attention(), attention(), feed(), (norm(), norm(), norm())),
    ]
    places = LearnedPositions(8, DIM)
    return Decoder(Embedding(nn.Embedding(11, DIM, padding_idx=0), places=places), layers, norm())


def encoder():
    embedding = Embedding(nn.Embedding(11, DIM), types=nn.Embedding(2, DIM), norm=nn.LayerNorm(DIM))
    layer = lambda i: PostNorm(attention(), MLP(DIM, 24, activation("gelu")), nn.LayerNorm(DIM), nn.LayerNorm(DIM))  # noqa: E731
    return Encoder(embedding, [layer], pooler=FirstTokenPooler(DIM))


PARTS = {
    "rms_norm": norm,
    "rms_norm_with_offset": lambda: RMSNorm(DIM, unit_offset=True),
    "gated_norm": lambda: GatedRMSNorm(DIM),
    "head_norm": lambda: HeadLayerNorm(4, 4, 1e-5),
    "convolution": lambda: ShortConv(DIM, bias=True),
    "block_diagonal": lambda: BlockDiagonal(DIM, 4),
    "relative_bias": lambda: RelativePositionBias(8, 4),
    "learned_positions": lambda: LearnedPositions(8, DIM),
    "rebased": lambda: Rebased(4, 4),
    "forget_bounds": lambda: ForgetBounds(3, DIM),
    "latent_with_sink": lambda: MultiHeadLatentAttention(DIM, 4, LatentSizes(8, 4, 2, 4), scores=Scores(sink=True)),
    "attention_of_all_parts": lambda: attention(
        projections=Projections(bias=True, gate=True, norm=RMSNorm), bias=RelativePositionBias(8, 4)
    ),
    "kda_with_biased_gate": lambda: KimiDeltaAttention(DIM, 4, gates=KDAGates(gate_bias=True)),
    "mamba2_with_biases": lambda: Mamba2(DIM, 4, shell=MambaConfig(bias=True)),
    "router": lambda: Router(DIM, Routing(4, 2, corrected=True), bias=True),
    "gated_experts": lambda: GatedExperts(DIM, 8, 4, nn.SiLU()),
    "stacked_experts": lambda: StackedExperts(DIM, 8, 4, ClampedSwiGLU()),
    "mixture": experts,
    "mlp": lambda: MLP(DIM, 24, activation("gelu")),
    "gated_mlp": feed,
}
MODELS = {"decoder": decoder, "encoder": encoder, "encoder_decoder": lambda: EncoderDecoder(encoder(), decoder())}
BUILDS = {record.name: lambda record=record: record.build(DIM, 4) for record in RECORDS} | PARTS


def filled_with_nan(model):
    with torch.no_grad():
        for tensor in (*model.parameters(), *model.buffers()):
            tensor.fill_(torch.nan)
    return model


def owns(module):
    return any(True for _ in module.parameters(recurse=False)) or any(True for _ in module.buffers(recurse=False))


def reset(model, order):
    """What torch's FSDP does with every module that holds tensors of its own."""
    for module in order:
        if owns(module):
            module.reset_parameters()
    return model


def inner_first(model):
    found = []
    model.apply(found.append)
    return list(dict.fromkeys(found))


def bare(build):
    with torch.device("meta"):
        model = build()
    return filled_with_nan(model.to_empty(device="cpu"))


@pytest.mark.parametrize("name", BUILDS)
def test_a_layer_without_memory_starts_as_one_that_was_built(name):
    torch.manual_seed(3)
    built = BUILDS[name]()
    made = bare(BUILDS[name])
    torch.manual_seed(3)
    reset(made, inner_first(made))
    assert made.state_dict().keys() == built.state_dict().keys()
    for key, tensor in built.state_dict().items():
        assert torch.equal(made.state_dict()[key], tensor), key


@pytest.mark.parametrize("name", BUILDS | MODELS)
def test_no_tensor_keeps_what_memory_held_in_whichever_order_modules_are_reset(name):
    build = (BUILDS | MODELS)[name]
    started = {}
    for way in ("outer first", "inner first"):
        model = bare(build)
        torch.manual_seed(3)
        reset(model, model.modules() if way == "outer first" else inner_first(model))
        for key, tensor in model.state_dict().items():
            assert tensor.isfinite().all(), (way, key)
        started[way] = {
            key: (float(t.mean()), float(t.std())) for key, t in model.state_dict().items() if t.numel() > 400
        }
    for key, (mean, std) in started["inner first"].items():  # the same distribution
        other = started["outer first"][key]
        assert abs(mean - other[0]) <= 0.2 * std + 1e-12 and abs(std - other[1]) <= 0.2 * std, key


@pytest.mark.parametrize("record", [r for r in RECORDS if not r.context], ids=lambda record: record.name)
def test_a_layer_reset_after_training_computes_what_a_new_one_does(record):
    """So its constants (slopes, rotary frequencies, masks) survive the meta device, where they were made."""
    torch.manual_seed(3)
    built = record.build(DIM, 4).double().eval()
    with torch.device("meta"):
        made = record.build(DIM, 4)
    made = filled_with_nan(made.to_empty(device="cpu"))
    torch.manual_seed(3)
    reset(made, inner_first(made))
    x = torch.randn(2, 7, DIM, dtype=torch.float64)
    torch.testing.assert_close(made.double().eval()(x), built(x), rtol=0, atol=0)


@pytest.mark.parametrize("record", RECORDS, ids=lambda record: record.name)
def test_a_reset_keeps_a_layers_parameters_themselves(record):
    layer = record.build(DIM, 4)
    held, copied = dict(layer.named_parameters()), copy.deepcopy(layer)
    reset(layer, layer.modules())
    assert all(p is held[name] and p.requires_grad and p.grad_fn is None for name, p in layer.named_parameters())
    assert held.keys() == dict(copied.named_parameters()).keys()


@pytest.mark.parametrize("name", ["mamba", "rwkv6"])
def test_a_copy_resets_its_own_linear_maps(name):
    (record,) = (r for r in RECORDS if r.name == name)
    layer = record.build(DIM, 4)
    other = filled_with_nan(copy.deepcopy(layer))
    reset(other, other.modules())
    assert all(bool(tensor.isfinite().all()) for tensor in other.parameters())
    before = {key: tensor.clone() for key, tensor in layer.state_dict().items()}
    reset(filled_with_nan(other), other.modules())
    assert all(torch.equal(tensor, before[key]) for key, tensor in layer.state_dict().items())
