"""Algorithm of a verl job: advantages, penalties, clips, sampling, corrections."""

from __future__ import annotations

from flexrlhf.config.presets.filling import PEERS
from flexrlhf.imports.parts import drop_cuts, put_estimator, put_overlong, put_reals
from flexrlhf.imports.settings import JobSettings, Setting, is_true
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
_MEANS = ("token-mean", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm")
_BEFORE = (
    "trainer.default_hdfs_dir",
    f"{_A}fsdp_config.grad_offload",
    f"{_A}ppo_micro_batch_size",
    f"{_R}log_prob_micro_batch_size",
    f"{_R}micro_batch_size",
    "actor_rollout_ref.ref.log_prob_micro_batch_size",
    "critic.ppo_micro_batch_size",
    "data.val_batch_size",
)
"""Settings of versions until March 2025; later ones have others in their place, or ignore them."""
_KL = {"kl": "k1", "k1": "k1", "mse": "k2", "k2": "k2", "low_var_kl": "k3", "k3": "k3"}


def put_algorithm(out: Translation, job: JobSettings) -> int:
    """Write the algorithm; return the responses to a prompt."""
    estimator, mode = job.get("algorithm.adv_estimator"), job.get(f"{_A}policy_loss.loss_mode")
    samples = job.count(f"{_R}n")
    number = 1 if samples is None else samples.value
    name = put_estimator(out, "verl", _ESTIMATORS, estimator, mode, "grpo" if number > 1 else "reinforce++")
    if name in ("grpo", "gspo", "rloo") and number == 1:
        out.note(f"{_R}n is 1, which leaves nothing to compare: here the algorithm's default number of responses")
        number = 4 if name == "rloo" else 8
    elif name != "remax":
        out.put_same("algorithm.samples_per_prompt", samples)
    _penalty(out, job)
    _loss(out, job, name, mode)
    _sampling(out, job)
    _groups(out, job, name, estimator)
    return number


def _penalty(out: Translation, job: JobSettings) -> None:
    loss, reward = job.truth(f"{_A}use_kl_loss"), job.truth("algorithm.use_kl_in_reward")
    of_loss = job.real(f"{_A}kl_loss_coef"), job.get(f"{_A}kl_loss_type")
    of_reward = job.real("algorithm.kl_ctrl.kl_coef"), job.get("algorithm.kl_penalty")
    kind = job.get("algorithm.kl_ctrl.type")
    if loss is None and not job.has("algorithm.use_kl_in_reward") and (of_reward[0] is None or of_reward[0].value > 0):
        reward = _penalty_of_before(out, job, of_reward[0])
    if loss is None and reward is None:
        out.put("algorithm.kl", None, "neither actor.use_kl_loss nor algorithm.use_kl_in_reward")
    places = (reward, (*of_reward, kind), "reward"), (None if reward else loss, of_loss, "loss")
    for used, own, place in places:
        if used is None:
            listed = {each.setting.key for each in out.left_out}
            for each in own:
                why, matters = f"there is no penalty in the {place}", loss is not None and reward is not None
                out.drop(None if each is not None and each.key in listed else each, why, matters)
            continue
        coefficient, estimator, *_ = own
        out.put("algorithm.kl.place", place, used)
        out.put_real("algorithm.kl.coefficient", coefficient)
        if estimator is not None and estimator.value in _KL:
            out.put("algorithm.kl.estimator", _KL[estimator.value], estimator)
        else:
            out.drop(estimator, "an estimator is k1, k2 or k3")
    adapts = reward is not None and kind is not None and kind.value == "adaptive"
    for key, own_key in (("target", "target_kl"), ("horizon", "horizon")):
        each = job.number(f"algorithm.kl_ctrl.{own_key}")
        if adapts:
            out.put_same(f"algorithm.kl.{key}", each)
        else:
            out.drop(each, "the penalty's coefficient is fixed", matters=False)


def _penalty_of_before(out: Translation, job: JobSettings, coefficient: Setting | None) -> Setting | None:
    """Return the sign of a version that subtracts the penalty from the rewards if it is not in the loss, if the job
    has one and names the coefficient. Without such a sign the coefficient is listed with its effect."""
    if coefficient is None:
        return None
    old = "verl until March 2025 subtracts it from the rewards if use_kl_loss is not set"
    sign = next((job.found[key] for key in _BEFORE if job.has(key)), None)
    how = job.found.get(f"{_R}load_format")
    sign = how if sign is None and how is not None and str(how.value).startswith("dummy_") else sign
    if sign is None:
        out.drop(coefficient, f"{old}, later versions if use_kl_in_reward is: algorithm.kl, if the job ran there")
    else:
        out.note(f"{sign.key} is of a verl that subtracts KL from the rewards; for a later one algorithm.kl: null")
    return sign


def _loss(out: Translation, job: JobSettings, name: str, mode: Setting | None) -> None:
    surrogate = None if mode is None else _LOSSES.get(str(mode.value))
    if surrogate is not None and name != "gspo":
        out.put("algorithm.surrogate", surrogate, mode)
        if surrogate != "clip-cov" and name in PEERS["verl"].trainers:
            out.put("algorithm.dual_clip", None, mode)
    elif mode is not None and mode.value not in ("vanilla", "gspo", "ppo"):
        out.drop(mode, "this loss is not here; PPO's clipped loss stands for it")
    low = job.number(f"{_A}clip_ratio_low", f"{_A}clip_ratio")
    if low is not None and low.value >= 1:
        out.drop(low, "a lower bound of the ratio is above 0: clip_low below 1")
    else:
        out.put_real("algorithm.clip_low", low)
    out.put_real("algorithm.clip_high", job.number(f"{_A}clip_ratio_high", f"{_A}clip_ratio"))
    dual = job.number(f"{_A}clip_ratio_c")
    if name != "gspo" and "algorithm.dual_clip" not in out.lines:
        out.put_real("algorithm.dual_clip", dual)
    put_reals(out, job, {"entropy_coefficient": f"{_A}entropy_coeff"})
    mean = job.get(f"{_A}loss_agg_mode")
    if mean is not None and mean.value in _MEANS:
        out.put_same("algorithm.loss_aggregation", mean)
    else:
        out.drop(mean, f"known are {', '.join(_MEANS)}")
    out.put_same("algorithm.freeze_actor_steps", job.count("trainer.critic_warmup"))
    if name in ("ppo", "reinforce++", "remax"):
        put_reals(out, job, {"gamma": "algorithm.gamma"})
    if name == "ppo":
        put_reals(out, job, {"gae_lambda": "algorithm.lam", "value_clip": "critic.cliprange_value"})


def _sampling(out: Translation, job: JobSettings) -> None:
    put_reals(out, job, {"temperature": f"{_R}temperature"})
    drop_cuts(out, job.get(f"{_R}top_p"), job.get(f"{_R}top_k"))
    prefix = "algorithm.rollout_correction.rollout_"
    level, cap = job.get(f"{prefix}is"), job.real(f"{prefix}is_threshold")
    if level is not None and level.value in ("token", "sequence"):
        out.put_same("algorithm.importance.level", level)
        if cap is not None and cap.value >= 1:
            out.put_real("algorithm.importance.cap", cap)
        else:
            out.drop(cap, "a bound of importance weights is one number of at least 1")
    for key in ("rs", "rs_threshold", "rs_threshold_lower", "token_veto_threshold"):
        out.drop(job.get(prefix + key), "rejection: algorithm.importance.reject has other bounds")


def _groups(out: Translation, job: JobSettings, name: str, estimator: Setting | None) -> None:
    scaled = job.get("algorithm.norm_adv_by_std_in_grpo")
    if scaled is not None and name in ("grpo", "gspo"):
        out.put("algorithm.scale", "group" if is_true(scaled.value) else "none", scaled)
    if estimator is not None and estimator.value == "reinforce_plus_plus_baseline":
        out.put("algorithm.baseline", "group", estimator)
    prefix = "algorithm.filter_groups."
    filters, rounds = job.truth(f"{prefix}enable"), job.count(f"{prefix}max_num_gen_batches")
    job.pass_over("groups whose scores are all the same are left out", f"{prefix}metric")
    if filters is not None and name in ("grpo", "gspo", "rloo"):
        out.put("algorithm.dynamic_sampling.rounds", 2 if rounds is None else max(2, rounds.value), filters, rounds)
    prefixes = [
        f"{prefix}overlong_buffer{kind}."
        for prefix in ("reward.reward_kwargs.", "reward_model.", "reward_model.reward_kwargs.", "reward_kwargs.")
        for kind in ("_cfg", "")
    ]
    length, penalty = (job.number(*(prefix + key for prefix in prefixes)) for key in ("len", "penalty_factor"))
    if job.truth(*(f"{prefix}enable" for prefix in prefixes)) is not None:
        put_overlong(out, length, penalty)
    lengths = ("reward.reward_kwargs.max_resp_len", "reward_model.reward_kwargs.max_resp_len")
    job.pass_over("the longest response is data.max_response_tokens", *lengths)
    job.pass_over("logs", *(f"{prefix}log" for prefix in prefixes))
