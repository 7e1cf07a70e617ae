"""Tokens that end a response: eos, those of the policy's generation_config.json, and the end of an assistant's turn."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from flexrlhf.config.spec import ModelSpec
from flexrlhf.data.chat import ChatTemplate, own_template
from flexrlhf.errors import UserError, shown
from flexrlhf.weights.adapter_files import base_model

GENERATION_CONFIG, CHAT_TEMPLATE = "generation_config.json", "chat_template.jinja"
"""Files of a model's directory."""


def end_tokens(tokenizer: Any, template: str | None, policy: ModelSpec | None) -> tuple[int, ...]:
    """Return the ids of all tokens that end a response, that of the tokenizer's eos first.

    template: the run's chat template; None: the tokenizer's, if it has one.
    policy:   the model that generates; None: there is none.
    """
    own = _listed_ids(policy) if policy is not None else ()
    return tuple(dict.fromkeys((tokenizer.eos_token_id, *own, *_turn_end(tokenizer, template))))


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


def _listed_ids(policy: ModelSpec) -> tuple[int, ...]:
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
    """Return the contents of the policy's generation config; nothing where it has none."""
    path = base_model("actor", policy).path
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


def _turn_end(tokenizer: Any, template: str | None) -> tuple[int, ...]:
    """Return the id of the token that the chat template writes behind an assistant's turn, if it is a special one."""
    if template is None and own_template(tokenizer) is None:
        return ()
    text = ChatTemplate(tokenizer, template).turn_end().lstrip()
    first = tokenizer.encode(text, add_special_tokens=False)[:1] if text else []
    return tuple(token for token in first if token in tokenizer.added_tokens_decoder)
