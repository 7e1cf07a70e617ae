"""Rollout engine: vLLM on any ranks of the run, generating with weights that are overwritten in place."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import count
from typing import Any

import torch
from torch import Tensor

from flexrlhf.api.engine import Batch, Engine, EngineContext, MemoryUsage, RowSource, Sampling
from flexrlhf.engines.vllm.instance import VllmInstance
from flexrlhf.engines.vllm.requests import (
    PartialResponse,
    RequestKey,
    add_output,
    new_requests,
    request_keys,
    response_columns,
    sampling_params,
)
from flexrlhf.engines.vllm.restarts import Restarts, RolloutProcessError

_STEPS_BETWEEN_LOOKS = 8
"""Tokens after which further rows are requested, as entering and leaving vLLM's globals takes about a millisecond."""


class VllmEngine(Engine):
    """One rank of a rollout engine, in this process or in a child; ``Engine`` in engines/base.py documents the methods.

    A child that ends or does not respond is replaced: its rank has a copy of the weights, and its rows are generated
    again, with the same tokens, since noise is a function of seed, step, row and position.

    ``num_requests``: responses that it has finished.
    """

    def __init__(self, context: EngineContext) -> None:
        rollout = context.placed.rollout
        assert rollout is not None, f"{context.placed.name} is no rollout engine"
        self._context, self._lengths = context, context.lengths
        self._is_exact = rollout.noise == "exact"
        self._restarts = Restarts(rollout.max_restarts, context.ranks.replica.ranks[0])
        self._vllm = self._started()
        self.config = self._vllm.config
        self._responses: dict[RequestKey, PartialResponse] = {}
        # responses that vLLM has no request for yet, and the ones of its requests since it last had none
        self._due: dict[RequestKey, PartialResponse] = {}
        self._requested: dict[RequestKey, PartialResponse] = {}
        self._running: dict[str, RequestKey] = {}  # by vLLM's request id
        self._has_stale_cache = False
        self.num_requests = self._num_names = 0
        self._copies: dict[str, Tensor] = {}
        self._copy_weights()

    @property
    def child_pid(self) -> int | None:
        """Process id of the child; None where vLLM runs in this process."""
        return None if self._vllm.child is None else self._vllm.child.pid

    def generate(self, batch: Batch, sampling: Sampling, ahead: Sequence[Batch] = ()) -> dict[str, Tensor]:
        self._restarts.begin(sampling.step)
        keys, *_ = [self._add(each, sampling) for each in (batch, *ahead)]
        while True:
            try:
                self._decode(keys)
                return response_columns(batch, [self._responses.pop(key) for key in keys], sampling, self._lengths)
            except RolloutProcessError as error:
                self._replace_child(error)

    def advance(self, source: RowSource, sampling: Sampling) -> None:
        if len(self._context.ranks.replica.ranks) > 1:
            # all of its ranks add the same requests before the same token
            super().advance(source, sampling)
            return
        self._restarts.begin(sampling.step)
        out: list[tuple[Batch, dict[RequestKey, int]]] = []
        goes_on = True
        while goes_on or out:
            batch = source.due(wait=not out) if goes_on else None
            goes_on = batch is not None
            if batch is not None and len(batch):
                out.append((batch, {key: place for place, key in enumerate(self._add(batch, sampling))}))
            if not out:
                continue
            try:
                self._decode([key for _, places in out for key in places], _STEPS_BETWEEN_LOOKS)
            except RolloutProcessError as error:
                # others are not received yet, and are requested again
                self._requested = {key: each for key, each in self._requested.items() if not each.done}
                self._replace_child(error)
            for batch, places in out:
                self._return_done(batch, places, source, sampling)
            out = [(batch, places) for batch, places in out if places]

    def _return_done(self, batch: Batch, places: dict[RequestKey, int], source: RowSource, sampling: Sampling) -> None:
        """Return the rows of ``batch`` at ``places`` whose responses are done to ``source``."""
        done = [key for key in places if self._responses[key].done]
        if not done:
            return
        rows = batch.select(torch.tensor([places.pop(key) for key in done], device=batch.rows.device))
        for key in done:
            # the row may come again
            self._requested.pop(key, None)
        responses = [self._responses.pop(key) for key in done]
        source.receive(rows, response_columns(rows, responses, sampling, self._lengths))

    def _add(self, batch: Batch, sampling: Sampling) -> list[RequestKey]:
        """Make the responses of ``batch`` due that are not requested yet; return the keys of its rows."""
        for key, request in new_requests(batch, sampling, self._lengths, self._responses).items():
            self._responses[key] = self._due[key] = PartialResponse(request, sampling)
        return request_keys(batch, sampling)

    def _decode(self, keys: Sequence[RequestKey], steps: int | None = None) -> None:
        """Request the responses that are due, and generate until the ones of ``keys`` are done.

        steps:  tokens of each request at most, after which it returns, or when one of ``keys`` is done.
        """
        if not self._vllm.sleep_mode.has_cache:
            with self._vllm.calling():
                self._vllm.sleep_mode.wake_cache()
        if self._has_stale_cache:
            self._reset_prefix_cache()
        with self._vllm.calling():
            if self._due:
                self._request()
            has_ended = all if steps is None else any
            for _ in count() if steps is None else range(steps):
                if has_ended(self._responses[key].done for key in keys):
                    return
                self._step()

    def _request(self) -> None:
        """Add the responses that are due to vLLM's requests."""
        if not self._running:
            self._requested.clear()
        with self._vllm.adding():
            while self._due:
                key = next(iter(self._due))
                response = self._requested[key] = self._due.pop(key)
                request, name = response.request, str(self._num_names)
                params = sampling_params(key, request, self.config.vocab_size, self._is_exact)
                self._num_names += 1
                self._running[name] = key
                self._vllm.engine.add_request(name, {"prompt_token_ids": request.prompt + request.response}, params)

    def _step(self) -> None:
        """Generate one token of every request in vLLM's batch, and record them."""
        outputs = self._vllm.step()
        if self._vllm.child is not None:
            self._vllm.child.restart_timeout()
        for output in outputs:
            key = self._running[output.request_id]
            response = self._requested[key]
            must_be_aborted = add_output(response, output)
            if response.done:
                del self._running[output.request_id]
                self.num_requests += self._responses.get(key) is response
            if must_be_aborted:
                self._vllm.engine.abort_request([output.request_id])

    def _started(self) -> VllmInstance:
        """Return an instance of vLLM; a child that ends while it starts is replaced, up to ``rollout.max_restarts``."""
        while True:
            try:
                return VllmInstance(self._context)
            except RolloutProcessError as error:
                self._count(error)

    def _count(self, error: RolloutProcessError) -> None:
        self._restarts.add(error)
        self.num_restarts += 1

    def _replace_child(self, error: RolloutProcessError) -> None:
        """Start another child with the weights of one that has failed, for the same requests.

        Rows that were done are requested as well: log-probs depend in their last digits on what is decoded together.
        Raises ``error``, or the one of a further start, beyond ``rollout.max_restarts``.
        """
        self._count(error)
        self._vllm.close()
        self._vllm = self._started()
        for name, values in self._copies.items():
            self._vllm.views[name].copy_(values)
        self._has_stale_cache = False
        # without a running request all have ended
        requests, self._due = (self._requested if self._running else {}) | self._due, {}
        self._running.clear()
        for key, response in requests.items():
            self._due[key] = PartialResponse(response.request, response.sampling)
            if self._responses.get(key) is response and not response.done:
                self._responses[key] = self._due[key]

    def _refuse(self, *_: Any, **__: Any) -> Any:
        raise AssertionError("planning gives a rollout engine only generate")

    forward = backward = step = losses = training_state = load_numbers = _refuse

    def weights(self) -> dict[str, Tensor]:
        child = self._vllm.child
        if child is not None and child.has_ended and self._restarts.limit:
            # a sync would write to a GPU's memory that ended with it
            self._replace_child(child.failure())
        return dict(self._vllm.views)

    @torch.no_grad()
    def load_weights(self, weights: Mapping[str, Tensor]) -> None:
        assert not self._responses, "weights may change only between requests"
        for name, values in weights.items():
            self._vllm.views[name].copy_(values.view(self._vllm.views[name].shape))
        self.weights_changed()

    def weights_changed(self) -> None:
        assert not self._responses, "weights may change only between requests"
        self._has_stale_cache = True
        self._copy_weights()

    def _copy_weights(self) -> None:
        """Copy the weights of a child to host memory, where its replacement has them from.

        Raises RolloutProcessError where a GPU's memory has ended with the child meanwhile.
        """
        child = self._vllm.child
        if child is None or not self._restarts.limit:
            return
        for name, values in self._vllm.views.items():
            if name not in self._copies:
                self._copies[name] = torch.empty_like(values, device="cpu")
            self._copies[name].copy_(values)
        if child.has_ended and self._context.device.type != "cpu":
            raise child.failure()

    def _reset_prefix_cache(self) -> None:
        """Discard the keys and values of earlier prompts, which are of other weights."""
        if self._context.device.type == "cuda" and self._vllm.child is not None:
            # the child's streams do not wait for this one, which has written its weights, or waited for who does
            torch.cuda.current_stream(self._context.device).synchronize()
        with self._vllm.calling():
            assert self._vllm.engine.reset_prefix_cache(), "a request still uses the cache"
        self._has_stale_cache = False

    def memory_usage(self) -> MemoryUsage:
        weights = sum(view.nbytes for view in self._vllm.views.values()) + self._vllm.padding_bytes
        asleep = self._vllm.sleep_mode
        return MemoryUsage(weights, 0, 0, host=asleep.num_host_bytes, unmapped=asleep.num_unmapped_bytes)

    def offload(self, keeps: bool = True, changed: bool = True) -> None:
        assert self._vllm.child is None, "planning refuses a child next to models that need its memory"
        assert not self._responses, "the engine still decodes"
        with self._vllm.isolated():
            self._vllm.sleep_mode.sleep(keeps)

    def reload(self) -> None:
        with self._vllm.isolated():
            self._vllm.sleep_mode.wake_weights()
        self._has_stale_cache = True

    def close(self) -> None:
        self._vllm.close()
