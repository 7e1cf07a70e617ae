"""A package of other people as an installed one: ``fixtures/guest``, and the metadata that pip would write."""

from __future__ import annotations

import shutil
import tomllib
from pathlib import Path

GUEST = Path(__file__).parent / "fixtures" / "guest"


def install_guest(site: Path, broken: str = "") -> Path:
    """Write the package and its metadata into ``site``, a directory for ``sys.path``. ``broken``: a module that raises
    as it is loaded."""
    shutil.copytree(GUEST / "guest", site / "guest", ignore=shutil.ignore_patterns("__pycache__"))
    if broken:
        (site / "guest" / f"{broken}.py").write_text("raise SystemExit('out of order')\n")
    project = tomllib.loads((GUEST / "pyproject.toml").read_text())["project"]
    metadata = site / "guest-1.2.dist-info"
    metadata.mkdir()
    name, version = project["name"], project["version"]
    (metadata / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    lines = []
    for group, entries in project["entry-points"].items():
        lines += [f"[{group}]", *(f"{each} = {reference}" for each, reference in entries.items())]
    (metadata / "entry_points.txt").write_text("\n".join(lines) + "\n")
    return site
