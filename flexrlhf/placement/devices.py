"""Device classes: peak speed, memory and links of one device, with the source of each figure.

Bandwidths are in GB/s (1e9 bytes), one direction; vendors' sheets print both directions of a link together.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import ClassVar

from flexrlhf.errors import UserError, nearest

ALLOCATABLE = 0.988
"""Share of the GiB in a device's name that a framework can allocate: 79.1 of 80, 31.7 of 32, 139.8 of 141."""
CONTEXT_BYTES = 1.5e9
"""Driver, libraries and communication buffers of one device."""
COMMUNICATOR_BYTES = 0.5e9
"""Buffers of one further communicator: 544 MB between two A100 over NVLink, 688 MB between more (NCCL issue 964), 407
MB of one H200 (docs/gpu.md), 576 MiB of eight GB200 (SGLang PR 30908)."""
COMMUNICATORS_IN_CONTEXT = 3
"""Communicators of a rank for which ``CONTEXT_BYTES`` has room, as those have whose memory was published: data, tensor
and pipeline parallelism."""
BFLOAT16_CAPABILITY = 8.0
"""Least compute capability with tensor cores for bfloat16."""
UNFILLED = 0.1
"""Share of the rest that fragmentation and workspaces of kernels take: with it no published setting that runs is
predicted not to fit, and none that ran out of memory to fit (``benchmarks/calibration``)."""


@dataclass(frozen=True)
class DeviceClass:
    """Figures of one device class.

    tflops:       dense 16-bit tensor-core peak, TFLOP/s.
    memory_gb:    as sold, in GiB.
    memory_gb_s:  bandwidth of its memory.
    link_gb_s:    between two devices of a node.
    host_gb_s:    to host memory.
    node_gb_s:    of a usual node of such devices to the network.
    cores:        multiprocessors, which whole waves of a kernel fill.
    capability:   its CUDA compute capability, by which libraries support it.
    matmul:       share of ``tflops`` of large matrix products in a benchmark of kernels (``benchmarks/calibration``).
    sustained:    share of that in long passes, where the board's power limit reduces its clock.
    attention:    share of ``tflops`` of FlashAttention 2.
    relative_speed: of a device of a cluster to its first rank's, on whose machine times are measured.
    """

    KNOWN: ClassVar[Mapping[str, DeviceClass]]
    """All classes with figures, by name."""
    PER_NODE: ClassVar = 8
    """Devices of the servers in which they are sold."""
    GROUPED_CAPABILITIES: ClassVar = (9, 10)
    """Major compute capabilities with a kernel of torch's ``grouped_mm`` for the products of all experts, in bfloat16
    (``_grouped_mm_cuda`` in ATen/native/cuda/GroupedBlas.cpp); elsewhere it computes one after the other."""

    name: str
    tflops: float
    memory_gb: float
    memory_gb_s: float
    link_gb_s: float
    host_gb_s: float
    node_gb_s: float
    cores: int = 108
    capability: float = 8.0
    matmul: float = 0.755
    sustained: float = 1.0
    attention: float = 0.5
    relative_speed: float = 1.0

    def __hash__(self) -> int:
        # of one field: classes are keys of many tables
        return hash(self.name)

    @property
    def bf16(self) -> bool:
        """Whether it computes in bfloat16."""
        return self.capability >= BFLOAT16_CAPABILITY

    def has_grouped_mm(self, item: float) -> bool:
        """Return whether torch computes the products of all experts in one kernel, of numbers of ``item`` bytes."""
        return item == 2 and int(self.capability) in DeviceClass.GROUPED_CAPABILITIES

    @property
    def usable_bytes(self) -> int:
        """Bytes that models and calls can fill, with no more communicators than a context has room for."""
        return int(self.allocator_bytes * (1 - UNFILLED))

    @staticmethod
    def context_bytes(communicators: int = 0) -> int:
        """Return the bytes of one device that drivers, libraries and so many communicators of a rank take."""
        further = max(0, communicators - COMMUNICATORS_IN_CONTEXT)
        return int(CONTEXT_BYTES) + int(COMMUNICATOR_BYTES * further)

    @property
    def allocator_bytes(self) -> float:
        """Bytes that torch's allocator can take."""
        return ALLOCATABLE * 2**30 * self.memory_gb - CONTEXT_BYTES

    @classmethod
    def find(cls, text: str, where: str) -> str:
        """Return the name of the device class that ``text`` is, in any case, or that it is the start of.

        Raises UserError if there is none, or several.
        """
        lowered = {name.lower(): name for name in cls.KNOWN}
        if text.lower() in lowered:
            return lowered[text.lower()]
        starts = [name for key, name in lowered.items() if key.startswith(text.lower())]
        if len(starts) == 1:
            return starts[0]
        hint = f" (it may be {' or '.join(starts)})" if starts else nearest(text, cls.KNOWN)
        raise UserError(f"{where} {text}: no such device class{hint}; known: {', '.join(cls.KNOWN)}")


_A100 = DeviceClass("A100-80G", 312, 80, 2039, 300, 31, 200, attention=0.59)
_H100 = DeviceClass("H100-80G", 989, 80, 3350, 450, 63, 400, cores=132, capability=9.0, sustained=0.79, attention=0.33)
_V100 = DeviceClass("V100-32G", 125, 32, 900, 150, 15.8, 50, cores=80, capability=7.0, sustained=0.91)

# Vendor data sheets and whitepapers (NVIDIA V100, A100, H100, H200, L40S, B200); node_gb_s: DGX-1V 4 x 100 Gb, DGX
# A100 8 x 200 Gb, DGX H100 8 x 400 Gb, P4d 4 x 100 Gb for the A100-40G. Without NVLink the link is PCIe. A800 and H800:
# NVLink cut to 400 GB/s both directions. H20, A10, A40, A6000, RTX 3090 and
# 4090: public board listings, medium confidence.
# Shares: fitted for the V100, A100 and H100 (boards of 700 W). Assumed: a B200 is sustained as an H100 is
# and has its FlashAttention 2 unchanged; an H20, with the power of an H100 for a seventh of its peak, and the others
# have the defaults.
DeviceClass.KNOWN = {
    item.name: item
    for item in (
        replace(_V100, name="V100-16G", memory_gb=16),
        _V100,
        replace(_A100, name="A100-40G", memory_gb=40, memory_gb_s=1555, node_gb_s=50),
        _A100,
        replace(_A100, name="A800-80G", link_gb_s=200),
        _H100,
        replace(_H100, name="H800-80G", link_gb_s=200),
        replace(_H100, name="H100-96G", memory_gb=96, memory_gb_s=2400),
        replace(_H100, name="H200-141G", memory_gb=141, memory_gb_s=4800),
        DeviceClass("H20-96G", 148, 96, 4000, 450, 63, 400, cores=78, capability=9.0),
        DeviceClass("B200-180G", 2250, 180, 8000, 900, 63, 400, 148, 10.0, sustained=0.79, attention=0.15),
        DeviceClass("L40S-48G", 362, 48, 864, 31, 31, 12.5, cores=142, capability=8.9),
        DeviceClass("A40-48G", 149.7, 48, 696, 31, 31, 12.5, cores=84, capability=8.6),
        DeviceClass("A6000-48G", 154.8, 48, 768, 56, 31, 12.5, cores=84, capability=8.6),
        DeviceClass("A10-24G", 125, 24, 600, 31, 31, 12.5, cores=72, capability=8.6),
        DeviceClass("RTX3090-24G", 71, 24, 936, 31, 31, 1.25, cores=82, capability=8.6),
        DeviceClass("RTX4090-24G", 165, 24, 1008, 31, 31, 1.25, cores=128, capability=8.9),
    )
}
