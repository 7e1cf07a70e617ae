"""Memory plan of a rank: the phases of all its work, and their peak.

Not counted: the context of the device's driver (about 1 GB on CUDA), fragmentation, and the columns of the newest
batch's rows, unless these are episodes.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from flexrlhf.memory.budget import Compute, Copying, NamedBytes, Phase, Sizing, Work
from flexrlhf.memory.states import State, reused_bytes
from flexrlhf.memory.transfer_bytes import UNDER_WAY, WeightSync
from flexrlhf.placement.placed import ModelName

ROWS = "rows in flight"
"""Part of every phase with a lag or episodes."""


@dataclass(frozen=True)
class RankMemory:
    """Memory plan of one rank.

    states:       by placed model.
    phases:       the largest of each kind and model.
    loading:      bytes of host memory while models are loaded.
    loads_whole:  whether one of them is loaded whole and in float32.
    """

    rank: int
    states: Mapping[ModelName, State | None]
    phases: tuple[Phase, ...]
    loading: int
    loads_whole: bool

    def on(self, rank: int) -> RankMemory:
        """Return the memory of ``rank``, which has the same work."""
        other = replace(self, rank=rank)
        vars(other).update(peak=self.peak, peak_bytes=self.peak_bytes)
        return other

    @cached_property
    def peak(self) -> Phase | None:
        """Phase with the highest total; None on a rank without work."""
        return max(self.phases, key=lambda phase: phase.total, default=None)

    @cached_property
    def peak_bytes(self) -> int:
        """Peak bytes on the device, as far as they are known."""
        resting = sum(state.resting for state in self.states.values() if state is not None)
        return resting if self.peak is None else self.peak.total

    @property
    def tensor_bytes(self) -> int:
        """Bytes of the models' tensors at the end of a run, as far as they are known: transient copies are released."""
        states = (state for state in self.states.values() if state is not None and not state.transient)
        return sum(state.weights + state.gradients + state.optimizer + state.host for state in states)

    @property
    def process_bytes(self) -> int:
        """Peak bytes of a rank on CPU, whose device memory is host memory."""
        return max((phase.total + phase.host for phase in self.phases), default=self.peak_bytes)

    @property
    def host_bytes(self) -> int:
        """Peak bytes in host memory."""
        offloaded = sum(state.host for state in self.states.values() if state is not None)
        return max(self.loading + offloaded, self.loaded_host_bytes)

    @property
    def loaded_host_bytes(self) -> int:
        """Peak bytes in host memory once models are loaded."""
        return max((phase.host for phase in self.phases), default=0)

    @property
    def is_complete(self) -> bool:
        """Whether every number is known."""
        parts = [size for phase in self.phases for size in phase.parts.values()]
        return None not in self.states.values() and None not in parts

    @classmethod
    def of(
        cls,
        sizing: Sizing,
        rank: int,
        work: Iterable[tuple[Work, frozenset[ModelName]]],
        start: Start | None = None,
        in_flight: int = 0,
    ) -> RankMemory:
        """Return the memory plan of ``rank``.

        work:       in order, each with the models that are offloaded or released.
        start:      None if nothing is offloaded: all that is loaded then stays on the device.
        in_flight:  bytes of rows that are generated and not trained on yet.
        """
        kept = frozenset[ModelName]() if start is None else start.kept
        states = {model.name: sizing.state(model, rank) for model in sizing.placement.on_rank(rank)}
        first = () if start is None else _starting(states, start)
        largest: dict[tuple[str, str], Phase] = {(phase.kind, phase.model): phase for phase in first}
        works = dict.fromkeys(work)
        graphs = _graphs_on_host(states, frozenset[ModelName]().union(*(absent for _, absent in works)) - kept)
        lasting = graphs + _lasting_host_bytes(sizing, rank, {item for item, _ in works})
        under_way = dict(_under_way(sizing, rank, {item for item, _ in works}))
        if in_flight:
            under_way[ROWS] = in_flight
        for item, absent in works:
            for bare in sizing.phases(item, rank):
                own = 0 if isinstance(item, Compute | Copying) else bare.host
                phase = replace(bare, host=own + lasting, parts={**bare.parts, **under_way})
                if isinstance(item, WeightSync) and item.wakes:
                    phase = _with_states(phase, {**states, **_without_cache(states, item.destination)}, absent, kept)
                else:
                    phase = _with_states(phase, states, absent, kept)
                known = largest.setdefault((phase.kind, phase.model), phase)
                if phase.total > known.total:
                    largest[phase.kind, phase.model] = phase
        return cls(rank, states, tuple(largest.values()), sizing.loading_bytes(rank), sizing.loads_whole(rank))


@dataclass(frozen=True)
class Start:
    """Start of a rank that offloads models.

    loaded:   its models in the order of loading.
    away:     models that leave the device before the next one is loaded.
    movable:  models that are not on the device while a checkpoint is read, but for the one that is read.
    kept:     models that host memory has a copy of, or room for one.
    read:     models that a checkpoint has.
    """

    loaded: Sequence[ModelName]
    away: frozenset[ModelName]
    movable: frozenset[ModelName]
    kept: frozenset[ModelName]
    read: frozenset[ModelName]

    def most_loading_bytes(self, states: Mapping[ModelName, State | None]) -> int:
        """Return the most bytes on the device while models are loaded, in the order that needs most."""
        known = {name: states[name] or State(0) for name in self.loaded}
        lasting = {
            name: state.resting - state.freed if name in self.away else state.loaded for name, state in known.items()
        }
        own = (state.loaded + state.at_load - lasting[name] for name, state in known.items())
        return sum(lasting.values()) + max(own, default=0)


def _starting(states: Mapping[ModelName, State | None], start: Start) -> tuple[Phase, ...]:
    """Return the largest phase of loading and of resuming."""
    known = {name: states[name] or State(0) for name in start.loaded}
    resting = sum(state.resting for state in known.values())
    # copies that a Sync refills are released as they are loaded
    alone = resting - sum(known[name].freed for name in start.movable | start.away)
    load, resume, on_device = [], [], 0
    for name, state in known.items():
        load.append(Phase("load", name, {}, on_device + state.loaded + state.at_load))
        on_device += state.resting - state.freed if name in start.away else state.loaded
        if name in start.read:
            resume.append(Phase("resume", name, {}, alone + state.freed * (name in start.movable)))
    return tuple(max(phases, key=lambda phase: phase.total) for phases in (load, resume) if phases)


def _lasting_host_bytes(sizing: Sizing, rank: int, works: Iterable[Work]) -> int:
    """Return the host memory that exists in every phase: a copy for a checkpoint until its files are written, and that
    of each model's offloaded activations, which is kept for the next pass."""
    copied, activations = 0, dict[ModelName, int]()
    for item in works:
        if isinstance(item, Copying):
            copied += sizing.phases(item, rank)[0].host
        elif isinstance(item, Compute) and item.kind == "train":
            activations[item.model] = max(activations.get(item.model, 0), sizing.phases(item, rank)[0].host)
    return copied + sum(activations.values())


def _graphs_on_host(states: Mapping[ModelName, State | None], asleep: frozenset[ModelName]) -> int:
    """Return the bytes of captured graphs of engines that sleep at times without a copy of their weights."""
    return sum(state.graphs for name, state in states.items() if state is not None and name in asleep)


def _under_way(sizing: Sizing, rank: int, works: Iterable[Work]) -> NamedBytes:
    """Return the bytes, in every phase, of weights that travel while a rank computes."""
    syncs = [item for item in works if isinstance(item, WeightSync) and item.overlaps]
    sizes = [phase.parts.get(UNDER_WAY, None) for item in syncs for phase in sizing.phases(item, rank)]
    if not sizes:
        return {}
    return {UNDER_WAY: None if None in sizes else sum(size or 0 for size in sizes)}


def _without_cache(states: Mapping[ModelName, State | None], name: ModelName) -> dict[ModelName, State]:
    """Return the state of a rollout engine that has its weights, and allocates its cache when it generates."""
    state = states.get(name)
    return {} if state is None else {name: replace(state, cache=0)}


def _with_states(
    phase: Phase,
    states: Mapping[ModelName, State | None],
    absent: frozenset[ModelName],
    kept: frozenset[ModelName],
) -> Phase:
    device, host = reused_bytes(states, absent), 0
    for name, state in states.items():
        if state is None:
            continue
        # once it is allocated, host memory is kept for the next time
        host += state.host + state.for_restart + (state.offloaded if name in kept else 0)
        if name in absent:
            device += state.resting - state.freed
        else:
            device += state.training if phase.trains and name == phase.model else state.resting
    return replace(phase, states=device, host=phase.host + host)
