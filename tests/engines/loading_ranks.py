"""One process: a rank of one or two that load a model from its files, in every way to share it, one after the other."""

from __future__ import annotations

import gc
import json
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from itertools import accumulate
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from loading_models import CASES, MODELS
from small_models import LENGTHS, SEED
from torch import Tensor
from torch.distributed.distributed_c10d import _coalescing_manager
from torch.profiler import ProfilerActivity, profile

from flexrlhf.comm.reduce import RankGroup
from flexrlhf.comm.world import ALONE, Groups, World, open_world
from flexrlhf.config.axes import ParallelDims
from flexrlhf.config.model_settings import LoraSpec, ModelSpec
from flexrlhf.engines.base import Engine, EngineContext, TrainingState
from flexrlhf.engines.model_ranks import ExpertRanks, ModelRanks
from flexrlhf.engines.models import load_model
from flexrlhf.engines.router_biases import router_biases
from flexrlhf.engines.weight_files import PartReader
from flexrlhf.placement.groups import Group
from flexrlhf.placement.layout import Layout
from flexrlhf.placement.placed import ModelName, PlacedModel
from flexrlhf.runs.tensor_files import cut
from flexrlhf.weights.model_shape import ModelShape
from flexrlhf.weights.shards import Parts

SECONDS = 100.0
LINEAR = torch.nn.functional.linear
"""The function that DeepSpeed replaces, inside calls of its own models alone."""


def placed_case(directory: Path, name: str, ranks: tuple[int, ...]) -> PlacedModel:
    settings = dict(CASES[name])
    model, role = settings.pop("model"), settings.pop("role", "actor")
    if "lora" in settings:
        settings["lora"] = LoraSpec(**settings["lora"])
    spec = ModelSpec(path=str(directory / model), **settings)
    head = MODELS[model].head if role != "ref" else "causal"
    return PlacedModel(
        ModelName(role), Layout(ranks, ParallelDims(tp=spec.tp, ep=spec.ep)), role != "ref", spec, head=head
    )


def context_of(name: str, model: PlacedModel, world: World, groups: Groups) -> EngineContext:
    def wait(work: dist.Work, ranks: tuple[int, ...]) -> None:
        work.wait()

    alone = RankGroup(None, (world.rank,), wait)
    together = RankGroup(groups.get(name, model.ranks), model.ranks, wait) if len(model.ranks) > 1 else alone
    is_tp = model.settings.tp > 1
    return EngineContext(
        placed=model,
        lengths=LENGTHS,
        temperature=1.0,
        seed=SEED,
        num_updates=1,
        ranks=ModelRanks(
            dp=alone if is_tp else together,
            tp=together if is_tp else alone,
            experts=ExpertRanks(together, alone) if model.settings.ep > 1 else None,
            alone=groups.alone(world.rank),
        ),
        device=torch.device("cpu"),
        kv_bytes=0,
        store=dist.PrefixStore(name, world.store),
    )


@contextmanager
def counted_reads() -> Iterator[list[int]]:
    """Bytes of every read of a tensor."""
    counts: list[int] = []
    plain = PartReader.read

    def counting(*arguments: Any) -> int:
        counts.append(plain(*arguments))
        return counts[-1]

    with patch.object(PartReader, "read", counting):
        yield counts


def peak_bytes(work: Callable[[], Engine]) -> tuple[Engine, int]:
    """Result of ``work``, and its peak of allocated tensor bytes."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
        engine = work()
    events = sorted(profiled.profiler.kineto_results.events(), key=lambda event: event.start_ns())
    return engine, max(accumulate(event.nbytes() for event in events if event.name() == "[memory]"))


def run_case(directory: Path, name: str, world: World, groups: Groups) -> dict[str, Any]:
    """Names whose values differ from the whole model's; bytes that were read, allocated, and are stored."""
    model = placed_case(directory, name, tuple(range(world.size)))
    plain = load_model(model, SEED)
    whole = {each: parameter.detach() for each, parameter in plain.named_parameters()} | router_biases(plain)
    shape = ModelShape(tuple((each, tuple(tensor.shape)) for each, tensor in sorted(whole.items())))
    gc.collect()
    with counted_reads() as reads:
        engine, peak = peak_bytes(lambda: context_of(name, model, world, groups).make_engine())
    parts, usage = shape.parts_on(model, world.rank), engine.memory_usage()
    assert set(engine.weights()) == set(whole) and torch.nn.functional.linear is LINEAR, name
    if model.engine == "deepspeed":
        # its float32 weights are copies of those that it computes with
        whole = {each: tensor.to(getattr(torch, model.settings.dtype)) for each, tensor in whole.items()}
    found = {
        "differing": differing(engine, whole, parts),
        "read": sum(reads),
        "peak": peak,
        "state": usage.weights + usage.optimizer,
        "largest": 4 * max(tensor.numel() for tensor in whole.values()),
    }
    engine.close()
    return found


def differing(engine: Engine, whole: Mapping[str, Tensor], parts: Parts) -> list[str]:
    """Weights, and float32 weights of a trained model, that differ from the whole model's."""
    live = {(name, parts[name]): tensor for name, tensor in engine.weights().items()}
    if any(parameter.requires_grad for parameter in engine._model.parameters()):  # type: ignore[attr-defined]
        live |= {
            (name, tensor.part_of(parts[name])): tensor.values
            for name, tensor in engine.training_state().tensors[TrainingState.WEIGHTS].items()
        }
    return [
        name
        for (name, part), values in live.items()
        if not torch.equal(cut(whole[name], part).to(values.dtype), values.view(-1))
    ]


def check_group_of_one(group: dist.ProcessGroup | None) -> None:
    """Collectives of libraries in a group of one rank give back their input; none of them makes a connection."""
    assert group is not None and dist.get_backend(group) == ALONE
    values, out = torch.arange(1.0, 7.0), torch.zeros(4, 6)
    dist.all_gather([out[0]], values, group=group)
    dist.reduce_scatter(out[1], [values], group=group)
    dist.all_to_all_single(out[2], values, group=group)
    with _coalescing_manager(group):
        dist.all_reduce(out[3].copy_(values), group=group)
    work = dist.broadcast(values, dist.get_rank(), group=group, async_op=True)
    assert work is not None and work.wait()
    assert (out == values).all() and values.tolist() == [1, 2, 3, 4, 5, 6]


def run_rank(directory: Path, world: World) -> None:
    ranks = tuple(range(world.size))
    cases = [name for name, case in CASES.items() if world.size > 1 or {"tp", "ep"}.isdisjoint(case)]
    own = [Group("alone", (rank,), alone=True) for rank in ranks]
    groups = world.make_groups([*(Group(name, ranks) for name in cases if len(ranks) > 1), *own], SECONDS)
    check_group_of_one(groups.alone(world.rank))
    found = {name: run_case(directory, name, world, groups) for name in cases}
    (directory / f"{world.size}-{world.rank}.json").write_text(json.dumps(found))
    world.close_groups(groups, SECONDS)
    world.meet("end", SECONDS)


if __name__ == "__main__":
    torch.set_num_threads(1)
    with open_world("cpu", SECONDS) as opened:
        run_rank(Path(sys.argv[1]), opened)
