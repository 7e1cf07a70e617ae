"""Planned activations, caches and logits: what autograd keeps, and close above what the allocator hands out."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import accumulate
from typing import Any

import pytest
import torch
from pairwise import pairwise
from torch import Tensor
from torch.profiler import ProfilerActivity, profile
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from flexrlhf.config.axes import ParallelDims
from flexrlhf.config.model_settings import LoraSpec, ModelSpec
from flexrlhf.engines.attention import BY_SEQUENCES
from flexrlhf.engines.base import Batch, Sampling
from flexrlhf.engines.decoding import Decoding
from flexrlhf.engines.language_head import token_logprobs
from flexrlhf.engines.micro_batch import MicroBatch
from flexrlhf.engines.models import use_kernels
from flexrlhf.engines.pass_settings import PassSettings
from flexrlhf.engines.passes import no_search_for_texts
from flexrlhf.engines.sampling import sample_tokens
from flexrlhf.engines.sink_attention import SINK_ATTENTION
from flexrlhf.engines.tiled_mlp import tile_mlps
from flexrlhf.memory.activations import NOISE_BYTES, Blocks
from flexrlhf.operators.columns import Lengths
from flexrlhf.weights.decoder_sizes import Sizes
from flexrlhf.weights.shapes import model_shape

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
SAMPLING = Sampling(seed=0, step=0, temperature=1.0, eos_token_ids=(10**6,), pad_token_id=0)
WIDE_MLP = {"hidden_size": 64, "intermediate_size": 512, "num_attention_heads": 4, "num_key_value_heads": 2}
WIDE_HEADS = {"hidden_size": 64, "intermediate_size": 64, "num_attention_heads": 8, "num_key_value_heads": 2}
SIZES = {"wide MLP": WIDE_MLP, "wide heads": WIDE_HEADS}


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


def config_of(kind: str = "llama", layers: int = 2, **changes: Any) -> dict[str, Any]:
    return {"model_type": kind, "vocab_size": 32, "num_hidden_layers": layers, "head_dim": 16, **WIDE_MLP, **changes}


def model_of(config: dict[str, Any], dtype: str) -> PreTrainedModel:
    torch.manual_seed(0)
    model: PreTrainedModel = AutoModelForCausalLM.from_config(AutoConfig.for_model(**config), dtype=DTYPES[dtype])
    return model.eval()


def blocks_of(config: dict[str, Any], dtype: str) -> Blocks:
    shape = model_shape("actor", ModelSpec(init=config))
    assert shape is not None and shape.sizes is not None
    return Blocks(shape.sizes, DTYPES[dtype].itemsize)


def inputs(rows: int, width: int) -> dict[str, Tensor]:
    """Left-padded in one row, so that attention needs its mask."""
    mask = torch.ones(rows, width, dtype=torch.long)
    mask[0, :3] = 0
    return {
        "input_ids": torch.zeros(rows, width, dtype=torch.long),
        "attention_mask": mask,
        "position_ids": (mask.cumsum(1) - 1).clamp(min=0),
    }


def saved_bytes(model: PreTrainedModel, rows: int, width: int) -> int:
    """Bytes of the storages that autograd keeps of the blocks, without parameters and buffers."""
    own = {tensor.untyped_storage().data_ptr() for tensor in (*model.parameters(), *model.buffers())}
    kept: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: kept.append(tensor) or tensor, lambda tensor: tensor):
        model.model(**inputs(rows, width), use_cache=False)
    storages = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage() for tensor in kept}
    return sum(storage.nbytes() for pointer, storage in storages.items() if pointer not in own)


def peak_bytes(work: Callable[[], object]) -> int:
    """The most bytes of tensors at a time that ``work`` allocates."""
    work()
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
        work()
    events = sorted(profiled.profiler.kineto_results.events(), key=lambda event: event.start_ns())
    return max(accumulate(event.nbytes() for event in events if event.name() == "[memory]"))


# --- what autograd keeps


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("sizes", [WIDE_MLP, WIDE_HEADS], ids=["wide MLP", "wide heads"])
@pytest.mark.parametrize("kind", ["llama", "mistral", "qwen2", "qwen3"])
def test_planned_activations_are_what_autograd_keeps(kind: str, sizes: dict[str, int], dtype: str) -> None:
    rows, width, layers = 3, 20, 2
    config = config_of(kind, layers, **sizes)
    blocks = blocks_of(config, dtype)
    planned = rows * width * (layers * blocks.saved_by_layer(width) + blocks.saved_outside_layers())
    model = model_of(config, dtype)
    assert saved_bytes(model, rows, width) == planned
    use_kernels(model, ModelSpec(init=config))  # norms keep less
    assert 0.75 * planned < saved_bytes(model, rows, width) <= planned


EXPERTS = {
    "mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2, "intermediate_size": 96},
    "olmoe": {"num_experts": 8, "num_experts_per_tok": 2, "intermediate_size": 48},
    "qwen2_moe": {
        "num_experts": 8,
        "num_experts_per_tok": 3,
        "moe_intermediate_size": 32,
        "shared_expert_intermediate_size": 72,
    },
    "qwen3_moe": {
        "num_experts": 8,
        "num_experts_per_tok": 3,
        "moe_intermediate_size": 160,
        "norm_topk_prob": True,
        "mlp_only_layers": [0],
    },
}
"""Sizes in which models with experts differ, by family."""


@pytest.mark.parametrize(("kind", "dtype"), [*zip(EXPERTS, [*DTYPES, *DTYPES], strict=True)])
def test_planned_activations_of_experts(kind: str, dtype: str) -> None:
    """What autograd keeps of choices depends on the family by some bytes; the peaks are those of a tiny MLP."""
    rows, width, layers = 4, 128, 2
    config = config_of(kind, layers, **EXPERTS[kind])
    model, blocks, batch = model_of(config, dtype), blocks_of(config, dtype), inputs(rows, width)
    planned = layers * blocks.saved_by_layer(20) + blocks.saved_outside_layers()
    assert_close_above(3 * 20 * planned, saved_bytes(model, 3, 20), 0.02)

    @torch.no_grad()
    def forward() -> None:
        model.model(**batch, use_cache=False)

    assert_close_above(blocks.forward_bytes(rows * width, width), peak_bytes(forward), 0.03)

    def train() -> None:
        model.model(**batch, use_cache=False).last_hidden_state.float().sum().backward()

    for parameter in model.parameters():  # so that gradients are added in place
        parameter.grad = torch.zeros_like(parameter)
    for recompute in (False, True):
        if recompute:
            model.gradient_checkpointing_enable({"use_reentrant": False})
            model.train()
        planned = blocks.train_bytes(rows * width, width, recompute)
        assert_close_above(planned, peak_bytes(train), 0.08)


def test_planned_activations_of_latent_attention() -> None:
    """In float32, with values as wide as keys: attention on CPUs keeps its weights otherwise."""
    sizes = {
        "num_key_value_heads": 4,
        "n_routed_experts": 8,
        "num_experts_per_tok": 3,
        "moe_intermediate_size": 40,
        "first_k_dense_replace": 1,
        **{"q_lora_rank": 24, "kv_lora_rank": 16, "qk_rope_head_dim": 4, "qk_nope_head_dim": 12, "v_head_dim": 16},
    }
    config = config_of("deepseek_v2", 2, **sizes)
    model, blocks = model_of(config, "float32"), blocks_of(config, "float32")
    planned = 2 * blocks.saved_by_layer(20) + blocks.saved_outside_layers()
    assert_close_above(3 * 20 * planned, saved_bytes(model, 3, 20), 0.02)


@pytest.mark.parametrize("dtype", DTYPES)
def test_planned_activations_of_sinks(dtype: str) -> None:
    """Masks of both kinds of layers are made once, and kept."""
    config = config_of("gpt_oss", 2, num_local_experts=8, num_experts_per_tok=2, intermediate_size=96, sliding_window=8)
    blocks, rows = blocks_of(config, dtype), 4

    def made() -> PreTrainedModel:
        model = model_of(config, dtype)
        model.config._attn_implementation = SINK_ATTENTION
        return model

    masks = 2 * 20 * DTYPES[dtype].itemsize
    planned = 2 * blocks.saved_by_layer(20) + blocks.saved_outside_layers() + masks
    assert_close_above(3 * 20 * planned, saved_bytes(made(), 3, 20), 0.02)
    for width in (64, 256):
        model, batch = made(), inputs(rows, width)
        for parameter in model.parameters():
            parameter.grad = torch.zeros_like(parameter)

        @torch.no_grad()
        def forward(model: PreTrainedModel = model, batch: dict[str, Tensor] = batch) -> None:
            model.model(**batch, use_cache=False)

        def train(model: PreTrainedModel = model, batch: dict[str, Tensor] = batch) -> None:
            model.model(**batch, use_cache=False).last_hidden_state.float().sum().backward()

        assert 0.96 < blocks.forward_bytes(rows * width, width) / peak_bytes(forward) < 1.2
        assert 0.96 < blocks.train_bytes(rows * width, width, False) / peak_bytes(train) < 1.2
        model.gradient_checkpointing_enable({"use_reentrant": False})
        model.train()
        assert 0.96 < blocks.train_bytes(rows * width, width, True) / peak_bytes(train) < 1.2


@pytest.mark.parametrize("dtype", DTYPES)
def test_adapters_keep_their_narrow_products(dtype: str) -> None:
    """Of frozen norms autograd keeps less than planned, and nothing of token ids and the first norm, behind a frozen
    embedding."""
    peft = pytest.importorskip("peft")
    rows, width, layers = 3, 20, 2
    config = config_of("llama", layers)
    model = model_of(config, dtype)
    peft.inject_adapter_in_model(peft.LoraConfig(r=4, target_modules="all-linear"), model)
    model.to(DTYPES[dtype])
    blocks = replace(blocks_of(config, dtype), lora=LoraSpec(rank=4))
    planned = layers * blocks.saved_by_layer(width) + blocks.saved_outside_layers()
    frozen = (2 * layers + 1) * DTYPES[dtype].itemsize * config["hidden_size"]
    first = 8 + 4 * config["hidden_size"] + 4
    assert saved_bytes(model, rows, width) == rows * width * (planned - frozen - first)


def test_the_gpt_count_of_the_literature_and_ours() -> None:
    """34 bytes per hidden number in 16 bits (Korthikanti et al. 2022); gated blocks with float32 norms keep 45.

    Two norms 16, attention 8, an MLP of 8/3 the width 21; the mask adds its width.
    """
    hidden = 3 * 2**12
    blocks = Blocks(Sizes(1, hidden, 8 * hidden // 3, 96, 96, 128, 1, family="llama"), 2)
    assert blocks.saved_by_layer(0) / hidden == pytest.approx(16 + 8 + 64 / 3, rel=0.01)


# --- what the allocator hands out


@pytest.mark.parametrize(("sizes", "dtype", "tiled"), pairwise(SIZES, DTYPES.keys(), (False, True)))
def test_the_peak_of_a_pass_without_gradients(sizes: dict[str, int], dtype: str, tiled: bool) -> None:
    rows, width = 4, 128
    config = config_of(**sizes)
    model, batch = model_of(config, dtype), inputs(rows, width)
    if tiled:
        tile_mlps(model)

    @torch.no_grad()
    def work() -> None:
        model.model(**batch, use_cache=False)

    blocks = replace(blocks_of(config, dtype), tiled=tiled)
    assert_close_above(blocks.forward_bytes(rows * width, width), peak_bytes(work), 0.08 if tiled else 0.06)


@pytest.mark.parametrize(
    ("sizes", "dtype", "tiled", "recompute"), pairwise(SIZES, DTYPES.keys(), (False, True), (False, True))
)
def test_the_peak_of_training(sizes: dict[str, int], dtype: str, tiled: bool, recompute: bool) -> None:
    rows, width, layers = 4, 256, 3
    config = config_of("llama" if recompute == tiled else "qwen3", layers, **sizes)
    model, batch = model_of(config, dtype), inputs(rows, width)
    if tiled:
        tile_mlps(model)
    if recompute:
        model.gradient_checkpointing_enable({"use_reentrant": False})
        model.train()

    def work() -> None:
        model.model(**batch, use_cache=False).last_hidden_state.float().sum().backward()

    blocks = replace(blocks_of(config, dtype), tiled=tiled)
    # sums of the gradients of an MLP's weights, and those of a tile, are new gradients (memory/engine_bytes.py)
    sums = (4 + blocks.item) * 3 * config["hidden_size"] * config["intermediate_size"] * tiled
    measured, planned = peak_bytes(work), blocks.train_bytes(rows * width, width, recompute)
    assert measured < 1.02 * (planned + sums)
    assert planned < 1.06 * measured


LONGEST = Lengths(96, 32)
PROMPTS, RESPONSES = (96, 20, 30, 50), (32, 4, 7, 30)


def first_pass(dtype: str, samples: int, masks: bool) -> MicroBatch:
    """The first pass with several texts in a row, of 64 texts: 16 prompts of four samples, or each of its own."""
    mask = torch.zeros(64, LONGEST.total, dtype=torch.uint8)
    for row in range(64):
        prompt = PROMPTS[row // samples % 4]
        mask[row, LONGEST.prompt - prompt : LONGEST.prompt + RESPONSES[row % 4]] = 1
    columns = {"tokens": torch.ones_like(mask, dtype=torch.int32), "attention_mask": mask}
    settings = PassSettings(LONGEST, 2048, packs=True, shares=True, dtype=DTYPES[dtype], masks=masks)
    pieces = MicroBatch.split(Batch(columns, torch.arange(64), samples), settings)
    return next(piece for piece in pieces if not masks or piece.attention_mask is not None)


@pytest.mark.parametrize("samples", [pytest.param(1, marks=pytest.mark.full), 4])
@pytest.mark.parametrize(
    ("sizes", "dtype", "masks"), pairwise(SIZES, DTYPES.keys(), {"under a mask": True, "by lengths": False})
)
def test_the_peak_of_packed_rows(sizes: dict[str, int], dtype: str, samples: int, masks: bool) -> None:
    """A mask is made by the engine, as numbers, and all layers read the same."""
    config = config_of(layers=3, **sizes)
    model, blocks, piece = model_of(config, dtype), blocks_of(config, dtype), first_pass(dtype, samples, masks)
    model.config._attn_implementation = "sdpa" if masks else BY_SEQUENCES

    def hidden() -> Tensor:
        made = first_pass(dtype, samples, masks)
        with no_search_for_texts():
            states: Tensor = model.model(
                input_ids=made.tokens,
                attention_mask=made.attention_mask,
                position_ids=made.position_ids,
                use_cache=False,
                attended=made.attended,
            ).last_hidden_state
        return states

    @torch.no_grad()
    def forward() -> None:
        hidden()

    tokens, width = piece.tokens.numel(), piece.width
    planned = blocks.forward_bytes(tokens, width, packed=True, masks=masks)
    assert_close_above(planned, peak_bytes(forward), 0.12 if masks or samples == 1 else 0.3)
    train = peak_bytes(lambda: hidden().float().sum().backward())
    assert_close_above(
        blocks.train_bytes(tokens, width, False, packed=True, masks=masks), train, 0.02 if masks else 0.07
    )


@pytest.mark.parametrize(
    ("texts", "read", "dtype"),
    pairwise(
        {
            "groups": (WIDE_HEADS, 8, 40),
            "no groups": (WIDE_HEADS | {"num_key_value_heads": 8}, 8, 40),
            "long prompts": (WIDE_MLP, 88, 8),
        },
        {"waves": None, "slots, short passes": 64, "slots": 2048},
        DTYPES.keys(),
    ),
)
def test_the_peak_of_decoding(texts: tuple[dict[str, int], int, int], read: int | None, dtype: str) -> None:
    """At the last token, where waves repeat keys and values of a layer; or at the prompts, where they are long.

    The plan repeats them for prompts in slots, too, as some kernels do.
    """
    sizes, prompt, response = texts
    rows, config = 8, config_of(layers=3, **sizes)
    planned = blocks_of(config, dtype).decode_bytes(rows, prompt, response, read)
    measured = peak_bytes(decoding(config, dtype, rows, prompt, response, read=read))
    assert_close_above(sum(planned.values()), measured, 0.15 if read is None else 0.2)


@pytest.mark.parametrize(("top_p", "num_bytes"), [(1.0, 24), (0.9, NOISE_BYTES)])
@pytest.mark.parametrize("dtype", DTYPES)
def test_the_noise_of_sampling(dtype: str, top_p: float, num_bytes: int) -> None:
    """Of two vocabularies the difference: nothing but logits grows. The plan has the larger number."""
    sampling = replace(SAMPLING, top_p=top_p)
    rows, peaks = 16, {}
    for vocabulary in (2**13, 2**14):
        config = config_of(layers=1, vocab_size=vocabulary, hidden_size=8, intermediate_size=8, head_dim=4)
        peaks[vocabulary] = peak_bytes(decoding(config, dtype, rows, 4, 3, sampling))
    per_word = (peaks[2**14] - peaks[2**13]) / 2**13 / rows
    assert per_word == pytest.approx(num_bytes + DTYPES[dtype].itemsize, abs=1)


@pytest.mark.parametrize(
    "changes",
    [{"temperature": 0.0}, {"top_k": 9}, {"top_p": 0.9}, {"top_p": 0.9, "top_k": 99, "min_tokens": 2}],
    ids=str,
)
@pytest.mark.parametrize("dtype", DTYPES)
def test_no_way_of_drawing_needs_more_than_the_noise(dtype: str, changes: dict[str, Any]) -> None:
    """Besides the model's logits, which are there before."""
    rows, vocabulary = 16, 2**13
    logits = torch.randn(rows, vocabulary).to(DTYPES[dtype])
    peak = peak_bytes(lambda: sample_tokens(logits, replace(SAMPLING, **changes), torch.arange(rows), 0))
    assert peak <= NOISE_BYTES * rows * vocabulary


def decoding(
    config: dict[str, Any],
    dtype: str,
    rows: int,
    prompt: int,
    response: int,
    sampling: Sampling = SAMPLING,
    read: int | None = None,
) -> Callable[[], None]:
    model, batch = model_of(config, dtype), inputs(rows, prompt)
    settings = PassSettings(Lengths(prompt, response), read or 0, dtype=DTYPES[dtype], slots=read is not None)
    columns = {"prompts": batch["input_ids"].int(), "prompt_mask": batch["attention_mask"].to(torch.uint8)}

    @torch.no_grad()
    def work() -> None:
        drawn = Decoding(model, Batch(columns, torch.arange(rows), 1), sampling, response, settings)
        assert sum(drawn.calls(rows)) >= response

    return work


@pytest.mark.parametrize("train", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
def test_the_peak_of_chunked_log_probs(dtype: str, train: bool) -> None:
    """Without the gradient of the head's own weight, which is a new gradient (memory/engine_bytes.py)."""
    tokens, hidden, vocabulary, chunk = 256, 32, 4096, 2**18
    blocks = Blocks(Sizes(1, hidden, 1, 1, 1, 1, vocabulary, family="llama"), DTYPES[dtype].itemsize)
    states = torch.randn(tokens, hidden, dtype=DTYPES[dtype], requires_grad=train)
    weight = torch.randn(vocabulary, hidden, dtype=DTYPES[dtype])
    targets = torch.zeros(tokens, dtype=torch.long)

    def work() -> None:
        logprobs, _ = token_logprobs(states, weight, targets, chunk_elements=chunk // 4)
        if train:
            torch.autograd.grad(logprobs.sum(), states)

    assert peak_bytes(work) <= 1.05 * blocks.head_bytes(tokens, chunk, train)


def test_a_chunk_is_a_row_at_least_and_all_at_most() -> None:
    blocks = Blocks(Sizes(1, 1, 1, 1, 1, 1, 1000, family="llama"), 4)
    assert blocks.head_bytes(10, 1, train=False) == 2 * 4 * 1000 + 10 * 4
    assert blocks.head_bytes(10, 10**9, train=False) == 2 * 4 * 1000 * 10 + 10 * 4


@pytest.mark.parametrize("kind", ["llama", "mistral", "qwen2", "qwen3", "mixtral", "qwen3_moe"])
@pytest.mark.parametrize(
    "settings", [{}, {"sliding_window": None}, {"sliding_window": 64}, {"use_sliding_window": True}], ids=str
)
def test_the_window_of_attention_is_that_of_transformers(kind: str, settings: dict[str, Any]) -> None:
    """By which the plan and an engine decide alike whether texts are packed."""
    config = config_of(kind, **settings)
    shape = model_shape("actor", ModelSpec(init=config))
    assert shape is not None and shape.window == getattr(AutoConfig.for_model(**config), "sliding_window", None)


def test_tensor_parallel_ranks_share_heads_and_features() -> None:
    sizes = Sizes(4, 64, 512, 8, 4, 16, 1024, family="qwen3")
    whole, half = Blocks(sizes, 2), Blocks(sizes, 2, ParallelDims(tp=2))
    shared = 2 * ((4 + 2 * 2) * 64 + 4) + 2 * 100
    assert half.saved_by_layer(100) - shared == (whole.saved_by_layer(100) - shared) // 2
    assert half.forward_bytes(100, 100) < whole.forward_bytes(100, 100)


def assert_close_above(planned: int, measured: int, tolerance: float) -> None:
    """Planned bytes may be more than needed by ``tolerance``, but hardly less."""
    assert -0.02 <= planned / measured - 1 <= tolerance, f"planned {planned}, measured {measured}"
