"""Checks of all inputs of runs before a rank starts: models, tokenizers, rows, and sources of scores."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from os.path import realpath
from pathlib import Path
from typing import Any

from flexrlhf.config.environment_settings import BY_TEMPLATE, EnvironmentSpec
from flexrlhf.config.model_families import Families
from flexrlhf.config.model_settings import Head, ModelSpec
from flexrlhf.data.files import is_present
from flexrlhf.data.messages import Message
from flexrlhf.environments.sources import check_environment
from flexrlhf.environments.tool_schemas import EnvironmentTools
from flexrlhf.errors import UserError, nearest, shown, some_of
from flexrlhf.plan.algorithm_graph import heads_of
from flexrlhf.plan.model_checks import check_packages, check_run_engines
from flexrlhf.plan.models import origins_first
from flexrlhf.plan.plan import Plan
from flexrlhf.plan.run_data import DataSource, RunData
from flexrlhf.plan.run_tokenizer import (
    listed_end_tokens,
    load_tokenizer,
)
from flexrlhf.rewards.checks import SourceChecks
from flexrlhf.weights.loading import is_native, load_config, one_sentence_errors
from flexrlhf.weights.parameters import ParameterName
from flexrlhf.weights.shapes import read_config
from flexrlhf.weights.stored_model import StoredModel

ACTIVATIONS = ("hidden_act", "hidden_activation", "activation_function")
"""Settings of an activation in the configs of transformers' families."""


def check_runs(plans: Sequence[Plan]) -> None:
    """Check all inputs of a command before a rank starts, so that a bad one leaves nothing half-written.

    Raises UserError. Outputs of an earlier run of the command do not exist yet: a run that takes its tokenizer from
    there has its texts checked here and its tokens by its ranks.
    """
    check_inputs(plans, is_run=True)
    for index, plan in enumerate(plans):
        pending = {path for earlier in plans[:index] for path in earlier.outputs}
        plan.tokenizer.chat()
        if Path(realpath(plan.tokenizer.path)) in pending:
            continue
        data = plan.data.load()
        tokenizer = load_tokenizer(data.tokenizer, data.is_trusted)
        if plan.spec.environment is not None and plan.spec.environment.tool_format == BY_TEMPLATE:
            EnvironmentTools(plan.spec.environment).with_known_form(plan.data.turn_tokens(tokenizer))
        number, largest = len(tokenizer), _largest_token(data)
        for role in origins_first(plan.graph):
            if plan.model(role).path is None or Path(realpath(plan.model(role).path or "")) not in pending:
                _check_model(plan, role, number, largest)
                _check_retokenized(plan, role, data)


def check_inputs(plans: Sequence[Plan], is_run: bool = False) -> None:
    """Check the models, data files and sources of scores of a command, as far as that needs no tokenizer.

    ``is_run``: whether the runs start on this machine: then all of them, libraries and environment variables have to
    be there, else the inputs that exist already are checked. Runs of which nothing exists yet load no torch. Raises
    UserError.
    """
    for index, plan in enumerate(plans):
        sections = {"reward": plan.spec.reward or (), "cost": plan.spec.cost or ()}
        if is_run:
            check_packages(plan.placement)
            check_run_engines(plan.placement, plan.shapes)
            if plan.spec.environment is not None:
                check_environment(plan.spec.environment)
        checks = [SourceChecks(sources, name) for name, sources in sections.items()]
        for each in checks:
            (each.check if is_run else each.check_forms)()
        has_functions = is_run or all([each.check_present_functions() for each in checks])
        _check_places(plan, plans, index)
        files = [source for source in plan.data.sources if is_run or is_present(source.path)]
        _check_models(plan, {path for earlier in plans[:index] for path in earlier.outputs}, bool(files))
        environment = plan.spec.environment
        has_class = environment is not None and (is_run or EnvironmentTools(environment).has_code)
        if environment is not None and has_class:
            EnvironmentTools(environment).check_class()
        for file in files:
            _check_texts(plan, file, has_functions, environment if has_class else None)


def _check_texts(
    plan: Plan, source: DataSource, with_functions: bool, environment: EnvironmentSpec | None = None
) -> None:
    """Check the rows of a data file, and that they have the columns that the sources of their scores need.

    ``environment``: whose class is there, and receives columns.
    """
    texts = plan.data.texts(source)
    operators = plan.graph.operators if source.is_training else plan.graph.evaluation if source.key == "eval" else ()
    sections = {"reward": plan.spec.reward or (), "cost": plan.spec.cost or ()}
    names = sorted({each.function for each in operators if each.kind == "score"})
    columns = dict.fromkeys(key for text in texts for key in text.columns) if names or environment else {}
    if environment is not None and (source.is_training or source.key == "eval"):
        EnvironmentTools(environment).check_class(columns)
    for name in names:
        checks = SourceChecks(sections[name], name)
        checks.check_columns(columns, source.path, with_functions)
        checks.check_solutions([text.columns for text in texts], source.path)


def _check_places(plan: Plan, plans: Sequence[Plan], index: int) -> None:
    """Refuse inputs in a directory that a run of the command starts afresh, except for models of an earlier one."""
    models = {f"models.{role}.path": path for role in plan.graph.roles if (path := plan.model(role).path) is not None}
    others: dict[str, str | None] = {source.setting: source.path for source in plan.data.sources}
    others |= {"data.tokenizer": plan.spec.data.tokenizer, "data.chat_template": plan.spec.data.chat_template}
    pending = {path for earlier in plans[:index] for path in earlier.outputs}
    for key, source in {**models, **others}.items():
        if source is None or Path(realpath(source)) in pending:
            continue
        for other in plans:
            if Path(realpath(source)).is_relative_to(realpath(other.spec.directory)):
                raise UserError(
                    f"{key} {source}: is in {other.spec.directory}, which run {other.spec.name!r} starts afresh; "
                    f"give that run another name"
                )


def _largest_token(data: RunData) -> int:
    rows = [*data.examples, *data.evaluation, *data.texts]
    largest = max((max(ids) for row in rows for ids in (row.prompt, *row.responses) if ids), default=0)
    return max(largest, data.pad_token_id, *data.eos_token_ids)


def _check_model(plan: Plan, role: str, num_tokens: int, largest_token: int) -> None:
    """Check for weights and an embedding of every token: on a rank the error would be obscure.

    num_tokens:     of the tokenizer
    largest_token:  of the data, and of end and padding
    """
    model = plan.model(role)
    _check_weights(StoredModel.of(role, model).whole)
    if model.retokenize:
        return
    size = getattr(load_config(role, model).get_text_config(), "vocab_size", None)
    if size is not None and size < num_tokens:
        raise UserError(f"models.{role}: vocab_size {size} is smaller than the {num_tokens} tokens of the tokenizer")
    if size is not None and size <= largest_token:
        raise UserError(
            f"models.{role}: vocab_size {size} has no token {largest_token}, which the tokenizer "
            f"{plan.tokenizer.path} gives; use the model's own tokenizer"
        )


def _check_weights(model: StoredModel) -> None:
    if model.path is not None and not model.files:
        raise UserError(f"{model.key} {model.path}: no weights in it (no file {model.SINGLE} or {model.INDEX})")


def _check_models(plan: Plan, pending: Collection[Path], has_data: bool) -> None:
    """Check the models whose directories are there and not ``pending``, and models without one."""
    for role in origins_first(plan.graph):
        path = plan.model(role).path
        if path is None or (Path(path).is_dir() and Path(realpath(path)) not in pending):
            _check_planned(plan, role, is_built=has_data or path is not None)


def _check_planned(plan: Plan, role: str, is_built: bool) -> None:
    """Raise UserError for a model that transformers cannot build, weights in another format, and longer texts than it
    has positions.

    A directory without any weights can be planned with. ``is_built``: whether to build it, which loads torch.
    """
    model = plan.model(role)
    if is_built:
        new_head = role in plan.graph.trained or model.new_head
        check_architecture(role, model, heads_of(plan.graph)[role], new_head)
    if role == "actor":
        listed_end_tokens(model)
    whole = StoredModel.of(role, model).whole
    if whole.path is not None and any(Path(whole.path).glob("*.bin")):
        _check_weights(whole)
    config = read_config(role, model)
    if model.retokenize:
        _check_text_limit(role, model, config)
        return
    width, limit = plan.lengths.prompt + plan.lengths.response, config.get("max_position_embeddings")
    if isinstance(limit, int) and width > limit:
        raise UserError(
            f"data: {plan.lengths.prompt} prompt and {plan.lengths.response} response tokens exceed the {limit} "
            f"positions of models.{role}; lower data.max_prompt_tokens or data.max_response_tokens"
        )


def _check_text_limit(role: str, model: ModelSpec, config: dict[str, Any]) -> None:
    """Raise UserError for longer texts than a model with its own tokenizer has positions."""
    limit, longest = config.get("max_position_embeddings"), model.max_text_tokens
    if isinstance(limit, int) and longest is not None and longest > limit:
        raise UserError(
            f"models.{role}.max_text_tokens: {longest} exceeds the {limit} positions of the model; use at most {limit}"
        )


def _check_retokenized(plan: Plan, role: str, data: RunData) -> None:
    """Encode the first prompt of each file for a role with a tokenizer of its own, as its ranks would."""
    if plan.model(role).retokenize:
        encoder, environment = plan.data.text_encoder(role), plan.spec.environment
        replier = "tool" if environment is not None and environment.tools else "user"
        turns = [Message("assistant", ""), *([Message(replier, "x"), Message("assistant", "")] if environment else [])]
        for example in (*data.examples[:1], *data.evaluation[:1]):
            encoder.encode(example, tuple(turns), is_finished=True)


def check_architecture(role: str, model: ModelSpec, head: Head, new_head: bool) -> Any:
    """Return the config of a role as an object of transformers. Raises UserError if its ranks could not load it.

    ``new_head``: whether files may lack a scalar head. Models with code of their own, which is trusted, are built by
    the ranks alone.
    """
    source = StoredModel.of(role, model)
    layers, new_head = source.layers, new_head or source.has_adapters
    model = model.model_copy(update={"path": source.whole.path})
    config = load_config(role, model)
    family = read_config(role, model)["model_type"]
    if is_native(family):
        built = _without_weights(role, model, config, head)
        if model.path is not None and family not in Families.LLAMA_LIKE:
            _check_files(role, model, built, {ParameterName.SCALAR_HEAD} if new_head else set())
        for number, directory in enumerate(layers):
            _check_adapters(role, directory, built if number == 0 else _without_weights(role, model, config, head))
    return config


def _check_adapters(role: str, directory: str, built: Any) -> None:
    """Raise UserError for adapters that do not fit a model, which is changed."""
    # slow to load, and only a model with adapters needs it
    from flexrlhf.weights.peft_files import check_adapters

    check_adapters(f"models.{role}.path {directory}", built, directory)


def _without_weights(role: str, model: ModelSpec, config: Any, head: Head) -> Any:
    """Return a model of the class that the ranks load, on the meta device."""
    import torch
    from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification
    from transformers.models.auto.modeling_auto import (
        MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
        MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES,
    )

    key, kind = StoredModel.of(role, model).where, config.model_type
    if head == "scalar":
        config.num_labels = 1
    names = MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES if head == "scalar" else MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
    if kind not in names:
        needed = "a scalar head" if head == "scalar" else "a language head"
        raise UserError(
            f"{key}: transformers has no {kind} model with {needed}; use a model such as {Families.LLAMA_LIKE[0]}"
        )
    auto = AutoModelForSequenceClassification if head == "scalar" else AutoModelForCausalLM
    try:
        with one_sentence_errors(key), torch.device("meta"):
            built = auto.from_config(config, trust_remote_code=False)
    except UserError:
        _check_names(key, config)
        raise
    if head == "scalar" and ParameterName.SCALAR_HEAD not in dict(built.named_parameters()):
        raise UserError(
            f"{key}: the head of {kind} is no {ParameterName.SCALAR_HEAD}, so it gives no score at each token; use a "
            f"model such as {Families.LLAMA_LIKE[0]}"
        )
    return built


def _check_names(key: str, config: Any) -> None:
    """Raise UserError for an activation, or a type of rotary embeddings, that transformers lacks."""
    from transformers.activations import ACT2CLS
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    ropes = ("default", *ROPE_INIT_FUNCTIONS)
    names: list[tuple[str, Any, Sequence[str]]] = [
        (name, getattr(config, name, None), list(ACT2CLS)) for name in ACTIVATIONS
    ]
    names.append(("rope_type", (getattr(config, "rope_parameters", None) or {}).get("rope_type"), ropes))
    for name, found, known in names:
        if found is not None and found not in known:
            raise UserError(
                f"{key}: transformers has no {name} {shown(found)}{nearest(str(found), known)}; use {some_of(known)}"
            )


def _check_files(role: str, model: ModelSpec, built: Any, optional: set[str]) -> None:
    """Raise UserError for files that lack weights of the model, or have others, unless their names are converted on
    loading.

    Files with names that the model does not have may be of an older form of the family; then the ranks check. A
    directory without any weights can be planned with. ``built``: the model, on the meta device.
    """
    assert model.path is not None, "a model without files has none to check"
    stored = StoredModel.of(role, model).tensors
    if not stored:
        return
    shapes = {name: tuple(parameter.shape) for name, parameter in built.named_parameters()}
    found, key = stored.named_as(shapes), StoredModel.of(role, model).where
    missing = set(shapes) - set(found) - {ParameterName.SCALAR_HEAD}
    others = {name for name in found if name not in shapes and name.endswith((".weight", ".bias"))}
    if missing and others:
        return
    stored.check(key, shapes, optional)
    buffers = [name for name, _ in built.named_buffers()]
    ignored = getattr(built, "_keys_to_ignore_on_load_unexpected", None) or ()
    found.check_left_over(key, [*shapes, *buffers], read_config(role, model), ignored)
