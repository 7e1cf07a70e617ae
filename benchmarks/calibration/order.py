"""Order of measurements and predictions: systems, placements, device counts and meshes of one problem."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import combinations
from pathlib import Path

from benchmarks.calibration.problems import Catalogue, LeftOut
from benchmarks.calibration.rlhf import predict, rows_of
from benchmarks.calibration.rows import Row, device_of, read_models, read_rows
from benchmarks.systems.engines import COSTS
from benchmarks.systems.profiles import SYSTEMS
from benchmarks.systems.steps import best_step
from benchmarks.systems.workload import ACTOR, CRITIC, REF, REWARD, Workload
from flexrlhf.guideline.costs.cost_model import Links, Transformer

Key = Callable[[Row], "tuple[str, ...] | None"]
"""Values that are equal in rows that are compared; None for a row that is not compared."""
CLEAR = 0.1
"""Measurements that differ by less have no order."""


@dataclass(frozen=True)
class OrderedPair:
    """Two rows that are compared.

    kind:       the difference between them
    rows:       their names
    measured:   measured seconds of the second relative to the first
    predicted:  the same as predicted
    """

    kind: str
    rows: tuple[str, str]
    measured: float
    predicted: float

    @property
    def is_right(self) -> bool:
        return (self.measured > 1) == (self.predicted > 1)


@dataclass(frozen=True)
class TimedRow:
    row: Row
    measured: float
    predicted: float


def read(directory: Path) -> list[OrderedPair]:
    """Return all pairs whose measurements differ clearly."""
    timed = list(_timed(directory))
    pairs = [*_pairs("systems", timed, _problem), *_pairs("devices", timed, _scaled)]
    return [*pairs, *_pairs("calls", timed, _meshes), *_choices(directory)]


def _timed(directory: Path) -> Iterator[TimedRow]:
    """Yield steps and calls in seconds; for throughputs, seconds per row."""
    models = read_models(directory)
    for row in rows_of(directory):
        if row["kind"] not in ("e2e", "percall"):
            continue
        try:
            found = predict(row, Catalogue(models))
        except LeftOut:
            continue
        scale = float(row["value"]) * found.measured if row["unit"] == "samples/s" else 1.0
        yield TimedRow(row, found.measured / scale, found.predicted / scale)


def _pairs(kind: str, timed: list[TimedRow], key: Key) -> Iterator[OrderedPair]:
    groups: dict[tuple[str, ...], list[TimedRow]] = defaultdict(list)
    for item in timed:
        name = key(item.row)
        if name is not None:
            groups[name].append(item)
    for group in groups.values():
        for first, second in combinations(group, 2):
            ratio = second.measured / first.measured
            if max(ratio, 1 / ratio) > 1 + CLEAR:
                yield OrderedPair(kind, (first.row["id"], second.row["id"]), ratio, second.predicted / first.predicted)


def _models(row: Row) -> tuple[str, ...]:
    return tuple(row[name] for name in ("group", "gpu", "actor_b", "critic_b", "model", "lora", "grad_ckpt"))


def _lengths(row: Row) -> tuple[str, ...]:
    return tuple(row[name] for name in ("global_batch", "prompt_len", "gen_len", "minibatches", "algo", "unit"))


def _problem(row: Row) -> tuple[str, ...] | None:
    """Return the key of the same step in different systems."""
    if row["kind"] != "e2e" or not row["n_gpus"] or row["metric"] == "run_time":
        return None
    model = "" if row["group"].startswith("real/") else row["model"]
    return (*_models(row)[:4], model, row["lora"], row["grad_ckpt"], *_lengths(row), row["n_gpus"])


def _scaled(row: Row) -> tuple[str, ...] | None:
    """Return a key that the same step of one system has on any number of devices."""
    if row["kind"] != "e2e":
        return None
    return (*_models(row), *_lengths(row), row["system"], row["version"], row["placement"].split(":")[0])


def _meshes(row: Row) -> tuple[str, ...] | None:
    """Return the key of the calls of one step, each on its own mesh, among which a planner chooses."""
    if row["kind"] != "percall":
        return None
    return (row["group"], row["system"], row["actor_b"], row["n_gpus"], row["global_batch"], row["gen_len"])


# ---------------------------------------------------------------- the best of three placements


def _choices(directory: Path) -> Iterator[OrderedPair]:
    """Yield a pair for each placement that is slower than HybridFlow's best: colocate, standalone or split."""
    models = read_models(directory)
    for row in read_rows(directory, "measurements_calib"):
        if row["metric"] != "best_placement":
            continue
        seconds = dict(_placed_seconds(row, models))
        best = _NAMES.get(row["value"].split()[0])
        if best not in seconds:
            continue
        for name, value in seconds.items():
            if name != best:
                yield OrderedPair("placements", (row["id"], name), 1 + 2 * CLEAR, value / seconds[best])


_NAMES = {"colocate": "co-located", "standalone": "standalone", "split": "split"}


def _placed_seconds(row: Row, models: Mapping[str, Transformer]) -> Iterator[tuple[str, float]]:
    """Yield HybridFlow's step time with each placement."""
    sizes = {7: "LLaMA-2-7B", 13: "LLaMA-2-13B", 34: "CodeLlama-34B", 70: "LLaMA-2-70B"}
    actor, critic = (int(re.findall(r"\d+", row[name] or row["actor_b"])[0]) for name in ("actor_b", "critic_b"))
    counts = [int(count) for count in re.findall(r"\d+", row["notes"].split(";")[0])]
    device = device_of(row)
    assert device is not None
    for name in SYSTEMS["hybridflow"].placements:
        workload = Workload(
            {
                ACTOR: models[sizes[actor]],
                REF: models[sizes[actor]],
                CRITIC: models[sizes[critic]].as_scorer(),
                REWARD: models[sizes[critic]].as_scorer(),
            },
            int(row["n_gpus"] or max(counts)),
            device,
            Links(device.link_gb_s, 25.0),
            int(row["global_batch"]),
            float(row["prompt_len"]),
            (float(row["gen_len"]),),
            int(row["minibatches"]),
        )
        step = best_step(workload, replace(SYSTEMS["hybridflow"], placements=(name,)), COSTS)
        if step is not None:
            yield name, step.seconds
