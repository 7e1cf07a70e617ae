"""Tiny models in engines of one rank, and mini-batches for them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor
from torch.distributed import HashStore
from torch.profiler import ProfilerActivity, profile

from flexrlhf.comm.reduce import RankGroup
from flexrlhf.config.model_settings import Head, LoraSpec, ModelSpec, OptimizerSpec
from flexrlhf.config.output_settings import NO_SWITCHES, Switches
from flexrlhf.engines.base import Batch, Engine, EngineContext, Loss, Moments, Outputs, Sampling, Totals
from flexrlhf.engines.model_ranks import ModelRanks
from flexrlhf.engines.torch.engine import TorchEngine
from flexrlhf.operators.columns import Column, Lengths
from flexrlhf.placement.layout import Layout
from flexrlhf.placement.placed import ModelName, PlacedModel

TINY = {
    "model_type": "llama",
    "vocab_size": 32,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "initializer_range": 0.2,
}
LENGTHS = Lengths(prompt=4, response=6)
SEED = 3
ONE_RANK = RankGroup(None, (0,), lambda work, ranks: None)
HEADS: dict[str, Head] = {"critic": "scalar", "reward": "scalar"}
"""The others have a language head."""


def placed(role: str = "actor", head: Head | None = None, **settings: Any) -> PlacedModel:
    """``settings`` as in the YAML; ``optimizer`` and ``lora`` as mappings. A critic or an actor is trained."""
    source = {} if {"path", "init"} & settings.keys() else {"init": TINY}
    for name, kind in (("optimizer", OptimizerSpec), ("lora", LoraSpec)):
        if name in settings:
            settings[name] = kind(**settings[name])
    head = head or HEADS.get(role, "causal")
    trained = role in ("actor", "critic")
    return PlacedModel(ModelName(role), Layout((0,)), trained, ModelSpec(**source, **settings), head=head)


def engine_of(role: str = "actor", num_updates: int = 100, head: Head | None = None, **settings: Any) -> TorchEngine:
    return engine_for(placed(role, head, **settings), num_updates)


def engine_for(
    model: PlacedModel,
    num_updates: int = 100,
    lengths: Lengths = LENGTHS,
    switches: Switches = NO_SWITCHES,
    **more: Any,
) -> TorchEngine:
    return TorchEngine(replace(context_of(model, num_updates, lengths), switches=switches, **more))


def context_of(model: PlacedModel, num_updates: int = 100, lengths: Lengths = LENGTHS) -> EngineContext:
    return EngineContext(
        placed=model,
        lengths=lengths,
        temperature=1.0,
        seed=SEED,
        num_updates=num_updates,
        ranks=ModelRanks(ONE_RANK, ONE_RANK),
        device=torch.device("cpu"),
        kv_bytes=0,
        store=HashStore(),
    )


def mini_batch(seed: int = 0, rows: int = 5) -> Batch:
    """Random sequences with 1 to 4 prompt and 1 to 6 response tokens."""
    generator = torch.Generator().manual_seed(seed)
    places = torch.arange(LENGTHS.prompt + LENGTHS.response)
    first = LENGTHS.prompt - torch.randint(1, LENGTHS.prompt + 1, (rows, 1), generator=generator)
    last = LENGTHS.prompt + torch.randint(1, LENGTHS.response + 1, (rows, 1), generator=generator)
    mask = ((places >= first) & (places < last)).to(torch.uint8)
    tokens = torch.randint(0, TINY["vocab_size"], mask.shape, generator=generator, dtype=torch.int32) * mask
    columns = {"tokens": tokens, "attention_mask": mask, "response_mask": mask[:, LENGTHS.prompt :]}
    return Batch(columns, torch.arange(rows), 1)


def likelihood(factor: float = 1.0) -> Loss:
    """Minus the mean log-prob of the response tokens, times ``factor``."""

    def function(outputs: Outputs, batch: Batch, totals: Totals) -> tuple[Tensor, Moments]:
        return -factor * (outputs.quantity * batch.mask).sum() / totals.tokens, {}

    return Loss("logprobs", function, ())


def squared_values() -> Loss:
    """Half the mean squared distance of the values from 1."""

    def function(outputs: Outputs, batch: Batch, totals: Totals) -> tuple[Tensor, Moments]:
        distance = (outputs.quantity[:, :-1] - 1) * batch.mask
        return 0.5 * distance.square().sum() / totals.tokens, {}

    return Loss("values", function, ())


def snapshot(engine: TorchEngine) -> dict[str, Tensor]:
    return {name: weight.clone() for name, weight in engine.weights().items()}


def train(engine: TorchEngine, steps: int, loss: Loss | None = None) -> list[Moments]:
    """Mini-batch i of every engine is the same."""
    return [engine.train([(mini_batch(seed), loss or likelihood())]) for seed in range(steps)]


def train_in_turn(engine: Engine, parts: Sequence[tuple[Batch, Loss]], between: Callable[[], object]) -> Moments:
    """Make an optimizer step by a backward pass of each part, with a call ``between`` two of them and the step."""
    statistics: Moments = {}
    for part in parts:
        statistics |= engine.backward([part])
        between()
    return statistics | engine.step(parts)


def output(engine: TorchEngine, column: str, adapters: bool = True, batch: Batch | None = None) -> Tensor:
    """One column of a forward pass, by itself."""
    return engine.forward(mini_batch() if batch is None else batch, [Column.of(column)], adapters)[column]


Generate = Callable[[Batch, Sampling], dict[str, Tensor]]


def in_segments(generate: Generate, batch: Batch, sampling: Sampling, tokens: int, longest: int) -> dict[str, Tensor]:
    """Columns of ``generate`` in calls that add at most ``tokens``, or 1 or 2 less, to the responses that go on.

    Each call is of another step, as in a run, with the noise of the first.
    """
    n, width = len(batch), batch["prompts"].shape[1]
    mask, finished = torch.zeros(n, longest, dtype=torch.uint8), torch.zeros(n, dtype=torch.uint8)
    columns = {
        "tokens": torch.zeros(n, width + longest, dtype=torch.int32),
        "attention_mask": torch.cat([batch["prompt_mask"], mask], 1),
        "response_mask": mask,
        "finished": finished,
        "rollout_logprobs": torch.zeros(n, longest),
    }
    for number in range(longest):
        places = ((finished == 0) & ~mask.bool().all(1)).nonzero().squeeze(1)
        if not len(places):
            break
        before = {"responses": columns["tokens"][:, width:], "response_mask": mask}
        before["noise_step"] = torch.full((n,), sampling.step)
        part = batch.with_columns(before).select(places)
        limits = tokens - part.rows % min(tokens, 3)
        part = part.with_columns({"most_tokens": limits})
        made = generate(part, replace(sampling, step=sampling.step + number))
        assert ((made["response_mask"].sum(1) - mask[places].sum(1)) <= limits).all()
        # the tokens before a segment have no log-probs in its call
        made["rollout_logprobs"] += columns["rollout_logprobs"][places]
        for name, values in made.items():
            columns.setdefault(name, values.new_zeros(n, *values.shape[1:]))[places] = values
    return columns


def peak_bytes(work: Callable[[], object]) -> int:
    """Return the most bytes that ``work`` has allocated on the CPU at a time."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
        work()
    events = sorted(profiled.profiler.kineto_results.events(), key=lambda event: event.start_ns())
    return max(accumulate(event.nbytes() for event in events if event.name() == "[memory]"))
