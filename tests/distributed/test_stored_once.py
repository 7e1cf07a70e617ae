"""Weights that a copy and its source have in common are stored once: planned bytes are the metered ones."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from cases import Assets
from launcher import run_orders

from flexrlhf.config.spec import Spec
from flexrlhf.plan.pipeline import make_plan
from flexrlhf.plan.plan import Plan
from flexrlhf.runs.resume import RunOrder
from flexrlhf.strategies.instructions import Offload

INIT = {
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 160,
    "num_hidden_layers": 3,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "vocab_size": 300,
}
BOTH, FIRST = {"ranks": "0-1"}, {"ranks": [0]}
SLICES = {"generate": {**BOTH, "tp": 2}, "ref_logprobs": BOTH, "train_actor": FIRST}
RUNS: dict[str, dict[str, Any]] = {
    # shards in whole weights; the actor's float32 masters are in host memory while it generates
    "offloaded": {
        **{"rollout": {"engine": "torch"}, "actor": {"tp": 2, "dtype": "bfloat16"}},
        "cluster": {"memory_gb": 0.0008},
    },
    # slices of whole weights on one rank, and of no weights on the other
    "slices": {"placement": {"operators": SLICES}},
    "lent": {"rollout": {"engine": "torch"}, "actor": {"tp": 2}},
    "viewed": {"rollout": {"engine": "torch"}, "cluster": {"memory_gb": 0.0014}},
    "shards": {"rollout": {"engine": "torch"}, "actor": {"zero": 3}},
}
IN_FULL_ALONE = ("lent", "viewed", "shards")
NAMES = [pytest.param(name, marks=[pytest.mark.full] * (name in IN_FULL_ALONE)) for name in RUNS]
_PLANS: dict[str, Plan] = {}


def plan_of(assets: Assets, name: str) -> Plan:
    """The plan of a run that has ended, launched with all others of the default tests or of the others."""
    if name not in _PLANS:
        names = [each for each in RUNS if (each in IN_FULL_ALONE) == (name in IN_FULL_ALONE)]
        specs = [Spec.parse(raw_spec(assets.directory, each)) for each in names]
        run_orders([RunOrder(spec) for spec in specs])
        _PLANS.update(zip(names, map(make_plan, specs), strict=True))
    return _PLANS[name]


def raw_spec(assets: Path, name: str) -> dict[str, Any]:
    changes = dict(RUNS[name])
    cluster, actor = changes.pop("cluster", {}), changes.pop("actor", {})
    batches = {"micro_batch_tokens": 32, "generate_tokens": 64}
    return {
        "name": f"stored-once-{name}",
        "algorithm": {
            **{"name": "grpo", "prompts_per_step": 8, "samples_per_prompt": 2},
            "loop": f"{Path(__file__).with_name('metered.py')}:loop",
        },
        "models": {"actor": {"init": INIT, **batches, **actor}, "ref": {"init": INIT, **batches}},
        "reward": [{"rule": "length", "target_tokens": 5}],
        "data": {
            **{"path": str(assets / "ppo.jsonl"), "tokenizer": str(assets / "tokenizer")},
            **{"max_prompt_tokens": 8, "max_response_tokens": 8},
        },
        "steps": 2,
        "cluster": {"devices": 2, "device": "cpu", **cluster},
        "runs": str(assets / "runs"),
        **changes,
    }


@pytest.mark.parametrize("name", NAMES)
def test_planned_bytes_are_metered(assets: Assets, name: str) -> None:
    plan = plan_of(assets, name)
    (copy,) = (model for model in plan.placement.models if model.is_transient)
    moved = {each.model for each in plan.schedule.instructions if isinstance(each, Offload)}
    assert ("actor" in moved) == (name in ("offloaded", "viewed"))
    for rank in range(2):
        metered = json.loads((plan.spec.directory / f"metered-{rank}.json").read_text())
        phases = {phase.label: phase for phase in plan.memory(rank).phases}
        (filled, most), (generated, _) = (
            metered[label] for label in (f"sync weights actor -> {copy.name}", f"run generate on {copy.name}")
        )
        assert filled == phases[f"sync to {copy.name}"].states, (rank, metered)
        assert generated == phases[f"generate on {copy.name}"].states, (rank, metered)
        # tensors are moved one after the other; checksums are not planned
        assert most <= 1.02 * phases[f"sync to {copy.name}"].total, (rank, metered)
        # with an actor in host memory that grows, which is metered on CPU ranks
        _, most = metered[f"release {copy.name}"]
        assert moved or most <= phases[f"release of {copy.name}"].total, (rank, metered)


@pytest.mark.parametrize("name", NAMES)
def test_weights_in_common_are_planned_once(name: str, tmp_path: Path) -> None:
    """Else the test above would show less."""
    plan = make_plan(Spec.parse(raw_spec(tmp_path, name)))
    (copy,) = (model for model in plan.placement.models if model.is_transient)
    first, second = (plan.state(copy, rank) for rank in range(2))
    actor = plan.state(plan.placement["actor"], 0)
    assert first is not None and second is not None and actor is not None
    if name in ("slices", "viewed"):
        assert first.weights == 0 and first.viewed == actor.weights
        assert (second.viewed, second.lent) == (first.viewed if name == "viewed" else 0, 0)
    else:
        assert first.lent + first.viewed == actor.weights and first.lent and first.weights > first.lent
