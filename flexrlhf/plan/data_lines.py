"""One line for each data file of a run: rows, prompts left out or truncated, responses cut; and warnings of many."""

from __future__ import annotations

from collections.abc import Iterator

from flexrlhf.data.data_counts import DataCounts, quantile
from flexrlhf.data.files import ENDINGS
from flexrlhf.data.hub import hub_name
from flexrlhf.data.reasoning_tasks import is_task
from flexrlhf.errors import one_line
from flexrlhf.plan.data_sources import DataSource

WARNED_SHARE = 0.05
"""Share of prompts or responses above which a line warns of what the limits do to them."""
MOST = 0.95
"""Share of them that a suggested limit keeps."""


def data_line(source: DataSource, counts: DataCounts) -> str:
    """Return what a file has, and what the limits of the run do to it."""
    parts = [f"form {counts.form}, {counts.num_rows} rows"]
    if len(counts.prompts) < counts.num_rows:
        parts[0] += f" ({len(counts.prompts)} of them counted)"
    parts.append(f"{_share(counts.num_long, len(counts.prompts))} prompts {_fate(counts)}")
    if responses := counts.kept_responses:
        parts.append(f"{_share(counts.num_cut, len(responses))} responses cut")
    return one_line(f"{source.key}: {source.path}: {', '.join(parts)}")


def absent_line(source: DataSource) -> str:
    """Return what is not checked of a file that planning does not find."""
    if is_task(source.path):
        return one_line(f"{source.key}: {source.path} needs reasoning-gym (flexrlhf[reasoning]): no rows are checked")
    if not source.path.endswith(ENDINGS) and hub_name(source.path) is not None:
        return one_line(f"{source.key}: {source.path} is not in the cache of the Hub yet, so its rows are not checked")
    return one_line(f"{source.key}: {source.path} does not exist yet, so its rows are not checked")


def data_warnings(source: DataSource, counts: DataCounts) -> Iterator[str]:
    """Yield a sentence for prompts, and one for responses, where more than a few exceed their limit."""
    limits, responses = counts.limits, counts.kept_responses
    if counts.num_long > WARNED_SHARE * len(counts.prompts):
        yield (
            f"{source.key}: {_share(counts.num_long, len(counts.prompts))} prompts have more than "
            f"data.max_prompt_tokens {limits.max_prompt} and are {_fate(counts)}; "
            f"{MOST:.0%} have at most {quantile(counts.prompts, MOST)}"
        )
    if counts.num_cut > WARNED_SHARE * len(responses):
        yield (
            f"{source.key}: {_share(counts.num_cut, len(responses))} responses have more than data.max_response_tokens "
            f"{limits.max_response} and are cut, without an end token; "
            f"{MOST:.0%} have at most {quantile(responses, MOST)}"
        )


def _fate(counts: DataCounts) -> str:
    """Return what happens to prompts that are too long."""
    if counts.limits.long_prompts == "error":
        return "too long"
    return "left out" if counts.limits.drops else "truncated"


def _share(number: int, total: int) -> str:
    return f"{number} of {total} ({number / total:.1%})" if number and total else f"{number} of {total}"
