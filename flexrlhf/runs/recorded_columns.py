"""Files of columns that a run records (``debug.record_columns``), and replay of its responses (``debug.replay``)."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import Tensor

from flexrlhf.comm.rows import RowStore
from flexrlhf.errors import UserError
from flexrlhf.metrics import Triple
from flexrlhf.operators.columns import Column
from flexrlhf.operators.graph import Operator
from flexrlhf.runs.row_file import RowFile
from flexrlhf.runs.tensor_files import save_tensors

DIRECTORY = "columns"
"""Folder of these files in the run's directory."""
_EVALUATED = "held-out-"
"""Begins the names of files with rows of the evaluation set."""
_ARRIVED = "arrived-"
"""Begins the names of files with columns that an operator read after a move."""
FILE_NAME = re.compile(r"step(?P<step>\d+)-(?P<operator>.+)-chunk\d+-rank(?P<rank>\d+)\.safetensors")
VERSIONS = "policy_version"
"""Column of a generate that says who generated, not what."""
OF_TOKENS = {"rollout_logprobs": "logprobs", "logprobs": "rollout_logprobs"}
"""Log-probs of the tokens → the column in which a run with another source of them has recorded theirs."""


@dataclass
class RecordedColumn:
    """One column of one step.

    operator:  that wrote it
    values:    by row
    ranks:     that wrote each row
    repeated:  rows that were written more than once
    """

    operator: str
    values: dict[int, Tensor] = field(default_factory=dict)
    ranks: dict[int, int] = field(default_factory=dict)
    repeated: set[int] = field(default_factory=set)

    def of_rows(self, rows: Sequence[int]) -> Tensor:
        """Return the values of ``rows`` (n, ...), in this order."""
        return torch.stack([self.values[row] for row in rows])


@dataclass(frozen=True)
class RecordedColumns:
    """Files of columns in the directory ``run``, and the statistics of each step, from which its metrics follow."""

    run: Path

    @property
    def _folder(self) -> Path:
        return self.run / DIRECTORY

    @property
    def statistics(self) -> RowFile:
        """Statistics of each step, and the instruction that reported each, in words."""
        return RowFile(self._folder / "statistics.jsonl")

    def write(
        self,
        place: str,
        rows: Sequence[int],
        columns: Mapping[str, Tensor],
        arrived: bool = False,
        of_evaluation: bool = False,
    ) -> Path:
        """Write the values of ``columns`` for ``rows``; return the file.

        place:          ``step<n>-<operator>-chunk<n>-rank<n>``.
        arrived:        whether the operator has read them after a move; else it has written them.
        of_evaluation:  whether the rows are of the evaluation set.
        """
        self._folder.mkdir(parents=True, exist_ok=True)
        prefix = f"{_ARRIVED * arrived}{_EVALUATED * of_evaluation}"
        path = self._folder / f"{prefix}{place}.safetensors"
        save_tensors({**columns, "rows": torch.tensor(rows, dtype=torch.int64)}, path)
        return path

    def write_statistics(self, step: int, statistics: Mapping[str, Triple], reporters: Mapping[str, str]) -> None:
        """Append the statistics of a step. ``reporters``: instruction that reported each, in words."""
        self._folder.mkdir(parents=True, exist_ok=True)
        self.statistics.append({"step": step, "statistics": statistics, "reporters": reporters})

    def read(self, step: int) -> dict[str, RecordedColumn]:
        """Return the columns of ``step`` by name."""
        columns: dict[str, RecordedColumn] = {}
        for operator, rank, file in self.files(step):
            parts = load_file(file)
            rows = parts.pop("rows").tolist()
            for name, values in parts.items():
                column = columns.setdefault(name, RecordedColumn(operator))
                column.repeated |= column.values.keys() & set(rows)
                column.values.update(zip(rows, values, strict=True))
                column.ranks.update(dict.fromkeys(rows, rank))
        return columns

    def files(self, step: int, arrived: bool = False) -> Iterator[tuple[str, int, Path]]:
        """Yield operator and rank of each file of columns of ``step``, with the file. ``X."""
        for file in sorted(self._folder.glob(f"{_ARRIVED * arrived}step{step}-*.safetensors")):
            found = FILE_NAME.fullmatch(file.name.removeprefix(_ARRIVED))
            assert found is not None, file
            yield found["operator"], int(found["rank"]), file

    def remove(self, step: int, rank: int | None = None) -> None:
        """Remove the files of ``step`` and later ones. ``rank``: that wrote them; None: all."""
        for file in self._folder.glob("*.safetensors"):
            found = FILE_NAME.search(file.name)
            if found is not None and int(found["step"]) >= step and rank in (None, int(found["rank"])):
                file.unlink()

    def rows_of(self, names: Sequence[str], step: int, rows: Sequence[int]) -> dict[str, Tensor]:
        """Return the columns ``names`` (n, ...) of ``rows`` of ``step``, for ``debug.late_replies_of``.

        Raises UserError if the run has not recorded them.
        """
        recorded = self.read(step)
        for name in names:
            if name not in recorded or not set(rows) <= recorded[name].values.keys():
                raise UserError(f"debug.late_replies_of {self.run}: has not recorded all rows of {name} of step {step}")
        return {name: recorded[name].of_rows(rows) for name in names}

    def replay(self, operator: Operator, step: int, rows: Sequence[int], store: RowStore) -> None:
        """Replace the rows that a generate ``operator`` wrote in ``store`` by the recorded ones.

        The tokens' versions remain the ones of the weights that this run generated with; in segments, where these may
        be several for a row, they are the recorded ones, which follow from the same rule.
        """
        recorded = self.read(step)
        for name in operator.writes if rows else ():
            if Column.plain(name) == VERSIONS and not operator.carries:
                mask = store.get(name.replace(VERSIONS, "response_mask"), rows)
                store.put(name, rows, store.get(name, rows).amax(1, keepdim=True) * mask)
                continue
            column = recorded.get(name) or recorded.get(OF_TOKENS.get(name, name))
            if column is None or not set(rows) <= column.values.keys():
                raise UserError(f"debug.replay {self.run}: has not recorded all rows of {name} of step {step}")
            store.put(name, rows, column.of_rows(rows).to(store.get(name, rows).device))
