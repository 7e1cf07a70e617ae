"""Texts of one tokenizer in the tokens of another: a prompt and what follows as another model reads them."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from flexrlhf.config.data_settings import ControlUse
from flexrlhf.data.chat import ChatTemplate
from flexrlhf.data.control_tokens import ControlTokens
from flexrlhf.data.examples import Example
from flexrlhf.data.messages import Chat, is_assistant
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

    def encode(self, example: Example, behind: Chat, is_finished: bool) -> tuple[list[int], bool]:
        """Return the tokens of a prompt with the turns ``behind`` it, and whether some were cut off.

        A chat is rendered by the model's own template. A text goes on with the contents of the turns; it gets what the
        tokenizer adds to texts, and its end token if the last turn ``is_finished``. Raises UserError for a chat that no
        template renders.
        """
        row = self._controls.mark_row(TextExample(example.text, turns=example.turns), self.control)
        behind = tuple(replace(each, content=self._controls.mark(each.content)) for each in behind)
        text = row.prompt + "".join(each.content for each in behind)
        ids = self._chat(row.turns, behind) if row.turns else self._text(text, is_finished)
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

    def _chat(self, turns: Chat, behind: Chat) -> list[int]:
        """Return the tokens of a chat with the turns ``behind`` it."""
        if ChatTemplate.own(self.tokenizer) is None:
            raise UserError(
                f"{self.key}: the data is chat, and its tokenizer has no chat template; copy that of the model into "
                f"its directory"
            )
        try:
            text = ChatTemplate(self.tokenizer).chat(_joined(turns, behind))
        except UserError as error:
            raise UserError(f"{self.key}: {error}") from None
        # a template writes bos itself
        return self._controls.encode(text)


def _joined(turns: Chat, behind: Chat) -> Chat:
    """Return all turns; one of the assistant goes on with the next one that is its own as well."""
    for each in behind:
        last = turns[-1]
        if is_assistant(last) and is_assistant(each):
            turns = (*turns[:-1], replace(last, content=last.content + each.content))
        else:
            turns = (*turns, each)
    return turns
