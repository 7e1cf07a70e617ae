"""Steps of PPO and GRPO: log-probs by a forward pass of their own, and reused from a pass that computes them anyway."""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any
from unittest.mock import patch

import yaml

from benchmarks.gpu.workload import WORDS
from benchmarks.peers.speed.workloads import SMALL
from benchmarks.saved_work.costs import Cost, SavedWork, count_flops
from flexrlhf import ExecutionEngine
from flexrlhf.data.quickstart.corpus import build_tokenizer
from flexrlhf.operators.columns import Lengths

WITH, WITHOUT = "recompute", "auto"
"""Values of ``rollout.logprobs``: with a forward pass of the old policy, and without it."""


@dataclass(frozen=True)
class StepRuns:
    """Runs of one algorithm on one rank in this process, with one mini-batch and one epoch.

    algorithm:  ppo or grpo
    directory:  of everything that runs read and write
    prompts:    tokens of each prompt of a step
    lengths:    most tokens of prompts and responses
    samples:    of each prompt
    """

    algorithm: str
    directory: Path
    prompts: Sequence[int]
    lengths: Lengths
    samples: int = 1

    def saved(self, steps: int, rounds: int) -> SavedWork:
        """Measure runs of ``steps`` in turns, the first step of each a warm-up. FLOPs are those of a second step."""
        self._write()
        flops = [self._second_step(way) for way in (WITH, WITHOUT)]
        seconds: list[list[float]] = [[], []]
        for _ in range(rounds):
            for way, found in zip((WITH, WITHOUT), seconds, strict=True):
                found += self._run(way, 1 + steps)[1:]
        costs = [Cost(each, median(found)) for each, found in zip(flops, seconds, strict=True)]
        return SavedWork("log-probs", f"{self.algorithm.upper()}, step", *costs)

    def _second_step(self, way: str) -> float:
        """Return the FLOPs of a step after the first, which compares log-probs with generation's."""
        one, two = (count_flops(partial(self._run, way, steps)) for steps in (1, 2))
        return two - one

    def _run(self, way: str, steps: int) -> list[float]:
        """Train and return the time of each step."""
        settings = (f"rollout.logprobs={way}", f"steps={steps}")
        with (self.directory / "log").open("a") as log, redirect_stdout(log), redirect_stderr(log), _as_rank():
            run = ExecutionEngine(self._config, overrides=settings)
            assert bool(run.plan.graph.left_out) == (way == WITHOUT), f"the plan of {way} leaves out something else"
            found = run()
        return [step["seconds"] for step in found.metrics]

    @property
    def _config(self) -> Path:
        return self.directory / f"{self.algorithm}.yaml"

    def _write(self) -> None:
        """Write a tokenizer with one token a word, prompts, and the YAML."""
        build_tokenizer([" ".join(WORDS)], self.directory / "tokenizer")
        # one more token than words: bos
        prompts = [" ".join(WORDS[place % len(WORDS)] for place in range(count - 1)) for count in self.prompts]
        lines = [json.dumps({"prompt": prompt}) for prompt in prompts]
        (self.directory / f"{self.algorithm}.jsonl").write_text("\n".join(lines) + "\n")
        self._config.write_text(yaml.safe_dump(self._spec()))

    def _spec(self) -> dict[str, Any]:
        spec: dict[str, Any] = {
            "name": self.algorithm,
            "algorithm": {"name": self.algorithm, "prompts_per_step": len(self.prompts)},
            "models": {role: {"init": dict(SMALL)} for role in ("actor", "ref", "reward", "critic")},
            "data": {
                "path": str(self.directory / f"{self.algorithm}.jsonl"),
                "tokenizer": str(self.directory / "tokenizer"),
                "max_prompt_tokens": self.lengths.prompt,
                "max_response_tokens": self.lengths.response,
            },
            "cluster": {"devices": 1, "device": "cpu"},
            "checkpoint": {"on_signal": False},
            "runs": str(self.directory),
        }
        if self.samples > 1:
            spec["algorithm"]["samples_per_prompt"] = self.samples
            spec["models"] = {role: {"init": dict(SMALL)} for role in ("actor", "ref")}
            spec["reward"] = {"rule": "length", "target_tokens": self.lengths.response}
        return spec


@contextmanager
def _as_rank() -> Iterator[None]:
    """Make this process the only rank of a job, as launchers do, so that its passes can be counted here."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    rank = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1", "OMP_NUM_THREADS": "1"}
    with patch.dict(os.environ, rank | {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}):
        yield
