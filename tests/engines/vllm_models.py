"""Small models for vLLM engines, and prompts for them. vLLM's attention on CPUs requires heads of size 32 or more."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from transformers import PreTrainedModel

from flexrlhf.comm.reduce import RankGroup
from flexrlhf.config.axes import ParallelDims
from flexrlhf.config.model_settings import ModelSpec
from flexrlhf.config.spec import RolloutSpec
from flexrlhf.engines.base import Batch, EngineContext, Sampling
from flexrlhf.engines.model_ranks import ModelRanks, StageRanks
from flexrlhf.engines.models import load_model
from flexrlhf.memory.states import kv_cache_bytes
from flexrlhf.operators.columns import Lengths
from flexrlhf.placement.layout import Layout
from flexrlhf.placement.placed import ModelName, PlacedModel
from flexrlhf.weights.shapes import model_shape

LLAMA = {
    "model_type": "llama",
    "vocab_size": 100,
    "hidden_size": 64,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "initializer_range": 0.2,
}
QWEN2 = {**LLAMA, "model_type": "qwen2", "hidden_size": 128, "tie_word_embeddings": True}
QWEN3 = {**LLAMA, "model_type": "qwen3", "tie_word_embeddings": True}
CUT = {**QWEN2, "vocab_size": 130}
"""With biases and a tied head; the vocabulary, as vLLM pads it, has 96 rows on one of two ranks and 34 on the other."""
ONE_KEY_HEAD = {**CUT, "num_key_value_heads": 1}
"""Of which two ranks have the same key-value head."""
MISTRAL = {**LLAMA, "model_type": "mistral", "sliding_window": None}
OLMOE = {**LLAMA, "model_type": "olmoe", "hidden_size": 128, "num_experts": 4, "num_experts_per_tok": 2}
_EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
QWEN3_MOE = {**QWEN3, **_EXPERTS, "model_type": "qwen3_moe", "norm_topk_prob": True, "mlp_only_layers": [0]}
QWEN2_MOE = {**QWEN2, **_EXPERTS, "model_type": "qwen2_moe", "shared_expert_intermediate_size": 40}
GPT_OSS = {
    **LLAMA,
    **{"model_type": "gpt_oss", "num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 8},
}
MIXTRAL = {**LLAMA, "model_type": "mixtral", "num_local_experts": 4}
LENGTHS = Lengths(prompt=40, response=12)
SEED = 3
END = 1
KV_TOKENS = 512
ONE_RANK = RankGroup(None, (0,), lambda work, ranks: None)


def placed(init: dict[str, Any] = LLAMA, ranks: tuple[int, ...] = (0,), **rollout: Any) -> PlacedModel:
    tokens, pp = rollout.pop("kv_tokens", KV_TOKENS), rollout.get("pp", 1)
    tp = len(ranks) // pp
    settings = ModelSpec(init=init, engine="vllm", tp=tp, pp=pp, generate_tokens=tokens)
    layout = Layout(ranks, ParallelDims(tp=tp, pp=pp))
    return PlacedModel(
        ModelName("actor.rollout"), layout, False, settings, RolloutSpec(engine="vllm", tp=tp, **rollout)
    )


def engine_context(model: PlacedModel, replica: RankGroup = ONE_RANK, store: dist.Store | None = None) -> EngineContext:
    """``replica``: ranks of the one replica, of tensor-parallel parts or of stages."""
    shape = model_shape("actor", model.settings)
    assert shape is not None
    return EngineContext(
        placed=model,
        lengths=LENGTHS,
        temperature=1.0,
        seed=SEED,
        num_updates=1,
        ranks=ModelRanks(ONE_RANK, replica, stages=StageRanks(replica, replica, replica, replica)),
        device=torch.device("cpu"),
        kv_bytes=kv_cache_bytes(model, shape),
        store=store or dist.HashStore(),
    )


def other_weights(model: PlacedModel) -> PreTrainedModel:
    """The model with weights, biases among them, that it does not begin with."""
    changed = load_model(model, SEED)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in changed.parameters():
            parameter += 0.1 * torch.randn(parameter.shape, generator=generator)
    return changed


def flat(model: PreTrainedModel) -> dict[str, Tensor]:
    """Weights of a model as a Sync delivers them."""
    return {name: parameter.detach().flatten() for name, parameter in model.named_parameters()}


def prompts(num_rows: int = 6, first: int = 0, samples_per_prompt: int = 1, seed: int = 0) -> Batch:
    """Random prompts of 1 to 40 tokens; samples of one prompt are neighbours."""
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(1, LENGTHS.prompt + 1, (num_rows, 1), generator=generator)
    mask = (torch.arange(LENGTHS.prompt) >= LENGTHS.prompt - lengths).to(torch.uint8)
    tokens = torch.randint(3, LLAMA["vocab_size"], mask.shape, generator=generator, dtype=torch.int32) * mask
    tokens, mask = (tensor.repeat_interleave(samples_per_prompt, 0) for tensor in (tokens, mask))
    return Batch({"prompts": tokens, "prompt_mask": mask}, first + torch.arange(len(tokens)), samples_per_prompt)


def sampling(**changes: Any) -> Sampling:
    settings: dict[str, Any] = {"seed": 7, "step": 2, "temperature": 1.0, "eos_token_ids": (END,), "pad_token_id": 0}
    return Sampling(**{**settings, **changes})
