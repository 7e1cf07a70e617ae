"""Seeded random specs of every algorithm and every setting; placements and schedules as in ``random_specs``."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from random import Random
from typing import Any

from random_settings import APART, Examples, Raw, random_settings
from random_specs import (
    INIT,
    add_tensor_parallel,
    chance,
    classes_of,
    nodes_of,
    placement_of,
    planned,
    rollout_of,
    settings_of,
    with_parts_of_rows,
    with_rollout_stages,
    with_shards_in_nodes,
    with_stages,
)

from flexrlhf.config.algorithms import ALGORITHMS, KINDS
from flexrlhf.config.algorithms.base import ImportanceSpec
from flexrlhf.config.algorithms.policy_sections import LagrangeSpec
from flexrlhf.config.data_settings import DataSpec, EvalSpec, SourceSpec
from flexrlhf.config.environment_settings import EnvironmentSpec
from flexrlhf.config.model_settings import ModelSpec
from flexrlhf.config.output_settings import SaveSpec
from flexrlhf.config.presets.filling import PEERS
from flexrlhf.config.reward_sources import FunctionSource, ModelSource, RuleSource, ServiceSource
from flexrlhf.config.spec import RolloutSpec, Spec, SyncSpec
from flexrlhf.errors import UserError
from flexrlhf.operators.graph import Graph
from flexrlhf.plan.algorithm_graph import make_graph
from flexrlhf.plan.pipeline import make_plan
from flexrlhf.plan.plan import Plan

CALLED = (FunctionSource, ServiceSource, RuleSource)
TEXTS = (
    "rows.jsonl",
    "on",
    "1e-6",
    "~",
    "2026-01-31",
    "00",
    "0x1f",
    "a: b",
    "- c",
    "grüße/数据.jsonl",
    "no\u2028line",
    "a ",
)
"""Strings that YAML would read as something else without quotes."""
URLS = ("http://localhost:9000/score", ["https://a.example/1", "https://b.example/2"])
READ_BY = ("DataSpec", "SourceSpec", "EvalSpec", "PtxSpec")
"""Sections that define how rows are read."""
NOTHING: tuple[Any, ...] = ()
"""Examples of a setting that follows from others, or that is added elsewhere."""
ADDED = (
    *("algorithm", "models", "data", "reward", "cost", "cluster", "environment", "placement", "schedule", "sync"),
    *("rollout", "eval", "save"),
)
"""Sections that are made by functions of their own."""
PLACED = (
    *(
        "path",
        "init",
        "new_head",
        "share",
        "engine",
        "zero",
        "shard",
        "tp",
        "pp",
        "cp",
        "ep",
        "lora",
        "config",
        "dtype",
    ),
    *("shadow", "offload_optimizer", "offload_parameters", "offload_activations", "tiled_mlp", "retokenize"),
    *("max_text_tokens", *ModelSpec.OF_ROUTERS),
)
"""Settings of a model's placement and engine: ``random_specs``."""
EXAMPLES: Examples = {
    "Spec.name": ("a", "run-1.2_x", "0", "1e-6", "2026-01-31", "true"),
    "Spec.steps": (3, 4, 5, 1_000_000),
    # planning puts steps in its place: test_epochs.py
    "Spec.epochs": NOTHING,
    "Spec.seed": (0, 1, 2**63 - 1),
    "Spec.runs": TEXTS,
    "Spec.loggers": (
        [],
        [{"name": "wandb", "project": "p", "mode": "offline"}],
        [{"name": "wandb", "project": "p", "entity": "team", "group": "g"}],
        [{"name": "mlflow", "tracking_uri": "http://host:5000", "experiment": "e"}, {"name": "tensorboard"}],
    ),
    "Spec.timeout_seconds": (1, 1.5, 86400),
    **dict.fromkeys((f"Spec.{name}" for name in ADDED), NOTHING),
    "EnvironmentSpec.path": ("games.py:Game", "package.games:Game", None),
    "EnvironmentSpec.tools": ([], ["tools.py:search"], ["tools.py:search", "package.tools:add"]),
    # where path is a program: _with_environment
    "EnvironmentSpec.api": NOTHING,
    "EnvironmentSpec.python": NOTHING,
    "EnvironmentSpec.options": ({}, {"level": 3, "on": "1e-6"}),
    "EnvironmentSpec.sequences": (1, 2, 3),
    "EnvironmentSpec.tool_format": ("hermes", "mistral", "auto", r"<(?P<name>\w+)>(?P<arguments>.*?)</\w+>"),
    **dict.fromkeys([f"{kind.__name__}.name" for kind in KINDS.values()], NOTHING),
    **dict.fromkeys([f"{kind.__name__}.prompts_per_step" for kind in KINDS.values()], (4, 6, 8, 12, 24)),
    **dict.fromkeys([f"{kind.__name__}.num_mini_batches" for kind in KINDS.values()], (1, 2, 3, 4)),
    **dict.fromkeys([f"{kind.__name__}.stop" for kind in KINDS.values()], ("\n\n", ["###", " yes", "\u00e9"], [])),
    # code of one's own, with its settings
    **{
        f"{kind.__name__}.{name}": NOTHING
        for kind in KINDS.values()
        for name in ("graph", "loop", "settings", "protocols")
    },
    **dict.fromkeys([f"{kind.__name__}.min_response_tokens" for kind in KINDS.values()], (0, 1, 4)),
    "ReinforceSpec.samples_per_prompt": (2, 3),
    "KlSpec.horizon": (10000, 1000),
    "OverlongSpec.buffer_tokens": (None, 1, 4),
    "LagrangeSpec.initial": (0.5, 1, 5.0),
    "PtxSpec.path": TEXTS,
    "DataSpec.path": NOTHING,
    "DataSpec.sources": NOTHING,
    "SourceSpec.weight": (1, 0.3, "1/3", 12),
    **dict.fromkeys([f"{name}.path" for name in ("SourceSpec", "EvalSpec")], TEXTS),
    **dict.fromkeys([f"{name}.columns" for name in READ_BY], ({}, {"prompt": "question", "0": "a.b"})),
    **dict.fromkeys([f"{name}.template" for name in READ_BY], ("{a}", "{question}\n#### {{x}}", " {on}: ~")),
    **dict.fromkeys([f"{name}.system" for name in READ_BY], TEXTS),
    "DataSpec.tokenizer": TEXTS,
    "DataSpec.chat_template": TEXTS,
    "DataSpec.end_token": ("eos", "<|user|>"),
    "DataSpec.max_response_tokens": (4, 8, 256),
    "SaveSpec.best": (None, None, "eval_reward_mean", "eval_loss"),
    "DebugSpec.replay": ("runs/other", None),
    "DebugSpec.late_replies_of": NOTHING,
    "ModelSource.model": NOTHING,
    **dict.fromkeys([f"{kind}Source.separator" for kind in ("Model", "Function", "Service")], NOTHING),
    "ImportanceSpec.floor": NOTHING,
    # where it goes with the others: _algorithm
    "ImportanceSpec.level": ("token", "sequence"),
    "KlSpec.corrected": APART,
    "RejectionSpec.denominators": APART,
    "ImportanceSpec.max_staleness": NOTHING,
    "FunctionSource.function": ("scores.py:score", "package.module:score"),
    "ServiceSource.url": URLS,
    "ServiceSource.headers": ({"Authorization": "Bearer ${REWARD_TOKEN}"}, {"X-Run": "on"}),
    "ServiceSource.label": ("label", "null"),
    "RuleSource.rule": NOTHING,
    "RuleSource.answer": ("answer", "y"),
    "RuleSource.pattern": NOTHING,
    "RuleSource.target_tokens": NOTHING,
    # of episodes: _with_environment
    **dict.fromkeys(("RolloutSpec.order", "RolloutSpec.late_replies"), APART),
    "RolloutSpec.config": ({"max_num_seqs": 8}, {}),
    **dict.fromkeys([f"RolloutSpec.{name}" for name in ("engine", "tp", "process", "dtype", "kv_tokens")], NOTHING),
    **dict.fromkeys((f"ModelSpec.{name}" for name in PLACED), NOTHING),
}
RULES: tuple[Raw, ...] = (
    {"rule": "exact_answer"},
    {"rule": "gsm8k", "answer": "solution"},
    {"rule": "format", "pattern": r"<think>.*</think>\s"},
    {"rule": "length", "target_tokens": 12},
)
BALANCED = {
    **{**INIT, "model_type": "glm4_moe", "n_routed_experts": 4, "num_experts_per_tok": 2},
    **{"num_key_value_heads": 4, "first_k_dense_replace": 0},
}
"""A model whose routers have biases."""
DEEPSPEED: tuple[Raw, ...] = ({"wall_clock_breakdown": True}, {"zero_optimization": {"reduce_bucket_size": 5_000_000}})


class VariedSpecs:
    """Valid specs with their plans, one after another, and how many planning refused, by the start of the reason."""

    def __init__(self, seed: int) -> None:
        self.rng = Random(seed)
        self.refused: Counter[str] = Counter()

    def __iter__(self) -> Iterator[tuple[Raw, Plan]]:
        while True:
            try:
                yield self._next()
            except UserError as error:
                self.refused[str(error).removeprefix("config: ")[:60]] += 1

    def _next(self) -> tuple[Raw, Plan]:
        raw = make_varied_spec(self.rng)
        plan = make_plan(Spec.parse(raw))
        if chance(self.rng, 0.4) and add_tensor_parallel(self.rng, raw, plan):
            plan = make_plan(Spec.parse(raw))
        if chance(self.rng, 0.2):
            raw, plan = with_shards_in_nodes(raw, plan)
        raw, plan = with_parts_of_rows(*with_rollout_stages(*with_stages(raw, plan)))
        return _with_environment(*_with_routers(raw, plan))


def _with_routers(raw: Raw, plan: Plan) -> tuple[Raw, Plan]:
    """Train the routers of an actor with experts in some specs; unchanged if that is not valid."""
    rng = Random(f"routers {raw}")
    if not chance(rng, 0.2) or "init" not in raw["models"].get("actor", {}):
        return raw, plan
    actor = (
        raw["models"]["actor"] | {"init": BALANCED} | {name: rng.choice((0.001, 1)) for name in ModelSpec.OF_ROUTERS}
    )
    changed = raw | {"models": raw["models"] | {"actor": actor}}
    return planned(changed) or (raw, plan)


def _with_environment(raw: Raw, plan: Plan) -> tuple[Raw, Plan]:
    """Play episodes in some specs; unchanged if that is not valid."""
    rng = Random(f"environment {raw}")
    if not chance(rng, 0.2):
        return raw, plan
    changed = raw | {"environment": random_settings(rng, EnvironmentSpec, EXAMPLES, 0.3)}
    if chance(Random(f"program {raw}"), 0.3):
        program = {"path": "agents.py:run", "tools": [], "api": "openai", "python": "other/bin/python"}
        changed["environment"] |= program
    if chance(rng, 0.5):
        changed["rollout"] = raw.get("rollout", {}) | {"order": "free"}
        if "segment_tokens" in changed["rollout"] and chance(Random(f"late {raw}"), 0.5):
            changed["rollout"]["late_replies"] = "carry"
    return planned(changed) or (raw, plan)


def make_varied_spec(rng: Random) -> Raw:
    """One spec, mostly valid. Raises UserError if the algorithm's settings exclude each other."""
    share = rng.choice((0.0, 0.1, 0.3))
    raw: Raw = random_settings(rng, Spec, EXAMPLES, share)
    raw |= {"name": rng.choice(EXAMPLES["Spec.name"]), "algorithm": _algorithm(rng, share)}
    raw["data"] = random_settings(rng, DataSpec, EXAMPLES, share) | {"max_response_tokens": rng.choice((4, 8, 256))}
    sources = [random_settings(rng, SourceSpec, EXAMPLES, share) for _ in range(rng.randint(1, 3))]
    raw["data"] |= {"sources": sources} if chance(rng, 0.3) else {"path": rng.choice(TEXTS)}
    raw["cluster"] = _cluster(rng, share)
    raw |= {"models": {}, "rollout": {}, **_sources(rng, raw["algorithm"]["name"], share)}
    raw["algorithm"].pop("supervision", None)
    has_steps = any(source.get("level") == "step" for source in _listed(raw.get("reward", [])))
    if has_steps and raw["algorithm"]["name"] == "grpo" and chance(Random(repr(raw)), 0.5):
        raw["algorithm"] |= {"supervision": "process", "baseline": "mean", "normalise_scores": "none", "kl": None}
    graph = make_graph(Spec.parse(raw))
    shadows = graph.can_shadow and chance(rng, 0.5)
    raw["models"] = _models(rng, graph, shadows, share) | _scoring_models(raw)
    if chance(Random(repr(raw)), share):
        raw["models"]["all"] = {"micro_batch_tokens": 4096}
    if graph.generated is not None and chance(rng, 0.3):
        raw["rollout"] = random_settings(rng, RolloutSpec, EXAMPLES, share) | rollout_of(rng, shadows)
        if raw["rollout"].get("process") == "child":
            raw["rollout"]["max_restarts"] = Random(repr(raw)).choice((0, 2))
        if {"as-ended", "kept"} & {raw["rollout"].get("groups"), raw["rollout"].get("caches")}:
            raw["rollout"] |= {"segment_tokens": 2, "max_segments": Random(repr(raw)).choice((None, 2))}
        raw["models"]["actor"].pop("shadow", None)
    graph = make_graph(Spec.parse(raw))
    raw["placement"] = _placement(rng, graph, raw, shadows)
    _split_nodes(rng, raw["cluster"]["nodes"], share)
    return raw | _instructions(rng, raw, shadows, share)


def _listed(sources: Any) -> list[Raw]:
    return [sources] if isinstance(sources, dict) else sources


def _split_nodes(rng: Random, nodes: list[Raw], share: float) -> None:
    """Make two machines of some nodes with an even number of devices."""
    for node in nodes:
        if node["devices"] % 2 == 0 and chance(rng, share):
            node |= {"count": 2, "devices": node["devices"] // 2}


def _algorithm(rng: Random, share: float) -> Raw:
    name = rng.choice(ALGORITHMS)
    settings = random_settings(rng, KINDS[name], EXAMPLES, share / 2)
    if settings.get("surrogate", "clip") != "clip":
        for key in ("ratio", "dual_clip"):
            settings.pop(key, None)
    if settings.get("baseline") == "group":
        settings["samples_per_prompt"] = 3
    likes = [like for like, peer in PEERS.items() if name in peer.trainers]
    if likes and chance(rng, 0.5):
        # presets of one algorithm would be rare
        settings["like"] = rng.choices(likes, [1 / len(PEERS[like].trainers) for like in likes])[0]
        # the preset's mini-batches would be large, and divided differently from chunks
        settings |= {"prompts_per_step": rng.choice((8, 24)), "num_mini_batches": rng.choice((1, 2, 4))}
    if settings.get("importance", {}) and settings["importance"].get("outside") == "mask" and chance(rng, 0.5):
        settings["importance"]["floor"] = 0.25
    if settings.keys() & {"top_p", "top_k", "min_response_tokens"}:
        settings["importance"] = random_settings(rng, ImportanceSpec, EXAMPLES, share)
    own = Random(repr(settings))
    if (settings.get("importance") or {}).get("reject"):
        settings["importance"] |= {"level": "none"} if chance(own, 0.3) else {}
        settings["importance"]["reject"] |= {"denominators": "all"} if chance(own, 0.3) else {}
    if (settings.get("kl") or {}).get("place") == "loss" and chance(own, 0.5):
        settings["kl"]["corrected"] = True
    if name == "safe-rlhf" and chance(rng, share):
        settings["lagrange"] = random_settings(rng, LagrangeSpec, EXAMPLES, 0.5)
    return {"name": name} | settings


def _cluster(rng: Random, share: float) -> Raw:
    cluster: Raw = {"nodes": nodes_of(rng)}
    total = sum(node["devices"] for node in cluster["nodes"])
    for settings in ({"memory_gb": 100.5}, {"devices": total}, {"device": rng.choice(("cpu", "cuda"))}):
        if chance(rng, share):
            cluster |= settings
    for node in cluster["nodes"]:
        node |= {name: rng.choice((12, 0.5)) for name in ("link_gb_s", "network_gb_s") if chance(rng, share / 2)}
        node |= {"memory_gb": 90} if chance(rng, share / 2) else {}
        node |= {"cores": 16} if chance(Random(repr(node)), share) else {}
    if chance(rng, share / 4):
        for node in cluster["nodes"]:
            node["speed"] = rng.choice((1, 0.5))
    return cluster


def _sources(rng: Random, algorithm: str, share: float) -> Raw:
    """Sources of scores: none, one or a list; costs from a model and a function."""
    if algorithm == "safe-rlhf" and chance(rng, share):
        return {"cost": [{"model": "cost"}, {"function": "costs.py:cost", "weight": 0.5}]}
    if not KINDS[algorithm].SAMPLES or not chance(rng, 0.4):
        return {}
    sources: list[Raw] = [_called(rng, share) for _ in range(rng.randint(0, 2))]
    names = rng.sample(("reward", "reward_help", "reward_v2-1"), rng.randint(0 if sources else 1, 2))
    sources += [random_settings(rng, ModelSource, EXAMPLES, share) | {"model": name} for name in names]
    for source in sources:
        if source.get("level") == "step" and ("model" in source or chance(rng, 0.5)):
            source["separator"] = rng.choice(("\n\n", "Step "))
    return {"reward": sources[0] if len(sources) == 1 and chance(rng, 0.5) else sources}


def _called(rng: Random, share: float) -> Raw:
    kind = rng.choice(CALLED)
    return random_settings(rng, kind, EXAMPLES, share) | (rng.choice(RULES) if kind is RuleSource else {})


def _models(rng: Random, graph: Graph, shadows: bool, share: float) -> Raw:
    models = {role: _model(rng, role in graph.trained, shadows, share) for role in graph.roles}
    for role, model in models.items():
        if role not in ("ref", "critic", "cost_critic") or role not in graph.trained and chance(rng, 0.2):
            model["init"] = INIT
    if "ref" in graph.roles and chance(rng, 0.15):
        models["actor"]["lora"] = {"rank": 2, "alpha": 3, "targets": ["q_proj"]}
        models["ref"] = {"share": "actor"}
    if "reward" not in graph.roles and "critic" in models:
        models["critic"]["init"] = INIT
    return models


def _model(rng: Random, trained: bool, shadows: bool, share: float) -> Raw:
    model = settings_of(rng, trained, shadows)
    further = random_settings(rng, ModelSpec, EXAMPLES, share)
    if not trained:
        further.pop("optimizer", None)
        further.pop("activation_checkpointing", None)
    if model.get("cp", 1) == 1:
        further.pop("context_parallel", None)
    if chance(rng, share):
        further["dtype"] = rng.choice(("float32", "float16"))
    if further.get("activation_checkpointing") and chance(rng, share):
        further["offload_activations"] = True
    if model.get("engine") != "megatron" and not further.get("compile") and chance(rng, share):
        further["tiled_mlp"] = True
    if "shadow" in model and chance(rng, share):
        model["shadow"] |= {
            "dtype": "float16",
            "shard": "all",
            "cp": 1,
            "ep": 1,
            "generate_tokens": 512,
            "micro_batch_tokens": 256,
        }
    if model.get("engine") == "deepspeed" and chance(rng, share):
        further["config"] = rng.choice(DEEPSPEED)
        if trained and model.get("zero"):
            further["offload_optimizer"] = True
        if model.get("zero") == 3:
            further["offload_parameters"] = True
    return {**further, **model}


def _scoring_models(raw: Raw) -> Raw:
    """Settings of the cost model, which no source names."""
    return {"cost": {"init": INIT, "new_head": True}} if raw["algorithm"]["name"] == "safe-rlhf" else {}


def _placement(rng: Random, graph: Graph, raw: Raw, shadows: bool) -> Any:
    roles, classes = graph.roles, classes_of(raw["cluster"]["nodes"])
    if len(roles) == 1:
        return placement_of(rng, "sft", "co-located", classes, roles, ())
    strategy = "disaggregated" if shadows else rng.choice(("co-located", "interleaving", "interleaving"))
    names = tuple(f"{role}.shadow" for role in graph.trained if graph.can_shadow)
    if raw["rollout"]:
        names = tuple(f"{role}.rollout" if role == graph.generated else f"{role}.shadow" for role in graph.trained)
    return placement_of(rng, "ppo", strategy, classes, roles, names)


def _instructions(rng: Random, raw: Raw, shadows: bool, share: float) -> Raw:
    """The sections about the order of a step and its files."""
    num_mini_batches = raw["algorithm"].get("num_mini_batches", 1)
    divisors = [n for n in range(1, num_mini_batches + 1) if num_mini_batches % n == 0]
    sections: Raw = {
        "schedule": {"num_chunks": rng.choice(divisors), "lag": int(shadows and chance(rng, 0.4))},
        "sync": random_settings(rng, SyncSpec, EXAMPLES, share),
        "save": random_settings(rng, SaveSpec, EXAMPLES, share),
    }
    if sections["schedule"]["lag"]:
        sections["schedule"]["lag"] = Random(repr(sections)).choice((1, 2, 4, 16))
    if chance(rng, share):
        sections["schedule"]["strategy"] = rng.choice(("co-located", "interleaving", "disaggregated"))
        sections["schedule"]["num_blocks"] = Random(repr(sections)).choice((None, None, 1, 4))
    if not shadows:
        sections["sync"].pop("every", None)
    if chance(rng, 0.4):
        sections["eval"] = random_settings(rng, EvalSpec, EXAMPLES, share)
    else:
        sections["save"].pop("best", None)
    importance, own = raw["algorithm"].get("importance"), Random(repr(raw))
    if importance is not None and chance(own, 0.5):
        importance["max_staleness"] = sections["schedule"]["lag"] + own.randint(0, 2)
    return sections
