"""Jobs of OpenRLHF: command lines of ``openrlhf.cli.train_*``, with the names of options of 0.11 and earlier."""

from __future__ import annotations

from typing import Any

from flexrlhf.api import PEERS, UserError
from flexrlhf.imports import device_parts, model_parts, parts, run_parts, score_parts
from flexrlhf.imports.launches import Launch, flags
from flexrlhf.imports.openrlhf.algorithm import put_algorithm
from flexrlhf.imports.openrlhf.names import OLD_NAMES
from flexrlhf.imports.openrlhf.reasons import WITH_EFFECT, WITHOUT_EFFECT
from flexrlhf.imports.settings import JobSettings, Setting, is_false, read_scalar
from flexrlhf.imports.translation import Translation

_ROLES = ("actor", "critic", "ref", "reward")
_SIZES = PEERS["openrlhf"].trainers["ppo"].sizes
DEFAULTS: dict[str, Any] = {
    "rollout.batch_size": _SIZES["prompts_per_step"],
    "train.batch_size": _SIZES["num_mini_batches"],
    "rollout.n_samples_per_prompt": _SIZES["samples_per_prompt"],
    "data.max_len": 2048,
    **{f"{role}.num_nodes": 1 for role in _ROLES},
    **{f"{role}.num_gpus_per_node": 8 for role in _ROLES},
    "vllm.tensor_parallel_size": 1,
    "vllm.gpu_memory_utilization": 0.95,
    "ds.zero_stage": 2,
    "ds.param_dtype": "bf16",
    "train.max_tokens_per_gpu": 16192,
    "ds.lora.alpha": 16,
}
_SUPERVISED = {"sft": "sft", "rm": "reward", "dpo": "dpo", "kto": "kto"}


def translate(out: Translation, launch: Launch) -> None:
    """Translate a command line. Raises UserError for one without any counterpart."""
    found = {
        OLD_NAMES.get(name, name): Setting(f"--{name}", read_scalar("bf16" if name == "bf16" else value))
        for name, value in flags(launch.arguments).items()
    }
    found |= {each.key: each for each in launch.devices() if each is not None}
    job = JobSettings(found, DEFAULTS)
    kind = launch.program.removesuffix("_ray")
    if kind == "ppo":
        _reinforced(out, job)
    elif kind in _SUPERVISED:
        _supervised(out, job, _SUPERVISED[kind])
    else:
        raise UserError(f"{out.file}: openrlhf.cli.train_{launch.program} has no counterpart")
    run_parts.drop_uses_of_rows(out, job)
    out.finish(job, WITHOUT_EFFECT, WITH_EFFECT)


def _supervised(out: Translation, job: JobSettings, name: str) -> None:
    role = "reward" if name == "reward" else "actor"
    parts.put_name(out, "openrlhf", name, "its trainer")
    out.put_same("algorithm.prompts_per_step", job.count("train.batch_size"))
    if name in ("dpo", "kto"):
        out.put_real("algorithm.beta", job.number("model.beta"))
    if (ipo := job.truth("model.ipo_enable")) is not None:
        out.put("algorithm.loss", "ipo", ipo)
        out.drop(job.number("model.label_smoothing"), "ipo has none", matters=False)
    else:
        out.put_real("algorithm.label_smoothing", job.number("model.label_smoothing"))
    run_parts.put_length(out, None, job.number("train.max_epochs"), f"max_epochs={2 if name == 'sft' else 1}")
    _run(out, job, {})
    model = parts.put_needed_model(out, job, role, "model.model_name_or_path", "actor.model_name_or_path")
    reference = job.named("ref.model_name_or_path")
    if reference is not None and reference.value != model.value and name in ("dpo", "kto"):
        parts.put_model(out, "ref", reference)
    tokens = parts.split_length(out, job.count("data.max_len"))
    parts.put_data(out, job.get("data.dataset"), "data/train.jsonl")
    pairs = {each: job.get(f"data.{each}_key") for each in ("prompt", "chosen", "rejected")}
    texts = {each: job.get(f"data.{each}_key") for each in ("input", "output")}
    _rows(out, job, "data.dataset_split", texts if name in ("sft", "kto") else pairs)
    parts.put_optimizer(out, job, role, _optimizer(""))
    sources = job.count("--nnodes", "--num_nodes"), job.count("--nproc_per_node", "--num_gpus")
    device_parts.put_cluster(out, [device_parts.machines(out, job, *sources)], *sources)
    _engine(out, job, role, tokens)
    out.put("placement", None, "every model on all devices")


def _run(out: Translation, job: JobSettings, settings: dict[str, Setting | None]) -> None:
    """Write the run's name, seed, loggers, evaluation and checkpoints. ``settings``: further ones of an evaluation."""
    run_parts.put_run_name(out, job, "logger.wandb.run_name")
    run_parts.put_seed(out, job, "train.seed")
    names = {"wandb": "logger.wandb.key", "tensorboard": "logger.tensorboard_dir"}
    found = {name: job.found.get(key) for name, key in names.items()}
    switches = {name: each for name, each in found.items() if each is not None and not is_false(each.value)}
    job.read |= {key for key in names.values() if job.has(key)}
    own = {"project": "logger.wandb.project", "entity": "logger.wandb.org", "group": "logger.wandb.group"}
    run_parts.put_loggers(out, job, switches, {"wandb": own})
    rows, split = job.get("eval.dataset"), job.get("eval.split")
    run_parts.put_evaluation(
        out, _split(rows, split), run_parts.interval(job, "eval.steps"), settings if rows is not None else {}
    )
    run_parts.put_checkpoints(out, run_parts.interval(job, "ckpt.save_steps"), job.count("ckpt.max_num"))


def _split(rows: Setting | None, split: Setting | None) -> Setting | None:
    """Return a data set on the Hub with its split."""
    if rows is None or split is None or str(rows.value).count("/") != 1 or "." in str(rows.value):
        return rows
    return Setting(rows.key, f"{rows.value}:{split.value}")


def _rows(out: Translation, job: JobSettings, split: str, columns: dict[str, Setting | None]) -> None:
    """Write the split of the rows, their columns, and how a prompt is made of them."""
    data, part = job.get("data.dataset", "data.prompt_dataset"), job.get(split)
    if data is not None and part is not None and "data.path" in out.lines and part.value != "train":
        named = _split(data, part)
        out.put("data.path", str(named.value if named else ""), data, part)
    run_parts.put_columns(out, columns)
    if (chats := job.truth("data.apply_chat_template")) is not None:
        out.put("data.chat", "always", chats)
    template, column = job.get("data.input_template"), columns.get("input") or columns.get("prompt")
    text = "" if template is None else str(template.value)
    if text.count("{}") == 1 and text.count("{") == 1 and chats is None:
        out.put("data.template", text.replace("{}", f"{{{column.value if column else 'input'}}}"), template)


def _optimizer(prefix: str) -> dict[str, tuple[str, ...]]:
    return {
        "learning_rate": (f"{prefix}adam.lr",),
        "weight_decay": (f"{prefix}adam.weight_decay", "adam.weight_decay"),
        "name": (f"{prefix}optim", "optim"),
        "betas": (f"{prefix}adam.betas", "adam.betas"),
        "eps": (f"{prefix}adam.eps", "adam.eps"),
        "warmup_ratio": (f"{prefix}lr_warmup_ratio", "lr_warmup_ratio"),
        "schedule": (f"{prefix}lr_scheduler", "lr_scheduler"),
        "final_ratio": (f"{prefix}min_lr_ratio", "min_lr_ratio"),
        "max_grad_norm": (f"{prefix}max_norm", "max_norm"),
    }


def _reinforced(out: Translation, job: JobSettings) -> None:
    name = put_algorithm(out, job)
    prompts, samples = job.count("rollout.batch_size"), job.count("rollout.n_samples_per_prompt")
    number = samples.value if samples else 1
    if prompts is not None:
        out.put_same("algorithm.prompts_per_step", prompts)
        parts.mini_batches(out, prompts, job.count("train.batch_size"), number)
    out.put_same("algorithm.epochs", job.count("train.max_epochs"))
    run_parts.put_length(out, None, job.number("train.num_episodes"), "num_episodes=1")
    own = {"temperature": job.real("eval.temperature"), "samples_per_prompt": job.count("eval.n_samples_per_prompt")}
    _run(out, job, own)
    tokens = _lengths(out, job)
    actor = parts.put_needed_model(out, job, "actor", "actor.model_name_or_path")
    _scores(out, job)
    apart = [f"{role}.num_{each}" for role in _ROLES for each in ("nodes", "gpus_per_node")]
    job.pass_over("models without devices of their own", "train.colocate_", *apart)
    job.pass_over("what it says is written", "train.dynamic_batch_enable", "train.async_enable")
    if name == "ppo":
        critic = job.named("critic.model_name_or_path") or (None if out.has_model("reward") else actor)
        if critic is not None:
            parts.put_model(out, "critic", critic)
        parts.put_optimizer(out, job, "critic", _optimizer("critic."))
    parts.put_data(out, job.get("data.prompt_dataset"), "data/prompts.jsonl")
    _rows(out, job, "data.prompt_split", {"input": job.get("data.input_key")})
    parts.put_optimizer(out, job, "actor", _optimizer("actor."))
    engines = _placement(out, job)
    _engine(out, job, "actor", tokens)
    if engines is None:
        out.put("rollout.engine", "transformers", "no --vllm.num_engines")
        parts.put_decoded(out, job.count("rollout.micro_batch_size"))
        return
    out.put("rollout.engine", "vllm", engines)
    tp, share = job.count("vllm.tensor_parallel_size"), job.number("vllm.gpu_memory_utilization")
    rows = (prompts.value if prompts else DEFAULTS["rollout.batch_size"]) * number
    device_parts.put_vllm(out, tp, None, share, rows, tokens, engines.value)


def _lengths(out: Translation, job: JobSettings) -> int:
    whole, prompt = job.count("data.max_len"), job.count("data.prompt_max_len")
    response = job.count("rollout.max_new_tokens")
    if response is None:
        return parts.split_length(out, whole, 8)
    out.put_same("data.max_response_tokens", response)
    if prompt is not None:
        out.put_same("data.max_prompt_tokens", prompt)
    elif whole is not None and whole.value > response.value:
        out.put("data.max_prompt_tokens", whole.value - response.value, whole, response)
    return int(response.value) + (out.value("data.max_prompt_tokens") or 0)


def _scores(out: Translation, job: JobSettings) -> None:
    remote, agent = job.get("reward.remote_url"), job.get("train.agent_func_path")
    path, labels = job.named("reward.model_name_or_path"), job.get("data.label_key")
    if path is not None and remote is None and agent is None:
        parts.put_model(out, "reward", path)
    elif remote is not None and str(remote.value).startswith(("http://", "https://")):
        addresses = str(remote.value).split(",")
        out.put("reward", {"url": addresses if len(addresses) > 1 else addresses[0]}, remote)
        run_parts.put_columns(out, {"label": labels})
    elif remote is not None and str(remote.value).endswith(".py"):
        score_parts.put_function(out, f"{remote.value}:reward_func", remote, needs={})
        run_parts.put_columns(out, {"labels": labels})
    else:
        score_parts.put_scored_by_code(out, remote, agent)
        run_parts.put_columns(out, {"answer": labels})


def _placement(out: Translation, job: JobSettings) -> Setting | None:
    """Write the device_parts.machines and the ranks of each model; return the number of vLLM's engines."""
    engines, tp = job.count("vllm.num_engines"), job.count("vllm.tensor_parallel_size")
    sizes = {role: (job.count(f"{role}.num_nodes"), job.count(f"{role}.num_gpus_per_node")) for role in _ROLES}
    machine = {role: (nodes.value if nodes else 1, each.value if each else 8) for role, (nodes, each) in sizes.items()}
    everything, is_async = job.truth("train.colocate_all"), job.truth("train.async_enable")
    with_ref, with_reward = job.truth("train.colocate_actor_ref"), job.truth("train.colocate_critic_reward")
    queue = job.count("train.async_queue_size")
    if everything is not None and (is_async is None or engines is None):
        device_parts.put_cluster(out, [machine["actor"]], *sizes["actor"])
        out.put("placement", None, everything, "every model on all devices")
        others = [f"{role}.num_{each}" for role in _ROLES[1:] for each in ("nodes", "gpus_per_node")]
        job.pass_over("every model is on the actor's devices", *others)
        return engines
    penalised = bool(out.value("algorithm.kl.place")) or "algorithm.kl" not in out.lines
    roles = sorted(["actor", *device_parts.other_roles(out, penalised)], key=("actor", "ref", "critic", "reward").index)
    ranks: dict[str, range] = {}
    end = 0
    for role in roles:
        nodes, per_node = machine[role]
        if role != "actor" and (everything or (role == "ref" and with_ref)):
            ranks[role] = ranks["actor"]
        elif role == "reward" and with_reward and "critic" in ranks:
            ranks[role] = ranks["critic"]
        else:
            ranks[role] = range(end, end + nodes * per_node)
            end += nodes * per_node
    generating = 0 if engines is None else engines.value * (tp.value if tp else 1)
    device_parts.put_cluster(
        out,
        [device_parts.machines_of(end + generating)],
        *(each for role in roles for each in sizes[role]),
        engines,
        tp,
    )
    for role in roles:
        out.put(f"placement.{role}.ranks", device_parts.span(ranks[role]), *sizes[role])
    job.pass_over("models without devices of their own", "train.colocate_actor_ref", "train.colocate_critic_reward")
    if engines is not None:
        device_parts.put_generating(out, range(end, end + generating), engines, tp)
        if is_async is not None:
            out.put("schedule.lag", queue.value if queue else 1, is_async, queue)
    return engines


def _engine(out: Translation, job: JobSettings, role: str, tokens: int) -> None:
    stage, dtype = job.get("ds.zero_stage"), job.get("ds.param_dtype")
    out.put("models.all.engine", "deepspeed", "OpenRLHF's engine")
    if stage is not None and stage.value in (0, 1, 2, 3):
        out.put_same("models.all.zero", stage)
    types = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}
    if dtype is not None and str(dtype.value) in types:
        out.put("models.all.dtype", types[str(dtype.value)], dtype)
    model_parts.put_router_loss(out, job.number("actor.aux_loss_coef", "model.aux_loss_coef"))
    if (offloads := job.truth("ds.adam_offload")) is not None:
        out.put("models.all.offload_optimizer", True, offloads)
    recomputes = job.truth("actor.gradient_checkpointing_enable") or job.truth("model.gradient_checkpointing_enable")
    parts.put_recomputation(out, recomputes, "no gradient_checkpointing_enable")
    model_parts.put_lora(
        out, role, job.count("ds.lora.rank"), job.number("ds.lora.alpha"), job.listed("ds.lora.target_modules")
    )
    most = None if job.truth("train.dynamic_batch_enable") is None else job.count("train.max_tokens_per_gpu")
    parts.put_micro_batch(out, job.count("train.micro_batch_size"), tokens, most)
    job.pass_over("micro-batches are of tokens", "train.dynamic_batch_enable")
