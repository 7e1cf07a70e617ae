"""Settings of the cluster and of the placement: machines, and the devices of each placed model or operator."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    GetJsonSchemaHandler,
    PlainSerializer,
    StrictInt,
    model_validator,
)
from pydantic_core import CoreSchema

from flexrlhf.config.model_settings import LAYOUT_SETTINGS, ModelSpec
from flexrlhf.config.ratio_vector import Exact
from flexrlhf.config.strict_model import StrictModel, optional_fields, plain_text
from flexrlhf.errors import nearest, shown


class NodeSpec(StrictModel):
    """Machines of one kind."""

    count: int = Field(1, ge=1, description="machines")
    devices: int = Field(ge=1, description="devices in each machine")
    device_class: str = Field("any", alias="class", description="such as A100-80G: device memory and compute figures")
    memory_gb: float | None = Field(
        None, gt=0, description="GB of one device that models and calls may fill; null: what its class leaves"
    )
    link_gb_s: float | None = Field(
        None, gt=0, description="GB/s between two devices of a machine, in one direction; null: that of the class"
    )
    network_gb_s: float | None = Field(
        None, gt=0, description="GB/s from one machine to the others, in one direction; null: that of the class"
    )
    cores: int | None = Field(
        None, ge=1, description="CPU cores of each machine, which processes of an environment share; null: enough"
    )
    speed: Exact | None = Field(
        None,
        gt=0,
        description="speed of one device, relative to those of the other nodes, by which rows are shared and measured "
        "times are scaled; `flexrlhf doctor` measures it; null: that of the class",
    )


class ClusterSpec(StrictModel):
    """Devices of the run: one number, or nodes with a device class each."""

    devices: int | None = Field(
        None, ge=1, description="number of devices, a rank each; null: those of the nodes, or 1"
    )
    nodes: tuple[NodeSpec, ...] = Field((), description="machines in the order of their ranks; []: one machine")
    memory_gb: float | None = Field(
        None, gt=0, description="GB of one device that models and calls may fill, where its node has no memory_gb"
    )
    device: Literal["auto", "cpu", "cuda"] = Field(
        "auto",
        description="auto: cuda where each rank has a GPU, else cpu, unless its node's class is a GPU; cpu: classes "
        "are labels",
    )

    ON_CPUS: ClassVar = "cluster.device: cpu to train on CPUs"
    """Setting that makes a device class a label."""
    NVIDIA_DRIVER: ClassVar = Path("/proc/driver/nvidia/version")
    """Exists if NVIDIA's driver is loaded."""

    @property
    def num_nodes(self) -> int:
        """Number of nodes; devices that are given as one number are on one."""
        return sum(node.count for node in self.nodes) if self.nodes else 1

    @staticmethod
    def node_keys() -> frozenset[str]:
        """Return the keys of a node."""
        return NodeSpec._keys()

    @property
    def num_devices(self) -> int:
        """Number of devices: given, else those of the nodes, else 1."""
        return self.devices or sum(node.count * node.devices for node in self.nodes) or 1

    @model_validator(mode="after")
    def _sizes_agree(self) -> Self:
        total = sum(node.count * node.devices for node in self.nodes)
        if self.nodes and self.devices not in (None, total):
            raise ValueError(f"devices {self.devices} but the nodes hold {total}: remove devices or correct the nodes")
        without = [number for number, node in enumerate(self.nodes) if node.speed is None]
        if 0 < len(without) < len(self.nodes):
            raise ValueError(f"nodes[{without[0]}] has no speed and others have one: give it for all nodes or for none")
        return self

    @property
    def is_on_cpu(self) -> bool:
        """Whether ranks run on CPUs, as set or because this machine has no GPU; nodes whose class is a GPU apart."""
        return self.device == "cpu" or (self.device == "auto" and not self.NVIDIA_DRIVER.is_file())


def _ranks(value: Any) -> Any:
    """Read ranks that are written as a text such as ``0-3`` or ``0-1,4-5``."""
    if not isinstance(value, str):
        return value
    spans = [re.fullmatch(r"\s*(\d{1,6})(?:\s*-\s*(\d{1,6}))?\s*", part) for part in value.split(",")]
    ranks = [rank for span in spans if span for rank in range(int(span[1]), int(span[2] or span[1]) + 1)]
    if not all(spans) or not ranks:
        raise ValueError(f"expected ranks such as [0, 1, 2, 3] or 0-3, found {shown(value)}")
    return ranks


def _written_ranks(ranks: tuple[int, ...]) -> list[int] | str:
    """Write ranks so that reading them gives the same: a run of several as a span."""
    is_run = len(ranks) > 2 and list(ranks) == list(range(ranks[0], ranks[0] + len(ranks)))
    return f"{ranks[0]}-{ranks[-1]}" if is_run else list(ranks)


WrittenRanks = Annotated[
    tuple[StrictInt, ...],
    BeforeValidator(_ranks, json_schema_input_type=tuple[int, ...] | str),
    PlainSerializer(_written_ranks),
]


class PlacementEntry(StrictModel):
    """Ranks of one placed model, in the mapping form."""

    ratio: Exact | None = Field(None, description="share of the devices, in (0, 1]; or ranks")
    ranks: WrittenRanks | None = Field(None, description="the ranks themselves, as a list or as 0-3; or ratio")
    on: str | None = Field(None, description="device class; the ratio then counts devices of this class only")
    row_shares: tuple[Exact, ...] | None = Field(
        None, description="relative share of the rows for each replica; null: equal shares"
    )

    @model_validator(mode="after")
    def _one_form(self) -> Self:
        if (self.ratio is None) == (self.ranks is None):
            raise ValueError("give either ratio or ranks")
        if self.ranks is not None and self.on is not None:
            raise ValueError("on goes with a ratio: remove on or ranks")
        if self.ranks is not None and (
            not self.ranks or len(set(self.ranks)) != len(self.ranks) or min(self.ranks) < 0
        ):
            raise ValueError(f"ranks must be distinct and not negative, found {list(self.ranks)}")
        if self.row_shares is not None and (min(self.row_shares, default=-1) < 0 or sum(self.row_shares) == 0):
            raise ValueError("row_shares must not be negative and must not all be 0")
        return self


def _entry(value: Any) -> Any:
    return value if isinstance(value, dict | PlacementEntry) else {"ratio": value}


Entry = Annotated[PlacementEntry, BeforeValidator(_entry, json_schema_input_type=PlacementEntry | Exact)]


_OfRole: Any = optional_fields(ModelSpec, *LAYOUT_SETTINGS, "micro_batch_tokens")


class OperatorPlacement(_OfRole, PlacementEntry):  # type: ignore[misc]
    """Ranks of one operator, and settings in which it differs from its role; null: those of the role.

    Operators of a role that differ in ``micro_batch_tokens`` alone share a copy of it. Where ``rollout.engine``
    generates, an operator that generates has ``tp`` and ``pp`` alone, by default as in ``rollout``.
    """

    shadow: bool = Field(
        False,
        strict=True,
        description="whether its copy of a trained model keeps its weights from step to step and is synced after "
        "training, on ranks that train nothing; schedule.lag and sync.every need it of what generates",
    )

    @property
    def settings(self) -> dict[str, Any]:
        """The settings of its copy that are given."""
        given = {name: getattr(self, name) for name in LAYOUT_SETTINGS}
        return {name: value for name, value in given.items() if value is not None}


OperatorEntry = Annotated[OperatorPlacement, BeforeValidator(_entry, json_schema_input_type=OperatorPlacement | Exact)]


class PlacementMap(BaseModel):
    """Mapping form of a placement: placed model → ratio, or → ratio, ranks, on, row_shares; or ``operators``.

    ``train_share`` and ``span_classes`` stand next to the models, whose names ``placement/`` checks.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    SETTINGS: ClassVar[tuple[str, ...]] = ("train_share", "span_classes")
    """Settings that stand next to the models."""

    models: dict[str, Entry]
    operators: dict[str, OperatorEntry] | None = Field(
        None, description="a placement for each operator, in place of one for each model"
    )
    train_share: Exact | None = Field(
        None, description="share of the devices on the training side, with shadows; null: follows from the ratios"
    )
    span_classes: bool = Field(False, strict=True, description="whether a ratio may take devices of several classes")

    @classmethod
    def __get_pydantic_json_schema__(cls, core: CoreSchema, handler: GetJsonSchemaHandler) -> dict[str, Any]:
        """Return the JSON Schema of the form that a user writes: the models next to the settings."""
        schema = handler.resolve_ref_schema(handler(core))
        schema["additionalProperties"] = schema["properties"].pop("models")["additionalProperties"]
        schema["description"] = plain_text(cls.__doc__)
        schema.pop("required")
        return schema

    @classmethod
    def of_ranks(cls, ranks: Mapping[str, tuple[int, ...]]) -> Self:
        """Return the placement of models on these ranks."""
        return cls(models={name: PlacementEntry(ranks=own) for name, own in ranks.items()})

    @model_validator(mode="before")
    @classmethod
    def _split_settings(cls, value: Any) -> Any:
        """Split a user's mapping into placed models and settings; our own code passes entries as ``models``."""
        if not isinstance(value, dict) or _holds_entries(value.get("models")):
            return value
        settings = {key: value[key] for key in (*cls.SETTINGS, "operators") if key in value}
        models = {key: entry for key, entry in value.items() if key not in settings}
        if settings.get("operators") is not None:
            others = [*models, *(["train_share"] if settings.get("train_share") is not None else [])]
            if others:
                raise ValueError(f"operators and {others[0]} exclude each other: remove {', '.join(others)}")
        for key, entry in models.items():
            if isinstance(entry, bool):
                raise ValueError(f"{key}: expected a ratio, found {shown(entry)}{nearest(str(key), cls.SETTINGS)}")
        return {"models": models, **settings}


def _holds_entries(models: Any) -> bool:
    return isinstance(models, dict) and bool(models) and all(isinstance(e, PlacementEntry) for e in models.values())
