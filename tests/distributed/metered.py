"""Training loop of a run that meters the memory of the models on its ranks, after and during each instruction."""

from __future__ import annotations

import json
from typing import Any

from torch import Tensor
from torch.profiler import ProfilerActivity, profile

from flexrlhf.engines.host_offload import storage_bytes
from flexrlhf.engines.optimizers import local
from flexrlhf.strategies.instructions import Release, Run, Sync
from flexrlhf.trainer.execution import Execution
from flexrlhf.trainer.trainer import Trainer


def loop(trainer: Trainer) -> None:
    """Train as without a loop, and write the bytes after each instruction of the last step, and its peak, by rank."""
    found: dict[str, list[int]] = {}
    execute, last = trainer.execute, trainer.plan.spec.steps - 1

    def metered(execution: Execution) -> None:
        each = execution.instruction
        if execution.step < last or not isinstance(each, Run | Sync | Release):
            return execute(execution)
        before, most, total = stored(trainer), 0, 0
        with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
            execute(execution)
        for event in sorted(profiled.profiler.kineto_results.events(), key=lambda event: event.start_ns()):
            if event.name() == "[memory]":
                total += event.nbytes()
                most = max(most, total)
        found[f"{each.kind} {each.label}"] = [stored(trainer), before + most]

    trainer.execute = metered  # type: ignore[method-assign]
    for batch in trainer.batches():
        trainer.train_rlhf(trainer.generate_experience(batch))
    rank = trainer._rank
    (rank.directory.path / f"metered-{rank.rank}.json").write_text(json.dumps(found))


def stored(trainer: Trainer) -> int:
    """Bytes of the storages of all weights, masters and moments on this rank, of views once."""
    tensors: list[Tensor] = []
    for model in trainer._models.values():
        engine: Any = model.engine
        tensors += [local(parameter) for parameter in engine._model.parameters()] + engine._optimizer_tensors()
    return storage_bytes(tensors)
