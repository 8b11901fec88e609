"""A model from parts starts as published models do: near the loss of a guess, from every build."""

import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from regard.catalog import RECORDS
from regard.mixers.parts import RMSNorm
from regard.models import (
    Decoder,
    Embedding,
    GatedExperts,
    GatedMLP,
    MixtureOfExperts,
    PostNorm,
    PreNorm,
    Router,
    Routing,
    activation,
    initialise,
)
from regard.nn import Mamba, MultiHeadAttention

DIM, HEADS, VOCAB = 32, 4, 257
CAUSAL = [record for record in RECORDS if record.causal and not record.context]


def feed():
    return GatedMLP(DIM, 48, activation("silu"))


def stack(make, tied=True, count=2, block=PreNorm, ff=feed):
    head = None if tied else nn.Linear(DIM, VOCAB, bias=False)
    layers = [lambda i: block(make(), ff(), RMSNorm(DIM), RMSNorm(DIM))] * count
    return Decoder(Embedding(nn.Embedding(VOCAB, DIM)), layers, RMSNorm(DIM), head)


def loss(model):
    ids = torch.randint(0, VOCAB, (4, 33))
    return float(F.cross_entropy(model(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten()))


@torch.no_grad()
@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
@pytest.mark.parametrize("record", CAUSAL, ids=lambda record: record.name)
def test_a_decoder_starts_at_the_loss_of_a_guess(record, tied):
    model = initialise(stack(lambda: record.build(DIM, HEADS), tied))
    assert abs(loss(model) - math.log(VOCAB)) < 0.3


@torch.no_grad()
def test_so_does_one_with_experts():
    def ff():
        return MixtureOfExperts(Router(DIM, Routing(4, 2)), GatedExperts(DIM, 16, 4, nn.SiLU()))

    model = initialise(stack(lambda: MultiHeadAttention(DIM, HEADS), ff=ff))
    assert abs(loss(model) - math.log(VOCAB)) < 0.3


def test_a_model_built_without_memory_starts_with_the_same_values():
    def build():
        return stack(lambda: Mamba(DIM), tied=False)

    with torch.device("meta"):
        bare = build()
    built = build()
    torch.manual_seed(5)
    initialise(built)
    torch.manual_seed(5)
    made = initialise(bare.to_empty(device="cpu")).state_dict()
    assert all(torch.equal(made[name], tensor) for name, tensor in built.state_dict().items())


@torch.no_grad()
def test_what_ends_a_branch_is_divided_by_the_root_of_the_branches():
    def spread(**options):
        torch.manual_seed(0)
        model = initialise(stack(lambda: MultiHeadAttention(DIM, HEADS), count=8), **options)
        block = model.layers[3]
        return [float(part.weight.std()) for part in (block.mixer.o_proj, block.ff.down_proj, block.mixer.q_proj)]

    scaled, plain = spread(std=0.1), spread(std=0.1, depth_scaled=False)
    assert scaled[:2] == pytest.approx([value / 4 for value in plain[:2]])
    assert scaled[2] == plain[2] == pytest.approx(0.1, rel=0.1)


def test_branches_behind_which_a_norm_stands_are_not_scaled():
    def ends(**options):
        torch.manual_seed(0)
        return initialise(stack(lambda: MultiHeadAttention(DIM, HEADS), block=PostNorm), **options).state_dict()

    assert all(torch.equal(tensor, ends(depth_scaled=False)[name]) for name, tensor in ends().items())


@torch.no_grad()
def test_parts_that_layers_share_are_scaled_once():
    shared = MultiHeadAttention(DIM, HEADS)
    initialise(stack(lambda: shared, count=8))
    assert float(shared.o_proj.weight.std()) == pytest.approx(0.02 / 4, rel=0.2)


@torch.no_grad()
def test_a_mechanisms_own_start_stays():
    model = initialise(stack(lambda: Mamba(DIM)))
    mixer = model.layers[0].mixer
    step = F.softplus(mixer.dt_proj.bias)
    assert 1e-4 <= float(step.min()) and float(step.max()) <= 0.11
    assert torch.equal(mixer.A_log[0], torch.arange(1.0, 17.0).log())


def test_the_row_of_padding_stays_zero():
    table = initialise(nn.Embedding(5, 4, padding_idx=2))
    assert bool((table.weight[2] == 0).all()) and bool((table.weight[1] != 0).all())


def test_a_part_that_cannot_start_anew_is_named_before_anything_changes():
    class Scaled(nn.Module):
        def __init__(self):
            super().__init__()
            self.gain = nn.Parameter(torch.ones(3))

    model = nn.Sequential(nn.Linear(3, 3), Scaled())
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    with pytest.raises(
        TypeError, match=r"^model: expected parts with reset_parameters, got 1, a Scaled, which holds gain"
    ):
        initialise(model)
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())


def test_a_model_without_memory_is_refused():
    with pytest.raises(ValueError, match=r"^model: expected tensors with memory, got .*to_empty"):
        initialise(nn.Linear(2, 2, device="meta"))


@pytest.mark.parametrize("std", [0.0, -1.0, float("nan")])
def test_a_standard_deviation_out_of_range_is_refused(std):
    with pytest.raises(ValueError, match=r"^std: expected a number > 0"):
        initialise(nn.Linear(2, 2), std=std)
