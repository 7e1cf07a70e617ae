"""Scores of ``flexrlhf serve-reward``: of a function in worker processes, or of a sequence classifier in this one."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from queue import SimpleQueue
from typing import Any, Protocol

import torch
from torch import Tensor

from flexrlhf.config.model_settings import ModelSpec
from flexrlhf.config.reward_sources import FunctionSource, Level
from flexrlhf.data.examples import Example
from flexrlhf.data.messages import Message
from flexrlhf.data.retokenized import TextEncoder
from flexrlhf.engines.models import load_model
from flexrlhf.engines.scalar_head import score_rule
from flexrlhf.errors import UserError
from flexrlhf.placement.layout import Layout
from flexrlhf.placement.placed import ModelName, PlacedModel
from flexrlhf.plan.run_tokenizer import load_tokenizer
from flexrlhf.rewards.base import Reply, ScoreBatch
from flexrlhf.rewards.checks import SourceChecks
from flexrlhf.rewards.worker_calls import call, load
from flexrlhf.user_code.call_failures import CallFailed
from flexrlhf.user_code.worker_process import Worker


class ServedScores(Protocol):
    """Source of the scores of a server, called from several threads."""

    def score(self, batch: ScoreBatch, level: Level) -> Reply:
        """Return the scores of a request's responses. Raises UserError for a level that it does not have."""

    def close(self) -> None:
        """End the processes of the source."""


def chosen_device(device: str) -> str:
    """Return cpu or cuda, for ``auto`` a GPU if there is one. Raises UserError for one that is not there."""
    has_gpu = torch.cuda.is_available()
    if device == "cuda" and not has_gpu:
        raise UserError("--device cuda: torch finds no GPU on this machine; use cpu")
    return ("cuda" if has_gpu else "cpu") if device == "auto" else device


class FunctionScores:
    """A reward function, each call of which has a worker process and a limit of its time.

    reference:  ``path/to/file.py:name``
    workers:    calls at a time
    seconds:    limit of one call
    """

    def __init__(self, reference: str, workers: int, seconds: float) -> None:
        """Check the function and load it in a first process. Raises UserError if it cannot be called."""
        SourceChecks([FunctionSource(function=reference)]).check()
        self._reference, self._seconds = reference, seconds
        self._workers = [Worker() for _ in range(workers)]
        self._idle: SimpleQueue[Worker] = SimpleQueue()
        for worker in self._workers:
            self._idle.put(worker)
        try:
            failure = self._workers[0].load(partial(load, reference), Worker.loading_deadline(self._seconds))
        except CallFailed as error:
            failure = error.failure
        if failure is not None:
            self.close()
            raise UserError(f"{reference}: {failure.text}")

    def score(self, batch: ScoreBatch, level: Level) -> Reply:
        worker = self._idle.get()
        try:
            deadline = Worker.loading_deadline(self._seconds)
            failure = worker.load(partial(load, self._reference), deadline)
            if failure is not None:
                return Reply.failed(batch, failure)
            return worker.run(call, self._reference, level, batch, seconds=self._seconds, deadline=deadline)
        except CallFailed as error:
            return Reply.failed(batch, error.failure)
        finally:
            self._idle.put(worker)

    def close(self) -> None:
        for worker in self._workers:
            worker.stop()
        for worker in self._workers:
            worker.close()


class ModelScores:
    """A sequence classifier with one label, which scores texts as a run with ``retokenize`` scores finished responses.

    directory:   of the model with its tokenizer
    device:      auto, cpu or cuda
    batch_size:  sequences of one pass
    most:        tokens of the longest text, of a longer one the last are read; None: as many as the model has positions
    """

    def __init__(self, directory: Path, device: str, batch_size: int, most: int | None) -> None:
        """Load the model. Raises UserError for one that gives no scores."""
        self._device = chosen_device(device)
        tokenizer = load_tokenizer(str(directory), False, "serve-reward")
        settings = ModelSpec(path=str(directory))
        placed = PlacedModel(ModelName("reward"), Layout((0,)), trained=False, settings=settings, head="scalar")
        self._model: Any = load_model(placed, seed=0).to(self._device)
        config = self._model.config
        self._rule, self._batch_size = score_rule(config, is_trained=False), batch_size
        limit = getattr(config.get_text_config(), "max_position_embeddings", None)
        if most is not None and limit is not None and most > limit:
            raise UserError(f"--max-tokens {most}: the model has {limit} positions; use at most {limit}")
        self._encoder = TextEncoder(str(directory), tokenizer, most or limit or tokenizer.model_max_length)
        self._lock = threading.Lock()

    def score(self, batch: ScoreBatch, level: Level) -> Reply:
        if level != "answer":
            raise UserError(f"a model gives one score a response here, and the request is one of level {level}")
        texts = zip(batch.prompts, batch.responses, strict=True)
        with self._lock:
            rows = [(Example((), (), (), prompt), (Message("assistant", response),)) for prompt, response in texts]
            ids = [self._encoder.encode(*row, is_finished=True)[0] for row in rows]
            return Reply([score for part in self._parts(ids) for score in self._pass(part)])

    def close(self) -> None:
        """Do nothing: the model ends with the process."""

    def _parts(self, ids: list[list[int]]) -> Iterator[list[list[int]]]:
        yield from (ids[start : start + self._batch_size] for start in range(0, len(ids), self._batch_size))

    @torch.inference_mode()
    def _pass(self, ids: list[list[int]]) -> list[float]:
        """Return the scores of sequences, which are padded at their ends."""
        width = max(map(len, ids))
        tokens, mask = (torch.zeros(len(ids), width, dtype=torch.long) for _ in range(2))
        for row, sequence in enumerate(ids):
            tokens[row, : len(sequence)] = torch.tensor(sequence)
            mask[row, : len(sequence)] = 1
        tokens, mask = tokens.to(self._device), mask.to(self._device)
        places = torch.arange(width, device=self._device).expand(len(ids), -1)
        outputs: Tensor = self._model(input_ids=tokens, attention_mask=mask, position_ids=places)
        found: list[float] = self._rule.scores(outputs, tokens, mask).tolist()
        return found


def load_scores(
    path: str, workers: int, seconds: float, device: str, batch_size: int, most: int | None
) -> ServedScores:
    """Return the scores of the model in the directory ``path``, or of the function that it names.

    The arguments are the fields of ``FunctionScores`` and ``ModelScores``. Raises UserError as these.
    """
    if Path(path).is_dir():
        return ModelScores(Path(path), device, batch_size, most)
    return FunctionScores(path, workers, seconds)
