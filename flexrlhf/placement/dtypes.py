"""Types of placed models: a class without bfloat16 computes in the type that the YAML names for it."""

from __future__ import annotations

from collections.abc import Iterable

from flexrlhf.config.spec import ClusterSpec, Dtype, ModelSpec, ShadowSpec, Spec
from flexrlhf.placement.cluster import Cluster, has_known_gpus
from flexrlhf.placement.devices import DEVICE_CLASSES, DeviceClass
from flexrlhf.placement.placed import Placement


def all_compute_in_bfloat16(spec: ClusterSpec, cluster: Cluster) -> bool:
    """Whether all devices are GPUs of known classes that compute in bfloat16. ``spec``: of ``cluster``."""
    return has_known_gpus(spec, cluster) and all(DEVICE_CLASSES[name].bf16 for name in cluster.classes)


def lacks_bfloat16(rank: int, cluster: Cluster) -> DeviceClass | None:
    """Return the class of a rank's device if it does not compute in bfloat16, else None."""
    figures = DEVICE_CLASSES.get(cluster.devices[rank].device_class)
    return figures if figures is not None and not figures.bf16 else None


def on_devices(settings: ModelSpec, fallback: Dtype | None, ranks: Iterable[int], cluster: Cluster) -> ModelSpec:
    """Return the settings of a model that is placed on ``ranks``: with ``fallback`` where one has no bfloat16."""
    if settings.dtype != "bfloat16" or fallback is None or not any(lacks_bfloat16(rank, cluster) for rank in ranks):
        return settings
    return settings.model_copy(update={"dtype": fallback})


def with_placed_dtypes(spec: Spec, placement: Placement) -> Spec:
    """Return ``spec`` with the types that its placed models have, the shadows' apart."""
    placed = [each for each in placement.models if each.rollout is None]
    own = {each.role: each.settings.dtype for each in reversed(placed) if not each.is_shadow}
    of_shadow = {each.role: each.settings.dtype for each in placed if each.is_shadow}
    changed = {}
    for role, model in spec.models:
        if model is None or role not in own:
            continue
        found = own[role], of_shadow.get(role, own[role])
        if found != (model.dtype, model.of_shadow.dtype):
            raw = model.shadow.model_dump() if model.shadow is not None else {}
            changed[role] = model.model_copy(
                update={"dtype": found[0], "shadow": ShadowSpec(**raw | {"dtype": found[1]})}
            )
    return spec.model_copy(update={"models": spec.models.model_copy(update=changed)}) if changed else spec
