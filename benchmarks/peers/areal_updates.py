"""Jobs of AReaL 1.0.4, and one update of each: its config classes, advantages of its actor, and losses of its steps."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from pathlib import Path
from tempfile import TemporaryDirectory
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest.mock import MagicMock, patch

import torch
import yaml
from torch import Tensor

from benchmarks.peers.comparison import LENGTH, ROWS, SAMPLES
from benchmarks.peers.updates import MINI_BATCHES, Inputs, Job, Losses, make_inputs, of_mini_batches

_MODEL = "Qwen/Qwen2.5-0.5B-Instruct"
_GROUPS = {"mean_level": "group", "std_level": "group", "group_size": SAMPLES, "eps": 1e-6}
_WHITE = {"mean_level": "batch", "std_level": "batch", "eps": 1e-8}
"""Normalisations with what is added to deviations here."""
_BASES: Mapping[str, Mapping[str, Any]] = {
    "grpo": {"actor.reward_norm": _GROUPS},
    "reinforce": {"gconfig.n_samples": 1},
    "ppo": {"gconfig.n_samples": 1, "critic.path": _MODEL, "critic.ppo_n_minibatches": len(MINI_BATCHES)},
}
_LONGEST = LENGTH + 2
"""Tokens of a truncated response with its prompt; others are shorter."""


def _job(
    base: str, says: str | bool = "", finishes: bool = True, further: Mapping[str, Any] | None = None, **settings: Any
) -> Job:
    """Return a job; ``settings``: of the actor. ``says``: True: the first of the settings."""
    own = {f"actor.{key}": value for key, value in settings.items()} | dict(further or {})
    values = {
        "experiment_name": "a",
        "rollout.backend": "vllm:d1",
        "gconfig.n_samples": SAMPLES,
        "gconfig.max_new_tokens": LENGTH,
        "actor.backend": "fsdp:d1",
        "actor.path": _MODEL,
        "actor.ppo_n_minibatches": len(MINI_BATCHES),
        "actor.recompute_logprob": True,
        "ref.path": _MODEL,
        **_BASES[base],
        **own,
    }
    values["train_dataset"] = {"batch_size": ROWS // values["gconfig.n_samples"], "path": "data", "type": "rl"}
    text = yaml.safe_dump(_tree(values), default_flow_style=True, sort_keys=False, width=10**6).strip()
    about = ", ".join(f"{key}={value}" for key, value in own.items()) or "defaults"
    key = next(iter(own)) if says is True else says or ""
    return Job(f"{base} {about}", text, key, file="job.yaml", finishes=finishes and base == "ppo")


def _tree(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return dotted keys as nested mappings; None removes a section."""
    tree: dict[str, Any] = {}
    for key, value in values.items():
        *parents, last = key.split(".")
        node = tree
        for parent in parents:
            node = node.setdefault(parent, {})
        node[last] = value
    return {key: value for key, value in tree.items() if value != {"path": None}}


def jobs() -> Iterator[Job]:
    """Yield the jobs: one for each setting that a loss depends on."""
    for base in _BASES:
        yield _job(base)
        yield _job(base, kl_ctl=0.0)
        yield _job(base, says="of the reference", further={"ref.path": None})
        yield _job(base, recompute_logprob=False, kl_ctl=0.0)
    yield _job("ppo", reward_clip=100.0, says="behind a truncated response", finishes=False)
    yield _job("ppo", mask_no_eos_with_zero=True, reward_clip=100.0, finishes=False)
    yield from _advantage_jobs()
    yield from _loss_jobs()
    yield from _decoupled_jobs()


def _advantage_jobs() -> Iterator[Job]:
    for base in _BASES:
        yield _job(base, discount=0.9, **_says(base == "grpo"))
        yield _job(base, gae_lambda=0.8, **_says(base == "grpo"))
        yield _job(base, adv_norm=_WHITE, **_says(base == "grpo" and "actor.adv_norm.mean_level"))
        yield _job(base, reward_clip=1.0)
        yield _job(base, reward_scaling=2.0, says=True)
        yield _job(base, reward_bias=0.5, says=True)
        yield _job(base, mask_no_eos_with_zero=True, **_says(base != "ppo"))
        for estimator in ("k2", "k3"):
            yield _job(base, kl_estimator=estimator)
        penalty: dict[str, Any] = {"overlong_tokens": 8, "overlong_penalty_factor": 0.5, "max_new_tokens": LENGTH}
        yield _job(base, overlong_reward_penalty=True, **penalty)
        yield _job(base, overlong_reward_penalty=True, **penalty | {"max_new_tokens": 9}, says="overlong")
    yield _job("reinforce", discount=0.9, gae_lambda=0.8, kl_ctl=0.0)
    for own in ({"mean_level": "batch"}, {"std_level": None}, {"mean_level": None}, {"std_unbiased": False}):
        yield _job("reinforce", adv_norm={**_WHITE, **own}, says=_unlike(own, "adv_norm"))
        yield _job("ppo", reward_norm={**_WHITE, **own}, reward_clip=1e3, says=_unlike(own, "reward_norm"))
    yield _job("reinforce", adv_norm={"eps": 1e-8})
    yield _job("grpo", reward_norm={**_GROUPS, "std_level": None})
    yield _job("grpo", reward_norm={**_GROUPS, "std_level": None, "mean_leave1out": True})
    yield _job("grpo", reward_norm={**_GROUPS, "std_level": None}, adv_norm=_WHITE)
    yield _job("grpo", reward_norm={**_GROUPS, "mean_leave1out": True})
    yield _job("grpo", reward_norm={**_GROUPS, "std_unbiased": False}, says="actor.reward_norm.std_unbiased")
    yield _job("grpo", reward_norm={**_GROUPS, "std_level": "batch"}, says="actor.reward_norm.std_level")
    yield _job("grpo", reward_norm={**_GROUPS, "group_size": 2}, says="actor.reward_norm.group_size")
    for norm in ({"mean_level": "group", "std_level": "group"}, {"mean_level": "group", "group_size": SAMPLES}):
        yield _job("grpo", reward_norm=norm, says="actor.reward_norm")
    yield _job("grpo", reward_norm=None)


def _says(named: Any) -> dict[str, Any]:
    return {"says": named} if named else {}


def _unlike(own: Mapping[str, Any], section: str) -> str:
    """Return the key of a setting other than means and deviations of the batch."""
    key, value = next(iter(own.items()))
    return "" if value == "batch" else f"actor.{section}.{key}"


def _loss_jobs() -> Iterator[Job]:
    for base in _BASES:
        yield _job(base, eps_clip=0.1)
        yield _job(base, eps_clip_higher=0.28)
        yield _job(base, c_clip=1.5)
        yield _job(base, use_sapo_loss=True, says=True)
        yield _job(base, m2_threshold=0.04, says=True)
        yield _job(base, importance_sampling_level="sequence", says="importance_sampling_level")
        yield _job(base, importance_sampling_level="sequence", kl_ctl=0.0, **_says(base == "ppo"))
    yield _job("ppo", further={"critic.eps_clip": 0.2})
    yield _job("ppo", further={"critic.ppo_n_minibatches": 4}, says=True)


def _decoupled_jobs() -> Iterator[Job]:
    prefix = "actor.rejection_sampling."
    decoupled: dict[str, Any] = {"use_decoupled_loss": True, "kl_ctl": 0.0}
    for base in _BASES:
        yield _job(base, **decoupled, says="since 1.0")
        yield _job(base, rejection_sampling={"upper": 5.0}, **decoupled)
        yield _job(base, rejection_sampling={"upper": 1.4}, use_decoupled_loss=True)
    for own in (
        {"upper": 1.3},
        {"upper": 1.3, "lower": 0.7},
        {"upper": 1.3, "action": "clamp"},
        {"metric": "ratio", "level": "token", "action": "mask", "upper": 1.3},
    ):
        yield _job("grpo", rejection_sampling=own, **decoupled)
    yield _job("grpo", rejection_sampling={"upper": 1.3, "lower": 0.7, "action": "clamp"}, **decoupled, says="lower")
    for further in ({"action": "mask"}, {"action": "clamp"}, {"agg": "sum"}, {"agg": "max"}):
        bounds = {"level": "sequence", "upper": 1.2, **further}
        yield _job("grpo", rejection_sampling=bounds, **decoupled, says=f"{prefix}level")
    for metric in ("kl_k1", "kl_k2", "kl_k3"):
        words = {"metric": metric, "upper": 0.2}
        yield _job("grpo", rejection_sampling=words, **decoupled, says=f"{prefix}metric")
    yield _job("grpo", rejection_sampling={"upper": 1.1}, kl_ctl=0.0)
    yield _job("grpo", prox_logp_method="metrics", rejection_sampling={"upper": 1.4}, **decoupled)
    corrected: dict[str, Any] = {"rejection_sampling": {"upper": 1.4}, **decoupled}
    yield _job("grpo", prox_logp_method="loglinear", says=True, **corrected)
    yield _job("grpo", importance_sampling_level="sequence", **corrected, says="importance_sampling_level")


def scale_of(_: Job) -> float:
    """Return the factor of the scores."""
    return 1.0


def losses_of(job: Job) -> tuple[Losses, Inputs]:
    """Return the losses of a job as AReaL computes them, and the inputs."""
    config, inputs = _parsed(job), make_inputs(job, scale_of(job))
    data = _with_advantages(config, inputs)
    sample = inputs.sample
    places = data["loss_mask"].bool()
    losses = {
        "actor": of_mini_batches(
            lambda new, part: _policy_loss(config, data, _placed(new, inputs, places)[part], part), sample.new_logprobs
        )
    }
    if config.critic is not None:
        losses["critic"] = of_mini_batches(
            lambda new, part: _value_loss(config, data, _placed(new, inputs, places)[part], part), sample.new_values
        )
    return losses, inputs


def _parsed(job: Job) -> Any:
    """Return the config of a file, as ``load_expr_config`` merges it: the sections that losses depend on."""
    from areal.api.cli_args import PPOConfig, parse_cli_args, to_structured_cfg
    from omegaconf import OmegaConf

    # AReaL's loggers turn it on
    logging.disable(logging.WARNING)
    with TemporaryDirectory() as folder:
        file = Path(folder, job.file)
        file.write_text(job.command)
        tree, _ = parse_cli_args(["--config", str(file)])
    whole = to_structured_cfg(tree, PPOConfig)
    sections = {name: whole[name] for name in ("actor", "critic")}
    for each in filter(None, sections.values()):
        OmegaConf.update(each, "experiment_name", "a")
        OmegaConf.update(each, "trial_name", "b")
        each.backend = whole.actor.backend
    found = {name: OmegaConf.to_object(each) if each else None for name, each in sections.items()}
    return SimpleNamespace(**found, ref=whole.ref)


def _placed(columns: Tensor, inputs: Inputs, places: Tensor) -> Tensor:
    """Return values of response tokens in rows of prompt and response, at the tokens before, as a model writes them."""
    mask = inputs.sample.mask.bool()
    return torch.zeros(places.shape, dtype=columns.dtype).masked_scatter(places, columns[:, :LENGTH][mask])


def _with_advantages(config: Any, inputs: Inputs) -> dict[str, Any]:
    """Return the rows with advantages, as ``PPOActor`` computes them.

    A response that is not finished ends where the longest row does, which is how AReaL finds it.
    """
    from areal.trainer.ppo.actor import PPOActor

    sample, lengths = inputs.sample, inputs.sample.mask.sum(1)
    ends = torch.where(inputs.finished, lengths + 1, _LONGEST)[:, None]
    positions = torch.arange(_LONGEST)
    loss_mask = (positions >= ends - lengths[:, None]) & (positions < ends)
    places = loss_mask.roll(-1, 1)
    engine, trained, values = (
        _placed(each, inputs, places) for each in (inputs.rollout_logprobs, sample.logprobs, sample.values)
    )
    last = sample.values.gather(1, lengths[:, None])
    data = {
        "input_ids": torch.zeros(ROWS, _LONGEST, dtype=torch.long),
        "attention_mask": (positions < ends).long(),
        "loss_mask": loss_mask.long(),
        "rewards": sample.scores.clone(),
        "logprobs": engine.roll(1, 1),
        "versions": torch.where(loss_mask, 0, -1),
    }
    if config.actor.should_compute_prox_logp():
        data["prox_logp"] = trained
    if config.actor.kl_ctl > 0 and config.ref is not None:
        data["ref_logp"] = _placed(sample.ref_logprobs, inputs, places)
    if config.critic is not None:
        data["values"] = values.scatter(1, ends - 1, last)
    found: dict[str, Any] = PPOActor(config.actor, SimpleNamespace())._compute_advantages(data)
    return found


def _rows(data: Mapping[str, Any], part: slice) -> dict[str, Any]:
    return {name: column[part] for name, column in data.items()}


def _policy_loss(config: Any, data: Mapping[str, Any], new: Tensor, part: slice) -> Tensor:
    from areal.trainer.ppo import actor

    engine = _Engine(new)
    return engine.loss_of(actor, actor.PPOActor(config.actor, engine), _rows(data, part))


def _value_loss(config: Any, data: Mapping[str, Any], new: Tensor, part: slice) -> Tensor:
    from areal.trainer.ppo import critic

    engine = _Engine(new)
    return engine.loss_of(critic, critic.PPOCritic(config.critic, engine), _rows(data, part))


class _Engine:
    """Engine of AReaL's interface whose model has computed ``outputs`` of a mini-batch."""

    def __init__(self, outputs: Tensor) -> None:
        self.outputs, self.loss = outputs, torch.zeros(())

    def loss_of(self, module: ModuleType, trainer: Any, rows: dict[str, Any]) -> Tensor:
        """Return the loss that a trainer goes backward from, with all ``rows`` in one mini-batch."""
        # statistics take float32 alone
        others: dict[str, Any] = {
            "split_padded_tensor_dict_into_mb_list": lambda data, **_: SimpleNamespace(mbs=[data]),
            "stats_tracker": MagicMock(),
        }
        with patch.multiple(module, **others):
            trainer._ppo_update(rows)
        return self.loss

    def train(self) -> None:
        """Do nothing: there is no dropout."""

    def get_version(self) -> int:
        """Return the number of updates."""
        return 1

    def train_batch(self, rows: dict[str, Any], loss_fn: Any, loss_weight_fn: Any) -> dict[str, float]:
        """Compute the loss of a mini-batch, whose weight is 1."""
        entropy = {"entropy": self.outputs} if "eps_clip_higher" in loss_fn.keywords else {}
        self.loss = loss_fn(self.outputs, input_data=rows, **entropy)
        return {}
