"""A policy and its critic on one trunk: losses and rows for tests, on one rank or shared by two."""

from __future__ import annotations

from dataclasses import replace
from importlib.util import find_spec
from typing import Any

from small_models import LENGTHS, TINY, likelihood, mini_batch, squared_values
from torch import Tensor

from flexrlhf.config.model_settings import LoraSpec, OptimizerSpec
from flexrlhf.engines.base import Batch, Loss, Moments, Outputs, Sampling, Totals, moments
from flexrlhf.operators.columns import Column

COLUMNS_OF_BOTH = [Column.of("logprobs"), Column.of("values")]
INIT = {**TINY, "intermediate_size": 32}
UPDATES = 3
FAST = OptimizerSpec(learning_rate=0.01, eps=1e-4)
LORA = LoraSpec(rank=2, alpha=4)
_BASE: dict[str, Any] = {"optimizer": FAST, "micro_batch_tokens": 12}
_DEEPSPEED: dict[str, dict[str, Any]] = {
    **{f"DeepSpeed stage {stage}": _BASE | {"zero": stage, "engine": "deepspeed"} for stage in range(4)},
    "DeepSpeed with adapters": _BASE | {"zero": 3, "engine": "deepspeed", "lora": LORA},
    "DeepSpeed, 16 bits": _BASE | {"zero": 2, "engine": "deepspeed", "dtype": "bfloat16"},
}
CASES: dict[str, dict[str, Any]] = {
    "replicas": _BASE,
    "replicas, 16 bits": _BASE | {"dtype": "bfloat16"},
    "replicas with adapters": _BASE | {"lora": LORA},
    "FSDP2 stage 2": _BASE | {"zero": 2},
    "FSDP2 stage 3": _BASE | {"zero": 3},
    "FSDP2 with adapters": _BASE | {"zero": 3, "lora": LORA},
    "FSDP2, recomputed": _BASE | {"zero": 3, "activation_checkpointing": True},
    "tensor parallel": _BASE | {"tp": 2},
    "parts of rows": _BASE | {"cp": 2, "lora": LORA},
    "parts of rows in a ring": _BASE
    | {"cp": 2, "context_parallel": "ring", "zero": 3, "activation_checkpointing": True},
    **(_DEEPSPEED if find_spec("deepspeed") is not None else {}),
}
"""Settings of the model on two ranks."""
USUAL = (
    *("replicas with adapters", "FSDP2 stage 3", "tensor parallel", "parts of rows", "parts of rows in a ring"),
    *("DeepSpeed stage 2", "DeepSpeed stage 3"),
)
"""Cases outside the long matrix."""


def has_all_rows(case: str) -> bool:
    """Whether both ranks compute all rows in this case."""
    return not {"tp", "cp"}.isdisjoint(CASES[case])


def shared(coefficient: float = 0.5) -> Loss:
    """Minus the mean log-prob, and ``coefficient`` times half the mean squared distance of the values from 1."""

    def function(outputs: Outputs, batch: Batch, totals: Totals) -> tuple[Tensor, Moments]:
        assert outputs.values is not None
        policy, _ = likelihood().function(outputs, batch, totals)
        value, _ = squared_values().function(replace(outputs, quantity=outputs.values), batch, totals)
        return policy + coefficient * value, {"loss": moments(policy.detach()[None])}

    return Loss("logprobs", function, ("loss",), with_values=True)


def rows_of(rank: int) -> slice:
    """Inputs of five rows."""
    return slice(0, 4) if rank == 0 else slice(4, 5)


def parts_of(step: int, rank: int | None) -> list[tuple[Batch, Loss]]:
    """The losses of one optimizer step, the second of them without values and with no row on rank 0. None: all rows."""
    first, second = mini_batch(step), mini_batch(step + 10, rows=3)
    if rank is not None:
        first, second = first.select(rows_of(rank)), second.select(slice(0, 3 * rank))
    return [(first, shared()), (second, likelihood(0.3))]


def prompts() -> Batch:
    batch = mini_batch(2)
    cut = {name: batch[name][:, : LENGTHS.prompt] for name in ("tokens", "attention_mask")}
    columns = {**batch.columns, "prompts": cut["tokens"], "prompt_mask": cut["attention_mask"]}
    return Batch(columns, batch.rows, 1)


def sampling() -> Sampling:
    return Sampling(seed=1, step=0, temperature=1.0, eos_token_ids=(2,), pad_token_id=0)
