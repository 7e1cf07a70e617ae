"""Ranks that a factory forks are as those that a launcher starts, and nothing is left of it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from commands import children_of, comm_of, is_alive

from flexrlhf.config.plugins import SHIPPED
from flexrlhf.errors import RunStopped
from flexrlhf.launch.rank_factory import RankFactory

PROBE = """
import json, os, signal, sys, threading
from pathlib import Path

def report():
    facts = {
        "argv": sys.argv[1:], "name": __name__, "parent": os.getppid(), "session": os.getsid(0) == os.getpid(),
        "variables": {key: os.environ.get(key) for key in ("RANK", "OPENBLAS_NUM_THREADS")},
        "loaded": "flexrlhf.launch.worker" in sys.modules, "directory": os.getcwd(),
        "comm": Path("/proc/self/comm").read_text().strip(),
        "sockets": [name for name in os.listdir("/proc/self/fd") if int(name) > 2 and is_open(name)],
        "handlers": [signal.getsignal(each) is signal.SIG_DFL for each in (signal.SIGTERM, signal.SIGUSR1)],
    }
    Path(sys.argv[1]).write_text(json.dumps(facts))

def is_open(name):
    try:
        return os.readlink(f"/proc/self/fd/{name}").startswith(("socket:", "pipe:"))
    except FileNotFoundError:
        return False

report()
import atexit
atexit.register(print, "at the end", flush=True)
match sys.argv[2]:
    case "exit": sys.exit(int(sys.argv[3]))
    case "sentence": sys.exit("a sentence")
    case "raise": raise ValueError("an error")
    case "wait": threading.Event().wait(60)
"""


MODULES = {
    "probe": PROBE,
    "ending_probe": f"from flexrlhf.launch.lifetime import end_with_launcher\nend_with_launcher()\n{PROBE}",
    "threads": "import sys, torch; sys.exit(torch.get_num_threads())",
    "with_thread": "import threading\nthreading.Thread(target=threading.Event().wait, daemon=True).start()",
}
"""Modules of processes; none is found in the current directory."""


@pytest.fixture(scope="module", autouse=True)
def modules(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    directory = tmp_path_factory.mktemp("modules")
    for name, text in MODULES.items():
        (directory / f"{name}.py").write_text(text)
    places = os.pathsep.join([str(directory), *filter(None, [os.environ.get("PYTHONPATH")])])
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", places)
        yield


@pytest.fixture(scope="module")
def factory(modules: None) -> Iterator[RankFactory]:
    factory = RankFactory()
    yield factory
    factory.close()


@pytest.fixture(autouse=True)
def directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current directory."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


def facts(path: Path, pid: int) -> dict[str, object]:
    limit = time.monotonic() + 60
    while not path.exists() or not path.read_text():
        assert time.monotonic() < limit and is_alive(pid), "the process has reported nothing"
        time.sleep(0.02)
    return json.loads(path.read_text())


def test_a_rank_is_as_if_its_launcher_had_started_it(
    factory: RankFactory, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """Its modules are loaded, and its parent, variables, session, signals and exit code are a new process's."""
    command, variables = ["probe", str(tmp_path / "facts"), "exit", "7"], {**os.environ, "RANK": "3"}
    process = factory.fork(command, variables, "rank 3")
    assert process.wait(60) == 7 and process.poll() == 7
    found = facts(tmp_path / "facts", process.pid)
    assert found == {
        **{"argv": command[1:], "name": "__main__", "parent": os.getpid(), "session": True, "loaded": True},
        "variables": {"RANK": "3", "OPENBLAS_NUM_THREADS": os.environ.get("OPENBLAS_NUM_THREADS")},
        **{"directory": str(tmp_path), "comm": "rank 3", "sockets": [], "handlers": [True, True]},
    }
    assert capfd.readouterr().out == "at the end\n"


@pytest.mark.parametrize(
    ("end", "code", "printed"), [("sentence", 1, "a sentence"), ("raise", 1, "ValueError: an error")]
)
def test_ends_of_the_interpreter(
    end: str, code: int, printed: str, factory: RankFactory, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    process = factory.fork(["probe", str(tmp_path / "facts"), end], os.environ, "rank 0")
    assert process.wait(60) == code
    assert printed in capfd.readouterr().err


def test_a_signal_is_an_exit_code_and_the_factory_survives_signals_of_schedulers(
    factory: RankFactory, tmp_path: Path
) -> None:
    processes = [factory.fork(["probe", str(tmp_path / str(n)), "wait"], os.environ, f"rank {n}") for n in (0, 1)]
    for number, process in enumerate(processes):
        facts(tmp_path / str(number), process.pid)
    for child in children_of(os.getpid()):
        if child in [process.pid for process in processes] or is_factory(child):
            os.kill(child, signal.SIGTERM)
    assert [process.wait(60) for process in processes] == [-signal.SIGTERM] * 2
    assert factory.fork(["probe", str(tmp_path / "facts"), "exit", "0"], os.environ, "rank 0").wait(60) == 0


def test_ranks_go_on_without_their_factory_and_the_next_one_has_a_new_one(tmp_path: Path) -> None:
    factory = RankFactory(modules=[])
    first = factory.fork(["probe", str(tmp_path / "first"), "wait"], os.environ, "rank 0")
    facts(tmp_path / "first", first.pid)
    # other tests of this process have one, too
    newest = [pid for pid in children_of(os.getpid()) if is_factory(pid)][-1]
    os.kill(newest, signal.SIGKILL)
    while is_alive(newest):
        time.sleep(0.01)
    second = factory.fork(["probe", str(tmp_path / "second"), "exit", "0"], os.environ, "rank 1")
    assert second.wait(60) == 0 and is_alive(first.pid)
    before = [pid for pid in children_of(os.getpid()) if is_factory(pid)]
    factory.close()
    after = [pid for pid in children_of(os.getpid()) if is_factory(pid)]
    assert len(after) == len(before) - 1 and is_alive(first.pid)
    first.kill()
    assert first.wait(60) == -signal.SIGKILL


def is_factory(pid: int) -> bool:
    return comm_of(pid) == "rank-factory"


def test_a_changed_environment_reaches_the_libraries_that_a_rank_loads() -> None:
    """Libraries read it while they are loaded, so the next rank loads them again."""
    with RankFactory(modules=["torch"]) as factory:
        for number in ("2", "1"):
            rank = factory.fork(["threads"], {**os.environ, "OMP_NUM_THREADS": number}, "rank 0")
            assert rank.wait(60) == int(number)


LAUNCHER = """
import os, sys, time
from flexrlhf.launch.rank_factory import RankFactory
factory = RankFactory(is_copied=sys.argv[1] == "copied", modules=["torch"])
factory.start()
print(os.getpid(), flush=True)
sys.stdin.readline()
rank = factory.fork(["ending_probe", "facts", "wait"], {**os.environ, "FLEXRLHF_LAUNCHER": str(os.getpid())}, "rank 0")
print(rank.pid, flush=True)
time.sleep(60)
"""


@pytest.mark.parametrize("way", ["copied", "started"])
def test_nothing_is_left_of_a_killed_launcher(way: str) -> None:
    """The same for a launcher that is killed before its factory has loaded its modules."""
    for lines in (1, 2):
        command, pipes = [sys.executable, "-c", LAUNCHER, way], {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
        with subprocess.Popen(command, text=True, **pipes) as process:
            assert process.stdin is not None and process.stdout is not None
            process.stdout.readline()
            if lines == 2:
                process.stdin.write("go on\n")
                process.stdin.flush()
                process.stdout.readline()
            started = children_of(process.pid)
            assert len(started) == lines
            process.kill()
        limit = time.monotonic() + 10
        while any(map(is_alive, started)):
            assert time.monotonic() < limit, "processes are left behind"
            time.sleep(0.02)


IN_A_DIRECTORY = """
import sys
from flexrlhf.user_code.process_directories import process_directory
with process_directory() as directory:
    print(directory, flush=True)
    sys.stdin.readline()
"""


def test_directories_of_killed_processes_are_removed_by_the_next_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A finished run, whose lock is free, too, stays."""
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    run = tmp_path / "flexrlhf-run"
    run.mkdir()
    (run / ".lock").touch()

    def begin() -> tuple[subprocess.Popen[str], Path]:
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
        process = subprocess.Popen([sys.executable, "-c", IN_A_DIRECTORY], text=True, **pipes)
        assert process.stdout is not None
        return process, Path(process.stdout.readline().strip())

    (killed, left), (alive, used) = begin(), begin()
    killed.kill()
    killed.communicate()
    assert left.is_dir()
    last, own = begin()
    assert not left.exists() and used.is_dir() and own.is_dir() and run.is_dir()
    for process, directory in ((alive, used), (last, own)):
        process.communicate("end\n")
        assert process.returncode == 0 and not directory.exists()


FORKABLE = """
import os, sys
from flexrlhf.launch.fork_server import problem_after
from flexrlhf.launch.rank_factory import LOADED
problems, looked = [problem_after(["torch"])], []
import torch
for name in ("is_available", "device_count", "_lazy_init", "init", "current_device"):
    setattr(torch.cuda, name, lambda *_, name=name, true=getattr(torch.cuda, name): looked.append(name) or true())
problems.append(problem_after(LOADED))
print([problems, looked, len(os.listdir("/proc/self/task")), torch.distributed.is_initialized()])
print(*sys.modules)
"""


def test_loaded_modules_start_no_thread_and_look_for_no_gpu() -> None:
    """A fork has no threads, and CUDA cannot be used in the fork of a process that has."""
    environment = {name: value for name, value in os.environ.items() if not name.endswith("_NUM_THREADS")}
    found, modules = output_of(FORKABLE, environment)
    assert found == "[['', ''], [], 1, False]"
    # engines and loggers are loaded by the plans that name them
    others = {"deepspeed", "megatron", "vllm", "peft", "ray", "plotly", "datasets", *SHIPPED["loggers"]}
    assert not {name.partition(".")[0] for name in modules.split()} & others


def output_of(code: str, environment: dict[str, str]) -> list[str]:
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def test_libraries_that_cannot_be_forked_are_loaded_by_each_rank(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    with RankFactory(modules=["with_thread"]) as factory:
        process = factory.fork(["probe", str(tmp_path / "facts"), "exit", "3"], os.environ, "rank 0")
        assert process.wait(60) == 3
    assert not facts(tmp_path / "facts", process.pid)["loaded"]
    assert "rank 0 loads its libraries by itself: they start 1 thread" in capfd.readouterr().err


def test_a_factory_that_cannot_load_its_modules_ends_in_one_sentence() -> None:
    factory = RankFactory(modules=["no_such_module"])
    with pytest.raises(RunStopped, match=r"^the process that loads the libraries of .* has ended \(exit code 1\)$"):
        factory.fork(["probe"], os.environ, "rank 0")
