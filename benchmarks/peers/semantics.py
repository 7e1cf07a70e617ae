"""Core functions of verl, OpenRLHF and TRL, imported from their packages, next to this project's, on random inputs.

Their packages go into a separate folder, without their dependencies:

    pip install --no-deps --target PEERS verl==0.9.1 trl==1.16.0 openrlhf==0.11.2 ray tensordict omegaconf pandas \\
        antlr4-python3-runtime==4.9.3 pyvers pylatexenc codetiming torchdata hydra-core pyarrow wandb \\
        orjson
    python -m benchmarks.peers.semantics PEERS

Prints a table of the largest differences, and of the presets' defaults that the packages confirm. Ends with an
error if a difference above 1e-6 has no explanation.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from benchmarks.peers import defaults, openrlhf_rows, trl_rows, verl_rows
from benchmarks.peers.comparison import print_rows
from benchmarks.peers.packages import use_packages


def main() -> None:
    """Compare and print."""
    parser = argparse.ArgumentParser(description="Compare verl and OpenRLHF with this project.")
    parser.add_argument("packages", type=Path, help="folder with the packages")
    directory = parser.parse_args().packages.resolve()
    use_packages(directory)
    unexplained = []
    peers = {"verl 0.9.1": verl_rows, "OpenRLHF 0.11.2": openrlhf_rows, "TRL 1.16.0": trl_rows}
    for title, rows in ((title, module.rows()) for title, module in peers.items()):
        found = list(rows)
        print_rows(title, found)
        unexplained += [row.function for row in found if not row.is_explained and not row.named]
    defaults.print_defaults(directory)
    if unexplained:
        raise SystemExit(f"differences without a name: {', '.join(unexplained)}")


if __name__ == "__main__":
    main()
