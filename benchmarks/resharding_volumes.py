"""Weights that a GPU receives between training and generation on the same GPUs, and has in memory while it generates,
planned and by published formulas.

    python -m benchmarks.resharding_volumes [--metered]

Fractions of all weights M, for a model whose tensors all degrees divide. Formulas and names: HybridFlow (Sheng et al.
2024, sec. 5.4, table 2): DeepSpeed-Chat gathers everything from ZeRO-3 over all t p d GPUs, HybridFlow-V everything
within a training replica, HybridFlow only missing weights, with generation ranks in an order in which each reuses its
trained part. ``--metered`` runs layouts of up to eight CPU ranks and counts the memory of their weights.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Mapping
from fractions import Fraction
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import yaml

from flexrlhf.config.axes import ParallelDims
from flexrlhf.config.model_settings import ModelSpec
from flexrlhf.config.spec import RolloutSpec, Spec
from flexrlhf.data.quickstart.corpus import build_tokenizer
from flexrlhf.engines.host_offload import storage_bytes
from flexrlhf.engines.optimizers import local
from flexrlhf.placement.layout import Layout, generation_layout
from flexrlhf.placement.placed import ModelName, PlacedModel
from flexrlhf.plan.pipeline import make_plan
from flexrlhf.weights.model_shape import ModelShape
from flexrlhf.weights.reuse import Reuse
from flexrlhf.weights.shards import part_elements
from flexrlhf.weights.transfers import Holdings, plan_transfers

SHAPE = ModelShape(
    tuple((f"model.layers.{layer}.mlp.{kind}_proj.weight", (64, 64)) for layer in range(8) for kind in ("down", "up"))
)
DEGREES = [
    (1, 8, 2, 1, 2),
    (1, 8, 1, 1, 4),
    (2, 4, 2, 1, 2),
    (2, 4, 1, 1, 4),
    (2, 8, 2, 1, 4),
    (4, 4, 2, 2, 2),
    (4, 8, 1, 1, 8),
    (8, 2, 1, 2, 1),
    (1, 2, 4, 1, 1),
    (2, 2, 2, 2, 2),
]
"""p, t, d of training and p_g, t_g of generation."""
METERED = [(1, 8, 1, 1, 2), (1, 8, 1, 1, 4), (2, 4, 1, 1, 2), (2, 4, 1, 1, 4), (1, 2, 4, 1, 1)]
"""Rows of ``DEGREES`` in which torch generates, with as many replicas as eight ranks have."""
INIT = {
    "model_type": "llama",
    "vocab_size": 256,
    "hidden_size": 128,
    "intermediate_size": 512,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
}


def holdings(layout: Layout, engine: str = "torch", zero: int = 0) -> Holdings:
    """Return each rank's part of the model."""
    model = PlacedModel(ModelName("actor"), layout, True, ModelSpec(engine=engine, zero=zero))
    return {rank: SHAPE.parts_on(model, rank) for rank in layout.ranks}


def received(source: Holdings, destination: Holdings) -> Fraction:
    """Return the largest fraction of all weights that a rank receives."""
    plan = plan_transfers(source, destination, 10**9)
    return Fraction(max(plan.received.values(), default=0), SHAPE.num_parameters)


def stored_twice(training: Layout, generation: Layout, is_once: bool) -> Fraction:
    """Return the largest fraction of all weights that a rank has in memory in addition to those that it generates with.

    is_once:  whether weights in common are stored once.
    """
    by_torch = training.dims.pp == 1
    settings = ModelSpec(engine="torch" if by_torch else "megatron")
    rollout = RolloutSpec(engine="torch" if generation.dims.pp == 1 else "vllm")
    actor = PlacedModel(ModelName("actor"), training, True, settings)
    copy = PlacedModel(
        ModelName("actor.rollout"), generation, False, ModelSpec(engine=rollout.engine), rollout, is_hybrid=True
    )
    is_once = is_once and not copy.obstacle_to_reuse(actor, None)
    sizes = []
    for rank in training.ranks:
        reuse = Reuse.of(actor, copy, SHAPE, rank, lends=True)
        trained = SHAPE.parts_on(actor, rank)
        # a part that it views is inside a trained tensor
        once = part_elements(reuse.parts, sorted(reuse.views)) + reuse.source_elements(reuse.lent)
        sizes.append(part_elements(trained, list(trained)) - is_once * once)
    return Fraction(max(sizes), SHAPE.num_parameters)


def row(p: int, t: int, d: int, p_g: int, t_g: int) -> str:
    """Return a row of the table: planned share and formula of each system."""
    training = Layout(tuple(range(p * t * d)), ParallelDims(t, p))
    everything, trained = holdings(Layout(training.ranks)), holdings(training)
    planned = (
        received(holdings(Layout(training.ranks), "deepspeed", 3), everything),
        received(trained, everything),
        received(trained, holdings(generation_layout(training, ParallelDims(t_g, p_g)))),
        received(trained, holdings(Layout(training.ranks, ParallelDims(t_g, p_g)))),
    )
    formulas = (
        Fraction(t * p * d - 1, t * p * d),
        Fraction(t * p - 1, t * p),
        Fraction(t * p - t_g * p_g, t_g * p_g * t * p),
    )
    cells = [f"{one} ({other})" for one, other in zip(planned, formulas, strict=False)]
    return f"| {p}, {t}, {d} | {p_g}, {t_g} | {' | '.join(cells)} | {planned[-1]} |"


def memory_row(p: int, t: int, d: int, p_g: int, t_g: int) -> str:
    """Return a row of the table of memory while a rank generates: weights that it generates with, and others."""
    training = Layout(tuple(range(p * t * d)), ParallelDims(t, p))
    generation = generation_layout(training, ParallelDims(t_g, p_g))
    planned = (stored_twice(training, generation, is_once) for is_once in (False, True))
    part = Fraction(1, t_g * p_g)
    found = ((1, Fraction(1, t * p * d)), (1, Fraction(1, t * p)), (part, 0), *((part, other) for other in planned))
    cells = (f"{used} + {other}" for used, other in found)
    return f"| {p}, {t}, {d} | {p_g}, {t_g} | {' | '.join(cells)} |"


def metered_row(degrees: tuple[int, int, int, int, int], directory: Path) -> str:
    """Return a row of the table of metered memory: MB of weights of the fullest rank, planned in parentheses."""
    cells = []
    for sleeps in (False, True):
        raw = run_of(degrees, directory, sleeps)
        path = directory / f"{raw['name']}.yaml"
        path.write_text(yaml.safe_dump(raw))
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        subprocess.run(
            [sys.executable, "-m", "flexrlhf", "run", str(path)], env=environment, check=True, stdout=subprocess.DEVNULL
        )
        plan = make_plan(Spec.parse(raw))
        files = sorted(plan.spec.directory.glob("weights-*.json"))
        states = [plan.sizing.state(model, rank) for rank in range(8) for model in plan.placement.on_rank(rank)]
        planned = [sum(state.weights - state.lent for state in states[at : at + 2] if state) for at in range(0, 16, 2)]
        cells.append(f"{max(json.loads(file.read_text()) for file in files) / 1e6:.3f} ({max(planned) / 1e6:.3f})")
    p, t, d, p_g, t_g = degrees
    return f"| {p}, {t}, {d} | {p_g}, {t_g} | {' | '.join(cells)} |"


def run_of(degrees: tuple[int, int, int, int, int], directory: Path, sleeps: bool) -> dict[str, Any]:
    """Return the YAML of a run of two steps. ``sleeps``: whether the copy is released, so that it reuses weights."""
    p, t, _, _, t_g = degrees
    actor: Mapping[str, Any] = {"tp": t} if p == 1 else {"engine": "megatron", "tp": t, "pp": p}
    return {
        "name": f"{'-'.join(map(str, degrees))}-{'once' if sleeps else 'twice'}",
        "algorithm": {
            **{"name": "grpo", "prompts_per_step": 8, "samples_per_prompt": 2, "kl": None},
            "loop": f"{Path(__file__).resolve()}:metered_loop",
        },
        "models": {"actor": {"init": INIT, **actor}},
        "reward": [{"rule": "length", "target_tokens": 5}],
        "data": {
            **{"path": str(directory / "prompts.jsonl"), "tokenizer": str(directory / "tokenizer")},
            **{"max_prompt_tokens": 4, "max_response_tokens": 8},
        },
        "steps": 2,
        "rollout": {"engine": "torch", "tp": t_g, "sleep": sleeps, "parity": None},
        "cluster": {"devices": 8, "device": "cpu"},
        "runs": str(directory),
    }


def metered_loop(trainer: Any) -> None:
    """Train, and write the bytes of the weights of all models on this rank after generation."""
    execute, found = trainer.execute, list[int]()

    def metered(execution: Any) -> None:
        execute(execution)
        if execution.instruction.label.startswith("generate"):
            engines = [model.engine for model in trainer._models.values()]
            modules = [getattr(engine, "_stage", None) or engine._model for engine in engines]
            found.append(storage_bytes(local(each) for module in modules for each in module.parameters()))

    trainer.execute = metered
    for batch in trainer.batches():
        trainer.train_rlhf(trainer.generate_experience(batch))
    (trainer.plan.spec.directory / f"weights-{trainer._rank.rank}.json").write_text(json.dumps(max(found)))


def main() -> None:
    """Print the tables of the documents."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.resharding_volumes", description=__doc__)
    parser.add_argument("--metered", action="store_true", help="run layouts of eight ranks on CPUs")
    if parser.parse_args().metered:
        with TemporaryDirectory() as name:
            directory = Path(name)
            build_tokenizer(["a b c d"], directory / "tokenizer")
            (directory / "prompts.jsonl").write_text('{"prompt": "a b c"}\n{"prompt": "b c d"}\n' * 8)
            print("| p, t, d | p_g, t_g | stored twice, MB (planned) | stored once, MB (planned) |")
            print("|---|---|---|---|")
            for degrees in METERED:
                print(metered_row(degrees, directory), flush=True)
        return
    print("| p, t, d | p_g, t_g | DeepSpeed-Chat | HybridFlow-V | HybridFlow | ranks in their own order |")
    print("|---|---|---|---|---|---|")
    for degrees in DEGREES:
        print(row(*degrees))
    print()
    print("| p, t, d | p_g, t_g | DeepSpeed-Chat | HybridFlow-V | HybridFlow | stored twice | stored once |")
    print("|---|---|---|---|---|---|---|")
    for degrees in DEGREES:
        print(memory_row(*degrees))


if __name__ == "__main__":
    main()
