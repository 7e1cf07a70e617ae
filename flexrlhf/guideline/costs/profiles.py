"""Constants of the cost model, read from tables: passes and generation of each engine, accuracy of predictions.

Tables are CSV files next to the code. Each row ends with its ``source``: the publication or measurement that its values
are fitted on, or that they are assumed. Spaces after a comma align the columns; an empty cell stands for the field's
default.
"""

from __future__ import annotations

import csv
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from math import inf
from pathlib import Path
from typing import Any, Literal, TypeVar, get_type_hints

from pydantic import TypeAdapter

from flexrlhf.api import DeviceClass, EngineFacts

Row = TypeVar("Row")


def read_table(path: Path) -> list[dict[str, str]]:
    """Return the rows of a table by column, without empty cells."""
    with path.open(newline="", encoding="utf-8") as stream:
        rows = csv.DictReader(stream, skipinitialspace=True)
        return [{column: cell for column, cell in row.items() if cell} for row in rows]


def named_rows(row_type: type[Row], rows: Iterable[Mapping[str, Any]]) -> dict[str, Row]:
    """Return ``rows`` as instances of a dataclass, by name. Raises KeyError for a column that is none of its fields,
    ValueError for a cell of another type."""
    cells = {name: TypeAdapter(hint) for name, hint in get_type_hints(row_type).items()}
    omitted = {"name", "source"} - cells.keys()
    return {
        row["name"]: row_type(**{column: cells[column].validate_python(row[column]) for column in row.keys() - omitted})
        for row in rows
    }


@dataclass(frozen=True)
class EngineProfile:
    """Constants of an engine's forward and training passes; ``DecodeProfile`` is for generation.

    name:                 the engine
    attention:            speed of its attention kernels, that of FlashAttention 2 being 1
    elements:             bytes that element-wise kernels of a layer move, plain 16-bit kernels being 1
                          (normalising in 32 bits unfused moves several times as many)
    loss_bytes:           bytes that each logit moves in its loss, forward and backward
    overlap:              share of the shorter of compute and collectives over replicas that hides behind the other
    repeats:              share of a layer's forward pass that selective recomputation does again
    sequence_parallel:    whether tensor-parallel ranks share element-wise work too
    pass_launch_seconds:  launching the kernels of one layer in one pass, on the host
    adapter_elements:     passes over a product's result that a low-rank adapter adds to it
    gather_gb_s:          most GB/s of a node to others in gathering sharded weights or scattering gradients; empty:
                          what its links reach
    gather_within_gb_s:   the same of a device inside its node
    reached:              share of all these speeds that passes reach, but for collectives and the optimizer
    tensor_reached:       share of the speed of tensor-parallel collectives that they reach
    stops_early:          whether recomputing a layer ends before its last matrix product, whose result the backward
                          pass does not need (``torch.utils.checkpoint`` without reentrance)
    chunks:               parts of each pipeline stage whose micro-batches are interleaved, which divides the bubble
                          (PTD-P, section 2.2)
    grouped_mm:           whether products of experts are torch's ``grouped_mm``, else a kernel of its own
    """

    name: str
    attention: float
    elements: float
    loss_bytes: float
    overlap: float
    repeats: float
    sequence_parallel: bool
    pass_launch_seconds: float
    adapter_elements: float
    stops_early: bool
    chunks: int
    gather_gb_s: float = inf
    gather_within_gb_s: float = inf
    grouped_mm: bool = False
    reached: float = 1.0
    tensor_reached: float = 1.0

    def __hash__(self) -> int:
        # of one field: profiles are keys of many tables
        return hash(self.name)


def read_engines(path: Path) -> dict[str, EngineProfile]:
    """Return the engine profiles of a table, by name."""
    return named_rows(EngineProfile, read_table(path))


PROFILES = read_engines(Path(__file__).with_name("engines.csv"))
"""Engine name → profile. ``serving``: forward passes of inference engines."""


Batching = Literal["refill", "group", "static"]
"""``refill``: rows enter as others end (continuous batching). ``group``: groups of ``decode_rows`` that shrink as rows
end. ``static``: groups that run whole until their longest row ends."""


@dataclass(frozen=True)
class DecodeProfile:
    """Constants of one generating engine in one era. Host times are of a node with PCIe 5
    (``host_factor``).

    name:              the engine
    batching:          how rows share a batch
    cache:             share of the memory bandwidth at which attention reads keys and values
    reread:            part of them that each further query head that shares them reads again (0: kernels of
                       grouped-query attention, 1: copies for each)
    layer_seconds:     a layer in one step in addition to matrices, attention and collectives: small kernels on the
                       device or, if ``host_paced``, its wait for the host
    host_paced:        whether ``layer_seconds`` are the host's
    launch_seconds:    launching one layer's kernels in one step, on the host; overlaps the device's work; 0: a graph is
                       launched whole
    launch_tp_seconds: addition to it with tensor parallelism, for the collectives of the layer
    step_seconds:      a step, on the host, while the device waits
    row_seconds:       the same, for each live row
    entry_seconds:     a row that enters, on the host
    one_shot_seconds:  latency of the engine's own all-reduce kernel for small messages; 0: it has none
    passes:            profile of its forward passes over prompts
    expands:           whether a step makes keys and values of all cached tokens from their latents, where attention is
                       latent; else queries are mapped to the latents' space
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
    expands: bool = False
    reached: float = 1.0
    tensor_reached: float = 1.0


def read_decoders(path: Path, engines: Mapping[str, EngineProfile]) -> dict[str, DecodeProfile]:
    """Return the decode profiles of a table, by name; column ``passes`` names one of ``engines``."""
    rows = ({**row, "passes": engines[row["passes"]]} for row in read_table(path))
    return named_rows(DecodeProfile, rows)


DECODERS = read_decoders(Path(__file__).with_name("decoders.csv"), PROFILES)
"""Engine name → profile. ``transformers``: Hugging Face's ``generate``. ``torch``: this package's own decoding."""


def profile_of(profiles: Mapping[str, Row], engine: str) -> Row:
    """Return the profile of an engine; of one without a row in the table, that of the engine as which it is priced."""
    return profiles[engine if engine in profiles else EngineFacts.of(engine).priced_as]


HOST_FACTORS = ((50.0, 1.0), (25.0, 1.9), (0.0, 3.0))
"""From so many GB/s between host and device: how much slower hosts are than in nodes with PCIe 5; the bus dates a node.
Fitted for PCIe 4 (A100 against H100 under vLLM 0.5 and 0.6), assumed for PCIe 3."""


def host_factor(device: DeviceClass) -> float:
    """Return how much longer work on the host takes in a node of ``device`` than in one with PCIe 5."""
    return next(factor for least, factor in HOST_FACTORS if device.host_gb_s >= least)


NORMAL_RANGES = 1.5
"""Ranges of the middle half around a median between which 96 % of normally distributed times are."""


@dataclass(frozen=True)
class Accuracy:
    """Range of measured over predicted seconds of a step, or of a part of it.

    name:  basis of the predictions: figures of the device classes, for engines of any family or of one, or
           measurements of the devices
    low:   least value of the range
    high:  most value of the range
    share: share of the rows that are in it
    tie:   relative difference that the predictions of two placements need, so that measurements give the same order in
           nine of ten cases; 0: not derived for this family or part
    """

    name: str
    low: float
    high: float
    share: float
    tie: float = 0.0

    def scattered(self, spread: float) -> Accuracy:
        """Return the range for measurements that vary. ``spread``: range of the middle half, relative to the median."""
        beyond = 1 + NORMAL_RANGES * spread
        return replace(self, low=min(self.low, 1 / beyond), high=max(self.high, beyond))

    @property
    def elsewhere(self) -> Accuracy:
        """Accuracy of measurements on another machine: of their order alone."""
        return replace(self, low=0.0, high=inf)

    @property
    def has_range(self) -> bool:
        """Whether it bounds measured seconds."""
        return self.high < inf

    def seconds(self, predicted: float) -> tuple[float, float]:
        """Return the seconds between which a ``share`` of the measurements are, for a prediction."""
        return self.low * predicted, self.high * predicted

    def has(self, measured: float, predicted: float) -> bool:
        low, high = self.seconds(predicted)
        return low <= measured <= high


_ACCURACIES = named_rows(Accuracy, read_table(Path(__file__).with_name("accuracy.csv")))
FROM_FIGURES, FROM_MEASUREMENTS = _ACCURACIES["figures"], _ACCURACIES["measurements"]
"""Accuracy of predicted steps, by their basis."""
EngineFamily = Literal["adapters", "deepspeed", "torch and megatron", "figures"]
"""Plans that train adapters; that train all weights with DeepSpeed; or with FSDP or Megatron, and generate with CUDA
graphs; and all others."""
StepPart = Literal["step", "generation", "training", "other calls"]


def accuracy_by_figures(family: EngineFamily, part: StepPart = "step") -> Accuracy:
    """Return the accuracy of a ``part`` that is predicted by figures of the device classes."""
    return _ACCURACIES.get(f"{family}, {part}", _ACCURACIES[family])
