"""Transfer protocols: rows that a function splits over replicas, HybridFlow's by name, a sentence for each mistake."""

from __future__ import annotations

import re
from collections import defaultdict
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from small_runs import TINY, plan_of, whole_plan_of
from test_simulate import Fixed

from flexrlhf.comm.world import World
from flexrlhf.errors import UserError
from flexrlhf.guideline.simulation.simulate import simulate
from flexrlhf.placement.protocols import _splits
from flexrlhf.plan.plan import Plan
from flexrlhf.plan.plan_text import format_plan
from flexrlhf.runs.fingerprints import Fingerprints
from flexrlhf.strategies.instructions import Move, Run
from flexrlhf.trainer.rank_runs import check_splits
from flexrlhf.user_code import planning_calls

SPLITS = Path(__file__).parents[1] / "fixtures" / "splits.py"
PAIRS = "algorithm.num_mini_batches=2"


def protocols(**given: str) -> str:
    named = {
        name: f"{SPLITS}:{value}" if value in ("round_robin", "last_alone") else value for name, value in given.items()
    }
    return f"algorithm.protocols={{{', '.join(f'{name}: {value}' for name, value in named.items())}}}"


def split(plan: Plan, operator: str) -> dict[int, tuple[int, ...]]:
    run = next(each for each in plan.schedule.instructions if isinstance(each, Run) and each.operator.name == operator)
    return {rank: plan.batch.prompts_on(run.layout, rank, run.mini_batches) for rank in run.ranks}


def test_each_mini_batch_of_an_operator_is_split_by_its_function() -> None:
    plan = whole_plan_of([1, 1, 1, 1], 2, PAIRS, protocols(values="round_robin", train_critic="last_alone"))
    assert split(plan, "values") == {0: (0, 2, 4, 6), 1: (1, 3, 5, 7)}
    assert split(plan, "train_critic") == {0: (), 1: tuple(range(8))}
    assert split(plan, "generate") == {0: (0, 1, 4, 5), 1: (2, 3, 6, 7)}


def test_rows_move_to_the_ranks_that_the_function_gives_them_and_no_others() -> None:
    """Of models on all ranks no rows would move without it."""
    plan = whole_plan_of([1, 1, 1, 1], 2, PAIRS, protocols(values="round_robin"))
    moves = [each for each in plan.schedule.instructions if isinstance(each, Move)]
    there, back = {(0, 1): (1, 5), (1, 0): (2, 6)}, {(1, 0): (1, 5), (0, 1): (2, 6)}
    carried: dict[str, dict[tuple[int, int], tuple[int, ...]]] = defaultdict(dict)
    for transfer in (each for move in moves for each in move.transfers):
        carried[transfer.column][transfer.source, transfer.destination] = transfer.prompts
    assert carried == {"tokens": there, "attention_mask": there, "values": back}
    sent = sum(map(plan.traffic.move_bytes, moves))
    assert sent == 4 * sum(map(plan.lengths.row_bytes, carried))


def test_the_plan_prints_the_split_and_the_blocks_that_it_cuts() -> None:
    text = format_plan(whole_plan_of([1, 1, 1, 1], 2, protocols(values="round_robin", scores="last_alone")))
    for line in (rf"values +4 on each of 2 replicas, by protocol {SPLITS}:round_robin", r"scores +0, 8 on each of 2"):
        assert re.search(f"rows of {line}", text), line
    assert "in a mini-batch, cut by replicas of values\n" in text


def test_a_simulation_prices_the_fullest_replica() -> None:
    for given, rows in (({}, 4), ({"generate": "last_alone"}, 8)):
        costs = Fixed()
        simulate(whole_plan_of([1, 1, 1, 1], 2, protocols(**given)), costs)
        assert {call.rows for call, _ in costs.asked if call.kind == "generate"} == {rows}


def test_rows_that_a_protocol_gives_to_one_rank_have_a_slot_each() -> None:
    segments = ("rollout.segment_tokens=3", "rollout.caches=kept")
    plan = plan_of(None, 2, protocols(generate="last_alone"), *segments)
    (kept,), layout = plan.kept_slots.values(), plan.placement.layout_of(plan.graph.operators[0])
    rows = [len(plan.batch.rows(plan.batch.prompts_on(layout, rank, plan.batch.mini_batches))) for rank in (0, 1)]
    assert kept.rows == max(rows) > min(rows) and sum(rows) == plan.batch.num_rows


def test_files_of_protocols_are_compared_between_machines() -> None:
    plan = plan_of(None, 2, protocols(generate="round_robin"))
    assert any(
        key.startswith("algorithm.protocols.generate") and "splits.py" in key for key in Fingerprints([plan]).inputs()
    )


@pytest.mark.parametrize(
    ("body", "sentence"),
    [
        ("return [prompts[:3], prompts[4:]]", "prompt 3 of 0-7 is on none of rank 0, rank 1"),
        ("return [prompts[:5], prompts[4:]]", "prompt 4 is on rank 0 and on rank 1; each row is computed once"),
        ("return [prompts, [8]]", "prompt 8 of rank 1 is not in 0-7"),
        ("return [prompts]", "expected a list of prompts for each of 2 replicas, found 1 lists"),
        ("return [list(map(str, prompts)), []]", "expected whole numbers of prompts, found '0'"),
        ("return [list(map(float, prompts)), []]", "expected whole numbers of prompts, found 0.0"),
        ("import os; os._exit(0)", "ended the process that called it, exit code 0"),
        ("import os; os.kill(os.getpid(), 9)", "ended the process that called it, killed by SIGKILL"),
        ("return replicas[9]", r"raised IndexError: tuple index out of range \(own.py, line 2\)"),
    ],
)
def test_a_function_that_does_not_split_the_rows_is_refused(body: str, sentence: str, tmp_path: Path) -> None:
    file = tmp_path / "own.py"
    file.write_text(f"def split(replicas, prompts):\n    {body}\n")
    with pytest.raises(UserError, match=f"protocol .*own.py:split:? {sentence}"):
        plan_of(None, 2, protocols(generate=f"{file}:split"))


@pytest.mark.parametrize(
    "order",
    [
        "__import__('random').sample(prompts, len(prompts))",
        "list(map(int, set(map(str, prompts))))",
        "prompts if len(calls) % 2 else prompts[::-1]",
    ],
    ids=["random", "set", "counter"],
)
def test_a_function_of_other_things_than_its_arguments_is_refused(order: str, tmp_path: Path) -> None:
    """Numpy's integers are numbers of prompts; the order of processes, and of calls, is no argument."""
    file = tmp_path / "own.py"
    text = "import numpy\ncalls = []\ndef split(replicas, prompts):\n    calls.append(1)\n    order = list({})\n"
    text += "    return numpy.array([order[:4], order[4:]])\n"
    file.write_text(text.format(order))
    with pytest.raises(UserError, match=r"own.py:split returns \[.*\] and \[.*\] for the same prompts 0-7; its result"):
        plan_of(None, 2, protocols(generate=f"{file}:split"))
    file.write_text(text.format("sorted(prompts)"))
    assert split(plan_of(None, 2, protocols(generate=f"{file}:split")), "generate")[0] == (0, 1, 2, 3)


def test_ranks_that_split_rows_in_other_ways_stop(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file, store = tmp_path / "own.py", dist.HashStore()
    file.write_text(
        "import os\ndef split(replicas, prompts):\n"
        "    first = int(os.environ['FIRST'])\n    return [prompts[:first], prompts[first:]]\n"
    )
    for rank, first in enumerate("334"):
        monkeypatch.setenv("FIRST", first)
        # as another process, of a rank
        _splits.cache_clear()
        plan = plan_of(None, 2, protocols(generate=f"{file}:split"))
        world = World(rank, 3, store, torch.device("cpu"), "gloo", host=f"host-{rank}")
        if rank < 2:
            check_splits(plan, world)
            continue
        sentence = (
            r"algorithm.protocols.generate: rank 2 \(host host-2\) splits .* as \[\[\[0, 1, 2, 3\], .*, rank 0 as "
        )
        with pytest.raises(UserError, match=sentence):
            check_splits(plan, world)


def test_a_function_that_does_not_return_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(planning_calls, "PLANNING_SECONDS", 1.0)
    file = tmp_path / "own.py"
    file.write_text("import time\ndef split(replicas, prompts):\n    time.sleep(1000)\n")
    with pytest.raises(UserError, match="protocol .*own.py:split has not returned within 1 s"):
        plan_of(None, 2, protocols(generate=f"{file}:split"))


TP_2, ON_ONE = ("models.actor.tp=2",), "placement={actor: 1, critic: {ranks: [0]}, ref: 1, reward: {ranks: [1]}}"
HYBRID = "rollout={engine: torch, tp: 1}"
STAGED = (f"models.actor={{engine: megatron, pp: 2, init: {TINY | {'num_hidden_layers': 2}}}}", HYBRID)
REFUSED = {
    "dp_proto": "a replica of its model has 2 ranks, which compute the same rows; use 3d_proto",
    "one_to_all": "its model has 2 replicas, which would each compute every row; use tp 2",
    "3d_pp_only": "its model has 2 replicas, which would each compute every row; use tp 2",
    "3d_all_micro_dp": "it has tp 2 in replicas that are not parts of those that train with tp 2",
    "pp_as_dp": "it has pp 1 in replicas that are not parts of those that train with pp 1",
    "all_to_all": "generate does not write prompt 4 on rank 0; give both one layout",
    "rank_zero": "its model is on ranks 0-1; place it on one",
    "dp_prot": "no protocol 'dp_prot' (did you mean 'dp_proto'?); there are one_to_all, 3d_proto",
}


@pytest.mark.parametrize(
    ("protocol", "operator", "changes", "is_its_layout"),
    [
        ("3d_proto", "train_actor", TP_2, True),
        ("dp_proto", "train_actor", (), True),
        ("dp_proto", "train_actor", TP_2, False),
        ("one_to_all", "train_actor", TP_2, True),
        ("one_to_all", "values", (), False),
        ("3d_pp_only", "train_actor", STAGED, True),
        ("3d_pp_only", "values", (), False),
        ("3d_all_micro_dp", "generate", (*TP_2, HYBRID), True),
        ("3d_all_micro_dp", "generate", TP_2, False),
        ("pp_as_dp", "generate", STAGED, True),
        ("pp_as_dp", "generate", (), False),
        ("all_to_all", "values", (), True),
        ("all_to_all", "values", ("models.critic.tp=2",), False),
        ("rank_zero", "values", (ON_ONE,), True),
        ("rank_zero", "values", (), False),
        ("dp_prot", "values", (), False),
    ],
)
def test_a_protocol_of_hybridflow_is_a_layout(
    protocol: str, operator: str, changes: tuple[str, ...], is_its_layout: bool
) -> None:
    """Its name changes nothing of an operator that has the layout, and is refused for others."""
    given = protocols(**{operator: protocol})
    if is_its_layout:
        assert plan_of(None, 2, *changes, given).schedule == plan_of(None, 2, *changes).schedule
        return
    with pytest.raises(UserError, match=rf"algorithm.protocols.{operator}: .*{re.escape(REFUSED[protocol])}"):
        plan_of(None, 2, *changes, given)
