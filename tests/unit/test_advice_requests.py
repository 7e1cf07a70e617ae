"""Requests to ``flexrlhf advise``: an advised placement plans, fits and is about as fast as any; a refusal is right."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path

import pytest

from flexrlhf.config.spec import Spec
from flexrlhf.config.spec_file import load_spec
from flexrlhf.errors import UserError
from flexrlhf.guideline.advice.advise import advise
from flexrlhf.guideline.advice.advised_yaml import write_advised
from flexrlhf.guideline.advice.choice import Advice
from flexrlhf.guideline.advice.request import AdviceOptions
from flexrlhf.guideline.costs.analytic import AnalyticCosts
from flexrlhf.guideline.simulation.inputs import lengths_for
from flexrlhf.guideline.simulation.simulate import simulate
from flexrlhf.plan.algorithm_graph import make_graph
from flexrlhf.plan.pipeline import make_plan
from flexrlhf.plan.suggestions import check_fits

GRPO = "algorithm.name=grpo"
RULE = "reward={rule: gsm8k}"
MIXED = "cluster={nodes: [{devices: 4, class: H100-80G}, {devices: 4, class: A100-40G}]}"
OLDER = "cluster={nodes: [{devices: 8, class: A100-80G}, {devices: 8, class: V100-32G}]}"
SMALL = "cluster={nodes: [{devices: 8, class: A100-80G, memory_gb: 10}]}"
UNEVEN = "cluster={nodes: [{devices: 8, class: A100-80G}, {devices: 4, class: A100-80G}]}"


@dataclass(frozen=True)
class Row:
    """A request.

    model:      of all roles.
    gpus:       number of devices.
    gpu_type:   their class.
    overrides:  of ``--set``.
    others:     other options of the command line.
    fits:       whether a placement is advised.
    """

    model: str
    gpus: int
    gpu_type: str = "A100-80G"
    overrides: tuple[str, ...] = ()
    others: tuple[tuple[str, object], ...] = ()
    fits: bool = True

    @property
    def spec(self) -> Spec:
        options = AdviceOptions(model=self.model, gpus=self.gpus, gpu_type=self.gpu_type)
        return replace(options, **dict(self.others)).spec(None, self.overrides)


def row(model: str, gpus: int, gpu_type: str = "A100-80G", *overrides: str, fits: bool = True, **others: object) -> Row:
    return Row(model, gpus, gpu_type, overrides, tuple(others.items()), fits)


REQUESTS = {
    "one device": row("qwen2.5-0.5b", 1),
    "one device, transformers": row("qwen2.5-0.5b", 1, rollout="transformers"),
    "one device, torch": row("qwen2.5-0.5b", 1, rollout="torch"),
    "one device, adapters": row("llama-7b", 1, lora=16),
    "one device of 40 GB, adapters": row("llama-7b", 1, "A100-40G", lora=16),
    "one device of 24 GB, adapters": row("qwen2.5-1.5b", 1, "RTX4090-24G", lora=8),
    "one device, 7B": row("llama-7b", 1),
    "one device, torch, 7B": row("llama-7b", 1, engine="torch", fits=False),
    "one device, 65B": row("llama-65b", 1, fits=False),
    "one device, 65B, adapters": row("llama-65b", 1, lora=16, fits=False),
    "one older device": row("qwen2.5-1.5b", 1, "V100-16G", lora=8),
    "one device, sft": row("qwen2.5-3b", 1, "A100-80G", "algorithm.name=sft"),
    "one device, dpo": row("qwen2.5-1.5b", 1, "A100-80G", "algorithm.name=dpo"),
    "one device, dpo, 7B": row("llama-7b", 1, "A100-80G", "algorithm.name=dpo"),
    "one device, dpo, 7B, adapters": row("llama-7b", 1, "A100-80G", "algorithm.name=dpo", lora=16),
    "one device, deepspeed": row("qwen2.5-0.5b", 1, engine="deepspeed"),
    "one device, deepspeed, 7B, optimizer on it": row(
        "llama-7b",
        1,
        "A100-80G",
        "models.actor.offload_optimizer=false",
        "models.critic.offload_optimizer=false",
        engine="deepspeed",
        fits=False,
    ),
    "one device, deepspeed, 65B": row("llama-65b", 1, engine="deepspeed", fits=False),
    "two devices": row("qwen2.5-1.5b", 2),
    "three devices": row("qwen2.5-1.5b", 3),
    "three devices, grpo": row("qwen2.5-1.5b", 3, "A100-80G", GRPO, RULE),
    "three devices, 7B": row("llama-7b", 3),
    "four devices": row("llama-7b", 4),
    "four devices, older": row("qwen2.5-3b", 4, "V100-32G"),
    "four devices of 24 GB, adapters": row("llama-7b", 4, "A10-24G", lora=16),
    "four devices, grpo": row("qwen2.5-7b", 4, "A100-80G", GRPO),
    "six devices": row("qwen2.5-3b", 6),
    "a node": row("llama-7b", 8),
    "a node, 13B": row("llama-13b", 8),
    "a node, 32B, adapters": row("qwen2.5-32b", 8, "H100-80G", lora=16),
    "a node, 33B": row("llama-33b", 8),
    "a node, 65B": row("llama-65b", 8, fits=False),
    "a node, 70B": row("llama-2-70b", 8, "H100-80G", fits=False),
    "a node, 70B, adapters": row("llama-2-70b", 8, "H200-141G", lora=16),
    "a node with little memory": row("llama-7b", 8, "A100-80G", SMALL, fits=False),
    "a node, transformers": row("qwen2.5-7b", 8, rollout="transformers"),
    "a node, torch": row("qwen2.5-7b", 8, rollout="torch"),
    "a node, deepspeed": row("qwen2.5-7b", 8, engine="deepspeed"),
    "a node, deepspeed, 65B": row("llama-65b", 8, engine="deepspeed"),
    "a node, deepspeed, transformers": row("qwen2.5-3b", 8, engine="deepspeed", rollout="transformers"),
    "a node, megatron": row("qwen2.5-7b", 8, engine="megatron"),
    "a node, grpo": row("qwen2.5-7b", 8, "A100-80G", RULE, algorithm="grpo"),
    "a node, grpo, long responses": row("qwen2.5-7b", 8, "A100-80G", GRPO, RULE, response_tokens=8192, samples=16),
    "a node, grpo, longest responses": row("qwen2.5-7b", 8, "H100-80G", GRPO, RULE, response_tokens=16384),
    "a node, grpo, adapters": row("qwen2.5-14b", 8, "A100-80G", GRPO, RULE, lora=16),
    "a node, rloo": row("qwen2.5-3b", 8, "A100-80G", "algorithm.name=rloo"),
    "a node, dpo": row("llama-13b", 8, "A100-80G", "algorithm.name=dpo"),
    "a node, sft": row("llama-13b", 8, "A100-80G", "algorithm.name=sft"),
    "a node, small critic": row("llama-13b", 8, reward="qwen2.5-1.5b"),
    "a node, short responses": row("llama-7b", 8, response_tokens=128, prompt_tokens=128, prompts=64),
    "a node, settings of the YAML": row("llama-7b", 8, "A100-80G", "models.actor.tp=2", "models.critic.zero=3"),
    "a node, settings of the YAML that need much": row(
        "llama-7b", 8, "A100-40G", "models.actor.zero=0", "models.critic.zero=0"
    ),
    "a node, settings of the YAML that are too large": row(
        "llama-7b", 8, "A100-40G", "models.actor.zero=0", "models.actor.tp=1", fits=False
    ),
    "a node, a strategy": row("qwen2.5-1.5b", 8, "A100-80G", "schedule.strategy=interleaving"),
    "a node, a lag": row("qwen2.5-1.5b", 8, "A100-80G", "schedule.lag=1"),
    "two classes": row("qwen2.5-3b", 8, "A100-80G", MIXED),
    "two classes, older": row("qwen2.5-3b", 8, "A100-80G", OLDER, "models.ref.fallback_dtype=float16"),
    "uneven nodes": row("qwen2.5-3b", 8, "A100-80G", UNEVEN),
    "two nodes": row("llama-13b", 16),
    "five nodes": row("llama-13b", 40),
}
LARGE = {
    "four nodes": row("llama-33b", 32),
    "four nodes, 70B, adapters": row("llama-2-70b", 32, "H100-80G", lora=16),
    "sixteen nodes": row("codellama-34b", 128),
    "64 nodes, 70B, long responses": row(
        "llama-3-70b", 512, "RTX4090-24G", RULE, algorithm="grpo", response_tokens=8192, fits=False
    ),
    "128 nodes": row("llama-65b", 1024),
    "512 nodes, adapters": row("llama-65b", 4096, lora=16),
    "2048 nodes": row("llama-65b", 16384),
    "2048 nodes, adapters": row("llama-65b", 16384, lora=16),
}
SECONDS = 0.5


SLOW = {
    *("four devices of 24 GB, adapters", "a node, 65B", "a node, 70B", "one device, 65B", "a node, 33B"),
    *("a node with little memory", "five nodes", "four devices, older", "a node, 70B, adapters", "four devices"),
    *("six devices", "three devices, 7B", "a node, deepspeed, 65B", "a node, 13B", "a node, small critic"),
    *("a node, settings of the YAML that need much", "a node, settings of the YAML that are too large"),
    *("two nodes", "a node, megatron", "a node, 32B, adapters", "uneven nodes", "a node, short responses"),
    *("a node, deepspeed", "one device, 65B, adapters", "a node, a strategy", "one device, deepspeed, 65B"),
}
"""Requests that are searched for seconds, of kinds that the others have, too."""
CASES = [
    *(pytest.param(each, id=name, marks=[pytest.mark.full] * (name in SLOW)) for name, each in REQUESTS.items()),
    *(pytest.param(each, id=name, marks=pytest.mark.full) for name, each in LARGE.items()),
]
assert set(REQUESTS) > SLOW


@pytest.mark.parametrize("case", CASES)
def test_a_request_is_advised_on_or_rightly_refused(case: Row, tmp_path: Path) -> None:
    spec = case.spec
    found = advise(spec, AnalyticCosts(), lengths_for(spec, None), SECONDS)
    assert bool(found.feasible) == case.fits, found.refusal or found.best.candidate
    if case.fits:
        check_choice(found, tmp_path / "advised.yaml")
    else:
        check_refusal(found, spec)


def check_choice(found: Advice, path: Path) -> None:
    """Check that the YAML plans within memory, to the seconds printed, and is a tie with the fastest."""
    best = found.best
    write_advised(best, path)
    plan = make_plan(load_spec(path))
    check_fits(plan)
    assert simulate(plan, AnalyticCosts()).seconds == pytest.approx(best.seconds, rel=1e-12)
    assert best.seconds <= (1 + found.margin) * found.comparable[0].seconds


def check_refusal(found: Advice, spec: Spec) -> None:
    """Check that no plan of the leanest settings fits, and that the sentence has changes under which one does."""
    with pytest.raises(UserError, match="no placement of these models fits") as error:
        _ = found.best
    assert "it would fit" in str(error.value)
    assert not any(fits(lean) for lean in leanest(spec))


def fits(spec: Spec) -> bool:
    """Whether a plan can be made, and fits; as ``check_fits`` without its suggestions, which take longer than plans."""
    try:
        plan = make_plan(spec)
    except UserError:
        return False
    rank = plan.tightest_rank
    size = plan.cluster.memory_bytes(rank)
    return size is None or plan.memories[rank].peak_bytes <= size


def leanest(spec: Spec) -> Iterator[Spec]:
    """The request on all devices, sharded as far as engines allow, with the smallest passes and caches; what the YAML
    sets stays."""
    graph = make_graph(spec)
    for tp, rollout_tp in product((1, 2, 4, 8), repeat=2):
        models = {}
        for role in graph.roles:
            model = spec.models.of(role)
            assert model is not None
            trained, engine = role in graph.trained, model.facts
            lean = {
                "zero": max(engine.zero),
                "tp": tp if engine.searches_tp and (model.lora is None or not trained) else 1,
                "micro_batch_tokens": 1,
                "generate_tokens": 1,
                "activation_checkpointing": trained,
                "offload_optimizer": engine.offload and trained,
            }
            kept = {name: value for name, value in lean.items() if name not in model.model_fields_set}
            models[role] = model.model_copy(update=kept)
        rollout = spec.rollout.model_copy(update={"tp": rollout_tp, "kv_tokens": spec.padded_row})
        yield spec.model_copy(
            update={"models": spec.models.model_copy(update=models), "rollout": rollout, "placement": None}
        )
