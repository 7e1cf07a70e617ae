"""Rows that reasoning-gym generates, and its scores: by a stand-in, and by the library where it is installed."""

from __future__ import annotations

import math
import os
import subprocess
import sys
from ast import literal_eval
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from small_runs import plan_of

from flexrlhf.config.reward_sources import RuleSource
from flexrlhf.data.files import Row, is_present, read_rows
from flexrlhf.data.text_rows import TextRows
from flexrlhf.errors import UserError
from flexrlhf.rewards.base import Sample, Scores
from flexrlhf.rewards.checks import SourceChecks
from flexrlhf.rewards.scorer import Scorer
from flexrlhf.runs.fingerprints import needed_extras

STAND_INS = Path(__file__).parents[1] / "fixtures" / "stand_ins"
SUMS = "reasoning-gym:sums?size=4&largest=5"
RULE = RuleSource(rule="reasoning-gym")


@pytest.fixture
def stand_in(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(STAND_INS)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, (str(STAND_INS), os.environ.get("PYTHONPATH")))))


@pytest.fixture
def library() -> Any:
    return pytest.importorskip("reasoning_gym")


def scored(rows: Sequence[Row], answers: Sequence[str]) -> Scores:
    scorer = Scorer([RULE], "reward", 120)
    try:
        return scorer.score([Sample("", answer, 3, row) for row, answer in zip(rows, answers, strict=True)])
    finally:
        scorer.close()


def rows_of_another_process(path: str, hash_seed: str) -> Any:
    code = f"from flexrlhf.data.files import read_rows; print(read_rows({path!r}))"
    environment = {**os.environ, "PYTHONHASHSEED": hash_seed}
    return literal_eval(subprocess.check_output([sys.executable, "-c", code], env=environment, text=True))


# --- rows


@pytest.mark.usefixtures("stand_in")
def test_rows_are_the_same_in_every_process() -> None:
    assert read_rows(SUMS) == rows_of_another_process(SUMS, "1") == rows_of_another_process(SUMS, "2")


@pytest.mark.usefixtures("stand_in")
def test_a_task_has_its_settings_and_begins_at_seed_0() -> None:
    rows = read_rows("reasoning-gym:sums?size=3&largest=1")
    assert [row["question"] for row in rows] == ["Add (0, 0, 0).", "Add (1, 0, 0).", "Add (2, 0, 0)."]
    assert [row["answer"] for row in rows] == ["0", "1", "2"]
    assert read_rows("reasoning-gym:sums?size=2&seed=1&largest=1")[0]["question"] == rows[1]["question"]
    assert len(read_rows("reasoning-gym:sums")) == 500
    entry = literal_eval(rows[1]["entry"])
    assert entry["metadata"] == {"terms": (1, 0, 0), "of_numpy": 0.5, "half": "1/2"}


@pytest.mark.usefixtures("stand_in")
def test_rows_are_questions_with_answers() -> None:
    path = "reasoning-gym:sums?size=1&largest=1"
    assert TextRows.usable(path, needs="prompts")[0].prompt == "Add (0, 0, 0).\n"
    assert TextRows.usable(path, needs="responses")[0].responses == ("0",)


@pytest.mark.usefixtures("stand_in")
@pytest.mark.parametrize(
    ("path", "sentence"),
    [
        ("reasoning-gym:sum", "reasoning-gym has no task 'sum' (did you mean 'sums'?)"),
        (
            "reasoning-gym:sums?large=1",
            "sums has no setting 'large' (did you mean 'largest'?); it has largest, seed, size",
        ),
        ("reasoning-gym:sums?largest=0", "sums refuses its settings: largest must be positive"),
        ("reasoning-gym:sums?largest=[1]", "sums refuses its settings: '>' not supported between instances of 'list'"),
        ("reasoning-gym:sums?seed=null", "seed must be an integer, found null"),
        ("reasoning-gym:sums?seed", "expected NAME=VALUE after ?, found 'seed'"),
        ("reasoning-gym:sums?size=[", "the value of size is not YAML: expected the node content"),
    ],
)
def test_a_task_that_cannot_be_generated_is_one_sentence(path: str, sentence: str) -> None:
    with pytest.raises(UserError) as caught:
        read_rows(path)
    assert str(caught.value).startswith(f"{path}: {sentence}") and "\n" not in str(caught.value)


@pytest.mark.usefixtures("stand_in")
def test_a_task_without_rows_is_refused() -> None:
    with pytest.raises(UserError, match="has no rows"):
        read_rows("reasoning-gym:sums?size=0")


def test_without_the_library_rows_and_rule_name_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in ("data.reasoning_tasks", "rewards.checks"):
        monkeypatch.setattr(f"flexrlhf.{module}.find_spec", lambda _: None)
    with pytest.raises(UserError) as caught:
        read_rows("reasoning-gym:chain_sum")
    needs = "needs reasoning-gym, which is not installed: pip install 'flexrlhf[reasoning]'"
    assert str(caught.value) == f"reasoning-gym:chain_sum: {needs}"
    with pytest.raises(UserError) as caught:
        SourceChecks([RULE]).check()
    assert (
        str(caught.value) == "reward.rule: reasoning-gym needs the package reasoning-gym; install flexrlhf[reasoning]"
    )
    plan = plan_of(None, 2, "data.path=reasoning-gym:chain_sum")
    assert not is_present(plan.spec.data.path or "")
    assert plan.data.sources[0].absent_line == (
        "data: reasoning-gym:chain_sum needs reasoning-gym (flexrlhf[reasoning]): no rows are checked"
    )


def test_machines_compare_the_version_that_generates_the_rows() -> None:
    assert needed_extras([plan_of(None, 2, "data.path=reasoning-gym:chain_sum")]) == ["reasoning"]
    assert needed_extras([plan_of(None, 2, "eval={path: reasoning-gym:chain_sum}")]) == ["reasoning"]


# --- scores


@pytest.mark.usefixtures("stand_in")
def test_the_answer_between_tags_is_scored_by_its_task(capsys: pytest.CaptureFixture[str]) -> None:
    rows = read_rows("reasoning-gym:sums?size=4&largest=2")
    right = [row["answer"] for row in rows]
    answers = [f"3? <answer>0</answer> No.\n<answer>{right[0]}</answer>", "<answer>99</answer>", right[2], right[3]]
    assert scored(rows, answers) == Scores([0.5, 0.0, 0.0, 0.0], None, 0)
    assert capsys.readouterr().err == ""


@pytest.mark.usefixtures("stand_in")
def test_an_answer_that_a_task_cannot_read_is_wrong_and_a_row_of_no_task_has_no_score(
    capsys: pytest.CaptureFixture[str],
) -> None:
    row = read_rows("reasoning-gym:sums?size=1&largest=1")[0]
    found = scored([row, row, {}], ["<answer>0</answer>", "<answer>zero</answer>", "<answer>0</answer>"])
    assert found.totals[:2] == [1.0, 0.0] and math.isnan(found.totals[2]) and found.failed == 1
    assert "reward.rule reasoning-gym: sums raised ValueError: " in capsys.readouterr().err
    assert math.isnan(scored([{}], [""]).totals[0])
    assert "reward.rule reasoning-gym: a row has no task of reasoning-gym: TypeError" in capsys.readouterr().err


def test_rows_of_no_task_are_refused() -> None:
    with pytest.raises(UserError) as caught:
        SourceChecks([RULE], "reward").check_columns(["question", "answer"], "rows.jsonl")
    assert str(caught.value) == (
        "reward.rule: reasoning-gym reads 'entry', no column of rows.jsonl; there are question, answer"
    )


# --- the library


def test_the_library_generates_known_rows(library: Any) -> None:
    rows = read_rows("reasoning-gym:chain_sum?size=2&max_terms=3")
    assert rows[0]["question"] == "State the final answer to the following arithmetic problem: 1663 - 5242 - 9376 ="
    assert rows[0]["answer"] == "-12955"


@pytest.mark.parametrize("task", ["word_ladder", "ransom_note", "list_functions", "gsm_symbolic"])
def test_rows_of_the_library_are_the_same_in_every_process(task: str, library: Any) -> None:
    path = f"reasoning-gym:{task}?size=20"
    assert read_rows(path) == rows_of_another_process(path, "1")


@pytest.mark.parametrize("task", ["chain_sum", "arc_1d", "rearc", "knights_knaves", "gsm_symbolic", "word_ladder"])
def test_the_library_finds_its_own_answers_right(task: str, library: Any) -> None:
    rows = read_rows(f"reasoning-gym:{task}?size=3")
    assert scored(rows, [f"<answer>{row['answer']}</answer>" for row in rows]).totals == [1, 1, 1]
    assert max(scored(rows, ["<answer>no</answer>"] * 3).totals) < 0.1
