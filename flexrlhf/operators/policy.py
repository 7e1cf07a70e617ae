"""Operators that the graphs of policy-gradient algorithms have in common."""

from __future__ import annotations

from dataclasses import replace

from flexrlhf.config.algorithms import PolicySpec
from flexrlhf.operators.columns import TEXT, Quantity, qualified
from flexrlhf.operators.evaluation import DIVERSITY, GENERATE, HELD_OUT_SCORES
from flexrlhf.operators.graph import Graph, Operator

SCORES = Operator("scores", "forward", "reward", TEXT, ("scores",))
PTX = "ptx"


def drawn(spec: PolicySpec, told: tuple[str, ...] = ("logprobs",)) -> tuple[Operator, ...]:
    """Answers, their log-probs, those under the reference where leaving it is penalised, and their scores.

    ``told``: the columns that the actor's own pass over them writes.
    """
    logprobs = Operator("logprobs", "forward", "actor", TEXT, told)
    ref_logprobs = Operator("ref_logprobs", "forward", "ref", TEXT, ("ref_logprobs",))
    return (GENERATE, logprobs, *([ref_logprobs] if spec.kl is not None else []), SCORES)


def reference(spec: PolicySpec) -> tuple[str, ...]:
    """The role of the reference model, where there is one."""
    return () if spec.kl is None else ("ref",)


def advantages(
    spec: PolicySpec,
    function: str,
    further: tuple[str, ...] = (),
    writes: tuple[str, ...] = (),
    barrier: bool = False,
) -> Operator:
    """From scores to advantages by ``function``, which reads the columns ``further`` besides."""
    penalised = ("logprobs", "ref_logprobs") if spec.kl is not None else ()
    return Operator(
        "advantages",
        "combine",
        "actor",
        (*penalised, "scores", *further, "response_mask", "finished"),
        ("loss_mask", "advantages", *writes),
        function=function,
        barrier=barrier or spec.normalise_scores == "batch",
        is_controlled=True,
    )


def train_actor(
    spec: PolicySpec,
    function: str = "policy_loss",
    further: tuple[str, ...] = (),
    quantities: tuple[Quantity, ...] = ("logprobs",),
) -> Operator:
    """The optimizer steps of the actor by the loss ``function``, which reads the columns ``further`` besides."""
    penalised = ("ref_logprobs",) if spec.kl is not None and spec.kl.place == "loss" else ()
    return Operator(
        "train_actor",
        "train",
        "actor",
        (*TEXT, "loss_mask", "logprobs", *penalised, "advantages", *further),
        function=function,
        quantities=quantities,
        barrier=spec.epochs > 1,
        first_step=spec.freeze_actor_steps,
    )


def train_critic(spec: PolicySpec, role: str = "critic", suffix: str = "") -> Operator:
    """The optimizer steps of a critic. ``suffix``: of the columns of its values and returns."""
    return Operator(
        f"train_{role}",
        "train",
        role,
        (*TEXT, "loss_mask", f"values{suffix}", f"returns{suffix}"),
        function="value_loss",
        quantities=("values",),
        barrier=spec.epochs > 1,
        suffix=suffix,
    )


def policy_graph(spec: PolicySpec, operators: tuple[Operator, ...], roles: tuple[str, ...]) -> Graph:
    """A graph that draws its answers to the prompts of the data set."""
    inputs: tuple[str, ...] = ("prompts", "prompt_mask")
    if spec.ptx is not None:
        texts = qualified((*TEXT, "response_mask"), PTX)
        inputs += texts
        operators = tuple(
            _beside(operator, texts) if operator.name == "train_actor" else operator for operator in operators
        )
    return Graph(
        operators=operators,
        roles=roles,
        data="prompts",
        inputs=inputs,
        evaluation=(GENERATE, DIVERSITY, SCORES, HELD_OUT_SCORES),
        can_shadow=True,
    )


def _beside(train: Operator, texts: tuple[str, ...]) -> Operator:
    return replace(train, reads=(*train.reads, *texts), extra_loss=PTX)
