"""Without gradients the definition works in place: the same weights and outputs, and nobody's tensor changes."""

import pytest
import torch

import regard


def made(*shape):
    return torch.randn(shape, dtype=torch.float64)


@pytest.mark.parametrize("options", [{}, {"softcap": 3.0}, {"sink": torch.zeros(3).double()}, {"scale": 1.0}], ids=str)
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("biased", [False, True])
def test_weights_and_outputs_are_those_that_are_recorded(options, masked, biased):
    q, k, v = made(2, 3, 5, 4), made(2, 3, 6, 4), made(2, 3, 6, 4)
    given = {**options, "backend": "reference"}
    if masked:
        given["mask"] = torch.rand(2, 1, 5, 6) > 0.4
        given["mask"][0, :, 2] = False
    if biased:
        given["bias"] = made(1, 3, 5, 6)
    tensors = {"q": q, "k": k, "v": v, **{name: x for name, x in given.items() if isinstance(x, torch.Tensor)}}
    before = {name: x.clone() for name, x in tensors.items()}
    want = regard.attention_weights(q, k, v, **given)
    with torch.no_grad():
        found = regard.attention_weights(q, k, v, **given)
    assert all(torch.equal(a, b) for a, b in zip(found, want, strict=True))
    assert all(torch.equal(before[name], x) for name, x in tensors.items())


@pytest.mark.filterwarnings("ignore:.*torch.jit.script. is deprecated:DeprecationWarning")  # torch's jvp uses it
def test_under_vmap_and_forward_derivatives():
    q, k, v = made(2, 3, 5, 4), made(2, 3, 6, 4), made(2, 3, 6, 4)
    biases, masks = made(4, 2, 3, 5, 6), torch.rand(4, 2, 1, 5, 6) > 0.3

    def weights(bias, mask):
        return regard.attention_weights(q, k, v, bias=bias, mask=mask)[1]

    def by_query(q):
        return regard.attention_weights(q, k, v)[1]

    tangent = torch.func.jvp(by_query, (q,), (torch.ones_like(q),))
    with torch.no_grad():
        want = torch.stack([weights(*pair) for pair in zip(biases, masks, strict=True)])
        torch.testing.assert_close(torch.func.vmap(weights)(biases, masks), want)
        for own, one in zip(torch.func.jvp(by_query, (q,), (torch.ones_like(q),)), tangent, strict=True):
            torch.testing.assert_close(own, one)
