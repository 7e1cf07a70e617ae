"""Jobs of OpenRLHF 0.11.2, and one update of each: arguments of its scripts, advantages, and steps of its trainers."""

from __future__ import annotations

import ast
import shlex
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock, patch

import torch
from torch import Tensor

from benchmarks.peers.comparison import ROWS, SAMPLES
from benchmarks.peers.updates import MINI_BATCHES, Inputs, Job, Losses, make_inputs, of_mini_batches

_GROUPS = {"rloo", "reinforce_baseline", "group_norm", "dr_grpo"}
_MODEL, _MIXTURE = "Qwen/Qwen2.5-0.5B-Instruct", "Qwen/Qwen3-30B-A3B"


def _job(estimator: str, about: str, further: str = "", says: str | bool = "", **others: Any) -> Job:
    """Return the job of an estimator of advantages. ``says``: True: the name of the option."""
    samples, model = SAMPLES if estimator in _GROUPS else 1, others.pop("model", _MODEL)
    words = (
        f"python3 -m openrlhf.cli.train_ppo_ray --actor.model_name_or_path {model} "
        f"--reward.model_name_or_path {_MODEL} "
        f"--data.prompt_dataset data --algo.advantage.estimator {estimator} --rollout.n_samples_per_prompt {samples} "
        f"--rollout.batch_size {ROWS // samples} --train.batch_size {ROWS // len(MINI_BATCHES)} {about} {further}"
    )
    key = f"{about[2:].partition(' ')[0]}" if says is True else says or ""
    return Job(f"{estimator} {about}" if about else f"{estimator}, defaults", " ".join(words.split()), key, **others)


def _dpo(about: str, further: str = "", says: str | bool = "", **others: Any) -> Job:
    words = f"deepspeed --module openrlhf.cli.train_dpo --model.model_name_or_path {_MODEL} --data.dataset data {about}"
    key = f"{about[2:].partition(' ')[0]}" if says is True else says or ""
    return Job(f"dpo {about}" if about else "dpo, defaults", f"{words} {further}".strip(), key, **others)


def jobs() -> Iterator[Job]:
    """Yield the jobs: one for each setting that a loss depends on, and each preset."""
    for estimator in ("gae", "reinforce", "rloo", "reinforce_baseline", "group_norm", "dr_grpo"):
        yield _job(estimator, "")
        yield _job(estimator, "--algo.kl.init_coef 0")
        yield _job(estimator, "--algo.advantage.no_std_norm", says=estimator.startswith(("gae", "reinforce")))
    yield _job("flash_reinforce", "--rollout.n_samples_per_prompt 4", says="algo.advantage.estimator=flash_reinforce")
    yield from _loss_jobs()
    yield from _correction_jobs()
    for name, estimator in _PRESETS.items():
        loss = "--actor.policy_loss_type gspo" if name == "gspo" else ""
        samples = SAMPLES if estimator in _GROUPS else 1
        yield _job(estimator, loss, preset={"name": name, "like": "openrlhf", "samples_per_prompt": samples})
    yield _dpo("", preset={"name": "dpo", "like": "openrlhf"})
    yield _dpo("")
    yield _dpo("--model.beta 0.3")
    yield _dpo("--model.label_smoothing 0.1")
    yield _dpo("--model.ipo_enable")
    yield _dpo("--model.label_smoothing 0.1", "--model.ipo_enable")
    yield _dpo("--model.nll_loss_coef 0.1", says=True)


_PRESETS = {"ppo": "gae", "grpo": "group_norm", "rloo": "rloo", "gspo": "group_norm", "reinforce++": "reinforce"}


def _loss_jobs() -> Iterator[Job]:
    yield _job("gae", "--algo.advantage.gamma 0.9")
    yield _job("gae", "--algo.advantage.lambd 0.8")
    yield _job("gae", "--critic.value_clip 0.2")
    yield _job("reinforce", "--algo.advantage.gamma 0.9")
    yield _job("rloo", "--algo.advantage.gamma 0.9")
    for about in (
        "--actor.eps_clip 0.1",
        "--actor.eps_clip_low_high 0.1 0.3",
        "--actor.dual_clip 1.5",
        "--actor.entropy_coef 0.01",
        "--actor.loss_agg_mode seq-mean-token-mean",
        "--algo.kl.init_coef 0.05",
        "--actor.policy_loss_type gspo",
    ):
        yield _job("group_norm", about)
    for estimator in ("k1", "k2", "k3"):
        yield _job("group_norm", f"--algo.kl.estimator {estimator}", "--algo.kl.use_loss --algo.kl.init_coef 0.05")
        yield _job("gae", f"--algo.kl.estimator {estimator}", "--algo.kl.init_coef 0.05")
    yield _job("group_norm", "--algo.kl.use_loss", "--algo.kl.init_coef 0.05")
    yield _job("group_norm", "--algo.kl.unbiased_gradient", "--algo.kl.use_loss --algo.kl.estimator k3", says=True)
    yield _job("gae", "--reward.clip_range -1 1")
    yield _job("gae", "--reward.clip_range -1 2", says=True)
    yield _job("rloo", "--reward.clip_range -1 1", says=True)
    yield _job("group_norm", "--actor.aux_loss_coef 0.003", model=_MIXTURE)
    yield _job("group_norm", "", model=_MIXTURE)


def _correction_jobs() -> Iterator[Job]:
    prefix = "--algo.advantage.is_correction_"
    for level in ("token", "seq"):
        own = f"{prefix}level {level} --algo.kl.init_coef 0"
        yield _job("group_norm", own)
        yield _job("group_norm", f"{prefix}threshold 0.7 1.3", own)
        yield _job("group_norm", f"{prefix}threshold 1.2", own)
        yield _job("group_norm", f"{prefix}mode mask", own)
        yield _job("group_norm", f"{prefix}threshold 0.7 1.3", f"{own} --actor.loss_agg_mode seq-mean-token-mean")
        yield _job("group_norm", f"{prefix}threshold 1.1 1.3", own, says=True)
        for gating in ("binary_kl", "tv"):
            yield _job("group_norm", f"{prefix}gating {gating}", f"{own} {prefix}threshold 0.05", says=True)
    yield _job("group_norm", f"{prefix}mode clip", f"{prefix}level token", says=True)
    yield _job("group_norm", f"{prefix}level token", "--actor.policy_loss_type gspo", says=True)
    yield _job("gae", f"{prefix}level token", "--algo.kl.init_coef 0")
    yield _job("gae", f"{prefix}level token", says="the engine's log-probs")
    yield _job("group_norm", f"{prefix}level token", "--algo.kl.use_loss --algo.kl.estimator k3")
    yield _job(
        "group_norm", f"{prefix}level seq", "--algo.kl.use_loss --algo.kl.estimator k3", says="rejected responses"
    )
    yield _job("group_norm", f"{prefix}level off")


def scale_of(job: Job) -> float:
    """Return the factor of the scores, next to which the 1e-9 and 1e-6 that are added to deviations are nothing."""
    return 64.0 if "estimator group_norm" in job.command else 1.0


def losses_of(job: Job) -> tuple[Losses, Inputs]:
    """Return the losses of a job as OpenRLHF computes them, and the inputs."""
    words = shlex.split(job.command)
    module = next(word for word in words if word.startswith("openrlhf.cli."))
    arguments = _parsed(module, words[words.index(module) + 1 :])
    is_ppo = module.endswith("ppo_ray")
    inputs = make_inputs(job, scale_of(job))
    if not is_ppo:
        return {
            "actor": of_mini_batches(lambda new, part: _pairs(arguments, inputs, new, part), inputs.sample.new_logprobs)
        }, inputs
    rows = _with_advantages(arguments, inputs)
    sample = inputs.sample
    losses = {
        "actor": of_mini_batches(lambda new, part: _policy(arguments, rows, inputs, new, part), sample.new_logprobs)
    }
    if arguments.algo.advantage.estimator == "gae":
        losses["critic"] = of_mini_batches(
            lambda new, part: _values(arguments, rows, inputs, new, part), sample.new_values
        )
    return losses, inputs


def _parsed(module: str, words: list[str]) -> Any:
    """Return the arguments of a script, parsed and checked by its own statements up to the training."""
    import openrlhf

    file = Path(openrlhf.__file__).parent / "cli" / f"{module.rpartition('.')[2]}.py"
    tree = ast.parse(file.read_text())
    main = next(node for node in tree.body if isinstance(node, ast.If))
    body = [node for node in main.body if ast.unparse(node) != "train(args)"]
    imports = [node for node in tree.body if isinstance(node, ast.Import | ast.ImportFrom)]
    plain = [node for node in imports if "openrlhf" not in ast.unparse(node) and "ray" not in ast.unparse(node)]
    names: dict[str, Any] = {}
    code = compile(ast.Module(plain + body, []), str(file), "exec")
    with patch("sys.argv", ["train", *words]), patch("builtins.print"):
        exec(code, names)
    return names["args"]


def _with_advantages(arguments: Any, inputs: Inputs) -> Any:
    """Return the rows with advantages, as ``RemoteExperienceMaker`` makes them."""
    from openrlhf.models.utils import compute_approx_kl
    from openrlhf.trainer.ppo_utils.experience import Experience
    from openrlhf.trainer.ppo_utils.experience_maker import RemoteExperienceMaker
    from openrlhf.trainer.ppo_utils.kl_controller import FixedKLController

    sample, kl = inputs.sample, arguments.algo.kl
    maker = RemoteExperienceMaker.__new__(RemoteExperienceMaker)
    maker.strategy = SimpleNamespace(args=arguments)
    maker.args, maker.advantage_estimator = arguments, arguments.algo.advantage.estimator
    maker.kl_ctl = FixedKLController(0.0 if kl.use_loss else kl.init_coef)
    estimate = compute_approx_kl(sample.logprobs, sample.ref_logprobs, kl_estimator=kl.estimator)
    rows = Experience(
        action_mask=sample.mask.bool(),
        values=sample.values[:, :-1].clone(),
        rewards=sample.scores.clone(),
        kl=torch.zeros_like(estimate) if kl.use_loss or kl.init_coef == 0 else estimate,
        index=list(range(ROWS)),
    )
    (found,) = maker.compute_advantages_and_returns([rows])
    if (
        maker.advantage_estimator in ("gae", "reinforce", "reinforce_baseline")
        and not arguments.algo.advantage.no_std_norm
    ):
        # the preset names this difference: a variance over N tokens, here over N - 1
        tokens = int(sample.mask.sum())
        found.advantages = found.advantages * ((tokens - 1) / tokens) ** 0.5
    return found


def _step(kind: Any, arguments: Any, number: int, **attributes: Any) -> tuple[Any, list[Tensor]]:
    """Return a trainer with its constructor's losses, and the list of the losses that its steps go backward from."""
    losses: list[Tensor] = []
    strategy = MagicMock(args=arguments)
    strategy.backward = lambda loss, *_: losses.append(loss)
    module = import_module(kind.__module__)
    without_gpu = {"NaiveReplayBuffer": MagicMock(), "torch_dist_barrier_and_cuda_sync": MagicMock()}
    with patch.multiple(module, **{name: each for name, each in without_gpu.items() if hasattr(module, name)}):
        trainer = kind(strategy, *(MagicMock() for _ in range(number)), **attributes)
    return trainer, losses


def _experience(rows: Any, inputs: Inputs, part: slice) -> Any:
    from openrlhf.trainer.ppo_utils.experience import Experience

    sample = inputs.sample
    return Experience(
        info={},
        action_mask=rows.action_mask[part],
        action_log_probs=sample.logprobs[part],
        base_action_log_probs=sample.ref_logprobs[part],
        rollout_log_probs=inputs.rollout_logprobs[part],
        advantages=rows.advantages[part],
        returns=None if rows.returns is None else rows.returns[part],
        values=sample.values[part, :-1],
    )


def _policy(arguments: Any, rows: Any, inputs: Inputs, new: Tensor, part: slice) -> Tensor:
    from openrlhf.trainer.ray.ppo_actor import ActorPPOTrainer

    trainer, losses = _step(ActorPPOTrainer, arguments, 4)
    outputs = SimpleNamespace(entropy=inputs.entropy(new)[part], aux_loss=inputs.router_loss(new[part]))
    trainer.actor = MagicMock(return_value=(new[part], outputs), is_vlm=False)
    trainer.training_step(_experience(rows, inputs, part), arguments.algo.kl.init_coef, 0)
    return losses[0]


def _values(arguments: Any, rows: Any, inputs: Inputs, new: Tensor, part: slice) -> Tensor:
    from openrlhf.trainer.ray.ppo_critic import CriticPPOTrainer

    trainer, losses = _step(CriticPPOTrainer, arguments, 3, value_clip=arguments.critic.value_clip)
    trainer.critic = MagicMock(return_value=(new[part][:, :-1], SimpleNamespace(aux_loss=0)))
    trainer.training_step(_experience(rows, inputs, part), 0)
    return losses[0]


def _pairs(arguments: Any, inputs: Inputs, new: Tensor, part: slice) -> Tensor:
    """Return DPO's loss with the terms that its trainer adds."""
    from openrlhf.models import DPOLoss

    settings, mask = arguments.model, inputs.sample.mask[part]

    def sums(logprobs: Tensor) -> tuple[Tensor, ...]:
        return (logprobs[part] * mask).sum(1).view(-1, 2).unbind(1)

    loss: Tensor = DPOLoss(settings.beta, settings.label_smoothing, settings.ipo_enable)(
        *sums(new), *sums(inputs.sample.ref_logprobs)
    )[0]
    means = (new[part] * mask).sum(1) / mask.sum(1)
    return loss - settings.nll_loss_coef * means[::2].mean()
