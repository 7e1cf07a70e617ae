"""The display of a run on a terminal: what stays, what changes, and that nothing is wider than the terminal."""

from __future__ import annotations

import io
import os
import pty
import struct
import subprocess
import sys
import termios
from fcntl import ioctl
from pathlib import Path

import pytest
from rich.console import Console, RenderableType
from test_step_text import ROW

from flexrlhf.display.events import Doing, RunBegins, RunEnds, StepDone
from flexrlhf.display.live_view import LiveView

SHARES = {"time_generate": 0.4, "time_forward": 0.1, "time_train": 0.3, "time_wait": 0.15, "time_other": 0.05}
BEGIN = RunBegins("a-run-with-a-rather-long-name-as-some-people-give-them", "title", (("actor", "rank 0"),), 50)


def shown(what: RenderableType, width: int) -> list[str]:
    file = io.StringIO()
    Console(file=file, width=width, force_terminal=False).print(what)
    return file.getvalue().splitlines()


def step(number: int, **further: float) -> StepDone:
    return StepDone(BEGIN.run, number, 50, {**ROW, **SHARES, **further})


@pytest.mark.parametrize("width", [80, 120])
def test_nothing_is_wider_than_the_terminal(width: int) -> None:
    view = LiveView("starting 2 ranks")
    texts = [view.panel(width)]
    for event in (BEGIN, Doing(BEGIN.run, "loading the models"), step(0), step(1), step(2, score_failed=0.5)):
        texts += [*view.lines(event, width), view.panel(width)]
    lines = [line for text in texts for line in shown(text, 1000)]
    assert max(map(len, lines)) <= width, max(lines, key=len)


def test_the_panel_has_progress_throughput_time_left_and_shares() -> None:
    view = LiveView("starting 2 ranks")
    assert "starting 2 ranks" in " ".join(shown(view.panel(80), 80))
    for event in (BEGIN, step(0), Doing(BEGIN.run, "train_actor on actor", 1, rare=False), step(1)):
        view.lines(event, 80)
    *_, newest, empty, bar, doing, shares = shown(view.panel(80), 80)
    assert newest.split() == ["1", "1.25", "0.5", "17", "-0.01", "0.125", "2"] and not empty.strip()
    assert "2/50 steps, 1:36 left" in bar
    assert "train_actor on actor" in doing and "32 samples/s, 1.24k tokens/s" in doing
    assert shares.strip() == "time of all ranks: generate 40 %, forward 10 %, train 30 %, wait 15 %, other 5 %"


def test_some_steps_stay_with_evaluations_and_problems() -> None:
    view = LiveView("starting")
    view.lines(BEGIN, 80)
    stays = {number: [str(line) for line in view.lines(step(number), 80)] for number in range(4)}
    head, first = stays[0]
    assert head.split() == ["step", "reward_mean", "kl", "response_length", "policy_loss", "value_loss", "s"]
    assert len(head) == len(first) and first.split()[0] == "0"
    assert [number for number, lines in stays.items() if lines] == [0, 2]
    _, problem, evaluation = (str(line) for line in view.lines(step(5, score_failed=0.5, eval_reward_mean=2.0), 80))
    assert problem.strip() == "score_failed 0.5" and evaluation.strip() == "eval_reward_mean 2"
    (end,) = (str(line) for line in view.lines(RunEnds(BEGIN.run, 6), 80))
    assert end.startswith(f"{BEGIN.run}: 6 steps done, 32 samples/s")


def test_what_is_rare_and_takes_long_stays() -> None:
    times = iter(range(0, 1000, 2))
    view = LiveView("starting", lambda: float(next(times)))
    lines = view.lines(BEGIN, 80)
    assert str(lines[0]).startswith("starting: ")
    view.lines(Doing("a", "writing a checkpoint of actor", 3), 80)
    assert str(view.lines(Doing("a", "generate on actor", 4, rare=False), 80)[0]).startswith("step 3: writing a che")
    assert not view.lines(Doing("a", "train_actor on actor", 4, rare=False), 80)


SCRIPT = """
import os, subprocess, sys
from pathlib import Path
from flexrlhf.display.live_display import is_terminal
from flexrlhf.display.events import EventFile, RunBegins, RunEnds, StepDone
from flexrlhf.display.live_display import live_display
assert is_terminal()
path = Path(sys.argv[1])
with live_display(path, "starting"):
    send = EventFile(path)
    send(RunBegins("first", "first: ppo", (("actor", "rank 0"),), 3))
    for step in range(3):
        send(StepDone("first", step, 3, {"seconds": 0.1, "kl": 1.0}))
    subprocess.run([sys.executable, "-c", "import sys; print('of a child', sys.stdout.isatty()); sys.exit('wrong')"])
    print("of this process", flush=True)
    print("without an end", end="", file=sys.stderr, flush=True)
    send(RunEnds("first", 3))
assert is_terminal()
print("afterwards")
"""


def test_a_terminal_shows_events_and_what_all_processes_print(tmp_path: Path) -> None:
    """In a pseudo-terminal of 80 columns; afterwards it is as before."""
    master, slave = pty.openpty()
    ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", 40, 80, 0, 0))
    process = subprocess.Popen(
        [sys.executable, "-c", SCRIPT, str(tmp_path / "events")],
        stdin=slave,
        stdout=slave,
        stderr=slave,
        env={**os.environ, "TERM": "xterm", "NO_COLOR": "1"},
    )
    os.close(slave)
    output = b""
    while True:
        try:
            data = os.read(master, 4096)
        except OSError:
            break
        if not data:
            break
        output += data
    os.close(master)
    text = output.decode()
    assert process.wait(timeout=60) == 0, text
    for expected in ("first: ppo", "of a child False", "wrong", "of this process", "without an end", "3 steps done"):
        assert expected in text, text
    assert text.endswith("afterwards\r\n") and text.rindex("\x1b[?25h") > text.index("\x1b[?25l")
