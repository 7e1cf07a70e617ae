"""A Sync from any layout to any other, in one process: what arrives, the bytes that travel, and the checksums."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist
from small_runs import TINY, placed_model
from torch import Tensor

from flexrlhf.comm.sync import ChecksumError, Destination, Source, Syncer, checksum
from flexrlhf.comm.weights import Gather, cut
from flexrlhf.placement.placed import PlacedModel
from flexrlhf.placement.reshard import gathering_sets, pair_ranks, sync_bytes, trained_parts
from flexrlhf.placement.shapes import ModelShape, model_shape
from flexrlhf.spec import ModelSpec, SyncSpec
from flexrlhf.strategies.instructions import Sync

TRAINED, SHADOW = (0, 1, 2, 3), (4, 5, 6)
LAYOUTS: list[dict[str, Any]] = [{}, {"zero": 3}, {"engine": "deepspeed", "zero": 3}]
CUT: list[dict[str, Any]] = [{"tp": 2}, {"tp": 2, "zero": 2}]
A_GROUP = cast(dist.ProcessGroup, "a group")


def no_wait(work: dist.Work, ranks: tuple[int, ...]) -> None:
    pass


@dataclass
class Wires:
    """What travels between ranks that take turns in one process; ``rank`` is the one whose turn it is."""

    rank: int = -1
    sent: dict[tuple[int, int], deque[Tensor]] = field(default_factory=lambda: defaultdict(deque))

    def isend(self, buffer: Tensor, to: int, group: dist.ProcessGroup) -> dist.Work:
        assert group is A_GROUP and len(buffer)
        self.sent[self.rank, to].append(buffer.clone())
        return cast(dist.Work, "sent")

    def irecv(self, buffer: Tensor, source: int, group: dist.ProcessGroup) -> dist.Work:
        assert group is A_GROUP and len(buffer)
        buffer.copy_(self.sent[source, self.rank].popleft())
        return cast(dist.Work, "received")


@pytest.fixture
def wires(monkeypatch: pytest.MonkeyPatch) -> Wires:
    made = Wires()
    monkeypatch.setattr(dist, "isend", made.isend)
    monkeypatch.setattr(dist, "irecv", made.irecv)
    return made


@dataclass
class Case:
    """Two layouts of a tiny critic, whose head has a single row, and the whole weights of the trained copy."""

    source: PlacedModel
    shadow: PlacedModel
    settings: SyncSpec
    shape: ModelShape
    tensors: dict[str, Tensor]

    @property
    def bucket_bytes(self) -> int:
        return int(self.settings.bucket_mb * 1e6)

    @property
    def dtype(self) -> torch.dtype:
        return cast(torch.dtype, getattr(torch, self.shadow.settings.dtype))

    @property
    def sync(self) -> Sync:
        transfers = pair_ranks(self.source.ranks, self.shadow.ranks)
        return Sync(
            ranks=(*self.source.ranks, *self.shadow.ranks),
            source=self.source.name,
            destination=self.shadow.name,
            transfers=transfers,
            gathers=gathering_sets(self.source, [transfer.source for transfer in transfers]),
        )

    def syncer(self, rank: int) -> Syncer:
        return Syncer(rank, self.settings, self.bucket_bytes, no_wait)

    def source_on(self, rank: int) -> Source:
        ranks = next((ranks for ranks in self.sync.gathers if rank in ranks), (rank,))
        parts = tuple(trained_parts(self.source, self.shape, member) for member in ranks)
        local = {name: cut(self.tensors[name], part) for name, part in parts[ranks.index(rank)].items()}
        return Source(local, Gathered(A_GROUP if len(ranks) > 1 else None, ranks, parts, no_wait, self.tensors))

    @property
    def destination(self) -> Destination:
        return Destination(
            self.dtype, {rank: trained_parts(self.shadow, self.shape, rank) for rank in self.shadow.ranks}
        )


@dataclass(frozen=True)
class Gathered(Gather):
    """The collective has happened: ``tensors`` are whole."""

    tensors: Mapping[str, Tensor] = field(default_factory=dict)

    def whole(self, weights: Mapping[str, Tensor], names: Sequence[str], dtype: torch.dtype) -> dict[str, Tensor]:
        if self.group is None:
            return super().whole(weights, names, dtype)
        return {name: self.tensors[name].to(dtype) for name in names}


def case_of(source: dict[str, Any], shadow: dict[str, Any], num_sources: int = 4, **settings: Any) -> Case:
    shape = model_shape("critic", ModelSpec(init=TINY | {"model_type": "qwen2"}))
    assert shape is not None
    draw = torch.Generator().manual_seed(0)
    return Case(
        placed_model("critic", TRAINED[:num_sources], **source),
        placed_model("critic.shadow", SHADOW[: len(SHADOW) // 2 * 2] if "tp" in shadow else SHADOW, **shadow),
        SyncSpec(**settings),
        shape,
        {name: torch.randn(size, generator=draw) for name, size in shape.parameters},
    )


def send_all(case: Case, wires: Wires) -> int:
    """The bytes that all ranks of the source say they sent."""
    total = 0
    for wires.rank in case.source.ranks:
        syncer = case.syncer(wires.rank)
        total += syncer.send(case.sync, case.source_on(wires.rank), case.destination, A_GROUP, None)
        syncer.close()
    return total


def receive(case: Case, wires: Wires, rank: int, deaf: str = "") -> dict[str, Tensor]:
    """What ``rank`` of the shadow holds afterwards; it never takes the tensor ``deaf``."""
    parts = trained_parts(case.shadow, case.shape, rank)
    held = {name: torch.zeros(part.num_elements, dtype=case.dtype) for name, part in parts.items()}

    def load(weights: dict[str, Tensor]) -> None:
        for name, values in weights.items():
            if name != deaf:
                held[name].copy_(values)

    wires.rank = rank
    case.syncer(rank).receive(case.sync, held, parts, load, A_GROUP)
    return held


# --- what arrives


@pytest.mark.parametrize("num_sources", [2, 4])
@pytest.mark.parametrize("shadow", LAYOUTS + CUT, ids=str)
@pytest.mark.parametrize("source", LAYOUTS + CUT, ids=str)
def test_every_rank_of_the_shadow_gets_its_part(
    source: dict[str, Any], shadow: dict[str, Any], num_sources: int, wires: Wires
) -> None:
    """Of two sources one sends to two ranks, which hold the same or different parts."""
    for settings in ({"bucket_mb": 0.001}, {"snapshot": True, "bucket_mb": 0.002}, {"checksum": False}):
        case = case_of(source, shadow, num_sources, **settings)
        sent = send_all(case, wires)
        for rank in case.shadow.ranks:
            held = receive(case, wires, rank)
            for name, part in trained_parts(case.shadow, case.shape, rank).items():
                assert torch.equal(held[name], cut(case.tensors[name], part)), f"{name} on rank {rank}"
        assert not any(wires.sent.values()), "more was sent than received"
        checks = case.settings.checksum
        planned = sync_bytes(case.source, case.shadow, case.shape, case.sync.transfers, case.bucket_bytes, checks)
        assert sent == planned


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_weights_travel_in_the_type_of_the_shadow(dtype: str, wires: Wires) -> None:
    case = case_of({"zero": 3}, {"dtype": dtype}, bucket_mb=0.001)
    sent = send_all(case, wires)
    held = receive(case, wires, SHADOW[0])
    assert all(torch.equal(held[name], case.tensors[name].to(case.dtype).view(-1)) for name in held)
    assert sent == sync_bytes(case.source, case.shadow, case.shape, case.sync.transfers, 1000, True)


# --- checksums


@pytest.mark.parametrize("snapshot", [False, True])
def test_a_shadow_that_holds_something_else_is_reported(snapshot: bool, wires: Wires) -> None:
    case = case_of({"zero": 3}, {}, bucket_mb=0.001, snapshot=snapshot)
    send_all(case, wires)
    with pytest.raises(ChecksumError) as caught:
        receive(case, wires, 5, deaf="model.norm.weight")
    bucket = next(names for names in case.destination.buckets(1000) if "model.norm.weight" in names)
    assert str(caught.value) == (
        "sync weights critic -> critic.shadow: rank 5 holds other weights than rank 1 sent, "
        f"in the bucket of {bucket[0]}"
    )


def test_without_checksums_nobody_looks(wires: Wires) -> None:
    case = case_of({}, {}, checksum=False)
    send_all(case, wires)
    assert not receive(case, wires, 4, deaf="score.weight")["score.weight"].any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_checksum_sees_every_changed_number(dtype: torch.dtype) -> None:
    values = torch.randn(100, generator=torch.Generator().manual_seed(1)).to(dtype)
    total = checksum(values)
    assert total.dtype == torch.int64 and total.ndim == 0
    assert total == checksum(values.clone())
    for index in range(len(values)):
        changed = values.clone()
        changed[index] += 1
        assert checksum(changed) != total


def test_a_checksum_tells_zero_from_minus_zero_and_takes_what_is_not_a_number() -> None:
    assert checksum(torch.tensor([0.0])) != checksum(torch.tensor([-0.0]))
    assert checksum(torch.tensor([torch.nan])) == checksum(torch.tensor([torch.nan]))
    assert checksum(torch.zeros(0)) == 0
