"""The checkpoint that all ranks of a run go on from: each verifies some of its files, rank 0 decides."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch.distributed as dist

from flexrlhf.comm.world import World
from flexrlhf.errors import RunStopped, UserError
from flexrlhf.plan.inputs import RunData, data_digest
from flexrlhf.plan.plan import Plan
from flexrlhf.runs.manifest import Manifest, damage, read_manifest
from flexrlhf.runs.run_directory import RunStatus, set_aside_checkpoints, trim_lines, write_status
from flexrlhf.runs.run_files import RunFiles


@dataclass(frozen=True)
class StartingPoint:
    """Checkpoint that a run goes on from.

    checkpoint:  its directory.
    manifest:    its numbers.
    """

    checkpoint: Path
    manifest: Manifest

    @property
    def next_step(self) -> int:
        return self.manifest.progress.next_step


def choose_start(
    plan: Plan, world: World, data: RunData, files: RunFiles, candidates: Sequence[Path]
) -> StartingPoint | None:
    """Return the first of ``candidates`` whose files are all as written; None without any: the run begins anew.

    All ranks call this with the same candidates. Rank 0 then prepares the run's directory, and every rank waits for it.
    A machine with directories of its own gets a copy of the checkpoint.
    Raises RunStopped where all are damaged, and UserError where the data has changed since.
    """
    store = dist.PrefixStore(f"start/{plan.spec.name}", world.store)
    for candidate in candidates:
        place = files.received_checkpoint(candidate, plan, world)
        try:
            manifest = read_manifest(place)
        except UserError as error:
            _print_unused(world, str(error))
            continue
        problems = _verified(place, manifest, world, store, plan.spec.timeout_seconds)
        if not problems:
            _check_data(candidate, manifest, data)
            _prepare(plan, world, store, files, manifest.progress.next_step)
            return StartingPoint(place, manifest)
        _print_unused(world, f"checkpoint {candidate}: {problems[0]}")
    if candidates:
        raise RunStopped(f"{plan.spec.name}: every checkpoint is damaged; remove {candidates[0].parent} to begin anew")
    _prepare(plan, world, store, files, 0)
    return None


def _print_unused(world: World, problem: str) -> None:
    if world.rank == 0:
        print(f"flexrlhf: {problem}; an earlier one is tried", file=sys.stderr, flush=True)


def _verified(
    checkpoint: Path, manifest: Manifest, world: World, store: dist.Store, timeout_seconds: float
) -> list[str]:
    """Return what is wrong with the files of a checkpoint, of which each rank reads its share."""
    mine = sorted(manifest.files.items())[world.rank :: world.size]
    problems = [problem for name, entry in mine if (problem := damage(checkpoint, name, entry)) is not None]
    store.set(f"{checkpoint.name}/{world.rank}", "\n".join(problems))
    keys = {f"{checkpoint.name}/{rank}": f"rank {rank}" for rank in range(world.size)}
    world.wait_for(store, keys, f"the verification of {checkpoint}", timeout_seconds)
    return [line for key in keys for line in store.get(key).decode().splitlines()]


def _check_data(checkpoint: Path, manifest: Manifest, data: RunData) -> None:
    if manifest.data != data_digest(data):
        raise UserError(
            f"checkpoint {checkpoint}: the training examples are others than those it was written with; restore the "
            f"data and the tokenizer, or start a new run under another name"
        )


def _prepare(plan: Plan, world: World, store: dist.Store, files: RunFiles, next_step: int) -> None:
    """Remove what an interrupted run recorded of ``next_step`` and later; all ranks wait for rank 0."""
    if files.keeps:
        directory = plan.spec.directory
        set_aside_checkpoints(directory, next_step + 1)
        for name in ("metrics.jsonl", "samples.jsonl"):
            trim_lines(directory / name, "step", next_step)
        for path in (directory / "timeline").glob("*.jsonl"):
            trim_lines(path, "next_step", next_step + 1)
        write_status(directory, RunStatus("running", next_step, plan.spec.steps))
    if world.rank == 0:
        store.set("prepared", "yes")
    world.wait_for(store, {"prepared": "rank 0"}, "the start of the run", plan.spec.timeout_seconds)
