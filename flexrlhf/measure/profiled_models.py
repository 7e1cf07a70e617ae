"""Models, calls, sequence lengths and row counts that a profile measures for a plan.

Layers are measured in models of few layers. If there are not enough ranks for a tensor-parallel layout, a rank's slice
of its layers is measured in a model with fewer heads and features, of which each rank has one by itself.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from flexrlhf.api import (
    EngineFacts,
    Families,
    ModelShape,
    ModelSpec,
    Operator,
    ParallelDims,
    PlacedModel,
    Plan,
    Spec,
    UserError,
    read_config,
)
from flexrlhf.guideline.costs.cost_model import Transformer, transformer_of

SHAPELESS_KEYS = ("architectures", "transformers_version", "torch_dtype", "dtype", "_name_or_path")
"""Keys of a saved config that do not describe the model's shape."""
MEASURED_KINDS = ("generate", "forward", "train")
"""Kinds of operators that a model computes."""
MAX_SCALE = 4
"""Combines are measured up to so many times the rows of a replica; beyond, the last two points are extrapolated."""
SHALLOW, DEEP = 1, 3
"""Layers of the two models whose times are compared."""
MOST_COUNTS = 4
"""Numbers of rows at which a call is measured, at most."""


@dataclass(frozen=True)
class ProfiledModel:
    """A model to be measured, which stands for all models of its shape.

    placed:       with a role of that shape, a trained one if there is one
    transformer:  its sizes
    operators:    one operator of each kind that roles of that shape have
    slices:       tensor-parallel ranks, of whose slices the layers are measured
    trunk:        a model before it with the same layers, from which those of its other slices are taken; None: none
    """

    placed: PlacedModel
    transformer: Transformer
    operators: Mapping[str, Operator]
    slices: tuple[int, ...] = (1,)
    trunk: Transformer | None = None

    @property
    def item(self) -> int:
        """Bytes of a weight."""
        return self.placed.item_bytes


def profiling_spec(plan: Plan, command_plans: Sequence[Plan], ranks: int, device: str) -> Spec:
    """Return ``plan``'s spec with every model on all ``ranks``, as replicas, and random weights that optimizer steps do
    not change.

    ``command_plans``: plans of the same command, whose models need not exist yet.
    """
    spec = plan.spec
    models = {role: _with_random_weights(role, plan, command_plans) for role in plan.graph.roles}
    plain = spec.with_defaults("cluster", "placement", "schedule", "sync", "rollout", "debug").with_models(models)
    cluster = plain.cluster.model_copy(update={"devices": ranks, "device": device})
    sync = plain.sync.model_copy(update={"checksum": spec.sync.checksum, "bucket_mb": spec.sync.bucket_mb})
    return plain.model_copy(update={"cluster": cluster, "sync": sync})


def _with_random_weights(role: str, plan: Plan, command_plans: Sequence[Plan]) -> ModelSpec:
    model = plan.model(role)
    config = read_config(role, _origin(model, command_plans))
    init = {key: value for key, value in config.items() if key not in SHAPELESS_KEYS}
    # a role that is not trained must have no settings of an optimizer
    frozen = {"learning_rate": 0.0, "warmup_steps": 0} if role in plan.graph.trained else {}
    optimizer = model.optimizer.model_copy(update=frozen)
    # times are of sequences as long as the policy's, whose tokens stand for another tokenizer's
    plain = {"path": None, "init": init, "shadow": None, "retokenize": False, "max_text_tokens": None}
    whole: dict[str, object] = ParallelDims()._asdict()
    whole |= dict.fromkeys(("activation_checkpointing", "offload_activations", "tiled_mlp"), False)
    return model.model_copy(update={**plain, **whole, "optimizer": optimizer})


def slim_spec(plan: Plan, depth: int, tp: int) -> Spec:
    """Return the spec of a profiling ``plan`` with ``depth`` layers of every model, on ``tp`` tensor-parallel ranks. Of
    more than there are, each rank has the slice of one by itself. Models that allow no such split are whole."""
    models = {role: _slim(plan, plan.model(role), role, depth, tp) for role in plan.graph.roles}
    return plan.spec.model_copy(update={"models": plan.spec.models.model_copy(update=models)})


def _slim(plan: Plan, model: ModelSpec, role: str, depth: int, tp: int) -> ModelSpec:
    config, shape = dict(model.init or {}), plan.shapes.get(role)
    kinds = config.get("layer_types")
    changed: dict[str, object] = {"num_hidden_layers": depth} | ({"layer_types": kinds[:depth]} if kinds else {})
    if tp == 1 or shape is None or tp not in _slices(model, shape, tp):
        return model.model_copy(update={"init": config | changed})
    if plan.placement.num_ranks % tp == 0:
        return model.model_copy(update={"init": config | changed, "tp": tp})
    # without ids of the whole vocabulary
    config = {key: value for key, value in config.items() if not key.endswith("_token_id")}
    return model.model_copy(update={"init": config | changed | _slice(shape, model.facts, tp)})


def _slice(shape: ModelShape, facts: EngineFacts, tp: int) -> dict[str, object]:
    """Return the sizes of a model's slice on one of ``tp`` ranks."""
    sizes = shape.sizes
    assert sizes is not None, "shapes without sizes have no slices"
    splits_head = facts.vocabulary_multiple or not (shape.is_tied or sizes.vocabulary % tp)
    return {
        "num_attention_heads": sizes.heads // tp,
        "num_key_value_heads": sizes.kv_heads // tp,
        "head_dim": sizes.head_dim,
        "intermediate_size": sizes.ffn // tp,
        "vocab_size": -(-sizes.vocabulary // tp) if splits_head else sizes.vocabulary,
    }


def _slices(model: ModelSpec, shape: ModelShape, most: int) -> tuple[int, ...]:
    """Return the powers of two, at most ``most``, that may be the tensor-parallel ranks of a model."""
    powers = (2**power for power in range(most.bit_length()) if 2**power <= most)
    if shape.sizes is None or shape.sizes.family not in Families.LLAMA_LIKE or not model.facts.searches_tp:
        return (1,)
    sizes = shape.sizes
    return tuple(tp for tp in powers if not (sizes.heads % tp or sizes.kv_heads % tp or sizes.ffn % tp))


def _origin(model: ModelSpec, command_plans: Sequence[Plan]) -> ModelSpec:
    """Return the model that ``model`` starts from, through the runs of the command that write its weights."""
    pending = {path: plan.model(role) for plan in command_plans for path, role in plan.outputs.items()}
    return model.origin(pending)


def profiled_models(plan: Plan, most_tp: int = 1) -> list[ProfiledModel]:
    """Return one model for each shape, engine and dtype of a profiling ``plan``, with slices of at most ``most_tp``
    tensor-parallel ranks. Raises UserError for a family of unknown shape."""
    models: dict[object, ProfiledModel] = {}
    # a trained role comes first; adapters make another shape
    for placed in sorted(plan.placement.models, key=lambda placed: not placed.trained):
        model = _profiled_model(plan, placed, most_tp)
        key = (model.transformer, placed.engine, model.item)
        first = models.get(key, model)
        models[key] = replace(first, operators={**model.operators, **first.operators})
    found: list[ProfiledModel] = []
    for model in models.values():
        trunk = next((each.transformer for each in found if _has_layers_of(each, model)), None)
        found.append(model if trunk is None else replace(model, slices=(1,), trunk=trunk))
    return found


def _has_layers_of(first: ProfiledModel, model: ProfiledModel) -> bool:
    """Whether ``first`` has the layers of ``model``, under another head, and runs the same calls in the same engine."""
    own = model.transformer
    if (first.placed.engine, first.item, first.trunk) != (model.placed.engine, model.item, None):
        return False
    return (
        replace(first.transformer, head=own.head, tied=own.tied) == own
        and model.operators.keys() <= first.operators.keys()
    )


def _profiled_model(plan: Plan, model: PlacedModel, most_tp: int) -> ProfiledModel:
    operators: dict[str, Operator] = {
        o.kind: o.of_whole_responses
        for o in reversed(plan.graph.operators)
        if o.role == model.role and o.kind in MEASURED_KINDS
    }
    shape = plan.shapes.get(model.role)
    if shape is None or shape.sizes is None:
        raise UserError(f"models.{model.role}: the config of this model family does not contain its sizes")
    slices = _slices(model.settings, shape, most_tp)
    return ProfiledModel(model, transformer_of(shape, model.head, is_adapted=True), operators, slices)


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
    prompts = plan.data.prompt_lengths() or _upper_half(plan.lengths.prompt)
    return LengthSample(prompts, plan.data.response_lengths() or _upper_half(plan.lengths.response))


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

    @property
    def all(self) -> tuple[int, ...]:
        return (*self.needed, *self.further)


@dataclass(frozen=True)
class RowCounts:
    """Rows of a replica at which calls are measured.

    combine:  for combines
    passes:   for forward and training passes, of one pass each
    decode:   for generation
    """

    combine: MeasuredRows
    passes: MeasuredRows
    decode: MeasuredRows


def row_counts(plan: Plan, settings: ModelSpec, tokens: float) -> RowCounts:
    """Return row counts for replicas of one rank: whole prompts, in powers of two for what is made of layers.

    ``tokens``: of a row, in the mean.
    """
    replicas, samples = plan.placement.num_ranks, plan.batch.samples_per_prompt
    share, scale = plan.batch.num_rows / replicas, min(replicas, MAX_SCALE)

    def whole_prompts(*counts: float) -> tuple[int, ...]:
        return tuple(sorted({samples * max(1, round(count / samples)) for count in counts}))

    def powers(most: float) -> MeasuredRows:
        prompts = min(plan.batch.num_prompts, most / samples)
        counts = [2**power for power in range(30) if 2**power <= max(1.0, prompts)]
        every = -(-len(counts) // MOST_COUNTS)
        rows = [samples * count for count in counts[::-every][::-1]]
        # one more than the share of a replica, so that it lies between two measured ones
        needed = min(len(rows), 1 + sum(count < share for count in rows))
        return MeasuredRows(tuple(rows[:needed]), tuple(rows[needed:]))

    needed = whole_prompts(share / 4, share)
    further = tuple(each for each in whole_prompts(scale * share) if each not in needed)
    return RowCounts(
        combine=MeasuredRows(needed, further),
        passes=powers(settings.micro_batch_tokens / tokens),
        decode=powers(settings.generate_tokens / plan.lengths.total),
    )
