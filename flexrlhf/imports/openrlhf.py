"""Jobs of OpenRLHF: command lines of ``openrlhf.cli.train_*``, with the names of options of 0.11 and earlier."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from flexrlhf.config.presets.filling import PEERS
from flexrlhf.errors import UserError
from flexrlhf.imports.launches import Launch, flags
from flexrlhf.imports.parts import (
    mini_batches,
    put_cache,
    put_cluster,
    put_data,
    put_gpus,
    put_lora,
    put_model,
    put_optimizer,
    put_recomputation,
    put_scored_by_code,
    split_length,
)
from flexrlhf.imports.settings import JobSettings, Setting, read_scalar
from flexrlhf.imports.translation import DOT, Reason, Translation

OLD_NAMES: Mapping[str, str] = {
    "pretrain": "actor.model_name_or_path",
    "reward_pretrain": "reward.model_name_or_path",
    "critic_pretrain": "critic.model_name_or_path",
    "remote_rm_url": "reward.remote_url",
    "actor_num_nodes": "actor.num_nodes",
    "actor_num_gpus_per_node": "actor.num_gpus_per_node",
    "ref_num_nodes": "ref.num_nodes",
    "ref_num_gpus_per_node": "ref.num_gpus_per_node",
    "reward_num_nodes": "reward.num_nodes",
    "reward_num_gpus_per_node": "reward.num_gpus_per_node",
    "critic_num_nodes": "critic.num_nodes",
    "critic_num_gpus_per_node": "critic.num_gpus_per_node",
    "vllm_num_engines": "vllm.num_engines",
    "vllm_tensor_parallel_size": "vllm.tensor_parallel_size",
    "vllm_gpu_memory_utilization": "vllm.gpu_memory_utilization",
    "colocate_all_models": "train.colocate_all",
    "colocate_actor_ref": "train.colocate_actor_ref",
    "colocate_critic_reward": "train.colocate_critic_reward",
    "async_train": "train.async_enable",
    "micro_train_batch_size": "train.micro_batch_size",
    "train_batch_size": "train.batch_size",
    "micro_rollout_batch_size": "rollout.micro_batch_size",
    "rollout_batch_size": "rollout.batch_size",
    "n_samples_per_prompt": "rollout.n_samples_per_prompt",
    "max_epochs": "train.max_epochs",
    "num_episodes": "train.num_episodes",
    "prompt_max_len": "data.prompt_max_len",
    "generate_max_len": "rollout.max_new_tokens",
    "max_len": "data.max_len",
    "max_samples": "data.max_samples",
    "zero_stage": "ds.zero_stage",
    "bf16": "ds.param_dtype",
    "adam_offload": "ds.adam_offload",
    "gradient_checkpointing": "actor.gradient_checkpointing_enable",
    "actor_learning_rate": "actor.adam.lr",
    "critic_learning_rate": "critic.adam.lr",
    "learning_rate": "adam.lr",
    "init_kl_coef": "algo.kl.init_coef",
    "kl_target": "algo.kl.target",
    "kl_estimator": "algo.kl.estimator",
    "use_kl_loss": "algo.kl.use_loss",
    "advantage_estimator": "algo.advantage.estimator",
    "gamma": "algo.advantage.gamma",
    "lambd": "algo.advantage.lambd",
    "eps_clip": "actor.eps_clip",
    "eps_clip_low_high": "actor.eps_clip_low_high",
    "value_clip": "critic.value_clip",
    "temperature": "rollout.temperature",
    "top_p": "rollout.top_p",
    "dynamic_filtering": "algo.dynamic_filtering_enable",
    "prompt_data": "data.prompt_dataset",
    "dataset": "data.dataset",
    "beta": "model.beta",
    "lora_rank": "ds.lora.rank",
    "lora_alpha": "ds.lora.alpha",
    "target_modules": "ds.lora.target_modules",
    "freezing_actor_steps": "critic.freezing_steps",
    "normalize_reward": "reward.normalize_enable",
    "use_dynamic_batch": "train.dynamic_batch_enable",
    "train_max_tokens_per_gpu": "train.max_tokens_per_gpu",
    "agent_func_path": "train.agent_func_path",
    "overlong_buffer_len": "reward.overlong_buffer_len",
    "overlong_penalty_factor": "reward.overlong_penalty_factor",
    "seed": "train.seed",
    "l2": "adam.weight_decay",
    "lr_scheduler": "lr_scheduler",
    "ring_attn_size": "ds.ring_attn_size",
    "ds_tensor_parallel_size": "ds.tensor_parallel_size",
    "save_path": "ckpt.output_dir",
    "ckpt_path": "ckpt.path",
    "save_steps": "ckpt.save_steps",
    "logging_steps": "logger.logging_steps",
    "eval_steps": "eval.steps",
    "input_key": "data.input_key",
    "output_key": "data.output_key",
    "chosen_key": "data.chosen_key",
    "rejected_key": "data.rejected_key",
    "label_key": "data.label_key",
    "apply_chat_template": "data.apply_chat_template",
    "packing_samples": "ds.packing_samples",
    "flash_attn": "ds.attn_implementation",
    "attn_implementation": "ds.attn_implementation",
    "load_checkpoint": "ckpt.load_enable",
    "vllm_sync_backend": "vllm.sync_backend",
    "vllm_enable_sleep": "vllm.enable_sleep",
    "deepspeed_enable_sleep": "ds.enable_sleep",
    "enforce_eager": "vllm.enforce_eager",
    "enable_prefix_caching": "vllm.enable_prefix_caching",
    "use_wandb": "logger.wandb.key",
}
"""Options before 0.11 → their names since."""
DEFAULTS: dict[str, Any] = {
    "rollout.batch_size": 1024,
    "train.batch_size": 128,
    "rollout.n_samples_per_prompt": 1,
    "data.max_len": 2048,
    "actor.num_nodes": 1,
    "actor.num_gpus_per_node": 8,
    "critic.num_nodes": 1,
    "critic.num_gpus_per_node": 8,
    "ref.num_nodes": 1,
    "ref.num_gpus_per_node": 8,
    "reward.num_nodes": 1,
    "reward.num_gpus_per_node": 8,
    "vllm.tensor_parallel_size": 1,
    "vllm.gpu_memory_utilization": 0.95,
    "ds.zero_stage": 2,
    "ds.param_dtype": "bf16",
    "train.max_tokens_per_gpu": 16192,
    "ds.lora.alpha": 16,
}
_SUPERVISED = {"sft": "sft", "rm": "reward", "dpo": "dpo", "kto": "kto"}
_ESTIMATORS = {
    "gae": "ppo",
    "group_norm": "grpo",
    "dr_grpo": "grpo",
    "rloo": "rloo",
    "reinforce": "reinforce++",
    "reinforce_baseline": "reinforce++",
}
REASONS = (
    Reason(
        r"logger\..*|.*wandb.*|.*tensorboard.*|ckpt\..*|eval\..*|save_\w+|use_\w*_ckpt|critic\.save\w+",
        "logs, checkpoints and validation are of a run",
        False,
    ),
    Reason(r"data\.(image_key|max_images\w*)|actor\.freeze_visual\w*", "images are not read"),
    Reason(
        r"data\..*|.*_key|.*template.*|.*_probs|.*_split|multiturn|train\.num_episodes",
        "how rows are read: data.form, columns and template",
        False,
    ),
    Reason(
        r"vllm\..*|ds\.(enable_sleep|packing_samples|attn\w*|overlap_comm|use_liger\w*|deepcompile|zpg|grad_accum\w*|experts\w*|value_head\w*)|.*reentrant|packing_\w+|master_\w+|local_rank|use_ms|.*full_determinism\w*|.*seed",
        "kernels and processes, which follow from the engine here",
        False,
    ),
    Reason(
        r"rollout\.(micro_batch_size|max_tokens_per_gpu|vllm_generate_batch_size)",
        "passes without gradients have the micro-batches of models.actor",
        False,
    ),
    Reason(
        r"(ref|reward)\.offload|ds\.offload.*",
        "models go to host memory between their calls where a plan needs it",
        False,
    ),
    Reason(
        r"ds\.(ring_attn\w*|tensor_parallel_size)",
        "DeepSpeed here has neither ring attention nor tensor parallelism: engine torch has tp",
    ),
    Reason(
        r".*aux_loss.*|.*nll_loss.*|.*(ema|EMA).*", "a term of the loss, or an average of weights, that is not here"
    ),
    Reason(r"train\.partial_rollout\w*", "responses in segments are of rollout.segment_tokens tokens"),
    Reason(r".*load_in_4bit", "weights are of 16 or 32 bits"),
    Reason(r".*muon.*", "optimizers are adamw, adam and sgd"),
    Reason(r"--\w+", "of the launcher", False),
)


def translate(out: Translation, launch: Launch, device_class: tuple[str, str] | None) -> None:
    """Translate a command line. Raises UserError for one without any counterpart."""
    found = {}
    for name, value in flags(launch.arguments).items():
        key = OLD_NAMES.get(name, name)
        value = "bf16" if name == "bf16" else value
        found[key] = Setting(f"--{name}", read_scalar(value))
    found |= {each.key: each for each in launch.devices() if each is not None}
    job = JobSettings(found, DEFAULTS)
    kind = launch.program.removesuffix("_ray")
    if kind == "ppo":
        _reinforced(out, job, device_class)
    elif kind in _SUPERVISED:
        _supervised(out, job, _SUPERVISED[kind], device_class)
    else:
        raise UserError(f"{out.file}: openrlhf.cli.train_{launch.program} has no counterpart")
    out.finish(job, REASONS)


def _supervised(out: Translation, job: JobSettings, name: str, device_class: tuple[str, str] | None) -> None:
    role = "reward" if name == "reward" else "actor"
    out.put("algorithm.name", name, "its trainer")
    if name in PEERS["openrlhf"].trainers:
        out.put("algorithm.like", "openrlhf", "what is not written")
    batch, beta = job.count("train.batch_size"), job.number("model.beta")
    if batch is not None:
        out.put("algorithm.prompts_per_step", batch.value, batch)
    if beta is not None and name in ("dpo", "kto"):
        out.put("algorithm.beta", float(beta.value), beta)
    ipo, smoothing = job.truth("model.ipo_enable", "ipo"), job.number("model.label_smoothing", "label_smoothing")
    if ipo is not None:
        out.put("algorithm.loss", "ipo", ipo)
    if smoothing is not None:
        out.put("algorithm.label_smoothing", float(smoothing.value), smoothing)
    if (epochs := job.get("train.max_epochs")) is not None:
        out.drop(epochs, "epochs over data whose size is not in the file: write steps", matters=False)
    model = _model(out, job, role, "model.model_name_or_path", "actor.model_name_or_path")
    reference = job.named("ref.model_name_or_path") or job.named("ref_pretrain")
    if reference is not None and reference.value != model.value and name in ("dpo", "kto"):
        put_model(out, "ref", reference)
    tokens = split_length(out, job.count("data.max_len"))
    put_data(out, job.get("data.dataset"), "data/train.jsonl")
    put_optimizer(out, job, role, _optimizer_keys(""))
    nodes, per_node = job.count("--nnodes", "--num_nodes"), job.count("--nproc_per_node", "--num_gpus")
    if per_node is None:
        out.note("the number of devices is not in the file: one node of eight is assumed")
    put_cluster(out, nodes.value if nodes else 1, per_node.value if per_node else 8, device_class, nodes, per_node)
    _engine(out, job, role, tokens)
    out.put("placement", None, "every model on all devices")


def _model(out: Translation, job: JobSettings, role: str, *keys: str) -> Setting:
    setting = next(filter(None, (job.named(key) for key in keys)), None)
    if setting is None:
        unresolved = next((job.unresolved[key].missing[0] for key in keys if key in job.unresolved), None)
        where = f"its value ${unresolved} is not in the file: give it by --var" if unresolved else "the file has none"
        raise UserError(f"{out.file}: --{keys[0]}: a job needs a model, and {where}")
    put_model(out, role, setting)
    return setting


def _optimizer_keys(prefix: str) -> dict[str, tuple[str, ...]]:
    return {
        "learning_rate": (f"{prefix}adam.lr",),
        "weight_decay": (f"{prefix}adam.weight_decay", "adam.weight_decay"),
        "warmup_ratio": (f"{prefix}lr_warmup_ratio", "lr_warmup_ratio"),
        "schedule": (f"{prefix}lr_scheduler", "lr_scheduler"),
        "final_ratio": (f"{prefix}min_lr_ratio", "min_lr_ratio"),
        "max_grad_norm": (f"{prefix}max_norm", "max_norm"),
    }


def _reinforced(out: Translation, job: JobSettings, device_class: tuple[str, str] | None) -> None:
    name = _algorithm(out, job)
    prompts, samples = job.count("rollout.batch_size"), job.count("rollout.n_samples_per_prompt")
    number = samples.value if samples else 1
    if prompts is not None:
        out.put("algorithm.prompts_per_step", prompts.value, prompts)
        mini_batches(out, prompts, job.count("train.batch_size"), number)
    epochs = job.count("train.max_epochs")
    if epochs is not None:
        out.put("algorithm.epochs", epochs.value, epochs)
    _lengths(out, job)
    actor = _model(out, job, "actor", "actor.model_name_or_path")
    _scores(out, job)
    if name == "ppo":
        critic = job.named("critic.model_name_or_path") or (
            None if "models.reward.init" in out.lines or "models.reward.path" in out.lines else actor
        )
        if critic is not None:
            put_model(out, "critic", critic)
        put_optimizer(out, job, "critic", _optimizer_keys("critic."))
    put_data(out, job.get("data.prompt_dataset"), "data/prompts.jsonl")
    put_optimizer(out, job, "actor", _optimizer_keys("actor."))
    tokens = (out.value("data.max_prompt_tokens") or 0) + (out.value("data.max_response_tokens") or 0)
    engines = _placement(out, job, name, device_class)
    _engine(out, job, "actor", tokens)
    tp = job.count("vllm.tensor_parallel_size")
    size = tp.value if tp else 1
    if engines is None:
        out.put("rollout.engine", "transformers", "no --vllm.num_engines")
        return
    out.put("rollout.engine", "vllm", engines)
    if tp is not None and size > 1:
        out.put("rollout.tp", size, tp)
    rows = (prompts.value if prompts else 1024) * number
    put_cache(out, job.number("vllm.gpu_memory_utilization"), size, -(-rows // engines.value), tokens)


def _algorithm(out: Translation, job: JobSettings) -> str:
    estimator, loss = job.get("algo.advantage.estimator"), job.get("actor.policy_loss_type")
    name = "ppo" if estimator is None else _ESTIMATORS.get(str(estimator.value), "")
    if not name:
        out.drop(estimator, "these advantages are not here; grpo has the same models and passes")
        name = "grpo"
    if loss is not None and loss.value == "gspo" and name == "grpo":
        name = "gspo"
    elif loss is not None and loss.value not in ("ppo", "gspo"):
        out.drop(loss, "this loss is not here; PPO's stands for it")
    out.put(
        "algorithm.name", name, estimator or "estimator: gae (OpenRLHF's default)", loss if name == "gspo" else None
    )
    if name in PEERS["openrlhf"].trainers:
        out.put("algorithm.like", "openrlhf", "what is not written")
    if estimator is not None and estimator.value == "reinforce_baseline":
        out.put("algorithm.baseline", "group", estimator)
    no_std = job.truth("algo.advantage.no_std_norm") or (
        estimator if estimator is not None and estimator.value == "dr_grpo" else None
    )
    if no_std is not None and name in ("grpo", "gspo"):
        out.put("algorithm.scale", "none", no_std)
    samples = job.count("rollout.n_samples_per_prompt")
    if samples is not None and (samples.value > 1 or name in ("ppo", "reinforce++")):
        out.put("algorithm.samples_per_prompt", samples.value, samples)
    _penalty(out, job)
    pairs = {
        "gamma": ("algo.advantage.gamma", ("ppo", "reinforce++")),
        "gae_lambda": ("algo.advantage.lambd", ("ppo",)),
    }
    pairs |= {"value_clip": ("critic.value_clip", ("ppo",)), "temperature": ("rollout.temperature", (name,))}
    pairs |= {"dual_clip": ("actor.dual_clip", (name,)), "entropy_coefficient": ("actor.entropy_coef", (name,))}
    for key, (own, names) in pairs.items():
        setting = job.number(own)
        if setting is not None and name in names:
            out.put(f"algorithm.{key}", float(setting.value), setting)
        elif setting is not None:
            out.drop(setting, f"{name} has none", matters=False)
    clip, both = job.number("actor.eps_clip"), job.get("actor.eps_clip_low_high")
    ends = [read_scalar(each) for each in str(both.value).split()] if both is not None else []
    if len(ends) == 2 and all(isinstance(end, int | float) for end in ends):
        out.put("algorithm.clip_low", float(ends[0]), both)
        out.put("algorithm.clip_high", float(ends[1]), both)
    elif clip is not None:
        out.put("algorithm.clip_low", float(clip.value), clip)
        out.put("algorithm.clip_high", float(clip.value), clip)
    top_p = job.number("rollout.top_p")
    if top_p is not None and top_p.value < 1:
        out.drop(top_p, "a cut distribution needs importance weights here: algorithm.importance")
    _corrections(out, job, name)
    return name


def _penalty(out: Translation, job: JobSettings) -> None:
    coefficient, estimator = job.get("algo.kl.init_coef"), job.get("algo.kl.estimator")
    in_loss, target = job.truth("algo.kl.use_loss"), job.number("algo.kl.target")
    if coefficient is not None and coefficient.value == 0:
        out.put("algorithm.kl", None, coefficient)
        for each in (estimator, in_loss, target):
            out.drop(each, "there is no penalty", matters=False)
        return
    if in_loss is not None:
        out.put("algorithm.kl.place", "loss", in_loss)
    if coefficient is not None:
        out.put("algorithm.kl.coefficient", float(coefficient.value), coefficient)
    if estimator is not None:
        out.put("algorithm.kl.estimator", estimator.value, estimator)
    if target is not None and in_loss is None:
        out.put("algorithm.kl.target", float(target.value), target)


def _corrections(out: Translation, job: JobSettings, name: str) -> None:
    correction, kind = job.truth("algo.advantage.is_correction_enable"), job.get("algo.advantage.is_correction_type")
    level = job.get("algo.advantage.is_correction_level")
    bounds = job.get("algo.advantage.is_correction_threshold")
    if correction is not None or (level is not None and level.value in ("token", "sequence")):
        is_mask = kind is not None and kind.value == "icepop"
        out.put("algorithm.importance.level", "token", correction, kind)
        values = [0.5, 5.0] if bounds is None else [read_scalar(each) for each in str(bounds.value).split()]
        if len(values) == 2 and all(isinstance(value, int | float) for value in values):
            out.put(
                "algorithm.importance.cap",
                float(values[1]),
                bounds or "is_correction_threshold: 0.5 5.0 (OpenRLHF's default)",
            )
            if is_mask:
                out.put("algorithm.importance.outside", "mask", kind)
                out.put("algorithm.importance.floor", float(values[0]), bounds or "its default")
    filters, ends = job.truth("algo.dynamic_filtering_enable"), job.get("algo.dynamic_filtering_range")
    if filters is not None and name in ("grpo", "gspo", "rloo"):
        out.put("algorithm.dynamic_sampling.rounds", 2, filters)
        out.drop(ends, "groups whose scores are all the same are left out", matters=False)
    elif filters is not None:
        out.drop(filters, "dynamic sampling goes with grpo, rloo and gspo")
    if (normalised := job.truth("reward.normalize_enable")) is not None:
        out.put("algorithm.normalise_scores", "running", normalised)
    length, penalty = job.count("reward.overlong_buffer_len"), job.number("reward.overlong_penalty_factor")
    if length is not None:
        out.put("algorithm.overlong.buffer_tokens", length.value, length)
        if penalty is not None:
            out.put("algorithm.overlong.penalty", float(penalty.value), penalty)
    frozen = job.count("critic.freezing_steps")
    if frozen is not None:
        out.put("algorithm.freeze_actor_steps", frozen.value, frozen)


def _lengths(out: Translation, job: JobSettings) -> None:
    whole, prompt, response = (
        job.count("data.max_len"),
        job.count("data.prompt_max_len"),
        job.count("rollout.max_new_tokens"),
    )
    if response is None:
        split_length(out, whole, 8)
        return
    out.put("data.max_response_tokens", response.value, response)
    if prompt is not None:
        out.put("data.max_prompt_tokens", prompt.value, prompt)
    elif whole is not None and whole.value > response.value:
        out.put("data.max_prompt_tokens", whole.value - response.value, whole, response)


def _scores(out: Translation, job: JobSettings) -> None:
    remote, agent, path = (
        job.get("reward.remote_url"),
        job.get("train.agent_func_path"),
        job.named("reward.model_name_or_path"),
    )
    if path is not None and remote is None and agent is None:
        put_model(out, "reward", path)
    elif remote is not None and str(remote.value).startswith(("http://", "https://")):
        out.put("reward", {"url": str(remote.value)}, remote)
    else:
        put_scored_by_code(out, remote or agent)


def _placement(out: Translation, job: JobSettings, name: str, device_class: tuple[str, str] | None) -> Setting | None:
    """Write the machines and the ranks of each model; return the number of vLLM's engines."""
    engines, tp = job.count("vllm.num_engines"), job.count("vllm.tensor_parallel_size")
    sizes = {
        role: (job.count(f"{role}.num_nodes"), job.count(f"{role}.num_gpus_per_node"))
        for role in ("actor", "ref", "critic", "reward")
    }
    everything, is_async = job.truth("train.colocate_all"), job.truth("train.async_enable")
    with_ref, with_reward = job.truth("train.colocate_actor_ref"), job.truth("train.colocate_critic_reward")
    queue = job.count("train.async_queue_size")
    roles = ["actor", *(["ref"] if out.value("algorithm.kl.place") or "algorithm.kl" not in out.lines else [])]
    roles += [
        *(["critic"] if name == "ppo" else []),
        *(["reward"] if "models.reward.init" in out.lines or "models.reward.path" in out.lines else []),
    ]

    def gpus(role: str) -> int:
        nodes, per_node = sizes[role]
        return (nodes.value if nodes else 1) * (per_node.value if per_node else 8)

    sources = [each for each in sizes["actor"] if each is not None]
    if everything is not None and (is_async is None or engines is None):
        put_cluster(out, gpus("actor") // sources[1].value, sources[1].value, device_class, *sources)
        out.put("placement", None, everything, "every model on all devices")
        return engines
    ranks: dict[str, range] = {}
    end = 0
    for role in roles:
        shared = (
            "actor"
            if everything or (role == "ref" and with_ref)
            else "critic"
            if role == "reward" and with_reward and "critic" in ranks
            else None
        )
        if shared in ranks and shared is not None:
            ranks[role] = ranks[shared]
            continue
        ranks[role] = range(end, end + gpus(role))
        end += gpus(role)
    generating = 0 if engines is None else engines.value * (tp.value if tp else 1)
    put_gpus(out, end + generating, device_class, *(each for role in roles for each in sizes[role]), engines, tp)
    for role in roles:
        own = ranks[role]
        out.put(f"placement.{role}.ranks", f"{own[0]}-{own[-1]}" if len(own) > 1 else [own[0]], *sizes[role])
    if engines is not None:
        key = f"placement.actor{DOT}rollout.ranks"
        out.put(key, f"{end}-{end + generating - 1}" if generating > 1 else [end], engines, tp)
        if is_async is not None:
            out.put("schedule.lag", queue.value if queue else 1, is_async, queue)
    return engines


def _engine(out: Translation, job: JobSettings, role: str, tokens: int) -> None:
    stage, dtype = job.get("ds.zero_stage"), job.get("ds.param_dtype")
    out.put("models.all.engine", "deepspeed", "OpenRLHF's engine")
    if stage is not None and stage.value in (0, 1, 2, 3):
        out.put("models.all.zero", stage.value, stage)
    types = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}
    if dtype is not None and str(dtype.value) in types:
        out.put("models.all.dtype", types[str(dtype.value)], dtype)
    offloads = job.truth("ds.adam_offload")
    if offloads is not None:
        out.put("models.all.offload_optimizer", True, offloads)
    recomputes = job.truth("actor.gradient_checkpointing_enable") or job.truth("model.gradient_checkpointing_enable")
    put_recomputation(out, recomputes, "no gradient_checkpointing_enable")
    put_lora(out, role, job.number("ds.lora.rank"), job.number("ds.lora.alpha"), job.get("ds.lora.target_modules"))
    dynamic, most, rows = (
        job.truth("train.dynamic_batch_enable"),
        job.count("train.max_tokens_per_gpu"),
        job.count("train.micro_batch_size"),
    )
    if dynamic is not None and most is not None:
        out.put("models.all.micro_batch_tokens", most.value, most)
    elif rows is not None:
        pair = 2 if out.value("algorithm.name") in ("dpo", "reward") else 1
        out.put("models.all.micro_batch_tokens", rows.value * tokens * pair, rows, f"times {pair * tokens} tokens")
