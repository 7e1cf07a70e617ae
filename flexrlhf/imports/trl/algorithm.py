"""Algorithm of a TRL job: its losses and their settings."""

from __future__ import annotations

import re

from flexrlhf.api import UserError
from flexrlhf.imports import parts, score_parts
from flexrlhf.imports.ratio_bounds import NO_BOUND, NO_LOWER_BOUND, put_cap, put_floor
from flexrlhf.imports.settings import JobSettings, Setting, is_true
from flexrlhf.imports.translation import Translation

ALGORITHMS = {name: name for name in ("grpo", "gspo", "rloo", "ppo", "sft", "dpo", "reward", "kto", "orpo", "simpo")}
ALGORITHMS |= {
    "reward_modeling": "reward",
    "ppo_tldr": "ppo",
    "cpo": "simpo",
    "asyncgrpo": "grpo",
    "async_grpo": "grpo",
}
"""Names of TRL's commands, scripts and config classes → algorithms."""
MISSING = {
    "gkd|gold|minillm|(server_)?distillation": "distillation from a teacher",
    "sdft|sdpo|ssd": "distillation from the model itself",
    "online_?dpo|nash_?md|xpo": "pairs of sampled responses that a reward model or a judge ranks",
    "bco|tpo|a2po": "its loss",
    "prm": "scores of single steps of a response",
}
"""Names of other trainers → what they need that is not here."""


def algorithm_of(trainer: str, file: str) -> str:
    """Return the algorithm of a trainer. Raises UserError for one without a counterpart, with what is missing."""
    if "vlm" in trainer or "vlm" in file:
        raise UserError(f"{file}: TRL's trainer {trainer} reads images; flexrlhf trains models of text")
    if trainer in ALGORITHMS:
        return ALGORITHMS[trainer]
    missing = next((f" ({each})" for names, each in MISSING.items() if re.fullmatch(names, trainer)), "")
    known = ", ".join(dict.fromkeys(ALGORITHMS.values()))
    raise UserError(f"{file}: TRL's trainer {trainer} has no counterpart{missing}; there are {known}")


def put_reinforced(out: Translation, job: JobSettings, name: str) -> None:
    """Write the settings of an algorithm that samples responses, and where their scores are from."""
    reward = job.named("reward_model_name_or_path") or job.named("reward_model_path") or job.named("reward_model")
    functions = job.found.get("reward_funcs")
    job.read.add("reward_funcs")
    if reward is not None:
        parts.put_model(out, "reward", reward)
    elif not score_parts.put_functions(out, job):
        score_parts.put_scored_by_code(out, functions)
    _put_penalty(out, job, name)
    _put_ratios(out, job)
    own: dict[str, str | tuple[str, ...]] = {
        "temperature": "temperature",
        "gamma": "gamma",
        "gae_lambda": "lam",
        "value_clip": "cliprange_value",
        "entropy_coefficient": "entropy_coef",
    }
    parts.put_reals(out, job, own)
    if out.value("algorithm.entropy_coefficient"):
        out.put("algorithm.entropy_aggregation", "token-mean", "its bonus is a mean over tokens")
    parts.drop_cuts(out, job.get("top_p"), job.get("top_k"))
    out.drop(job.get("min_p"), parts.CUT)
    if (repeated := job.get("repetition_penalty")) is not None and repeated.value != 1:
        out.drop(repeated, parts.CUT)
    loss, scale = job.get("loss_type"), job.get("scale_rewards")
    means = {
        "dapo": "token-mean",
        "bnpo": "token-mean",
        "grpo": "seq-mean-token-mean",
        "dr_grpo": "seq-mean-token-sum-norm",
    }
    if loss is not None and loss.value in means:
        out.put("algorithm.loss_aggregation", means[loss.value], loss)
    elif loss is not None and loss.value != "cispo":
        out.drop(loss, "this loss is not here; PPO's clipped loss stands for it")
    if scale is not None and scale.value in ("group", "none", True, False):
        out.put("algorithm.scale", "group" if scale.value in ("group", True) else "none", scale)
    else:
        out.drop(scale, "scores are scaled in groups or not at all")
    masked, penalty = job.truth("mask_truncated_completions"), job.number("missing_eos_penalty")
    if masked is not None:
        out.put("algorithm.truncation", "mask-loss", masked)
        if name == "rloo" and out.value("algorithm.kl.place") != "loss" and "algorithm.kl" not in out.lines:
            out.note("in the reward of a truncated response that is masked TRL has no KL penalty; here it has one")
    else:
        out.put_real("algorithm.truncation.penalty", penalty)
    job.pass_over(
        "responses end at the tokenizer's end, or at stop sequences of rollout.config", "stop_token", matters=True
    )
    if name in ("grpo", "gspo") and job.truth("use_vllm") is not None and "max_staleness" not in job.defaults:
        _put_corrections(out, job)


def _put_penalty(out: Translation, job: JobSettings, name: str) -> None:
    """Write the KL penalty. TRL's GRPO multiplies it by the ratio, unless the file says otherwise."""
    beta, corrected = job.real("beta", "kl_coef"), job.get("use_bias_correction_kl")
    if beta is not None and beta.value == 0:
        out.put("algorithm.kl", None, beta)
        return
    out.put_real("algorithm.kl.coefficient", beta)
    if beta is not None and corrected is not None and name in ("grpo", "gspo"):
        out.put("algorithm.kl.corrected", is_true(corrected.value), corrected)


def _put_ratios(out: Translation, job: JobSettings) -> None:
    """Write the ratio and its bounds. CISPO's in TRL is at most ``epsilon_high`` and has no lower bound."""
    low, high = job.number("epsilon", "cliprange"), job.number("epsilon_high", "epsilon", "cliprange")
    delta, loss, level = job.number("delta"), job.get("loss_type"), job.get("importance_sampling_level")
    if level is not None and level.value == "sequence_token":
        out.put("algorithm.ratio", "sequence-token", level)
    elif level is not None and level.value not in ("token", "sequence"):
        out.drop(level, "a ratio is of tokens or of responses")
    if loss is not None and loss.value == "cispo":
        _put_capped_weights(out, job, loss, level)
        out.drop(delta, "TRL's cispo does not read it", matters=False)
        return
    out.put_real("algorithm.clip_low", low)
    out.put_real("algorithm.clip_high", high)
    largest = 1 + (0.2 if high is None else high.value)
    if delta is not None and delta.value <= largest:
        out.drop(delta, f"up to 1 + epsilon_high, {largest:g}, it also bounds ratios of positive advantages")
    else:
        out.put_real("algorithm.dual_clip", delta)


def _put_capped_weights(out: Translation, job: JobSettings, loss: Setting, level: Setting | None) -> None:
    high = job.number("epsilon_high", "epsilon")
    if level is not None and level.value != "token":
        out.drop(level, "cispo here weighs tokens by their own ratios")
    if high is None or high.value <= 1:
        shown = "0.2 by default" if high is None else f"{high.value:g}"
        for each in (loss, high):
            out.drop(each, f"its weights are at most epsilon_high, {shown}; here a bound of weights is above 1")
        return
    out.put("algorithm.surrogate", "cispo", loss)
    out.put("algorithm.clip_high", round(float(high.value) - 1, 9), high, "the largest weight, less 1")
    out.put("algorithm.clip_low", NO_LOWER_BOUND, "cispo's weights have no lower bound")
    job.read.add("epsilon")


def _put_corrections(out: Translation, job: JobSettings) -> None:
    """Write the weights of responses that vLLM has sampled, which TRL's GRPO has by default."""
    prefix = "vllm_importance_sampling_"
    on, mode = job.get(f"{prefix}correction"), job.get(f"{prefix}mode")
    upper, off = (each(f"{prefix}clip_max", f"{prefix}cap") for each in (job.number, job.is_zero))
    if on is not None and not is_true(on.value):
        out.put("algorithm.importance", None, on)
        return
    level, _, outside = str(mode.value if mode else "sequence_mask").partition("_")
    if level not in ("token", "sequence") or outside not in ("mask", "truncate"):
        out.drop(mode, "weights are of tokens or responses, and are truncated or masked")
        return
    out.put("algorithm.importance.level", level, mode or f"{prefix}mode: sequence_mask (TRL's default)")
    out.put("algorithm.importance.outside", outside, mode or "sequence_mask")
    default = Setting(f"{prefix}clip_max", 3.0, default=True) if off is None else Setting(off.key, NO_BOUND)
    put_cap(out, upper or default)
    put_floor(out, job.number(f"{prefix}clip_min"))


def put_supervised(out: Translation, job: JobSettings, name: str) -> None:
    """Write the settings of an algorithm that trains on given responses."""
    if name in ("dpo", "kto", "orpo", "simpo"):
        parts.put_reals(out, job, {"beta": "beta"})
    own = {"simpo": {"gamma": "simpo_gamma"}, "kto": {key: key for key in ("desirable_weight", "undesirable_weight")}}
    parts.put_reals(out, job, own.get(name, {}))
    if name == "simpo":
        _put_likelihood(out, job)
    elif name == "orpo":
        out.note(
            "the likelihood in TRL's ORPO is a mean over the tokens of all chosen texts with their prompts, here over "
            "responses of the means of their own tokens"
        )
    loss = job.listed("loss_type")
    values = loss.value if loss is not None and isinstance(loss.value, list) else [] if loss is None else [loss.value]
    if name == "dpo" and values == ["robust"]:
        out.put_real("algorithm.label_smoothing", job.number("label_smoothing"))
    elif name == "dpo":
        out.drop(job.number("label_smoothing"), "TRL's loss does not read it: robust does", matters=False)
    if name == "dpo" and values in (["sigmoid"], ["sigmoid_norm"], ["ipo"], ["robust"]):
        out.put("algorithm.loss", str(values[0]).removesuffix("_norm"), loss)
        if values[0] in ("ipo", "sigmoid_norm"):
            out.put("algorithm.length_normalised", True, loss)
    elif values and not (name in ("sft", "simpo") and values[0] in ("nll", "simpo")):
        out.drop(loss, "this loss is not here")
    elif loss is not None:
        out.drop(loss, f"the loss of {name}", matters=False)


def _put_likelihood(out: Translation, job: JobSettings) -> None:
    """List the likelihood that TRL's CPO adds to SimPO's loss, unless the file says 0."""
    factor = job.get("cpo_alpha")
    if factor is None:
        factor = Setting("cpo_alpha", "1.0 by default")
    if factor.value != 0:
        out.drop(factor, "the likelihood of chosen responses is no part of the loss here")
