"""`accelerate` on transformers' recurrent models: the same logits, cached or not, trained, and back again."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest
import torch
import transformers

from regard.backends import count_backends
from regard.integrations.transformers import accelerate
from regard.models import experts

FOLDERS = Path(__file__).parents[1] / "checkpoints"
NAMES = ["qwen3_next", "kimi_linear", "mamba2", "recurrent_gemma"]


@pytest.fixture(scope="module", params=NAMES)
def model(request):
    return transformers.AutoModelForCausalLM.from_pretrained(FOLDERS / request.param, dtype=torch.float32).eval()


def tokens(length=70):
    return torch.randint(3, 97, (2, length), generator=torch.Generator().manual_seed(3))


def close(got, want):
    torch.testing.assert_close(got, want, rtol=0, atol=1e-5)


@torch.no_grad()
def test_logits_and_generation(model):
    ids = tokens()
    want, text = model(ids).logits, model.generate(ids[:, :9], max_new_tokens=8, do_sample=False)
    with accelerate(model) as changed, count_backends() as counts:
        assert changed.layers and str(len(changed.layers)) in repr(changed)
        close(model(ids).logits, want)
        assert torch.equal(model.generate(ids[:, :9], max_new_tokens=8, do_sample=False), text)
        with pytest.raises(ValueError, match=r"^model: .* changed already"):
            accelerate(model)
    assert sum(counts.values()) >= 4
    assert not any("forward" in layer.__dict__ for layer in model.modules())
    assert torch.equal(model(ids).logits, want)


@torch.no_grad()
def test_a_prompt_in_pieces(model):
    name = "cache_params" if model.config.model_type == "mamba2" else "past_key_values"
    ids = tokens(21)
    if model.config.model_type == "recurrent_gemma":
        return  # it keeps its state on the module and returns no cache; generation above uses it
    with accelerate(model):
        whole = model(ids).logits
        first = model(ids[:, :13], use_cache=True)
        pieces = [first.logits]
        for t in range(13, 21):
            step = model(ids[:, t : t + 1], use_cache=True, **{name: getattr(first, name)})
            pieces.append(step.logits)
    torch.testing.assert_close(torch.cat(pieces, 1), whole, rtol=0, atol=2e-5)


def test_training(model):
    ids = tokens(33)
    parameters = [p for p in model.parameters() if p.requires_grad]

    def gradients():
        loss = model(ids, labels=ids, use_cache=False).loss
        return torch.autograd.grad(loss, parameters, allow_unused=True)

    want = gradients()
    with accelerate(model):
        got = gradients()
    for a, b in zip(got, want, strict=True):
        assert (a is None) == (b is None)
        if b is not None:
            assert float((a - b).abs().max()) <= 1e-4 * max(1.0, float(b.abs().max()))


def test_offloaded_weights_are_refused():
    model = transformers.AutoModelForCausalLM.from_pretrained(FOLDERS / "mamba2")
    next(m for m in model.modules() if type(m).__name__ == "Mamba2Mixer").conv1d._hf_hook = object()
    with pytest.raises(ValueError, match="offloaded"):
        accelerate(model)


@torch.no_grad()
def test_packed_documents_are_as_separate_ones():
    """transformers' own plain code lets a document read the one before it."""
    model = transformers.AutoModelForCausalLM.from_pretrained(FOLDERS / "qwen3_next", dtype=torch.float32).eval()
    ids, borders = tokens(30)[:1], [0, 11, 12, 30]
    parts = list(itertools.pairwise(borders))
    with accelerate(model):
        alone = torch.cat([model(ids[:, a:b], use_cache=False).logits for a, b in parts], 1)
        places = torch.cat([torch.arange(b - a) for a, b in parts])[None]
        marks = {"cu_seq_lens_q": torch.tensor(borders, dtype=torch.int32)}
        close(model(ids, position_ids=places, use_cache=False, **marks).logits, alone)


@torch.no_grad()
def test_experts_of_any_number(monkeypatch):
    """All at once, or by transformers' own code: the same; one that nobody asked for may overflow."""
    model = transformers.AutoModelForCausalLM.from_pretrained(FOLDERS / "qwen3_next", dtype=torch.float32).eval()
    ids = tokens(20)
    want = model(ids).logits
    for most in (-1, 2**60):
        monkeypatch.setattr(experts, "SPARED", most)
        with accelerate(model) as changed:
            assert "model.layers.0.mlp.experts" in changed.layers
            close(model(ids).logits, want)
    layer = model.model.layers[0].mlp.experts
    layer.gate_up_proj[1] = 1e38
    with accelerate(model):
        out = layer(torch.ones(3, 32), torch.tensor([[0], [1], [2]]), torch.ones(3, 1))
    assert out[[0, 2]].isfinite().all() and not out[1].isfinite().all()
