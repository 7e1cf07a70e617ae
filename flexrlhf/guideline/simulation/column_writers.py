"""Runs of a list of instructions that others wait for: by the columns that they write, or the model that they train."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

from flexrlhf.api import Instruction, ModelName, Run


class ColumnWriters:
    """Runs of a list of instructions, by their columns."""

    def __init__(self, instructions: Sequence[Instruction]) -> None:
        self._runs = {index: each for index, each in enumerate(instructions) if isinstance(each, Run)}
        self._writers: dict[str, list[int]] = defaultdict(list)
        for index, run in self._runs.items():
            for column in run.operator.writes:
                self._writers[column].append(index)

    def of(self, reader: Run) -> dict[int, Run]:
        """Return the runs whose columns ``reader`` reads, by their places in the list, in its order."""
        columns = {*reader.operator.reads, *reader.operator.earlier}
        places = sorted({place for column in columns for place in self._writers.get(column, ())})
        return {place: self._runs[place] for place in places if reader.reads_from(self._runs[place])}

    def last_training(self, model: ModelName) -> tuple[int, ...]:
        """Return the place of the run that ends the training of ``model``, if one trains it."""
        places = [i for i, run in self._runs.items() if run.model == model and run.operator.kind == "train"]
        return tuple(places[-1:])
