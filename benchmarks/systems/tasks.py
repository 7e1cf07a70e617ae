"""One step of PPO or GRPO that a system is to run, and on which groups of devices its models may lie."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from flexrlhf.guideline.costs.cost_model import Links
from flexrlhf.guideline.costs.transformer import Transformer
from flexrlhf.placement.devices import DeviceClass

ACTOR, CRITIC, REF, REWARD = "actor", "critic", "ref", "reward"
ROLLOUT = "rollout"
"""Where the actor generates, when that is not where it trains."""


@dataclass(frozen=True)
class Task:
    """One step. ``models``: by role; a step without critic has no values. ``rows``: of the step; None: as many as fit.

    ``prompt``, ``responses``: tokens, as in a ``Call``. ``minibatches``: optimizer steps, all epochs together.
    ``micro_rows``, ``decode_rows`` of a replica, ``generate_tp`` and ``train_split`` (tensor-parallel size, stages of
    the pipeline) are chosen where they are not known.
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
    generate_tp: int | None = None
    train_split: tuple[int, int] | None = None

    @property
    def mean(self) -> float:
        return sum(self.responses) / len(self.responses)


@dataclass(frozen=True)
class Placement:
    """``blocks``: devices of each disjoint group. ``where``: role (or ``ROLLOUT``) → the groups that it is on."""

    name: str
    blocks: tuple[int, ...]
    where: Mapping[str, tuple[int, ...]]

    def devices(self, role: str) -> int:
        return sum(self.blocks[index] for index in self.where[role])


def placements_of(name: str, task: Task) -> Iterator[Placement]:
    """Those that ``name`` can mean on so many devices."""
    yield from _PLACEMENTS[name](task)


def _roles(task: Task, **where: tuple[int, ...]) -> dict[str, tuple[int, ...]]:
    return {role: where[role] for role in (*task.models, ROLLOUT) if role in where}


def _co_located(task: Task) -> Iterator[Placement]:
    yield Placement("co-located", (task.devices,), dict.fromkeys(task.models, (0,)))


def _reward_alone(task: Task) -> Iterator[Placement]:
    where = {role: (1,) if role == REWARD else (0,) for role in task.models}
    if task.devices > 1:
        yield Placement("reward alone", (task.devices - 1, 1), where)


def _interleaved(task: Task) -> Iterator[Placement]:
    half = task.devices // 2
    if half:
        where = _roles(task, actor=(0, 1), critic=(0, 1), ref=(0,), reward=(1,))
        yield Placement("interleaved", (half, task.devices - half), where)


def _split(task: Task) -> Iterator[Placement]:
    """Actor and its reference beside critic and reward."""
    where = _roles(task, actor=(0,), ref=(0,), critic=(1,), reward=(1,))
    for first in _cuts(task):
        yield Placement("split", (first, task.devices - first), where)


def _halves(task: Task) -> Iterator[Placement]:
    """Generation everywhere; then the models of the actor's side beside those of the critic's."""
    half = task.devices // 2
    if half:
        where = _roles(task, rollout=(0, 1), actor=(0,), ref=(0,), critic=(1,), reward=(1,))
        yield Placement("halves", (half, task.devices - half), where)


def _cuts(task: Task) -> tuple[int, ...]:
    """First parts of two, in eighths; in whole nodes where there are several."""
    unit = max(1, task.per_node if task.devices > task.per_node else task.devices // 8)
    cuts = {round(task.devices * share / 8 / unit) * unit for share in range(2, 7)}
    return tuple(sorted(cut for cut in cuts if 0 < cut < task.devices))


def _standalone(task: Task) -> Iterator[Placement]:
    """Each model and the rollout engine on devices of their own, in eighths (OpenRLHF's recipes: 1, 1, 2, 2, 2)."""
    where = _roles(task, ref=(0,), reward=(1,), critic=(2,), actor=(3,), rollout=(4,))
    for eighths in (
        (1, 1, 2, 2, 2),
        (1, 1, 1, 3, 2),
        (1, 1, 1, 2, 3),
        (1, 1, 3, 2, 1),
        (2, 1, 1, 2, 2),
        (1, 2, 2, 2, 1),
    ):
        if task.devices >= 8:
            yield Placement("standalone", tuple(task.devices * share // 8 for share in eighths), where)


def _standalone_without_rollout(task: Task) -> Iterator[Placement]:
    where = _roles(task, ref=(0,), reward=(1,), critic=(2,), actor=(3,))
    if task.devices >= 8:
        eighth = task.devices // 8
        yield Placement("standalone", (eighth, eighth, 2 * eighth, task.devices - 4 * eighth), where)


def _disaggregated(task: Task) -> Iterator[Placement]:
    """Training on one part, copies for everything else on the other (FlexRLHF's guideline: 30 to 50 % of devices)."""
    where = _roles(task, actor=(0,), critic=(0,), ref=(1,), reward=(1,), rollout=(1,))
    for first in _cuts(task):
        yield Placement("disaggregated", (first, task.devices - first), where)


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
