"""Requests to ``flexrlhf advise``: a name, and the options of its command."""

from __future__ import annotations

import argparse
import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from flexrlhf.config.spec import Spec
from flexrlhf.config.yaml_io import write_yaml
from flexrlhf.guideline.advice.request import AdviceOptions

REQUESTS = Path(__file__).with_name("requests.txt")
TEXTS = ("algorithm", "model", "critic", "ref", "reward", "gpu-type", "engine", "rollout")
NUMBERS = ("gpus", "prompt-tokens", "response-tokens", "prompts", "samples", "mini-batches", "lora")


@dataclass(frozen=True)
class Case:
    """A request.

    name:       its name.
    command:    options of ``flexrlhf advise``, and ``--nodes``, which is written to a file for ``--cluster``.
    in_subset:  whether it is one of the subset.
    """

    name: str
    command: str
    in_subset: bool

    @property
    def file_name(self) -> str:
        return re.sub(r"[^a-z0-9.]+", "_", self.name)

    def options(self) -> argparse.Namespace:
        parser = argparse.ArgumentParser()
        for name in TEXTS:
            parser.add_argument(f"--{name}")
        for name in NUMBERS:
            parser.add_argument(f"--{name}", type=int)
        parser.add_argument("--nodes", type=_nodes)
        parser.add_argument("--max-lag", type=int)
        parser.add_argument("--mean-response", type=float)
        parser.add_argument("--set", action="append", default=[])
        return parser.parse_args(shlex.split(self.command))

    def spec(self, folder: Path) -> Spec:
        """Return the spec of the request. ``folder``: for the file of nodes. Raises UserError."""
        options, cluster = self.options(), None
        if options.nodes is not None:
            cluster = folder / f"{self.file_name}.nodes.yaml"
            cluster.write_text(write_yaml({"nodes": options.nodes}))
        given = {name: getattr(options, name.replace("-", "_")) for name in (*TEXTS, *NUMBERS)}
        named = {name.replace("-", "_"): value for name, value in given.items()}
        return AdviceOptions(**named, cluster=cluster).spec(None, tuple(options.set))


def _nodes(text: str) -> list[dict[str, Any]]:
    """Return the nodes of a text such as ``3x8 H100-80G, 8 B200-180G``."""
    nodes = []
    for part in text.split(","):
        sizes, name = part.split()
        count, _, devices = sizes.rpartition("x")
        nodes.append({"count": int(count or 1), "devices": int(devices), "class": name})
    return nodes


def cases() -> Iterator[Case]:
    """Yield all requests."""
    for line in REQUESTS.read_text().splitlines():
        name, found, command = line.partition(": --")
        if found and not line.startswith("#"):
            yield Case(name.removeprefix("*"), f"--{command}", name.startswith("*"))
