"""Calls that a session refuses in one sentence, and calls of threads, handlers and forks, in the middle of a step."""

from __future__ import annotations

import math
import os
import pickle
import signal
import threading
from collections.abc import Callable, Iterator

import numpy as np
import pytest
import torch

from flexrlhf import Session
from flexrlhf.errors import UserError
from flexrlhf.launch.session import CalledBatch

Call = Callable[[], object]


def odd_calls(run: Session, batch: CalledBatch, other: Session) -> Iterator[tuple[Call, str]]:
    """Yield calls after ``generate(batch)``, each with its sentence."""
    for wrong in (None, "x", [batch], 5, torch.ones(3), Session, run):
        yield lambda wrong=wrong: run.scores(wrong), "expected a batch of prompts"
    yield lambda: run.column(None, "tokens"), "expected a batch of prompts"
    yield lambda: run.forward_backward("train_actor", None), "expected a batch of prompts"
    yield lambda: other.scores(batch), "a batch of another session"
    for wrong in (0, None, slice(1), ["tokens"], b"tokens"):
        yield lambda wrong=wrong: batch[wrong], "a column is read by its name"
    yield lambda: batch["token"], r"no column 'token' \(did you mean 'tokens'\?\)"
    for values in (torch.ones(3), torch.full((16,), math.nan), torch.ones(16, dtype=torch.bool), None):
        yield lambda values=values: batch.__setitem__("scores", values), r"batch\['scores'\] cannot be assigned"
    yield lambda: batch.__delitem__("tokens"), "cannot be deleted"
    yield lambda: list(batch), "a batch has columns and mini-batches"
    for number in ("2", 2.0, None, True, 0, -1, 3, [2], math.nan):
        yield lambda number=number: batch.mini_batches(number), "in .* parts; use one of 1, 2"
    for name in (None, 5, [], batch):
        yield lambda name=name: run.call(name, batch), "an operator is called by its name"
    yield lambda: run.call("score", batch), r"no operator 'score' \(did you mean 'scores'\?\)"
    yield lambda: run.nothing, "no operator 'nothing'"
    yield lambda: run.optim_step(None), "an operator is called by its name"
    yield lambda: run.optim_step("train_actor"), "call forward_backward before it"
    yield lambda: run.train_actor(batch), "which this batch does not have"
    yield lambda: run.generate(batch), "generate has written tokens of this batch"
    for loss in (5, len, batch):
        yield lambda loss=loss: run.train_actor(batch, loss), "a loss of train_actor is given by its name"
    yield lambda: run.train_actor(batch, loss="no.py:loss"), "the loss of train_actor: no file no.py"
    yield lambda: run.compute_loss("generate", batch), "generate has no loss"
    for number in (99, -1, "x"):
        yield lambda number=number: run.statistics(batch, number), "has 1 call, from 0"
    for part in ("01", [0.0], [False], [None], [math.nan]):
        yield lambda part=part: run.scores(batch, protocol=lambda *_: [part, []]), "expected whole numbers of prompts"
    yield lambda: run.scores(batch, protocol=5), "protocol of scores raised TypeError"
    yield lambda: run.__enter__(), "it has been entered before"
    yield lambda: next(run.prompts()), "a loop over prompts.. has left step 0 before all of its trainings"
    for given in (5, "abc", ["abc"], [None]):
        yield lambda given=given: next(run.prompts(given)), "takes a list of prompts for each step"
    yield lambda: next(run.prompts([[1] * len(batch)])), "expected texts or rows of the data, found 1"
    yield lambda: pickle.dumps(batch), "it cannot be copied or sent to another process"


def try_odd_calls(run: Session, batch: CalledBatch, other: Session) -> int:
    """Make all odd calls; return their number."""
    calls = list(odd_calls(run, batch, other))
    for call, sentence in calls:
        with pytest.raises(UserError, match=sentence):
            call()
    assert not hasattr(run, "nothing") and "tokens" in batch and "nothing" not in batch
    assert len(batch.mini_batches(np.int64(1))) == 1
    return len(calls)


def call_from_everywhere(run: Session, batch: CalledBatch) -> None:
    """Read a column in threads at once, in a handler that interrupts reads, and in a fork, which is refused."""
    expected, found = batch["tokens"], list[object]()
    threads = [threading.Thread(target=lambda: found.append(batch["tokens"]), daemon=True) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert len(found) == 3

    def handle(*_: object) -> None:
        try:
            found.append(batch["tokens"])
        except UserError as error:
            assert "by a signal handler in the middle of another call" in str(error)

    before = signal.signal(signal.SIGUSR2, handle)
    stop = threading.Event()

    def interrupt() -> None:
        while not stop.wait(0.001):
            os.kill(os.getpid(), signal.SIGUSR2)

    interrupting = threading.Thread(target=interrupt)
    interrupting.start()
    found += [batch["tokens"] for _ in range(20)]
    stop.set()
    interrupting.join()
    signal.signal(signal.SIGUSR2, before)
    assert all(isinstance(each, torch.Tensor) and torch.equal(each, expected) for each in found)
    if (child := os.fork()) == 0:
        try:
            run.__exit__(None, None, None)
            run.scores(batch)
        except UserError as error:
            os._exit(int("this one is a fork of it" not in str(error)))
        finally:
            os._exit(2)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
