"""Algorithm and scores of a verl job: advantages, penalties, clips, sampling, corrections, sources of scores."""

from __future__ import annotations

from flexrlhf.config.presets.filling import PEERS
from flexrlhf.imports.parts import put_model, rule_for
from flexrlhf.imports.settings import JobSettings, Setting
from flexrlhf.imports.translation import Translation

_A, _R = "actor_rollout_ref.actor.", "actor_rollout_ref.rollout."
_ESTIMATORS = {
    "gae": "ppo",
    "grpo": "grpo",
    "rloo": "rloo",
    "reinforce_plus_plus": "reinforce++",
    "reinforce_plus_plus_baseline": "reinforce++",
    "remax": "remax",
    "rloo_vectorized": "rloo",
    "grpo_vectorized": "grpo",
}
_LOSSES = {"cispo": "cispo", "clip_cov": "clip-cov", "kl_cov": "kl-cov"}
_KL = {"kl": "k1", "k1": "k1", "mse": "k2", "k2": "k2", "low_var_kl": "k3", "k3": "k3"}
_CLIPS = {
    "clip_low": ("clip_ratio_low", "clip_ratio"),
    "clip_high": ("clip_ratio_high", "clip_ratio"),
    "dual_clip": ("clip_ratio_c",),
}


def put_algorithm(out: Translation, job: JobSettings) -> int:
    """Write the algorithm; return the responses to a prompt."""
    estimator, mode = job.get("algorithm.adv_estimator"), job.get(f"{_A}policy_loss.loss_mode")
    name = "ppo" if estimator is None else _ESTIMATORS.get(str(estimator.value))
    samples = job.count(f"{_R}n")
    if name is None:
        out.drop(estimator, "these advantages are not here; the algorithm written has the same models and passes")
        name = "grpo" if samples is not None and samples.value > 1 else "reinforce++"
    if mode is not None and mode.value == "gspo" and name == "grpo":
        name = "gspo"
        out.put("algorithm.name", name, estimator, mode)
    else:
        out.put("algorithm.name", name, estimator or "adv_estimator: gae (verl's default)")
    if name in PEERS["verl"].trainers:
        out.put("algorithm.like", "verl", "what is not written")
    number = 1 if samples is None else samples.value
    if name in ("grpo", "gspo", "rloo") and number == 1:
        out.note(f"{_R}n is 1, which leaves nothing to compare: here the algorithm's default number of responses")
        number = 4 if name == "rloo" else 8
    elif samples is not None and name != "remax":
        out.put("algorithm.samples_per_prompt", number, samples)
    _penalty(out, job)
    _loss(out, job, name, mode)
    _sampling(out, job)
    _groups(out, job, name, estimator)
    return number


def _penalty(out: Translation, job: JobSettings) -> None:
    loss, reward = job.truth(f"{_A}use_kl_loss"), job.truth("algorithm.use_kl_in_reward")
    of_loss = [job.real(f"{_A}kl_loss_coef"), job.get(f"{_A}kl_loss_type")]
    of_reward = [
        job.real("algorithm.kl_ctrl.kl_coef"),
        job.get("algorithm.kl_penalty"),
        job.get("algorithm.kl_ctrl.type"),
    ]
    further = [job.number(f"algorithm.kl_ctrl.{key}") for key in ("target_kl", "horizon")]
    if loss is None and reward is None:
        out.put("algorithm.kl", None, "neither actor.use_kl_loss nor algorithm.use_kl_in_reward")
    for used, own, place in ((reward, of_reward, "reward"), (None if reward else loss, of_loss, "loss")):
        if used is None:
            for each in own:
                out.drop(each, f"there is no penalty in the {place}", matters=loss is not None and reward is not None)
            continue
        coefficient, estimator = own[:2]
        out.put("algorithm.kl.place", place, used)
        out.put_real("algorithm.kl.coefficient", coefficient)
        if estimator is not None and estimator.value in _KL:
            out.put("algorithm.kl.estimator", _KL[estimator.value], estimator)
        else:
            out.drop(estimator, "an estimator is k1, k2 or k3")
    adapts = reward is not None and of_reward[2] is not None and of_reward[2].value == "adaptive"
    for key, each in zip(("target", "horizon"), further, strict=True):
        if each is not None and adapts:
            out.put(f"algorithm.kl.{key}", each.value, each)
        else:
            out.drop(each, "the penalty's coefficient is fixed", matters=False)


def _loss(out: Translation, job: JobSettings, name: str, mode: Setting | None) -> None:
    surrogate = None if mode is None else _LOSSES.get(str(mode.value))
    if surrogate is not None and name != "gspo":
        out.put("algorithm.surrogate", surrogate, mode)
        if surrogate != "clip-cov" and name in PEERS["verl"].trainers:
            out.put("algorithm.dual_clip", None, mode)
    elif mode is not None and mode.value not in ("vanilla", "gspo", "ppo"):
        out.drop(mode, "this loss is not here; PPO's clipped loss stands for it")
    for key, names in _CLIPS.items():
        setting = job.number(*(f"{_A}{each}" for each in names))
        if setting is None or (key == "dual_clip" and (name == "gspo" or f"algorithm.{key}" in out.lines)):
            continue
        if key == "clip_low" and setting.value >= 1:
            out.drop(setting, "a lower bound of the ratio is above 0: clip_low below 1")
        else:
            out.put(f"algorithm.{key}", float(setting.value), setting)
    out.put_real("algorithm.entropy_coefficient", job.number(f"{_A}entropy_coeff"))
    mean = job.get(f"{_A}loss_agg_mode")
    if mean is not None:
        known = ("token-mean", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm")
        if mean.value in known:
            out.put("algorithm.loss_aggregation", mean.value, mean)
        else:
            out.drop(mean, f"known are {', '.join(known)}")
    out.put_same("algorithm.freeze_actor_steps", job.count("trainer.critic_warmup"))
    if name in ("ppo", "reinforce++", "remax"):
        for key, own in (("gamma", "algorithm.gamma"), ("gae_lambda", "algorithm.lam")):
            setting = job.number(own)
            if setting is not None and (name == "ppo" or key == "gamma"):
                out.put(f"algorithm.{key}", float(setting.value), setting)
        clip = job.number("critic.cliprange_value")
        if clip is not None and name == "ppo":
            out.put("algorithm.value_clip", float(clip.value), clip)


def _sampling(out: Translation, job: JobSettings) -> None:
    out.put_real("algorithm.temperature", job.number(f"{_R}temperature"))
    for key, plain in (("top_p", (1, 1.0)), ("top_k", (-1, 0))):
        setting = job.get(f"{_R}{key}")
        if setting is not None and setting.value not in plain:
            out.drop(setting, "a cut distribution needs importance weights here: algorithm.importance")
    level, cap = (
        job.get("algorithm.rollout_correction.rollout_is"),
        job.real("algorithm.rollout_correction.rollout_is_threshold"),
    )
    if level is not None and level.value in ("token", "sequence"):
        out.put("algorithm.importance.level", level.value, level)
        if cap is not None and cap.value >= 1:
            out.put("algorithm.importance.cap", float(cap.value), cap)
        else:
            out.drop(cap, "a bound of importance weights is one number of at least 1")
    for key in ("rollout_rs", "rollout_rs_threshold", "rollout_rs_threshold_lower", "rollout_token_veto_threshold"):
        out.drop(
            job.get(f"algorithm.rollout_correction.{key}"), "rejection: algorithm.importance.reject has other bounds"
        )


def _groups(out: Translation, job: JobSettings, name: str, estimator: Setting | None) -> None:
    scaled = job.get("algorithm.norm_adv_by_std_in_grpo")
    if scaled is not None and name in ("grpo", "gspo"):
        out.put("algorithm.scale", "none" if str(scaled.value).lower() == "false" else "group", scaled)
    if estimator is not None and estimator.value == "reinforce_plus_plus_baseline":
        out.put("algorithm.baseline", "group", estimator)
    filters, rounds = (
        job.truth("algorithm.filter_groups.enable"),
        job.count("algorithm.filter_groups.max_num_gen_batches"),
    )
    job.get("algorithm.filter_groups.metric")
    if filters is not None and name in ("grpo", "gspo", "rloo"):
        out.put("algorithm.dynamic_sampling.rounds", 2 if rounds is None else max(2, rounds.value), filters, rounds)
    prefixes = ("reward.reward_kwargs.", "reward_model.", "reward_model.reward_kwargs.", "reward_kwargs.")
    found = {
        key: job.get(*(f"{prefix}overlong_buffer{part}" for prefix in prefixes))
        for key, part in (
            ("enable", "_cfg.enable"),
            ("len", "_cfg.len"),
            ("penalty", "_cfg.penalty_factor"),
            ("log", "_cfg.log"),
        )
    }
    found |= {
        f"{key}2": job.get(*(f"{prefix}overlong_buffer.{part}" for prefix in prefixes))
        for key, part in (("enable", "enable"), ("len", "len"), ("penalty", "penalty_factor"))
    }
    job.get("reward.reward_kwargs.max_resp_len", "reward_model.reward_kwargs.max_resp_len")
    on = found["enable"] or found["enable2"]
    if on is not None and str(on.value).lower() == "true":
        length, penalty = found["len"] or found["len2"], found["penalty"] or found["penalty2"]
        if length is not None:
            out.put("algorithm.overlong.buffer_tokens", length.value, length)
        if penalty is not None:
            out.put("algorithm.overlong.penalty", float(penalty.value), penalty)


def put_scores(out: Translation, job: JobSettings) -> None:
    """Write where scores are from: a reward model, a function of the user, or a rule for the rows."""
    enabled = job.truth("reward.reward_model.enable", "reward_model.enable")
    path = job.named("reward.reward_model.model_path") or job.named("reward_model.model.path")
    function = job.get("reward.custom_reward_function.path", "custom_reward_function.path")
    name = job.get("reward.custom_reward_function.name", "custom_reward_function.name")
    manager = job.get("reward.reward_manager.name", "reward_model.reward_manager")
    if enabled is not None and path is not None:
        put_model(out, "reward", path)
        return
    if function is not None:
        out.drop(
            function,
            "a function takes prompts and responses here, docs/rewards.md; a rule stands for it",
            matters=False,
        )
        out.drop(
            name, "a function takes prompts and responses here, docs/rewards.md; a rule stands for it", matters=False
        )
    rule = rule_for(out)
    why = "the data's name" if rule == "gsm8k" else "the rows' data_source chooses it in verl"
    out.put(
        "reward", {"rule": rule}, *([function] if function is not None else []), *([manager] if manager else []), why
    )
    if manager is not None and manager.value not in ("naive", "dapo", "batch", "prime"):
        out.drop(manager, "a manager of scores that is not here")
