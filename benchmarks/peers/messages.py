"""Rows of the data files of ``make real`` as messages, the form that TRL and flexrlhf both read."""

from __future__ import annotations

import gzip
import json
import re
from collections.abc import Iterator
from pathlib import Path

Message = dict[str, str]
Row = dict[str, list[Message]]
ROLES = {"human": "user", "gpt": "assistant", "system": "system"}
TURN = re.compile(r"\n\n(Human|Assistant):")


def read_instructions(directory: Path) -> Iterator[Row]:
    """Yield ``prompt`` and ``completion`` of each instruction, its input below it."""
    for row in json.loads((directory / "alpaca.json").read_text()):
        text = "\n\n".join(part for part in (row["instruction"], row["input"]) if part)
        yield {"prompt": [message("user", text)], "completion": [message("assistant", row["output"])]}


def read_pairs(directory: Path) -> Iterator[Row]:
    """Yield ``prompt``, ``chosen`` and ``rejected`` of each ShareGPT row."""
    for row in json.loads((directory / "dpo_pairs.json").read_text()):
        yield {"prompt": [of_sharegpt(turn) for turn in row["conversations"]]} | {
            key: [of_sharegpt(row[key])] for key in ("chosen", "rejected")
        }


def read_dialogues(directory: Path) -> Iterator[Row]:
    """Yield ``prompt``, ``chosen`` and ``rejected`` of each pair of dialogues that part at their last turn only."""
    with gzip.open(directory / "hh_pairs.jsonl.gz", "rt") as file:
        for line in file:
            pair: dict[str, str] = json.loads(line)
            chosen, rejected = (of_dialogue(pair[key]) for key in ("chosen", "rejected"))
            if chosen[:-1] == rejected[:-1] and chosen[-1]["role"] == rejected[-1]["role"] == "assistant":
                yield {"prompt": chosen[:-1], "chosen": chosen[-1:], "rejected": rejected[-1:]}


def message(role: str, content: str) -> Message:
    return {"role": role, "content": content}


def of_sharegpt(turn: dict[str, str]) -> Message:
    return message(ROLES[turn["from"]], turn["value"])


def of_dialogue(text: str) -> list[Message]:
    """Return the turns of a dialogue as hh-rlhf writes them."""
    parts: list[str] = TURN.split(text)[1:]
    turns = zip(parts[::2], parts[1::2], strict=True)
    return [message("user" if speaker == "Human" else "assistant", words.strip()) for speaker, words in turns]
