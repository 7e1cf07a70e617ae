"""The systems of the field: their engines, placements, and the few constants that are theirs, one set for each.

The constants are fitted on published steps (``benchmarks/calibration``), never on one row of them.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from flexrlhf.guideline.costs.constants import named_rows, read_rows
from flexrlhf.guideline.costs.cost_model import Recompute

Gathers = Literal["every step", "at once", "tensor parallel", "own copy", "reshard"]
"""How weights come to generation: ZeRO-3 gathers them for every token, or once for all; DeepSpeed's hybrid engine cuts
them into the slices of a node; an engine of its own has a copy that is sent; 3D meshes exchange their parts."""
Layout = Literal["ZeRO", "symmetric", "smallest", "searched"]
"""How a model's devices share its work: replicas alone; tensor parallel in the node, a pipeline as short as fits;
as little of both as fits; each call its best mesh."""


@dataclass(frozen=True)
class System:
    """``trainer``, ``generator``: engine profiles. Fitted on the published steps of the system, one set for all:

    ``passes``, ``decode``: shares that it reaches, in a step, of its trainer's and generator's speed alone; ``tensor``:
    of collectives of tensor parallelism; ``gather``: of ZeRO-3's collectives between nodes, ``gather_within``: inside
    one. ``launch_seconds``: of one layer in one decoding step on the host, where kernels are launched one by one, in
    nodes with PCIe 5; ``launch_tp_seconds``: besides, with tensor parallelism; 0: the generator's own. ``gaps``: share
    of a step in which nothing is done. ``decode_rows``: the most that a replica decodes together. ``sync_seconds``,
    ``sync_gb_s``: of sending the weights to a copy; 0: as fast as the links.

    What it does: ``scores_again``: the actor computes the log-probs of what it has generated. ``offloads``: gradients
    and optimizer go to host memory where nothing else fits. ``ahead``: it generates the next batch while it trains.
    ``sleeps``: trained states and the copy that generates leave the device for each other. ``all_heads``: its planner
    counts keys and values of all heads. ``stages``: of ZeRO, in order of preference. ``rests``: False where memory of
    one call is not given back before the next.
    """

    name: str
    trainer: str = "deepspeed"
    generator: str = "transformers"
    layout: Layout = "ZeRO"
    gathers: Gathers = "at once"
    placements: tuple[str, ...] = ("co-located",)
    passes: float = 1.0
    decode: float = 1.0
    tensor: float = 1.0
    gather: float = 1.0
    gather_within: float = 1.0
    decode_rows: int | None = None
    launch_seconds: float = 0.0
    launch_tp_seconds: float = 0.0
    gaps: float = 0.0
    sync_seconds: float = 0.0
    sync_gb_s: float = 0.0
    scores_again: bool = True
    offloads: bool = False
    ahead: bool = False
    sleeps: bool = False
    all_heads: bool = False
    stages: tuple[int, ...] = (2, 3)
    rests: bool = True
    recompute: Recompute = "full"


def read_systems(directory: Path) -> dict[str, System]:
    """Return the systems of two tables: ``systems.csv``, how each of them works, and ``speeds.csv``, its constants."""
    speeds = {row["name"]: row for row in read_rows(directory / "speeds.csv")}
    return named_rows(System, (speeds[row["name"]] | _lists(row) for row in read_rows(directory / "systems.csv")))


def _lists(row: dict[str, str]) -> dict[str, str | list[str]]:
    """Return ``row`` with its lists split at semicolons."""
    return {column: cell.split("; ") if column in ("placements", "stages") else cell for column, cell in row.items()}


SYSTEMS = read_systems(Path(__file__).parent)
