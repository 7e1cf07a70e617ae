"""Options of SLURM in the comments of a batch script, and the variables that a job has by them."""

from __future__ import annotations

import re

_OPTION = re.compile(r"(?m)^#SBATCH[ \t]+(.*)$")
_NAMES = {"-N": "--nodes", "-n": "--ntasks", "-G": "--gpus", "-J": "--job-name", "-c": "--cpus-per-task"}


def slurm_variables(text: str) -> dict[str, str]:
    """Return the variables of a job by the options in a script: its nodes, tasks and devices."""
    words = [word for line in _OPTION.findall(text) for word in line.partition(" #")[0].split()]
    options: dict[str, str] = {}
    name = ""
    for word in words:
        if (found := re.fullmatch(r"(--[\w-]+)(?:=(.*))?", word)) is not None:
            name, options[found[1]] = found[1], found[2] or ""
        elif (found := re.fullmatch(r"(-[A-Za-z])(.*)", word)) is not None:
            name = _NAMES.get(found[1], found[1])
            options[name] = found[2]
        elif name and not options[name]:
            options[name] = word
    nodes, tasks, ntasks = (_number(options.get(key, "")) for key in ("--nodes", "--ntasks-per-node", "--ntasks"))
    if ntasks is None and tasks is not None:
        ntasks = tasks * (nodes or 1)
    values = {
        "SLURM_NNODES": nodes,
        "SLURM_JOB_NUM_NODES": nodes,
        "SLURM_NTASKS_PER_NODE": tasks,
        "SLURM_NTASKS": ntasks,
        "SLURM_NPROCS": ntasks,
        "SLURM_GPUS_ON_NODE": _gpus(options, nodes or 1, tasks),
        "SLURM_GPUS_PER_NODE": _gpus(options, nodes or 1, tasks),
        "SLURM_GPUS": _number(options.get("--gpus", "")),
        "SLURM_CPUS_PER_TASK": _number(options.get("--cpus-per-task", "")),
    }
    return {name: str(value) for name, value in values.items() if value is not None}


def _gpus(options: dict[str, str], nodes: int, tasks: int | None) -> int | None:
    """Return the devices of a node."""
    generic = [each for each in options.get("--gres", "").split(",") if each.partition(":")[0] in ("gpu", "gres/gpu")]
    for text in (options.get("--gpus-per-node", ""), *generic):
        if (number := _number(text)) is not None:
            return number
    of_task, whole = _number(options.get("--gpus-per-task", "")), _number(options.get("--gpus", ""))
    if of_task is not None and tasks is not None:
        return of_task * tasks
    return None if whole is None else max(1, whole // nodes)


def _number(text: str) -> int | None:
    """Return the number of an option, which may follow a type (``a100:4``) or be a range (``2-4``)."""
    last = text.rpartition(":")[2].partition("-")[0].partition("(")[0]
    return int(last) if re.fullmatch(r"\d{1,6}", last) else None
