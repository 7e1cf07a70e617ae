"""Run of a TRL job: its launcher and processes, length, name, seed, loggers, evaluation, checkpoints and rows."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from flexrlhf.api import read_yaml
from flexrlhf.imports import parts, run_parts
from flexrlhf.imports.settings import JobSettings, Setting
from flexrlhf.imports.translation import Translation

_MADE = re.compile(r"\.(map|filter|select|shuffle|train_test_split)\(|concatenate|interleave|^\$?\w+$")
"""In an expression of a data set: what it loads is changed, or it is a name with several values."""

OF_LAUNCHER = ("zero_stage", "use_deepspeed", "offload_optimizer_device", "use_fsdp", "config_file")
"""Options of accelerate that are read."""
OF_FILE = ("distributed_type", "num_processes")
"""Settings of its file that are read."""


def put_run(out: Translation, job: JobSettings) -> None:
    """Write the length of the run, its name, seed, loggers, evaluation and checkpoints."""
    _put_length(out, job)
    run_parts.put_run_name(out, job, "run_name")
    run_parts.put_seed(out, job, "seed", "data_seed")
    run_parts.put_loggers(
        out, job, run_parts.named_loggers(out, job.listed("report_to")), {"wandb": {"project": "project"}}
    )
    strategy, file = job.get("eval_strategy", "evaluation_strategy"), job.get("dataset_name", "dataset")
    if strategy is not None and strategy.value != "no" and file is not None:
        split = job.get("dataset_test_split") or Setting("dataset_test_split", "test", default=True)
        path = Setting(split.key, _rows(job, str(file.value), str(split.value)), split.default)
        first = job.truth("eval_on_start")
        own = {"before": first and Setting(first.key, True)}
        run_parts.put_evaluation(out, path, job.count("eval_steps") if strategy.value == "steps" else None, own)
        out.drop(strategy if strategy.value != "steps" else None, run_parts.AT_STEPS, matters=False)
    saved = job.get("save_strategy")
    if saved is None or saved.value == "steps":
        run_parts.put_checkpoints(out, job.count("save_steps"), job.count("save_total_limit"))


def _put_length(out: Translation, job: JobSettings) -> None:
    steps, epochs = job.found.get("max_steps"), job.number("num_train_epochs")
    if steps is not None and steps.value == -1:
        job.pass_over("it is off", "max_steps")
        steps = None
    episodes, rows = job.count("total_episodes"), out.value("algorithm.prompts_per_step")
    if episodes is not None and rows is not None:
        # PPO's, a response each
        out.put("steps", math.ceil(episodes.value / rows), episodes, "over the responses of a step")
    run_parts.put_length(out, steps and job.count("max_steps"), epochs, "num_train_epochs=3", steps_count_alone=True)


def _rows(job: JobSettings, name: str, split: str | None) -> str:
    """Return the name of a data set on the Hub with its subset and split."""
    is_on_hub = name.count("/") == 1 and not name.startswith((".", "/", "~")) and "." not in name.rpartition("/")[2]
    subset = job.get("dataset_config", "dataset_config_name") if is_on_hub else None
    # a name with a subset has a split, too
    split = "train" if split is None and subset is not None else split
    return ":".join([name, *([str(subset.value)] if subset else []), *([split] if split and is_on_hub else [])])


def put_rows(out: Translation, job: JobSettings) -> None:
    """Write the rows, their columns, and what a recipe puts in front of them."""
    file, split = job.get("dataset_name", "dataset"), job.get("dataset_train_split")
    if file is not None:
        sources = [each for each in (job.get("dataset_config"), split) if each is not None]
        out.put("data.path", _rows(job, str(file.value), str(split.value) if split else None), file, *sources)
    else:
        parts.put_data(out, None, "data/train.jsonl")
    rows = job.found.get("train_dataset")
    if rows is not None and _MADE.search(rows.text):
        out.drop(rows, "its code makes other rows of them: data.path is what it loads, write a file with the others")
    run_parts.put_columns(out, {"prompt": job.get("dataset_prompt_column"), "text": job.get("dataset_text_field")})
    if (system := job.get("system_prompt")) is not None:
        out.put("data.system", str(system.value), system)
    if (end := job.get("eos_token")) is not None:
        out.put("data.end_token", str(end.value), end)


def all_processes(
    out: Translation, job: JobSettings, devices: tuple[Setting | None, Setting | None], accelerate: dict[str, Any]
) -> tuple[Setting, int]:
    """Return the processes of all machines, and the number of these, if it is known, else 0."""
    nodes, per_node = devices
    nodes, whole = nodes or job.count("num_machines"), job.count("num_processes")
    if per_node is not None:
        number = nodes.value if nodes else 1
        return Setting(per_node.key, per_node.value * number), number
    of_file = {key: each for key in ("num_processes", "num_machines") if isinstance(each := accelerate.get(key), int)}
    number = nodes.value if nodes else max(0, of_file.get("num_machines", 0))
    if whole is not None:
        return whole, number
    if of_file.get("num_processes", 0) > 0:
        return Setting("num_processes of accelerate's file", of_file["num_processes"]), number
    out.note("the number of processes is not in the file: eight devices are assumed, by which the batch is computed")
    return Setting("processes, assumed", 8), number


def accelerate_file(name: str | None, folder: Path) -> dict[str, Any]:
    """Return the configuration of accelerate, or one that its name tells, if the file is not there."""
    if name is None:
        return {}
    for parent in (folder, *folder.absolute().parents):
        path = parent / name
        if path.is_file():
            try:
                tree = read_yaml(path.read_text()) if not name.endswith(".json") else json.loads(path.read_text())
            except (yaml.YAMLError, ValueError):
                return {}
            return tree if isinstance(tree, dict) else {}
    for stage in range(4):
        if f"zero{stage}" in name.lower().replace("_", "").replace("-", ""):
            return {"distributed_type": "DEEPSPEED", "deepspeed_config": {"zero_stage": stage}}
    return {"distributed_type": "FSDP"} if "fsdp" in name.lower() else {}


def with_options(file: Mapping[str, Any], options: Mapping[str, str]) -> dict[str, Any]:
    """Return the configuration of accelerate under the options of its command.

    file:  accelerate's, or DeepSpeed's, which names a stage in ``zero_optimization``.
    """
    found, zero = dict(file), file.get("zero_optimization")
    if isinstance(zero, Mapping):
        offload = zero.get("offload_optimizer")
        device = offload.get("device") if isinstance(offload, Mapping) else None
        own = {"zero_stage": zero.get("stage", 0), "offload_optimizer_device": device}
        found = {"distributed_type": "DEEPSPEED", "deepspeed_config": own}
    if "use_deepspeed" in options or "zero_stage" in options:
        found["distributed_type"] = "DEEPSPEED"
        own = {"zero_stage": 2, **(found.get("deepspeed_config") or {})}
        stage, device = options.get("zero_stage", ""), options.get("offload_optimizer_device")
        own |= {"zero_stage": int(stage)} if stage in ("0", "1", "2", "3") else {}
        found["deepspeed_config"] = own | ({"offload_optimizer_device": device} if device else {})
    elif "use_fsdp" in options:
        found["distributed_type"] = "FSDP"
    return found
