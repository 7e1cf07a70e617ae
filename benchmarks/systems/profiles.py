"""Systems of the field: engines, placements and a few constants of each.

The constants are fitted on published steps (``benchmarks/calibration``), never on a single one of them.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from flexrlhf.guideline.costs.constants import named_rows, read_rows
from flexrlhf.guideline.costs.cost_model import Recompute

Gathers = Literal["every step", "at once", "tensor parallel", "own copy", "reshard"]
"""How weights come to generation: ZeRO-3 gathers them for every token, or once for all; DeepSpeed's hybrid engine
shards them over a node; a separate engine has a copy that is sent; 3D meshes exchange their shards."""
MeshRule = Literal["ZeRO", "symmetric", "smallest", "searched"]
"""How a model's devices share its work: replicas alone; tensor parallel in the node, with the shortest pipeline that
fits; as little of both as fits; the best mesh for each call."""


@dataclass(frozen=True)
class System:
    """One system of the field. How it works (``systems.csv``):

    name:               the system
    trainer:            engine profile of its forward and training passes
    generator:          decode profile of its generation
    layout:             how a model's devices share its work
    gathers:            how weights come to generation
    placements:         names of the placements that it chooses among
    decode_rows:        most rows that a replica decodes together
    scores_again:       whether the actor computes the log-probs of what it has generated
    offloads:           whether gradients and optimizer go to host memory where nothing else fits
    ahead:              whether it generates the next batch while it trains
    sleeps:             whether trained states and the copy that generates leave the device for each other
    all_heads:          whether its planner counts keys and values of all heads
    stages:             ZeRO stages in order of preference
    rests:              whether the memory of one call is released before the next
    recompute:          activations that the backward pass computes again

    Its constants (``speeds.csv``), one set for all published steps:

    passes:             share of its trainer's own speed that it reaches in a step
    decode:             share of its generator's own speed
    tensor:             share of the speed of tensor-parallel collectives
    gather:             share of the links' speed of ZeRO-3's collectives between nodes
    gather_within:      the same inside a node
    launch_seconds:     launching one layer in one decoding step on the host, in nodes with PCIe 5, where kernels are
                        launched one by one; 0: that of the generator's profile
    launch_tp_seconds:  addition to it with tensor parallelism
    gaps:               share of a step in which nothing runs
    sync_seconds:       start of sending the weights to a copy
    sync_gb_s:          speed of sending them; 0: that of the links
    """

    name: str
    trainer: str = "deepspeed"
    generator: str = "transformers"
    layout: MeshRule = "ZeRO"
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
