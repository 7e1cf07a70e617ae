"""Published measurements as rows, and their predictions."""

from __future__ import annotations

import csv
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import mean

from flexrlhf.guideline.costs.cost_model import Transformer
from flexrlhf.placement.devices import DeviceClass

Row = dict[str, str]

_CLASSES = {
    "V100-32GB-SXM": "V100-32G",
    "A100-40GB-SXM": "A100-40G",
    "A100-80GB-SXM": "A100-80G",
    "A800-80GB-SXM": "A800-80G",
    "H100-80GB-SXM": "H100-80G",
    "H800-80GB": "H800-80G",
    "H200-141GB-SXM": "H200-141G",
    "H20-96GB": "H20-96G",
    "H100-96GB-HBM2e-500W": "H100-96G",
    "B200": "B200-180G",
    "L40S-48GB": "L40S-48G",
    "A6000-48GB": "A6000-48G",
    "A10-24GB": "A10-24G",
    "A100": "A100-80G",
    "H100": "H100-80G",
    "A40": "A40-48G",
}


@dataclass(frozen=True)
class Prediction:
    """One measurement in seconds, and its predictions.

    goal:          goal that the row counts for, such as ``training`` or ``decode``
    group:         group of the row
    row:           name of the row
    measured:      measured seconds
    predicted:     seconds by the cost model
    constant_mfu:  seconds at one utilisation for all rows
    roofline:      seconds by the roofline
    """

    goal: str
    group: str
    row: str
    measured: float
    predicted: float
    constant_mfu: float
    roofline: float

    @property
    def error(self) -> float:
        """Relative error, without its sign."""
        return abs(self.predicted - self.measured) / self.measured

    @property
    def signed(self) -> float:
        """Relative error; above 0: predicted too slow."""
        return self.predicted / self.measured - 1


def distinct(found: Sequence[Prediction]) -> list[Prediction]:
    """Return ``found`` with each cell once, by the mean of its measurements. Rows are one cell if all three predictors
    give the same."""
    cells: dict[tuple[str | float, ...], list[Prediction]] = defaultdict(list)
    for each in found:
        cells[each.goal, each.group, each.predicted, each.constant_mfu, each.roofline].append(each)
    return [replace(same[0], measured=mean(each.measured for each in same)) for same in cells.values()]


def verdict(error: float, goal: float | None) -> str:
    """Return whether an error meets a goal, if there is one."""
    return "" if goal is None else f"{'met' if error <= goal else 'NOT MET'} (<= {100 * goal:.0f})"


def read_rows(directory: Path, name: str) -> list[Row]:
    """Return the rows of ``directory``'s file ``name`` (without its ending) that are not marked as context."""
    with (directory / f"{name}.csv").open(newline="") as stream:
        return [row for row in csv.DictReader(stream) if row.get("split") != "context"]


def device_of(row: Row) -> DeviceClass | None:
    """Return the device class of a row; None for one that the catalogue lacks."""
    return DeviceClass.KNOWN.get(_CLASSES.get(row["gpu"], row["gpu"]))


def read_models(directory: Path) -> dict[str, Transformer]:
    """Return model shapes by name, from ``models.csv``."""
    with (directory / "models.csv").open(newline="") as stream:
        return {row["model"]: _model(row) for row in csv.DictReader(stream)}


def _model(row: Row) -> Transformer:
    return Transformer(
        layers=int(row["layers"]),
        hidden=int(row["hidden"]),
        ffn=int(row["ffn"]),
        heads=int(row["heads"]),
        kv_heads=int(row["kv_heads"]),
        head_dim=int(row["head_dim"]),
        vocabulary=int(row["vocab"]),
        gated=row["gated_mlp"] == "1",
        tied=row["tied_embeddings"] == "1",
    )
