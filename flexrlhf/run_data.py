"""From the data section to examples: the tokenizer and the rows of a run. Bad ones raise UserError."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from flexrlhf.data import Example, load_examples
from flexrlhf.errors import UserError
from flexrlhf.placement.shapes import read_config
from flexrlhf.plan import Plan

WEIGHT_FILES = "*.safetensors"


@dataclass(frozen=True)
class RunData:
    """The examples of a run and the special tokens of its tokenizer."""

    examples: list[Example]
    held_out: list[Example]
    tokenizer: str
    eos_token_ids: tuple[int, ...]
    pad_token_id: int


def tokenizer_path(plan: Plan) -> str:
    """The directory named in ``data.tokenizer``, else that of the first model with a path."""
    if plan.spec.data.tokenizer is not None:
        return plan.spec.data.tokenizer
    for role in plan.graph.roles:
        path: str | None = getattr(plan.spec.models, role).path
        if path is not None:
            return path
    raise UserError("data.tokenizer: missing; no model has a path to take a tokenizer from")


def load_tokenizer(path: str) -> Any:
    """The Hugging Face tokenizer in a directory."""
    from transformers import AutoTokenizer

    if not Path(path).is_dir():
        raise UserError(f"data.tokenizer {path}: no such directory")
    try:
        return AutoTokenizer.from_pretrained(path)
    except (OSError, ValueError) as error:
        raise UserError(f"data.tokenizer {path}: no tokenizer in it ({str(error).splitlines()[0]})") from None


def load_run_data(plan: Plan, pending: Iterable[str] = ()) -> RunData:
    """Examples for training and for evaluation. ``pending``: run directories whose models do not exist yet."""
    path = tokenizer_path(plan)
    tokenizer = load_tokenizer(path)
    _check_models(plan, path, len(tokenizer), tuple(pending))
    examples = _examples(plan, plan.spec.data.path, tokenizer)
    held_out = _examples(plan, plan.spec.eval.path, tokenizer) if plan.spec.eval is not None else []
    if tokenizer.eos_token_id is None:
        raise UserError(f"data.tokenizer {path}: it has no end-of-sequence token")
    pad = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else tokenizer.eos_token_id
    return RunData(examples, held_out, path, (tokenizer.eos_token_id,), pad)


def check_run_data(plan: Plan, pending: set[str]) -> None:
    """Load the data once before any rank starts, so that a bad row is a sentence and nothing is half-written.

    ``pending``: run directories that do not exist yet. A run that takes its tokenizer from one is checked by its ranks.
    """
    if not any(tokenizer_path(plan).startswith(directory + "/") for directory in pending):
        load_run_data(plan, pending)


def _examples(plan: Plan, path: str, tokenizer: Any) -> list[Example]:
    data = plan.spec.data
    return load_examples(
        path,
        form=data.form,
        needs=plan.graph.data,
        tokenizer=tokenizer,
        max_prompt_tokens=data.max_prompt_tokens,
        max_response_tokens=data.max_response_tokens,
        long_prompts=data.long_prompts,
    )


def _check_models(plan: Plan, path: str, num_tokens: int, pending: tuple[str, ...]) -> None:
    """Weights are there, and every token has an embedding: else a rank would end the run, with an obscure error."""
    for role in plan.graph.roles:
        model = getattr(plan.spec.models, role)
        if model.path is not None and model.path.startswith(pending):
            continue
        if model.path is not None and not any(Path(model.path).glob(WEIGHT_FILES)):
            raise UserError(f"models.{role}.path {model.path}: no weights in it (no file {WEIGHT_FILES})")
        size = read_config(role, model).get("vocab_size")
        if size is not None and size < num_tokens:
            raise UserError(f"models.{role}: vocab_size {size} is smaller than the {num_tokens} tokens of {path}")
