"""Conversation with the policy of a run, and with the one that it started from, by plain transformers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.generation.streamers import TextStreamer
from transformers.utils.logging import disable_progress_bar

from flexrlhf.config.spec_file import load_spec
from flexrlhf.data.chat import ChatTemplate
from flexrlhf.data.control_tokens import ControlTokens
from flexrlhf.data.encoding import bos_in_front
from flexrlhf.data.messages import Message
from flexrlhf.errors import UserError
from flexrlhf.plan.hub_names import in_cache
from flexrlhf.runs.run_directory import RunDirectory

FILES = ("config.json", "adapter_config.json")
"""Files of which a directory of a model has one."""


@dataclass
class Speaker:
    """A policy, with its side of a conversation.

    turns:  messages so far, marked (``ControlTokens.mark``), if its tokenizer has a chat template; else every text
            stands alone.
    """

    model: Any
    tokenizer: Any
    turns: list[Message] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._controls = ControlTokens(self.tokenizer)

    def reply(self, text: str, tokens: int, temperature: float, write: Callable[[str], None] | None = None) -> str:
        """Return the reply to ``text``, of at most so many ``tokens``; ``write`` receives it as it is generated.

        temperature:  0 takes the likeliest tokens.
        """
        ids = self._encoded(text)
        sampling = {"do_sample": temperature > 0} | ({"temperature": temperature} if temperature > 0 else {})
        streamer = None if write is None else _Writer(self.tokenizer, write)
        generated = self.model.generate(ids, max_new_tokens=tokens, streamer=streamer, **sampling)
        reply: str = self.tokenizer.decode(generated[0, ids.shape[1] :], skip_special_tokens=True).strip()
        if self.turns:
            self.turns.append(Message("assistant", self._controls.mark(reply)))
        return reply

    def _encoded(self, text: str) -> Any:
        """Return the ids (1, n) that the reply follows: all turns so far, or the text alone."""
        if self.tokenizer.chat_template is None:
            ids = [*bos_in_front(self.tokenizer), *self.tokenizer.encode(text, add_special_tokens=False)]
        else:
            self.turns.append(Message("user", self._controls.mark(text)))
            ids = self._controls.encode(ChatTemplate(self.tokenizer).prompt(self.turns))
        return torch.tensor([ids])


class _Writer(TextStreamer):
    """Receiver of tokens that passes on their text."""

    def __init__(self, tokenizer: Any, write: Callable[[str], None]) -> None:
        super().__init__(tokenizer, skip_prompt=True, skip_special_tokens=True)
        self._write = write

    def on_finalized_text(self, text: str, stream_end: bool = False) -> None:
        self._write(text)


@dataclass(frozen=True)
class Policies:
    """Directories of the policies of a conversation.

    after:   the trained one, or a model that no run has trained.
    before:  the one that its run started from; None: it has no files, or there is no run.
    limit:   most tokens of a reply, of a response in the run if there is one.
    """

    after: Path
    before: Path | None = None
    limit: int = 256

    @classmethod
    def find(cls, place: Path) -> Policies:
        """Return the policies of a run's directory, or of a model's. Raises UserError if ``place`` has none."""
        run = RunDirectory(place)
        if not run.config.is_file():
            if any((place / name).is_file() for name in FILES):
                return cls(place)
            raise UserError(
                f"{place}: neither a run nor a model in it; give a directory such as runs/NAME or of a model"
            )
        spec = in_cache(load_spec(run.config))
        if not any((place / "actor" / name).is_file() for name in FILES):
            remedy = f"export one: flexrlhf export {place} -o MODEL" if run.checkpoints else "nothing in it to talk to"
            raise UserError(f"{place}: no actor is saved in it; {remedy}")
        path = None if spec.models.actor is None else spec.models.actor.path
        return cls(place / "actor", None if path is None else Path(path), spec.data.max_response_tokens)

    def load(self, directory: Path) -> Speaker:
        """Load one of them, with the tokenizer of the trained one if it has none. Raises UserError."""
        disable_progress_bar()
        try:
            model = AutoModelForCausalLM.from_pretrained(directory, dtype="auto").eval()
        except (OSError, ValueError, KeyError, ImportError) as error:
            raise UserError(f"{directory}: transformers cannot load it ({str(error).splitlines()[0]})") from None
        return Speaker(model, self.tokenizer(directory))

    def tokenizer(self, directory: Path) -> Any:
        """Load the tokenizer of one of them, or of the trained one. Raises UserError."""
        own = directory if (directory / "tokenizer_config.json").is_file() else self.after
        try:
            return AutoTokenizer.from_pretrained(own)
        except (OSError, ValueError, KeyError) as error:
            raise UserError(f"{own}: no tokenizer can be loaded ({str(error).splitlines()[0]})") from None
