"""Symbolic results of an algorithm: a value is a digest of everything that it depends on.

Two executions agree on a value only if they agree on the weights, the rows and the order that led to it. ``reference``
computes a run from its spec alone, one batch after another, without placement or schedule.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from hashlib import blake2b

from flexrlhf.config.placement_settings import PlacementMap
from flexrlhf.config.spec import Spec
from flexrlhf.operators.graph import Operator
from flexrlhf.plan.algorithm_graph import make_graph
from flexrlhf.plan.attempts import with_attempts
from flexrlhf.plan.episodes import with_episodes
from flexrlhf.plan.rollout_engine import with_rollout
from flexrlhf.plan.segments import with_segments

Value = int
Cell = tuple[int, str, int]
"""(step, column, row)."""


def digest(*parts: object) -> Value:
    return int.from_bytes(blake2b(repr(parts).encode(), digest_size=8).digest())


def initial_weights(role: str) -> Value:
    return digest("weights", role)


def input_value(step: int, column: str, row: int) -> Value:
    """A column that comes from the data set."""
    return digest("input", step, column, row)


def evaluation_value(column: str, row: int) -> Value:
    """Value of an evaluation row; every evaluation has the same rows."""
    return digest("evaluation", column, row)


def num_evaluation_prompts(batch: int) -> int:
    """Evaluation prompts of an emulated run: a whole batch, and one of about half."""
    return batch + (batch + 1) // 2


def written(operator: Operator, column: str, step: int, row: int, read: Value, context: Value) -> Value:
    """``read``: digest of what the operator reads of ``row``. ``context``: the weights, or the rows of a statistic."""
    return digest(operator.name, column, step, row, read, context)


def statistic(reads: Mapping[int, Value]) -> Value:
    """A statistic over rows, such as the moments that whiten advantages."""
    return digest("statistic", *sorted(reads.items()))


def whitening(spec: Spec, operator: Operator) -> str:
    """Rows that the statistic of a combine is over; sums of scores have none."""
    return "none" if operator.function == "reward" else getattr(spec.algorithm, "whiten", "none")


def updated(operator: Operator, weights: Value, reads: Mapping[int, Value]) -> Value:
    """The weights after one optimizer step on the rows of a mini-batch."""
    return digest("update", operator.name, weights, *sorted(reads.items()))


@dataclass(frozen=True)
class Reference:
    """``columns``: every cell of the run. ``versions``: role → its weights after 0, 1, 2 … batches. ``evaluated``: the
    cells of evaluation rows, by the step after which they were computed."""

    columns: dict[Cell, Value]
    versions: dict[str, list[Value]]
    evaluated: dict[Cell, Value]


def inference_version(batch: int, lag: int, every: int) -> int:
    """The number of trained batches in the weights that generate and forward ``batch`` (the version rule)."""
    return every * (max(0, batch - lag) // every)


def version_used(spec: Spec, operator: Operator, batch: int) -> int:
    """Weights of an operator that does not train: log-probs for a correction, or for the gate, use the weights at the
    start of training on ``batch``; so do forwards of a role without a copy for inference."""
    importance = getattr(spec.algorithm, "importance", None)
    of_trained_copy = {"trainer_logprobs"} | ({"logprobs"} if importance is not None else set())
    if operator.kind == "forward" and (of_trained_copy & set(operator.writes) or not has_copy(spec, operator.role)):
        return batch
    return inference_version(batch, spec.schedule.lag, spec.sync.every)


def has_copy(spec: Spec, role: str) -> bool:
    """Whether inference with ``role`` has a copy on its own devices, where generation has."""
    if not isinstance(spec.placement, PlacementMap):
        return True
    copied = {name.partition(".")[0] for name in spec.placement.models if "." in name}
    entries = spec.placement.operators or {}
    copied |= {each.role for each in make_graph(spec).operators if each.name in entries and entries[each.name].shadow}
    return not copied or role in copied


def is_compared(spec: Spec, batch: int) -> bool:
    """Whether the gate looks at ``batch``: at each so many, and at the first behind a sync, of those that the engine
    samples with the newest weights."""
    parity = spec.rollout.parity
    if spec.rollout.engine == "transformers" or parity is None:
        return False
    is_turn = batch % parity.every == 0 or batch == spec.sync.every
    if spec.num_segments > 1 and batch:
        return False  # some rows are older
    return is_turn and inference_version(batch, spec.schedule.lag, spec.sync.every) == batch


def is_due(spec: Spec, operator: Operator, batch: int) -> bool:
    """The comparison of transformers with itself is in the first batch."""
    if operator.name == "computed_logprobs":
        return batch == 0
    return operator.name not in ("parity", "trainer_logprobs") or is_compared(spec, batch)


def is_evaluated(spec: Spec, batch: int) -> bool:
    if spec.eval is None:
        return False
    return batch == spec.steps - 1 or (batch + 1) % (spec.eval.every or spec.steps) == 0


def has_shadows(spec: Spec, num_roles: int) -> bool:
    """Whether generation has its own devices in the user's spec."""
    if isinstance(spec.placement, PlacementMap):
        if spec.placement.operators is not None:
            return spec.placement.operators["generate"].shadow
        return any("." in name for name in spec.placement.models)
    return spec.placement is not None and len(spec.placement) > num_roles


def reference(spec: Spec) -> Reference:
    """The right result of ``spec``."""
    return _Run(spec).play()


class _Run:
    def __init__(self, spec: Spec) -> None:
        self._spec = spec
        plain = make_graph(spec)
        graph = with_rollout(plain, spec, is_remote=has_shadows(spec, len(plain.roles)))
        self._graph = with_attempts(with_segments(with_episodes(graph, spec), spec), spec)
        self._rows_of_prompt = spec.algorithm.samples_per_prompt * spec.num_sequences
        self._columns: dict[Cell, Value] = {}
        self._evaluated: dict[Cell, Value] = {}
        self._versions = {role: [initial_weights(role)] for role in self._graph.roles}

    def play(self) -> Reference:
        if self._spec.eval is not None and self._spec.eval.before:
            self._evaluate(0)
        for step in range(self._spec.steps):
            for operator in self._graph.operators:
                if operator.kind == "train":
                    self._train(operator, step)
                elif is_due(self._spec, operator, step):
                    own = self._versions[operator.role][version_used(self._spec, operator, step)]
                    self._write(operator, step, own if operator.adapters else initial_weights(operator.role))
            for role in set(self._graph.roles) - set(self._graph.trained):
                self._versions[role].append(self._versions[role][-1])
            if is_evaluated(self._spec, step):
                self._evaluate(step)
        return Reference(self._columns, self._versions, self._evaluated)

    def _evaluate(self, step: int) -> None:
        """All evaluation rows, by the weights that the step has left."""
        settings, algorithm = self._spec.eval, self._spec.algorithm
        assert settings is not None
        samples = (settings.samples_per_prompt or algorithm.samples_per_prompt) * self._spec.num_sequences
        for operator in self._graph.evaluation:
            for row in range(num_evaluation_prompts(algorithm.num_prompts) * samples):
                read = digest(*(self._read_evaluation(step, column, row) for column in operator.reads))
                weights = self._versions[operator.role][-1] if operator.adapters else initial_weights(operator.role)
                context = 0 if operator.kind == "combine" else weights
                for column in operator.writes:
                    self._evaluated[step, column, row] = written(operator, column, step, row, read, context)

    def _read_evaluation(self, step: int, column: str, row: int) -> Value:
        return evaluation_value(column, row) if column in self._graph.inputs else self._evaluated[step, column, row]

    def _mini_batches(self) -> list[range]:
        """Rows by mini-batch: contiguous prompts with all segments and samples; sizes differ by at most one prompt."""
        algorithm = self._spec.algorithm
        prompts, count = algorithm.prompts_per_step, algorithm.num_mini_batches
        rows = self._rows_of_prompt * self._spec.num_segments * algorithm.attempts
        return [range(m * prompts // count * rows, (m + 1) * prompts // count * rows) for m in range(count)]

    def _reads(self, operator: Operator, step: int, rows: Iterable[int]) -> dict[int, Value]:
        places, k = self._spec.num_segments * self._spec.algorithm.attempts, self._spec.num_sequences
        read = {
            row: [
                column
                for column in operator.reads
                # a prompt has further texts at the first of its places, one for each sample
                if column not in operator.extra_reads or (row // self._rows_of_prompt % places, row % k) == (0, 0)
            ]
            for row in rows
        }
        return {
            row: digest(*(self._read(step, column, row) for column in of_row), *self._carried(operator, step, row))
            for row, of_row in read.items()
        }

    def _carried(self, operator: Operator, step: int, row: int) -> list[Value]:
        """A response goes on from its own place in the step before, unless the step takes a prompt for that."""
        prompt = row // self._rows_of_prompt
        if not step or (step - prompt) % self._spec.num_segments == 0:
            return []
        return [self._columns[step - 1, column, row] for column in operator.carries]

    def _read(self, step: int, column: str, row: int) -> Value:
        if column in self._graph.inputs:
            return input_value(step, column, row)
        return self._columns[step, column, row]

    def _write(self, operator: Operator, step: int, weights: Value) -> None:
        mini_batches = self._mini_batches()
        whiten = whitening(self._spec, operator)
        together = [range(mini_batches[-1].stop)] if whiten == "batch" else mini_batches
        for rows in together:
            reads = self._reads(operator, step, rows)
            shared = statistic(reads) if whiten != "none" else 0
            for row, read in reads.items():
                context = shared if operator.kind == "combine" else weights
                for column in operator.writes:
                    self._columns[step, column, row] = written(operator, column, step, row, read, context)

    def _train(self, operator: Operator, step: int) -> None:
        weights = self._versions[operator.role][-1]
        for _ in range(self._spec.algorithm.epochs):
            for rows in self._mini_batches():
                weights = updated(operator, weights, self._reads(operator, step, rows))
        self._versions[operator.role].append(weights)
