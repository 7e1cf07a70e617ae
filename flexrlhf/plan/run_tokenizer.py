"""Tokenizer of a run: where it is and how it is loaded, its chat format, and the tokens that end a response."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from os.path import realpath
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flexrlhf.config.model_settings import ModelSpec
from flexrlhf.config.user_paths import instead_of
from flexrlhf.data.chat import ChatFormat, ChatTemplate
from flexrlhf.data.files import json_type
from flexrlhf.environments.tool_schemas import EnvironmentTools
from flexrlhf.errors import UserError, shown
from flexrlhf.plan.tokenizers import has_tokenizer, tokenizer_source
from flexrlhf.weights.loading import one_sentence_errors, quiet
from flexrlhf.weights.model_files import check_regular
from flexrlhf.weights.stored_model import StoredModel

if TYPE_CHECKING:
    from flexrlhf.plan.plan import Plan

GENERATION_CONFIG, CHAT_TEMPLATE = "generation_config.json", "chat_template.jinja"
"""Files of a model's directory."""


@dataclass(frozen=True)
class RunTokenizer:
    """Tokenizer of the run of ``plan``, which need not be there yet."""

    plan: Plan

    @property
    def path(self) -> str:
        """Directory. Raises UserError if no setting names one."""
        return self.named[1]

    @property
    def named(self) -> tuple[str, str]:
        """Setting that names it, and its directory. Raises UserError if there is none."""
        source = tokenizer_source(self.plan.spec, self.plan.graph)
        if source is None:
            raise UserError("data.tokenizer: missing; no model has a path to take a tokenizer from")
        return source

    def load(self) -> Any:
        """Return the Hugging Face tokenizer of a run.

        Raises UserError with the setting that names it, also for one without a token that ends a response.
        """
        key, path = self.named
        tokenizer = load_tokenizer(path, self.is_trusted, key)
        if tokenizer.eos_token_id is None:
            raise UserError(f"{key} {path}: it has no end-of-sequence token")
        return tokenizer

    @property
    def is_trusted(self) -> bool:
        """Whether code in its directory may run: whether it is a model's directory whose code is trusted."""
        path = Path(realpath(self.path))
        models = [model for role in self.plan.graph.roles if (model := self.plan.model(role)).trust_remote_code]
        return any(model.path is not None and Path(realpath(model.path)) == path for model in models)

    def chat(self) -> ChatFormat:
        """Return the chat format: which rows a chat template renders, and the template that the spec names."""
        data = self.plan.spec.data
        return replace(ChatFormat.read(data.chat, data.chat_template), control=data.control_tokens, end=data.end_token)

    @property
    def prompt_format(self) -> ChatFormat:
        """Chat format with the tools of the environment, whose code another process loads."""
        environment = self.plan.spec.environment
        return replace(self.chat(), tools=() if environment is None else EnvironmentTools(environment).schemas())


def load_tokenizer(path: str, trust_remote_code: bool = False, key: str = "data.tokenizer") -> Any:
    """Return the Hugging Face tokenizer in a directory; code in it runs only with ``trust_remote_code``. ``key``: names
    it in messages."""
    from transformers import AutoTokenizer

    if not Path(path).is_dir():
        raise UserError(f"{key} {path}: no such directory{instead_of(Path(path))}")
    _check_tokenizer_files(Path(path), key)
    with one_sentence_errors(f"{key} {path}"), quiet():
        try:
            tokenizer = AutoTokenizer.from_pretrained(path, trust_remote_code=trust_remote_code)
        except (OSError, ValueError) as error:
            reason = str(error).partition("\n")[0].rstrip(": ") if has_tokenizer(Path(path)) else "no tokenizer.json"
            other = ", or name one in data.tokenizer" if key.endswith(".path") else ""
            raise UserError(f"{key} {path}: no tokenizer in it ({reason}); copy one there{other}") from None
        # some wrong settings are noticed by the first text
        tokenizer.encode("text", add_special_tokens=False)
        return tokenizer


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


def end_tokens(tokenizer: Any, chat: ChatFormat, policy: ModelSpec | None) -> tuple[int, ...]:
    """Return the ids of all tokens that end a response, the tokenizer's eos first.

    chat:    the run's chat format; without a template, the tokenizer's is taken, if it has one.
    policy:  the model that generates; None: there is none.
    """
    own = listed_end_tokens(policy) if policy is not None else ()
    template = ChatTemplate.of(tokenizer, chat)
    of_turns = () if template is None else template.end_tokens()
    return tuple(dict.fromkeys((tokenizer.eos_token_id, *own, *of_turns)))


def saved_template(tokenizer: Any, chat: ChatFormat) -> str | None:
    """Return the text of the chat template that is saved with a model; None if the tokenizer's own is."""
    template = None if chat.end is None else ChatTemplate.of(tokenizer, chat)
    return chat.template if template is None else template.text


def usage_files(
    template: str | None, policy: ModelSpec | None, eos_token_ids: tuple[int, ...], pad_token_id: int
) -> dict[str, str]:
    """Return the text of files that are saved with a trained model, by name.

    The run's own chat template, and of a policy the generation config of its origin with the run's end tokens.
    """
    files = {} if template is None else {CHAT_TEMPLATE: template}
    if policy is None:
        return files
    kept = {key: value for key, value in _read(policy).items() if key != "_from_model_config"}
    eos = list(eos_token_ids) if len(eos_token_ids) > 1 else eos_token_ids[0]
    settings = {"pad_token_id": pad_token_id, **kept, "eos_token_id": eos}
    return files | {GENERATION_CONFIG: json.dumps(settings, indent=2) + "\n"}


def listed_end_tokens(policy: ModelSpec) -> tuple[int, ...]:
    """Return the end tokens in the policy's generation config. Raises UserError for others than token ids."""
    found = _read(policy).get("eos_token_id")
    ids = found if isinstance(found, list) else [] if found is None else [found]
    for token in ids:
        if not isinstance(token, int) or isinstance(token, bool) or token < 0:
            raise UserError(
                f"models.actor.path {policy.path}: eos_token_id in {GENERATION_CONFIG} must be a token id or a list of "
                f"them, found {shown(token)}"
            )
    return tuple(ids)


def _read(policy: ModelSpec) -> dict[str, Any]:
    """Return the contents of the policy's generation config; nothing if it has none."""
    path = StoredModel.of("actor", policy).whole.path
    file = None if path is None else Path(path) / GENERATION_CONFIG
    if file is None or not file.is_file():
        return {}
    try:
        contents = json.loads(file.read_bytes())
    except (OSError, ValueError, RecursionError) as error:
        raise UserError(f"models.actor.path {path}: {GENERATION_CONFIG} cannot be read as JSON ({error})") from None
    if not isinstance(contents, dict):
        raise UserError(f"models.actor.path {path}: {GENERATION_CONFIG} must contain an object")
    return contents
