"""``flexrlhf advise``: the search times plans as the simulator does; what it says can be planned, fits and is told."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from flexrlhf.cli import app
from flexrlhf.errors import UserError
from flexrlhf.guideline.advice.advise import Advice, advise
from flexrlhf.guideline.advice.proposals import spec_of
from flexrlhf.guideline.advice.request import Request, equal_nodes, find_class, read_nodes
from flexrlhf.guideline.advice.space import Space, make_space, with_schedule
from flexrlhf.guideline.costs.analytic import AnalyticCosts
from flexrlhf.guideline.search.evaluate import evaluate
from flexrlhf.guideline.search.problem import Assignment, Choice, Problem
from flexrlhf.guideline.simulation.simulate import evaluate as simulated_seconds
from flexrlhf.plan import make_plan
from flexrlhf.remedies import check_fits
from flexrlhf.spec import Spec
from flexrlhf.spec_file import load_spec
from flexrlhf.strategies.instructions import Offload
from flexrlhf.yaml12 import read_yaml, write_yaml

ROLES = ("actor", "critic", "ref", "reward")
SCHEDULES = ((False, 1, 0), (True, 1, 0), (True, 2, 0), (True, 4, 0), (True, 1, 1))
"""Shadows, chunks, lag."""


def spec_for(gpus: int, model: str = "llama-7b", **changes: object) -> Spec:
    plain = Request(dict.fromkeys(ROLES, model), equal_nodes(gpus, "A100-80G"), prompts=64, mini_batches=4)
    return replace(plain, **changes).spec()


def run(*words: object) -> Result:
    return CliRunner().invoke(app, ["advise", *map(str, words)])


def told(*words: object) -> str:
    """The sentence of a refusal."""
    result = run(*words)
    assert result.exit_code == 2, result.output
    assert len(result.output.strip().splitlines()) == 1
    return result.output


@pytest.fixture(scope="module")
def advice() -> Advice:
    return advise(spec_for(8, prompt_tokens=256, response_tokens=256), AnalyticCosts())


# --- the fast evaluator and the simulator


def random_assignment(space: Space, problem: Problem, rng: random.Random) -> Assignment | None:
    """Any mesh and setting for every model; with shadows the two sides apart, without them a rollout engine beside."""
    total = space.pool.num_devices
    cut = rng.randrange(1, total) if space.has_shadows else total
    chosen: list[Choice] = []
    for part, member in zip(problem.parts, space.members, strict=True):
        sides = range(cut) if member.trained or not space.has_shadows else range(cut, total)
        meshes = [(at, n) for at, n in problem.all_meshes if at in sides and at + n - 1 in sides]
        if member.is_rollout and not space.has_shadows:
            meshes = [(choice.start, choice.size) for choice in chosen if choice.part == member.role]
        start, size = rng.choice(meshes)
        options = part.options(problem.shape_of(start, size))
        if not options:
            return None
        chosen.append(Choice(part.name, start, size, rng.choice(options)))
    return tuple(chosen)


def random_plans(gpus: int, number: int, seed: int, rollout: str) -> Iterator[tuple[float, float]]:
    """Seconds by the search's evaluator and by the simulator of the whole plan."""
    rng, costs = random.Random(seed), AnalyticCosts()
    base = make_space(spec_for(gpus, "qwen2.5-0.5b", rollout=rollout), costs, None)
    for has_shadows, chunks, lag in SCHEDULES:
        space = with_schedule(replace(base, has_shadows=has_shadows), chunks, lag)
        problem = space.problem()
        for _ in range(number):
            assignment = random_assignment(space, problem, rng)
            if assignment is not None:
                plan = make_plan(spec_of(space, assignment))
                away = {each.model for each in plan.schedule.instructions if isinstance(each, Offload)}
                if away <= {"actor.rollout"}:
                    yield evaluate(problem, assignment), simulated_seconds(plan, costs)


@pytest.mark.parametrize("rollout", ["transformers", "vllm"])
@pytest.mark.parametrize("gpus", [2, 8, 16])
def test_the_fast_evaluator_is_the_simulator(gpus: int, rollout: str) -> None:
    pairs = list(random_plans(gpus, 8, gpus, rollout))
    assert len(pairs) > 30
    assert [fast for fast, _ in pairs] == pytest.approx([whole for _, whole in pairs], rel=1e-12)


@pytest.mark.full
def test_the_fast_evaluator_is_the_simulator_on_a_thousand_plans() -> None:
    both = [(gpus, rollout) for gpus in (2, 4, 8, 16) for rollout in ("transformers", "vllm")]
    pairs = [pair for gpus, rollout in both for pair in random_plans(gpus, 30, 100 + gpus, rollout)]
    assert len(pairs) > 1000
    assert [fast for fast, _ in pairs] == pytest.approx([whole for _, whole in pairs], rel=1e-12)


# --- advice


def test_what_is_advised_can_be_planned_and_fits(advice: Advice) -> None:
    for answer in advice.answers:
        assert answer.candidate.spec is not None
        plan = make_plan(answer.candidate.spec)
        check_fits(plan)
        assert simulated_seconds(plan, AnalyticCosts()) == answer.seconds


def test_both_methods_and_the_usual_placements_are_shown(advice: Advice) -> None:
    methods = [item.candidate.method for item in (*advice.answers, *advice.refused)]
    assert methods.count("guideline") == 1
    assert methods.count("search") == 3
    names = {item.candidate.name for item in (*advice.answers, *advice.refused) if item.candidate.method == "usual"}
    assert {"co-located ZeRO-3", "standalone", "split", "symmetric, tp 8"} == names
    assert [answer.seconds for answer in advice.answers] == sorted(answer.seconds for answer in advice.answers)


def test_nothing_without_lag_beats_the_search_by_more_than_its_gap(advice: Advice) -> None:
    for label, lag in (("without shadows", 0), ("with shadows", 0)):
        result = next(item.result for item in advice.searches if item.label == label)
        same = [answer for answer in advice.answers if bool(answer.plan.placement.shadows) == ("with s" in label)]
        fastest = min(answer.seconds for answer in same if answer.plan.spec.schedule.lag == lag)
        assert result.bound <= result.seconds * (1 + 1e-9)
        # chunks may be faster than the stated space, which has none
        assert fastest >= (1 - result.gap) * result.seconds * 0.999 or "with s" in label


def test_the_choice_trains_on_the_newest_batch(advice: Advice) -> None:
    assert advice.best.plan.spec.schedule.lag == 0


def test_rules_that_fire_are_named_with_what_made_them(advice: Advice) -> None:
    rules = {rule.name: rule.reason for rule in advice.rules}
    assert "fits one node" in rules["interleave what fits a node"]
    assert "co-locate small clusters" in rules


@pytest.mark.parametrize(
    ("gpus", "model", "rule"),
    [(1, "qwen2.5-0.5b", "co-locate where devices are scarce"), (32, "llama-13b", "disaggregate beyond two nodes")],
)
def test_the_guideline_follows_the_cluster(gpus: int, model: str, rule: str) -> None:
    found = advise(spec_for(gpus, model), AnalyticCosts(), seconds_limit=1.0, on_paper=False)
    assert rule in {item.name for item in found.rules}


def test_settings_of_the_yaml_stay() -> None:
    spec = spec_for(8, "qwen2.5-7b")
    actor = spec.models.actor
    assert actor is not None
    fixed = actor.model_validate({**actor.model_dump(exclude_unset=True), "zero": 3, "tp": 2})
    spec = spec.model_copy(update={"models": spec.models.model_copy(update={"actor": fixed})})
    found = advise(spec, AnalyticCosts(), seconds_limit=2.0, on_paper=False)
    for answer in found.answers:
        settings = answer.plan.model("actor")
        assert (settings.zero, settings.tp) == (3, 2)


def test_less_memory_never_makes_a_faster_plan() -> None:
    """The same devices with less memory: what fits there fits the larger ones, too."""
    seconds = []
    for memory in (80, 60, 40):
        node = {"count": 1, "devices": 8, "class": "A100-80G", "memory_gb": memory}
        request = Request(dict.fromkeys(ROLES, "llama-7b"), (node,), 256, 256, 64, mini_batches=4)
        found = advise(request.spec(), AnalyticCosts(), on_paper=False)
        seconds.append(min(answer.seconds for answer in found.answers if answer.candidate.method == "search"))
    # each search may miss the fastest plan by one per cent
    assert all(more <= less * 1.01 for more, less in zip(seconds, seconds[1:], strict=False))


def test_a_mixed_cluster_keeps_models_on_one_class() -> None:
    nodes = ({"count": 1, "devices": 4, "class": "A100-80G"}, {"count": 1, "devices": 4, "class": "A100-40G"})
    request = Request(dict.fromkeys(ROLES, "qwen2.5-1.5b"), nodes, 256, 256, 64, mini_batches=4)
    found = advise(request.spec(), AnalyticCosts(), seconds_limit=4.0, on_paper=False)
    best = found.best.plan
    for model in best.placement.models:
        assert len({best.cluster.devices[rank].device_class for rank in model.ranks}) == 1


def with_older_devices(number: int) -> Advice:
    """Four nodes of A100s, for 33B models, with ``number`` nodes of V100s beside them."""
    newer = {"count": 4, "devices": 8, "class": "A100-80G"}
    older = {"count": number, "devices": 8, "class": "V100-32G", "network_gb_s": 12.5}
    nodes = (newer, older) if number else (newer,)
    request = Request(dict.fromkeys(ROLES, "llama-33b"), nodes, 256, 256, 512, rollout="transformers")
    return advise(request.spec(), AnalyticCosts(), on_paper=False)


def test_older_devices_beside_newer_ones_help_a_little() -> None:
    """FlexRLHF, table III: forward passes move to V100s, what trains and generates stays."""
    found = [with_older_devices(number) for number in (0, 1)]
    apart = [next(a.seconds for a in each.answers if a.candidate.name == "with shadows") for each in found]
    assert 1.02 < apart[0] / apart[1] < 1.5
    assert found[1].best.seconds <= found[0].best.seconds * 1.01


def test_a_config_that_nobody_has_seen_is_advised_on(tmp_path: Path) -> None:
    sizes = {"hidden_size": 3328, "intermediate_size": 9216, "num_hidden_layers": 37, "num_attention_heads": 26}
    config = {"model_type": "qwen3", **sizes, "num_key_value_heads": 2, "head_dim": 128, "vocab_size": 99991}
    (tmp_path / "config.json").write_text(json.dumps(config))
    result = run("--model", tmp_path, "--gpus", 16, "--gpu-type", "H20-96G", "--prompts", 128)
    assert result.exit_code == 0, result.output


# --- the command


def test_the_command_writes_a_yaml_that_plans(tmp_path: Path) -> None:
    path = tmp_path / "advised.yaml"
    result = run("--model", "qwen2.5-1.5b", "--gpus", 8, "--prompts", 64, "--rollout", "transformers", "-o", path)
    assert result.exit_code == 0, result.output
    for part in ("ranked", "settings of", "why", "guideline: rules that fired", "search", "gap"):
        assert part in result.output
    assert CliRunner().invoke(app, ["plan", str(path)]).exit_code == 0
    assert len(path.read_text().splitlines()) < 80
    again = advise(load_spec(path), AnalyticCosts(), seconds_limit=1.0, on_paper=False)
    assert again.best.plan.placement.num_ranks == 8


def test_auto_in_a_yaml_is_what_is_advised(tmp_path: Path) -> None:
    path = tmp_path / "auto.yaml"
    assert run("--model", "qwen2.5-1.5b", "--gpus", 4, "--prompts", 64, "-o", path).exit_code == 0
    path.write_text(write_yaml({**read_yaml(path.read_text()), "placement": "auto"}))
    result = CliRunner().invoke(app, ["plan", str(path)])
    assert result.exit_code == 0, result.output
    assert result.output.startswith("advised: placement auto is [")


def test_unknown_names_get_the_nearest() -> None:
    assert "did you mean 'llama-33b'" in told("--model", "lama-33b")
    assert "A100-40G or A100-80G" in told("--gpu-type", "A100")
    assert "did you mean 'H100-96G'" in told("--gpu-type", "H100-90G")
    assert "use 8 or 16" in told("--gpus", 12)
    assert "did you mean 'deepspeed'" in told("--engine", "deepsped")


def test_models_that_fit_nowhere_are_told() -> None:
    assert "no placement of these models fits" in told("--model", "llama-65b", "--gpus", 1)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("nodes: [{devices: 8}]", "a node has no class"),
        ("nodes: [{devices: 8, clas: A100-80G}]", "did you mean 'class'"),
        ("[{devices: 8, class: A10-80G}]", "no such device class"),
        ("nodes: 8", "expected a list of nodes"),
        ("{", "not YAML"),
    ],
)
def test_a_bad_cluster_file_is_one_sentence(tmp_path: Path, text: str, said: str) -> None:
    path = tmp_path / "cluster.yaml"
    path.write_text(text)
    assert said in told("--cluster", path)


def test_a_cluster_file_may_say_how_fast_its_links_are(tmp_path: Path) -> None:
    path = tmp_path / "cluster.yaml"
    path.write_text("cluster: {nodes: [{count: 2, devices: 4, class: v100-32g, network_gb_s: 12.5}]}")
    assert read_nodes(path) == ({"count": 2, "devices": 4, "class": "V100-32G", "network_gb_s": 12.5},)


def test_classes_are_found_by_their_start() -> None:
    assert find_class("h20-", "--gpu-type") == "H20-96G"
    with pytest.raises(UserError, match="no such device class"):
        find_class("TPU", "--gpu-type")
