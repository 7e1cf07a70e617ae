"""Jobs of NeMo-RL: YAML files with all settings, each over the files that its ``defaults`` name."""

from __future__ import annotations

import re
from typing import Any

from flexrlhf.api import UserError
from flexrlhf.imports import device_parts, model_parts, parts, run_parts
from flexrlhf.imports.nemo_rl.algorithm import KINDS, put_algorithm
from flexrlhf.imports.nemo_rl.reasons import WITH_EFFECT, WITHOUT_EFFECT
from flexrlhf.imports.settings import JobSettings, Setting
from flexrlhf.imports.translation import Translation

_P, _G = "policy.", "policy.generation."
ENDLESS = 100_000
"""Most steps of a run that its data do not end."""


def translate(out: Translation, job: JobSettings) -> None:
    """Translate a job. Raises UserError for one without any counterpart."""
    if job.truth("on_policy_distillation.enabled") or job.starts("distillation.", "teacher."):
        raise UserError(f"{out.file}: distillation from a teacher has no counterpart")
    section = next((key for key in KINDS if job.starts(f"{key}.")), None)
    if section is None:
        raise UserError(f"{out.file}: none of the trainers {', '.join(KINDS)} of NeMo-RL")
    name = put_algorithm(out, job, section)
    role = "reward" if name == "reward" else "actor"
    steps = job.count(f"{section}.max_num_steps")
    epochs = job.number(f"{section}.max_num_epochs")
    if steps is not None and steps.value >= ENDLESS:
        out.drop(steps, "epochs end the run", matters=epochs is None)
        steps = None
    run_parts.put_length(out, steps, epochs, "none")
    rows = _batch(out, job, section, name)
    on_policy = job.truth("loss_fn.force_on_policy_ratio")
    if (out.value("algorithm.num_mini_batches") or 1) > 1:
        out.drop(on_policy, "the ratio is to the policy that the step starts from")
    _run(out, job, section)
    model = parts.put_needed_model(out, job, role, f"{_P}model_name")
    if name == "ppo":
        parts.put_model(out, "critic", job.named("value.model_name") or model)
    tokens = _lengths(out, job, name)
    parts.put_data(
        out,
        job.get("data.train.data_path", "data.train_data_path", "data.train.dataset_name", "data.dataset_name"),
        "data/train.jsonl",
    )
    samples = name in ("grpo", "gspo", "reinforce++", "ppo")
    _columns(out, job, samples)
    is_megatron = job.truth(f"{_P}megatron_cfg.enabled") is not None
    _optimizer(out, job, role, is_megatron)
    if samples:
        _scores(out, job)
    _devices(out, job)
    _engine(out, job, role, is_megatron, tokens)
    if name == "ppo":
        _critic(out, job, is_megatron)
    if samples:
        _rollout(out, job, rows, tokens)
    job.pass_over("of the engine that does not train", f"{_P}{'dtensor_cfg' if is_megatron else 'megatron_cfg'}.")
    run_parts.drop_uses_of_rows(out, job)
    out.finish(job, WITHOUT_EFFECT, WITH_EFFECT)


def _run(out: Translation, job: JobSettings, section: str) -> None:
    """Write the run's name, seed, loggers, evaluation and checkpoints."""
    run_parts.put_run_name(out, job, "logger.wandb.name")
    run_parts.put_seed(out, job, f"{section}.seed", "data.seed", "data.train.seed")
    if job.truth(f"{section}.use_dynamic_sampling") is None:
        job.pass_over("prompts are not sampled anew", f"{section}.dynamic_sampling_", f"{section}.batch_multiplier")
    plain = {"loss_fn.positive_example_nll_weight": 0, f"{_P}megatron_cfg.mtp_num_layers": 0}
    plain |= {f"{section}.batch_multiplier": 1, f"{section}.only_unmask_final": False}
    job.pass_over("as it is here", *(key for key, value in plain.items() if job.value(key) == value))
    job.pass_over("of another estimator", f"{section}.adv_estimator.minus_baseline")
    keys = {"wandb": {key: f"logger.wandb.{key}" for key in ("project", "entity", "group", "mode")}}
    keys["mlflow"] = {"experiment": "logger.mlflow.experiment_name", "tracking_uri": "logger.mlflow.tracking_uri"}
    names = ("wandb", "tensorboard", "mlflow")
    run_parts.put_loggers(out, job, {name: job.truth(f"logger.{name}_enabled") for name in names}, keys)
    every, first = run_parts.interval(job, f"{section}.val_period"), job.truth(f"{section}.val_at_start")
    if every is not None:
        names = ("data.validation.data_path", "data.val_data_path", "data.validation.dataset_name")
        run_parts.put_evaluation(out, job.get(*names), every, {"before": first and Setting(first.key, True)})
    if job.truth("checkpointing.enabled") is not None:
        run_parts.put_checkpoints(out, job.count("checkpointing.save_period"), job.count("checkpointing.keep_top_k"))


def _columns(out: Translation, job: JobSettings, samples: bool) -> None:
    """Write the columns of the rows; ``samples``: whether responses are sampled, so that theirs is the solution."""
    response = "answer" if samples else "response"
    names = {"prompt": ("input", "prompt"), response: ("output",), "chosen": ("chosen",), "rejected": ("rejected",)}
    keys = {name: [f"data.{part}{each}_key" for each in own for part in ("train.", "")] for name, own in names.items()}
    run_parts.put_columns(out, {name: job.get(*own) for name, own in keys.items()})
    run_parts.put_columns(out, {"messages": job.get("data.train.chat_key", "data.chat_key")})


def _batch(out: Translation, job: JobSettings, section: str, name: str) -> int:
    """Write the batch; return the responses of a step."""
    size = job.count(f"{_P}train_global_batch_size")
    if name in ("sft", "dpo", "reward"):
        out.put_same("algorithm.prompts_per_step", size)
        return 0
    prompts, samples = job.count(f"{section}.num_prompts_per_step"), job.count(f"{section}.num_generations_per_prompt")
    number = samples.value if samples else 1
    if samples is not None and (number > 1 or name in ("ppo", "reinforce++")):
        out.put("algorithm.samples_per_prompt", number, samples)
    out.put_same("algorithm.epochs", job.count(f"{section}.ppo_epochs"))
    out.put_same("algorithm.freeze_actor_steps", job.count(f"{section}.policy_training_start_step"))
    if prompts is None:
        return 0
    out.put_same("algorithm.prompts_per_step", prompts)
    parts.mini_batches(out, prompts, size, number)
    return int(prompts.value * number)


def _lengths(out: Translation, job: JobSettings, name: str) -> int:
    whole = job.count(f"{_P}max_total_sequence_length")
    if name in ("sft", "dpo", "reward"):
        return parts.split_length(out, whole)
    response, prompt = job.count(f"{_G}max_new_tokens"), job.count("data.max_input_seq_length")
    if whole is None or response is None or response.value >= whole.value:
        return parts.split_length(out, whole or response, 8)
    if prompt is None or prompt.value + response.value > whole.value:
        prompt = Setting(whole.key, whole.value - response.value)
    job.pass_over("of prompt and response, whose lengths are in the file", whole.key)
    return sum(parts.put_lengths(out, prompt, response))


def _optimizer(out: Translation, job: JobSettings, role: str, is_megatron: bool) -> None:
    """Write the optimizer of a role, whose settings are in ``value.`` if it is the critic."""
    section = "value." if role == "critic" else _P
    prefix = f"{section}megatron_cfg.optimizer." if is_megatron else f"{section}optimizer.kwargs."
    keys = {
        "learning_rate": (f"{prefix}lr",),
        "weight_decay": (f"{prefix}weight_decay",),
        "eps": (f"{prefix}adam_eps", f"{prefix}eps"),
        "betas": (f"{prefix}betas",),
        "max_grad_norm": (f"{section}max_grad_norm",),
    }
    if is_megatron:
        scheduler = f"{section}megatron_cfg.scheduler."
        keys |= {"max_grad_norm": (f"{prefix}clip_grad", f"{section}max_grad_norm")}
        keys |= {"beta1": (f"{prefix}adam_beta1",), "beta2": (f"{prefix}adam_beta2",)}
        keys |= {"schedule": (f"{scheduler}lr_decay_style",), "warmup_steps": (f"{scheduler}lr_warmup_iters",)}
        _decay(out, job, role, prefix, scheduler)
    parts.put_optimizer(out, job, role, keys)
    if is_megatron:
        job.pass_over("Megatron has its own: megatron_cfg.optimizer", f"{section}optimizer.", f"{section}scheduler")
        return
    kind = job.get(f"{section}optimizer.name")
    out.drop(kind, "optimizers are adamw, adam and sgd", matters="Adam" not in str(kind.value if kind else ""))
    job.pass_over("kernels", *(f"{section}optimizer.kwargs.{key}" for key in ("foreach", "fused")))
    _stages(out, job.found.get(f"{section}scheduler"), role)
    job.pass_over("its stages are read", f"{section}scheduler")


def _decay(out: Translation, job: JobSettings, role: str, prefix: str, scheduler: str) -> None:
    """Write the end of Megatron's schedule."""
    style, end, peak = job.get(f"{scheduler}lr_decay_style"), job.number(f"{prefix}min_lr"), job.number(f"{prefix}lr")
    length = job.get(f"{scheduler}lr_decay_iters")
    first = job.real(f"{scheduler}lr_warmup_init")
    small = first is None or peak is None or abs(first.value) <= 0.1 * peak.value
    out.drop(
        first, "a warm-up begins at 0", matters=job.number(f"{scheduler}lr_warmup_iters") is not None and not small
    )
    if style is None or style.value == "constant":
        job.pass_over("the rate is constant", f"{prefix}min_lr", f"{scheduler}lr_decay_", f"{scheduler}lr_warmup_init")
        return
    out.drop(length, "a schedule ends at the last step of the run")
    if end is not None and peak is not None and end.value <= peak.value:
        out.put(f"models.{role}.optimizer.final_ratio", end.value / peak.value, end, peak)


def _stages(out: Translation, scheduler: Setting | None, role: str) -> None:
    """Write a warm-up and a schedule that are torch's, one after the other."""
    prefix = f"models.{role}.optimizer."
    for stage in scheduler.value if scheduler is not None and isinstance(scheduler.value, list) else ():
        kwargs: Any = stage.get("kwargs") if isinstance(stage, dict) else None
        if not isinstance(kwargs, dict):
            continue
        name = str(stage.get("name", "")).rpartition(".")[2]
        start, steps = kwargs.get("start_factor", 1 / 3), kwargs.get("total_iters", 5)
        rises = name == "LinearLR" and isinstance(start, int | float) and start < kwargs.get("end_factor", 1.0)
        if rises and isinstance(steps, int):
            source = f"policy.scheduler: {name}, from {start} of the rate, here from 0"
            out.put(f"{prefix}warmup_steps", steps, source)
        elif name in ("LinearLR", "CosineAnnealingLR"):
            out.put(f"{prefix}schedule", "cosine" if "Cosine" in name else "linear", f"policy.scheduler: {name}")


def _critic(out: Translation, job: JobSettings, is_megatron: bool) -> None:
    """Write how the critic is trained and split where it differs from the actor."""
    _optimizer(out, job, "critic", is_megatron)
    prefix = "value.megatron_cfg." if is_megatron else "value.dtensor_cfg."
    sizes = {"tp": ("tensor_model_parallel_size", "tensor_parallel_size"), "pp": ("pipeline_model_parallel_size",)}
    sizes |= {} if is_megatron else {"cp": ("context_parallel_size",)}
    for key, names in sizes.items():
        size = job.count(*(prefix + name for name in names))
        if size is not None and size.value != (out.value(f"models.all.{key}") or 1):
            out.put(f"models.critic.{key}", size.value, size)
    own = {key: each for key, each in job.found.items() if key.startswith("value.")}
    of_actor = {key: job.found.get(f"{_P}{key.removeprefix('value.')}") for key in own}
    same = [key for key, each in of_actor.items() if each is not None and each.value == own[key].value]
    job.pass_over("the critic is as the actor is", *same)
    out.note("of value. the model, the optimizer and the split are read; else the critic is as the actor is")


def _scores(out: Translation, job: JobSettings) -> None:
    path = next((key for key in job.found if re.fullmatch(r"env\.reward_model\w*\.model_name", key)), None)
    setting = None if path is None else job.named(path)
    environment = job.get("data.default.env_name", "data.env_name", "data.train.env_name")
    if setting is not None and environment is not None and "reward" in str(environment.value):
        parts.put_model(out, "reward", setting)
        return
    out.put("reward", {"rule": "math"}, environment or "its environment")
    if environment is not None and "math" not in str(environment.value):
        out.drop(environment, "scores of this environment are a function here; a rule stands for them")


def _devices(out: Translation, job: JobSettings) -> None:
    nodes, per_node = job.count("cluster.num_nodes"), job.count("cluster.gpus_per_node")
    count, devices = device_parts.machines(out, job, nodes, per_node)
    prefix = f"{_G}colocated."
    together = job.get(f"{prefix}enabled")
    more, others = job.count(f"{prefix}resources.num_nodes"), job.count(f"{prefix}resources.gpus_per_node")
    sources = (nodes, per_node, more, others)
    is_apart = together is not None and together.value is False
    if not is_apart:
        device_parts.put_cluster(out, [(count, devices)], nodes, per_node)
        out.put("placement", None, together or "no policy.generation.colocated", "every model on all devices")
    elif count > 1 and more is not None and more.value < count:
        device_parts.put_apart(out, (count - more.value, devices), (more.value, devices), *sources)
    elif others is not None and others.value < devices:
        device_parts.put_apart(out, (count, devices - others.value), (count, others.value), *sources)
    else:
        out.drop(together, "the file has no devices for generation: here every model is on all of them")
        device_parts.put_cluster(out, [(count, devices)], nodes, per_node)
    for section in ("grpo.async_grpo", "ppo.async_ppo"):
        enabled, age = job.truth(f"{section}.enabled"), job.count(f"{section}.max_trajectory_age_steps")
        if enabled is not None and is_apart:
            out.put("schedule.lag", age.value if age else 1, enabled, age)
        else:
            out.drop(enabled, "a lag needs devices that only generate")


def _engine(out: Translation, job: JobSettings, role: str, is_megatron: bool, tokens: int) -> None:
    precision = job.get(f"{_P}precision")
    if precision is not None and precision.value in ("bfloat16", "float16", "float32"):
        out.put_same("models.all.dtype", precision)
    if is_megatron:
        prefix, sizes = f"{_P}megatron_cfg.", model_parts.SPLITS
        lora = f"{prefix}peft."
        enabled, shards = job.get(f"{prefix}enabled"), job.truth(f"{prefix}optimizer.use_distributed_optimizer")
        if model_parts.has_experts(out):
            out.drop(enabled, model_parts.NO_MEGATRON)
            for own in sizes.values():
                size = job.count(prefix + own)
                out.drop(size if size is not None and size.value > 1 else None, model_parts.NO_SPLIT)
            sizes = {"cp": "context_parallel_size"}
            out.put("models.all.engine", "torch", enabled)
            out.put("models.all.zero", 3, "torch shards parameters")
        else:
            out.put("models.all.engine", "megatron", enabled)
            out.put("models.all.zero", 1, shards or "its distributed optimizer")
    else:
        prefix, sizes = f"{_P}dtensor_cfg.", {"tp": "tensor_parallel_size", "cp": "context_parallel_size"}
        lora = f"{prefix}lora_cfg."
        out.put("models.all.engine", "torch", job.get(f"{prefix}enabled") or "its engine")
        out.put("models.all.zero", 3, "FSDP2 shards parameters")
    for key, own in sizes.items():
        out.put_same(f"models.all.{key}", job.count(prefix + own))
    model_parts.put_expert_ranks(out, job.count(f"{prefix}expert_model_parallel_size", f"{prefix}expert_parallel_size"))
    model_parts.put_megatron_losses(out, job, prefix)
    recomputes = job.truth(f"{prefix}activation_checkpointing")
    parts.put_recomputation(out, recomputes, f"{prefix}activation_checkpointing=false")
    granularity = job.get(f"{prefix}recompute_granularity")
    if granularity is not None and granularity.value != "full" and recomputes is not None:
        out.drop(granularity, "activations of whole layers are computed again")
    reduced = job.get(f"{prefix}distributed_data_parallel_config.grad_reduce_in_fp32")
    if reduced is not None and reduced.value is False:
        out.drop(reduced, "gradients are added up in 32 bits: 2 bytes more of each parameter")
    if job.truth(f"{lora}enabled") is not None:
        of_all = job.truth(f"{lora}match_all_linear")
        targets = None if of_all else job.listed(f"{lora}target_modules")
        excluded = job.listed(f"{lora}exclude_modules")
        model_parts.put_lora(out, role, job.count(f"{lora}dim"), job.number(f"{lora}alpha"), targets, excluded)
        out.drop(of_all, "adapters are on all linear layers", matters=False)
        job.pass_over("kernels", f"{lora}use_triton")
        job.pass_over("what it says is written", f"{lora}enabled")
    packs, dynamic = (f"{_P}{key}." for key in ("sequence_packing", "dynamic_batching"))
    used = next((key for key in (packs, dynamic) if job.truth(f"{key}enabled")), None)
    most = None if used is None else job.count(f"{used}train_mb_tokens")
    parts.put_micro_batch(out, job.count(f"{_P}train_micro_batch_size"), tokens, most)


def _rollout(out: Translation, job: JobSettings, rows: int, tokens: int) -> None:
    out.put("rollout.special_tokens", "skip", "its environments' texts have none")
    if model_parts.put_router_replay(out, job.truth(f"{_P}router_replay.enabled")):
        return
    backend = job.get(f"{_G}backend")
    name = "vllm" if backend is None else str(backend.value)
    out.put("rollout.engine", "transformers" if name == "hf" else "vllm", backend)
    if name not in ("vllm", "hf"):
        out.note(f"{name} generates there ({_G}backend), vLLM here")
    if name not in ("megatron", "hf"):
        prefix = f"{_G}{name if name in ('sglang', 'trtllm') else 'vllm'}_cfg."
        tp, pp = (
            job.count(f"{prefix}tensor_parallel_size", f"{prefix}tp_size"),
            job.count(f"{prefix}pipeline_parallel_size"),
        )
        device_parts.put_vllm(out, tp, pp, job.number(f"{prefix}gpu_memory_utilization"), rows, tokens)
        for key in ("precision", "kv_cache_dtype"):
            setting = job.get(prefix + key)
            if setting is not None and setting.value not in ("auto", "bfloat16", "float16", "float32"):
                out.drop(setting, "weights and caches are of 16 or 32 bits")
