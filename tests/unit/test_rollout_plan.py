"""A rollout engine in a plan: its place, changes of the graph, moves, and comparisons."""

from __future__ import annotations

from dataclasses import replace
from fractions import Fraction
from typing import Any

import pytest
from small_runs import RECOMPUTE, plan_of, spec_of

from flexrlhf.config.axes import ParallelDims
from flexrlhf.engines.vllm.config import engine_arguments
from flexrlhf.errors import UserError
from flexrlhf.memory.states import kv_cache_bytes
from flexrlhf.operators.columns import TEXT
from flexrlhf.operators.graph import Graph, Operator
from flexrlhf.placement.groups import Group
from flexrlhf.placement.layout import Layout, received_share
from flexrlhf.plan.algorithm_graph import make_graph
from flexrlhf.plan.model_checks import check_run_engines
from flexrlhf.plan.pipeline import ResolvedSpec
from flexrlhf.plan.plan import Plan
from flexrlhf.plan.plan_text import format_plan
from flexrlhf.plan.rollout_engine import with_rollout
from flexrlhf.strategies.instructions import Eval, Move, Run, Sync
from flexrlhf.weights.transfers import overlap

VLLM = "rollout.engine=vllm"
SIX = [0.5] * 6
NAMES = ("actor.rollout", "critic.shadow", "actor", "critic", "ref", "reward")
IMPORTANCE = "algorithm.importance={}"
UNCOMPARED = "rollout.parity=null"
LAG = "schedule.lag=1"
SHARED = ("models.actor.lora={rank: 2}", "models.ref.share=actor")
STREAM = ("algorithm.num_mini_batches=4", "schedule.num_chunks=4", "algorithm.whiten=mini_batch")


def mapping(**changes: Any) -> dict[str, Any]:
    entries = dict.fromkeys(NAMES, 0.5) | {name.replace("_", "."): entry for name, entry in changes.items()}
    return {name: entry for name, entry in entries.items() if entry is not None}


def runs(plan: Plan) -> list[Run]:
    return [x for x in plan.schedule.instructions if isinstance(x, Run)]


def models_by_operator(plan: Plan) -> dict[str, str]:
    return {run.operator.name: run.model for run in runs(plan)}


@pytest.mark.parametrize(
    ("overrides", "device", "leaves"),
    [
        ((), "cuda", True),
        ((), "cpu", False),
        (("rollout.cuda_graphs=false",), "cuda", False),
        (("rollout.sleep=false",), "cuda", False),
        (("rollout.config={sleep_mode_offload_cudagraph: false}",), "cuda", False),
    ],
)
def test_graphs_leave_a_gpu_while_the_engine_sleeps(overrides: tuple[str, ...], device: str, leaves: bool) -> None:
    plan = plan_of(None, 2, VLLM, *overrides)
    arguments = engine_arguments(plan.placement["actor.rollout"], plan.lengths, 0, device)
    assert arguments["sleep_mode_offload_cudagraph"] is leaves


# --- where it sits


@pytest.mark.parametrize("placement", [None, [1, 1, 1, 1], [1, 1, 0.5, 0.5], [0.5] * 4])
def test_without_shadows_the_engine_sits_where_the_actor_does(placement: Any) -> None:
    plan = plan_of(placement, 4, VLLM)
    engine, actor = plan.placement["actor.rollout"], plan.placement["actor"]
    assert engine.layout == actor.layout
    assert (engine.engine, engine.role, engine.trained) == ("vllm", "actor", False)
    assert not plan.placement.shadows and plan.placement.followers == (engine,)
    assert plan.strategy == plan_of(placement, 4).strategy


def test_the_mapping_form_names_the_engine() -> None:
    plan = plan_of(mapping(actor_rollout={"ranks": [3, 2]}, critic_shadow={"ranks": [2]}), 4, VLLM)
    assert plan.placement["actor.rollout"].ranks == (2, 3)
    assert plan.placement["critic.shadow"].ranks == (2,)
    assert tuple(model.name for model in plan.placement.models) == NAMES


@pytest.mark.parametrize(
    ("placement", "ranks", "layout"),
    [
        (None, 4, Layout((0, 1, 2, 3), ParallelDims(tp=2))),
        ([1, 1, 0.5, 0.5], 4, Layout((0, 1, 2, 3), ParallelDims(tp=2))),
        (SIX, 4, Layout((2, 3), ParallelDims(tp=2))),
        (mapping(actor_rollout={"ranks": [7, 5, 4, 6]}), 8, Layout((4, 5, 6, 7), ParallelDims(tp=2))),
    ],
)
def test_tensor_parallel_ranks_of_an_engine_lie_side_by_side(placement: Any, ranks: int, layout: Layout) -> None:
    plan = plan_of(placement, ranks, VLLM, "rollout.tp=2")
    engine = plan.placement["actor.rollout"]
    assert (engine.layout, engine.settings.tp) == (layout, 2)
    assert plan.placement["actor"].layout.dims.tp == 1
    assert {g.ranks for g in plan.groups if g.purpose == "tp actor.rollout"} == set(layout.sets("tp"))


def test_tensor_parallel_ranks_of_an_engine_may_be_all_of_several_nodes() -> None:
    nodes = "cluster={nodes: [{count: 4, devices: 2}]}"
    heads = ("models.actor.init.num_attention_heads=4", "models.actor.init.num_key_value_heads=2")
    plan = plan_of(None, 8, VLLM, nodes, *heads, "rollout.tp=4")
    assert plan.placement["actor.rollout"].layout.sets("tp") == ((0, 1, 2, 3), (4, 5, 6, 7))


LATENT = (
    "models.actor.init={model_type: deepseek_v2, vocab_size: 64, hidden_size: 8, intermediate_size: 16, "
    "num_hidden_layers: 2, num_attention_heads: 4, num_key_value_heads: 4, q_lora_rank: 6, kv_lora_rank: 4, "
    "qk_rope_head_dim: 2, qk_nope_head_dim: 4, v_head_dim: 4, n_routed_experts: 4, n_shared_experts: 1, "
    "num_experts_per_tok: 2, moe_intermediate_size: 8, first_k_dense_replace: 1}"
)


def test_an_engine_with_latent_attention_is_planned_and_not_run() -> None:
    """Heads are split, latents and their cache are on every rank."""
    plan = plan_of(None, 4, LATENT, VLLM, "rollout.tp=4")
    engine, shape = plan.placement["actor.rollout"], plan.shapes["actor"]
    parts, attention = shape.parts_on(engine, 1), "model.layers.1.self_attn."
    assert parts[f"{attention}kv_b_proj.weight"].box == (range(8, 16), range(4))
    assert parts[f"{attention}q_b_proj.weight"].box[0] == range(6, 12)
    assert parts[f"{attention}kv_a_proj_with_mqa.weight"].box == (range(6), range(8))
    assert parts["model.layers.1.mlp.experts.down_proj"].box[0] == range(1, 2)
    alone = replace(engine, layout=Layout((0,)), settings=engine.settings.model_copy(update={"tp": 1}))
    assert kv_cache_bytes(engine, shape) == kv_cache_bytes(alone, shape)
    with pytest.raises(UserError, match="rollout.engine: vllm is planned and not run for deepseek_v2 models"):
        check_run_engines(plan.placement, plan.shapes)
    check_run_engines(plan_of(None, 4, LATENT).placement, plan.shapes)


def test_stages_of_an_engine_have_ranks_one_behind_the_other() -> None:
    two = "models.actor.init.num_hidden_layers=2"
    engine = plan_of(None, 4, two, VLLM, "rollout.tp=2", "rollout.pp=2").placement["actor.rollout"]
    assert engine.layout == Layout((0, 1, 2, 3), ParallelDims(tp=2, pp=2))
    assert (engine.settings.tp, engine.settings.pp) == (2, 2)
    engine = plan_of([1, 1, 0.5, 0.5], 4, two, VLLM, "rollout.pp=2").placement["actor.rollout"]
    assert engine.layout.replica_sets == ((0, 2), (1, 3))


FOUR_LAYERS = (
    "models.actor.init={model_type: llama, vocab_size: 64, hidden_size: 8, intermediate_size: 16, "
    "num_hidden_layers: 4, num_attention_heads: 2, num_key_value_heads: 2}"
)


@pytest.mark.parametrize(
    ("trained", "rollout", "sent"),
    # elements of each rank's two layers more than it trains, and the embedding or the last norm and head
    [
        (("pp=2",), "pp: 2", False),
        (("tp=2", "pp=2"), "tp: 2, pp: 2", False),
        (("pp=4",), "pp: 2", True),
        (("pp=2",), "pp: 1", True),
    ],
)
def test_stages_keep_what_their_ranks_train(trained: tuple[str, ...], rollout: str, sent: bool) -> None:
    settings = (FOUR_LAYERS, "models.actor.engine=megatron", *(f"models.actor.{each}" for each in trained))
    plan = plan_of(None, 4, *settings, f"rollout={{engine: vllm, {rollout}}}")
    actor, engine = plan.placement["actor"], plan.placement["actor.rollout"]
    for rank in range(4):
        trains, generates = (plan.shapes["actor"].parts_on(model, rank) for model in (actor, engine))
        assert trains.keys() <= generates.keys()
    (sync,) = (x for x in plan.schedule.instructions if isinstance(x, Sync))
    assert bool(plan.traffic.sync_bytes(sync)) == sent


# --- rows

UNEQUAL = {"actor": {"ratio": 1, "row_shares": [1, 3]}, "critic": 1, "ref": 1, "reward": 1}


def test_an_engine_beside_the_actor_takes_its_row_shares() -> None:
    plan = plan_of(UNEQUAL, 2, VLLM)
    engine = plan.placement["actor.rollout"]
    assert engine.layout == plan.placement["actor"].layout
    assert [len(plan.batch.prompts_on(engine.layout, rank, plan.batch.mini_batches)) for rank in (0, 1)] == [2, 6]
    # the actor has the rows of its own answers
    assert not [x for x in plan.schedule.instructions if isinstance(x, Move) and "rollout_logprobs" in x.columns]
    assert not [
        x
        for x in plan.schedule.instructions
        if isinstance(x, Move) and "tokens" in x.columns and x.destinations == ("actor",)
    ]


def test_where_replicas_are_other_ranks_row_shares_follow_from_the_devices() -> None:
    """The actor has four replicas, the engine two."""
    shares = UNEQUAL | {"actor": {"ratio": 1, "row_shares": [1, 3, 2, 2]}}
    assert plan_of(shares, 4, VLLM, "rollout.tp=2").placement["actor.rollout"].layout == Layout(
        (0, 1, 2, 3), ParallelDims(tp=2)
    )
    nodes = "cluster={nodes: [{devices: 2, class: A100-80G}, {devices: 2, class: V100-32G}], device: cpu}"
    spanning = {"actor": {"ranks": [0, 1, 2, 3]}} | {name: {"ranks": [0]} for name in ("critic", "ref", "reward")}
    engine = plan_of(spanning, 4, VLLM, "rollout.tp=2", nodes).placement["actor.rollout"]
    assert engine.layout.row_shares == (312, 125)


def test_an_engine_apart_has_its_own_row_shares() -> None:
    plan = plan_of(mapping(actor_rollout={"ratio": 0.5, "row_shares": [3, 1]}), 4, VLLM)
    assert plan.placement["actor.rollout"].layout.row_shares == (3, 1)


def test_an_engine_sits_on_two_device_classes_where_its_actor_was_put_there() -> None:
    """No user placed the engine, so no message can suggest another place."""
    nodes = "cluster={nodes: [{devices: 1, class: A100-80G}, {devices: 1, class: V100-32G}], device: cpu}"
    plan = plan_of({name: {"ranks": [0, 1]} for name in ("actor", "critic", "ref", "reward")}, 2, VLLM, nodes)
    assert plan.placement["actor.rollout"].layout == plan.placement["actor"].layout
    assert plan.placement["actor"].layout.row_shares == (312, 125)
    assert plan_of(None, 2, VLLM, nodes).placement["actor.rollout"].ranks == (0,)


# --- its settings


def test_the_engine_has_the_weights_of_the_actor_and_nothing_of_its_training() -> None:
    overrides = ("models.actor={zero: 3, dtype: bfloat16, activation_checkpointing: true}", "models.actor.lora={}")
    init = "models.actor.init={model_type: qwen3, hidden_size: 64, num_hidden_layers: 1, vocab_size: 32}"
    plan = plan_of(None, 1, VLLM, *overrides, init)
    actor, engine = plan.placement["actor"].settings, plan.placement["actor.rollout"].settings
    assert (engine.init, engine.path, engine.dtype) == (actor.init, actor.path, "bfloat16")
    assert (engine.zero, engine.lora, engine.activation_checkpointing) == (0, None, False)
    assert plan_of(None, 1, VLLM, "rollout.dtype=float16").placement["actor.rollout"].settings.dtype == "float16"


@pytest.mark.parametrize(
    ("overrides", "tokens"),
    [
        ((), 8 * 32),
        (("algorithm.samples_per_prompt=3",), 3 * 8 * 32),
        (("models.actor.generate_tokens=64",), 64),
        (("models.actor.generate_tokens=1",), 32),
        (("rollout.kv_tokens=70",), 70),
        (("rollout.kv_tokens=32",), 32),
        (("rollout.kv_tokens=999999",), 8 * 32),
        (("data.max_prompt_tokens=40",), 8 * 64),
    ],
)
def test_the_cache_holds_the_rows_of_a_step_at_most_and_one_at_least(overrides: tuple[str, ...], tokens: int) -> None:
    """Eight prompts; a row of 4 + 8 tokens takes a block of 32."""
    assert plan_of(None, 1, VLLM, *overrides).placement["actor.rollout"].settings.generate_tokens == tokens


def test_the_replica_with_most_rows_counts() -> None:
    assert plan_of(UNEQUAL, 2, VLLM).placement["actor.rollout"].settings.generate_tokens == 6 * 32


def test_a_cut_distribution_goes_without_a_gate() -> None:
    assert "parity" not in models_by_operator(plan_of(None, 2, VLLM, "algorithm.top_p=0.9", IMPORTANCE, UNCOMPARED))


# --- the graph


def graph_of(*overrides: str, is_remote: bool) -> Graph:
    resolved = ResolvedSpec.of(spec_of(None, 2, *overrides))
    return with_rollout(resolved.graph, resolved.spec, is_remote)


def named(graph: Graph) -> dict[str, Operator]:
    assert len({operator.name for operator in graph.operators}) == len(graph.operators)
    assert len(graph.waves) == len(graph.operators), "an operator stands before a parent"
    return {operator.name: operator for operator in graph.operators}


GENERATED = (*TEXT, "response_mask", "finished", "policy_version")
PLAIN = ["generate", "logprobs", "ref_logprobs", "scores", "values", "advantages", "train_actor", "train_critic"]
COMPARED = [*PLAIN[:6], "parity", *PLAIN[6:]]
TOLD = ["generate", *PLAIN[2:6], "trainer_logprobs", "parity", *PLAIN[6:]]


@pytest.mark.parametrize("is_remote", [False, True])
def test_generation_by_transformers_changes_no_graph(is_remote: bool) -> None:
    assert graph_of(RECOMPUTE, is_remote=is_remote) == make_graph(spec_of())


@pytest.mark.parametrize(
    ("overrides", "is_remote", "names"),
    [
        ((VLLM,), False, COMPARED),
        ((VLLM, UNCOMPARED), False, PLAIN),
        ((VLLM,), True, TOLD),
        ((VLLM, UNCOMPARED), True, [name for name in PLAIN if name != "logprobs"]),
        ((IMPORTANCE, RECOMPUTE), False, PLAIN),
        ((IMPORTANCE, RECOMPUTE), True, PLAIN),
        ((VLLM, IMPORTANCE, RECOMPUTE), False, COMPARED),
        ((VLLM, IMPORTANCE, RECOMPUTE), True, COMPARED),
        ((VLLM, IMPORTANCE, UNCOMPARED, RECOMPUTE), True, PLAIN),
    ],
)
def test_the_operators_of_each_case(overrides: tuple[str, ...], is_remote: bool, names: list[str]) -> None:
    graph = graph_of(*overrides, is_remote=is_remote)
    assert list(named(graph)) == names
    plain = make_graph(spec_of())
    assert (graph.roles, graph.inputs, graph.evaluation) == (plain.roles, plain.inputs, plain.evaluation)


def test_an_engine_apart_tells_the_log_probs_itself_and_the_trained_copy_checks_them() -> None:
    operators = named(graph_of(VLLM, is_remote=True))
    assert operators["generate"].writes == (*GENERATED, "logprobs")
    trainer, gate = operators["trainer_logprobs"], operators["parity"]
    assert (trainer.kind, trainer.role, trainer.reads, trainer.writes) == ("forward", "actor", TEXT, (trainer.name,))
    assert (gate.kind, gate.role, gate.function) == ("combine", "actor", "parity")
    assert gate.reads == ("logprobs", "trainer_logprobs", "tokens", "response_mask") and gate.writes == ()
    assert trainer.on_trained and gate.on_trained and gate.barrier
    assert operators["advantages"] == named(make_graph(spec_of()))["advantages"]


def test_an_engine_beside_the_actor_is_compared_with_what_the_actor_computes_anyway() -> None:
    plain, operators = named(make_graph(spec_of())), named(graph_of(VLLM, is_remote=False))
    assert operators["generate"].writes == (*GENERATED, "rollout_logprobs")
    assert operators["parity"].reads == ("rollout_logprobs", "logprobs", "tokens", "response_mask")
    assert [name for name in plain if plain[name] != operators[name]] == ["generate"]


def test_weights_that_are_sent_in_16_bits_are_compared_with_those_that_are_trained() -> None:
    """The copy computes ``logprobs`` of rounded weights, and no training pass does it for the copy."""
    one = ("sync.dtype=bfloat16", "algorithm.num_mini_batches=1", "algorithm.epochs=1")
    operators = named(graph_of(*one, RECOMPUTE, is_remote=True))
    assert operators["parity"].reads == ("logprobs", "trainer_logprobs", "tokens", "response_mask")
    assert operators["trainer_logprobs"].on_trained and not operators["logprobs"].on_trained
    assert {"trainer_logprobs", "parity"} <= named(graph_of(*one, is_remote=True)).keys()
    assert "parity" not in named(graph_of(*one, is_remote=False))
    assert "parity" not in named(graph_of(*one, "rollout.parity=null", is_remote=True))
    parity = plan_of(SIX, 2, *one).spec.rollout.parity
    assert parity is not None and (parity.p999_difference, parity.mean_difference) == (1.0, 0.05)


@pytest.mark.parametrize("overrides", [(), (VLLM,)])
@pytest.mark.parametrize("is_remote", [False, True])
def test_a_correction_reads_both_log_probs(overrides: tuple[str, ...], is_remote: bool) -> None:
    operators = named(graph_of(IMPORTANCE, RECOMPUTE, *overrides, is_remote=is_remote))
    assert operators["generate"].writes == (*GENERATED, "rollout_logprobs")
    assert operators["logprobs"].on_trained
    assert {"logprobs", "rollout_logprobs"} <= set(operators["train_actor"].reads)
    reads = operators["advantages"].reads
    assert "rollout_logprobs" in reads and "logprobs" not in reads
    plain = named(make_graph(spec_of()))
    assert all(operators[name] == plain[name] for name in ("ref_logprobs", "scores", "values", "train_critic"))


def test_a_shared_reference_stays_the_actor_without_adapters() -> None:
    operators = named(graph_of(VLLM, *SHARED, is_remote=True))
    assert (operators["ref_logprobs"].role, operators["ref_logprobs"].adapters) == ("actor", False)
    assert not operators["ref_logprobs"].on_trained


# --- ranks of each operator


@pytest.mark.parametrize(
    ("placement", "overrides", "models"),
    [
        (None, (VLLM,), {"generate": "actor.rollout", "logprobs": "actor", "advantages": "actor", "parity": "actor"}),
        (
            SIX,
            (VLLM,),
            {
                "generate": "actor.rollout",
                "advantages": "actor.rollout",
                "values": "critic.shadow",
                "trainer_logprobs": "actor",
                "parity": "actor",
            },
        ),
        (
            SIX,
            (VLLM, IMPORTANCE, RECOMPUTE),
            {"generate": "actor.rollout", "logprobs": "actor", "advantages": "actor.rollout"},
        ),
        (
            SIX,
            (IMPORTANCE, RECOMPUTE),
            {"generate": "actor.shadow", "logprobs": "actor", "advantages": "actor.shadow"},
        ),
        ([0.5] * 5, (VLLM, *SHARED), {"ref_logprobs": "actor", "advantages": "actor.rollout"}),
        ([0.5] * 5, (VLLM, *SHARED, LAG), {"ref_logprobs": "actor", "advantages": "actor"}),
        ([1, 1, 1], (VLLM, *SHARED), {"generate": "actor.rollout", "ref_logprobs": "actor", "logprobs": "actor"}),
    ],
)
def test_the_copies_that_compute(placement: Any, overrides: tuple[str, ...], models: dict[str, str]) -> None:
    found = models_by_operator(plan_of(placement, 2, *overrides))
    assert models.items() <= found.items()
    assert found["train_actor"] == "actor"


def test_evaluations_generate_with_the_trained_copy() -> None:
    """Only rollouts that are trained on are drawn by the engine."""
    plan = plan_of(None, 2, VLLM, "eval={path: held_out.jsonl}")
    (evaluation,) = (x for x in plan.schedule.instructions if isinstance(x, Eval))
    assert [run.model for run in evaluation.runs if run.operator.kind == "generate"] == ["actor"]


@pytest.mark.parametrize("overrides", [(), (IMPORTANCE,), ("rollout.tp=2",), (*SHARED, IMPORTANCE), SHARED])
def test_with_lag_nothing_before_training_waits_for_it(overrides: tuple[str, ...]) -> None:
    """The engine's side reads nothing that the trained copy, a step behind, writes; nor does its own gate run ahead."""
    plan = plan_of([0.5] * (5 if "models.ref.share=actor" in overrides else 6), 4, VLLM, LAG, *overrides)
    training = set(plan.placement["actor"].ranks)
    late = {column for run in runs(plan) if run.lag for column in run.operator.writes}
    assert not [run.label for run in runs(plan) if not run.lag and late & set(run.operator.reads)]
    assert all((set(run.ranks) <= training) == bool(run.lag) for run in runs(plan))
    names = [run.operator.name for run in runs(plan) if run.lag]
    assert names[-2:] == ["train_actor", "train_critic"] and "parity" in names


# --- when engine and trainer are compared


@pytest.mark.parametrize("parity", [1, 2, 3, 10])
@pytest.mark.parametrize("sync", [1, 2, 3])
@pytest.mark.parametrize("lag", [0, 1])
@pytest.mark.parametrize("importance", [(), (IMPORTANCE,)])
def test_only_answers_of_the_newest_weights_are_compared(
    parity: int, sync: int, lag: int, importance: tuple[str, ...]
) -> None:
    """Batch b is drawn with the weights after k * floor(max(0, b - lag) / k) batches; the trained copy has seen b."""
    steps = 13
    settings = (f"rollout.parity.every={parity}", f"sync.every={sync}", f"schedule.lag={lag}", f"steps={steps}")
    plan = plan_of(SIX, 2, VLLM, *settings, *importance)
    newest = [b for b in range(steps) if sync * (max(0, b - lag) // sync) == b]
    # the first batch behind a sync is looked at besides
    wanted = [b for b in newest if b % parity == 0 or b == sync]
    for name in ("parity",) if importance else ("parity", "trainer_logprobs"):
        found = [
            step
            for _, step, x in plan.schedule.walk(0, steps)
            if isinstance(x, Run) and x.operator.name == name and x.model == "actor"
        ]
        assert found == wanted, name


def test_beside_the_actor_only_the_comparison_is_rare() -> None:
    plan = plan_of(None, 2, VLLM, "rollout.parity.every=2", "steps=5")
    due = {run.operator.name: [step for step in range(5) if run.due(step, 5)] for run in runs(plan)}
    assert due.pop("parity") == [0, 1, 2, 4]
    assert set(map(tuple, due.values())) == {(0, 1, 2, 3, 4)}


def test_the_printed_plan_says_how_often_they_are_compared() -> None:
    def line(*overrides: str) -> str:
        text = format_plan(plan_of(SIX, 2, VLLM, "steps=8", *overrides))
        return next(line for line in text.splitlines() if "parity on actor" in line)

    assert "at step 0 and 1, every 4 steps" in line("rollout.parity.every=4")
    assert "at step 0 and 3, every 6 steps" in line("rollout.parity.every=2", "sync.every=3")
    assert line().endswith("at step 0 and 1") and "at step 0  of the last batch" in line(LAG, "rollout.parity.every=1")
    assert "every" not in line("rollout.parity.every=1")


# --- chunks


def chunked(plan: Plan) -> set[str]:
    return {run.operator.name for run in runs(plan) if run.chunk is not None}


def test_training_streams_unless_the_trained_copy_must_score_before_it_changes() -> None:
    assert {"train_actor", "train_critic", "advantages"} <= chunked(plan_of(SIX, 2, VLLM, UNCOMPARED, *STREAM))
    for overrides in ((), (IMPORTANCE, UNCOMPARED), (IMPORTANCE,)):
        streamed = chunked(plan_of(SIX, 2, VLLM, *STREAM, *overrides))
        assert "train_actor" not in streamed
        assert {"generate", "advantages", "train_critic"} <= streamed


def ahead_of(plan: Plan) -> list[list[range]]:
    return [plan.ahead(run) for run in runs(plan) if run.operator.kind == "generate"]


@pytest.mark.parametrize("placement", [None, SIX])
def test_an_engine_may_begin_with_all_later_chunks(placement: Any) -> None:
    plan = plan_of(placement, 2, VLLM, *STREAM)
    assert ahead_of(plan) == [[range(n, n + 1) for n in range(chunk + 1, 4)] for chunk in range(4)]
    assert all(plan.ahead(run) == [] for run in runs(plan) if run.operator.kind != "generate")


def test_nothing_is_begun_that_the_engine_could_lose() -> None:
    """If memory is so short that the engine is offloaded between two chunks, it receives no chunk behind that."""
    peak = max(memory.peak_bytes for memory in plan_of(None, 2, VLLM, *STREAM).memories)
    tight = plan_of(None, 2, VLLM, *STREAM, f"cluster.memory_gb={0.5 * peak / 1e9}")
    later = ahead_of(tight)
    assert sum(map(len, later)) < 3 + 2 + 1 and later[-1] == []


def test_a_rank_does_what_it_can_before_it_waits_for_its_child() -> None:
    """A child decodes chunk 1 while its rank scores chunk 0; an engine in the rank itself generates first."""
    inline, child = (
        [(run.operator.name, run.chunk) for run in runs(plan_of(SIX, 2, VLLM, UNCOMPARED, *STREAM, process))]
        for process in ("rollout.process=inline", "rollout.process=child")
    )
    for names in (inline, child):
        assert names[0] == ("generate", 0)
    assert inline.index(("generate", 1)) < inline.index(("values", 0))
    assert child.index(("values", 0)) < child.index(("generate", 1)) < child.index(("values", 1))
    assert sorted(map(str, inline)) == sorted(map(str, child))


# --- the rest of the schedule


def test_what_is_synced_in_place_needs_no_group() -> None:
    purposes = {group.purpose for group in plan_of(None, 4, VLLM, "rollout.tp=2").groups}
    assert "sync actor" not in purposes
    shards = plan_of(None, 4, VLLM, "rollout.tp=2", "models.actor.zero=3")
    assert Group("sync actor", (0, 1, 2, 3)) in shards.groups
    assert "sync actor" in {group.purpose for group in plan_of(SIX, 4, VLLM).groups}


@pytest.mark.parametrize(("tp", "order"), [(1, (0, 1, 2, 3, 4, 5, 6, 7)), (2, (0, 2, 1, 3, 4, 6, 5, 7))])
def test_an_engine_in_place_keeps_what_its_ranks_train(tp: int, order: tuple[int, ...]) -> None:
    """Training with tp 4: each rank receives the share of split tensors in HybridFlow's table 2."""
    sizes = ("models.actor.init.num_attention_heads=4", "models.actor.init.hidden_size=16")
    plan = plan_of(None, 8, VLLM, *sizes, "models.actor.tp=4", f"rollout.tp={tp}")
    actor, engine = plan.placement["actor"], plan.placement["actor.rollout"]
    assert engine.ranks == order
    split = 4 * 16 * 16 + 3 * 16 * 16
    assert received_share(actor.layout, ParallelDims(tp)) == Fraction(4 - tp, 4 * tp)
    layers = [name for name, _ in plan.shapes["actor"].parameters if "_proj" in name]
    stored = {rank: plan.shapes["actor"].parts_on(actor, rank) for rank in actor.ranks}
    needed = {rank: plan.shapes["actor"].parts_on(engine, rank) for rank in actor.ranks}
    for rank in actor.ranks:
        missing = sum(
            needed[rank][name].num_elements - overlap(stored[rank][name], needed[rank][name]) for name in layers
        )
        assert missing == split * received_share(actor.layout, ParallelDims(tp))


def test_another_dtype_than_the_policys_is_warned_of() -> None:
    def warned(*overrides: str) -> list[str]:
        found = plan_of(None, 2, *overrides).placement.warnings
        return [each for each in found if each.startswith("rollout.dtype")]

    rounded = VLLM, "rollout.dtype=bfloat16", UNCOMPARED
    (warning,) = warned(*rounded)
    assert warning == (
        "rollout.dtype bfloat16 with float32 of models.actor samples from a policy that differs by rounding; "
        "algorithm.importance: {} corrects for it"
    )
    assert not warned(*rounded, IMPORTANCE)
    assert not warned(VLLM)
