"""Random damage to jobs of other systems: each key is in the YAML, in the list, or the job is refused in a sentence."""

from __future__ import annotations

import re
from pathlib import Path
from random import Random

import pytest
from mutated_jobs import GIVEN, SECRET, MutatedJob, mutated_job
from outcomes import deadline

from flexrlhf.config.yaml_io import read_yaml
from flexrlhf.errors import UserError
from flexrlhf.imports.translate import translated

SAMPLE, ALL = 30, 500
FULL = [pytest.mark.full, pytest.mark.timeout(1800)]
SIZES = pytest.mark.parametrize("count", [SAMPLE, pytest.param(ALL, marks=FULL)])


def problem_of_job(job: MutatedJob, directory: Path) -> str | None:
    """Return the problem with the import of a job."""
    path = directory / job.name
    path.write_text(job.text)
    try:
        with deadline():
            out = translated(path, "H100-80G", GIVEN)
    except UserError as error:
        return f"not one sentence: {error}" if "\n" in str(error) or SECRET in str(error) else None
    text = out.text()
    if read_yaml(text) != out.tree():
        return "its YAML does not read back"
    lost = [key for key in job.keys if not re.search(rf"(?<![\w.]){re.escape(key)}(?![\w-])", text)]
    return "a secret is written" if SECRET in text else f"lost: {lost}" if lost else None


@SIZES
def test_no_key_of_a_job_is_lost(count: int, tmp_path: Path) -> None:
    found = ((number, mutated_job(Random(f"jobs-{number}"))) for number in range(count))
    problems = [f"{number} {job.name}: {why}" for number, job in found if (why := problem_of_job(job, tmp_path))]
    assert not problems
