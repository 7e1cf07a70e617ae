"""Parts of a YAML that every system's jobs have: models by name, batches, lengths, optimizers, data, scores."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from typing import Any

from flexrlhf.api import PEERS, Families, FoundModel, UserError
from flexrlhf.imports.settings import JobSettings, Setting, read_scalar
from flexrlhf.imports.translation import Translation

_READS_IMAGES = re.compile(
    r"[-_]vl|vision|omni|vlm|minicpm-[ov]|llava|glm-?4[._]\dv|internvl|kimi-vl|geo3k|clevr", re.I
)
_ADAM = re.compile(r"(torch\.optim\.)?adam(w(_torch(_fused|_xla)?|_hf|_apex_fused)?)?")
SCHEDULES = ("constant", "linear", "cosine")
PAIRS = ("dpo", "reward", "orpo", "simpo")
"""Algorithms whose rows are two sequences."""
CUT = "a cut distribution needs importance weights here: algorithm.importance"


def put_name(out: Translation, peer: str, name: str, *sources: Setting | str | None) -> None:
    """Write the name of the algorithm, and the preset of its other settings if ``peer`` has one for it."""
    out.put("algorithm.name", name, *sources)
    if name in PEERS[peer].trainers:
        out.put("algorithm.like", peer, "what is not written")


def put_estimator(
    out: Translation,
    peer: str,
    names: Mapping[str, str],
    estimator: Setting | None,
    loss: Setting | None,
    otherwise: str,
) -> str:
    """Write the algorithm whose advantages an estimator computes; return its name.

    names:      estimators, the first by default → algorithms.
    otherwise:  the algorithm for an estimator that is not among them.
    """
    default = next(iter(names))
    name = names.get(default if estimator is None else str(estimator.value))
    if name is None:
        out.drop(estimator, f"these advantages are not here; {otherwise} has the same models and passes")
    name = name or otherwise
    of_sequence = loss if loss is not None and loss.value == "gspo" and name == "grpo" else None
    name = "gspo" if of_sequence else name
    put_name(out, peer, name, estimator or f"estimator: {default} ({out.system}'s default)", of_sequence)
    return name


def put_needed_model(out: Translation, job: JobSettings, role: str, *keys: str) -> Setting:
    """Write the model that a job needs, by the first key that has one; return its setting. Raises UserError."""
    setting = next(filter(None, map(job.named, keys)), None)
    if setting is None:
        missing = [name for key in keys if key in job.unresolved for name in job.unresolved[key].missing]
        # an argument of a script is given by its number
        hint = f"--var {missing[0].removeprefix('argument ').partition(' ')[0]}=NAME" if missing else ""
        where = f"its value {missing[0]} is not in the file: give it by {hint}" if missing else "the file has none"
        raise UserError(f"{out.file}: {keys[0]}: a job needs a model, and {where}")
    put_model(out, role, setting)
    return setting


def put_model(out: Translation, role: str, setting: Setting) -> None:
    """Write the model of a role: its sizes if its name gives them, else its path.

    Raises UserError for a model that reads images.
    """
    name = str(setting.value)
    if _READS_IMAGES.search(name.rpartition("/")[2]):
        raise UserError(f"{out.file}: {setting.key} {name} reads images or sound; flexrlhf trains models of text")
    sizes = FoundModel.named(name)
    if sizes is not None:
        out.put(f"models.{role}.init", sizes, setting, "by its sizes", f"to train it: path: {name}")
        return
    out.put(f"models.{role}.path", name, setting)
    out.note(f"{name} is no model whose sizes are known by its name: plan reads them from its files")


def check_families(out: Translation) -> None:
    """List models whose family is not known, if Megatron or vLLM, which serve few families, would run them."""
    served = [
        each for each in (out.value("models.all.engine"), out.value("rollout.engine")) if each in ("megatron", "vllm")
    ]
    families = Families.STAGED if "megatron" in served else Families.SERVED
    for key in [key for key in out.lines if key.startswith("models.") and key.endswith(".path")]:
        name, source = out.lines[key]
        if served and key != "models.reward.path":
            out.drop(
                Setting(source.partition(",")[0], name),
                f"here {' and '.join(served)} serve {', '.join(families)} models alone: see the model's config.json",
            )


def put_optimizer(
    out: Translation, job: JobSettings, role: str, keys: Mapping[str, tuple[str, ...]], warmup_updates: int = 1
) -> None:
    """Write the optimizer of a role.

    keys:            setting of ours → keys of the file.
    warmup_updates:  optimizer steps of one step of the file's warm-up.
    """
    prefix = f"models.{role}.optimizer."
    for name in ("learning_rate", "weight_decay", "eps", "final_ratio", "max_grad_norm"):
        setting = job.real(*keys.get(name, ()))
        if setting is not None and (setting.value > 0 or name in ("weight_decay", "final_ratio") and not setting.value):
            out.put(prefix + name, setting.value or 0.0, setting)
        elif name == "max_grad_norm" and (off := job.is_zero(*keys.get(name, ()))) is not None:
            out.put(prefix + name, None, off)
    betas = job.listed(*keys.get("betas", ()))
    two = [] if betas is None else [read_scalar(each) for each in names_of(betas.value)]
    if len(two) == 2 and all(isinstance(each, int | float) for each in two):
        out.put(prefix + "betas", two, betas)
    else:
        out.drop(betas, "betas are two numbers")
    ends = [end for name in ("beta1", "beta2") if (end := job.number(*keys.get(name, ()))) is not None]
    if len(ends) == 2:
        out.put(prefix + "betas", [end.value for end in ends], *ends)
    kind = job.get(*keys.get("name", ()))
    plain = kind is None or _ADAM.fullmatch(str(kind.value).lower())
    out.drop(kind, "optimizers are adamw, adam and sgd, with states of 32 bits", matters=not plain)
    schedule = job.get(*keys.get("schedule", ()))
    name = "" if schedule is None else re.sub("_with_(warmup|min_lr)$", "", str(schedule.value))
    if name in SCHEDULES:
        out.put(prefix + "schedule", name, schedule)
    else:
        out.drop(schedule, "schedules here are constant, linear and cosine")
    warmup, share = (job.number(*keys.get(name, ())) for name in ("warmup_steps", "warmup_ratio"))
    if warmup is not None:
        times = f"times {warmup_updates} optimizer steps of a step" if warmup_updates > 1 else None
        out.put(prefix + "warmup_steps", int(warmup.value) * warmup_updates, warmup, times)
    elif share is not None and "steps" in out.lines:
        out.put(prefix + "warmup_steps", math.ceil(share.value * out.value("steps") * updates_of(out)), share)
    elif share is not None and share.value == _preset_share(out, role):
        out.drop(share, "the preset's share of the steps that plan counts", matters=False)
    elif share is not None:
        out.drop(share, "a share of a run whose steps are not in the file: write warmup_steps")
    else:
        zeros = [off for name in ("warmup_steps", "warmup_ratio") if (off := job.is_zero(*keys.get(name, ())))]
        if any(each.value == 0 for each in zeros):
            # a preset may have one
            out.put(prefix + "warmup_steps", 0, *zeros)


def _preset_share(out: Translation, role: str) -> float | None:
    """Return the share of a run that is the warm-up of a role in the preset that is written."""
    like, name = out.value("algorithm.like"), out.value("algorithm.name")
    trainer = PEERS[like].trainers.get(name) if like in PEERS else None
    return None if trainer is None else trainer.warm_up_share(role)


def updates_of(out: Translation) -> int:
    """Return the optimizer steps of a step."""
    return (out.value("algorithm.num_mini_batches") or 1) * (out.value("algorithm.epochs") or 1)


def check_warmup(out: Translation) -> None:
    """Leave out warm-ups that are longer than the run, whose learning rate would never reach its value; a run whose
    steps follow from its data has none to compare with."""
    if "epochs" in out.lines:
        return
    updates = (out.value("steps") or 100) * updates_of(out)
    for key in [key for key in out.lines if key.endswith(".optimizer.warmup_steps")]:
        warmup, source = out.lines[key]
        if warmup >= updates:
            # without a line of its own a preset's warm-up would be in its place
            out.put(key, 0, "a warm-up of the whole run is left out")
            out.drop(
                Setting(source, warmup), f"the warm-up is not shorter than the {updates} optimizer steps of the run"
            )


def names_of(value: Any) -> list[str]:
    """Return the names of a list, or of a text with blanks or commas between them."""
    return (
        [str(each) for each in value] if isinstance(value, list | tuple) else re.findall(r"[^\s,\"'\[\]]+", str(value))
    )


def put_lengths(out: Translation, prompt: Setting | None, response: Setting | None) -> tuple[int, int]:
    """Write the longest prompt and response; return both."""
    for name, setting in (("max_prompt_tokens", prompt), ("max_response_tokens", response)):
        if setting is not None:
            out.put(f"data.{name}", setting.value, setting)
    return out.value("data.max_prompt_tokens") or 128, out.value("data.max_response_tokens") or 128


def split_length(out: Translation, whole: Setting | None, parts: int = 2) -> int:
    """Write one of ``parts`` of a length of prompt and response together as the longest prompt; return the whole."""
    if whole is None:
        return 256
    prompt = max(1, whole.value // parts)
    for name, tokens in (("max_prompt_tokens", prompt), ("max_response_tokens", whole.value - prompt)):
        out.put(f"data.{name}", tokens, whole, f"of both together; the prompt's are assumed to be 1 of {parts} parts")
    return int(whole.value)


def put_micro_batch(
    out: Translation, rows: Setting | None, tokens: int, most: Setting | None = None, role: str = "all"
) -> None:
    """Write the tokens of a micro-batch: at most ``most``, else of ``rows`` rows of ``tokens`` tokens.

    role:  ``all`` models, or one whose micro-batches are written if they differ from the others'.
    """
    whole = tokens * (2 if out.value("algorithm.name") in PAIRS else 1)
    size = most.value if most is not None else None if rows is None else rows.value * whole
    if size is not None and size != out.value("models.all.micro_batch_tokens"):
        out.put(f"models.{role}.micro_batch_tokens", size, most or rows, None if most else f"times {whole} tokens")
    elif size is not None:
        out.drop(most or rows, "micro-batches have the size of the actor's", matters=False)
    if most is not None:
        out.drop(rows, f"{most.key} is the size", matters=False)


def put_overlong(out: Translation, length: Setting | None, penalty: Setting | None) -> None:
    """Write the penalty of responses that are almost too long, if its length is given."""
    if length is not None:
        out.put("algorithm.overlong.buffer_tokens", length.value, length)
        out.put_real("algorithm.overlong.penalty", penalty)


def put_reals(out: Translation, job: JobSettings, keys: Mapping[str, str | tuple[str, ...]]) -> None:
    """Write settings of the algorithm that are numbers above 0. ``keys``: setting of ours → keys of the file."""
    for name, own in keys.items():
        out.put_real(f"algorithm.{name}", job.number(*([own] if isinstance(own, str) else own)))


def drop_cuts(out: Translation, top_p: Setting | None, top_k: Setting | None) -> None:
    """List settings that cut the distribution that tokens are sampled from."""
    for setting, plain in ((top_p, (1,)), (top_k, (0, -1))):
        if setting is not None and setting.value in plain:
            out.drop(setting, "nothing is cut", matters=False)
        else:
            out.drop(setting, CUT)


def put_decoded(out: Translation, rows: Setting | None, ranks: int = 1) -> None:
    """Write the tokens of the rows that are decoded together; ``rows``: of a process, ``ranks`` of which generate as
    one."""
    if rows is not None:
        tokens = (out.value("data.max_prompt_tokens") or 128) + (out.value("data.max_response_tokens") or 128)
        out.put("models.actor.generate_tokens", rows.value * ranks * tokens, rows, f"times {ranks * tokens} tokens")


def put_recomputation(out: Translation, setting: Setting | None, otherwise: str) -> None:
    """Write whether activations are computed again. ``otherwise``: why not, where ``setting`` is None."""
    out.put("models.all.activation_checkpointing", setting is not None, setting or otherwise)


def put_offloaded_activations(out: Translation, setting: Setting | None, role: str = "all") -> None:
    """Write that activations are in host memory until the backward pass, if they are computed again from these."""
    if setting is None:
        return
    recomputes = out.value(f"models.{role}.activation_checkpointing")
    if out.value("models.all.activation_checkpointing") if recomputes is None else recomputes:
        out.put(f"models.{role}.offload_activations", True, setting)
    else:
        out.drop(setting, "inputs of layers that are computed again go to host memory, no others")


def put_data(out: Translation, setting: Setting | None, fallback: str) -> None:
    """Write the rows' file or name on the Hub; of several files the sources."""
    if setting is None:
        out.put("data.path", fallback, "the file names no data")
        return
    value = setting.value
    if isinstance(value, str) and value.startswith("["):
        value = names_of(value)
    paths = [str(each) for each in value] if isinstance(value, list | tuple) else [str(value)]
    if len(paths) == 1:
        out.put("data.path", paths[0], setting)
    else:
        out.put("data.sources", [{"path": path} for path in paths], setting)


def mini_batches(out: Translation, prompts: Setting, size: Setting | None, samples: int = 1) -> None:
    """Write the mini-batches of a step; ``size``: prompts or, with ``samples``, responses of one."""
    if size is None:
        return
    number = max(1, math.ceil(prompts.value * samples / size.value))
    number = min(number, prompts.value)
    if prompts.value * samples % size.value:
        out.note(
            f"{prompts.value * samples} rows are no multiple of mini-batches of {size.value}: here {number} equal ones"
        )
    out.put("algorithm.num_mini_batches", number, prompts, size)
