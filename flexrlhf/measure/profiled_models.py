"""Models, calls, sequence lengths and row counts that a profile measures for a plan."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from os.path import realpath
from pathlib import Path

from flexrlhf.config.model_settings import ModelSpec
from flexrlhf.config.output_settings import DebugSpec
from flexrlhf.config.placement_settings import ClusterSpec
from flexrlhf.config.spec import RolloutSpec, ScheduleSpec, Spec, SyncSpec
from flexrlhf.errors import UserError
from flexrlhf.guideline.costs.cost_model import Transformer, transformer_of
from flexrlhf.operators.graph import GENERATE, Operator
from flexrlhf.placement.placed import PlacedModel
from flexrlhf.plan.plan import Plan
from flexrlhf.plan.run_data import prompt_lengths, response_lengths
from flexrlhf.weights.shapes import DTYPE_BYTES, read_config

SHAPELESS_KEYS = ("architectures", "transformers_version", "torch_dtype", "dtype", "_name_or_path")
"""Keys of a saved config that do not describe the model's shape."""
MEASURED_KINDS = ("generate", "forward", "train")
"""Kinds of operators that a model computes."""
MAX_SCALE = 4
"""Calls are measured up to so many times the rows of a replica; beyond, the last two points are extrapolated."""


@dataclass(frozen=True)
class ProfiledModel:
    """A model to be measured, which stands for all models of its shape.

    placed:       with a role of that shape, a trained one if there is one
    transformer:  its sizes
    operators:    one operator of each kind that the role has
    """

    placed: PlacedModel
    transformer: Transformer
    operators: Mapping[str, Operator]

    @property
    def item(self) -> int:
        """Bytes of a weight."""
        return DTYPE_BYTES[self.placed.settings.dtype]


def without_turns(operator: Operator) -> Operator:
    """Return the operator that generates whole responses in place of one that generates a turn."""
    return replace(GENERATE, role=operator.role) if operator.turns else operator


def profiling_spec(plan: Plan, command_plans: Sequence[Plan], ranks: int, device: str) -> Spec:
    """Return ``plan``'s spec with every model on all ``ranks`` and random weights that optimizer steps do not change.

    ``command_plans``: plans of the same command, whose models need not exist yet.
    """
    spec = plan.spec
    models = {role: _with_random_weights(role, plan, command_plans) for role in plan.graph.roles}
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


def _with_random_weights(role: str, plan: Plan, command_plans: Sequence[Plan]) -> ModelSpec:
    model = plan.model(role)
    config = read_config(role, _origin(model, command_plans))
    init = {key: value for key, value in config.items() if key not in SHAPELESS_KEYS}
    # a role that is not trained must have no settings of an optimizer
    frozen = {"learning_rate": 0.0, "warmup_steps": 0} if role in plan.graph.trained else {}
    optimizer = model.optimizer.model_copy(update=frozen)
    # times are of sequences as long as the policy's, whose tokens stand for another tokenizer's
    plain = {"path": None, "init": init, "shadow": None, "retokenize": False, "max_text_tokens": None}
    return model.model_copy(update={**plain, "optimizer": optimizer})


def _origin(model: ModelSpec, command_plans: Sequence[Plan]) -> ModelSpec:
    """Return the model that ``model`` starts from, through the runs of the command that write its weights."""
    pending = {path: plan.model(role) for plan in command_plans for path, role in plan.outputs.items()}
    while model.path is not None and Path(realpath(model.path)) in pending:
        model = pending[Path(realpath(model.path))]
    return model


def profiled_models(plan: Plan) -> list[ProfiledModel]:
    """Return one model for each shape, engine and dtype of ``plan``. Raises UserError for a family of unknown shape."""
    models: dict[object, ProfiledModel] = {}
    # a trained role comes first: a frozen one of its shape computes nothing else, and adapters make another shape
    for placed in sorted(plan.placement.models, key=lambda placed: not placed.trained):
        model = _profiled_model(plan, placed)
        models.setdefault((model.transformer, placed.engine, model.item, placed.layout.tp), model)
    return list(models.values())


def _profiled_model(plan: Plan, model: PlacedModel) -> ProfiledModel:
    operators: dict[str, Operator] = {
        o.kind: without_turns(o)
        for o in reversed(plan.graph.operators)
        if o.role == model.role and o.kind in MEASURED_KINDS
    }
    shape = plan.shapes.get(model.role)
    if shape is None or shape.sizes is None:
        raise UserError(f"models.{model.role}: the config of this model family does not contain its sizes")
    return ProfiledModel(model, transformer_of(shape, model.head, is_adapted=True), operators)


@dataclass(frozen=True)
class LengthSample:
    """Lengths of prompts and of responses, in tokens, from which rows are made up."""

    prompts: tuple[int, ...]
    responses: tuple[int, ...]

    def rows(self, count: int, samples: int = 1) -> list[tuple[int, int]]:
        """Return (prompt, response) of ``count`` rows, spread over the sample; the longest of each are among them.

        Every ``samples`` rows have one prompt, and responses of all lengths.
        """
        groups = count // samples
        prompts = _spread(sorted(self.prompts, reverse=True), groups)
        # the longest prompt has the shortest response: neither side has all the padding
        responses = _spread(sorted(self.responses, reverse=True), count)[::-1]
        return [(prompts[row // samples], responses[row % samples * groups + row // samples]) for row in range(count)]


def _spread(ordered: Sequence[int], count: int) -> list[int]:
    return [ordered[place * (len(ordered) - 1) // max(1, count - 1)] for place in range(count)]


def length_sample(plan: Plan) -> LengthSample:
    """Return the lengths in the run's data files or, without any, those from half of the maximum to the maximum."""
    prompts = prompt_lengths(plan) or _upper_half(plan.lengths.prompt)
    return LengthSample(prompts, response_lengths(plan) or _upper_half(plan.lengths.response))


def _upper_half(maximum: int) -> tuple[int, ...]:
    return tuple(range(-(-maximum // 2), maximum + 1))


@dataclass(frozen=True)
class MeasuredRows:
    """Rows at which a call is measured, ascending.

    needed:   few ones and those of the run, through which a line leads to more rows, too
    further:  rows that are measured if there is time
    """

    needed: tuple[int, ...]
    further: tuple[int, ...] = ()


@dataclass(frozen=True)
class RowCounts:
    """Rows of a replica at which calls are measured.

    calls:   for forward passes and combines
    decode:  for generation
    update:  for optimizer steps
    """

    calls: MeasuredRows
    decode: MeasuredRows
    update: MeasuredRows


def row_counts(plan: Plan, tp: int) -> RowCounts:
    """Return row counts for replicas of ``tp`` ranks: whole prompts, at most all rows of the step on one replica."""
    replicas, samples = plan.placement.num_ranks // tp, plan.batch.samples_per_prompt
    share = plan.batch.num_rows / replicas
    update = share / plan.batch.num_mini_batches
    scale = min(replicas, MAX_SCALE)

    def whole_prompts(*counts: float) -> tuple[int, ...]:
        return tuple(sorted({samples * max(1, round(count / samples)) for count in counts}))

    def rows(needed: tuple[float, ...], *further: float) -> MeasuredRows:
        first = whole_prompts(*needed)
        return MeasuredRows(first, tuple(each for each in whole_prompts(*further) if each not in first))

    return RowCounts(
        calls=rows((share / 4, share), scale * share),
        decode=rows((share / 8, share), share / 2, scale * share),
        update=rows((update / 4, update), scale * update),
    )
