"""Recipes of other systems through ``flexrlhf import`` and ``plan``: how many are translated, and how many fit.

    python -m benchmarks.imported_recipes DIRECTORY [--list]

DIRECTORY has checkouts of their repositories, by the names of ``RECIPES``; a missing one is left out. Recipes are the
files there that start a job or are its settings. Each counts as

* imported: every setting that changes results, memory or time has a counterpart;
* partly: there is a YAML, and such settings without a counterpart are listed;
* refused: one sentence says why there is none.

Of YAMLs whose models have known sizes, and whose recipe names the number of devices, ``plan`` says whether they fit.
A recipe that names no class of devices is planned on H100-80G, one of NeMo-RL for nodes of four (``4n4g``) on
B200-180G, as it was made for GB200. ``--list`` prints a line for each recipe.
"""

from __future__ import annotations

import argparse
import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from flexrlhf.config.spec import Spec
from flexrlhf.errors import UserError
from flexrlhf.imports.translate import translated
from flexrlhf.imports.translation import Translation
from flexrlhf.plan.pipeline import make_plan
from flexrlhf.plan.suggestions import check_fits

RECIPES: dict[str, tuple[tuple[str, ...], str]] = {
    "verl": (("examples/**/*.sh", "verl/experimental/**/*.sh"), r"main_ppo|sft_trainer|fully_async_main|main_dapo"),
    "OpenRLHF": (("examples/scripts/train_*.sh",), r"openrlhf\.cli\.train_"),
    "trl": (("examples/scripts/**/*.py", "examples/cli_configs/*.yaml"), r"Trainer\(|model_name_or_path:"),
    "RL": (("examples/configs/*.yaml", "examples/configs/recipes/**/*.yaml"), r"\bpolicy:|\bdefaults:"),
    "AReaL": (("examples/**/*.yaml",), r"(?m)^actor:"),
    "DeepSpeedExamples": (("applications/DeepSpeed-Chat/training/*/training_scripts/**/*.sh",), r"main\.py"),
}
"""Repository → files, and a text that a recipe has."""
NODES_OF_FOUR = re.compile(r"\d+n4g")


@dataclass
class Count:
    """Recipes of one repository.

    results:  imported, partly, refused.
    reasons:  why recipes are refused.
    plans:    fits, too large, refused, of recipes that name devices; sizes unknown; no devices named.
    """

    results: Counter[str] = field(default_factory=Counter)
    reasons: Counter[str] = field(default_factory=Counter)
    plans: Counter[str] = field(default_factory=Counter)


def recipes(directory: Path, repository: str) -> Iterator[Path]:
    """Yield the recipes of a repository."""
    globs, text = RECIPES[repository]
    for path in sorted({path for glob in globs for path in (directory / repository).glob(glob)}):
        if path.is_file() and re.search(text, path.read_text(errors="replace")):
            yield path


def class_of(repository: str, path: Path) -> str | None:
    """Return the class of devices on which a recipe without one is planned."""
    return "B200-180G" if repository == "RL" and NODES_OF_FOUR.search(path.name) else None


def plan_result(out: Translation) -> str:
    """Return whether the plan of a translation fits."""
    if any(key.startswith("models.") and key.endswith(".path") for key in out.lines):
        return "sizes unknown"
    if any("of devices is not in the file" in note or "of processes" in note for note in out.notes):
        return "no devices named"
    if any("whose number is not in the file" in note for note in out.notes):
        return "no devices named"
    try:
        plan = make_plan(Spec.parse(out.tree(), out.file))
    except UserError as error:
        return f"plan refuses: {error}"
    try:
        check_fits(plan)
    except UserError as error:
        return f"too large: {error}"
    return "fits"


def reason_of(error: UserError) -> str:
    """Return the kind of a refusal."""
    kinds = {
        "reads images": "models that read images or sound",
        "distillation": "distillation from a teacher",
        "trainer": "a trainer without a counterpart",
        "is not in the file": "the model is not in the file",
        "its value is": "the model is not in the file",
        "the file has none": "the model is not in the file",
    }
    return next((kind for text, kind in kinds.items() if text in str(error)), "no job of a known form")


def count(directory: Path, repository: str, lists: bool) -> Count:
    """Translate and plan the recipes of a repository."""
    found = Count()
    for path in recipes(directory, repository):
        try:
            default = class_of(repository, path)
            out = translated(path, default)
            if "class" not in (out.value("cluster.nodes") or [{}])[0]:
                out = translated(path, "H100-80G")
        except UserError as error:
            found.results["refused"] += 1
            found.reasons[reason_of(error)] += 1
            result = f"refused: {error}"
        else:
            whole, planned = "imported" if out.is_whole else "partly", plan_result(out)
            found.results[whole] += 1
            found.plans[planned.partition(":")[0]] += 1
            result = f"{whole}, {planned}"
        if lists:
            print(f"{path.relative_to(directory)}: {result}", flush=True)
    return found


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("directory", type=Path)
    parser.add_argument("--list", action="store_true", help="a line for each recipe")
    options = parser.parse_args()
    counts = {
        name: count(options.directory, name, options.list) for name in RECIPES if (options.directory / name).is_dir()
    }
    print("| repository | recipes | imported | partly | refused | sizes unknown | name devices | fit |")
    print("|---|---|---|---|---|---|---|---|")
    for name, each in counts.items():
        planned = sum(each.plans[key] for key in ("fits", "too large", "plan refuses"))
        numbers = (each.results.total(), *(each.results[key] for key in ("imported", "partly", "refused")))
        row = (name, *numbers, each.plans["sizes unknown"], planned, each.plans["fits"])
        print(f"| {' | '.join(map(str, row))} |")
    for name, each in counts.items():
        reasons = ", ".join(f"{number} {reason}" for reason, number in each.reasons.most_common())
        print(f"\n{name}: refused {reasons or 'none'}; plans {dict(each.plans)}")


if __name__ == "__main__":
    main()
