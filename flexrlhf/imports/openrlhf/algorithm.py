"""Algorithm of an OpenRLHF job: advantages, penalty, clips, corrections."""

from __future__ import annotations

from flexrlhf.imports.parts import CUT, put_estimator, put_overlong
from flexrlhf.imports.settings import LARGEST, JobSettings, Setting, read_scalar
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
    name = put_estimator(out, "openrlhf", _ESTIMATORS, estimator, loss, "grpo")
    if loss is not None and loss.value not in ("ppo", "gspo"):
        out.drop(loss, "this loss is not here; PPO's stands for it")
    if estimator is not None and estimator.value == "reinforce_baseline":
        out.put("algorithm.baseline", "group", estimator)
    no_std = job.truth("algo.advantage.no_std_norm") or (
        estimator if estimator is not None and estimator.value == "dr_grpo" else None
    )
    if no_std is not None and name in ("grpo", "gspo"):
        out.put("algorithm.scale", "none", no_std)
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
        out.drop(top_p, CUT)
    _corrections(out, job, name)
    return name


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
    out.put_same("algorithm.kl.estimator", estimator)
    if in_loss is None:
        out.put_real("algorithm.kl.target", target)


def _corrections(out: Translation, job: JobSettings, name: str) -> None:
    correction, kind = job.truth("algo.advantage.is_correction_enable"), job.get("algo.advantage.is_correction_type")
    level = job.get("algo.advantage.is_correction_level")
    bounds = job.get("algo.advantage.is_correction_threshold")
    if correction is not None or (level is not None and level.value in ("token", "sequence")):
        word = "token" if level is None or level.value not in ("token", "sequence") else str(level.value)
        out.put("algorithm.importance.level", word, level or correction)
        values = [0.5, 5.0] if bounds is None else _two(bounds)
        source = bounds or "is_correction_threshold: 0.5 5.0 (OpenRLHF's default)"
        if values and min(values) > 0:
            out.put("algorithm.importance.cap", max(1.0, values[1]), source)
            if kind is not None and kind.value == "icepop":
                out.put("algorithm.importance.outside", "mask", kind)
                out.put("algorithm.importance.floor", min(1.0, values[0]), source)
            else:
                lower = Setting("--algo.advantage.is_correction_threshold", values[0])
                out.drop(lower, "weights that are truncated have no lower bound here")
        if kind is not None and kind.value not in ("tis", "icepop"):
            out.drop(kind, "weights beyond their bounds are truncated or masked, one by one")
    filters, ends = job.truth("algo.dynamic_filtering_enable"), job.get("algo.dynamic_filtering_range")
    if filters is not None and name in ("grpo", "gspo", "rloo"):
        out.put("algorithm.dynamic_sampling.rounds", 2, filters)
        out.drop(ends, "groups whose scores are all the same are left out", matters=False)
    elif filters is not None:
        out.drop(filters, "dynamic sampling goes with grpo, rloo and gspo")
    if (normalised := job.truth("reward.normalize_enable")) is not None:
        out.put("algorithm.normalise_scores", "running", normalised)
    put_overlong(out, job.count("reward.overlong_buffer_len"), job.number("reward.overlong_penalty_factor"))
    out.put_same("algorithm.freeze_actor_steps", job.count("critic.freezing_steps"))


def _two(setting: Setting | None) -> list[float]:
    """Return the two numbers of a setting; none if it has others."""
    ends = [] if setting is None else [read_scalar(each) for each in str(setting.value).split()]
    is_pair = len(ends) == 2 and all(isinstance(end, int | float) and abs(end) < LARGEST for end in ends)
    return [float(end) for end in ends] if is_pair else []
