"""One rank's part in a Sync, planned once before the run: shards to gather, buckets, receivers and their parts.

Pure data; ``comm/sync.py`` executes it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from flexrlhf.config.spec import Dtype, LoraSpec
from flexrlhf.placement.names import ModelName
from flexrlhf.placement.placed import PlacedModel
from flexrlhf.weights.lora import adapters_to_merge
from flexrlhf.weights.reshard import Parts, WeightTransfer, bucket_names, gathering_sets, trained_parts
from flexrlhf.weights.shapes import DTYPE_BYTES, ModelShape
from flexrlhf.weights.shards import Part, parts_on

Buckets = tuple[tuple[str, ...], ...]
"""Names of the weights in each bucket."""


@dataclass(frozen=True)
class Packet:
    """One buffer of a bucket, for all ranks that store the same parts of it.

    parts:      of each weight of the bucket, in the bucket's order.
    receivers:  ranks that it is sent to.
    """

    parts: tuple[Part, ...]
    receivers: tuple[int, ...]

    @property
    def num_elements(self) -> int:
        return sum(part.num_elements for part in self.parts)


@dataclass(frozen=True)
class SendPlan:
    """Gathering and sending on one rank of the trained model.

    ranks:     ranks that gather together, this one among them; a single one stores whole tensors.
    shards:    parts that each of ``ranks`` stores, in their order.
    merge:     adapters to add to the weights that they change; None: weights are sent as they are.
    packets:   buffers of each bucket for other ranks.
    """

    ranks: tuple[int, ...]
    shards: tuple[Parts, ...]
    merge: LoraSpec | None
    packets: tuple[tuple[Packet, ...], ...]

    @property
    def receivers(self) -> tuple[int, ...]:
        """Other ranks that this one sends to."""
        return tuple(rank for packet in self.packets[0] for rank in packet.receivers)

    @property
    def longest(self) -> int:
        """Numbers in the longest buffer."""
        return max((packet.num_elements for bucket in self.packets for packet in bucket), default=0)


@dataclass(frozen=True)
class ReceivePlan:
    """Receiving on one rank of the copy.

    sender:  rank that sends the weights; this rank itself where it also stores the trained model.
    parts:   what this rank stores of each weight.
    """

    sender: int
    parts: Parts


@dataclass(frozen=True)
class SyncPlan:
    """Weights of a trained model to a copy of it, on one rank.

    source:       the trained model.
    destination:  the copy.
    rank:         the rank that this plan is for.
    dtype:        type of the copy's weights, in which they are sent.
    buckets:      names of the weights in each bucket, in the order of sending.
    send:         None: this rank neither gathers nor sends.
    receive:      None: the copy is not on this rank.
    """

    source: ModelName
    destination: ModelName
    rank: int
    dtype: Dtype
    buckets: Buckets
    send: SendPlan | None
    receive: ReceivePlan | None

    @property
    def own_parts(self) -> Parts | None:
        """Parts of the copy that this rank loads from its own trained model; None where it does not."""
        return self.receive.parts if self.receive is not None and self.receive.sender == self.rank else None


def plan_sync(
    source: PlacedModel,
    destination: PlacedModel,
    shape: ModelShape,
    transfers: Sequence[WeightTransfer],
    bucket_bytes: int,
    rank: int,
) -> SyncPlan:
    """Plan the part of ``rank`` in a Sync of the trained weights of ``source`` to ``destination``."""
    parts = {t.destination: trained_parts(destination, shape, t.destination) for t in transfers if rank in _ends(t)}
    any_parts = trained_parts(destination, shape, transfers[0].destination)
    dtype = destination.settings.dtype
    buckets = tuple(tuple(names) for names in bucket_names(any_parts, DTYPE_BYTES[dtype], bucket_bytes))
    sender = next((t.source for t in transfers if t.destination == rank), None)
    return SyncPlan(
        source=source.name,
        destination=destination.name,
        rank=rank,
        dtype=dtype,
        buckets=buckets,
        send=_plan_send(source, destination, shape, transfers, parts, buckets, rank),
        receive=None if sender is None else ReceivePlan(sender, parts[rank]),
    )


def _ends(transfer: WeightTransfer) -> tuple[int, int]:
    return transfer.source, transfer.destination


def _plan_send(
    source: PlacedModel,
    destination: PlacedModel,
    shape: ModelShape,
    transfers: Sequence[WeightTransfer],
    parts: Mapping[int, Parts],
    buckets: Buckets,
    rank: int,
) -> SendPlan | None:
    receivers = [t.destination for t in transfers if t.source == rank]
    sets = gathering_sets(source, [t.source for t in transfers])
    ranks = next((members for members in sets if rank in members), (rank,))
    if rank not in source.ranks or (not receivers and len(ranks) == 1):
        return None
    merge = adapters_to_merge(source, destination)
    shards_on = trained_parts if merge is None else parts_on
    others = {receiver: parts[receiver] for receiver in receivers if receiver != rank}
    return SendPlan(
        ranks=ranks,
        shards=tuple(shards_on(source, shape, member) for member in ranks),
        merge=merge,
        packets=tuple(_packets(names, others) for names in buckets),
    )


def _packets(names: Sequence[str], parts: Mapping[int, Parts]) -> tuple[Packet, ...]:
    """Return a buffer for each different content of the bucket ``names``. ``parts``: by receiver."""
    receivers: dict[tuple[Part, ...], list[int]] = {}
    for rank, stored in parts.items():
        receivers.setdefault(tuple(stored[name] for name in names), []).append(rank)
    return tuple(Packet(contents, tuple(ranks)) for contents, ranks in receivers.items())
