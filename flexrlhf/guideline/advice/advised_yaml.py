"""YAMLs of advised placements, each with its origin in a comment."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from flexrlhf.api import Spec, UserError, bytes_text, without_device_sizes
from flexrlhf.guideline.advice.candidates import FeasibleCandidate
from flexrlhf.guideline.advice.operator_space import OperatorAdvice

SIMULATED = "a step as simulated"
"""Words that the first line of an advised YAML has."""


def is_advised(text: str) -> bool:
    """Whether a text begins as a YAML of ``write_advised``."""
    first = text.partition("\n")[0]
    return first.startswith("# ") and SIMULATED in first


def write_advised(chosen: FeasibleCandidate, path: Path) -> None:
    """Write the YAML of ``chosen``, with its origin in a comment. Raises UserError if it cannot be written."""
    seconds, candidate = chosen.seconds, chosen.candidate
    head = [
        f"# {candidate.method}: {candidate.name}; {seconds:.2f} s {SIMULATED}, {bytes_text(int(chosen.peak))}",
    ]
    if candidate.space.has_less_memory:
        share = f"{candidate.space.usable:.0%}"
        head.append(
            f"# memory_gb of the nodes is {share} of what models can fill: they are offloaded before that is full"
        )
    models = candidate.spec.models
    roles = candidate.space.roles.all
    has_sizes = any((model := models.of(role)) is not None and model.init is not None for role in roles)
    if has_sizes:
        head.append("# models have sizes only (init): give the paths of their weights instead, and of the data")
    _write(path, head, candidate.spec)


def write_operator_advice(advice: OperatorAdvice, path: Path) -> None:
    """Write the YAML, with its origin in a comment. Raises UserError if it cannot be written."""
    seconds, peak = advice.simulation.seconds, bytes_text(peak_of(advice))
    head = f"# a placement for each operator; {seconds:.2f} s {SIMULATED}, {peak}"
    _write(path, [head], advice.spec)


def peak_of(advice: OperatorAdvice) -> int:
    """Return the bytes on the fullest device."""
    return max(memory.peak_bytes for memory in advice.plan.memories)


def _write(path: Path, head: Sequence[str], spec: Spec) -> None:
    try:
        path.write_text("\n".join([*head, without_device_sizes(spec).dump(short=True)]))
    except OSError as error:
        raise UserError(f"--output {path}: cannot be written ({error.strerror})") from None
