"""The devices of a run: one rank per device, node-major, each with a class."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import cached_property
from typing import ClassVar

from flexrlhf.config.model_settings import Dtype, ModelSpec
from flexrlhf.config.placement_settings import ClusterSpec
from flexrlhf.errors import UserError, either, nearest
from flexrlhf.placement.devices import DeviceClass


@dataclass(frozen=True)
class Device:
    """One device of a cluster.

    rank:          number in the job.
    node:          number of its node.
    device_class:  name of its class, such as ``A100-80G``; ``any`` without a class.
    memory_gb, link_gb_s, network_gb_s, own_speed: of the YAML, in place of the figures of the class; the network is its
        node's, and a speed is relative to the other nodes'.
    cores:         of its node; None: unknown.
    """

    rank: int
    node: int
    device_class: str
    memory_gb: float | None = None
    link_gb_s: float | None = None
    network_gb_s: float | None = None
    own_speed: Fraction | None = None
    cores: int | None = None


@dataclass(frozen=True)
class Cluster:
    """Devices by rank, node after node."""

    devices: tuple[Device, ...]

    ANY_CLASS: ClassVar = "any"
    """Class of devices of which nothing is known."""

    @property
    def ranks(self) -> tuple[int, ...]:
        return tuple(device.rank for device in self.devices)

    @property
    def classes(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(device.device_class for device in self.devices))

    @property
    def has_known_classes(self) -> bool:
        """Whether all devices are of known classes, which are GPUs."""
        return all(name in DeviceClass.KNOWN for name in self.classes)

    @cached_property
    def classes_by_strength(self) -> tuple[str, ...]:
        """Classes, that with most memory and speed first; as listed where they are equal."""
        return tuple(sorted(self.classes, key=lambda name: -self.strength(name)))

    def strength(self, device_class: str) -> Fraction:
        """Return the memory of a device of a class times its speed; its speed if one class has no known memory."""
        sizes = {device.device_class: self.memory_bytes(device.rank) for device in self.devices}
        speed = self.speed(self.ranks_on(device_class)[0])
        return speed if None in sizes.values() else speed * (sizes[device_class] or 0)

    @property
    def num_nodes(self) -> int:
        return len(self._nodes)

    def ranks_on(self, device_class: str) -> tuple[int, ...]:
        return tuple(device.rank for device in self.devices if device.device_class == device_class)

    @property
    def most_on_node(self) -> int:
        """Devices of the largest node."""
        return max(map(len, self._nodes.values()))

    def ranks_on_node(self, node: int) -> tuple[int, ...]:
        return self._nodes.get(node, ())

    @cached_property
    def _nodes(self) -> dict[int, tuple[int, ...]]:
        nodes: dict[int, list[int]] = {}
        for device in self.devices:
            nodes.setdefault(device.node, []).append(device.rank)
        return {node: tuple(ranks) for node, ranks in nodes.items()}

    def node_of(self, rank: int) -> int:
        """Return the number of the node of ``rank``."""
        return self.devices[rank].node

    def cores(self, node: int) -> int | None:
        """Return the CPU cores of a node; None if they are unknown."""
        return self.devices[self._nodes[node][0]].cores

    def resolve_class(self, name: str) -> str:
        """Return the class called ``name``, or the only one that starts so: ``V100`` is ``V100-32G``. Raises
        UserError.
        """
        matches = [each for each in self.classes if each == name] or [c for c in self.classes if c.startswith(name)]
        if len(matches) != 1:
            found = ", ".join(self.classes)
            raise UserError(f"placement: on: {name!r} names no single device class; the cluster has {found}")
        return matches[0]

    def memory_bytes(self, rank: int, communicators: int = 0) -> int | None:
        """Return the bytes of a device that models and calls can fill: as the YAML sets it, else its class's
        without so many ``communicators``; None if neither gives a size."""
        device = self.devices[rank]
        if device.memory_gb is not None:
            return int(device.memory_gb * 1e9)
        figures = DeviceClass.KNOWN.get(device.device_class)
        further = DeviceClass.context_bytes(communicators) - DeviceClass.context_bytes()
        return None if figures is None else figures.usable_bytes - further

    def figures(self, rank: int) -> DeviceClass | None:
        """Return the figures of a device's class with the YAML's links; None for a class without figures."""
        return self._with_links(rank, DeviceClass.KNOWN.get(self.devices[rank].device_class))

    def figures_or(self, rank: int, default: DeviceClass) -> DeviceClass:
        """Return ``figures``, or of a class without any ``default`` with the YAML's links."""
        found = self.figures(rank) or self._with_links(rank, default)
        assert found is not None, "a default has figures"
        return found

    def _with_links(self, rank: int, known: DeviceClass | None) -> DeviceClass | None:
        device = self.devices[rank]
        if known is None:
            return None
        link, network = device.link_gb_s or known.link_gb_s, device.network_gb_s or known.node_gb_s
        relative = float(self.speed(rank) / self.speed(0))
        return replace(known, link_gb_s=link, node_gb_s=network, relative_speed=relative)

    def speed(self, rank: int) -> Fraction:
        """Return the relative speed for default row shares: the YAML's, else the class's, 1 without figures."""
        return self._speeds[rank]

    @cached_property
    def _speeds(self) -> tuple[Fraction, ...]:
        known = {name: Fraction(int(figures.tflops)) for name, figures in DeviceClass.KNOWN.items()}
        return tuple(each.own_speed or known.get(each.device_class, Fraction(1)) for each in self.devices)

    @classmethod
    def of(cls, spec: ClusterSpec) -> Cluster:
        """Return the devices of ``spec``, numbered node by node. A cluster given as one number is one node.

        Raises UserError for a device class without figures, where these are needed.
        """
        if not spec.nodes:
            return cls(tuple(Device(rank, 0, Cluster.ANY_CLASS, spec.memory_gb) for rank in range(spec.devices or 1)))
        devices: list[Device] = []
        node = 0
        for group in spec.nodes:
            memory = group.memory_gb or spec.memory_gb
            _check_class(group.device_class, memory, spec.device)
            for _ in range(group.count):
                own = memory, group.link_gb_s, group.network_gb_s, group.speed, group.cores
                devices += [
                    Device(rank, node, group.device_class, *own)
                    for rank in range(len(devices), len(devices) + group.devices)
                ]
                node += 1
        return cls(tuple(devices))

    @classmethod
    def of_equal_nodes(cls, size: int, per_node: int, device_class: str) -> Cluster:
        """Return a cluster of ``size`` devices of one class, ``per_node`` of them on each node."""
        return cls(tuple(Device(rank, rank // per_node, device_class) for rank in range(size)))

    def has_known_gpus(self, spec: ClusterSpec) -> bool:
        """Whether all devices are GPUs of known classes. ``spec``: of this cluster."""
        return spec.device != "cpu" and self.has_known_classes

    def all_compute_in_bfloat16(self, spec: ClusterSpec) -> bool:
        """Whether all devices are GPUs of known classes that compute in bfloat16. ``spec``: of this cluster."""
        return self.has_known_gpus(spec) and all(DeviceClass.KNOWN[name].bf16 for name in self.classes)

    def lacks_bfloat16(self, rank: int) -> DeviceClass | None:
        """Return the class of a rank's device if it does not compute in bfloat16, else None."""
        figures = DeviceClass.KNOWN.get(self.devices[rank].device_class)
        return figures if figures is not None and not figures.bf16 else None

    def planned_gpu(self, ranks: Iterable[int]) -> str:
        """Return node and class of the first of ``ranks`` that is planned on a GPU, as a sentence; empty if none is."""
        planned = (self.devices[rank] for rank in ranks if rank < len(self.devices))
        found = next((device for device in planned if device.device_class in DeviceClass.KNOWN), None)
        return "" if found is None else f"node {found.node}: its class {found.device_class} is a GPU"

    def settings_on(self, settings: ModelSpec, fallback: Dtype | None, ranks: Iterable[int]) -> ModelSpec:
        """Return the settings of a model that is placed on ``ranks``: with ``fallback`` where one has no bfloat16."""
        if settings.dtype != "bfloat16" or fallback is None or not any(self.lacks_bfloat16(rank) for rank in ranks):
            return settings
        return settings.model_copy(update={"dtype": fallback})


def _check_class(name: str, memory_gb: float | None, device: str) -> None:
    """Raise UserError for a class that is nearly a known one, and for one whose devices have no known memory.

    A label of one's own needs ``memory_gb``, since nothing would check the memory else; on CPUs it needs none.
    """
    if name in DeviceClass.KNOWN or name == Cluster.ANY_CLASS:
        return
    meant = [known for known in DeviceClass.KNOWN if known.lower().startswith(name.lower())]
    if meant:
        raise UserError(f"cluster.nodes: class {name!r} has no figures; use {either(meant)}")
    if memory_gb is None and device != "cpu":
        raise UserError(
            f"cluster.nodes: class {name!r} has no figures{nearest(name, DeviceClass.KNOWN)}; give memory_gb, by which "
            f"a plan is checked, or one of {', '.join(DeviceClass.KNOWN)}"
        )
