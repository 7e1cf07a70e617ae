"""Algorithm of a NeMo-RL job: advantages, loss, corrections, sampling."""

from __future__ import annotations

from flexrlhf.imports import parts
from flexrlhf.imports.settings import JobSettings
from flexrlhf.imports.translation import Translation

_G = "policy.generation."
KINDS = {"grpo": "grpo", "ppo": "ppo", "sft": "sft", "dpo": "dpo", "rm": "reward"}
"""Sections of the trainers → algorithms."""


def put_algorithm(out: Translation, job: JobSettings, section: str) -> str:
    """Write the algorithm and return its name. ``section``: the trainer's in the file."""
    estimator = job.get(f"{section}.adv_estimator.name")
    name = KINDS[section]
    if section in ("sft", "dpo", "rm"):
        out.put("algorithm.name", name, f"{section}:")
        out.put_real("algorithm.beta", job.number("dpo.reference_policy_kl_penalty"))
        if (average := job.truth("dpo.preference_average_log_probs")) is not None:
            out.put("algorithm.length_normalised", True, average)
        job.pass_over("of a loss in addition, which is listed", "dpo.sft_average_log_probs")
        if (weight := job.number("dpo.preference_loss_weight")) is not None:
            out.drop(weight, "the loss of preferences has the weight 1", matters=weight.value != 1)
        out.drop(job.number("dpo.sft_loss_weight"), "a loss of chosen responses in addition is not here")
        return name
    if (of_sequence := job.truth("loss_fn.sequence_level_importance_ratios")) is not None:
        name = "gspo"
    elif estimator is not None and "reinforce" in str(estimator.value):
        name = "reinforce++"
    elif estimator is not None and estimator.value not in ("grpo", "gae"):
        out.drop(estimator, "these advantages are not here; grpo has the same models and passes")
    out.put("algorithm.name", name, estimator or f"{section}:", of_sequence)
    baseline = job.truth(f"{section}.adv_estimator.minus_baseline")
    if name == "reinforce++" and baseline is not None:
        out.put("algorithm.baseline", "group", baseline)
    others = job.truth(f"{section}.adv_estimator.use_leave_one_out_baseline", f"{section}.use_leave_one_out_baseline")
    scaled = job.get(f"{section}.adv_estimator.normalize_rewards", f"{section}.normalize_rewards")
    if name in ("grpo", "gspo"):
        if others is not None:
            out.put("algorithm.baseline", "others", others)
        if scaled is not None:
            out.put("algorithm.scale", "group" if scaled.value else "none", scaled)
    if name == "ppo":
        prefix = "ppo.adv_estimator."
        own = {"gae_lambda": f"{prefix}gae_lambda", "gamma": f"{prefix}gae_gamma"}
        parts.put_reals(out, job, own | {"value_clip": "value_loss_fn.cliprange"})
        whitened = job.truth(f"{prefix}normalize_advantages")
        out.put("algorithm.whiten", "batch" if whitened else "none", job.get(f"{prefix}normalize_advantages"))
    _loss(out, job)
    _sampling(out, job, section, name)
    for prefix in (f"{section}.", f"{section}.adv_estimator."):
        groups = (f"{prefix}normalize_rewards", f"{prefix}use_leave_one_out_baseline")
        job.pass_over("of advantages in groups, or the estimator has its own", *groups)
    return name


def _loss(out: Translation, job: JobSettings) -> None:
    penalty = job.number("loss_fn.reference_policy_kl_penalty")
    estimator = job.get("loss_fn.reference_policy_kl_type")
    clamps = {"kl.value_clamp": "loss_fn.kl_output_clamp_value", "kl.clamp": "loss_fn.kl_input_clamp_value"}
    if penalty is None:
        out.put("algorithm.kl", None, job.get("loss_fn.reference_policy_kl_penalty") or "no penalty")
        job.pass_over("there is no penalty", *clamps.values())
    else:
        in_reward = job.truth("loss_fn.use_kl_in_reward")
        out.put("algorithm.kl.place", "reward" if in_reward else "loss", in_reward or "use_kl_in_reward: false")
        out.put_real("algorithm.kl.coefficient", penalty)
        out.put_same("algorithm.kl.estimator", estimator)
        parts.put_reals(out, job, clamps)
    low = job.number("loss_fn.ratio_clip_min")
    if low is not None and low.value >= 1:
        out.drop(low, "a lower bound of the ratio is above 0: clip_low below 1")
    else:
        out.put_real("algorithm.clip_low", low)
    parts.put_reals(out, job, {"clip_high": "loss_fn.ratio_clip_max", "dual_clip": "loss_fn.ratio_clip_c"})
    tokens = job.get("loss_fn.token_level_loss")
    if tokens is not None:
        out.put("algorithm.loss_aggregation", "token-mean" if tokens.value else "seq-mean-token-mean", tokens)
    if (cispo := job.truth("loss_fn.use_cispo")) is not None:
        out.put("algorithm.surrogate", "cispo", cispo)
        out.put("algorithm.dual_clip", None, cispo)
    for key in ("disable_ppo_ratio", "use_on_policy_kl_approximation"):
        out.drop(job.truth(f"loss_fn.{key}"), "the ratio is to the policy that the step starts from")
    corrects = job.truth("loss_fn.use_importance_sampling_correction")
    kind = job.get("loss_fn.truncated_importance_sampling_type")
    cap, floor = (job.number(f"loss_fn.truncated_importance_sampling_{key}") for key in ("ratio", "ratio_min"))
    if corrects is not None:
        out.put("algorithm.importance.level", "token", corrects)
        if cap is not None:
            out.put("algorithm.importance.cap", max(1.0, float(cap.value)), cap)
        if kind is not None and kind.value == "icepop":
            out.put("algorithm.importance.outside", "mask", kind)
            if floor is not None and 0 < floor.value <= 1:
                out.put_real("algorithm.importance.floor", floor)
        elif kind is not None and kind.value != "tis":
            out.drop(kind, "weights outside of bounds are truncated or masked")


def _sampling(out: Translation, job: JobSettings, section: str, name: str) -> None:
    if (masked := job.truth(f"{section}.overlong_filtering")) is not None:
        out.put("algorithm.truncation", "mask", masked)
    parts.put_reals(out, job, {"temperature": f"{_G}temperature"})
    parts.drop_cuts(out, job.get(f"{_G}top_p"), job.get(f"{_G}top_k"))
    filters = job.truth(f"{section}.use_dynamic_sampling")
    rounds = job.count(f"{section}.dynamic_sampling_max_gen_batches")
    if filters is not None and name in ("grpo", "gspo"):
        out.put("algorithm.dynamic_sampling.rounds", max(2, rounds.value if rounds else 2), filters, rounds)
    prefix = f"{section}.reward_shaping."
    job.pass_over("the longest response is data.max_response_tokens", f"{prefix}max_response_length")
    if job.truth(f"{prefix}enabled") is not None:
        parts.put_overlong(
            out, job.count(f"{prefix}overlong_buffer_length"), job.number(f"{prefix}overlong_buffer_penalty")
        )
