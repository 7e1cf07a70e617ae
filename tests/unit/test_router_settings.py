"""Settings of routers, and the models that have them."""

from __future__ import annotations

import pytest
from small_runs import plan_of

from flexrlhf.errors import UserError

INIT = "models.actor.init={model_type: mixtral, num_local_experts: 4}"
KEY = "models.actor.router_aux_loss_coef"


@pytest.mark.parametrize(
    ("overrides", "sentence"),
    [
        ((f"{KEY}=0.1",), f"{KEY}: 0.1 is for models with experts, and models.actor has none; use 0"),
        (
            (INIT, f"{KEY}=0.1", "models.actor.compile=true"),
            f"{KEY}: goes with compile false, found true; use false, or 0",
        ),
        (
            (INIT, "models.actor.router_bias_update_rate=0.1"),
            "models.actor.router_bias_update_rate: 0.1 is for glm4_moe or deepseek_v3 models, whose routers have "
            "biases, and models.actor is of mixtral; use 0, or router_aux_loss_coef",
        ),
        (
            ("models.ref.router_z_loss_coef=0.1",),
            "models.ref.router_z_loss_coef: ref is not trained; remove it",
        ),
    ],
)
def test_what_has_no_trained_routers_is_refused(overrides: tuple[str, ...], sentence: str) -> None:
    with pytest.raises(UserError) as caught:
        plan_of(None, 2, *overrides)
    assert str(caught.value) == sentence
