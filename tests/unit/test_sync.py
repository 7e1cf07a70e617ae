"""A Sync from any layout to any other, ranks as threads: what arrives, the bytes that travel, and the checksums."""

from __future__ import annotations

import threading
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import Any, NamedTuple, cast

import pytest
import torch
import torch.distributed as dist
import yaml
from pairwise import pairwise
from small_runs import TINY, placed_model, plan_of
from torch import Tensor

from flexrlhf.comm.checksum import checksum
from flexrlhf.comm.sync import ChecksumError, SyncChannel, WeightMover
from flexrlhf.comm.weights import WeightGather
from flexrlhf.comm.world import SINGLY, Waitable
from flexrlhf.config.model_settings import LoraSpec, ModelSpec
from flexrlhf.config.spec import SyncSpec
from flexrlhf.placement.placed import PlacedModel
from flexrlhf.runs.tensor_files import cut
from flexrlhf.weights.model_shape import ModelShape
from flexrlhf.weights.parameters import ParameterName
from flexrlhf.weights.shapes import model_shape
from flexrlhf.weights.shards import Parts
from flexrlhf.weights.sync_plan import SyncPlan, transfers_of

TRAINED, SHADOW, LARGER = (0, 1, 2, 3), (4, 5, 6), (4, 5, 6, 7)
LAYOUTS: list[dict[str, Any]] = [{}, {"zero": 3}, {"engine": "deepspeed", "zero": 3}]
CUT: list[dict[str, Any]] = [{"tp": 2}, {"tp": 2, "zero": 2}]
STAGED: list[dict[str, Any]] = [{"engine": "megatron", "tp": 2}, {"engine": "megatron", "pp": 2, "zero": 1}]
SPLIT: list[dict[str, Any]] = [{"ep": 2, "zero": 3}, {"tp": 2, "zero": 3}, {"ep": 2, "tp": 2}]
EXPERTS = {
    **{"model_type": "qwen3_moe", "num_experts": 6, "num_experts_per_tok": 2},
    **{"moe_intermediate_size": 6, "mlp_only_layers": [0]},
}
BIASED = {
    **{"model_type": "glm4_moe", "n_routed_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 6},
    "first_k_dense_replace": 1,
}
SETTINGS: list[dict[str, Any]] = [{"bucket_mb": 0.001}, {"overlap": True, "bucket_mb": 0.002}, {"checksum": False}]
A_GROUP = cast(dist.ProcessGroup, SimpleNamespace(group_desc="sync actor"))
SECONDS = 20


def rarely(*layouts: dict[str, Any]) -> list[Any]:
    """``layouts`` of the long matrix."""
    return [pytest.param(layout, marks=pytest.mark.full) for layout in layouts]


def wait(work: Waitable, ranks: tuple[int, ...]) -> None:
    work.wait()


class Operation(NamedTuple):
    """One message of a batch; ``op`` is ``dist.isend`` or ``dist.irecv``."""

    op: Callable[..., Any]
    tensor: Tensor
    peer: int
    group: dist.ProcessGroup


@dataclass
class Batch:
    """Messages of one rank that start together. ``left``: what has not crossed, by link and in order."""

    wires: Wires
    left: dict[tuple[int, int], deque[Tensor]]

    @property
    def is_done(self) -> bool:
        return not any(self.left.values())

    def wait(self) -> None:
        with self.wires.changed:
            assert self.wires.changed.wait_for(lambda: self.is_done, SECONDS), "the batch waits for a rank for ever"


@dataclass
class Wires:
    """What travels between ranks, which are threads, by NCCL's rules: the batches of a rank run one after another, and
    a message crosses while those of both its ends run. What is sent is read only then.

    change:  what happens to messages on their way, by link.
    """

    local: threading.local = field(default_factory=threading.local)
    changed: threading.Condition = field(default_factory=threading.Condition)
    batches: dict[int, deque[Batch]] = field(default_factory=lambda: defaultdict(deque))
    num_bytes: Counter[tuple[int, int]] = field(default_factory=Counter)
    change: dict[tuple[int, int], Callable[[Tensor], None]] = field(default_factory=dict)

    def batch(self, operations: list[Operation]) -> list[Batch]:
        rank: int = self.local.rank
        made = Batch(self, defaultdict(deque))
        for each in operations:
            assert each.group is A_GROUP and len(each.tensor) and each.peer != rank
            made.left[(rank, each.peer) if each.op is dist.isend else (each.peer, rank)].append(each.tensor)
        with self.changed:
            self.batches[rank].append(made)
            while self._cross():
                pass
            self.changed.notify_all()
        return [made]

    def _cross(self) -> bool:
        """Let messages of running batches cross, until the first of these has ended; return whether one has."""
        running = {rank: batches[0] for rank, batches in self.batches.items() if batches}
        for link in {link for batch in running.values() for link in batch.left}:
            sent, received = (running[end].left[link] if end in running else deque() for end in link)
            while sent and received:
                message = sent.popleft().clone()
                self.num_bytes[link] += message.nbytes
                self.change.get(link, lambda message: None)(message)
                received.popleft().copy_(message)
        ended = [rank for rank, batch in running.items() if batch.is_done]
        for rank in ended:
            self.batches[rank].popleft()
        return bool(ended)


@dataclass(frozen=True)
class Single:
    """``dist.isend`` or ``dist.irecv``, by name."""

    name: str
    wires: Wires

    def __call__(self, tensor: Tensor, peer: int, group: dist.ProcessGroup) -> Batch:
        (batch,) = self.wires.batch([Operation(self, tensor, peer, group)])
        return batch


@pytest.fixture
def wires(monkeypatch: pytest.MonkeyPatch) -> Wires:
    made = Wires()
    monkeypatch.setattr(dist, "P2POp", Operation)
    monkeypatch.setattr(dist, "batch_isend_irecv", made.batch)
    return made


@dataclass(frozen=True)
class Gathered(WeightGather):
    """A collective that has happened: ``tensors`` are whole, of which ``parts`` are gathered."""

    tensors: Mapping[str, Tensor] = field(default_factory=dict)
    parts: Parts = field(default_factory=dict)

    def whole(self, weights: Mapping[str, Tensor], names: Sequence[str], dtype: torch.dtype) -> dict[str, Tensor]:
        return {name: cut(self.tensors[name], self.parts[name]).to(dtype) for name in names}


@dataclass
class Case:
    """Two layouts of a tiny model, and the whole weights of the trained copy. ``per_node``: ranks of a node."""

    source: PlacedModel
    shadow: PlacedModel
    settings: SyncSpec
    shape: ModelShape
    tensors: dict[str, Tensor]
    per_node: int = 8

    @property
    def ranks(self) -> tuple[int, ...]:
        return tuple(sorted({*self.source.ranks, *self.shadow.ranks}))

    @property
    def dtype(self) -> torch.dtype:
        return cast(torch.dtype, getattr(torch, self.shadow.settings.dtype))

    @property
    def sent(self) -> torch.dtype:
        """Type in which the weights are sent."""
        return cast(torch.dtype, getattr(torch, self.shadow.sent_dtype(self.settings.dtype)))

    @property
    def overlaps(self) -> bool:
        return self.settings.overlap is True and set(self.source.ranks).isdisjoint(self.shadow.ranks)

    def channel(self, rank: int) -> SyncChannel:
        """Every group is ``A_GROUP``."""
        plan = self.plan(rank)
        gather = None
        if plan.adapters is not None:
            group = A_GROUP if len(plan.adapters.ranks) > 1 else None
            adapters = plan.adapters
            gather = Gathered(group, adapters.ranks, adapters.shards, wait, self.tensors, adapters.parts)
        group = None if self.shadow.is_filled_in_place(self.source) else A_GROUP
        return SyncChannel(plan, self.sent, torch.device("cpu"), group, gather, self.overlaps)

    def plan(self, rank: int) -> SyncPlan:
        size, dtype = self.settings.bucket_bytes, self.settings.dtype
        return SyncPlan.of(self.source, self.shadow, self.shape, size, rank, self.node_of, dtype, self.overlaps)

    def node_of(self, rank: int) -> int:
        return rank // self.per_node

    def weights_on(self, rank: int) -> dict[str, Tensor] | None:
        """What ``rank`` stores of the trained copy, as vectors."""
        if rank not in self.source.ranks:
            return None
        return {name: cut(self.tensors[name], part) for name, part in self.shape.parts_on(self.source, rank).items()}

    def empty_on(self, rank: int) -> dict[str, Tensor] | None:
        if rank not in self.shadow.ranks:
            return None
        parts = self.shape.trained_parts(self.shadow, rank)
        types = {name: torch.float32 if ParameterName(name).is_router_bias else self.dtype for name in parts}
        return {name: torch.zeros(part.num_elements, dtype=types[name]) for name, part in parts.items()}

    def planned_bytes(self) -> int:
        return SyncPlan.all_bytes(self.source, self.shadow, self.shape, self.settings.dtype)


@dataclass
class Moved:
    """What ranks store after a Sync, and the bytes that they say they sent."""

    stored: dict[int, dict[str, Tensor]]
    num_bytes: int


def move(case: Case, wires: Wires, times: int = 1) -> Moved:
    """Execute a Sync on all ranks, ``times`` times, with weights that change between."""
    stored = {rank: empty for rank in case.ranks if (empty := case.empty_on(rank)) is not None}

    def run(rank: int) -> int:
        wires.local.rank = rank
        channel, mover, total = case.channel(rank), WeightMover(case.settings, wait), 0
        for time in range(times):
            weights = case.weights_on(rank)
            older = (
                None
                if weights is None
                else {name: value * 2.0 ** (time + 1 - times) for name, value in weights.items()}
            )
            receipt = mover.receive(channel) if channel.overlaps and rank in stored else None
            total += mover.run(channel, older, stored.get(rank)) if receipt is None else channel.plan.bytes_sent_on
            if receipt is not None:
                receipt.store(stored[rank])
        mover.close()
        return total

    with ThreadPoolExecutor(len(case.ranks)) as threads:
        num_bytes = sum(threads.map(run, case.ranks))
    assert not any(wires.batches.values()), "a batch waits for ever"
    return Moved(stored, num_bytes)


def assert_arrived(case: Case, moved: Moved) -> None:
    for rank, stored in moved.stored.items():
        for name, part in case.shape.trained_parts(case.shadow, rank).items():
            tensor = case.tensors[name]
            expected = cut(tensor if ParameterName(name).is_router_bias else tensor.to(case.sent).to(case.dtype), part)
            assert torch.equal(stored[name], expected), f"{name} on rank {rank}"


def case_of(
    source: dict[str, Any],
    shadow: dict[str, Any],
    num_sources: int = 4,
    family: dict[str, Any] | None = None,
    **settings: Any,
) -> Case:
    init = TINY | {"model_type": "qwen2", "num_hidden_layers": 2, "num_key_value_heads": 2} | (family or {})
    shape = model_shape("critic", ModelSpec(init=init), "scalar")
    assert shape is not None
    draw = torch.Generator().manual_seed(0)
    ranks = LARGER if family else SHADOW[: len(SHADOW) // 2 * 2] if {"tp", "pp"} & set(shadow) else SHADOW
    return Case(
        placed_model("critic", TRAINED[:num_sources], **source),
        placed_model("critic.shadow", ranks, **shadow),
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


# --- what arrives


@pytest.mark.parametrize("num_sources", [pytest.param(2, marks=pytest.mark.full), 4])
@pytest.mark.parametrize("shadow", LAYOUTS + CUT + STAGED, ids=str)
@pytest.mark.parametrize("source", LAYOUTS + CUT + STAGED, ids=str)
def test_every_rank_of_the_shadow_gets_its_part(
    source: dict[str, Any], shadow: dict[str, Any], num_sources: int, wires: Wires
) -> None:
    for settings in SETTINGS:
        case = case_of(source, shadow, num_sources, **settings)
        wires.num_bytes.clear()
        moved = move(case, wires)
        assert_arrived(case, moved)
        planned = transfers_of(case.source, case.shadow, case.shape, case.settings.bucket_bytes)
        links = {link: 4 * elements for link, elements in planned.links.items()}
        assert moved.num_bytes == case.planned_bytes() == sum(links.values())
        # checksums travel, too
        assert set(wires.num_bytes) == set(links)
        sums = 8 if case.settings.checksum else 0
        assert all(size > links[link] if sums else size == links[link] for link, size in wires.num_bytes.items())
        assert all((size - links[link]) % 8 == 0 for link, size in wires.num_bytes.items())


@pytest.mark.parametrize("shadow", [*LAYOUTS, *SPLIT, {"engine": "vllm", "tp": 2}], ids=str)
@pytest.mark.parametrize("source", LAYOUTS + SPLIT, ids=str)
def test_experts_go_from_any_split_to_any_other(source: dict[str, Any], shadow: dict[str, Any], wires: Wires) -> None:
    """Each rank gets the elements of its experts once: no byte more than it lacks travels."""
    case = case_of(source, shadow, family=EXPERTS, bucket_mb=0.002)
    moved = move(case, wires)
    assert_arrived(case, moved)
    lacked = sum(part.num_elements for rank in LARGER for part in case.shape.trained_parts(case.shadow, rank).values())
    assert moved.num_bytes == case.planned_bytes() == 4 * lacked


@pytest.mark.parametrize("per_node", [pytest.param(1, marks=pytest.mark.full), 2, 3])
@pytest.mark.parametrize("shadow", [{}, {"tp": 2}, *rarely(*LAYOUTS[1:], *CUT[1:])], ids=str)
@pytest.mark.parametrize("source", [{}, {"zero": 3}, *rarely({"tp": 2})], ids=str)
def test_weights_cross_to_a_node_once(
    source: dict[str, Any], shadow: dict[str, Any], per_node: int, wires: Wires
) -> None:
    """In the foreground and in the background, rounded, and again with other weights: ranks send on what is theirs."""
    for settings in [*SETTINGS, {"dtype": "bfloat16", "overlap": True}]:
        case = replace(case_of(source, shadow, **settings), per_node=per_node)
        wires.num_bytes.clear()
        moved = move(case, wires, times=2)
        assert_arrived(case, moved)
        assert moved.num_bytes == 2 * case.planned_bytes()
        if not case.settings.checksum:
            planned = transfers_of(case.source, case.shadow, case.shape, 10**6, case.node_of).links
            assert wires.num_bytes == {link: 2 * 4 * elements for link, elements in planned.items()}
            crossing = [size for link, size in planned.items() if len(set(map(case.node_of, link))) > 1]
            nodes = {case.node_of(rank) for rank in SHADOW} - {case.node_of(rank) for rank in TRAINED}
            whole = sum(tensor.numel() for tensor in case.tensors.values())
            assert (source, shadow) != ({}, {}) or sum(crossing) == whole * len(nodes)


@pytest.mark.parametrize("tp", [1, 2])
@pytest.mark.parametrize("source", ["{zero: 3}", "{tp: 2}"])
def test_messages_one_by_one_have_one_order_on_all_ranks(
    source: str, tp: int, wires: Wires, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without batches (``debug.message_batches``) no ranks wait for each other in a circle, on the same ranks too."""
    monkeypatch.setattr(A_GROUP, "group_desc", f"sync actor{SINGLY}")
    monkeypatch.setattr(dist, "get_rank", lambda *_: wires.local.rank)
    for name in ("isend", "irecv"):
        monkeypatch.setattr(dist, name, Single(name, wires))
    for colocated in (True, False):
        case = engine_case(colocated, tp, source, bucket_mb=0.001)
        wires.num_bytes.clear()
        assert_arrived(case, move(case, wires, times=2))
        assert sum(wires.num_bytes.values()) > 2 * case.planned_bytes() > 0


def test_a_rank_that_sends_on_is_the_one_named(wires: Wires) -> None:
    """What rank 5 has sent on to rank 6 is changed on the way."""
    case = replace(case_of({}, {}, overlap=True), per_node=4)
    wires.change[5, 6] = lambda message: message.view(-1)[0].add_(1)
    with pytest.raises(ChecksumError, match=r"rank 6 holds other weights than rank 5 sent"):
        move(case, wires)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_weights_travel_in_the_type_of_the_shadow(dtype: str, wires: Wires) -> None:
    case = case_of({"zero": 3}, {"dtype": dtype}, bucket_mb=0.001)
    moved = move(case, wires)
    assert_arrived(case, moved)
    assert moved.num_bytes == case.planned_bytes() == 3 * 2 * sum(t.numel() for t in case.tensors.values())


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("source", [{}, {"zero": 3}, {"ep": 2}], ids=str)
def test_biases_of_routers_are_not_rounded(source: dict[str, Any], overlap: bool, wires: Wires) -> None:
    for shadow, settings in (({"dtype": "bfloat16"}, SyncSpec()), ({}, SyncSpec(dtype="bfloat16"))):
        case = case_of(source, shadow, family=BIASED, dtype=settings.dtype, overlap=overlap, bucket_mb=0.002)
        moved = move(case, wires)
        assert_arrived(case, moved)
        biases = sum(tensor.numel() for name, tensor in case.tensors.items() if ParameterName(name).is_router_bias)
        assert biases == 8 and moved.num_bytes == case.planned_bytes() + 2 * len(case.shadow.ranks) * biases


@pytest.mark.parametrize(
    ("source", "overlap", "dtype"), pairwise(({}, {"zero": 3}, {"tp": 2}), (False, True), ("bfloat16", "float16"))
)
def test_a_copy_of_a_larger_type_gets_rounded_weights(
    source: dict[str, Any], overlap: bool, dtype: str, wires: Wires
) -> None:
    for bucket_mb in (0.001, 1.0):
        case = case_of(source, {}, dtype=dtype, overlap=overlap, bucket_mb=bucket_mb)
        moved = move(case, wires, times=2)
        assert_arrived(case, moved)
        assert moved.num_bytes == 2 * case.planned_bytes()
        assert 2 * case.planned_bytes() == SyncPlan.all_bytes(case.source, case.shadow, case.shape)


@pytest.mark.parametrize("source", ["{}", "{zero: 3}"])
def test_what_a_rank_has_itself_is_rounded_too(source: str, wires: Wires) -> None:
    """So the numbers do not depend on what crosses."""
    case = engine_case(True, 1, source)
    case = replace(case, settings=SyncSpec(dtype="bfloat16"))
    assert_arrived(case, move(case, wires))


def test_a_smaller_copy_gets_its_own_type(wires: Wires) -> None:
    case = case_of({}, {"dtype": "float16"}, dtype="bfloat16")
    assert case.sent == torch.float16
    assert_arrived(case, move(case, wires))


# --- to an engine on the same ranks as the copy that is trained

SOURCES = ["{}", "{zero: 3}", "{engine: deepspeed, zero: 3}", "{tp: 2}"]


@pytest.mark.parametrize(("source", "tp", "dtype"), pairwise(SOURCES, (1, 2), ("float32", "bfloat16")))
def test_an_engine_on_the_same_ranks_gets_what_they_lack(source: str, tp: int, dtype: str, wires: Wires) -> None:
    """Of 32 words that are padded to 64 the second tensor-parallel rank has none."""
    for settings in SETTINGS:
        case = engine_case(True, tp, source, dtype, **settings)
        moved = move(case, wires)
        assert_arrived(case, moved)
        assert moved.num_bytes == case.planned_bytes()
        assert (moved.num_bytes == 0) == case.shadow.is_filled_in_place(case.source) == (source == "{}")


def test_an_engine_is_synced_again_and_again(wires: Wires) -> None:
    """One channel and mover for the whole run, and weights that change between."""
    for colocated in (True, False):
        case = engine_case(colocated, source="{zero: 3}", bucket_mb=0.001)
        assert_arrived(case, move(case, wires, times=3))


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


@pytest.mark.parametrize(
    ("colocated", "zero", "tp", "dtype"),
    pairwise(
        (True, False),
        ("", "zero: 3", "engine: deepspeed, zero: 3", "tp: 2", "tp: 2, zero: 3"),
        (1, 2),
        ("float32", "bfloat16"),
    ),
)
def test_an_engine_gets_the_weights_that_peft_merges(
    colocated: bool, zero: str, tp: int, dtype: str, wires: Wires
) -> None:
    """All of them are linear layers; embeddings, norms and the head have not changed, and do not come."""
    source = f"{{lora: {{rank: 3, alpha: 5}}, {zero}}}"
    case = engine_case(colocated, tp, source, dtype, bucket_mb=0.001)
    lora = case.source.settings.lora
    assert lora is not None
    expected = merged_by_peft(case.tensors, lora)
    moved = move(case, wires)
    for rank, stored in moved.stored.items():
        parts = case.shape.trained_parts(case.shadow, rank)
        assert set(stored) == set(parts) == case.shape.of_copy(case.shadow).adapters and len(stored) == 7
        for name, part in parts.items():
            exact = cut(expected[name], part)
            assert torch.allclose(stored[name].float(), exact, rtol=1e-6 if dtype == "float32" else 2**-8, atol=1e-6)
    assert moved.num_bytes == case.planned_bytes()


def test_a_sum_of_16_bit_weights_and_adapters_is_rounded_once(wires: Wires) -> None:
    """The base weight stays 1 in bfloat16, whose next number is 1 + 2^-7; with 2^-8 + 2^-9 it comes out at that."""
    case = engine_case(True, source="{lora: {rank: 1, alpha: 1}, dtype: bfloat16}", dtype="bfloat16")
    for name, tensor in case.tensors.items():
        tensor.fill_(1.0 if "lora_B" in name or "base_layer" in name else 2**-8 + 2**-9)
    case.tensors |= {name: t if "lora" in name else t.bfloat16() for name, t in case.tensors.items()}
    stored = move(case, wires).stored[0]
    assert {float(value) for tensor in stored.values() for value in tensor.unique()} == {1 + 2**-7}


def test_a_copy_that_has_adapters_itself_gets_them_as_they_are() -> None:
    lora = LoraSpec(rank=3)
    actor, shadow = placed_model("actor", (0,), lora=lora), placed_model("actor.shadow", (1,), lora=lora)
    engine = engine_case(True, source=ADAPTED).shadow
    assert shadow.adapters_to_merge(actor) is None
    assert engine.adapters_to_merge(actor) == lora
    assert engine.adapters_to_merge(placed_model("actor", (0,))) is None


# --- checksums


@pytest.mark.parametrize("overlap", [False, True])
def test_a_shadow_that_stores_something_else_is_reported(overlap: bool, wires: Wires) -> None:
    """A bit of the first message from rank 1 to rank 5 changes on its way."""
    case = case_of({"zero": 3}, {}, bucket_mb=0.001, overlap=overlap)
    left = [1]

    def flip(message: Tensor) -> None:
        if left:
            message.view(torch.uint8)[3] ^= left.pop()

    wires.change[1, 5] = flip
    with pytest.raises(ChecksumError) as caught:
        move(case, wires)
    first = next(bucket for bucket in case.channel(5).plan.buckets if any(m.source == 1 for m in bucket.receives))
    name = next(message for message in first.receives if message.source == 1).regions[0].name
    assert str(caught.value) == (
        f"sync weights critic -> critic.shadow: rank 5 holds other weights than rank 1 sent, in the bucket of {name}"
    )


def test_without_checksums_nobody_looks(wires: Wires) -> None:
    case = case_of({}, {}, checksum=False)
    wires.change[1, 5] = lambda message: message.zero_()
    assert not move(case, wires).stored[5]["score.weight"].any()


def summed(tensor: Tensor) -> Tensor:
    return checksum([tensor])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_checksum_sees_every_changed_number(dtype: torch.dtype) -> None:
    values = torch.randn(100, generator=torch.Generator().manual_seed(1)).to(dtype)
    total = summed(values)
    assert total.dtype == torch.int64 and total.ndim == 0
    assert total == summed(values.clone())
    for index in range(len(values)):
        changed = values.clone()
        changed[index] += 1
        assert summed(changed) != total


@pytest.mark.parametrize("size", [(3, 5), (300, 700), (3, 32749)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_checksum_sees_numbers_that_change_places_or_sign(size: tuple[int, int], dtype: torch.dtype) -> None:
    """What a cut that is wrong by a row, a slice or a transposition would do."""
    values = torch.randn(size, generator=torch.Generator().manual_seed(1)).to(dtype)
    two_signs = values.clone()
    two_signs[0, :2] *= -1
    turned = (values.flip(0), values.flip(1), values.t(), values.roll(1, 0), two_signs)
    assert len({int(summed(each.contiguous())) for each in (values, *turned)}) == 1 + len(turned)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_checksum_does_not_depend_on_where_a_tensor_lies(dtype: torch.dtype) -> None:
    """Pieces of a bucket begin anywhere in its buffer."""
    values = torch.randn(1001, generator=torch.Generator().manual_seed(1)).to(dtype)
    for offset in (1, 2, 3):
        assert summed(torch.cat([values.new_zeros(offset), values])[offset:]) == summed(values)


def test_a_bucket_sees_tensors_that_change_places() -> None:
    first, second = torch.randn(2, 4, 4, generator=torch.Generator().manual_seed(1)).unbind(0)
    assert checksum([first, second]) != checksum([second, first])


def test_a_checksum_tells_zero_from_minus_zero_and_takes_what_is_not_a_number() -> None:
    assert summed(torch.tensor([0.0])) != summed(torch.tensor([-0.0]))
    assert summed(torch.tensor([torch.nan])) == summed(torch.tensor([torch.nan]))
    assert summed(torch.zeros(0)) == 0
