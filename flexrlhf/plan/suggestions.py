"""Suggestions to free memory: settings and the bytes that each frees, found by planning the run again with each.

A change is suggested as its override on the command line, where engines and devices allow it.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import combinations, islice
from typing import Any

from flexrlhf.config.engines import facts_of
from flexrlhf.config.spec import LoraSpec, ShadowSpec, Spec
from flexrlhf.config.strict_model import StrictModel
from flexrlhf.errors import UserError
from flexrlhf.memory.budget import Compute
from flexrlhf.placement.cluster import has_known_gpus
from flexrlhf.placement.groups import is_sharded_in_nodes
from flexrlhf.placement.placed import PlacedModel
from flexrlhf.placement.rollout import padded_row
from flexrlhf.plan.algorithm_graph import make_graph
from flexrlhf.plan.pipeline import ResolvedSpec, plan_on
from flexrlhf.plan.plan import Plan
from flexrlhf.strategies.instructions import Sync
from flexrlhf.strategies.workload import workload
from flexrlhf.text import bytes_text
from flexrlhf.weights.lora import with_adapters
from flexrlhf.weights.shapes import ModelShape

WORTH = 0.01
"""Share of the peak that a suggestion must free."""

REPLANNED_RANKS = 4096
"""Most ranks times changes that are tried: each change is planned on all ranks."""
COMBINED = 8
"""Changes of which two or three are tried together where none suffices alone: those that free most."""
BY_TIME = (
    *("bucket_mb", "kv_tokens", "sleep", "micro_batch_tokens", "generate_tokens", "zero", "shard"),
    *("activation_checkpointing", "tp", "pp", "overlap", "offload_optimizer", "offload_parameters"),
)
"""Settings that leave learning as it is, by the time that they usually cost."""


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
        """Whether results stay the same; else it changes what is trained, or the precision."""
        return _keeps_numbers(self.changes)


@dataclass(frozen=True)
class SettingChange:
    """A new value for a setting of ``section`` (sync, rollout), or of the model ``role`` (its shadow where
    ``of_shadow``).
    """

    key: str
    value: Any
    section: str = ""
    role: str = ""
    of_shadow: bool = False

    @property
    def setting(self) -> str:
        section = self.section or f"models.{self.role}" + ".shadow" * self.of_shadow
        return f"{section}.{self.key}"

    @property
    def shown(self) -> str:
        """Value as it follows ``setting`` on the command line."""
        return f"={{rank: {self.value.rank}}}" if isinstance(self.value, LoraSpec) else f"={str(self.value).lower()}"

    @property
    def text(self) -> str:
        return self.setting + self.shown

    def applied(self, spec: Spec) -> Spec:
        """Return ``spec`` with the change."""
        if self.section:
            changed_section = getattr(spec, self.section).model_copy(update={self.key: self.value})
            return spec.model_copy(update={self.section: changed_section})
        model = spec.models.of(self.role)
        assert model is not None, f"{self.role} is resolved"
        update: dict[str, Any] = {self.key: self.value}
        if self.of_shadow:
            update = {"shadow": (model.shadow or ShadowSpec()).model_copy(update=update)}
        changed = model.model_copy(update=update)
        return spec.model_copy(update={"models": spec.models.model_copy(update={self.role: changed})})


def tightest_rank(plan: Plan) -> int:
    """Return the rank that lacks most memory; among devices of unknown size the one that needs most."""

    def tightness(rank: int) -> tuple[bool, int]:
        size = plan.device_bytes(rank)
        return size is not None, plan.memories[rank].peak_bytes - (size or 0)

    return max(range(plan.placement.num_ranks), key=tightness)


def memory_suggestions(plan: Plan, rank: int, written: frozenset[str] = frozenset()) -> list[MemorySuggestion]:
    """Return the changes that reduce the peak of ``rank``: every setting at the value that frees most.

    Those that leave learning alone come first: what suffices by the time that it usually costs, else what frees most.
    Each is tried on every model alone, and on all that can have it together: where several models need nearly as much,
    a change of one only makes the next one the peak. Where none suffices that leaves learning alone, two or three are
    tried together. On many ranks only the first changes are tried.

    ``written``: settings that stay as they are.
    """
    most = max(1, REPLANNED_RANKS // plan.placement.num_ranks)
    allowed = (change for change in _candidates(plan, rank) if change.setting not in written)
    tried = _tried(plan, rank, [(change,) for change in islice(allowed, most)])
    alone = {changes[0]: freed for changes, freed in tried}
    for changes, freed in _tried(plan, rank, _together(alone)[: max(0, most - len(tried))]):
        if freed > (1 + WORTH) * max(alone[change] for change in changes):
            tried.append((changes, freed))
    best: dict[str, tuple[Changes, int]] = {}
    for changes, freed in tried:
        settings = " ".join(change.setting for change in changes)
        if freed > (best[settings][1] if settings in best else WORTH * plan.memories[rank].peak_bytes):
            best[settings] = changes, freed
    peak, size = plan.memories[rank].peak_bytes, plan.device_bytes(rank)
    lacking = 0 if size is None else peak - size
    found = list(best.values())
    if not any(freed >= lacking and _keeps_numbers(changes) for changes, freed in found):
        found += _combined(plan, rank, found, lacking, most - len(tried))

    def order(each: tuple[Changes, int]) -> tuple[bool, bool, int, int]:
        changes, freed = each
        suffices = freed >= lacking
        slowest = max(map(_time_of, changes)) if suffices and lacking > 0 else 0
        return not _keeps_numbers(changes), not suffices, slowest, -freed

    return [MemorySuggestion(changes, freed, freed >= lacking) for changes, freed in sorted(found, key=order)]


Changes = tuple[SettingChange, ...]


def _keeps_numbers(changes: Changes) -> bool:
    return all(change.key in BY_TIME for change in changes)


def _time_of(change: SettingChange) -> int:
    return BY_TIME.index(change.key) if change.key in BY_TIME else len(BY_TIME)


def _combined(
    plan: Plan, rank: int, found: Iterable[tuple[Changes, int]], lacking: int, most: int
) -> list[tuple[Changes, int]]:
    """Return two or three of the changes that leave learning alone together: the first that free ``lacking`` bytes, by
    the time that they usually cost.

    ``most``: trials.
    """
    largest = sorted((each for each in found if _keeps_numbers(each[0])), key=lambda each: -each[1])[:COMBINED]
    by_time = sorted((changes for changes, _ in largest), key=lambda changes: max(map(_time_of, changes)))
    left = most
    for number in (2, 3):
        for several in combinations(by_time, number):
            together = tuple(change for changes in several for change in changes)
            if left <= 0 or len({change.setting for change in together}) < len(together):
                continue
            left -= 1
            for changes, freed in _tried(plan, rank, [together]):
                if freed >= lacking:
                    return [(changes, freed)]
    return []


def _tried(plan: Plan, rank: int, trials: Iterable[Changes]) -> list[tuple[Changes, int]]:
    """Return the trials that are allowed, each with the bytes by which it reduces the peak of ``rank``."""
    found = []
    for changes in trials:
        try:
            after = replanned(plan, changes).memory(rank).peak_bytes
        except UserError:
            continue
        found.append((changes, plan.memories[rank].peak_bytes - after))
    return found


def _together(changes: Iterable[SettingChange]) -> list[Changes]:
    """Return the same changes of several models; batches are halved, whatever their size."""
    alike: dict[str, list[SettingChange]] = defaultdict(list)
    for change in changes:
        alike[change.key + ("" if change.key.endswith("_tokens") else change.shown)].append(change)
    return [tuple(members) for members in alike.values() if len(members) > 1]


def check_fits(plan: Plan) -> None:
    """Raise UserError where a rank needs more than its device's memory. Devices of unknown size are not checked."""
    rank = tightest_rank(plan)
    memory, size = plan.memories[rank], plan.device_bytes(rank)
    if size is None or memory.peak_bytes <= size:
        return
    raise UserError(f"memory: {need_text(plan)}; {_remedy(memory_suggestions(plan, rank))}")


def need_text(plan: Plan) -> str:
    """Return what the tightest rank needs and has."""
    rank = tightest_rank(plan)
    memory, device = plan.memories[rank], plan.cluster.devices[rank].device_class
    at = f" for {memory.peak.label}" if memory.peak is not None else ""
    size = bytes_text(plan.device_bytes(rank))
    return f"rank {rank} needs {bytes_text(memory.peak_bytes)}{at}, and its device ({device}) has {size}"


def _remedy(suggestions: list[MemorySuggestion]) -> str:
    """Return what to do, after what is wrong."""
    best = next((each for each in suggestions if each.suffices), suggestions[0] if suggestions else None)
    if best is None:
        return "use more or larger devices"
    numbers = "" if best.same_numbers else " with other numbers"
    enough = "which suffices" if best.suffices else "which is not enough"
    return f"{best.change} frees {bytes_text(best.freed)}, {enough}{numbers}"


def replanned(plan: Plan, changes: Changes) -> Plan:
    """Return ``plan`` with ``changes``. Raises UserError where engines or devices do not allow them."""
    spec, shapes = plan.spec, dict(plan.shapes)
    for change in changes:
        spec = change.applied(spec)
    for change in changes:
        if isinstance(change.value, LoraSpec):
            shapes[change.role] = with_adapters(change.role, shapes[change.role], change.value)
    resolved = ResolvedSpec(spec, make_graph(spec), plan.cluster)
    return plan_on(resolved, resolved.place(), shapes)


def _candidates(plan: Plan, rank: int) -> Iterator[SettingChange]:
    for model in plan.placement.on_rank(rank):
        if model.is_of_operators:
            continue  # it has the settings of its role
        if model.rollout is not None:
            yield from _of_rollout(plan, model)
            continue
        shape = plan.shapes.get(model.role)
        changes = {**_anywhere(model), **_smaller_batches(plan, model, rank)}
        if not model.is_shadow:
            changes |= _of_role(model, shape)
        for key, values in changes.items():
            yield from (SettingChange(key, value, "", model.role, model.is_shadow) for value in values)
    if any(isinstance(each, Sync) and each.overlaps for each in plan.schedule.instructions):
        yield SettingChange("overlap", False, "sync")
    yield SettingChange("bucket_mb", plan.spec.sync.bucket_bytes / 2e6, "sync")


def _of_rollout(plan: Plan, model: PlacedModel) -> Iterator[SettingChange]:
    """Yield changes of a rollout engine: a smaller cache, tensor parallelism, fewer bits, sleep."""
    rollout = plan.spec.rollout
    yield SettingChange("kv_tokens", max(padded_row(plan.spec), model.settings.generate_tokens // 2), "rollout")
    yield SettingChange("tp", 2 * rollout.tp, "rollout")
    if model.settings.dtype == "float32":
        yield SettingChange("dtype", "bfloat16", "rollout")
    if not rollout.sleep:
        yield SettingChange("sleep", True, "rollout")


def _anywhere(model: PlacedModel) -> dict[str, list[Any]]:
    """Return changes that any copy allows: more sharding and stages, fewer bits."""
    settings = model.settings
    return {
        "shard": ["all"] if is_sharded_in_nodes(model) else [],
        "zero": [stage for stage in (1, 2, 3) if stage > settings.zero],
        "tp": [2 * settings.tp],
        "pp": [2 * settings.pp] if facts_of(model.engine).pp else [],
        "dtype": ["bfloat16", "float16"] if settings.dtype == "float32" else [],
    }


def _of_role(model: PlacedModel, shape: ModelShape | None) -> dict[str, list[Any]]:
    """Return changes of a role's settings; engines refuse those that do not go with a model."""
    settings = model.settings
    changes: dict[str, list[Any]] = {
        key: [] if getattr(settings, key) else [True]
        for key in ("activation_checkpointing", "offload_optimizer", "offload_parameters")
    }
    if model.trained and settings.lora is None and shape is not None:
        changes["lora"] = [LoraSpec()]
    return changes


def _smaller_batches(plan: Plan, model: PlacedModel, rank: int) -> dict[str, list[Any]]:
    """Return half of the tokens that are computed together."""
    texts = plan.sizing.texts_of(model.role)
    mine = workload(plan.schedule.for_rank(rank), plan.placement, plan.batch, rank)
    calls = [work for work, _ in mine if isinstance(work, Compute) and work.model == model.name]
    passes = [plan.sizing.pass_size(model, call) for call in calls if call.kind != "generate"]
    decoded = [texts.rows_decoded(model, call.rows) for call in calls if call.kind == "generate"]
    most = max((size.tokens for size in passes), default=0)
    changes = {"micro_batch_tokens": [most // 2 // texts.width * texts.width]} if most >= 2 * texts.width else {}
    return changes | ({"generate_tokens": [max(decoded) // 2 * texts.width]} if max(decoded, default=0) > 1 else {})


MOST_ROUNDS = 6
"""Choices one after the other, of models or calls that lack memory in turn."""


def fitted(spec: Spec, plan: Plan) -> tuple[Plan, str]:
    """Return ``plan`` with the settings that ``spec`` leaves out so that it fits, and a sentence that names them; as it
    is, and no sentence, where it fits, where nothing that is left out suffices, and on devices of no known class.

    ``spec``: as a user has written it.
    """
    if not has_known_gpus(spec.cluster, plan.cluster):
        return plan, ""
    written, changed, chosen = frozenset(_written(spec, plan.graph.roles)), plan, dict[str, str]()
    for _ in range(MOST_ROUNDS):
        rank = tightest_rank(changed)
        size = changed.device_bytes(rank)
        if size is None or changed.memories[rank].peak_bytes <= size:
            sentence = f"{plan.spec.name}: {' '.join(chosen.values())} chosen; else {need_text(plan)}" if chosen else ""
            return changed, sentence
        # what suffices comes first, then what frees most: another call may then be the largest
        best = next((each for each in memory_suggestions(changed, rank, written) if each.same_numbers), None)
        if best is None:
            break
        changed = replanned(changed, best.changes)
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
