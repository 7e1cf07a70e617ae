"""Changes of settings with which a run fits its devices: suggested with the bytes that each frees, or chosen if a YAML
leaves the settings out. Each is found by planning the run again with it.

A change is suggested as its override on the command line, if engines and devices allow it. Chosen settings leave
results as they are, and follow from the plan alone: every machine of a job chooses the same.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import combinations, islice

from flexrlhf.config.axes import OF_EXPERTS, OF_REPLICA
from flexrlhf.config.model_settings import LoraSpec
from flexrlhf.config.spec import Spec
from flexrlhf.config.strict_model import StrictModel
from flexrlhf.errors import UserError
from flexrlhf.operators.graph import Graph
from flexrlhf.plan.algorithm_graph import make_graph
from flexrlhf.plan.cache_size import unsized_spec
from flexrlhf.plan.changes import Changes, SettingChange, changes_on
from flexrlhf.plan.pipeline import ResolvedSpec
from flexrlhf.plan.plan import Plan
from flexrlhf.text import bytes_text

WORTH = 0.01
"""Share of the peak that a suggestion must free."""

REPLANNED_RANKS = 4096
"""Most ranks times changes that are tried: each change is planned on all ranks."""
COMBINED = 8
"""Changes of which two or three are tried together if none suffices alone: those that free most."""
BY_TIME = (
    *("bucket_mb", "kv_tokens", "sleep", "micro_batch_tokens", "generate_tokens", "zero", "shard"),
    *(axis.name for axis in OF_EXPERTS),
    *("tiled_mlp", "activation_checkpointing", "offload_activations"),
    *(axis.name for axis in OF_REPLICA),
    "overlap",
    *("offload_optimizer", "offload_parameters"),
)
"""Settings that leave learning as it is, by the time that they usually cost."""
MOST_ROUNDS = 6
"""Choices one after the other, of models or calls that lack memory in turn."""


@dataclass(frozen=True)
class MemorySuggestion:
    """A change of settings that frees memory.

    changes:   made together.
    freed:     bytes by which the rank's peak falls.
    suffices:  whether the rank's models and calls then fit its device.
    """

    changes: Changes
    freed: int
    suffices: bool

    @property
    def change(self) -> str:
        """Overrides as on the command line."""
        return " ".join(change.text for change in self.changes)

    @property
    def same_numbers(self) -> bool:
        """Whether results stay the same; else the change is one of trained weights, or of precision."""
        return all(change.key in BY_TIME for change in self.changes)

    @property
    def slowest(self) -> int:
        """Place in ``BY_TIME`` of the change that usually costs most time."""
        return max(BY_TIME.index(each.key) if each.key in BY_TIME else len(BY_TIME) for each in self.changes)


def memory_suggestions(plan: Plan, rank: int, written: frozenset[str] = frozenset()) -> list[MemorySuggestion]:
    """Return the changes that reduce the peak of ``rank``: every setting at the value that frees most.

    First come changes that leave learning as it is: of those that suffice the fastest, else the ones that free most.
    Each is tried on every model alone, and on all that can have it together: where several models need nearly as much,
    a change of one only makes the next one the peak. Where none suffices that leaves learning alone, two or three are
    tried together. On many ranks only the first changes are tried.

    ``written``: settings that stay as they are.
    """
    trials, most = _Trials(plan, rank), max(1, REPLANNED_RANKS // plan.placement.num_ranks)
    allowed = (change for change in changes_on(plan, rank) if change.setting not in written)
    tried = list(trials.with_each((change,) for change in islice(allowed, most)))
    alone = {each.changes[0]: each.freed for each in tried}
    for each in trials.with_each(_together(alone)[: max(0, most - len(tried))]):
        if each.freed > (1 + WORTH) * max(alone[change] for change in each.changes):
            tried.append(each)
    best: dict[str, MemorySuggestion] = {}
    for each in tried:
        settings = " ".join(change.setting for change in each.changes)
        if each.freed > (best[settings].freed if settings in best else WORTH * trials.peak):
            best[settings] = each
    found = list(best.values())
    if not any(each.suffices and each.same_numbers for each in found):
        found += _combined(trials, found, most - len(tried))

    def order(each: MemorySuggestion) -> tuple[bool, bool, int, int]:
        slowest = each.slowest if each.suffices and trials.lacking > 0 else 0
        return not each.same_numbers, not each.suffices, slowest, -each.freed

    return sorted(found, key=order)


class _Trials:
    """Plans of a run with changes, whose peaks on a rank are compared with that of ``plan``.

    peak:     bytes of it
    lacking:  bytes of it that the device does not have
    """

    def __init__(self, plan: Plan, rank: int) -> None:
        self._plan, self._rank, self._graph = plan, rank, make_graph(plan.spec)
        size = plan.device_bytes(rank)
        self.peak = plan.memories[rank].peak_bytes
        self.lacking = 0 if size is None else self.peak - size

    def with_each(self, trials: Iterable[Changes]) -> Iterator[MemorySuggestion]:
        """Yield the trials that engines and devices allow."""
        for changes in trials:
            key = self._rank, changes
            if key not in self._plan.tried_peaks:
                self._plan.tried_peaks[key] = self._peak(changes)
            peak = self._plan.tried_peaks[key]
            if peak is not None:
                freed = self.peak - peak
                yield MemorySuggestion(changes, freed, freed >= self.lacking)

    def _peak(self, changes: Changes) -> int | None:
        try:
            changed = replanned(self._plan, self._graph, changes, self._rank)
            peak = changed.memory(self._rank).peak_bytes
            # which model is loaded first depends on the ones that start in host memory on other ranks
            if changed.most_loading_bytes(self._rank) > peak:
                peak = replanned(self._plan, self._graph, changes).memory(self._rank).peak_bytes
        except UserError:
            return None
        return peak


def _combined(trials: _Trials, found: Iterable[MemorySuggestion], most: int) -> list[MemorySuggestion]:
    """Return two or three of the changes that leave learning alone together: the first that suffice, by the time that
    they usually cost.

    ``most``: trials.
    """
    largest = sorted((each for each in found if each.same_numbers), key=lambda each: -each.freed)[:COMBINED]
    by_time = sorted(largest, key=lambda each: each.slowest)
    several = [each for number in (2, 3) for each in combinations(by_time, number)]
    together = [tuple(change for each in chosen for change in each.changes) for chosen in several]
    distinct = [changes for changes in together if len({change.setting for change in changes}) == len(changes)]
    first = next((each for each in trials.with_each(distinct[: max(0, most)]) if each.suffices), None)
    return [] if first is None else [first]


def _together(changes: Iterable[SettingChange]) -> list[Changes]:
    """Return the same changes of several models; batches are halved, whatever their size."""
    alike: dict[str, list[SettingChange]] = defaultdict(list)
    for change in changes:
        alike[change.key + ("" if change.key.endswith("_tokens") else change.shown)].append(change)
    return [tuple(members) for members in alike.values() if len(members) > 1]


def check_fits(plan: Plan) -> None:
    """Raise UserError if a rank needs more than its device's memory. Devices of unknown size are not checked."""
    if sentence := lack_text(plan):
        raise UserError(sentence)


def lack_text(plan: Plan) -> str:
    """Return a sentence on the memory that the tightest rank lacks, and how it would fit; empty if each has enough."""
    rank = plan.tightest_rank
    size = plan.device_bytes(rank)
    if size is None or plan.memories[rank].peak_bytes <= size:
        return ""
    return f"memory: {need_text(plan)}; {_remedy(memory_suggestions(plan, rank))}"


def need_text(plan: Plan) -> str:
    """Return a sentence on the memory that the tightest rank needs, and has."""
    rank = plan.tightest_rank
    memory, device = plan.memories[rank], plan.cluster.devices[rank].device_class
    at = f" for {memory.peak.label}" if memory.peak is not None else ""
    size = bytes_text(plan.device_bytes(rank))
    return f"rank {rank} needs {bytes_text(memory.peak_bytes)}{at}, and its device ({device}) has {size}"


def _remedy(suggestions: list[MemorySuggestion]) -> str:
    """Return the remedy, which ends a sentence on lacking memory."""
    best = next((each for each in suggestions if each.suffices), suggestions[0] if suggestions else None)
    if best is None:
        return "use more or larger devices"
    numbers = "" if best.same_numbers else " with other numbers"
    enough = "which suffices" if best.suffices else "which is not enough"
    return f"{best.change} frees {bytes_text(best.freed)}, {enough}{numbers}"


def replanned(plan: Plan, graph: Graph, changes: Changes, only: int | None = None) -> Plan:
    """Return ``plan`` with ``changes``.

    ``graph``: of the algorithm, which they leave as it is.
    ``only``: the rank whose memory is wanted.

    Raises UserError if engines or devices do not allow them.
    """
    shapes = dict(plan.shapes)
    for change in changes:
        if isinstance(change.value, LoraSpec):
            role = change.setting.split(".")[1]
            shapes[role] = shapes[role].with_adapters(role, change.value)
    spec = unsized_spec(plan).with_settings({change.setting: change.value for change in changes})
    resolved = ResolvedSpec(spec, graph, plan.cluster)
    return resolved.plan(resolved.place(), shapes, plan.sizing, only)


def fitted(spec: Spec, plan: Plan) -> tuple[Plan, str]:
    """Return ``plan`` with the settings that ``spec`` leaves out so that it fits, and a sentence that names them; as it
    is, and no sentence, where it fits, where nothing that is left out suffices, and on devices of no known class.

    ``spec``: as a user has written it.
    """
    if not plan.cluster.has_known_gpus(spec.cluster):
        return plan, ""
    graph, chosen = make_graph(plan.spec), dict[str, str]()
    written, changed = frozenset(_written(spec, plan.graph.roles)), plan
    for _ in range(MOST_ROUNDS):
        rank = changed.tightest_rank
        size = changed.device_bytes(rank)
        if size is None or changed.memories[rank].peak_bytes <= size:
            sentence = f"{plan.spec.name}: {' '.join(chosen.values())} chosen; else {need_text(plan)}" if chosen else ""
            return changed, sentence
        # changes that suffice come first, then the one that frees most: another call may then be the largest
        best = next((each for each in memory_suggestions(changed, rank, written) if each.same_numbers), None)
        if best is None:
            break
        changed = replanned(changed, graph, best.changes)
        chosen |= {change.setting: change.text for change in best.changes}
    return plan, ""


def _written(spec: Spec, roles: Iterable[str]) -> Iterator[str]:
    """Yield the settings of models, the rollout engine and syncs that ``spec`` has."""
    for role in roles:
        model = spec.models.of(role) or spec.models.all
        if model is not None:
            yield from _settings(f"models.{role}", model)
            # a shadow has the settings of its role
            yield from _settings(f"models.{role}.shadow", model)
            if model.shadow is not None:
                yield from _settings(f"models.{role}.shadow", model.shadow)
    yield from _settings("rollout", spec.rollout)
    yield from _settings("sync", spec.sync)


def _settings(section: str, model: StrictModel) -> Iterator[str]:
    return (f"{section}.{name}" for name in model.model_fields_set if getattr(model, name) is not None)
