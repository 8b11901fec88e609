"""Mixing matrices of whole models, and looking at them."""

import pytest
import torch
from torch import nn

import regard
from regard.analysis import Mixing, mixing_matrix

STACK = ["gated_deltanet", "mamba2", "gqa", "hyena", "mega", "multi_token"]


def test_every_layer_of_a_model_mixes_what_its_matrix_says():
    torch.manual_seed(0)
    model = regard.models.decoder(50, 16, STACK, heads=2).double().eval()
    ids = torch.randint(0, 50, (2, 7))
    seen = {}
    for i, layer in enumerate(model.layers):
        layer.mixer.register_forward_pre_hook(
            lambda part, args, kwargs, i=i: seen.update({i: part.mixed(*args, **kwargs)}), with_kwargs=True
        )
    with torch.no_grad():
        found = mixing_matrix(model, ids)
    assert list(found) == [f"layers.{i}.mixer" for i in range(len(STACK))]
    for i, one in enumerate(found.values()):
        mixed = one.matrix @ one.values
        torch.testing.assert_close(mixed.reshape(seen[i].shape), seen[i], rtol=1e-9, atol=1e-9)
        assert not one.matrix.triu(1).any()
    assert not any(layer.mixer._forward_pre_hooks and len(layer.mixer._forward_pre_hooks) > 1 for layer in model.layers)


def test_images_pairs_and_a_layer_that_is_called_twice():
    layer = regard.nn.MultiHeadAttention(8, 2)
    found = mixing_matrix(nn.Sequential(layer, layer), torch.randn(1, 3, 8))
    assert list(found) == ["0", "0#2"] and not torch.equal(found["0"].matrix, found["0#2"].matrix)
    pair = regard.load("tests/checkpoints/t5")
    names = mixing_matrix(pair, torch.tensor([[1, 2, 3]]), source=torch.tensor([[4, 5]]))
    assert names["decoder.layers.1.cross_mixer"].matrix.shape == (1, 4, 3, 2)
    with pytest.raises(TypeError, match="module: expected a layer with a mixing method, or a model of such"):
        mixing_matrix(nn.Linear(3, 3), torch.zeros(1, 3))
    with pytest.raises(ValueError, match="ids"):
        mixing_matrix(pair, torch.tensor([[10**6]]), source=torch.tensor([[4, 5]]))
    assert not any(part._forward_pre_hooks for part in pair.modules())


def test_a_matrix_as_text():
    one = Mixing(torch.tensor([[[[1.0, 0.0, 0.0], [-0.5, 0.5, 0.0], [0.1, torch.nan, 0.9]]]]), torch.zeros(1, 1, 3, 1))
    assert one.draw() == "@ · ·\nx = ·\n. ? %"
    assert one.draw(most=2).splitlines()[0] == "@ ·"
    assert Mixing(torch.zeros(1, 1, 0, 0), torch.zeros(1, 1, 0, 1)).draw() == ""
    with pytest.raises(IndexError):
        one.draw(head=1)


def test_a_matrix_as_a_picture(tmp_path):
    image = pytest.importorskip("PIL.Image")
    pytest.importorskip("matplotlib")
    one = mixing_matrix(regard.nn.MultiHeadAttention(12, 6), torch.randn(1, 5, 12))
    for head, name in ((None, "all.png"), (2, "one.png")):
        one.plot(tmp_path / name, head)
        with image.open(tmp_path / name) as drawn:
            assert min(drawn.size) > 200
