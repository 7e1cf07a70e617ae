"""Algorithm of a verl job: advantages, penalties, clips, sampling, corrections."""

from __future__ import annotations

from flexrlhf.api import PEERS
from flexrlhf.imports import parts
from flexrlhf.imports.ratio_bounds import NO_LOWER_BOUND, note_penalty, put_cap, put_floor, put_rejection
from flexrlhf.imports.settings import LARGEST, JobSettings, Setting, is_true, read_scalar
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
_MEANS = ("token-mean", "token-sum", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm")
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
_REJECTED = {"token_k1": "token", "seq_sum_k1": "sequence", "seq_mean_k1": "geometric"}
_KL = {"kl": "k1", "k1": "k1", "mse": "k2", "k2": "k2", "low_var_kl": "k3", "k3": "k3"}


def put_algorithm(out: Translation, job: JobSettings) -> int:
    """Write the algorithm; return the responses to a prompt."""
    estimator, mode = job.get("algorithm.adv_estimator"), job.get(f"{_A}policy_loss.loss_mode")
    samples = job.count(f"{_R}n")
    number = 1 if samples is None else samples.value
    name = parts.put_estimator(out, "verl", _ESTIMATORS, estimator, mode, "grpo" if number > 1 else "reinforce++")
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
    if loss is not None and reward is not None:
        out.drop(loss, "there is one KL penalty here, the one in the reward")
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
        if surrogate != "cispo":
            _covariance(out, job, surrogate)
    elif mode is not None and mode.value not in ("vanilla", "gspo", "ppo"):
        out.drop(mode, "this loss is not here; PPO's clipped loss stands for it")
    low, high = job.number(f"{_A}clip_ratio_low"), job.number(f"{_A}clip_ratio_high")
    if low is not None and low.value >= 1:
        out.put("algorithm.clip_low", NO_LOWER_BOUND, low, "no lower bound")
    else:
        out.put_real("algorithm.clip_low", low)
    out.put_real("algorithm.clip_high", high)
    if (both := job.number(f"{_A}clip_ratio")) is not None and not (low and high) and both.value != 0.2:
        out.drop(both, "verl's losses read clip_ratio_low and clip_ratio_high, which are 0.2 by default")
    dual = job.number(f"{_A}clip_ratio_c")
    if name != "gspo" and "algorithm.dual_clip" not in out.lines:
        out.put_real("algorithm.dual_clip", dual)
    parts.put_reals(out, job, {"entropy_coefficient": f"{_A}entropy_coeff"})
    mean = job.get(f"{_A}loss_agg_mode")
    if mean is not None and mean.value in _MEANS:
        out.put_same("algorithm.loss_aggregation", mean)
    else:
        out.drop(mean, f"known are {', '.join(_MEANS)}")
    of_critic = job.get("critic.loss_agg_mode")
    if name == "ppo" and of_critic is not None and of_critic.value != (mean.value if mean else "token-mean"):
        out.drop(of_critic, "the value loss is aggregated as the policy's")
    out.put_same("algorithm.freeze_actor_steps", job.count("trainer.critic_warmup"))
    if name in ("ppo", "reinforce++", "remax"):
        parts.put_reals(out, job, {"gamma": "algorithm.gamma"})
    if name == "ppo":
        parts.put_reals(out, job, {"gae_lambda": "algorithm.lam", "value_clip": "critic.cliprange_value"})


def _sampling(out: Translation, job: JobSettings) -> None:
    parts.put_reals(out, job, {"temperature": f"{_R}temperature"})
    parts.drop_cuts(out, job.get(f"{_R}top_p"), job.get(f"{_R}top_k"))
    _corrections(out, job)


def _corrections(out: Translation, job: JobSettings) -> None:
    """Write importance weights, and which tokens are left out of the loss."""
    prefix = "algorithm.rollout_correction.rollout_"
    level, bounds = job.get(f"{prefix}is"), job.get(f"{prefix}is_threshold")
    if level is not None and level.value in ("token", "sequence"):
        out.put_same("algorithm.importance.level", level)
        lower, upper = _bounds(bounds)
        if bounds is not None and upper is None:
            out.drop(bounds, "bounds of importance weights are one number or two")
        elif bounds is not None:
            if lower is not None:
                out.put("algorithm.importance.outside", "mask", bounds)
            put_cap(out, Setting(bounds.key, upper))
            put_floor(out, None if lower is None else Setting(bounds.key, lower))
    else:
        out.drop(level, "importance weights are of tokens or of responses")
        out.drop(bounds, "there are no importance weights", matters=False)
    _rejections(out, job, level)
    note_penalty(out)


def _rejections(out: Translation, job: JobSettings, level: Setting | None) -> None:
    """Write what is rejected: by bounds of pi_rollout / pi_old there, of its inverse here."""
    prefix = "algorithm.rollout_correction.rollout_"
    kind, bounds = job.get(f"{prefix}rs"), job.get(f"{prefix}rs_threshold")
    lower, upper = _bounds(bounds)
    lower = 1 / upper if lower is None and upper else lower
    if kind is None:
        out.drop(bounds, "nothing is rejected", matters=False)
    elif kind.value not in _REJECTED or lower is None or upper is None or out.value("algorithm.name") == "ppo":
        for each in (kind, bounds):
            out.drop(each, "rejection: algorithm.importance.reject is by the ratio (k1), once advantages are computed")
    elif not put_rejection(out, _REJECTED[str(kind.value)], 1 / upper, 1 / lower, kind, bounds):
        out.drop(bounds, "bounds of a rejection are around 1")
    else:
        out.put("algorithm.importance.reject.denominators", "all", "its trainer counts rejected tokens, too")
        if level is None:
            out.put("algorithm.importance.level", "none", "no rollout_is")
    for key in ("rs_threshold_lower", "token_veto_threshold"):
        out.drop(job.get(prefix + key), "rejection: algorithm.importance.reject has other bounds")


def _bounds(setting: Setting | None) -> tuple[float | None, float | None]:
    """Return the lower and upper bound of ``LOWER_UPPER`` or ``UPPER``; None for one that is not there or no number."""
    words = [] if setting is None else str(setting.value).split("_", 1)
    numbers = [read_scalar(word) for word in words]
    if not numbers or not all(isinstance(each, int | float) and 0 < each < LARGEST for each in numbers):
        return None, None
    lower, upper = (None, *numbers) if len(numbers) == 1 else numbers
    return (None if lower is None else float(lower)), float(upper)


def _covariance(out: Translation, job: JobSettings, surrogate: str) -> None:
    """Write the settings of a loss that selects tokens by their covariance."""
    prefix = f"{_A}policy_loss."
    keys = {
        "clip-cov": {"share": "clip_cov_ratio", "lower": "clip_cov_lb", "upper": "clip_cov_ub"},
        "kl-cov": {"share": "kl_cov_ratio", "coefficient": "ppo_kl_coef"},
    }
    for key, own in keys[surrogate].items():
        out.put_real(f"algorithm.covariance.{key}", job.real(prefix + own))
    if surrogate == "kl-cov" and "algorithm.covariance.coefficient" not in out.lines:
        out.put("algorithm.covariance.coefficient", 0.1, "ppo_kl_coef: 0.1 (verl's default)")
    out.note(
        "tokens are selected by their covariance under the policy that the step starts from; verl selects anew in "
        "every update, and at random for clip_cov"
    )


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
        parts.put_overlong(out, length, penalty)
    lengths = ("reward.reward_kwargs.max_resp_len", "reward_model.reward_kwargs.max_resp_len")
    job.pass_over("the longest response is data.max_response_tokens", *lengths)
    job.pass_over("logs", *(f"{prefix}log" for prefix in prefixes))
