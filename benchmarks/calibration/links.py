"""Published and predicted timings of collectives and messages, and the fit of the link constants.

``python -m benchmarks.calibration.links DIRECTORY [--fit]``
"""

from __future__ import annotations

import sys
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import median

from benchmarks.calibration.command import command
from benchmarks.calibration.descent import descend, mean_and_square
from benchmarks.calibration.rows import Prediction, Row, read_rows
from flexrlhf.guideline.costs.cost_model import Links, Traffic
from flexrlhf.guideline.costs.links import ACROSS, WITHIN, LinkFigures, all_reduce_seconds, travel_seconds
from flexrlhf.placement.devices import DeviceClass

Figures = tuple[LinkFigures, LinkFigures]

# The network of these clusters is not stated: one port of a node is assumed, 100 Gb/s with A100s and 400 Gb/s with
# H100s, since more devices of a node get no more through it.
_CLUSTERS = {"a100": ("A100-80G", 12.5), "h100": ("H100-80G", 50.0)}


@dataclass(frozen=True)
class LinkCase:
    """Exchange of ``size`` bytes among ``ranks``, ``per_node`` of them in a node."""

    row: Row
    links: Links
    measured: float

    @property
    def size(self) -> int:
        return int(self.row["size_bytes"])

    @property
    def ranks(self) -> int:
        return int(self.row["num_workers"])

    @property
    def per_node(self) -> int:
        return int(self.row["devices_per_node"])

    @property
    def group(self) -> str:
        scope = "within" if self.ranks <= self.per_node else "across"
        return f"{self.row['collective']} {scope}/{self.row['cluster']}"

    def seconds(self, figures: Figures = (WITHIN, ACROSS)) -> float:
        if self.row["collective"] == "all_reduce":
            return all_reduce_seconds(self.size, self.ranks, self.per_node, self.links, figures=figures)
        inside = self.ranks <= self.per_node
        traffic = Traffic(self.size, 0) if inside else Traffic(0, self.size)
        return travel_seconds(traffic, self.links, figures)

    @property
    def wire(self) -> float:
        """Seconds at the links' speed as sold."""
        gb_s = self.links.device_gb_s if self.ranks <= self.per_node else self.links.node_gb_s
        moved = 2 * (self.ranks - 1) / self.ranks if self.row["collective"] == "all_reduce" else 1
        return moved * self.size / (gb_s * 1e9)


def predictions(directory: Path) -> list[Prediction]:
    cases, _ = read_cases(directory)
    share = median(case.wire / case.measured for case in cases)
    return [_prediction(case, share) for case in cases]


def _prediction(case: LinkCase, share: float) -> Prediction:
    return Prediction(
        goal="links",
        group=case.group,
        row=f"{case.ranks} ranks, {case.per_node} in a node, {case.size} bytes",
        measured=case.measured,
        predicted=case.seconds(),
        constant_mfu=case.wire / share,
        roofline=case.wire,
    )


def read_cases(directory: Path) -> tuple[list[LinkCase], dict[str, int]]:
    """Return the timings that are predicted, and the number of others by reason."""
    cases: list[LinkCase] = []
    left_out: dict[str, int] = defaultdict(int)
    for row in _rows(directory):
        case = _case(row)
        if isinstance(case, LinkCase):
            cases.append(case)
        else:
            left_out[case] += 1
    return cases, dict(left_out)


def _rows(directory: Path) -> list[Row]:
    names = sorted(path.stem for path in directory.glob("comm*.csv"))
    return [row for name in names for row in read_rows(directory, name)]


def _case(row: Row) -> LinkCase | str:
    family = _CLUSTERS.get(row["cluster"].split("_")[0])
    if family is None:
        return "devices unstated"
    if "pairwise" in row["cluster"] and row["collective"] == "send_recv":
        return "the same timings are published for A100s and H100s"
    device, node_gb_s = DeviceClass.KNOWN[family[0]], family[1]
    return LinkCase(row, Links(device.link_gb_s, node_gb_s), float(row["time_ms"]) / 1e3)


def fitted() -> dict[str, float]:
    """Return every constant that the fit sets, with its present value."""
    return {
        f"{name} {field}": value
        for name, each in _FIGURES.items()
        for field, value in asdict(each).items()
        if field != "hop_seconds"
    }


_FIGURES = {"within": WITHIN, "across": ACROSS}


def fit(cases: list[LinkCase]) -> dict[str, float]:
    """Return the constants with the smallest relative errors, none counted as more than 1."""
    return descend(lambda values: mean_and_square(_errors(cases, values)), fitted(), step=0.4)


def _errors(cases: list[LinkCase], values: Mapping[str, float]) -> list[float]:
    within, across = (
        replace(each, **{field: values[f"{name} {field}"] for field in asdict(each) if f"{name} {field}" in values})
        for name, each in _FIGURES.items()
    )
    return [min(abs(case.seconds((within, across)) / case.measured - 1), 1.0) for case in cases]


if __name__ == "__main__":
    command(sys.modules[__name__])
