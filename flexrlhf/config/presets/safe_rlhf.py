"""Defaults of PKU's safe-rlhf (82743cc, 2024-04-21): arguments of its trainers, and its DeepSpeed template."""

from __future__ import annotations

from typing import Any

from flexrlhf.config.presets.table import Cell, Peer, PeerTrainer, cells, optimizers

_PPO = "safe_rlhf/algorithms/ppo/main.py"
_LAG = "safe_rlhf/algorithms/ppo_lag/main.py"
_LOOP = "safe_rlhf/trainers/rl_trainer.py"
_DPO = "safe_rlhf/algorithms/dpo/main.py"
_SFT = "safe_rlhf/finetune/deepspeed.py"
_REWARD = "safe_rlhf/values/reward/main.py"
_CONSTANTS = "safe_rlhf/configs/constants.py"
_TEMPLATE = "safe_rlhf/configs/ds_train_config_template.json"

_BATCH = "its batch counts rows of each device (16): prompts_per_step is the one of this project, or what the YAML says"


def _adam(file: str, role: str, rate: float, decay: float, prefix: str = "") -> tuple[Cell, ...]:
    """Return the optimizer's cells. ``prefix``: of its arguments."""
    settings = {
        "learning_rate": (rate, f"{prefix}lr"),
        "weight_decay": (decay, f"{prefix}weight_decay"),
        "schedule": ("cosine", f"{prefix}lr_scheduler_type"),
        "warmup_steps": (0, f"{prefix}lr_warmup_ratio"),
    }
    fixed = {
        "name": ("adamw", "FusedAdam (_init_train_engine)"),
        "eps": (1e-8, "FusedAdam (_init_train_engine)"),
    }
    return (
        optimizers(file, (role,), settings)
        + optimizers(_LOOP, (role,), fixed)
        + optimizers(_CONSTANTS, (role,), {"betas": ((0.9, 0.95), "ADAM_BETAS")})
        + optimizers(_TEMPLATE, (role,), {"max_grad_norm": (1.0, "gradient_clipping")})
    )


def _policy(file: str, loss: str) -> tuple[Cell, ...]:
    """Return the cells that both of its policy trainers have, from their arguments and from their ``loss`` file."""
    return (
        cells(
            file,
            {
                "num_mini_batches": (1, "per_device_prompt_batch_size, per_device_train_batch_size"),
                "epochs": (1, "update_iters"),
                "samples_per_prompt": (1, "num_return_sequences"),
                "temperature": (1.0, "temperature"),
                "top_p": (1.0, "top_p"),
                "kl": ({"place": "reward", "estimator": "k1", "coefficient": 0.02}, "kl_coeff"),
                "clip_low": (0.2, "clip_range_ratio"),
                "clip_high": (0.2, "clip_range_ratio"),
                "value_clip": (5.0, "clip_range_value"),
                "reward_clip": (50.0, "clip_range_score"),
                "normalise_scores": ("none", "normalize_reward"),
                "ptx": (None, "ptx_coeff"),
            },
        )
        + cells(_LOOP, {"gamma": (1.0, "gamma"), "gae_lambda": (0.95, "gae_lambda")})
        + cells(
            loss,
            {
                "whiten": ("none", "rl_step"),
                "loss_aggregation": ("seq-mean-token-mean", "actor_loss_fn (masked_mean)"),
                "dual_clip": (None, "actor_loss_fn (has none)"),
                "entropy_coefficient": (0.0, "actor_loss_fn (has none)"),
                "importance": (None, "actor_loss_fn (has none)"),
                "truncation": ("none", "add_kl_divergence_regularization (has none)"),
                "overlong": (None, "add_kl_divergence_regularization (has none)"),
            },
        )
        + _adam(file, "actor", 1e-5, 0.0, "actor_")
        + _adam(file, "critic", 5e-6, 0.0, "critic_")
    )


def _supervised(file: str, role: str, rate: float, decay: float, **further: tuple[Any, str]) -> tuple[Cell, ...]:
    """Return the cells of training on given responses; an epoch there is a pass over the data, here ``steps``."""
    step = {"num_mini_batches": (1, "gradient_accumulation_steps"), "epochs": (1, "per_device_train_batch_size")}
    return cells(file, step | further) + _adam(file, role, rate, decay)


_DECAY = "biases and norms have no weight decay there, here all weights have it"
_KL = {"reward": {"estimator": "k1", "coefficient": 0.02, "value_clamp": None}}
_DIFFERS = (
    _BATCH,
    "rewards of tokens are clipped to [-50, 50] with their KL penalty, here scores before it",
    "it takes the mean of the ranks' means, here of all responses of the mini-batch",
    "it samples from the 50 most likely tokens (top_k of transformers' GenerationConfig), here from all",
)
SAFE_RLHF = Peer(
    "safe-rlhf 82743cc",
    {
        "ppo": PeerTrainer(_policy(_PPO, "safe_rlhf/algorithms/ppo/trainer.py"), _KL, _DIFFERS),
        "safe-rlhf": PeerTrainer(
            _policy(_LAG, "safe_rlhf/algorithms/ppo_lag/trainer.py")
            + _adam(_LAG, "cost_critic", 5e-6, 0.0, "critic_")
            + cells(
                _LAG,
                {
                    "lagrange": (
                        {"limit": 0.0, "initial": 1.0, "learning_rate": 0.1, "maximum": None},
                        "threshold, lambda_init, lambda_lr, lambda_max",
                    )
                },
            ),
            _KL,
            (
                *_DIFFERS,
                "lambda follows the mean of the last 128 costs (episode_cost_window_size), here that of the step",
                "lambda changes before the step that it weighs, here after it",
            ),
        ),
        "sft": PeerTrainer(
            _supervised(_SFT, "actor", 2e-5, 1e-6, loss_aggregation=("token-mean", "(the model's own loss)")),
            differs=(_BATCH, _DECAY, "it takes the mean of the ranks' means, here of all tokens of the mini-batch"),
        ),
        "reward": PeerTrainer(
            _supervised(_REWARD, "reward", 2e-5, 1e-6),
            differs=(_BATCH, _DECAY),
        ),
        "dpo": PeerTrainer(
            _supervised(
                _DPO,
                "actor",
                2e-5,
                0.0,
                beta=(0.02, "scale_coeff"),
                loss=("sigmoid", "DPOTrainer.loss"),
                label_smoothing=(0.0, "DPOTrainer.loss (has none)"),
            ),
            differs=(_BATCH,),
        ),
    },
)
