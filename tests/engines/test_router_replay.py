"""Router replay: log-probs and training use the experts that generation chose, also where a router would not."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from small_models import LENGTHS, TINY, engine_of, in_segments, likelihood, output, snapshot
from torch import Tensor

from flexrlhf.engines.base import Batch, Sampling
from flexrlhf.engines.torch.engine import TorchEngine

FAMILIES: dict[str, dict[str, Any]] = {
    "mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2},
    # other experts, in waves
    "mixtral with a window": {"num_local_experts": 300, "num_experts_per_tok": 3, "sliding_window": 5},
    "gpt_oss": {"num_local_experts": 8, "num_experts_per_tok": 2, "sliding_window": 5, "head_dim": 4},
    "olmoe": {"num_experts": 8, "num_experts_per_tok": 2},
    "qwen2_moe": {"num_experts": 4, "moe_intermediate_size": 8, "num_experts_per_tok": 1, "mlp_only_layers": [0]},
    "qwen3_moe": {"num_experts": 8, "moe_intermediate_size": 8, "num_experts_per_tok": 3, "norm_topk_prob": True},
}
SHARED = {
    **{"n_routed_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 8, "first_k_dense_replace": 1},
    **{"n_group": 1, "topk_group": 1, "routed_scaling_factor": 1.5},
}
LATENT = {
    **{"num_key_value_heads": 4, "q_lora_rank": 6, "kv_lora_rank": 6},
    **{"qk_rope_head_dim": 2, "qk_nope_head_dim": 4, "v_head_dim": 4},
}
FAMILIES |= {"glm4_moe": SHARED, "deepseek_v2": SHARED | LATENT, "deepseek_v3": SHARED | LATENT}
BYTES_OF_TOKEN = {
    **{"mixtral": 4, "mixtral with a window": 12, "gpt_oss": 4, "olmoe": 4, "qwen2_moe": 1, "qwen3_moe": 6},
    **dict.fromkeys(("glm4_moe", "deepseek_v2", "deepseek_v3"), 3),
}
SAMPLING = Sampling(seed=1, step=0, temperature=1.0, eos_token_ids=(0, 1, 2), pad_token_id=0)


def engine(family: str, router_replay: str, **settings: Any) -> TorchEngine:
    config = {**TINY, "model_type": family.split()[0], **FAMILIES[family]}
    optimizer = {"name": "sgd", "learning_rate": 1.0, "max_grad_norm": None}
    return engine_of(init=config, router_replay=router_replay, optimizer=optimizer, **settings)


def second_choice(router: Any, _: object, routed: tuple[Tensor, Tensor, Tensor]) -> tuple[Tensor, Tensor, Tensor]:
    """A router's choice without its most likely expert, and with one more instead."""
    is_sigmoid = hasattr(router, "e_score_correction_bias")
    scores = routed[0].sigmoid() if is_sigmoid else routed[0].softmax(-1)
    weights, chosen = (each[:, 1:] for each in scores.topk(router.top_k + 1))
    if getattr(router, "norm_topk_prob", not hasattr(router, "topk_method")):
        weights = weights / weights.sum(-1, keepdim=True)
    return routed[0], getattr(router, "routed_scaling_factor", 1.0) * weights, chosen


def plant(trained: TorchEngine) -> list[Any]:
    """Make all routers take their second choice; return the hooks."""
    routers = [module for module in trained._model.modules() if type(module).__name__.lower().endswith("topkrouter")]
    return [router.register_forward_hook(second_choice, prepend=True) for router in routers]


def responses(of: TorchEngine) -> Batch:
    """Two responses to each of five prompts of 1 to 4 tokens."""
    lengths = torch.tensor([[1], [4], [2], [3], [4]]).repeat_interleave(2, 0)
    mask = (torch.arange(LENGTHS.prompt) >= LENGTHS.prompt - lengths).to(torch.uint8)
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(3, TINY["vocab_size"], (5, LENGTHS.prompt), generator=generator, dtype=torch.int32)
    tokens = tokens.repeat_interleave(2, 0)
    batch = Batch({"prompts": tokens * mask, "prompt_mask": mask}, torch.arange(10), 2)
    return batch.with_columns(of.generate(batch, SAMPLING))


@pytest.mark.parametrize("settings", [{}, {"generate_tokens": 30, "micro_batch_tokens": 16, "share_prompts": False}])
@pytest.mark.parametrize("family", FAMILIES)
def test_a_replay_turns_a_planted_mismatch_to_zero(family: str, settings: dict[str, Any]) -> None:
    replaying, comparing = engine(family, "rollout", **settings), engine(family, "compare", **settings)
    hooks = plant(replaying)
    batch = responses(replaying)
    for hook in hooks:
        hook.remove()
    mask, sampled = batch["response_mask"].bool(), batch["rollout_logprobs"]
    assert batch["experts"].shape == (10, (LENGTHS.prompt + LENGTHS.response) * BYTES_OF_TOKEN[family])
    assert mask.sum(1).min() < mask.sum(1).max()

    def difference(of: TorchEngine) -> float:
        return float((output(of, "logprobs", batch=batch) - sampled)[mask].abs().max())

    assert difference(comparing) > 0.01
    assert difference(replaying) < 1e-5
    # the planted choice lacks each token's likeliest expert; the last token of a response was never read
    layers = sum(type(module).__name__.lower().endswith("topkrouter") for module in replaying._model.modules())
    for each in (replaying, comparing):
        read, differing, _ = each.backward([(batch, likelihood())])["router_mismatch"].tolist()
        assert 0.9 * read < differing <= read and read % layers == 0
        assert each is comparing or differing == read
        if "share_prompts" in settings and "window" not in family:
            assert read == layers * (batch["attention_mask"].sum() - len(batch))


@pytest.mark.parametrize("family", ["mixtral", "mixtral with a window", "qwen3_moe"])
def test_experts_of_a_continued_response_are_those_of_all_tokens_that_its_call_has_read(family: str) -> None:
    """In slots and in waves, with samples that end in other segments."""
    of = engine(family, "rollout", generate_tokens=40)
    whole = responses(of)
    batch = replace(whole, columns={n: whole[n] for n in ("prompts", "prompt_mask")})
    for tokens in (1, 4, LENGTHS.response):
        made = in_segments(of.generate, batch, SAMPLING, tokens, LENGTHS.response)
        assert torch.equal(made["experts"], whole["experts"]) and torch.equal(made["tokens"], whole["tokens"])


def test_in_bfloat16_a_replay_leaves_rounding_alone() -> None:
    """Log-probs differ from generation's by a hundredth, as a dense model's do."""
    replaying, comparing = (engine("olmoe", mode, dtype="bfloat16") for mode in ("rollout", "compare"))
    hooks = plant(replaying)
    batch = responses(replaying)
    for hook in hooks:
        hook.remove()
    mask, sampled = batch["response_mask"].bool(), batch["rollout_logprobs"]
    found = [
        float((output(each, "logprobs", batch=batch) - sampled)[mask].abs().max()) for each in (replaying, comparing)
    ]
    assert 0 < found[0] < 0.03 and 5 * found[0] < found[1], found
    for each in (replaying, comparing):
        read, differing, _ = each.train([(batch, likelihood())])["router_mismatch"].tolist()
        assert 0.9 * read < differing <= read


@pytest.mark.parametrize("family", FAMILIES)
def test_where_routers_choose_alike_a_replay_changes_no_bit(family: str) -> None:
    plain, replaying = engine(family, "none"), engine(family, "rollout")
    batch = responses(replaying)
    assert torch.equal(output(plain, "logprobs", batch=batch), output(replaying, "logprobs", batch=batch))
    assert replaying.train([(batch, likelihood())])["router_mismatch"][1] == 0
    plain.train([(batch, likelihood())])
    for name, weights in snapshot(plain).items():
        assert torch.equal(weights, snapshot(replaying)[name]), name


@pytest.mark.parametrize("family", ["mixtral", "olmoe", "gpt_oss"])
def test_gradients_are_those_of_the_replayed_experts_also_where_layers_are_recomputed(family: str) -> None:
    planted = engine(family, "compare")
    plant(planted)
    batch = responses(planted)
    planted.train([(batch, likelihood())])
    replaying, own = engine(family, "rollout", activation_checkpointing=True), engine(family, "none")
    before = snapshot(replaying)
    replaying.train([(batch, likelihood())])
    own.train([(batch, likelihood())])
    for name, weights in snapshot(planted).items():
        torch.testing.assert_close(snapshot(replaying)[name], weights, rtol=1e-4, atol=1e-6)
        if name.endswith(("gate.weight", "router.weight")):
            assert not torch.equal(before[name], weights)
            assert not torch.allclose(snapshot(own)[name], weights, rtol=1e-4, atol=1e-6)
