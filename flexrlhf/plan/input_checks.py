"""Tokenizer and examples of a run, and the checks of all its inputs. Bad ones raise UserError."""

from __future__ import annotations

import hashlib
import json
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from os.path import realpath
from pathlib import Path
from typing import Any

from flexrlhf.config.spec import ModelSpec
from flexrlhf.config.user_paths import instead_of
from flexrlhf.data.chat import ChatFormat, read_chat_format
from flexrlhf.data.data_counts import DataCounts
from flexrlhf.data.examples import Example, LoadedExamples, load_examples, read_texts
from flexrlhf.data.files import is_present, json_type
from flexrlhf.data.order import SourceShare
from flexrlhf.data.retokenized import TextEncoder
from flexrlhf.errors import UserError
from flexrlhf.operators.graph import reads_texts
from flexrlhf.plan.algorithm_graph import heads_of
from flexrlhf.plan.architectures import check_architecture
from flexrlhf.plan.data_sources import DataSource, data_sources
from flexrlhf.plan.end_tokens import end_tokens
from flexrlhf.plan.model_checks import check_packages
from flexrlhf.plan.models import origins_first
from flexrlhf.plan.plan import Plan
from flexrlhf.plan.tokenizers import tokenizer_of
from flexrlhf.plan.vocabulary import has_tokenizer
from flexrlhf.rewards.checks import check_columns, check_present_functions, check_sources
from flexrlhf.weights.adapter_files import base_model
from flexrlhf.weights.loading import one_sentence_errors, quiet
from flexrlhf.weights.model_files import INDEX, SINGLE, check_regular, weight_files
from flexrlhf.weights.shapes import read_config


@dataclass(frozen=True)
class RunData:
    """Examples of a run and the special tokens of its tokenizer.

    examples:       training rows, source after source
    evaluation:     evaluation rows
    texts:          pretraining texts of ``algorithm.ptx``
    tokenizer:      its directory
    eos_token_ids:  all tokens that end a response; the tokenizer's eos is the first
    pad_token_id:   padding token; the end token where the tokenizer has none
    is_trusted:     whether code in the tokenizer's directory may run
    shares:         parts of the training rows by source, and how often they come
    counts:         lengths of all rows of each source, by its key
    """

    examples: list[Example]
    evaluation: list[Example]
    texts: list[Example]
    tokenizer: str
    eos_token_ids: tuple[int, ...]
    pad_token_id: int
    is_trusted: bool = False
    shares: tuple[SourceShare, ...] = ()
    counts: Mapping[str, DataCounts] = field(default_factory=dict)


def tokenizer_path(plan: Plan) -> str:
    """Return the directory in ``data.tokenizer``, else that of the first model with a path."""
    if plan.spec.data.tokenizer is not None:
        return plan.spec.data.tokenizer
    paths = [path for role in plan.graph.roles if (path := plan.model(role).path) is not None]
    if not paths:
        raise UserError("data.tokenizer: missing; no model has a path to take a tokenizer from")
    return paths[0]


def tokenizer_key(plan: Plan) -> str:
    """Return the setting that names the directory of ``tokenizer_path``."""
    if plan.spec.data.tokenizer is not None:
        return "data.tokenizer"
    role = next((role for role in plan.graph.roles if plan.model(role).path is not None), None)
    return "data.tokenizer" if role is None else f"models.{role}.path"


def load_run_tokenizer(plan: Plan) -> Any:
    """Return the Hugging Face tokenizer of a run. Raises UserError with the setting that names it."""
    return load_tokenizer(tokenizer_path(plan), trusts_tokenizer(plan), tokenizer_key(plan))


def load_tokenizer(path: str, trust_remote_code: bool = False, key: str = "data.tokenizer") -> Any:
    """Return the Hugging Face tokenizer in a directory; code in it runs only with ``trust_remote_code``. ``key``: names
    it in messages."""
    from transformers import AutoTokenizer

    if not Path(path).is_dir():
        raise UserError(f"{key} {path}: no such directory{instead_of(Path(path), Path.is_dir)}")
    _check_tokenizer_files(Path(path), key)
    with one_sentence_errors(f"{key} {path}"), quiet():
        try:
            tokenizer = AutoTokenizer.from_pretrained(path, trust_remote_code=trust_remote_code)
        except (OSError, ValueError) as error:
            raise UserError(_no_tokenizer(Path(path), key, error)) from None
        # some wrong settings are noticed by the first text
        tokenizer.encode("text", add_special_tokens=False)
        return tokenizer


def _no_tokenizer(directory: Path, key: str, error: Exception) -> str:
    """Return the sentence for a directory from which no tokenizer is read, with what can be done."""
    reason = str(error).partition("\n")[0].rstrip(": ") if has_tokenizer(directory) else "no tokenizer.json"
    other = ", or name one in data.tokenizer" if key.endswith(".path") else ""
    return f"{key} {directory}: no tokenizer in it ({reason}); copy one there{other}"


def _check_tokenizer_files(directory: Path, key: str) -> None:
    """Raise UserError for files that no tokenizer is read from: pipes, and JSON that is no mapping."""
    for file in sorted(directory.iterdir()):
        check_regular(f"{key} {directory}", file)
        if file.name not in ("tokenizer.json", "tokenizer_config.json") or not file.is_file():
            continue
        try:
            contents = json.loads(file.read_bytes())
        except (OSError, ValueError, RecursionError) as error:
            raise UserError(f"{key} {directory}: {file.name} cannot be read as JSON ({error})") from None
        if not isinstance(contents, dict):
            found = json_type(contents)
            raise UserError(f"{key} {directory}: {file.name} must contain an object, found {found}")


def trusts_tokenizer(plan: Plan) -> bool:
    """Whether code in the tokenizer's directory may run: whether it is a model's directory whose code is trusted."""
    path = Path(realpath(tokenizer_path(plan)))
    models = [model for role in plan.graph.roles if (model := plan.model(role)).trust_remote_code]
    return any(model.path is not None and Path(realpath(model.path)) == path for model in models)


def load_run_data(plan: Plan) -> RunData:
    """Load the examples for training and for evaluation."""
    path, chat = tokenizer_path(plan), chat_format(plan)
    tokenizer = load_run_tokenizer(plan)
    if tokenizer.eos_token_id is None:
        raise UserError(f"{tokenizer_key(plan)} {path}: it has no end-of-sequence token")
    sources = data_sources(plan)
    found = {source.key: _examples(plan, source, tokenizer) for source in sources}
    loaded, counts = {key: each.examples for key, each in found.items()}, {key: found[key].counts for key in found}
    training = [source for source in sources if source.is_training]
    examples = [example for source in training for example in loaded[source.key]]
    shares = tuple(SourceShare(len(loaded[source.key]), source.parts) for source in training)
    pad = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else tokenizer.eos_token_id
    evaluation, texts = (loaded.get(key, []) for key in ("eval", "algorithm.ptx"))
    ends = end_tokens(tokenizer, chat.template, plan.model("actor") if "actor" in plan.graph.roles else None)
    return RunData(examples, evaluation, texts, path, ends, pad, trusts_tokenizer(plan), shares, counts)


def chat_format(plan: Plan) -> ChatFormat:
    """Return which rows a chat template renders, and the template that the spec names."""
    return read_chat_format(plan.spec.data.chat, plan.spec.data.chat_template)


def data_digest(data: RunData) -> str:
    """Return a digest of the training examples: two data files, tokenizers or templates have different ones."""
    digest = hashlib.sha256()
    for example in (*data.examples, *data.texts):
        for tokens in (example.prompt, *example.responses):
            digest.update(array("q", (len(tokens), *tokens)).tobytes())
        for mask in example.trained:
            digest.update(bytes(mask))
    return digest.hexdigest()


def check_runs(plans: Sequence[Plan]) -> None:
    """Check all inputs of a command before a rank starts, so that a bad one leaves nothing half-written.

    Raises UserError. What an earlier run of the command writes does not exist yet: a run that takes its tokenizer from
    there has its texts checked here and its tokens by its ranks.
    """
    for index, plan in enumerate(plans):
        check_packages(plan.placement)
        check_sources(plan.spec.reward or (), "reward")
        check_sources(plan.spec.cost or (), "cost")
        _check_sources(plan, plans, index)
        pending = {path for earlier in plans[:index] for path in earlier.outputs}
        for source in data_sources(plan):
            _check_texts(plan, source)
        chat_format(plan)
        if Path(realpath(tokenizer_path(plan))) in pending:
            continue
        data = load_run_data(plan)
        tokens = _tokens(plan, data)
        for role in origins_first(plan.graph):
            if plan.model(role).path is None or Path(realpath(plan.model(role).path or "")) not in pending:
                _check_model(plan, role, tokens)
                _check_retokenized(plan, role, data)


@dataclass(frozen=True)
class _Tokens:
    """Tokens that a run's models have to embed.

    number:   of the tokenizer.
    largest:  largest one in the data, or of those for end and padding.
    """

    number: int
    largest: int


def _tokens(plan: Plan, data: RunData) -> _Tokens:
    rows = [*data.examples, *data.evaluation, *data.texts]
    largest = max((max(ids) for row in rows for ids in (row.prompt, *row.responses) if ids), default=0)
    number = len(load_tokenizer(data.tokenizer, data.is_trusted))
    return _Tokens(number, max(largest, data.pad_token_id, *data.eos_token_ids))


def check_present_data(plan: Plan) -> None:
    """Check those data files and reward functions that exist already, as far as that needs no tokenizer.

    Raises UserError.
    """
    sections = {"reward": plan.spec.reward or (), "cost": plan.spec.cost or ()}
    has_functions = all([check_present_functions(sources, name) for name, sources in sections.items()])
    for source in data_sources(plan):
        if is_present(source.path):
            _check_texts(plan, source, has_functions)


def _check_texts(plan: Plan, source: DataSource, with_functions: bool = True) -> None:
    """Check the rows of a data file, and that they have the columns that the sources of their scores need."""
    texts = read_texts(source.path, form=source.form, needs=source.needs, layout=source.layout)
    operators = plan.graph.operators if source.is_training else plan.graph.evaluation if source.key == "eval" else ()
    sections = {"reward": plan.spec.reward or (), "cost": plan.spec.cost or ()}
    names = sorted({each.function for each in operators if each.kind == "score"})
    columns = dict.fromkeys(key for text in texts for key in text.columns) if names else {}
    for name in names:
        check_columns(sections[name], name, columns, source.path, with_functions)


def _check_sources(plan: Plan, plans: Sequence[Plan], index: int) -> None:
    """Refuse inputs in a directory that a run of the command starts afresh, except for models of an earlier one."""
    models = {f"models.{role}.path": path for role in plan.graph.roles if (path := plan.model(role).path) is not None}
    others: dict[str, str | None] = {source.setting: source.path for source in data_sources(plan)}
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


def _check_model(plan: Plan, role: str, tokens: _Tokens) -> None:
    """Check for weights, an embedding of every token and enough positions: on a rank the error would be obscure."""
    model = plan.model(role)
    whole = base_model(role, model).path
    if whole is not None and not weight_files(f"models.{role}.path", Path(whole)):
        raise UserError(f"models.{role}.path {whole}: no weights in it (no file {SINGLE} or {INDEX})")
    loaded = check_architecture(role, model, heads_of(plan.graph)[role], role in plan.graph.trained or model.new_head)
    size, config = getattr(loaded.get_text_config(), "vocab_size", None), read_config(role, model)
    if model.retokenize:
        _check_text_limit(role, model, config)
        return
    if size is not None and size < tokens.number:
        raise UserError(f"models.{role}: vocab_size {size} is smaller than the {tokens.number} tokens of the tokenizer")
    if size is not None and size <= tokens.largest:
        raise UserError(
            f"models.{role}: vocab_size {size} has no token {tokens.largest}, which the tokenizer "
            f"{tokenizer_path(plan)} gives; use the model's own tokenizer"
        )
    width, limit = plan.lengths.prompt + plan.lengths.response, config.get("max_position_embeddings")
    if limit is not None and width > limit:
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


def text_encoder(plan: Plan, role: str) -> TextEncoder:
    """Return the encoder of texts for a role with a tokenizer of its own."""
    model = plan.model(role)
    directory = tokenizer_of(role, model)
    assert directory is not None, "planning refuses a role without a tokenizer"
    tokenizer = load_tokenizer(str(directory), model.trust_remote_code, f"models.{role}.retokenize")
    return TextEncoder(f"models.{role}.retokenize", tokenizer, plan.lengths.of_role(role).total)


def _check_retokenized(plan: Plan, role: str, data: RunData) -> None:
    """Encode the first prompt of each file for a role with a tokenizer of its own, as its ranks would."""
    if plan.model(role).retokenize:
        encoder = text_encoder(plan, role)
        for example in (*data.examples[:1], *data.evaluation[:1]):
            encoder.encode(example, "", is_finished=True)


def _examples(plan: Plan, source: DataSource, tokenizer: Any) -> LoadedExamples:
    data = plan.spec.data
    return load_examples(
        source.path,
        form=source.form,
        needs=source.needs,
        tokenizer=tokenizer,
        max_prompt_tokens=data.max_prompt_tokens,
        max_response_tokens=data.max_response_tokens,
        long_prompts=data.long_prompts,
        layout=source.layout,
        with_columns=source.needs == "prompts"
        and any(reads_texts(operator) for operator in (*plan.graph.operators, *plan.graph.evaluation)),
        chat=chat_format(plan),
    )
