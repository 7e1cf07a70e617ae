"""Jobs of OpenRLHF: command lines of ``openrlhf.cli.train_*``, with the names of options of 0.11 and earlier."""

from __future__ import annotations

from typing import Any

from flexrlhf.config.presets.filling import PEERS
from flexrlhf.errors import UserError
from flexrlhf.imports.device_parts import put_cache, put_cluster, put_gpus
from flexrlhf.imports.launches import Launch, flags
from flexrlhf.imports.openrlhf.algorithm import put_algorithm
from flexrlhf.imports.openrlhf.names import OLD_NAMES
from flexrlhf.imports.openrlhf.reasons import REASONS
from flexrlhf.imports.parts import (
    mini_batches,
    put_data,
    put_lora,
    put_model,
    put_optimizer,
    put_recomputation,
    put_scored_by_code,
    split_length,
)
from flexrlhf.imports.settings import JobSettings, Setting, read_scalar
from flexrlhf.imports.translation import DOT, Translation

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
        unresolved = next((job.unresolved[key].gap for key in keys if key in job.unresolved), None)
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
    name = put_algorithm(out, job)
    prompts, samples = job.count("rollout.batch_size"), job.count("rollout.n_samples_per_prompt")
    number = samples.value if samples else 1
    if prompts is not None:
        out.put("algorithm.prompts_per_step", prompts.value, prompts)
        mini_batches(out, prompts, job.count("train.batch_size"), number)
    out.put_same("algorithm.epochs", job.count("train.max_epochs"))
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
        out.put("sync.overlap", False, "weights are sent while nothing else runs there")
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
    put_lora(out, role, job.number("ds.lora.rank"), job.number("ds.lora.alpha"), job.listed("ds.lora.target_modules"))
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
