"""Terms of a job, which all its machines must have in common for the replicas of a model to stay the same."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from pydantic import TypeAdapter

from flexrlhf.config.number_settings import SettingDifference
from flexrlhf.config.secrets import without_secrets
from flexrlhf.config.yaml_io import read_yaml
from flexrlhf.errors import shown
from flexrlhf.launch.shared_directories import DirectoryFacts, Sharing
from flexrlhf.plan.plan import Plan
from flexrlhf.runs.fingerprints import Fingerprints
from flexrlhf.text import counted

MOST_NAMED = 3
SAME_COMMAND = "start the same command with the same files on all machines"


@dataclass(frozen=True)
class Sides:
    """Two machines that are compared, by their names for messages."""

    first: str
    other: str

    def differ(self, what: str, here: object, there: object) -> str:
        """Return that something differs between them."""
        return f"{what} is {here} on {self.first} and {there} on {self.other}"


@dataclass(frozen=True)
class Terms:
    """Terms of a job on one machine.

    nodes:     machines of the job
    restarts:  how often all ranks are started again after one has failed
    specs:     resolved YAML of each run; empty if they are the same as node 0's
    versions:  of Python, this package and its libraries
    sources:   digest of each file of this package; empty if they are the same as node 0's
    inputs:    digest of each file of models and data, by setting and path
    """

    nodes: int
    restarts: int
    specs: tuple[str, ...]
    versions: dict[str, str]
    sources: dict[str, str]
    inputs: dict[str, str]

    @classmethod
    def of(cls, plans: Sequence[Plan], device: str, nodes: int, restarts: int = 0) -> Terms:
        """Return the terms of this machine. ``device``: of its ranks."""
        fingerprints = Fingerprints(plans)
        return cls(
            nodes=nodes,
            restarts=restarts,
            specs=tuple(plan.spec.with_device(device).dump() for plan in plans),
            versions=fingerprints.versions(),
            sources=fingerprints.sources(),
            inputs=fingerprints.inputs(),
        )

    @classmethod
    def of_json(cls, text: str) -> Terms:
        """Return the terms that ``json`` has written."""
        return _JSON.validate_json(text)

    @property
    def json(self) -> str:
        """Text of these terms in JSON, for another machine."""
        return _JSON.dump_json(self).decode()

    def compare(self, subject: str, other: Terms, sides: Sides) -> tuple[str, str]:
        """Return the difference in ``subject``, a key of what is compared, and the advice for it.

        The difference is empty without any; ``sides``: names of these terms' machine and the other's.
        """
        compare, advice = _COMPARED[subject]
        return compare(self, other, sides), advice

    def difference(self, other: Terms, sides: Sides) -> str:
        """Return the difference from the terms of another machine, with its advice; empty without any."""
        found = (self.compare(subject, other, sides) for subject in _COMPARED)
        return next((f"{each}; {advice}" for each, advice in found if each), "")

    def compare_machine(self, own: Terms, sides: Sides, directories: Sequence[DirectoryFacts], number: int) -> Sharing:
        """Compare this machine with the first one, whose terms these are: terms, then the directories of the runs.

        own:          terms of this machine
        directories:  of the first machine, with its probes
        number:       of this machine, from 1
        """
        if found := self.difference(own, sides):
            return Sharing(False, found)
        sharing = DirectoryFacts.look([each for each in directories if not each.problem], number)
        if sharing.problem:
            return replace(sharing, problem=f"runs: {sides.other} {sharing.problem}")
        return sharing

    def without_equals(self, first: Terms) -> Terms:
        """Return these terms without the files and settings that ``first`` has, too: they are long."""
        sources = {} if self.sources == first.sources else self.sources
        return replace(self, sources=sources, specs=() if self.specs == first.specs else self.specs)


def _differing(first: Mapping[str, str], other: Mapping[str, str]) -> Iterator[tuple[str, str, str]]:
    for name in {**first, **other}:
        here, there = first.get(name, ""), other.get(name, "")
        if here != there:
            yield name, here, there


def _value(setting: Any) -> str:
    return shown(without_secrets(setting))


def option_difference(first: Terms, other: Terms, sides: Sides) -> str:
    """Return the option that differs; empty if none does."""
    options = {"--nnodes": (first.nodes, other.nodes), "--max-restarts": (first.restarts, other.restarts)}
    return next((sides.differ(name, *pair) for name, pair in options.items() if pair[0] != pair[1]), "")


def version_difference(first: Terms, other: Terms, sides: Sides) -> str:
    """Return the difference in Python, libraries and files of this package; empty without any."""
    named = [
        sides.differ(name, here or "missing", there or "missing")
        for name, here, there in _differing(first.versions, other.versions)
    ][:MOST_NAMED]
    files = list(_differing(first.sources, other.sources or first.sources))
    if files:
        more = f" and {counted(len(files) - 1, 'more file')} differ" if len(files) > 1 else " differs"
        named.append(f"flexrlhf/{files[0][0]}{more} on {sides.first} and {sides.other}")
    return "; ".join(named)


def setting_difference(first: Terms, other: Terms, sides: Sides) -> str:
    """Return the differences of the resolved settings; empty without any."""
    if not other.specs:
        return ""
    if len(first.specs) != len(other.specs):
        return f"{counted(len(first.specs), 'run')} on {sides.first} and {len(other.specs)} on {sides.other}"
    found = [
        sides.differ(each.key, _value(each.first), _value(each.second))
        for here, there in zip(first.specs, other.specs, strict=True)
        if here != there
        for each in SettingDifference.between(read_yaml(here), read_yaml(there))
    ]
    more = f" and {len(found) - MOST_NAMED} more" if len(found) > MOST_NAMED else ""
    return ", ".join(found[:MOST_NAMED]) + more


def input_difference(first: Terms, other: Terms, sides: Sides) -> str:
    """Return the files of models and data that differ; empty if none does."""
    found = [
        f"{file} differs between {sides.first} ({here or 'missing'}) and {sides.other} ({there or 'missing'})"
        for file, here, there in _differing(first.inputs, other.inputs)
    ]
    more = f", and {counted(len(found) - 1, 'more file')}" if len(found) > 1 else ""
    return found[0] + more if found else ""


_COMPARED: dict[str, tuple[Callable[[Terms, Terms, Sides], str], str]] = {
    "command": (option_difference, SAME_COMMAND),
    "settings": (setting_difference, SAME_COMMAND),
    "versions": (version_difference, "install the same versions on all machines"),
    "inputs": (input_difference, "copy models and data to all machines"),
}
"""Terms that must be the same on all machines: how they are compared, and the advice for a difference."""


_JSON = TypeAdapter(Terms)
