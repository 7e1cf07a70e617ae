"""Placements of operators executed with one thread per rank, among them ReaL's published plans."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

import pytest
import yaml
from emulator import EmulationError, emulate
from random_specs import INIT
from residency_rules import check_residency, least_and_most
from test_emulation import PAIR, RECOMPUTE, STREAM, VLLM, check_plan, ppo_plan, without

from flexrlhf.config.placement_settings import ClusterSpec
from flexrlhf.config.spec import RolloutSpec, Spec
from flexrlhf.config.yaml_io import read_yaml
from flexrlhf.guideline.advice.operator_space import advise_operators
from flexrlhf.guideline.costs.analytic import AnalyticCosts
from flexrlhf.plan.pipeline import make_plan
from flexrlhf.plan.plan import Plan
from flexrlhf.strategies.instructions import Instruction, Offload, Release, Run, Sync

CONFIGS = Path(__file__).parents[2] / "configs"
REAL = {path.stem: path for path in sorted(CONFIGS.glob("real-*.yaml"))}


CALLS = ("generate", "ref_logprobs", "values", "scores", "train_actor", "train_critic")


def operators(**entries: Any) -> dict[str, Any]:
    """A placement of PPO's operators: those that are not given are on all four ranks, with the settings of the role."""
    placed = {name: {"ranks": "0-3"} for name in CALLS} | entries
    return {"operators": {name: entry for name, entry in placed.items() if entry is not None}}


TP = {"ranks": "0-3", "tp": 2}
LEFT, RIGHT = {"ranks": "0-1"}, {"ranks": "2-3"}
SHADOW = {**RIGHT, "shadow": True}


def shadowed(**entries: Any) -> dict[str, Any]:
    """A placement of PPO's operators with shadows of both trained models on the ranks that train nothing."""
    apart = {"generate": SHADOW, "values": SHADOW, "ref_logprobs": RIGHT, "scores": RIGHT}
    return operators(**apart | {"train_actor": LEFT, "train_critic": LEFT} | entries)


PER_OPERATOR = {
    "one-copy-each": (operators(), {}),
    "resharded": (operators(generate=TP, train_critic={"ranks": "0-3", "zero": 3}), {}),
    "apart": (operators(generate=RIGHT, train_actor=LEFT, values=LEFT, train_critic=RIGHT), {}),
    "lanes": (operators(ref_logprobs=RIGHT, scores=RIGHT, values=LEFT, train_actor=LEFT, train_critic=RIGHT), {}),
    "chunks": (operators(generate=TP, train_actor=LEFT, values=RIGHT), {"schedule": STREAM}),
    "evaluated": (operators(generate=TP, scores=LEFT), {"evaluation": PAIR}),
    "recomputed": (operators(generate=TP, logprobs={"ranks": "0-3", "zero": 3}), {"rollout": RECOMPUTE}),
    "importance": (operators(generate=TP), {"importance": {}}),
    "adapters": (operators(generate=RIGHT), {"models": {"actor": {"lora": {}}, "ref": {"share": "actor"}}}),
    "vllm": (operators(generate=TP, logprobs=RIGHT), {"rollout": VLLM}),
    "vllm-stages": (
        operators(generate=RIGHT, train_actor=LEFT, logprobs=LEFT),
        {"rollout": VLLM | {"pp": 2}, "models": {"actor": {"init": {**INIT, "num_hidden_layers": 2}}}},
    ),
    "vllm-awake": (operators(generate=LEFT, logprobs=TP), {"rollout": VLLM | {"sleep": False}, "evaluation": PAIR}),
    "vllm-merged": (operators(generate=TP, logprobs=RIGHT), {"rollout": VLLM, "models": {"actor": {"lora": {}}}}),
    "vllm-child": (shadowed(), {"rollout": VLLM | {"process": "child"}, "schedule": {"lag": 1}}),
    "shadows": (shadowed(logprobs=SHADOW), {"schedule": STREAM, "rollout": RECOMPUTE, "whiten": "mini_batch"}),
    "shadow-resharded": (shadowed(generate={**SHADOW, "tp": 2}, values=LEFT), {"sync_every": 2, "evaluation": PAIR}),
    "lag": (shadowed(), {"schedule": {"lag": 1, "num_chunks": 2}}),
    "lag-vllm": (shadowed(values=LEFT, ref_logprobs=LEFT), {"schedule": {"lag": 2}, "rollout": VLLM, "sync_every": 2}),
    "lag-importance": (shadowed(logprobs={**LEFT, "tp": 2}), {"schedule": {"lag": 1}, "importance": {}}),
    "lag-importance-apart": (shadowed(logprobs=RIGHT), {"schedule": {"lag": 2}, "importance": {}}),
    "lag-reallocated": (shadowed(values={**LEFT, "zero": 3}, ref_logprobs=LEFT), {"schedule": {"lag": 2}}),
    "lag-adapters": (
        shadowed(ref_logprobs=None),
        {"schedule": {"lag": 1}, "models": {"actor": {"lora": {}}}, "rollout": VLLM, "kl": None},
    ),
    "whitened": (operators(generate=TP, values=LEFT), {"schedule": {"num_chunks": 2}, "whiten": "mini_batch"}),
}


@pytest.mark.parametrize("name", PER_OPERATOR)
def test_operators_with_placements_of_their_own_reach_the_right_result(name: str) -> None:
    placement, settings = PER_OPERATOR[name]
    check_plan(ppo_plan(placement, 4, **settings))


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        (Release, r"run train_actor on actor.*: actor trains under \['actor.generate'\]"),
        (Sync, r"run generate on actor.generate.*: actor.generate has no weights on rank \d"),
    ],
)
def test_a_copy_that_is_not_freed_or_not_refilled_is_reported(kind: type[Instruction], message: str) -> None:
    plan = without(ppo_plan(operators(generate=TP), 4), kind)
    with pytest.raises(EmulationError, match=message):
        emulate(plan, "asynchronous")
    with pytest.raises(AssertionError):
        check_residency(plan)


def test_a_copy_that_is_refilled_too_early_is_reported() -> None:
    """After the last update of the step before there would be the right weights, but not before it."""
    plan = ppo_plan(operators(generate=TP), 4)
    instructions = list(plan.schedule.instructions)
    kinds = [type(x) for x in instructions]
    sync, release = instructions.pop(kinds.index(Sync)), kinds.index(Release) - 1
    instructions.insert(release + 1, sync)
    early = replace(plan, schedule=replace(plan.schedule, instructions=tuple(instructions)))
    with pytest.raises(EmulationError, match=r"generate on actor.generate.*: actor.generate has no weights"):
        emulate(early, "asynchronous")


NUM_RANDOM, BY_DEFAULT = 100, 20
SEEDS = [pytest.param(seed, marks=[pytest.mark.full] * (seed >= BY_DEFAULT)) for seed in range(NUM_RANDOM)]


def random_entry(rng: Random, call: str) -> dict[str, Any]:
    """Ranks and settings that an engine has for ``call``."""
    ranks = rng.choice(("0-3", "0-3", "0-1", "2-3", "1-2", [0, 2, 3], [rng.randrange(4)]))
    size = {"0-3": 4, "0-1": 2, "2-3": 2, "1-2": 2}.get(str(ranks), len(ranks))
    engine = rng.choice(("torch", "deepspeed", "torch" if call == "generate" else "megatron"))
    stages = {"torch": (0, 2, 3), "deepspeed": (0, 1, 2, 3), "megatron": (0, 1)}[engine]
    tp = rng.choice([n for n in (1, 2, 4) if size % n == 0]) if engine != "deepspeed" else 1
    pp = rng.choice([n for n in (1, 2, 4) if size // tp % n == 0]) if engine == "megatron" else 1
    return {"ranks": ranks, "engine": engine, "zero": rng.choice(stages), "tp": tp, "pp": pp}


def random_shadows(rng: Random) -> dict[str, Any]:
    """Entries of a placement with shadows: training on the left ranks, generation on the right ones, others on either
    side; values with or without a shadow."""
    sides: dict[str, list[Any]] = {"left": ["0-1", [0], [1]], "right": ["2-3", [2], [3]]}

    def entry(side: str, *engines: str, **settings: Any) -> dict[str, Any]:
        return {"ranks": rng.choice(sides[side]), "engine": rng.choice(engines), "zero": rng.choice((0, 3)), **settings}

    engines = ("torch", "deepspeed")
    # an operator of the newest batch may not wait for the ranks of training
    either = rng.choice(("left", "right"))
    return {
        "generate": entry("right", *engines, shadow=True),
        "ref_logprobs": entry(either, *engines),
        "values": entry("right", *engines, shadow=True) if rng.random() < 0.6 else entry("left", *engines),
        "scores": entry(either, *engines),
        "train_actor": entry("left", *engines),
        "train_critic": entry("left", *engines),
    }


def with_vllm(entries: dict[str, Any], rng: Random) -> dict[str, Any]:
    """``entries`` with vLLM generating, in parts where the ranks allow."""
    own = {name: value for name, value in entries["generate"].items() if name in ("ranks", "shadow")}
    if isinstance(own["ranks"], str):
        own |= rng.choice(({}, {"tp": 2}, {"pp": 2}))
    return {**entries, "generate": own}


@pytest.mark.parametrize("seed", SEEDS)
def test_random_placements_with_vllm_and_shadows_reach_the_right_result(seed: int) -> None:
    rng = Random(1000 + seed)
    models = {role: {"init": {**INIT, "num_hidden_layers": 4}} for role in ("actor", "reward")}
    is_shadowed, has_vllm = rng.random() < 0.7, rng.random() < 0.6
    entries = random_shadows(rng) if is_shadowed else {call: random_entry(rng, call) for call in CALLS}
    settings: dict[str, Any] = {"models": models, "whiten": rng.choice(("batch", "mini_batch", "none"))}
    if rng.random() < 0.3 and entries["train_actor"]["engine"] != "megatron":
        settings["evaluation"] = {"every": rng.choice((1, 2))}
    schedule: dict[str, Any] = {"num_chunks": rng.choice((1, 1, 2, 4))}
    if is_shadowed:
        schedule["lag"], settings["sync_every"] = rng.choice((0, 1, 2)), rng.choice((1, 2))
    if has_vllm:
        entries = with_vllm(entries, rng)
        settings["rollout"] = VLLM | {"logprobs": "reuse", "sleep": rng.random() < 0.7}
    if rng.random() < 0.3:
        settings["importance"] = {}
        settings["rollout"] = {key: value for key, value in settings.get("rollout", {}).items() if key != "logprobs"}
        entries["logprobs"] = {"ranks": rng.choice(("0-1", "2-3", [0])), "zero": rng.choice((0, 3))}
    check_plan(ppo_plan({"operators": entries}, 4, schedule, epochs=rng.choice((1, 2)), **settings))


@pytest.mark.parametrize("seed", SEEDS)
def test_random_placements_of_operators_reach_the_right_result(seed: int) -> None:
    rng = Random(seed)
    layers = {role: {"init": {**INIT, "num_hidden_layers": 4}} for role in ("actor", "reward")}
    settings: dict[str, Any] = {"models": layers, "whiten": rng.choice(("batch", "mini_batch", "none"))}
    if rng.random() < 0.3:
        settings["evaluation"] = {"every": rng.choice((1, 2))}
    entries = {call: random_entry(rng, call) for call in CALLS}
    schedule = {"num_chunks": rng.choice((1, 1, 2, 4))}
    plan = ppo_plan({"operators": entries}, 4, schedule, epochs=rng.choice((1, 2)), **settings)
    check_plan(plan)


def test_copies_are_freed_if_memory_is_short_and_other_models_take_turns() -> None:
    """A copy that exists only during its calls is never offloaded; permanent ones are."""
    plan = ppo_plan(operators(generate=TP, values=LEFT), 4)
    least, most = least_and_most(plan)
    tight = make_plan(plan.spec.model_copy(update={"cluster": ClusterSpec(devices=4, memory_gb=(least + most) / 2e9)}))
    offloaded = {x.model for x in tight.schedule.instructions if isinstance(x, Offload)}
    assert offloaded and not any(tight.placement[name].is_transient for name in offloaded)
    check_plan(tight)


def test_a_sync_does_not_delay_other_ranks() -> None:
    """The critic's values on the left half overlap the scores on the right one, which has the critic that trains."""
    plan = ppo_plan(operators(ref_logprobs=RIGHT, scores=RIGHT, values=LEFT, train_critic=RIGHT), 4)
    order = [x.operator.name if isinstance(x, Run) else x.kind for x in plan.schedule.instructions]
    values = order.index("values")
    assert order[values - 3 : values + 2] == ["sync", "ref_logprobs", "scores", "values", "release"]


def test_placements_of_advise_are_written_and_run() -> None:
    plan = ppo_plan(None, 4, models={"actor": {"engine": "megatron"}}, rollout={"engine": "vllm"})
    cluster = ClusterSpec.model_validate({"nodes": [{"devices": 4, "class": "A100-80G"}]})
    spec = plan.spec.model_copy(update={"cluster": cluster, "rollout": RolloutSpec()})
    found = advise_operators(spec, AnalyticCosts(), None, 10.0)
    written = make_plan(Spec.parse(read_yaml(found.spec.dump(short=True))))
    assert written.schedule == found.plan.schedule
    assert any(isinstance(x, Release) for x in written.schedule.instructions), "nothing is reallocated"
    check_plan(written)


def emulated(path: Path) -> Plan:
    """The plan of a YAML, with small models and batches; its placement is unchanged."""
    raw = yaml.safe_load(path.read_text())
    for model in raw["models"].values():
        if "init" in model:
            model["init"] = {**INIT, "num_hidden_layers": model["init"]["num_hidden_layers"]}
    raw["algorithm"] |= {"prompts_per_step": 8, "num_mini_batches": 4}
    return make_plan(Spec.parse({**raw, "steps": 3, "cluster": {"devices": 8}, "data": {"path": "rows.jsonl"}}))


def test_real_has_four_plans() -> None:
    assert list(REAL) == ["real-70b-heuristic", "real-70b-searched", "real-7b-heuristic", "real-7b-searched"]


@pytest.mark.parametrize("name", REAL)
def test_the_plans_of_real_reach_the_right_result(name: str) -> None:
    check_plan(emulated(REAL[name]))


Degrees = tuple[int, int, int]
"""tp, pp and dp."""
PUBLISHED: dict[str, list[Degrees]] = {
    "real-70b-searched": [(2, 4, 16), (1, 8, 16), (1, 8, 16), (1, 8, 16), (2, 16, 4), (8, 4, 4)],
    "real-70b-heuristic": [(8, 4, 4), (8, 4, 4), (8, 1, 16), (8, 1, 16), (8, 4, 4), (8, 1, 16)],
    "real-7b-heuristic": [(8, 1, 2)] * 6,
}
"""Layouts before they are scaled; of real-7b-searched the paper's meshes alone are followed."""


def scaled(degrees: Degrees, devices: int) -> Degrees:
    """The largest degree is halved, among equal ones dp, then pp, then tp, as stated in the files."""
    tp, pp, dp = degrees
    while tp * pp * dp > devices:
        largest = max(tp, pp, dp)
        if dp == largest:
            dp //= 2
        elif pp == largest:
            pp //= 2
        else:
            tp //= 2
    return tp, pp, dp


@pytest.mark.parametrize("name", PUBLISHED)
def test_calls_have_their_published_layouts_scaled(name: str) -> None:
    """No engine generates in stages: the ranks of generation are replicas."""
    plan = emulated(REAL[name])
    runs = {x.operator.name: x for x in plan.schedule.instructions if isinstance(x, Run)}
    for call, degrees in zip(CALLS, PUBLISHED[name], strict=True):
        tp, pp, dp = scaled(degrees, 8)
        layout = plan.placement[runs[call].model].layout
        found = layout.dims.tp, layout.dims.pp, layout.dp
        assert found == ((tp, 1, pp * dp) if call == "generate" else (tp, pp, dp)), call


@pytest.mark.parametrize(
    ("name", "filled"),
    [
        ("real-70b-searched", ["actor.generate", "critic.values"]),
        ("real-70b-heuristic", ["actor.generate"]),
        ("real-7b-searched", ["actor.generate", "critic.values"]),
        ("real-7b-heuristic", []),
    ],
)
def test_weights_are_reallocated_between_calls_of_different_layouts(name: str, filled: list[str]) -> None:
    instructions = emulated(REAL[name]).schedule.instructions
    assert [x.destination for x in instructions if isinstance(x, Sync)] == filled
    assert [x.model for x in instructions if isinstance(x, Release)] == filled
