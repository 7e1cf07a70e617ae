"""Seeded random specs of every strategy. Specs that planning refuses are counted and replaced."""

from __future__ import annotations

from collections import Counter
from copy import deepcopy
from dataclasses import dataclass, field
from fractions import Fraction
from pathlib import Path
from random import Random
from typing import Any

from residency_rules import least_and_most
from split_here import SPLITTING_HERE

from flexrlhf.config.placement_settings import PlacementMap
from flexrlhf.config.spec import Spec
from flexrlhf.errors import UserError
from flexrlhf.placement.placed import PlacedModel
from flexrlhf.placement.placement import Placement
from flexrlhf.plan.pipeline import make_plan
from flexrlhf.plan.plan import Plan
from flexrlhf.strategies.instructions import Eval, Move, Offload, Run, Save, Sync

Raw = dict[str, Any]

INIT = {
    "model_type": "llama",
    "hidden_size": 8,
    "intermediate_size": 8,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "vocab_size": 16,
}
EXPERTS = {**INIT, "model_type": "mixtral", "num_key_value_heads": 4, "num_local_experts": 4}
TRAINED = ("actor", "critic")
SHADOWS = ("actor.shadow", "critic.shadow")
BESIDE_ROLLOUT = ("actor.rollout", "critic.shadow")
ROLES = ("actor", "critic", "ref", "reward")
CLASSES = ("A100-80G", "V100-32G")
SPLITS = Path(__file__).parents[1] / "fixtures" / "splits.py"
COMPUTE = (
    *({"engine": "torch", "zero": zero} for zero in (0, 2, 3, 3)),
    *({"engine": "deepspeed", "zero": zero} for zero in (0, 1, 2, 3)),
)


@dataclass
class RandomSpecs:
    """Valid specs, and how many planning refused, by the first words of the reason."""

    specs: list[Raw] = field(default_factory=list)
    plans: list[Plan] = field(default_factory=list)
    refused: Counter[str] = field(default_factory=Counter)

    @property
    def valid_share(self) -> float:
        return len(self.plans) / (len(self.plans) + self.refused.total())


@SPLITTING_HERE
def valid_specs(count: int, seed: int) -> RandomSpecs:
    """``count`` valid specs; the same for the same ``seed``."""
    rng = Random(seed)
    specs = RandomSpecs()
    while len(specs.plans) < count:
        raw = make_spec(rng)
        try:
            plan = make_plan(Spec.parse(raw))
            if chance(rng, 0.7) and add_tensor_parallel(rng, raw, plan):
                plan = make_plan(Spec.parse(raw))
            raw, plan = with_shards_in_nodes(*with_parts_of_experts(*with_parts_of_rows(raw, plan)))
            raw, plan = with_rollout_stages(*with_stages(raw, plan))
            if chance(rng, 0.25):
                raw["cluster"]["memory_gb"] = rng.randint(*least_and_most(plan)) / 1e9
                plan = make_plan(Spec.parse(raw))
            if "importance" in raw["algorithm"] and chance(Random(repr(raw)), 0.8):
                # with syncs after several batches some of these leave tokens out
                raw["algorithm"]["importance"]["max_staleness"] = raw["schedule"]["lag"]
                plan = make_plan(Spec.parse(raw))
            raw, plan = split_by_protocols(*in_turns(*in_segments(raw, plan)))
            specs.plans.append(plan)
            specs.specs.append(raw)
        except UserError as error:
            specs.refused[" ".join(str(error).removeprefix("config: ").split()[:2])] += 1
    return specs


def planned(raw: Raw) -> tuple[Raw, Plan] | None:
    """``raw`` with its plan, if it is valid."""
    try:
        return raw, make_plan(Spec.parse(raw))
    except UserError:
        return None


def make_spec(rng: Random) -> Raw:
    """One spec, mostly valid."""
    name = rng.choices(("ppo", "sft", "reward"), (18, 1, 1))[0]
    strategy = rng.choices(("co-located", "interleaving", "disaggregated"), (1, 3, 4))[0]
    algorithm = _algorithm(rng, name)
    nodes = nodes_of(rng)
    shadows = name == "ppo" and strategy == "disaggregated"
    models = _models(rng, name, shadows)
    rollout = rollout_of(rng, shadows) if name == "ppo" and chance(rng, 0.5) else {}
    if rollout and chance(rng, 0.95):
        # the engine takes the place of that copy, so its settings are refused
        models["actor"].pop("shadow", None)
    roles = tuple(role for role in ROLES if "share" not in models.get(role, {}))
    shadow_names = BESIDE_ROLLOUT if rollout else SHADOWS
    spec: Raw = {
        "name": "emulated",
        "steps": rng.randint(3, 5),
        "algorithm": algorithm,
        "models": models,
        "data": {"path": "rows.jsonl"},
        # GPUs of the second class have no vLLM
        "cluster": {"nodes": nodes} | ({"device": "cpu"} if len(classes_of(nodes)) > 1 else {}),
        "placement": placement_of(rng, name, strategy, classes_of(nodes), roles, shadow_names),
        "schedule": {"num_chunks": _chunks(rng, algorithm), "lag": int(chance(rng, 0.5 if shadows else 0.02))},
        "sync": {"every": rng.choice((1, 1, 2, 3)) if shadows or chance(rng, 0.02) else 1},
        "save": {"every": rng.choice((None, 1, 2))},
        "rollout": rollout,
    }
    if name == "ppo":
        _set_logprobs(Random(repr(spec)), spec)
        _set_rollout_engine(Random(repr(spec)), spec, shadows)
    if chance(rng, 0.1):
        spec["schedule"]["strategy"] = strategy
    if chance(rng, 0.3):
        spec["eval"] = {"path": "evaluation.jsonl", "every": rng.choice((None, 1, 2))}
        if name == "ppo":
            spec["eval"]["samples_per_prompt"] = rng.choice((None, 1, 2, 3))
            spec["save"]["best"] = rng.choice((None, "eval_reward_mean"))
        spec["eval"]["before"] = spec["eval"]["every"] != 1 and chance(Random(repr(spec)), 0.8)
    if spec["schedule"]["lag"]:
        spec["schedule"]["lag"] = Random(repr(spec)).choice((1, 1, 2, 2, 3))
    return spec


def _set_logprobs(rng: Random, spec: Raw) -> None:
    """Choose the source of log-probs, by a separate generator, and whether rewards need them before training."""
    spec["rollout"]["logprobs"] = rng.choice(("auto", "auto", "auto", "recompute", "reuse"))
    if chance(rng, 0.4):
        spec["algorithm"]["kl"] = {"place": "loss"}


def _set_rollout_engine(rng: Random, spec: Raw, shadows: bool) -> None:
    """Let torch generate instead of vLLM in some specs without shadows, by a separate generator, and nearly always with
    settings that it has; let vLLM add adapters itself in half of the specs that have any."""
    rollout = spec["rollout"]
    if rollout.get("engine") == "vllm" and chance(rng, 0.02 if shadows else 0.5):
        rollout["engine"] = "torch"
        if chance(rng, 0.95):
            rollout.pop("process", None)
    elif rollout.get("engine") == "vllm" and "lora" in spec["models"]["actor"] and chance(rng, 0.5):
        rollout["adapters"] = "separate"


def chance(rng: Random, probability: float) -> bool:
    return rng.random() < probability


def _models(rng: Random, name: str, shadows: bool) -> Raw:
    """Engine settings of each model; tensor parallelism is added once their ranks are known."""
    roles = {"sft": ("actor",), "reward": ("reward",)}.get(name, ROLES)
    trained = TRAINED if name == "ppo" else roles
    models = {role: settings_of(rng, role in trained, shadows) for role in roles}
    for role in {"actor", "reward"} & set(roles):
        models[role]["init"] = INIT
    if name == "ppo" and chance(rng, 0.2):
        models["actor"]["lora"] = {"rank": 2}
        models["ref"] = {"share": "actor"}
    return models


def settings_of(rng: Random, trained: bool, shadows: bool) -> Raw:
    settings: Raw = {}
    if chance(rng, 0.75):
        settings |= rng.choice(COMPUTE)
    if trained and chance(rng, 0.15):
        settings["lora"] = {"rank": rng.randint(1, 3)}
    if trained and shadows and chance(rng, 0.4):
        settings["shadow"] = dict(rng.choice(COMPUTE))
    return settings


def rollout_of(rng: Random, shadows: bool) -> Raw:
    """A vLLM engine; missing settings have their defaults."""
    rollout: Raw = {"engine": "vllm", "parity": rng.choice((None, {"every": 1}, {"every": 2}, {"every": 2}, {}))}
    if chance(rng, 0.4 if shadows else 0.02):
        rollout["process"] = "child"
    if chance(rng, 0.3):
        rollout["sleep"] = False
    if chance(rng, 0.3):
        rollout["dtype"] = "float16"
    if chance(rng, 0.3):
        rollout["kv_tokens"] = rng.choice((256, 300, 4096))
    return rollout


def add_tensor_parallel(rng: Random, raw: Raw, plan: Plan) -> bool:
    """Give some placed models that can have it tensor-parallel ranks; whether any has them now."""
    changed = False
    for model in plan.placement.models:
        entry = plan.spec.placement.models.get(model.name) if isinstance(plan.spec.placement, PlacementMap) else None
        given = entry is not None and entry.row_shares is not None
        is_adapted = model.settings.lora is not None and model.rollout is None
        cannot = given or model.engine == "deepspeed" or is_adapted or raw["rollout"].get("process") == "child"
        sizes = [] if cannot else _tensor_parallel_sizes(plan, model)
        tp = rng.choice(sizes) if sizes and chance(rng, 0.8) else 1
        settings = raw["models"].setdefault(model.role, {})
        if model.rollout is not None:
            raw["rollout"]["tp"] = tp
        elif model.is_shadow:
            # set explicitly, since the role may set another value
            settings["shadow"] = settings.get("shadow", {}) | {"tp": tp}
        elif tp > 1:
            settings["tp"] = tp
        changed = changed or tp > 1
    return changed


def with_parts_of_rows(raw: Raw, plan: Plan) -> tuple[Raw, Plan]:
    """Split the rows of some models over context-parallel ranks, by a separate generator; unchanged if that is not
    valid."""
    rng = Random(f"parts of {raw!r}")
    if not chance(rng, 0.4):
        return raw, plan
    changed = deepcopy(raw)
    for model in plan.placement.models:
        if "cp" in model.facts.axes and model.rollout is None and not model.follows and chance(rng, 0.7):
            parts = {"cp": rng.choice((2, 2, 4)), "context_parallel": rng.choice(("auto", "ring"))}
            changed["models"].setdefault(model.role, {}).update(parts)
    return planned(changed) or (raw, plan)


def with_parts_of_experts(raw: Raw, plan: Plan) -> tuple[Raw, Plan]:
    """Give all models experts in some specs, split over ranks for some models, by a separate generator; unchanged if
    that is not valid."""
    rng = Random(f"experts {raw!r}")
    if not chance(rng, 0.4):
        return raw, plan
    changed = deepcopy(raw)
    for settings in changed["models"].values():
        settings |= {"init": EXPERTS} if "init" in settings else {}
    for model in plan.placement.models:
        sizes = [number for number in (2, 4) if model.layout.of_weights.dp % number == 0]
        if sizes and "ep" in model.facts.axes and model.rollout is None and not model.follows and chance(rng, 0.7):
            changed["models"].setdefault(model.role, {})["ep"] = rng.choice(sizes)
    return planned(changed) or (raw, plan)


def with_shards_in_nodes(raw: Raw, plan: Plan) -> tuple[Raw, Plan]:
    """Shard some models inside nodes, if each node has several of their replicas."""
    for model in plan.placement.models:
        if plan.cluster.num_nodes > 1 and model.split == "rows" and not model.follows:
            changed = deepcopy(raw)
            changed["models"][model.role]["shard"] = "node"
            raw, plan = planned(changed) or (raw, plan)
    return raw, plan


def with_stages(raw: Raw, plan: Plan) -> tuple[Raw, Plan]:
    """Put some models on Megatron, in pipeline stages, by a separate generator; unchanged if that is not valid."""
    rng, staged = Random(repr(raw)), deepcopy(raw)
    if not chance(rng, 0.25):
        return raw, plan
    for settings in staged["models"].values():
        if "init" in settings:
            settings["init"] = {**settings["init"], "num_hidden_layers": 4}
    generates = "" if raw["rollout"] else plan.graph.generated
    for role in plan.graph.roles:
        settings = staged["models"].setdefault(role, {})
        if role != generates and "share" not in settings and chance(rng, 0.8):
            _put_on_megatron(rng, settings, plan, plan.placement[role])
    return planned(staged) or (raw, plan)


def with_rollout_stages(raw: Raw, plan: Plan) -> tuple[Raw, Plan]:
    """Put some vLLM engines in two stages; unchanged if that is not valid."""
    if raw["rollout"].get("engine") != "vllm" or chance(Random(repr(raw)), 0.4):
        return raw, plan
    staged = deepcopy(raw)
    staged["rollout"]["pp"] = 2
    for settings in staged["models"].values():
        if "init" in settings:
            settings["init"] = {**settings["init"], "num_hidden_layers": 4}
    return planned(staged) or (raw, plan)


def in_segments(raw: Raw, plan: Plan) -> tuple[Raw, Plan]:
    """Generate responses in segments in some specs, by a separate generator; unchanged if that is not valid."""
    rng, changed = Random(f"segments {raw}"), deepcopy(raw)
    # the gate would be at step 0 alone
    if not chance(rng, 0.4) or _gate(plan) == "every 1":
        return raw, plan
    segments = {"segment_tokens": rng.choice((32, 32, 43, 64, 128)), "max_segments": rng.choice((None, None, 2, 3))}
    changed["rollout"] |= segments
    return planned(changed) or (raw, plan)


def in_turns(raw: Raw, plan: Plan) -> tuple[Raw, Plan]:
    """Play episodes in some specs, by a separate generator; unchanged if that is not valid."""
    rng = Random(f"turns {raw}")
    if not chance(rng, 0.3):
        return raw, plan
    changed = {**deepcopy(raw), "environment": {"path": "games.py:Game", "max_turns": rng.randint(1, 4)}}
    changed["environment"]["sequences"] = rng.choice((1, 1, 2, 3))
    return planned(changed) or (raw, plan)


def split_by_protocols(raw: Raw, plan: Plan) -> tuple[Raw, Plan]:
    """Split the rows of some operators by functions, in some specs, by a separate generator."""
    rng = Random(f"protocols {raw}")
    if not chance(rng, 0.4):
        return raw, plan
    names = [operator.name for operator in plan.graph.operators if not operator.is_rare]
    functions = [f"{SPLITS}:{name}" for name in ("round_robin", "last_alone", "scattered")]
    protocols = {name: rng.choice(functions) for name in rng.sample(names, rng.randint(1, len(names)))}
    changed = {**deepcopy(raw), "algorithm": {**raw["algorithm"], "protocols": protocols}}
    return changed, make_plan(Spec.parse(changed))


def _put_on_megatron(rng: Random, settings: Raw, plan: Plan, model: PlacedModel) -> None:
    of_others = ("lora", "config", "liger", "compile", "attention", "dtype", "tiled_mlp")
    for name in (*of_others, "offload_optimizer", "offload_parameters", "offload_activations"):
        settings.pop(name, None)
    stages = [number for number in (2, 4) if len(model.ranks) // model.layout.dims.tp % number == 0]
    is_adam = settings.get("optimizer", {}).get("name") != "sgd"
    settings |= {"engine": "megatron", "zero": rng.choice((0, 1)) if is_adam else 0}
    settings.pop("shard", None)
    if stages:
        settings["pp"] = rng.choice((*stages, stages[-1]))
    if f"{model.role}.shadow" in plan.placement and chance(rng, 0.7):
        settings["shadow"] = rng.choice(({"pp": 1}, {"pp": 2}, {"pp": 2}, {"engine": "torch", "zero": 3}))


def _tensor_parallel_sizes(plan: Plan, model: PlacedModel) -> list[int]:
    """Sizes that divide the model's devices and its 4 heads, and leave no replica on two nodes."""
    nodes = [plan.cluster.devices[rank].node for rank in model.ranks]
    return [
        tp
        for tp in (2, 4)
        if len(nodes) % tp == 0 and all(len(set(nodes[i : i + tp])) == 1 for i in range(0, len(nodes), tp))
    ]


def _algorithm(rng: Random, name: str) -> Raw:
    prompts = rng.choice((*range(1, 17), 12, 16, 24))
    mini_batches = rng.choice([n for n in (1, 2, 3, 4, 4, 6, 8) if n <= prompts or chance(rng, 0.02)])
    algorithm: Raw = {"name": name, "prompts_per_step": prompts, "num_mini_batches": mini_batches}
    algorithm["epochs"] = rng.choice((1, 1, 1, 2))
    if name == "ppo":
        algorithm["whiten"] = rng.choice(("batch", "mini_batch", "mini_batch", "none"))
        algorithm["samples_per_prompt"] = rng.randint(1, 3)
        if chance(rng, 0.3):
            algorithm["importance"] = {"level": rng.choice(("token", "sequence"))}
    return algorithm


def _chunks(rng: Random, algorithm: Raw) -> int:
    mini_batches = algorithm["num_mini_batches"]
    return rng.choice([n for n in range(1, mini_batches + 1) if mini_batches % n == 0 or chance(rng, 0.02)])


def nodes_of(rng: Random) -> list[Raw]:
    """1 to 3 nodes of one or two device classes, 1 to 12 devices in all."""
    counts = [rng.choice((1, 1, 2, 2, 2, 2, 3, 3, *range(4, 13)))]
    if chance(rng, 0.6):
        counts = [rng.randint(1, 4) for _ in range(rng.randint(2, 3))]
    classes = CLASSES if chance(rng, 0.5) else CLASSES[:1]
    return [{"devices": count, "class": classes[i % len(classes)]} for i, count in enumerate(counts)]


def classes_of(nodes: list[Raw]) -> dict[str, int]:
    devices: Counter[str] = Counter()
    for node in nodes:
        devices[node["class"]] += node["devices"]
    return dict(devices)


def placement_of(
    rng: Random, name: str, strategy: str, classes: dict[str, int], roles: tuple[str, ...], shadows: tuple[str, ...]
) -> Any:
    size = sum(classes.values())
    if name != "ppo":
        return [str(Fraction(rng.randint(1, size), size))]
    names = (*shadows, *roles) if strategy == "disaggregated" else roles
    if strategy == "co-located":
        return rng.choice((None, None, [1] * len(names), {**dict.fromkeys(names, 1), "span_classes": True}))
    if strategy == "interleaving" and size <= 3 and chance(rng, 0.9):
        # one reader on every rank, so that rows are gathered to all
        return {**dict.fromkeys(names, str(Fraction(1, size))), "actor": 1, "span_classes": True}
    if len(classes) == 1 and chance(rng, 0.5):
        counts, _ = _counts(rng, names, size)
        return [str(Fraction(counts[name], size)) for name in names]
    if chance(rng, 0.25):
        return _explicit(rng, names, size)
    return _mapping(rng, names, classes)


def _has_shadows(names: tuple[str, ...]) -> bool:
    return bool(set(SHADOWS) & set(names))


def _counts(rng: Random, names: tuple[str, ...], size: int) -> tuple[dict[str, int], int]:
    """Devices by model in a pool of ``size``, and the training side's: all of it without shadows."""
    training = [name for name in names if name in TRAINED]
    inference = [name for name in names if name not in TRAINED]
    if not _has_shadows(names) or not training or not inference:
        return {name: size if chance(rng, 0.3) else rng.randint(1, size) for name in names}, size
    side = rng.randint(1, max(1, size - 1))
    counts = {name: rng.randint(1, max(1, size - side)) for name in inference}
    first = rng.randint(1, side)
    rest = side - first if first < side and chance(rng, 0.5) else side
    return counts | dict(zip(rng.sample(training, len(training)), (first, rest), strict=False)), side


def _explicit(rng: Random, names: tuple[str, ...], size: int) -> Raw:
    """Any subset of the ranks for each model; the training models' subsets apart from the others' with shadows."""
    ranks = rng.sample(range(size), size)
    side = rng.randint(1, max(1, size - 1)) if _has_shadows(names) else size
    left, right = ranks[:side], ranks[side:] or ranks
    placement: Raw = {}
    for name in names:
        pool = left if name in TRAINED or not _has_shadows(names) else right
        placement[name] = {"ranks": rng.sample(pool, rng.randint(1, len(pool)))}
    return placement


def _mapping(rng: Random, names: tuple[str, ...], classes: dict[str, int]) -> Raw:
    """Each model on one class, named by ``on:`` or the remaining one; some with row shares."""
    homes = {name: rng.choice(sorted(classes)) for name in names}
    unpinned = rng.choice(sorted(classes)) if len(classes) > 1 and chance(rng, 0.5) else None
    placement: Raw = {}
    for home, size in classes.items():
        members = tuple(name for name in names if homes[name] == home)
        counts, side = _counts(rng, members, size)
        for name in members:
            placement[name] = {"ratio": str(Fraction(counts[name], size))}
            if len(classes) > 1 and home != unpinned:
                placement[name]["on"] = home.split("-")[0]
            if chance(rng, 0.3):
                placement[name]["row_shares"] = _row_shares(rng, counts[name])
        if len(classes) == 1 and _has_shadows(names) and chance(rng, 0.2):
            placement["train_share"] = str(Fraction(side, size))
    return placement


def _row_shares(rng: Random, count: int) -> list[int]:
    shares = [rng.randint(0, 3) for _ in range(count)]
    return shares if sum(shares) else [1] * count


def coverage(specs: RandomSpecs) -> dict[str, Counter[str]]:
    """Features of the specs: feature → value → number of specs (or of Moves, for primitives)."""
    table: dict[str, Counter[str]] = {}
    for plan in specs.plans:
        for feature, values in features(plan).items():
            table.setdefault(feature, Counter()).update(values)
    return table


def features(plan: Plan) -> dict[str, list[str]]:
    """Features of a plan, with its values of each."""
    spec, placement = plan.spec, plan.placement
    algorithm = spec.algorithm
    classes = {device.device_class for device in plan.cluster.devices}
    return {
        "algorithm": [algorithm.name],
        "strategy": [plan.strategy],
        "placement": [_form(plan)],
        "ranks": [str(placement.num_ranks)],
        "nodes": [str(plan.cluster.num_nodes)],
        "device classes": [str(len(classes))],
        "protocols": ["some" if placement.layouts else "none"],
        "row shares": ["unequal" if any(m.layout.row_shares for m in placement.models) else "equal"],
        "replicas without rows": ["some" if _empty_replicas(plan, placement) else "none"],
        "lag": [str(plan.schedule.lag) if plan.schedule.lag < 2 else "2 or 3"],
        "segments": [str(plan.batch.segments), *(["several, lagging"] if _lags_in_segments(plan) else [])],
        "turns": _turns(plan),
        "chunks": [str(plan.batch.num_chunks)],
        "sync every": [str(spec.sync.every) if placement.shadows else "no sync"],
        "whiten": [getattr(algorithm, "whiten", "not ppo")],
        "epochs": [str(algorithm.epochs)],
        "samples per prompt": [str(algorithm.samples_per_prompt)],
        "moves": [i.primitive for i in plan.schedule.instructions if isinstance(i, Move)],
        "engine": [f"{m.engine}-{m.settings.zero}" for m in placement.models],
        "weights": [
            f"{m.split} of {'tp' if m.layout.dims.tp > 1 else 'one'}" for m in placement.models if len(m.ranks) > 1
        ],
        "sharded in nodes": [m.split for m in placement.models if m.is_sharded_in_nodes],
        "tensor parallel": [str(m.layout.dims.tp) for m in placement.models],
        "context parallel": [str(m.layout.dims.cp) for m in placement.models],
        "expert parallel": [str(m.layout.dims.ep) for m in placement.models],
        "pipeline stages": [f"{m.layout.dims.pp} of {'a copy' if m.is_shadow else 'a role'}" for m in placement.models],
        "adapters": _adapters(plan),
        "syncs": [_reshards(plan, x) for x in plan.schedule.instructions if isinstance(x, Sync)],
        "offload": ["some" if _is_tight(plan) else "none"],
        "rollout": [_rollout_kind(plan), *(["same ranks, asleep, little memory"] if _sleeps_tight(plan) else [])],
        "rollout tp": [str(m.layout.dims.tp) for m in placement.models if m.rollout is not None],
        "rollout pp": [str(m.layout.dims.pp) for m in placement.models if m.rollout is not None],
        "gate": [_gate(plan)],
        "log-probs": [_logprobs(plan)] if plan.graph.generated else [],
        "importance": [getattr(getattr(algorithm, "importance", None), "level", "none")],
        "tokens that are too stale": ["left out" if "kept_mask" in plan.graph.producers else "none"],
        "adapters of a rollout engine": [_rollout_adapters(plan)],
        "begun ahead": ["some" if any(map(plan.ahead, _runs(plan))) else "none"],
        "evaluation": [_evaluation(plan)],
        "evaluation before training": [str(spec.eval is not None and spec.eval.before)],
        "saves": ["several ranks" if len(x.ranks) > 1 else "one rank" for x in _saves(plan)],
    }


def _lags_in_segments(plan: Plan) -> bool:
    return plan.batch.segments > 1 and plan.schedule.lag > 0


def _turns(plan: Plan) -> list[str]:
    if plan.spec.environment is None:
        return ["none"]
    found = {
        "in chunks": plan.batch.num_chunks > 1,
        "lagging": plan.schedule.lag > 0,
        "evaluated": plan.spec.eval is not None,
        "of an engine": _rollout_kind(plan) != "none",
    }
    return [str(plan.spec.environment.max_turns), *(name for name, is_so in found.items() if is_so)]


def _is_tight(plan: Plan) -> bool:
    """Whether models take turns on a device since memory is short, not only for a rollout engine that sleeps."""
    is_known = plan.spec.cluster.memory_gb is not None
    return is_known and any(isinstance(x, Offload) for x in plan.schedule.instructions)


def _sleeps_tight(plan: Plan) -> bool:
    return _is_tight(plan) and _rollout_kind(plan) in ("same ranks, asleep", "same ranks, released")


def _logprobs(plan: Plan) -> str:
    """Source of the log-probs that ratios are taken to."""
    writer = plan.graph.producers.get("logprobs")
    return "train" if writer is None else writer.kind


def _rollout_kind(plan: Plan) -> str:
    engine = next((model for model in plan.placement.models if model.rollout is not None), None)
    if engine is None or engine.rollout is None:
        return "none"
    if engine in plan.placement.shadows:
        return f"apart, {engine.rollout.process}"
    if engine.is_transient:
        return "same ranks, released"
    return "same ranks, asleep" if engine.rollout.sleep else "same ranks, awake"


def _gate(plan: Plan) -> str:
    gate = next((operator for operator in plan.graph.operators if operator.name == "parity"), None)
    if gate is None:
        return "none"
    return "at step 0" if gate.every >= plan.spec.steps else f"every {gate.every}"


def _rollout_adapters(plan: Plan) -> str:
    engine = next((model for model in plan.placement.models if model.rollout is not None), None)
    if engine is None or plan.placement[engine.role].settings.lora is None:
        return "none"
    return "merged" if engine.settings.lora is None else "separate"


def _runs(plan: Plan) -> list[Run]:
    return [x for x in plan.schedule.instructions if isinstance(x, Run)]


def _saves(plan: Plan) -> list[Save]:
    return [x for x in plan.schedule.instructions if isinstance(x, Save)]


def _evaluation(plan: Plan) -> str:
    found = next((x for x in plan.schedule.instructions if isinstance(x, Eval)), None)
    if found is None:
        return "none"
    return "with moves" if found.moves else "without moves"


def _adapters(plan: Plan) -> list[str]:
    if "ref" in plan.graph.roles or plan.graph.data != "prompts":
        return ["some" if any(m.settings.lora for m in plan.placement.models) else "none"]
    return ["shared"]


def _reshards(plan: Plan, sync: Sync) -> str:
    """Whether ranks of the source and of the shadow have whole tensors."""
    ends = [plan.placement[name] for name in (sync.source, sync.destination)]
    return " to ".join("whole" if each.split == "whole" and each.layout.dims.tp == 1 else "parts" for each in ends)


def _form(plan: Plan) -> str:
    placement = plan.spec.placement
    if not isinstance(placement, PlacementMap):
        return "none" if placement is None else f"vector of {len(placement)}"
    if any(entry.ranks is not None for entry in placement.models.values()):
        return "ranks"
    return "mapping with on" if any(entry.on for entry in placement.models.values()) else "mapping"


def _empty_replicas(plan: Plan, placement: Placement) -> bool:
    batch = plan.batch
    return any(not batch.prompts_on(m.layout, rank, batch.mini_batches) for m in placement.models for rank in m.ranks)


def format_table(table: dict[str, Counter[str]]) -> str:
    lines = []
    for feature, counts in table.items():
        cells = [f"{value}: {counts[value]}" for value in sorted(counts, key=lambda v: (len(v), v))]
        lines.append(f"{feature:<22} {'   '.join(cells)}")
    return "\n".join(lines)
