"""Graphs of a user's own in planning: valid ones, and the sentence for each mistake."""

from __future__ import annotations

import signal
import textwrap
from pathlib import Path

import pytest
from pydantic import TypeAdapter
from small_runs import TINY, plan_of

from flexrlhf.config.algorithms import ALGORITHMS, Algorithm, AnyAlgorithm
from flexrlhf.errors import UserError
from flexrlhf.operators.columns import TEXT
from flexrlhf.operators.graph import Operator
from flexrlhf.operators.named_functions import LOSSES
from flexrlhf.user_code import planning_calls

EXAMPLE = Path(__file__).parents[2] / "configs" / "cautious_rewards.py"
SECOND = f"models.reward_second.init={TINY}"
GRPO = ("algorithm.name=grpo", SECOND)


def plan_with(file: Path, *overrides: str, placement: object = None):  # type: ignore[no-untyped-def]
    return plan_of(placement, 2, *GRPO, f"algorithm.graph={file}:make_graph", *overrides)


def written(tmp_path: Path, text: str) -> Path:
    """A file whose graph is that of the example, changed by ``text``, a function of a Graph."""
    file = tmp_path / "graph.py"
    file.write_text(
        EXAMPLE.read_text()
        + "\nfrom dataclasses import replace\nmade = make_graph\n\n\ndef make_graph(spec):\n    graph = made(spec)\n"
        + textwrap.indent(textwrap.dedent(text).strip() + "\n", "    ")
    )
    return file


@pytest.mark.parametrize(
    ("operator", "compares"),
    [
        (Operator("train_actor", "train", "actor", TEXT, function="policy_loss"), False),
        (Operator("train_actor", "train", "actor", TEXT, function="preference_loss"), True),
        (Operator("train_actor", "train", "actor", TEXT, function="file.py:loss"), True),
        (Operator("train_actor", "train", "actor", TEXT, function="file.py:loss", compares=False), False),
        (Operator("logprobs", "forward", "actor", TEXT, ("logprobs",)), False),
    ],
    ids=["package's", "package's of pairs", "own", "own of single responses", "forward"],
)
def test_responses_that_an_own_loss_may_compare_are_in_one_pass(operator: Operator, compares: bool) -> None:
    assert operator.compares_responses is compares


def test_the_algorithms_that_compare_responses_in_training() -> None:
    settings: TypeAdapter[AnyAlgorithm] = TypeAdapter(Algorithm)
    for name in ALGORITHMS:
        graph = settings.validate_python({"name": name}).step_graph()
        compares = {each.compares_responses for each in graph.operators if each.kind == "train"}
        assert compares == {name in ("dpo", "kto", "simpo", "orpo", "reward")}, name


@pytest.mark.parametrize(
    ("placement", "strategy"),
    [([1, 1, 1, 1], "co-located"), ([1, 1, 0.5, 0.5], "interleaving"), ([0.5] * 5, "disaggregated")],
)
def test_the_example_is_planned(placement: list[float], strategy: str) -> None:
    plan = plan_with(EXAMPLE, placement=placement)
    assert plan.strategy == strategy
    assert plan.graph.roles == ("actor", "ref", "reward", "reward_second")
    functions = {each.name: each.function for each in plan.graph.operators}
    assert functions["advantages"] == f"{EXAMPLE}:cautious_advantages"
    assert functions["train_actor"] in LOSSES, "the package's own, by its name"
    assert "second_scores" in functions
    assert any(model.role == "reward_second" for model in plan.placement.models)


def test_a_file_that_has_changed_is_read_again(tmp_path: Path) -> None:
    file = written(tmp_path, "return graph")
    assert len(plan_with(file).graph.roles) == 4
    file.write_text(file.read_text().replace('"reward_second")', '"reward_second", "ref_other")'))
    with pytest.raises(UserError, match=r"models\.ref_other: missing"):
        plan_with(file)


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("return None", "returns NoneType, not a flexrlhf"),
        ("return 1 / 0", r"make_graph raised ZeroDivisionError: division by zero \(graph.py, line 36\)"),
        ("import os\nos._exit(0)", "make_graph ends the process that calls it, exit code 0"),
        ("raise SystemExit(0)", "make_graph raised SystemExit: 0"),
        ("return replace(graph, roles=(*graph.roles, 'judge'))", "role 'judge' is no name of a model"),
        (
            "return replace(graph, operators=(*graph.operators, graph.operators[-1]))",
            "two operators are called 'train_actor'",
        ),
        (
            "return replace(graph, operators=graph.operators[1:])",
            "reads 'tokens', which no operator before it writes",
        ),
        (
            "return replace(graph, operators=tuple(replace(o, function=o.function and o.function + 's') "
            "for o in graph.operators))",
            r"no function 'cautious_advantagess' .* \(did you mean 'cautious_advantages'\?\)",
        ),
        (
            "return replace(graph, operators=tuple(replace(o, kind='forwards') for o in graph.operators))",
            r"kind 'forwards' \(did you mean 'forward'\?\)",
        ),
        (
            "return replace(graph, operators=tuple(replace(o, writes=(*o.writes, 'margin')) for o in graph.operators))",
            "generate: no column 'margin'.*such as scores.margin",
        ),
    ],
)
def test_what_cannot_run_is_refused_in_a_sentence(tmp_path: Path, text: str, sentence: str) -> None:
    with pytest.raises(UserError, match=rf"^algorithm\.graph: .*{sentence}"):
        plan_with(written(tmp_path, text))


@pytest.mark.parametrize(
    "text",
    [
        "import time\ntime.sleep(1000)\n",
        "while True:\n    try:\n        sum([])\n    except Exception:\n        pass\n",
    ],
)
def test_a_file_that_does_not_return_is_refused(tmp_path: Path, text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(planning_calls, "PLANNING_SECONDS", 0.3)
    before = signal.getsignal(signal.SIGALRM), signal.getitimer(signal.ITIMER_REAL)[0] > 0
    (tmp_path / "graph.py").write_text(text + "def make_graph(spec): ...\n")
    with pytest.raises(UserError, match="^algorithm.graph: .*make_graph has not returned within 0.3 s"):
        plan_with(tmp_path / "graph.py")
    assert (signal.getsignal(signal.SIGALRM), signal.getitimer(signal.ITIMER_REAL)[0] > 0) == before


def test_scores_of_a_function_need_no_role(tmp_path: Path) -> None:
    """The vector has no entry for them, whether the graph lists the role or not."""
    few = "return replace(graph, roles=tuple(role for role in graph.roles if role != 'reward'))"
    file = written(tmp_path, few)
    with pytest.raises(UserError, match=r"algorithm\.graph: scores is of role 'reward', which is not among"):
        plan_with(file, "models.reward=null")
    function = "reward={function: 'scores.py:score'}"
    plans = [plan_with(each, "models.reward=null", function, placement=[1, 1, 1]) for each in (file, EXAMPLE)]
    assert [plan.graph.roles for plan in plans] == [("actor", "ref", "reward_second")] * 2


def test_responses_that_own_functions_may_compare_are_trained_on_together(tmp_path: Path) -> None:
    """A combine may compare them, and so may a loss, unless its operator says otherwise."""
    ended = "rollout={segment_tokens: 3, groups: as-ended}"
    refusal = r"\.py:\w+ may compare the responses to a prompt; use wait"
    with pytest.raises(UserError, match=refusal):
        plan_with(EXAMPLE, ended)
    losses = """
    functions = {"combine": {"function": "group_advantages"}, "train": {"function": "make_graph", "compares": COMPARES}}
    return replace(graph, operators=tuple(replace(each, **functions.get(each.kind, {})) for each in graph.operators))
    """
    with pytest.raises(UserError, match=refusal):
        plan_with(written(tmp_path, losses.replace("COMPARES", "None")), ended)
    assert plan_with(written(tmp_path, losses.replace("COMPARES", "False")), ended).batch.segments == 3


def test_a_graph_that_samples_needs_settings_to_sample_with(tmp_path: Path) -> None:
    """An algorithm that trains on responses of the data set has no temperature."""
    file = tmp_path / "graph.py"
    file.write_text(
        "from dataclasses import replace\n"
        "from flexrlhf.operators.graph import GENERATE\n"
        "def make_graph(spec):\n"
        "    made = spec.step_graph()\n"
        "    return replace(made, operators=(replace(GENERATE.next_to_data, suffix='.own'), *made.operators))\n"
    )
    with pytest.raises(UserError, match=r"^algorithm\.graph: .* and sft, which .* has no temperature .* such as grpo"):
        plan_of(None, 2, f"algorithm={{name: sft, graph: '{file}:make_graph'}}", "models.reward=null")
