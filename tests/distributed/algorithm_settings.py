"""Settings of the equality suite beyond plain PPO: further algorithms, and the models and data that they need.

``assets:`` before a path is replaced by the directory of models and data, which is made when tests run.
"""

from __future__ import annotations

from typing import Any

from flexrlhf.config.algorithms import KINDS

Raw = dict[str, Any]
FAST = {"learning_rate": 0.01, "eps": 1e-4}
"""Optimizer of adapters, which start at zero."""
COUNTED = {"function": "assets:scores.py:counted"}
BY_TOKEN = {"function": "assets:scores.py:by_token", "level": "token"}
BY_STEP = {"function": "assets:scores.py:by_step", "level": "step", "separator": "i"}
"""Settings whose steps end after a word in i."""
BY_ENDS = {"function": "assets:scores.py:by_ends", "level": "step"}
MODEL_STEPS = {"model": "reward", "level": "step", "separator": "u"}
COSTS = {"function": "assets:scores.py:costs"}
LENGTH = {"rule": "length", "target_tokens": 5}
"""Ties are many: eight lengths have five scores."""
EXACT = {"rule": "exact_answer"}
"""Every third row has no solution, so its responses have no score."""
PRETRAINING = {"path": "assets:texts.jsonl", "form": "text"}
SHARED_REF = {"actor": {"lora": {}, "optimizer": FAST}, "ref": {"share": "actor"}}
OWN_TOKENIZER = {"path": "assets:models/letters", "retokenize": True}
SCHEDULED = {"actor": {"optimizer": {"schedule": "linear", "warmup_steps": 1}}}
PAIRS = {"beta": 0.5}


EPISODE_SETTINGS: Raw = {
    "environment": {"path": "assets:games.py:Game", "max_turns": 3, "turn_tokens": 4, "processes": 1},
    "data": {"max_prompt_tokens": 9, "max_response_tokens": 14},
}


def in_episodes_of(name: str, **changes: Any) -> Raw:
    environment = {**EPISODE_SETTINGS["environment"], "path": f"assets:games.py:{name}", **changes}
    return {**EPISODE_SETTINGS, "environment": environment}


def _loss_kl(estimator: str, coefficient: float, **changes: Any) -> Raw:
    return {"place": "loss", "estimator": estimator, "coefficient": coefficient, **changes}


def _episodes_in_segments(name: str = "Game", api: str | None = None, **rollout: Any) -> Raw:
    """Episodes of which some are carried over two updates, in the middle of a turn, and some are cut at the last
    segment."""
    return _of(
        "grpo",
        {
            **in_episodes_of(name, **({"sequences": 2} if api is None else {"api": api})),
            **_scored({"model": "reward", "weight": 0.1}),
            "models": {"reward": OWN_TOKENIZER},
            "rollout": {"segment_tokens": 3, "max_segments": 3, **rollout},
            "steps": 6,
        },
        # a program returns its reward at the end
        supervision="process" if api is None else "outcome",
        importance={"cap": 1.1},
        prompts_per_step=2,
        stop=["ta", "o n", "i b", "e"],
    )


CLIPS = {"clip_low": 0.05, "clip_high": 0.08}
"""Bounds so narrow that each of them clips some of the tokens."""
DEFAULTS: dict[str, Raw] = {
    "ppo": {"prompts_per_step": 8, **CLIPS, "value_clip": 0.05, "kl": {"coefficient": 0.1}},
    "ac-share": {"prompts_per_step": 8, **CLIPS, "value_clip": 0.05, "kl": {"coefficient": 0.1}},
    "safe-rlhf": {"prompts_per_step": 8, **CLIPS, "value_clip": 0.05, "kl": {"coefficient": 0.1}},
    "grpo": {"prompts_per_step": 4, "samples_per_prompt": 4, **CLIPS, "kl": _loss_kl("k3", 0.3)},
    "rloo": {"prompts_per_step": 4, "samples_per_prompt": 4, **CLIPS, "kl": {"coefficient": 0.1}},
    # a mean over a response's tokens moves less than one of them
    "gspo": {"prompts_per_step": 4, "samples_per_prompt": 4, "clip_low": 0.01, "clip_high": 0.02, "kl": None},
    "reinforce++": {"prompts_per_step": 8, **CLIPS, "kl": {"coefficient": 0.1}},
    "remax": {"prompts_per_step": 8, **CLIPS, "kl": {"coefficient": 0.1}},
}


def _default(name: str) -> Raw:
    """Settings of an algorithm that has none of its own in ``DEFAULTS``."""
    if not KINDS[name].SAMPLES:
        return {"prompts_per_step": 8}
    has_groups = KINDS[name].model_fields["samples_per_prompt"].default > 1
    return {**({"prompts_per_step": 4, "samples_per_prompt": 4} if has_groups else {"prompts_per_step": 8}), **CLIPS}


DEFAULTS = {name: DEFAULTS.get(name) or _default(name) for name in KINDS}


def _of(name: str, further: Raw | None = None, **changes: Any) -> Raw:
    return {"algorithm": {"name": name, "num_mini_batches": 2, **changes}, **(further or {})}


def _chats(file: str) -> Raw:
    """Chats of several turns, in a prompt and responses that have room for them."""
    lengths = {"max_prompt_tokens": 8, "max_response_tokens": 20}
    data = {"path": f"assets:{file}.jsonl", "chat_template": "assets:chat.jinja", **lengths}
    return {"data": data, "eval": {"path": f"assets:{file}-evaluation.jsonl", "every": 1}}


def _in_small_passes(*roles: str) -> Raw:
    """A budget of one or two sequences in a pass."""
    return {"models": {role: {"micro_batch_tokens": 20} for role in roles}}


def _scored(*sources: Raw) -> Raw:
    return {"reward": list(sources)}


COMPLETIONS: dict[str, Raw] = {
    "kl-k2": _of("ppo", kl={"estimator": "k2", "coefficient": 0.5}),
    "kl-clamped": _of("ppo", kl={"estimator": "k3", "coefficient": 0.5, "clamp": 0.05}),
    "kl-k1-loss": _of("ppo", kl=_loss_kl("k1", 0.2)),
    "kl-k2-loss": _of("ppo", kl=_loss_kl("k2", 0.5, clamp=0.05), loss_aggregation="seq-mean-token-mean"),
    "kl-k3-loss": _of("ppo", kl=_loss_kl("k3", 0.5), temperature=0.7, entropy_coefficient=0.02),
    # the coefficient rises and falls by up to a fifth of 8 responses to 20
    "adaptive": _of("ppo", {"steps": 5}, kl={"coefficient": 0.2, "target": 0.3, "horizon": 20}),
    "adaptive-masked": _of("ppo", _scored(COUNTED), kl={"coefficient": 0.2, "target": 0.1, "horizon": 10}),
    # the coefficient falls and rises; with a target per response it would only rise
    "adaptive-token": _of(
        "ppo", {"steps": 5}, kl={"coefficient": 0.6, "target": 0.09, "target_unit": "token", "horizon": 8}
    ),
    # the estimates are small, so the limit binds for some of the tokens
    "kl-limited": _of("ppo", kl={"coefficient": 0.5, "value_clamp": 0.05}),
    "episodes": _of(
        "ppo",
        {**EPISODE_SETTINGS, "eval": {"path": "assets:ppo-evaluation.jsonl", "samples_per_prompt": 2}},
        truncation="bootstrap",
        gamma=0.98,
        gae_lambda=0.9,
    ),
    "episodes-random": _of("ppo", in_episodes_of("Random")),
    "episodes-replayed": _of(
        "ppo",
        {**in_episodes_of("Absent"), "debug": {"replay": "assets:runs/episodes_co-located_2"}},
        truncation="bootstrap",
        gamma=0.98,
        gae_lambda=0.9,
    ),
    "no-kl": _of("ppo", kl=None, value_clip=None),
    # bounded below the upper clip, so that the bound binds
    "dual": _of("ppo", dual_clip=1.02, epochs=2),
    "running": _of("ppo", {"steps": 4}, normalise_scores="running", reward_clip=1.0),
    "normalised": _of("ppo", normalise_scores="batch", reward_clip=1.0, whiten="mini_batch"),
    "masked": _of("ppo", truncation="mask", loss_aggregation="seq-mean-token-sum"),
    "masked-streaming": _of("ppo", truncation="mask", whiten="mini_batch", num_mini_batches=4),
    "overlong": _of("ppo", overlong={"buffer_tokens": 3, "penalty": 0.7}, truncation={"penalty": 0.5}),
    "counted": _of("ppo", _scored(COUNTED), whiten="mini_batch"),
    "unknown": _of("ppo", _scored({"model": "reward"}, {**EXACT, "weight": 0.5}), prompts_per_step=7),
    "frozen": _of("ppo", {"steps": 4, "models": SCHEDULED}, freeze_actor_steps=2),
    "thirds": _of("ppo", prompts_per_step=9, num_mini_batches=3),
    # the likelihood of pretraining data is at temperature 1
    "ptx": _of("ppo", ptx={**PRETRAINING, "coefficient": 0.5}, epochs=2, temperature=0.8),
    "ptx-adapters": _of("ppo", {"models": SHARED_REF}, ptx={**PRETRAINING, "coefficient": 0.5}, prompts_per_step=7),
    "tokens": _of("ppo", _scored({"model": "reward", "level": "token", "weight": 0.5}), reward_clip=1.0),
    "tokens-called": _of("ppo", _scored({**BY_TOKEN, "weight": 2.0}, LENGTH), truncation={"penalty": 1.0}),
    "tokens-bootstrap": _of("ppo", _scored({"model": "reward", "level": "token"}), truncation="bootstrap"),
    "tokens-mixed": _of("ppo", _scored({"model": "reward"}, {**BY_TOKEN, "weight": 0.5}), gamma=0.9),
    "steps": _of("ppo", _scored(BY_STEP), gamma=0.95),
    "steps-models": _of("ppo", _scored(MODEL_STEPS, {**BY_ENDS, "weight": 0.5}), reward_clip=1.0),
    "two-rewards": _of(
        "ppo", _scored({"model": "reward", "weight": 0.7}, {"model": "reward_second", "weight": -0.4}, LENGTH)
    ),
    "rule": _of("ppo", _scored(LENGTH), kl=None),
    "cispo": _of("ppo", surrogate="cispo", prompts_per_step=7, epochs=2),
    "clip-cov": _of("ppo", surrogate="clip-cov", covariance={"share": 0.2, "lower": 0.2, "upper": 2.0}, epochs=2),
    "masked-sequences": _of("ppo", importance={"level": "sequence", "outside": "mask", "floor": 0.7, "cap": 1.4}),
    "rejected": _of(
        "ppo", importance={"level": "none", "reject": {"level": "token", "lower": 0.9, "upper": 1.1}}, kl=None
    ),
    "rejected-sequences": _of(
        "ppo",
        importance={"level": "sequence", "reject": {"lower": 0.6, "upper": 1.6}},
        loss_aggregation="seq-mean-token-mean",
    ),
    # with a lag and sync.every some steps lose all of their tokens
    "fresh": _of("ppo", importance={"cap": 1.05, "max_staleness": 1}),
    # sequences in letters are up to three times as long, so the default limit cuts some
    "retokenized": _of("ppo", {"models": {"reward": OWN_TOKENIZER}}),
    "retokenized-second": _of(
        "ppo",
        {
            **_scored({"model": "reward"}, {"model": "reward_second", "weight": 0.5}),
            "models": {"reward_second": {**OWN_TOKENIZER, "max_text_tokens": 60}},
        },
        prompts_per_step=7,
    ),
}
"""Further settings of PPO, and with it of all that generate responses."""
RECOMPUTED: Raw = {"rollout": {"logprobs": "recompute"}}
ALGORITHMS: dict[str, Raw] = {
    "one-trunk": _of("ac-share"),
    "one-trunk-epochs": _of("ac-share", epochs=2, entropy_coefficient=0.02, value_coefficient=1.5, value_clip=None),
    "one-trunk-streaming": _of("ac-share", num_mini_batches=4, whiten="mini_batch", kl=_loss_kl("k3", 0.3)),
    "one-trunk-uneven": _of("ac-share", prompts_per_step=7, truncation="bootstrap", gamma=0.98),
    "one-trunk-corrected": _of("ac-share", importance={"cap": 1.05}),
    "one-trunk-rejected": _of("ac-share", importance={"reject": {"level": "token", "lower": 0.9, "upper": 1.1}}),
    "one-trunk-adapters": _of("ac-share", {"models": SHARED_REF}),
    "one-trunk-ptx": _of("ac-share", _scored(LENGTH), ptx=PRETRAINING, samples_per_prompt=2, prompts_per_step=4),
    "one-trunk-episodes": _of("ac-share", {**EPISODE_SETTINGS, **RECOMPUTED}),
    "grpo": _of("grpo"),
    # the only pass of a step computes the log-probs that its ratios are taken to, and the KL
    "grpo-alone": _of("grpo", num_mini_batches=1),
    "gspo-alone": _of("gspo", num_mini_batches=1),
    "one-trunk-alone": _of("ac-share", num_mini_batches=1, kl=_loss_kl("k2", 0.3), entropy_coefficient=0.02),
    "corrected-alone": _of("ppo", num_mini_batches=1, importance={"cap": 1.05}),
    # each pass by itself
    # a stop string ends a turn, and is not searched for in earlier ones
    "grpo-episodes": _of(
        "grpo",
        {**EPISODE_SETTINGS, **_scored({"model": "reward", "weight": 0.1})},
        supervision="process",
        importance={"cap": 1.1},
        prompts_per_step=2,
        stop=["ta", "o n", "i b", "e"],
    ),
    "grpo-episodes-segments": _episodes_in_segments(caches="kept"),
    # with all rows read again behind each checkpoint
    "grpo-episodes-segments-saved": {**_episodes_in_segments(caches="kept"), "checkpoint": {"every": 2}},
    # a program that calls the policy by HTTP plays the same game, whose rewards are there at its end
    "grpo-program-segments": _episodes_in_segments("play", "openai"),
    # groups whose environment fails are replaced in a further attempt; rows wait for no other row's reply
    "grpo-episodes-dynamic": _of(
        "grpo",
        {**in_episodes_of("Game", sequences=3), "rollout": {"order": "free"}, "steps": 3},
        supervision="process",
        importance={"cap": 1.1},
        prompts_per_step=3,
        samples_per_prompt=2,
        stop=["ta", "o n", "i b", "e"],
        dynamic_sampling={"rounds": 3},
        # no score that is missing is of an episode that failed
        invalid_scores="stop",
    ),
    "grpo-recomputed": _of("grpo", RECOMPUTED, num_mini_batches=1),
    "one-trunk-recomputed": _of("ac-share", RECOMPUTED),
    "grpo-rule": _of("grpo", {**_scored(LENGTH), "eval": {"pass_at": 2, "pass_score": 0.8}}, epochs=2),
    "grpo-dr": _of("grpo", kl=None, scale="none", loss_aggregation="seq-mean-token-sum-norm"),
    # three of six groups are trained on, if as many differ
    "grpo-dapo": _of(
        "grpo",
        {**_scored(LENGTH), "data": {"max_response_tokens": 4}},
        prompts_per_step=3,
        dynamic_sampling={"rounds": 2},
        kl=None,
        clip_high=0.12,
        loss_aggregation="token-mean",
        overlong={"buffer_tokens": 2, "penalty": 0.5},
    ),
    "grpo-dynamic": _of(
        "grpo",
        {**_scored(COUNTED), "data": {"max_response_tokens": 3}},
        samples_per_prompt=3,
        prompts_per_step=5,
        dynamic_sampling={"rounds": 3},
        freeze_actor_steps=1,
    ),
    "grpo-counted": _of("grpo", _scored(COUNTED), kl={"place": "reward", "estimator": "k1", "coefficient": 0.05}),
    # no group fits into a pass, and ranks have different counts of passes
    "grpo-pieces": _of("grpo", _in_small_passes("actor", "ref", "reward"), prompts_per_step=5, num_mini_batches=2),
    "grpo-uneven": _of("grpo", prompts_per_step=5, samples_per_prompt=3, truncation="mask", num_mini_batches=4),
    # half of the gradient of the penalty is cut off
    "grpo-limited": _of("grpo", kl=_loss_kl("k3", 0.5, value_clamp=0.002), epochs=2),
    "grpo-after": _of(
        "grpo",
        kl={"place": "advantages", "coefficient": 0.2, "target": 0.05, "target_unit": "token", "horizon": 30},
        num_mini_batches=4,
    ),
    "grpo-shared": _of("grpo", {"models": SHARED_REF}),
    # an end token after a few tokens, so that a group waits for its last response
    "grpo-segments": _of(
        "grpo",
        {"rollout": {"segment_tokens": 2}, "steps": 6},
        importance={"cap": 1.1},
        truncation="mask-loss",
        ptx={**PRETRAINING, "coefficient": 0.3},
    ),
    # groups that are alike or without a score, in place of which later steps take more prompts
    "grpo-dynamic-segments": _of(
        "grpo",
        {**_scored(COUNTED), "rollout": {"segment_tokens": 2}, "steps": 6},
        prompts_per_step=3,
        num_mini_batches=2,
        dynamic_sampling={"rounds": 2},
        truncation="mask-loss",
        freeze_actor_steps=3,
    ),
    # scores that are exact, since the same short responses come in several steps
    "grpo-as-ended": _of(
        "grpo",
        {**_scored(LENGTH), "rollout": {"segment_tokens": 2, "groups": "as-ended"}, "steps": 6},
        truncation="mask-loss",
        ptx={**PRETRAINING, "coefficient": 0.3},
    ),
    # steps are compared with the ones of rows that have ended by then
    "grpo-as-ended-process": _of(
        "grpo",
        {**_scored(BY_STEP), "rollout": {"segment_tokens": 2, "groups": "as-ended"}, "steps": 6},
        supervision="process",
    ),
    "grpo-corrected": _of("grpo", importance={"level": "sequence", "cap": 1.1}, kl=None),
    "grpo-ptx": _of("grpo", ptx={**PRETRAINING, "coefficient": 0.3}, freeze_actor_steps=1),
    "rloo": _of("rloo"),
    "rloo-after": _of(
        "rloo", _scored(COUNTED), kl={"place": "advantages", "estimator": "k2", "coefficient": 0.3}, truncation="mask"
    ),
    "rloo-unknown": _of("rloo", _scored({"model": "reward"}, EXACT), normalise_scores="running"),
    "rloo-clipped": _of("rloo", samples_per_prompt=2, reward_clip=0.5, dual_clip=1.02, epochs=2),
    "gspo": _of("gspo", epochs=2),
    "gspo-masked": _of("gspo", _scored(COUNTED), truncation="mask", kl=_loss_kl("k2", 0.3), normalise_scores="batch"),
    # advantages that differ inside a response, so that the gradient does not reduce to one ratio
    "gspo-token": _of("gspo", _scored(BY_STEP), ratio="sequence-token", supervision="process", epochs=2),
    "grpo-process": _of("grpo", _scored(BY_STEP), supervision="process"),
    "grpo-process-models": _of(
        "grpo",
        _scored({**MODEL_STEPS, "weight": 0.5}, {**BY_ENDS, "weight": 2.0}, LENGTH),
        supervision="process",
        scale="none",
        truncation={"penalty": 0.5},
        prompts_per_step=3,
        samples_per_prompt=3,
    ),
    "grpo-cispo": _of("grpo", surrogate="cispo", epochs=2),
    "grpo-clip-cov": _of(
        "grpo", surrogate="clip-cov", covariance={"share": 0.2, "lower": 0.2, "upper": 2.0}, prompts_per_step=5
    ),
    "grpo-kl-cov": _of("grpo", surrogate="kl-cov", covariance={"share": 0.15, "coefficient": 0.7}, epochs=2),
    "grpo-masked": _of(
        "grpo",
        kl={**_loss_kl("k3", 0.1), "corrected": True},
        importance={
            "outside": "mask",
            "floor": 0.9,
            "cap": 1.1,
            "reject": {"level": "geometric", "lower": 0.95, "upper": 1.05, "denominators": "all"},
        },
    ),
    "grpo-rejected": _of(
        "grpo",
        surrogate="kl-cov",
        covariance={"share": 0.15},
        importance={"cap": 1.05, "reject": {"level": "geometric", "lower": 0.95, "upper": 1.05}},
    ),
    "grpo-fresh": _of(
        "grpo", importance={"max_staleness": 1, "reject": {"level": "token", "lower": 0.9, "upper": 1.1}}
    ),
    "raft": _of("raft", _scored(COUNTED)),
    "raft-penalised": _of("raft", kl={"coefficient": 0.3}, truncation="mask", epochs=2),
    "reinforce": _of("reinforce++", num_mini_batches=4, kl={"coefficient": 0.1, "target": 0.2, "horizon": 20}),
    "reinforce-group": _of(
        "reinforce++", baseline="group", samples_per_prompt=4, prompts_per_step=4, kl=_loss_kl("k2", 0.3)
    ),
    "reinforce-as-ended": _of(
        "reinforce++",
        {**_scored(LENGTH), "rollout": {"segment_tokens": 2, "groups": "as-ended"}, "steps": 6},
        baseline="group",
        samples_per_prompt=4,
        prompts_per_step=4,
    ),
    "reinforce-plain": _of("reinforce++", _scored(BY_TOKEN), whiten="none", gamma=0.9, num_mini_batches=4),
    "reinforce-counted": _of(
        "reinforce++", _scored(COUNTED, BY_TOKEN), baseline="group", samples_per_prompt=3, prompts_per_step=3
    ),
    "remax": _of("remax"),
    # greedy responses that end in other steps than the sampled ones; rows whose reply is late go on in the next step.
    # One row at a time is decoded, so that the order of rows changes no bit
    "remax-episodes": _of(
        "remax",
        {
            **in_episodes_of("Late", processes=8, sequences=2),
            "models": {"actor": {"generate_tokens": 1}},
            "rollout": {"segment_tokens": 3, "order": "free", "late_replies": "carry"},
            # episodes that fail at once are trained on before others
            "guards": {"max_failed_steps": None},
            "steps": 6,
        },
    ),
    "remax-segments": _of("remax", {"rollout": {"segment_tokens": 3}}),
    "remax-retokenized": _of("remax", {"models": {"reward": {**OWN_TOKENIZER, "max_text_tokens": 20}}}),
    "remax-rule": _of("remax", _scored(LENGTH), kl=None, normalise_scores="running", num_mini_batches=4),
    "remax-masked": _of("remax", _scored(COUNTED), whiten="batch", gamma=0.95),
    "remax-cut-off": _of("remax", {"steps": 2}, truncation="mask", min_response_tokens=2, importance={"cap": 1.05}),
    "remax-two": _of("remax", _scored({"model": "reward"}, {"model": "reward_second", "level": "token"}, LENGTH)),
    "remax-steps": _of("remax", _scored(MODEL_STEPS, BY_STEP)),
    "remax-corrected": _of("remax", importance={"cap": 1.05}),
    "safe": _of("safe-rlhf", lagrange={"limit": -0.5, "learning_rate": 0.5}),
    "safe-ptx": _of(
        "safe-rlhf", _scored(LENGTH), lagrange={"limit": 0.5}, ptx={**PRETRAINING, "coefficient": 0.3}, epochs=2
    ),
    "safe-called": _of(
        "safe-rlhf",
        {**_scored(COUNTED), "cost": [COSTS, {"model": "cost", "weight": 0.5}]},
        lagrange={"limit": 0.2, "learning_rate": 5.0, "maximum": 1.2},
    ),
    "safe-episodes": _of("safe-rlhf", EPISODE_SETTINGS, lagrange={"limit": -0.5}),
    "safe-steps": _of(
        "safe-rlhf", {"cost": [{**MODEL_STEPS, "model": "cost", "weight": 0.5}, LENGTH]}, lagrange={"limit": 0.2}
    ),
    "safe-retokenized": _of("safe-rlhf", {"models": {"cost": OWN_TOKENIZER}}, lagrange={"limit": -0.5}),
    "safe-streaming": _of("safe-rlhf", num_mini_batches=4, whiten="mini_batch", truncation="bootstrap"),
    "safe-rule": _of("safe-rlhf", {**_scored(LENGTH), "cost": [COSTS]}, kl=None, value_clip=None),
    "dpo": _of("dpo", **PAIRS),
    "dpo-ipo": _of("dpo", **PAIRS, loss="ipo"),
    "dpo-smoothed": _of("dpo", **PAIRS, label_smoothing=0.2, prompts_per_step=7, epochs=2),
    "dpo-shared": _of("dpo", {"models": SHARED_REF}, **PAIRS),
    "dpo-robust": _of("dpo", **PAIRS, loss="robust", label_smoothing=0.2),
    # a pair is above the budget of a pass
    "dpo-normalised": _of(
        "dpo",
        _in_small_passes("actor", "ref"),
        beta=2.0,
        length_normalised=True,
        prompts_per_step=7,
        num_mini_batches=3,
    ),
    "dpo-ipo-normalised": _of("dpo", **PAIRS, loss="ipo", length_normalised=True),
    "simpo": _of("simpo", gamma=0.5, epochs=2),
    "simpo-uneven": _of("simpo", prompts_per_step=7, num_mini_batches=4),
    "orpo": _of("orpo", beta=1.5),
    "orpo-adapters": _of("orpo", {"models": {"actor": {"lora": {}, "optimizer": FAST}}}),
    # in the first step policy and reference differ already, so that the reference point is not 0
    "kto": _of("kto", beta=0.5, desirable_weight=1.3, undesirable_weight=0.7),
    "kto-uneven": _of("kto", beta=0.5, prompts_per_step=7, num_mini_batches=3, epochs=2),
    "kto-shared": _of("kto", {"models": SHARED_REF}, beta=0.5),
    "sft-chats": _of("sft", _chats("chats")),
    "sft-chats-mean": _of("sft", _chats("chats"), prompts_per_step=7, loss_aggregation="seq-mean-token-mean"),
    "dpo-chats": _of("dpo", _chats("chat-pairs"), **PAIRS),
    "orpo-chats": _of("orpo", _chats("chat-pairs")),
    "kto-chats": _of("kto", _chats("chat-pairs"), beta=0.5),
}
"""By algorithm; all begin with the same word."""
EVALUATED = (
    *("retokenized", "grpo-rule", "one-trunk", "dpo", "dpo-smoothed", "dpo-shared", "sft-chats", "dpo-chats"),
    *("simpo", "orpo", "kto"),
)
"""Settings that evaluate after every step."""

SCORES = '''"""Scores of responses, for tests."""

import math


def counted(prompts, responses):
    """Words that end in a; no number for a response that begins with a k."""
    return [math.nan if text.strip().startswith("k") else float(text.count("a")) for text in responses]


def by_token(prompts, responses, num_tokens):
    """A number for each token, by its place and the whole text."""
    return [[0.25 * ((place + len(text)) % 5) for place in range(n)] for text, n in zip(responses, num_tokens)]


def by_step(prompts, responses, steps):
    """A number for each step, by its place and length; none for a response that begins with an m.

    Sums of them are no multiples of their mean, so that no advantage is 0 but for rounding.
    """
    scores = [[math.sin(1 + place + 2 * len(step)) for place, step in enumerate(each)] for each in steps]
    return [None if text.strip().startswith("m") else each for text, each in zip(responses, scores)]


def by_ends(prompts, responses):
    """Characters up to each word that ends in o."""
    return [[(end + 1, 0.1 * (end % 7)) for end, sign in enumerate(text) if sign == "o"] for text in responses]


def costs(prompts, responses, num_tokens):
    """The fraction of words that end in e; none for a response that begins with a p."""
    return [
        None if text.strip().startswith("p") else text.count("e") / n for text, n in zip(responses, num_tokens)
    ]
'''
"""A user's file. A score does not depend on the other responses in its batch."""

GAMES = '''"""An environment, for tests: its replies follow from its seed and the turns so far."""

import json
import random
import time
from urllib.error import HTTPError
from urllib.request import Request, urlopen

from flexrlhf.environments.base import Turn

SOUNDS = [first + second for first in "bdfgklmnprst" for second in "aeiou"]


class Game:
    def reset(self, row, seed):
        self.sum = seed + len(row["prompt"])
        if self.sum % 11 == 3:
            raise RuntimeError("no game today")
        return SOUNDS[self.sum % 60] if self.sum % 3 else ""

    def step(self, reply):
        self.sum = self.sum * 31 + sum(place * ord(sign) for place, sign in enumerate(reply, 1))
        if self.sum % 13 == 5:
            raise RuntimeError("the game broke")
        words = [SOUNDS[self.sum // (place + 2) % 60] for place in range(self.sum % 4)]
        return Turn(" ".join(words), reward=self.sum % 7 / 4 - 0.5, is_done=self.sum % 5 == 0)


def play(row, api):
    game, total = Game(), 0.0
    text = row["prompt"] + spaced(game.reset(row, api.seed))
    head = {"Authorization": f"Bearer {api.api_key}", "Content-Type": "application/json"}
    while True:
        data = json.dumps({"model": api.model, "prompt": text}).encode()
        try:
            with urlopen(Request(f"{api.base_url}/completions", data, head)) as reply:
                said = json.load(reply)["choices"][0]["text"]
        except HTTPError:
            return total
        turn = game.step(said)
        total += turn.reward
        if turn.is_done:
            return total
        text += said + spaced(turn.messages)


def spaced(text):
    return text and " " + text


play.game = Game


class Late(Game):
    def reset(self, row, seed):
        found = super().reset(row, seed)
        self.wait()
        return found

    def step(self, reply):
        found = super().step(reply)
        self.wait()
        return found

    def wait(self):
        time.sleep(0.2 * (self.sum % 3 == 0))


class Random:
    def reset(self, row, seed):
        return random.choice(SOUNDS)

    def step(self, reply):
        return Turn(random.choice(SOUNDS), random.random(), random.random() < 0.2)


class Absent:
    def __init__(self):
        raise RuntimeError("no environment")
'''
"""Environments: one ends some episodes early, and fails in some, and a program plays it; one is late as well; one never
replies alike; one cannot run."""
