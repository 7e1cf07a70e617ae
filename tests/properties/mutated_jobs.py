"""Job files of other systems with random damage, and the keys that each of them has."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

from flexrlhf.imports.launches import Launch, find_launches
from flexrlhf.imports.settings import flat
from flexrlhf.imports.shell_script import ShellScript
from flexrlhf.imports.yaml_trees import read_tree

JOBS = Path(__file__).parents[1] / "fixtures" / "imports"
GIVEN = {"1": "meta-llama/Llama-2-7b-hf", "2": "meta-llama/Llama-2-7b-hf"}
Pairs = list[tuple[str, Any]]
SCRIPTS = ("verl_grpo.sh", "verl_off_policy.sh", "verl_experts.sh", "openrlhf_ppo.sh", "openrlhf_before.sh") + (
    *("trl_grpo.sh", "deepspeed_chat.sh"),
)
TREES = ("verl_ppo.yaml", "trl_grpo.yaml", "areal_grpo.yaml", "nemo_base.yaml")
ODD: Sequence[Any] = (
    -1,
    0,
    1,
    7,
    512.7,
    1e400,
    "nan",
    "abc",
    "auto",
    "none",
    "",
    True,
    False,
    None,
    [1, 2],
    "$X",
    "a b",
)
SECRET = "s3cret0123456789"


@dataclass(frozen=True)
class MutatedJob:
    """A job file.

    name:  the file's name.
    text:  its text.
    keys:  keys of its settings.
    """

    name: str
    text: str
    keys: tuple[str, ...]


def mutated_job(rng: Random) -> MutatedJob:
    """Return a job with up to four changes of its settings."""
    name = rng.choice((*SCRIPTS, *TREES, "trl_sft.py"))
    if name.endswith(".py"):
        return _python(rng)
    path, secret = JOBS / name, (rng.choice(("hf_token", "own.api_key")), SECRET)
    if name in TREES:
        pairs = _changed(rng, [(key, value) for key, value in flat(read_tree(path)) if _is_plain(value)])
        pairs = list(dict([*pairs, secret]).items())
        return MutatedJob(name, _yaml(pairs), tuple(key for key, _ in pairs if key))
    launch = next(find_launches([each.words for each in ShellScript(path.read_text(), GIVEN).commands]))
    before, pairs = _pairs(launch)
    pairs = [*_changed(rng, pairs), secret]
    words = [_option(launch, key, value) for key, value in pairs]
    return MutatedJob(name, " ".join([*before, *words]), tuple(key for key, _ in pairs))


def _pairs(launch: Launch) -> tuple[list[str], Pairs]:
    """Return the words in front of a command's settings, and the settings."""
    own = {"verl": "verl.trainer.main_ppo", "OpenRLHF": f"openrlhf.cli.train_{launch.program}", "TRL": "trl"}
    start = [*launch.before, own.get(launch.system, "main.py"), *(["grpo"] if launch.system == "TRL" else [])]
    pairs: Pairs = []
    for word in launch.arguments:
        if launch.system == "verl":
            pairs += [tuple(word.lstrip("+").split("=", 1))] if "=" in word and not word.startswith("-") else []  # type: ignore[list-item]
        elif word.startswith("--"):
            pairs.append((word[2:], ""))
        elif pairs:
            pairs[-1] = (pairs[-1][0], f"{pairs[-1][1]} {word}".strip())
    return start, pairs


def _option(launch: Launch, key: str, value: Any) -> str:
    text = json.dumps(value) if isinstance(value, list | bool | None) else str(value)
    quoted = "'" + text.replace("'", "").replace("\0", "") + "'"
    return f"+{key}={quoted}" if launch.system == "verl" else f"--{key} {quoted if text else ''}"


def _python(rng: Random) -> MutatedJob:
    pairs = _changed(rng, [("max_length", 1024), ("learning_rate", 1e-5), ("max_steps", 50), ("packing", True)])
    pairs = list(dict([*pairs, ("hub_token", SECRET)]).items())
    words = ", ".join(f"{key.replace('.', '_')}={value!r}" for key, value in pairs)
    text = f"from trl import SFTConfig, SFTTrainer\nX = SFTTrainer('Qwen/Qwen3-1.7B', args=SFTConfig({words}))\n"
    return MutatedJob("job.py", text.replace("inf", "float('inf')"), tuple(key.replace(".", "_") for key, _ in pairs))


def _changed(rng: Random, pairs: Pairs) -> Pairs:
    """Return settings of which some are renamed, removed, repeated or new, or have other values."""
    for _ in range(rng.randint(1, 4)):
        place = rng.randrange(len(pairs)) if pairs else 0
        key, value = pairs[place] if pairs else ("x", 1)
        match rng.randrange(6):
            case 0:
                pairs[place : place + 1] = [(f"{key}_x", value)]
            case 1 | 2:
                pairs[place : place + 1] = [(key, rng.choice(ODD))]
            case 3:
                del pairs[place : place + 1]
            case 4:
                pairs.insert(place, (f"own.key{rng.randrange(99)}", rng.choice(ODD)))
            case 5:
                pairs.insert(place, (key, rng.choice(ODD)))
    return pairs


def _is_plain(value: Any) -> bool:
    return not (isinstance(value, str) and "${" in value) and not (isinstance(value, dict) and not value)


def _yaml(pairs: Pairs) -> str:
    """Return a YAML of dotted keys; one that is a section of another is left out."""
    names = {key for key, _ in pairs}
    tree: dict[str, Any] = {}
    for key, value in pairs:
        parts = key.split(".")
        if any(".".join(parts[:end]) in names for end in range(1, len(parts))):
            continue
        node = tree
        for part in parts[:-1]:
            node = node.setdefault(part, {})
        node[parts[-1]] = value
    return json.dumps(tree).replace("Infinity", ".inf").replace("NaN", ".nan")
