"""Decode profiles: what differs between engines that generate, one row of constants each (``decoders.csv``)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from flexrlhf.guideline.costs.constants import named_rows, read_rows
from flexrlhf.guideline.costs.engines import PROFILES, EngineProfile
from flexrlhf.placement.devices import DeviceClass

Batching = Literal["refill", "group", "static"]
"""``refill``: rows enter as others end (continuous batching). ``group``: groups of ``decode_rows`` that shrink as rows
end. ``static``: groups that run whole until their longest row ends."""


@dataclass(frozen=True)
class DecodeProfile:
    """Constants of one generating engine in one era. Seconds on the host are those of a node with PCIe 5
    (``host_factor``).

    name:              the engine
    batching:          how rows share a batch
    cache:             share of the memory bandwidth at which attention reads keys and values
    reread:            part of them that each further query head that shares them reads again (0: kernels of
                       grouped-query attention, 1: copies for each)
    layer_seconds:     a layer in one step in addition to matrices, attention and collectives: small kernels on the
                       device or, if ``host_paced``, what the host lets it wait
    host_paced:        whether ``layer_seconds`` are the host's
    launch_seconds:    launching one layer's kernels in one step, on the host; overlaps the device's work; 0: a graph is
                       launched whole
    launch_tp_seconds: addition to it with tensor parallelism, for the collectives of the layer
    step_seconds:      a step, on the host, while the device waits
    row_seconds:       the same, for each live row
    entry_seconds:     a row that enters, on the host
    one_shot_seconds:  latency of the engine's own all-reduce kernel for small messages; 0: it has none
    passes:            profile of its forward passes over prompts
    reached:           share of all these speeds that generation reaches, but for collectives
    tensor_reached:    share of the speed of tensor-parallel collectives that it reaches
    """

    name: str
    batching: Batching
    cache: float
    reread: float
    layer_seconds: float
    host_paced: bool
    launch_seconds: float
    launch_tp_seconds: float
    step_seconds: float
    row_seconds: float
    entry_seconds: float
    one_shot_seconds: float
    passes: EngineProfile
    reached: float = 1.0
    tensor_reached: float = 1.0


def read_decoders(path: Path, engines: Mapping[str, EngineProfile]) -> dict[str, DecodeProfile]:
    """Return the decode profiles of a table, by name; column ``passes`` names one of ``engines``."""
    rows = ({**row, "passes": engines[row["passes"]]} for row in read_rows(path))
    return named_rows(DecodeProfile, rows)


DECODERS = read_decoders(Path(__file__).with_name("decoders.csv"), PROFILES)
"""Engine name → profile. ``transformers``: Hugging Face's ``generate``. ``torch``: this package's own decoding."""

HOST_FACTORS = ((50.0, 1.0), (25.0, 1.9), (0.0, 3.0))
"""From so many GB/s between host and device: how much slower hosts are than in nodes with PCIe 5; the bus dates a node.
Fitted for PCIe 4 (A100 against H100 under vLLM 0.5 and 0.6), assumed for PCIe 3."""


def host_factor(device: DeviceClass) -> float:
    """Return how much longer work on the host takes in a node of ``device`` than in one with PCIe 5."""
    return next(factor for least, factor in HOST_FACTORS if device.host_gb_s >= least)
