"""Alternatives of refusals: a run with any of the settings that a rule's sentence names is planned."""

from __future__ import annotations

import pytest
from pydantic import BaseModel
from refusal_rows import Raw, RefusalRow, all_rows, set_in

from flexrlhf.config.spec import Spec
from flexrlhf.errors import Alternative, SettingError, UserError
from flexrlhf.plan.model_checks import check_device
from flexrlhf.plan.pipeline import make_plan

SUBJECTS = ("adapters", "deepspeed", "degrees", "megatron", "models", "rollout")
"""Files of refusals with rows of the table of models' rules."""
LEAST = 4
"""Alternatives in each of them."""
SECOND = {
    "deepspeed models.critic.engine=megatron models.critic.init={model_type: llama, vocab_size: 32, hidden_size: 8, "
    "intermediate_size: 16, num_hidden_layer": "the settings of a library are ones that DeepSpeed refuses, too",
    "rollout six vllm cluster.devices=4 rollout.process=child rollout.pp=2": (
        "the model has fewer layers than stages, whatever process decodes"
    ),
}
"""Name of a row of which an alternative leaves a second mistake → the mistake."""


def planned(raw: Raw, row: RefusalRow) -> None:
    plan = make_plan(Spec.parse(raw))
    for device in row.devices:
        check_device(plan.placement, plan.shapes, device)


def refusal_of(row: RefusalRow) -> SettingError | None:
    try:
        planned(row.raw(), row)
    except SettingError as error:
        return error
    except UserError:
        return None
    return None


def changed(row: RefusalRow, alternative: Alternative, value: object) -> Raw:
    raw = row.raw()
    for setting, chosen in ((alternative.setting, value), *alternative.along):
        set_in(
            raw, f"{alternative.section}.{setting}", chosen.model_dump() if isinstance(chosen, BaseModel) else chosen
        )
    return raw


@pytest.mark.parametrize("subject", SUBJECTS)
def test_a_run_with_an_alternative_is_planned(subject: str) -> None:
    tried = 0
    for row in all_rows():
        error = refusal_of(row) if row.subject == subject else None
        for alternative in () if error is None else error.alternatives:
            for value in alternative.values:
                tried += 1
                try:
                    planned(changed(row, alternative, value), row)
                except UserError as further:
                    assert row.name in SECOND, f"{row.name}: {further}"
    assert tried >= LEAST
