"""Command lines of random damage: each is executed or refused in one clear sentence.

A command that could start ranks names ``broken.yaml`` first, whose data does not exist, so that it is refused.
"""

from __future__ import annotations

from pathlib import Path
from random import Random

import pytest
from mutated_yaml import odd_setting
from odd_values import TEXTS, misspelt, odd_value
from outcomes import Case, run_cases
from small_inputs import RAW

SAMPLE, ALL = 50, 1200
VECTOR = ("--placement-ratio", "[1,1,0.5,0.5]")
COMMANDS: tuple[tuple[str, ...], ...] = (
    ("plan", "ppo.yaml", "--devices", "4", *VECTOR, "--set", "models.actor.zero=3", "--force"),
    ("plan", "sft.yaml", "ppo.yaml", "--set", "small:steps=4", "--set", "cluster.memory_gb=0.001"),
    ("simulate", "ppo.yaml", "--devices", "2", "--lengths", "8", "--steps", "2", "-o", "trace.json"),
    ("simulate", "ppo.yaml", "--mean-response", "4", "--against", "trace.json", "--profile", "profile.json"),
    ("advise", "ppo.yaml", "--seconds", "0.1", "--set", "cluster.devices=2", "--mean-response", "4", "-o", "new.yaml"),
    ("advise", "--model", "llama-7b", "--gpus", "2", "--gpu-type", "A100-80G", "--seconds", "0.1", "--lora", "4"),
    (
        "advise",
        "--cluster",
        "nodes.yaml",
        "--prompts",
        "8",
        "--mini-batches",
        "2",
        "--engine",
        "torch",
        "--seconds",
        "0.1",
    ),
    ("run", "ppo.yaml", "--dry-run", "--resume", "runs/small", "--set", "steps=4"),
    ("run", "ppo.yaml", "--dry-run", "--resume", "auto", "--devices", "2", *VECTOR),
    ("run", "broken.yaml", "--nnodes", "2", "--node-rank", "0", "--rdzv-endpoint", "localhost:1234", "--devices", "4"),
    ("verify", "broken.yaml", "--against", "[1,1,0.5,0.5]", "--steps", "2", "--devices", "2", "--keep", "kept"),
    ("verify", "broken.yaml", "--determinism", "--against-set", "schedule.num_chunks=2", "--set", "steps=2"),
    ("export", "runs/small", "-o", "exported", "--model", "actor", "--dtype", "float16", "--merge-adapters"),
    ("export", "runs/small/checkpoints/step-000002", "--output", "exported"),
)
KEPT = {"run": 3, "verify": 2}
"""First words that stay as they are, by command: without them ranks would start."""
OPTIONS = tuple(sorted({word for command in COMMANDS for word in command if word.startswith("-")}))
ODD_OPTIONS = (
    "--",
    "-",
    "-x",
    "--no-such-option",
    "--help=1",
    "-o",
    "---",
    "--set=",
    "--devices=0",
    "--résumé",
    "\udcff",
)


@pytest.mark.parametrize("count", [SAMPLE, pytest.param(ALL, marks=[pytest.mark.full, pytest.mark.timeout(1800)])])
def test_a_damaged_command_line_is_executed_or_refused_in_one_sentence(count: int, inputs: Path) -> None:
    def case(rng: Random) -> Case:
        (Path("nodes.yaml")).write_text("- {devices: 2, class: A100-80G}\n")
        words = mutated_words(rng, rng.choice(COMMANDS))
        return Case(words, "command line")

    run_cases(inputs, count, 8, case).check(least_refused=0.5)


def mutated_words(rng: Random, command: tuple[str, ...]) -> tuple[str, ...]:
    """A command with words dropped, added, repeated, cut, misspelt or replaced."""
    kept = KEPT.get(command[0], 1) if command[:2] != ("run", "broken.yaml") else 2
    words = list(command)
    for _ in range(rng.choice((1, 1, 2))):
        at = rng.randint(kept, len(words) - 1) if len(words) > kept else kept
        words[at:] = _mutated_once(rng, words[at:])
    return tuple(words)


def _mutated_once(rng: Random, words: list[str]) -> list[str]:
    """``words`` with a mutation of the first one, or something before it."""
    first, *rest = words or [""]
    match rng.randrange(9):
        case 0:
            return rest
        case 1:
            return [first[: rng.randrange(len(first) + 1)], *rest]
        case 2:
            return [misspelt(rng, first), *rest]
        case 3:
            return [rng.choice(TEXTS), *rest]
        case 4:
            return [str(odd_value(rng))[:100_000], *rest]
        case 5:
            return ["--set", odd_setting(rng, RAW), *words]
        case 6:
            return [
                rng.choice(OPTIONS),
                rng.choice((*TEXTS, "1", "0", "-1", "ppo.yaml", "runs/small", "llama")),
                *words,
            ]
        case 7:
            return [rng.choice(ODD_OPTIONS), *words]
        case _:
            return [*words[:2], *words]
