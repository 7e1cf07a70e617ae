"""One rank of a profile: join the job, measure with all other ranks; rank 0 writes the measurements."""

from __future__ import annotations

import datetime
import json
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import torch
import torch.distributed as dist
import transformers

from flexrlhf.api import Layout, ParallelDims, PlacedModel, Plan, Spec, make_plan, process_directory, read_yaml
from flexrlhf.api.engine import DTYPES, BareRank, LoadedModel, joined_rank, limit_threads
from flexrlhf.guideline.costs.measurements import Machine, Measurements, ModelTimes, Points, write_measurements
from flexrlhf.measure import traffic
from flexrlhf.measure.layer_calls import SlimModel, measure_embedding, measure_slim
from flexrlhf.measure.layer_split import SlimTimes, layer_times, update_times
from flexrlhf.measure.model_calls import ProfileContext, measure_combine, measure_contention
from flexrlhf.measure.profiled_models import (
    DEEP,
    SHALLOW,
    LengthSample,
    ProfiledModel,
    RowCounts,
    profiled_models,
    row_counts,
    slim_spec,
)
from flexrlhf.measure.stopwatch import Stopwatch

SHARE_OF_OTHERS, NUM_OTHERS = 0.3, 10
"""Share of the time for all that is not a model's calls, and number of such measurements."""


def measure(specs: Sequence[Spec], lengths: Sequence[LengthSample], seconds: float, most_tp: int, path: Path) -> None:
    """Measure the models of ``specs``, each with its ``lengths``, and their communication; rank 0 writes ``path``.

    seconds:  time of all measurements; longer where calls are slow, each of which is made three times
    most_tp:  tensor-parallel ranks of the smallest slices
    """
    limit_threads()
    seconds_of_waits = specs[0].timeout_seconds
    with joined_rank(specs[0].cluster.device, seconds_of_waits) as world:
        plans = [make_plan(spec) for spec in specs]
        share = seconds / len(plans)
        ranks = [BareRank(world, f"profile/{plan.spec.name}", plan.spec.timeout_seconds) for plan in plans]
        profilers = [PlanProfiler(*each, share, most_tp) for each in zip(ranks, plans, lengths, strict=True)]
        models = tuple(times for profiler in profilers for times in profiler.models())
        measurements = profilers[0].measurements(models)
        if world.rank == 0:
            write_measurements(path, measurements)
        for rank in ranks:
            rank.disconnect()
        world.meet("the end of the profile", seconds_of_waits)


class PlanProfiler:
    """Measurements for one plan, whose models are on all ranks, one after the other, with few layers."""

    def __init__(self, rank: BareRank, plan: Plan, lengths: LengthSample, seconds: float, most_tp: int) -> None:
        self._rank, self._plan, self._world = rank, plan, rank.world
        self._models = profiled_models(plan, most_tp)
        slices = sorted({tp for model in self._models for tp in model.slices})
        self._slim = {(tp, depth): make_plan(slim_spec(plan, depth, tp)) for tp in slices for depth in (SHALLOW, DEEP)}
        groups = (group for slim in self._slim.values() for group in slim.groups)
        rank.connect("profile", "move", "sync", groups=groups)
        device, cores = rank.world.device, len(os.sched_getaffinity(0))
        oversubscribed = rank.world.size > (torch.cuda.device_count() if device.type == "cuda" else cores)
        stopwatch = Stopwatch(rank.all_ranks("profile"), rank.world.rank, device, oversubscribed)
        parts = sum(len(model.slices) for model in self._models)
        budget = (1 - SHARE_OF_OTHERS) * seconds / max(1, parts)
        self._context = ProfileContext(plan, lengths, rank, stopwatch, budget)
        self._short_context = replace(self._context, budget=SHARE_OF_OTHERS * seconds / NUM_OTHERS)

    def models(self) -> Iterator[ModelTimes]:
        """Yield the times of one model after the other, so that only one is in memory."""
        found: list[ModelTimes] = []
        for model in self._models:
            found.append(self._model_times(model, found))
            yield found[-1]

    def _model_times(self, model: ProfiledModel, before: Sequence[ModelTimes]) -> ModelTimes:
        """Return the times of a model. ``before``: of those with whose layers it may share some."""
        placed = model.placed
        self._report(f"layers of {placed.role}")
        slim = {tp: self._slim_times(model, tp) for tp in model.slices}
        shallow, _ = slim[1]
        embedding = measure_embedding(
            self._short_context, model.transformer, DTYPES[placed.settings.dtype], shallow.forward or shallow.train
        )
        updates = update_times([each for pair in slim.values() for each in pair])
        layers = {tp: layer_times(*pair, embedding, updates) for tp, pair in slim.items()}
        for trunk in (each for each in before if each.model == model.trunk and each.engine == placed.engine):
            others = {tp: each for tp, each in trunk.layers.items() if tp not in layers}
            layers |= {tp: each.model_copy(update={"head": layers[1].head}) for tp, each in others.items()}
        lengths = self._context.lengths
        return ModelTimes(
            model=model.transformer,
            engine=placed.engine,
            item=model.item,
            shards=placed.num_shards,
            width=max(lengths.prompts) + max(lengths.responses),
            prompt=max(lengths.prompts),
            row=self._context.row_width(placed, self._counts(placed).passes),
            layers=layers,
            update=updates,
        )

    def _slim_times(self, model: ProfiledModel, tp: int) -> tuple[SlimTimes, SlimTimes]:
        """Measure the shallow and the deep model of a slice, with sharded layers if those of the model are."""
        placed = model.placed
        is_sharded = placed.split != "whole"
        with ExitStack() as stack:
            models = []
            for depth in (SHALLOW, DEEP):
                plan = self._slim[tp, depth]
                on_all = next(each for each in plan.placement.models if each.name == placed.name)
                alone = on_all if is_sharded else self._one_replica(on_all)
                loaded = stack.enter_context(self._rank.loaded(plan, alone))
                replicas = None
                if "train" in model.operators and self._world.size > 1 and not is_sharded and tp == 1:
                    replicas = stack.enter_context(self._rank.loaded(plan, on_all))
                models.append(SlimModel(depth, loaded, replicas))
            shallow, deep = measure_slim(self._context, model.operators, models, self._counts(placed))
            return shallow, deep

    def _counts(self, placed: PlacedModel) -> RowCounts:
        lengths = self._context.lengths.rows(self._plan.batch.num_rows, self._plan.batch.samples_per_prompt)
        return row_counts(self._plan, placed.settings, sum(map(sum, lengths)) / len(lengths))

    def _one_replica(self, model: PlacedModel) -> PlacedModel:
        """Return ``model`` without the other replicas than this rank's."""
        ranks = model.layout.along("tp", self._world.rank)
        return replace(model, layout=Layout(ranks, ParallelDims(tp=len(ranks))))

    def measurements(self, models: tuple[ModelTimes, ...]) -> Measurements:
        """Return ``models`` with the measurements of everything else: contention, communication, host memory, files."""
        self._report("contention, moves of columns and transfers of weights")
        role = next(each.placed.name for each in self._models if "train" in each.operators)
        plan, context = self._slim[1, DEEP], self._short_context
        trained = next(each for each in plan.placement.models if each.name == role)
        with self._rank.loaded(plan, trained) as loaded, process_directory() as directory:
            combine = self._combine(loaded)
            switch = traffic.measure_switch(context, loaded)
            save = traffic.measure_save(context, loaded, directory)
        several = self._world.size > 1
        plain, sums = self._bookkeeping()
        return Measurements(
            machine=self._machine(),
            models=models,
            combine=combine,
            bookkeeping=plain,
            statistics=sums,
            contention=self._contention(plan, trained),
            memory_bytes_s=traffic.measure_memory(context),
            reduce=traffic.measure_reduce(context) if several else None,
            moves=traffic.measure_moves(context) if several else {},
            sync=traffic.measure_sync(context) if several else None,
            switch=switch,
            save=save,
        )

    def _combine(self, loaded: LoadedModel) -> Points:
        combines = (each for each in self._plan.graph.operators if each.kind == "combine" and each.writes)
        operator = next(combines, None)
        counts = self._counts(loaded.placed).combine
        return () if operator is None else measure_combine(self._short_context, operator, loaded, counts)

    def _contention(self, plan: Plan, model: PlacedModel) -> dict[int, float]:
        forwards = [o for o in self._plan.graph.operators if o.role == model.role and o.kind == "forward"]
        if not forwards:
            return {1: 1.0}
        # without replicas, which some engines would wait for
        with self._rank.loaded(plan, self._one_replica(model)) as loaded:
            rows = self._counts(model).combine.needed[0]
            return measure_contention(self._short_context, forwards[0], loaded, rows)

    def _bookkeeping(self) -> tuple[float, float]:
        """Return seconds that the trainer takes around a Run: to report progress and publish, without and with sums."""
        store = dist.PrefixStore("profile", self._world.store)
        stopwatch = self._short_context.stopwatch
        statistics = [torch.ones(3, dtype=torch.float64, device=self._world.device) for _ in range(6)]

        def publish(table: list[list[float]]) -> None:
            self._rank.progress.report(self._rank.position, "bookkeeping")
            store.set(f"statistics/{self._world.rank}", json.dumps({"statistics": table, "labels": {}}))

        calls = {
            "plain": lambda: publish([]),
            "sums": lambda: publish(stopwatch.all_ranks.sum(torch.stack(statistics)).tolist()),
        }
        timings = stopwatch.time(calls, self._short_context.budget)
        return timings["plain"].seconds, timings["sums"].seconds

    def _machine(self) -> Machine:
        device = self._world.device
        return Machine(
            date=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
            torch=torch.__version__,
            transformers=transformers.__version__,
            device=torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu",
            cores=len(os.sched_getaffinity(0)),
            threads=torch.get_num_threads(),
            ranks=self._world.size,
        )

    def _report(self, what: str) -> None:
        self._rank.report(what)
        if self._world.rank == 0:
            parts = len(self._models) + 1
            print(f"{self._plan.spec.name}: measuring {what} ({self._rank.position} of {parts})", flush=True)


def main(request_file: str, path: str) -> None:
    """Measure the runs of a request file and write ``path``."""
    request = json.loads(Path(request_file).read_text())
    runs = request["runs"]
    specs = [Spec.parse(read_yaml(run["spec"])) for run in runs]
    lengths = [LengthSample(tuple(run["prompts"]), tuple(run["responses"])) for run in runs]
    measure(specs, lengths, request["seconds"], request["most_tp"], Path(path))


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2])
