"""Algorithms of AReaL's jobs that sample: advantages, the penalty, and the loss of the policy."""

from __future__ import annotations

from dataclasses import dataclass

from flexrlhf.imports import parts
from flexrlhf.imports.ratio_bounds import put_cap, put_floor
from flexrlhf.imports.settings import JobSettings, Setting
from flexrlhf.imports.translation import Translation

_VALUE_CLAMP = 10.0
"""Bound of AReaL's estimates of the KL."""
_REWARD, _ADVANTAGE, _REJECTION = "actor.reward_norm.", "actor.adv_norm.", "actor.rejection_sampling."
_BEFORE = ("actor.behav_imp_weight_", "actor.behave_imp_weight_")


@dataclass(frozen=True)
class _Levels:
    """Rows that scores or advantages are normalised over: ``batch``, ``group`` or ``none``; a section's defaults are
    ``batch``."""

    mean: str = "none"
    std: str = "none"

    @classmethod
    def of(cls, job: JobSettings, prefix: str) -> _Levels:
        """Return the levels of a section."""
        if not job.starts(prefix):
            return cls()
        mean, std = (
            str(job.value(key) or "none") if job.has(key) else "batch"
            for key in (f"{prefix}mean_level", f"{prefix}std_level")
        )
        return cls(mean, std)


_OVER_BATCH = _Levels("batch", "batch")


def put_algorithm(out: Translation, job: JobSettings) -> str:
    """Write an algorithm that samples responses; return its name."""
    samples = job.count("gconfig.n_samples")
    number = samples.value if samples else 1
    scores, whitened = _Levels.of(job, _REWARD), _Levels.of(job, _ADVANTAGE)
    has_critic, compares = job.starts("critic."), scores.mean == "group" and number > 1
    # a mean of the group with a deviation of the batch
    is_whitened = not compares or (scores.std == "none" and whitened == _OVER_BATCH and not _others(job))
    name = "ppo" if has_critic else "reinforce++" if is_whitened else "grpo"
    level = job.get("actor.importance_sampling_level")
    of_sequence = level if level is not None and level.value == "sequence" else None
    name = "gspo" if of_sequence and name == "grpo" else name
    mean = job.get(f"{_REWARD}mean_level")
    out.put("algorithm.name", name, "critic:" if has_critic else mean or "no actor.reward_norm", of_sequence)
    out.put("algorithm.samples_per_prompt", number, samples)
    if name in ("grpo", "gspo"):
        _compared(out, job, scores, number)
    else:
        _returned(out, job, scores, whitened, compares and not has_critic, number)
    out.put("algorithm.loss_aggregation", "token-mean", "AReaL's loss")
    out.put_same("algorithm.num_mini_batches", job.count("actor.ppo_n_minibatches"))
    _scores(out, job, has_critic)
    _penalty(out, job, name)
    _ratio(out, job, of_sequence, name)
    if (decoupled := job.truth("actor.use_decoupled_loss")) is not None:
        job.pass_over("log-probs of the policy that trains are computed", "actor.recompute_logprob")
        if job.value("actor.prox_logp_method") == "loglinear":
            out.drop(job.get("actor.prox_logp_method"), "log-probs of the policy that trains are computed")
        _weights(out, job, decoupled)
    else:
        job.pass_over("off without actor.use_decoupled_loss", _REJECTION, *_BEFORE)
        if job.truth("actor.recompute_logprob") is None:
            source = job.get("actor.recompute_logprob") or "recompute_logprob: false (AReaL's default)"
            out.put("rollout.logprobs", "reuse", source)
    return name


def _others(job: JobSettings) -> Setting | None:
    return job.truth(f"{_REWARD}mean_leave1out")


def _compared(out: Translation, job: JobSettings, scores: _Levels, number: int) -> None:
    """Write how scores are compared in groups without a critic."""
    others, std = _others(job), job.get(f"{_REWARD}std_level")
    scale = "group" if scores.std == "group" else "none"
    out.put("algorithm.scale", scale, std or f"std_level: {scores.std}")
    if scores.std == "batch":
        out.drop(std, "scores are scaled in groups or not at all")
        if std is None:
            out.note("actor.reward_norm has the deviation of the batch, AReaL's default: scores are not scaled here")
    # AReaL's deviation is around the mean of the others, too, which cancels
    is_others = others is not None and scale == "none"
    out.put("algorithm.baseline", "others" if is_others else "mean", others or job.get(f"{_REWARD}mean_level"))
    _drop_all(out, job, _ADVANTAGE, "advantages of a group are not whitened over the batch again")
    _groups(out, job, number)
    for decay in (job.real("actor.discount"), job.real("actor.gae_lambda")):
        if decay is not None and decay.value != 1:
            out.drop(decay, "without a critic advantages of a group are the same at all tokens here")


def _groups(out: Translation, job: JobSettings, number: int) -> None:
    """List what is unlike in a normalisation over the responses to a prompt."""
    size = job.count(f"{_REWARD}group_size")
    if size is None:
        out.note("actor.reward_norm has groups of 1 by AReaL's default: here they are all responses to a prompt")
    elif size.value == number:
        job.pass_over("of the responses to a prompt", size.key)
    _drop_biased(out, job, _REWARD)


def _drop_biased(out: Translation, job: JobSettings, prefix: str) -> None:
    unbiased = job.get(f"{prefix}std_unbiased")
    if unbiased is not None and job.truth(unbiased.key) is None:
        out.drop(unbiased, "variances are over N - 1")
    else:
        job.pass_over("variances are over N - 1", f"{prefix}std_unbiased")


def _drop_all(out: Translation, job: JobSettings, prefix: str, why: str) -> None:
    for key in job.found:
        if key.startswith(prefix):
            out.drop(job.get(key) or Setting(key, None), why)


def _returned(
    out: Translation, job: JobSettings, scores: _Levels, whitened: _Levels, of_group: bool, number: int
) -> None:
    """Write advantages that are returns, of a critic or whitened over the batch."""
    std = job.get(f"{_ADVANTAGE}std_level")
    is_white = "batch" in (whitened.mean, whitened.std)
    out.put("algorithm.whiten", "batch" if is_white else "none", std or f"adv_norm.std_level: {whitened.std}")
    _drop_biased(out, job, _ADVANTAGE)
    if whitened not in (_OVER_BATCH, _Levels()) or job.truth(f"{_ADVANTAGE}mean_leave1out"):
        _drop_all(out, job, _ADVANTAGE, "advantages have mean 0 and deviation 1 over the batch, or stay as they are")
    if of_group:
        out.put("algorithm.baseline", "group", job.get(f"{_REWARD}mean_level"))
        _groups(out, job, number)
    elif scores == _OVER_BATCH and not _others(job):
        out.put("algorithm.normalise_scores", "batch", job.get(f"{_REWARD}mean_level") or "actor.reward_norm:")
        _drop_biased(out, job, _REWARD)
        out.note("scores are clipped once they are normalised, in AReaL before")
    else:
        _drop_all(out, job, _REWARD, "without groups scores are normalised over the batch or not at all")
    discount, decay = job.number("actor.discount"), job.number("actor.gae_lambda")
    if out.value("algorithm.name") == "ppo":
        own = {"gamma": "actor.discount", "gae_lambda": "actor.gae_lambda", "value_clip": "critic.eps_clip"}
        parts.put_reals(out, job, own)
    elif discount is not None and decay is not None:
        # without values each token has the rewards behind it, times both for each step
        out.put("algorithm.gamma", float(f"{discount.value * decay.value:.10g}"), discount, decay)


def _scores(out: Translation, job: JobSettings, has_critic: bool) -> None:
    """Write what changes a response's score."""
    parts.put_reals(out, job, {"reward_clip": "actor.reward_clip", "temperature": "gconfig.temperature"})
    if (least := job.real("gconfig.min_new_tokens")) is not None and least.value >= 0:
        out.put("algorithm.min_response_tokens", int(least.value), least)
    for key, neutral in (("reward_scaling", 1), ("reward_bias", 0)):
        if (own := job.real(f"actor.{key}")) is not None and own.value == neutral:
            job.pass_over("it changes no score", own.key)
    tokens = job.count("actor.max_new_tokens")
    longest = job.count("gconfig.max_new_tokens")
    is_whole = tokens is not None and longest is not None and tokens.value == longest.value
    if job.truth("actor.overlong_reward_penalty") is not None and is_whole:
        parts.put_overlong(out, job.count("actor.overlong_tokens"), job.number("actor.overlong_penalty_factor"))
        job.pass_over("by its length and factor", "actor.overlong_reward_penalty")
    if has_critic and (masked := job.truth("actor.mask_no_eos_with_zero")) is not None:
        out.put("algorithm.truncation", "bootstrap", masked)
    elif has_critic:
        out.note("AReaL adds the critic's value behind a truncated response to its score: here it has the score alone")
    actor, critic = out.value("algorithm.num_mini_batches"), job.count("critic.ppo_n_minibatches")
    if critic is not None and critic.value != actor:
        out.drop(critic, "the critic has the mini-batches of the actor")


def _penalty(out: Translation, job: JobSettings, name: str) -> None:
    """Write the KL penalty, which AReaL subtracts from rewards of tokens once scores are compared."""
    penalty = job.number("actor.kl_ctl")
    if penalty is None or not job.starts("ref."):
        out.put("algorithm.kl", None, job.get("actor.kl_ctl") if penalty is None else "no ref")
        if penalty is not None:
            why = "without ref AReaL subtracts log-probs themselves; a penalty here is of the reference"
            out.drop(penalty, why)
            out.note(f"{why}: algorithm.kl: null")
        return
    out.put("algorithm.kl.place", "advantages" if name in ("grpo", "gspo") else "reward", "AReaL's place")
    out.put_real("algorithm.kl.coefficient", penalty)
    out.put_same("algorithm.kl.estimator", job.get("actor.kl_estimator"))
    out.put("algorithm.kl.value_clamp", _VALUE_CLAMP, "AReaL's bound")


def _ratio(out: Translation, job: JobSettings, of_sequence: Setting | None, name: str) -> None:
    """Write bounds and level of the ratio."""
    low, high = job.number("actor.eps_clip"), job.number("actor.eps_clip_higher")
    out.put_real("algorithm.clip_low", low)
    out.put_real("algorithm.clip_high", high or low)
    parts.put_reals(out, job, {"dual_clip": "actor.c_clip"})
    if of_sequence is None:
        job.pass_over("ratios are of tokens", "actor.importance_sampling_level")
        return
    out.put("algorithm.ratio", "sequence", of_sequence)
    varies = name == "ppo" or out.value("algorithm.kl.place") or out.value("algorithm.gamma") not in (None, 1.0)
    if varies:
        out.drop(of_sequence, "AReaL takes the mean of a response's advantages, here each token has its own")
    elif job.truth("actor.use_decoupled_loss") is not None:
        out.drop(of_sequence, "AReaL leaves rejected tokens out of a response's ratio")


def _weights(out: Translation, job: JobSettings, decoupled: Setting) -> None:
    """Write the weights of a decoupled loss, by rejection_sampling or its form before 1.0."""
    if not job.starts(_REJECTION, *_BEFORE):
        out.note(
            "weights of a decoupled loss are masked above 5, AReaL's default before 1.0; since 1.0 it has none without "
            "rejection_sampling: algorithm.importance: null"
        )
    old = job.get(*(f"{each}mode" for each in _BEFORE))
    words = ("token", "mask") if old is None else str(old.value).partition("_")[::2]
    level, action, metric = (job.get(_REJECTION + key) for key in ("level", "action", "metric"))
    of = words[0] if level is None else level.value
    outside = {"clamp": "truncate"}.get(action.value, action.value) if action else words[1]
    if of != "token" or outside not in ("mask", "truncate") or (metric is not None and metric.value != "ratio"):
        for each in (old, level, action, metric):
            out.drop(each, "weights and rejections are by ratios of tokens")
        return
    job.pass_over("a token's ratio", f"{_REJECTION}metric", f"{_REJECTION}agg")
    keys = (f"{_REJECTION}upper", *(f"{each}cap" for each in _BEFORE))
    upper = job.number(*keys) or Setting(keys[0], 5.0, default=True)
    out.put("algorithm.importance.level", "token", level or decoupled)
    out.put("algorithm.importance.outside", outside, action or old or "action: mask (AReaL's default)")
    put_cap(out, upper)
    put_floor(out, job.number(f"{_REJECTION}lower"))
