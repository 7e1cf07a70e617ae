"""Checkpoints without ranks: pieces under any two layouts, damage, what a run goes on from, locks, requests to stop."""

from __future__ import annotations

import json
import random
import re
import threading
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from small_runs import TINY, plan_of
from test_shards import LAYOUTS, drawn_shape, placed
from transformers import LlamaConfig, LlamaForCausalLM

from flexrlhf.errors import RunStopped, UserError
from flexrlhf.plan.plan import Plan
from flexrlhf.runs.checkpoint_directory import CheckpointDirectory
from flexrlhf.runs.durable_files import write_durably
from flexrlhf.runs.fingerprints import Fingerprints
from flexrlhf.runs.manifest import (
    Manifest,
    Progress,
)
from flexrlhf.runs.resume import resume_runs
from flexrlhf.runs.row_file import RowFile
from flexrlhf.runs.run_directory import (
    RunDirectory,
)
from flexrlhf.runs.tensor_files import Piece, PieceReader, cut, piece_file, write_pieces
from flexrlhf.strategies.instructions import Checkpoint, Run
from flexrlhf.strategies.schedule import RunStart, Schedule
from flexrlhf.trainer.checkpointer import merged_progress
from flexrlhf.trainer.stop_requests import StopRequests
from flexrlhf.weights.shards import Part


@pytest.mark.parametrize("seed", range(12))
def test_pieces_of_any_layout_are_read_by_any_other(seed: int, tmp_path: Path) -> None:
    draw = random.Random(seed)
    (engine, zero, tp), dp = draw.choice(LAYOUTS), draw.randint(1, 6)
    shape = drawn_shape(draw, tp)
    writer = placed(engine, zero, tp, dp)
    tensors = {name: torch.randn(size) for name, size in shape.parameters}
    for rank in writer.ranks:
        parts, mine = shape.trained_parts(writer, rank), shape.written_names(writer, rank)
        pieces = {f"weights/{n}": Piece(cut(tensors[n], parts[n]), parts[n]) for n in mine if parts[n].num_elements}
        if pieces:
            write_pieces(tmp_path / piece_file("actor", rank), pieces)
    for engine, zero, other_tp in LAYOUTS:
        if other_tp not in (1, tp):
            continue  # the sizes are multiples of tp alone
        reader = placed(engine, zero, other_tp, draw.randint(1, 5))
        for rank in reader.ranks:
            for name, part in shape.trained_parts(reader, rank).items():
                found = PieceReader(tmp_path, "actor").read(f"weights/{name}", part)
                assert torch.equal(found, cut(tensors[name], part)), (name, part)


def test_each_number_is_written_once_and_the_work_is_shared() -> None:
    model, shape = placed("torch", 0, 2, 3), drawn_shape(random.Random(1), 2)
    by_rank = [shape.written_names(model, rank) for rank in model.ranks]
    written = sum(
        shape.trained_parts(model, rank)[name].num_elements
        for rank, names in zip(model.ranks, by_rank, strict=True)
        for name in names
    )
    assert written == shape.num_parameters
    assert sum(1 for names in by_rank if names) > 2


def flat_part(shape: tuple[int, ...], flat: range) -> Part:
    return replace(Part.whole(shape), flat=flat)


def test_ranges_of_stage_1_are_read_as_whole_tensors(tmp_path: Path) -> None:
    tensor, parts = torch.randn(5, 3), [flat_part((5, 3), range(0, 4)), flat_part((5, 3), range(4, 15))]
    for rank, part in enumerate(parts):
        write_pieces(tmp_path / piece_file("actor", rank), {"exp_avg/w": Piece(cut(tensor, part), part)})
    reader = PieceReader(tmp_path, "actor")
    assert torch.equal(reader.tensor("exp_avg/w"), tensor)
    middle = flat_part((5, 3), range(3, 6))
    assert torch.equal(reader.read("exp_avg/w", middle), tensor.view(-1)[3:6])
    with pytest.raises(UserError, match=r"actor needs exp_avg/v of shape \[5, 3\], found nothing"):
        reader.read("exp_avg/v", middle)
    (tmp_path / piece_file("actor", 1)).unlink()
    with pytest.raises(UserError, match="exp_avg/w of actor is there in part only"):
        PieceReader(tmp_path, "actor").tensor("exp_avg/w")


def test_a_part_is_read_back_from_its_text() -> None:
    for part in (flat_part((4, 2), range(1, 7)), replace(flat_part((4,), range(4)), flat=None)):
        assert Part.load(part.text) == part


def written_checkpoint(plan: Plan, next_step: int) -> Path:
    """A checkpoint with a file of numbers, in the directory of the run, which has its rows of metrics."""
    directory = RunDirectory(plan.spec.directory).checkpoint(next_step).path
    directory.mkdir(parents=True)
    rows = [json.dumps({"step": step}) for step in range(next_step)]
    (plan.spec.directory / "metrics.jsonl").write_text("\n".join(rows))
    entry = write_durably(directory / "actor-00000.safetensors", bytes(range(200)))
    progress = Progress(next_step, {"actor": {"updates": 4.0}}, {"actor": next_step}, {}, {}, {})
    files = {"actor-00000.safetensors": entry}
    written = Manifest(plan.spec.dump(), "digest", {"torch": "2"}, files, progress, Fingerprints([plan]).fixed())
    written.write(directory)
    return directory


@pytest.fixture
def plan(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Plan:
    monkeypatch.chdir(tmp_path)
    return plan_of([1, 1, 1, 1], 2, "checkpoint.every=1", "steps=9")


def test_a_manifest_is_read_back_and_any_changed_byte_is_noticed(plan: Plan) -> None:
    directory = written_checkpoint(plan, 2)
    manifest = Manifest.read(directory)
    assert manifest.progress.next_step == 2 and manifest.progress.numbers == {"actor": {"updates": 4.0}}
    found, name = CheckpointDirectory(directory), next(iter(manifest.files))
    assert found.damage(name) is None
    original = (directory / name).read_bytes()
    for position in (0, 77, 199):
        changed = bytearray(original)
        changed[position] ^= 1
        (directory / name).write_bytes(bytes(changed))
        assert found.damage(name) == f"{name} has another checksum than when it was written"
    (directory / name).write_bytes(original[:-1])
    assert found.damage(name) == f"{name} has 199 of 200 bytes"
    (directory / name).unlink()
    assert found.damage(name) == f"{name} is missing"
    text = (directory / "manifest.json").read_text()
    (directory / "manifest.json").write_text(text.replace('"updates": 4.0', '"updates": 5.0'))
    with pytest.raises(UserError, match="another checksum"):
        Manifest.read(directory)
    (directory / "manifest.json").write_text(text[:50])
    with pytest.raises(UserError, match="cannot be read"):
        Manifest.read(directory)


def test_only_whole_checkpoints_are_found_and_the_newest_is_first(plan: Plan) -> None:
    older, newer = written_checkpoint(plan, 9), written_checkpoint(plan, 10)
    (newer.parent / "step-000011.writing").mkdir()
    (newer.parent / "step-000012").mkdir()
    assert RunDirectory(plan.spec.directory).checkpoints == [CheckpointDirectory(newer), CheckpointDirectory(older)]
    assert RunDirectory(Path("nowhere")).checkpoints == []


def test_what_each_run_goes_on_from(plan: Plan) -> None:
    assert resume_runs((plan,), None)[0].candidates == ()
    fresh = resume_runs((plan,), "auto")[0]
    assert not fresh.continues and not fresh.finished
    older, newer = written_checkpoint(plan, 3), written_checkpoint(plan, 4)
    automatic = resume_runs((plan,), "auto")[0]
    assert automatic.candidates == (newer, older) and automatic.continues
    assert resume_runs((plan,), str(older))[0].candidates == (older,)
    (plan.spec.directory / "config.yaml").write_text(plan.spec.dump())
    RunDirectory(plan.spec.directory).write_status("finished", 9, 9)
    assert resume_runs((plan,), "auto")[0].finished
    longer = plan_of([1, 1, 1, 1], 2, "checkpoint.every=1", "steps=12")
    assert resume_runs((longer,), "auto")[0].candidates == (newer, older)
    branch = plan_of([1, 1, 1, 1], 2, "name=branch", "steps=9")
    assert not resume_runs((branch,), str(newer))[0].continues


@pytest.mark.parametrize(
    ("override", "sentence"),
    [
        ("seed=5", "seed was 0 and is 5 now"),
        ("algorithm.gamma=0.5", "algorithm.gamma was 1.0 and is 0.5 now"),
        ("models.actor.optimizer.learning_rate=0.1", "models.actor.optimizer.learning_rate was"),
        ("schedule.lag=1", "schedule.lag was 0 and is 1 now"),
        ("steps=3", "it comes after 4 steps, and this run has 3; use steps: 4 or more"),
    ],
)
def test_a_change_of_numbers_is_refused_by_name(plan: Plan, override: str, sentence: str) -> None:
    written_checkpoint(plan, 4)
    placement = [0.5] * 6 if "lag" in override else [1, 1, 1, 1]
    with pytest.raises(UserError, match=sentence):
        resume_runs((plan_of(placement, 2, "steps=9", override),), "auto")


SCORER = "from factors import {name}\n\n\ndef score(prompts, responses):\n    return [{name}] * len(responses)\n"


def scored(tmp_path: Path, *overrides: str) -> Plan:
    """GRPO by a function that imports a file next to it, from a model with files."""
    if not (tmp_path / "actor").exists():
        LlamaForCausalLM(LlamaConfig(**TINY)).save_pretrained(tmp_path / "actor")
        (tmp_path / "scores.py").write_text(SCORER.format(name="ONE"))
        (tmp_path / "factors.py").write_text("ONE = 1.0\n")
    settings = ("algorithm={name: grpo}", "reward=[{function: scores.py:score}]", "models={actor: {path: actor}}")
    return plan_of([1, 1], 2, "checkpoint.every=1", "steps=9", *settings, *overrides)


@pytest.mark.parametrize(
    ("file", "contents", "sentence"),
    [
        ("actor/model.safetensors", None, r"models.actor.path model.safetensors has changed"),
        ("scores.py", SCORER.format(name="TWO").encode(), r"reward.function scores.py has changed"),
        ("factors.py", b"ONE = 1000.0\n", r"reward.function factors.py has changed"),
        ("actor/chat_template.jinja", b"", r"models.actor.path chat_template.jinja is new"),
    ],
    ids=["weights", "code", "imported code", "template"],
)
def test_a_changed_input_is_refused_by_name_or_accepted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, file: str, contents: bytes | None, sentence: str
) -> None:
    """``contents``: None: the same file with another last byte, of a weight."""
    monkeypatch.chdir(tmp_path)
    found = written_checkpoint(scored(tmp_path), 4)
    assert resume_runs((scored(tmp_path),), "auto")[0].notes == ()
    changed = tmp_path / file
    changed.write_bytes(changed.read_bytes()[:-1] + b"1" if contents is None else contents)
    with pytest.raises(UserError, match=f"{sentence}, which would change .* accept it with --accept-changes$"):
        resume_runs((scored(tmp_path),), "auto")
    (accepted,) = resume_runs((scored(tmp_path),), "auto", accepts=True)
    assert accepted.candidates == (found,) and re.search(sentence, accepted.notes[0])


SEGMENTS, LONG = "rollout.segment_tokens", "data.max_response_tokens=20"


def lagging(*overrides: str) -> Plan:
    return plan_of([0.5] * 6, 2, "checkpoint.every=1", "steps=9", *overrides)


@pytest.mark.parametrize(
    ("before", "after", "sentence"),
    [
        (("schedule.lag=4",), ("schedule.lag=2",), "schedule.lag was 4 and is 2: 4 batches in flight, trained on as"),
        (("schedule.lag=1",), ("schedule.lag=8",), "1 batch in flight, .*then lag 8 holds; no row is lost"),
        (
            ("schedule.lag=1", f"{SEGMENTS}=6"),
            ("schedule.lag=1", f"{SEGMENTS}=4"),
            f"{SEGMENTS} was 6 and is 4: 3 rows under way, continued by segments of the new length; none is lost",
        ),
        (("schedule.lag=1",), ("schedule.lag=1", f"{SEGMENTS}=4"), f"{SEGMENTS} was null and is 4"),
    ],
)
def test_another_lag_or_other_segments_are_accepted_with_what_becomes_of_rows_in_flight(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, before: tuple[str, ...], after: tuple[str, ...], sentence: str
) -> None:
    monkeypatch.chdir(tmp_path)
    directory = written_checkpoint(lagging(*before), 3)
    manifest = Manifest.read(directory)
    replace(manifest, progress=replace(manifest.progress, carried={"2": [0, 1, 5]})).write(directory)
    with pytest.raises(UserError, match=f"{sentence}.*which would change .* accept it with --accept-changes$"):
        resume_runs((lagging(*after),), "auto")
    (accepted,) = resume_runs((lagging(*after),), "auto", accepts=True)
    assert accepted.candidates == (directory,) and re.search(sentence, accepted.notes[0])


@pytest.mark.parametrize(
    ("before", "after", "sentence"),
    [
        (("schedule.lag=2",), (), "schedule.lag was 2 and is 0 now, .*use 2, or another lag from 1 on"),
        (
            ("schedule.lag=4", "sync.every=2", "algorithm.importance={max_staleness: 4}"),
            ("schedule.lag=1", "sync.every=2", "algorithm.importance={max_staleness: 4}"),
            "tokens in flight may be 5 batches old, .*max_staleness 4; use lag 4",
        ),
        (
            ("schedule.lag=1", f"{SEGMENTS}=4"),
            ("schedule.lag=1", f"{SEGMENTS}=8"),
            r"carried over 5 steps, and now over 3; use rollout.segment_tokens: 8 with rollout.max_segments: 5",
        ),
        (
            ("schedule.lag=1", f"{SEGMENTS}=10"),
            ("schedule.lag=1",),
            r"carried over 2 steps, and now over 1; use rollout.segment_tokens: 20 with rollout.max_segments: 2",
        ),
    ],
)
def test_a_lag_or_segments_without_a_place_for_rows_in_flight_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, before: tuple[str, ...], after: tuple[str, ...], sentence: str
) -> None:
    monkeypatch.chdir(tmp_path)
    written_checkpoint(lagging(LONG, *before), 3)
    with pytest.raises(UserError, match=sentence):
        resume_runs((lagging(LONG, *after),), "auto", accepts=True)


def test_a_changed_type_is_refused_by_name_or_accepted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    written_checkpoint(scored(tmp_path), 4)
    changed = scored(tmp_path, "models.actor.dtype=bfloat16")
    with pytest.raises(UserError, match="models.actor.dtype was float32 and is bfloat16, which would change"):
        resume_runs((changed,), "auto")
    assert resume_runs((changed,), "auto", accepts=True)[0].candidates


def test_a_checkpoint_without_digests_goes_on_and_says_so(plan: Plan) -> None:
    directory = written_checkpoint(plan, 4)
    replace(Manifest.read(directory), inputs=None).write(directory)
    (resumed,) = resume_runs((plan,), "auto")
    assert "of an older version, so that models and code are not compared" in resumed.notes[0]


def test_a_checkpoint_with_a_setting_that_is_gone_is_refused_in_one_sentence(plan: Plan) -> None:
    directory = written_checkpoint(plan, 4)
    manifest = Manifest.read(directory)
    older = manifest.spec.replace("prompts_per_step:", "rollouts_per_step: 1\n  prompts_per_step:")
    replace(manifest, spec=older).write(directory)
    sentence = "^settings of the run that wrote the checkpoint: algorithm: unknown key 'rollouts_per_step'.*"
    with pytest.raises(UserError, match=sentence):
        resume_runs((plan,), "auto")


def test_more_steps_need_the_rows_that_a_lag_generates_before(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)

    def lagged(steps: int) -> Plan:
        return plan_of([0.5] * 6, 2, "schedule.lag=1", "checkpoint.every=1", f"steps={steps}")

    written_checkpoint(lagged(9), 9)
    with pytest.raises(UserError, match="the run of 9 steps generated none for a later one; go on from the checkpoint"):
        resume_runs((lagged(12),), "auto")
    with pytest.raises(UserError, match="of which there is none here"):
        resume_runs((lagged(12),), "auto")
    earlier, last = written_checkpoint(lagged(9), 8), RunDirectory(lagged(9).spec.directory).checkpoint(9).path
    assert resume_runs((lagged(12),), str(earlier))[0].candidates == (earlier,)
    for given in ("auto", str(lagged(9).spec.directory)):
        (found,) = resume_runs((lagged(12),), given)
        assert found.candidates == (earlier,) and f"goes on from {earlier}, the latest" in found.notes[0]
    with pytest.raises(UserError, match=f"an earlier step, such as {earlier}"):
        resume_runs((lagged(12),), str(last))
    assert resume_runs((lagged(9),), str(last))[0].candidates == (last,)
    (earlier / "manifest.json").write_text("")
    with pytest.raises(UserError, match="generated none for a later one"):
        resume_runs((lagged(12),), "auto")


def test_an_engine_behind_its_actor_keeps_the_form_of_its_adapters(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)

    def adapted(adapters: str, *overrides: str) -> Plan:
        engine = f"rollout={{engine: vllm, adapters: {adapters}}}"
        return plan_of([0.5] * 6, 2, engine, "models.actor.lora={}", "checkpoint.every=1", "steps=9", *overrides)

    found = written_checkpoint(adapted("merged"), 4)
    assert resume_runs((adapted("separate"),), "auto")[0].candidates == (found,)
    written_checkpoint(adapted("separate", "schedule.lag=1"), 5)
    with pytest.raises(UserError, match="rollout.adapters was separate and is merged now, .* stored; use separate$"):
        resume_runs((adapted("merged", "schedule.lag=1"),), "auto")


@pytest.mark.parametrize("override", ["models.actor.zero=3", "cluster.devices=4", "checkpoint.every=3", "steps=20"])
def test_a_change_of_placement_is_free(plan: Plan, override: str) -> None:
    found = written_checkpoint(plan, 4)
    changed = plan_of([1, 1, 0.5, 0.5], 2, "steps=9", override)
    assert resume_runs((changed,), "auto")[0].candidates == (found,)


def test_a_directory_without_a_checkpoint_is_refused(plan: Plan) -> None:
    with pytest.raises(UserError, match="^--resume nowhere: no such directory; give auto, a run's directory or a che"):
        resume_runs((plan,), "nowhere")
    Path("empty").mkdir()
    with pytest.raises(UserError, match="^--resume empty: no checkpoint in it; give a run's directory or checkpoints/"):
        resume_runs((plan,), "empty")


@pytest.mark.parametrize(
    ("overrides", "why"),
    [((), "was not set in it"), (("checkpoint.every=3",), "is 3 steps, and it ended before the first one")],
)
def test_a_run_without_a_checkpoint_is_refused_with_the_cause(
    overrides: tuple[str, ...], why: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    plan = plan_of([1, 1, 1, 1], 2, "steps=9", *overrides)
    RunDirectory(plan.spec.directory).prepare(plan.spec, "", continues=False).close()
    expected = (
        f"--resume {plan.spec.directory}: the run has no checkpoint: checkpoint.every {why}; begin it anew without"
    )
    with pytest.raises(UserError, match=expected):
        resume_runs((plan,), str(plan.spec.directory))


def test_a_running_directory_is_refused_and_a_left_one_moved_away(plan: Plan) -> None:
    directory = plan.spec.directory
    lock = RunDirectory(plan.spec.directory).prepare(plan.spec, "", continues=False)
    (directory / "metrics.jsonl").write_text("")
    with pytest.raises(UserError, match=rf"{directory}: process \d+ on .* is using it"):
        RunDirectory(plan.spec.directory).prepare(plan.spec, "", continues=True)
    lock.close()
    for left in ("actor", "checkpoints/step-000005"):
        (directory / f"{left}.writing").mkdir(parents=True)
    RunDirectory(plan.spec.directory).prepare(plan.spec, "", continues=True).close()
    assert (directory / "metrics.jsonl").exists() and list(directory.rglob("*.writing")) == []
    RunDirectory(plan.spec.directory).prepare(plan.spec, "", continues=False).close()
    assert not (directory / "metrics.jsonl").exists() and directory.with_name("test.1").is_dir()


def test_an_earlier_run_is_not_moved_away_without_a_word(plan: Plan) -> None:
    directory = plan.spec.directory
    assert RunDirectory(directory).moved_text() is None
    RunDirectory(plan.spec.directory).prepare(plan.spec, "", continues=False).close()
    moved = f"{directory}: an earlier run has not finished and is moved to {directory}.1"
    assert RunDirectory(directory).moved_text() == moved
    newest = written_checkpoint(plan, 3)
    assert RunDirectory(directory).moved_text() == f"{moved}; --resume auto would go on from {newest}"
    RunDirectory(directory).write_status("finished", 9, 9)
    assert RunDirectory(directory).moved_text() == f"{directory}: an earlier run is moved to {directory}.1"


def test_a_directory_that_cannot_be_made_is_one_sentence(plan: Plan) -> None:
    Path("runs").write_text("a file")
    with pytest.raises(UserError, match=r"runs: runs/test cannot be written \(Not a directory\)"):
        RunDirectory(plan.spec.directory).prepare(plan.spec, "", continues=False)


def test_rows_of_later_steps_and_a_cut_row_are_dropped(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text("".join(json.dumps({"step": step, "kl": 0.1}) + "\n" for step in range(5)) + '{"step": 1, "k')
    RowFile(path).trim("step", 3)
    assert [json.loads(line)["step"] for line in path.read_text().splitlines()] == [0, 1, 2]


def test_rows_that_are_removed_or_replaced_are_written_again(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "run" / "metrics.jsonl"
    path.parent.mkdir()
    path.write_text("0\n")
    file = RowFile(path).writer()
    file.append("1\n")
    path.unlink()
    file.append("2\n")
    assert path.read_text() == "0\n1\n2\n"
    assert capsys.readouterr().err == f"flexrlhf: {path}: was removed; it is written again with the rows so far\n"
    (tmp_path / "other").write_text("mine")
    (tmp_path / "other").rename(path)
    file.append("3\n")
    assert path.read_text() == "0\n1\n2\n3\n" and path.with_name("metrics.jsonl.1").read_text() == "mine"
    assert "was replaced by another file, now metrics.jsonl.1;" in capsys.readouterr().err
    path.write_text("0\n")
    for row in "45":
        file.append(f"{row}\n")
    assert path.read_text() == "0\n4\n5\n"
    assert capsys.readouterr().err == f"flexrlhf: {path}: 6 of its 8 bytes were cut off; these rows are lost\n"
    path.parent.rename(tmp_path / "moved")
    with (
        pytest.raises(RunStopped, match=r"metrics.jsonl: cannot be written \(No such file"),
        RunDirectory(path.parent).writing(),
    ):
        file.append("6\n")
    file.close()


def test_rows_that_are_missing_before_a_checkpoint_are_named(plan: Plan) -> None:
    written_checkpoint(plan, 5)
    file = plan.spec.directory / "metrics.jsonl"
    file.unlink()
    (found,) = resume_runs((plan,), "auto")
    assert found.notes == (f"{plan.spec.name}: {file} has no rows of 5 steps from 0 on, before the checkpoint",)
    for steps, notes in (([0, 1, 4], ["2 steps from 2 on"]), ([3, 4], []), (range(7), [])):
        file.write_text("".join(f'{{"step": {step}}}\n' for step in steps))
        (found,) = resume_runs((plan,), "auto")
        assert len(found.notes) == len(notes) and all(map(str.__contains__, found.notes, notes))


def test_checkpoints_after_the_one_gone_on_from_are_set_aside(plan: Plan) -> None:
    for step in (2, 3, 4):
        written_checkpoint(plan, step)
    folder = plan.spec.directory / "checkpoints"
    directory = RunDirectory(plan.spec.directory)
    directory.go_back(3, plan.spec.steps)
    names = sorted(path.name for path in folder.iterdir())
    assert names == ["step-000002", "step-000003", "step-000004.abandoned"]
    written_checkpoint(plan, 5)
    directory.go_back(3, plan.spec.steps)
    directory.drop_checkpoints(9, 4)
    assert sorted(path.name for path in folder.iterdir()) == ["step-000002", "step-000003", "step-000005.abandoned"]


def test_numbers_of_all_ranks_are_united() -> None:
    first = Progress(2, {"actor": {"updates": 4.0}}, {"actor": 2}, {}, {}, {"2": {"generate": {"statistics": {}}}})
    second = Progress(2, {}, {"actor.shadow": 1}, {"advantages": {"kl_coefficient": 0.1}}, {"actor": 0.5}, {"2": {}})
    total = merged_progress([first, second])
    assert total.versions == {"actor": 2, "actor.shadow": 1} and total.best == {"actor": 0.5}
    assert total.reports == {"2": {"generate": {"statistics": {}}}} and total.controllers == second.controllers


def test_all_ranks_stop_after_the_same_round_whenever_the_request_comes(tmp_path: Path) -> None:
    """Eight ranks walk at their own pace; a file appears meanwhile. Every round is decided once, for all of them."""
    store, file, stopped = dist.HashStore(), tmp_path / "stop", dict[int, int]()

    def walk(rank: int) -> None:
        request, stops = 20 + random.Random(rank).randint(0, 30), StopRequests(store, file)
        for turn in range(100):
            if turn == request:
                file.touch()
            if stops.decide(f"run/{turn}"):
                stopped[rank] = turn
                return

    threads = [threading.Thread(target=walk, args=(rank,)) for rank in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(stopped) == 8 and len(set(stopped.values())) == 1
    assert StopRequests(store).follow(f"run/{stopped[0]}", 5)


@pytest.mark.parametrize("lag", [0, 1, 3])
def test_an_interrupted_walk_is_a_whole_one(lag: int) -> None:
    plan = plan_of([0.5] * 6, 2, f"schedule.lag={lag}", "steps=7", "checkpoint.every=2")
    schedule = plan.schedule
    whole = [each for turn in schedule.rounds(7) for each in schedule.walk_round(0, 7, turn)]
    for next_step in range(1, 7):
        first = [each for turn in range(next_step + lag) for each in schedule.walk_round(0, 7, turn)]
        start = RunStart(next_step, min(next_step + lag, 7))
        second = [each for turn in schedule.rounds(7, start) for each in schedule.walk_round(0, 7, turn, start)]
        assert first + second == whole
    due = [step + 1 for _, step, each in whole if isinstance(each, Checkpoint)]
    assert due == [2, 4, 6, 7]


@pytest.mark.parametrize(("before", "after"), [(1, 4), (4, 1), (3, 2), (2, 8)])
def test_a_walk_under_another_lag_runs_each_operator_once_for_each_batch(before: int, after: int) -> None:
    """Batches in flight are generated and not trained on; no training is far behind a batch that is generated."""
    first, second = (plan_of([0.5] * 6, 2, f"schedule.lag={lag}", "steps=9").schedule for lag in (before, after))
    for next_step in range(1, 9):
        start = RunStart(next_step, min(next_step + before, 9))
        for rank in range(2):
            walked = [each for turn in range(next_step + before) for each in first.walk_round(rank, 9, turn)]
            further = [each for turn in second.rounds(9, start) for each in second.walk_round(rank, 9, turn, start)]
            runs = Counter((step, each.label) for _, step, each in walked + further if isinstance(each, Run))
            whole = {each.label for each in first.for_rank(rank) if isinstance(each, Run) and not each.is_rare}
            assert {key: runs[key] for key in ((step, name) for step in range(9) for name in whole)} == dict.fromkeys(
                ((step, name) for step in range(9) for name in whole), 1
            )
            behind = [turn - step for turn, step in _generations(second, rank, start)]
            assert all(each == 0 for each in behind)


def _generations(schedule: Schedule, rank: int, start: RunStart) -> list[tuple[int, int]]:
    """Round and batch of each generation of ``rank``."""
    return [
        (turn, step)
        for turn in schedule.rounds(9, start)
        for _, step, each in schedule.walk_round(rank, 9, turn, start)
        if isinstance(each, Run) and each.operator.kind == "generate"
    ]


def test_a_plan_shows_the_checkpoint_and_its_host_memory() -> None:
    plain, saving = plan_of([1, 1, 1, 1], 2), plan_of([1, 1, 1, 1], 2, "checkpoint.every=2")
    assert not any(isinstance(each, Checkpoint) for each in plain.schedule.instructions)
    assert saving.schedule.instructions[-1].label == "actor, critic"
    copied = [
        next(phase.host for phase in saving.memory(rank).phases if phase.kind == "checkpoint") for rank in range(2)
    ]
    numbers = sum(shape.num_parameters for role, shape in saving.shapes.items() if role in ("actor", "critic"))
    assert sum(copied) == 12 * numbers  # float32 weights and two moments
    assert saving.memory(0).process_bytes == plain.memory(0).process_bytes + copied[0]
