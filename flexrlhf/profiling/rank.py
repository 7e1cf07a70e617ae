"""One rank of a profile: join the job, measure with all others, and let the first rank write what was found."""

from __future__ import annotations

import datetime
import gc
import json
import os
import signal
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
import torch.distributed as dist
from torch.distributed.elastic.multiprocessing.errors import record

from flexrlhf.comm.reduce import RankGroup
from flexrlhf.comm.world import Groups, RankProgress, Wait, World, deadline, open_world
from flexrlhf.config.spec import Spec
from flexrlhf.config.spec_file import parse_spec
from flexrlhf.config.yaml_io import read_yaml
from flexrlhf.execution.loaded_models import LoadedModel, load_model_on_rank
from flexrlhf.guideline.costs.measurements import Machine, Measurements, ModelTimes, Points, write_measurements
from flexrlhf.placement.groups import Group
from flexrlhf.placement.layout import Layout
from flexrlhf.placement.placed import PlacedModel
from flexrlhf.plan.pipeline import make_plan
from flexrlhf.plan.plan import Plan
from flexrlhf.profiling.model_calls import (
    Bench,
    measure_alone,
    measure_calls,
    measure_combine,
    measure_contention,
)
from flexrlhf.profiling.stopwatch import Stopwatch
from flexrlhf.profiling.subjects import Subject, TextSample, first_combine, row_counts, subjects
from flexrlhf.profiling.traffic import (
    Channel,
    measure_memory,
    measure_moves,
    measure_reduce,
    measure_save,
    measure_switch,
    measure_sync,
)

PIECE = 0.2
"""Of the time that one model's calls are repeated for: for anything else that is measured."""


def measure(specs: Sequence[Spec], texts: Sequence[TextSample], seconds: float, path: Path) -> None:
    """Measure the models of ``specs``, each with its ``texts``, and what they exchange; rank 0 writes ``path``.

    ``seconds``: for which the calls of each model are repeated.
    """
    if "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) // int(os.environ.get("LOCAL_WORLD_SIZE", "1"))))
    with open_world(specs[0].cluster.device, specs[0].timeout_seconds) as world:
        plans = [make_plan(spec) for spec in specs]
        sessions = [Session(plan, sample, seconds, world) for plan, sample in zip(plans, texts, strict=True)]
        models = tuple(times for session in sessions for times in session.models())
        measured = sessions[0].measured(models)
        if world.rank == 0:
            write_measurements(path, measured)
        for session in sessions:
            session.close()
        world.meet("the end of the profile", specs[0].timeout_seconds)


class Session:
    """The measurements of one plan, whose models all ranks hold one after the other."""

    def __init__(self, plan: Plan, texts: TextSample, seconds: float, world: World) -> None:
        self._plan, self._world = plan, world
        ranks = tuple(range(world.size))
        own = [Group("profile", ranks), Group("move", ranks), Group("sync", ranks)] if len(ranks) > 1 else []
        self._groups: Groups = world.make_groups([*own, *plan.groups], plan.spec.timeout_seconds)
        self._progress = RankProgress(world, f"profile/{plan.spec.name}")
        self._position = 0
        everyone = RankGroup(self._groups.get("profile", ranks), ranks, self._wait)
        crowded = world.device.type == "cpu" and world.size > len(os.sched_getaffinity(0))
        stopwatch = Stopwatch(everyone, world.rank, world.device, crowded)
        self._models = Bench(plan, texts, stopwatch, world.rank, world.device, seconds)
        self._pieces = replace(self._models, budget=PIECE * seconds)

    def models(self) -> Iterator[ModelTimes]:
        """Each in its turn, so that one at a time takes memory."""
        yield from map(self._model, subjects(self._plan))

    def close(self) -> None:
        self._groups.close()

    def _model(self, subject: Subject) -> ModelTimes:
        self._say(f"the calls of {subject.role}, alone and with {self._world.size} ranks")
        counts = row_counts(self._plan, subject.tp)
        with self._loaded(self._plan.placement[subject.role]) as loaded:
            times = measure_calls(self._models, subject, loaded, counts)
        if "train" not in subject.operators or subject.tp > 1 or self._world.size == 1:
            return times
        with self._loaded(self._single(subject.role)) as loaded:
            alone = measure_alone(self._models, subject, loaded, counts)
        return times.model_copy(update={"train": {1: alone, **times.train}})

    def _single(self, role: str) -> PlacedModel:
        """The model on this rank by itself."""
        return replace(self._plan.placement[role], layout=Layout((self._world.rank,)))

    def measured(self, models: tuple[ModelTimes, ...]) -> Measurements:
        """``models``, and what goes on around their calls."""
        self._say("contention, columns and weights that travel")
        role = next(subject for subject in subjects(self._plan) if "train" in subject.operators).role
        with self._loaded(self._plan.placement[role]) as loaded, TemporaryDirectory() as directory:
            combine = self._combine(loaded)
            switch = measure_switch(self._pieces, loaded)
            save = measure_save(self._pieces, loaded, Path(directory))
        several = self._world.size > 1
        plain, sums = self._bookkeeping()
        return Measurements(
            machine=self._machine(),
            models=models,
            combine=combine,
            bookkeeping=plain,
            statistics=sums,
            contention=self._contention(self._plan.placement[role]),
            memory_bytes_s=measure_memory(self._pieces),
            reduce=measure_reduce(self._pieces) if several else None,
            moves=measure_moves(self._channel("move")) if several else {},
            sync=measure_sync(self._channel("sync")) if several else None,
            switch=switch,
            save=save,
        )

    def _combine(self, loaded: LoadedModel) -> Points:
        operator = first_combine(self._plan)
        counts = row_counts(self._plan, loaded.placed.layout.tp)
        return () if operator is None else measure_combine(self._pieces, operator, loaded, counts)

    def _contention(self, model: PlacedModel) -> dict[int, float]:
        """Not of a model that is in parts: one rank may hold no more than its own."""
        forwards = [o for o in self._plan.graph.operators if o.role == model.role and o.kind == "forward"]
        if not forwards or model.split != "whole" or model.layout.tp > 1:
            return {1: 1.0}
        # without replicas, which some engines would wait for
        with self._loaded(self._single(model.role)) as loaded:
            return measure_contention(self._pieces, forwards[0], loaded, row_counts(self._plan, 1).calls[0])

    def _bookkeeping(self) -> tuple[float, float]:
        """What the trainer does around a Run: say where it is, and publish, with or without numbers to add up."""
        store = dist.PrefixStore("profile", self._world.store)
        statistics = [torch.ones(3, dtype=torch.float64, device=self._world.device) for _ in range(6)]

        def publish(table: list[list[float]]) -> None:
            self._progress.report(self._position, "bookkeeping")
            store.set(f"statistics/{self._world.rank}", json.dumps({"statistics": table, "labels": {}}))

        def publish_sums() -> None:
            publish(self._pieces.stopwatch.everyone.sum(torch.stack(statistics)).tolist())

        timed = self._pieces.stopwatch.time({"plain": lambda: publish([]), "sums": publish_sums}, self._pieces.budget)
        return timed["plain"].seconds, timed["sums"].seconds

    def _channel(self, purpose: str) -> Channel:
        ranks = tuple(range(self._world.size))
        group = self._groups.get(purpose, ranks)
        assert group is not None, "one rank exchanges nothing"
        return Channel(self._pieces, group, ranks)

    def _machine(self) -> Machine:
        device = self._world.device
        return Machine(
            date=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
            torch=torch.__version__,
            device=torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu",
            cores=len(os.sched_getaffinity(0)),
            threads=torch.get_num_threads(),
            ranks=self._world.size,
        )

    @contextmanager
    def _loaded(self, model: PlacedModel) -> Iterator[LoadedModel]:
        loaded = load_model_on_rank(self._plan, model, self._world, self._groups, self._wait)
        try:
            yield loaded
        finally:
            loaded.engine.close()
            gc.collect()

    def _say(self, what: str) -> None:
        self._position += 1
        self._progress.report(self._position, what)
        if self._world.rank == 0:
            print(f"{self._plan.spec.name}: measuring {what}", flush=True)

    @property
    def _wait(self) -> Wait:
        def wait(work: dist.Work, ranks: tuple[int, ...]) -> None:
            what = f"rank {self._world.rank} in the profile of {self._plan.spec.name}"
            with deadline(what, lambda: self._progress.missing(ranks)):
                work.wait()

        return wait


@record
def main(request_file: str, path: str) -> None:
    # as in execution/worker.py
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    request = json.loads(Path(request_file).read_text())
    runs = request["runs"]
    specs = [parse_spec(read_yaml(run["spec"])) for run in runs]
    texts = [TextSample(tuple(run["prompts"]), tuple(run["answers"])) for run in runs]
    measure(specs, texts, request["seconds"], Path(path))


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2])
