"""Published and predicted memory: verdicts (fits or out of memory) and peaks."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

from benchmarks.calibration.problems import Catalogue, LeftOut, PublishedStep, model_named, number, problem_of
from benchmarks.calibration.rows import Row, device_of, read_models, read_rows
from benchmarks.systems.footprint import (
    CHUNKED_LOGIT_BYTES,
    FLOAT_SHARDS,
    LOGIT_BYTES,
    capacity_bytes,
    decode_bytes,
    frozen_bytes,
    pass_bytes,
    trained_bytes,
)
from benchmarks.systems.meshes import mesh_of
from benchmarks.systems.steps import best_step
from benchmarks.systems.workload import ACTOR, Workload
from flexrlhf.guideline.costs.cost_model import Call, Links, Transformer
from flexrlhf.placement.devices import CONTEXT_BYTES, DeviceClass

VLLM_TOKENS = 8192
"""Tokens of one prefill pass for which vLLM reserves memory when it starts."""
HF_BYTES = 0.02
"""Memory of Transformers in addition to keys and values, as a fraction of the weights."""
MARGIN = 0.04
"""Fraction of a device's memory that a setting must leave free to count as fitting, in addition to ``FRAGMENTATION``:
together as much as a plan leaves (``UNFILLED``)."""
CHUNKED = 1024
"""Tokens of one chunk in trainers that compute the log-probs of a rollout in chunks."""

_GROUPS = {
    "flexrlhf-003": "flexrlhf/a100",
    "openrlhf-bench": "openrlhf-bench/a800",
    "real-v1-svg": "real-v1/a100",
    "nemo-rl": "nemo-rl/h100",
    "verl-docs": "verl/min",
    "dschat-blog": "dschat",
}


@dataclass(frozen=True)
class Verdict:
    """Whether a setting fits the devices.

    row:        name of the row
    claim:      published cell, or a conclusion from one, such as that half of the fewest devices is too few
    measured:   whether it fits as published
    predicted:  whether it fits as predicted
    """

    row: str
    claim: str
    measured: bool
    predicted: bool

    @property
    def is_cell(self) -> bool:
        """Whether this very setting was tried."""
        return self.claim in ("trains", "step", "generates") or self.claim.endswith("k tokens")

    @property
    def is_right(self) -> bool:
        return self.measured == self.predicted


@dataclass(frozen=True)
class Peak:
    """Bytes of one device (of all devices, if the row counts them all)."""

    row: str
    source: str
    measured: float
    predicted: float

    @property
    def error(self) -> float:
        return abs(self.predicted - self.measured) / self.measured


@dataclass
class MemoryReport:
    verdicts: list[Verdict] = field(default_factory=list)
    peaks: list[Peak] = field(default_factory=list)
    left_out: Counter[str] = field(default_factory=Counter)


@dataclass(frozen=True)
class Known:
    """Models and margin that rows are compared with.

    models:  model shapes by name
    margin:  fraction of a device's memory that must stay free
    """

    models: Mapping[str, Transformer]
    margin: float

    def device(self, device: DeviceClass) -> DeviceClass:
        """Return ``device`` with the memory that may be used."""
        return replace(device, memory_gb=(1 - self.margin) * device.memory_gb)

    def fits(self, problem: PublishedStep) -> bool:
        workload = replace(problem.workload, device=self.device(problem.workload.device))
        return best_step(workload, problem.system, problem.costs, problem.placement) is not None


def read(directory: Path, margin: float = MARGIN) -> MemoryReport:
    known, found = Known(read_models(directory), margin), MemoryReport()
    for row in (*read_rows(directory, "memory_calib"), *_measured(directory)):
        try:
            for item in _items(row, known):
                (found.peaks if isinstance(item, Peak) else found.verdicts).append(item)
        except LeftOut as reason:
            found.left_out[str(reason)] += 1
    return found


def _measured(directory: Path) -> Iterator[Row]:
    """Yield the rows of memory among the measurements; rows of inference are in both files."""
    for row in read_rows(directory, "measurements_calib"):
        if row["kind"] == "memory" and row["metric"] != "gpu_memory":
            yield row


def _items(row: Row, known: Known) -> Iterator[Verdict | Peak]:
    if "MoE" in row["model"] or re.search(r"Mixtral|A\d+B|DeepSeek|235B", row["model"]):
        raise LeftOut("mixture of experts")
    kind = row["kind"]
    if kind in ("formula", "min_total_mem"):
        raise LeftOut("a formula or a rule of thumb, no measurement")
    if "group" in row:
        yield from _measurement(row, known)
    elif kind == "peak":
        yield _peak(row, known.models)
    elif kind == "max_context":
        yield from _context(row, known)
    elif "prime-rl" in row["source"]:
        yield Verdict(row["id"], "trains", row["value"] == "yes", _trains(row, known))
    else:
        yield from _systems(row, known)


def _measurement(row: Row, known: Known) -> Iterator[Verdict | Peak]:
    problem = problem_of(row, Catalogue(known.models))
    if row["metric"] == "fits":
        yield Verdict(row["id"], "step", row["value"] == "yes", known.fits(problem))
        return
    step = best_step(problem.workload, problem.system, problem.costs, problem.placement)
    if step is None:
        raise LeftOut("predicted not to fit")
    yield Peak(row["id"], row["group"], float(row["value"]) * 1e9, max(step.bytes))


# ---------------------------------------------------------------- steps of systems


def _systems(row: Row, known: Known) -> Iterator[Verdict]:
    if row["source"] not in _GROUPS:
        raise LeftOut(f"source {row['source']}")
    if "shadow" in row["model"]:
        yield Verdict(row["id"], "generates", row["value"] == "yes", _shadow(row, known))
        return
    whole = _as_measurement(row)
    value = number(row["value"])
    if row["kind"] == "fits":
        yield Verdict(row["id"], "step", row["value"] == "yes", known.fits(problem_of(whole, Catalogue(known.models))))
    elif value is None:
        raise LeftOut("no value")
    elif row["kind"] == "min_gpus":
        for devices, fits in ((value, True), (value / 2, False)):
            if devices >= 1:
                problem = problem_of(whole | {"n_gpus": str(int(devices))}, Catalogue(known.models))
                yield Verdict(row["id"], f"on {devices:g}", fits, known.fits(problem))
    elif row["kind"] == "max_batch":
        for each in (value, value / 2):
            problem = problem_of(
                whole | {"global_batch": str(int(each * number(row["n_gpus"])))}, Catalogue(known.models)
            )
            yield Verdict(row["id"], f"{each:g} rows", True, known.fits(problem))
    elif row["kind"] == "max_model":
        problem = problem_of(whole | {"model": f"OPT-{value:g}B"}, Catalogue(known.models))
        yield Verdict(row["id"], f"{value:g} B", True, known.fits(problem))


def _as_measurement(row: Row) -> Row:
    """Return the row in the columns of the measurements."""
    setting, group = row["setting"], _GROUPS[row["source"]]
    sizes = re.findall(r"(\d+)B", row["model"].replace("(CodeLlama)", ""))
    text = {name: re.search(pattern, setting) for name, pattern in _PATTERNS.items()}
    stated = {name: found.group(1) if found else "" for name, found in text.items()}
    actor = sizes[0] if sizes else row["params_b"]
    grpo = "GRPO" in setting or "GRPO" in row["system"]
    return {
        **dict.fromkeys(_COLUMNS, ""),
        **{name: row[name] for name in ("id", "system", "gpu", "n_gpus", "kind", "value")},
        "group": group + ("-share" if "AC-Share" in setting else ""),
        "model": row["model"].removesuffix(" actor"),
        "actor_b": actor,
        "critic_b": sizes[-1] if sizes else actor,
        "ref_b": actor if grpo and "LoRA" not in setting else "",
        "algo": "GRPO" if grpo else "PPO",
        "prompt_len": stated["prompt"] or "256",
        "gen_len": stated["gen"] or "256",
        "global_batch": stated["batch"],
        "micro_bs": "1" if grpo else stated["micro"],
        "minibatches": "4" if group == "real-v1/a100" else "1",
        "lora": "16" if "LoRA" in setting else "",
        "gpus_per_node": "8",
        "offload": "none" if row["source"] == "dschat-blog" and "offload" not in setting else "",
    }


_PATTERNS = {
    "prompt": r"prompt (\d+)",
    "gen": r"gen (\d+)",
    "batch": r"PPO batch (\d+)",
    "micro": r"micro-batch (\d+)",
}
_COLUMNS = (
    *("version", "placement", "zero", "tp", "pp", "dp", "n_microbatch", "ppo_epochs", "grad_ckpt", "offload"),
    *("metric", "unit", "notes", "call", "n_nodes", "interconnect"),
)


def _workload(row: Row, model: Transformer, device: DeviceClass, devices: int) -> Workload:
    links = Links(device.link_gb_s, device.node_gb_s)
    return Workload({ACTOR: model}, devices, device, links, devices, 0.0, (1.0,))


def _device(row: Row) -> DeviceClass:
    device = device_of(row)
    if device is None:
        raise LeftOut(f"device {row['gpu']} is not in the catalogue")
    return device


def _shadow(row: Row, known: Known) -> bool:
    """Whether one replica fits one device."""
    device, model = known.device(_device(row)), known.models[model_named(row["model"], known.models)]
    call = Call("generate", model, "vllm", 1, 256.0, (256.0,), 512.0)
    mesh = mesh_of(_workload(row, model, device, 1), 1)
    return frozen_bytes(model, mesh) + decode_bytes(call, mesh, 1) <= capacity_bytes(device)


# ---------------------------------------------------------------- inference


def _context(row: Row, known: Known) -> Iterator[Verdict]:
    """Yield verdicts on one sequence of so many thousand tokens in vLLM, on all devices of the row."""
    device, value = known.device(_device(row)), number(row["value"])
    assert value is not None
    model = known.models[model_named(re.sub("-FP8$", "", row["model"]), known.models)]
    item = 1 if row["dtype"] == "fp8" else 2
    tp = int(number(row["n_gpus"]) or 1)
    mesh = mesh_of(_workload(row, model, device, tp), tp, tp)
    for thousands in (value, value / 2) if value else (1.0,):
        call = Call("generate", model, "vllm", 1, 1024 * thousands - 1, (1.0,), 1024 * thousands)
        prefill = replace(call, kind="forward", width=float(VLLM_TOKENS // 4), prompt=float(VLLM_TOKENS // 4))
        need = frozen_bytes(model, mesh, item) + decode_bytes(call, mesh, 1) + pass_bytes(prefill, mesh, 4) / 4
        yield Verdict(row["id"], f"{thousands:g} k tokens", value > 0, need <= 0.95 * 2**30 * device.memory_gb)


# ---------------------------------------------------------------- peaks


def _peak(row: Row, models: Mapping[str, Transformer]) -> Peak:
    unit = {"GB": 1e9, "GiB": 2**30, "MB": 2**20}.get(row["unit"])
    value = number(row["value"])
    if unit is None or value is None:
        raise LeftOut("no value")
    if row["system"] == "HF Transformers":
        # it prints the figure of the driver, in GiB
        return Peak(row["id"], "Transformers", value * 2**30, _inference_bytes(row, models))
    if "fp8" in row["setting"] or row["dtype"] == "fp8":
        raise LeftOut("8-bit floats in training")
    if row["system"] not in ("torchtitan", "prime-rl trainer (FSDP2)"):
        raise LeftOut(f"system {row['system'] or row['source']} is not described")
    if "offloaded activations" in row["setting"]:
        raise LeftOut("activations in host memory")
    return Peak(row["id"], row["system"], value * unit, _training_bytes(row, models))


def _inference_bytes(row: Row, models: Mapping[str, Transformer]) -> float:
    """Return the bytes on all devices together: weights, keys and values of one row, and the pass over its prompt."""
    model = models[model_named(row["model"], models)]
    tokens = number(row["seq_len"]) or 0
    return 2 * model.parameters * (1 + HF_BYTES) + model.kv_bytes() * tokens + 20 * model.hidden * tokens


def _trains(row: Row, known: Known) -> bool:
    return _training_bytes(row, known.models) <= capacity_bytes(known.device(_device(row))) + CONTEXT_BYTES


def _training_bytes(row: Row, models: Mapping[str, Transformer]) -> float:
    """Return the bytes on one device of a trainer that shards with FSDP2."""
    model, setting = models[model_named(row["model"], models)], row["setting"]
    rank = re.search(r"r=(\d+)", setting)
    if rank:
        outer = 8 * model.hidden + 3 * (model.hidden + model.ffn)
        model = replace(model, adapters=int(rank.group(1)) * outer * model.layers)
    devices = int(number(row["n_gpus"]) or 1)
    shards = re.search(r"FSDP2? ?(?:over )?(\d+)", setting)
    mesh = mesh_of(_workload(row, model, _device(row), devices), int(shards.group(1)) if shards else devices, zero=3)
    width = number(row["seq_len"]) or 0
    in_chunks = setting.startswith("rl")
    call = Call(
        "train", model, "torch", 1, 0.0, (width,), width, recompute="full" if "AC full" in setting else "selective"
    )
    state = trained_bytes(model, mesh, FLOAT_SHARDS)
    rows = int(number(row["micro_batch"]) or 1)
    layers = pass_bytes(replace(call, model=model.as_scorer()), mesh, rows)
    logits = model.vocabulary * (CHUNKED_LOGIT_BYTES * CHUNKED if in_chunks else LOGIT_BYTES * rows * width)
    return state + layers + logits
