"""The list of instructions: order, moves, chunks, lag, syncs, groups, and what overlaps."""

from __future__ import annotations

import os
from collections import defaultdict
from dataclasses import replace
from itertools import pairwise
from os.path import realpath
from pathlib import Path

import pytest
from small_runs import plan_of, whole_plan_of

from flexrlhf.config.model_settings import ModelSpec
from flexrlhf.config.spec import Spec
from flexrlhf.config.spec_file import load_spec
from flexrlhf.data import quickstart
from flexrlhf.operators.graph import Operator
from flexrlhf.placement.layout import BatchShape, Layout
from flexrlhf.plan.overlap import overlapping_operators
from flexrlhf.plan.pipeline import make_plan, make_plans
from flexrlhf.plan.plan import Plan
from flexrlhf.plan.plan_text import format_plan
from flexrlhf.strategies.instructions import Eval, Instruction, Move, Run, Save, Sync
from flexrlhf.text import rank_marks, span_of

HERE = Path(__file__).parent
CONFIGS = HERE.parents[1] / "configs"
UPDATE = os.environ.get("FLEXRLHF_UPDATE_SNAPSHOTS") == "1"

SIX = [0.5] * 6
SIX_APART = [0.25] * 6
CHUNKS = ("algorithm.num_mini_batches=4", "schedule.num_chunks=4")
STREAM = (*CHUNKS, "algorithm.whiten=mini_batch")
LAG = "schedule.lag=1"
OPERATORS = [
    "generate on actor",
    "logprobs on actor",
    "ref_logprobs on ref",
    "scores on reward",
    "values on critic",
    "advantages on actor",
    "train_actor on actor",
    "train_critic on critic",
]


def runs(plan: Plan) -> list[Run]:
    return [x for x in plan.schedule.instructions if isinstance(x, Run)]


def moves(plan: Plan) -> list[Move]:
    return [x for x in plan.schedule.instructions if isinstance(x, Move)]


# --- the order


def test_all_moves_of_a_wave_stand_before_its_runs() -> None:
    """Else a rank at the second move would wait for one that still runs the first reader."""
    for plan in (whole_plan_of([1, 1, 0.5, 0.5], 2), whole_plan_of(SIX_APART, 4), whole_plan_of([0.5] * 4, 4)):
        waves = plan.graph.waves
        last_wave = 0
        for instruction in plan.schedule.instructions:
            if isinstance(instruction, Run):
                assert waves[instruction.operator.name] >= last_wave
                last_wave = waves[instruction.operator.name]
            elif isinstance(instruction, Move):
                after = plan.schedule.instructions[plan.schedule.instructions.index(instruction) :]
                next_run = next(x for x in after if isinstance(x, Run))
                assert waves[next_run.operator.name] > last_wave


# --- lag


@pytest.mark.parametrize("segments", [(), ("rollout.segment_tokens=3",)])
def test_prompts_are_taken_by_scores_of_ranks_that_do_not_train(segments: tuple[str, ...]) -> None:
    """The attempts of dynamic sampling need the scores of the newest batch, and with segments of the one before."""
    placement = {"actor.shadow": {"ranks": [1]}, **{name: {"ranks": [0]} for name in ("actor", "ref", "reward")}}
    settings = (LAG, "algorithm={name: grpo, dynamic_sampling: {rounds: 2}}", *segments)
    apart = whole_plan_of({**placement, "reward": {"ranks": [1]}}, 2, *settings)
    assert {run.operator.name for run in runs(apart) if run.lag} == {"ref_logprobs", "advantages", "train_actor"}


@pytest.mark.parametrize(("placement", "devices"), [(SIX, 2), (SIX, 4), (SIX_APART, 4)])
@pytest.mark.parametrize("chunks", [(), CHUNKS, STREAM])
@pytest.mark.parametrize("lag", [1, 4])
def test_with_lag_only_new_rows_and_syncs_join_the_sides(
    placement: list[float], devices: int, chunks: tuple[str, ...], lag: int
) -> None:
    plan = whole_plan_of(placement, devices, f"schedule.lag={lag}", "steps=9", *chunks)
    training = {rank for name in ("actor", "critic") for rank in plan.placement[name].ranks}

    def joins(instruction: Instruction) -> bool:
        return bool(training & set(instruction.ranks)) and bool(set(instruction.ranks) - training)

    joining = [x for x in plan.schedule.instructions if joins(x)]
    assert {(type(x), x.lag) for x in joining} == {(Move, 0), (Sync, lag)}
    rest = [x for x in plan.schedule.instructions if not joins(x)]
    # rows leave behind all training, so that what trains does not wait for them
    last = max(i for i, x in enumerate(plan.schedule.instructions) if isinstance(x, Run) and x.lag)
    assert all(i > last for i, x in enumerate(plan.schedule.instructions) if isinstance(x, Move) and joins(x))
    assert {x.lag for x in rest if set(x.ranks) <= training} == {lag}
    assert {x.lag for x in rest if not set(x.ranks) & training} == {0}
    assert plan.schedule.lag == lag


def test_with_lag_syncs_stand_behind_all_training_unless_they_overlap_it() -> None:
    plan = whole_plan_of(SIX_APART, 4, LAG, "sync.overlap=false")
    kinds = [type(x).__name__ for x in plan.schedule.instructions]
    assert kinds[-4:] == ["Sync", "Sync", "Save", "Save"] and kinds.count("Sync") == 2
    early = [x.label for x in whole_plan_of(SIX_APART, 4, LAG).schedule.instructions if x.ranks[0] < 2]
    place = early.index("train_actor on actor")
    assert early[place : place + 2] == ["train_actor on actor", "weights actor -> actor.shadow"]


@pytest.mark.parametrize(
    ("settings", "overlaps"),
    [
        ((), False),
        ((LAG,), True),
        (("cluster={nodes: [{count: 2, devices: 2}]}",), True),
        (("cluster={nodes: [{count: 2, devices: 2}]}", "sync.overlap=false"), False),
        (("sync.overlap=true",), True),
    ],
    ids=str,
)
def test_syncs_overlap_where_that_is_worth_memory(settings: tuple[str, ...], overlaps: bool) -> None:
    found = [x for x in whole_plan_of(SIX_APART, 4, *settings).schedule.instructions if isinstance(x, Sync)]
    assert [x.overlaps for x in found] == [overlaps, overlaps]


def test_with_lag_a_rank_walks_batches_behind_each_other() -> None:
    plan = whole_plan_of(SIX, 2, LAG)
    labels = [(step, x.label) for _, step, x in plan.schedule.walk(0, steps=2) if isinstance(x, Run)]
    late = ["advantages on actor", *OPERATORS[6:]]
    assert labels == [(step, label) for step in (0, 1) for label in late]
    generated = [(loop // len(plan.schedule.instructions), step) for loop, step, x in plan.schedule.walk(1, 2)]
    assert generated[0] == (0, 0)
    assert generated[-1] == (2, 1)


@pytest.mark.parametrize("rank", range(4))
def test_the_walk_of_a_rank_is_ordered_and_names_it(rank: int) -> None:
    plan = whole_plan_of(SIX_APART, 4, LAG, "sync.every=2")
    walked = list(plan.schedule.walk(rank, steps=5))
    assert [position for position, _, _ in walked] == sorted({position for position, _, _ in walked})
    assert all(rank in x.ranks and 0 <= step < 5 for _, step, x in walked)


# --- chunks and barriers


def chunks_of(plan: Plan) -> dict[str, list[int | None]]:
    chunks: dict[str, list[int | None]] = defaultdict(list)
    for run in runs(plan):
        chunks[run.operator.name].append(run.chunk)
    return dict(chunks)


INFERENCE = ("generate", "logprobs", "ref_logprobs", "scores", "values")
TRAINING = ("train_actor", "train_critic")
BARRIERS = [
    ((), ()),
    (("algorithm.whiten=mini_batch",), ("advantages", *TRAINING)),
    (("algorithm.whiten=none",), ("advantages", *TRAINING)),
    (("algorithm.whiten=mini_batch", "algorithm.epochs=2"), ("advantages",)),
    (("algorithm.epochs=2",), ()),
]


@pytest.mark.parametrize(("settings", "streamed"), BARRIERS)
@pytest.mark.parametrize(("placement", "devices"), [([1] * 4, 2), ([1, 1, 0.5, 0.5], 2), (SIX, 2), (SIX_APART, 4)])
def test_chunks_end_at_a_barrier(
    placement: list[float], devices: int, settings: tuple[str, ...], streamed: tuple[str, ...]
) -> None:
    """Without a shadow a chunk must not be generated by weights that another chunk has trained."""
    plan = whole_plan_of(placement, devices, *CHUNKS, *settings)
    chunked = {*INFERENCE, *streamed} - (set() if plan.placement.shadows else set(TRAINING))
    assert chunks_of(plan) == {name: [0, 1, 2, 3] if name in chunked else [None] for name in chunks_of(plan)}


def test_the_plan_says_what_a_barrier_keeps_from_streaming() -> None:
    assert "not chunked: advantages, train_actor, train_critic" in format_plan(whole_plan_of(SIX, 2, *CHUNKS))
    assert "not chunked" not in format_plan(whole_plan_of(SIX, 2, *STREAM))


def test_a_chunk_is_generated_ahead_and_trained_before_later_ones_are_scored() -> None:
    order = {(run.operator.name, run.chunk): i for i, run in enumerate(runs(whole_plan_of(SIX, 2, *STREAM)))}
    assert order["generate", 1] < order["logprobs", 0]
    assert order["generate", 2] < order["advantages", 0] < order["logprobs", 1]
    assert order["generate", 3] < order["train_actor", 0] < order["advantages", 1] < order["logprobs", 2]


def test_columns_leave_right_behind_the_runs_that_wrote_them() -> None:
    """Else the next chunk's generation would hold back what other ranks wait for."""
    instructions = whole_plan_of(SIX_APART, 4, *STREAM).schedule.instructions
    for earlier, move in pairwise(instructions):
        if isinstance(earlier, Run) and isinstance(move, Move):
            assert move.chunk == earlier.chunk and set(move.columns) <= columns_of_wave(instructions, earlier)


def columns_of_wave(instructions: tuple[Instruction, ...], run: Run) -> set[str]:
    """What the unbroken row of runs that ends with ``run`` wrote."""
    columns: set[str] = set()
    for instruction in instructions[instructions.index(run) :: -1]:
        if not isinstance(instruction, Run) or instruction.chunk != run.chunk:
            break
        columns |= set(instruction.operator.writes)
    return columns


def rows_by_operator(plan: Plan) -> dict[tuple[str, int], set[int]]:
    rows: dict[tuple[str, int], set[int]] = defaultdict(set)
    for run in runs(plan):
        for rank in run.ranks:
            held = plan.batch.prompts_on(plan.placement[run.model].layout, rank, run.mini_batches, run.attempt)
            assert not rows[run.operator.name, rank] & set(held), "a row is computed twice"
            rows[run.operator.name, rank] |= set(held)
    return rows


def rows_by_move(plan: Plan) -> list[tuple[str, int, int, int]]:
    return sorted((t.column, t.source, t.destination, p) for m in moves(plan) for t in m.transfers for p in t.prompts)


@pytest.mark.parametrize(("placement", "devices"), [([1] * 4, 2), ([1, 1, 0.5, 0.5], 4), (SIX, 4), (SIX_APART, 4)])
@pytest.mark.parametrize("whiten", ["batch", "mini_batch"])
def test_chunks_change_no_row(placement: list[float], devices: int, whiten: str) -> None:
    plans = [
        whole_plan_of(
            placement,
            devices,
            "algorithm.prompts_per_step=13",
            "algorithm.num_mini_batches=4",
            f"schedule.num_chunks={num_chunks}",
            f"algorithm.whiten={whiten}",
        )
        for num_chunks in (1, 2, 4)
    ]
    assert rows_by_operator(plans[0]) == rows_by_operator(plans[1]) == rows_by_operator(plans[2])
    assert rows_by_move(plans[0]) == rows_by_move(plans[1]) == rows_by_move(plans[2])


# --- periodic instructions


SYNC = Sync(ranks=(0,), source="actor", destination="actor.shadow")
PARITY = Operator("parity", "combine", "actor", ())
GATE = Run(ranks=(0,), operator=PARITY, model="actor", layout=Layout((0,)), mini_batches=range(1))


@pytest.mark.parametrize(
    ("instruction", "steps", "due"),
    [
        (SYNC, 4, [0, 1, 2, 3]),
        (replace(SYNC, every=3), 7, [2, 5]),
        (Save(ranks=(0,), model="actor", every=3, at_end=True), 7, [2, 5, 6]),
        (Save(ranks=(0,), model="actor", every=7, at_end=True), 7, [6]),
        (Eval(ranks=(0,), instructions=(), batch=BatchShape(1), every=2, at_end=True), 4, [1, 3]),
        (Eval(ranks=(0,), instructions=(), batch=BatchShape(1), every=9, at_end=True), 4, [3]),
        (GATE, 3, [0, 1, 2]),
        (replace(GATE, operator=replace(GATE.operator, every=3)), 8, [0, 3, 6]),
        (replace(GATE, operator=replace(GATE.operator, every=8)), 8, [0]),
    ],
)
def test_instructions_are_due_after_each_so_many_batches_and_operators_before(
    instruction: Instruction, steps: int, due: list[int]
) -> None:
    assert [step for step in range(-2, steps + 2) if instruction.due(step, steps)] == due


# --- overlap

TRAINING_WITH = "train_actor, train_critic with"
OVERLAPS = [
    ("co-located", [1] * 4, (), []),
    ("interleaving", [1, 1, 0.5, 0.5], (), ["ref_logprobs with scores"]),
    ("interleaving, chunks", [1, 1, 0.5, 0.5], STREAM, ["ref_logprobs with scores"]),
    (
        "two halves",
        [0.5] * 4,
        (),
        [
            "logprobs, ref_logprobs with scores, values",
            "train_actor with train_critic",
            "train_critic with generate, logprobs, ref_logprobs of the next step",
        ],
    ),
    ("six models", SIX, (), []),
    ("six models, chunks that end at a barrier", SIX, CHUNKS, []),
    (
        "six models, chunks",
        SIX,
        STREAM,
        [f"advantages, {TRAINING_WITH} generate, logprobs, ref_logprobs, scores, values of a later chunk"],
    ),
    (
        "six models, lag",
        SIX,
        (LAG,),
        [f"advantages, {TRAINING_WITH} generate, logprobs, ref_logprobs, scores, values of the next step"],
    ),
]


@pytest.mark.parametrize(
    ("placement", "settings", "expected"), [case[1:] for case in OVERLAPS], ids=[case[0] for case in OVERLAPS]
)
def test_operators_that_overlap(placement: list[float], settings: tuple[str, ...], expected: list[str]) -> None:
    assert overlapping_operators(whole_plan_of(placement, 2, *settings).schedule) == expected


def test_models_apart_overlap_more() -> None:
    lines = overlapping_operators(whole_plan_of(SIX_APART, 4, LAG, *STREAM).schedule)
    assert "train_actor with train_critic" in lines
    assert any("scores, values with generate" in line and line.endswith("of a later chunk") for line in lines)


# --- process groups


def test_one_rank_needs_no_group() -> None:
    assert whole_plan_of([1] * 4, 1).groups == ()


# --- as a person reads it


@pytest.mark.parametrize(
    ("ranks", "text"), [((), ""), ((3,), "3"), ((0, 1, 2), "0-2"), ((0, 2), "0,2"), ((0, 1, 3, 5, 6), "0-1,3,5-6")]
)
def test_ranks_are_written_as_spans(ranks: tuple[int, ...], text: str) -> None:
    assert span_of(ranks) == text


def test_rank_marks() -> None:
    assert rank_marks((0, 3), 4) == "#..#"
    assert rank_marks((0, 1, 2), 64).strip() == "0-2"


# --- snapshots


def config_plan(path: Path) -> Plan:
    """A plan without models on disk: those of the quick start are known by its configs; another path that names no
    directory is an architecture that only loading can tell."""
    spec = load_spec(path)
    missing = [Path(realpath(model)) for model in missing_models(spec)]
    pending = {model: ModelSpec(init={"model_type": "unknown"}) for model in missing}
    known = {model: plan.model(role) for plan in quickstart_plans().values() for model, role in plan.outputs.items()}
    return make_plan(spec, pending | known)


def missing_models(spec: Spec) -> list[str]:
    models = [model for _, model in spec.models if model is not None and model.path is not None]
    return [model.path for model in models if not Path(model.path).is_dir()]


def quickstart_plans() -> dict[str, Plan]:
    paths = quickstart.config_paths()
    plans = make_plans([load_spec(path) for path in paths])
    return {f"quickstart-{path.stem}": plan for path, plan in zip(paths, plans, strict=True)}


def config_files() -> dict[str, Path]:
    files = sorted(CONFIGS.rglob("*.yaml")) if CONFIGS.is_dir() else []
    return {"-".join(["configs", *file.relative_to(CONFIGS).with_suffix("").parts]): file for file in files}


@pytest.fixture(autouse=True)
def _away_from_the_repository(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Model directories that happen to lie in the repository change no plan; a graph's file is there."""
    monkeypatch.chdir(tmp_path)
    if CONFIGS.is_dir():
        (tmp_path / "configs").symlink_to(CONFIGS)


def check_snapshot(name: str, plan: Plan) -> None:
    file = HERE / "snapshots" / f"{name}.txt"
    text = format_plan(plan) + "\n"
    if UPDATE:
        file.parent.mkdir(exist_ok=True)
        file.write_text(text)
    assert file.is_file(), f"no {file.name}: make it with FLEXRLHF_UPDATE_SNAPSHOTS=1"
    assert file.read_text() == text, f"{file.name} differs: look at it, then FLEXRLHF_UPDATE_SNAPSHOTS=1"


@pytest.mark.parametrize("name", config_files())
def test_the_printed_plan_of_every_config(name: str) -> None:
    check_snapshot(name, config_plan(config_files()[name]))


def test_the_printed_plans_of_the_quick_start() -> None:
    for name, plan in quickstart_plans().items():
        check_snapshot(name, plan)


def test_the_printed_plan_of_episodes() -> None:
    game = "environment={path: game.py:Game, max_turns: 3}"
    further = "schedule={num_chunks: 2, lag: 1}", "eval={path: rows.jsonl, every: 1}"
    check_snapshot("episodes", plan_of([0.5] * 6, 4, game, "algorithm.num_mini_batches=2", *further))


def test_no_snapshot_is_left_over() -> None:
    stored = {file.stem for file in (HERE / "snapshots").glob("*.txt")}
    assert stored == set(config_files()) | {f"quickstart-{stage}" for stage in quickstart.STAGES} | {"episodes"}


def test_attempts_follow_one_another_and_the_rest_follows_the_last() -> None:
    """Each attempt's rows are scored before the next one decides; advantages and training are of all of them."""
    grpo = ("algorithm={name: grpo, prompts_per_step: 8, kl: null}", "algorithm.dynamic_sampling={rounds: 2}")
    plan = plan_of(None, 2, *grpo)
    listed = [(run.operator.name, run.attempt) for run in runs(plan) if not run.is_rare]
    chain = [(name, attempt) for attempt in (0, 1) for name in ("take_prompts", "generate", "scores")]
    assert listed == [*chain, ("advantages", None), ("train_actor", None)]
    assert plan.batch.num_prompts == 16 and plan.batch.num_new == 8
    taken = [rows_of_attempt(plan, attempt) for attempt in (0, 1)]
    assert not taken[0] & taken[1] and taken[0] | taken[1] == set(range(16))


def rows_of_attempt(plan: Plan, attempt: int) -> set[int]:
    """Prompts that all ranks generate for in an attempt."""
    (run,) = [run for run in runs(plan) if (run.operator.name, run.attempt) == ("generate", attempt)]
    layout = plan.placement[run.model].layout
    parts = [plan.batch.prompts_on(layout, rank, run.mini_batches, attempt) for rank in run.ranks]
    return {prompt for part in parts for prompt in part}
