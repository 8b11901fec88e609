"""Adapters from other implementations' names to this library's, one per family of golden cases.

An adapter is a function `paths(case)`: the ways to compute the case with this library, by name, or None where the case
is of a kind that no adapter covers. A way is a function of the peer's own tensors (weights and inputs, under the peer's
names and in its layout) that returns the peer's outputs, so gradients come back in the peer's layout too. Adapters read
a case's configuration and the names of its tensors: no shape, option or value of a case stands in one.
"""

from collections.abc import Callable

from golden_adapters import (
    alignment,
    composed,
    compositions,
    delta_layers,
    disentangled,
    graph,
    hyena,
    images,
    kernel_linear,
    latent,
    lowrank,
    mega,
    modules,
    multi_token,
    recurrent_core,
    reformer,
    rope,
    softmax_core,
    softmax_relatives,
    sparse,
    ssm,
    textbook,
    vector_state,
)
from golden_adapters.case import Case, Paths


def either(*adapters: Callable[[Case], Paths | None]) -> Callable[[Case], Paths | None]:
    """The first of these that covers a case."""
    return lambda case: next((found for adapter in adapters if (found := adapter(case)) is not None), None)


ADAPTERS: dict[str, Callable[[Case], Paths | None]] = {
    "rope": rope.paths,
    "softmax_core": softmax_core.paths,
    "textbook_listing": textbook.paths,
    **modules.ADAPTERS,
    **dict.fromkeys(("mamba1_selective_scan", "mamba2_ssd", "nemotron_h_mamba2"), ssm.paths),
    **dict.fromkeys(
        ("hgrn", "mega_ema", "recurrent_gemma_local_attention", "recurrent_gemma_rglru"), vector_state.paths
    ),
    # their attention layers stand among the modules
    **{name: either(ssm.paths, modules.ADAPTERS[name]) for name in ("bamba", "jamba")},
    **composed.ADAPTERS,
    **delta_layers.ADAPTERS,
    "graph_attention": graph.paths,
    **dict.fromkeys(("linformer", "performer_favor"), lowrank.paths),
    **dict.fromkeys(("longformer", "bigbird"), sparse.paths),
    **dict.fromkeys(("deberta", "deberta_v2"), disentangled.paths),
    "multi_token_attention": multi_token.paths,
    **dict.fromkeys(compositions.WAYS, compositions.paths),
    **dict.fromkeys(("diffllama", "forgetting_attention", "stickbreaking"), softmax_relatives.paths),
    **dict.fromkeys(("vit", "swin", "swinv2", "coatnet", "detr", "deformable_attention"), images.paths),
    "reformer_lsh": reformer.paths,
    "hyena": hyena.paths,
    "mega": mega.paths,
    **dict.fromkeys(("bahdanau", "keras_additive", "luong_attention"), alignment.paths),
    **kernel_linear.ADAPTERS,
    **latent.ADAPTERS,
    **recurrent_core.ADAPTERS,
}


def paths_of(case: Case) -> Paths | None:
    """The ways to compute a case, or None where nothing covers it."""
    adapter = ADAPTERS.get(case.family)
    return None if adapter is None else adapter(case)
