"""Calls of models from a plain program on one process (HybridFlow, section 4), on the ranks of a placement.

    with flexrlhf.Session("my.yaml", placement_ratio=[1, 1, 0.5, 0.5]) as run:
        for batch in run.prompts():
            run.generate(batch)
            ...
            for part in batch.mini_batches(4):
                run.train_actor(part)

Every operator of the algorithm's graph is a method. A call is sent to the ranks and returns at once; the program waits
where it reads a column or a metric.
"""

from __future__ import annotations

import json
import os
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from fractions import Fraction
from functools import cached_property, partial
from itertools import chain, repeat
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, NoReturn, Self, get_args

from safetensors.torch import load
from torch import Tensor

from flexrlhf.config.code_checks import check_function
from flexrlhf.config.spec_file import SpecFile, program_settings
from flexrlhf.data.examples import Example
from flexrlhf.data.files import Row
from flexrlhf.errors import UserError
from flexrlhf.launch.called_batch import CalledBatch, Metrics, named
from flexrlhf.launch.session_connection import SessionRanks
from flexrlhf.operators.graph import TrainPart, is_own
from flexrlhf.placement.hosts import Hosts
from flexrlhf.placement.protocols import PromptParts, SplitPrompts, TransferProtocol
from flexrlhf.plan.choice import planned
from flexrlhf.plan.plan import Plan
from flexrlhf.plan.suggestions import check_fits
from flexrlhf.runs.fingerprints import FunctionFiles
from flexrlhf.runs.run_directory import RunDirectory
from flexrlhf.strategies.calls import CalledStep, OperatorCall
from flexrlhf.strategies.instructions import Offload, Release, Reload
from flexrlhf.text import counted


class Session:
    """Operators of a run's graph as methods: ``run.generate(batch)``, ``run.values(batch)``, ``run.train_actor(part)``.

    plan:       placement, models and graph of the run; the program decides the order of the calls.
    directory:  of the run: metrics, samples, timeline and models are there as of a planned run.
    """

    def __init__(
        self,
        config_path: str | Path,
        placement_ratio: Sequence[float | Fraction] | str | None = None,
        *,
        devices: int | None = None,
        overrides: Sequence[str] = (),
        force: bool = False,
        resume: str | Path | None = None,
        nnodes: int = 1,
        rdzv_endpoint: str = "",
    ) -> None:
        """Plan the run of a YAML file; ranks start where the session is entered.

        nnodes:         machines of the job; this one is the first, the others join it by ``flexrlhf join``.
        rdzv_endpoint:  HOST:PORT of this machine, where several meet.

        The others are the ones of ``ExecutionEngine``. Raises UserError for machines that do not fit, and for a plan
        that calls cannot follow: with dynamic sampling, or models that move.
        """
        hosts = Hosts(nnodes, rdzv_endpoint=rdzv_endpoint)
        spec = SpecFile(config_path).spec_on(nnodes, program_settings(overrides, devices), placement_ratio)
        if Hosts.under_torchrun():
            raise UserError(
                "session: it starts the ranks itself, found torchrun's; start the program with python, on one machine, "
                "and `flexrlhf join` on each other one"
            )
        if (found := hosts.of_launcher("auto", os.environ)) != hosts:
            raise UserError(
                f"session: srun has started this program on {found.nnodes} nodes, and it runs on one; start `flexrlhf "
                f"join` on the others, and give nnodes={found.nnodes} and rdzv_endpoint"
            )
        hosts.check_single_planner([spec])
        ((self.plan, _),) = planned([spec])
        hosts.check_cluster(self.plan.cluster)
        _check_callable(self.plan)
        if not force:
            check_fits(self.plan)
        self.directory = self.plan.spec.directory
        self._resume = None if resume is None else str(resume)
        self._ranks = SessionRanks(hosts)
        # first step whose batch is not taken yet, and batches of steps that have not ended
        self._next_step, self._open = 0, list[CalledBatch]()
        # calls that a checkpoint has of steps in flight, and these steps
        self._kept: dict[int, list[OperatorCall]] = {}
        self._in_flight: dict[int, CalledStep] = {}
        self._saves = False
        self._last: CalledBatch | None = None
        self._num_read = 0

    def __enter__(self) -> Self:
        """Start the ranks and load the models, once. Raises UserError and RankFailure."""
        self._next_step, calls = self._ranks.start(self.plan, self._resume)
        before = None
        for step, messages in sorted((int(step), messages) for step, messages in calls.items()):
            before = self._in_flight[step] = self._new_step(before)
            before.add_all(messages)
            before.builder.lag = len(calls) - 1 - len(self._kept)
            self._kept[step] = [OperatorCall.of(message) for message in messages]
        # where nothing leaves it, with the program
        weakref.finalize(self, self._ranks.end, raises=False)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """End the ranks: models are saved after the last step, and a checkpoint is written before it.

        A step in whose middle the program is does not count if it ends with an error, or if its trainings are not done.
        """
        try:
            while error is None and self._open and _is_trained(self._open[0]):
                self.end_step()
        finally:
            self._open = []
            self._ranks.end(raises=error is None)

    def prompts(self, given: Iterable[Sequence[str | Row]] | None = None) -> Iterator[CalledBatch]:
        """Yield the batches of the run, in order. A step ends where the next batch is taken if it is trained on, else
        ``schedule.lag`` batches later.

        ``given``: prompts of each further step, as texts or as rows of the data set; None: those of the data set. A
        session ends with the last of them. Raises UserError for another number of prompts than
        ``algorithm.prompts_per_step``, for prompts that cannot be used, for a step that ends with gradients, and for
        one that another loop has left in its middle.
        """
        if isinstance(given, str) or not (given is None or isinstance(given, Iterable)):
            raise UserError(f"session: prompts() takes a list of prompts for each step, found {named(given)}")
        steps = range(self._next_step, self.plan.spec.steps)
        # the steps end before the prompts do
        for step, rows in zip(steps, repeat(None) if given is None else map(_listed, given), strict=False):
            batch = self._begin(step, None if rows is None else self._encoded(step, rows))
            yield batch
            while self._open and step == self._next_step - 1:
                if self._open[0].step > step - self.plan.schedule.lag and not _is_trained(self._open[0]):
                    break
                self.end_step()

    def _begin(self, step: int, prompts: Sequence[object] | None) -> CalledBatch:
        """Begin a step. ``prompts``: examples of the program's own, for JSON."""
        with self._ranks.call():
            self._end_left(step)
            with self._ranks.exchange():
                self._ranks.send({"do": "begin", "step": step, "examples": prompts})
                called = self._in_flight.pop(step, None)
                if called is None:
                    called = self._new_step(self._open[-1].called if self._open else None)
                    for each in self._open:
                        each.called.overtake()
                self._open.append(CalledBatch(self, step, called, self.plan.batch.mini_batches))
                self._next_step = step + 1
            return self._open[-1]

    def _end_left(self, step: int) -> None:
        """End the steps that a loop has left, before the batch of ``step`` is taken.

        Raises UserError in the middle of their calls: an error may have left the loop.
        """
        while self._open and _is_trained(self._open[0]):
            self._end()
        left = self._open[0] if self._open else None
        if left is not None and left.step < step - self.plan.schedule.lag:
            raise UserError(
                f"session: a loop over prompts() has left step {left.step} before all of its trainings; count it as it "
                f"is by end_step(), or leave the session and resume it"
            )
        if step != self._next_step:
            raise UserError(f"session: the batch of step {step} is not next, step {self._next_step} is; use one loop")

    def end_step(self) -> None:
        """End the step as it is, without the next batch; rows that it was not trained on are counted. With batches of
        several steps it is the first of them.

        Raises UserError for gradients without an optimizer step.
        """
        with self._ranks.call():
            self._end()

    def _end(self) -> None:
        batch = self._first("end_step")
        batch.called.check_ended()
        with self._ranks.exchange():
            self._ranks.send({"do": "end", "saves": self._saves})
            batch.called.end()
            self._open.pop(0)
            self._last, self._saves = batch, False
            self._kept.pop(batch.step, None)

    def _end_before(self, batch: CalledBatch, operator: str) -> None:
        """End the steps before that of ``batch``, which is trained on: batches are, in order. Raises UserError for one
        without its trainings."""
        while (first := self._open[0]).called is not batch.called:
            if not _is_trained(first):
                raise UserError(
                    f"session: {operator} on the batch of step {batch.step}, before all trainings of step "
                    f"{first.step}; train on that, or count it as it is by end_step()"
                )
            self._end()

    def __getattr__(self, name: str) -> Callable[..., Any]:
        """Return the operator ``name`` as a function of a batch: it returns the batch, a training its metrics."""
        if name.startswith("_"):
            raise AttributeError(name)
        try:
            self._new_step().operator(OperatorCall(name, self.plan.batch.mini_batches))
        except UserError as error:
            raise _NoOperatorError(str(error)) from None
        return partial(self.call, name)

    def __reduce__(self) -> NoReturn:
        raise UserError("session: it cannot be copied or sent to another process; make its calls in this one")

    def call(
        self, operator: str, batch: CalledBatch, loss: str = "", protocol: SplitPrompts | None = None
    ) -> CalledBatch | Metrics:
        """Call an operator on a batch or on some mini-batches of it, a training with an optimizer step for each.

        loss:      of a training, in place of the graph's: a name of the package, or ``path/to/file.py:name``.
        protocol:  takes the ranks of each replica and a range of prompts, numbered among those that a step takes,
                   returns the prompts of each replica; it may depend on columns that the program has read. None: as
                   planned.

        Returns the batch, with the columns that the operator writes; of a training its metrics. Raises UserError for a
        call whose columns are not there, for a batch of an earlier step, and as ``errors`` has it if ranks have ended.
        """
        parts = () if protocol is None else self._parts(operator, self._current(batch), protocol)
        return self._call(batch, operator, loss, parts=parts)

    def compute_loss(self, operator: str, batch: CalledBatch, loss: str = "") -> Metrics:
        """Compute the loss of a training on mini-batches in a forward pass, without an optimizer step.

        ``loss``: in place of the graph's; ``ptx`` is that of the step's pretraining texts (``algorithm.ptx``).

        Returns the metrics of the loss, and ``total_loss``, its mean over the mini-batches. Raises UserError as
        ``call``.
        """
        return self._metrics(batch, operator, loss, "loss")

    def forward_backward(self, operator: str, batch: CalledBatch, loss: str = "") -> Metrics:
        """Add the gradients of the loss of a training on mini-batches, for the next optimizer step.

        Parts of a batch add up, each mini-batch with denominators of its own; ``loss``: of each part, in place of the
        graph's.

        Returns the metrics of the loss. Raises UserError as ``call``, and for parts that are no neighbours.
        """
        return self._metrics(batch, operator, loss, "backward")

    def optim_step(self, operator: str) -> Metrics:
        """Make one optimizer step on the gradients that ``forward_backward`` has added since the last one.

        Returns its metrics: the learning rate, the norm of the gradients. Raises UserError without gradients.
        """
        return self._metrics(self._first("optim_step"), operator, part="step")

    def _first(self, call: str) -> CalledBatch:
        """Return the batch of the first step that has not ended. Raises UserError without one."""
        self._ranks.check_process()
        if not self._open:
            raise UserError(f"session: {call}() outside a step; call it in the loop over prompts()")
        return self._open[0]

    def _metrics(self, batch: CalledBatch, operator: str, loss: str = "", part: TrainPart = "loss") -> Metrics:
        metrics = self._call(batch, operator, loss, part)
        assert isinstance(metrics, Metrics), "a training has metrics"
        return metrics

    def _call(
        self, batch: CalledBatch, operator: str, loss: str, part: TrainPart | Literal[""] = "", parts: PromptParts = ()
    ) -> CalledBatch | Metrics:
        if not isinstance(operator, str):
            raise UserError(f"session: an operator is called by its name, found {named(operator)}")
        if not isinstance(loss, str | None):
            raise UserError(
                f"session: a loss of {operator} is given by its name or as path/to/file.py:name, found {named(loss)}"
            )
        code = dict[str, str]()
        if loss and is_own(loss):
            check_function(loss, f"session: the loss of {operator}")
            code = FunctionFiles(loss, f"session: the loss of {operator}").digests()
        with self._ranks.call():
            called = self._current(batch).called
            numbers = called.added_to(operator) if part == "step" else batch.parts
            call = OperatorCall(operator, numbers, loss or "", part, parts)
            kind = called.operator(call).kind
            if kind in ("train", "backward", "step"):
                self._end_before(batch, operator)
            number = called.num_calls
            if call in (kept := self._kept.get(batch.step, [])):
                number = kept.index(call)
            else:
                with self._ranks.exchange():
                    called.add(call)
                    self._ranks.send({**call.message, "do": "call", "step": batch.step, "code": code})
        return Metrics(self, batch, number) if kind in ("train", *get_args(TrainPart)) else batch

    def _parts(self, operator: str, batch: CalledBatch, protocol: SplitPrompts) -> PromptParts:
        """Return the numbers of each replica in the mini-batches of ``batch``. Raises UserError as a planned one."""
        called = batch.called.operator(OperatorCall(operator, batch.parts))
        if called.kind == "generate" and self.plan.kept_slots:
            raise UserError(
                f"session: a protocol of {operator} would take rows away from the keys and values that they have; "
                f"leave it out, or set rollout.caches: renewed"
            )
        replicas = self.plan.placement.layout_of(called).replica_sets
        split = TransferProtocol(f"of {operator}", protocol)
        each = [split.parts(replicas, self.plan.batch.numbers(number)) for number in batch.parts]
        return tuple(tuple(chain.from_iterable(parts)) for parts in zip(*each, strict=True))

    def save(self) -> None:
        """Write a checkpoint at the end of this step, which ``Session(resume="auto")`` goes on from."""
        self._first("save")
        self._saves = True

    @property
    def metrics(self) -> list[dict[str, Any]]:
        """Rows of ``metrics.jsonl`` so far, one for each step."""
        return RunDirectory(self.directory).metrics.read()

    def trace(self) -> Plan:
        """Return the plan whose step is the last one that the program called, which ``simulate`` prices."""
        if self._last is None:
            raise UserError("session: trace() before a step has ended; call it behind the loop over prompts()")
        called, step = self._last.called.instructions, self._last.step
        schedule = self.plan.schedule.as_called(called, step)
        return replace(self.plan, schedule=schedule)

    def column(self, batch: CalledBatch, name: str) -> Tensor:
        """Return a column of the rows of ``batch``, (n, ...), on the CPU. Waits until it is computed."""
        if not isinstance(name, str):
            raise UserError(f"session: a column is read by its name, as in batch['scores'], found {named(name)}")
        with self._ranks.call():
            self._current(batch).called.owners(name, batch.parts)
            self._num_read += 1
            numbers = [batch.parts.start, batch.parts.stop]
            parts = self._ranks.request(
                {"do": "column", "step": batch.step, "name": name, "number": self._num_read, "mini_batches": numbers}
            )
        found: dict[int, Tensor] = {}
        for part in map(load, parts):
            found.update(zip(part["rows"].tolist(), part["values"], strict=True))
        shape = self.plan.batch
        rows = shape.rows(tuple(prompt for number in batch.parts for prompt in shape.prompts(number)))
        import torch

        return torch.stack([found[row] for row in rows])

    def statistics(self, batch: CalledBatch, number: int) -> dict[str, float]:
        """Return the metrics of a call of this step by its number. Waits until it has run."""
        with self._ranks.call():
            most = self._current(batch).called.num_calls
            if not isinstance(number, int) or not 0 <= number < most:
                raise UserError(
                    f"session: step {batch.step} has {counted(most, 'call')}, from 0, found {named(number)}"
                )
            (reply,) = self._ranks.request({"do": "statistics", "step": batch.step, "call": number})
        found: dict[str, float] = json.loads(reply)
        return found

    def _encoded(self, step: int, rows: Sequence[str | Row]) -> Sequence[object]:
        """Return the examples of ``rows`` for JSON."""
        wrong = next((row for row in rows if not isinstance(row, str | dict)), "")
        if wrong != "":
            raise UserError(
                f"session: prompts of step {step}: expected texts or rows of the data, found {named(wrong)}"
            )
        if len(rows) != self.plan.batch.num_new:
            raise UserError(
                f"session: {len(rows)} prompts for step {step}; algorithm.prompts_per_step is "
                f"{self.plan.batch.num_new}, give as many"
            )
        examples = self.plan.data.examples(f"prompts of step {step}", rows, self._tokenizer)
        found: Sequence[object] = Example.to_data(examples)
        return found

    @cached_property
    def _tokenizer(self) -> Any:
        return self.plan.tokenizer.load()

    def _new_step(self, before: CalledStep | None = None) -> CalledStep:
        """Return a step without calls. ``before``: the open one before it; None: the last one has ended."""
        ended = None if self._last is None else self._last.called
        return CalledStep.begin(self.plan.graph, self.plan.placement, self.plan.batch, before or ended, ended)

    def _current(self, batch: CalledBatch) -> CalledBatch:
        """Return ``batch``. Raises UserError if it is none of the step under way."""
        if not isinstance(batch, CalledBatch):
            raise UserError(
                f"session: expected a batch of prompts(), or some of its mini-batches, found {named(batch)}"
            )
        if batch.session is not self:
            raise UserError("session: a batch of another session; take one of this session's prompts()")
        if all(batch.called is not each.called for each in self._open):
            raise UserError(f"session: a batch of step {batch.step}, which has ended; read what you need before that")
        return batch


def _is_trained(batch: CalledBatch) -> bool:
    return batch.called.is_trained(batch.step)


class _NoOperatorError(UserError, AttributeError):
    """Name that is no operator's."""


def _listed(rows: object) -> list[str | Row]:
    if isinstance(rows, str | dict) or not isinstance(rows, Iterable):
        raise UserError(f"session: prompts() takes a list of prompts for each step, found {named(rows)} for one")
    return list(rows)


def _check_callable(plan: Plan) -> None:
    """Raise UserError for settings of what a program decides itself."""
    spec, listed = plan.spec, plan.schedule.instructions
    moved = [each for each in listed if isinstance(each, Offload | Reload | Release)]
    own_prompts = "a program takes further prompts itself, by prompts(own), and leaves rows out; remove it"
    for setting, is_set, reason in (
        ("algorithm.dynamic_sampling", plan.batch.attempts > 1, own_prompts),
        ("algorithm.loop", spec.algorithm.loop is not None, "the program is the loop; remove it"),
    ):
        if is_set:
            raise UserError(f"{setting}: in a session {reason}")
    if moved:
        raise UserError(
            f"memory: a program alone has the order of calls, so a session keeps all models on their devices, and the "
            f"plan moves {moved[0].label} away; use more or larger devices"
        )
