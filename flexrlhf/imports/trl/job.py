"""Jobs of TRL: options of its commands and scripts, YAML files of them, and config classes in Python files."""

from __future__ import annotations

from typing import Any

from flexrlhf.api import PEERS, UserError
from flexrlhf.imports import device_parts, model_parts, parts, run_parts
from flexrlhf.imports.settings import JobSettings, Setting
from flexrlhf.imports.translation import Translation
from flexrlhf.imports.trl.algorithm import algorithm_of, put_reinforced, put_supervised
from flexrlhf.imports.trl.reasons import WITH_EFFECT, WITHOUT_EFFECT
from flexrlhf.imports.trl.run import all_processes, put_rows, put_run

_SIMPO = {"beta": 0.1, "simpo_gamma": 0.5}
DEFAULTS: dict[str, Any] = {
    "per_device_train_batch_size": 8,
    "gradient_accumulation_steps": 1,
    "gradient_checkpointing": True,
    "lora_r": 16,
    "lora_alpha": 32,
}
_SAMPLED = {"num_generations": 8, "max_completion_length": 512, "max_prompt_length": 512}
_OF: dict[str, dict[str, Any]] = {
    "grpo": _SAMPLED | {"vllm_gpu_memory_utilization": 0.3},
    "async": _SAMPLED | {"max_completion_length": 2048, "use_vllm": True, "vllm_mode": "server", "max_staleness": 4},
    "rloo": _SAMPLED | {"num_generations": 2, "vllm_gpu_memory_utilization": 0.3},
    "ppo": {
        "response_length": 53,
        "max_prompt_length": 512,
        "num_mini_batches": 1,
        "local_rollout_forward_batch_size": 64,
    },
    "": {"max_length": 1024},
}
_BEFORE = ("vllm_device", "vllm_dtype", "vllm_max_model_len")
"""Settings of versions up to 0.15."""
_DEFAULTS_BEFORE: dict[str, Any] = {
    "beta": 0.04,
    "temperature": 0.9,
    "max_completion_length": 256,
    "loss_type": "grpo",
    "gradient_checkpointing": False,
    "vllm_gpu_memory_utilization": 0.9,
    "vllm_importance_sampling_correction": False,
    "use_bias_correction_kl": False,
}
"""Defaults of these versions, where later ones have others."""
_TARGETS = Setting("lora_target_modules", ["q_proj", "v_proj"], default=True)
"""Of peft for the models whose sizes are known by their names."""
_OPTIMIZER = {
    "learning_rate": ("learning_rate",),
    "weight_decay": ("weight_decay",),
    "eps": ("adam_epsilon",),
    "beta1": ("adam_beta1",),
    "beta2": ("adam_beta2",),
    "schedule": ("lr_scheduler_type",),
    "warmup_steps": ("warmup_steps",),
    "warmup_ratio": ("warmup_ratio",),
    "max_grad_norm": ("max_grad_norm",),
    "final_ratio": ("lr_scheduler_kwargs.min_lr_rate",),
    "name": ("optim",),
}


def translate(
    out: Translation,
    found: dict[str, Any],
    trainer: str,
    devices: tuple[Setting | None, Setting | None],
    served: tuple[Setting, Setting] | None,
    accelerate: dict[str, Any],
) -> None:
    """Translate settings of a trainer. Raises UserError for one without any counterpart.

    devices:     nodes and processes of one, as a launcher names them.
    served:      devices of a vLLM server, and of one of its engines.
    accelerate:  the configuration of accelerate, if there is one.
    """
    name, is_async = algorithm_of(trainer, out.file), trainer.startswith("async")
    kind = "async" if is_async else {"gspo": "grpo"}.get(name, name)
    job = JobSettings.of(found, DEFAULTS | _OF.get(kind, _OF[""]) | (_SIMPO if name == "simpo" else {}))
    if name == "grpo":
        _take_defaults_of_before(out, job)
    if name == "simpo" and job.value("loss_type") != "simpo":
        raise UserError(f"{out.file}: TRL's trainer cpo has no counterpart without loss_type: simpo")
    if name == "grpo" and (level := job.get("importance_sampling_level")) is not None and level.value == "sequence":
        name = "gspo"
    parts.put_name(out, "trl", name, f"TRL's trainer {trainer}")
    processes, nodes = all_processes(out, job, devices, accelerate)
    rows = _batch(out, job, name, processes)
    put_run(out, job)
    role = "reward" if name == "reward" else "actor"
    model = job.named("sft_model_path") if name == "ppo" else None
    model = model or job.named("model_name_or_path") or job.named("model")
    if model is None:
        missing = [name for each in job.unresolved.values() for name in each.missing]
        where = f"its value {missing[0]} is not in the file" if missing else "the file has none"
        raise UserError(
            f"{out.file}: model_name_or_path: a job needs a model, and {where}: --var model_name_or_path=NAME"
        )
    job.read |= {"model_name_or_path", "model"}
    _put_model(out, job, role, model)
    job.passed.setdefault("model", (f"{model.key} names it", False))
    job.passed.setdefault("model_name_or_path", (f"{model.key} names it", False))
    tokens = _lengths(out, job, name)
    if name in ("grpo", "gspo", "rloo", "ppo"):
        put_reinforced(out, job, name)
    else:
        put_supervised(out, job, name)
    if (routers := job.real("router_aux_loss_coef")) is not None:
        model_parts.put_router_loss(out, routers)
    elif (
        name == "kto"
        and (own := PEERS["trl"].trainers["sft"].router_loss({"init": out.value("models.actor.init")})) is not None
    ):
        out.put("models.actor.router_aux_loss_coef", own, "router_aux_loss_coef: the architecture's (TRL's default)")
    put_rows(out, job)
    parts.put_optimizer(out, job, role, _OPTIMIZER)
    if name == "ppo":
        parts.put_optimizer(out, job, "critic", _OPTIMIZER)
    tp = _devices(out, job, processes, nodes, served)
    _engine(out, job, accelerate, role, tokens)
    if name in ("grpo", "gspo", "rloo"):
        _rollout(out, job, rows, tokens, processes.value, tp)
    elif name == "ppo":
        out.put("rollout.engine", "transformers", "its trainer")
        parts.put_decoded(out, job.known("local_rollout_forward_batch_size"))
    job.pass_over("what it says is written", "use_peft", "vllm_mode", "use_vllm", "importance_sampling_level")
    job.pass_over("the file's settings are read", *(["accelerate_config", "deepspeed"] if accelerate else []))
    run_parts.drop_uses_of_rows(out, job)
    out.finish(job, WITHOUT_EFFECT, WITH_EFFECT)


def _put_model(out: Translation, job: JobSettings, role: str, model: Setting) -> None:
    """Write the trained model, with its revision, and whether its code is run."""
    parts.put_model(out, role, model)
    revision, trust = job.get("model_revision"), job.truth("trust_remote_code")
    if revision is not None and revision.value != "main":
        name, sizes = f"{model.value}@{revision.value}", out.value(f"models.{role}.init")
        if sizes is None:
            out.put(f"models.{role}.path", name, model, revision)
        else:
            out.put(f"models.{role}.init", sizes, model, revision, "by its sizes", f"to train it: path: {name}")
    if trust is not None and out.value(f"models.{role}.path"):
        out.put(f"models.{role}.trust_remote_code", True, trust)


def _take_defaults_of_before(out: Translation, job: JobSettings) -> None:
    """Take the defaults of TRL up to 0.15 where the file has a setting of that time."""
    sign = next((job.found[key] for key in _BEFORE if job.has(key)), None)
    if sign is not None:
        job.defaults = {**job.defaults, **_DEFAULTS_BEFORE}
        values = ", ".join(f"{key} {value}" for key, value in _DEFAULTS_BEFORE.items() if not job.has(key))
        out.note(f"{sign.key} is of TRL up to 0.15, whose defaults are taken: {values}")


def _batch(out: Translation, job: JobSettings, name: str, processes: Setting) -> int:
    """Write the batch, which TRL counts per device; return the responses of a step."""
    rows, accumulated = (job.known(key) for key in ("per_device_train_batch_size", "gradient_accumulation_steps"))
    update = rows.value * accumulated.value * processes.value
    if name in ("sft", "dpo", "reward", "kto", "orpo", "simpo"):
        out.put("algorithm.prompts_per_step", update, rows, accumulated, processes)
        return 0
    if name == "ppo":
        number = job.known("num_mini_batches")
        out.put("algorithm.prompts_per_step", update * number.value, rows, accumulated, number, processes)
        out.put("algorithm.num_mini_batches", number.value, number)
        out.put_same("algorithm.epochs", job.count("num_ppo_epochs"))
        return int(update * number.value)
    samples = job.known("num_generations")
    whole, generated = job.count("generation_batch_size"), job.count("steps_per_generation")
    size = whole.value if whole else update // accumulated.value * (generated.value if generated else accumulated.value)
    prompts = max(1, size // samples.value)
    if size % samples.value:
        out.note(f"{size} responses of a step are no whole groups of {samples.value}: here {prompts} prompts")
    out.put("algorithm.prompts_per_step", prompts, rows, accumulated, whole, generated, processes, samples)
    out.put("algorithm.samples_per_prompt", max(2, samples.value), samples)
    updates = max(1, size // update)
    if updates > 1:
        out.put("algorithm.num_mini_batches", min(updates, prompts), whole, generated, accumulated)
    out.put_same("algorithm.epochs", job.count("num_iterations"))
    return int(size)


def _lengths(out: Translation, job: JobSettings, name: str) -> int:
    if name in ("grpo", "gspo", "rloo"):
        return sum(parts.put_lengths(out, job.count("max_prompt_length"), job.count("max_completion_length")))
    if name == "ppo":
        return sum(parts.put_lengths(out, job.count("max_prompt_length"), job.count("response_length")))
    prompt, whole = job.count("max_prompt_length"), job.count("max_length", "max_seq_length")
    if prompt is not None and whole is not None and prompt.value < whole.value:
        return sum(parts.put_lengths(out, prompt, Setting(whole.key, whole.value - prompt.value)))
    return parts.split_length(out, whole)


def _engine(out: Translation, job: JobSettings, accelerate: dict[str, Any], role: str, tokens: int) -> None:
    kind, deepspeed = str(accelerate.get("distributed_type", "")).upper(), accelerate.get("deepspeed_config") or {}
    stage = deepspeed.get("zero_stage")
    if kind == "DEEPSPEED" and stage in (0, 1, 2, 3):
        out.put("models.all.engine", "deepspeed", "accelerate's file")
        out.put("models.all.zero", max(1, stage), f"zero_stage of accelerate's file: {stage}")
        if deepspeed.get("offload_optimizer_device") == "cpu":
            out.put("models.all.offload_optimizer", True, "offload_optimizer_device of accelerate's file")
    else:
        is_fsdp = kind == "FSDP"
        out.put("models.all.engine", "torch", "FSDP of accelerate's file" if is_fsdp else "transformers' Trainer")
        shards = (3, "FSDP shards parameters") if is_fsdp else (0, "a whole model in every process")
        out.put("models.all.zero", *shards)
    dtype, full = job.get("dtype", "torch_dtype"), job.get("bf16")
    if (half := job.truth("fp16")) is not None:
        out.put("models.all.dtype", "float16", half)
    elif full is not None and full.value is False:
        out.put("models.all.dtype", "float32", full)
    else:
        is_named = dtype is not None and dtype.value == "bfloat16"
        out.put("models.all.dtype", "bfloat16", dtype if is_named else "bf16 (TRL's default)")
    parts.put_recomputation(out, job.truth("gradient_checkpointing"), "gradient_checkpointing=false")
    parts.put_offloaded_activations(out, job.truth("activation_offloading"))
    if job.truth("use_peft") is not None or job.has("lora_r"):
        targets = job.listed("lora_target_modules") or _TARGETS
        excluded, by_root = job.listed("exclude_modules"), job.truth("use_rslora")
        model_parts.put_lora(out, role, job.count("lora_r"), job.number("lora_alpha"), targets, excluded, by_root)
        if not job.has("lora_dropout") and not out.file.endswith(".py"):  # a LoraConfig's is 0
            out.note("TRL's adapters have a dropout of 0.05 if the file names none, here there is none")
    rows, budget = job.known("per_device_train_batch_size"), job.count("token_budget")
    if budget is not None or "max_staleness" in job.defaults:
        out.put("models.all.micro_batch_tokens", budget.value if budget else tokens, budget or "the longest sequence")
    else:
        parts.put_micro_batch(out, rows, tokens)


def _devices(
    out: Translation, job: JobSettings, processes: Setting, nodes: int, served: tuple[Setting, Setting] | None
) -> Setting | None:
    """Write the machines, and how far generation may lag. Return the ranks of an engine of a server, which has devices
    of its own, as the device of ``vllm_device`` is."""
    mode, lag, every = job.get("vllm_mode"), job.count("max_staleness"), job.count("weight_sync_steps")
    if lag is not None and served is None:
        out.note("the vLLM server's devices are not in the file: one is assumed")
        served = (Setting("devices of vllm serve, assumed", 1),) * 2
    if (device := job.get("vllm_device")) is not None and job.truth("use_vllm") is not None:
        mode, served = Setting("vllm_device", "server"), (Setting(device.key, 1), Setting(device.key, 1, default=True))
    job.pass_over("vLLM does not generate", *(["vllm_"] if job.truth("use_vllm") is None else []))
    if served is None or mode is None or mode.value != "server":
        if nodes > 1 and processes.value % nodes == 0:
            device_parts.put_cluster(out, [(nodes, processes.value // nodes)], processes)
        else:
            device_parts.put_cluster(out, [device_parts.machines_of(processes.value)], processes)
        out.put("placement", None, "every model in every process")
        if mode is not None and mode.value == "server":
            out.drop(mode, "the server's devices are not in the file: vLLM is on the devices that train")
        return None
    if "algorithm.kl.coefficient" in out.lines:
        out.put("algorithm.kl.place", "reward" if out.value("algorithm.name") == "rloo" else "loss", "its trainer")
    device_parts.put_apart(
        out, device_parts.machines_of(processes.value), device_parts.machines_of(served[0].value), processes, served[0]
    )
    out.put_same("schedule.lag", lag)
    if every is not None and every.value > 1:
        out.put("sync.every", every.value, every)
    return served[1]


def _rollout(out: Translation, job: JobSettings, rows: int, tokens: int, processes: int, tp: Setting | None) -> None:
    out.put("rollout.special_tokens", "skip", "its texts of completions have none")
    uses, share = job.truth("use_vllm"), job.number("vllm_gpu_memory_utilization")
    if tp is not None and not job.has("vllm_device"):  # a server's share is its own
        share = Setting("gpu_memory_utilization of its server", 0.9, default=True)
    tp = tp or job.count("vllm_tensor_parallel_size")
    if uses is None:
        out.put("rollout.engine", "transformers", "no use_vllm")
        parts.put_decoded(out, Setting("responses of a process", max(1, rows // processes)))
        return
    out.put("rollout.engine", "vllm", uses)
    device_parts.put_vllm(out, tp, None, share, rows, tokens)
