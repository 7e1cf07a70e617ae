"""Defaults of TRL 1.16.0, with those that its configs take from transformers 5.19.0 (``TrainingArguments``).

PPO's are of TRL 1.9.0, the last release with such a trainer.
"""

from __future__ import annotations

from typing import Any

from flexrlhf.config.model_names import MODELS
from flexrlhf.config.presets.table import Cell, Peer, PeerTrainer, cells, optimizers

_ARGUMENTS = "transformers/training_args.py"
_PPO = "trl-1.9.0/experimental/ppo/ppo_config.py"
_PPO_LOOP = "trl-1.9.0/experimental/ppo/ppo_trainer.py"
_GRPO = "trl/trainer/grpo_config.py"
_GRPO_LOSS = "trl/trainer/grpo_trainer.py"
_RLOO = "trl/trainer/rloo_config.py"
_RLOO_LOSS = "trl/trainer/rloo_trainer.py"

_ADAMW = {
    "name": ("adamw", "optim: adamw_torch_fused"),
    "betas": ((0.9, 0.999), "adam_beta1, adam_beta2"),
    "eps": (1e-8, "adam_epsilon"),
    "weight_decay": (0.0, "weight_decay"),
    "schedule": ("linear", "lr_scheduler_type"),
    "warmup_steps": (0, "warmup_steps"),
    "max_grad_norm": (1.0, "max_grad_norm"),
}
_BATCH = (
    "its batch counts rows of each device (per_device_train_batch_size 8): prompts_per_step is the one of this "
    "project, or what the YAML says"
)


def _adamw(file: str, role: str, rate: float, **others: tuple[Any, str]) -> tuple[Cell, ...]:
    """Return the optimizer's cells. ``others``: where ``file`` differs from transformers."""
    common = {name: value for name, value in _ADAMW.items() if name not in others}
    return optimizers(file, (role,), {"learning_rate": (rate, "learning_rate"), **others}) + optimizers(
        _ARGUMENTS, (role,), common
    )


_NO_CLIPPING = (None, "train (gradients are not clipped)")
_ONCE = cells(
    _GRPO,
    {
        "num_mini_batches": (1, "(steps_per_generation: None)"),
        "epochs": (1, "num_iterations"),
        "samples_per_prompt": (8, "num_generations"),
        "temperature": (1.0, "temperature"),
        "top_p": (1.0, "top_p"),
        "top_k": (0, "top_k"),
        "importance": (None, "(vllm_importance_sampling_correction, with vLLM alone)"),
        "clip_low": (0.2, "epsilon"),
        "clip_high": (0.2, "(epsilon_high: None, so epsilon)"),
        "dual_clip": (None, "delta"),
        "entropy_coefficient": (0.0, "entropy_coef"),
        "kl": (None, "beta: 0.0"),
        "loss_aggregation": ("token-mean", "loss_type: dapo"),
        "scale": ("group", "scale_rewards"),
        "truncation": ("none", "mask_truncated_completions"),
    },
) + cells(
    _GRPO_LOSS,
    {
        "baseline": ("mean", "_generate_and_score_completions"),
        "reward_clip": (None, "_generate_and_score_completions (has none)"),
        "normalise_scores": ("none", "_generate_and_score_completions (has none)"),
        "dynamic_sampling": (None, "_generate_and_score_completions (has none)"),
        "overlong": (None, "_generate_and_score_completions (has none)"),
    },
)
_GRPO_KL = {"loss": {"estimator": "k3", "value_clamp": None, "corrected": True}}
"""``_compute_loss``: k3 without a limit, times the ratio (``use_bias_correction_kl``)."""
ROUTER_LOSSES = {"mixtral": 0.001, "qwen2_moe": 0.001, "qwen3_moe": 0.001, "gpt_oss": 0.001, "olmoe": 0.01}
"""``router_aux_loss_coef`` of families with such a loss, as transformers' configs have it."""


def _routers(file: str) -> dict[str, Any]:
    """Return the cell of the loss of routers, with the sentence on models whose family is not known here."""
    source = f"trl/trainer/{file}_config.py: router_aux_loss_coef"
    return {"routers": Cell("models.actor.router_aux_loss_coef", ROUTER_LOSSES, source)}


def router_loss_of(init: str | None) -> float | None:
    """Return the factor of the loss of routers of a model that is known by its name; None without such a loss."""
    return ROUTER_LOSSES.get(str(MODELS[init]["model_type"])) if init in MODELS else None


_ROUTERS = (
    "of a mixture of experts router_aux_loss_coef is the one of its config.json, here the family's, for models whose "
    "sizes are known by their names"
)
_WINDOW = (
    "a mini-batch of several is divided by the mean number of tokens of the step's mini-batches, here by the number of "
    "its own"
)
_DEVIATION = "it adds 1e-4 to the deviation of a group, here 1e-6 is added"
_VLLM = (
    "with vLLM it leaves out responses whose weights pi_old / pi_rollout exceed 3 (vllm_importance_sampling_mode: "
    "sequence_mask), here importance is off"
)


def _pairs(name: str, role: str, rate: float, **further: tuple[Any, str]) -> PeerTrainer:
    """Return the trainer of given responses; an epoch there is a pass over the data, here ``steps``."""
    file = f"trl/trainer/{name}_config.py"
    step = cells(
        _ARGUMENTS, {"num_mini_batches": (1, "gradient_accumulation_steps"), "epochs": (1, "(each batch once)")}
    )
    has_routers: dict[str, Any] = {} if name == "reward" else _routers(name)
    differs = (_BATCH, *([_ROUTERS] if has_routers else []))
    return PeerTrainer(step + cells(file, further) + _adamw(file, role, rate), differs=differs, **has_routers)


TRL = Peer(
    "TRL 1.16.0 (ppo: 1.9.0)",
    {
        "ppo": PeerTrainer(
            cells(
                _PPO,
                {
                    "num_mini_batches": (1, "num_mini_batches"),
                    "epochs": (4, "num_ppo_epochs"),
                    "temperature": (0.7, "temperature"),
                    "kl": ({"place": "reward", "estimator": "k1", "coefficient": 0.05}, "kl_coef, kl_estimator"),
                    "clip_low": (0.2, "cliprange"),
                    "clip_high": (0.2, "cliprange"),
                    "value_clip": (0.2, "cliprange_value"),
                    "gamma": (1.0, "gamma"),
                    "gae_lambda": (0.95, "lam"),
                    "truncation": ("none", "missing_eos_penalty: None"),
                    "normalise_scores": ("none", "whiten_rewards"),
                },
            )
            + cells(
                _PPO_LOOP,
                {
                    "samples_per_prompt": (1, "train (one response to a query)"),
                    "top_p": (1.0, "train (GenerationConfig)"),
                    "top_k": (0, "train (GenerationConfig)"),
                    "importance": (None, "train (has none)"),
                    "dual_clip": (None, "train (has none)"),
                    "entropy_coefficient": (0.0, "train (has none)"),
                    "reward_clip": (None, "train (has none)"),
                    "overlong": (None, "train (has none)"),
                    "loss_aggregation": ("token-mean", "train (masked_mean)"),
                    "whiten": ("batch", "train (masked_whiten)"),
                },
            )
            + _adamw(_PPO, "actor", 3e-6, max_grad_norm=_NO_CLIPPING)
            + _adamw(_PPO, "critic", 3e-6, max_grad_norm=_NO_CLIPPING),
            {"reward": {"estimator": "k1", "coefficient": 0.05, "value_clamp": None}},
            (
                _BATCH,
                "advantages are whitened over the rows of a rank, and losses are means of micro-batches: here over all",
                "actor and critic have one optimizer, with vf_coef 0.1 on the value loss: here each has its own, in "
                "which AdamW cancels a factor of the loss but for its eps",
                "without stop_token a response goes on past its end token, here it ends with it",
                "a score lands on the token after the end token, here on the end token",
                "rows are shuffled again in every epoch, here they keep their order",
                "the learning rate changes once a batch, here at every optimizer step",
            ),
        ),
        "grpo": PeerTrainer(
            _ONCE + cells(_GRPO, {"ratio": ("token", "importance_sampling_level")}) + _adamw(_GRPO, "actor", 1e-6),
            _GRPO_KL,
            (_BATCH, _DEVIATION, _VLLM, _WINDOW, _ROUTERS, "k3 has no limit there, here log-ratios are limited to 20"),
            **_routers("grpo"),
        ),
        "gspo": PeerTrainer(
            _ONCE
            + cells(_GRPO, {"ratio": ("sequence", "(importance_sampling_level: sequence)")})
            + _adamw(_GRPO, "actor", 1e-6),
            _GRPO_KL,
            (
                _BATCH,
                _DEVIATION,
                _VLLM,
                _WINDOW,
                _ROUTERS,
                "the paper's clips (3e-4 and 4e-4) are written by its users",
            ),
            **_routers("grpo"),
        ),
        "rloo": PeerTrainer(
            cells(
                _RLOO,
                {
                    "num_mini_batches": (1, "(steps_per_generation: None)"),
                    "epochs": (1, "num_iterations"),
                    "samples_per_prompt": (2, "num_generations"),
                    "temperature": (1.0, "temperature"),
                    "top_p": (1.0, "top_p"),
                    "top_k": (0, "top_k"),
                    "clip_low": (0.2, "epsilon"),
                    "clip_high": (0.2, "(epsilon_high: None, so epsilon)"),
                    "reward_clip": (None, "reward_clip_range"),
                    "kl": ({"place": "reward", "estimator": "k1", "coefficient": 0.05}, "beta"),
                    "truncation": ("none", "mask_truncated_completions"),
                    "scale": ("none", "normalize_advantages"),
                },
            )
            + cells(
                _RLOO_LOSS,
                {
                    "baseline": ("others", "_generate_and_score_completions"),
                    "ratio": ("token", "_compute_loss (equal at the first update)"),
                    "loss_aggregation": ("seq-mean-token-sum", "_compute_loss"),
                    "importance": (None, "_compute_loss (has none)"),
                    "dual_clip": (None, "_compute_loss (has none)"),
                    "entropy_coefficient": (0.0, "_compute_loss (has none)"),
                    "normalise_scores": ("none", "_generate_and_score_completions (has none)"),
                    "dynamic_sampling": (None, "_generate_and_score_completions (has none)"),
                    "overlong": (None, "_generate_and_score_completions (has none)"),
                },
            )
            + _adamw(_RLOO, "actor", 1e-6),
            {"reward": {"estimator": "k1", "coefficient": 0.05, "value_clamp": None}},
            (
                _BATCH,
                "its ratio is the product of a response's ratios, clipped as one: here each token's is clipped; both "
                "are 1, and the gradients equal, at the first update of a step",
                _ROUTERS,
            ),
            **_routers("rloo"),
        ),
        "sft": _pairs("sft", "actor", 2e-5, loss_aggregation=("token-mean", "(loss_type: None, so nll)")),
        "reward": _pairs("reward", "reward", 1e-4),
        "dpo": _pairs(
            "dpo",
            "actor",
            1e-6,
            beta=(0.1, "beta"),
            loss=("sigmoid", "loss_type"),
            label_smoothing=(0.0, "label_smoothing"),
        ),
    },
)
