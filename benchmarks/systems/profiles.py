"""Systems of the field: engines, placements and a few constants of each.

The constants are fitted on published steps (``benchmarks/calibration``), never on a single one of them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, Literal

from flexrlhf.guideline.costs.analytic import OVERHEADS, RunOverheads
from flexrlhf.guideline.costs.cost_model import Recompute
from flexrlhf.guideline.costs.profiles import named_rows, read_table

Gathers = Literal["every step", "at once", "tensor parallel", "own copy", "reshard"]
"""How weights come to generation: ZeRO-3 gathers them for every token, or once for all; DeepSpeed's hybrid engine
shards them over a node; a separate engine has a copy that is sent; 3D meshes exchange their shards."""
Offloads = Literal["no", "at last", "always"]
"""When gradients and optimizer are in host memory; at last: if nothing else fits."""
MeshRule = Literal["ZeRO", "symmetric", "smallest", "searched"]
"""How a model's devices share its work: replicas alone; tensor parallel in the node, with the shortest pipeline that
fits; as little of both as fits; the best mesh for each call."""


CONTROLLER_SECONDS = 1.1
"""Time of a controlling process in each call, for all systems that have one. Fitted."""
SYNC_SECONDS = 3.3
"""Time until such a process has a weight sync between nodes begin. Fitted."""


@dataclass(frozen=True)
class System:
    """One system of the field. How it works (``systems.csv``):

    name:               the system
    trainer:            engine profile of forward and training passes
    generator:          decode profile of generation
    layout:             how a model's devices share its work
    gathers:            how weights come to generation
    placements:         names of the placements that it chooses among
    decode_rows:        most rows that a replica decodes together
    scores_again:       whether the actor computes the log-probs of its responses
    offloads:           when gradients and optimizer are in host memory
    streams:            whether the weights of all models are in host memory then too, if ZeRO-3 shards them
    ahead:              whether it generates the next batch while it trains
    sleeps:             whether trained states and the copy that generates leave the device for each other
    all_heads:          whether its planner counts keys and values of all heads
    stages:             ZeRO stages in order of preference
    rests:              whether the memory of one call is released before the next
    recompute:          activations that the backward pass computes again
    micro_tokens:       most tokens of a pass, of at least one row
    sends_tokens:       tokens of the rows that each device of the actor has generated at a time, and waits for
    pads:               whether all rows of a pass are as long as the longest of the step
    controller_seconds: time of a call in which a controlling process collects its rows and hands them on; 0: no process
                        does
    sync_seconds:       start of a weight sync between nodes, which such a process begins
    overheads:          its own overheads of a step (``speeds.csv``); cells that are empty there have the package's
    """

    name: str
    trainer: str = "deepspeed"
    generator: str = "transformers"
    layout: MeshRule = "ZeRO"
    gathers: Gathers = "at once"
    placements: tuple[str, ...] = ("co-located",)
    decode_rows: int | None = None
    scores_again: bool = True
    offloads: Offloads = "no"
    streams: bool = False
    ahead: bool = False
    sleeps: bool = False
    all_heads: bool = False
    stages: tuple[int, ...] = (2, 3)
    rests: bool = True
    recompute: Recompute = "full"
    micro_tokens: int | None = None
    sends_tokens: int | None = None
    pads: bool = False
    controller_seconds: float = 0.0
    sync_seconds: float = 0.0
    overheads: RunOverheads = OVERHEADS


def read_systems(directory: Path) -> dict[str, System]:
    """Return the systems of two tables: ``systems.csv``, how each of them works, and ``speeds.csv``, its overheads."""
    speeds = {row["name"]: row for row in read_table(directory / "speeds.csv")}
    return named_rows(System, (_with_overheads(_lists(row), speeds) for row in read_table(directory / "systems.csv")))


def _with_overheads(row: dict[str, Any], speeds: Mapping[str, Mapping[str, str]]) -> dict[str, Any]:
    own = speeds.get(row["name"], {})
    values = {item.name: float(own[item.name]) for item in fields(RunOverheads) if item.name in own}
    controlled = row.pop("controlled") == "yes"
    return {
        **row,
        "controller_seconds": CONTROLLER_SECONDS if controlled else 0.0,
        "sync_seconds": SYNC_SECONDS if controlled else 0.0,
        "overheads": replace(OVERHEADS, **values),
    }


def _lists(row: dict[str, str]) -> dict[str, str | list[str]]:
    """Return ``row`` with its lists split at semicolons."""
    return {column: cell.split("; ") if column in ("placements", "stages") else cell for column, cell in row.items()}


SYSTEMS = read_systems(Path(__file__).parent)
