"""A decoder from the catalogue's names: what it is made of, its written form, and what it refuses."""

import json
import math
import re

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import regard
from regard.catalog import RECORDS
from regard.errors import CheckpointError
from regard.masks import Causal, Window
from regard.mixers.parts import RMSNorm
from regard.models import Decoder, Embedding, GatedMLP, decoder, generate
from regard.nn import GatedDeltaNet, MultiHeadAttention

CAUSAL = [record.name for record in RECORDS if record.causal and not record.context]
HYBRID = ["gated_deltanet", "gated_deltanet", "gated_deltanet", "gqa"]


def ids(vocab=61, tokens=12):
    return torch.randint(0, vocab, (2, tokens))


@torch.no_grad()
@pytest.mark.parametrize("name", CAUSAL)
def test_a_decoder_of_one_mechanism_is_causal_saves_and_loads(name, tmp_path):
    model = decoder(61, 32, [name, name], heads=4)
    x = ids()
    logits = model(x)
    assert abs(float(F.cross_entropy(logits[:, :-1].flatten(0, 1), x[:, 1:].flatten())) - math.log(61)) < 0.3
    changed = x.clone()
    changed[:, -1] = (changed[:, -1] + 1) % 61
    torch.testing.assert_close(model(changed)[:, :-1], logits[:, :-1], rtol=1e-4, atol=1e-5)
    model.save(tmp_path / "folder")
    again = regard.load(tmp_path / "folder")
    assert again.state_dict().keys() == model.state_dict().keys()
    torch.testing.assert_close(again(x), model.eval()(x), rtol=0, atol=0)


def test_its_blocks_are_pre_norm_with_gated_feed_forward_parts():
    model = decoder(61, 32, HYBRID, heads=4)
    assert [type(block.mixer) for block in model.layers] == [GatedDeltaNet] * 3 + [MultiHeadAttention]
    assert all(type(block.ff) is GatedMLP and block.ff.up_proj.out_features == 88 for block in model.layers)
    assert isinstance(model.norm, RMSNorm) and model.head is None and model.training
    assert isinstance(model.layers[3].mixer.mask, Causal) and model.layers[3].mixer.rotary.dim == 8
    untied = decoder(61, 32, HYBRID, heads=4, tied=False, hidden=50)
    assert untied.head.weight.shape == (61, 32) and untied.layers[0].ff.up_proj.out_features == 50


def test_heads_are_of_64_channels_by_default():
    assert [decoder(5, dim, ["mha"]).layers[0].mixer.heads for dim in (32, 64, 192)] == [1, 1, 3]


def test_sizes_are_the_published_ones_not_those_of_small_tests():
    model = decoder(5, 16, ["window", "griffin_attention", "softcap"], heads=2)
    assert model.layers[0].mixer.mask.w == 4096
    assert model.layers[1].mixer.mask.w == 2048
    assert model.layers[2].mixer.scores.softcap == 50.0


def test_layers_of_hgrn_share_a_table_of_rising_bounds(tmp_path):
    model = decoder(61, 16, ["hgrn", "mha", "hgrn", "hgrn"], heads=2)
    tables = {id(model.layers[i].mixer.low.table) for i in (0, 2, 3)}
    assert len(tables) == 1 and [model.layers[i].mixer.low.layer for i in (0, 2, 3)] == [0, 1, 2]
    with torch.no_grad():
        model.layers[0].mixer.low.table.weight.normal_()
    model.save(tmp_path)
    again = regard.load(tmp_path)
    assert again.layers[0].mixer.low.table is again.layers[3].mixer.low.table
    assert torch.equal(again.layers[0].mixer.low.table.weight, model.layers[3].mixer.low.table.weight)


def test_its_options_are_written_and_make_the_same_model(tmp_path):
    model = decoder(61, 32, HYBRID, heads=4, hidden=40, tied=False, std=0.05)
    model.save(tmp_path)
    written = json.loads((tmp_path / "config.json").read_text())
    assert written["model_type"] == "regard_decoder" and written["layer_types"] == HYBRID
    made = regard.models.from_config(tmp_path)
    shapes = {name: tensor.shape for name, tensor in model.state_dict().items()}
    assert {name: tensor.shape for name, tensor in made.state_dict().items()} == shapes
    for own in (made, model):
        assert float(own.embedding.tokens.weight.detach().std()) == pytest.approx(0.05, rel=0.1)
        assert float(own.layers[0].ff.down_proj.weight.detach().std()) == pytest.approx(0.05 / 8**0.5, rel=0.1)


def test_a_saved_one_continues_a_text(tmp_path):
    model = decoder(61, 32, HYBRID, heads=4).eval()
    model.save(tmp_path)
    prompt = [3, 1, 4, 1, 5]
    texts = [generate(own, prompt, max_tokens=6)[0].ids for own in (model, regard.load(tmp_path))]
    assert texts[0] == texts[1]


def test_factories_stand_beside_names():
    model = decoder(61, 32, ["mha", lambda i: MultiHeadAttention(32, 2, mask=Window(i + 2))], heads=4)
    assert model.layers[1].mixer.mask.w == 3
    with pytest.raises(
        CheckpointError, match=r"got one of parts that no config\.json describes; keep its state_dict\(\)"
    ):
        model.save("never")


def test_a_model_assembled_by_hand_says_how_to_keep_its_weights(tmp_path):
    model = Decoder(Embedding(nn.Embedding(5, 4)), [])
    with pytest.raises(CheckpointError, match=r"regard\.models\.decoder .*torch\.save or safetensors"):
        model.save(tmp_path / "folder")
    assert not (tmp_path / "folder").exists()


def test_it_can_be_built_without_memory():
    with torch.device("meta"):
        model = decoder(61, 32, HYBRID, heads=4)
    assert all(parameter.is_meta for parameter in model.parameters())
    made = regard.models.initialise(model.to_empty(device="cpu"))
    assert all(bool(parameter.isfinite().all()) for parameter in made.parameters())


@pytest.mark.parametrize(
    ("layers", "error", "text"),
    [
        (["encoder"], ValueError, "layers: expected causal mechanisms, got 'encoder', in which tokens read later ones"),
        (["cross"], ValueError, "layers: expected mechanisms of one sequence, got 'cross', which reads a context"),
        (["gated_deltanett"], ValueError, "got 'gated_deltanett' (did you mean 'gated_deltanet'?)"),
        (["zzz"], ValueError, "layers: expected names among mha, mqa"),
        ([], TypeError, "layers: expected a list of names or factories, at least one, got"),
        ("mha", TypeError, "layers: expected a list of names or factories, at least one, got"),
        ([3], TypeError, "layers: expected names and factories of layers, got int 3"),
        ([nn.Identity()], TypeError, "layers: expected names and factories of layers, got Identity"),
        ([lambda i: 3], TypeError, "layers: expected factories of layers, got one that gives int 3"),
        ([lambda i: MultiHeadAttention(32, 2)], ValueError, "layers: expected causal layers, got a MultiHeadAttention"),
    ],
)
def test_layers_that_it_cannot_stack_are_refused(layers, error, text):
    with pytest.raises(error, match=re.escape(text)):
        decoder(61, 32, layers, heads=4)


@pytest.mark.parametrize(
    ("options", "error", "text"),
    [
        ({"heads": 5}, ValueError, "heads: expected a divisor of dim=32, got 5"),
        ({"hidden": 0}, ValueError, "hidden: expected an int of at least 1"),
        ({"tied": 1}, TypeError, "tied: expected True or False"),
        ({"std": 0.0}, ValueError, "std: expected a number > 0"),
    ],
)
def test_options_out_of_range_are_refused(options, error, text):
    with pytest.raises(error, match=re.escape(text)):
        decoder(61, 32, ["mha"], **options)


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"layer_types": ["encoder"]}, "layer_types: expected mha, .*got 'encoder'"),
        ({"layer_types": []}, "layer_types: expected a list of names"),
        ({"shear": 2}, "unknown option shear=2"),
        ({"num_attention_heads": 5}, "heads: expected a divisor of dim=32"),
    ],
)
def test_a_written_form_that_cannot_be_read_is_refused(options, text):
    good = decoder(61, 32, ["mha"], heads=4).origin.config
    with pytest.raises(CheckpointError, match=text):
        regard.models.from_config({**good, **options})
