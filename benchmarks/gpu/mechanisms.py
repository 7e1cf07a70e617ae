"""Mechanisms of several GPUs, one run each, which must have the results of the plain run of the same settings."""

from __future__ import annotations

import json
import os
import re
import shutil
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

from benchmarks.gpu.bases import BASES, SIX, settings_of, write_base
from benchmarks.gpu.clock import OutOfTime, TimeBudget, Unfinished
from benchmarks.gpu.job import Job
from benchmarks.gpu.results import LeftOut, Row


@dataclass(frozen=True)
class Mechanism:
    """Settings that change how a run computes, and no result.

    name:      in the table
    ranks:     that it has
    settings:  in addition to the base's
    base:      run whose results it must have
    library:   that it needs; empty: none
    """

    name: str
    ranks: int
    settings: tuple[str, ...] = ()
    base: str = "grpo"
    library: str = ""


def _all(**settings: object) -> tuple[str, ...]:
    return tuple(f"models.all.{key}={value}" for key, value in settings.items())


def _vllm(name: str, tp: int = 2, base: str = "grpo", further: tuple[str, ...] = (), **settings: object) -> Mechanism:
    off = {"tp": tp, "cuda_graphs": "false", "sleep": "false", "parity.every": 1, **settings}
    written = ("rollout.engine=vllm", *(f"rollout.{key}={value}" for key, value in off.items()), *further)
    return Mechanism(name, max(2, tp), written, base, "vllm")


def _six(name: str, base: str, *settings: str) -> Mechanism:
    return Mechanism(name, 4, (SIX, *settings), base)


_MEGATRON_ON_CPU = Path(__file__).parents[2] / "tests" / "megatron_on_cpu"
ON_CPUS = {"PYTHONPATH": os.pathsep.join(filter(None, (str(_MEGATRON_ON_CPU), os.environ.get("PYTHONPATH"))))}
"""Variables with which Megatron runs on CPUs."""
_MEGATRON = (*_all(engine="megatron", tp=2, pp=2), "rollout.engine=torch")
MECHANISMS: dict[str, tuple[Mechanism, ...]] = {
    "shards": (
        Mechanism("replicas", 2),
        Mechanism("zero 2", 2, _all(zero=2)),
        Mechanism("zero 3", 2, _all(zero=3)),
        Mechanism("zero 3 in bfloat16", 2, _all(zero=3), "grpo-bfloat16"),
    ),
    "splits": (
        Mechanism("tp 2", 2, _all(tp=2)),
        Mechanism("cp 2, ulysses", 2, _all(cp=2, context_parallel="ulysses")),
        Mechanism("cp 2, ring", 2, _all(cp=2, context_parallel="ring")),
        Mechanism("cp 4, ulysses", 4, _all(cp=4, context_parallel="ulysses")),
        Mechanism("cp 4, ring, zero 3", 4, _all(cp=4, context_parallel="ring", zero=3)),
    ),
    "experts": (
        Mechanism("ep 2", 2, _all(ep=2, zero=3), "grpo-experts"),
        Mechanism("ep 8", 8, _all(ep=8, zero=3), "grpo-experts"),
        Mechanism(
            "shard: node, two of two", 4, ("cluster.nodes=[{count: 2, devices: 2}]", *_all(zero=3, shard="node"))
        ),
    ),
    "vllm-tp": (
        *(_vllm(f"vLLM, tp {tp}, no graphs, no sleep", tp) for tp in (1, 2)),
        _vllm("vLLM, tp 4, no graphs, no sleep", 4),
    ),
    "vllm-graphs": (
        _vllm("vLLM, tp 2, sleep", sleep="true"),
        _vllm("vLLM, tp 2, graphs", cuda_graphs="true"),
        _vllm("vLLM, tp 2, graphs and sleep", cuda_graphs="true", sleep="true"),
    ),
    "vllm-child": (
        _vllm("vLLM as a child", 1, further=("placement=[0.5,0.5,0.5]",), process="child", cuda_graphs="true"),
        _vllm("vLLM, tp 2, adapters separate", base="grpo-adapters", adapters="separate", sleep="true"),
    ),
    "six-models": (
        _six("six models, 2 chunks", "ppo", "schedule.num_chunks=2"),
        _six("six models, segments", "ppo-segments", "schedule.num_chunks=2"),
        _six("six models, lag 1, 2 chunks, syncs in the background", "ppo-lag", "schedule.num_chunks=2"),
    ),
    "engines": (
        Mechanism("DeepSpeed, zero 2", 2, _all(engine="deepspeed", zero=2), library="deepspeed"),
        Mechanism("DeepSpeed, zero 3", 2, _all(engine="deepspeed", zero=3), library="deepspeed"),
        Mechanism("Megatron, tp 2, pp 2", 4, _MEGATRON, library="megatron.core"),
    ),
    "agent": (Mechanism("agent, two turns", 2, _all(zero=3), "grpo-agent"),),
}
"""Mechanisms by stage, in the order in which they are likely to fail."""


def run_mechanisms(stage: str, job: Job, budget: TimeBudget) -> Iterator[Row | LeftOut]:
    """Run the mechanisms of a stage; one that fails does not end the stage."""
    for each in MECHANISMS[stage]:
        if reason := job.lacks(each.ranks) or _missing(each.library):
            yield LeftOut(stage, each.name, reason)
            continue
        settings = (f"cluster.devices={each.ranks}", *each.settings)
        yield compared(stage, each.name, each.base, settings, job, budget)


def _missing(library: str) -> str:
    top = library.partition(".")[0]
    return f"{library} is not installed" if top and (find_spec(top) is None or find_spec(library) is None) else ""


def run_directory(name: str, job: Job) -> Path:
    """Return the directory of the run of a mechanism."""
    return job.directory / "several" / "runs" / re.sub(r"[^\w]+", "-", name)


def compared(
    stage: str, name: str, base: str, settings: tuple[str, ...], job: Job, budget: TimeBudget, fresh: bool = True
) -> Row | LeftOut:
    """Run a base with further settings and return how it compares with the plain run, which the first caller makes.

    fresh:  whether it runs even if its directory has a finished run
    """
    run = run_directory(name, job)
    if fresh:
        shutil.rmtree(run, ignore_errors=True)
    sides = {
        "--set": settings_of(base, job),
        "--plain-set": ("cluster.devices=1", *BASES[base].plain),
        "--against-set": settings,
    }
    words = [word for option, values in sides.items() for value in values for word in (option, value)]
    command = [sys.executable, "-m", "benchmarks.gpu.against", str(run.parent), str(write_base(base, job)), run.name]
    try:
        printed = budget.run([*command, *words], ON_CPUS if job.device == "cpu" else None)
    except OutOfTime as error:
        _keep(run, error.printed)
        return LeftOut(stage, name, str(error))
    except Unfinished as error:
        _keep(run, error.printed)
        return Row(stage, name, f"failed: {error}", {"failed": 1})
    _keep(run, printed)
    return _row(stage, name, printed)


def _row(stage: str, name: str, printed: str) -> Row:
    found = json.loads(printed.splitlines()[-1])
    part = found.pop("part")
    text = f"they part: {part}" if part else "the same numbers"
    text += f"; columns {found['numbers']:.1e} apart (limit {found['limit']:g}), weights {found['weights']:.1e}"
    text += f"{', after a tie' if found['tie'] else ''}; {found['seconds']:.2f} s a step"
    return Row(stage, name, text, {**found, "failed": int(bool(part))})


def _keep(run: Path, printed: str) -> None:
    """Write a run's output next to its directory, whose weights are removed: they have been compared."""
    run.with_suffix(".txt").write_text(printed)
    for file in run.rglob("*.safetensors") if run.exists() else ():
        if file.parent.name != "columns":
            file.unlink()
