"""Defaults of DeepSpeed-Chat (DeepSpeedExamples 45b4b715, 2026-03-29): arguments and fixed numbers of its trainers."""

from __future__ import annotations

from typing import Any

from flexrlhf.config.presets.table import Cell, Peer, PeerTrainer, cells, optimizers

_TRAINER = "dschat/rlhf/ppo_trainer.py"
_STEP_1 = "training/step1_supervised_finetuning/main.py"
_STEP_2 = "training/step2_reward_model_finetuning/main.py"
_DPO = "training/step2_dpo_finetuning/main.py"
_STEP_3 = "training/step3_rlhf_finetuning/main.py"
_DS = "dschat/utils/ds_utils.py"

_BATCH = "its batch counts rows of each device (16): prompts_per_step is the one of this project, or what the YAML says"


def _adam(file: str, role: str, rate: tuple[float, str], decay: str, betas: str, warmup: int) -> tuple[Cell, ...]:
    """Return the optimizer's cells. ``rate``: learning rate and its argument; ``decay``: argument of weight decay."""
    settings = {
        "name": ("adamw", f"FusedAdam ({betas})"),
        "learning_rate": rate,
        "betas": ((0.9, 0.95), betas),
        "eps": (1e-8, f"FusedAdam ({betas})"),
        "weight_decay": (0.0, decay),
        "schedule": ("cosine", "lr_scheduler_type"),
        "warmup_steps": (warmup, "num_warmup_steps"),
    }
    return optimizers(file, (role,), settings) + optimizers(
        _DS, (role,), {"max_grad_norm": (1.0, "get_train_ds_config (gradient_clipping)")}
    )


def _supervised(file: str, role: str, rate: float, *differs: str, **further: tuple[Any, str]) -> PeerTrainer:
    """Return the trainer of given responses; an epoch there is a pass over the data, here ``steps``."""
    step = {"num_mini_batches": (1, "gradient_accumulation_steps"), "epochs": (1, "main (each batch once)")}
    adam = _adam(file, role, (rate, "learning_rate"), "weight_decay", "main", 0)
    return PeerTrainer(cells(file, step | further) + adam, differs=(_BATCH, *differs))


_LAUNCH = "dschat/rlhf/rlhf_engine.py"
DEEPSPEED_CHAT = Peer(
    "DeepSpeed-Chat 45b4b715",
    {
        "ppo": PeerTrainer(
            cells(
                _TRAINER,
                {
                    "kl": ({"place": "reward", "estimator": "k1", "coefficient": 0.1}, "kl_ctl"),
                    "reward_clip": (5.0, "clip_reward_value"),
                    "clip_low": (0.2, "cliprange"),
                    "clip_high": (0.2, "cliprange"),
                    "value_clip": (0.2, "cliprange_value"),
                    "gamma": (1.0, "gamma"),
                    "gae_lambda": (0.95, "lam"),
                    "whiten": ("none", "get_advantages_and_returns"),
                    "loss_aggregation": ("token-mean", "actor_loss_fn"),
                    "dual_clip": (None, "actor_loss_fn (has none)"),
                    "entropy_coefficient": (0.0, "train_rlhf (has none)"),
                    "truncation": ("none", "compute_rewards (has none)"),
                    "overlong": (None, "compute_rewards (has none)"),
                    "normalise_scores": ("none", "compute_rewards (has none)"),
                    "samples_per_prompt": (1, "_generate_sequence"),
                    "importance": (None, "actor_loss_fn (has none)"),
                },
            )
            + cells(
                _STEP_3,
                {
                    "num_mini_batches": (1, "per_device_generation_batch_size, per_device_training_batch_size"),
                    "rollouts_per_step": (1, "generation_batches"),
                    "epochs": (1, "ppo_epochs"),
                },
            )
            + _adam(_STEP_3, "actor", (9.65e-6, "actor_learning_rate"), "actor_weight_decay", _LAUNCH, 100)
            + _adam(_STEP_3, "critic", (5e-6, "critic_learning_rate"), "critic_weight_decay", _LAUNCH, 100),
            {"reward": {"estimator": "k1", "coefficient": 0.1, "value_clamp": None}},
            (
                _BATCH,
                "losses are means of the rows of a rank, here of the mini-batch",
                "it samples as the model's generation_config says, greedily without one: here temperature 1",
                "a score lands on the token after the last where rows are padded, here on the last",
                "responses of at most one token are dropped, or a batch before is repeated: here all count",
                "with unsupervised_dataset_name it adds a loss of texts with unsup_coef 27.8: write ptx",
            ),
        ),
        "sft": _supervised(
            _STEP_1,
            "actor",
            1e-3,
            "prompts are trained on, too, here responses alone",
            loss_aggregation=("token-mean", "main (the model's own loss)"),
        ),
        "reward": _supervised(
            _STEP_2,
            "reward",
            5e-5,
            "its loss is the mean over all tokens from where two responses part (dschat/utils/model/reward_model.py), "
            "here of their last tokens",
        ),
        "dpo": _supervised(
            _DPO,
            "actor",
            1e-3,
            beta=(0.1, "beta"),
            loss=("sigmoid", "main"),
            label_smoothing=(0.0, "label_smoothing"),
        ),
    },
)
