"""Texts of one tokenizer in the tokens of another: a prompt and a response as a model of another family reads them."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from flexrlhf.config.data_settings import ControlUse
from flexrlhf.data.chat import ChatTemplate, own_template
from flexrlhf.data.control_tokens import ControlTokens
from flexrlhf.data.examples import Example
from flexrlhf.data.messages import Chat, Message, is_assistant
from flexrlhf.data.text_example import TextExample
from flexrlhf.errors import UserError


@dataclass(frozen=True)
class TextEncoder:
    """Encoder of texts for one model.

    key:        how messages name it
    tokenizer:  its tokenizer, of Hugging Face
    limit:      most tokens of a text; of a longer one the first tokens are cut off
    control:    use of control tokens of the tokenizer in prompts; in responses they are text
    """

    key: str
    tokenizer: Any
    limit: int
    control: ControlUse = "auto"

    def encode(self, example: Example, response: str, is_finished: bool) -> tuple[list[int], bool]:
        """Return the tokens of a prompt with a response to it, and whether some were cut off.

        A chat is rendered by the model's own template. A text gets what the tokenizer adds to texts, and its end token
        behind a response that ``is_finished``. Raises UserError for a chat that no template renders.
        """
        row = self._controls.mark_row(TextExample(example.text, turns=example.turns), self.control)
        response = self._controls.mark(response)
        ids = self._chat(row.turns, response) if row.turns else self._text(row.prompt + response, is_finished)
        return ids[-self.limit :], len(ids) > self.limit

    @cached_property
    def _controls(self) -> ControlTokens:
        return ControlTokens(self.tokenizer)

    def _text(self, text: str, is_finished: bool) -> list[int]:
        ids, end = self._controls.encode(text, add_special_tokens=True), self.tokenizer.eos_token_id
        if ids[:2] == [self.tokenizer.bos_token_id] * 2:  # a prompt may begin with it itself
            ids = ids[1:]
        if end is not None and (not ids or (is_finished and ids[-1] != end)):
            ids.append(end)
        if not ids:
            raise UserError(f"{self.key}: its tokenizer has no token for an empty text; give a model with an end token")
        return ids

    def _chat(self, turns: Chat, response: str) -> list[int]:
        """Return the tokens of a chat; a last turn of the assistant goes on with the response."""
        if own_template(self.tokenizer) is None:
            raise UserError(
                f"{self.key}: the data is chat, and its tokenizer has no chat template; copy that of the model into "
                f"its directory"
            )
        try:
            text = ChatTemplate(self.tokenizer).chat(_with_response(turns, response))
        except UserError as error:
            raise UserError(f"{self.key}: {error}") from None
        # a template writes bos itself
        return self._controls.encode(text)


def _with_response(turns: Chat, response: str) -> Chat:
    last = turns[-1]
    if is_assistant(last):
        return (*turns[:-1], replace(last, content=last.content + response))
    return (*turns, Message("assistant", response))
