"""The devices of a run: one rank per device, node-major, each with a class."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property

from flexrlhf.config.spec import ClusterSpec
from flexrlhf.errors import UserError
from flexrlhf.placement.devices import DEVICE_CLASSES, DeviceClass


@dataclass(frozen=True)
class Device:
    """``link_gb_s``, ``network_gb_s``: where the YAML says otherwise than the catalogue; the latter of its node."""

    rank: int
    node: int
    device_class: str
    memory_gb: float | None = None
    link_gb_s: float | None = None
    network_gb_s: float | None = None


@dataclass(frozen=True)
class Cluster:
    devices: tuple[Device, ...]

    @property
    def ranks(self) -> tuple[int, ...]:
        return tuple(device.rank for device in self.devices)

    @property
    def classes(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(device.device_class for device in self.devices))

    @property
    def num_nodes(self) -> int:
        return len({device.node for device in self.devices})

    def ranks_on(self, device_class: str) -> tuple[int, ...]:
        return tuple(device.rank for device in self.devices if device.device_class == device_class)

    def ranks_on_node(self, node: int) -> tuple[int, ...]:
        return self._nodes.get(node, ())

    @cached_property
    def _nodes(self) -> dict[int, tuple[int, ...]]:
        nodes: dict[int, list[int]] = {}
        for device in self.devices:
            nodes.setdefault(device.node, []).append(device.rank)
        return {node: tuple(ranks) for node, ranks in nodes.items()}

    def resolve_class(self, wanted: str) -> str:
        """``V100`` names ``V100-32G`` when the cluster has just one class that starts so."""
        matches = [name for name in self.classes if name == wanted] or [n for n in self.classes if n.startswith(wanted)]
        if len(matches) != 1:
            found = ", ".join(self.classes)
            raise UserError(f"placement: on: {wanted!r} names no single device class; the cluster has {found}")
        return matches[0]

    def memory_bytes(self, rank: int) -> int | None:
        """What one device holds: as the YAML says, else as its class is sold; None when nobody says."""
        device = self.devices[rank]
        figures = DEVICE_CLASSES.get(device.device_class)
        gigabytes = device.memory_gb or (figures.memory_gb if figures else None)
        return None if gigabytes is None else int(gigabytes * 1e9)

    def figures(self, rank: int) -> DeviceClass | None:
        """What the catalogue says of a device, with the links that the YAML names; None for a class without figures."""
        device = self.devices[rank]
        known = DEVICE_CLASSES.get(device.device_class)
        if known is None:
            return None
        link, network = device.link_gb_s or known.link_gb_s, device.network_gb_s or known.node_gb_s
        return replace(known, link_gb_s=link, node_gb_s=network)

    def speed(self, rank: int) -> int:
        """Relative speed for default row shares; a class without figures counts 1."""
        figures = DEVICE_CLASSES.get(self.devices[rank].device_class)
        return int(figures.tflops) if figures else 1


def make_cluster(spec: ClusterSpec) -> Cluster:
    """Number the devices node by node. A cluster given as one number is one node."""
    if not spec.nodes:
        return Cluster(tuple(Device(rank, 0, "any", spec.memory_gb) for rank in range(spec.devices or 1)))
    devices: list[Device] = []
    node = 0
    for group in spec.nodes:
        for _ in range(group.count):
            memory = group.memory_gb or spec.memory_gb
            devices += [
                Device(len(devices) + i, node, group.device_class, memory, group.link_gb_s, group.network_gb_s)
                for i in range(group.devices)
            ]
            node += 1
    return Cluster(tuple(devices))
