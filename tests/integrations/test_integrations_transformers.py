"""`attn_implementation="regard"` against transformers' eager attention, on tiny checkpoints."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import transformers

import regard
import regard.integrations.transformers as integration
from regard.masks import Band, Causal, Dense

FOLDERS = Path(__file__).parents[1] / "checkpoints"
DECODERS = ["llama", "mistral", "gemma2", "gpt_oss"]


@pytest.fixture(scope="module", params=DECODERS)
def pair(request):
    def load(kind):
        model = transformers.AutoModelForCausalLM.from_pretrained(FOLDERS / request.param, attn_implementation=kind)
        return model.eval()

    return request.param, load("eager"), load("regard")


def tokens(batch=2, length=17):
    return torch.randint(3, 97, (batch, length), generator=torch.Generator().manual_seed(3))


def close(got, want):
    torch.testing.assert_close(got, want, rtol=0, atol=1e-5)


@torch.no_grad()
def test_whole_and_padded(pair):
    _, eager, ours = pair
    ids, keep = tokens(), torch.ones(2, 17, dtype=torch.long)
    close(ours(ids).logits, eager(ids).logits)
    keep[1, :5] = 0
    call = {"attention_mask": keep, "position_ids": (keep.cumsum(-1) - 1).clamp(min=0)}
    close(ours(ids, **call).logits[keep.bool()], eager(ids, **call).logits[keep.bool()])
    for row in ours(ids, **call).logits:
        assert torch.isfinite(row).all()


@torch.no_grad()
def test_packed_by_position_ids(pair):
    name, eager, ours = pair
    if name == "gpt_oss":
        return  # its model hands no position_ids to its masks: no attention function can tell rows apart there
    ids = tokens()
    positions = torch.cat([torch.arange(6), torch.arange(7), torch.arange(4)])[None].expand(2, -1)
    got = ours(ids, position_ids=positions, use_cache=False).logits
    close(got, eager(ids, position_ids=positions, use_cache=False).logits)
    close(got[:, 6:13], ours(ids[:, 6:13]).logits)


@torch.no_grad()
@pytest.mark.parametrize("cache", [None, "static"])
def test_generation(pair, cache):
    _, eager, ours = pair
    keep = torch.ones(2, 17, dtype=torch.long)
    keep[1, :5] = 0
    options = {"max_new_tokens": 12, "do_sample": False, "attention_mask": keep}
    if cache:
        options["cache_implementation"] = cache
    assert torch.equal(ours.generate(tokens(), **options), eager.generate(tokens(), **options))


@torch.no_grad()
def test_returned_weights(pair):
    _, eager, ours = pair
    for got, want in zip(
        ours(tokens(), output_attentions=True).attentions,
        eager(tokens(), output_attentions=True).attentions,
        strict=True,
    ):
        close(got, want)


def test_training(pair):
    _, eager, ours = pair
    for model in (eager, ours):
        model.zero_grad()
        model(tokens(), labels=tokens()).loss.backward()
    for (name, a), b in zip(ours.named_parameters(), eager.parameters(), strict=True):
        if b.grad is not None:
            torch.testing.assert_close(
                a.grad, b.grad, rtol=0, atol=1e-5 * max(1.0, float(b.grad.abs().max())), msg=name
            )


@torch.no_grad()
def test_an_encoder():
    eager, ours = (
        transformers.AutoModel.from_pretrained(FOLDERS / "bert", attn_implementation=kind).eval()
        for kind in ("eager", "regard")
    )
    keep = torch.ones(2, 17, dtype=torch.long)
    keep[1, -5:] = 0
    got, want = (model(tokens(), attention_mask=keep).last_hidden_state for model in (ours, eager))
    close(got[keep.bool()], want[keep.bool()])


@torch.no_grad()
def test_an_encoder_decoder_with_position_biases():
    config = transformers.T5Config(
        vocab_size=50, d_model=24, d_kv=6, d_ff=32, num_layers=2, num_heads=4, dropout_rate=0.0
    )
    torch.manual_seed(0)
    eager = transformers.T5ForConditionalGeneration(config).eval()
    eager.set_attn_implementation("eager")
    call = {
        "input_ids": tokens(2, 9) % 50,
        "decoder_input_ids": tokens(2, 6) % 50,
        "attention_mask": torch.ones(2, 9).long(),
    }
    call["attention_mask"][1, 6:] = 0
    want = eager(**call).logits
    eager.set_attn_implementation("regard")
    close(eager(**call).logits, want)


def test_rules_stay_rules():
    from transformers import masking_utils as peer

    assert isinstance(integration.make_mask(1, 4, 4).mask, Causal)
    window = integration.make_mask(1, 4, 4, mask_function=peer.sliding_window_causal_mask_function(3)).mask
    assert window.offsets().ranges == ((0, 2),)
    both = integration.make_mask(1, 4, 4, mask_function=peer.sliding_window_bidirectional_mask_function(2)).mask
    assert both.offsets() == Band(2, 2).offsets()
    odd = integration.make_mask(2, 4, 4, mask_function=lambda b, h, q, k: (q + k) % 2 == 0)
    assert isinstance(odd.mask, Dense) and odd.mask.dense(4, batch=2)[0, 0].tolist()[0] == [True, False, True, False]
    shifted = integration.make_mask(1, 1, 5, q_offset=7, kv_offset=3)
    assert shifted.q_start == 4
    assert integration.make_mask(1, 1, 5, attention_mask=shifted) is shifted


def test_float_masks_of_a_model_are_read():
    module = torch.nn.Module()
    q = torch.randn(1, 2, 3, 4)
    mask = torch.zeros(1, 1, 3, 3).masked_fill(~torch.ones(3, 3).tril().bool(), torch.finfo(torch.float32).min)
    out, weights = integration.attention_forward(module, q, q, q, mask, scaling=0.5)
    want = regard.attention(q, q, q, mask=Causal(), scale=0.5).transpose(1, 2)
    close(out, want)
    assert weights is None
