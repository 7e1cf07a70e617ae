"""Workload of a system: one step of PPO or GRPO, and placements of the models on groups of devices."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from flexrlhf.guideline.costs.cost_model import Links, Transformer
from flexrlhf.placement.devices import DeviceClass

ACTOR, CRITIC, REF, REWARD = "actor", "critic", "ref", "reward"
ROLLOUT = "rollout"
"""Name of the actor's copy that generates, if that has its own devices."""


@dataclass(frozen=True)
class Workload:
    """One step and the devices that run it. If an optional setting is None the system chooses it.

    models:       shapes by role; a step without critic has no values
    devices:      number of devices
    device:       their class
    links:        their links
    rows:         rows of the step; None: as many as fit
    prompt:       mean tokens of a prompt
    responses:    tokens of responses, a sample
    minibatches:  optimizer steps in all epochs
    per_node:     devices in a node
    micro_rows:   rows of a pass of one replica
    decode_rows:  rows that one replica decodes together
    sent_rows:    rows that each device of the actor has generated at a time, if it waits for them
    generate_tp:  tensor-parallel size of generation
    train_split:  tensor-parallel size and pipeline stages of training
    """

    models: Mapping[str, Transformer]
    devices: int
    device: DeviceClass
    links: Links
    rows: int | None
    prompt: float
    responses: tuple[float, ...]
    minibatches: int = 1
    per_node: int = 8
    micro_rows: int | None = None
    decode_rows: int | None = None
    sent_rows: int | None = None
    generate_tp: int | None = None
    train_split: tuple[int, int] | None = None

    @property
    def mean(self) -> float:
        return sum(self.responses) / len(self.responses)


@dataclass(frozen=True)
class SystemPlacement:
    """Disjoint groups of devices, and the models on each.

    name:    name of the placement
    blocks:  devices of each group
    groups:   groups of each role (or of ``ROLLOUT``)
    """

    name: str
    blocks: tuple[int, ...]
    groups: Mapping[str, tuple[int, ...]]

    @property
    def home(self) -> str:
        """Role that generates: the actor, or ``ROLLOUT``."""
        return ROLLOUT if ROLLOUT in self.groups else ACTOR

    def devices(self, role: str) -> int:
        return sum(self.blocks[index] for index in self.groups[role])


def placements_of(name: str, workload: Workload) -> Iterator[SystemPlacement]:
    """Yield the placements called ``name`` on the workload's devices."""
    yield from _PLACEMENTS[name](workload)


def _roles(workload: Workload, **groups: tuple[int, ...]) -> dict[str, tuple[int, ...]]:
    return {role: groups[role] for role in (*workload.models, ROLLOUT) if role in groups}


def _co_located(workload: Workload) -> Iterator[SystemPlacement]:
    yield SystemPlacement("co-located", (workload.devices,), dict.fromkeys(workload.models, (0,)))


def _reward_alone(workload: Workload) -> Iterator[SystemPlacement]:
    groups = {role: (1,) if role == REWARD else (0,) for role in workload.models}
    if workload.devices > 1:
        yield SystemPlacement("reward alone", (workload.devices - 1, 1), groups)


def _interleaved(workload: Workload) -> Iterator[SystemPlacement]:
    half = workload.devices // 2
    if half:
        groups = _roles(workload, actor=(0, 1), critic=(0, 1), ref=(0,), reward=(1,))
        yield SystemPlacement("interleaved", (half, workload.devices - half), groups)


def _split(workload: Workload) -> Iterator[SystemPlacement]:
    """Yield placements with actor and reference on one part, critic and reward on the other."""
    groups = _roles(workload, actor=(0,), ref=(0,), critic=(1,), reward=(1,))
    for first in _first_parts(workload):
        yield SystemPlacement("split", (first, workload.devices - first), groups)


def _halves(workload: Workload) -> Iterator[SystemPlacement]:
    """Yield the placement with generation on all devices, then actor and reference on one half, critic and reward on
    the other."""
    half = workload.devices // 2
    if half:
        groups = _roles(workload, rollout=(0, 1), actor=(0,), ref=(0,), critic=(1,), reward=(1,))
        yield SystemPlacement("halves", (half, workload.devices - half), groups)


def _first_parts(workload: Workload) -> tuple[int, ...]:
    """Return sizes of the first of two parts, in eighths; in whole nodes if there are several."""
    unit = max(1, workload.per_node if workload.devices > workload.per_node else workload.devices // 8)
    sizes = {round(workload.devices * share / 8 / unit) * unit for share in range(2, 7)}
    return tuple(sorted(size for size in sizes if 0 < size < workload.devices))


def _standalone(workload: Workload) -> Iterator[SystemPlacement]:
    """Yield placements with each model and the rollout engine on separate devices, in eighths (OpenRLHF's recipes: 1,
    1, 2, 2, 2)."""
    groups = _roles(workload, ref=(0,), reward=(1,), critic=(2,), actor=(3,), rollout=(4,))
    for eighths in (
        (1, 1, 2, 2, 2),
        (1, 1, 1, 3, 2),
        (1, 1, 1, 2, 3),
        (1, 1, 3, 2, 1),
        (2, 1, 1, 2, 2),
        (1, 2, 2, 2, 1),
    ):
        if workload.devices >= 8:
            yield SystemPlacement("standalone", tuple(workload.devices * share // 8 for share in eighths), groups)


def _standalone_without_rollout(workload: Workload) -> Iterator[SystemPlacement]:
    groups = _roles(workload, ref=(0,), reward=(1,), critic=(2,), actor=(3,))
    if workload.devices >= 8:
        eighth = workload.devices // 8
        yield SystemPlacement("standalone", (eighth, eighth, 2 * eighth, workload.devices - 4 * eighth), groups)


def _disaggregated(workload: Workload) -> Iterator[SystemPlacement]:
    """Yield placements with training on one part, copies for everything else on the other (FlexRLHF's guideline: 30 to
    50 % of devices)."""
    groups = _roles(workload, actor=(0,), critic=(0,), ref=(1,), reward=(1,), rollout=(1,))
    for first in _first_parts(workload):
        yield SystemPlacement("disaggregated", (first, workload.devices - first), groups)


_PLACEMENTS = {
    "co-located": _co_located,
    "reward alone": _reward_alone,
    "interleaved": _interleaved,
    "split": _split,
    "halves": _halves,
    "standalone": _standalone,
    "standalone without rollout": _standalone_without_rollout,
    "disaggregated": _disaggregated,
}
