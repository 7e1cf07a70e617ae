"""Inspection of those data files of a run that exist already, with its tokenizer where that exists."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from os.path import realpath
from pathlib import Path
from typing import Any

from flexrlhf.data.data_counts import TokenLimits
from flexrlhf.data.files import is_present
from flexrlhf.data.inspection import Inspection, inspect_rows
from flexrlhf.errors import UserError
from flexrlhf.plan.data_sources import DataSource, data_sources
from flexrlhf.plan.inputs import chat_format, load_run_tokenizer, tokenizer_path
from flexrlhf.plan.plan import Plan

PLANNED_ROWS = 2000
"""Most rows of a file that planning tokenises."""


def present_inspections(plan: Plan, earlier: Sequence[Plan]) -> Iterator[tuple[DataSource, Inspection]]:
    """Yield the inspection of a sample of the rows of each file that exists; none before the tokenizer does.

    ``earlier``: runs of the same command before this one. Raises UserError for a row that cannot be used, and for
    prompts over the limit where ``run`` would stop.
    """
    sources, owner = [source for source in data_sources(plan) if is_present(source.path)], tokenizer_run(plan, earlier)
    if not sources or owner is None:
        return
    tokenizer = load_run_tokenizer(owner)
    for source in sources:
        found = inspect_source(plan, source, tokenizer, PLANNED_ROWS)
        check_inspection(source, found)
        yield source, found


def absent_sources(plan: Plan) -> list[DataSource]:
    """Return the data files of a run that do not exist yet."""
    return [source for source in data_sources(plan) if not is_present(source.path)]


def tokenizer_run(plan: Plan, earlier: Sequence[Plan]) -> Plan | None:
    """Return the run whose tokenizer a run has: its own, or of the earlier one that will write its model; None where
    that does not exist."""
    if plan.spec.data.tokenizer is None and all(plan.model(role).path is None for role in plan.graph.roles):
        return None
    path = Path(realpath(tokenizer_path(plan)))
    for index, other in enumerate(earlier):
        if path in other.outputs:
            return tokenizer_run(other, earlier[:index])
    return plan if path.is_dir() else None


def inspect_source(plan: Plan, source: DataSource, tokenizer: Any, max_rows: int | None = None) -> Inspection:
    """Return what is in the file of ``source``, in all of its rows or in ``max_rows``. Raises UserError."""
    data = plan.spec.data
    return inspect_rows(
        source.path,
        form=source.form,
        needs=source.needs,
        layout=source.layout,
        tokenizer=tokenizer,
        chat=chat_format(plan),
        limits=TokenLimits(data.max_prompt_tokens, data.max_response_tokens, data.long_prompts),
        max_rows=max_rows,
    )


def check_inspection(source: DataSource, found: Inspection) -> None:
    """Raise UserError for a file with which ``run`` would stop: bad rows, or prompts over the limit that is one."""
    if found.bad:
        first, counts = found.bad[0], found.counts
        number = f"; {len(found.bad)} of {counts.num_rows} rows cannot be read" if len(found.bad) > 1 else ""
        raise UserError(f"{source.path}, row {first.number}: {first.sentence}{number}")
    counts, limits = found.counts, found.counts.limits
    if counts.num_long and (limits.long_prompts == "error" or limits.drops and counts.num_long == len(counts.prompts)):
        raise UserError(
            f"{source.path}: {counts.num_long} of {len(counts.prompts)} prompts have more than "
            f"data.max_prompt_tokens={limits.max_prompt} tokens, the longest {max(counts.prompts)}: set "
            f"data.long_prompts=drop or a larger data.max_prompt_tokens"
        )
