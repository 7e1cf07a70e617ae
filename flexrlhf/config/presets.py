"""Presets of an algorithm, ``algorithm.like``: its settings in other engines, or in papers.

From the sources of verl 0.9, OpenRLHF 0.11, TRL 1.9 and DeepSpeed-Chat (August 2026). What depends on the split of a
batch there (TRL's whitening per rank, means of local means) is over the whole batch here; that scores land after the
last token where pad is not the end token (TRL, DeepSpeed-Chat) is not copied.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any, Literal

Like = Literal["verl", "openrlhf", "trl", "deepspeed-chat", "dr-grpo", "dapo"]
OF_GRPO = ("dr-grpo", "dapo")
"""Presets of ``grpo`` only."""

_COMMON = {"clip_low": 0.2, "clip_high": 0.2, "dual_clip": None, "gamma": 1.0, "loss_aggregation": "token-mean"}
PRESETS: Mapping[str, Mapping[str, Any]] = {
    "verl": {
        **_COMMON,
        "kl": None,
        "dual_clip": 3.0,
        "gae_lambda": 1.0,
        "value_clip": 0.5,
        "whiten": "batch",
        "reward_clip": None,
        "truncation": "none",
    },
    "openrlhf": {
        **_COMMON,
        "kl": {"place": "reward", "coefficient": 0.01, "estimator": "k1", "clamp": 10.0},
        "gae_lambda": 1.0,
        "value_clip": 0.5,
        "whiten": "batch",
        "reward_clip": 10.0,
        "truncation": "none",
    },
    "trl": {
        **_COMMON,
        "kl": {"place": "reward", "coefficient": 0.05, "estimator": "k1"},
        "gae_lambda": 0.95,
        "value_clip": 0.2,
        "whiten": "batch",
        "reward_clip": None,
        "truncation": {"penalty": 1.0},
    },
    "deepspeed-chat": {
        **_COMMON,
        "kl": {"place": "reward", "coefficient": 0.1, "estimator": "k1"},
        "gae_lambda": 0.95,
        "value_clip": 0.2,
        "whiten": "none",
        "reward_clip": 5.0,
        "truncation": "none",
    },
    # Liu et al. 2025: no division by the deviation or by the response's length
    "dr-grpo": {"kl": None, "scale": "none", "loss_aggregation": "seq-mean-token-sum-norm"},
    # Yu et al. 2025, sections 3.1 to 3.4
    "dapo": {
        "kl": None,
        "clip_low": 0.2,
        "clip_high": 0.28,
        "loss_aggregation": "token-mean",
        "dynamic_sampling": {"rounds": 2},
        "overlong": {},
    },
}


def with_preset(written: Mapping[str, Any], fields: Collection[str]) -> dict[str, Any]:
    """Return the preset ``written["like"]``, restricted to the algorithm's ``fields``, with ``written`` over it."""
    settings = {key: value for key, value in PRESETS[written["like"]].items() if key in fields}
    default, part = settings.get("kl"), written.get("kl")
    if isinstance(default, dict) and isinstance(part, dict):
        return {**settings, **written, "kl": penalty_over(default, part)}
    return {**settings, **written}


def penalty_over(default: Mapping[str, Any], written: Mapping[str, Any]) -> dict[str, Any]:
    """Return a KL penalty with what is ``written`` over ``default``; another place does not inherit its estimator."""
    moved = written.get("place", default["place"]) != default["place"]
    return {**{key: value for key, value in default.items() if not (moved and key == "estimator")}, **written}
