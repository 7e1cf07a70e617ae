"""Forms of GRPO from papers: DAPO (Yu et al. 2025) and Dr. GRPO (Liu et al. 2025), as their scripts run them."""

from __future__ import annotations

from flexrlhf.config.presets.table import MiniBatchesOf, Peer, PeerTrainer, WarmUp, cells, optimizers

_DAPO = "recipe/dapo/run_dapo_qwen2.5_32b.sh"
_DR_GRPO = "examples/qwen2.5-math-7b.sh"
_DR_GRPO_CODE = "train_zero_math.py"

_LOSS_KL = {"loss": {"estimator": "k3", "value_clamp": 10.0}}
DAPO = Peer(
    "DAPO, recipe of verl 246cac4c",
    {
        "grpo": PeerTrainer(
            cells(
                _DAPO,
                {
                    "prompts_per_step": (512, "train_prompt_bsz"),
                    "num_mini_batches": (MiniBatchesOf(32), "train_prompt_mini_bsz"),
                    "samples_per_prompt": (16, "n_resp_per_prompt"),
                    "dynamic_sampling": ({"rounds": 3}, "gen_prompt_bsz"),
                    "epochs": (1, "(ppo_epochs of ppo_trainer.yaml)"),
                    "temperature": (1.0, "temperature"),
                    "top_p": (1.0, "top_p"),
                    "top_k": (0, "top_k (-1: all)"),
                    "clip_low": (0.2, "clip_ratio_low"),
                    "clip_high": (0.28, "clip_ratio_high"),
                    "dual_clip": (10.0, "clip_ratio_c"),
                    "entropy_coefficient": (0.0, "entropy_coeff"),
                    "loss_aggregation": ("token-mean", "loss_agg_mode"),
                    "kl": (None, "use_kl_in_reward, use_kl_loss"),
                    "overlong": ({"penalty": 1.0}, "overlong_buffer_len (a fifth), overlong_penalty_factor"),
                    "truncation": ("none", "(scored as they are, but for overlong)"),
                    "baseline": ("mean", "adv_estimator: grpo"),
                    "scale": ("group", "adv_estimator: grpo"),
                },
            )
            + optimizers(
                _DAPO,
                ("actor",),
                {
                    "name": ("adamw", "(ppo_trainer.yaml)"),
                    "learning_rate": (1e-6, "lr"),
                    "betas": ((0.9, 0.999), "(ppo_trainer.yaml)"),
                    "eps": (1e-8, "(torch.optim.AdamW)"),
                    "weight_decay": (0.1, "weight_decay"),
                    "schedule": ("constant", "(ppo_trainer.yaml)"),
                    "warmup_steps": (WarmUp(steps=10), "lr_warmup_steps"),
                    "max_grad_norm": (1.0, "grad_clip"),
                },
            ),
            _LOSS_KL,
            (
                "prompts are sampled until 512 groups have different scores, in up to 10 batches of 1536: here 3 "
                "rounds of 512, and a step trains on fewer where fewer differ",
                "groups are compared by their accuracy (filter_groups_metric: acc), here by their scores",
                "the learning rate changes once a training step, here at every optimizer step of the warm-up",
            ),
        )
    },
)
DR_GRPO = Peer(
    "Dr. GRPO, understand-r1-zero dfca49dd",
    {
        "grpo": PeerTrainer(
            cells(
                _DR_GRPO,
                {
                    "prompts_per_step": (128, "rollout_batch_size"),
                    "num_mini_batches": (MiniBatchesOf(128, "responses"), "train_batch_size"),
                    "samples_per_prompt": (8, "num_samples"),
                    "epochs": (1, "num_ppo_epochs"),
                    "temperature": (1.0, "temperature"),
                    "top_p": (1.0, "top_p"),
                    "kl": (None, "beta: 0"),
                },
            )
            + cells(
                _DR_GRPO_CODE,
                {
                    "scale": ("none", "critic_type: drgrpo (no division by the deviation)"),
                    "baseline": ("mean", "critic_type: drgrpo"),
                    "loss_aggregation": ("seq-mean-token-sum-norm", "masked_sum (constant_normalizer)"),
                },
            )
            + optimizers(
                _DR_GRPO,
                ("actor",),
                {"learning_rate": (1e-6, "learning_rate"), "schedule": ("constant", "lr_scheduler")},
            ),
            {"loss": {"estimator": "k3"}},
        )
    },
)
