"""Defaults of verl 0.9.1: ``ppo_trainer.yaml`` (flattened in ``_generated_ppo_trainer.yaml``) and the SFT trainer."""

from __future__ import annotations

from flexrlhf.config.presets.table import Cell, MiniBatchesOf, Peer, PeerTrainer, cells, optimizers

_PPO = "verl/trainer/config/_generated_ppo_trainer.yaml"
_CORE = "verl/trainer/ppo/core_algos.py"
_SFT = "verl/trainer/config/sft_trainer_engine.yaml"
_FSDP = "verl/trainer/config/optim/fsdp.yaml"

_ADAMW = {
    "name": ("adamw", "{role}.optim.optimizer"),
    "betas": ((0.9, 0.999), "{role}.optim.betas"),
    "eps": (1e-8, "(torch.optim.AdamW)"),
    "weight_decay": (0.01, "{role}.optim.weight_decay"),
    "schedule": ("constant", "{role}.optim.lr_scheduler_type"),
    "warmup_steps": (0, "{role}.optim.lr_warmup_steps_ratio"),
    "max_grad_norm": (1.0, "{role}.optim.clip_grad"),
}
_PLAIN = cells(
    _PPO,
    {
        "prompts_per_step": (1024, "data.train_batch_size"),
        "num_mini_batches": (MiniBatchesOf(256), "actor.ppo_mini_batch_size"),
        "epochs": (1, "actor.ppo_epochs"),
        "rollouts_per_step": (1, "data.gen_batch_size"),
        "freeze_actor_steps": (0, "trainer.critic_warmup"),
        "temperature": (1.0, "rollout.temperature"),
        "top_p": (1.0, "rollout.top_p"),
        "top_k": (0, "rollout.top_k (-1: all)"),
        "importance": (None, "algorithm.rollout_correction.rollout_is"),
        "clip_low": (0.2, "actor.clip_ratio_low"),
        "clip_high": (0.2, "actor.clip_ratio_high"),
        "entropy_coefficient": (0.0, "actor.entropy_coeff"),
        "loss_aggregation": ("token-mean", "actor.loss_agg_mode"),
        "kl": (None, "algorithm.use_kl_in_reward, actor.use_kl_loss"),
    },
) + cells(
    "verl/trainer/ppo/ray_trainer.py",
    {
        "reward_clip": (None, "apply_kl_penalty (scores are not clipped)"),
        "normalise_scores": ("none", "apply_kl_penalty (nor normalised)"),
        "truncation": ("none", "apply_kl_penalty (nor changed by truncation)"),
        "overlong": (None, "reward.reward_manager.name: naive"),
    },
)
_ACTOR = optimizers(_PPO, ("actor",), _ADAMW) + (
    Cell("models.actor.optimizer.learning_rate", 1e-6, f"{_PPO}: actor.optim.lr"),
)
_CRITIC = optimizers(_PPO, ("critic",), _ADAMW) + (
    Cell("models.critic.optimizer.learning_rate", 1e-5, f"{_PPO}: critic.optim.lr"),
)
_DUAL = cells(_PPO, {"dual_clip": (3.0, "actor.clip_ratio_c"), "ratio": ("token", "actor.policy_loss.loss_mode")})
_ONE = cells(_PPO, {"samples_per_prompt": (1, "rollout.n")})
_GAMMA = cells(_PPO, {"gamma": (1.0, "algorithm.gamma")})
_IN_REWARD = {
    "coefficient": 0.001,
    "estimator": "k1",
    "target_unit": "token",
    "horizon": 10000,
}
"""``algorithm.kl_ctrl.kl_coef``, ``algorithm.kl_penalty: kl``, ``apply_kl_penalty``, ``kl_ctrl.horizon``."""
_IN_LOSS = {"coefficient": 0.001, "estimator": "k3", "value_clamp": 10.0}
"""``actor.kl_loss_coef``, ``actor.kl_loss_type: low_var_kl``, and the clamp of ``kl_penalty_forward``."""
_REWARD_FIRST = {"reward": _IN_REWARD, "loss": _IN_LOSS}
_LOSS_FIRST = {"loss": _IN_LOSS, "reward": _IN_REWARD}
_GROUP = cells(_PPO, {"dynamic_sampling": (None, "algorithm.filter_groups.enable")}) + cells(
    _CORE,
    {
        "baseline": ("mean", "compute_grpo_outcome_advantage"),
        "scale": ("group", "algorithm.norm_adv_by_std_in_grpo"),
    },
)
_NO_SAMPLES = (
    "rollout.n is 1 there, which leaves nothing to compare: the number of samples is the one of this project, or what "
    "samples_per_prompt says"
)
_GSPO = (
    "the logarithm of a response's ratio is limited from above at 10 there, and here to 20 for each token",
    "its script for GSPO (examples/gspo_trainer/run_qwen30b_gspo.sh) writes clips of 3e-4 and 4e-4 over these defaults",
)

VERL = Peer(
    "verl 0.9.1",
    {
        "ppo": PeerTrainer(
            _PLAIN
            + _ACTOR
            + _DUAL
            + _ONE
            + _GAMMA
            + _CRITIC
            + cells(
                _PPO,
                {"gae_lambda": (1.0, "algorithm.lam"), "value_clip": (0.5, "critic.cliprange_value")},
            )
            + cells(_CORE, {"whiten": ("batch", "compute_gae_advantage_return (masked_whiten)")}),
            _REWARD_FIRST,
        ),
        "grpo": PeerTrainer(_PLAIN + _ACTOR + _DUAL + _GROUP, _LOSS_FIRST, (_NO_SAMPLES,)),
        "rloo": PeerTrainer(
            _PLAIN
            + _ACTOR
            + _DUAL
            + cells(
                _CORE,
                {
                    "baseline": ("others", "compute_rloo_outcome_advantage"),
                    "scale": ("none", "compute_rloo_outcome_advantage"),
                },
            )
            + cells(_PPO, {"dynamic_sampling": (None, "algorithm.filter_groups.enable")}),
            _REWARD_FIRST,
            (_NO_SAMPLES,),
        ),
        "gspo": PeerTrainer(
            _PLAIN
            + _ACTOR
            + _GROUP
            + cells(
                _CORE,
                {
                    "ratio": ("sequence", "compute_policy_loss_gspo"),
                    "dual_clip": (None, "compute_policy_loss_gspo (has none)"),
                },
            ),
            _LOSS_FIRST,
            (_NO_SAMPLES, *_GSPO),
        ),
        "reinforce++": PeerTrainer(
            _PLAIN
            + _ACTOR
            + _DUAL
            + _ONE
            + _GAMMA
            + cells(
                _CORE,
                {
                    "whiten": ("batch", "compute_reinforce_plus_plus_outcome_advantage"),
                    "baseline": ("none", "compute_reinforce_plus_plus_outcome_advantage"),
                },
            ),
            _REWARD_FIRST,
        ),
        "remax": PeerTrainer(
            _PLAIN
            + _ACTOR
            + _DUAL
            + _ONE
            + cells(
                _CORE,
                {
                    "whiten": ("none", "compute_remax_outcome_advantage"),
                    "gamma": (1.0, "compute_remax_outcome_advantage (cumsum)"),
                },
            ),
            _REWARD_FIRST,
            ("its trainer for ReMax is the older one, trainer.use_v1: false",),
        ),
        "sft": PeerTrainer(
            cells(
                _SFT,
                {
                    "prompts_per_step": (256, "data.train_batch_size"),
                    "num_mini_batches": (1, "(data.train_batch_size is of one update)"),
                    "epochs": (1, "(each batch once)"),
                },
            )
            + cells("verl/workers/utils/losses.py", {"loss_aggregation": ("token-mean", "sft_loss")})
            + optimizers(
                _FSDP,
                ("actor",),
                {
                    "name": ("adamw", "optimizer"),
                    "learning_rate": (1e-3, "lr"),
                    "betas": ((0.9, 0.999), "betas"),
                    "eps": (1e-8, "(torch.optim.AdamW)"),
                    "weight_decay": (0.01, "weight_decay"),
                    "schedule": ("constant", "lr_scheduler_type"),
                    "warmup_steps": (0, "lr_warmup_steps_ratio"),
                    "max_grad_norm": (1.0, "clip_grad"),
                },
            ),
        ),
    },
)
