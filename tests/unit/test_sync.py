"""A Sync from any layout to any other, in one process: what arrives, the bytes that travel, and the checksums."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist
import yaml
from small_runs import TINY, placed_model, plan_of
from torch import Tensor

from flexrlhf.comm.checksum import checksum, checksum_of
from flexrlhf.comm.sync import ChecksumError, Load, SyncChannel, WeightReceiver, WeightSender
from flexrlhf.comm.weights import WeightGather, cut
from flexrlhf.config.spec import LoraSpec, ModelSpec, SyncSpec
from flexrlhf.placement.placed import PlacedModel
from flexrlhf.strategies.instructions import Sync
from flexrlhf.weights.lora import adapters_to_merge, shape_of
from flexrlhf.weights.reshard import gathering_sets, pair_ranks, sync_bytes, trained_parts
from flexrlhf.weights.shapes import ModelShape, model_shape
from flexrlhf.weights.shards import parts_on
from flexrlhf.weights.sync_plan import SyncPlan, plan_sync

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
            ranks=tuple(sorted({*self.source.ranks, *self.shadow.ranks})),
            source=self.source.name,
            destination=self.shadow.name,
            transfers=transfers,
            gathers=gathering_sets(self.source, [transfer.source for transfer in transfers]),
        )

    def plan(self, rank: int) -> SyncPlan:
        return plan_sync(self.source, self.shadow, self.shape, self.sync.transfers, self.bucket_bytes, rank)

    def channel(self, rank: int) -> SyncChannel:
        """ModelLink ranks, or on one: every group is ``A_GROUP``."""
        plan, gather = self.plan(rank), None
        if plan.send is not None:
            group = A_GROUP if len(plan.send.ranks) > 1 else None
            merge = plan.send.merge
            gather = Gathered(group, plan.send.ranks, plan.send.shards, no_wait, merge, self.tensors)
        return SyncChannel(plan, self.dtype, gather, None if self.sync.is_local else A_GROUP)

    def sender(self) -> WeightSender:
        return WeightSender(self.settings, no_wait)

    def receiver(self) -> WeightReceiver:
        return WeightReceiver(self.settings.checksum, no_wait)

    def weights_on(self, rank: int) -> dict[str, Tensor]:
        """What ``rank`` stores of the trained copy, as vectors."""
        return {name: cut(self.tensors[name], part) for name, part in parts_on(self.source, self.shape, rank).items()}

    def bucket_of(self, name: str) -> tuple[str, ...]:
        return next(names for names in self.plan(self.source.ranks[0]).buckets if name in names)


@dataclass(frozen=True)
class Gathered(WeightGather):
    """A collective that has happened: ``tensors`` are whole."""

    tensors: Mapping[str, Tensor] = field(default_factory=dict)

    def gathered(self, weights: Mapping[str, Tensor], names: Sequence[str], dtype: torch.dtype) -> dict[str, Tensor]:
        if self.group is None:
            return super().gathered(weights, names, dtype)
        return {name: self.tensors[name].to(dtype) for name in names}


def case_of(source: dict[str, Any], shadow: dict[str, Any], num_sources: int = 4, **settings: Any) -> Case:
    shape = model_shape("critic", ModelSpec(init=TINY | {"model_type": "qwen2"}), "scalar")
    assert shape is not None
    draw = torch.Generator().manual_seed(0)
    return Case(
        placed_model("critic", TRAINED[:num_sources], **source),
        placed_model("critic.shadow", SHADOW[: len(SHADOW) // 2 * 2] if "tp" in shadow else SHADOW, **shadow),
        SyncSpec(**settings),
        shape,
        {name: torch.randn(size, generator=draw) for name, size in shape.parameters},
    )


def engine_case(colocated: bool, tp: int = 1, source: str = "{}", dtype: str = "float32", **settings: Any) -> Case:
    """A tiny actor and the engine that generates for it, as a plan places them on four ranks."""
    actor = [f"models.actor.{key}={value}" for key, value in yaml.safe_load(source).items()]
    rollout = f"rollout={{engine: vllm, tp: {tp}, dtype: {dtype}}}"
    plan = plan_of(None if colocated else [0.5] * 6, 4, rollout, *actor)
    draw, shape = torch.Generator().manual_seed(0), plan.shapes["actor"]
    tensors = {name: torch.randn(size, generator=draw) for name, size in shape.parameters}
    return Case(plan.placement["actor"], plan.placement["actor.rollout"], SyncSpec(**settings), shape, tensors)


def send_all(case: Case, wires: Wires) -> int:
    """The bytes that all ranks of the source say they sent."""
    total = 0
    for wires.rank in case.source.ranks:
        channel, sender = case.channel(wires.rank), case.sender()
        if channel.plan.send is not None:
            total += sender.send(channel, case.weights_on(wires.rank), None).num_bytes
        sender.close()
    return total


def receive(case: Case, wires: Wires, rank: int, deaf: str = "") -> dict[str, Tensor]:
    """What ``rank`` of the shadow holds afterwards; it never takes the tensor ``deaf``."""
    parts = trained_parts(case.shadow, case.shape, rank)
    stored = {name: torch.zeros(part.num_elements, dtype=case.dtype) for name, part in parts.items()}
    wires.rank = rank
    case.receiver().receive(case.channel(rank), stored, loader(stored, deaf))
    return stored


def loader(stored: dict[str, Tensor], deaf: str = "") -> Load:
    """Writes what it is given into ``stored``; it never takes the tensor ``deaf``."""

    def load(weights: dict[str, Tensor]) -> None:
        for name, values in weights.items():
            if name != deaf:
                stored[name].copy_(values)

    return load


def deliver(case: Case, rank: int, deaf: str = "") -> tuple[int, dict[str, Tensor]]:
    """Source and engine on ``rank`` itself: the bytes that it says it sent, and what the engine holds afterwards."""
    parts = trained_parts(case.shadow, case.shape, rank)
    stored = {name: torch.zeros(part.num_elements, dtype=case.dtype) for name, part in parts.items()}
    channel, sender, load = case.channel(rank), case.sender(), loader(stored, deaf)
    sent = sender.send(channel, case.weights_on(rank), load)
    case.receiver().receive(channel, stored, load, sent.delivered)
    sender.close()
    return sent.num_bytes, stored


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
            stored = receive(case, wires, rank)
            for name, part in trained_parts(case.shadow, case.shape, rank).items():
                assert torch.equal(stored[name], cut(case.tensors[name], part)), f"{name} on rank {rank}"
        assert not any(wires.sent.values()), "more was sent than received"
        checks = case.settings.checksum
        planned = sync_bytes(case.source, case.shadow, case.shape, case.sync.transfers, case.bucket_bytes, checks)
        assert sent == planned


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_weights_travel_in_the_type_of_the_shadow(dtype: str, wires: Wires) -> None:
    case = case_of({"zero": 3}, {"dtype": dtype}, bucket_mb=0.001)
    sent = send_all(case, wires)
    stored = receive(case, wires, SHADOW[0])
    assert all(torch.equal(stored[name], case.tensors[name].to(case.dtype).view(-1)) for name in stored)
    assert sent == sync_bytes(case.source, case.shadow, case.shape, case.sync.transfers, 1000, True)


# --- in place, to an engine on the same ranks as the copy that is trained

SOURCES = ["{}", "{zero: 3}", "{engine: deepspeed, zero: 3}", "{tp: 2}"]


@pytest.mark.parametrize("tp", [1, 2])
@pytest.mark.parametrize("source", SOURCES)
def test_a_rank_hands_its_own_engine_its_part_and_nothing_travels(source: str, tp: int, wires: Wires) -> None:
    """But for what the ranks gather. Of 32 words that are padded to 64 the second tensor-parallel rank holds none."""
    for settings in ({"bucket_mb": 0.001}, {"snapshot": True, "bucket_mb": 0.002}, {"checksum": False}):
        case = engine_case(True, tp, source, **settings)
        assert case.sync.is_local
        total = 0
        for rank in case.shadow.ranks:
            sent, stored = deliver(case, rank)
            total += sent
            for name, part in trained_parts(case.shadow, case.shape, rank).items():
                assert torch.equal(stored[name], cut(case.tensors[name], part)), f"{name} on rank {rank}"
        checks = case.settings.checksum
        planned = sync_bytes(case.source, case.shadow, case.shape, case.sync.transfers, case.bucket_bytes, checks)
        assert total == planned and (planned > 0) == bool(case.sync.gathers)
    assert not wires.sent


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_an_engine_is_handed_its_own_type(dtype: str, wires: Wires) -> None:
    case = engine_case(True, source="{zero: 3}", dtype=dtype, bucket_mb=0.001)
    _, stored = deliver(case, 1)
    assert all(torch.equal(stored[name], case.tensors[name].to(case.dtype).view(-1)) for name in stored)


def test_what_is_handed_over_may_be_the_live_weights_themselves() -> None:
    """Whole tensors of the same type are not copied on the way, so an engine must not keep them."""
    case = engine_case(True)
    given: list[Tensor] = []
    weights = case.weights_on(0)
    case.sender().send(case.channel(0), weights, lambda pieces: given.extend(pieces.values()))
    live = {tensor.data_ptr() for tensor in weights.values()}
    assert {piece.data_ptr() for piece in given} == live


@pytest.mark.parametrize("snapshot", [False, True])
def test_an_engine_that_holds_something_else_than_its_rank_handed_over_is_reported(snapshot: bool) -> None:
    case = engine_case(True, source="{zero: 3}", bucket_mb=0.001, snapshot=snapshot)
    with pytest.raises(ChecksumError) as caught:
        deliver(case, 2, deaf="model.norm.weight")
    bucket = case.bucket_of("model.norm.weight")
    assert str(caught.value) == (
        "sync weights actor -> actor.rollout: rank 2 holds other weights than rank 2 sent, "
        f"in the bucket of {bucket[0]}"
    )


def test_an_engine_is_synced_again_and_again() -> None:
    """One channel, sender and receiver for the whole run, and weights that change between."""
    case = engine_case(True, bucket_mb=0.001)
    parts = trained_parts(case.shadow, case.shape, 0)
    stored = {name: torch.zeros(part.num_elements) for name, part in parts.items()}
    channel, sender, load = case.channel(0), case.sender(), loader(stored)
    for factor in (1.0, 2.0, 0.5):
        case.tensors |= {name: factor * tensor for name, tensor in case.tensors.items()}
        sent = sender.send(channel, case.weights_on(0), load)
        case.receiver().receive(channel, stored, load, sent.delivered)
        assert torch.equal(stored["model.norm.weight"], case.tensors["model.norm.weight"])


# --- adapters, merged on the way

ADAPTED = "{lora: {rank: 3, alpha: 5}}"


def merged_by_peft(tensors: dict[str, Tensor], lora: LoraSpec) -> dict[str, Tensor]:
    """The weights of a real model with these parameters after peft has merged its adapters."""
    tuners = pytest.importorskip("peft.tuners.tuners_utils")
    from flexrlhf.engines.models import load_model

    model = load_model(placed_model("actor", (0,), init=TINY, lora=lora), 0)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(tensors[name])
    for module in model.modules():
        if isinstance(module, tuners.BaseTunerLayer):
            module.merge()
    return {name.replace(".base_layer.", "."): value.detach() for name, value in model.named_parameters()}


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("tp", [1, 2])
@pytest.mark.parametrize("zero", ["", "zero: 3", "engine: deepspeed, zero: 3"])
@pytest.mark.parametrize("colocated", [True, False])
def test_an_engine_gets_the_weights_that_peft_merges(
    colocated: bool, zero: str, tp: int, dtype: str, wires: Wires
) -> None:
    """All of them are linear layers; embeddings, norms and the head have not changed, and do not come."""
    source = f"{{lora: {{rank: 3, alpha: 5}}, {zero}}}"
    case = engine_case(colocated, tp, source, dtype, bucket_mb=0.001)
    lora = case.source.settings.lora
    assert lora is not None
    expected = merged_by_peft(case.tensors, lora)
    sent = 0 if colocated else send_all(case, wires)
    for rank in case.shadow.ranks:
        if colocated:
            handed, stored = deliver(case, rank)
            sent += handed
        else:
            stored = receive(case, wires, rank)
        parts = trained_parts(case.shadow, case.shape, rank)
        assert set(stored) == set(parts) == shape_of(case.shadow, case.shape).adapters and len(stored) == 7
        for name, part in parts.items():
            exact = cut(expected[name], part)
            assert torch.allclose(stored[name].float(), exact, rtol=1e-6 if dtype == "float32" else 2**-8, atol=1e-6)
            assert dtype == "float32" or torch.equal(stored[name], stored[name].float().to(case.dtype))
    assert sent == sync_bytes(case.source, case.shadow, case.shape, case.sync.transfers, 1000, True)


def test_a_sum_of_16_bit_weights_and_adapters_is_rounded_once() -> None:
    """The base weight stays 1 in bfloat16, whose next number is 1 + 2^-7; with 2^-8 + 2^-9 it comes out at that."""
    case = engine_case(True, source="{lora: {rank: 1, alpha: 1}, dtype: bfloat16}", dtype="bfloat16")
    for name, tensor in case.tensors.items():
        tensor.fill_(1.0 if "lora_B" in name or "base_layer" in name else 2**-8 + 2**-9)
    case.tensors |= {name: t if "lora" in name else t.bfloat16() for name, t in case.tensors.items()}
    _, stored = deliver(case, 0)
    assert {float(value) for tensor in stored.values() for value in tensor.unique()} == {1 + 2**-7}


def test_a_copy_that_has_adapters_itself_gets_them_as_they_are() -> None:
    lora = LoraSpec(rank=3)
    actor, shadow = placed_model("actor", (0,), lora=lora), placed_model("actor.shadow", (1,), lora=lora)
    engine = engine_case(True, source=ADAPTED).shadow
    assert adapters_to_merge(actor, shadow) is None
    assert adapters_to_merge(actor, engine) == lora
    assert adapters_to_merge(placed_model("actor", (0,)), engine) is None


# --- checksums


@pytest.mark.parametrize("snapshot", [False, True])
def test_a_shadow_that_holds_something_else_is_reported(snapshot: bool, wires: Wires) -> None:
    case = case_of({"zero": 3}, {}, bucket_mb=0.001, snapshot=snapshot)
    send_all(case, wires)
    with pytest.raises(ChecksumError) as caught:
        receive(case, wires, 5, deaf="model.norm.weight")
    bucket = case.bucket_of("model.norm.weight")
    assert str(caught.value) == (
        "sync weights critic -> critic.shadow: rank 5 holds other weights than rank 1 sent, "
        f"in the bucket of {bucket[0]}"
    )


def test_a_checksum_of_what_a_rank_loaded_itself_is_not_forgotten(wires: Wires) -> None:
    """Neither left out where the rank sends to itself, nor passed on where another one sends."""
    case = engine_case(True)
    with pytest.raises(AssertionError):
        case.receiver().receive(case.channel(0), case.weights_on(0), loader({}))
    case = case_of({}, {})
    send_all(case, wires)
    with pytest.raises(AssertionError):
        case.receiver().receive(case.channel(4), {}, loader({}), torch.zeros(1))


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


@pytest.mark.parametrize("size", [(3, 5), (300, 700), (3, 32749)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_checksum_sees_numbers_that_change_places_or_sign(size: tuple[int, int], dtype: torch.dtype) -> None:
    """What a cut that is wrong by a row, a slice or a transposition would do."""
    values = torch.randn(size, generator=torch.Generator().manual_seed(1)).to(dtype)
    two_signs = values.clone()
    two_signs[0, :2] *= -1
    turned = (values.flip(0), values.flip(1), values.t(), values.roll(1, 0), two_signs)
    assert len({int(checksum(each.contiguous())) for each in (values, *turned)}) == 1 + len(turned)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_checksum_does_not_depend_on_where_a_tensor_lies(dtype: torch.dtype) -> None:
    """Pieces of a bucket begin anywhere in its buffer."""
    values = torch.randn(1001, generator=torch.Generator().manual_seed(1)).to(dtype)
    for offset in (1, 2, 3):
        assert checksum(torch.cat([values.new_zeros(offset), values])[offset:]) == checksum(values)


def test_a_bucket_sees_tensors_that_change_places() -> None:
    first, second = torch.randn(2, 4, 4, generator=torch.Generator().manual_seed(1)).unbind(0)
    assert checksum_of([first, second]) != checksum_of([second, first])


def test_a_checksum_tells_zero_from_minus_zero_and_takes_what_is_not_a_number() -> None:
    assert checksum(torch.tensor([0.0])) != checksum(torch.tensor([-0.0]))
    assert checksum(torch.tensor([torch.nan])) == checksum(torch.tensor([torch.nan]))
    assert checksum(torch.zeros(0)) == 0
