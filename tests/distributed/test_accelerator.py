"""Runs on an accelerator made of host memory, which the torch engine uses as it would a GPU.

They give the results of the reference, no call mixes tensors of the two devices, the allocated memory always equals the
plan, and the host waits for few of the device's values.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from shutil import which
from typing import Any

import host_accelerator
import pytest
from assets import SIZES, WORDS
from cases import DEFAULT, LONG, SIX, SWITCHED, Assets, Case, make_assets
from comparison import deviations
from forked import run_ranks
from launcher import Outcome, params

from flexrlhf.config.spec import Spec
from flexrlhf.data.quickstart.corpus import build_tokenizer
from flexrlhf.plan.pipeline import make_plan
from flexrlhf.plan.plan import Plan
from flexrlhf.plan.plan_text import format_plan
from flexrlhf.runs.resume import RunOrder
from flexrlhf.runs.run_directory import RunDirectory
from flexrlhf.strategies.instructions import Checkpoint, Instruction, Offload, Reload, Run, Save, Sync

pytestmark = [
    pytest.mark.timeout(900),
    pytest.mark.skipif(which("g++") is None, reason="g++ builds the accelerator"),
]
EQUAL = [
    # a lag and chunks, models that take turns in device memory, shards, adapters
    Case("streaming", "six-chunks", 2),
    Case("four", "tight", 2),
    Case("two", "co-located", 2, "torch-3"),
    Case("adapters", "co-located", 2),
    # without each mechanism that a switch turns off
    SWITCHED,
]
OTHERS = [
    case
    for case in DEFAULT
    if case.ranks == 2
    and case not in EQUAL
    and not case.has_vllm
    and not any(package in case.compute for package in ("deepspeed", "megatron", "mixed"))
]
"""Everything else that the equality suite has the torch engine compute on two ranks, in `make test-all`."""
PROMPT, RESPONSE = 24, 40
INIT = {
    "model_type": "llama",
    "vocab_size": 2000,
    "hidden_size": 256,
    "intermediate_size": 2048,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
TOLERANCE = 0.03
"""Relative difference that a phase's measured peak may have from the plan."""


def raw_spec(assets: Assets, name: str, micro_batch_tokens: int) -> dict[str, Any]:
    """PPO with a lag, whose two trained models have no room on a rank together; its rows have all their tokens."""
    role = {"init": INIT, "micro_batch_tokens": micro_batch_tokens}
    return {
        "name": name,
        "algorithm": {"name": "ppo", "prompts_per_step": 16, "num_mini_batches": 1},
        "models": dict.fromkeys(("critic", "ref", "reward"), role)
        | {"actor": role | LONG | {"micro_batch_tokens": 2 * micro_batch_tokens}},
        "placement": SIX,
        "schedule": {"lag": 1},
        "data": {
            "path": str(assets.directory / "long.jsonl"),
            "tokenizer": str(assets.directory / "long-tokenizer"),
            "max_prompt_tokens": PROMPT,
            "max_response_tokens": RESPONSE,
        },
        "steps": 3,
        "checkpoint": {"every": 1},
        "cluster": {"devices": 2, "memory_gb": 0.25},
        "runs": str(assets.directory / "runs"),
        "timeout_seconds": 60,
    }


TOGETHER = {"replicas": {}, "shards": {"zero": 3}, "ring": {"cp": 2, "context_parallel": "ring"}}
"""Ways in which two ranks train one model."""
STEPS = 2
"""Optimizer steps, of several micro-batches each."""


def together_spec(assets: Assets, way: str) -> dict[str, Any]:
    """One step of supervised training of a model on both ranks."""
    return {
        "name": way,
        "algorithm": {"name": "sft", "prompts_per_step": 32, "num_mini_batches": STEPS},
        "models": {"actor": {"init": INIT | {"intermediate_size": 256}, "micro_batch_tokens": 64, **TOGETHER[way]}},
        "data": {
            "path": str(assets.directory / "sft.jsonl"),
            "tokenizer": str(assets.directory / "tokenizer"),
            "max_prompt_tokens": 8,
            "max_response_tokens": 8,
        },
        "steps": 1,
        "cluster": {"devices": 2},
        "runs": str(assets.directory / "runs"),
        "timeout_seconds": 60,
    }


@dataclass(frozen=True)
class Outcomes:
    """Results of the runs: ``whole``, and ``resumed``, which went on from its second step with smaller
    micro-batches; ``together``, by the way in which both ranks train a model."""

    equal: dict[Case, Outcome]
    whole: Outcome
    resumed: Outcome
    together: dict[str, Outcome]


@pytest.fixture(scope="module")
def outcomes(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Outcomes:
    directory = tmp_path_factory.mktemp("accelerator")
    assets = make_assets(directory)
    # with the token that begins a text
    prompt = json.dumps({"prompt": " ".join(WORDS[: PROMPT - 1])})
    # with all ids of the models, of which one ends a response
    words = [*WORDS, *(f"word{number}" for number in range(INIT["vocab_size"] - SIZES["vocab_size"]))]
    build_tokenizer([" ".join(words)], directory / "long-tokenizer")
    (directory / "long.jsonl").write_text("\n".join([prompt] * 48))
    items = [item for item in request.session.items if item.path == request.path and hasattr(item, "callspec")]
    selected = [item.callspec.params["case"] for item in items if "case" in item.callspec.params]
    equal = {case: Outcome(case, make_plan(assets.spec(case))) for case in selected}
    whole, resumed = (
        Outcome(EQUAL[0], make_plan(Spec.parse(raw_spec(assets, *settings))))
        for settings in (("whole", 256), ("resumed", 128))
    )
    # measured first, since weights of checksums stay on the device
    orders = [
        RunOrder(whole.plan.spec),
        RunOrder(resumed.plan.spec, (RunDirectory(whole.directory).checkpoint(2).path,)),
    ]
    together = {way: Outcome(EQUAL[0], make_plan(Spec.parse(together_spec(assets, way)))) for way in TOGETHER}
    orders += [RunOrder(each.plan.spec) for each in (*equal.values(), *together.values())]
    for each in (whole, resumed, *equal.values(), *together.values()):
        RunDirectory(each.plan.spec.directory).prepare(each.plan.spec, format_plan(each.plan), continues=False).close()
    (directory / "orders").write_text(RunOrder.to_json(orders))
    library = host_accelerator.built(Path(request.config.cache.mkdir("accelerator")))
    run_ranks("accelerator_ranks", library, directory / "orders", number=2, seconds=800)
    return Outcomes(equal, whole, resumed, together)


@pytest.mark.parametrize("case", params([*EQUAL, *OTHERS], OTHERS))
def test_results_equal_the_reference(outcomes: Outcomes, case: Case) -> None:
    outcome = outcomes.equal[case]
    assert outcome.trace["otherData"]["device"] == host_accelerator.NAME
    first = next((d for d in deviations(outcome) if not d.size <= d.limit), None)
    assert first is None, f"{case.name}: {first}"


def phase_names(plan: Plan, instruction: Instruction) -> Iterator[tuple[str, str]]:
    """Kind and model of the phases of an instruction that the memory plan has."""
    match instruction:
        case Run():
            yield instruction.operator.kind, instruction.model
            yield from [("update", instruction.model)] * (instruction.operator.kind == "train")
        case Sync():
            yield "sync", instruction.destination
        case Save():
            yield "save", instruction.model
        case Checkpoint():
            yield from (("checkpoint", phase.model) for each in plan.memories for phase in each.phases)


def planned_phases(outcome: Outcome, rank: int) -> dict[tuple[str, str], int]:
    return {(phase.kind, phase.model): phase.total for phase in outcome.plan.memories[rank].phases}


def planned_and_measured(outcome: Outcome, rank: int) -> dict[str, tuple[int, int]]:
    """Peaks of a rank by instruction."""
    plan, planned = outcome.plan, planned_phases(outcome, rank)
    found = {}
    for instruction in plan.schedule.for_rank(rank):
        spans = [
            span["args"]
            for span in outcome.spans
            if (span["tid"], span["cat"], span["name"]) == (rank, instruction.kind, instruction.label)
        ]
        # work of the first step alone runs before weights travel
        peaks = [span["peak_bytes"] for span in spans] if any(span["step"] > 0 for span in spans) else []
        sizes = [planned[name] for name in phase_names(plan, instruction) if name in planned]
        if sizes and peaks:
            found[f"{instruction.kind} {instruction.label}"] = max(sizes), max(peaks)
    return found


@pytest.mark.parametrize("rank", [0, 1])
def test_memory_at_every_moment_is_the_planned_memory(outcomes: Outcomes, rank: int) -> None:
    """Memory of a plan that offloads: at load and resume, in every call, at syncs, saves and checkpoints."""
    found = planned_and_measured(outcomes.whole, rank)
    for outcome, start in ((outcomes.whole, "load"), (outcomes.resumed, "resume")):
        measured = outcome.trace["otherData"]["start_bytes"][str(rank)][start]
        if sizes := [size for (kind, _), size in planned_phases(outcome, rank).items() if kind == start]:
            found[start] = max(sizes), measured
    for name, (size, measured) in found.items():
        print(f"rank {rank}: {name}: {size / 1e6:.1f} MB planned, {measured / 1e6:.1f} MB measured")
    kinds = {name.split()[0] for name in found}
    assert kinds == {"run", "sync", "checkpoint"} | ({"load", "resume", "save"} if rank == 0 else set())
    assert max(abs(measured - size) / size for size, measured in found.values()) < TOLERANCE
    # after instructions; the driver of this accelerator counts what is allocated
    facts = outcomes.whole.trace["otherData"]
    assert 0 < facts["device_bytes"][str(rank)] <= facts["peak_bytes"][str(rank)]


def test_models_are_copied_on_streams_of_their_own(outcomes: Outcomes) -> None:
    """Copies are made as late, or as early, as events allow, in equal runs too: a wait that lacks changes numbers."""
    tight = outcomes.equal[EQUAL[1]]
    assert any(isinstance(each, Reload) and each.overlaps for each in tight.plan.schedule.instructions)
    for outcome in (tight, outcomes.whole):
        moving = {
            rank for each in outcome.plan.schedule.instructions if isinstance(each, Offload) for rank in each.ranks
        }
        copies = outcome.trace["otherData"]["host_copies"]
        assert moving and {int(rank) for rank, times in copies.items() if times["seconds"] > 0} == moving, copies


def counts(outcome: Outcome, rank: int, label: str) -> Counter[str]:
    """Count the host's reads and waits of an instruction on a rank, in the last step."""
    found: dict[str, dict[str, int]] = json.loads((outcome.directory / f"counts-{rank}.json").read_text())
    return Counter(found[label])


@pytest.mark.parametrize(("way", "waits", "at_end"), [("replicas", 2, 3), ("shards", 3, 3), ("ring", 1, 0)])
def test_the_host_waits_for_no_gradient_and_no_step_of_a_ring(
    outcomes: Outcomes, way: str, waits: int, at_end: int
) -> None:
    """In an optimizer step it waits for the norm, for counts of other ranks' rows, and in lockstep for their number of
    passes; at the end of the training for the rows and the statistics of others."""
    for rank in (0, 1):
        found = counts(outcomes.together[way], rank, "train_actor on actor")
        print(f"{way}, rank {rank}: {found}")
        assert found["host"] == STEPS * waits + at_end, found
        assert found["in order"] > 0, found


def test_switches_reach_the_ranks(outcomes: Outcomes) -> None:
    """Copies by streams, and batches of messages, which runs have that do not switch them off."""

    def counted(case: Case) -> tuple[float, int]:
        outcome = outcomes.equal[case]
        copies = outcome.trace["otherData"]["host_copies"]
        found = [json.loads((outcome.directory / f"counts-{rank}.json").read_text()) for rank in range(2)]
        batches = sum(counts.get("batches", 0) for labels in found for counts in labels.values())
        return sum(times["seconds"] for times in copies.values()), batches

    assert counted(EQUAL[1])[0] > 0 and counted(EQUAL[0])[1] > 0
    plan = outcomes.equal[SWITCHED].plan
    assert {Sync, Reload} <= {type(each) for each in plan.schedule.instructions}
    assert counted(SWITCHED) == (0, 0)


def test_the_host_waits_for_no_micro_batch_and_not_for_each_token(outcomes: Outcomes) -> None:
    """A call of four passes reads its rows, and once its statistics; whether all rows have ended is looked at every
    eight tokens. A checkpoint waits for all copies together; before, checksums of two shadows are read on rank 1.
    """

    def reads(outcome: Outcome, rank: int, label: str) -> int:
        return counts(outcome, rank, label)["reads"]

    for label in ("train_actor on actor", "train_critic on critic"):
        assert 0 < reads(outcomes.whole, 0, label) == reads(outcomes.resumed, 0, label) < 10, label
    for label in ("ref_logprobs on ref", "values on critic.shadow", "scores on reward"):
        assert 0 < reads(outcomes.whole, 1, label) < 3, label
    assert 0 < reads(outcomes.whole, 1, "generate on actor.shadow") < RESPONSE / 3
    checkpoints = [each for each in outcomes.whole.plan.schedule.instructions if isinstance(each, Checkpoint)]
    assert [reads(outcomes.whole, rank, each.label) for each in checkpoints for rank in (0, 1)] == [1, 3]
