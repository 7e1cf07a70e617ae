"""Texts of one tokenizer in the tokens of another: a prompt and a response as a model of another family reads them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from flexrlhf.data.examples import Example
from flexrlhf.data.messages import Message
from flexrlhf.errors import UserError

ASSISTANT_ROLE = "assistant"


@dataclass(frozen=True)
class TextEncoder:
    """Encoder of texts for one model.

    key:        how messages name it
    tokenizer:  its tokenizer, of Hugging Face
    limit:      most tokens of a text; of a longer one the first tokens are cut off
    """

    key: str
    tokenizer: Any
    limit: int

    def encode(self, example: Example, response: str, is_finished: bool) -> tuple[list[int], bool]:
        """Return the tokens of a prompt with a response to it, and whether some were cut off.

        A chat is rendered by the model's own template. A text gets what the tokenizer adds to texts, and its end token
        behind a response that ``is_finished``. Raises UserError for a chat that no template renders.
        """
        ids = self._chat(example.turns, response) if example.turns else self._text(example.text + response, is_finished)
        return ids[-self.limit :], len(ids) > self.limit

    def _text(self, text: str, is_finished: bool) -> list[int]:
        ids, end = list(self.tokenizer.encode(text)), self.tokenizer.eos_token_id
        if end is not None and (not ids or (is_finished and ids[-1] != end)):
            ids.append(end)
        if not ids:
            raise UserError(f"{self.key}: its tokenizer has no token for an empty text; give a model with an end token")
        return ids

    def _chat(self, turns: Sequence[Message], response: str) -> list[int]:
        """Return the tokens of a chat; a last turn of the assistant goes on with the response."""
        from jinja2 import TemplateError

        if not getattr(self.tokenizer, "chat_template", None):
            raise UserError(
                f"{self.key}: the data is chat, and its tokenizer has no chat template; copy that of the model into "
                f"its directory"
            )
        messages = [{"role": turn.role, "content": turn.content} for turn in turns]
        if messages[-1]["role"] == ASSISTANT_ROLE:
            messages[-1]["content"] += response
        else:
            messages.append({"role": ASSISTANT_ROLE, "content": response})
        try:
            text = self.tokenizer.apply_chat_template(messages, tokenize=False)
        except (TemplateError, TypeError, ValueError, LookupError) as error:
            reason = " ".join(str(error).split()) or type(error).__name__
            raise UserError(f"{self.key}: its chat template refuses the turns ({reason:.300})") from None
        # a template writes bos itself
        return list(self.tokenizer.encode(text, add_special_tokens=False))
