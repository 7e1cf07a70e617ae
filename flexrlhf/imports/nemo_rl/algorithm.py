"""Algorithm of a NeMo-RL job: advantages, loss, corrections, sampling."""

from __future__ import annotations

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
        job.read |= {"dpo.preference_loss_weight", "dpo.sft_average_log_probs"}
        weight = job.number("dpo.sft_loss_weight")
        out.drop(weight, "a loss of chosen responses in addition is not here")
        return name
    if job.truth("loss_fn.sequence_level_importance_ratios") is not None:
        name = "gspo"
    elif estimator is not None and "reinforce" in str(estimator.value):
        name = "reinforce++"
    elif estimator is not None and estimator.value not in ("grpo", "gae"):
        out.drop(estimator, "these advantages are not here; grpo has the same models and passes")
    out.put(
        "algorithm.name",
        name,
        estimator or f"{section}:",
        job.get("loss_fn.sequence_level_importance_ratios") if name == "gspo" else None,
    )
    if name == "reinforce++" and job.truth(f"{section}.adv_estimator.minus_baseline") is not None:
        out.put("algorithm.baseline", "group", job.get(f"{section}.adv_estimator.minus_baseline"))
    others = job.truth(f"{section}.adv_estimator.use_leave_one_out_baseline", f"{section}.use_leave_one_out_baseline")
    scaled = job.get(f"{section}.adv_estimator.normalize_rewards", f"{section}.normalize_rewards")
    if name in ("grpo", "gspo"):
        if others is not None:
            out.put("algorithm.baseline", "others", others)
        if scaled is not None:
            out.put("algorithm.scale", "group" if scaled.value else "none", scaled)
    if name == "ppo":
        for key, own in (("gae_lambda", "gae_lambda"), ("gamma", "gae_gamma")):
            out.put_real(f"algorithm.{key}", job.number(f"ppo.adv_estimator.{own}"))
        out.put_real("algorithm.value_clip", job.number("value_loss_fn.cliprange"))
        out.put(
            "algorithm.whiten",
            "batch" if job.truth("ppo.adv_estimator.normalize_advantages") else "none",
            job.get("ppo.adv_estimator.normalize_advantages"),
        )
    _loss(out, job, name)
    _sampling(out, job, section, name)
    job.read |= {f"{section}.{key}" for key in ("normalize_rewards", "use_leave_one_out_baseline")}
    job.read |= {
        f"{section}.adv_estimator.{key}"
        for key in ("normalize_rewards", "use_leave_one_out_baseline", "minus_baseline")
    }
    return name


def _loss(out: Translation, job: JobSettings, name: str) -> None:
    penalty = job.number("loss_fn.reference_policy_kl_penalty")
    estimator = job.get("loss_fn.reference_policy_kl_type")
    limit, clamp = job.number("loss_fn.kl_output_clamp_value"), job.number("loss_fn.kl_input_clamp_value")
    if penalty is None:
        out.put("algorithm.kl", None, job.get("loss_fn.reference_policy_kl_penalty") or "no penalty")
    else:
        in_reward = job.truth("loss_fn.use_kl_in_reward")
        out.put("algorithm.kl.place", "reward" if in_reward else "loss", in_reward or "use_kl_in_reward: false")
        out.put("algorithm.kl.coefficient", float(penalty.value), penalty)
        if estimator is not None:
            out.put("algorithm.kl.estimator", estimator.value, estimator)
        out.put_real("algorithm.kl.value_clamp", limit)
        out.put_real("algorithm.kl.clamp", clamp)
    for key, own in (("clip_low", "ratio_clip_min"), ("clip_high", "ratio_clip_max"), ("dual_clip", "ratio_clip_c")):
        setting = job.number(f"loss_fn.{own}")
        if setting is not None and not (key == "clip_low" and setting.value >= 1):
            out.put(f"algorithm.{key}", float(setting.value), setting)
        else:
            out.drop(setting, "a lower bound of the ratio is above 0: clip_low below 1")
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
                out.put("algorithm.importance.floor", float(floor.value), floor)
        elif kind is not None and kind.value != "tis":
            out.drop(kind, "weights outside of bounds are truncated or masked")


def _sampling(out: Translation, job: JobSettings, section: str, name: str) -> None:
    if (masked := job.truth(f"{section}.overlong_filtering")) is not None:
        out.put("algorithm.truncation", "mask", masked)
    out.put_real("algorithm.temperature", job.number(f"{_G}temperature"))
    for key, plain in (("top_p", 1), ("top_k", -1)):
        setting = job.get(f"{_G}{key}")
        if setting is not None and setting.value != plain:
            out.drop(setting, "a cut distribution needs importance weights here: algorithm.importance")
    filters, rounds = (
        job.truth(f"{section}.use_dynamic_sampling"),
        job.count(f"{section}.dynamic_sampling_max_gen_batches"),
    )
    if filters is not None and name in ("grpo", "gspo"):
        out.put("algorithm.dynamic_sampling.rounds", max(2, rounds.value if rounds else 2), filters, rounds)
    job.get(f"{section}.batch_multiplier")
    if job.truth(f"{section}.reward_shaping.enabled") is not None:
        length, penalty = (
            job.count(f"{section}.reward_shaping.overlong_buffer_length"),
            job.number(f"{section}.reward_shaping.overlong_buffer_penalty"),
        )
        job.get(f"{section}.reward_shaping.max_response_length")
        if length is not None:
            out.put("algorithm.overlong.buffer_tokens", length.value, length)
            if penalty is not None:
                out.put("algorithm.overlong.penalty", float(penalty.value), penalty)
