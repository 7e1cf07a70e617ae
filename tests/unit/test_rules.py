"""Rules: what a row may read, the form of a sentence, and that plans and searches ask the same table alike."""

from __future__ import annotations

import pytest
from small_runs import plan_of

from flexrlhf.config.model_settings import ModelSpec
from flexrlhf.config.rules import NO, Rule, RuleTable, made_by
from flexrlhf.errors import Alternative
from flexrlhf.guideline.advice.allowed_settings import CHOSEN, UNTRIED
from flexrlhf.plan.model_view import ModelView, PlacedView
from flexrlhf.plan.size_rules import MODEL_RULES


@pytest.mark.parametrize(
    "rule",
    [
        Rule("zero", {"layout.dims": ((1,),)}),
        Rule("zero", {"model.layout": (1,)}),
        Rule("zero", {"role.layout": (1,)}, reason="its layout"),
        Rule("zero", {"sizes.replicas": (1,)}, reason="its replicas"),
        Rule("zero", {"sizes._settings": (1,)}, reason="behind a fact"),
        Rule("zero", {"zero": made_by(tuple, "devices._model")}, reason="behind devices"),
        Rule("tpp", {"compile": NO}),
    ],
)
def test_a_rule_cannot_read_what_a_search_does_not_have(rule: Rule) -> None:
    """A layout is chosen after settings are; a rule that read one would be answered otherwise by a plan."""
    with pytest.raises((AssertionError, AttributeError)):
        RuleTable(PlacedView, (rule,))


def test_a_search_remembers_by_all_settings_that_rules_read() -> None:
    read = MODEL_RULES.subjects & ModelSpec.model_fields.keys()
    assert read == {*CHOSEN, *(read & UNTRIED)}


def test_a_refusal_says_what_was_found_what_it_needs_and_what_works() -> None:
    view = ModelView(plan_of(None, 2, "models.actor.liger=true").placement["actor"])
    (error,) = RuleTable(ModelView, (Rule("liger", {"compile": (True,)}),)).refusals(view)
    assert str(error) == "models.actor.liger: true goes with compile true, found false; use false, or compile true"
    assert error.alternatives == (
        Alternative("models.actor", "liger", (False,)),
        Alternative("models.actor", "compile", (True,)),
    )
    assert not error.allowed
