"""Choice of the engine that generates (``rollout.engine: auto``): the same on every machine, whatever is installed."""

from __future__ import annotations

from collections.abc import Mapping
from os.path import realpath
from pathlib import Path

from flexrlhf.config.engines import VLLM
from flexrlhf.config.model_names import LLAMA_LIKE
from flexrlhf.config.model_settings import ModelSpec
from flexrlhf.config.placement_settings import PlacementMap
from flexrlhf.config.spec import ParitySpec, RolloutSpec, Spec
from flexrlhf.errors import UserError, either
from flexrlhf.operators.graph import Graph
from flexrlhf.placement.cluster import Cluster, all_compute_in_bfloat16
from flexrlhf.placement.placed import SHADOW, ModelName
from flexrlhf.plan.algorithm_graph import heads_of
from flexrlhf.plan.old_logprobs import recomputes_next_to_generation
from flexrlhf.plan.rollout_graph import compares_cut_logprobs
from flexrlhf.weights.shapes import read_config


def with_rollout_engine(
    spec: Spec, graph: Graph, cluster: Cluster, pending: Mapping[Path, ModelSpec], obstacle: str = ""
) -> tuple[Spec, str]:
    """Return ``spec`` with the engine that generates, and why it is that one; no reason if it is written, or where
    transformers is the only candidate.

    spec:      its models are resolved.
    pending:   directory → model, for models that an earlier run of the command will write.
    obstacle:  why vLLM cannot generate, which ``spec`` does not show.

    Raises UserError for settings that the chosen engine does not have.
    """
    role = graph.generated
    if spec.rollout.engine != "auto":
        return spec, ""
    if role is None:
        return _with_transformers(spec, f"{spec.algorithm.name} trains on responses of the data set"), ""
    if not all_compute_in_bfloat16(spec.cluster, cluster):
        unknown = "not all devices of cluster.nodes are GPUs of known classes that compute in bfloat16"
        return _with_transformers(spec, unknown), ""
    family = _family(spec, role, pending)
    if obstacle := obstacle or _obstacle(spec, graph, role, family):
        return _with_transformers(spec, obstacle), f"transformers, since {obstacle}"
    devices = " and ".join(cluster.classes)
    return _with_engine(spec, "vllm"), f"vllm, since all devices are {devices}, and it serves {family} models"


def _obstacle(spec: Spec, graph: Graph, role: str, family: str) -> str:
    """Return why vLLM cannot generate, or is not chosen; empty for no reason."""
    model, placement = spec.models.of(role), spec.placement
    entries = placement.models if isinstance(placement, PlacementMap) else {}
    has_copies = spec.schedule.lag > 0 or spec.sync.every > 1 or any(ModelName(name).copy for name in entries)
    has_copies |= isinstance(placement, tuple) and len(placement) > len(graph.roles)
    obstacles = {
        f"vllm serves {either(LLAMA_LIKE)} models": family not in LLAMA_LIKE,
        f"the {role} also computes values": heads_of(graph)[role] == "both",
        f"models.{role}.shadow is the copy that generates": model is not None and model.shadow is not None,
        f"placement has {role}.{SHADOW}": ModelName.of(role, SHADOW) in entries,
        "placement.operators has a place for generation": (
            isinstance(placement, PlacementMap) and placement.operators is not None
        ),
        f"vllm samples at a temperature of at least {VLLM.least_temperature}": (
            getattr(spec.algorithm, "temperature", 1.0) < VLLM.least_temperature
        ),
        "top_p, top_k or min_response_tokens cut the distribution that rollout.parity compares (null: it does not)": (
            compares_cut_logprobs(spec)
        ),
        "rollout.logprobs: recompute needs a copy of the actor": has_copies and recomputes_next_to_generation(spec),
    }
    return next((text for text, is_so in obstacles.items() if is_so), "")


def _family(spec: Spec, role: str, pending: Mapping[Path, ModelSpec]) -> str:
    """Return the family of the model that generates."""
    model = spec.models.of(role)
    assert model is not None, f"{role} is resolved"
    while model.path is not None and Path(realpath(model.path)) in pending:
        model = pending[Path(realpath(model.path))]
    return str(read_config(role, model)["model_type"])


def _with_transformers(spec: Spec, obstacle: str) -> Spec:
    """Return ``spec`` with transformers, which generates since vLLM has an ``obstacle``. Raises UserError for settings
    that it does not have."""
    surplus = spec.rollout.surplus("transformers")
    if spec.rollout.parity != ParitySpec() and spec.sync.dtype is None:
        surplus.append("parity")
    if surplus:
        raise UserError(
            f"rollout.{surplus[0]}: has no effect, since rollout.engine auto is transformers here ({obstacle}); remove "
            f"{', '.join(surplus)}, or write an engine that has it"
        )
    return _with_engine(spec, "transformers")


def _with_engine(spec: Spec, engine: str) -> Spec:
    """Return ``spec`` with an engine that remains one that is not written: a short YAML leaves it out."""
    written, settings = spec.rollout.model_fields_set - {"engine"}, {**dict(spec.rollout), "engine": engine}
    return spec.model_copy(update={"rollout": RolloutSpec.model_construct(written, **settings)})
