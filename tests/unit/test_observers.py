"""Observers of a run: which there are, and the order that each needs."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from small_runs import plan_of

from flexrlhf.display.events import Doing, Event, EventSender
from flexrlhf.trainer.execution import Execution, Observer
from flexrlhf.trainer.observers import Display, make_observers

DEBUG = "debug={replay: other, record_columns: true, run_delay_seconds: 0.5}"
NAMED = ("recorder", "controllers", "ledger", "flight", "work", "results", "checkpointer")


def observed(*overrides: str) -> list[str]:
    """Return the observers of a run by name, in order."""
    parts: dict[str, Any] = {name: type(name, (Observer,), {})() for name in NAMED}
    rank = SimpleNamespace(
        **{"plan": plan_of(None, 1, *overrides), "rank": 0, "decode": str, "text": str, "models": {}},
        **dict.fromkeys(("read_reply", "events", "meter", "report_memory")),
    )
    rank.flight = parts["flight"]
    results = parts["results"]
    results.recorder, results.work = parts["recorder"], parts["work"]
    states = (parts["controllers"], parts["ledger"])
    made = make_observers(rank, *states, results, parts["checkpointer"])  # type: ignore[arg-type]
    return [type(each).__name__ for each in made]


@pytest.mark.parametrize(
    ("first", "second"),
    [
        ("Replay", "Samples"),
        ("Replay", "ColumnFiles"),
        ("Samples", "recorder"),
        ("ledger", "recorder"),
        ("recorder", "controllers"),
        ("ColumnFiles", "flight"),
        ("PeakMemory", "flight"),
        ("flight", "Delay"),
        ("flight", "work"),
        ("work", "results"),
        ("results", "checkpointer"),
    ],
)
def test_one_observer_receives_an_event_before_another(first: str, second: str) -> None:
    names = observed(DEBUG)
    assert names.index(first) < names.index(second)


def test_a_run_without_debugging_has_no_observer_for_it() -> None:
    assert set(observed(DEBUG)) - set(observed()) == {"Replay", "ColumnFiles", "Delay"}


def test_a_display_receives_instructions_in_words() -> None:
    sent: list[Event] = []
    plan = plan_of(None, 1, "steps=2")
    display = Display(EventSender(sent.append), "run")
    for position, instruction in enumerate(plan.schedule.instructions):
        display.begin(Execution(position, 1, instruction))
    assert sent[0] == Doing("run", "generate on actor", 1, rare=False)
    assert sent[-1] == Doing("run", f"saving {plan.schedule.instructions[-1].label}", 1, rare=True)
