"""Settings of routers, and the models that have them."""

from __future__ import annotations

import pytest
from small_runs import plan_of

from flexrlhf.errors import UserError

INIT = "models.actor.init={model_type: mixtral, num_local_experts: 4}"
GLM = "models.actor.init={model_type: glm4_moe, n_routed_experts: 8, n_group: 2, topk_group: 1, num_experts_per_tok: 2}"
KEY = "models.actor.router_aux_loss_coef"


@pytest.mark.parametrize(
    ("overrides", "sentence"),
    [
        ((f"{KEY}=0.1",), f"{KEY}: 0.1 is for models with experts, and models.actor has none; use 0"),
        (
            (INIT, f"{KEY}=0.1", "models.actor.compile=true"),
            f"{KEY}: 0.1 goes with compile false, found true; use 0, or compile false",
        ),
        (
            (INIT, "models.actor.router_bias_update_rate=0.1"),
            "models.actor.router_bias_update_rate: 0.1 is for glm4_moe or deepseek_v3 models, whose routers have "
            "biases, and models.actor is of mixtral; use 0, or router_aux_loss_coef",
        ),
        (
            (GLM, "models.actor.router_bias_update_rate=0.1", "models.actor.lora={}"),
            "models.actor.router_bias_update_rate: 0.1 goes with lora null, since adapters alone are synced and saved; "
            "use 0",
        ),
        (
            (GLM.replace("n_group: 2", "n_group: 3"),),
            "models.actor: the config is not one of glm4_moe (n_group 3: expected groups of equally many of the 8 "
            "experts, at least 2 in each)",
        ),
        (
            (GLM.replace("per_tok: 2", "per_tok: 5"),),
            "models.actor: the config is not one of glm4_moe (num_experts_per_tok 5: use at most 4, as many as "
            "topk_group has)",
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
