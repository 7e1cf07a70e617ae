"""Launches of the selected cases, one per number of ranks and with or without vLLM: start, and reading of the
results."""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from functools import cached_property
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from cases import KILLED, Assets, Case
from forked import RANK_ENVIRONMENT, warm_factory
from killed_decoders import killed_decoders
from safetensors.torch import load_file
from split_here import SPLITTING_HERE
from torch import Tensor

from flexrlhf.errors import RankFailure
from flexrlhf.launch.start import launch
from flexrlhf.placement.hosts import Hosts
from flexrlhf.plan.pipeline import make_plan
from flexrlhf.plan.plan import Plan
from flexrlhf.plan.plan_text import format_plan
from flexrlhf.runs.resume import RunOrder
from flexrlhf.runs.run_directory import RunDirectory

UNUSED = ("tokens", "attention_mask", "response_mask", "loss_mask", "logprobs", "scores", "advantages", "kept_mask")
"""Columns without anything in rows that no conversation has used."""


@dataclass(frozen=True)
class Outcome:
    """Results in a run's directory."""

    case: Case
    plan: Plan

    @property
    def directory(self) -> Path:
        return self.plan.spec.directory

    @cached_property
    def metrics(self) -> list[dict[str, float]]:
        return [json.loads(line) for line in (self.directory / "metrics.jsonl").read_text().splitlines()]

    @property
    def samples(self) -> list[dict[str, Any]]:
        return RunDirectory(self.directory).samples.read()

    @cached_property
    def trace(self) -> dict[str, Any]:
        return json.loads((self.directory / "timeline.json").read_text())

    @property
    def spans(self) -> list[dict[str, Any]]:
        return [event for event in self.trace["traceEvents"] if event["ph"] == "X"]

    def weights(self, model: str) -> dict[str, Tensor]:
        """Saved weights: all of them, or the adapters under peft's names."""
        (file,) = (self.directory / model).glob("*.safetensors")
        return load_file(file)

    def columns(self, step: int) -> dict[str, Tensor]:
        """The columns of a step with all rows in order, put together from the files of the ranks; of an episode with
        several sequences the first one, as its class has no other."""
        rows: dict[str, dict[int, Tensor]] = {}
        for file in sorted((self.directory / "columns").glob(f"step{step}-*.safetensors")):
            parts = load_file(file)
            indices = parts.pop("rows").tolist()
            for name, values in parts.items():
                values_of = rows.setdefault(name, {})
                twice = values_of.keys() & set(indices)
                assert not twice, f"{self.case.name}, step {step}: rows {sorted(twice)} of {name} written twice"
                values_of.update(zip(indices, values, strict=True))
        return {name: self._in_order(step, name, parts) for name, parts in rows.items()}

    def evaluated(self, name: str, step: int) -> Tensor:
        """A column of all evaluation rows in order, as computed after a step."""
        values: dict[int, Tensor] = {}
        for file in (self.directory / "columns").glob(f"held-out-step{step}-*.safetensors"):
            parts = load_file(file)
            values |= dict(zip(parts["rows"].tolist(), parts.get(name, ()), strict=False))
        return torch.stack([values[row] for row in sorted(values)[:: self.plan.batch.sequences]])

    def _in_order(self, step: int, name: str, values: dict[int, Tensor]) -> Tensor:
        count, k = self.plan.batch.num_rows, self.plan.batch.sequences
        assert sorted(values) == list(range(count)), f"{self.case.name}, step {step}: {name} has rows {sorted(values)}"
        column = torch.stack([values[row] for row in range(count)])
        further = column.view(-1, k, *column.shape[1:])[:, 1:]
        assert name not in UNUSED or not further.any(), f"{self.case.name}, step {step}: {name} of unused rows"
        return column[::k]


def params(
    cases: Iterable[Case], marked: Collection[Case] = (), mark: pytest.MarkDecorator = pytest.mark.full
) -> list[object]:
    """Return values of a parameter ``case``, by name; ``marked``: cases that have the mark."""
    return [pytest.param(case, id=case.name, marks=[mark] * (case in marked)) for case in cases]


def run_orders(orders: list[RunOrder]) -> None:
    """Launch the ranks of runs with as many of them, which resume from their checkpoints."""
    plans = [make_plan(order.spec) for order in orders]
    for plan, order in zip(plans, orders, strict=True):
        RunDirectory(plan.spec.directory).prepare(
            plan.spec, format_plan(plan), continues=bool(order.candidates)
        ).close()
    logging.getLogger("torchelastic-events-null").disabled = True
    with patch.dict(os.environ, RANK_ENVIRONMENT):
        launch(orders, plans[0], Hosts(), factory=warm_factory())


RUNS_PER_LAUNCH = 60
"""Sharded models leave threads behind until their process ends (docs/limits.md)."""


Kind = tuple[int, bool]
"""A launch's number of ranks, and whether vLLM is loaded there, which only some machines have."""


class Launches:
    """Outcomes by case. The runs of a launch start when the first of them is requested; if one fails, the following
    ones are launched again.
    """

    def __init__(self, assets: Assets, selected: Iterable[Case]) -> None:
        self.assets = assets
        self._launches = _launches(list(dict.fromkeys(selected)))
        self._outcomes: dict[Case, Outcome] = {}
        self._failures: dict[str, str] = {}

    def outcome(self, case: Case) -> Outcome:
        if missing := _missing_package(case):
            pytest.skip(f"{case.name}: {missing} is not installed")
        if case not in self._outcomes:
            self._launch(next(cases for cases in self._launches if case in cases))
        outcome = self._outcomes[case]
        if not _has_ended(outcome.plan):
            pytest.fail(f"{case.name} did not end: {self._failures.get(case.name, 'no rank failed')}", pytrace=False)
        return outcome

    def _launch(self, cases: list[Case]) -> None:
        outcomes = {case: Outcome(case, make_plan(self.assets.spec(case))) for case in cases}
        self._outcomes |= outcomes
        plans = [outcome.plan for outcome in outcomes.values()]
        with SPLITTING_HERE:
            for plan in plans:
                RunDirectory(plan.spec.directory).prepare(plan.spec, format_plan(plan), continues=False).close()
        # its events would bury the one line that names the failed rank
        logging.getLogger("torchelastic-events-null").disabled = True
        killed = [outcome.directory for case, outcome in outcomes.items() if case == KILLED]
        with patch.dict(os.environ, RANK_ENVIRONMENT), killed_decoders(killed):
            while plans:
                try:
                    launch([RunOrder(plan.spec) for plan in plans], plans[0], Hosts(), factory=warm_factory())
                    return
                except RankFailure as error:
                    left = [plan for plan in plans if not _has_ended(plan)]
                    self._failures |= {plan.spec.name: str(error) for plan in left[:1]}
                    plans = left[1:]


def _launches(selected: list[Case]) -> list[list[Case]]:
    """Cases of one kind together, at most RUNS_PER_LAUNCH of them."""
    kinds: dict[Kind, list[Case]] = {}
    for case in (case for case in selected if not _missing_package(case)):
        kinds.setdefault(_kind(case), []).append(case)
    starts = [(cases, start) for cases in kinds.values() for start in range(0, len(cases), RUNS_PER_LAUNCH)]
    return [cases[start : start + RUNS_PER_LAUNCH] for cases, start in starts]


def _has_ended(plan: Plan) -> bool:
    """Whether a run has finished, and the last thing exists that it writes, which one that failed may have, too."""
    status = RunDirectory(plan.spec.directory).status
    return status is not None and status.state == "finished" and (plan.spec.directory / "timeline.json").exists()


def _missing_package(case: Case) -> str | None:
    """Requirements of the engines of ``case`` that this machine lacks."""
    used = [package for package in ("deepspeed", "megatron") if package in case.compute] + ["vllm"] * case.has_vllm
    return next((package for package in used if find_spec(package) is None), None)


def _kind(case: Case) -> Kind:
    return case.ranks, case.has_vllm
