"""Graphs whose scores come from several sources: operators, columns, roles and refusals."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from small_runs import TINY, plan_of, spec_of

from flexrlhf.config.spec import Spec
from flexrlhf.operators.columns import TEXT, Column
from flexrlhf.operators.graph import Graph, Operator
from flexrlhf.plan.algorithm_graph import heads_of, make_graph
from flexrlhf.plan.score_sources import with_sources

ANSWERED = (*TEXT, "response_mask", "finished")
MODELS = f"models.reward_style={{init: {TINY}}}"


def graph_of(reward: str, *overrides: str) -> Graph:
    return make_graph(spec_of(None, 1, f"reward={reward}", *overrides))


def added(graph: Graph) -> list[Operator]:
    """The operators that stand where that of the reward model stood: between its neighbours."""
    names = [operator.name for operator in graph.operators]
    return list(graph.operators[names.index("ref_logprobs") + 1 : names.index("values")])


def by_name(graph: Graph) -> dict[str, Operator]:
    return {operator.name: operator for operator in graph.operators}


def outline(operators: list[Operator]) -> list[tuple[str, str, str, tuple[str, ...], tuple[str, ...]]]:
    return [(o.name, o.kind, o.role, o.reads, o.writes) for o in operators]


# --- sources that are called


def test_one_model_of_the_sections_name_changes_nothing() -> None:
    plain = make_graph(spec_of(None, 1))
    assert graph_of("{model: reward}") == plain
    assert outline(added(plain)) == [("scores", "forward", "reward", TEXT, ("scores",))]


@pytest.mark.parametrize("source", ["{rule: gsm8k}", "{function: 'a.py:f'}", "{url: 'http://a'}"])
def test_what_is_no_model_takes_no_place(source: str) -> None:
    """It is called where the responses are, and the vector loses its entry."""
    graph = graph_of(source)
    assert outline(added(graph)) == [("scores", "score", "actor", ANSWERED, ("scores",))]
    assert added(graph)[0].function == "reward" and added(graph)[0].call is None
    assert graph.roles == ("actor", "critic", "ref")
    assert "token_scores" not in by_name(graph)["advantages"].reads


def test_several_of_them_are_asked_at_once() -> None:
    graph = graph_of("[{rule: gsm8k}, {rule: length, target_tokens: 4}, {url: 'http://a', level: token}]")
    assert outline(added(graph)) == [("scores", "score", "actor", ANSWERED, ("scores", "token_scores"))]


def test_a_model_with_a_weight_is_weighed() -> None:
    graph = graph_of("{model: reward, weight: 0.5}")
    assert outline(added(graph)) == [
        ("scores_reward", "forward", "reward", TEXT, ("scores.reward",)),
        ("scores", "combine", "actor", ("scores.reward", "response_mask"), ("scores",)),
    ]
    assert graph.roles == ("actor", "critic", "ref", "reward")
    assert heads_of(graph)["reward"] == "scalar"


def test_several_models_are_roles_in_their_order() -> None:
    graph = graph_of("[{model: reward_style}, {model: reward, level: token}, {rule: gsm8k}]", MODELS)
    assert outline(added(graph)) == [
        ("scores_reward_style", "forward", "reward_style", TEXT, ("scores.reward_style",)),
        ("scores_reward", "forward", "reward", TEXT, ("token_scores.reward",)),
        ("scores_called", "score", "actor", ANSWERED, ("scores.called",)),
        (
            "scores",
            "combine",
            "actor",
            ("scores.reward_style", "token_scores.reward", "scores.called", "response_mask"),
            ("scores", "token_scores"),
        ),
    ]
    assert graph.roles == ("actor", "critic", "ref", "reward_style", "reward")
    assert added(graph)[-1].function == "reward"
    assert {heads_of(graph)[role] for role in ("reward_style", "reward")} == {"scalar"}


def test_scores_of_tokens_from_outside_beside_a_model() -> None:
    graph = graph_of("[{model: reward}, {function: 'a.py:f', level: token}]")
    called, weighed = added(graph)[1:]
    assert called.writes == ("scores.called", "token_scores.called")
    assert weighed.reads == ("scores.reward", *called.writes, "response_mask")


@pytest.mark.parametrize("reward", ["{model: reward, level: token}", "{url: 'http://a', level: token}"])
def test_whoever_reads_scores_reads_those_of_tokens_too(reward: str) -> None:
    reads = by_name(graph_of(reward))["advantages"].reads
    assert reads[-1] == "token_scores" and len(set(reads)) == len(reads)


@pytest.mark.parametrize(
    "reward",
    [
        "{rule: gsm8k}",
        "{model: reward, level: token}",
        "[{model: reward}, {model: reward_style, level: token}, {function: 'a.py:f', level: token}]",
    ],
)
def test_every_column_is_written_once_before_it_is_read(reward: str) -> None:
    graph = graph_of(reward, MODELS)
    known = set(graph.inputs)
    for operator in graph.operators:
        assert set(operator.reads) <= known | {"policy_version"}, operator.name
        assert not set(operator.writes) & known, operator.name
        known |= set(operator.writes)
        assert len(set(operator.reads)) == len(operator.reads), operator.name
        assert all(Column.of(name).name == name for name in operator.reads)
    names = [operator.name for operator in graph.operators]
    assert len(set(names)) == len(names) and graph.waves


@pytest.mark.parametrize(
    ("reward", "placement", "roles"),
    [
        ("{rule: gsm8k}", [1, 1, 1], ["actor", "critic", "ref"]),
        ("{model: reward, weight: 2}", [1, 1, 0.5, 0.5], ["actor", "critic", "ref", "reward"]),
        (
            "[{model: reward}, {model: reward_style}, {rule: gsm8k}]",
            [1, 1, 1, 0.5, 0.5],
            ["actor", "critic", "ref", "reward", "reward_style"],
        ),
    ],
)
def test_a_vector_has_an_entry_for_every_model(reward: str, placement: list[float], roles: list[str]) -> None:
    models = [MODELS] if "style" in reward else []
    if "model" not in reward:
        models = ["models.reward=null", f"models.critic={{init: {TINY}}}"]
    plan = plan_of(placement, 2, f"reward={reward}", *models)
    assert [model.name for model in plan.placement.models] == roles


# --- sources of both sections, and of several texts

GENERATE = Operator("generate", "generate", "actor", ("prompts", "prompt_mask"), ANSWERED)
GREEDY = tuple(f"{name}.greedy" for name in ANSWERED)
BOTH = Graph(
    operators=(
        GENERATE,
        replace(GENERATE, name="greedy", writes=GREEDY, suffix=".greedy"),
        Operator("scores", "forward", "reward", TEXT, ("scores",)),
        Operator("scores_greedy", "forward", "reward", GREEDY[:2], ("scores.greedy",), suffix=".greedy"),
        Operator("costs", "forward", "cost", TEXT, ("scores.cost",), suffix=".cost"),
        Operator("advantages", "combine", "actor", ("scores", "scores.greedy", "scores.cost", "response_mask")),
    ),
    roles=("actor", "reward", "cost"),
    data="prompts",
    inputs=("prompts", "prompt_mask"),
    evaluation=(GENERATE, Operator("held_out", "forward", "reward", TEXT, ("scores",))),
)


def of_both(reward: Any = None, cost: Any = None) -> Graph:
    spec = spec_of(None, 1)
    sources: dict[str, Any] = {"reward": reward, "cost": cost}
    return with_sources(BOTH, Spec.model_validate(spec.model_dump(by_alias=True, exclude_unset=True) | sources))


def test_sources_of_one_section_leave_the_other_alone() -> None:
    graph = of_both(reward={"rule": "gsm8k"})
    assert graph.roles == ("actor", "cost")
    assert by_name(graph)["costs"] == by_name(BOTH)["costs"]
    assert of_both() == BOTH


def test_each_text_is_asked_about_by_itself() -> None:
    """The qualifier of its columns stays, for the mask and the finish reason, too."""
    operators = by_name(of_both(reward=[{"model": "reward"}, {"rule": "gsm8k"}]))
    assert operators["scores_greedy_reward"].reads == GREEDY[:2]
    assert operators["scores_greedy_reward"].writes == ("scores.reward.greedy",)
    assert operators["scores_greedy_called"].reads == GREEDY
    assert operators["scores_greedy_called"].writes == ("scores.called.greedy",)
    assert operators["scores_greedy"].reads == ("scores.reward.greedy", "scores.called.greedy", GREEDY[2])
    assert operators["scores_greedy"].writes == ("scores.greedy",)
    assert {operators[f"scores_greedy{end}"].suffix for end in ("", "_reward", "_called")} == {".greedy"}
    assert operators["scores_called"].reads == ANSWERED and operators["scores_called"].suffix == ""
    alone = by_name(of_both(reward={"rule": "gsm8k"}))
    assert (alone["scores_greedy"].reads, alone["scores_greedy"].writes) == (GREEDY, ("scores.greedy",))
    assert (alone["scores"].reads, alone["scores"].writes) == (ANSWERED, ("scores",))


def test_evaluations_ask_the_same_sources() -> None:
    graph = of_both(reward=[{"model": "reward"}, {"rule": "gsm8k"}])
    assert [operator.name for operator in graph.evaluation] == [
        "generate",
        "held_out_reward",
        "held_out_called",
        "held_out",
    ]


def test_sources_of_costs_have_their_own_section_and_columns() -> None:
    operators = by_name(of_both(cost=[{"model": "cost"}, {"rule": "gsm8k"}]))
    assert operators["costs"].function == operators["costs_called"].function == "cost"
    assert operators["costs_called"].writes == ("scores.called.cost",)
    assert operators["costs"].reads[:2] == ("scores.cost.cost", "scores.called.cost")
    assert operators["costs"].writes == ("scores.cost",)


def test_scores_of_tokens_in_both_sections_are_read_once_each() -> None:
    token = {"url": "http://a", "level": "token"}
    for reward, cost, expected in (
        (token, None, {"token_scores", "token_scores.greedy"}),
        (token, {"rule": "gsm8k"}, {"token_scores", "token_scores.greedy"}),
        ({"rule": "gsm8k"}, token, {"token_scores.cost"}),
        (token, token, {"token_scores", "token_scores.greedy", "token_scores.cost"}),
    ):
        reads = by_name(of_both(reward, cost))["advantages"].reads
        assert {name for name in reads if name.startswith("token_scores")} == expected
        assert len(reads) == 4 + len(expected)
