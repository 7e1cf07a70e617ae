"""Published step times of other systems, next to the prediction for their recipes through ``flexrlhf import``.

    python -m benchmarks.imported_times DIRECTORY [ROW ...] [--show]

DIRECTORY has clones of their repositories, with history, by the names in ``imported_times.csv``; rows of a missing one
are left out. A row there is one published time:

* the recipe's file, at the commit of its release;
* ``variables`` that a script takes from its caller, ``settings`` of the YAML that are published otherwise;
* the mean tokens of prompts and responses; ``rows``: responses of a published step, if a step here has others;
* ``fitted``: whether the cost model's constants are fitted on the time (``benchmarks/calibration``); the source.

Where no mean is published, ``response`` is ``solved``: the mean with which the prediction is the published time. Such a
row shows nothing by itself; others of the same experiment name it and have the same mean.

Prints both times, published / predicted with the range that ``simulate`` prints, and whether the plan fits its devices.
Responses vary as those of ``simulate --mean-response`` do.
"""

from __future__ import annotations

import argparse
import csv
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

from flexrlhf.config.spec import Spec
from flexrlhf.config.yaml_io import read_yaml
from flexrlhf.errors import UserError
from flexrlhf.guideline.simulation.inputs import CostSource, TextLengths, costs_for, truncated_exponential
from flexrlhf.guideline.simulation.simulate import simulate
from flexrlhf.guideline.simulation.simulation_text import format_simulation
from flexrlhf.imports.translate import translated
from flexrlhf.plan.pipeline import make_plan
from flexrlhf.plan.plan import Plan

TABLE = Path(__file__).with_suffix(".csv")
ENDINGS = ("sh", "yaml", "yml")
"""Of files that a recipe may read."""
Row = Mapping[str, str]


@dataclass(frozen=True)
class Recipe:
    """A published time and the plan of its recipe.

    row:     of the table.
    plan:    by ``flexrlhf import``.
    source:  cost model and its accuracy.
    """

    row: Row
    plan: Plan
    source: CostSource

    def predicted(self, mean: float) -> float:
        """Return the seconds of as many responses as the published step has, with this mean length."""
        simulation = simulate(self.plan, self.source.costs, self.lengths(mean))
        taken = self.plan.batch.num_taken
        return simulation.seconds * float(self.row["rows"] or taken) / taken

    def lengths(self, mean: float) -> TextLengths:
        longest = self.plan.lengths.response
        return TextLengths(float(self.row["prompt"]), truncated_exponential(mean, longest))

    def solved(self) -> float:
        """Return the mean length with which the prediction is the published time."""
        low, high = 1.0, float(self.plan.lengths.response)
        for _ in range(20):
            mean = (low + high) / 2
            low, high = (mean, high) if self.predicted(mean) < float(self.row["seconds"]) else (low, mean)
        return low

    @property
    def fits(self) -> str:
        """``yes``, or the gigabytes that the fullest device needs and has."""
        rank = self.plan.tightest_rank
        needed, size = self.plan.memories[rank].peak_bytes, self.plan.device_bytes(rank)
        assert size is not None
        return "yes" if needed <= size else f"{needed / 1e9:.0f} of {size / 1e9:.0f} GB"


def recipe_of(row: Row, checkouts: Path) -> Recipe:
    """Translate and plan the recipe of a row. Raises UserError."""
    given = dict(pair.split("=", 1) for pair in row["variables"].split("; ") if pair)
    out = translated(checkouts / row["repository"] / row["commit"] / row["file"], row["device"], given)
    for change in filter(None, row["settings"].split("; ")):
        key, _, value = change.partition("=")
        out.put(key, read_yaml(value), "published")
    spec = Spec.parse(out.tree(), out.file)
    return Recipe(row, make_plan(spec), costs_for(spec, None))


def check_out(directory: Path, row: Row, checkouts: Path) -> None:
    """Write the job files of a row's commit."""
    target = checkouts / row["repository"] / row["commit"]
    if not target.is_dir():
        target.mkdir(parents=True)
        git = ("git", "-C", str(directory / row["repository"]))
        listed = subprocess.run((*git, "ls-tree", "-r", "--name-only", row["commit"]), capture_output=True, text=True)
        jobs = [f":(glob)**/*.{ending}" for ending in ENDINGS if f".{ending}\n" in listed.stdout]
        # fails at the end where a clone lacks large files, which are no job files
        with subprocess.Popen(
            (*git, "archive", row["commit"], *jobs), stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
        ) as archive:
            subprocess.run(("tar", "-x", "-C", str(target)), stdin=archive.stdout, check=False)


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("directory", type=Path)
    parser.add_argument("rows", nargs="*", help="rows of the table; default: all")
    parser.add_argument("--show", action="store_true", help="the parts of each step, too")
    options = parser.parse_args()
    with TABLE.open(newline="") as stream:
        table = [row for row in csv.DictReader(stream) if (options.directory / row["repository"]).is_dir()]
    means: dict[str, float] = {}
    inside: dict[str, list[bool]] = {"yes": [], "no": []}
    print("| recipe | devices | response | published, s | predicted, s | ratio | range | inside | fitted | fits |")
    print("|---|---|---|---|---|---|---|---|---|---|")
    with TemporaryDirectory() as folder:
        for row in table:
            if options.rows and row["id"] not in {*options.rows, *(each["response"] for each in table)}:
                continue
            check_out(options.directory, row, Path(folder))
            try:
                recipe = recipe_of(row, Path(folder))
            except UserError as error:
                print(f"| {row['id']} | refused: {error} |")
                continue
            text = row["response"]
            mean = means[row["id"]] = recipe.solved() if text == "solved" else means.get(text) or float(text)
            published, predicted = float(row["seconds"]), recipe.predicted(mean)
            accuracy = recipe.source.accuracy_of(recipe.plan)
            shown = "solved" if text == "solved" else "yes" if accuracy.has(published, predicted) else "**no**"
            if text != "solved":
                inside[row["fitted"]].append(accuracy.has(published, predicted))
            cells = (
                *(
                    row["id"],
                    f"{row['devices']} {row['device']}",
                    f"{mean:.0f}",
                    f"{published:.4g}",
                    f"{predicted:.4g}",
                ),
                *(f"{published / predicted:.2f}", f"{accuracy.low:g} to {accuracy.high:g}"),
                *(shown, row["fitted"], recipe.fits),
            )
            print(f"| {' | '.join(cells)} |", flush=True)
            if options.show:
                print(
                    format_simulation(simulate(recipe.plan, recipe.source.costs, recipe.lengths(mean)), recipe.source)
                )
    for fitted, found in inside.items():
        print(f"\nfitted: {fitted}: {sum(found)} of {len(found)} inside the range", end="")
    print()


if __name__ == "__main__":
    main()
