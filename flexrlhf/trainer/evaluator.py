"""Evaluations on one rank: execute an Eval's list over batches of the evaluation set."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from flexrlhf.comm.move import ColumnMover, RowPacking
from flexrlhf.comm.rows import RowStore
from flexrlhf.engines.base import Moments, add_moments
from flexrlhf.strategies.instructions import Eval, Move, Run
from flexrlhf.trainer.evaluation_batches import evaluation_shape, walk_evaluation
from flexrlhf.trainer.execution import Execution, Observer, OperatorRun
from flexrlhf.trainer.operator_context import OperatorContext, evaluation_sampling
from flexrlhf.trainer.rank_context import RankContext
from flexrlhf.trainer.run_operator import run_operator
from flexrlhf.trainer.step_rows import input_columns


class Evaluator:
    """Executes Eval instructions on this rank."""

    def __init__(self, context: RankContext, operators: OperatorContext, observers: Sequence[Observer]) -> None:
        """``operators``: context of the operators of training. ``observers``: receive what is computed."""
        self._context, self._observers = context, observers
        self._operators = replace(operators, sampling=evaluation_sampling(context.plan, operators.sampling))

    def evaluate(self, instruction: Eval, execution: Execution) -> None:
        """Execute the list of ``instruction``; observers receive its runs once all batches are computed."""
        rows = EvaluationRows(self._context, instruction)
        results: dict[int, Moments] = {}
        for index, inner, batches in walk_evaluation(instruction, rows.shape, self._context.rank):
            if isinstance(inner, Move):
                rows.move(inner)
            else:
                add_moments(results.setdefault(index, {}), self._run(inner, batches, rows))
        rows.finish()
        for index, moments in sorted(results.items()):
            run = instruction.instructions[index]
            assert isinstance(run, Run), "moves report nothing"
            result = Execution(execution.position, execution.step, run, inner=index)
            result.work, result.store = self._work(run, rows.shape.mini_batches, rows), rows.store
            result.moments = moments
            for observer in self._observers:
                observer.computed(result)

    def _run(self, run: Run, batches: range, rows: EvaluationRows) -> Moments:
        """Execute ``run`` on this rank's rows of ``batches``. Returns its statistics under the names of evaluations."""
        statistics = run_operator(self._work(run, batches, rows), rows.store, self._operators)
        return {f"eval_{name.removeprefix('eval_')}": value for name, value in statistics.items()}

    def _work(self, run: Run, batches: range, rows: EvaluationRows) -> OperatorRun:
        """Return the operator of ``run`` over ``batches``."""
        model, rank, examples = self._context.models[run.model], self._context.rank, self._context.data.evaluation
        return OperatorRun(*(run.operator, model, run.layout, rows.shape, batches, rank, examples), tokens=run.tokens)


class EvaluationRows:
    """Rows of the evaluation set on this rank, for one Eval.

    shape:  of all prompts, in batches.
    store:  columns of this rank's rows, which are numbered over all prompts.
    """

    def __init__(self, context: RankContext, instruction: Eval) -> None:
        plan, device = context.plan, context.world.device
        self.shape = evaluation_shape(len(context.data.evaluation), instruction.batch)
        self.store = RowStore(plan.lengths, device)
        self._context = context
        self._mover = ColumnMover(context.rank, RowPacking(self.shape, plan.lengths, device), context.wait)
        self._put_inputs(instruction)

    def move(self, move: Move) -> None:
        """Start a Move of columns of one batch."""
        group = self._context.groups.get("move", move.ranks)
        assert group is not None, "a move joins at least two ranks"
        self._mover.start(move, self.store, group)

    def finish(self) -> None:
        """Await all rows that are under way."""
        self.store.finish()
        self._mover.close()

    def of(self, run: Run) -> tuple[int, ...]:
        """Return the rows of this rank that ``run`` works on in the whole evaluation."""
        return self.shape.rows(self.shape.prompts_on(run.layout, self._context.rank, self.shape.mini_batches))

    def _put_inputs(self, instruction: Eval) -> None:
        """Put columns of the data set, for the rows of which runs on this rank read some."""
        plan, data = self._context.plan, self._context.data
        names = set(plan.graph.inputs)
        readers = [
            run for run in instruction.runs if self._context.rank in run.ranks and names & set(run.operator.reads)
        ]
        rows = sorted({row for run in readers for row in self.of(run)})
        columns = input_columns(data.evaluation, rows, self.shape.samples_per_prompt, plan.lengths, data.pad_token_id)
        for name in names & set(columns):
            self.store.put(name, rows, columns[name].to(self._context.world.device))
