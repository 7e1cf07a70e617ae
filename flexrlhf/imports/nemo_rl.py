"""Jobs of NeMo-RL: YAML files with all settings, each over the files that its ``defaults`` name."""

from __future__ import annotations

import re
from typing import Any

from flexrlhf.errors import UserError
from flexrlhf.imports.parts import (
    mini_batches,
    num_devices,
    put_apart,
    put_cache,
    put_cluster,
    put_data,
    put_lengths,
    put_lora,
    put_model,
    put_optimizer,
    put_recomputation,
    ranks_of,
    split_length,
)
from flexrlhf.imports.settings import JobSettings, Setting
from flexrlhf.imports.translation import DOT, Reason, Translation

_P, _G = "policy.", "policy.generation."
_KINDS = {"grpo": "grpo", "ppo": "ppo", "sft": "sft", "dpo": "dpo", "rm": "reward"}
REASONS = (
    Reason(
        r"checkpointing\..*|logger\..*|.*\.val_\w+|.*max_val_samples|.*val_at\w+|data\.validation.*|.*stop_at_validation\w*|eval\..*",
        "checkpoints, logs and validation are of a run",
        False,
    ),
    Reason(
        r"data\..*|policy\.tokenizer\..*|env\..*|\w+\.max_num_epochs|.*(chat_template|prompt_file)\w*|.*data_plane.*",
        "how rows are read and scored: data, reward",
        False,
    ),
    Reason(
        r"policy\.(dtensor_cfg\.(_v2|env_vars.*|automodel_kwargs.*|custom_parallel_plan|clear_cache\w*|defer\w*)|logprob_\w+|generation_batch_size|"
        r"make_sequence_length\w*|(dynamic_batching|sequence_packing)\..*|refit_\w+|offload_\w+|hf_config_overrides\.rope.*|"
        r"megatron_cfg\.(env_vars.*|checkpoint.*|empty_unused\w*|\w*fusion\w*|pipeline_dtype|converter_type|distributed_data\w*.*|"
        r"scheduler\.(start|end|weight)\w*|optimizer\.(bf16|fp16|params_dtype|use_\w+|overlap\w*|optimizer|clip_grad|sgd\w*)|use_gloo\w*|"
        r"cuda_graph\w*|recompute_granularity|attention_backend|apply_rope\w*|gradient_acc\w*|fused_linear\w*|use_fused\w*|defer\w*|sequence_parallel|enabled|"
        r"bias_\w+|freeze\w*|moe_permute\w*|moe_router_bias\w*|moe_router_load\w*|moe_router_dtype|moe_token_disp\w*|moe_enable\w*|moe_shared\w*|moe_per_layer\w*|mtp_loss\w*))",
        "kernels and loading, which follow from the engine here",
        False,
    ),
    Reason(
        r"policy\.dtensor_cfg\.sequence_parallel|.*worker_extension\w*|.*port_range\w*|.*_worker_cls",
        "follows from the engine here",
        False,
    ),
    Reason(
        r"policy\.generation\.(vllm_cfg|vllm_kwargs|sglang_cfg|sglang_kwargs|trtllm_cfg|mcore\w*|stop_token_ids|refit\w*|"
        r"real_quant\w*|val_\w+|model_name|pad_token_id|port\w*|colocated|colocate\w*|async_engine|max_new_tokens|top_\w)\b.*",
        "limits of the scheduler of vLLM and others, which rollout.config takes by vLLM's names",
        False,
    ),
    Reason(r".*context_parallel_size", "a sequence is on one device, or on tensor-parallel ranks"),
    Reason(r".*expert\w*_parallel_size|.*\bmoe_\w+", "experts are not placed by themselves"),
    Reason(
        r".*num_layers_in_\w+|.*virtual_pipeline\w*|.*pipeline_model_parallel_layout", "stages have equally many layers"
    ),
    Reason(
        r".*cpu_offload|.*optimizer_offload\w*|.*offload\w*",
        "models go to host memory between their calls where a plan needs it",
        False,
    ),
    Reason(r".*fp8.*|.*quant.*|.*kv_cache_dtype|.*precision\w*", "weights and caches are of 16 or 32 bits"),
    Reason(r".*max_rollout_turns|env\.nemo_gym.*|.*nemo_gym.*|.*gym.*", "responses are of one turn"),
    Reason(
        r".*reward_scaling\..*|.*reward_penalt.*|.*advantage_clip\w*|.*seq_logprob_error\w*|.*overlong_filtering|.*positive_example\w*",
        "scores and advantages are changed in other ways here: docs/algorithms.md",
    ),
    Reason(r".*mtp\w*.*|draft\..*|policy\.draft\..*|.*speculative.*", "tokens are generated one by one"),
    Reason(r"cluster\..*", "of the launcher", False),
    Reason(
        r".*async_\w+\.(max_generation\w*|warmup\w*|drop\w*)|.*skip_reference\w*|.*trtllm_kwargs.*|.*dynamo.*",
        "of its server",
        False,
    ),
    Reason(r".*async_\w+\..*", "weights change between steps alone, and a lag is in whole steps"),
    Reason(r"value_loss_fn\.scale", "the critic has an optimizer of its own, in which AdamW cancels a factor", False),
    Reason(r".*profil.*|.*nsys.*", "profiling", False),
)


def translate(out: Translation, job: JobSettings, device_class: tuple[str, str] | None) -> None:
    """Translate a job. Raises UserError for one without any counterpart."""
    if any(job.has(f"{key}.enabled") and job.truth(f"{key}.enabled") for key in ("on_policy_distillation",)) or any(
        key.startswith(("distillation.", "teacher.")) for key in job.found
    ):
        raise UserError(f"{out.file}: distillation from a teacher has no counterpart")
    section = next((key for key in _KINDS if any(each.startswith(f"{key}.") for each in job.found)), None)
    if section is None:
        raise UserError(f"{out.file}: none of the trainers {', '.join(_KINDS)} of NeMo-RL")
    name = _algorithm(out, job, section)
    role = "reward" if name == "reward" else "actor"
    steps = job.count(f"{section}.max_num_steps")
    if steps is not None and steps.value < 100_000:
        out.put("steps", steps.value, steps)
    rows = _batch(out, job, section, name)
    on_policy = job.truth("loss_fn.force_on_policy_ratio")
    if (out.value("algorithm.num_mini_batches") or 1) > 1:
        out.drop(on_policy, "the ratio is to the policy that the step starts from")
    seed = job.count(f"{section}.seed")
    if seed is not None:
        out.put("seed", seed.value, seed)
    model = job.named(f"{_P}model_name")
    if model is None:
        raise UserError(f"{out.file}: {_P}model_name: a job needs a model, and the file has none")
    put_model(out, role, model)
    if name == "ppo":
        put_model(out, "critic", job.named("value.model_name") or model)
        for key in [key for key in job.found if key.startswith("value.")]:
            job.read.add(key)
        out.note("the critic is trained as the actor is: settings in value. are not read, but for its model")
    tokens = _lengths(out, job, name)
    put_data(
        out,
        job.get("data.train.data_path", "data.train_data_path", "data.train.dataset_name", "data.dataset_name"),
        "data/train.jsonl",
    )
    is_megatron = job.truth(f"{_P}megatron_cfg.enabled") is not None
    _optimizer(out, job, role, is_megatron)
    if name in ("grpo", "gspo", "reinforce++", "ppo"):
        _scores(out, job)
    _devices(out, job, device_class)
    _engine(out, job, role, is_megatron, tokens)
    if name in ("grpo", "gspo", "reinforce++", "ppo"):
        _rollout(out, job, rows, tokens)
    skipped = f"{_P}{'dtensor_cfg' if is_megatron else 'megatron_cfg'}."
    job.read |= {key for key in job.found if key.startswith(skipped)}
    out.finish(job, REASONS)


def _algorithm(out: Translation, job: JobSettings, section: str) -> str:
    estimator = job.get(f"{section}.adv_estimator.name")
    name = _KINDS[section]
    if section in ("sft", "dpo", "rm"):
        out.put("algorithm.name", name, f"{section}:")
        beta = job.number("dpo.reference_policy_kl_penalty")
        if beta is not None:
            out.put("algorithm.beta", float(beta.value), beta)
        if (average := job.truth("dpo.preference_average_log_probs")) is not None:
            out.put("algorithm.length_normalised", True, average)
        job.read |= {"dpo.preference_loss_weight", "dpo.sft_average_log_probs"}
        weight = job.number("dpo.sft_loss_weight")
        out.drop(weight, "a loss of chosen responses in addition is not here")
        return name
    if job.truth("loss_fn.sequence_level_importance_ratios") is not None:
        name = "gspo"
    elif estimator is not None and "reinforce" in str(estimator.value):
        name = "reinforce++"
    elif estimator is not None and estimator.value not in ("grpo", "gae"):
        out.drop(estimator, "these advantages are not here; grpo has the same models and passes")
    out.put(
        "algorithm.name",
        name,
        estimator or f"{section}:",
        job.get("loss_fn.sequence_level_importance_ratios") if name == "gspo" else None,
    )
    if name == "reinforce++" and job.truth(f"{section}.adv_estimator.minus_baseline") is not None:
        out.put("algorithm.baseline", "group", job.get(f"{section}.adv_estimator.minus_baseline"))
    others = job.truth(f"{section}.adv_estimator.use_leave_one_out_baseline", f"{section}.use_leave_one_out_baseline")
    scaled = job.get(f"{section}.adv_estimator.normalize_rewards", f"{section}.normalize_rewards")
    if name in ("grpo", "gspo"):
        if others is not None:
            out.put("algorithm.baseline", "others", others)
        if scaled is not None:
            out.put("algorithm.scale", "group" if scaled.value else "none", scaled)
    if name == "ppo":
        for key, own in (("gae_lambda", "gae_lambda"), ("gamma", "gae_gamma")):
            setting = job.number(f"ppo.adv_estimator.{own}")
            if setting is not None:
                out.put(f"algorithm.{key}", float(setting.value), setting)
        clip = job.number("value_loss_fn.cliprange")
        if clip is not None:
            out.put("algorithm.value_clip", float(clip.value), clip)
        out.put(
            "algorithm.whiten",
            "batch" if job.truth("ppo.adv_estimator.normalize_advantages") else "none",
            job.get("ppo.adv_estimator.normalize_advantages"),
        )
    _loss(out, job, name)
    _sampling(out, job, section, name)
    job.read |= {f"{section}.{key}" for key in ("normalize_rewards", "use_leave_one_out_baseline")}
    job.read |= {
        f"{section}.adv_estimator.{key}"
        for key in ("normalize_rewards", "use_leave_one_out_baseline", "minus_baseline")
    }
    return name


def _loss(out: Translation, job: JobSettings, name: str) -> None:
    penalty = job.number("loss_fn.reference_policy_kl_penalty")
    estimator, limit, clamp = (
        job.get(f"loss_fn.{key}")
        for key in ("reference_policy_kl_type", "kl_output_clamp_value", "kl_input_clamp_value")
    )
    if penalty is None:
        out.put("algorithm.kl", None, job.get("loss_fn.reference_policy_kl_penalty") or "no penalty")
    else:
        in_reward = job.truth("loss_fn.use_kl_in_reward")
        out.put("algorithm.kl.place", "reward" if in_reward else "loss", in_reward or "use_kl_in_reward: false")
        out.put("algorithm.kl.coefficient", float(penalty.value), penalty)
        if estimator is not None:
            out.put("algorithm.kl.estimator", estimator.value, estimator)
        if limit is not None:
            out.put("algorithm.kl.value_clamp", float(limit.value), limit)
        if clamp is not None:
            out.put("algorithm.kl.clamp", float(clamp.value), clamp)
    for key, own in (("clip_low", "ratio_clip_min"), ("clip_high", "ratio_clip_max"), ("dual_clip", "ratio_clip_c")):
        setting = job.number(f"loss_fn.{own}")
        if setting is not None and not (key == "clip_low" and setting.value >= 1):
            out.put(f"algorithm.{key}", float(setting.value), setting)
        else:
            out.drop(setting, "a lower bound of the ratio is above 0: clip_low below 1")
    tokens = job.get("loss_fn.token_level_loss")
    if tokens is not None:
        out.put("algorithm.loss_aggregation", "token-mean" if tokens.value else "seq-mean-token-mean", tokens)
    if (cispo := job.truth("loss_fn.use_cispo")) is not None:
        out.put("algorithm.surrogate", "cispo", cispo)
        out.put("algorithm.dual_clip", None, cispo)
    for key in ("disable_ppo_ratio", "use_on_policy_kl_approximation"):
        out.drop(job.truth(f"loss_fn.{key}"), "the ratio is to the policy that the step starts from")
    corrects = job.truth("loss_fn.use_importance_sampling_correction")
    kind, cap, floor = (
        job.get(f"loss_fn.truncated_importance_sampling_{key}") for key in ("type", "ratio", "ratio_min")
    )
    if corrects is not None:
        out.put("algorithm.importance.level", "token", corrects)
        if cap is not None:
            out.put("algorithm.importance.cap", max(1.0, float(cap.value)), cap)
        if kind is not None and kind.value == "icepop":
            out.put("algorithm.importance.outside", "mask", kind)
            if floor is not None and 0 < floor.value <= 1:
                out.put("algorithm.importance.floor", float(floor.value), floor)
        elif kind is not None and kind.value != "tis":
            out.drop(kind, "weights outside of bounds are truncated or masked")


def _sampling(out: Translation, job: JobSettings, section: str, name: str) -> None:
    temperature = job.number(f"{_G}temperature")
    if temperature is not None:
        out.put("algorithm.temperature", float(temperature.value), temperature)
    for key, plain in (("top_p", 1), ("top_k", -1)):
        setting = job.get(f"{_G}{key}")
        if setting is not None and setting.value != plain:
            out.drop(setting, "a cut distribution needs importance weights here: algorithm.importance")
    filters, rounds = (
        job.truth(f"{section}.use_dynamic_sampling"),
        job.count(f"{section}.dynamic_sampling_max_gen_batches"),
    )
    if filters is not None and name in ("grpo", "gspo"):
        out.put("algorithm.dynamic_sampling.rounds", max(2, rounds.value if rounds else 2), filters, rounds)
    job.get(f"{section}.batch_multiplier")
    if job.truth(f"{section}.reward_shaping.enabled") is not None:
        length, penalty = (
            job.count(f"{section}.reward_shaping.overlong_buffer_length"),
            job.number(f"{section}.reward_shaping.overlong_buffer_penalty"),
        )
        job.get(f"{section}.reward_shaping.max_response_length")
        if length is not None:
            out.put("algorithm.overlong.buffer_tokens", length.value, length)
            if penalty is not None:
                out.put("algorithm.overlong.penalty", float(penalty.value), penalty)


def _batch(out: Translation, job: JobSettings, section: str, name: str) -> int:
    """Write the batch; return the responses of a step."""
    size = job.count(f"{_P}train_global_batch_size")
    if name in ("sft", "dpo", "reward"):
        if size is not None:
            out.put("algorithm.prompts_per_step", size.value, size)
        return 0
    prompts, samples = job.count(f"{section}.num_prompts_per_step"), job.count(f"{section}.num_generations_per_prompt")
    number = samples.value if samples else 1
    if samples is not None and (number > 1 or name in ("ppo", "reinforce++")):
        out.put("algorithm.samples_per_prompt", number, samples)
    epochs, frozen = job.count(f"{section}.ppo_epochs"), job.count(f"{section}.policy_training_start_step")
    if epochs is not None:
        out.put("algorithm.epochs", epochs.value, epochs)
    if frozen is not None:
        out.put("algorithm.freeze_actor_steps", frozen.value, frozen)
    if prompts is None:
        return 0
    out.put("algorithm.prompts_per_step", prompts.value, prompts)
    mini_batches(out, prompts, size, number)
    return int(prompts.value * number)


def _lengths(out: Translation, job: JobSettings, name: str) -> int:
    whole = job.count(f"{_P}max_total_sequence_length")
    if name in ("sft", "dpo", "reward"):
        return split_length(out, whole)
    response, prompt = job.count(f"{_G}max_new_tokens"), job.count("data.max_input_seq_length")
    if whole is None or response is None or response.value >= whole.value:
        return split_length(out, whole or response, 8)
    if prompt is None or prompt.value + response.value > whole.value:
        prompt = Setting(whole.key, whole.value - response.value)
    return sum(put_lengths(out, prompt, response))


def _optimizer(out: Translation, job: JobSettings, role: str, is_megatron: bool) -> None:
    prefix = f"{_P}megatron_cfg.optimizer." if is_megatron else f"{_P}optimizer.kwargs."
    betas = ("adam_beta1", "adam_beta2") if is_megatron else ("", "")
    keys = {
        "learning_rate": (f"{prefix}lr",),
        "weight_decay": (f"{prefix}weight_decay",),
        "eps": (f"{prefix}adam_eps", f"{prefix}eps"),
    }
    keys |= {"betas": (f"{prefix}betas",), "max_grad_norm": (f"{_P}max_grad_norm",)}
    keys |= {"beta1": (prefix + betas[0],), "beta2": (prefix + betas[1],)}
    if is_megatron:
        keys |= {
            "schedule": (f"{_P}megatron_cfg.scheduler.lr_decay_style",),
            "warmup_steps": (f"{_P}megatron_cfg.scheduler.lr_warmup_iters",),
        }
        job.read |= {
            f"{_P}megatron_cfg.scheduler.lr_decay_iters",
            f"{_P}megatron_cfg.scheduler.lr_warmup_init",
            f"{prefix}min_lr",
        }
    put_optimizer(out, job, role, keys)
    job.read |= {key for key in job.found if key.startswith((f"{_P}optimizer.", f"{_P}scheduler"))}
    scheduler = job.found.get(f"{_P}scheduler")
    if scheduler is None or is_megatron or not isinstance(scheduler.value, list):
        return
    for stage in scheduler.value:
        kwargs: dict[str, Any] = stage.get("kwargs", {}) if isinstance(stage, dict) else {}
        name = str(stage.get("name", "")) if isinstance(stage, dict) else ""
        if name.endswith("LinearLR") and isinstance(kwargs.get("total_iters"), int):
            out.put(f"models.{role}.optimizer.warmup_steps", kwargs["total_iters"], f"{scheduler.key}: LinearLR")
        elif "Cosine" in name:
            out.put(f"models.{role}.optimizer.schedule", "cosine", f"{scheduler.key}: {name.rpartition('.')[2]}")


def _scores(out: Translation, job: JobSettings) -> None:
    path = next((key for key in job.found if re.fullmatch(r"env\.reward_model\w*\.model_name", key)), None)
    setting = None if path is None else job.named(path)
    environment = job.get("data.default.env_name", "data.env_name", "data.train.env_name")
    if setting is not None and environment is not None and "reward" in str(environment.value):
        put_model(out, "reward", setting)
        return
    out.put("reward", {"rule": "math"}, environment or "its environment")
    if environment is not None and "math" not in str(environment.value):
        out.drop(environment, "scores of this environment are a function here; a rule stands for them")


def _devices(out: Translation, job: JobSettings, device_class: tuple[str, str] | None) -> None:
    nodes, per_node = job.count("cluster.num_nodes"), job.count("cluster.gpus_per_node")
    count, devices = nodes.value if nodes else 1, per_node.value if per_node else 8
    prefix = f"{_G}colocated."
    together = job.get(f"{prefix}enabled")
    apart = together is not None and together.value is False
    more, others = job.count(f"{prefix}resources.num_nodes"), job.count(f"{prefix}resources.gpus_per_node")
    if not apart:
        put_cluster(out, count, devices, device_class, nodes, per_node)
        out.put("placement", None, together or "no policy.generation.colocated", "every model on all devices")
    elif count > 1 and more is not None and more.value < count:
        put_apart(
            out, (count - more.value, devices), (more.value, devices), device_class, nodes, per_node, more, others
        )
    elif others is not None and others.value < devices:
        put_apart(
            out, (count, devices - others.value), (count, others.value), device_class, nodes, per_node, more, others
        )
    else:
        out.drop(together, "the file has no devices for generation: here every model is on all of them")
        put_cluster(out, count, devices, device_class, nodes, per_node)
    for section in ("grpo.async_grpo", "ppo.async_ppo"):
        enabled, age = job.truth(f"{section}.enabled"), job.count(f"{section}.max_trajectory_age_steps")
        if enabled is not None and apart:
            out.put("schedule.lag", age.value if age else 1, enabled, age)
        else:
            out.drop(enabled, "a lag needs devices that only generate")


def _engine(out: Translation, job: JobSettings, role: str, is_megatron: bool, tokens: int) -> None:
    precision = job.get(f"{_P}precision")
    if precision is not None and precision.value in ("bfloat16", "float16", "float32"):
        out.put("models.all.dtype", precision.value, precision)
    if is_megatron:
        out.put("models.all.engine", "megatron", job.get(f"{_P}megatron_cfg.enabled"))
        out.put(
            "models.all.zero",
            1,
            job.truth(f"{_P}megatron_cfg.optimizer.use_distributed_optimizer") or "its distributed optimizer",
        )
        prefix, sizes = f"{_P}megatron_cfg.", {"tp": "tensor_model_parallel_size", "pp": "pipeline_model_parallel_size"}
        lora = f"{_P}megatron_cfg.peft."
    else:
        out.put("models.all.engine", "torch", job.get(f"{_P}dtensor_cfg.enabled") or "its engine")
        out.put("models.all.zero", 3, "FSDP2 shards parameters")
        prefix, sizes, lora = f"{_P}dtensor_cfg.", {"tp": "tensor_parallel_size"}, f"{_P}dtensor_cfg.lora_cfg."
    for key, own in sizes.items():
        size = job.count(prefix + own)
        if size is not None:
            out.put(f"models.all.{key}", size.value, size)
    for key in (
        "context_parallel_size",
        "expert_parallel_size",
        "expert_model_parallel_size",
        "expert_tensor_parallel_size",
    ):
        size = job.count(prefix + key)
        if size is not None and size.value > 1:
            job.read.discard(prefix + key)
    recomputes = f"{prefix}activation_checkpointing"
    put_recomputation(out, job.truth(recomputes), f"{recomputes}=false")
    granularity = job.get(f"{prefix}recompute_granularity")
    if granularity is not None and granularity.value != "full" and job.truth(recomputes) is not None:
        out.drop(granularity, "activations of whole layers are computed again")
    adapters = job.truth(f"{lora}enabled")
    if adapters is not None:
        put_lora(out, role, job.count(f"{lora}dim"), job.number(f"{lora}alpha"), None)
        if is_megatron:
            del out.lines[f"models.{role}.lora.rank"], out.lines[f"models.{role}.lora.alpha"]
            out.drop(adapters, "Megatron trains no adapters here; without them all weights are trained")
        job.read |= {key for key in job.found if key.startswith(lora)}
    rows = job.count(f"{_P}train_micro_batch_size")
    packs = job.truth(f"{_P}sequence_packing.enabled")
    dynamic = job.truth(f"{_P}dynamic_batching.enabled")
    most = job.count(f"{_P}sequence_packing.train_mb_tokens" if packs else f"{_P}dynamic_batching.train_mb_tokens")
    if (packs or dynamic) and most is not None:
        out.put("models.all.micro_batch_tokens", most.value, most)
    elif rows is not None:
        pair = 2 if out.value("algorithm.name") in ("dpo", "reward") else 1
        out.put("models.all.micro_batch_tokens", rows.value * tokens * pair, rows, f"times {tokens * pair} tokens")


def _rollout(out: Translation, job: JobSettings, rows: int, tokens: int) -> None:
    backend = job.get(f"{_G}backend")
    name = "vllm" if backend is None else str(backend.value)
    if name in ("hf", "megatron"):
        engine = "torch" if name == "megatron" else "transformers"
        if name == "megatron":
            out.note(f"{name} generates there ({backend.key if backend else ''}), vLLM here")
            engine = "vllm"
        out.put("rollout.engine", engine, backend)
        return
    out.put("rollout.engine", "vllm", backend)
    section = {"vllm": "vllm_cfg", "sglang": "sglang_cfg", "trtllm": "trtllm_cfg"}.get(name, "vllm_cfg")
    if name != "vllm":
        out.note(f"{name} generates there ({_G}backend), vLLM here")
    tp = job.count(f"{_G}{section}.tensor_parallel_size", f"{_G}{section}.tp_size")
    pp, share = job.count(f"{_G}{section}.pipeline_parallel_size"), job.number(f"{_G}{section}.gpu_memory_utilization")
    size = tp.value if tp else 1
    generating = ranks_of(out.value(f"placement.actor{DOT}rollout.ranks"))
    devices = len(generating) if generating else num_devices(out)
    if size > 1:
        out.put("rollout.tp", size, tp)
    if pp is not None and pp.value > 1:
        out.put("rollout.pp", pp.value, pp)
        size *= pp.value
    put_cache(out, share, size, -(-rows * size // max(1, devices)), tokens)
