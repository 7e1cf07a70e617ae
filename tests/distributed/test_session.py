"""Sessions: calls of a program have the bits of the planned run, also if it is killed, and account for their rows."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from secrets import token_hex

import called
import left_open
import pytest
import torch
from called import BugError, main
from cases import Case
from commands import free_port, read_until, start
from forked import RANK_ENVIRONMENT, Forked
from launcher import Launches, Outcome, params

from benchmarks.two_hosts import Link, can_link, linked_hosts
from flexrlhf.config.job_secret import JobSecret
from flexrlhf.launch.session_connection import SessionRanks
from flexrlhf.metrics import METRICS
from flexrlhf.plan.pipeline import make_plan
from flexrlhf.report.reported_run import plan_of_run
from flexrlhf.report.run_contents import read_contents
from flexrlhf.runs.run_directory import RunDirectory
from flexrlhf.strategies.instructions import Run

pytestmark = pytest.mark.timeout(600)
PPO, GRPO, REMAX = Case("ptx", "halves", 2), Case("grpo-alone", "six", 2), Case("remax-masked", "pairs", 2)
LAGGING, CHUNKED = Case("segments-corrected", "lag-2-alone", 2), Case("remax", "lag-chunks", 2)
EPISODES = Case("grpo-episodes-segments-saved", "lag-2-alone", 2, "deepspeed-3")
SKIPPED, FORGOTTEN = Case("remax-segments", "lag", 2), Case("grpo-as-ended-process", "co-located", 2)
SPLIT = Case("grpo-uneven", "co-located", 2)


def written(launches: Launches, case: Case, directory: Path, name: str, **changes: int) -> Path:
    """Write the config of ``case`` for a run ``name`` in ``directory``."""
    spec = launches.assets.spec(case)
    path = directory / f"{name}.yaml"
    path.write_text(spec.model_copy(update={"name": name, "runs": str(directory / "runs"), **changes}).dump())
    return path


def outcome_at(launches: Launches, case: Case, directory: Path, name: str) -> Outcome:
    spec = launches.assets.spec(case)
    return Outcome(case, make_plan(spec.model_copy(update={"name": name, "runs": str(directory / "runs")})))


def killed(program: list[str], directory: Path) -> None:
    """Run a program, which ends by SIGKILL."""
    process = Forked(program, directory, {**os.environ, **RANK_ENVIRONMENT})
    out, _ = process.communicate(timeout=120)
    assert process.returncode == -9, out[-2000:]


def started_on_two_machines(places: list[Path], resume: str, link: Link | None) -> list[subprocess.Popen[str]]:
    """Start a program on the first machine, and join it on the second; ``link``: between these, None: one machine."""
    endpoint = f"localhost:{free_port()}" if link is None else f"{link.hosts[0]}:29500"
    program, join = ["called.yaml", "scheduled", resume, endpoint], ["join", "--rdzv-endpoint", endpoint]
    environment = {**os.environ, **RANK_ENVIRONMENT}
    if link is None:
        return [Forked(["called", *program], places[0], environment), start(join, places[1])]
    first = link.start(0, program, places[0], [called.__file__], environment)
    stranger = link.start(1, join, places[1], environment={**environment, JobSecret.VARIABLE: token_hex()})
    out, _ = stranger.communicate(timeout=60)
    assert stranger.returncode == 2 and "FLEXRLHF_TOKEN: this machine's is not that of the first machine" in out, out
    read_until(first, "it has not the secret of this job, so node 0 waits for another")
    return [first, link.start(1, join, places[1], environment=environment)]


@pytest.fixture(autouse=True)
def forked_launchers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fork the launchers of this process's sessions; those of other programs load their libraries, as a user's do."""

    def launched(_: SessionRanks, command: list[str]) -> subprocess.Popen[str]:
        module = command[command.index("-m") + 1 :]
        return Forked(module, Path(), {**os.environ, **RANK_ENVIRONMENT}, stdout=None, stderr=None)

    monkeypatch.setattr(SessionRanks, "_launched", launched)


def columns_of(directory: Path, step: int) -> list[Path]:
    return list((directory / "columns").glob(f"*step{step}-*"))


def assert_same_bits(found: Outcome, planned: Outcome) -> None:
    for step, (one, two) in enumerate(zip(found.metrics, planned.metrics, strict=True)):
        names = {name for name in one.keys() - METRICS.times if "_loss/" not in name}
        assert {name: one[name] for name in names} == {name: two[name] for name in two.keys() - METRICS.times}
        mine, theirs = found.columns(step), planned.columns(step)
        assert mine.keys() - {"computed_logprobs"} == theirs.keys() - {"computed_logprobs"}
        for name in theirs:
            # a score that is not finite is NaN
            torch.testing.assert_close(mine[name], theirs[name], rtol=0, atol=0, equal_nan=True)
    for role in planned.plan.graph.trained:
        mine, theirs = found.weights(role), planned.weights(role)
        assert all(torch.equal(mine[name], theirs[name]) for name in theirs), role
    mine, theirs = (RunDirectory(each.directory).outcomes.read() for each in (found, planned))
    for line, expected in zip(mine, theirs, strict=True):
        # no numbers in the data of prompts that are the program's own
        assert line in (expected, {**expected, "prompts": [None] * len(expected["prompts"])})


@pytest.mark.parametrize("case", params([PPO, GRPO, REMAX, CHUNKED, LAGGING], [PPO, GRPO, REMAX]))
def test_calls_have_the_bits_of_the_graph(launches: Launches, case: Case, tmp_path: Path) -> None:
    """PPO and ReMax call by call; GRPO with copies that follow by syncs, trained by primitives. With
    a lag while newer batches are generated, in chunks; and in segments, killed with batches in flight, whose calls are
    not repeated."""
    path = written(launches, case, tmp_path, "called")
    if case == LAGGING:
        killed(["called", str(path), "stops-late"], tmp_path)
        newest, *_ = RunDirectory(outcome_at(launches, case, tmp_path, "called").directory).checkpoints
        progress = newest.manifest.progress
        # its own prompts: of the batches in flight, and of two before, whose rows may be carried
        assert len(progress.calls) == 2 and len(progress.prompts) == 4
        assert {call["lag"] for calls in progress.calls.values() for call in calls} == {0}
    way = {GRPO: "joined", CHUNKED: "scheduled", LAGGING: "scheduled"}.get(case, "")
    main(str(path), way, "auto" if case == LAGGING else None)
    assert_same_bits(outcome_at(launches, case, tmp_path, "called"), launches.outcome(case))


@pytest.fixture(params=["loopback", pytest.param("hosts", marks=pytest.mark.full)])
def link(request: pytest.FixtureRequest) -> Iterator[Link | None]:
    if request.param == "loopback":
        yield None
    elif not can_link():
        pytest.skip("needs the right to make network namespaces")
    else:
        with linked_hosts() as hosts:
            yield hosts


@pytest.mark.parametrize("case", params([EPISODES]))
def test_calls_on_two_machines_have_the_bits_of_the_graph(
    launches: Launches, case: Case, link: Link | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """GRPO on episodes in segments under a lag, with kept caches and the program's own prompts; each machine has a
    directory of its own. A machine whose launcher is killed ends the program with its name, and the program is resumed
    on two machines again. A stranger cannot join."""
    monkeypatch.setenv(JobSecret.VARIABLE, token_hex())
    places = [tmp_path / "first", tmp_path / "second"]
    for place in places:
        place.mkdir()
    spec = launches.assets.spec(case).model_copy(update={"name": "called", "runs": "runs"})
    (places[0] / "called.yaml").write_text(spec.dump())
    program, other = started_on_two_machines(places, "", link)
    read_until(program, "called  step 3/6")
    other.kill()
    out, _ = program.communicate(timeout=60)
    assert program.returncode == 1, out[-2000:]
    assert re.search(r"RankFailure: (the launcher of node 1|rank 1) \(", out), out[-2000:]
    other.communicate()
    assert RunDirectory(places[0] / "runs" / "called").checkpoints
    program, other = started_on_two_machines(places, "auto", link)
    for process in (program, other):
        out, _ = process.communicate(timeout=120)
        assert process.returncode == 0, out[-2000:]
    assert "joins called as node 1 of 2: rank 1\n" in out, out
    assert_same_bits(outcome_at(launches, case, places[0], "called"), launches.outcome(case))


@pytest.mark.parametrize("case", params([PPO]))
def test_a_program_that_fails_and_is_killed_goes_on_with_the_bits_of_the_graph(
    launches: Launches, case: Case, tmp_path: Path
) -> None:
    """In a step before its trainings, and between them: neither step counts. At last by HybridFlow's primitives, of
    which some change nothing: losses without an update."""
    path = written(launches, case, tmp_path, "killed")
    with pytest.raises(BugError):
        main(str(path), "fails")
    failed = outcome_at(launches, case, tmp_path, "killed").directory
    assert [row["step"] for row in RunDirectory(failed).metrics.read()] == [0] and not columns_of(failed, 1)
    assert [each.path.name for each in RunDirectory(failed).checkpoints] == ["step-000001"]
    # no process of ours loads it
    (tmp_path / "yaml.py").write_text("raise SystemExit('another yaml')")
    killed(["called", str(path), "stops", "auto"], tmp_path)
    assert [each.path.name for each in RunDirectory(failed).checkpoints][0] == "step-000002" and columns_of(failed, 2)
    main(str(path), "primitives", resume="auto")
    found, planned = outcome_at(launches, case, tmp_path, "killed"), launches.outcome(case)
    assert_same_bits(found, planned)
    # the report predicts the last step as it was called
    plan, notes = plan_of_run(read_contents(found.directory))
    assert plan is not None and not notes
    runs = [each.operator.name for each in plan.schedule.instructions if isinstance(each, Run)]
    assert runs[1] == "computed_logprobs" and runs[-3:] == ["train_actor_loss", "train_actor", "train_critic"]
    # of the texts that the step then trains on, before its first update
    nll, settings = found.metrics[2]["train_actor_loss/ptx_nll"], found.plan.spec.algorithm.ptx
    assert nll == pytest.approx(planned.metrics[2]["ptx_nll"], rel=0.1)
    assert found.metrics[2]["train_actor_loss/total_loss"] == pytest.approx(settings.coefficient * nll, rel=0.1)


@pytest.mark.full
@pytest.mark.parametrize("fails_at", range(8))
@pytest.mark.parametrize("case", params([PPO]))
def test_a_step_that_fails_at_any_point_is_trained_again(
    launches: Launches, case: Case, fails_at: int, tmp_path: Path
) -> None:
    """Before each operator, between trainings and behind the last one."""
    path = written(launches, case, tmp_path, "failed")
    with pytest.raises(BugError):
        main(str(path), "fails", fails_at=fails_at)
    directory = outcome_at(launches, case, tmp_path, "failed").directory
    assert [row["step"] for row in RunDirectory(directory).metrics.read()] == [0] and not columns_of(directory, 1)
    # nothing can go on from weights in the middle of a step
    assert [each.path.name for each in RunDirectory(directory).checkpoints] == (["step-000001"] if fails_at < 6 else [])
    main(str(path), resume="auto")
    assert_same_bits(outcome_at(launches, case, tmp_path, "failed"), launches.outcome(case))


@pytest.mark.full
@pytest.mark.parametrize("case", params([PPO]))
def test_a_session_that_nothing_leaves_ends_with_its_program(launches: Launches, case: Case, tmp_path: Path) -> None:
    """Also if the thread that has entered it has ended; after an interrupted read it takes no calls."""
    path = written(launches, case, tmp_path, "open")
    command = [sys.executable, str(Path(left_open.__file__)), str(path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=200, env={**os.environ, **RANK_ENVIRONMENT})
    assert done.returncode == 0 and "8 rows" in done.stdout and "Traceback" not in done.stderr, done
    assert "step 0 was left before its end; nothing is kept of it" in done.stderr
    found = outcome_at(launches, case, tmp_path, "open")
    status = RunDirectory(found.directory).status
    assert status is not None and status.state == "stopped" and not RunDirectory(found.directory).checkpoints


@pytest.mark.parametrize("case", params([SPLIT]))
def test_rows_that_a_program_leaves_out_are_accounted_for(launches: Launches, case: Case, tmp_path: Path) -> None:
    """A branch on data: steps whose mean score rises are not trained on. The first step is that of the graph, though
    its prompts are the program's and rows of the reference are on other ranks."""
    main(str(written(launches, case, tmp_path, "chosen")), "chooses")
    found = outcome_at(launches, case, tmp_path, "chosen")
    means = [row["reward_mean"] for row in found.metrics]
    rises = [before < mean for before, mean in zip(means, means[1:], strict=False)]
    lines = RunDirectory(found.directory).outcomes.read()
    assert all(line["prompts"] == [None] * found.plan.batch.num_prompts for line in lines)
    assert any(rises) and [("left_out" in line["outcomes"]) for line in lines] == [False, *rises]
    for row in found.metrics:
        assert sum(row[name] for name in row if name.startswith("rows_")) == found.plan.batch.num_rows
    # before each update
    first = found.metrics[0]
    assert first["train_actor_loss/policy_loss"] == first["policy_loss"] and first["train_actor_loss/total_loss"]
    mine, planned = found.columns(0), launches.outcome(case).columns(0)
    assert torch.equal(mine["tokens"], planned["tokens"])
    torch.testing.assert_close(mine["ref_logprobs"], planned["ref_logprobs"], rtol=1e-5, atol=1e-6)


def test_rows_in_segments_that_a_program_leaves_out_are_accounted_for(launches: Launches, tmp_path: Path) -> None:
    """Under a lag, with trainings at once: rows in flight are the carried ones. Rows that have ended and are not
    trained on are left out, and so are those that no call goes on with, or without one of their two responses."""
    main(str(written(launches, SKIPPED, tmp_path, "skipped", steps=11)), "skips")
    found = outcome_at(launches, SKIPPED, tmp_path, "skipped")
    lines = [line["outcomes"] for line in RunDirectory(found.directory).outcomes.read()]
    assert [line.keys() - {"carried"} for line in lines][:4] == [{"trained"}, {"left_out"}] * 2
    taken, after = found.plan.batch.num_taken, found.metrics[4]
    for before, skipped in (found.metrics[2:4], found.metrics[6:8]):
        assert skipped["rows_left_out"] == before["rows_in_flight"] + taken and not skipped["rows_in_flight"]
    # of the two mini-batches one is new
    assert after["rows_left_out"] == after["rows_in_flight"] == taken / 2
    assert sum(row.get(f"rows_{name}", 0) for row in found.metrics for name in ("trained", "left_out")) == (
        taken * len(found.metrics) - found.metrics[-1]["rows_in_flight"]
    )


def test_scores_of_rows_that_have_ended_are_kept_where_a_program_compares_none(
    launches: Launches, tmp_path: Path
) -> None:
    """Scores and rewards of steps that advantages are relative to. A split of the program's own has the numbers of
    prompts, whose places stay together."""
    main(str(written(launches, FORGOTTEN, tmp_path, "forgotten")), "forgets")
