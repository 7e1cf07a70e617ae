"""Sources of rewards that fail during a run lose only their responses: a service that is slow, fails or replies with
nonsense, a function that hangs or crashes; or they end the run with a sentence, if the config says so."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml
from commands import children, is_alive, read_until, start
from faulty_service import FaultyService
from safetensors.torch import load_file
from torch import Tensor
from toys import SCORES, SHAPE, WORDS

from flexrlhf.data.quickstart.corpus import build_tokenizer

Raw = dict[str, Any]
RANKS, PROMPTS, SAMPLES = 2, 4, 4
ROWS = PROMPTS * SAMPLES
FAULTS = ("slow", "too slow", "500", "nan", "infinite", "count", "none")
"""Faults of the service, step by step. Each rank sends one request a step, since it does not retry."""
LOST = {"too slow": 1.0, "500": 1.0, "count": 1.0}
"""Fraction of responses without a score."""
INVALID = {**LOST, "nan": RANKS / ROWS, "infinite": RANKS / ROWS}
"""Fraction of responses whose score is not finite."""
GRPO = {"name": "grpo", "kl": None, "prompts_per_step": PROMPTS, "samples_per_prompt": SAMPLES}
PLAIN_STEPS = 2
SECRET = "FLEXRLHF_REWARD_SECRET"
"""Variable of a kind that no library reads, so that the factory of the tests need not load them anew."""
ACTIONS = ("fine", "hang", "fine", "fine", "fine", "crash", "fine", "nan")
"""To the function, row by row. Two steps take each row once; a call scores one prompt."""


@dataclass(frozen=True)
class Left:
    """Results of the command."""

    directory: Path
    output: str
    status: int
    orphans: list[int]
    plain: FaultyService
    served: str
    served_status: int

    def metrics(self, name: str) -> list[Raw]:
        return [json.loads(line) for line in (self.directory / name / "metrics.jsonl").read_text().splitlines()]


@pytest.fixture(scope="module")
def left(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Left]:
    """All runs in one command; the last one is to end it."""
    directory = tmp_path_factory.mktemp("rewards")
    build_tokenizer([" ".join(WORDS)], directory / "tokenizer")
    rows = [{"prompt": word, "do": action} for word, action in zip(WORDS, ACTIONS, strict=False)]
    (directory / "data.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    with ExitStack() as stack:
        patch = stack.enter_context(pytest.MonkeyPatch.context())
        patch.setenv(SECRET, "a secret")
        server = start(["serve-reward", f"{SCORES}:lettered", "--port", "0", "--secret", SECRET], directory)
        stack.callback(server.kill)
        begin = read_until(server, "serves ")
        bearer = {"Authorization": f"Bearer ${{{SECRET}}}"}
        faulty = stack.enter_context(FaultyService(lambda number: FAULTS[number // RANKS]))
        plain = stack.enter_context(FaultyService())
        service = {"url": faulty.url, "retries": 0, "timeout_seconds": 1.5}
        function = {"function": f"{SCORES}:as_the_rows_say", "batch_size": SAMPLES, "timeout_seconds": 2}
        raws = [
            run(directory, "service", service, steps=len(FAULTS)),
            run(directory, "tensor-parallel", {"url": plain.url, "batch_size": 3}, tp=2),
            run(directory, "served", {"url": begin.split(" at ")[1].split()[0], "headers": bearer}, steps=1),
            run(directory, "function", function),
            run(directory, "stopped", function, invalid_scores="stop"),
        ]
        paths = [directory / f"{raw['name']}.yaml" for raw in raws]
        for path, raw in zip(paths, raws, strict=True):
            path.write_text(yaml.safe_dump(raw))
        process = start(["run", *map(str, paths)], directory)
        head = read_until(process, "function  step 1/")
        ranks = children(process)
        tail, _ = process.communicate(timeout=100)
        server.terminate()
        rest, _ = server.communicate(timeout=30)
        orphans = [pid for pid in ranks if is_alive(pid)]
        yield Left(directory / "runs", head + tail, process.returncode, orphans, plain, begin + rest, server.returncode)


def run(directory: Path, name: str, reward: Raw, steps: int = PLAIN_STEPS, tp: int = 1, **algorithm: Any) -> Raw:
    return {
        "name": name,
        "algorithm": GRPO | algorithm,
        "models": {"actor": {"init": SHAPE, "tp": tp, "optimizer": {"learning_rate": 1e-3}}},
        "reward": reward,
        "data": {
            **{"path": str(directory / "data.jsonl"), "tokenizer": str(directory / "tokenizer")},
            **{"max_prompt_tokens": 2, "max_response_tokens": 2},
        },
        "cluster": {"devices": RANKS, "device": "cpu"},
        "steps": steps,
        "runs": str(directory / "runs"),
        "timeout_seconds": 60,
    }


def weights_of(directory: Path) -> dict[str, Tensor]:
    weights: dict[str, Tensor] = load_file(directory / "actor" / "model.safetensors")
    return weights


def test_a_faulty_service_costs_the_responses_of_failed_requests(left: Left) -> None:
    rows = left.metrics("service")
    assert [row["score_failed"] for row in rows] == [LOST.get(fault, 0.0) for fault in FAULTS]
    assert [row["score_invalid"] for row in rows] == [INVALID.get(fault, 0.0) for fault in FAULTS]
    assert all(row.get("rows_invalid_score", 0) == row["score_invalid"] * ROWS for row in rows)
    # a step without a score has no mean reward
    assert [row.get("reward_mean") for row in rows] == [None if fault in LOST else 1.0 for fault in FAULTS]


@pytest.mark.parametrize("name", ["service", "function"])
def test_no_fault_reaches_the_weights(left: Left, name: str) -> None:
    assert all(weights.isfinite().all() for weights in weights_of(left.directory / name).values())
    assert all(row["actor_grad_norm"] == 0 for row in left.metrics(name)), "all scores that count are alike"


def test_ranks_with_the_same_rows_ask_once(left: Left) -> None:
    """Two ranks of one replica; three responses a request."""
    sizes = [len(texts) for texts in left.plain.texts]
    assert sum(sizes) == PLAIN_STEPS * ROWS and max(sizes) == 3
    assert all(row["score_failed"] == 0 and row["reward_mean"] == 1 for row in left.metrics("tensor-parallel"))


def test_a_server_of_our_own_scores_a_step(left: Left) -> None:
    """A request of each rank, whose mean is in its line; it ends without a traceback."""
    (row,) = left.metrics("served")
    lines = re.findall(r"^\d\d:\d\d:\d\d 127\.0\.0\.1: 8 responses in .* s, mean (.*)$", left.served, re.MULTILINE)
    assert len(lines) == RANKS and row["score_failed"] == 0
    assert row["reward_mean"] == pytest.approx(sum(map(float, lines)) / RANKS, rel=1e-3) and row["reward_std"] > 0
    last = left.served.strip().splitlines()[-1]
    assert (left.served_status, last) == (0, f"ended after {RANKS} requests"), left.served


def test_a_function_that_hangs_or_crashes_costs_its_calls(left: Left) -> None:
    rows = left.metrics("function")
    assert sum(row["score_failed"] for row in rows) * ROWS == (ACTIONS.count("hang") + ACTIONS.count("crash")) * SAMPLES
    assert sum(row["score_invalid"] for row in rows) * ROWS == (len(ACTIONS) - ACTIONS.count("fine")) * SAMPLES
    assert all(row.get("rows_invalid_score", 0) == row["score_invalid"] * ROWS for row in rows)
    assert all(row["reward_mean"] == 1 for row in rows)
    assert "took longer than 2 s" in left.output and "ended its process, exit code 7" in left.output


def test_a_run_stops_with_a_sentence_if_the_config_says_so(left: Left) -> None:
    last = left.output.strip().splitlines()[-1]
    assert left.status == 1 and not left.orphans
    assert last.startswith("flexrlhf: rank ") and "responses have a score that is not a finite number (rows " in last
    assert "algorithm.invalid_scores: mask would go on without them; record: " in last, last
