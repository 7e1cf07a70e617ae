"""Jobs of verl 0.9.1, and one update of each by its trainer's functions: the config that Hydra composes, penalties,
corrections, advantages and losses."""

from __future__ import annotations

import shlex
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from torch import Tensor

from benchmarks.peers.comparison import ROWS, SAMPLES
from benchmarks.peers.updates import MINI_BATCHES, Inputs, Job, Losses, make_inputs, of_mini_batches

_ACTOR, _ALGORITHM = "actor_rollout_ref.actor.", "algorithm."
_CORRECTION = "algorithm.rollout_correction."
_GROUPS = {"grpo", "rloo", "reinforce_plus_plus_baseline"}
CLIPS = "clip_ratio"


def _job(estimator: str, about: str, further: str = "", says: str | bool = "", **others: Any) -> Job:
    """Return the job of an estimator of advantages. ``says``: True: the name of the option."""
    samples = SAMPLES if estimator in _GROUPS else 1
    prompts = ROWS // samples
    words = (
        f"python3 -m verl.trainer.main_ppo {_ALGORITHM}adv_estimator={estimator} actor_rollout_ref.model.path=Qwen/"
        f"Qwen2.5-0.5B-Instruct data.train_files=data.parquet data.train_batch_size={prompts} "
        f"{_ACTOR}ppo_mini_batch_size={prompts // len(MINI_BATCHES)} {_ACTOR}ppo_micro_batch_size_per_gpu=1 "
        f"critic.ppo_micro_batch_size_per_gpu=1 actor_rollout_ref.rollout.n={samples} {about} {further}"
    )
    key = about.partition("=")[0] if says is True else says or ""
    return Job(f"{estimator} {about}" if about else f"{estimator}, defaults", " ".join(words.split()), key, **others)


def jobs() -> Iterator[Job]:
    """Yield the jobs: one for each setting that a loss depends on, and each preset."""
    yield from _advantage_jobs()
    yield from _loss_jobs()
    yield from _penalty_jobs()
    yield from _correction_jobs()
    for name, estimator in _PRESETS.items():
        samples = SAMPLES if estimator in _GROUPS else 1
        loss = f"{_ACTOR}policy_loss.loss_mode=gspo" if name == "gspo" else ""
        preset = {"name": name, "like": "verl", "samples_per_prompt": samples}
        yield _job(estimator, loss, preset=preset)


_PRESETS = {"ppo": "gae", "grpo": "grpo", "rloo": "rloo", "gspo": "grpo", "reinforce++": "reinforce_plus_plus"}


def _advantage_jobs() -> Iterator[Job]:
    for estimator in ("gae", "grpo", "rloo", "reinforce_plus_plus", "reinforce_plus_plus_baseline"):
        yield _job(estimator, "")
    yield _job("gae", f"{_ALGORITHM}gamma=0.9")
    yield _job("gae", f"{_ALGORITHM}lam=0.8")
    yield _job("gae", "critic.cliprange_value=0.2")
    yield _job("gae", "critic.loss_agg_mode=seq-mean-token-mean", says=True)
    yield _job("reinforce_plus_plus", f"{_ALGORITHM}gamma=0.9")
    yield _job("grpo", f"{_ALGORITHM}norm_adv_by_std_in_grpo=False")
    for estimator in ("opo", "gpg", "grpo_passk"):
        yield _job(estimator, "actor_rollout_ref.rollout.n=4", says=f"adv_estimator={estimator}")


def _loss_jobs() -> Iterator[Job]:
    for how in ("token-mean", "seq-mean-token-sum", "seq-mean-token-mean"):
        yield _job("grpo", f"{_ACTOR}loss_agg_mode={how}")
        yield _job("grpo", f"{_ACTOR}entropy_coeff=0.01", f"{_ACTOR}loss_agg_mode={how}")
    yield _job("grpo", f"{_ACTOR}loss_agg_mode=seq-mean-token-sum-norm", f"{_ACTOR}loss_scale_factor=11")
    yield _job("grpo", f"{_ACTOR}loss_agg_mode=token-sum")
    yield _job("grpo", f"{_ACTOR}clip_ratio_low=0.1")
    yield _job("grpo", f"{_ACTOR}clip_ratio_high=0.28")
    yield _job("grpo", f"{_ACTOR}clip_ratio=0.1", says="clip_ratio=")
    yield _job("grpo", f"{_ACTOR}clip_ratio_c=1.5")
    yield _job("grpo", f"{_ACTOR}clip_ratio_c=10.0")
    mode = f"{_ACTOR}policy_loss.loss_mode="
    yield _job("grpo", f"{mode}gspo")
    yield _job("grpo", f"{mode}gspo", f"{_ACTOR}loss_agg_mode=seq-mean-token-mean {_ACTOR}clip_ratio_low=0.0003")
    yield _job("grpo", f"{mode}cispo")
    yield _job("grpo", f"{mode}cispo", f"{_ACTOR}clip_ratio_low=10 {_ACTOR}clip_ratio_high=0.2")
    yield _job("grpo", f"{mode}kl_cov", says=_CHOICE)
    yield _job("grpo", f"{mode}clip_cov", says=_CHOICE)
    for name in ("sapo", "geo_mean", "gpg", "dppo_tv", "dppo_kl"):
        yield _job("grpo", f"{mode}{name}", says="loss_mode=")


_CHOICE = "covariance"


def _penalty_jobs() -> Iterator[Job]:
    in_loss = f"{_ACTOR}use_kl_loss=True"
    yield _job("grpo", in_loss)
    for kind in ("kl", "k2", "low_var_kl", "k3"):
        yield _job("grpo", f"{_ACTOR}kl_loss_type={kind}", f"{in_loss} {_ACTOR}kl_loss_coef=0.05")
    for kind in ("k3+", "abs"):
        yield _job("grpo", f"{_ACTOR}kl_loss_type={kind}", f"{in_loss} {_ACTOR}kl_loss_coef=0.05", says=True)
    in_reward = f"{_ALGORITHM}use_kl_in_reward=True"
    for estimator in ("gae", "grpo", "rloo", "reinforce_plus_plus"):
        yield _job(estimator, in_reward, f"{_ALGORITHM}kl_ctrl.kl_coef=0.05")
    for kind in ("kl", "mse", "low_var_kl"):
        yield _job("gae", f"{_ALGORITHM}kl_penalty={kind}", f"{in_reward} {_ALGORITHM}kl_ctrl.kl_coef=0.05")
    yield _job("gae", f"{_ALGORITHM}kl_penalty=abs", f"{in_reward} {_ALGORITHM}kl_ctrl.kl_coef=0.05", says=True)
    yield _job("grpo", in_loss, in_reward, says="use_kl_loss")


def _correction_jobs() -> Iterator[Job]:
    yield _job("grpo", f"{_CORRECTION}rollout_is=token", f"{_CORRECTION}rollout_is_threshold=2.0")
    for level in ("token", "sequence"):
        own = f"{_CORRECTION}rollout_is={level}"
        yield _job("grpo", own)
        yield _job("grpo", f"{_CORRECTION}rollout_is_threshold=1.5", own)
        yield _job("grpo", f"{_CORRECTION}rollout_is_threshold=0.5_2.0", own)
        yield _job("grpo", f"{_CORRECTION}rollout_is_threshold=0.9", own, says=True)
        yield _job("grpo", f"{_CORRECTION}rollout_is_batch_normalize=True", own, says=True)
    for kind in ("token_k1", "seq_sum_k1", "seq_mean_k1"):
        own = f"{_CORRECTION}rollout_rs={kind}"
        yield _job("grpo", own, f"{_CORRECTION}rollout_rs_threshold=0.6_1.4")
        yield _job("grpo", f"{_CORRECTION}rollout_rs_threshold=1.1", own)
    penalised = f"{_ALGORITHM}use_kl_in_reward=True {_ALGORITHM}kl_ctrl.kl_coef=0.05"
    yield _job("grpo", f"{_CORRECTION}rollout_is=token", penalised, says="the engine's log-probs")
    both = f"{_CORRECTION}rollout_is=token {_CORRECTION}rollout_rs_threshold=0.6_1.5"
    yield _job("grpo", f"{_CORRECTION}rollout_rs=seq_mean_k1", both)
    means = f"{both} {_ACTOR}loss_agg_mode=seq-mean-token-mean"
    yield _job("grpo", f"{_CORRECTION}rollout_rs=seq_mean_k1", means)
    yield _job("grpo", f"{_CORRECTION}rollout_rs=token_k1", means)
    for kind in ("token_k2", "seq_mean_k3", "seq_max_k2"):
        yield _job("grpo", f"{_CORRECTION}rollout_rs={kind}", f"{_CORRECTION}rollout_rs_threshold=0.1", says=True)
    yield _job("grpo", f"{_CORRECTION}rollout_rs_threshold=1.5_2.0", f"{_CORRECTION}rollout_rs=token_k1", says=True)
    yield _job("gae", f"{_CORRECTION}rollout_rs=token_k1", f"{_CORRECTION}rollout_rs_threshold=2.0", says=True)
    yield _job(
        "grpo", f"{_CORRECTION}rollout_rs='\"token_k1,seq_sum_k1\"'", f"{_CORRECTION}rollout_rs_threshold=2", says=True
    )


def scale_of(_: Job) -> float:
    """Return the factor of the scores."""
    return 1.0


def losses_of(job: Job) -> tuple[Losses, Inputs]:
    """Return the losses of a job as verl computes them, and the inputs."""
    config = _composed(shlex.split(job.command))
    inputs = make_inputs(job, scale_of(job))
    data = _with_advantages(config, inputs)
    losses = {
        "actor": of_mini_batches(
            lambda new, part: _policy_loss(config, data, inputs, new, part), inputs.sample.new_logprobs
        )
    }
    if config.algorithm.adv_estimator == "gae":
        losses["critic"] = of_mini_batches(
            lambda new, part: _value_loss(config, data, new, part), inputs.sample.new_values
        )
    return losses, inputs


def _composed(words: list[str]) -> Any:
    """Return the config that Hydra composes of a command."""
    import verl
    from hydra import compose, initialize_config_dir

    folder = Path(verl.__file__).parent / "trainer" / "config"
    with initialize_config_dir(config_dir=str(folder), version_base=None):
        return compose("ppo_trainer", overrides=words[3:])


def _with_advantages(config: Any, inputs: Inputs) -> Any:
    """Return the rows with advantages, as the trainer's ``_compute_advantage`` computes them."""
    from verl import DataProto
    from verl.trainer.ppo import core_algos
    from verl.trainer.ppo.ray_trainer import apply_kl_penalty, compute_advantage
    from verl.trainer.ppo.rollout_corr_helper import compute_rollout_correction_and_add_to_batch
    from verl.utils.config import omega_conf_to_dataclass

    sample, algorithm = inputs.sample, config.algorithm
    mask = sample.mask
    last = (mask * torch.arange(mask.shape[1])).argmax(1, keepdim=True)
    tensors = {
        "response_mask": mask,
        "token_level_scores": torch.zeros_like(sample.logprobs).scatter(1, last, sample.scores[:, None]),
        "old_log_probs": sample.logprobs,
        "ref_log_prob": sample.ref_logprobs,
        "rollout_log_probs": inputs.rollout_logprobs,
        "values": sample.values[:, :-1],
    }
    data = DataProto.from_dict(tensors)
    if algorithm.use_kl_in_reward:
        control = core_algos.get_kl_controller(algorithm.kl_ctrl)
        data, _ = apply_kl_penalty(data, control, kl_penalty=algorithm.kl_penalty)
    else:
        data.batch["token_level_rewards"] = data.batch["token_level_scores"]
    samples = config.actor_rollout_ref.rollout.n
    data.non_tensor_batch["uid"] = np.array([row // samples for row in range(ROWS)], dtype=object)
    if not algorithm.rollout_correction.bypass_mode:
        data, _ = compute_rollout_correction_and_add_to_batch(data, algorithm.rollout_correction)
    settings = omega_conf_to_dataclass(algorithm)
    return compute_advantage(
        data,
        adv_estimator=algorithm.adv_estimator,
        gamma=algorithm.gamma,
        lam=algorithm.lam,
        num_repeat=samples,
        norm_adv_by_std_in_grpo=algorithm.norm_adv_by_std_in_grpo,
        config=settings,
    )


class _Rows(dict[str, Any]):
    """Rows of a mini-batch in the interface of a TensorDict."""

    def select(self, *names: str) -> _Rows:
        return _Rows({name: self[name] for name in names})

    def to_padded_tensor(self) -> _Rows:
        return self


def _rows(config: Any, data: Any, part: slice, size: int) -> _Rows:
    """Return the rows of a mini-batch with the counts that ``train_mini_batch`` adds: of all sampled tokens, since
    ``loss_mask`` is written before the corrections."""
    columns = {name: column[part] for name, column in data.batch.items()}
    if not config.actor_rollout_ref.actor.use_kl_loss:
        columns.pop("ref_log_prob")
    sampled = (data.batch["token_level_scores"][part] * 0 + data.sampled[part]).sum()
    return _Rows(columns, dp_size=1, batch_num_tokens=sampled.item(), global_batch_size=size)


def _policy_loss(config: Any, data: Any, inputs: Inputs, new: Tensor, part: slice) -> Tensor:
    from verl.utils.config import omega_conf_to_dataclass
    from verl.workers.utils import losses

    data.sampled = inputs.sample.mask
    actor = omega_conf_to_dataclass(config.actor_rollout_ref.actor)
    entropy = inputs.entropy(new)[part] if actor.entropy_coeff else None
    size = actor.ppo_mini_batch_size * config.actor_rollout_ref.rollout.n
    with patch.object(losses, "no_padding_2_padding", lambda value, _: value):
        outputs = {"log_probs": new[part], "entropy": entropy}
        loss: Tensor = losses.ppo_loss(actor, outputs, _rows(config, data, part, size))[0]
    return loss


def _value_loss(config: Any, data: Any, new: Tensor, part: slice) -> Tensor:
    from verl.workers.utils import losses

    critic = config.critic
    settings = SimpleNamespace(
        cliprange_value=critic.cliprange_value, loss_agg_mode=critic.loss_agg_mode, loss_scale_factor=None
    )
    with patch.object(losses, "no_padding_2_padding", lambda value, _: value):
        outputs = {"values": new[part][:, :-1]}
        rows = _rows(config, data, part, critic.ppo_mini_batch_size)
        loss: Tensor = losses.value_loss(settings, outputs, rows)[0]
    return loss
