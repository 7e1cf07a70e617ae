"""The operator graph of one algorithm step. Edges follow from the columns that operators read and write."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from typing import ClassVar, Literal, get_args

from flexrlhf.operators.columns import TEXT, Column, Qualifier, Quantity
from flexrlhf.operators.named_functions import COMBINES, LOSSES

CallKind = Literal["generate", "forward", "train"]
"""Kind of a model's call."""
GraphKind = CallKind | Literal["score", "retokenize", "combine"]
"""Kind of an operator of a graph."""
TrainPart = Literal["loss", "backward", "step"]
"""Part of a train that a program calls by itself: its loss in a forward pass, its gradients, its optimizer step."""
OperatorKind = GraphKind | TrainPart
Needs = Literal["prompts", "responses", "pairs"]
"""Responses that an algorithm needs with each prompt: none, one, or a chosen and a rejected one."""


@dataclass(frozen=True)
class Operator:
    """One step of an algorithm: a model call, or a computation next to a model.

    A combine is mathematics on columns; a score calls functions and services; a retokenize encodes texts for a model
    with another tokenizer. A program may call a train by parts
    (strategies/calls.py).

    name:         unique in the graph.
    kind:         generate, forward, train, score, retokenize, combine, or a part of a train.
    role:         the role whose model computes it, or on whose ranks it runs.
    reads:        columns that it reads.
    writes:       columns that it writes; none for a train and for statistics.
    function:     the mathematics of a combine, the loss of a train (named_functions.py), the section of the YAML
                  with the sources of a score, or with the environment that replies to a generate, or the role that
                  a retokenize encodes for.
    quantities:   outputs of the model that the loss of a train reads.
    compares:     whether the loss of a train compares the responses to a prompt; None: as ``LOSSES`` has it. Of a
                  forward: whether a train on the same sequences does, so that both make the same passes.
    extra_loss:   name of a second loss of a train, on further texts in the same optimizer step; their columns have
                  this name behind a dot.
    suffix:       may stand behind the names of its columns; whoever computes sees them without it.
    barrier:      needs every row of the step at once, so chunks end here, and for all readers of its columns.
    is_greedy:    a generate that takes the likeliest tokens.
    is_controlled: uses values that follow from the step before (trainer/controllers.py).
    either_copy:  may run on the trained copy, in parallel with the inference copy, while both store the same weights.
    first_step:   it does not run before this step, or computes nothing (``accounts_frozen``).
    adapters:     False: computed by the base weights alone, without the low-rank adapters that are trained.
    every, also:  it runs at step 0 and every so many steps, and at step ``also``.
    on_trained:   runs on the copy that is trained even where another copy is for inference, before that copy trains.
    carries:      columns that it also reads of the step before: as it wrote them, of rows that are not whole yet, or
                  scores.
    is_repeated:  it runs once for each attempt of dynamic sampling, on the rows of that attempt.
    earlier:      columns that it also reads of the rows of earlier attempts.
    is_free:      a generate with replies whose rows go on one by one, each when its reply is there.
    """

    KINDS: ClassVar[tuple[str, ...]] = tuple(kind for choice in get_args(GraphKind) for kind in get_args(choice))
    """Kinds of operators of a graph."""

    name: str
    kind: OperatorKind
    role: str
    reads: tuple[str, ...]
    writes: tuple[str, ...] = ()
    function: str = ""
    quantities: tuple[Quantity, ...] = ("logprobs",)
    compares: bool | None = None
    extra_loss: str = ""
    suffix: str = ""
    barrier: bool = False
    is_greedy: bool = False
    is_controlled: bool = False
    either_copy: bool = False
    first_step: int = 0
    adapters: bool = True
    every: int = 1
    also: int = 0
    on_trained: bool = False
    carries: tuple[str, ...] = ()
    is_repeated: bool = False
    earlier: tuple[str, ...] = ()
    is_free: bool = False

    @property
    def stored_columns(self) -> tuple[str, ...]:
        """Columns that it leaves on its ranks: the ones it writes, of a train the outcomes of its rows."""
        return (*self.writes, *((Column.FINAL_OUTCOME,) if self.kind == "train" else ()))

    @property
    def of_whole_responses(self) -> Operator:
        """The operator that generates responses without replies in place of one that plays episodes."""
        return replace(GENERATE, role=self.role) if self.has_replies else self

    @property
    def with_own_routers(self) -> Operator:
        """The operator without the experts that generation chose: the routers of its model choose others."""
        return replace(self, reads=tuple(name for name in self.reads if name != Column.EXPERTS))

    @property
    def next_to_data(self) -> Operator:
        """The operator on generated responses, for a data set that has responses, too."""
        own = {*TEXT, "response_mask", "finished", "policy_version"}

        def renamed(names: tuple[str, ...]) -> tuple[str, ...]:
            return tuple(f"{name}.{Qualifier.GENERATED}" if name in own else name for name in names)

        suffix = f".{Qualifier.GENERATED}"
        return replace(self, reads=renamed(self.reads), writes=renamed(self.writes), suffix=suffix)

    def is_due(self, step: int) -> bool:
        """Whether it runs at ``step``."""
        has_begun = step >= self.first_step or self.accounts_frozen
        return has_begun and (step % self.every == 0 or step == self.also)

    @property
    def accounts_frozen(self) -> bool:
        """Whether it runs before its first step, without training: it accounts for the rows of a step, whose number
        segments and attempts decide."""
        return self.kind == "train" and Column.PRESENT in self.reads

    @property
    def call(self) -> CallKind | None:
        """Kind of the model call; None without one."""
        match self.kind:
            case "generate" | "forward" | "train":
                return self.kind
            case "backward":
                return "train"
            case "loss":
                return "forward"
        return None

    @property
    def compares_responses(self) -> bool:
        """Whether all responses to a prompt are in one pass, because the loss of a train may compare them.

        A loss of a user's own may, unless its operator says otherwise.
        """
        if self.kind not in ("train", *get_args(TrainPart)):
            return bool(self.compares)
        if self.compares is not None:
            return self.compares
        return LOSSES[self.function].compares if self.function in LOSSES else is_own(self.function)

    @property
    def is_rare(self) -> bool:
        """Whether most steps skip it."""
        return self.every > 1

    @property
    def samples_responses(self) -> bool:
        """Whether it samples the responses that are trained on."""
        return self.kind == "generate" and not self.is_greedy

    @property
    def has_replies(self) -> bool:
        """Whether environments reply to the responses that it samples."""
        return self.kind == "generate" and self.function == ENVIRONMENT

    @property
    def reads_texts(self) -> bool:
        """Whether it reads the rows of the data set as text."""
        return self.has_replies or self.kind in ("score", "retokenize")

    @property
    def reads_data(self) -> bool:
        """Whether it reads rows of the data set."""
        return self.samples_responses or self.reads_texts

    @property
    def takes_prompts(self) -> bool:
        """Whether it decides which prompts of the data a step takes."""
        return self.function == TAKE_PROMPTS.function

    @property
    def is_of_episodes(self) -> bool:
        """Whether it computes for the first sequence of an episode alone: scores, and statistics of evaluations."""
        scores = self.kind != "generate" and any(Column.plain(name) in SCORES for name in self.writes)
        return scores or self.kind in ("score", "retokenize") or self.function in ("diversity", "held_out_scores")

    @property
    def joins_responses(self) -> bool:
        """Whether it decides which rows a step trains on, of the responses that several operators generate."""
        return self.function == WHOLE_RESPONSES

    @property
    def extra_reads(self) -> tuple[str, ...]:
        """Columns of the further texts that ``extra_loss`` trains on."""
        return tuple(name for name in self.reads if self.extra_loss and name.endswith(f".{self.extra_loss}"))

    def columns_read(self, attempt: int | None, of_attempt: int | None) -> tuple[str, ...]:
        """Return the columns that ``operator`` in ``attempt`` reads of the rows of another one; None: of all rows."""
        if None in (attempt, of_attempt) or attempt == of_attempt:
            return self.reads
        assert attempt is not None and of_attempt is not None
        return self.earlier if of_attempt < attempt else ()


@dataclass(frozen=True)
class Graph:
    """Operators of one step, in the order a person would read them.

    roles:       in the order of the ratio vector.
    data:        responses that the data set must have.
    inputs:      columns that come from the data set.
    evaluation:  operators that run on the evaluation set.
    can_shadow:  whether inference may run on a copy while the trained weights change.
    left_out:    columns that no operator of their own writes, since another pass computes them or they would change
                 nothing, each with the reason.
    """

    operators: tuple[Operator, ...]
    roles: tuple[str, ...]
    data: Needs
    inputs: tuple[str, ...]
    evaluation: tuple[Operator, ...] = ()
    can_shadow: bool = False
    left_out: tuple[tuple[str, str], ...] = ()

    @property
    def trained(self) -> tuple[str, ...]:
        """Roles with a train operator, in vector order."""
        trained = {operator.role for operator in self.operators if operator.kind == "train"}
        return tuple(role for role in self.roles if role in trained)

    @property
    def evaluated(self) -> tuple[Operator, ...]:
        """Operators of evaluations, on the trained copies: a rollout engine may sleep or lag."""
        return tuple(replace(operator, on_trained=True) for operator in self.evaluation)

    @property
    def generated(self) -> str | None:
        """Role that generates the responses to train on; None if the data set has them."""
        return next((operator.role for operator in self.operators if operator.kind == "generate"), None)

    @cached_property
    def producers(self) -> dict[str, Operator]:
        """Operator that writes each column."""
        return {column: operator for operator in self.operators for column in operator.writes}

    @property
    def accounting(self) -> Operator | None:
        """Training that accounts for every row of a step: of the first trained role; None where nothing is trained."""
        trains = [operator for operator in self.operators if operator.kind == "train"]
        return min(trains, key=lambda train: self.roles.index(train.role), default=None)

    def first_step(self, role: str) -> int:
        """Return the first step in which ``role`` is trained."""
        return next((o.first_step for o in self.operators if (o.kind, o.role) == ("train", role)), 0)

    def parents(self, operator: Operator) -> list[Operator]:
        """Return the operators that write the columns ``operator`` reads, in graph order."""
        writers = {self.producers[column].name for column in operator.reads if column in self.producers}
        return [candidate for candidate in self.operators if candidate.name in writers]

    @property
    def evaluation_metrics(self) -> tuple[str, ...]:
        """Names of the metrics that evaluations report."""
        combines = (COMBINES[each.function] for each in self.evaluation if each.function in COMBINES)
        return tuple(name for combine in combines for name in combine.metrics)

    def sharing(self, role: str, owner: str) -> Graph:
        """Return the graph with the operators of ``role`` on ``owner``'s weights without adapters; ``role`` has no
        copy."""

        def shared(operator: Operator) -> Operator:
            return replace(operator, role=owner, adapters=False) if operator.role == role else operator

        return replace(
            self,
            operators=tuple(shared(operator) for operator in self.operators),
            evaluation=tuple(shared(operator) for operator in self.evaluation),
            roles=tuple(name for name in self.roles if name != role),
        )

    @cached_property
    def waves(self) -> dict[str, int]:
        """Depth of every operator, by name: 0 without parents, else one more than the deepest parent."""
        waves: dict[str, int] = {}
        for operator in self.operators:
            assert all(p.name in waves for p in self.parents(operator)), f"{operator.name} stands before a parent"
            waves[operator.name] = max((waves[parent.name] + 1 for parent in self.parents(operator)), default=0)
        return waves

    @cached_property
    def after_barrier(self) -> frozenset[str]:
        """Operators that need the whole step: barriers and all that depends on one."""
        names: set[str] = set()
        for operator in self.operators:
            if operator.barrier or any(parent.name in names for parent in self.parents(operator)):
                names.add(operator.name)
        return frozenset(names)


SCORES = ("scores", "token_scores")
"""Columns of scores of responses, by kind."""
ENVIRONMENT = "environment"
"""Section of the YAML with the environment that replies to a generate."""


def is_own(function: str) -> bool:
    """Whether the function of an operator is one of a user's file."""
    return ":" in function


def after(operators: tuple[Operator, ...], name: str, further: Operator) -> tuple[Operator, ...]:
    """Return ``operators`` with ``further`` behind the one called ``name``."""
    place = [operator.name for operator in operators].index(name) + 1
    return (*operators[:place], further, *operators[place:])


GENERATE = Operator(
    "generate",
    "generate",
    "actor",
    ("prompts", "prompt_mask"),
    (*TEXT, "response_mask", "finished", "policy_version"),
)
TAKE_PROMPTS = Operator(
    "take_prompts",
    "combine",
    "actor",
    (),
    (Column.PRESENT, Column.POSITION),
    function="take_prompts",
    barrier=True,
    is_controlled=True,
    is_repeated=True,
    earlier=("scores", "finished", "episode"),
)
WHOLE_RESPONSES = "whole_responses"
"""Function of a combine, which writes the rows whose responses have all ended."""
DIVERSITY = Operator("diversity", "combine", "actor", ("tokens", "response_mask"), function="diversity")
