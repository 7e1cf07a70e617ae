"""Weights that a GPU receives between training and generation on the same GPUs, planned and by published formulas.

    python -m benchmarks.resharding_volumes

Fractions of all weights M, for a model whose tensors all degrees divide. Formulas and names: HybridFlow (Sheng et al.
2024, sec. 5.4, table 2): DeepSpeed-Chat gathers everything from ZeRO-3 over all t p d GPUs, HybridFlow-V everything
within a training replica, HybridFlow only missing weights, with generation ranks in an order in which each reuses its
trained part.
"""

from __future__ import annotations

from fractions import Fraction

from flexrlhf.config.model_settings import ModelSpec
from flexrlhf.placement.layout import Layout, generation_layout
from flexrlhf.placement.placed import ModelName, PlacedModel
from flexrlhf.weights.shapes import ModelShape, count_elements
from flexrlhf.weights.shards import parts_on
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


def holdings(layout: Layout, engine: str = "torch", zero: int = 0) -> Holdings:
    """Return each rank's part of the model."""
    model = PlacedModel(ModelName("actor"), layout, True, ModelSpec(engine=engine, zero=zero))
    return {rank: parts_on(model, SHAPE, rank) for rank in layout.ranks}


def received(source: Holdings, destination: Holdings) -> Fraction:
    """Return the largest fraction of all weights that a rank receives."""
    plan = plan_transfers(source, destination, 10**9)
    return Fraction(max(plan.received.values(), default=0), count_elements(SHAPE.parameters))


def row(p: int, t: int, d: int, p_g: int, t_g: int) -> str:
    """Return a row of the table: planned share and formula of each system."""
    training = Layout(tuple(range(p * t * d)), t, p)
    everything, trained = holdings(Layout(training.ranks)), holdings(training)
    planned = (
        received(holdings(Layout(training.ranks), "deepspeed", 3), everything),
        received(trained, everything),
        received(trained, holdings(generation_layout(training, t_g, p_g))),
        received(trained, holdings(Layout(training.ranks, t_g, p_g))),
    )
    formulas = (
        Fraction(t * p * d - 1, t * p * d),
        Fraction(t * p - 1, t * p),
        Fraction(t * p - t_g * p_g, t_g * p_g * t * p),
    )
    cells = [f"{one} ({other})" for one, other in zip(planned, formulas, strict=False)]
    return f"| {p}, {t}, {d} | {p_g}, {t_g} | {' | '.join(cells)} | {planned[-1]} |"


def main() -> None:
    print("| p, t, d | p_g, t_g | DeepSpeed-Chat | HybridFlow-V | HybridFlow | ranks in their own order |")
    print("|---|---|---|---|---|---|")
    for degrees in DEGREES:
        print(row(*degrees))


if __name__ == "__main__":
    main()
