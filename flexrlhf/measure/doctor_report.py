"""All checks of a preflight, from what was measured and what the plans need."""

from __future__ import annotations

from collections.abc import Sequence

from flexrlhf.measure.checks import Check
from flexrlhf.measure.facts import JobFacts
from flexrlhf.measure.host_checks import (
    check_devices,
    check_host_libraries,
    check_inputs,
    check_memory_found,
    check_memory_plan,
    check_open_files,
    check_shared_memory,
)
from flexrlhf.measure.job_checks import (
    check_clocks,
    check_directories,
    check_links,
    check_reached,
    check_same_inputs,
    check_settings,
    check_speed,
    check_versions,
)
from flexrlhf.plan.plan import Plan


def judge(plans: Sequence[Plan], job: JobFacts, failure: str = "") -> list[Check]:
    """Return the checks in the order of their table.

    ``failure``: sentence with which the ranks ended early; empty where they did not.
    """
    return [
        check_devices(plans, job),
        check_host_libraries(job.hosts),
        check_memory_plan(plans),
        check_memory_found(plans, job),
        check_inputs(job.hosts),
        check_reached(job, failure),
        check_versions(job.hosts),
        check_settings(job.hosts),
        check_same_inputs(job.hosts),
        check_directories(job),
        job.hosts[0].disk,
        check_clocks(job),
        check_speed(plans[0].cluster, job),
        check_shared_memory(job.hosts),
        check_open_files(job),
        check_links(plans[0].cluster, job),
    ]
