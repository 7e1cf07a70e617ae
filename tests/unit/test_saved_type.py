"""Type of a saved model: its files', unless another is set."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from small_runs import placed_model

from flexrlhf.config.model_settings import LoraSpec
from flexrlhf.memory.transfer_bytes import saved_bytes
from flexrlhf.weights.model_files import StoredTensor, StoredTensors
from flexrlhf.weights.model_shape import ModelShape


@pytest.mark.parametrize(
    ("types", "expected"),
    [
        ([], "float32"),
        (["BF16"], "bfloat16"),
        (["F16", "F16"], "float16"),
        (["F32", "F32"], "float32"),
        (["F64"], "float32"),
        (["BF16", "F32"], "float32"),
        (["BF16", "F16"], "float32"),
    ],
)
def test_the_type_of_files_is_that_of_all_tensors(types: list[str], expected: str) -> None:
    stored = {str(place): StoredTensor((1,), kind, Path("a"), 0) for place, kind in enumerate(types)}
    assert StoredTensors(stored).common_type == expected


@pytest.mark.parametrize(
    ("settings", "stored", "expected"),
    [
        ({}, "bfloat16", "bfloat16"),
        ({}, "float32", "float32"),
        ({"dtype": "bfloat16"}, "float32", "float32"),
        ({"save_dtype": "float32"}, "bfloat16", "float32"),
        ({"save_dtype": "bfloat16"}, "float32", "bfloat16"),
        # adapters have no files; and DeepSpeed exposes weights in the type of passes
        ({"lora": LoraSpec()}, "bfloat16", "float32"),
        ({"engine": "deepspeed", "dtype": "bfloat16"}, "float32", "bfloat16"),
        ({"engine": "deepspeed"}, "bfloat16", "bfloat16"),
    ],
)
def test_the_saved_type_and_its_bytes(settings: dict[str, Any], stored: Any, expected: str) -> None:
    model, shape = placed_model("actor", (0,), **settings), ModelShape((("w.weight", (10, 10)),), stored=stored)
    assert shape.saved_type(model) == expected
    assert saved_bytes(model, shape) == (400 if expected == "float32" else 200)
