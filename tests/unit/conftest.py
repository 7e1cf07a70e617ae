"""Set before torch is loaded: attention in 16 bits packs copies of keys and values where a CPU has AMX, which planned
memory does not know, and which only some machines do."""

from __future__ import annotations

import os
from typing import Any

import pytest

os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_BF16")


@pytest.fixture(scope="session")
def tokenizers(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Small tokenizers of five families, with their chat templates."""
    from benchmarks.peers.chat_tokenizers import FAMILIES, build_chat_tokenizer

    return {name: build_chat_tokenizer(name, tmp_path_factory.mktemp(name)) for name in FAMILIES}
