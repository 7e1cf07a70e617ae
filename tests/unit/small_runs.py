"""Small runs as mappings, for tests of planning."""

from __future__ import annotations

from copy import deepcopy
from typing import Any

from flexrlhf.config.model_settings import Head, ModelSpec
from flexrlhf.config.spec import Spec
from flexrlhf.config.spec_file import apply_override
from flexrlhf.placement.layout import Layout
from flexrlhf.placement.placed import ModelName, PlacedModel
from flexrlhf.plan.pipeline import make_plan
from flexrlhf.plan.plan import Plan

TINY = {
    "model_type": "llama",
    "vocab_size": 32,
    "hidden_size": 8,
    "intermediate_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
}
PPO: dict[str, Any] = {
    "name": "test",
    "algorithm": {"name": "ppo", "prompts_per_step": 8},
    "models": {"actor": {"init": dict(TINY)}, "reward": {"init": dict(TINY)}},
    "data": {"path": "prompts.jsonl", "max_prompt_tokens": 4, "max_response_tokens": 8},
    "steps": 3,
}


HEADS: dict[str, Head] = {"critic": "scalar", "reward": "scalar"}
"""The others have a language head."""


def spec_of(placement: object = None, devices: int = 2, *overrides: str) -> Spec:
    """A PPO run; ``overrides`` as on the command line."""
    raw = deepcopy(PPO) | {"placement": placement, "cluster": {"devices": devices}}
    for override in overrides:
        apply_override(raw, override)
    return Spec.parse(raw)


def plan_of(placement: object = None, devices: int = 2, *overrides: str) -> Plan:
    return make_plan(spec_of(placement, devices, *overrides))


RECOMPUTE = "rollout.logprobs=recompute"
"""Every operator of the algorithm runs: none is left out because another pass computes the same."""


def whole_plan_of(placement: object = None, devices: int = 2, *overrides: str) -> Plan:
    """The plan of a run whose every operator runs."""
    return plan_of(placement, devices, *overrides, RECOMPUTE)


def placed_model(name: str, ranks: tuple[int, ...], **settings: Any) -> PlacedModel:
    """A placed model by itself, such as ``actor`` or ``actor.shadow``; ``settings`` as in the YAML."""
    model, role = ModelSpec(**settings), name.partition(".")[0]
    trained = name in ("actor", "critic")
    layout = Layout(ranks, model.dims)
    return PlacedModel(ModelName(name), layout, trained, model, head=HEADS.get(role, "causal"))
