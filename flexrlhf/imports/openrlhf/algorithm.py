"""Algorithm of an OpenRLHF job: advantages, penalty, clips, corrections."""

from __future__ import annotations

from flexrlhf.imports import parts
from flexrlhf.imports.ratio_bounds import NO_BOUND, note_penalty, put_rejection
from flexrlhf.imports.settings import LARGEST, JobSettings, Setting, is_true, read_scalar
from flexrlhf.imports.translation import Translation

_ESTIMATORS = {
    "gae": "ppo",
    "group_norm": "grpo",
    "dr_grpo": "grpo",
    "rloo": "rloo",
    "reinforce": "reinforce++",
    "reinforce_baseline": "reinforce++",
}


def put_algorithm(out: Translation, job: JobSettings) -> str:
    """Write the algorithm and return its name."""
    estimator, loss = job.get("algo.advantage.estimator"), job.get("actor.policy_loss_type")
    name = parts.put_estimator(out, "openrlhf", _ESTIMATORS, estimator, loss, "grpo")
    if loss is not None and loss.value not in ("ppo", "gspo"):
        out.drop(loss, "this loss is not here; PPO's stands for it")
    if estimator is not None and estimator.value == "reinforce_baseline":
        out.put("algorithm.baseline", "group", estimator)
    if estimator is not None and estimator.value == "dr_grpo":
        out.put("algorithm.scale", "none", estimator)
    no_std = job.truth("algo.advantage.no_std_norm")
    if name in ("ppo", "reinforce++"):
        out.drop(no_std, "advantages less their mean, not divided by their deviation, are not here")
    else:
        out.drop(no_std, "its advantages do not read it: gae, reinforce and reinforce_baseline do", matters=False)
    samples = job.count("rollout.n_samples_per_prompt")
    if samples is not None and (samples.value > 1 or name in ("ppo", "reinforce++")):
        out.put("algorithm.samples_per_prompt", samples.value, samples)
    _penalty(out, job)
    pairs = {
        "gamma": ("algo.advantage.gamma", ("ppo", "reinforce++")),
        "gae_lambda": ("algo.advantage.lambd", ("ppo",)),
        "value_clip": ("critic.value_clip", ("ppo",)),
        "temperature": ("rollout.temperature", (name,)),
        "dual_clip": ("actor.dual_clip", (name,)),
        "entropy_coefficient": ("actor.entropy_coef", (name,)),
    }
    for key, (own, names) in pairs.items():
        setting = job.number(own)
        if name in names:
            out.put_real(f"algorithm.{key}", setting)
        else:
            out.drop(setting, f"{name} has none", matters=False)
    clip, both = job.number("actor.eps_clip"), job.get("actor.eps_clip_low_high")
    ends = _two(both)
    for key, end in zip(("clip_low", "clip_high"), ends or (0, 0), strict=True):
        if ends:
            out.put(f"algorithm.{key}", end, both)
        else:
            out.put_real(f"algorithm.{key}", clip)
    top_p = job.number("rollout.top_p")
    if top_p is not None and top_p.value < 1:
        out.drop(top_p, parts.CUT)
    mean = job.get("actor.loss_agg_mode")
    if mean is not None and mean.value in ("token-mean", "seq-mean-token-mean"):
        out.put_same("algorithm.loss_aggregation", mean)
    else:
        out.drop(mean, "losses are aggregated by token-mean or seq-mean-token-mean")
    _clip(out, job, name)
    _corrections(out, job, name)
    return name


def _clip(out: Translation, job: JobSettings, name: str) -> None:
    """Write the bounds of scores, if they are symmetric; of scores before a baseline, OpenRLHF's are behind it."""
    both = job.listed("reward.clip_range")
    ends = [] if both is None else [read_scalar(each) for each in parts.names_of(both.value)]
    if len(ends) == 2 and all(isinstance(end, int | float) for end in ends) and 0 < ends[1] == -ends[0]:
        out.put("algorithm.reward_clip", float(ends[1]), both)
        out.drop(None if name == "ppo" else both, "scores are clipped at -x and x, before a baseline")
    else:
        out.drop(both, "scores are clipped to the same bound on both sides of 0: algorithm.reward_clip")


def _penalty(out: Translation, job: JobSettings) -> None:
    coefficient, estimator = job.real("algo.kl.init_coef"), job.get("algo.kl.estimator")
    in_loss, target = job.truth("algo.kl.use_loss"), job.number("algo.kl.target")
    if coefficient is not None and coefficient.value == 0:
        out.put("algorithm.kl", None, coefficient)
        for each in (estimator, in_loss, target):
            out.drop(each, "there is no penalty", matters=False)
        return
    if in_loss is not None:
        out.put("algorithm.kl.place", "loss", in_loss)
    out.put_real("algorithm.kl.coefficient", coefficient)
    if in_loss is not None and estimator is None:
        out.put("algorithm.kl.estimator", "k1", "algo.kl.estimator: k1 (OpenRLHF's default)")
    out.put_same("algorithm.kl.estimator", estimator)
    if in_loss is None:
        out.put_real("algorithm.kl.target", target)


def _corrections(out: Translation, job: JobSettings, name: str) -> None:
    _weights(out, job, name)
    note_penalty(out)
    filters, ends = job.truth("algo.dynamic_filtering_enable"), job.get("algo.dynamic_filtering_range")
    if filters is not None and name in ("grpo", "gspo", "rloo"):
        out.put("algorithm.dynamic_sampling.rounds", 2, filters)
        out.drop(ends, "groups whose scores are all the same are left out", matters=False)
    elif filters is not None:
        out.drop(filters, "dynamic sampling goes with grpo, rloo and gspo")
    if (normalised := job.truth("reward.normalize_enable")) is not None:
        out.put("algorithm.normalise_scores", "running", normalised)
    parts.put_overlong(out, job.count("reward.overlong_buffer_len"), job.number("reward.overlong_penalty_factor"))
    out.put_same("algorithm.freeze_actor_steps", job.count("critic.freezing_steps"))


def _weights(out: Translation, job: JobSettings, name: str) -> None:
    """Write the correction for an engine's log-probs: weights of tokens, and which tokens or responses it drops.

    Before 0.11 it was enabled by one option, and its type was tis, icepop or seq-mask-tis.
    """
    prefix = "algo.advantage.is_correction_"
    level, mode, gate, enabled = (job.get(f"{prefix}{key}") for key in ("level", "mode", "gating", "enable"))
    kind, bounds = job.get(f"{prefix}type"), job.listed(f"{prefix}threshold")
    word, treatment = str(level.value if level else "off"), str(mode.value if mode else "mask")
    word = "seq" if word == "sequence" else word
    if level is None and enabled is not None and is_true(enabled.value):
        word, treatment = _OLD_KINDS.get(str(kind.value if kind else "tis"), ("", ""))
        level = enabled
    if level is None or word == "off":
        for each in (mode, gate, kind, bounds):
            out.drop(each, "there is no correction", matters=False)
        return
    # one number is an upper bound
    ends = [0.5, 5.0] if bounds is None else [0.0, *_numbers(bounds)][-2:]
    low, high = ends if len(ends) == 2 else (0.0, 0.0)
    is_known = (
        word in ("token", "seq") and treatment in ("mask", "truncate") and (gate is None or gate.value == "ratio")
    )
    if name == "gspo" or not is_known or (word == "token" and not low <= 1 <= high):
        why = "the ratio of GSPO is to the engine's log-probs then" if name == "gspo" else _UNLIKE
        for each in (level, mode, gate, kind, bounds):
            out.drop(each, why)
        return
    source = bounds or "is_correction_threshold: 0.5 5.0 (OpenRLHF's default)"
    if word == "token":
        out.put("algorithm.importance.level", "token", level)
        out.put("algorithm.importance.outside", treatment, mode or kind or "is_correction_mode: mask (the default)")
        out.put("algorithm.importance.cap", high, source)
        if treatment == "mask" and low > 0:
            out.put("algorithm.importance.floor", low, source)
        elif low > 0:
            lower = Setting(bounds.key if bounds else "is_correction_threshold", low)
            out.drop(lower, "weights that are truncated have no lower bound here")
    elif put_rejection(out, "geometric", low, high, source):
        out.put("algorithm.importance.level", "token", level)
        out.put("algorithm.importance.cap", NO_BOUND, "weights of the responses that are kept have no bound")
        out.put("algorithm.importance.reject.denominators", "all", "rejected responses are counted in its means")
        if out.value("algorithm.kl.place") == "loss" or out.value("algorithm.entropy_coefficient"):
            out.note(
                "KL penalty and entropy bonus of rejected responses are a part of OpenRLHF's loss, here they are not"
            )
    else:
        for each in (level, bounds):
            out.drop(each, _UNLIKE)


_UNLIKE = "weights are truncated from above, or masked, by ratios of tokens or their mean, with bounds around 1"
_OLD_KINDS = {"tis": ("token", "truncate"), "icepop": ("token", "mask"), "seq-mask-tis": ("seq", "mask")}
"""Types of corrections before 0.11 → level and mode."""


def _two(setting: Setting | None) -> list[float]:
    """Return the two numbers of a setting; none if it has others."""
    ends = _numbers(setting)
    return ends if len(ends) == 2 else []


def _numbers(setting: Setting | None) -> list[float]:
    """Return the numbers of a setting; none if one is no number."""
    value = "" if setting is None else setting.value
    ends = [read_scalar(str(each)) for each in (value if isinstance(value, list) else str(value).split())]
    are_numbers = all(isinstance(end, int | float) and abs(end) < LARGEST for end in ends)
    return [float(end) for end in ends] if are_numbers else []
