"""Plans of a command's runs, with the settings chosen that their YAMLs leave out.

A plug-in chooses placements; without one, every model without a placement is on all devices.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Protocol

from flexrlhf.config.model_settings import ModelSpec
from flexrlhf.config.plugins import Plugin
from flexrlhf.config.spec import Spec
from flexrlhf.errors import UserError
from flexrlhf.placement.hosts import Hosts
from flexrlhf.plan.epochs import with_epochs
from flexrlhf.plan.pipeline import make_plans
from flexrlhf.plan.plan import Plan
from flexrlhf.plan.suggestions import fitted


class Chooser(Protocol):
    """Chooser of the settings of a YAML without a placement, or with ``placement: auto``.

    All machines of a job call it, and must find the same.
    """

    def __call__(self, spec: Spec, pending: Mapping[Path, ModelSpec], obstacle: str) -> tuple[Spec, str]:
        """Return the settings to use, and a text on the choice; empty if nothing is chosen.

        pending:   directory → model, for models that an earlier run of the command will write there.
        obstacle:  why vLLM cannot generate, if that follows from an earlier run.

        Raises UserError if nothing fits.
        """


def planned(specs: Sequence[Spec]) -> list[tuple[Plan, str]]:
    """Plan the runs of a command, and choose settings that their YAMLs leave out: each plan with a text on the choice
    for the first rank to print, which is empty if nothing is chosen and on other ranks.

    Raises UserError as ``make_plans``, and if ``placement: auto`` finds nothing that fits.
    """
    chosen: list[tuple[Spec, str]] = []

    def choose(spec: Spec, pending: Mapping[Path, ModelSpec], obstacle: str) -> Spec:
        spec, length = with_epochs(spec, pending)
        spec, searched = _with_placement(spec, pending, obstacle)
        chosen.append((spec, "\n".join(filter(None, (length, searched)))))
        return spec

    found = []
    for plan, (spec, searched) in zip(make_plans(specs, choose), chosen, strict=True):
        suited, sentence = fitted(spec, plan)
        texts = [text for text in (searched, sentence) if text and Hosts().is_first]
        found.append((suited, "\n".join(texts)))
    return found


def _with_placement(spec: Spec, pending: Mapping[Path, ModelSpec], obstacle: str) -> tuple[Spec, str]:
    """Return ``spec`` with the placement to use, and a text on it; as it is, without a text, if its own is used."""
    if spec.placement != "auto" and "placement" in spec.model_fields_set:
        return spec, ""
    try:
        chooser: Chooser = Plugin.chosen("chooser").load()
    except UserError as error:
        if spec.placement == "auto":
            raise
        return spec, f"{spec.name}: every model on all devices: {error}"
    return chooser(spec, pending, obstacle)
