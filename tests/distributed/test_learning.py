"""Every algorithm that needs no pretrained model learns a toy whose optimum is known, within two minutes on two cores:
from random weights, under several placements. SFT and reward models learn in the quick start."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import yaml
from cases import ROLES, TRAINED
from commands import start
from toys import COST_LIMIT, copying, earning, preferring, write_toys

from flexrlhf.config.algorithms import KINDS

pytestmark = pytest.mark.full

Raw = dict[str, Any]
SEED = int(os.environ.get("FLEXRLHF_LEARNING_SEED", "0"))
"""The settings also work with other seeds: 0, 1 and 2 were tried."""
SECONDS = 120
LAST = 10
"""Last steps whose mean counts as the result."""
ALONE = {"kl": None, "entropy_coefficient": 0.05, "prompts_per_step": 128}
GROUPS = {"kl": None, "entropy_coefficient": 0.05, "prompts_per_step": 64, "samples_per_prompt": 4}
"""One response to a prompt, or several. The bonus keeps an unlucky prompt from being given up."""
BESIDE_REF = {"kl": {"coefficient": 0.01}}
SHADOW = {"actor.shadow": 0.5, "actor": 0.5}
SIX = {f"{role}{copy}": 0.5 for role in ("actor", "critic", "cost_critic") for copy in ("", ".shadow")}
COPYING: Mapping[str, dict[str, tuple[Raw, object]]] = {
    "co-located": {
        "grpo": ({"name": "grpo", **GROUPS}, [1]),
        # of a policy with experts, which the ranks share
        "experts": ({"name": "grpo", **GROUPS}, [1]),
        "reinforce": ({"name": "reinforce++", **ALONE, "num_mini_batches": 2}, [1]),
        "raft": ({"name": "raft", **GROUPS}, [1]),
        "ac-share": ({"name": "ac-share", **ALONE, **BESIDE_REF}, [1, 1]),
    },
    "interleaving": {
        "ppo": ({"name": "ppo", **ALONE, "num_mini_batches": 2}, [0.5, 0.5]),
        "rloo": ({"name": "rloo", **GROUPS, **BESIDE_REF}, [1, 0.5]),
    },
    "disaggregated": {
        "gspo": ({"name": "gspo", **GROUPS, "num_mini_batches": 2}, SHADOW),
        "reinforce-baseline": ({"name": "reinforce++", **GROUPS, "baseline": "group"}, SHADOW),
        "remax": ({"name": "remax", **ALONE}, SHADOW),
    },
}
"""Strategy → run → algorithm and placement."""
SAFE: Mapping[str, tuple[Raw, object, int]] = {
    "cautious": ({"initial": 2.0, "learning_rate": 0.01}, [1, 1, 1], 100),
    "rash": ({"initial": 0.7, "learning_rate": 0.03}, SIX, 150),
    "careless": ({"initial": 0.001, "learning_rate": 0.0}, [1, 0.5, 0.5], 60),
}
"""Run → its multiplier, placement and steps."""
PREFERENCES: dict[str, tuple[Raw, object]] = {
    "sigmoid": ({"name": "dpo", "loss": "sigmoid"}, [1, 1]),
    "ipo": ({"name": "dpo", "loss": "ipo"}, [1, 0.5]),
    "kto": ({"name": "kto"}, [1, 0.5]),
    "simpo": ({"name": "simpo"}, [1]),
    "orpo": ({"name": "orpo"}, [0.5]),
}
"""Run → algorithm and placement."""
ELSEWHERE = ("safe-rlhf", "sft", "reward")
"""Algorithms of ``SAFE``, and of the quick start."""
LEARNT = {raw["name"] for runs in (*COPYING.values(), PREFERENCES) for raw, *_ in runs.values()}
for _name in sorted({*KINDS} - {*LEARNT, *ELSEWHERE}):
    # one without a run of its own
    if KINDS[_name].SAMPLES:
        _settings = GROUPS if KINDS[_name].model_fields["samples_per_prompt"].default > 1 else ALONE
        COPYING["co-located"][_name] = ({"name": _name, **_settings}, [1] * len(TRAINED[_name]))
    else:
        PREFERENCES[_name] = ({"name": _name}, [1] * len(ROLES[_name]))
ALGORITHMS = [(strategy, name) for strategy, runs in COPYING.items() for name in runs]


@dataclass
class Runs:
    """Metrics by run. The runs of a command share its start."""

    directory: Path
    commands: Mapping[str, list[Raw]]
    _done: dict[str, dict[str, list[Raw]]] = field(default_factory=dict)

    def metrics(self, command: str, name: str) -> list[Raw]:
        if command not in self._done:
            self._done[command] = self._launch(self.commands[command])
        return self._done[command][name]

    def plan(self, name: str) -> str:
        return (self.directory / "runs" / name / "plan.txt").read_text()

    def _launch(self, raws: list[Raw]) -> dict[str, list[Raw]]:
        paths = [self.directory / f"{raw['name']}.yaml" for raw in raws]
        for path, raw in zip(paths, raws, strict=True):
            path.write_text(yaml.safe_dump(raw | {"seed": SEED}))
        process = start(["run", *map(str, paths)], self.directory)
        out, _ = process.communicate(timeout=420)
        assert process.returncode == 0, out[-2000:]
        return {raw["name"]: self._read(raw["name"]) for raw in raws}

    def _read(self, name: str) -> list[Raw]:
        lines = (self.directory / "runs" / name / "metrics.jsonl").read_text().splitlines()
        return [json.loads(line) for line in lines]


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Runs:
    directory = tmp_path_factory.mktemp("toys")
    write_toys(directory)
    commands = {strategy: _copying(directory, strategy) for strategy in COPYING}
    commands["safe"] = [earning(directory, name, *settings) for name, settings in SAFE.items()]
    commands["preferences"] = [preferring(directory, name, *settings) for name, settings in PREFERENCES.items()]
    return Runs(directory, commands)


def _copying(directory: Path, strategy: str) -> list[Raw]:
    return [
        copying(directory, name, algorithm, placement) for name, (algorithm, placement) in COPYING[strategy].items()
    ]


def mean(rows: list[Raw], name: str) -> float:
    return float(sum(row[name] for row in rows) / len(rows))


def seconds(rows: list[Raw]) -> float:
    return float(sum(row["seconds"] for row in rows))


@pytest.mark.parametrize(("strategy", "name"), ALGORITHMS)
def test_the_optimum_is_nearly_reached(strategy: str, name: str, runs: Runs) -> None:
    rows = runs.metrics(strategy, name)
    assert f"{strategy} on 2 devices" in runs.plan(name)
    assert rows[0]["reward_mean"] < 0.2
    assert mean(rows[-LAST:], "reward_mean") >= 0.9
    assert rows[-1]["eval_reward_mean"] >= 0.8, "24 prompts that were not trained on"
    assert seconds(rows) < SECONDS


def test_the_reward_rises_while_the_cost_stays_under_its_limit(runs: Runs) -> None:
    rows = runs.metrics("safe", "cautious")
    costs = [mean(rows[start : start + LAST], "cost_mean") for start in range(0, len(rows), LAST)]
    assert max(costs) < COST_LIMIT
    assert mean(rows[-LAST:], "reward_mean") >= 0.9 * 2 > 2 * rows[0]["reward_mean"]
    assert seconds(rows) < SECONDS


def test_the_multiplier_brings_the_cost_back_to_its_limit(runs: Runs) -> None:
    """The multiplier integrates the excess over the limit, so in balance the cost is at the limit."""
    rows = runs.metrics("safe", "rash")
    assert "disaggregated on 2 devices" in runs.plan("rash")
    assert mean(rows[LAST : 2 * LAST], "cost_mean") > 1.5 * COST_LIMIT
    assert mean(rows[-4 * LAST :], "cost_mean") == pytest.approx(COST_LIMIT, rel=0.2)
    assert rows[-1]["lagrange"] > 1 > rows[0]["lagrange"]
    assert mean(rows[-4 * LAST :], "reward_mean") > 1.5


def test_without_a_multiplier_the_cost_exceeds_its_limit(runs: Runs) -> None:
    rows = runs.metrics("safe", "careless")
    assert "interleaving on 2 devices" in runs.plan("careless")
    assert mean(rows[-LAST:], "cost_mean") > 3 * COST_LIMIT


@pytest.mark.parametrize("name", PREFERENCES)
def test_preferences_on_evaluation_pairs_are_learnt(name: str, runs: Runs) -> None:
    rows = runs.metrics("preferences", name)
    assert rows[0]["eval_accuracy"] < 0.7
    assert mean(rows[-LAST:], "eval_accuracy") > 0.8
    if name not in ("simpo", "orpo"):
        assert rows[0]["preference_margin"] == pytest.approx(0, abs=1e-6), "it starts as its reference"
    assert seconds(rows) < SECONDS
