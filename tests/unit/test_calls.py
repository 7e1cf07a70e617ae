"""Calls of a session without ranks: what they become, what is refused, and what they would take."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml
from small_runs import PPO, plan_of, whole_plan_of
from test_simulate import Fixed

from flexrlhf.errors import UserError
from flexrlhf.guideline.simulation.simulate import simulate
from flexrlhf.launch.session import Session
from flexrlhf.placement.protocols import TransferProtocol
from flexrlhf.plan.plan import Plan
from flexrlhf.report.metric_table import MetricTable
from flexrlhf.report.reported_run import plan_of_run
from flexrlhf.report.run_contents import METRICS_FILE, read_contents
from flexrlhf.strategies.calls import CalledStep, OperatorCall
from flexrlhf.strategies.instructions import Instruction, Move, Run

DYNAMIC_SAMPLING = [
    "algorithm={name: grpo, prompts_per_step: 8, samples_per_prompt: 2, dynamic_sampling: {rounds: 2}}",
    "models.critic=null",
]
PRETRAINED = "algorithm.ptx={path: texts.jsonl, coefficient: 0.5}"
PLACEMENTS = [([1, 1, 1, 1], 2), ([0.5] * 4, 2), ([1, 1, 0.5, 0.5], 4), ([0.5] * 6, 4)]


def begin(plan: Plan, before: CalledStep | None = None) -> CalledStep:
    return CalledStep.begin(plan.graph, plan.placement, plan.batch, before)


def call_all(plan: Plan, *without: str, before: CalledStep | None = None) -> CalledStep:
    """A step with calls of the operators in the order of the graph."""
    step = begin(plan, before)
    for operator in plan.graph.operators:
        if operator.name not in without:
            step.add(OperatorCall(operator.name, plan.batch.mini_batches))
    return step


def traffic(instructions: list[Instruction]) -> Counter[tuple[str, int, int]]:
    """Prompts by column and link that moves carry."""
    moves = [each for each in instructions if isinstance(each, Move)]
    found: Counter[tuple[str, int, int]] = Counter()
    for transfer in (transfer for move in moves for transfer in move.transfers):
        found[transfer.column, transfer.source, transfer.destination] += len(transfer.prompts)
    return found


@pytest.mark.parametrize("chunks", [1, 2])
@pytest.mark.parametrize(("vector", "devices"), PLACEMENTS)
def test_calls_in_the_order_of_the_graph_are_its_schedule(vector: list[float], devices: int, chunks: int) -> None:
    """Each rank receives the rows that the schedule brings it, and runs what the schedule has it run, chunk by chunk.
    From the second step on rows leave right behind the run that has written them."""
    plan = whole_plan_of(vector, devices, "algorithm.num_mini_batches=2", f"schedule.num_chunks={chunks}")
    first = call_all(plan)
    second, planned = call_all(plan, before=first).instructions, list(plan.schedule.instructions)
    for called in (first.instructions, second):
        runs = [{each for each in some if isinstance(each, Run)} for some in (called, planned)]
        assert runs[0] == runs[1]
        received = [Counter({(c, d): n for (c, _, d), n in traffic(some).items()}) for some in (called, planned)]
        assert received[0] == received[1]
    written: tuple[str, ...] = ()
    for each in second:
        if isinstance(each, Run):
            written = each.operator.writes
        elif isinstance(each, Move):
            assert set(each.columns) <= set(written)


def test_calls_on_parts_of_a_batch_are_the_chunks_of_a_schedule() -> None:
    """Rows of the second part are generated while others score the first."""
    settings = ("algorithm.num_mini_batches=4", "algorithm.whiten=mini_batch")
    plan = whole_plan_of([0.5] * 6, 4, *settings)
    chunked, step, parts = (
        whole_plan_of([0.5] * 6, 4, *settings, "schedule.num_chunks=2"),
        begin(plan),
        (range(2), range(2, 4)),
    )
    assert chunked.batch.num_chunks == 2
    for part in parts:
        for operator in plan.graph.operators:
            step.add(OperatorCall(operator.name, part))
        assert step.has("advantages", part) and step.has("advantages", plan.batch.mini_batches) == (part.start > 0)
    received = [
        Counter({(c, d): n for (c, _, d), n in traffic(list(some)).items()})
        for some in (step.instructions, chunked.schedule.instructions)
    ]
    assert received[0] == received[1]
    owned = step.owners("tokens", parts[1]).values()
    assert sorted(prompt for prompts in owned for prompt in prompts) == [4, 5, 6, 7]


def test_the_report_of_a_session_has_the_last_step_as_it_was_called(tmp_path: Path) -> None:
    plan = whole_plan_of([0.5] * 4, 2, "algorithm.num_mini_batches=2", f"runs={tmp_path}")
    before, everything, first = begin(plan), plan.batch.mini_batches, range(1)
    earlier = [OperatorCall(name, everything) for name in ("generate", "ref_logprobs")]
    for call in earlier:
        before.add(call)
    calls = [earlier[0], OperatorCall("values", first, parts=((0, 1, 2, 3),))]
    step, steps = begin(plan, before), (earlier, calls)
    with (tmp_path / "calls.jsonl").open("w") as file:
        for number, of_step in enumerate(steps):
            messages = [{"do": "call", **call.message} for call in of_step]
            file.write(json.dumps({"step": number, "calls": messages}) + "\n")
    (tmp_path / METRICS_FILE).write_text('{"step": 0}\n{"step": 1}\n')
    contents = replace(read_contents(tmp_path), spec=plan.spec)
    called, notes = plan_of_run(contents)
    assert called is not None and not notes
    listed = [each for each in called.schedule.instructions if isinstance(each, Run | Move)]
    labels = [each.label for call in calls for each in step.add(call)]
    assert [each.label for each in listed] == labels and listed[-1].chunk == 0
    # steps behind the last one of a session are the plan's
    later, _ = plan_of_run(replace(contents, rows=MetricTable([{"step": 2}])))
    assert later is not None and later.schedule == plan.schedule


def test_a_call_on_a_part_reads_that_part_alone() -> None:
    plan = whole_plan_of([1, 1, 1, 1], 2, "algorithm.num_mini_batches=2")
    step, first, second = begin(plan), range(1), range(1, 2)
    step.add(OperatorCall("generate", first))
    step.add(OperatorCall("scores", first))
    for call, sentence in (
        (OperatorCall("scores", second), "scores reads tokens, which mini-batch 1 does not have; call generate first"),
        (OperatorCall("generate", plan.batch.mini_batches), "generate has written tokens of this batch; use it"),
    ):
        with pytest.raises(UserError, match=sentence):
            step.add(call)
    with pytest.raises(UserError, match="no column 'scores'"):
        step.owners("scores", plan.batch.mini_batches)
    step.add(OperatorCall("generate", second))
    for name in ("scores", "values", "ref_logprobs", "logprobs"):
        for part in (first, second)[name == "scores" :]:
            step.add(OperatorCall(name, part))
    with pytest.raises(UserError, match="advantages needs all rows of a step at once, found mini-batch 1; call"):
        step.add(OperatorCall("advantages", second))


def test_rows_that_no_call_reads_do_not_travel() -> None:
    plan = whole_plan_of([0.5] * 4)
    without = ("values", "advantages", "train_actor", "train_critic")
    first = call_all(plan, *without)
    for step in (first, call_all(plan, *without, before=first)):
        columns = {column for column, _, _ in traffic(step.instructions)}
        assert "scores" not in columns and "tokens" in columns


@pytest.mark.parametrize("lag", [0, 1])
@pytest.mark.parametrize(("vector", "devices"), PLACEMENTS)
def test_a_traced_step_is_priced_as_the_planned_one(vector: list[float], devices: int, lag: int) -> None:
    """Under a lag with the calls that train on the batch once a newer one is there; rows leave before."""
    if lag and len(vector) < 6:
        return
    plan = whole_plan_of(vector, devices, f"schedule.lag={lag}")
    late = [each.operator.name for each in plan.schedule.instructions if isinstance(each, Run) and each.lag]
    step: CalledStep | None = None
    for _ in range(2):
        step = call_all(plan, *late, before=step)
        moves = step.overtake() if lag else []
        for name in late:
            step.add(OperatorCall(name, plan.batch.mini_batches))
    assert step is not None and bool(moves) == bool(lag)
    assert {each.lag for each in step.instructions if each.kind == "run"} == {0, lag}
    traced = replace(plan, schedule=plan.schedule.as_called(step.instructions, 0))
    assert simulate(traced, Fixed()).seconds == pytest.approx(simulate(plan, Fixed()).seconds, rel=0.1)


def test_calls_go_on_with_rows_of_the_step_before() -> None:
    plan = plan_of([1, 1, 1, 1], 2, "algorithm.num_mini_batches=2", "rollout.segment_tokens=2")
    before, first = begin(plan), range(1)
    before.add(OperatorCall("generate", first))
    step = begin(plan, before)
    step.add(OperatorCall("generate", first))
    for call, sentence in (
        (OperatorCall("generate", range(1, 2)), "before, for which generate has not been called on mini-batch 1; call"),
        (OperatorCall("generate", range(1, 2), parts=((4, 5), (6, 7))), "stay on their ranks; call it without a proto"),
    ):
        with pytest.raises(UserError, match=sentence):
            step.add(call)
    # that step goes without
    before.end()
    assert step.add(OperatorCall("generate", range(1, 2)))


def test_rows_of_two_responses_go_on_where_both_are_generated() -> None:
    """On ranks that are split otherwise than those that join them: these move in the first step, too."""
    remax = "algorithm={name: remax, prompts_per_step: 8, num_mini_batches: 2}"
    plan = plan_of([1, 1, 1], 2, remax, "rollout.segment_tokens=2")
    own = TransferProtocol("uneven", lambda _, numbers: [numbers[:-1], numbers[-1:]])
    layout = replace(plan.placement.layout_of(plan.graph.producers["tokens"]), protocol=own)
    plan = replace(plan, placement=replace(plan.placement, layouts={"generate": layout}))
    before = call_all(plan, *(each.name for each in plan.graph.operators[2:]))
    step = begin(plan, before)
    with pytest.raises(UserError, match="generate goes on .* for which whole has not been called on mini-batch 0; "):
        step.add(OperatorCall("generate", plan.batch.mini_batches))
    moved = traffic(before.add(OperatorCall("whole", plan.batch.mini_batches)))
    assert moved["present", 1, 0] == moved["tokens", 0, 1] > 0
    assert step.add(OperatorCall("generate", plan.batch.mini_batches))


def test_wrong_calls_are_refused() -> None:
    plan = whole_plan_of(None, 2, "algorithm.num_mini_batches=4")
    everything = plan.batch.mini_batches
    step = begin(plan)
    for call, sentence in (
        (
            OperatorCall("advantages", everything),
            r"advantages reads \w+, which this batch does not have; call \w+ first",
        ),
        (OperatorCall("value", everything), r"no operator 'value' \(did you mean 'values'\?\); there are generate, "),
        (OperatorCall("generate", everything, "policy_loss"), "generate has no loss, found 'policy_loss'"),
        (
            OperatorCall("train_actor", everything, "policy_los"),
            r"no loss 'policy_los' \(did you mean 'policy_loss'\?\)",
        ),
        (OperatorCall("values", everything, part="loss"), "values has no loss; a training has one"),
        (OperatorCall("train_actor", everything, "ptx"), "train_actor has no pretraining texts; set algorithm.ptx"),
    ):
        with pytest.raises(UserError, match=sentence):
            step.add(call)
    step.add(OperatorCall("generate", everything))
    with pytest.raises(UserError, match="generate has written tokens of this batch; use it"):
        step.add(OperatorCall("generate", everything))
    with pytest.raises(UserError, match=r"no column 'score' \(did you mean|no column 'score'; it has prompts"):
        step.owners("score", everything)


def test_a_loss_is_computed_on_the_ranks_that_train_and_leaves_rows_to_be_trained_on() -> None:
    plan = whole_plan_of([0.5] * 6, 4, "algorithm.num_mini_batches=2", PRETRAINED)
    step = begin(plan)
    for name in ("generate", "logprobs", "values", "ref_logprobs", "scores", "advantages"):
        step.add(OperatorCall(name, plan.batch.mini_batches))
    for loss, is_read in (("", True), ("ptx", False)):
        *moves, run = step.add(OperatorCall("train_actor", range(1, 2), loss, part="loss"))
        assert isinstance(run, Run) and (run.operator.kind, run.operator.call) == ("loss", "forward")
        assert run.ranks == plan.placement["actor"].ranks and run.mini_batches == range(1, 2)
        assert ("advantages" in run.operator.reads) == is_read and "tokens.ptx" in run.operator.reads
    assert not moves
    *_, train = step.add(OperatorCall("train_actor", range(1, 2)))
    assert isinstance(train, Run) and train.operator in plan.graph.operators


def test_gradients_of_neighbouring_parts_await_an_optimizer_step() -> None:
    plan = whole_plan_of([0.5] * 6, 4, "algorithm.num_mini_batches=4")
    step = call_all(plan, "train_actor", "train_critic")
    for numbers in (range(1), range(1, 2)):
        *_, run = step.add(OperatorCall("train_actor", numbers, part="backward"))
        assert isinstance(run, Run) and run.operator.call == "train" and run.ranks == plan.placement["actor"].ranks
    step.add(OperatorCall("train_critic", range(1)))
    for call, sentence in (
        (
            OperatorCall("train_actor", range(1)),
            "train_actor with gradients of train_actor on mini-batches 0 to 1; call",
        ),
        (
            OperatorCall("train_actor", range(3, 4), part="backward"),
            "and of train_actor on mini-batch 3; add neighbour",
        ),
    ):
        with pytest.raises(UserError, match=sentence):
            step.add(call)
    with pytest.raises(
        UserError, match=r"optim_step\('train_critic'\) without a loss; call forward_backward before it"
    ):
        step.added_to("train_critic")
    with pytest.raises(UserError, match="the step ends with gradients of train_actor on mini-batches 0 to 1; call"):
        step.check_ended()
    *_, run = step.add(OperatorCall("train_actor", step.added_to("train_actor"), part="step"))
    assert isinstance(run, Run) and run.mini_batches == range(2)
    step.check_ended()
    traced = replace(plan, schedule=plan.schedule.as_called(step.instructions, 0))
    assert simulate(traced, Fixed()).seconds > 0


def test_rows_of_a_call_are_where_a_program_puts_them() -> None:
    """Those of its mini-batches; the next call has the planned ones."""
    plan = whole_plan_of([1, 1, 1, 1], 2, "algorithm.num_mini_batches=2", PRETRAINED)
    step, everything = begin(plan), plan.batch.mini_batches
    step.add(OperatorCall("generate", everything))
    *moves, run = step.add(OperatorCall("values", everything, parts=((0, 2, 4, 6), (1, 3, 5, 7))))
    assert isinstance(run, Run) and plan.batch.prompts_on(run.layout, 1, everything) == (1, 3, 5, 7)
    assert traffic(moves)["tokens", 0, 1] == traffic(moves)["tokens", 1, 0] == 2
    assert not step.add(OperatorCall("scores", everything))[:-1]
    *_, run = step.add(OperatorCall("train_actor", range(1), "ptx", part="loss", parts=((3,), (0, 1, 2))))
    assert isinstance(run, Run) and plan.batch.prompts_on(run.layout, 0, everything) == (3, 4, 5)
    assert OperatorCall.of(json.loads(json.dumps(OperatorCall("values", everything, parts=((1,), ())).message))).parts
    # numbers of prompts, of which each has two places
    plan = plan_of([1, 1, 1, 1], 2, "algorithm.num_mini_batches=2", "rollout.segment_tokens=4")
    step = begin(plan)
    step.add(OperatorCall("generate", everything))
    *_, run = step.add(OperatorCall("values", range(1), parts=((0, 2), (1, 3))))
    parts = [plan.batch.prompts_on(run.layout, rank, everything) for rank in (0, 1)] if isinstance(run, Run) else []
    assert parts == [(0, 1, 4, 5, 8, 9, 10, 11), (2, 3, 6, 7, 12, 13, 14, 15)]


def test_every_row_of_a_column_has_one_owner() -> None:
    plan = plan_of([1, 1, 0.5, 0.5], 4)
    step = begin(plan)
    step.add(OperatorCall("generate", plan.batch.mini_batches))
    for column in ("tokens", "prompts"):
        owned = [prompt for prompts in step.owners(column, plan.batch.mini_batches).values() for prompt in prompts]
        assert sorted(owned) == list(range(plan.batch.num_prompts))


@pytest.mark.parametrize(
    ("machines", "sentence"),
    [
        ({"nnodes": 2}, "--rdzv-endpoint: missing; several nodes need HOST:PORT of node 0"),
        ({"nnodes": 3, "rdzv_endpoint": "a:1"}, "--nnodes 3 does not divide the 4 devices of the cluster"),
        ({"rdzv_endpoint": "a:1"}, "--rdzv-endpoint a:1: goes with --nnodes of 2 or more, found 1"),
    ],
    ids=["no endpoint", "unequal parts", "one machine"],
)
def test_machines_of_a_session_that_do_not_fit_are_refused(
    machines: dict[str, Any], sentence: str, tmp_path: Path
) -> None:
    path = tmp_path / "run.yaml"
    path.write_text(yaml.safe_dump(PPO))
    with pytest.raises(UserError, match=f"^{sentence}"):
        Session(path, [1, 1, 1, 1], devices=4, **machines)


def test_several_processes_of_a_program_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As srun and mpirun start them; a task that is given the other nodes is the first one's."""
    path = tmp_path / "run.yaml"
    path.write_text(yaml.safe_dump(PPO))
    with monkeypatch.context() as mpi:
        mpi.setenv("OMPI_COMM_WORLD_SIZE", "2")
        with pytest.raises(UserError, match="^mpirun: .* each of these processes would start all ranks"):
            Session(path, [1, 1, 1, 1], devices=2)
    step = {"STEP_ID": "0", "STEP_NUM_NODES": "2", "STEP_NUM_TASKS": "2", "JOB_ID": "7", "NODEID": "0"}
    for name, value in {**step, "STEP_NODELIST": "a[1-2]"}.items():
        monkeypatch.setenv(f"SLURM_{name}", value)
    with pytest.raises(
        UserError, match="^session: srun has started this program on 2 nodes, and it runs on one; start"
    ):
        Session(path, [1, 1, 1, 1], devices=2)
    assert Session(path, [1, 1, 1, 1], devices=2, nnodes=2, rdzv_endpoint="a1:29500").plan.cluster.num_nodes == 2


def test_a_program_takes_prompts_itself(tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    path.write_text(yaml.safe_dump(PPO | {"algorithm": {**PPO["algorithm"], "num_mini_batches": 4}}))
    with pytest.raises(
        UserError, match="algorithm.dynamic_sampling: in a session a program takes further prompts itse"
    ):
        Session(path, devices=2, overrides=DYNAMIC_SAMPLING)
    with pytest.raises(UserError, match="its ranks have not started; use it in a with statement"):
        next(Session(path, [1, 1, 1, 1], devices=1).prompts())
    with pytest.raises(UserError, match="1 prompts for step 0; algorithm.prompts_per_step is 8, give as many"):
        next(Session(path, [1, 1, 1, 1], devices=1).prompts([["one"]]))
