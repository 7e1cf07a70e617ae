"""docs/troubleshooting.md: each heading is a message of the package, produced as the page describes."""

from __future__ import annotations

import json
import re
import signal
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import yaml
from small_runs import PPO, TINY, plan_of
from test_checkpoints import written_checkpoint
from torch.distributed.elastic.multiprocessing.errors import ProcessFailure
from typer.testing import CliRunner

from flexrlhf.cli import app
from flexrlhf.comm.progress import RankProgress
from flexrlhf.comm.reduce import RankGroup
from flexrlhf.comm.world import World
from flexrlhf.config.proxies import Address
from flexrlhf.data.quickstart import CORPUS, prepare_corpus
from flexrlhf.engines.vllm.restarts import Restarts, RolloutProcessError
from flexrlhf.errors import RunStopped, UserError
from flexrlhf.launch.failures import FailureReporter
from flexrlhf.runs.flight_log import FlightLog
from flexrlhf.runs.run_directory import RunDirectory
from flexrlhf.strategies.instructions import Run
from flexrlhf.timeline import Span
from flexrlhf.trainer.controllers import Controllers
from flexrlhf.trainer.operator_guards import FiniteGuard
from flexrlhf.trainer.step_warnings import StepWarnings

PAGE = Path(__file__).parents[2] / "docs" / "troubleshooting.md"
HEADINGS = re.findall(r"^### `(.+)`$", PAGE.read_text(), re.MULTILINE)
FILES = f"path: {CORPUS}/prompts.jsonl, tokenizer: {CORPUS}/tokenizer"
DATA = f"data={{{FILES}, max_prompt_tokens: 16, max_response_tokens: 20}}"
PAIR_LENGTHS = {"max_prompt_tokens": 16, "max_response_tokens": 20}
LARGE = [f"models.{role}.init.vocab_size=386" for role in ("actor", "reward")]


def pattern(heading: str) -> str:
    """A regular expression of a heading: words in capitals and ``...`` stand for any text."""
    words = re.split(r"(\b[A-Z]{2,}\b|\.\.\.)", heading)
    return "".join(".+?" if number % 2 else re.escape(word) for number, word in enumerate(words))


@dataclass
class Reader:
    """Someone who types commands and starts runs in a directory."""

    capsys: pytest.CaptureFixture[str]

    def types(self, *words: str) -> str:
        """The last line on stderr, without the program's name; the command may succeed with a warning."""
        result = CliRunner().invoke(app, list(words))
        assert result.exit_code in (0, 2), result.output
        return result.stderr.strip().splitlines()[-1].removeprefix("flexrlhf: ")

    def plans(self, *words: str) -> str:
        return self.types("plan", "a.yaml", *words)

    def checks(self, *settings: str) -> str:
        prepare_corpus()
        pairs = [word for setting in (DATA, *LARGE, *settings) for word in ("--set", setting)]
        return self.types("run", "a.yaml", "--dry-run", *pairs)

    def observes(self, *rows: Mapping[str, float]) -> str:
        warnings = StepWarnings("test", 16)
        for step, row in enumerate(rows):
            warnings.observe(step, row)
        return self.capsys.readouterr().err.strip().removeprefix("flexrlhf: ")


def sentence(kind: type[Exception], call: Callable[[], Any]) -> str:
    with pytest.raises(kind) as caught:
        call()
    return str(caught.value)


def rows_of_other_names(reader: Reader) -> str:
    Path("q.jsonl").write_text(json.dumps({"first": "hello", "second": "world"}) + "\n")
    return reader.checks("data.path=q.jsonl", "data.form=prompt")


def rows_without_pairs(reader: Reader) -> str:
    Path("q.jsonl").write_text(json.dumps({"messages": [{"role": "user", "content": "hello"}], "reference": "x"}))
    dpo = {"name": "dpo", "algorithm": {"name": "dpo"}, "models": {"actor": PPO["models"]["actor"]}, "steps": 1}
    Path("dpo.yaml").write_text(yaml.safe_dump({**dpo, "data": {"path": "q.jsonl", **PAIR_LENGTHS}}))
    return reader.types("plan", "dpo.yaml")


def model_without_a_tokenizer(reader: Reader) -> str:
    Path("models/own").mkdir()
    Path("models/own/config.json").write_text(json.dumps(TINY))
    return reader.checks("data.tokenizer=null", "models.actor={path: models/own}")


def socks_proxy(_: Reader) -> str:
    with pytest.MonkeyPatch.context() as environment:
        for name in ("no_proxy", "NO_PROXY"):
            environment.delenv(name, raising=False)
        environment.setenv("https_proxy", "socks5://127.0.0.1:9")
        return sentence(UserError, lambda: Address("https://hub.invalid").proxy())


def empty_prompt(reader: Reader) -> str:
    Path("q.jsonl").write_text(json.dumps({"prompt": "", "text": "hello"}))
    return reader.checks("data.path=q.jsonl")


def bad_rows(reader: Reader) -> str:
    Path("q.jsonl").write_text('{"prompt": "come"}\n{"prompt": 3}')
    return reader.checks("data.path=q.jsonl", "data.bad_rows=drop")


def dropped_prompts(reader: Reader) -> str:
    rows = [{"prompt": " ".join(["come"] * (1 + 20 * (number % 3 == 0)))} for number in range(30)]
    Path("q.jsonl").write_text("\n".join(map(json.dumps, rows)))
    return reader.checks("data.path=q.jsonl", "data.long_prompts=drop")


def changed_seed(_: Reader) -> str:
    from flexrlhf.runs.resume import resume_runs

    written_checkpoint(plan_of([1, 1, 1, 1], 2, "steps=9"), 4)
    return sentence(UserError, lambda: resume_runs((plan_of([1, 1, 1, 1], 2, "steps=9", "seed=5"),), "auto"))


def run_without_checkpoint(reader: Reader) -> str:
    RunDirectory(plan_of().spec.directory).prepare(plan_of().spec, "", continues=False).close()
    return reader.types("run", "a.yaml", "--resume", "runs/test", "--dry-run")


def used_directory(_: Reader) -> str:
    plan = plan_of()
    with RunDirectory(plan.spec.directory).prepare(plan.spec, "", continues=False):
        return sentence(UserError, lambda: RunDirectory(plan.spec.directory).prepare(plan.spec, "", continues=False))


def unfinished(_: Reader) -> str:
    Path("runs/test").mkdir(parents=True)
    RunDirectory(Path("runs/test")).write_status("running", 0, 3)
    return RunDirectory(Path("runs/test")).moved_text() or ""


def killed_rank(_: Reader) -> str:
    log = FlightLog(Path(), {"rank": 1}, keep_steps=2)
    log.begin(Span(1, "move", "scores", 1, None, 12.0))
    reporter = FailureReporter(plan_of([1, 1, 0.5, 0.5], 2), [Path()], (0, 1))
    return reporter.report({1: ProcessFailure(1, 9, -signal.SIGKILL, "none")})[0].sentence


def failing_rollout_process(reader: Reader) -> str:
    restarts = Restarts(2, rank=0)
    error = RolloutProcessError("actor.rollout: the vLLM process 71 ended (killed by SIGKILL)")
    for _ in range(2):
        restarts.add(error)
    return sentence(RunStopped, lambda: restarts.add(error))


def late_rank(_: Reader) -> str:
    store = dist.HashStore()
    worlds = [World(rank, 3, store, torch.device("cpu"), "gloo", f"host{rank}") for rank in range(3)]
    first, *others = [RankProgress(world, "run", {0: "actor", 1: "reward", 2: "critic"}, 5) for world in worlds]
    first.report(7, "step 2, move b")
    for number, other in zip((5, 7), others, strict=True):
        other.report(number, "step 2, run a")

    def wait() -> None:
        with first.deadline((0, 1, 2)):
            raise RuntimeError("Timed out waiting 5000ms")

    return sentence(RunStopped, wait)


def not_finite(_: Reader) -> str:
    guard = FiniteGuard("stop", dist.HashStore(), 0)
    columns = {"values": torch.tensor([[0.0, torch.nan]])}
    alone = RankGroup(None, (0,), lambda work, ranks: None)
    return sentence(
        RunStopped,
        lambda: guard.check_columns("step 3, values on critic", 3, columns, torch.tensor([7]), alone),
    )


def no_scores(_: Reader) -> str:
    plan = plan_of()
    states = Controllers(plan)
    runs = [
        each
        for each in plan.schedule.instructions
        if isinstance(each, Run) and each.operator.name in states.states and "reward" not in each.operator.name
    ]

    def steps() -> None:
        for step in range(3):
            for run in runs:
                states.add(run, step, {"reward": (0.0, 0.0, 0.0)})

    return sentence(RunStopped, steps)


ALIKE = {"reward_mean": 1.0, "reward_std": 0.0}
MESSAGES: dict[str, Callable[[Reader], str]] = {
    "no config": lambda reader: reader.plans("zzz.yaml"),
    "no vector": lambda reader: reader.plans("--placement-ratio", "1", "1", "0.5"),
    "no key": lambda reader: reader.plans("--set", "models.actor.optimiser={name: sgd}"),
    "short vector": lambda reader: reader.plans("--placement-ratio", "1,1,1"),
    "no whole devices": lambda reader: reader.plans("--placement-ratio", "1,1,0.3,1", "--devices", "4"),
    "no shadows": lambda reader: reader.plans("--set", "schedule.lag=1"),
    "top_p": lambda reader: reader.plans("--set", "algorithm.top_p=0.9"),
    "stage": lambda reader: reader.plans("--set", "models.actor.zero=1"),
    "no such setting of an engine": lambda reader: reader.plans("--set", "rollout.tp=2"),
    "no data": lambda reader: reader.checks("data.path=x.jsonl"),
    "no model": lambda reader: reader.plans("--actor-model-path", "gpt"),
    "no tokenizer": lambda reader: reader.checks("data.tokenizer=null"),
    "model without a tokenizer": model_without_a_tokenizer,
    "small vocabulary": lambda reader: reader.checks("models.reward.init.vocab_size=32"),
    "few positions": lambda reader: reader.checks("models.actor.init.max_position_embeddings=16"),
    "long prompts": lambda reader: reader.checks("data.max_prompt_tokens=2"),
    "other columns": rows_of_other_names,
    "no pairs": rows_without_pairs,
    "empty prompt": empty_prompt,
    "no package": lambda reader: reader.checks("models.actor.liger=true"),
    "no function": lambda reader: reader.checks("models.reward=null", "reward={function: scores.py:score}"),
    "no variable": lambda reader: reader.checks("models.reward=null", "reward={url: 'http://u:${NOT_SET}@h'}"),
    "no socks": socks_proxy,
    "no memory": lambda reader: reader.plans("--set", "cluster={nodes: [{devices: 1, class: mine, memory_gb: 1e-5}]}"),
    "no figures": lambda reader: reader.types(
        "simulate", "a.yaml", "--set", "cluster={nodes: [{devices: 1, class: mine, memory_gb: 1}]}"
    ),
    "nowhere": lambda reader: reader.types("run", "a.yaml", "--resume", "yes", "--dry-run"),
    "no checkpoint of a run": run_without_checkpoint,
    "no checkpoint": lambda reader: reader.types("run", "a.yaml", "--resume", "models", "--dry-run"),
    "changed setting": changed_seed,
    "used directory": used_directory,
    "no endpoint": lambda reader: reader.types("run", "a.yaml", "--nnodes", "2"),
    "killed": killed_rank,
    "rollout process": failing_rollout_process,
    "late": late_rank,
    "not finite": not_finite,
    "no scores": no_scores,
    "large kl": lambda reader: reader.observes({"kl_token": 2.5}),
    "spike": lambda reader: reader.observes(*[{"value_loss": 1.0}] * 9, {"value_loss": 99.0}),
    "equal scores": lambda reader: reader.observes(ALIKE),
    "truncated": lambda reader: reader.observes({"truncated": 0.75}),
    "dropped prompts": dropped_prompts,
    "bad rows": bad_rows,
    "unfinished run": unfinished,
}
"""What produces a message, under a name for it."""


@pytest.fixture
def reader(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Reader:
    monkeypatch.chdir(tmp_path)
    Path("a.yaml").write_text(yaml.safe_dump(PPO))
    for name in ("b.jsonl", "own.py"):
        Path(name).write_text("")
    Path("models").mkdir()
    return Reader(capsys)


@pytest.mark.parametrize("name", MESSAGES)
def test_a_message_has_its_heading(name: str, reader: Reader) -> None:
    """The only one that fits."""
    message = MESSAGES[name](reader)
    assert [heading for heading in HEADINGS if re.match(pattern(heading), message)] == [HEADING_OF[name]], message


def test_every_heading_has_a_message() -> None:
    assert len(HEADINGS) == len(set(HEADINGS)) == len(MESSAGES) > 30


HEADING_OF = dict(zip(MESSAGES, HEADINGS, strict=False))
"""Headings in the order of the page and of MESSAGES."""


def test_the_comparison_has_teeth() -> None:
    heading = "config FILE: no such file; DIRECTORY has NAMES"
    assert re.match(pattern(heading), "config a.yaml: no such file; runs has b.yaml")
    assert not re.match(pattern(heading), "config a.yaml: missing; runs has b.yaml")
