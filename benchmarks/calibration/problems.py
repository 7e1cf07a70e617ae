"""Published rows of RLHF systems as workloads: system, devices, models, lengths and meshes."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from benchmarks.calibration.rows import Row, device_of
from benchmarks.systems.engines import TABLES, EngineTables
from benchmarks.systems.profiles import SYSTEMS, System
from benchmarks.systems.workload import ACTOR, CRITIC, REF, REWARD, ROLLOUT, SystemPlacement, Workload
from flexrlhf.guideline.costs.analytic import AnalyticCosts
from flexrlhf.guideline.costs.cost_model import Links, Transformer
from flexrlhf.placement.devices import DeviceClass

NODE_GB_S = {"flexrlhf": 100.0, "real": 400.0, "hybridflow": 25.0, "nemo-rl": 400.0}
"""GB/s between nodes, if the source of the rows states it (hardware.yaml, clusters); else the device's."""

_SYSTEMS = {
    ("flexrlhf", "DeepSpeed-Chat"): "deepspeed-chat",
    ("openrlhf-bench", "DeepSpeed-Chat"): "deepspeed-chat, no hybrid engine",
    ("dschat", "DeepSpeed-Chat"): "deepspeed-chat 0.9, hybrid engine",
    ("real-v1", "OpenRLHF"): "openrlhf, untuned",
    ("real-v1", "ReaL-Heuristic"): "real v1, heuristic",
    ("real-v1", "ReaL"): "real v1",
    ("", "DeepSpeed-Chat"): "deepspeed-chat, hybrid engine",
    ("", "DeepSpeed-Chat HE"): "deepspeed-chat, hybrid engine",
    ("", "trlX"): "trlx",
    ("", "trlX-coexisted"): "trlx",
    ("", "trlX-standalone"): "trlx, reward alone",
    ("", "FlexRLHF-Interleave1"): "flexrlhf, interleaving 1",
    ("", "FlexRLHF-Interleaving"): "flexrlhf, interleaving 1",
    ("", "FlexRLHF-Interleave2"): "flexrlhf, interleaving 2",
    ("", "FlexRLHF-Disaggregated"): "flexrlhf, disaggregated",
    ("", "OpenRLHF"): "openrlhf",
    ("", "OpenRLHF-Ray+vLLM"): "openrlhf",
    ("", "OpenRLHF-Ray"): "openrlhf, no vllm",
    ("", "HybridFlow"): "hybridflow",
    ("", "verl"): "verl",
    ("", "NeMo-Aligner"): "nemo-aligner",
    ("", "RLinf"): "rlinf",
    ("", "NeMo-RL"): "nemo-rl",
    ("", "NeMo-RL colocated GRPO"): "nemo-rl",
    ("", "ReaL-Heuristic"): "real, heuristic",
    ("", "ReaL"): "real",
}

_ALIASES = {
    "deepseekr1distillqwen1.5b": "Qwen2.5-1.5B",
    "deepseekr1distillqwen7b": "Qwen2.5-7B",
    "qwen2.5math7b": "Qwen2.5-7B",
    "qwen27b": "Qwen2.5-7B",
    "qwen232b": "Qwen2.5-32B",
    "qwen270b": "Qwen2.5-72B",
    "llama38b": "Llama-3.1-8B",
    "llama370b": "Llama-3.1-70B",
    "llama3.18b": "Llama-3.1-8B",
    "llama3.170b": "Llama-3.1-70B",
    "llama234b": "CodeLlama-34B",
    "opt13.2b": "OPT-13B",
}
# families of the groups whose four models are named by billions of parameters
_FAMILIES = {
    "flexrlhf": {7: "LLaMA-7B", 13: "LLaMA-13B", 33: "LLaMA-33B", 65: "LLaMA-65B"},
    "real": {8: "ReaL-LLaMA3-7B", 14: "ReaL-LLaMA3-13B", 35: "ReaL-LLaMA3-34B", 71: "ReaL-LLaMA3-70B"},
    "": {7: "LLaMA-2-7B", 13: "LLaMA-2-13B", 34: "CodeLlama-34B", 70: "LLaMA-2-70B"},
}

_RECIPES = {("NeMo-RL", "Qwen3-32B"): "off"}
"""Activation checkpointing of recipes that leave it at their default, by system and model
(examples/configs/recipes/llm/performance of NeMo-RL; those of 8B set it)."""
DSCHAT_LOG = "dschat-log"
"""Source of rows of DeepSpeed-Chat's published log, whose command sets no activation checkpointing and keeps a moving
average of the actor."""
HH_PROMPT = 150.0
"""Mean tokens of a prompt of Anthropic's HH set, in rows that name the set and no length (an assumption)."""
OPENRLHF_ROWS = 128
"""Rows of an optimizer step in OpenRLHF's recipes, which its README's table does not repeat."""
HH_RESPONSE = 350.0
"""Mean tokens of a response to such prompts if the longest has 1,024 (NeMo-Aligner's table: 323 to 351), for rows whose
lengths are limits, of an engine whose rows end apart: OpenRLHF's with vLLM."""
SENT_ROWS = {7: 16, 13: 8, 34: 4, 70: 4}
"""Rows of a micro-batch in OpenRLHF's benchmark by billions of parameters (34: as 70), for rows that do not say."""
MATH_PROMPT = 100.0
"""The same of mathematical questions (OpenMathInstruct-2: about 100, by its source)."""


@dataclass(frozen=True)
class Catalogue:
    """Model shapes by name, and the systems of the field and engines with their constants."""

    models: Mapping[str, Transformer]
    systems: Mapping[str, System] = field(default_factory=lambda: SYSTEMS)
    tables: EngineTables = TABLES


class LeftOut(ValueError):
    """Reason why a row is no test."""


class NothingFits(LeftOut):
    """A published run is predicted not to fit."""


@dataclass(frozen=True)
class PublishedStep:
    """A published row as a workload of a system.

    row:        the row
    system:     the system that ran it
    workload:   models, batch and lengths
    placement:  its placement, if the row states it
    tables:     profiles of the engines
    planner:    the system that chose the meshes, if it is another
    """

    row: Row
    system: System
    workload: Workload
    placement: SystemPlacement | None = None
    tables: EngineTables = TABLES
    planner: System | None = None

    @property
    def costs(self) -> AnalyticCosts:
        """Cost model of the system."""
        return self.tables.costs(self.system.overheads)


def source_of(row: Row) -> str:
    """Return the source of a row: one publication or repository."""
    return row["group"].split("/")[0]


def number(text: str) -> float | None:
    """Return the first number of a cell; None without one."""
    found = re.search(r"\d+(?:\.\d+)?", text)
    return float(found.group()) if found else None


def system_of(row: Row, systems: Mapping[str, System]) -> System:
    """Return the system of a row. Raises LeftOut for one that is not described."""
    source = source_of(row)
    name = _SYSTEMS.get((source, row["system"])) or _SYSTEMS.get(("", row["system"]))
    if name is None:
        raise LeftOut(f"system {row['system']} is not described")
    system = systems[name]
    if source == "real" and "graph off" in row["placement"] + row["call"]:
        system = systems["real, no graphs"]
    if "heuristic" in row["placement"] and source == "real":
        system = replace(system, layout="symmetric", placements=("co-located",))
    if row["system"] == "verl" and "Megatron" in row["version"]:
        system = replace(system, trainer="megatron")
    checkpointing = _RECIPES.get((row["system"].split()[0], row["model"]), row["grad_ckpt"])
    if row.get("source") == DSCHAT_LOG:
        checkpointing = "off"
    if checkpointing in ("on", "off"):
        system = replace(system, recompute="full" if checkpointing == "on" else "none")
    if row["offload"] == "none":
        system = replace(system, offloads="no")
    if "async" in row["placement"]:  # a separate engine neither sleeps nor wakes
        system = replace(system, ahead=True, placements=("disaggregated",))
    return system


def problem_of(row: Row, known: Catalogue) -> PublishedStep:
    """Return the row as a workload. Raises LeftOut if it is no test of a prediction."""
    if "MoE" in row["model"] or re.search(r"A\d+B|3A\b|DeepSeek.?(V3|671)|\d3A", row["model"]):
        raise LeftOut("mixture of experts")
    device = device_of(row)
    if device is None:
        raise LeftOut(f"device {row['gpu'] or 'unstated'} is not in the catalogue")
    system = system_of(row, known.systems)
    prompt, responses = _lengths(row)
    devices = int(number(row["n_gpus"]) or 0)
    if not devices:
        raise LeftOut("number of devices unstated")
    generate_tp, train_split = _meshes(row)
    workload = Workload(
        models=_roles(row, known.models),
        devices=devices,
        device=device,
        links=_links(row, device),
        rows=_rows(row),
        prompt=prompt,
        responses=responses,
        minibatches=_minibatches(row),
        per_node=int(number(row["gpus_per_node"]) or 8),
        micro_rows=int(number(row["micro_bs"]) or 0) or None,
        decode_rows=_decode_rows(row),
        sent_rows=_sent_rows(row),
        generate_tp=generate_tp,
        train_split=train_split,
    )
    planner = known.systems["real"] if system.name == "real, no graphs" else None
    return PublishedStep(row, system, workload, _placement(row, workload), known.tables, planner)


def _rows(row: Row) -> int | None:
    return int(number(row["global_batch"]) or 0) or None


def _minibatches(row: Row) -> int:
    """Return the optimizer steps of a step in all epochs."""
    usual = 1024 // OPENRLHF_ROWS if source_of(row) == "openrlhf" else 1
    return int(number(row["minibatches"]) or usual) * int(number(row["ppo_epochs"]) or 1)


def _decode_rows(row: Row) -> int | None:
    """Return the rows decoded together: engines without a scheduler decode as many as they train on at once."""
    if "DeepSpeed" in row["system"] or row["system"] == "OpenRLHF-Ray":
        return int(number(row["micro_bs"]) or 0) or None
    return 256 if source_of(row) in ("nemo-rl", "verl") else None


def _asks_vllm(row: Row) -> bool:
    return row["system"] in ("OpenRLHF", "OpenRLHF-Ray+vLLM")


def _sent_rows(row: Row) -> int | None:
    """Return the prompts that a device of OpenRLHF's actor sends to vLLM at a time."""
    if not _asks_vllm(row):
        return None
    return int(number(row["micro_bs"]) or 0) or SENT_ROWS.get(round(number(row["actor_b"]) or 0))


def _links(row: Row, device: DeviceClass) -> Links:
    return Links(device.link_gb_s, NODE_GB_S.get(source_of(row), device.node_gb_s))


def _lengths(row: Row) -> tuple[float, tuple[float, ...]]:
    """Return tokens of prompt and responses. Raises LeftOut if no mean is published."""
    text = row["gen_len"]
    if not text or "unstated" in text or text.startswith("max"):
        raise LeftOut("mean response length unpublished")
    mean = number(text)
    assert mean is not None
    prompt = row["prompt_len"]
    longest = re.search(r"max (?:seq|context) ([\d,]+)", row["notes"])
    if "HH" in prompt:
        return HH_PROMPT, spread(mean, 1024.0)
    if source_of(row) in ("openrlhf", "openrlhf-bench") and _asks_vllm(row):
        return mean, spread(HH_RESPONSE, mean)
    if source_of(row) == "nemo-rl":  # its mean counts the prompt
        return MATH_PROMPT, spread(mean - MATH_PROMPT, _thousands(longest) or 4 * mean)
    if source_of(row) == "verl":
        return float(number(prompt.replace("max", "")) or 0) if "~" in prompt else 150.0, spread(
            mean, _thousands(longest) or 28672.0
        )
    if not number(prompt):
        raise LeftOut("prompt length unpublished")
    return float(number(prompt) or 0), (mean,)


def _thousands(found: re.Match[str] | None) -> float | None:
    return float(found.group(1).replace(",", "")) if found else None


def spread(mean: float, longest: float, count: int = 32) -> tuple[float, ...]:
    """Return lengths with this mean and maximum: quantiles of ``longest * u ** a``, a one-parameter family."""
    longest = max(longest, mean)
    power = longest / mean - 1
    return tuple(max(1.0, longest * ((index + 0.5) / count) ** power) for index in range(count))


def _roles(row: Row, models: Mapping[str, Transformer]) -> dict[str, Transformer]:
    source = source_of(row)
    actor, critic = _pair(row, models)
    actor, critic = (_with_adapters(row, model) for model in (actor, critic))
    if row["algo"] not in ("PPO", ""):
        roles = {ACTOR: actor}
        return roles | ({REF: actor} if row["ref_b"] else {})
    roles = {ACTOR: actor, REF: replace(actor, adapters=0), CRITIC: critic.as_scorer()}
    roles[REWARD] = replace(critic.as_scorer(), adapters=0)
    if row.get("source") == DSCHAT_LOG:
        roles["average"] = roles[REF]
    if row["group"].endswith("share") and source == "flexrlhf":
        del roles[CRITIC]
    return roles


def _with_adapters(row: Row, model: Transformer) -> Transformer:
    """Return ``model`` with adapters of the row's rank on all seven matrix products of a layer."""
    rank = int(number(row["lora"]) or 0)
    outer = 4 * model.hidden * 2 + 3 * (model.hidden + model.ffn)
    return replace(model, adapters=rank * outer * model.layers)


def _pair(row: Row, models: Mapping[str, Transformer]) -> tuple[Transformer, Transformer]:
    """Shapes of actor and critic."""
    source = source_of(row)
    sizes = _FAMILIES.get(source, _FAMILIES[""])
    if source in ("flexrlhf", "real", "real-v1", "openrlhf", "openrlhf-bench", "hybridflow"):
        actor = number(row["actor_b"])
        if actor is None:
            raise LeftOut("model sizes unstated")
        critic = number(row["critic_b"]) or actor
        found = [sizes.get(round(size)) for size in (actor, critic)]
        if None in found:
            raise LeftOut(f"models of {row['actor_b']} B are not described")
        return models[str(found[0])], models[str(found[1])]
    name = model_named(row["model"], models)
    if source == "dschat" and name.startswith("OPT"):
        return models[name], models["OPT-350M"]
    return models[name], models[name]


def model_named(text: str, models: Mapping[str, Transformer]) -> str:
    """The shape that a cell names. Raises LeftOut if there is none."""
    plain = re.sub(r"[^a-z0-9.]", "", re.split(r"\s+(actor|shadow|\()", text)[0].lower()).removesuffix("instruct")
    known = {re.sub(r"[^a-z0-9.]", "", name.lower()): name for name in models}
    name = known.get(plain) or _ALIASES.get(plain)
    if name is None:
        raise LeftOut(f"model {text} is not described")
    return name


def _placement(row: Row, workload: Workload) -> SystemPlacement | None:
    text = row["placement"]
    counts = {key: int(count) for key, count in re.findall(r"(ref|rm|actor|critic|vllm)(\d+)", text)}
    if len(counts) >= 4:
        order = [key for key in ("ref", "rm", "critic", "actor", "vllm") if key in counts]
        names = {"ref": REF, "rm": REWARD, "critic": CRITIC, "actor": ACTOR, "vllm": ROLLOUT}
        groups = {names[key]: (index,) for index, key in enumerate(order)}
        return SystemPlacement("standalone", tuple(counts[key] for key in order), groups)
    nodes = re.search(r"actor (\d+) nodes, critic\S* (\d+) nodes", text)
    if nodes:
        first, second = (int(count) * workload.per_node for count in nodes.groups())
        groups = {ACTOR: (0,), REF: (0,), CRITIC: (1,), REWARD: (1,)}
        return SystemPlacement("split", (first, second), groups)
    halves = re.search(r"(\d+) generation GPUs \+ (\d+) training GPUs", text)
    if halves:
        generation, training = (int(count) for count in halves.groups())
        groups = {role: (0,) for role in workload.models} | {ROLLOUT: (1,)}
        return SystemPlacement("disaggregated", (training, generation), groups)
    return None


def _meshes(row: Row) -> tuple[int | None, tuple[int, int] | None]:
    """Return the tensor-parallel size of generation; tensor-parallel size and pipeline stages of training."""
    tp, pp = row["tp"], row["pp"]
    stated = re.search(r"gen (\d+); train (\d+)", tp)
    if stated:
        stages = re.search(r"train (\d+)", pp)
        return int(stated.group(1)), (int(stated.group(2)), int(stages.group(1)) if stages else 1)
    if source_of(row) == "verl" and number(tp):
        return int(number(tp) or 1), None
    return None, None
