"""Ends of a run: which failure is its cause, the sentence of a failed wait, the record of a rank that was killed."""

from __future__ import annotations

import json
import signal
import socket
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from small_runs import plan_of
from torch.distributed.elastic.multiprocessing.errors import ProcessFailure

from flexrlhf.comm import progress as progress_module
from flexrlhf.comm.deadlines import DeadlineError, deadline
from flexrlhf.comm.progress import Beat, RankProgress
from flexrlhf.comm.store import Endpoint, Notice, await_keys
from flexrlhf.comm.world import InOrder, World
from flexrlhf.errors import RunStopped, UserError
from flexrlhf.launch.failures import Failure, FailureKind, FailureReporter, root_cause, write_error
from flexrlhf.runs.flight_log import (
    FlightLog,
    FlightLogs,
)
from flexrlhf.timeline import Span, Trace
from flexrlhf.trainer.memory_meter import naming_exhaustion, use_expandable_segments
from flexrlhf.weights.loading import one_sentence_errors

MODELS = {0: "actor", 1: "reward", 2: "critic"}


def failure(kind: FailureKind, sentence: str, time: float = 0.0) -> Failure:
    return Failure(kind, sentence, time)


@pytest.mark.parametrize(
    ("failures", "cause"),
    [
        ([failure("waited", "a", 1), failure("killed", "b", 2)], "b"),
        ([failure("error", "a", 1), failure("killed", "b", 31)], "a"),
        ([failure("closed", "a", 1), failure("waited", "b", 4)], "b"),
        ([failure("closed", "a", 1), failure("node", "b", 4)], "b"),
        ([failure("ended", "a", 1), failure("error", "b", 2), failure("error", "c", 3)], "b"),
        ([failure("ended", "a", 1)], "a"),
    ],
    ids=["killed", "killed by its launcher", "closed by one that gave up", "lost node", "error", "ended"],
)
def test_the_cause_is_the_rank_that_failed_by_itself(failures: list[Failure], cause: str) -> None:
    assert root_cause(failures).sentence == cause
    assert root_cause(failures[::-1]).sentence == cause


class Ranks:
    """Three ranks of one job, in this process."""

    def __init__(self) -> None:
        self.store = dist.HashStore()
        worlds = [World(rank, 3, self.store, torch.device("cpu"), "gloo", f"host{rank}") for rank in range(3)]
        self.progress = [RankProgress(world, "run", MODELS, 5) for world in worlds]

    def sentence(self, message: str) -> str:
        """The sentence of rank 0, whose wait for all ranks fails with torch's ``message``."""
        with pytest.raises(DeadlineError) as caught, self.progress[0].deadline((0, 1, 2)):
            raise RuntimeError(message)
        return str(caught.value)


@pytest.fixture
def ranks(monkeypatch: pytest.MonkeyPatch) -> Ranks:
    monkeypatch.setattr(progress_module, "SILENT_SECONDS", 0.01)
    monkeypatch.setattr(progress_module, "ENDING_SECONDS", 0.01)
    return Ranks()


def test_a_failed_wait_names_who_is_behind_and_who_has_arrived(ranks: Ranks) -> None:
    ranks.progress[0].report(7, "step 2, move b")
    ranks.progress[1].report(5, "step 2, run a")
    ranks.progress[2].report(7, "step 2, move b")
    assert ranks.sentence("Timed out waiting 5000ms") == (
        "rank 0 (actor; host host0) at step 2, move b: the deadline of 5 s passed, waiting for rank 1 (reward; host "
        "host1; at step 2, run a); arrived: rank 2 (critic; host host2)"
    )


class Endless(dist.Work):
    """What a device never finishes; to wait for it holds up no host."""

    def is_completed(self) -> bool:
        return False

    def wait(self, *_: object) -> bool:
        return True


def test_a_device_that_waits_past_the_deadline_is_named(ranks: Ranks) -> None:
    world = World(0, 3, ranks.store, torch.device("cpu"), "nccl", "host0")
    progress = RankProgress(world, "run", MODELS, 0.05)
    progress.report(7, "step 2, move b")
    ranks.progress[1].report(5, "step 2, run a")
    # the next wait finds it
    progress.wait(InOrder(Endless()), (0, 1))
    with pytest.raises(DeadlineError, match="0.05 s passed, waiting for rank 1 .reward; host host1; at"):
        progress.wait(Endless(), (0, 1))


def test_a_communicator_that_has_failed_is_an_error(ranks: Ranks) -> None:
    """Its work counts as completed, and its wait returns on a GPU; the next read of the host would block."""
    made: dict[int, dist.ProcessGroup] = {}

    def connect(rank: int) -> None:
        made[rank] = dist.ProcessGroupGloo(ranks.store, rank, 2, timedelta(seconds=20))

    with ThreadPoolExecutor() as threads:
        list(threads.map(connect, range(2)))
    work = made[0].allreduce([torch.zeros(1)])
    del made[1]
    progress = RankProgress(World(0, 2, ranks.store, torch.device("cpu"), "nccl", "host0"), "run", MODELS, 10.0)
    ranks.progress[1].report_end("out of memory")
    with pytest.raises(DeadlineError, match=r"the connection closed, rank 1 \(.*\) ended \(out of memory\)"):
        progress.wait(work, (0, 1))
    assert progress.waiting is None


def test_a_stopped_rank_is_named_that_has_come_further(ranks: Ranks, monkeypatch: pytest.MonkeyPatch) -> None:
    """It has posted the message that this rank waits for, and was stopped before all of it was sent."""
    ranks.progress[0].report(7, "step 2, sync a")
    ranks.progress[1].report(8, "step 2, sync b")
    ranks.progress[2].report(5, "step 2, run a")
    beats = iter(range(100))

    def beat(_: float) -> None:
        ranks.store.set(Beat.key(2), json.dumps([next(beats), True]))

    ranks.store.set(Beat.key(1), json.dumps([3, False]))
    beat(0)
    monkeypatch.setattr(progress_module.time, "sleep", beat)
    expected = "waiting for rank 1 (reward; host host1; at step 2, sync b; does not respond); arrived: rank 2"
    assert expected in ranks.sentence("timeout")


def test_of_ranks_at_the_same_instruction_the_one_without_a_sign_of_life_is_named(
    ranks: Ranks, monkeypatch: pytest.MonkeyPatch
) -> None:
    for each in ranks.progress:
        each.report(7, "step 2, run a")
    beats = iter(range(100))

    def beat(_: float) -> None:
        """As the watch of rank 2 does, whose main thread waits; rank 1 is stopped."""
        ranks.store.set(Beat.key(2), json.dumps([next(beats), True]))

    ranks.store.set(Beat.key(1), json.dumps([3, False]))
    beat(0)
    monkeypatch.setattr(progress_module.time, "sleep", beat)
    sentence = ranks.sentence("timeout")
    assert (
        "waiting for rank 1 (reward; host host1; at step 2, run a too; does not respond); arrived: rank 2" in sentence
    )


def test_a_rank_that_runs_is_named_before_one_that_waits_itself(ranks: Ranks, monkeypatch: pytest.MonkeyPatch) -> None:
    for each in ranks.progress:
        each.report(7, "step 2, run a")
    beats = {1: Beat(0, False), 2: Beat(0, True)}

    def beat(_: float) -> None:
        for rank, last in beats.items():
            beats[rank] = Beat(last.number + 1, last.is_waiting)
            ranks.store.set(Beat.key(rank), json.dumps([last.number + 1, last.is_waiting]))

    beat(0)
    monkeypatch.setattr(progress_module.time, "sleep", beat)
    assert "waiting for rank 1 (reward; host host1; at step 2, run a too); arrived: rank 2" in ranks.sentence("timeout")


def test_a_closed_connection_names_the_rank_that_ended(ranks: Ranks) -> None:
    for each in ranks.progress:
        each.report(7, "step 2, run a")
    closed = "Connection closed by peer [10.0.0.1]:99"
    assert ranks.sentence(closed).endswith(
        ": the connection to rank 1 (reward; host host1; at step 2, run a too) or rank 2 (critic; host host2; at step "
        "2, run a too) closed"
    )
    ranks.progress[2].report_end("ValueError: no")
    ended = ": the connection closed, rank 2 (critic; host host2) ended (ValueError: no)"
    assert ranks.sentence(closed).endswith(ended)


def test_a_wait_whose_store_is_gone_says_so() -> None:
    closed = r"^rank 0: the connection to the job's store closed$"
    with pytest.raises(DeadlineError, match=closed) as caught, deadline("rank 0", lambda _: "not read"):
        raise dist.DistNetworkError("Broken pipe")
    assert caught.value.cause == "closed"
    with pytest.raises(ValueError, match="other"), deadline("rank 0", lambda _: ""):
        raise ValueError("other")


def test_a_store_listens_on_its_address_alone() -> None:
    store = Endpoint("--rdzv-endpoint", "127.0.0.1", 0).serve(False, 5)
    with socket.create_connection(("127.0.0.1", store.port), timeout=5):
        pass
    with pytest.raises(ConnectionRefusedError), socket.create_connection(("127.0.0.2", store.port), timeout=5):
        pass
    with pytest.raises(UserError, match=rf"^--rdzv-endpoint localhost:{store.port}: .* \(address already in use\)$"):
        Endpoint("--rdzv-endpoint", "localhost", store.port).serve(True, 5)


def test_a_start_says_who_is_awaited(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr("flexrlhf.comm.store.NOTICE_SECONDS", 0.1)
    with socket.create_server(("127.0.0.1", 0)) as server:
        endpoint = Endpoint("--rdzv-endpoint", "127.0.0.1", server.getsockname()[1])
    with pytest.raises(RunStopped, match=r"node 1 waits for node 0: .*connection refused for 0\.5 s"):
        endpoint.connect(0.5, Notice("node 1 waits for node 0"))
    assert f"flexrlhf: node 1 waits for node 0: {endpoint}: connection refused (0 s)" in capfd.readouterr().err
    store = dist.HashStore()
    store.set("a", "")
    with pytest.raises(RunStopped, match="missing node 1; arrived: node 0"):
        await_keys(store, {"a": "node 0", "b": "node 1"}, 0.5, Notice("node 0 waits"))


@pytest.fixture
def log(tmp_path: Path) -> Iterator[FlightLog]:
    yield FlightLog(tmp_path, {"rank": 1, "host": "b", "pid": 9, "run": "test", "models": "reward"}, keep_steps=2)


def run_steps(log: FlightLog, steps: range) -> None:
    for step in steps:
        span = Span(1, "run", "scores on reward", step, None, 10.0 + step, 0.0)
        log.begin(span)
        span.end = span.start + 0.5
        log.end(span)


def test_a_log_has_what_a_killed_rank_did_last(log: FlightLog, tmp_path: Path) -> None:
    run_steps(log, range(1))
    log.begin(Span(1, "move", "scores", 1, None, 12.0))
    with (tmp_path / "flight" / "rank-1.jsonl").open("ab") as file:
        file.write(b'{"end": {"ra')
    flight = FlightLogs(tmp_path).read(1)
    assert flight.header["models"] == "reward" and flight.place == "step 1, move scores"
    assert [(span.label, span.end) for span in flight.spans] == [("scores on reward", 10.5), ("scores", 0.0)]
    assert FlightLogs(tmp_path).are_there and not FlightLogs(tmp_path / "none").are_there


def test_a_log_keeps_its_last_steps_and_is_removed_at_a_good_end(log: FlightLog, tmp_path: Path) -> None:
    run_steps(log, range(7))
    assert [span.step for span in FlightLogs(tmp_path).read(1).spans] == [4, 5, 6]
    FlightLogs(tmp_path).write_timeline()
    assert [span.step for span in Trace.read(tmp_path / "timeline.json").spans] == [4, 5, 6]
    (tmp_path / "timeline.json").unlink()
    log.close()
    assert not list(tmp_path.iterdir())


def test_a_full_disk_ends_the_log_and_not_the_run(tmp_path: Path) -> None:
    (tmp_path / "flight").mkdir()
    (tmp_path / "flight" / "rank-1.jsonl").symlink_to("/dev/full")
    log = FlightLog(tmp_path, {"rank": 1}, keep_steps=2)
    run_steps(log, range(3))
    log.close()


def test_the_launcher_writes_the_records_that_killed_ranks_could_not(log: FlightLog, tmp_path: Path) -> None:
    run_steps(log, range(1))
    log.begin(Span(1, "move", "scores", 1, None, 12.0))
    own = FlightLog(tmp_path, {"rank": 0, "pid": 8}, keep_steps=2)
    run_steps(own, range(1))
    FlightLogs(tmp_path).write_record(0, {"rank": 0, "pid": 8, "reason": "its own"})
    plan = plan_of([1, 1, 0.5, 0.5], 2)
    reporter = FailureReporter(plan, [tmp_path], (0, 1))
    (found,) = reporter.report({1: ProcessFailure(1, 9, -signal.SIGKILL, "none")})
    name = f"rank 1 (reward; host {socket.gethostname()})"
    assert found.kind == "killed" and reporter.record == tmp_path / "failure"
    assert found.sentence == f"{name} ended the run at step 1, move scores, killed by SIGKILL"
    records = [json.loads((tmp_path / "failure" / f"rank-{rank}.json").read_text()) for rank in (0, 1)]
    assert records[0]["reason"] == "its own"
    assert records[1]["reason"] == found.sentence and records[1]["at"] == "step 1, move scores"
    assert [each["label"] for each in records[1]["instructions"]] == ["scores on reward", "scores"]
    assert [span.label for span in Trace.read(tmp_path / "timeline.json").spans] == ["scores on reward"] * 2
    reporter.report({})
    assert json.loads((tmp_path / "failure" / "rank-1.json").read_text())["reason"] != "ended by the launcher"


@pytest.mark.parametrize(
    ("error", "kind", "end"),
    [
        (UserError("models.actor: no"), "user", "exit code 1: models.actor: no"),
        (KeyError("a"), "error", "exit code 1: KeyError: 'a'"),
        (DeadlineError("rank 0 (actor) at x: late"), "waited", "rank 0 (actor) at x: late"),
    ],
)
def test_an_error_of_a_rank_is_one_line(
    error: Exception, kind: str, end: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(tmp_path / "error.json"))
    write_error(error)
    reporter = FailureReporter(plan_of([1, 1, 0.5, 0.5], 2), [], (0, 1))
    (found,) = reporter.report({0: ProcessFailure(0, 9, 1, str(tmp_path / "error.json"))})
    assert found.kind == kind and found.sentence.endswith(end)
    assert kind == "waited" or found.sentence.startswith("rank 0 (actor, critic, ref; host ")


@pytest.mark.parametrize("exhaust", [lambda: torch.empty(10**15), lambda: bytearray(10**15)], ids=["torch", "Python"])
def test_exhausted_memory_is_named_with_what_was_being_done(exhaust: Callable[[], object]) -> None:
    words = r"^step 3, run train_actor: memory is exhausted \(.*micro_batch_tokens"
    with pytest.raises(RunStopped, match=words), naming_exhaustion("step 3, run train_actor"):
        exhaust()
    # not a model that transformers refuses
    with pytest.raises((MemoryError, RuntimeError)), one_sentence_errors("models.actor"):
        exhaust()
    with pytest.raises(RuntimeError, match="shapes"), naming_exhaustion("step 3"):
        torch.ones(2, 3) @ torch.ones(2, 3)


def test_exhausted_memory_of_a_gpu_names_gaps_between_tensors() -> None:
    words = r"^step 3: memory is exhausted \(CUDA out of memory\. .*debug\.expandable_segments: true$"
    with pytest.raises(RunStopped, match=words), naming_exhaustion("step 3"):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")


@pytest.mark.parametrize(
    ("environment", "found"),
    [
        ({}, ["expandable_segments:True"]),
        ({"PYTORCH_CUDA_ALLOC_CONF": "max_split_size_mb:512"}, ["max_split_size_mb:512,expandable_segments:True"]),
        ({"PYTORCH_ALLOC_CONF": "expandable_segments:False"}, []),
    ],
)
def test_memory_grows_in_place_as_the_environment_leaves_it(
    environment: dict[str, str], found: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Settings of the environment stay: torch would reset the ones that it is not given again."""
    given: list[str] = []
    monkeypatch.setattr(torch._C, "_accelerator_setAllocatorSettings", given.append)
    for name in ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    use_expandable_segments()
    assert given == found
