"""``flexrlhf verify``: placements that agree pass, and a planted bug is named at its step and column."""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from unittest.mock import patch

import pytest
import yaml
from cases import Case, make_assets
from commands import start
from forked import RANK_ENVIRONMENT, warm_factory
from launcher import run_orders

from flexrlhf.config.output_settings import DebugSpec
from flexrlhf.config.spec import Spec
from flexrlhf.launch.shared_directories import SHARED
from flexrlhf.launch.start import start_ranks
from flexrlhf.placement.hosts import Hosts
from flexrlhf.plan.pipeline import make_plan
from flexrlhf.plan.plan import Plan
from flexrlhf.plan.plan_text import format_plan
from flexrlhf.runs.resume import RunOrder
from flexrlhf.runs.run_directory import RunDirectory
from flexrlhf.verify.comparison import RecordedRun, compare_runs
from flexrlhf.verify.comparison_text import format_verdict
from flexrlhf.verify.deviations import BITWISE, FLOAT32, Deviation, Limits, first_beyond
from flexrlhf.verify.sides import short_spec
from flexrlhf.verify.verify import first_tie

pytestmark = pytest.mark.timeout(600)
SECONDS = 240
SIDES = {
    "halves": "halves",
    "whitening-per-rank": "halves",
    "denominator-per-rank": "halves",
    "rows-swapped": "halves",
    "another-token": "halves",
    "another-token-replayed": "halves",
    "six": "six",
    "sync-skipped": "six",
}
"""Runs on two ranks and their shapes; those that ``planted`` has a bug for have it."""

EXPERTS = ("experts", "experts-swapped")
"""Runs of models whose experts are split over two ranks."""


@dataclass
class Sides:
    """One run on a single rank, and those that are compared with it."""

    first: RecordedRun
    others: dict[str, RecordedRun] = field(default_factory=dict)

    def compared(self, name: str, limits: Limits = FLOAT32) -> list[Deviation]:
        return list(compare_runs((self.first, self.others[name]), limits))

    def verdict(self, name: str) -> str:
        runs = self.first, self.others[name]
        return "\n".join(format_verdict(self.compared(name), runs, FLOAT32))


@pytest.fixture(scope="module")
def sides(tmp_path_factory: pytest.TempPathFactory) -> Sides:
    directory = tmp_path_factory.mktemp("verify")
    assets = make_assets(directory)
    first = make_plan(named(assets.spec(Case("two", "co-located", 1)), "first"))
    again = make_plan(named(first.spec, "first-again"))
    replay = {"another-token-replayed": str(first.spec.directory)}
    specs = [named(assets.spec(Case("two", shape, 2)), name, replay.get(name)) for name, shape in SIDES.items()]
    specs += [named(assets.spec(Case("experts", "co-located", 2, "ep")), name) for name in EXPERTS]
    plans = [make_plan(spec) for spec in specs]
    run([first, again], directory)
    run(plans, directory)
    return Sides(RecordedRun(first), {plan.spec.name: RecordedRun(plan) for plan in (again, *plans)})


def named(spec: Spec, name: str, replay: str | None = None) -> Spec:
    return spec.model_copy(update={"name": name, "debug": DebugSpec(record_columns=True, replay=replay)})


def run(plans: Sequence[Plan], directory: Path) -> None:
    """Run as ``launch``, with the ranks of ``planted``."""
    for plan in plans:
        RunDirectory(plan.spec.directory).prepare(plan.spec, format_plan(plan), continues=False).close()
    file = directory / "orders.json"
    file.write_text(RunOrder.to_json([RunOrder(plan.spec) for plan in plans]))
    logging.getLogger("torchelastic-events-null").disabled = True
    with patch.dict(os.environ, RANK_ENVIRONMENT):
        start_ranks(["planted", str(file), str(directory / "stop"), SHARED], plans[0], Hosts(), factory=warm_factory())


@pytest.mark.parametrize("name", ["halves", "six"])
def test_placements_have_the_same_results(sides: Sides, name: str) -> None:
    found = sides.compared(name)
    assert first_beyond(found) is None and sides.verdict(name).startswith("same numbers")
    kinds = {(each.kind, each.step) for each in found}
    assert {(kind, step) for kind in ("column", "move", "metric") for step in range(3)} <= kinds
    assert {each.name for each in found if each.kind == "weights"} == {"actor", "critic"}
    assert {"advantages", "values", "tokens"} <= {each.name for each in found if each.kind == "column"}
    assert {"policy_loss", "actor_grad_norm"} <= {each.name for each in found if each.kind == "metric"}
    # two ranks add up in another order than one, so that the comparison is not of a run with itself
    assert name == "six" or any(each.size > 0 for each in found if each.kind == "column")


@pytest.mark.parametrize(
    ("name", "kind", "step", "quantity", "words"),
    [
        ("whitening-per-rank", "column", 0, "advantages", ("advantages on actor (ranks 0-1", "row 0, position 0")),
        ("denominator-per-rank", "metric", 0, "actor_grad_norm", ("train_actor on actor", "all columns of this step")),
        ("rows-swapped", "move", 0, "scores", ("on its way to advantages", "ref, reward -> actor")),
        ("sync-skipped", "column", 1, "tokens", ("actor.shadow (rank 1", "its weights come by sync from actor")),
    ],
)
def test_a_planted_bug_is_named(
    sides: Sides, name: str, kind: str, step: int, quantity: str, words: tuple[str, ...]
) -> None:
    first = first_beyond(sides.compared(name))
    assert first is not None
    assert (first.kind, first.step, first.name) == (kind, step, quantity)
    verdict = sides.verdict(name)
    assert [part for part in words if part not in verdict] == [], verdict
    assert first_tie((sides.first, sides.others[name]), FLOAT32) is None


def test_swapped_experts_are_found_in_the_first_column_that_a_policy_writes(sides: Sides) -> None:
    first = first_beyond(list(compare_runs(tuple(sides.others[name] for name in EXPERTS), FLOAT32)))
    assert first is not None and (first.kind, first.step, first.name) == ("column", 0, "tokens")


def test_a_run_is_repeated_to_the_last_bit(sides: Sides) -> None:
    found = sides.compared("first-again", BITWISE)
    assert len(found) > 90 and first_beyond(found) is None
    assert {each.limit for each in found} == {0.0}


def test_rows_are_late_where_the_first_side_was(tmp_path: Path) -> None:
    """So that they sample each token with the same weights, though the clock decides in the first run."""
    assets, steps = make_assets(tmp_path), 5
    first = short_spec(assets.spec(Case("remax-episodes", "co-located", 1)), "first", tmp_path, steps)
    other = short_spec(assets.spec(Case("remax-episodes", "halves", 2)), "other", tmp_path, steps, first)
    for spec in (first, other):
        run_orders([RunOrder(spec)])
    runs = RecordedRun(make_plan(first)), RecordedRun(make_plan(other))
    assert first_beyond(list(compare_runs(runs, FLOAT32))) is None
    late = [[row["late_replies"] for row in RunDirectory(each.directory).metrics.read()] for each in runs]
    assert late[0] == late[1] and sum(late[0]) > 0


def test_another_token_is_no_tie(sides: Sides) -> None:
    first = first_beyond(sides.compared("another-token"))
    assert first is not None and first.entry is not None
    assert (first.step, first.name, first.entry.row, first.size) == (1, "tokens", 3, 1)
    assert first_tie((sides.first, sides.others["another-token"]), FLOAT32) is None


def test_replayed_responses_replace_sampled_ones(sides: Sides) -> None:
    assert first_beyond(sides.compared("another-token-replayed")) is None


ONE_BY_ONE = """
def lengths(prompts, responses):
    return [float(len(response)) for response in responses]


def batches(prompts, responses):
    return [float(len(response) + len(responses)) for response in responses]
"""
"""Scores of a user; the second function's depend on how many responses a call happens to have."""


def config(directory: Path, function: str) -> Path:
    """A run of GRPO with scores of a function, so of few models; with more steps than are verified."""
    assets = make_assets(directory)
    (directory / "lengths.py").write_text(ONE_BY_ONE)
    raw = yaml.safe_load(assets.spec(Case("grpo", "co-located", 1)).dump())
    raw["models"].pop("reward")
    raw |= {"reward": {"function": f"{directory}/lengths.py:{function}"}, "placement": None, "steps": 100}
    (directory / "run.yaml").write_text(yaml.safe_dump(raw))
    return directory / "run.yaml"


def verify(directory: Path, *arguments: str) -> tuple[int, str]:
    process = start(["verify", "run.yaml", "--steps", "2", *arguments], directory)
    out, _ = process.communicate(timeout=SECONDS)
    return process.returncode, out


@pytest.mark.full
def test_scores_that_depend_on_the_batch_are_named(tmp_path: Path) -> None:
    """A function of the user that is deterministic, and yet not the same under another placement."""
    config(tmp_path, "batches")
    code, out = verify(tmp_path, "--against-set", "cluster.devices=2", "--keep", "kept")
    assert code == 1, out
    assert "they part at step 0, column scores, row 0" in out
    assert "against: written by" in out and "Traceback" not in out
    assert {path.name for path in (tmp_path / "kept").iterdir()} == {"as-given", "against"}


@pytest.mark.full
def test_engines_shards_and_ranks_have_the_same_results(tmp_path: Path) -> None:
    config(tmp_path, "lengths")
    settings = [f"models.actor.{setting}" for setting in ("zero=3", "shadow={zero: 0}", "micro_batch_tokens=32")]
    further = [word for setting in settings for word in ("--against-set", setting)]
    sides = ("--determinism", "--against", "[0.5,0.5,0.5]", "--against", "[1,0.5]")
    code, out = verify(tmp_path, "--devices", "2", *sides, *further)
    assert code == 0, out
    assert out.count("same numbers: ") == 3 and out.count("arrived by moves as they were written") == 2
    assert "same numbers: repeated-1 is within the limits of as-given (bitwise)" in out
    assert not [path for path in tmp_path.iterdir() if path.name == "runs"]
