"""Settings of policies and sources: valid ones, sentences of refusals, and the graph that follows."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import TypeAdapter
from small_runs import PPO, spec_of

from flexrlhf.config.algorithms.policy_sections import KlSpec, PtxSpec, TruncationPenalty
from flexrlhf.config.algorithms.ppo import PpoSpec
from flexrlhf.config.reward_sources import FunctionSource, ModelSource, RuleSource, ServiceSource, Sources
from flexrlhf.operators.graph import Operator

# --- settings of policies


def test_every_form_of_truncation() -> None:
    for word in ("none", "bootstrap", "mask"):
        assert PpoSpec.model_validate({"truncation": word}).truncation == word
    assert PpoSpec.model_validate({"truncation": {"penalty": 2}}).truncation == TruncationPenalty(penalty=2.0)


# --- the graph


def operators_of(**settings: Any) -> dict[str, Operator]:
    return {operator.name: operator for operator in PpoSpec.model_validate(settings).step_graph().operators}


def test_without_a_penalty_there_is_no_reference() -> None:
    graph = PpoSpec(kl=None).step_graph()
    assert graph.roles == ("actor", "critic", "reward")
    assert "ref_logprobs" not in {name for operator in graph.operators for name in (*operator.reads, *operator.writes)}
    assert PpoSpec().step_graph().roles == ("actor", "critic", "ref", "reward")


@pytest.mark.parametrize(("place", "training"), [("reward", False), ("loss", True)])
def test_the_loss_reads_the_reference_where_the_penalty_is_its_own(place: str, training: bool) -> None:
    operators = operators_of(kl={"place": place})
    assert "ref_logprobs" in operators["advantages"].reads, "the measured KL is reported in both places"
    assert ("ref_logprobs" in operators["train_actor"].reads) == training
    assert "ref_logprobs" not in operators["train_critic"].reads


def test_training_reads_the_mask_of_answers_that_count() -> None:
    operators = operators_of()
    assert "loss_mask" in operators["advantages"].writes
    for name in ("train_actor", "train_critic"):
        assert "loss_mask" in operators[name].reads and "response_mask" not in operators[name].reads


@pytest.mark.parametrize(
    ("settings", "barrier"),
    [
        ({}, True),
        ({"whiten": "mini_batch"}, False),
        ({"whiten": "none"}, False),
        ({"whiten": "none", "normalise_scores": "running"}, False),
        ({"whiten": "none", "normalise_scores": "batch"}, True),
        ({"whiten": "none", "kl": {"target": 4.0}}, False),
    ],
)
def test_what_needs_all_rows_at_once_ends_chunks(settings: dict[str, Any], barrier: bool) -> None:
    assert operators_of(**settings)["advantages"].barrier == barrier


def test_several_epochs_wait_for_all_chunks() -> None:
    for epochs in (1, 2):
        operators = operators_of(epochs=epochs)
        assert [operators[name].barrier for name in ("train_actor", "train_critic")] == [epochs == 2] * 2


def test_only_the_actor_reads_pretraining_texts() -> None:
    graph = PpoSpec(ptx=PtxSpec(path="texts.jsonl")).step_graph()
    texts = ("tokens.ptx", "attention_mask.ptx", "loss_mask.ptx")
    operators = {operator.name: operator for operator in graph.operators}
    assert operators["train_actor"].extra_reads == texts and operators["train_actor"].extra_loss == "ptx"
    assert graph.inputs == ("prompts", "prompt_mask", *texts)
    assert all(not operator.extra_reads for name, operator in operators.items() if name != "train_actor")


def test_a_frozen_actor_is_the_graphs_first_step() -> None:
    graph = PpoSpec(freeze_actor_steps=3, kl=KlSpec()).step_graph()
    assert (graph.first_step("actor"), graph.first_step("critic"), graph.first_step("ref")) == (3, 0, 0)


# --- sources of scores


def parsed(value: Any) -> tuple[Any, ...]:
    found: tuple[Any, ...] = TypeAdapter(Sources).validate_python(value)
    return found


def test_one_source_is_a_list_of_one() -> None:
    assert parsed({"model": "reward"}) == (ModelSource(model="reward"),)
    assert parsed(ModelSource(model="reward")) == (ModelSource(model="reward"),)
    assert parsed([{"model": "reward"}]) == (ModelSource(model="reward"),)


def test_the_kind_of_a_source_follows_from_its_key() -> None:
    kinds = parsed([{"model": "reward"}, {"function": "a.py:f"}, {"url": "http://a"}, {"rule": "gsm8k"}])
    assert [type(source) for source in kinds] == [ModelSource, FunctionSource, ServiceSource, RuleSource]
    assert kinds[2].url == ("http://a",)
    assert [source.weight for source in kinds] == [1.0] * 4
    assert parsed(kinds) == kinds


def test_a_run_has_the_sources_of_both_sections() -> None:
    spec = spec_of(None, 1, "reward=[{model: reward, weight: 0.5}, {rule: length, target_tokens: 4}]")
    assert spec.reward == (ModelSource(model="reward", weight=0.5), RuleSource(rule="length", target_tokens=4))
    assert spec.cost is None and spec_of(None, 1).reward is None
    assert "reward" not in PPO
