"""Changes of settings that let a run fit: a plan with one shows whether it is possible, and which bytes it frees."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from flexrlhf.config.axes import OF_PARTS, RARE, Axis
from flexrlhf.config.model_settings import LoraSpec
from flexrlhf.memory.budget import Compute
from flexrlhf.placement.placed import PlacedModel
from flexrlhf.plan.plan import Plan
from flexrlhf.strategies.instructions import Sync
from flexrlhf.strategies.workload import workload


@dataclass(frozen=True)
class SettingChange:
    """A new ``value`` for a ``setting``, which is its key in the YAML."""

    setting: str
    value: Any

    @property
    def key(self) -> str:
        """Last part of ``setting``."""
        return self.setting.rpartition(".")[2]

    @property
    def shown(self) -> str:
        """Value as it follows ``setting`` on the command line."""
        return f"={{rank: {self.value.rank}}}" if isinstance(self.value, LoraSpec) else f"={str(self.value).lower()}"

    @property
    def text(self) -> str:
        """Override as on the command line."""
        return self.setting + self.shown


Changes = tuple[SettingChange, ...]


def changes_on(plan: Plan, rank: int) -> Iterator[SettingChange]:
    """Yield changes of the models on a rank and of syncs: engines and devices may refuse them."""
    for operator, tokens in plan.placement.pass_tokens.items():
        model = plan.placement[plan.placement.operators[operator]]
        width = plan.sizing.texts_of(model.role).width
        if rank in model.ranks and tokens >= 2 * width:
            half = tokens // 2 // width * width
            yield SettingChange(f"placement.operators.{operator}.micro_batch_tokens", half)
    for model in plan.placement.on_rank(rank):
        if model.rollout is not None:
            yield from _of_rollout(plan, model)
            continue
        if model.is_of_operators:
            continue  # it has the settings of its role
        changes = {**_of_any_copy(model), **_smaller_batches(plan, model, rank)}
        sizes = plan.shapes[model.role].sizes if model.role in plan.shapes else None
        splits = ["tokens"] * plan.lengths.of_role(model.role).are_long
        splits += ["experts"] * (sizes is not None and sizes.experts is not None)
        changes |= _more_ranks(model, [axis for axis in RARE if axis.splits in splits])
        if not model.is_shadow:
            changes |= _of_role(model, has_shape=model.role in plan.shapes)
        section = f"models.{model.role}" + ".shadow" * model.is_shadow
        for key, values in changes.items():
            yield from (SettingChange(f"{section}.{key}", value) for value in values)
    if any(isinstance(each, Sync) and each.overlaps for each in plan.schedule.instructions):
        yield SettingChange("sync.overlap", False)
    yield SettingChange("sync.bucket_mb", plan.spec.sync.bucket_bytes / 2e6)


def _of_rollout(plan: Plan, model: PlacedModel) -> Iterator[SettingChange]:
    """Yield changes of a rollout engine: a smaller cache, tensor parallelism, fewer bits, sleep."""
    rollout = plan.spec.rollout
    yield SettingChange("rollout.kv_tokens", max(plan.spec.padded_row, model.settings.generate_tokens // 2))
    yield SettingChange("rollout.tp", 2 * rollout.tp)
    if model.settings.dtype == "float32":
        yield SettingChange("rollout.dtype", "bfloat16")
    if not rollout.sleep:
        yield SettingChange("rollout.sleep", True)


def _of_any_copy(model: PlacedModel) -> dict[str, list[Any]]:
    """Return changes that any copy allows: more sharding and stages, fewer bits."""
    settings = model.settings
    return {
        "shard": ["all"] if model.is_sharded_in_nodes else [],
        "zero": [stage for stage in (1, 2, 3) if stage > settings.zero],
        **_more_ranks(model, OF_PARTS),
        "dtype": ["bfloat16", "float16"] if settings.dtype == "float32" else [],
    }


def _more_ranks(model: PlacedModel, axes: Iterable[Axis]) -> dict[str, list[Any]]:
    """Return more ranks along those of ``axes`` that the engine has; many of which each has a part of the experts."""
    able = (axis for axis in axes if axis.name in model.facts.axes)
    times = {axis: (4, 16, 64) if axis.splits == "experts" else (2,) for axis in able}
    return {axis.name: [more * model.settings.dims.of(axis) for more in each] for axis, each in times.items()}


def _of_role(model: PlacedModel, has_shape: bool) -> dict[str, list[Any]]:
    """Return changes that a shadow takes from its role."""
    settings = model.settings
    changes: dict[str, list[Any]] = {
        key: [] if getattr(settings, key) else [True]
        for key in ("tiled_mlp", "activation_checkpointing", "offload_activations")
        + ("offload_optimizer", "offload_parameters")
    }
    if model.trained and settings.lora is None and has_shape:
        changes["lora"] = [LoraSpec()]
    return changes


def _smaller_batches(plan: Plan, model: PlacedModel, rank: int) -> dict[str, list[Any]]:
    """Return half of the tokens that are computed together."""
    texts = plan.sizing.texts_of(model.role)
    mine = workload(plan.schedule.for_rank(rank), plan.placement, plan.batch, rank)
    calls = [work for work, _ in mine if isinstance(work, Compute) and work.model == model.name]
    shared = [call for call in calls if call.kind != "generate" and call.tokens is None]
    passes = [plan.sizing.pass_size(model, call) for call in shared]
    decoded = [texts.rows_decoded(model, call.rows) for call in calls if call.kind == "generate"]
    most = max((size.tokens for size in passes), default=0)
    changes = {"micro_batch_tokens": [most // 2 // texts.width * texts.width]} if most >= 2 * texts.width else {}
    return changes | ({"generate_tokens": [max(decoded) // 2 * texts.width]} if max(decoded, default=0) > 1 else {})
