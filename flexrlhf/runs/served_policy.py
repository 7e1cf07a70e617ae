"""Policy of ``flexrlhf serve-model``: a trained model behind OpenAI's protocol, for evaluation harnesses."""

from __future__ import annotations

import hmac
import secrets
import time
from collections import deque
from collections.abc import Iterable, Sequence
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from functools import partial
from http import HTTPStatus
from pathlib import Path
from threading import Lock
from typing import Any, Literal, Protocol

import torch
from torch import Tensor
from transformers import GenerationConfig, LogitsProcessor, LogitsProcessorList, StoppingCriteria, StoppingCriteriaList

from flexrlhf.config.engines import EngineFacts
from flexrlhf.data.chat import ChatTemplate
from flexrlhf.data.control_tokens import ControlTokens
from flexrlhf.data.encoding import bos_in_front
from flexrlhf.data.known_keys import RowValues, with_texts
from flexrlhf.data.messages import Message, read_chat
from flexrlhf.engines.base import Sampling
from flexrlhf.engines.sampling import completes_stop, sample_tokens
from flexrlhf.environments.call_forms import ends_in_thought
from flexrlhf.environments.tool_calls import read_reply
from flexrlhf.errors import UserError, one_line
from flexrlhf.runs.conversation import Policies
from flexrlhf.runs.served_scores import chosen_device
from flexrlhf.serving.model_calls import CallRefused, ModelCall, ModelReply, ScoredToken

GENERATION = "generation_config.json"
GATHER_SECONDS = 0.01
"""Time in which the first of several calls waits for the others."""
TAIL = 8
"""Tokens of a prompt that a response is decoded behind."""


class TokenSampler(Protocol):
    """Model that samples tokens, called by several threads."""

    vocabulary: int
    """Number of its token ids."""
    positions: int | None
    """Most tokens of a sequence; None: any number."""

    def sample(self, prompt: Sequence[int], sampling: Sampling, most: int) -> list[int]:
        """Return at most ``most`` tokens behind a prompt, with the end token."""
        ...

    def scores(self, ids: Sequence[int], likeliest: int) -> list[tuple[int, dict[int, float]]]:
        """Return each token after the first and the likeliest one behind all, with log-probs of its place.

        These are of the token itself and of the ``likeliest`` tokens, by token.
        """
        ...

    def close(self) -> None:
        """Free its processes."""
        ...


@dataclass(eq=False)
class _SampledRow:
    """Prompt, and its response so far."""

    prompt: Sequence[int]
    sampling: Sampling
    most: int
    tokens: list[int] = field(default_factory=list)
    response: Future[list[int]] = field(default_factory=Future)

    def extend(self, logits: Tensor) -> int:
        """Return the next token by its logits (1, vocabulary); behind the end of the response any one."""
        if self.response.done():
            return self.sampling.pad_token_id
        row = torch.zeros(1, dtype=torch.int64, device=logits.device)
        self.tokens.append(token := int(sample_tokens(logits, self.sampling, row, len(self.tokens))[0]))
        is_stopped = bool(self.sampling.stop) and completes_stop(self.tokens, self.sampling)
        if token in self.sampling.eos_token_ids or is_stopped or len(self.tokens) == self.most:
            self.response.set_result(self.tokens)
        return token


class _RowSampling(LogitsProcessor):
    """Sampling of rows, each in its own way: the token of each is the only one left."""

    def __init__(self, rows: Sequence[_SampledRow]) -> None:
        self._rows = rows

    def __call__(self, input_ids: Any, scores: Any) -> Any:
        tokens = [row.extend(scores[place : place + 1]) for place, row in enumerate(self._rows)]
        chosen = torch.tensor(tokens, device=scores.device)[:, None]
        return torch.full_like(scores, -torch.inf).scatter_(1, chosen, 0.0)


class _RowEnds(StoppingCriteria):
    """Ends of rows."""

    def __init__(self, rows: Sequence[_SampledRow]) -> None:
        self._rows = rows

    def __call__(self, input_ids: Any, scores: Any, **kwargs: Any) -> Any:
        return torch.tensor([row.response.done() for row in self._rows], device=input_ids.device)


class TransformersSampler:
    """Model of transformers. Calls that come together are sampled together; others wait for the end of these.

    The noise of a response is that of a run: it follows from its seed, whatever else is sampled with it.
    """

    def __init__(self, model: Any, pad: int, most_rows: int) -> None:
        """
        pad:        token in front of shorter prompts, which nothing reads.
        most_rows:  sequences at once.
        """
        config = model.config.get_text_config()
        self.vocabulary: int = config.vocab_size
        self.positions: int | None = getattr(config, "max_position_embeddings", None)
        # else its temperature, penalties and so on would be used, too
        model.generation_config = GenerationConfig()
        self._model, self._pad, self._most_rows = model, pad, most_rows
        self._waiting: deque[_SampledRow] = deque()
        self._thread, self._lock = ThreadPoolExecutor(1, "sampling"), Lock()

    def sample(self, prompt: Sequence[int], sampling: Sampling, most: int) -> list[int]:
        """Return at most ``most`` tokens behind a prompt, with the end token."""
        row = _SampledRow(prompt, sampling, most)
        self._waiting.append(row)
        serving = self._thread.submit(self._serve)
        try:
            return row.response.result()
        except CancelledError:
            # raises the error, if it was in the task of this call
            serving.result()
            raise RuntimeError("another call of its batch failed") from None

    def scores(self, ids: Sequence[int], likeliest: int) -> list[tuple[int, dict[int, float]]]:
        """Return each token after the first and the likeliest behind all, with log-probs: its own, the likeliest."""
        with self._lock, torch.inference_mode():
            logits = self._model(input_ids=torch.tensor([ids], device=self._model.device), use_cache=False).logits
            log_probs = logits[0].float().log_softmax(1)
            best = log_probs.topk(likeliest, dim=1)
            tokens = [*ids[1:], int(log_probs[-1].argmax())]
            own = log_probs[range(len(ids)), tokens].tolist()
        places = zip(tokens, own, best.indices.tolist(), best.values.tolist(), strict=True)
        return [
            (token, dict(zip(others, values, strict=True)) | {token: each}) for token, each, others, values in places
        ]

    def close(self) -> None:
        """Await the end of sampling."""
        self._thread.shutdown(cancel_futures=True)

    def _serve(self) -> None:
        """Sample the responses to calls that wait. Each call submits one such task, so that none is left."""
        if not self._waiting:
            return
        time.sleep(GATHER_SECONDS)
        rows = [self._waiting.popleft() for _ in range(min(len(self._waiting), self._most_rows))]
        try:
            with self._lock, torch.inference_mode():
                self._sample(rows)
        finally:
            for row in rows:
                row.response.cancel()

    def _sample(self, rows: Sequence[_SampledRow]) -> None:
        width, most = max(len(row.prompt) for row in rows), max(row.most for row in rows)
        if self.positions is not None and len(rows) > 1 and width + most > self.positions:
            # rows that have ended decode on, and would pass the last position
            for row in rows:
                self._sample([row])
            return
        ids = [[self._pad] * (width - len(row.prompt)) + list(row.prompt) for row in rows]
        mask = [[0] * (width - len(row.prompt)) + [1] * len(row.prompt) for row in rows]
        self._model.generate(
            torch.tensor(ids, device=self._model.device),
            attention_mask=torch.tensor(mask, device=self._model.device),
            generation_config=GenerationConfig(max_new_tokens=most, do_sample=False, pad_token_id=self._pad),
            logits_processor=LogitsProcessorList([_RowSampling(rows)]),
            stopping_criteria=StoppingCriteriaList([_RowEnds(rows)]),
        )


class ServedPolicy:
    """Policy of a server: prompts as a run has them, sampled as their requests say.

    most_tokens:  of a reply whose request has no limit
    tool_format:  how the model writes calls of functions, as the setting of environments
    ends:         further tokens that end a response
    secret:       that requests have as their key; None: none is needed
    """

    def __init__(
        self,
        sampler: TokenSampler,
        tokenizer: Any,
        most_tokens: int,
        tool_format: str,
        ends: Sequence[int],
        secret: str | None,
    ) -> None:
        self._sampler, self._tokenizer, self._most, self._form = sampler, tokenizer, most_tokens, tool_format
        self._secret, self._controls = secret, ControlTokens(tokenizer)
        self._template = None if ChatTemplate.own(tokenizer) is None else ChatTemplate(tokenizer)
        own = () if self._template is None else self._template.end_tokens()
        self._ends = tuple({*ends, *own, *(() if tokenizer.eos_token_id is None else (tokenizer.eos_token_id,))})
        self.num_calls = 0

    def knows(self, key: str) -> bool:
        """Return whether requests with ``key`` are served."""
        return self._secret is None or hmac.compare_digest(key, self._secret)

    def refused(self, key: str, sentence: str) -> None:
        """Print why a request was refused."""
        print(one_line(f"refused: {sentence}"), flush=True)

    def reply(self, key: str, call: ModelCall) -> ModelReply:
        """Return the reply to a call. Raises CallRefused."""
        self.num_calls += 1
        try:
            prompt, text = self._prompt(call)
        except UserError as error:
            raise _refusal(str(error), "messages" if call.prompt is None else "prompt") from None
        most = self._most_tokens(prompt, call)
        try:
            if call.likeliest is not None:
                return self._scored(prompt, call.likeliest, most)
            sampling = self._sampling(call)
            tokens = self._sampler.sample(prompt, sampling, most)
        except RuntimeError as error:
            # of torch, such as exhausted memory
            sentence = f"the model failed: {one_line(str(error))}"
            raise CallRefused(HTTPStatus.INTERNAL_SERVER_ERROR, sentence, kind="server_error") from None
        return self._read(call, prompt, text, tokens, most)

    def _prompt(self, call: ModelCall) -> tuple[list[int], str]:
        """Return the ids of a prompt, and of a chat its text. Raises UserError."""
        text = ""
        if call.prompt_ids:
            ids = list(call.prompt_ids)
            if max(ids) >= self._sampler.vocabulary:
                raise UserError(
                    f"prompt: id {max(ids)} is not below {self._sampler.vocabulary}, the model's vocabulary"
                )
        elif call.prompt is not None:
            ids = [*bos_in_front(self._tokenizer), *self._tokenizer.encode(call.prompt, add_special_tokens=False)]
        else:
            text = self._rendered(call)
            ids = self._controls.encode(text)
        if not ids:
            raise UserError("prompt: has no token")
        return ids, text

    def _rendered(self, call: ModelCall) -> str:
        """Return a chat as text. Its own control tokens are text."""
        if self._template is None:
            raise UserError("the model's tokenizer has no chat template; call /v1/completions with a prompt")
        mark = self._controls.mark
        read = read_chat([dict(message) for message in call.messages], "messages")
        turns = [Message(each.role, mark(each.content), with_texts(each.given, mark)) for each in read]
        tools = tuple(with_texts(tool, mark) for tool in call.tools)
        text = self._template.of_row(RowValues(tools)).render(turns, generation=True, is_bounded=False)
        for tool in tools:
            if tool["function"]["name"] not in text:
                raise UserError("tools: the model's chat template does not write them into a prompt; leave them out")
        return text

    def _most_tokens(self, prompt: Sequence[int], call: ModelCall) -> int:
        """Return the most tokens of a reply. Raises CallRefused for a prompt without room for one."""
        most = self._most if call.most_tokens is None else call.most_tokens
        positions = self._sampler.positions
        if positions is None:
            return most
        if len(prompt) + min(most, 1) > positions:
            sentence = f"the prompt has {len(prompt)} tokens, and the model {positions} positions"
            raise CallRefused(HTTPStatus.BAD_REQUEST, sentence, code="context_length_exceeded")
        return min(most, positions - len(prompt))

    def _sampling(self, call: ModelCall) -> Sampling:
        seed = call.sampling.get("seed")
        return Sampling(
            seed=secrets.randbits(62) if seed is None else int(seed),
            step=0,
            temperature=call.sampling.get("temperature", 1.0),
            eos_token_ids=self._ends,
            pad_token_id=self._ends[0] if self._ends else 0,
            top_p=call.sampling.get("top_p", 1.0),
            top_k=max(0, int(call.sampling.get("top_k", 0))),
            num_ids=min(len(self._tokenizer), self._sampler.vocabulary),
            stop=call.stop,
            decode=partial(self._tokenizer.decode, skip_special_tokens=True),
        )

    def _read(self, call: ModelCall, prompt: Sequence[int], text: str, tokens: Sequence[int], most: int) -> ModelReply:
        """Return the reply of sampled tokens."""
        has_ended = tokens[-1] in self._ends
        said = self._text(prompt, tokens[:-1] if has_ended else tokens, skip_special_tokens=call.prompt is not None)
        places = [place for stop in call.stop if (place := said.find(stop)) >= 0]
        finish: Literal["stop", "length"] = "stop" if has_ended or places else "length"
        reply = ModelReply(said[: min(places, default=None)], "", (), finish, len(prompt), len(tokens))
        if call.prompt is not None:
            return reply
        is_thinking = ends_in_thought(text, self._form)
        content, reasoning, calls = read_reply(reply.content, self._form, call.tools, is_thinking)
        if calls and not call.tools:
            content, reasoning, calls = reply.content, "", ()
        content, reasoning = (_without(each, self._controls.texts.values()) for each in (content, reasoning))
        return replace(
            reply, content=content, reasoning=reasoning, calls=calls, finish="tool_calls" if calls else finish
        )

    def _text(self, prompt: Sequence[int], tokens: Sequence[int], **options: bool) -> str:
        """Return the text of tokens behind others: alone, some tokenizers drop a leading space."""
        before: str = self._tokenizer.decode(prompt[-TAIL:], **options)
        text: str = self._tokenizer.decode([*prompt[-TAIL:], *tokens], **options)
        return text[len(before) :] if text.startswith(before) else self._tokenizer.decode(tokens, **options)

    def _scored(self, ids: Sequence[int], likeliest: int, most: int) -> ModelReply:
        """Return a prompt with the log-probs of its tokens, and the likeliest token behind it if there is room."""
        places = self._sampler.scores(ids, likeliest)[: None if most else -1]
        decode = self._tokenizer.decode
        scored = [ScoredToken(decode([ids[0]]), None, {})]
        for token, values in places:
            found = dict[str, float]()
            # several tokens may have one text
            for other, value in sorted(values.items(), key=lambda each: -each[1]):
                found.setdefault(decode([other]), value)
            scored.append(ScoredToken(decode([token]), values[token], found))
        return ModelReply("", "", (), "length", len(ids), len(places) + 1 - len(ids), tuple(scored))

    def close(self) -> None:
        """Free the model's processes."""
        self._sampler.close()


def _refusal(sentence: str, param: str) -> CallRefused:
    return CallRefused(HTTPStatus.BAD_REQUEST, sentence, param)


def _without(text: str, parts: Iterable[str]) -> str:
    """Return a text without control tokens."""
    for part in parts:
        text = text.replace(part, "")
    return text


def load_policy(
    run: Path,
    engine: str,
    device: str,
    most_rows: int,
    most_tokens: int | None,
    tool_format: str,
    secret: str | None,
) -> ServedPolicy:
    """Load the policy of a run, or of a model's directory. Raises UserError.

    engine:       auto: vLLM on a GPU if it is installed and the model has whole weights, else transformers
    device:       auto, cpu or cuda
    most_rows:    sequences that are sampled at once
    most_tokens:  of a reply whose request has no limit; None: the run's, or 256
    """
    place, found = chosen_device(device), Policies.find(run)
    is_adapter = (found.after / "adapter_config.json").is_file()
    if engine == "auto":
        served = next(facts for facts in EngineFacts.all_engines() if facts.sampler)
        engine = served.name if served.is_installed and place == "cuda" and not is_adapter else "transformers"
    facts = EngineFacts.of(engine)
    if facts.sampler:
        if not facts.is_installed:
            raise UserError(f"--engine {engine}: {engine} is not installed; use transformers")
        if is_adapter:
            raise UserError(f"--engine {engine}: {found.after} has adapters alone; merge them with flexrlhf export")
        tokenizer = found.tokenizer(found.after)
        config = GenerationConfig.from_pretrained(found.after) if (found.after / GENERATION).is_file() else None
        sampler: TokenSampler = facts.part(facts.sampler)(found.after, found.after, place, most_rows)
    else:
        speaker = found.load(found.after)
        # before the sampler replaces it
        tokenizer, config = speaker.tokenizer, speaker.model.generation_config
        pad = next(each for each in (tokenizer.pad_token_id, tokenizer.eos_token_id, 0) if each is not None)
        sampler = TransformersSampler(speaker.model.to(place), pad, most_rows)
    own = None if config is None else config.eos_token_id
    ends = [] if own is None else [own] if isinstance(own, int) else own
    return ServedPolicy(sampler, tokenizer, most_tokens or found.limit, tool_format, ends, secret)
