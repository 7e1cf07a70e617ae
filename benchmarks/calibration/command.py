"""The command of one file of measurements: how far predictions are, or the constants of a fit."""

from __future__ import annotations

import argparse
from collections import defaultdict
from collections.abc import Callable, Hashable, Mapping
from pathlib import Path
from statistics import mean, median
from types import ModuleType
from typing import Any

Show = Callable[[Hashable], str]


def command(module: ModuleType, show: Show = str) -> None:
    """Print the errors of a module's predictions, or with ``--fit`` its constants. ``module`` has ``predictions``,
    ``read_cases``, ``fit`` and ``fitted``; ``show`` names a fitted constant."""
    parser = argparse.ArgumentParser(description=module.__doc__)
    parser.add_argument("directory", type=Path)
    parser.add_argument("--fit", action="store_true", help="search constants instead, and print them")
    arguments = parser.parse_args()
    if arguments.fit:
        found: Mapping[Any, float] = module.fit(module.read_cases(arguments.directory)[0])
        print("\n".join(f"{show(name)}: {value:.4g}" for name, value in found.items()))
    else:
        _report(module, arguments.directory)


def _report(module: ModuleType, directory: Path) -> None:
    errors = defaultdict(list)
    for each in module.predictions(directory):
        for group in (each.group, "all"):
            errors[group].append((each.error, each.row))
    for group, found in errors.items():
        values = [error for error, _ in found]
        print(f"{group}: {len(found)} rows, {mean(values):.1%}, median {median(values):.1%}, worst {max(found)}")
    print(f"{len(module.fitted())} constants; left out: {module.read_cases(directory)[1] or 'nothing'}")
