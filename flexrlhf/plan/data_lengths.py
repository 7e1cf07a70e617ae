"""How long prompts and answers of a run will be, as far as its data files can tell before anything runs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from flexrlhf.data.examples import Example, load_examples
from flexrlhf.data.files import read_rows
from flexrlhf.data.forms import detect_form, text_of
from flexrlhf.plan.inputs import data_sources, load_tokenizer, tokenizer_path
from flexrlhf.plan.plan import Plan

MOST_ROWS = 2000
"""Of a file; their lengths tell those of the others."""


def answer_lengths(plan: Plan) -> tuple[int, ...]:
    """Tokens of answers, the end token among them, at most ``data.max_response_tokens``: a sample.

    Of the answers that the run's data file carries, else its held-out file; where neither has any (or they do not
    exist yet) every answer is as long as it may be.
    """
    for path in [source.path for source in data_sources(plan) if source.key in ("data", "eval")]:
        lengths = tuple(sorted(len(example.responses[0]) for example in _examples(plan, path, answered=True)))
        if lengths:
            return lengths
    return (plan.lengths.response,)


def prompt_lengths(plan: Plan) -> tuple[int, ...]:
    """Tokens of the prompts of the run's data file: a sample."""
    lengths = tuple(sorted(len(example.prompt) for example in _examples(plan, plan.spec.data.path, answered=False)))
    return lengths or (plan.lengths.prompt,)


def _examples(plan: Plan, path: str, answered: bool) -> list[Example]:
    """None where the file or the tokenizer does not exist yet, or no row has an answer where answers are wanted."""
    data, directory = plan.spec.data, _tokenizer(plan)
    if directory is None or not Path(path).is_file() or (answered and not _has_answer(path, data.form)):
        return []
    examples = load_examples(
        path,
        form=data.form,
        needs="responses" if answered else "prompts",
        tokenizer=load_tokenizer(directory),
        max_prompt_tokens=data.max_prompt_tokens,
        max_response_tokens=data.max_response_tokens,
        long_prompts="drop",
    )
    return examples[:: max(1, len(examples) // MOST_ROWS)]


def _tokenizer(plan: Plan) -> str | None:
    """Its directory, if there is one already."""
    if plan.spec.data.tokenizer is None and all(plan.model(role).path is None for role in plan.graph.roles):
        return None
    path = tokenizer_path(plan)
    return path if Path(path).is_dir() else None


def _has_answer(path: str, form: str) -> bool:
    first: dict[str, Any] = read_rows(path)[0]
    return bool(text_of(first, detect_form(first, "responses") if form == "auto" else form).responses)
