"""A resumed run equals one that was never interrupted, whatever layout wrote the checkpoint."""

from __future__ import annotations

import shutil
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
import yaml
from cases import ROLES, SHAPES, Assets, Case, algorithm_of
from commands import start
from comparison import deviations
from launcher import Outcome, run_orders
from peft import PeftModel
from reference_responses import read_examples
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer
from typer.testing import CliRunner

from flexrlhf.cli import app
from flexrlhf.config.output_settings import CheckpointSpec
from flexrlhf.config.spec import RolloutSpec, Spec
from flexrlhf.data.order import step_indices
from flexrlhf.data.quickstart import CORPUS
from flexrlhf.data.quickstart.corpus import write_corpus
from flexrlhf.metrics import METRICS
from flexrlhf.operators.outcomes import EpisodeState
from flexrlhf.plan.pipeline import make_plan
from flexrlhf.runs.export import TrainedModel
from flexrlhf.runs.manifest import Manifest
from flexrlhf.runs.resume import AUTO, RunOrder, resume_runs
from flexrlhf.runs.run_directory import RunDirectory
from flexrlhf.strategies.instructions import Checkpoint, Offload, Reload, Run

pytestmark = pytest.mark.timeout(3600)
NEXT_STEP = 2
"""Steps before the interruption."""


@dataclass(frozen=True)
class Pair:
    """A run is interrupted under ``first`` and resumed under ``second``, which have the same setting.

    With a rollout engine transformers generates until the interruption.

    ends:  whether the first run is not interrupted, but ends after ``NEXT_STEP`` steps, and then gets more.
    """

    first: Case
    second: Case
    ends: bool = False

    @property
    def name(self) -> str:
        return f"{self.first.name}-then-{'more' if self.ends else self.second.name}"


def same(*arguments: object, **further: object) -> Pair:
    case = Case(*arguments, **further)  # type: ignore[arg-type]
    return Pair(case, case)


ALIKE = [
    same("two", "co-located", 2),
    same("two", "lag", 2),
    same("corrected", "lag-every-3", 2),
    same("retokenized", "lag", 2),
    same("segments", "co-located", 2),
    same("grpo-segments", "lag-4-every-2", 2),
    same("grpo-as-ended-process", "lag-2-alone", 2),
    same("grpo-dynamic-segments", "co-located", 2),
    same("reinforce", "co-located", 2),
    same("running", "six", 2),
    same("safe", "halves", 2),
    same("scheduled", "co-located", 2, "torch-3"),
    same("adapters", "co-located", 2, "deepspeed-1"),
    same("running", "six", 4, "megatron-tp"),
    same("streaming-two", "operators-lanes", 4),
    # episodes are carried on, and are replayed in processes that do not have them
    same("grpo-episodes-segments", "lag", 2),
    # a program goes on in the middle of a turn that it has called for
    same("grpo-program-segments", "lag", 2),
    # rows are carried while they await a late reply, in a run that was interrupted after the last generate
    same("remax-episodes", "lag", 2),
    # rows in flight have the experts that generation chose
    same("experts-moved", "lag", 2),
]
"""The same placement: equal to the last bit."""
RANDOM = same("episodes-random", "co-located", 2)
"""An environment that never replies alike, so that there is no reference: its replies are in a log."""
ENDED = Pair(Case("two", "lag", 2), Case("two", "lag", 2), ends=True)
"""The last checkpoint has no rows for further steps, so that the one before is taken."""
FILTERED = Pair(Case("grpo-dynamic", "lag", 2), Case("grpo-dynamic", "lag", 4))
"""With dynamic sampling, responses without a score, and a batch in flight."""
CHANGED = [
    FILTERED,
    # copies that lag are called otherwise
    Pair(Case("grpo", "lag-2-alone", 2), Case("grpo", "operators-lag-alone", 2)),
    Pair(Case("corrected", "lag", 2, rollout="vllm"), Case("corrected", "operators-lag", 2, rollout="vllm")),
    Pair(Case("segments-corrected", "halves", 2), Case("segments-corrected", "co-located", 4)),
    Pair(Case("grpo-dynamic-segments", "lag-2", 2), Case("grpo-dynamic-segments", "lag-2", 4)),
    Pair(Case("grpo-episodes-segments", "lag-2", 2), Case("grpo-episodes-segments", "lag-2", 4)),
    same("segments-corrected", "co-located", 2, rollout="vllm"),
    Pair(Case("one-trunk", "co-located", 2), Case("one-trunk", "six", 2)),
    Pair(Case("grpo", "co-located", 2), Case("grpo", "halves", 4)),
    Pair(Case("rloo", "co-located", 2, "cp-3"), Case("rloo", "six", 2)),
    Pair(Case("raft", "co-located", 4), Case("raft", "six", 2)),
    Pair(Case("gspo", "halves", 2), Case("gspo", "co-located", 2, "torch-3")),
    Pair(Case("reinforce", "six-chunks", 2), Case("reinforce", "co-located", 4, "deepspeed-2")),
    Pair(Case("remax-segments", "six", 2), Case("remax-segments", "co-located", 2, "deepspeed-0")),
    Pair(Case("safe", "co-located", 2, "deepspeed-3"), Case("safe", "six", 4)),
    Pair(Case("dpo", "co-located", 2), Case("dpo", "halves", 4)),
    Pair(Case("kto", "co-located", 2), Case("kto", "halves", 2)),
    Pair(Case("simpo", "all", 2), Case("simpo", "half", 2)),
    Pair(Case("orpo", "half", 2), Case("orpo", "all", 2, "torch-2")),
    Pair(Case("sft", "half", 2), Case("sft", "all", 2, "cp-ring-2")),
    Pair(Case("sft", "all", 2, "deepspeed-1"), Case("sft", "all", 4, "torch-2")),
    Pair(Case("reward", "all", 4, "torch-3"), Case("reward", "half", 2)),
    Pair(Case("scheduled", "co-located", 4, "mixed"), Case("scheduled", "co-located", 4, "tp")),
    Pair(Case("scheduled", "co-located", 2, "deepspeed-2"), Case("scheduled", "six", 4, "crossed")),
    Pair(Case("scheduled", "six", 4, "megatron-tp"), Case("scheduled", "six", 4, "megatron-pp")),
    Pair(Case("scheduled", "six", 4, "megatron-pp"), Case("scheduled", "six", 4, "crossed")),
    Pair(Case("adapters", "co-located", 2, "deepspeed-3"), Case("adapters", "co-located", 4, "tp-3")),
    Pair(Case("corrected", "lag", 2), Case("corrected", "lag", 4, "torch-3")),
    Pair(Case("corrected", "lag-every-3", 4), Case("corrected", "lag-every-3", 2)),
    Pair(Case("samples", "operators-engines", 4), Case("samples", "co-located", 2)),
    Pair(Case("samples", "co-located", 2), Case("samples", "real-7b-searched", 4)),
    same("four", "tight", 2),
    same("four", "co-located", 2, rollout="vllm"),
    same("grpo-shared", "six", 2, rollout="vllm"),
    same("two", "co-located", 2, "torch-3", rollout="torch-tp"),
    Pair(Case("experts-moved", "lag", 2), Case("experts-moved", "lag", 4, "ep")),
    # experts from half of them a rank to shards of all, to other halves and back
    Pair(Case("experts", "co-located", 2, "ep"), Case("experts", "co-located", 2, "ep-apart")),
    Pair(Case("experts", "co-located", 2, "ep-apart"), Case("experts", "co-located", 4, "ep-tp")),
    Pair(Case("experts", "co-located", 4, "ep-tp"), Case("experts", "six", 2)),
    Pair(Case("experts-adapters", "co-located", 2, "ep"), Case("experts-adapters", "co-located", 2, "torch-3")),
]
DRAINED = [
    Pair(Case("corrected", "lag-2", 2), Case("corrected", "lag", 2)),
    Pair(Case("grpo-segments", "lag", 2), Case("grpo-segments", "lag-2", 2)),
]
"""Another lag: rows in flight are trained on first, or the first rounds generate alone."""
"""Another placement, number of ranks, engine, ZeRO stage or rollout: equal within the tolerances of the design."""
_FOUND = {algorithm_of(pair.first.setting) for pair in (*ALIKE, *CHANGED)}
_SHAPES = {name: ("co-located", "halves") if len(roles) > 1 else ("all", "half") for name, roles in ROLES.items()}
CHANGED += [Pair(*(Case(name, shape, 2) for shape in _SHAPES[name])) for name in ROLES if name not in _FOUND]

DEFAULT = [
    *(
        pair
        for pair in ALIKE
        # PPO under a lag is in the pair with corrections, too, and segments are in pairs of groups
        if pair.first == Case("two", "co-located", 2)
        or pair.first.setting in ("corrected", "scheduled")
        or pair.first.setting in ("grpo-segments", "grpo-as-ended-process", "grpo-dynamic-segments")
        or pair.first.setting in ("grpo-episodes-segments", "grpo-program-segments", "remax-episodes")
    ),
    *(
        pair
        for pair in CHANGED
        if pair.first.setting in ("grpo-dynamic", "gspo", "sft")
        or pair.first == Case("grpo", "lag-2-alone", 2)
        or pair.first == Case("experts", "co-located", 2, "ep")
        or pair.second.rollout == "torch-tp"
    ),
    RANDOM,
    ENDED,
]


class Resumptions:
    """Outcomes of pairs, and of the runs that were not interrupted."""

    def __init__(self, assets: Assets, pairs: list[Pair]) -> None:
        self._assets = assets
        self._pairs = pairs
        self._whole: dict[Case, Outcome] = {}
        self._resumed: dict[Pair, Outcome] = {}

    def whole(self, case: Case) -> Outcome:
        if case not in self._whole:
            firsts = list(dict.fromkeys([*(pair.first for pair in self._pairs), case]))
            alike = [each for each in firsts if each.ranks == case.ranks]
            self._whole |= {each: self._outcome(each, f"{each.name}-whole", is_whole=True) for each in alike}
            short = [
                self._outcome(p.first, p.name, steps=NEXT_STEP) for p in self._pairs if p.ends and p.first in alike
            ]
            run_orders([RunOrder(each.plan.spec) for each in [*map(self._whole.__getitem__, alike), *short]])
        return self._whole[case]

    def resumed(self, pair: Pair) -> Outcome:
        if pair not in self._resumed:
            kind = _kind(pair.second)
            alike = [each for each in self._pairs if _kind(each.second) == kind]
            orders = []
            for each in alike:
                outcome = self._outcome(each.second, each.name)
                self._resumed[each] = outcome
                whole = self.whole(each.first)
                if each.ends:
                    (found,) = resume_runs((outcome.plan,), AUTO)
                    orders.append(RunOrder(outcome.plan.spec, found.candidates, found.continues))
                else:
                    orders.append(RunOrder(outcome.plan.spec, (self._copied(whole, outcome),)))
            run_orders(orders)
        return self._resumed[pair]

    def _outcome(self, case: Case, name: str, is_whole: bool = False, steps: int | None = None) -> Outcome:
        spec = self._assets.spec(case)
        names = ("segment_tokens", "max_segments", "groups", "caches", "order", "late_replies")
        segments = {name: getattr(spec.rollout, name) for name in names}
        # rows that keep their caches do so in some batches behind the checkpoint, but not in the first
        every = NEXT_STEP if spec.rollout.caches == "kept" else 1
        further = {
            "name": name,
            "checkpoint": CheckpointSpec(every=every, keep_last=9),
            "steps": steps or max(spec.steps, NEXT_STEP + 1),
            "rollout": RolloutSpec(**segments) if is_whole else spec.rollout,
        }
        return Outcome(case, make_plan(spec.model_copy(update=further)))

    def _copied(self, whole: Outcome, resumed: Outcome) -> Path:
        """Copy the files that the interrupted run would have left; checkpoints of later steps exist, too."""
        shutil.copytree(whole.directory, resumed.directory)
        in_flight = whole.plan.steps_in_flight(NEXT_STEP)
        runs = [each for each in whole.plan.schedule.instructions if isinstance(each, Run)]
        generated = {run.operator.name for run in runs if run.lag < whole.plan.schedule.lag}
        for step in range(NEXT_STEP, whole.plan.spec.steps):
            for file in (resumed.directory / "columns").glob(f"*step{step}-*"):
                if step not in in_flight or file.name.split("-")[1] not in generated:
                    file.unlink()
        if whole.case.setting in ("grpo-episodes-segments", "grpo-program-segments"):
            self._cut_log(resumed.directory, in_flight.stop)
        for role in whole.plan.graph.trained:
            shutil.rmtree(resumed.directory / role)
        return RunDirectory(resumed.directory).checkpoint(NEXT_STEP).path

    @staticmethod
    def _cut_log(directory: Path, step: int) -> None:
        """The run was interrupted in the middle of this step's episodes: some replies to first turns are there."""
        for file in (directory / "episodes").glob("*.jsonl"):
            of_step, lines = int(file.name.removeprefix("step").partition("-")[0]), file.read_text().splitlines(True)
            file.write_text("".join(lines[: len(lines) // 2] if of_step == step else lines * (of_step < step)))


def _kind(case: Case) -> tuple[int, bool]:
    return case.ranks, case.has_vllm


@pytest.fixture(scope="module")
def resumptions(assets: Assets, request: pytest.FixtureRequest) -> Resumptions:
    items = [item for item in request.session.items if isinstance(item, pytest.Function) and hasattr(item, "callspec")]
    selected = [value for item in items for value in item.callspec.params.values() if isinstance(value, Pair)]
    return Resumptions(assets, list(dict.fromkeys(selected)))


def cases(*pairs: Pair) -> list[object]:
    return [pytest.param(p, id=p.name, marks=() if p in DEFAULT else pytest.mark.full) for p in pairs]


@pytest.mark.parametrize("pair", cases(*ALIKE, RANDOM, ENDED))
def test_the_same_placement_goes_on_to_the_last_bit(resumptions: Resumptions, pair: Pair) -> None:
    whole, resumed = resumptions.whole(pair.first), resumptions.resumed(pair)
    assert [_without_times(row) for row in resumed.metrics] == [_without_times(row) for row in whole.metrics]
    assert not whole.plan.spec.rollout.carries_late or sum(row["late_replies"] for row in whole.metrics[NEXT_STEP:]) > 0
    assert resumed.samples == whole.samples
    for role in whole.plan.graph.trained:
        expected, found = whole.weights(role), resumed.weights(role)
        assert expected.keys() == found.keys() and all(torch.equal(expected[n], found[n]) for n in expected), role
    for step in range(whole.plan.spec.steps):
        expected, found = whole.columns(step), resumed.columns(step)
        # a score that is not there yet is NaN
        assert all(torch.equal(expected[n].nan_to_num(), found[n].nan_to_num()) for n in expected), step


@pytest.mark.parametrize("pair", cases(*ALIKE, *CHANGED))
def test_a_resumed_run_equals_the_reference(resumptions: Resumptions, pair: Pair) -> None:
    first = next((d for d in deviations(resumptions.resumed(pair)) if not d.size <= d.limit), None)
    assert first is None, f"{pair.name}: {first}"
    kept = [(sample["step"], sample["rows"], sample["row"]) for sample in resumptions.resumed(pair).samples]
    assert kept == [(s["step"], s["rows"], s["row"]) for s in resumptions.whole(pair.first).samples], pair.name


SERVICE = """
from pathlib import Path
from flexrlhf.environments.base import Turn


class Service:
    def reset(self, row, seed):
        self.turns = 0
        return ""

    def step(self, reply):
        self.turns += 1
        if self.turns == 2 and Path(__file__).with_name("down").exists():
            raise RuntimeError("the service is down")
        return Turn(" ", reward=1.0)
"""
"""An environment that fails in second turns until its service is up."""


def test_a_resumed_row_gets_further_than_its_record(assets: Assets, tmp_path: Path) -> None:
    """A service is up that was down before, so that episodes go on which had ended: none is trained on before the
    reply to its last turn. Late replies are carried, and a row's last turn is in its second step."""
    (tmp_path / "service.py").write_text(SERVICE)
    (tmp_path / "down").touch()
    case = Case("remax-episodes", "co-located", 1)
    raw = yaml.safe_load(assets.spec(case).dump())
    raw["environment"] = {"path": f"{tmp_path}/service.py:Service", "turn_tokens": 3, "max_failures": 1000}
    raw["rollout"] |= {"segment_tokens": 4, "max_segments": 2}
    checkpoint = {"every": NEXT_STEP, "keep_last": 9}
    raw |= {"name": "service", "runs": str(tmp_path), "checkpoint": checkpoint, "steps": NEXT_STEP + 2}
    spec = Spec.parse(raw)
    run_orders([RunOrder(spec)])
    (tmp_path / "down").unlink()
    shutil.rmtree(spec.directory / "columns")
    shutil.rmtree(spec.directory / "actor")
    run_orders([RunOrder(spec, (RunDirectory(spec.directory).checkpoint(NEXT_STEP).path,))])
    outcome, furthest = Outcome(case, make_plan(spec)), 0
    for step in range(NEXT_STEP, spec.steps):
        columns = outcome.columns(step)
        for suffix in ("", ".greedy"):
            is_trained, states = columns["present"].bool(), columns[f"episode{suffix}"]
            assert not (is_trained & (states == EpisodeState.NUMBERS["going on"])).any()
            furthest += int((is_trained & (columns[f"turns{suffix}"] == 3)).sum())
    assert furthest > 0


@pytest.mark.parametrize("pair", [pytest.param(pair, id=pair.name) for pair in DRAINED])
def test_rows_in_flight_are_trained_on_under_another_lag(resumptions: Resumptions, pair: Pair) -> None:
    """By the rule of versions: as they were generated; after them with the newest weights until the new lag holds."""
    before = NEXT_STEP, SHAPES[pair.first.shape]["schedule"]["lag"]
    first = next((d for d in deviations(resumptions.resumed(pair), before) if not d.size <= d.limit), None)
    assert first is None, f"{pair.name}: {first}"


def test_every_row_has_one_outcome_before_and_after_an_interruption(resumptions: Resumptions) -> None:
    """In the file of the run, at each step and in each checkpoint; prompts are taken in the order of the data, and no
    outcome is another one after the interruption."""
    whole, resumed = resumptions.whole(FILTERED.first), resumptions.resumed(FILTERED)
    lines = RunDirectory(resumed.directory).outcomes.read()
    assert lines == RunDirectory(whole.directory).outcomes.read()
    shape = resumed.plan.batch
    prompts_of_steps = [[p for p, number in enumerate(line["prompts"]) if number is not None] for line in lines]
    num_rows = [len(prompts) * shape.samples_per_prompt for prompts in prompts_of_steps]
    assert len(set(num_rows)) > 1, "some steps attempt more often than others"
    total = Counter[str]()
    for step, line in enumerate(lines):
        outcomes = {name: rows_of(text) for name, text in line["outcomes"].items()}
        expected = shape.rows(tuple(prompts_of_steps[step]))
        assert sorted(row for rows in outcomes.values() for row in rows) == [*expected], line
        counts = {name: len(rows) for name, rows in outcomes.items()}
        total.update(counts)
        in_flight = sum(num_rows[step + 1 : step + 2])
        row = resumed.metrics[step]
        assert {name: row[f"rows_{name}"] for name in counts} == counts and row["rows_in_flight"] == in_flight
        found = Manifest.read(RunDirectory(resumed.directory).checkpoint(step + 1).path).progress.rows
        assert found == dict(total) | ({"in_flight": in_flight} if in_flight else {})
        assert sum(found.values()) == sum(num_rows[: step + 2])
    assert total.keys() >= {"trained", "alike", "surplus", "invalid_score"}
    by_attempt = [line["prompts"][attempt :: shape.attempts] for line in lines for attempt in range(shape.attempts)]
    taken = [number for prompts in by_attempt for number in prompts if number is not None]
    data = resumed.plan.spec.data
    examples = read_examples(resumed.plan.spec, AutoTokenizer.from_pretrained(data.tokenizer), data.path)
    assert taken == step_indices(resumed.plan.spec.seed, 0, len(taken), len(examples))
    epochs = [taken[start : start + len(examples)] for start in range(0, len(taken), len(examples))]
    assert all(len(set(epoch)) == len(epoch) for epoch in epochs)


def rows_of(text: str) -> list[int]:
    """Rows of ``0-3,6``."""
    spans = [[int(end) for end in part.split("-")] for part in text.split(",")]
    return [row for span in spans for row in range(span[0], span[-1] + 1)]


def _without_times(row: dict[str, float]) -> dict[str, float]:
    return {name: value for name, value in row.items() if name not in METRICS.times}


@pytest.mark.parametrize(
    "case",
    [
        pytest.param(Case("two", "co-located", 2), id="whole"),
        pytest.param(Case("experts", "co-located", 2, "ep"), id="experts"),
    ],
)
def test_an_export_is_the_model_that_the_run_saved(resumptions: Resumptions, case: Case, tmp_path: Path) -> None:
    whole = resumptions.whole(case)
    for role in whole.plan.graph.trained:
        exported = CliRunner().invoke(
            app, ["export", str(whole.directory), "-o", str(tmp_path / role), "--model", role]
        )
        assert exported.exit_code == 0, exported.output
        expected, found = whole.weights(role), load_file(tmp_path / role / "model.safetensors")
        assert expected.keys() == found.keys() and all(torch.equal(expected[n], found[n]) for n in expected), role
    actor = AutoModelForCausalLM.from_pretrained(tmp_path / "actor").state_dict()
    trained = TrainedModel.find(whole.directory, "actor")
    assert actor.keys() == {*trained.names}
    assert all(torch.equal(actor[name], trained.tensor(name)) for name in trained.names)


@pytest.mark.full
@pytest.mark.parametrize(
    "case",
    [
        pytest.param(Case("adapters", "co-located", 2, "deepspeed-1"), id="linear"),
        pytest.param(Case("experts-adapters", "co-located", 2, "ep"), id="experts"),
    ],
)
def test_an_export_merges_adapters(resumptions: Resumptions, case: Case, tmp_path: Path) -> None:
    """peft reads the adapters that are exported alone, and merges them to the same weights."""
    whole = resumptions.whole(case)
    for name, option in (("adapters", []), ("merged", ["--merge-adapters"])):
        exported = CliRunner().invoke(app, ["export", str(whole.directory), "-o", str(tmp_path / name), *option])
        assert exported.exit_code == 0, exported.output
    base = AutoModelForCausalLM.from_pretrained(whole.plan.model("actor").path)
    by_peft = PeftModel.from_pretrained(base, tmp_path / "adapters").merge_and_unload()
    ours = AutoModelForCausalLM.from_pretrained(tmp_path / "merged")
    for (name, expected), found in zip(by_peft.state_dict().items(), ours.state_dict().values(), strict=True):
        torch.testing.assert_close(found, expected, msg=name)
    without = shutil.copytree(whole.directory, tmp_path / "run", ignore=shutil.ignore_patterns("checkpoints"))
    exported = CliRunner().invoke(app, ["export", str(without), "-o", str(tmp_path / "again"), "--merge-adapters"])
    assert exported.exit_code == 0, exported.output
    for file in (tmp_path / "merged").iterdir():
        assert file.read_bytes() == (tmp_path / "again" / file.name).read_bytes(), file.name


@pytest.mark.full
def test_a_copy_that_waits_in_host_memory_is_in_the_checkpoint(tmp_path: Path) -> None:
    """Two nodes; the second one's models do not fit together: a checkpoint finds a shadow in host memory."""
    write_corpus(tmp_path / CORPUS)
    small = {"model_type": "llama", "vocab_size": 4096, "hidden_size": 32, "intermediate_size": 64}
    small |= {"num_hidden_layers": 2, "num_attention_heads": 2}
    large = small | {"hidden_size": 128, "intermediate_size": 256}
    raw = {
        "name": "offloaded",
        "algorithm": {"name": "ppo", "prompts_per_step": 8},
        "models": {
            "actor": {"init": small},
            "ref": {"init": small},
            "critic": {"init": large},
            "reward": {"init": large},
        },
        "data": {"path": f"{CORPUS}/prompts.jsonl", "tokenizer": f"{CORPUS}/tokenizer", "max_response_tokens": 8},
        "steps": 3,
        "placement": [0.5] * 6,
        "schedule": {"lag": 1},
        "cluster": {"device": "cpu", "nodes": [{"devices": 1, "memory_gb": 50}, {"devices": 1, "memory_gb": 0.0068}]},
        "checkpoint": {"every": 1},
    }
    config = tmp_path / "offloaded.yaml"
    config.write_text(yaml.safe_dump(raw))
    offloaded, found = set[str](), set[str]()
    for instruction in make_plan(Spec.parse(raw)).schedule.for_rank(1):
        match instruction:
            case Offload():
                offloaded.add(instruction.model)
            case Reload():
                offloaded.discard(instruction.model)
            case Checkpoint():
                found |= offloaded & set(instruction.models)
    assert found
    checkpoint = RunDirectory(tmp_path / "runs" / "offloaded").checkpoint(NEXT_STEP).path
    for options in ([], ["--resume", str(checkpoint)]):
        process = start(["run", str(config), "--force", *options], tmp_path)
        out, _ = process.communicate(timeout=200)
        assert process.returncode == 0, out[-3000:]
