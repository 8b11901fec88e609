"""Reformer against transformers, over options; and what a loaded one says and does."""

import pytest
import torch
from model_calls import cache_of

import regard
from regard.errors import CheckpointError
from regard.models import from_config, generate

transformers = pytest.importorskip("transformers")
WORDS, MASKED = "ReformerModelWithLMHead", "ReformerForMaskedLM"
BASE = {
    "attention_head_size": 8,
    "attn_layers": ["local", "lsh", "local", "lsh"],
    "axial_pos_shape": [8, 8],
    "axial_pos_embds_dim": [16, 16],
    "feed_forward_size": 48,
    "hash_seed": 7,
    "hidden_dropout_prob": 0.0,
    "local_attention_probs_dropout_prob": 0.0,
    "hidden_size": 32,
    "local_attn_chunk_length": 4,
    "lsh_attn_chunk_length": 4,
    "max_position_embeddings": 64,
    "num_attention_heads": 4,
    "num_buckets": 4,
    "num_hashes": 2,
    "vocab_size": 97,
    "initializer_range": 0.3,
}
CASES = [
    (WORDS, 16, {}),
    (WORDS, 3, {}),
    (WORDS, 4, {}),
    (WORDS, 13, {}),
    (WORDS, 16, {"num_hashes": 1}),
    (WORDS, 16, {"num_buckets": [2, 4]}),
    (WORDS, 32, {"num_buckets": None}),
    (WORDS, 64, {"num_buckets": None, "lsh_attn_chunk_length": 2}),
    (WORDS, 16, {"attn_layers": ["lsh", "lsh"], "num_hidden_layers": 2}),
    (WORDS, 16, {"attn_layers": ["local"] * 3}),
    (WORDS, 20, {"local_attn_chunk_length": 6}),
    (WORDS, 24, {"lsh_num_chunks_before": 2, "local_num_chunks_before": 0}),
    (WORDS, 16, {"axial_pos_embds": False}),
    (WORDS, 16, {"attention_head_size": 5, "hidden_act": "gelu"}),
    (MASKED, 16, {}),
    (MASKED, 8, {"lsh_num_chunks_after": 1, "local_num_chunks_after": 1}),
    (MASKED, 22, {"lsh_num_chunks_after": 1, "local_num_chunks_after": 1}),
]


def saved(folder, architecture: str, options: dict):
    torch.manual_seed(0)
    config = transformers.ReformerConfig(**{**BASE, "is_decoder": architecture == WORDS, **options})
    peer = getattr(transformers, architecture)(config).double().eval()
    for p in peer.parameters():
        if p.dim() == 1:
            p.data.add_(0.1 * torch.randn_like(p))
    peer.save_pretrained(folder)
    return peer


def words(model, ids, **call):
    out = model(ids, **call)
    return out if model.head is None or out.shape[-1] == model.head.weight.shape[0] else model.logits(out)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("architecture", "tokens", "options"), CASES)
def test_it_gives_what_transformers_gives(architecture, tokens, options, tmp_path):
    before = torch.get_rng_state()
    peer = saved(tmp_path / "peer", architecture, options)
    model = regard.load(tmp_path / "peer", dtype=torch.float64)
    ids = torch.randint(0, 97, (2, tokens), generator=torch.Generator().manual_seed(1))
    keep = torch.ones(2, tokens, dtype=torch.bool)
    keep[1, tokens - tokens // 3 :] = False
    model.save(tmp_path / "own")
    again = regard.load(tmp_path / "own")
    back = getattr(transformers, architecture).from_pretrained(tmp_path / "own").eval()
    with torch.no_grad():
        for read in (None, keep):
            mask = {} if read is None else {"attention_mask": read.long()}
            want, real = peer(ids, **mask).logits, slice(None) if read is None else read
            torch.testing.assert_close(words(model, ids, keep=read)[real], want[real], rtol=1e-11, atol=1e-11)
            assert torch.equal(words(again, ids, keep=read)[real], words(model, ids, keep=read)[real])
            torch.testing.assert_close(back(ids, **mask).logits[real], want[real], rtol=1e-11, atol=1e-11)
    torch.set_rng_state(before)


def test_every_step_of_a_cache_gives_what_the_text_so_far_gives(tmp_path):
    model = from_config({**BASE, "model_type": "reformer", "is_decoder": True, "eos_token_id": None}).double().eval()
    ids = torch.randint(0, 97, (2, 14), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        cache, end = cache_of(model, 2, 14), 0
        for part in ids.split([6, 1, 1, 5, 1], 1):
            end += part.shape[1]
            found = model(part, cache=cache)
            torch.testing.assert_close(found, model(ids[:, :end])[:, end - part.shape[1] :], rtol=1e-11, atol=1e-11)
        texts = [ids[0].tolist(), ids[1, :9].tolist()]
        written = generate(model, texts, max_tokens=5, end_ids=())
        for text, found in zip(texts, written, strict=True):
            for _ in range(5):
                text.append(int(model(torch.tensor([text]))[0, -1].argmax()))
            assert list(found.ids) == text[-5:]


def test_it_trains():
    before = torch.get_rng_state()
    torch.manual_seed(0)
    options = {**BASE, "hidden_dropout_prob": 0.1, "initializer_range": 0.02, "axial_norm_std": 0.1}
    model = from_config({**options, "model_type": "reformer", "is_decoder": True})
    optimizer, ids, losses = torch.optim.AdamW(model.parameters(), 3e-3), torch.arange(40)[None] % 10, []
    for _ in range(30):
        loss = torch.nn.functional.cross_entropy(model(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    torch.set_rng_state(before)
    assert abs(losses[0] - torch.log(torch.tensor(97.0))) < 0.3 and losses[-1] < losses[0] - 1.5


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"attn_layers": ["global"]}, "attn_layers: expected a list of 'local' and 'lsh'"),
        ({"num_buckets": 3}, "num_buckets: expected an even number"),
        ({"num_buckets": [2, 5]}, "num_buckets: expected an even number"),
        ({"is_decoder": True, "lsh_num_chunks_after": 1}, "lsh_num_chunks_after: expected 0 in a decoder"),
        ({"axial_pos_embds_dim": [16, 8]}, "axial_pos_embds_dim: expected two numbers whose sum is hidden_size=32"),
        ({"axial_pos_shape": [4, 4, 4]}, "axial_pos_shape: expected two numbers"),
        ({"hash_seed": "x"}, "hash_seed: expected a whole number or null"),
        ({"local_num_chunks_before": -1}, "local_num_chunks_before: expected a whole number from 0 on"),
    ],
)
def test_options_out_of_range(options, words):
    with pytest.raises(CheckpointError, match=words):
        from_config({**BASE, "model_type": "reformer", **options})


def test_segments_and_places_beyond_the_grid_are_refused():
    model = from_config({**BASE, "model_type": "reformer", "is_decoder": True})
    with pytest.raises(ValueError, match="segments: expected None"):
        model(torch.zeros(1, 4, dtype=torch.long), segments=torch.tensor([[0, 0, 1, 1]]))
    with pytest.raises(ValueError, match=r"positions: expected numbers in \[0, 64\)"):
        model(torch.zeros(1, 65, dtype=torch.long))
