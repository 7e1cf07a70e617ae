"""What is measured for a plan: its models with random weights, each on all ranks, and the calls that they do."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from flexrlhf.config.spec import ClusterSpec, DebugSpec, ModelSpec, RolloutSpec, ScheduleSpec, Spec, SyncSpec
from flexrlhf.errors import UserError
from flexrlhf.guideline.costs.transformer import Transformer, transformer_of
from flexrlhf.operators.graph import Operator
from flexrlhf.placement.placed import PlacedModel
from flexrlhf.plan.data_lengths import prompt_lengths, response_lengths
from flexrlhf.plan.plan import Plan
from flexrlhf.weights.shapes import DTYPE_BYTES, LANGUAGE_HEAD, count_elements, read_config

LEFT_OUT = ("architectures", "transformers_version", "torch_dtype", "dtype", "_name_or_path")
"""Keys of a saved config that say nothing about its shape."""
COMPUTED = ("generate", "forward", "train")
"""Kinds of operators that a model computes."""
MOST_TIMES = 4
"""Calls are measured on at most so many times the rows of a replica: beyond, the last two points tell."""


@dataclass(frozen=True)
class Subject:
    """A model to be measured. ``operators``: one of each kind that roles of its shape do."""

    role: str
    transformer: Transformer
    engine: str
    item: int
    tp: int
    operators: Mapping[str, Operator]


def rehearsed(plan: Plan, earlier: Sequence[Plan], ranks: int, device: str) -> Spec:
    """``plan``'s run with every model on all ``ranks`` and random weights, which an optimizer step leaves as they are.

    ``earlier``: plans of the same command, whose models need not exist yet.
    """
    spec = plan.spec
    models = {role: _random(role, plan, earlier) for role in plan.graph.roles}
    return spec.model_copy(
        update={
            "models": spec.models.model_copy(update=models),
            "cluster": ClusterSpec(devices=ranks, device=device),
            "placement": None,
            "schedule": ScheduleSpec(),
            "sync": SyncSpec(checksum=spec.sync.checksum, bucket_mb=spec.sync.bucket_mb),
            "rollout": RolloutSpec(),
            "debug": DebugSpec(),
        }
    )


def _random(role: str, plan: Plan, earlier: Sequence[Plan]) -> ModelSpec:
    model = plan.model(role)
    config = read_config(role, _origin(model, earlier))
    init = {key: value for key, value in config.items() if key not in LEFT_OUT}
    # a role that is not trained must have no settings of an optimizer
    still = {"learning_rate": 0.0, "warmup_steps": 0} if role in plan.graph.trained else {}
    optimizer = model.optimizer.model_copy(update=still)
    return model.model_copy(update={"path": None, "init": init, "optimizer": optimizer, "shadow": None})


def _origin(model: ModelSpec, earlier: Sequence[Plan]) -> ModelSpec:
    """The model whose weights ``model`` starts from, where an earlier run of the command writes them."""
    pending = {path: made.model(role) for made in earlier for role, path in made.outputs.items()}
    while model.path is not None and Path(model.path).resolve() in pending:
        model = pending[Path(model.path).resolve()]
    return model


def subjects(plan: Plan) -> list[Subject]:
    """One for each shape, engine and type among the models of ``plan``; the trained role stands for its like."""
    found: dict[object, Subject] = {}
    for model in sorted(plan.placement.models, key=lambda model: not model.trained):
        subject = _subject(plan, model)
        key = subject.transformer, subject.engine, subject.item, subject.tp
        # a frozen model computes what its trained like does; adapters make another
        if key not in found:
            found[key] = subject
    return list(found.values())


def _subject(plan: Plan, model: PlacedModel) -> Subject:
    operators: dict[str, Operator] = {
        o.kind: o for o in reversed(plan.graph.operators) if o.role == model.role and o.kind in COMPUTED
    }
    transformer = _transformer(plan, model)
    settings = model.settings
    return Subject(model.role, transformer, model.engine, DTYPE_BYTES[settings.dtype], model.layout.tp, operators)


def _transformer(plan: Plan, model: PlacedModel) -> Transformer:
    shape = plan.shapes.get(model.role)
    if shape is None or shape.sizes is None:
        raise UserError(f"models.{model.role}: the config does not tell the sizes of this family of models")
    is_scorer = model.head == "scalar"
    tied = not is_scorer and LANGUAGE_HEAD not in shape.names
    return transformer_of(shape.sizes, is_scorer, tied, count_elements(shape.trained) if shape.adapters else 0)


@dataclass(frozen=True)
class TextSample:
    """Lengths of prompts and of answers, in tokens, from which rows are made up."""

    prompts: tuple[int, ...]
    answers: tuple[int, ...]

    def of_rows(self, count: int) -> list[tuple[int, int]]:
        """(prompt, answer) of so many rows: spread over the samples, the longest of each among them."""
        prompts, answers = (_spread(sorted(each, reverse=True), count) for each in (self.prompts, self.answers))
        # the longest prompt has the shortest answer: neither padding is all on one side
        return list(zip(prompts, answers[::-1], strict=True))


def _spread(ordered: Sequence[int], count: int) -> list[int]:
    return [ordered[place * (len(ordered) - 1) // max(1, count - 1)] for place in range(count)]


def text_sample(plan: Plan) -> TextSample:
    """As the data files of the run tell; where they do not, from half of what is allowed to all of it."""
    most_prompt, most_answer = plan.lengths.prompt, plan.lengths.response
    prompts, answers = prompt_lengths(plan), response_lengths(plan)
    if prompts == (most_prompt,):
        prompts = tuple(range(-(-most_prompt // 2), most_prompt + 1))
    if answers == (most_answer,):
        answers = tuple(range(-(-most_answer // 2), most_answer + 1))
    return TextSample(prompts, answers)


@dataclass(frozen=True)
class RowCounts:
    """Rows on a replica at which calls are measured, ascending: around what the run has."""

    calls: tuple[int, ...]
    decode: tuple[int, ...]
    update: tuple[int, ...]


def row_counts(plan: Plan, tp: int) -> RowCounts:
    """``tp``: ranks of a replica. Whole prompts; at the most all rows of the step on one replica."""
    replicas, samples = plan.placement.num_ranks // tp, plan.batch.samples_per_prompt
    whole = plan.batch.num_rows
    share, update = whole / replicas, whole / replicas / plan.batch.num_mini_batches
    most = min(replicas, MOST_TIMES)

    def counts(*wanted: float) -> tuple[int, ...]:
        return tuple(sorted({samples * max(1, round(rows / samples)) for rows in wanted}))

    return RowCounts(
        calls=counts(share / 2, share, most * share),
        decode=counts(share / 8, share / 2, share, most * share),
        update=counts(update / 2, update, most * update, 2 * most * update),
    )


def first_combine(plan: Plan) -> Operator | None:
    return next((operator for operator in plan.graph.operators if operator.kind == "combine"), None)


def settings_of(plan: Plan) -> dict[str, Any]:
    """How the algorithm cuts the distribution that answers are drawn from, which takes time, too."""
    algorithm = plan.spec.algorithm
    return {key: getattr(algorithm, key) for key in ("top_p", "top_k") if hasattr(algorithm, key)}
