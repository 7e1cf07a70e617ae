"""Biases of routers, in models of 16 bits, too: balanced once in a step, kept out of the optimizer, and restored."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from small_models import TINY, engine_of, likelihood, mini_batch, snapshot, train_in_turn
from torch import Tensor

from flexrlhf.engines.base import TrainingState
from flexrlhf.engines.non_finite import NonFiniteStep
from flexrlhf.engines.torch.engine import TorchEngine

NAME = "model.layers.1.mlp.gate.e_score_correction_bias"
GLM = {
    **{"model_type": "glm4_moe", "n_routed_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 8},
    **{"first_k_dense_replace": 1, "n_group": 2, "topk_group": 1},
}
RATE = 0.01


def engine(rate: float = RATE, **settings: Any) -> TorchEngine:
    return engine_of(init=TINY | GLM, router_bias_update_rate=rate, **settings)


@torch.no_grad()
def tokens_of_experts(of: TorchEngine, parts: int = 1) -> Tensor:
    """Tokens of each expert, from one sequence after the other."""
    found: list[Tensor] = []
    router = of._model.get_submodule(NAME.rpartition(".")[0])
    hook = router.register_forward_hook(lambda _, __, routed: found.append(routed[2].flatten()))
    for batch in map(mini_batch, range(parts)):
        for tokens, mask in zip(batch["tokens"], batch["attention_mask"], strict=True):
            of._model(input_ids=tokens[mask.bool()][None].long())
    hook.remove()
    return torch.cat(found).bincount(minlength=8).double()


@pytest.mark.parametrize("settings", [{}, {"dtype": "bfloat16"}, {"activation_checkpointing": True}], ids=str)
def test_a_step_moves_each_bias_towards_the_mean_load(settings: dict[str, Any]) -> None:
    trained = engine(**settings, micro_batch_tokens=16)
    bias, load = trained.weights()[NAME], tokens_of_experts(trained, parts=2)
    assert bias.dtype == torch.float32 and not bias.any() and len(load.unique()) > 2
    train_in_turn(trained, [(mini_batch(seed), likelihood()) for seed in (0, 1)], lambda: None)
    assert torch.equal(bias, RATE * (load.mean() - load).sign().float())
    # the weights of the same step do not depend on it
    other = engine(rate=0.0, **settings, micro_batch_tokens=16)
    train_in_turn(other, [(mini_batch(seed), likelihood()) for seed in (0, 1)], lambda: None)
    assert not other.weights()[NAME].any()
    assert all(torch.equal(values, snapshot(other)[name]) for name, values in snapshot(trained).items() if name != NAME)


def test_a_step_that_is_left_out_moves_no_bias_and_its_tokens_are_forgotten() -> None:
    trained = engine()
    with pytest.raises(NonFiniteStep):
        trained.train([(mini_batch(1), likelihood(float("nan")))])
    assert not trained.weights()[NAME].any()
    load = tokens_of_experts(trained)
    trained.train([(mini_batch(0), likelihood())])
    assert torch.equal(trained.weights()[NAME], RATE * (load.mean() - load).sign().float())


def test_biases_are_a_part_of_the_training_state_without_moments() -> None:
    trained = engine()
    trained.train([(mini_batch(), likelihood())])
    state = trained.training_state()
    assert [kind for kind, tensors in state.tensors.items() if NAME in tensors] == [TrainingState.WEIGHTS]
    assert state.tensors[TrainingState.WEIGHTS][NAME].values.any() and "exp_avg" in state.tensors
    fresh = engine()
    fresh.load_weights({NAME: trained.weights()[NAME]})
    assert torch.equal(fresh.weights()[NAME], trained.weights()[NAME])
