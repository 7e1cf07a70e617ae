"""The held-out rows of one rank while an evaluation lasts."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from flexrlhf.comm.move import Mover, Wire
from flexrlhf.comm.rows import RowStore
from flexrlhf.comm.world import Groups, Wait, World
from flexrlhf.data.examples import Example
from flexrlhf.execution.input_columns import input_columns
from flexrlhf.plan.plan import Plan
from flexrlhf.strategies.evaluation_batches import evaluation_shape, walk_evaluation
from flexrlhf.strategies.instructions import Eval, Move, Run


class Evaluation:
    """``shape``: of all held-out prompts. ``rows``: the columns of this rank's, which are numbered over all of them."""

    def __init__(
        self,
        plan: Plan,
        instruction: Eval,
        examples: Sequence[Example],
        pad_token_id: int,
        world: World,
        groups: Groups,
        wait: Wait,
    ) -> None:
        self.shape = evaluation_shape(len(examples), instruction.batch)
        self.rows = RowStore(plan.lengths, world.device)
        self._plan = plan
        self._instruction = instruction
        self._examples = examples
        self._world = world
        self._groups = groups
        self._mover = Mover(world.rank, Wire(self.shape, plan.lengths, world.device), wait)
        self._put_inputs(pad_token_id)

    def walk(self) -> Iterator[tuple[int, Run | Move, range]]:
        """What this rank does: (place in the list, instruction, batches)."""
        return walk_evaluation(self._instruction, self.shape, self._world.rank)

    def move(self, move: Move) -> None:
        group = self._groups.get("move", move.ranks)
        assert group is not None, "a move joins at least two ranks"
        self._mover.start(move, self.rows, group)

    def finish(self) -> None:
        """Await whatever is still under way."""
        self.rows.finish()
        self._mover.close()

    def rows_of(self, run: Run) -> tuple[int, ...]:
        """Rows of this rank that ``run`` works on in the whole evaluation."""
        layout = self._plan.placement[run.model].layout
        return self.shape.rows(self.shape.prompts_on(layout, self._world.rank, self.shape.mini_batches))

    def _put_inputs(self, pad_token_id: int) -> None:
        """Columns of the data set, of the rows whose runs read some."""
        names = set(self._plan.graph.inputs)
        mine = [run for run in self._instruction.runs if self._world.rank in run.ranks]
        rows = sorted({row for run in mine if names & set(run.operator.reads) for row in self.rows_of(run)})
        columns = input_columns(self._examples, rows, self.shape.samples_per_prompt, self._plan.lengths, pad_token_id)
        for name in names & set(columns):
            self.rows.put(name, rows, columns[name].to(self._world.device))
