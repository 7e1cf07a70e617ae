"""Settings that a YAML leaves out, chosen so that the run fits its devices; what it says is never changed.

They leave the numbers as they are, and follow from the plan alone: every machine of a job chooses the same.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from flexrlhf.config.spec import Spec
from flexrlhf.config.strict_model import StrictModel
from flexrlhf.placement.cluster import has_known_gpus
from flexrlhf.plan.plan import Plan
from flexrlhf.plan.suggestions import memory_suggestions, need_text, replanned, tightest_rank

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
