"""Summary of a run: metrics before and after, times, and samples side by side, at any width."""

from __future__ import annotations

from typing import Any

import pytest
from small_runs import plan_of

from flexrlhf.display.summary_text import format_summary, sample_pairs
from flexrlhf.metrics import METRICS
from flexrlhf.plan.memory_text import measured_memory
from flexrlhf.plan.plan_text import format_plan, format_short_plan
from flexrlhf.text import bytes_text
from flexrlhf.trainer.memory_meter import connected_memory, memory_in_use


def sample(rows: str, step: int, prompt: str, response: str, **score: float | None) -> dict[str, Any]:
    return {"rows": rows, "step": step, "prompt": prompt, "response": response, **score}


def summary(*samples: dict[str, Any], width: int = 120) -> list[str]:
    return format_summary("first", "runs/first", [], samples, width).splitlines()[2:]


def test_metrics_of_the_first_and_the_last_steps() -> None:
    rows = [{"step": step, "seconds": 1.0, "reward_mean": float(step)} for step in range(6)]
    head, where, columns, reward = format_summary("first", "runs/first", rows, []).splitlines()
    assert (head, where) == ("first: 6 steps, 6.0 s", "  results in runs/first")
    assert columns.split() == ["first", "3", "->", "last", "3", "steps"]
    assert reward.split()[:4] == ["reward_mean", "1", "->", "4"] and columns.index("first") == reward.index("1")


def test_throughput_and_shares_are_those_of_the_run() -> None:
    """Without the first step's throughput, which is slower."""
    rows = [
        {"step": step, "seconds": 5.0 if step == 0 else 1.0, "samples_per_second": 10.0 + step, "time_train": 0.5}
        for step in range(3)
    ]
    head, _, shares, *_ = format_summary("first", "runs/first", rows, []).splitlines()
    assert head.endswith(", 11.5 samples/s")
    assert shares == "  time of all ranks: train 50 %"


def test_samples_of_one_step_are_lines() -> None:
    line = summary(sample("training", 4, "Where\nis it?", "word " * 40 + "end", score=0.0), width=100)[-1]
    assert (
        line.startswith("  Where is it? -> word word ") and line.endswith(" word end  (score 0)") and len(line) <= 100
    )


def test_evaluations_are_compared_by_prompt() -> None:
    samples = [
        *(sample("training", step, f"prompt {step}", "x") for step in (0, 1)),
        *(
            sample("evaluation", step, f"{row}?", f"{step} to {row}", score=row, weights_version=step and step + 1)
            for step in (0, 3)
            for row in range(5)
        ),
    ]
    pairs, are_same = sample_pairs(samples)
    assert are_same and [(first["response"], last["response"]) for first, last in pairs] == [
        ("0 to 0", "3 to 0"),
        ("0 to 1", "3 to 1"),
        ("0 to 2", "3 to 2"),
    ]
    lines = summary(*samples, width=80)
    assert lines[:4] == [
        "  samples",
        f"  {'evaluation, before training':<36} | evaluation, after 4 steps",
        "  > 0?",
        f"  {'0 to 0 (score 0)':<36} | 3 to 0 (score 0)",
    ]


def test_the_same_prompt_of_training_is_better_than_others_of_evaluations() -> None:
    training = [sample("training", step, "same", str(step)) for step in (0, 9)]
    evaluation = [sample("evaluation", step, f"prompt {step}", str(step)) for step in (4, 9)]
    ((first, _),), are_same = sample_pairs([*evaluation, *training])
    assert are_same and first["rows"] == "training"
    (_,), are_same = sample_pairs(evaluation)
    assert not are_same
    assert summary(*evaluation)[0] == "  samples, of different prompts"
    assert sample_pairs(training[:1]) == ([], False)


@pytest.mark.parametrize("width", [60, 80, 120])
def test_definitions_are_whole_at_every_width(width: int) -> None:
    row = {"seconds": 1.0, "reward_mean": 1.0, "kl": 0.25, "response_length": 9.0}
    text = " ".join("\n".join(format_summary("first", "runs/first", [row], [], width).splitlines()[2:]).split())
    for name, number in (("reward_mean", 1), ("kl", 0.25), ("response_length", 9)):
        (definition,) = (metric.definition for metric in METRICS if metric.name == name)
        assert f"{name} {number} {definition}" in text


def test_shares_of_time_end_their_lines_whole() -> None:
    names = ("generate", "train", "forward", "wait", "other")
    row = {"seconds": 1.0} | {metric.name: 0.125 for metric in METRICS if metric.name in {f"time_{n}" for n in names}}
    for width in range(40, 121):
        lines = format_summary("first", "runs/first", [row], [], width).splitlines()[2:]
        assert lines[0].startswith("  time of all ranks: ") and max(map(len, lines)) <= width
        assert all(line.endswith((" %,", " %")) and line.isascii() for line in lines), width


def test_prompts_are_wrapped_as_responses_are() -> None:
    prompt = " ".join(f"word{number}" for number in range(14))
    same = [sample("training", step, prompt, "x") for step in (0, 9)]
    lines = summary(*same, width=80)
    assert lines[2].startswith("  > word0 ") and lines[3].startswith("    word")
    assert " ".join(" ".join(lines[2:-1]).split()) == f"> {prompt}"
    others = summary(same[0], sample("training", 9, "short", "y"), width=80)
    assert others[2].startswith("  > word0 ") and others[2].endswith(" | > short")
    assert " ".join(" ".join(line.split("|")[0] for line in others[2:-1]).split()) == f"> {prompt}"


@pytest.mark.parametrize("width", [60, 80, 120])
def test_no_line_is_wider_than_the_terminal(width: int) -> None:
    long = "a sentence of several words " * 20
    samples = [sample("training", step, prompt, long, score=None) for step in (0, 9) for prompt in (long, "b")]
    rows = [{"step": step, "seconds": 1.0, "kl": 1.0, "eval_accuracy": 0.5} for step in range(4)]
    lines = format_summary("first", "runs/first", rows, samples, width).splitlines()
    assert max(map(len, lines)) <= width, max(lines, key=len)


@pytest.mark.parametrize("width", [80, 120])
def test_peaks_are_compared_on_gpus_alone(width: int) -> None:
    """The peak of a process on a CPU has libraries and code, for which nothing is planned."""
    plan = plan_of([1, 1, 1, 1], 2)
    for device in ("cpu", "cuda"):
        facts = {"device": device, "held_bytes": {"0": {}, "1": {}}, "peak_bytes": {"0": 10**8, "1": 10**8}}
        lines = measured_memory(plan, facts, width)
        assert max(map(len, lines)) <= width, lines
        assert ("100 MB measured" in " ".join(lines)) is (device == "cuda") and "in use" not in " ".join(lines)
        counted = measured_memory(plan, facts | {"device_bytes": {"0": 2 * 10**9, "1": 0}}, width)
        assert max(map(len, counted)) <= width, counted
        assert ("1.5 GB planned, 2 GB in use" in " ".join(counted)) is (device == "cuda")


@pytest.mark.parametrize("width", [80, 120])
def test_a_short_plan_has_the_step_places_and_memory(width: int) -> None:
    plan = plan_of([1, 1, 0.5, 0.5], 2, "cluster.memory_gb=1")
    lines = format_short_plan(plan, width).splitlines()
    assert max(map(len, lines)) <= width and len(lines) <= 10
    assert lines[0] == "test: ppo, interleaving on 2 devices, 3 steps"
    assert [line.split()[:2] for line in lines[1:4]] == [["ranks", "0-1"], ["rank", "0"], ["rank", "1"]]
    text = " ".join(" ".join(lines).split())
    assert "step generate on actor > " in text and "train_critic on critic > save actor > save critic" in text
    assert "it has 1 GB whole plan runs/test/plan.txt" in text


def test_what_communicators_take_is_next_to_what_is_planned() -> None:
    text = connected_memory(plan_of(None, 2), 1, 4_000_000_000, 80_000_000_000)
    assert text == "rank 1: 1 communicator; 4 GB of 80 GB in use, planned 1.5 GB"


EXPERTS = "models.actor.init={model_type: qwen3_moe, num_experts: 8, num_experts_per_tok: 2}"


@pytest.mark.parametrize(
    ("overrides", "has_own"),
    [
        ((EXPERTS, "models.actor.zero=3", "models.actor.ep=4"), True),
        (("models.actor.zero=2", "models.actor.cp=4"), True),
        # FSDP2 shards over more ranks, or not at all
        ((EXPERTS, "models.actor.zero=3", "models.actor.ep=2"), False),
        (("models.actor.zero=2", "models.actor.cp=2"), False),
        (("models.actor.cp=4",), False),
    ],
)
def test_messages_inside_layers_do_not_queue_behind_gathers(overrides: tuple[str, ...], has_own: bool) -> None:
    plan = plan_of([1, 1, 1, 1], 4, *overrides)
    made = {group.communicator for group in plan.groups if 0 in group.ranks and not group.alone}
    assert ("inside layers", (0, 1, 2, 3)) in made if has_own else "inside layers" not in dict(made)
    assert plan.communicators(0) == len(made)
    assert ("messages inside layers" in " ".join(format_plan(plan).split())) == has_own


def test_memory_in_use_is_next_to_the_states_that_are_loaded() -> None:
    """An engine that sleeps has none on the device; moments of training come with its first update."""
    plan = plan_of(None, 1, "rollout.engine=vllm", "models.actor.init=qwen2.5-0.5b")
    states = {name: plan.state(plan.placement[name], 0) for name in ("actor", "actor.rollout")}
    actor, engine = states["actor"], states["actor.rollout"]
    assert actor is not None and engine is not None and engine.freed == engine.resting > 0
    for is_awake, planned in ((True, engine.resting), (False, 0)):
        loaded = {plan.placement[name].name: is_awake or name == "actor" for name in states}
        text = memory_in_use(plan, 0, "a moment", loaded, 30 * 10**9, 80 * 10**9)
        size = bytes_text(1_500_000_000 + actor.resting - actor.moments + planned)
        assert text == f"rank 0: a moment; 30 GB of 80 GB in use, planned {size}"


def test_more_communicators_than_usual_leave_a_known_device_less_memory() -> None:
    """Half a GB of each further one; a size in the YAML is what models can fill."""
    plan = plan_of(None, 2, "cluster.devices=null", "cluster.nodes=[{devices: 2, class: A100-80G}]")
    whole = plan.cluster.memory_bytes(0)
    assert whole is not None and plan.most_communicators == 1 and plan.device_bytes(0) == whole
    assert [whole - plan.cluster.memory_bytes(0, count) for count in (3, 4, 8)] == [0, 500_000_000, 2_500_000_000]
    written = plan_of(None, 2, "cluster.memory_gb=10")
    assert written.cluster.memory_bytes(0, 8) == 10_000_000_000
