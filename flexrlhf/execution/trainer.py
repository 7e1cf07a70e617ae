"""One rank of a run: walk the schedule and execute every instruction that names this rank."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
from safetensors.torch import save_file

from flexrlhf.comm.move import Mover, Wire
from flexrlhf.comm.rows import RowStore
from flexrlhf.comm.sync import Syncer
from flexrlhf.comm.world import Groups, RankProgress, World, deadline
from flexrlhf.config.algorithms import SampledSpec
from flexrlhf.data.examples import Example
from flexrlhf.data.order import step_indices
from flexrlhf.engines.base import Moments, Sampling, add_moments
from flexrlhf.execution.checkpoint import save_adapters, save_model
from flexrlhf.execution.controller_states import make_controls
from flexrlhf.execution.evaluator import Evaluation
from flexrlhf.execution.input_columns import input_columns
from flexrlhf.execution.loading import adapters_to_merge, destination_of, load_model_on_rank, source_of, whole_weights
from flexrlhf.execution.memory_meter import MemoryMeter
from flexrlhf.execution.recorder import Recorder
from flexrlhf.execution.run_operator import LoadedModel, OperatorContext, OperatorRun, run_operator
from flexrlhf.execution.samples import append_samples
from flexrlhf.execution.scoring import make_scoring
from flexrlhf.metrics import Triple, statistic_name
from flexrlhf.objectives.parity import naming_tokens
from flexrlhf.operators.columns import plain, qualified
from flexrlhf.operators.graph import Operator
from flexrlhf.operators.policy import PTX
from flexrlhf.placement.layout import BatchShape
from flexrlhf.placement.placed import PlacedModel
from flexrlhf.plan.inputs import RunData, load_tokenizer
from flexrlhf.plan.plan import Plan, bucket_bytes
from flexrlhf.strategies.instructions import Eval, Instruction, Move, Offload, Reload, Run, Save, Sync
from flexrlhf.strategies.schedule import walk
from flexrlhf.timeline import Span, Timeline
from flexrlhf.weights.reshard import trained_parts

EVAL_STEP = -1
"""The step that sampling noise of evaluations is drawn for: none of training."""


class Trainer:
    """Owns the engines, the rows and the communication of one rank."""

    def __init__(self, plan: Plan, world: World, data: RunData, directory: Path, meter: MemoryMeter) -> None:
        self.plan = plan
        self._world = world
        self._data = data
        self._directory = directory
        self._at = ""
        self._position = 0
        self._whereabouts = RankProgress(world, plan.spec.name)
        self._groups: Groups = world.make_groups(plan.groups, plan.spec.timeout_seconds)
        self._meter = meter
        self._decode: Callable[..., str] = load_tokenizer(data.tokenizer).decode
        self._controls = make_controls(plan)
        self._scoring = make_scoring(plan.graph, plan.spec, partial(self._decode, skip_special_tokens=True))
        self._models = {model.name: self._load(model) for model in plan.placement.on_rank(world.rank)}
        for name in plan.offloaded.get(world.rank, ()):
            self._models[name].engine.offload()
        self._meter.reset_peak()
        self._versions = dict.fromkeys(self._models, 0)
        self._stores: dict[int, RowStore] = {}
        self._mover = Mover(world.rank, Wire(plan.batch, plan.lengths, world.device), self._wait)
        self._syncer = Syncer(world.rank, plan.spec.sync, bucket_bytes(plan.spec), self._wait)
        self._recorder = Recorder(plan, world, directory)
        self.timeline = Timeline(world.rank, plan.spec.timeline_steps)

    def run(self) -> None:
        """The loop, all of it."""
        for position, step, instruction in walk(self.plan.schedule, self._world.rank, self.plan.spec.steps):
            self._enter(position, step, instruction)
            with self._span(instruction, step) as span, self._named(instruction.ranks):
                self._execute(instruction, step, span)
            if self._world.rank == 0:
                self._recorder.collect()
        self._finish()

    def close(self) -> None:
        for resident in self._models.values():
            resident.engine.close()
        self._models.clear()
        self._scoring.close()
        # models hold groups in cycles of hooks and closures
        gc.collect()
        self._groups.close()

    def _span(self, instruction: Instruction, step: int) -> AbstractContextManager[Span]:
        return self.timeline.span(instruction.kind, instruction.label, step, instruction.chunk)

    def _execute(self, instruction: Instruction, step: int, span: Span) -> None:
        match instruction:
            case Run():
                self._run(instruction, step, span)
            case Move():
                span.bytes_sent = self._move(instruction, step)
            case Sync():
                span.bytes_sent = self._sync(instruction, step)
            case Eval():
                self._evaluate(instruction, step)
            case Save():
                self._save(instruction, step)
            case Offload():
                self._models[instruction.model].engine.offload()
            case Reload():
                self._models[instruction.model].engine.reload()

    def _run(self, run: Run, step: int, span: Span) -> None:
        resident = self._models[run.model]
        self._count_frozen(resident.model, step)
        work = self._work(run.operator, resident, self.plan.batch, run.mini_batches)
        store = self._store(step)
        store.arrive(run.operator.reads, work.rows)
        span.begin()
        time.sleep(self.plan.spec.debug.run_delay_seconds)
        # the data's own columns are asked for where answers are scored alone
        examples = self._examples(step) if run.operator.kind == "score" else []
        work = replace(work, examples=examples, state=self._controls.state(run.operator))
        ahead = [replace(work, mini_batches=later) for later in self.plan.ahead(run)]
        with naming_tokens(self._decode, step):
            statistics = run_operator(work, store, self._surroundings(self._sampling(step)), ahead)
        self._versions[run.model] = step + 1 if run.operator.kind == "train" else self._versions[run.model]
        is_drawn = run.operator.kind == "generate" and not run.operator.is_greedy
        labels = {"rollout_engine": type(resident.engine).__name__} if is_drawn else {}
        summed = self._publish(step, resident, {run.operator.name: statistics}, labels)
        self._controls.add(run, summed)
        if self.plan.spec.debug.record_columns and run.operator.writes:
            self._record_columns(run, step, work.rows, store)

    def _work(self, operator: Operator, resident: LoadedModel, shape: BatchShape, mini_batches: range) -> OperatorRun:
        version = self._versions[resident.model.name]
        return OperatorRun(operator, resident, shape, mini_batches, self._world.rank, version)

    def _count_frozen(self, model: PlacedModel, step: int) -> None:
        """A batch that the model is not to be trained on makes its weights no older."""
        if model.trained:
            frozen = min(step, self.plan.graph.first_step(model.role))
            self._versions[model.name] = max(self._versions[model.name], frozen)

    def _surroundings(self, sampling: Sampling) -> OperatorContext:
        return OperatorContext(self.plan.spec, sampling, self._world.device, self._scoring)

    def _move(self, move: Move, step: int) -> int:
        group = self._groups.get("move", move.ranks)
        assert group is not None, "a move joins at least two ranks"
        return self._mover.start(move, self._store(step), group)

    def _sync(self, sync: Sync, step: int) -> int:
        group = None if sync.is_local else self._groups.get(f"sync {sync.source}", sync.ranks)
        follower, sent = self._models.get(sync.destination), 0
        load = follower.engine.load_weights if follower is not None else None
        if sync.source in self._models:
            resident, destination = self._models[sync.source], self.plan.placement[sync.destination]
            merge = adapters_to_merge(resident.model, destination)
            source = source_of(resident, sync.gathers, self._world.rank, self._groups, self._wait, merge)
            sent = self._syncer.send(sync, source, destination_of(destination, resident.shape, sync), group, load)
        if follower is not None and load is not None:
            parts = trained_parts(follower.model, follower.shape, self._world.rank)
            held = follower.engine.weights()
            self._syncer.receive(sync, {name: held[name] for name in parts}, parts, load, group)
            self._versions[sync.destination] = step + 1
        return sent

    def _evaluate(self, instruction: Eval, step: int) -> None:
        """Walk the list of ``instruction`` over the held-out rows."""
        data = self._data
        held_out = Evaluation(
            self.plan, instruction, data.evaluation, data.pad_token_id, self._world, self._groups, self._wait
        )
        reports: dict[int, Moments] = {}
        for index, inner, batches in held_out.walk():
            if isinstance(inner, Move):
                held_out.move(inner)
            else:
                add_moments(reports.setdefault(index, {}), self._evaluate_run(inner, batches, held_out))
        held_out.finish()
        for index, moments in sorted(reports.items()):
            run = instruction.instructions[index]
            assert isinstance(run, Run), "moves report nothing"
            self._publish(step, self._models[run.model], {run.operator.name: moments}, inner=index)
            self._show_evaluated(run, step, held_out)

    def _evaluate_run(self, run: Run, batches: range, held_out: Evaluation) -> Moments:
        """Execute ``run`` on this rank's rows of ``batches``. Returns its statistics under the names of evaluations."""
        work = self._work(run.operator, self._models[run.model], held_out.shape, batches)
        context = self._surroundings(self._eval_sampling())
        told = run_operator(replace(work, examples=self._data.evaluation), held_out.rows, context)
        return {f"eval_{name.removeprefix('eval_')}": value for name, value in told.items()}

    def _show_evaluated(self, run: Run, step: int, held_out: Evaluation) -> None:
        """Record what ``run`` has written, and some answers as text if it has generated them."""
        rows, store, suffix = held_out.rows_of(run), held_out.rows, run.operator.suffix
        if self.plan.spec.debug.record_columns and run.operator.writes:
            self._record_columns(run, step, rows, store, "held-out-")
        if run.operator.kind == "generate" and self._world.rank == run.ranks[0]:
            names = (f"tokens{suffix}", "prompt_mask", f"response_mask{suffix}", "scores")
            # of each prompt the first answer
            shown = rows[:: held_out.shape.samples_per_prompt]
            texts = [store.get(name, shown).cpu() for name in names if store.holds(name, shown)]
            append_samples(self._directory, step, self._versions[run.model], self._decode, *texts)

    def _save(self, save: Save, step: int) -> None:
        resident, is_writer = self._models[save.model], self._world.rank == save.ranks[0]
        directory, settings, best = self._directory / save.model, resident.model.settings, None
        if save.best is not None:
            value = self._recorder.improved(save, step)
            if value is None:
                return
            best = {"step": step, "metric": save.best, "value": value}
            directory = directory.with_name(f"{save.model}-best")
        source = source_of(resident, [save.ranks], self._world.rank, self._groups, self._wait)
        weights = whole_weights(self.plan, source, keep=is_writer)
        if not is_writer:
            return
        if settings.lora is None:
            save_model(directory, weights, resident.engine.config, self._data.tokenizer, best)
        else:
            save_adapters(directory, weights, settings, self._data.tokenizer, resident.model.head, best)

    def _load(self, model: PlacedModel) -> LoadedModel:
        return load_model_on_rank(self.plan, model, self._world, self._groups, self._wait)

    def _store(self, step: int) -> RowStore:
        """The rows of a step; those of steps that nothing works on any more are dropped."""
        if step not in self._stores:
            for old in [s for s in self._stores if s < step - self.plan.schedule.lag]:
                self._stores.pop(old).finish()
            store = self._stores[step] = RowStore(self.plan.lengths, self._world.device)
            self._put_inputs(store, self._examples(step), self._input_rows())
            if self._data.texts:
                self._put_texts(store, step, self._input_rows())
        return self._stores[step]

    def _examples(self, step: int) -> list[Example]:
        """Those of the prompts of a step."""
        indices = step_indices(self.plan.spec.seed, step, self.plan.batch.num_prompts, len(self._data.examples))
        return [self._data.examples[i] for i in indices]

    def _input_rows(self) -> tuple[int, ...]:
        """Rows whose input columns this rank's operators read."""
        prompts: set[int] = set()
        for run in self.plan.schedule.for_rank(self._world.rank):
            if isinstance(run, Run) and set(run.operator.reads) & set(self.plan.graph.inputs):
                layout = self.plan.placement[run.model].layout
                prompts.update(self.plan.batch.prompts_on(layout, self._world.rank, run.mini_batches))
        return self.plan.batch.rows(tuple(sorted(prompts)))

    def _put_inputs(self, store: RowStore, examples: list[Example], rows: tuple[int, ...]) -> None:
        columns = input_columns(
            examples, rows, self.plan.batch.samples_per_prompt, self.plan.lengths, self._data.pad_token_id
        )
        for name in self.plan.graph.inputs:
            if name in columns:
                store.put(name, rows, columns[name].to(self._world.device))

    def _put_texts(self, store: RowStore, step: int, rows: tuple[int, ...]) -> None:
        """Further texts for training, one for each row."""
        indices = step_indices(self.plan.spec.seed, step, self.plan.batch.num_rows, len(self._data.texts))
        texts = [self._data.texts[i] for i in indices]
        columns = input_columns(texts, rows, 1, self.plan.lengths, self._data.pad_token_id)
        for name in set(self.plan.graph.inputs) & set(qualified(columns, PTX)):
            store.put(name, rows, columns[plain(name)].to(self._world.device))

    def _sampling(self, step: int) -> Sampling:
        data, algorithm = self._data, self.plan.spec.algorithm
        decode = partial(self._decode, skip_special_tokens=True)
        sampling = Sampling(
            self.plan.spec.seed, step, self.plan.temperature, data.eos_token_ids, data.pad_token_id, decode=decode
        )
        if not isinstance(algorithm, SampledSpec):
            return sampling
        return replace(
            sampling,
            top_p=algorithm.top_p,
            top_k=algorithm.top_k,
            min_tokens=algorithm.min_response_tokens,
            stop=algorithm.stop,
        )

    def _eval_sampling(self) -> Sampling:
        """That of training, at the temperature of evaluations."""
        sampling, settings = self._sampling(EVAL_STEP), self.plan.spec.eval
        if settings is None or settings.temperature is None:
            return sampling
        return replace(sampling, temperature=settings.temperature)

    def _publish(
        self,
        step: int,
        resident: LoadedModel,
        reports: Mapping[str, Moments],
        labels: Mapping[str, str] | None = None,
        inner: int | None = None,
    ) -> dict[str, Triple]:
        """Sum the operators' statistics over the replicas; the model's first rank reports them, with ``labels``.

        ``inner``: the place in the list of an evaluation.
        """
        named: Moments = {}
        for operator, part in reports.items():
            add_moments(named, {statistic_name(operator, name): value for name, value in part.items()})
        if named:
            names = sorted(named)
            table = resident.dp.sum(torch.stack([named[name] for name in names]))
            named = dict(zip(names, table, strict=True))
        statistics: dict[str, Triple] = {name: tuple(value.tolist()) for name, value in named.items()}
        if self._world.rank == resident.model.ranks[0]:
            self._recorder.publish(step, self._position, statistics, labels or {}, inner)
        return statistics

    def _record_columns(self, run: Run, step: int, rows: tuple[int, ...], store: RowStore, prefix: str = "") -> None:
        if self.plan.placement[run.model].layout.tp_index(self._world.rank):
            return  # the first tensor-parallel rank of a replica writes its rows
        directory = self._directory / "columns"
        directory.mkdir(parents=True, exist_ok=True)
        columns = {name: store.get(name, rows).cpu().contiguous() for name in run.operator.writes}
        file = f"{prefix}step{step}-{run.operator.name}-chunk{run.chunk or 0}-rank{self._world.rank}.safetensors"
        save_file({**columns, "rows": torch.tensor(rows, dtype=torch.int64)}, directory / file)

    def _enter(self, position: int, step: int, instruction: Instruction) -> None:
        self._at = f"step {step}, {instruction.kind} {instruction.label}"
        self._position = position
        self._whereabouts.report(position, self._at)

    def _wait(self, work: dist.Work, ranks: tuple[int, ...]) -> None:
        """Every wait of this rank: with the group's deadline and a name."""
        with self._named(ranks):
            work.wait()

    def _named(self, ranks: tuple[int, ...]) -> AbstractContextManager[None]:
        """Names what a failed wait was for; around whole instructions, since engines' libraries wait by themselves."""
        return deadline(
            f"rank {self._world.rank} at {self._at}", lambda: self._whereabouts.missing(ranks, self._position)
        )

    def _finish(self) -> None:
        for store in self._stores.values():
            store.finish()
        self._mover.close()
        self._syncer.close()
        self._recorder.finish(self.timeline, self._held(), self._meter.peak())

    def _held(self) -> dict[str, dict[str, int]]:
        """Bytes on this rank by placed model, counted on the tensors."""
        return {name: asdict(resident.engine.memory_usage()) for name, resident in self._models.items()}
