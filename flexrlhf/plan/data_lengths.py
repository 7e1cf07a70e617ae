"""Lengths of a run's prompts and responses, from its data files, before anything runs."""

from __future__ import annotations

from pathlib import Path

from flexrlhf.data.examples import Example, load_examples
from flexrlhf.data.files import is_present, read_rows
from flexrlhf.data.forms import detect_form, has_response
from flexrlhf.plan.data_sources import DataSource, data_sources
from flexrlhf.plan.inputs import chat_format, load_run_tokenizer, tokenizer_path
from flexrlhf.plan.plan import Plan

MAX_ROWS = 2000
"""Largest number of rows of a file whose lengths are counted."""


def response_lengths(plan: Plan) -> tuple[int, ...]:
    """Return tokens of a sample of responses, end tokens included, at most ``data.max_response_tokens``, sorted.

    From the responses in the run's data file, else in its evaluation file; none where neither has any, or they do not
    exist yet.
    """
    for source in data_sources(plan):
        if source.is_training or source.key == "eval":
            examples = _examples(plan, source, with_responses=True)
            if examples:
                return tuple(sorted(len(example.responses[0]) for example in examples))
    return ()


def prompt_lengths(plan: Plan) -> tuple[int, ...]:
    """Return tokens of a sample of the prompts in the run's data files, sorted; none where they do not exist yet."""
    training = [source for source in data_sources(plan) if source.is_training]
    examples = [example for source in training for example in _examples(plan, source, with_responses=False)]
    return tuple(sorted(len(example.prompt) for example in examples))


def _examples(plan: Plan, source: DataSource, with_responses: bool) -> list[Example]:
    """Return a sample of a file's examples.

    None where the file or the tokenizer does not exist yet, or where responses are needed and the file has none.
    """
    data, directory = plan.spec.data, _tokenizer(plan)
    if directory is None or not is_present(source.path) or (with_responses and not _has_responses(source)):
        return []
    examples = load_examples(
        source.path,
        form=source.form,
        needs="responses" if with_responses else "prompts",
        tokenizer=load_run_tokenizer(plan),
        max_prompt_tokens=data.max_prompt_tokens,
        max_response_tokens=data.max_response_tokens,
        long_prompts="drop" if data.long_prompts == "error" else data.long_prompts,
        layout=source.layout,
        chat=chat_format(plan),
    ).examples
    return examples[:: max(1, len(examples) // MAX_ROWS)]


def _tokenizer(plan: Plan) -> str | None:
    """Return the tokenizer's directory, if there is one already."""
    if plan.spec.data.tokenizer is None and all(plan.model(role).path is None for role in plan.graph.roles):
        return None
    path = tokenizer_path(plan)
    return path if Path(path).is_dir() else None


def _has_responses(source: DataSource) -> bool:
    """Whether the first row of a file has a response."""
    row, form, layout = read_rows(source.path)[0], source.form, source.layout
    return has_response(row, detect_form(row, "responses", layout) if form == "auto" else form, layout)
