"""An accelerated model can do what it could before: be saved, copied, compiled and exported, and go back."""

from __future__ import annotations

import copy
import io
import itertools
import pickle
from pathlib import Path

import pytest
import torch
import transformers

from regard.backends import count_backends
from regard.integrations.transformers import accelerate, undo

FOLDERS = Path(__file__).parents[1] / "checkpoints"
SMALL = {
    "vocab_size": 97,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
GATED = {
    "linear_num_value_heads": 4,
    "linear_num_key_heads": 2,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "linear_conv_kernel_dim": 4,
    "layer_types": ["linear_attention", "full_attention"],
}
MAMBA = {
    "mamba_d_state": 8,
    "mamba_n_heads": 4,
    "mamba_d_head": 16,
    "mamba_n_groups": 1,
    "mamba_d_conv": 4,
    "mamba_expand": 2,
    "mamba_chunk_size": 8,
}
EXPERTS = {
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "shared_expert_intermediate_size": 16,
}
STORED = ["qwen3_next", "kimi_linear", "mamba2", "recurrent_gemma", "bailing_hybrid"]
BUILT = {
    "qwen3_5": lambda: transformers.Qwen3_5ForCausalLM(transformers.Qwen3_5TextConfig(**SMALL, **GATED, head_dim=8)),
    "qwen3_5_moe": lambda: transformers.Qwen3_5MoeForCausalLM(
        transformers.Qwen3_5MoeTextConfig(**SMALL, **GATED, **EXPERTS, head_dim=8)
    ),
    "olmo_hybrid": lambda: transformers.OlmoHybridForCausalLM(transformers.OlmoHybridConfig(**SMALL, **GATED)),
    "bamba": lambda: transformers.BambaForCausalLM(transformers.BambaConfig(**SMALL, **MAMBA, attn_layer_indices=[1])),
    "granitemoehybrid": lambda: transformers.GraniteMoeHybridForCausalLM(
        transformers.GraniteMoeHybridConfig(
            **SMALL,
            **MAMBA,
            layer_types=["mamba", "attention"],
            num_local_experts=4,
            num_experts_per_tok=2,
            shared_intermediate_size=16,
        )
    ),
    "falcon_h1": lambda: transformers.FalconH1ForCausalLM(
        transformers.FalconH1Config(**SMALL, **MAMBA, mamba_d_ssm=64, head_dim=8)
    ),
    "nemotron_h": lambda: transformers.NemotronHForCausalLM(
        transformers.NemotronHConfig(
            **SMALL,
            head_dim=8,
            layers_block_type=["linear_attention", "full_attention"],
            mamba_num_heads=4,
            mamba_head_dim=16,
            ssm_state_size=8,
            n_groups=1,
            conv_kernel=4,
            chunk_size=8,
        )
    ),
    "zamba2": lambda: transformers.Zamba2ForCausalLM(
        transformers.Zamba2Config(
            **SMALL,
            mamba_d_state=8,
            mamba_ngroups=1,
            n_mamba_heads=4,
            mamba_d_conv=4,
            chunk_size=8,
            layers_block_type=["mamba", "hybrid"],
            num_mem_blocks=1,
            adapter_rank=4,
            attention_head_dim=16,
        )
    ),
}
PACK_ALONE = {"mamba2", "recurrent_gemma"}  # their models pass no marks of documents on


def built(name):
    torch.manual_seed(0)
    if name in STORED:
        return transformers.AutoModelForCausalLM.from_pretrained(FOLDERS / name, dtype=torch.float32).eval()
    model = BUILT[name]().eval()
    with torch.no_grad():
        for weight in model.parameters():
            if weight.ndim > 1:
                weight.copy_(torch.randn(weight.shape) * 0.2)
    return model


SLOW = [pytest.param(name, marks=pytest.mark.slow) for name in ["kimi_linear", "bailing_hybrid", *BUILT]]
TRACED = ["qwen3_next", "mamba2", "recurrent_gemma", *SLOW]  # compilers take seconds for each


@pytest.fixture(scope="module", params=[*STORED, *BUILT])
def model(request):
    return built(request.param)


def tokens(length=14, batch=2):
    return torch.randint(3, 97, (batch, length), generator=torch.Generator().manual_seed(3))


def close(got, want):
    torch.testing.assert_close(got, want, rtol=0, atol=1e-4)


class Logits(torch.nn.Module):
    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, ids):
        return self.model(ids, use_cache=False).logits


def stored(model):
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


@torch.no_grad()
@pytest.mark.parametrize("copied", [stored, lambda m: pickle.loads(pickle.dumps(m)), copy.deepcopy])
def test_a_copy_is_accelerated_too_and_can_go_back(model, copied):
    ids = tokens()
    want, kind = model(ids).logits, model.config._attn_implementation
    with accelerate(model):
        other = copied(model)
        assert type(other) is type(model)
        with pytest.raises(ValueError, match="changed already"):
            accelerate(other)
        with count_backends() as counts:
            close(other(ids).logits, want)
        assert sum(counts.values())
    undo(other)
    assert {type(a) for a in other.modules()} == {type(b) for b in model.modules()}
    assert other.config._attn_implementation == model.config._attn_implementation == kind
    assert torch.equal(other(ids).logits, want)
    undo(other)  # again does nothing


@torch.no_grad()
def test_a_saved_folder(model, tmp_path):
    with accelerate(model):
        model.save_pretrained(tmp_path)
    again = type(model).from_pretrained(tmp_path, dtype=torch.float32).eval()
    for (name, a), (other, b) in zip(model.state_dict().items(), again.state_dict().items(), strict=True):
        assert name == other and torch.equal(a, b)


# what transformers' own recorder and RecurrentGemma's states do to a traced model, accelerated or not
@pytest.mark.filterwarnings(
    "ignore:While compiling, we found certain side effects", "ignore:The tensor attributes self"
)
@torch.no_grad()
@pytest.mark.parametrize("strict", [False, True], ids=["not strict", "strict"])
@pytest.mark.parametrize("name", TRACED)
def test_export(name, strict):
    model, ids = built(name), tokens(9)
    want = model(ids).logits
    with accelerate(model):
        exported = torch.export.export(Logits(model), (ids,), strict=strict).module()
    close(exported(ids), want)


@torch.no_grad()
@pytest.mark.parametrize("whole", [False, True], ids=["graphs", "one graph"])
@pytest.mark.parametrize("name", TRACED)
def test_compile(name, whole):
    torch._dynamo.reset()
    model, ids = built(name), tokens(9)
    want = model(ids).logits
    with accelerate(model):
        if whole:
            close(torch.compile(Logits(model), fullgraph=True, backend="eager")(ids), want)
        else:
            close(torch.compile(model, backend="eager")(ids).logits, want)
    if name == "mamba2":  # the same code objects with transformers' functions again
        close(torch.compile(Logits(model), fullgraph=True, backend="eager")(ids), want)


def test_modes_and_gradients(model):
    ids = tokens()
    weights = [weight for weight in model.parameters() if weight.requires_grad]

    def gradients():
        loss = model(ids, labels=ids, use_cache=False).loss
        return torch.autograd.grad(loss, weights, allow_unused=True)

    want = gradients()
    with accelerate(model):
        model.train()
        model.eval()
        for a, b in zip(gradients(), want, strict=True):
            assert (a is None) == (b is None)
            if b is not None:
                assert float((a - b).abs().max()) <= 1e-4 * max(1.0, float(b.abs().max()))


@torch.no_grad()
def test_packed_documents(model):
    """By `position_ids` alone as in transformers; where documents are marked, each as if it were alone."""
    ids, borders = tokens(20, 1), [0, 7, 9, 20]
    parts = list(itertools.pairwise(borders))
    places = torch.cat([torch.arange(b - a) for a, b in parts])[None]
    theirs = model(ids, position_ids=places, use_cache=False).logits
    alone = torch.cat([model(ids[:, a:b], use_cache=False).logits for a, b in parts], 1)
    marks = [
        {"cu_seq_lens_q": torch.tensor(borders, dtype=torch.int32)},
        {"seq_idx": torch.repeat_interleave(torch.arange(3), torch.tensor([7, 2, 11]))[None].int()},
    ]
    if model.config.model_type in PACK_ALONE:
        alone = theirs
    with accelerate(model):
        close(model(ids, position_ids=places, use_cache=False).logits, theirs)
        for mark in marks:
            close(model(ids, position_ids=places, use_cache=False, **mark).logits, alone)
            close(model(ids, position_ids=places, use_cache=True, **mark).logits, alone)
            if model.config.model_type not in PACK_ALONE:
                close(model(ids, use_cache=False, **mark).logits, alone)
        if model.config.model_type not in PACK_ALONE:
            with pytest.raises(ValueError, match="cu_seq_lens_q: expected borders that end at 20"):
                model(ids, position_ids=places, use_cache=False, cu_seq_lens_q=torch.tensor([0, 7, 19]))


@torch.no_grad()
def test_a_model_inside_another_module():
    class Holder(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = built("qwen3_next")

    holder = Holder()
    before = holder.inner.config._attn_implementation
    ids = tokens()
    want = holder.inner(ids).logits
    changed = accelerate(holder)
    assert holder.inner.config._attn_implementation == "regard"
    close(holder.inner(ids).logits, want)
    changed.undo()
    assert holder.inner.config._attn_implementation == before
    assert torch.equal(holder.inner(ids).logits, want)


def test_a_layer_that_another_library_wrapped():
    model = built("mamba2")
    layer = next(layer for layer in model.modules() if type(layer).__name__ == "Mamba2Mixer")
    plain = type(layer)
    accelerate(model)
    assert isinstance(layer, plain) and type(layer).__name__ == plain.__name__
    layer.__class__ = type("Wrapped", (type(layer),), {})
    with pytest.raises(ValueError, match=r"another library wrapped .*mixer"):
        undo(model)
    fresh = built("mamba2")
    next(layer for layer in fresh.modules() if type(layer) is plain).forward = lambda *a, **k: None
    with pytest.raises(ValueError, match="wrapped by another library"):
        accelerate(fresh)
