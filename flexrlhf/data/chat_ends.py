"""Ends of turns that a chat template is to write, in addition to its own text."""

from __future__ import annotations

import json
from typing import Any

from flexrlhf.errors import UserError, nearest

EOS = "eos"
"""Name of the tokenizer's own end token, as an end of turns."""
_END_OF_EACH = (
    "{%- set ended = namespace(turns=[]) -%}{%- for turn in messages -%}"
    "{%- if turn.role == 'assistant' and turn.content is string and not turn.tool_calls"
    " and not turn.content.endswith(END) -%}"
    "{%- set ended.turns = ended.turns + [dict(turn, content=turn.content + END)] -%}"
    "{%- else -%}{%- set ended.turns = ended.turns + [turn] -%}{%- endif -%}"
    "{%- endfor -%}{%- set messages = ended.turns %}"
)
"""Front of a template that appends END to the text of each turn of the assistant."""
_END_OF_LAST = "{%- if not add_generation_prompt and messages[-1].role == 'assistant' -%}{{- END -}}{%- endif -%}"
"""Rest of a template that appends END to a chat that ends with a turn of the assistant."""


def with_end_of_each(template: str, end: str) -> str:
    """Return a template that writes ``end`` behind the text of each turn of the assistant."""
    return _END_OF_EACH.replace("END", _literal(end)) + template


def with_end_of_last(template: str, end: str) -> str:
    """Return a template that writes ``end`` behind a chat that ends with a turn of the assistant."""
    return template + _END_OF_LAST.replace("END", _literal(end))


def end_token(tokenizer: Any, end: str) -> str:
    """Return the token named ``end``, its text or ``eos``. Raises UserError if the tokenizer has none of this name."""
    if end == EOS:
        return str(tokenizer.eos_token)
    known = sorted(str(token) for token in tokenizer.added_tokens_decoder.values())
    if end not in known:
        raise UserError(f"data.end_token {end!r} is no special token of the tokenizer{nearest(end, [EOS, *known])}")
    return end


def _literal(text: str) -> str:
    """Return a text as Jinja writes it."""
    return json.dumps(text, ensure_ascii=False)
