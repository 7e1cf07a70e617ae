"""Episodes of ten chats with tools have TRL's token ids and loss masks, for four chat templates."""

from __future__ import annotations

import json
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path

import pytest

from benchmarks.peers.chat_tokenizers import TOOL_FAMILIES, build_chat_tokenizer
from benchmarks.peers.trl_turns import REPLACED, SCRIPTS, TrainedIds, by_flexrlhf, by_trl

RECORDED = Path(__file__).parents[1] / "fixtures" / "trl_turns.json"
"""Episodes of TRL, with the version that has made them."""


@pytest.mark.parametrize("name", TOOL_FAMILIES)
def test_ids_and_masks_are_trls(name: str, tmp_path: Path) -> None:
    tokenizer = build_chat_tokenizer(name, tmp_path)
    ours = by_flexrlhf(name, tokenizer)
    recorded = [TrainedIds(**each) for each in json.loads(RECORDED.read_text())[name]]
    theirs = by_trl(name, tokenizer) if find_spec("trl") else recorded
    assert len(ours) == len(theirs) == len(SCRIPTS) == 10
    for number, (own, other) in enumerate(zip(ours, theirs, strict=True)):
        if (name, number) in REPLACED:
            assert own.prompt != other.prompt
            own = replace(own, prompt=other.prompt)
        assert own == other
        assert "10" in own.mask and "01" in own.mask and len(own.mask) == len(own.ids)
