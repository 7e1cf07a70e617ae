"""Launcher of one rank, this process, where torchrun or another system has started one for each device."""

from __future__ import annotations

from flexrlhf.launch.launchers.job_start import JobStart
from flexrlhf.launch.worker import work


def start(job: JobStart) -> bool:
    """Be one of the ranks."""
    return not work(job.orders, begin=job)
