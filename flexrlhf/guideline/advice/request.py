"""Request of ``advise``: models, devices, lengths and batch, as a Spec whose placement is still open, with defaults."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from copy import deepcopy
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

import typer
import yaml

from flexrlhf.api import (
    MOST_TOKENS,
    ClusterSpec,
    DeviceClass,
    EngineFacts,
    Families,
    FoundModel,
    Spec,
    UserError,
    apply_override,
    instead_of,
    load_spec,
    make_graph,
    nearest,
    read_config,
    read_yaml,
)

PPO_ROLES = ("actor", "critic", "ref", "reward")
MODEL, GPUS, GPU_TYPE = "llama-7b", 8, "A100-80G"


@dataclass(frozen=True)
class AdviceRequest:
    """Problem that is described without a YAML.

    models:           PPO's roles → name, directory or config file; roles of other algorithms use these.
    nodes:            as in ``cluster.nodes``.
    prompt_tokens:    longest prompt.
    response_tokens:  longest response.
    prompts:          prompts of a step.
    samples:          samples of each prompt; None: the algorithm's default, 1 for PPO.
    mini_batches:     optimizer steps of a step.
    engine:           engine of all models; None: any that fits.
    rollout:          engine of generation, where the algorithm generates; None: vLLM where a class supports it.
    lora:             rank of adapters on the trained models.
    algorithm:        its name.
    named:            roles that the spec must have.
    """

    models: Mapping[str, str]
    nodes: tuple[Mapping[str, Any], ...]
    prompt_tokens: int = 1024
    response_tokens: int = 1024
    prompts: int = 512
    samples: int | None = None
    mini_batches: int = 8
    engine: str | None = None
    rollout: str | None = None
    lora: int | None = None
    algorithm: str = "ppo"
    named: tuple[str, ...] = ()

    def spec(self, overrides: tuple[str, ...] = (), command: str = "advise") -> Spec:
        """Return the spec. Raises UserError for unknown models and impossible sizes.

        overrides:  of ``--set``.
        command:    for the sentence.
        """
        # roles, devices and models follow from the overrides
        plain = self._parsed(overrides, command)
        graph = make_graph(plain)
        roles = (*graph.roles, *(role for role in self.named if role not in graph.roles))
        models = {role: self._model(role, role in graph.trained, plain) for role in roles}
        if graph.generated is None:
            return self._parsed(overrides, command, models)
        engine = self.rollout or self._usual_rollout(self._parsed(overrides, command, models))
        return self._parsed(overrides, command, models, {"engine": engine})

    def _parsed(
        self,
        overrides: Sequence[str],
        command: str,
        models: Mapping[str, Any] | None = None,
        rollout: Mapping[str, Any] | None = None,
    ) -> Spec:
        raw: dict[str, Any] = {
            "name": "advised",
            "algorithm": {
                "name": self.algorithm,
                "prompts_per_step": self.prompts,
                "num_mini_batches": self.mini_batches,
            },
            "models": deepcopy(dict(models or {})),
            "data": {
                "path": "prompts.jsonl",
                "max_prompt_tokens": self.prompt_tokens,
                "max_response_tokens": self.response_tokens,
            },
            "cluster": {"nodes": [dict(node) for node in self.nodes]},
        }
        if self.samples is not None:
            raw["algorithm"]["samples_per_prompt"] = self.samples
        if rollout is not None:
            raw["rollout"] = dict(rollout)
        for override in overrides:
            apply_override(raw, override)
        return Spec.parse(raw, command)

    def _usual_rollout(self, spec: Spec) -> str:
        """Return the engine that generates where none is written: vLLM if a device and the model allow it."""
        classes = _classes(spec)
        can = not classes or any(each.capability >= EngineFacts.of_auto().least_capability for each in classes)
        actor = spec.models.of("actor")
        config = self._source("actor").config if actor is None else read_config("actor", actor)
        return EngineFacts.of_auto().name if can and config["model_type"] in Families.SERVED else "transformers"

    def _model(self, role: str, trained: bool, spec: Spec) -> dict[str, Any]:
        """Return the settings of ``role``, for the devices of ``spec``."""
        dtype = "bfloat16" if all(each.bf16 for each in _classes(spec)) else "float16"
        model: dict[str, Any] = {**self._source(role).weights, "dtype": dtype}
        if self.engine is not None:
            model["engine"] = self.engine
        if self.lora is not None and trained:
            model["lora"] = {"rank": self.lora, "alpha": 2 * self.lora}
        return model

    def _source(self, role: str) -> FoundModel:
        """Return the model of the role, or of PPO's role that does the same: of the reward model for all
        that score."""
        source = role if role in self.models else "critic" if role.endswith("critic") else "reward"
        return FoundModel.find(self.models[source], f"models.{source}")


def _classes(spec: Spec) -> list[DeviceClass]:
    """Return the classes of the devices of ``spec`` that have figures."""
    return [
        DeviceClass.KNOWN[node.device_class] for node in spec.cluster.nodes if node.device_class in DeviceClass.KNOWN
    ]


SETTINGS = {
    "algorithm": "algorithm.name=NAME",
    "model": "models.actor.path=DIRECTORY",
    "critic": "models.critic.path=DIRECTORY",
    "ref": "models.ref.path=DIRECTORY",
    "reward": "models.reward.path=DIRECTORY",
    "gpus": "cluster.nodes=[{count: 1, devices: 8, class: A100-80G}]",
    "gpu_type": "cluster.nodes=[{count: 1, devices: 8, class: A100-80G}]",
    "cluster": "cluster.nodes=[{count: 1, devices: 8, class: A100-80G}]",
    "prompt_tokens": "data.max_prompt_tokens=N",
    "response_tokens": "data.max_response_tokens=N",
    "prompts": "algorithm.prompts_per_step=N",
    "samples": "algorithm.samples_per_prompt=N",
    "mini_batches": "algorithm.num_mini_batches=N",
    "engine": "models.actor.engine=NAME",
    "rollout": "rollout.engine=NAME",
    "lora": "models.actor.lora={rank: N}",
}
"""Option → setting to use with a config, after ``--set``."""
OVERRIDES = ("algorithm", "prompt_tokens", "response_tokens", "prompts", "samples", "mini_batches", "rollout")
"""Options that are one setting of a config, which they replace."""

Text = str | None
Count = int | None
Algorithm = Annotated[Text, typer.Option(help="algorithm, such as grpo or dpo; default: ppo")]
Model = Annotated[
    Text, typer.Option(help="model of all roles: a name, a model directory or a config.json; default: llama-7b")
]
Critic = Annotated[Text, typer.Option(help="critic model; default: as --reward, else --model")]
Ref = Annotated[Text, typer.Option(help="reference model; default: as --model")]
Reward = Annotated[Text, typer.Option(help="reward model; default: as --critic, else --model")]
Gpus = Annotated[Count, typer.Option(min=1, help="number of devices, eight in a node; default: 8")]
GpuType = Annotated[Text, typer.Option(help="device class; default: A100-80G")]
ClusterFile = Annotated[Path | None, typer.Option(help="YAML with a list of nodes, instead of --gpus")]
PromptTokens = Annotated[Count, typer.Option(min=1, max=MOST_TOKENS, help="maximum prompt length; default: 1024")]
ResponseTokens = Annotated[Count, typer.Option(min=1, max=MOST_TOKENS, help="maximum response length; default: 1024")]
Prompts = Annotated[Count, typer.Option(min=1, help="prompts in a step; default: 512")]
Samples = Annotated[Count, typer.Option(min=1, help="responses to each prompt; default: the algorithm's, 1 for PPO")]
MiniBatches = Annotated[Count, typer.Option(min=1, help="optimizer steps in a step; default: 8")]
Engine = Annotated[
    Text, typer.Option(help="training engine, as models.ROLE.engine; default: torch, deepspeed if only that fits")
]
Rollout = Annotated[
    Text, typer.Option(help="generation engine: auto, transformers, torch or vllm; default: vllm where a class has it")
]
Lora = Annotated[Count, typer.Option(min=1, help="rank of LoRA adapters; default: all weights are trained")]


@dataclass(frozen=True)
class AdviceOptions:
    """Options of the command line under their names; None if one is not given."""

    algorithm: Algorithm = None
    model: Model = None
    critic: Critic = None
    ref: Ref = None
    reward: Reward = None
    gpus: Gpus = None
    gpu_type: GpuType = None
    cluster: ClusterFile = None
    prompt_tokens: PromptTokens = None
    response_tokens: ResponseTokens = None
    prompts: Prompts = None
    samples: Samples = None
    mini_batches: MiniBatches = None
    engine: Engine = None
    rollout: Rollout = None
    lora: Lora = None

    @property
    def given(self) -> dict[str, Any]:
        return {name: value for name, value in asdict(self).items() if value is not None}

    def spec(self, config: Path | None, overrides: tuple[str, ...] = ()) -> Spec:
        """Return the spec of ``config``, else of the options.

        Raises UserError for an option next to a ``config`` that is no single setting of it.
        """
        if config is None:
            return self.request().spec(overrides)
        for name, value in self.given.items():
            if name not in OVERRIDES:
                raise UserError(
                    f"{_option(name)} {value}: describes models and devices where there is no config; for {config} "
                    f"use --set '{SETTINGS[name]}'"
                )
        own = (f"{SETTINGS[name].partition('=')[0]}={value}" for name, value in self.given.items())
        return load_spec(config, (*own, *overrides))

    def request(self) -> AdviceRequest:
        """Return the request. Raises UserError for unknown models or classes, and for devices given twice."""
        for name in ("model", "critic", "ref", "reward"):
            if name in self.given:
                FoundModel.find(self.given[name], _option(name))
        actor = self.model or MODEL
        models = {
            "actor": actor,
            "critic": self.critic or self.reward or actor,
            "ref": self.ref or actor,
            "reward": self.reward or self.critic or actor,
        }
        given = {name: value for name, value in self.given.items() if name in AdviceRequest.__dataclass_fields__}
        return AdviceRequest(
            models, self._nodes(), named=tuple(role for role in PPO_ROLES if role in self.given), **given
        )

    def _nodes(self) -> tuple[Mapping[str, Any], ...]:
        if self.cluster is None:
            return nodes_of_eight(self.gpus or GPUS, self.gpu_type or GPU_TYPE)
        for name in ("gpus", "gpu_type"):
            if name in self.given:
                raise UserError(f"{_option(name)} {self.given[name]}: --cluster {self.cluster} sets it; leave one out")
        return read_nodes(self.cluster)


def _option(name: str) -> str:
    return f"--{name.replace('_', '-')}"


def nodes_of_eight(gpus: int, gpu_type: str) -> tuple[dict[str, Any], ...]:
    """Nodes of eight with ``gpus`` devices of one class. Raises UserError for an unknown class or an uneven number."""
    device_class = DeviceClass.find(gpu_type, "--gpu-type")
    if gpus <= DeviceClass.PER_NODE:
        return ({"count": 1, "devices": gpus, "class": device_class},)
    if gpus % DeviceClass.PER_NODE:
        low = gpus // DeviceClass.PER_NODE * DeviceClass.PER_NODE
        raise UserError(
            f"--gpus {gpus}: nodes have {DeviceClass.PER_NODE} devices; use {low} or {low + DeviceClass.PER_NODE}, or "
            f"describe the nodes in a file for --cluster"
        )
    return ({"count": gpus // DeviceClass.PER_NODE, "devices": DeviceClass.PER_NODE, "class": device_class},)


def read_nodes(path: Path) -> tuple[dict[str, Any], ...]:
    """Nodes of a cluster file: a list, or a mapping with ``nodes`` or ``cluster.nodes``.

    Raises UserError for a file that is missing or has no such list.
    """
    if not path.is_file():
        raise UserError(f"--cluster {path}: no such file{instead_of(path, '.yaml', '.yml')}")
    try:
        content = read_yaml(path.read_text())
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        text = str(error) if isinstance(error, yaml.YAMLError) else "not a text"
        raise UserError(f"--cluster {path}: not YAML: {text}") from None
    for key in ("cluster", "nodes"):
        content = content[key] if isinstance(content, dict) and key in content else content
    if not isinstance(content, list) or not content or not all(isinstance(node, dict) for node in content):
        raise UserError(
            f"--cluster {path}: expected a list of nodes such as [{{count: 2, devices: 8, class: A100-80G}}]"
        )
    return tuple(_node(node, path) for node in content)


def _node(node: dict[str, Any], path: Path) -> dict[str, Any]:
    known = ClusterSpec.node_keys()
    for key in node:
        if key not in known:
            raise UserError(f"--cluster {path}: unknown key {key!r}{nearest(str(key), known)}")
    if "class" not in node:
        raise UserError(f"--cluster {path}: a node has no class; known: {', '.join(DeviceClass.KNOWN)}")
    return {**node, "class": DeviceClass.find(str(node["class"]), f"--cluster {path}: class")}
