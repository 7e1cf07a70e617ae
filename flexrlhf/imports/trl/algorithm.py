"""Algorithm of a TRL job: its losses and their settings."""

from __future__ import annotations

import re

from flexrlhf.errors import UserError
from flexrlhf.imports.parts import CUT, drop_cuts, put_model, put_reals
from flexrlhf.imports.score_parts import put_functions, put_scored_by_code
from flexrlhf.imports.settings import JobSettings
from flexrlhf.imports.translation import Translation

ALGORITHMS = {name: name for name in ("grpo", "gspo", "rloo", "ppo", "sft", "dpo", "reward", "kto", "orpo", "simpo")}
ALGORITHMS |= {
    "reward_modeling": "reward",
    "ppo_tldr": "ppo",
    "cpo": "simpo",
    "asyncgrpo": "grpo",
    "async_grpo": "grpo",
}
"""Names of TRL's commands, scripts and config classes → algorithms."""
MISSING = {
    "gkd|gold|minillm|(server_)?distillation": "distillation from a teacher",
    "sdft|sdpo|ssd": "distillation from the model itself",
    "online_?dpo|nash_?md|xpo": "pairs of sampled responses that a reward model or a judge ranks",
    "bco|tpo|a2po": "its loss",
    "prm": "scores of single steps of a response",
}
"""Names of other trainers → what they need that is not here."""


def algorithm_of(trainer: str, file: str) -> str:
    """Return the algorithm of a trainer. Raises UserError for one without a counterpart, with what is missing."""
    if "vlm" in trainer or "vlm" in file:
        raise UserError(f"{file}: TRL's trainer {trainer} reads images; flexrlhf trains models of text")
    if trainer in ALGORITHMS:
        return ALGORITHMS[trainer]
    missing = next((f" ({each})" for names, each in MISSING.items() if re.fullmatch(names, trainer)), "")
    known = ", ".join(dict.fromkeys(ALGORITHMS.values()))
    raise UserError(f"{file}: TRL's trainer {trainer} has no counterpart{missing}; there are {known}")


def put_reinforced(out: Translation, job: JobSettings, name: str) -> None:
    """Write the settings of an algorithm that samples responses, and where their scores are from."""
    reward = job.named("reward_model_name_or_path") or job.named("reward_model_path") or job.named("reward_model")
    functions = job.found.get("reward_funcs")
    job.read.add("reward_funcs")
    if reward is not None:
        put_model(out, "reward", reward)
    elif not put_functions(out, job):
        put_scored_by_code(out, functions)
    beta = job.real("beta", "kl_coef")
    if beta is not None and beta.value == 0:
        out.put("algorithm.kl", None, beta)
    else:
        out.put_real("algorithm.kl.coefficient", beta)
    own: dict[str, str | tuple[str, ...]] = {
        "clip_low": ("epsilon", "cliprange"),
        "clip_high": ("epsilon_high", "epsilon", "cliprange"),
        "dual_clip": "delta",
        "temperature": "temperature",
        "gamma": "gamma",
        "gae_lambda": "lam",
        "value_clip": "cliprange_value",
        "entropy_coefficient": "entropy_coef",
    }
    put_reals(out, job, own)
    if out.value("algorithm.entropy_coefficient"):
        out.put("algorithm.entropy_aggregation", "token-mean", "its bonus is a mean over tokens")
    drop_cuts(out, job.get("top_p"), job.get("top_k"))
    out.drop(job.get("min_p"), CUT)
    if (repeated := job.get("repetition_penalty")) is not None and repeated.value != 1:
        out.drop(repeated, CUT)
    loss, scale = job.get("loss_type"), job.get("scale_rewards")
    means = {
        "dapo": "token-mean",
        "bnpo": "token-mean",
        "grpo": "seq-mean-token-mean",
        "dr_grpo": "seq-mean-token-sum-norm",
    }
    if loss is not None and loss.value in means:
        out.put("algorithm.loss_aggregation", means[loss.value], loss)
    elif loss is not None and loss.value == "cispo":
        out.put("algorithm.surrogate", "cispo", loss)
    else:
        out.drop(loss, "this loss is not here")
    if scale is not None and scale.value in ("group", "none", True, False):
        out.put("algorithm.scale", "group" if scale.value in ("group", True) else "none", scale)
    else:
        out.drop(scale, "scores are scaled in groups or not at all")
    masked, penalty = job.truth("mask_truncated_completions"), job.number("missing_eos_penalty")
    if masked is not None:
        out.put("algorithm.truncation", "mask-loss", masked)
    else:
        out.put_real("algorithm.truncation.penalty", penalty)
    job.pass_over(
        "responses end at the tokenizer's end, or at stop sequences of rollout.config", "stop_token", matters=True
    )


def put_supervised(out: Translation, job: JobSettings, name: str) -> None:
    """Write the settings of an algorithm that trains on given responses."""
    if name in ("dpo", "kto", "orpo", "simpo"):
        put_reals(out, job, {"beta": "beta"})
    own = {
        "simpo": {"gamma": "simpo_gamma"},
        "kto": {key: key for key in ("desirable_weight", "undesirable_weight")},
        "dpo": {"label_smoothing": "label_smoothing"},
    }
    put_reals(out, job, own.get(name, {}))
    loss = job.listed("loss_type")
    values = loss.value if loss is not None and isinstance(loss.value, list) else [] if loss is None else [loss.value]
    if name == "dpo" and values in (["sigmoid"], ["ipo"], ["robust"]):
        out.put("algorithm.loss", values[0], loss)
        if values == ["ipo"]:
            out.put("algorithm.length_normalised", True, loss)
    elif values and not (name in ("sft", "simpo") and values[0] in ("nll", "simpo")):
        out.drop(loss, "this loss is not here")
    elif loss is not None:
        out.drop(loss, f"the loss of {name}", matters=False)
