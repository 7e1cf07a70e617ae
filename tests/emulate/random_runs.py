"""Random settings of runs with lags and segments, and plans of them under several placements."""

from __future__ import annotations

from random import Random
from typing import Any

from random_specs import INIT

from flexrlhf.config.spec import Spec
from flexrlhf.errors import UserError
from flexrlhf.plan.pipeline import make_plan
from flexrlhf.plan.plan import Plan

GENERATED = ("ppo", "grpo", "raft", "remax", "safe-rlhf", "ac-share")
MODELS = {"ppo": 6, "grpo": 4, "raft": 3, "remax": 4, "ac-share": 4}
"""Models of a placement with inference on ranks of its own."""
TRAINING = {"ppo": ("actor", "critic", "ref"), "grpo": ("actor", "ref"), "raft": ("actor",)}
"""Roles on ranks of training where generation and scores alone are apart."""
LONGEST = 12
Raw = dict[str, Any]


def random_settings(random: Random) -> Raw:
    """A run without its placement."""
    name = random.choice((*GENERATED, *GENERATED, "grpo", "sft", "dpo"))
    mini_batches = random.choice((1, 2, 4))
    prompts = random.randint(mini_batches, 9)
    algorithm: Raw = {"name": name, "prompts_per_step": prompts, "num_mini_batches": mini_batches}
    is_dynamic = name == "grpo" and random.random() < 0.4
    tokens = random.choice((None, 1, 2, 3, 5, 6, LONGEST)) if name in GENERATED and not is_dynamic else None
    if name in GENERATED:
        algorithm["freeze_actor_steps"] = random.choice((0, 0, 2)) * (name != "ac-share")
    if name in ("grpo", "raft", "ppo"):
        algorithm["samples_per_prompt"] = random.randint(2, 4)
    if is_dynamic:
        algorithm["dynamic_sampling"] = {"rounds": random.randint(2, 3)}
    is_apart = name in MODELS and random.random() < 0.7
    lag = random.choice((0, 1, 1, 2, 3, 4, 6, 8, 16)) if is_apart else 0
    models = ("actor", *(("reward",) if name in GENERATED else ()), *(("cost",) if name == "safe-rlhf" else ()))
    raw: Raw = {
        "name": "rows",
        "steps": random.randint(1, 8) + random.choice((0, lag)),
        "algorithm": algorithm,
        "models": {role: {"init": INIT} for role in models},
        "data": {"path": "rows.jsonl", "max_response_tokens": LONGEST},
        "schedule": {"lag": lag},
        "sync": {"every": random.choice((1, 2, 3)) if is_apart else 1},
        "rollout": {
            "segment_tokens": tokens,
            "max_segments": random.choice((None, 1, 2, 3)) if tokens else None,
            "groups": random.choice(("wait", "as-ended")) if tokens and name in ("ppo", "grpo") else "wait",
        },
    }
    own = Random(repr(raw))
    if name in GENERATED and own.random() < 0.4:
        raw["environment"] = {"path": "games.py:Game", "max_turns": own.randint(1, 3)}
    if name == "grpo" and tokens and raw["rollout"]["groups"] == "wait" and own.random() < 0.7:
        algorithm["dynamic_sampling"] = {"rounds": own.randint(2, 3)}
    if name in GENERATED and own.random() < 0.2:
        algorithm["ptx"] = {"path": "texts.jsonl"}
    if "environment" in raw and tokens and own.random() < 0.5:
        raw["rollout"] |= {"order": "free", "late_replies": "carry"}
    if "environment" in raw:
        raw["environment"]["sequences"] = own.choice((1, 1, 2, 3))
    return raw


def placed(raw: Raw, random: Random) -> Plan | None:
    """The run on random devices and in random chunks; None for settings that no plan has."""
    name, mini_batches = raw["algorithm"]["name"], raw["algorithm"]["num_mini_batches"]
    is_apart = bool(raw["schedule"]["lag"] or raw["sync"]["every"] > 1 or (name in MODELS and random.random() < 0.3))
    chunks = random.choice([number for number in (1, 2, 4) if mini_batches % number == 0])
    half = random.randint(1, 2)
    sides = {name: {"ranks": list(range(half))} for name in TRAINING.get(name, ())}
    sides |= {name: {"ranks": list(range(half, 2 * half))} for name in ("actor.shadow", "reward")}
    apart = [["1/2"] * MODELS.get(name, 0), *([sides] if name in TRAINING else [])]
    settings = {
        "cluster": {"devices": 2 * half},
        "placement": random.choice(apart if is_apart else [None, [1, 1, "1/2", "1/2"]]),
        "schedule": {**raw["schedule"], "num_chunks": chunks},
    }
    try:
        return make_plan(Spec.parse({**raw, **settings}))
    except UserError:
        return None


def plan_of(raw: Raw, random: Random) -> Plan | None:
    return next((plan for _ in range(5) if (plan := placed(raw, random)) is not None), None)


def changed(raw: Raw, random: Random) -> Raw:
    """The run under another lag and other segments, in which rows in flight have their places."""
    lag, rollout = raw["schedule"]["lag"], raw["rollout"]
    if lag and random.random() < 0.5:
        lag = random.choice((1, 2, 4, 7))
    if raw["algorithm"]["name"] in GENERATED and random.random() < 0.5:
        rollout = {**rollout, "segment_tokens": random.randint(1, 5), "max_segments": None}
    return {**raw, "schedule": {"lag": lag}, "rollout": rollout}


def other_plan(plan: Plan, raw: Raw, random: Random) -> Plan:
    """The same run, mostly placed in another way, and some with another lag or other segments."""
    raw = changed(raw, random) if random.random() < 0.5 else raw
    other = plan_of({**raw, "steps": plan.spec.steps}, random)
    return plan if other is None or other.batch.segments < plan.batch.segments else other
