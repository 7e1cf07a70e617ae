"""One process: a rank that measures the memory of models on Megatron-Core, one after the other."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from itertools import accumulate
from pathlib import Path
from typing import Any

import torch
from engine_on_rank import engine_on_rank
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

from flexrlhf.comm.world import World, open_world
from flexrlhf.config.axes import ParallelDims
from flexrlhf.config.model_settings import Head, ModelSpec
from flexrlhf.engines.base import Batch, Engine, Loss, Moments, Outputs
from flexrlhf.engines.host_offload import storage_bytes
from flexrlhf.engines.megatron.engine import MegatronEngine
from flexrlhf.operators.columns import Column, Lengths
from flexrlhf.placement.groups import Group
from flexrlhf.placement.layout import Layout
from flexrlhf.placement.placed import ModelName, PlacedModel

LENGTHS, ROWS, VOCABULARY, SECONDS = Lengths(24, 40), 16, 2000, 100.0
LLAMA = {
    "model_type": "llama",
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "intermediate_size": 256,
    "num_hidden_layers": 8,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}


@dataclass(frozen=True)
class Case:
    """A model on the first ``ranks``, with ``settings`` as in the YAML."""

    ranks: int = 1
    head: Head = "causal"
    init: dict[str, Any] = field(default_factory=lambda: LLAMA)
    settings: dict[str, Any] = field(default_factory=dict)

    def placed(self, name: str) -> PlacedModel:
        """The model under a unique name, so that its groups are unique."""
        spec = ModelSpec(init=self.init, engine="megatron", micro_batch_tokens=256, logits_mb=0.5, **self.settings)
        layout = Layout(tuple(range(self.ranks)), ParallelDims(spec.tp, spec.pp))
        return PlacedModel(ModelName(name.replace(" ", "_")), layout, True, spec, head=self.head)

    @property
    def column(self) -> Column:
        return Column.of("values" if self.head == "scalar" else "logprobs")


MANY_KEYS = {**LLAMA, "num_key_value_heads": 4}
QWEN3 = {**LLAMA, "model_type": "qwen3", "head_dim": 16}
MIXTRAL = {**LLAMA, "model_type": "mixtral", "num_local_experts": 8, "intermediate_size": 64}
RECOMPUTED = {"activation_checkpointing": True}
ALONE = {
    "float32": Case(),
    "bfloat16": Case(settings={"dtype": "bfloat16"}),
    "recomputed": Case(settings=RECOMPUTED),
    "qwen3, values, zero 1": Case(head="scalar", init=QWEN3, settings={"zero": 1}),
    "experts": Case(init=MIXTRAL),
    "experts, recomputed, bfloat16": Case(init=MIXTRAL, settings={"dtype": "bfloat16", **RECOMPUTED}),
    "adapters, zero 1": Case(settings={"zero": 1, "lora": {"rank": 8}}),
    "many keys, unpacked, sgd": Case(init=MANY_KEYS, settings={"pack_texts": False, "optimizer": {"name": "sgd"}}),
}
TOGETHER = {
    "tp": Case(2, settings={"tp": 2}),
    "tp, recomputed": Case(2, settings={"tp": 2, **RECOMPUTED}),
    "tp, experts": Case(2, init=MIXTRAL, settings={"tp": 2}),
    "tp, two stages, experts, recomputed": Case(4, init=MIXTRAL, settings={"tp": 2, "pp": 2, **RECOMPUTED}),
    "pp": Case(2, settings={"pp": 2}),
    "four stages": Case(4, settings={"pp": 4}),
    "four stages, recomputed, values": Case(4, head="scalar", settings={"pp": 4, **RECOMPUTED}),
    "two stages, bfloat16, zero 1": Case(4, settings={"pp": 2, "dtype": "bfloat16", "zero": 1}),
    "tp, two stages": Case(4, settings={"tp": 2, "pp": 2}),
    "tp, two stages, tied": Case(
        4, init={**LLAMA, "tie_word_embeddings": True}, settings={"tp": 2, "pp": 2, "dtype": "bfloat16"}
    ),
}


def batch() -> Batch:
    width = LENGTHS.prompt + LENGTHS.response
    tokens = torch.randint(3, VOCABULARY, (ROWS, width), generator=torch.Generator().manual_seed(0)).int()
    mask = torch.ones(ROWS, width, dtype=torch.uint8)
    mask[0, :3] = 0
    columns = {"tokens": tokens, "attention_mask": mask, "response_mask": mask[:, LENGTHS.prompt :]}
    return Batch(columns, torch.arange(ROWS), 1)


def peak_bytes(work: Callable[[], object], times: int) -> int:
    """Most bytes that are allocated while ``work`` runs, in addition to those before.

    The minimum of several readings: copies that gloo sends are freed later by gloo's threads.
    """
    return min(_peak(work) for _ in range(times))


def _peak(work: Callable[[], object]) -> int:
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
        work()
    events = sorted(profiled.profiler.kineto_results.events(), key=lambda event: event.start_ns())
    return max(accumulate(event.nbytes() for event in events if event.name() == "[memory]"))


def total(outputs: Outputs, *_: object) -> tuple[Tensor, Moments]:
    return outputs.quantity.sum() / 1000, {}


def measure(case: Case, engine: Engine) -> dict[str, int]:
    """Bytes of the states, and of the calls in addition to them."""
    quantity = case.column.quantity
    assert quantity is not None
    rows, loss = batch(), Loss(quantity, total, ())
    engine.train([(rows, loss)])
    times = 1 if case.settings.get("tp", 1) == 1 else 12
    found = {
        "train": peak_bytes(lambda: engine.train([(rows, loss)]), times),
        "forward": peak_bytes(lambda: engine.forward(rows, [case.column]), times),
    }
    assert isinstance(engine, MegatronEngine)
    found |= asdict(engine.memory_usage()) | {"between trainings": storage_bytes(engine._update.gradients)}
    engine.close()
    return found


def run_rank(directory: Path, cases: dict[str, Case], world: World) -> None:
    models = {name: case.placed(name) for name, case in cases.items()}
    required = [group for model in models.values() for group in Group.of_model(model)]
    groups = world.make_groups(dict.fromkeys(each for each in required if len(each.ranks) > 1 or each.alone), SECONDS)
    found = {
        name: measure(case, engine_on_rank(models[name], world, groups, LENGTHS, 0, 3))
        for name, case in cases.items()
        if world.rank in models[name].ranks
    }
    (directory / f"rank-{world.rank}.json").write_text(json.dumps(found))
    world.close_groups(groups, SECONDS)
    world.meet("end", SECONDS)


if __name__ == "__main__":
    torch.set_num_threads(1)
    with open_world("cpu", SECONDS) as opened:
        run_rank(Path(sys.argv[1]), ALONE if sys.argv[2] == "alone" else TOGETHER, opened)
