"""Each switch of ``debug`` turns off the mechanism that it names, which is counted with the switch and without it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from small_models import TINY, context_of, engine_for, likelihood, mini_batch, placed
from test_router_replay import FAMILIES, SAMPLING
from torch import Tensor

from flexrlhf.comm import world as world_module
from flexrlhf.comm.point_to_point import exchange
from flexrlhf.comm.progress import RankProgress
from flexrlhf.comm.reduce import RankGroup
from flexrlhf.comm.world import Groups, InOrder, World
from flexrlhf.config.axes import ParallelDims
from flexrlhf.config.output_settings import NO_SWITCHES, DebugSpec, Switches
from flexrlhf.config.spec import Spec
from flexrlhf.engines import decoding, noise_kernel
from flexrlhf.engines.attended_spans import AttendedSpans, copied_to
from flexrlhf.engines.base import Batch
from flexrlhf.engines.copy_streams import CopyStreams
from flexrlhf.engines.model_ranks import ModelRanks, StageRanks
from flexrlhf.engines.routing import routers_of
from flexrlhf.engines.sampling import running_sums, sample_tokens
from flexrlhf.engines.slots import Slots
from flexrlhf.engines.vllm.isolation import _same_settings
from flexrlhf.engines.vllm.sleep import SleepMode
from flexrlhf.errors import UserError
from flexrlhf.placement.groups import Group
from flexrlhf.placement.layout import Layout
from flexrlhf.plan.pipeline import make_plan
from flexrlhf.plan.plan import Plan
from flexrlhf.plan.plan_text import format_plan
from flexrlhf.strategies.instructions import Reload
from flexrlhf.trainer.loaded_models import load_model_on_rank
from flexrlhf.trainer.operator_context import step_sampling
from flexrlhf.trainer.rank_runs import choose_kernels, run_title

CPU, GPU = torch.device("cpu"), torch.device("cuda", 0)
Count = Callable[[Switches, pytest.MonkeyPatch], int]


def plan_of(switches: Switches, **changes: Any) -> Plan:
    """PPO whose actor generates with a copy on both ranks, and whose models take turns in the memory of a device."""
    first, second, both = ({"ranks": ranks} for ranks in ([0], [1], [0, 1]))
    operators = {"generate": both, "values": both, "train_actor": first, "train_critic": second}
    model = {"init": TINY}
    return make_plan(
        Spec.parse(
            {
                "name": "switches",
                "algorithm": {"name": "ppo", "prompts_per_step": 8},
                "models": {role: model for role in ("actor", "critic", "ref", "reward")},
                "placement": {"operators": operators | {"ref_logprobs": first, "scores": second}},
                "data": {"path": "prompts.jsonl", "max_prompt_tokens": 4, "max_response_tokens": 8},
                "steps": 2,
                "cluster": {"devices": 2},
                "debug": {name: value for name, value in switches.model_dump().items() if name in switches.thrown},
                **changes,
            }
        )
    )


@dataclass
class Context:
    """Parts of a rank's context that its sampling depends on."""

    plan: Plan
    data: Any = field(default_factory=lambda: SimpleNamespace(eos_token_ids=(0,), pad_token_id=0, num_ids=32))
    decode: Any = str
    text: Any = str


def world_of(switches: Switches) -> World:
    return World(0, 2, dist.HashStore(), CPU, "nccl").under(switches)


class Done(dist.Work):
    """Work that a device has finished; counts looks at it."""

    looks = 0

    def is_completed(self) -> bool:
        self.looks += 1
        return True

    def exception(self) -> None:
        return None

    def wait(self, *_: object) -> bool:
        return True


def new_group(switches: Switches, monkeypatch: pytest.MonkeyPatch) -> tuple[str, str, int, int]:
    """Make a group; return the back end and the description that torch gets, how often the host looked at it, and the
    most blocks of its kernels, 0 without a limit."""
    made: list[tuple[str, str, int]] = []

    def helper(*arguments: Any, group_desc: str, backend_options: Any, **_: Any) -> tuple[object, None]:
        limit = 0 if backend_options is None else backend_options.config.max_ctas
        made.append((arguments[3], group_desc, limit))
        return object(), None

    # torch for CPUs has none
    options = SimpleNamespace(Options=lambda: SimpleNamespace(config=SimpleNamespace()))
    monkeypatch.setattr(dist, "ProcessGroupNCCL", options, raising=False)

    first = Done()
    monkeypatch.setattr(world_module, "_new_process_group_helper", helper)
    monkeypatch.setattr(world_module, "_world", SimpleNamespace(pg_group_ranks={}))
    monkeypatch.setattr(dist, "all_reduce", lambda *_, **__: first)
    world_of(switches).make_groups([Group("move", (0, 1))], 1.0)
    backend, description, limit = made[0]
    return backend, description, first.looks, limit


def groups_of_nccl(switches: Switches, monkeypatch: pytest.MonkeyPatch) -> int:
    return (new_group(switches, monkeypatch)[0]).count("nccl")


def limits_of_blocks(switches: Switches, monkeypatch: pytest.MonkeyPatch) -> int:
    return new_group(switches, monkeypatch)[3]


def groups_that_share(switches: Switches, _: pytest.MonkeyPatch) -> int:
    plan = plan_of(switches)
    return len(plan.groups) - len({group.communicator for group in plan.groups})


def communicators_inside_layers(switches: Switches, _: pytest.MonkeyPatch) -> int:
    actor = {"init": {**TINY, "num_key_value_heads": 4}, "cp": 2, "zero": 3}
    models = {"actor": actor} | {role: {"init": TINY} for role in ("critic", "ref", "reward")}
    plan = plan_of(switches, models=models, placement=[1, 1, 1, 1])
    return len({kind for kind, _ in (group.communicator for group in plan.groups)} & {"inside layers"})


def batches_of_messages(switches: Switches, monkeypatch: pytest.MonkeyPatch) -> int:
    """Batches in which a rank sends a message and receives two."""
    made = Counter[str]()

    def begin(kind: str) -> Callable[..., Any]:
        def begun(*_: Any, **__: Any) -> Any:
            made[kind] += 1
            return [f"{kind} {made[kind]}"] if kind == "batch" else f"{kind} {made[kind]}"

        return begun

    for name, kind in (("isend", "send"), ("irecv", "receive"), ("batch_isend_irecv", "batch")):
        monkeypatch.setattr(dist, name, begin(kind))
    monkeypatch.setattr(dist, "P2POp", lambda op, tensor, peer, group: SimpleNamespace(**locals()))
    monkeypatch.setattr(dist, "get_rank", lambda *_: 1)
    group: Any = SimpleNamespace(group_desc=new_group(switches, monkeypatch)[1])
    begun, arriving = exchange([(torch.ones(1), 2)], [(torch.ones(1), 0), (torch.ones(1), 2)], group)
    if not made["batch"]:
        # all ranks have them in one order: by pairs of ranks, and from the lower one first
        assert ([work for work, _ in begun], [work for work, _ in arriving]) == (["send 1"], ["receive 1", "receive 2"])
    return made["batch"]


def looks_at_a_device(switches: Switches, monkeypatch: pytest.MonkeyPatch) -> int:
    work = Done()
    RankProgress(world_of(switches), "run", {}, 1.0).wait(work, (0, 1))
    return work.looks + new_group(switches, monkeypatch)[2]


def waits_of_devices_alone(switches: Switches, _: pytest.MonkeyPatch) -> int:
    """Sums that the host has not looked at once its wait returns."""
    work = Done()
    RankProgress(world_of(switches), "run", {}, 1.0).wait(InOrder(work), (0, 1))
    return not work.looks


def weights_stored_once(switches: Switches, _: pytest.MonkeyPatch) -> int:
    plan = plan_of(switches)
    reuses = [plan.sizing.reuse(model, rank) for model in plan.placement.models for rank in model.ranks]
    return sum(len(reuse.views | reuse.lent) for reuse in reuses if reuse is not None)


def early_reloads(switches: Switches, _: pytest.MonkeyPatch) -> int:
    instructions = plan_of(switches, cluster={"devices": 2, "memory_gb": 0.00009}).schedule.instructions
    assert any(isinstance(each, Reload) for each in instructions)
    return sum(each.overlaps for each in instructions if isinstance(each, Reload))


def streams_of_copies(switches: Switches, monkeypatch: pytest.MonkeyPatch) -> int:
    made: list[object] = []
    monkeypatch.setattr(torch, "Stream", made.append)
    CopyStreams(GPU, switches)
    return len(made)


def pinned_memory(switches: Switches, monkeypatch: pytest.MonkeyPatch) -> int:
    """Host memory of offloaded tensors, and of the spans of a pass."""
    pinned: list[object] = []
    runtime = SimpleNamespace(cudaHostRegister=lambda *_: pinned.append(_) or 1)
    monkeypatch.setattr(torch.cuda, "cudart", lambda: runtime)
    monkeypatch.setattr(torch, "Stream", lambda _: None)
    monkeypatch.setattr(Tensor, "pin_memory", lambda self: pinned.append(self) or self)
    CopyStreams(GPU, switches).host_memory(8)
    settings = engine_for(placed(), switches=switches)._passes.pass_settings
    AttendedSpans(((0, 4),), ((0, 4),), causal=True, pins=settings.pins).offsets(torch.device("meta"), 4, 4)
    copied_to(torch.device("meta"), torch.zeros(2), settings.pins)
    return len(pinned)


def prompts() -> Batch:
    batch = mini_batch()
    return Batch({"prompts": batch["tokens"][:, :4], "prompt_mask": batch["attention_mask"][:, :4]}, batch.rows, 1)


def caches_with_slots(switches: Switches, monkeypatch: pytest.MonkeyPatch) -> int:
    made: list[Slots] = []

    def counted(*arguments: Any) -> Slots:
        made.append(Slots(*arguments))
        return made[-1]

    monkeypatch.setattr(decoding, "Slots", counted)
    plan = plan_of(switches, placement=None, cluster={"devices": 1})
    world = World(0, 1, dist.HashStore(), CPU, "gloo")
    model = load_model_on_rank(plan, plan.placement["actor"], world, Groups({}), lambda work, ranks: work.wait())
    model.engine.generate(prompts(), SAMPLING)
    return len(made)


class Kernel:
    """Triton's kernel, which needs a GPU; counts its starts."""

    starts = 0

    def __getitem__(self, _: object) -> Callable[..., None]:
        self.starts += 1
        return lambda *_: None


class OfGpu(Tensor):
    """A tensor that seems to be on a GPU."""

    is_cuda = True


def kernels_of_noise(switches: Switches, monkeypatch: pytest.MonkeyPatch) -> int:
    kernel, context = Kernel(), Context(plan_of(switches))
    monkeypatch.setattr(noise_kernel, "_kernel", kernel)
    sample_tokens(torch.zeros(2, 8), step_sampling(context), torch.arange(2).as_subclass(OfGpu), 0)
    return kernel.starts


def discarded_weights(switches: Switches, _: pytest.MonkeyPatch) -> int:
    levels: list[int] = []
    engine = SimpleNamespace(collective_rpc=lambda _: [[torch.ones(2)]], sleep=lambda level: levels.append(level))
    context: Any = SimpleNamespace(device=GPU, copies=CopyStreams(CPU), switches=switches)
    mode = SleepMode(engine, context)
    mode.sleep(keeps=False)
    assert mode.num_host_bytes == (0 if levels == [2] else 8)
    return levels.count(2)


def float32_routers(switches: Switches, _: pytest.MonkeyPatch) -> int:
    model = placed(init={**TINY, "model_type": "mixtral", **FAMILIES["mixtral"]}, dtype="bfloat16")
    routers = routers_of(engine_for(model, switches=switches)._model)
    results = [router(torch.ones(3, TINY["hidden_size"], dtype=torch.bfloat16))[0] for router in routers]
    return sum(each.dtype == torch.float32 for each in results)


def kernels_in_any_order(switches: Switches, _: pytest.MonkeyPatch) -> int:
    """Operations that torch allows and that have no order: one here, and two where their order cannot matter."""
    choose_kernels(DebugSpec.model_validate(switches.thrown))
    allowed = 0
    try:
        torch.zeros(3).put_(torch.tensor([0]), torch.ones(1))
        allowed += 1
    except RuntimeError as error:
        assert "deterministic" in str(error)
    for context in (running_sums, _same_settings):
        with context():
            torch.zeros(3).put_(torch.tensor([0]), torch.ones(1))
    assert torch.are_deterministic_algorithms_enabled() != bool(allowed)
    return allowed


@pytest.fixture(autouse=True)
def any_kernels() -> Any:
    yield
    choose_kernels(DebugSpec())


@pytest.mark.parametrize(
    ("switch", "count"),
    [
        ({"backend": "gloo"}, groups_of_nccl),
        ({"communicators": "apart"}, groups_that_share),
        ({"communicators": "shared"}, communicators_inside_layers),
        ({"message_batches": False}, batches_of_messages),
        ({"move_blocks": False}, limits_of_blocks),
        ({"device_polling": False}, looks_at_a_device),
        ({"device_waits": False}, waits_of_devices_alone),
        ({"reused_weights": False}, weights_stored_once),
        ({"copy_streams": False}, streams_of_copies),
        ({"prefetched_reloads": False}, early_reloads),
        ({"pinned_memory": False}, pinned_memory),
        ({"slots": False}, caches_with_slots),
        ({"noise_kernel": False}, kernels_of_noise),
        ({"sleep_level_2": False}, discarded_weights),
        ({"float32_routers": False}, float32_routers),
        ({"deterministic": True}, kernels_in_any_order),
    ],
    ids=lambda each: getattr(each, "__name__", str(each)),
)
def test_a_switch_turns_off_its_mechanism(
    switch: dict[str, Any], count: Count, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patches:
        assert count(NO_SWITCHES, patches) > 0
    assert count(Switches(**switch), monkeypatch) == 0


def test_a_fixed_order_is_that_of_cpus() -> None:
    """Training and generation with ``debug.deterministic`` have the bits that they have without it."""
    found = []
    for is_fixed in (False, True):
        choose_kernels(DebugSpec(deterministic=is_fixed))
        trained = engine_for(placed(init={**TINY, "model_type": "qwen3_moe", **FAMILIES["qwen3_moe"]}))
        trained.train([(mini_batch(), likelihood())])
        sampled = trained.generate(prompts(), replace(SAMPLING, top_p=0.8))
        found.append([*trained.weights().values(), *sampled.values()])
    assert all(torch.equal(one, other) for one, other in zip(*found, strict=True))


def test_every_switch_is_counted() -> None:
    (marks,) = test_a_switch_turns_off_its_mechanism.pytestmark  # type: ignore[attr-defined]
    counted = dict.fromkeys(name for switch, _ in marks.args[1] for name in switch)
    assert list(counted) == list(Switches.model_fields)


@pytest.mark.parametrize(
    ("switches", "why"),
    [(NO_SWITCHES, "several ranks share a GPU here"), (Switches(backend="gloo"), "debug.backend is gloo")],
)
def test_stages_without_nccl_are_refused_by_name(switches: Switches, why: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dist, "get_backend", lambda _: "gloo")
    a_group: Any = object()
    ranks = RankGroup(a_group, (0, 1), lambda work, ranks: work.wait())
    model = replace(placed(engine="megatron", pp=2), layout=Layout((0, 1), ParallelDims(pp=2)))
    of_model = ModelRanks(ranks, ranks, stages=StageRanks(ranks, ranks, ranks, ranks))
    context = replace(context_of(model), device=GPU, ranks=of_model, switches=switches)
    with pytest.raises(UserError, match=f"models.actor.pp: 2 stages need NCCL, but {why}; use 1"):
        context.check_links()


def test_a_run_with_a_switch_says_so_first() -> None:
    plan = plan_of(Switches(slots=False, backend="gloo"))
    for text in (format_plan(plan), run_title(plan, "cuda")):
        assert text.splitlines()[0].endswith("; debug: backend gloo, slots false")
    assert "debug" not in run_title(plan_of(NO_SWITCHES), "cuda")
