"""Refusal where no placement fits: why, and what would help. Each change is planned before it is suggested."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from time import perf_counter

from flexrlhf.config.spec import Spec
from flexrlhf.config.spec_file import dump_spec, parse_spec
from flexrlhf.config.yaml_io import read_yaml
from flexrlhf.errors import UserError, either
from flexrlhf.guideline.advice.candidates import RejectedCandidate
from flexrlhf.guideline.advice.changes import Change, changes, fixed_settings, freed, pairs
from flexrlhf.guideline.advice.last_resort import last_resort, last_spaces, least_needed
from flexrlhf.guideline.advice.space import UNLIMITED, Space, make_space
from flexrlhf.text import bytes_text

SECONDS = 20.0
"""Seconds in which changes are tried."""


def refusal_text(base: Space, rejected: Sequence[RejectedCandidate]) -> str:
    """Return one sentence: that nothing fits, why, and the changes that would help."""
    until = perf_counter() + SECONDS
    nothing = f"no placement of these models fits {_devices(base)}"
    opened = _first_that_fits(base, freed(base), until)
    if opened is not None:
        fixed = fixed_settings(base).items()
        named = [f"{name}: {value}" for name, value in fixed if name in opened.text.split()]
        return f"{nothing} with {' and '.join(named)}; it would fit {opened.text}"
    lacking = _without_settings(base)
    if lacking:
        return f"{nothing}: {lacking} has no settings there (heads, type, engine or a setting in the YAML)"
    single = [_first_that_fits(base, series, until) for series in changes(base)]
    helps = [each.text for each in single if each is not None]
    if not helps and (pair := _first_that_fits(base, pairs(base), until)) is not None:
        helps = [pair.text]
    hint = f"it would fit {either(helps)}" if helps else "no change that was tried would help"
    return f"{nothing} ({_cause(base, rejected)}); {hint}"


def _devices(base: Space) -> str:
    """Return the devices of each class as ``4 H100-80G and 4 A100-40G``."""
    return " and ".join(f"{len(base.cluster.ranks_on(name))} {name}" for name in base.cluster.classes)


def _first_that_fits(base: Space, series: Iterable[Change], until: float) -> Change | None:
    """Return the first change under which a plan fits. ``series``: the smaller changes first."""
    return next((change for change in series if perf_counter() < until and _fits(base, change.spec, until)), None)


def _fits(base: Space, spec: Spec, until: float) -> bool:
    try:
        parse_spec(read_yaml(dump_spec(spec, short=True)))
        return last_resort(make_space(spec, base.costs, base.lengths, base.pending), until) is not None
    except UserError:
        return False


def _without_settings(base: Space) -> str:
    """Return a model that has no settings on any mesh, with and without shadows; empty where there is none."""
    lacking = [[name for name, size in least_needed(space).items() if size is None] for _, space in last_spaces(base)]
    return lacking[0][0] if lacking and all(lacking) else ""


def _cause(base: Space, rejected: Sequence[RejectedCandidate]) -> str:
    """Return which model needs more than any device has, with its leanest settings, or why there is nothing to
    place."""
    found: dict[str, float] = {}
    for _, space in last_spaces(base):
        for name, size in least_needed(space).items():
            found[name] = min(size or UNLIMITED, found.get(name, UNLIMITED))
    memory = max(_memory_of(base))
    largest = max(found, key=lambda name: found[name], default="")
    has = f"of {bytes_text(int(memory))}"
    if largest and found[largest] > memory:
        return f"{largest} alone needs {bytes_text(int(found[largest]))} on a device {has}"
    if found:
        return f"the models need more than a device {has}"
    reasons = "; ".join(dict.fromkeys(item.reason for item in rejected if item.reason))
    return reasons or "lag, rare syncs or the strategy need shadow models, which there are none of here"


def _memory_of(space: Space) -> list[float]:
    """Return the bytes of the devices of each class."""
    return [each / space.usable for each in space.pool.memory.values()]
