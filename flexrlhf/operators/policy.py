"""Operators that the graphs of policy-gradient algorithms share."""

from __future__ import annotations

from dataclasses import replace

from flexrlhf.config.algorithms import PolicySpec
from flexrlhf.operators.columns import TEXT, Quantity, qualified
from flexrlhf.operators.evaluation import DIVERSITY, EVALUATION_SCORES, GENERATE
from flexrlhf.operators.graph import Graph, Operator

SCORES = Operator("scores", "forward", "reward", TEXT, ("scores",))
PTX = "ptx"


def sampled_and_scored(spec: PolicySpec, forwarded: tuple[str, ...] = ("logprobs",)) -> tuple[Operator, ...]:
    """Return the operators up to the scores: generate, log-probs of actor and (with a KL penalty) reference, scores.

    ``forwarded``: columns that the actor's forward over the responses writes.
    """
    logprobs = Operator("logprobs", "forward", "actor", TEXT, forwarded)
    ref_logprobs = Operator("ref_logprobs", "forward", "ref", TEXT, ("ref_logprobs",))
    return (GENERATE, logprobs, *([ref_logprobs] if spec.kl is not None else []), SCORES)


def reference(spec: PolicySpec) -> tuple[str, ...]:
    """Return the role of the reference model; nothing without a KL penalty."""
    return () if spec.kl is None else ("ref",)


def advantages(
    spec: PolicySpec,
    function: str,
    further: tuple[str, ...] = (),
    writes: tuple[str, ...] = (),
    barrier: bool = False,
) -> Operator:
    """Return the combine from scores to advantages by ``function``. ``further``: columns that it reads in addition."""
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
    """Return the training of the actor by the loss ``function``. ``further``: columns that it reads in addition."""
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
    """Return the training of a critic. ``suffix``: stands behind the names of its columns of values and returns."""
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


def _with_selection(spec: PolicySpec, operators: tuple[Operator, ...]) -> tuple[Operator, ...]:
    """Return ``operators`` with the selection of tokens by their covariance between advantages and training."""
    if not spec.selects_tokens:
        return operators
    read, written = ("logprobs", "advantages", "loss_mask"), ("selected_tokens",)
    selection = Operator("covariance", "combine", "actor", read, written, function="covariant_tokens")
    operators = tuple(
        replace(each, reads=(*each.reads, *written)) if each.name == "train_actor" else each for each in operators
    )
    return after(operators, "advantages", selection)


def after(operators: tuple[Operator, ...], name: str, further: Operator) -> tuple[Operator, ...]:
    """Return ``operators`` with ``further`` behind the one called ``name``."""
    place = [operator.name for operator in operators].index(name) + 1
    return (*operators[:place], further, *operators[place:])


def policy_graph(spec: PolicySpec, operators: tuple[Operator, ...], roles: tuple[str, ...]) -> Graph:
    """Return a graph that generates responses to the prompts of the data set, with its evaluation."""
    inputs: tuple[str, ...] = ("prompts", "prompt_mask")
    operators = _with_selection(spec, operators)
    if spec.ptx is not None:
        texts = qualified((*TEXT, "loss_mask"), PTX)
        inputs += texts
        operators = tuple(
            _with_extra_texts(operator, texts) if operator.name == "train_actor" else operator for operator in operators
        )
    return Graph(
        operators=operators,
        roles=roles,
        data="prompts",
        inputs=inputs,
        evaluation=(GENERATE, DIVERSITY, SCORES, EVALUATION_SCORES),
        can_shadow=True,
    )


def _with_extra_texts(train: Operator, texts: tuple[str, ...]) -> Operator:
    return replace(train, reads=(*train.reads, *texts), extra_loss=PTX)
