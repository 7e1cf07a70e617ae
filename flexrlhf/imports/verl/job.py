"""Jobs of verl: Hydra's overrides of ``main_ppo`` and of the SFT trainer, on a command line or in a YAML."""

from __future__ import annotations

from typing import Any

from flexrlhf.api import PEERS, UserError
from flexrlhf.imports import device_parts, model_parts, parts, run_parts
from flexrlhf.imports.settings import JobSettings, Setting, is_true
from flexrlhf.imports.translation import Translation
from flexrlhf.imports.verl.algorithm import put_algorithm
from flexrlhf.imports.verl.reasons import WITH_EFFECT, WITHOUT_EFFECT
from flexrlhf.imports.verl.run import put_run, put_scores, put_supervised_columns
from flexrlhf.imports.verl.splits import TYPES, put_engine, put_other_roles, put_saved_activations, put_splits

_A, _R, _M = "actor_rollout_ref.actor.", "actor_rollout_ref.rollout.", "actor_rollout_ref.model."
_SIZES = PEERS["verl"].trainers["ppo"].sizes
DEFAULTS: dict[str, Any] = {
    "data.train_batch_size": _SIZES["prompts_per_step"],
    "data.max_prompt_length": 512,
    "data.max_response_length": 512,
    f"{_A}ppo_mini_batch_size": _SIZES["num_mini_batches"],
    f"{_A}ppo_max_token_len_per_gpu": 16384,
    f"{_R}n": _SIZES["samples_per_prompt"],
    f"{_R}tensor_model_parallel_size": 2,
    f"{_R}gpu_memory_utilization": 0.5,
    f"{_M}enable_gradient_checkpointing": True,
    "critic.ppo_max_token_len_per_gpu": 32768,
    "trainer.nnodes": 1,
    "trainer.n_gpus_per_node": 8,
}
"""Of ``verl/trainer/config/_generated_ppo_trainer.yaml``; the algorithm has its own by ``like: verl``."""
SFT_DEFAULTS: dict[str, Any] = {
    "data.train_batch_size": PEERS["verl"].trainers["sft"].sizes["prompts_per_step"],
    "data.max_length": 1024,
    "data.max_token_len_per_gpu": 8192,
    "data.use_dynamic_bsz": True,
    "model.enable_gradient_checkpointing": True,
}
_OPTIMIZER = {
    "name": ("optim.optimizer",),
    "learning_rate": ("optim.lr",),
    "weight_decay": ("optim.weight_decay",),
    "betas": ("optim.betas",),
    "schedule": ("optim.lr_scheduler_type", "optim.warmup_style", "optim.lr_decay_style"),
    "warmup_steps": ("optim.lr_warmup_steps",),
    "warmup_ratio": ("optim.lr_warmup_steps_ratio",),
    "final_ratio": ("optim.min_lr_ratio",),
    "max_grad_norm": ("grad_clip", "optim.clip_grad"),
}


def translate(out: Translation, job: JobSettings, program: str) -> None:
    """Translate a job. ``program``: the module that it starts, or ``sft``. Raises UserError for one without any
    counterpart."""
    if program == "sft":
        _supervised(out, job)
    else:
        _reinforced(out, job, program)
    name = job.found.get("config-name")
    is_own = name is not None and "trainer" not in str(name.value)
    job.pass_over("the settings that it names are read if they are there", "config-name", "config-path", matters=is_own)
    run_parts.drop_uses_of_rows(out, job)
    plain = {f"{_R}do_sample": True, f"{_R}ignore_eos": False, "algorithm.kl_ctrl.type": "fixed"}
    job.pass_over("as it is here", *(key for key, value in plain.items() if job.value(key) == value))
    if job.value("trainer.v1.trainer_mode") == "sync":
        job.pass_over("its steps are one after the other", "trainer.v1.")
    if job.value("data.gen_batch_size") == (job.value("data.train_batch_size") or 0):
        job.pass_over("prompts of a step", "data.gen_batch_size")
    out.finish(job, WITHOUT_EFFECT, WITH_EFFECT)


def _reinforced(out: Translation, job: JobSettings, program: str) -> None:
    job.defaults = DEFAULTS
    if job.truth("distillation.enabled") is not None:
        raise UserError(f"{out.file}: distillation from a teacher (distillation.enabled) has no counterpart")
    samples = put_algorithm(out, job)
    prompts = _batch(out, job, program)
    put_run(out, job, "trainer.total_epochs=30")
    tokens = sum(parts.put_lengths(out, job.count("data.max_prompt_length"), job.count("data.max_response_length")))
    actor = _model(out, job, f"{_M}path")
    if out.value("algorithm.name") == "ppo":
        parts.put_model(out, "critic", job.named("critic.model.path") or actor)
        parts.put_optimizer(out, job, "critic", _optimizer("critic."), parts.updates_of(out))
    parts.put_data(out, job.listed("data.train_files"), "data/train.parquet")
    run_parts.put_columns(out, {"prompt": job.get("data.prompt_key")})
    parts.put_optimizer(out, job, "actor", _optimizer(_A), parts.updates_of(out))
    leaves_out, cut = job.truth("data.filter_overlong_prompts"), job.get("data.truncation")
    if leaves_out is not None:
        out.put("data.long_prompts", "drop", leaves_out)
    elif cut is not None and cut.value in ("left", "right"):
        out.put("data.long_prompts", f"truncate-{cut.value}", cut)
    put_scores(out, job)
    engine = put_engine(out, job)
    _devices(out, job, program)
    put_splits(out, job, engine, _A)
    _micro_batch(out, job, tokens, "all", _A)
    put_other_roles(out, job, engine)
    if out.value("algorithm.name") == "ppo":
        _critic(out, job, engine, tokens)
    _rollout(out, job, prompts * samples, tokens)


def _optimizer(prefix: str) -> dict[str, tuple[str, ...]]:
    return {key: tuple(prefix + each for each in own) for key, own in _OPTIMIZER.items()}


def _batch(out: Translation, job: JobSettings, program: str) -> int:
    """Write the prompts of a step and its mini-batches; return the prompts."""
    size = job.count(f"{_A}ppo_mini_batch_size")
    out.put_same("algorithm.epochs", job.count(f"{_A}ppo_epochs"))
    batches = job.count("async_training.require_batches")
    if "fully_async" in program and size is not None:
        number = 1 if batches is None else batches.value
        out.put("algorithm.prompts_per_step", size.value * number, size, batches)
        out.put("algorithm.num_mini_batches", number, batches)
        whole = job.count("rollout.total_rollout_steps")
        if whole is not None and "steps" not in out.lines:
            out.put("steps", max(1, whole.value // (size.value * number)), whole, "over the prompts of a step")
        job.pass_over(
            "a trainer without steps of its own takes mini-batches", "data.train_batch_size", "data.gen_batch_size"
        )
        return int(size.value * number)
    prompts = job.count("data.train_batch_size")
    if prompts is None:
        return int(DEFAULTS["data.train_batch_size"])
    out.put_same("algorithm.prompts_per_step", prompts)
    parts.mini_batches(out, prompts, size)
    return int(prompts.value)


def _model(out: Translation, job: JobSettings, *keys: str) -> Setting:
    setting = parts.put_needed_model(out, job, "actor", *keys)
    trust = job.truth(f"{_M}trust_remote_code", "model.trust_remote_code")
    if trust is not None and "models.actor.path" in out.lines:
        out.put("models.actor.trust_remote_code", True, trust)
    adapters = job.named(f"{_M}lora_adapter_path") or job.named("model.lora_adapter_path")
    if adapters is not None:
        _stored_adapters(out, setting, adapters)
    return setting


def _stored_adapters(out: Translation, base: Setting, adapters: Setting) -> None:
    """Write the adapters that training goes on with."""
    sizes, path = out.value("models.actor.init"), str(adapters.value)
    if sizes is None:
        out.put("models.actor.path", path, adapters)
        out.put("models.actor.lora.new", False, adapters)
    else:
        out.put("models.actor.init", sizes, base, "by its sizes", f"to train the adapters: path: {path}")
        out.drop(adapters, "models.actor.path has them", matters=False)
    out.note(
        f"training goes on with the adapters in {path}, whose adapter_config.json names their base model; the "
        f"reference is the policy with them, verl's the base model: models.ref.path: {base.value}"
    )


def _critic(out: Translation, job: JobSettings, engine: str, tokens: int) -> None:
    rank, alpha = job.count("critic.model.lora_rank"), job.number("critic.model.lora_alpha")
    targets, excluded = (job.listed(f"critic.model.{key}_modules") for key in ("target", "exclude"))
    model_parts.put_lora(out, "critic", rank, alpha, targets, excluded)
    _micro_batch(out, job, tokens, "critic", "critic.")
    of_actor = {
        "ppo_epochs": out.value("algorithm.epochs") or 1,
        "ppo_mini_batch_size": job.value(f"{_A}ppo_mini_batch_size"),
    }
    same = [f"critic.{key}" for key, each in of_actor.items() if job.value(f"critic.{key}") == each]
    job.pass_over("as of the actor", *same)
    recomputes = None if engine == "megatron" else job.get("critic.model.enable_gradient_checkpointing")
    if recomputes is not None and is_true(recomputes.value) != out.value("models.all.activation_checkpointing"):
        out.put("models.critic.activation_checkpointing", is_true(recomputes.value), recomputes)
    job.pass_over("as of the actor", "critic.model.enable_gradient_checkpointing")
    if engine != "megatron":
        put_saved_activations(out, job, "critic", "critic.model.")


def _micro_batch(out: Translation, job: JobSettings, tokens: int, role: str, prefix: str) -> None:
    """Write the micro-batches of a role. The critic's are dynamic where the actor's are."""
    most, rows = job.count(f"{prefix}ppo_max_token_len_per_gpu"), job.count(f"{prefix}ppo_micro_batch_size_per_gpu")
    is_dynamic = job.truth(f"{prefix}use_dynamic_bsz", f"{_A}use_dynamic_bsz") is not None
    parts.put_micro_batch(out, rows, tokens, most if is_dynamic else None, role)
    job.pass_over("micro-batches are of tokens", f"{prefix}use_dynamic_bsz")


def _devices(out: Translation, job: JobSettings, program: str) -> None:
    """Write the device_parts.machines, and which devices train and generate."""
    sources = nodes, per_node = job.count("trainer.nnodes"), job.count("trainer.n_gpus_per_node")
    training = device_parts.machines(out, job, nodes, per_node)
    more, others = (job.count(f"rollout.{key}", f"{_R}{key}") for key in ("nnodes", "n_gpus_per_node"))
    threshold = job.number("async_training.staleness_threshold")
    is_async = "off_policy" in program or "fully_async" in program
    is_hybrid = job.truth("actor_rollout_ref.hybrid_engine") is not None
    if others is None or not is_async or is_hybrid:
        device_parts.put_cluster(out, [training], *sources)
        out.put("placement", None, "every model on all devices: verl's hybrid engine")
    else:
        device_parts.put_apart(
            out, training, (more.value if more else training[0], others.value), *sources, more, others
        )
        if "off_policy" in program or threshold is not None:
            out.put("schedule.lag", 1, threshold or "one step off-policy")
    if is_async and not is_hybrid:
        out.put_same("sync.every", job.count("async_training.trigger_parameter_sync_step"))


def _rollout(out: Translation, job: JobSettings, rows: int, tokens: int) -> None:
    name = job.get(f"{_R}name")
    out.put("rollout.special_tokens", "skip", "its reward managers' texts have none")
    if model_parts.put_router_replay(out, _router_replay(out, job)):
        of_vllm = (
            f"{_R}{each}" for each in (*model_parts.SPLITS.values(), "gpu_memory_utilization", "expert_parallel")
        )
        job.pass_over("of vLLM, where transformers generates", *of_vllm)
        return
    if name is not None and name.value == "hf":
        out.put("rollout.engine", "transformers", name)
        return
    out.put("rollout.engine", "vllm", name)
    if name is not None and name.value != "vllm":
        out.note(f"{name.value} generates there ({name.key}), vLLM here")
    kind = job.get(f"{_R}dtype")
    if kind is not None and TYPES.get(str(kind.value)) != out.value("models.all.dtype") and str(kind.value) in TYPES:
        out.put("rollout.dtype", TYPES[str(kind.value)], kind)
    tp, pp = (job.count(f"{_R}{own}") for own in model_parts.SPLITS.values())
    device_parts.put_vllm(out, tp, pp, job.number(f"{_R}gpu_memory_utilization"), rows, tokens)
    bypass = job.truth("algorithm.rollout_correction.bypass_mode")
    if bypass is not None and "algorithm.importance.level" not in out.lines:
        out.put("rollout.logprobs", "reuse", bypass)
    else:
        out.drop(bypass, "importance weights compare with log-probs of their own pass")


def _router_replay(out: Translation, job: JobSettings) -> Setting | None:
    """Return the setting by which training takes the experts of generation (R3), if there is one."""
    modes = [job.get(f"{_A}{section}router_replay.mode") for section in ("", "megatron.", "veomni.", "fsdp_config.")]
    mode = next(filter(None, modes), None)
    if mode is not None and mode.value == "R2":
        out.drop(mode, "training takes the experts of generation (R3), of the pass of log-probs (R2) it does not")
        return None
    recorded = job.truth(f"{_R}enable_rollout_routing_replay")
    job.pass_over("router_replay.mode has it", f"{_R}enable_rollout_routing_replay")
    return recorded if mode is None or mode.value != "R3" else mode


def _supervised(out: Translation, job: JobSettings) -> None:
    job.defaults = SFT_DEFAULTS
    parts.put_name(out, "verl", "sft", "the SFT trainer")
    put_run(out, job, "trainer.total_epochs=4")
    out.put_same("algorithm.prompts_per_step", job.count("data.train_batch_size"))
    _model(out, job, "model.partial_pretrain", "model.path")
    tokens = parts.split_length(out, job.count("data.max_length"))
    parts.put_data(out, job.listed("data.train_files"), "data/train.parquet")
    put_supervised_columns(out, job)
    parts.put_optimizer(out, job, "actor", _OPTIMIZER)
    sources = job.count("--nnodes", "trainer.nnodes"), job.count("--nproc_per_node", "trainer.n_gpus_per_node")
    device_parts.put_cluster(out, [device_parts.machines(out, job, *sources)], *sources)
    put_splits(out, job, put_engine(out, job), "engine.")
    rows, most = job.count("data.micro_batch_size_per_gpu"), job.count("data.max_token_len_per_gpu")
    most = most if job.truth("data.use_dynamic_bsz") else None
    parts.put_micro_batch(out, rows, tokens, most)
    out.put("placement", None, "the model on all devices")
    job.pass_over("micro-batches are of tokens", "data.use_dynamic_bsz")
