"""Laws of pipeline stages: what they cost, how the bubble shrinks, and that a plan with stages is priced by them."""

from __future__ import annotations

import itertools
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from small_runs import plan_of

from flexrlhf.config.axes import ParallelDims
from flexrlhf.config.spec_file import load_spec
from flexrlhf.guideline.costs.analytic import AnalyticCosts
from flexrlhf.guideline.costs.cost_model import Call, Cost, Links, MeanPass, Mesh, Transformer
from flexrlhf.guideline.costs.links import MeshSide, lacks_rows, rows_traffic
from flexrlhf.guideline.costs.measured import load_costs
from flexrlhf.guideline.simulation.inputs import ORDINARY_CPU, longest_lengths
from flexrlhf.guideline.simulation.pricing import Pricer, side_of, synced_weights
from flexrlhf.guideline.simulation.simulate import simulate
from flexrlhf.placement.devices import DeviceClass
from flexrlhf.plan.pipeline import make_plan
from flexrlhf.plan.plan import Plan
from flexrlhf.strategies.instructions import Run, Sync

ROOT = Path(__file__).parents[2]
A100 = DeviceClass.KNOWN["A100-80G"]
COSTS = AnalyticCosts()
KINDS = pytest.mark.parametrize("kind", ["forward", "train"])
ROUNDING = 1 + 1e-9


def model(chance: random.Random) -> Transformer:
    heads = chance.choice([8, 16, 32])
    return Transformer(
        layers=chance.choice([8, 16, 48]),
        hidden=128 * heads,
        ffn=chance.choice([300, 400]) * heads,
        heads=heads,
        kv_heads=chance.choice([8, heads]),
        head_dim=128,
        vocabulary=chance.choice([32000, 152000]),
        head=chance.choice(["causal", "scalar"]),
    )


def call(kind: Any, chance: random.Random) -> Call:
    width = chance.choice([256.0, 1024.0, 4096.0])
    updates = chance.randint(1, 4) if kind == "train" else 1
    return Call(
        kind=kind,
        model=model(chance),
        engine="megatron",
        rows=updates * chance.choice([1, 4, 32]),
        prompt=width / 2,
        responses=(width / 2,),
        width=width,
        updates=updates,
        recompute=chance.choice(["none", "full"]),
    )


def mesh(pp: int, **changes: Any) -> Mesh:
    sizes = {"dp": 1, "per_node": 8, "stages_spread": True, **changes}
    dims = ParallelDims(sizes.pop("tp", 1), pp)
    return Mesh(A100, Links(A100.link_gb_s, A100.node_gb_s), dims=dims, **sizes)


def cases(kind: str, number: int = 60) -> list[Call]:
    chance = random.Random(17)
    return [call(kind, chance) for _ in range(number)]


def alone(cost: Cost) -> float:
    """Seconds that the devices compute, without what they exchange and without waiting."""
    return cost.seconds - sum(cost.parts.get(name, 0.0) for name in ("bubble", "pipeline", "gradients", "gather"))


# --- the bubble


@KINDS
@pytest.mark.parametrize("pp", [2, 4, 8])
def test_stages_never_save_device_seconds(kind: str, pp: int) -> None:
    """So many devices take at least the time of one, over their number."""
    for each in cases(kind):
        whole, staged = COSTS.call(each, mesh(1)), COSTS.call(each, mesh(pp))
        assert pp * staged.seconds * ROUNDING >= whole.seconds
        assert pp * alone(staged) * ROUNDING >= alone(whole)


@KINDS
@pytest.mark.parametrize("pp", [2, 4, 8])
def test_one_micro_batch_goes_through_the_stages_one_after_another(kind: str, pp: int) -> None:
    for each in cases(kind):
        single = replace(each, rows=each.updates)
        whole, staged = COSTS.call(single, mesh(1)), COSTS.call(single, mesh(pp))
        # launching hides less behind a smaller stage
        saved = whole.parts.get("optimizer", 0.0)
        assert staged.seconds * ROUNDING >= whole.seconds - saved


@KINDS
@pytest.mark.parametrize("pp", [2, 4])
def test_a_bubble_is_the_other_stages_work_on_one_micro_batch(kind: str, pp: int) -> None:
    for each in cases(kind):
        staged = COSTS.call(each, mesh(pp))
        one = alone(staged) - staged.parts.get("optimizer", 0.0)
        assert staged.parts["bubble"] == pytest.approx(each.updates * (pp - 1) * one / each.rows)


@KINDS
@pytest.mark.parametrize("pp", [2, 4, 8])
def test_more_micro_batches_never_have_a_larger_share_of_bubble(kind: str, pp: int) -> None:
    for each in cases(kind, 30):
        shares = []
        for times in (1, 2, 5, 20):
            cost = COSTS.call(replace(each, rows=times * each.rows), mesh(pp))
            shares.append(cost.parts["bubble"] / (cost.parts["bubble"] + alone(cost)))
        assert shares == sorted(shares, reverse=True)
        assert shares[-1] < shares[0]


@KINDS
def test_without_stages_there_is_no_bubble(kind: str) -> None:
    assert not {"bubble", "pipeline"} & set(COSTS.call(cases(kind)[0], mesh(1)).parts)


@KINDS
@pytest.mark.parametrize("pp", [2, 4, 8])
def test_more_stages_never_exchange_less(kind: str, pp: int) -> None:
    for each in cases(kind, 20):
        costs = [COSTS.call(each, mesh(stages)) for stages in (pp, 2 * pp) if each.model.layers % stages == 0]
        assert [cost.parts["pipeline"] for cost in costs] == sorted(cost.parts["pipeline"] for cost in costs)


# --- where stages lie


@KINDS
def test_the_order_of_ranks_makes_no_difference_inside_a_node(kind: str) -> None:
    for each in cases(kind, 20):
        near = mesh(2, dp=2, tp=2, zero=1)
        assert COSTS.call(each, near) == COSTS.call(each, replace(near, stages_spread=False))


@pytest.mark.parametrize("pp", [2, 4])
def test_spread_stages_cross_nodes_and_keep_replicas_in_one(pp: int) -> None:
    """Eight replicas of two stages on two nodes: gradients stay in a node, hidden states do not."""
    each = replace(cases("train")[0], rows=64, updates=1)
    spread = mesh(pp, dp=8)
    together = replace(spread, stages_spread=False)
    assert (spread.between_replicas, spread.between_stages) == (1, 8)
    assert (together.between_replicas, together.between_stages) == (pp, 1)
    first, second = COSTS.call(each, spread), COSTS.call(each, together)
    assert first.parts["pipeline"] > second.parts["pipeline"]
    assert first.parts["gradients"] < second.parts["gradients"]
    assert first.parts["bubble"] == second.parts["bubble"]


# --- rows


def side(size: int, tp: int, pp: int) -> MeshSide:
    return MeshSide(size, 8, size // (tp * pp), ParallelDims(tp, pp))


def test_rows_go_to_all_ranks_of_a_replica() -> None:
    assert not lacks_rows(side(8, 2, 2), side(8, 2, 2), "same")
    assert lacks_rows(side(8, 4, 1), side(8, 2, 2), "same")
    assert not lacks_rows(side(8, 8, 1), side(8, 2, 2), "same")  # the writer's one replica has all rows everywhere
    plain, staged = (rows_traffic(1000, side(4, 1, 1), side(4, 1, pp), "disjoint", False) for pp in (1, 2))
    assert staged.within == 2 * plain.within


# --- plans


TALL = "{model_type: llama, vocab_size: 512, hidden_size: 64, intermediate_size: 128, num_hidden_layers: 8, "
TALL += "num_attention_heads: 4}"
NODE = "cluster={nodes: [{devices: 8, class: A100-80G}]}"


def staged(pp: int, *overrides: str) -> Plan:
    settings = f"models.critic={{engine: megatron, pp: {pp}, init: {TALL}}}"
    return plan_of(None, 8, NODE, settings, "models.critic.micro_batch_tokens=12", *overrides)


def test_a_plan_with_stages_is_priced_by_them() -> None:
    plan = staged(4, "algorithm.prompts_per_step=64")
    pricer = Pricer(plan, COSTS, longest_lengths(plan))
    runs = [each for each in plan.schedule.instructions if isinstance(each, Run) and each.model == "critic"]
    assert {run.operator.kind for run in runs} == {"forward", "train"}
    for run in runs:
        ((priced, priced_mesh),) = pricer.calls(run)
        assert (priced_mesh.dims.pp, priced_mesh.dp, priced_mesh.stages_spread) == (4, 2, True)
        assert priced.rows == 32 and priced.passes is not None and priced.passes.count == 32
        cost = pricer.price(run)
        assert cost == COSTS.call(priced, priced_mesh)
        assert cost.parts["bubble"] > 0 and cost.parts["pipeline"] > 0


def test_ranks_that_share_rows_compute_their_part_and_exchange_states() -> None:
    """Four ranks with the tokens of one long row each compute a quarter of it; as replicas three have none."""

    def trained(cp: int, context_parallel: str = "auto", rows: int = 4) -> Cost:
        config = "{vocab_size: 32000, hidden_size: 4096, intermediate_size: 11008, num_hidden_layers: 4}"
        critic = f"models.critic={{cp: {cp}, context_parallel: {context_parallel}, zero: 3, init: {config}}}"
        data = "data={path: a.jsonl, max_prompt_tokens: 1024, max_response_tokens: 31744}"
        kept = ("models.critic.init.model_type=llama", "models.critic.init.num_attention_heads=32")
        plan = plan_of(None, 4, NODE.replace("8", "4", 1), critic, data, *kept, f"algorithm.prompts_per_step={rows}")
        found = simulate(plan, COSTS)
        return next(item.cost for item in found.priced if item.instruction.label == "train_critic on critic")

    replicas, ulysses, ring = trained(1), trained(4), trained(4, "ring")
    assert "context parallel" not in replicas.parts
    assert ulysses.parts["compute"] == ring.parts["compute"] == pytest.approx(replicas.parts["compute"], rel=0.1)
    assert ulysses.parts["attention"] == pytest.approx(replicas.parts["attention"], rel=0.01)
    # heads are exchanged for tokens; without grouped heads keys and values of all others are more
    assert 0 < ulysses.parts["context parallel"] < ring.parts["context parallel"] < 0.2 * ring.seconds
    assert ulysses.parts["gather"] == pytest.approx(4 * replicas.parts["gather"], rel=0.01)
    assert trained(4, rows=1).seconds < 0.4 * trained(1, rows=1).seconds


@pytest.mark.parametrize("device", DeviceClass.KNOWN.values(), ids=DeviceClass.KNOWN)
def test_ranks_of_a_node_exchange_heads_where_these_divide_as_a_ring_takes_longer(device: DeviceClass) -> None:
    """The choice of ``context_parallel: auto``, for short and long rows and few and many heads of keys."""
    links = Links(device.link_gb_s, device.node_gb_s)

    def added(kv_heads: int, width: int, cp: int, is_ring: bool) -> float:
        trained = Transformer(32, 4096, 14336, 32, kv_heads, 128, 32000)
        part = MeanPass(1, 1, width, width - 64, width).of_part(cp)
        call = Call("train", trained, "torch", cp, 64, (width - 64.0,), width, passes=part)
        cost = COSTS.call(call, Mesh(device, links, dims=ParallelDims(cp=cp), per_node=8, is_ring=is_ring))
        return cost.parts["context parallel"]

    for case in itertools.product((1, 8, 32), (2048, 32768, 131072), (2, 4, 8)):
        assert added(*case, is_ring=False) < added(*case, is_ring=True), case


def test_measured_exchanges_take_as_long_as_sums_of_their_bytes_and_their_copies() -> None:
    """Two layers on two ranks, 1024 tokens of each: Ulysses sends half of 256 + 128 features twice, in float32."""
    costs = load_costs(ORDINARY_CPU, 2)
    part = MeanPass(1, 1, 2048, 1984, 2048).of_part(2)
    call = Call(
        "forward", Transformer(2, 256, 704, 8, 4, 32, 1000), "torch", 1, 64, (1984.0,), 2048, item=4, passes=part
    )
    parts = costs.call(call, Mesh(A100, Links(1, 1), dims=ParallelDims(cp=2), per_node=2)).parts
    line = costs.measured.reduce
    assert line is not None
    sent, copied = 1024 * 2 * (256 + 128) * 4 / 2, 1024 * 4 * (256 + 128) * 4
    each = 2 * line.start + line.per_byte * sent + copied / costs.measured.memory_bytes_s
    assert parts["context parallel"] == pytest.approx(2 * each)


def test_a_larger_batch_has_a_smaller_share_of_bubble_in_a_plan() -> None:
    def share(prompts: int) -> float:
        found = simulate(staged(4, f"algorithm.prompts_per_step={prompts}"), COSTS)
        costs = [item.cost for item in found.priced if item.instruction.label == "train_critic on critic"]
        return costs[0].parts["bubble"] / costs[0].seconds

    shares = [share(prompts) for prompts in (8, 32, 128)]
    assert shares == sorted(shares, reverse=True) and shares[-1] < shares[0] / 2


def test_weights_for_a_copy_with_stages_are_those_of_its_fullest_rank() -> None:
    shadow = "models.critic.shadow={pp: 2}"
    plan = plan_of(
        [0.5] * 6, 8, NODE, f"models.critic={{engine: megatron, tp: 2, pp: 2, dtype: float32, init: {TALL}}}", shadow
    )
    sync = next(each for each in plan.schedule.instructions if isinstance(each, Sync) and each.source == "critic")
    copy, shape = plan.placement[sync.destination], plan.shapes["critic"]
    assert copy.layout.dims.pp == 2 and side_of(copy, 4).replica == 4
    most = max(sum(part.num_elements for part in shape.parts_on(copy, rank).values()) for rank in copy.ranks)
    assert synced_weights(copy, shape, plan.spec).part == 4 * most


def test_the_config_of_the_documents_is_simulated() -> None:
    found = simulate(make_plan(load_spec(ROOT / "configs" / "megatron.yaml")), COSTS)
    trained = [item.cost for item in found.priced if item.instruction.label.startswith("train_")]
    assert len(trained) == 2 and all(cost.parts["bubble"] < 0.2 * cost.seconds for cost in trained)
