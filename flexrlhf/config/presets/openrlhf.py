"""Defaults of OpenRLHF 0.11.2: the arguments of ``train_ppo_ray``, ``train_sft``, ``train_rm`` and ``train_dpo``."""

from __future__ import annotations

from typing import Any

from flexrlhf.config.presets.table import Cell, MiniBatchesOf, Peer, PeerTrainer, WarmUp, cells, optimizers

_PPO = "openrlhf/cli/train_ppo_ray.py"
_MAKER = "openrlhf/trainer/ppo_utils/experience_maker.py"

_ADAM = {
    "name": ("adamw", "optim: adam (DeepSpeed's FusedAdam, decoupled decay)"),
    "betas": ((0.9, 0.95), "adam.betas"),
    "eps": (1e-8, "adam.eps"),
    "weight_decay": (0.0, "adam.weight_decay"),
    "schedule": ("cosine", "lr_scheduler: cosine_with_min_lr"),
    "final_ratio": (0.1, "min_lr_ratio"),
    "warmup_steps": (WarmUp(share=0.03), "lr_warmup_ratio"),
    "max_grad_norm": (1.0, "max_norm"),
}


def _adam(file: str, role: str, rate: float) -> tuple[Cell, ...]:
    return optimizers(file, (role,), {"learning_rate": (rate, "adam.lr"), **_ADAM})


_STEP = cells(
    _PPO,
    {
        "prompts_per_step": (1024, "rollout.batch_size"),
        "num_mini_batches": (MiniBatchesOf(128, "responses"), "train.batch_size"),
        "epochs": (1, "train.max_epochs"),
        "freeze_actor_steps": (0, "critic.freezing_steps: -1"),
        "temperature": (1.0, "rollout.temperature"),
        "top_p": (1.0, "rollout.top_p"),
        "importance": (None, "algo.advantage.is_correction_level: off"),
        "clip_low": (0.2, "actor.eps_clip"),
        "clip_high": (0.2, "actor.eps_clip"),
        "dual_clip": (None, "actor.dual_clip"),
        "entropy_coefficient": (0.0, "actor.entropy_coef: None"),
        "normalise_scores": ("none", "reward.normalize_enable"),
        "truncation": ("none", "reward.stop_properly_penalty_coef: None"),
        "overlong": (None, "reward.overlong_buffer_len: None"),
    },
)
_ACTOR = _adam(_PPO, "actor", 1e-6)
_CRITIC = _adam(_PPO, "critic", 9e-6)
_KL = {"coefficient": 0.01, "value_clamp": 10.0, "target_unit": "token", "horizon": 10000}
"""``algo.kl.init_coef``; ``compute_approx_kl`` (openrlhf/models/utils.py); ``info["kl"]``; ``algo.kl.horizon``."""


def _penalty(place: str) -> dict[str, Any]:
    return {"place": place, "estimator": "k1", **_KL}


_IN_REWARD = {"reward": {"estimator": "k1", **_KL}, "loss": {**_KL}}
_AFTER = {"advantages": {"estimator": "k1", **_KL}, "reward": {"estimator": "k1", **_KL}, "loss": {**_KL}}
_LOSS_ESTIMATOR = "with algo.kl.use_loss its estimator stays k1, against which it warns; here one in the loss is k3"
_WHITENING = "its variance of advantages is over N tokens, here over N - 1"
_CLIP = "it clips a score to [-10, 10] once the baseline is subtracted, here reward_clip is for scores before that"
_TOKEN = cells(
    _PPO,
    {
        "ratio": ("token", "actor.policy_loss_type: ppo"),
        "loss_aggregation": ("token-mean", "actor.loss_agg_mode"),
    },
)
_ONE = cells(_PPO, {"samples_per_prompt": (1, "rollout.n_samples_per_prompt")})
_NO_SAMPLES = (
    "n_samples_per_prompt is 1 there, which it refuses for this algorithm: the number of samples is the one of this "
    "project, or what samples_per_prompt says"
)
_GAE = cells(
    _PPO,
    {
        "kl": (_penalty("reward"), "algo.kl.init_coef, algo.kl.estimator"),
        "reward_clip": (10.0, "reward.clip_range"),
        "gamma": (1.0, "algo.advantage.gamma"),
    },
)


def _group(baseline: str, scale: str) -> tuple[Cell, ...]:
    """Return the cells of comparing the responses to a prompt."""
    return cells(
        _MAKER,
        {
            "baseline": (baseline, "compute_advantages_and_returns"),
            "scale": (scale, "compute_advantages_and_returns"),
            "kl": (_penalty("advantages"), "compute_advantages_and_returns, compute_reward"),
            "reward_clip": (None, "compute_reward (after the baseline)"),
        },
    ) + cells(_PPO, {"dynamic_sampling": (None, "algo.dynamic_filtering_enable")})


def _supervised(file: str, role: str, rate: float, **further: tuple[Any, str]) -> tuple[Cell, ...]:
    """Return the cells of training on given responses; an epoch there is a pass over the data, here ``steps``."""
    step = {
        "prompts_per_step": (128, "train.batch_size"),
        "num_mini_batches": (1, "(train.batch_size is of one update)"),
        "epochs": (1, "(each batch once)"),
    }
    return cells(file, step | further) + _adam(file, role, rate)


OPENRLHF = Peer(
    "OpenRLHF 0.11.2",
    {
        "ppo": PeerTrainer(
            _STEP
            + _TOKEN
            + _ONE
            + _GAE
            + _ACTOR
            + _CRITIC
            + cells(
                _PPO,
                {"gae_lambda": (1.0, "algo.advantage.lambd"), "value_clip": (0.5, "critic.value_clip")},
            )
            + cells(_MAKER, {"whiten": ("batch", "compute_advantages_and_returns")}),
            _IN_REWARD,
            (_WHITENING, _LOSS_ESTIMATOR),
        ),
        "grpo": PeerTrainer(
            _STEP + _TOKEN + _group("mean", "group") + _ACTOR,
            _AFTER,
            (
                _NO_SAMPLES,
                "it adds 1e-9 to the deviation of a group, here 1e-6 is added",
                "it clips a scaled score to [-10, 10], which no group of up to 100 responses reaches",
                _LOSS_ESTIMATOR,
            ),
        ),
        "rloo": PeerTrainer(
            _STEP + _TOKEN + _group("others", "none") + _ACTOR, _AFTER, (_NO_SAMPLES, _CLIP, _LOSS_ESTIMATOR)
        ),
        "gspo": PeerTrainer(
            _STEP
            + _group("mean", "group")
            + cells(
                "openrlhf/models/loss.py",
                {
                    "ratio": ("sequence", "PolicyLoss.forward"),
                    "loss_aggregation": ("seq-mean-token-mean", "PolicyLoss.__init__"),
                },
            )
            + _ACTOR,
            _AFTER,
            (_NO_SAMPLES, "it adds 1e-9 to the deviation of a group, here 1e-6 is added", _LOSS_ESTIMATOR),
        ),
        "reinforce++": PeerTrainer(
            _STEP
            + _TOKEN
            + _ONE
            + _GAE
            + _ACTOR
            + cells(
                _MAKER,
                {
                    "baseline": ("none", "compute_advantages_and_returns (reinforce)"),
                    "whiten": ("batch", "compute_advantages_and_returns"),
                },
            ),
            _IN_REWARD,
            (_WHITENING, f"with baseline: group {_CLIP}", _LOSS_ESTIMATOR),
        ),
        "sft": PeerTrainer(
            _supervised(
                "openrlhf/cli/train_sft.py", "actor", 5e-6, loss_aggregation=("token-mean", "SFTLoss (models/loss.py)")
            ),
        ),
        "reward": PeerTrainer(_supervised("openrlhf/cli/train_rm.py", "reward", 9e-6)),
        "dpo": PeerTrainer(
            _supervised(
                "openrlhf/cli/train_dpo.py",
                "actor",
                1e-5,
                beta=(0.1, "model.beta"),
                loss=("sigmoid", "model.ipo_enable"),
                label_smoothing=(0.0, "model.label_smoothing"),
            ),
        ),
    },
)
