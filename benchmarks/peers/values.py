"""One update of job files and presets as other engines compute it, next to this project's by their translation.

    python -m benchmarks.peers.values PEERS [--record] [--only trl]

``PEERS`` is the folder of ``benchmarks.peers.semantics``. Prints for each job the largest difference of losses and
gradients, over the largest one. Ends with an error if one is above 1e-6 and the translation does not say so.
``--record`` writes the peers' values that ``tests/unit/test_peer_values.py`` compares with, where no peer is.
"""

from __future__ import annotations

import argparse
import json
import logging
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

from benchmarks.peers import areal_updates, openrlhf_updates, trl_updates, verl_updates
from benchmarks.peers.comparison import TOLERANCE
from benchmarks.peers.packages import use_packages
from benchmarks.peers.updates import Inputs, Job, Losses, difference, digest, effects, settings_of_job, update_of
from flexrlhf.errors import UserError

PEERS: Mapping[str, Any] = {
    "trl": trl_updates,
    "verl": verl_updates,
    "openrlhf": openrlhf_updates,
    "areal": areal_updates,
}
"""Package → its module here, with ``jobs`` and ``losses_of``."""
RECORDED = Path(__file__).parents[2] / "tests" / "fixtures" / "peer_values.json"


@dataclass(frozen=True)
class Compared:
    """A job with the difference of both sides; None if it is refused here."""

    job: Job
    difference: float | None
    report: str

    @property
    def is_right(self) -> bool:
        """Whether the values are equal, or are refused or named as others."""
        if self.difference is None:
            return bool(self.job.says)
        if self.job.says:
            return self.job.says in effects(self.report)
        return self.difference <= TOLERANCE

    def line(self) -> str:
        shown = "refused" if self.difference is None else f"{self.difference:.1e}"
        said = "named" if self.job.says or self.difference is None else ""
        return f"| {self.job.about} | {shown} | {said if self.is_right else '**wrong**'} |"


def compare(job: Job, theirs: Losses, inputs: Inputs) -> Compared:
    """Compare a peer's losses of a job with this project's."""
    try:
        spec, report = settings_of_job(job)
    except UserError as error:
        return Compared(job, None, str(error))
    return Compared(job, difference(job, update_of(spec, inputs), theirs), report)


def as_text(recorded: Mapping[str, Any]) -> str:
    """Return the values as JSON, a line for each job."""
    packages = []
    for package, values in recorded.items():
        lines = ",\n".join(f"{json.dumps(name)}: {json.dumps(each)}" for name, each in values["jobs"].items())
        packages.append(f'"{package}": {{"version": {json.dumps(values["version"])}, "jobs": {{\n{lines}\n}}}}')
    return "{" + ",\n".join(packages) + "}\n"


def main() -> None:
    """Compare, print, and record."""
    parser = argparse.ArgumentParser(description="Compare updates of job files.")
    parser.add_argument("packages", type=Path, help="folder with the packages")
    parser.add_argument("--record", action="store_true", help=f"write {RECORDED.name}")
    parser.add_argument("--only", choices=PEERS, help="one package")
    options = parser.parse_args()
    use_packages(options.packages.resolve())
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    wrong: list[str] = []
    recorded = json.loads(RECORDED.read_text()) if RECORDED.exists() else {}
    for package, module in PEERS.items():
        if options.only in (None, package):
            print(f"\n### {package} {version(package)}\n\n| setting | difference | |\n|---|---|---|")
            values: dict[str, Any] = {}
            for job in module.jobs():
                theirs, inputs = module.losses_of(job)
                values[job.name] = digest(job, theirs)
                compared = compare(job, theirs, inputs)
                print(compared.line(), flush=True)
                wrong += [] if compared.is_right else [job.about]
            recorded[package] = {"version": version(package), "jobs": values}
    if options.record:
        RECORDED.write_text(as_text(recorded))
    if wrong:
        raise SystemExit(f"{len(wrong)} jobs have other values: {'; '.join(wrong)}")


if __name__ == "__main__":
    main()
