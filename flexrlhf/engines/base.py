"""Contract of an engine, the object that computes one placed model on this rank.

A new engine is a class with the methods of ``Engine``, constructed from an ``EngineContext``; its facts
(``config/engines.py``) describe it and name the class.

Shapes: n rows of this rank, P prompt positions (left-padded), R response positions (right-padded). Rows may differ from
one data-parallel rank to the next and be none; the ranks of a replica, of its context-parallel and tensor-parallel
parts and pipeline stages, receive the same rows.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Literal, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from flexrlhf.comm.deadlines import Waits
from flexrlhf.comm.reduce import RankGroup
from flexrlhf.config.output_settings import NO_SWITCHES, Switches
from flexrlhf.engines.copy_streams import CopyStreams
from flexrlhf.engines.model_ranks import ModelRanks
from flexrlhf.errors import UserError
from flexrlhf.metrics import Outcome
from flexrlhf.operators.columns import Column, Lengths, Quantity
from flexrlhf.placement.placed import PlacedModel
from flexrlhf.placement.rollout import KeptSlots
from flexrlhf.weights.shards import Part

Moments = dict[str, Tensor]
"""Statistic name → float64 (3,): weight, weighted sum, weighted sum of squares. They add up over rows and ranks."""


@dataclass(frozen=True)
class Batch:
    """Columns of the rows of this rank.

    columns:            name → tensor (n, ...); operators/columns.py has the shapes and dtypes.
    rows:               int64 (n,), numbers of the rows in the step's batch; samples of one prompt are neighbours.
    samples_per_prompt: rows of one prompt: of each of its samples as many as it has sequences.
    blocks:             places of the prompts that are composed into passes together; empty: all of them.
    compares:           whether all sequences of a prompt are in one pass, because a loss compares them.
    tokens:             computed tokens of a pass; None: as in the settings of the model.
    sequences:          rows of one episode, neighbours; a further one that no conversation has used has no tokens.
    stops:              stop strings of each row in addition to those of its sampling; empty: no row has any.
    """

    columns: Mapping[str, Tensor]
    rows: Tensor
    samples_per_prompt: int
    blocks: tuple[tuple[int, ...], ...] = ()
    compares: bool = False
    tokens: int | None = None
    sequences: int = 1
    stops: tuple[tuple[str, ...], ...] = ()

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, column: str) -> Tensor:
        return self.columns[column]

    @property
    def mask(self) -> Tensor:
        """Response tokens that count for a loss (n, R); a row of zeros is a response that does not count."""
        return self.columns.get("kept_mask", self.sampled_mask)

    @property
    def sampled_mask(self) -> Tensor:
        """Response tokens (n, R) of responses that count, also those that importance sampling rejects."""
        return self.columns["loss_mask"] if "loss_mask" in self.columns else self.columns["response_mask"]

    @property
    def searched_from(self) -> list[int]:
        """Tokens of each given response that stop strings are not searched in."""
        return self.columns.get("searched_from", torch.zeros_like(self.rows)).tolist()

    def stops_of(self, sampling: Sampling) -> list[tuple[str, ...]]:
        """Return all stop strings of each row."""
        own = self.stops or ((),) * len(self)
        return [(*sampling.stop, *each) for each in own]

    def new_tokens(self, longest: int) -> Tensor:
        """Return how many tokens a call adds to each row at most, int64 (n,). ``longest``: tokens of a response."""
        given = self.columns["response_mask"].sum(1) if "responses" in self.columns else torch.zeros_like(self.rows)
        room = longest - given
        return room.minimum(self.columns["most_tokens"]) if "most_tokens" in self.columns else room

    @property
    def episodes(self) -> Batch:
        """The first row of each episode, which its scores and all statistics of responses are of."""
        k = self.sequences
        if k == 1:
            return self
        firsts = replace(self.select(slice(None, None, k)), blocks=self.blocks)
        return replace(firsts, samples_per_prompt=self.samples_per_prompt // k, sequences=1)

    @property
    def is_further(self) -> Tensor:
        """Rows bool (n,) of further sequences of an episode."""
        return self.rows % self.sequences > 0

    def of_rows(self, values: Tensor) -> Tensor:
        """Return ``values`` (n / sequences, ...) of episodes, (n, ...): for each of their rows."""
        return values if self.sequences == 1 else values.repeat_interleave(self.sequences, 0)

    def select(self, part: slice | Tensor) -> Batch:
        """Return the rows of ``part``, a range or int64 places; as views of a range."""
        columns = {name: tensor[part] for name, tensor in self.columns.items()}
        places = range(len(self))[part] if isinstance(part, slice) else part.tolist() if self.stops else ()
        stops = tuple(self.stops[place] for place in places) if self.stops else ()
        return replace(self, columns=columns, rows=self.rows[part], blocks=(), stops=stops)

    def with_columns(self, columns: Mapping[str, Tensor]) -> Batch:
        """Return the same rows with further ``columns``."""
        return replace(self, columns={**self.columns, **columns})


@dataclass(frozen=True)
class Sampling:
    """Distribution that responses are sampled from, and where they end.

    Tokens are sampled from softmax(logits / temperature), with end tokens excluded before ``min_tokens``, restricted to
    the ``top_k`` most likely tokens, and then to the most likely ones whose probabilities add up to ``top_p``. A
    response ends with an end token, or with the first token after which its decoded text contains a stop string.

    seed, step:    with the row and the position of a token, all that its noise depends on (engines/sampling.py).
    temperature:   of the softmax; 0: greedy.
    eos_token_ids: end tokens.
    pad_token_id:  token behind the end of a response.
    top_p:         1: no restriction.
    top_k:         0: no restriction.
    min_tokens:    least number of tokens of a response.
    num_ids:       sampled tokens are below it; None: any token. Log-probs are of the whole vocabulary, whose further
                   rows are padding, as they are in training.
    stop:          stop strings; they need ``decode``.
    decode:        tokens of a response → its text, with the special tokens that ``rollout.special_tokens`` keeps.
    has_kernel:    whether GPUs make the noise by a kernel, else by torch's operations.
    """

    seed: int
    step: int
    temperature: float
    eos_token_ids: tuple[int, ...]
    pad_token_id: int
    top_p: float = 1.0
    top_k: int = 0
    min_tokens: int = 0
    num_ids: int | None = None
    stop: tuple[str, ...] = ()
    decode: Callable[[Sequence[int]], str] | None = None
    has_kernel: bool = True


@dataclass(frozen=True)
class Outputs:
    """Outputs of a model that a loss reads.

    quantity: the quantity of the loss: log-probs or token scores (n, R), values (n, R+1) or scores (n,).
    entropy:  of the policy at each response token (n, R), where the loss reads it.
    values:   (n, R+1), of a model with both heads, where the loss reads them.
    """

    quantity: Tensor
    entropy: Tensor | None = None
    values: Tensor | None = None


@dataclass(frozen=True)
class Totals:
    """Sizes of a whole mini-batch over all data-parallel ranks, known before backward; denominators of losses.

    tokens:    response tokens that count (``Batch.mask``).
    sequences: responses with at least one such token.
    prompts:   prompts.
    taken:     sequences of prompts with one that is trained on, or that is truncated and counts.
    unused:    rows of episodes that have fewer sequences.
    sampled_tokens, sampled_sequences: the same of ``Batch.sampled_mask``, with the ones that are rejected.
    """

    tokens: float
    sequences: float
    prompts: float
    sampled_tokens: float = 0.0
    sampled_sequences: float = 0.0
    taken: float = 0.0
    unused: float = 0.0

    @classmethod
    def of(cls, batch: Batch, dp: RankGroup) -> Totals:
        """Count a mini-batch over all data-parallel ranks."""
        mask, sampled = batch.mask.double(), batch.sampled_mask.double()
        counts = [number for each in (mask, sampled) for number in (each.sum(), (each.sum(1) > 0).double().sum())]
        outcomes = batch.columns.get("outcome", torch.zeros_like(batch.rows))
        is_taken = (outcomes == Outcome.TRAINED.code) | (outcomes == Outcome.TRUNCATED.code)
        is_unused = outcomes == Outcome.UNUSED.code
        taken = is_taken.view(-1, batch.samples_per_prompt).any(1).repeat_interleave(batch.samples_per_prompt)
        counts += [(taken & ~is_unused).double().sum(), is_unused.double().sum(), mask.new_tensor(len(batch))]
        *sizes, rows = dp.sum(torch.stack(counts)).tolist()
        tokens, sequences, *further = sizes
        return cls(tokens, sequences, rows / batch.samples_per_prompt, *further)


EntropyUse = Literal["none", "value", "gradient"]
LossFunction = Callable[[Outputs, Batch, Totals], tuple[Tensor, Moments]]


@dataclass(frozen=True)
class Loss:
    """Loss of a train operator.

    quantity:    the model's output that it reads.
    function:    returns the contribution () of some rows; contributions of all micro-batches and data-parallel ranks
                 add up to the loss of the mini-batch.
    statistics:  names that ``function`` reports, so that a rank without rows reports the same ones.
    entropy:     whether it reads the policy's entropy: as a value, or with its gradient, which takes
                 rows x R x vocabulary of memory.
    with_values: whether it also reads the values of a model with both heads.
    temperature: of the log-probs, softmax(logits / temperature); None: that of the run's sampling.
    """

    quantity: Quantity
    function: LossFunction
    statistics: tuple[str, ...]
    entropy: EntropyUse = "none"
    with_values: bool = False
    temperature: float | None = None

    def outputs(self, computed: Mapping[str, Tensor]) -> Outputs:
        """Return what this loss reads of the quantities of a pass."""
        values = computed["values"] if self.with_values else None
        return Outputs(computed[self.quantity], computed.get("entropy"), values)


@dataclass(frozen=True)
class EngineContext:
    """Arguments of an engine's constructor, which all ranks of the placed model call.

    placed:          the placed model: its settings, its layout over ranks, whether it is trained, its head.
    lengths:         P and R of the run.
    temperature:     of the run's sampling, which log-probs are computed with.
    seed:            of weights that no file contains; alike on all ranks and copies.
    num_updates:     optimizer steps of the whole run, for the learning-rate schedule.
    ranks:           of the placed model, in groups.
    device:          device of this rank.
    kv_bytes:        bytes of the KV cache that a rollout engine keeps on this rank.
    store:           store of this placed model, for an engine whose library creates process groups of its own.
    timeout_seconds: longest wait of these groups.
    pad_token_id:    of the run; None: the run has no data.
    copies:          streams of this rank's copies to host memory and back; None: the engine has its own.
    switches:        mechanisms that the run does without.
    waits:           of this rank's main thread, for a library whose ranks wait for each other inside a call.
    kept_slots:      slots whose rows keep their keys and values from step to step; None: each call reads its rows.
    """

    placed: PlacedModel
    lengths: Lengths
    temperature: float
    seed: int
    num_updates: int
    ranks: ModelRanks
    device: torch.device
    kv_bytes: int
    store: dist.Store
    timeout_seconds: float = 1800.0
    pad_token_id: int | None = None
    copies: CopyStreams | None = None
    switches: Switches = NO_SWITCHES
    waits: Waits = field(default_factory=Waits)
    kept_slots: KeptSlots | None = None

    def is_tied(self, config: Any) -> bool:
        """Return whether the embedding is also the language head. ``config``: Hugging Face config of the model."""
        return self.placed.head != "scalar" and bool(config.tie_word_embeddings)

    def make_engine(self) -> Engine:
        """Construct the engine of the placed model on this rank; all ranks of the model call it."""
        facts = self.placed.facts
        engine: Engine = facts.part(facts.constructor)(self)
        return engine

    def check_links(self) -> None:
        """Raise UserError for pipeline stages on GPUs without NCCL, which their libraries send by."""
        stages = self.ranks.stages
        group = None if stages is None else stages.stages.group
        if group is not None and self.device.type == "cuda" and dist.get_backend(group) == "gloo":
            why = "debug.backend is gloo" if self.switches.backend == "gloo" else "several ranks share a GPU here"
            raise UserError(f"{self.placed.key('pp')}: {self.placed.layout.dims.pp} stages need NCCL, but {why}; use 1")

    def await_device(self) -> None:
        """Wait, with a deadline that names ranks of the model, until the device has done what it was given.

        Engines call it where the host is about to read results of communication that it has not waited for
        (``InOrder``, and collectives of libraries): after forward calls, and before the norm in an optimizer step.
        """
        if self.device.type != "cpu" and len(self.placed.ranks) > 1:
            self.ranks.dp.await_device(self.device, self.placed.ranks)


@dataclass(frozen=True)
class MemoryUsage:
    """Bytes of an engine's tensors on this rank, in device and host memory together.

    weights:   parameters.
    gradients: gradients of the last optimizer step; 0 before the first.
    optimizer: optimizer state and float32 master weights.
    host:      part of them that is in host memory.
    unmapped:  bytes that torch counts as allocated though a sleeping engine has returned them to the device.
    """

    weights: int
    gradients: int
    optimizer: int
    host: int = 0
    unmapped: int = 0

    @property
    def released(self) -> MemoryUsage:
        """The bytes once the model's weights are released."""
        return MemoryUsage(0, 0, 0, unmapped=self.unmapped)


@dataclass(frozen=True)
class StateTensor:
    """One tensor of a training state on this rank.

    values: its elements; as long as the engine is not called they do not change.
    flat:   their range in the flattened tensor that this rank computes with; None: of the part that this rank stores.
    """

    values: Tensor
    flat: range | None = None

    def part_of(self, stored: Part) -> Part:
        """Return the part of a parameter that it is, of which this rank stores ``stored``."""
        return stored if self.flat is None else replace(stored, flat=self.flat)


@dataclass(frozen=True)
class TrainingState:
    """All that the next optimizer step depends on.

    tensors: kind → trained parameter → tensor, on this rank.
    numbers: the same on all ranks: ``updates`` made, ``loss_scale``, ``good_steps`` since it changed.
    """

    WEIGHTS: ClassVar[str] = "weights"
    """Kind of its tensors: float32 weights. The other kinds are the optimizer's names, as ``exp_avg``."""

    tensors: Mapping[str, Mapping[str, StateTensor]]
    numbers: Mapping[str, float]


class RowSource(Protocol):
    """Source of the rows that one call of ``Engine.advance`` samples from, each of them as often as it goes on.

    An engine calls it from the thread of its own call, between two passes. Ranks whose engine decodes in rounds call it
    equally often, and the ranks of a replica receive the same rows from it.
    """

    most_rows: int
    """Rows that are out at a time at most: returned by ``due``, and not received back."""

    def due(self, wait: bool) -> Batch | None:
        """Return the rows to sample from now, as a batch for ``generate``; None: no further row goes on.

        A row that was received may come again, as a continuation. ``wait``: whether to wait until a row is due, because
        the engine has none; else the batch may be empty.
        """
        ...

    def receive(self, batch: Batch, columns: Mapping[str, Tensor]) -> None:
        """Receive rows of an earlier ``due`` whose responses have ended or have their ``most_tokens``.

        batch:    these rows, with the columns that ``due`` returned.
        columns:  of ``generate`` (n, ...).
        """
        ...


class Engine(Protocol):
    """One placed model on this rank.

    All ranks of the model call ``generate``, ``advance``, ``forward``, ``train``, ``backward``, ``step``, ``losses``
    and ``close`` in the same order, also those with an empty batch: these may communicate. The other methods concern
    this rank alone and do not.
    """

    config: Any
    """Hugging Face config of the model."""

    num_requests: int
    """Responses that this engine has generated so far."""

    num_restarts: int = 0
    """Processes of this engine that have failed so far, and were replaced."""

    def generate(self, batch: Batch, sampling: Sampling, ahead: Sequence[Batch] = ()) -> dict[str, Tensor]:
        """Sample a response to the prompt of every row.

        Reads ``prompts`` and ``prompt_mask`` (n, P). ``ahead``: batches of the next calls, in order and with the same
        ``sampling`` and weights, which an engine may decode in the same passes. Returns, on the device of ``batch``:

        tokens:           int32 (n, P+R), prompt and response.
        attention_mask:   uint8 (n, P+R).
        response_mask:    uint8 (n, R).
        finished:         uint8 (n,), 1 where an end token or a stop string ended the response, 0 where R did.
        rollout_logprobs: float32 (n, R), log-probs of the tokens under the distribution that they were sampled from; 0
                          outside the response.
        experts:          uint8 (n, (P+R) * B), with ``router_replay``: for each token but the last the numbers of its
                          experts (layers, k), in 8 bits where these suffice, else in 16; B bytes together.

        A batch with ``responses`` (n, R) and their ``response_mask`` continues these. Log-probs are then of the new
        tokens alone, experts also of the ones before, which this call has read. Further columns of the batch, int64
        (n,), each with a default:

        noise_step:     step of each row's noise; that of ``sampling``.
        noise_row:      number of each row in its noise; its own.
        searched_from:  its tokens that stop strings are not searched in; 0.
        most_tokens:    its new tokens at most, 1 or more; to the end of the response.

        With ``kept_slots`` a row whose step of noise, number and temperature are those of one before goes on with the
        keys and values of that one, as long as their ``period`` is the same, and until ``drop_kept_rows``.
        """
        ...

    def advance(self, source: RowSource, sampling: Sampling) -> None:
        """Sample from the rows of ``source`` until none goes on; each row gets the tokens of ``generate``.

        Here in rounds: the rows that are due are decoded to the last end. An engine that takes rows while it decodes
        others returns each to ``source`` when it has ended, so that the row goes on meanwhile.
        """
        while (batch := source.due(wait=True)) is not None:
            source.receive(batch, self.generate(batch, sampling))

    def drop_kept_rows(self) -> None:
        """Drop the keys and values of rows that ``kept_slots`` are for; an engine without such slots has none."""

    def forward(self, batch: Batch, columns: Sequence[Column], adapters: bool = True) -> dict[str, Tensor]:
        """Compute ``columns`` of every row in one pass, without gradients.

        Reads ``tokens`` and ``attention_mask`` (n, P+R). ``adapters`` False: with the base weights alone. Returns
        column name → float32 of the column's shape; 0 outside the response.
        """
        ...

    def train(self, parts: Sequence[tuple[Batch, Loss]]) -> Moments:
        """Make one optimizer step on the sum of the losses, each over its own mini-batch.

        Returns the statistics of the losses over this rank's rows, the learning rate, and the norm of the gradient
        before clipping. For a loss or gradient that no loss scale makes finite it changes neither weights nor the
        optimizer's state nor the schedule, and raises NonFiniteStep (engines/non_finite.py) on all ranks alike.
        """
        return self.backward(parts) | self.step(parts)

    def backward(self, parts: Sequence[tuple[Batch, Loss]]) -> Moments:
        """Add the gradients of the losses, each over its own mini-batch, for the next optimizer step.

        Returns the statistics of the losses over this rank's rows. The gradients stay on the device until ``step``.
        """
        ...

    def step(self, parts: Sequence[tuple[Batch, Loss]]) -> Moments:
        """Make one optimizer step on the gradients that ``backward`` has added, of ``parts`` in order.

        Returns the learning rate and the norm of the gradient, and raises NonFiniteStep, as ``train``.
        """
        ...

    def losses(self, parts: Sequence[tuple[Batch, Loss]]) -> Moments:
        """Compute the losses, each over its own mini-batch, in forward passes without gradients.

        Returns their statistics over this rank's rows, and ``total_loss``: this rank's part of their sum, with the
        weight 1 on the first data-parallel rank.
        """
        ...

    def weights(self) -> dict[str, Tensor]:
        """Return this rank's part of every parameter, by its Hugging Face (and peft) name.

        The tensors are live and may have any shape. Of a trained model they are the float32 master weights, where the
        engine can address them. Those of a copy that is not trained may lose their memory between two calls, and have
        other values when they get it back (``engines/host_offload.py``).
        """
        ...

    def lend(self, names: Sequence[str]) -> dict[str, Tensor]:
        """Return this rank's part of the named parameters as passes read them, for a copy to use until ``take_back``.

        They stay on the device if the model is offloaded. A copy that frees one restores it before it is taken back.
        """
        raise AssertionError(f"{type(self).__name__} lends no weights (weights/reuse.py)")

    def take_back(self, tensors: Sequence[Tensor] | None = None) -> None:
        """End the use of ``tensors`` by a copy; None: of all that are lent."""
        raise AssertionError(f"{type(self).__name__} lends no weights (weights/reuse.py)")

    def point_to(self, tensors: Mapping[str, Tensor]) -> None:
        """Use ``tensors`` as the named parameters of a model that is not trained, in place of memory of its own."""
        raise AssertionError(f"{type(self).__name__} uses no weights of others (weights/reuse.py)")

    def load_weights(self, weights: Mapping[str, Tensor]) -> None:
        """Overwrite this rank's part of the named parameters with tensors of as many elements, in any shape."""
        ...

    def weights_changed(self) -> None:
        """Discard results of weights that have since been overwritten in ``weights``."""
        ...

    def training_state(self) -> TrainingState:
        """Return the training state of a trained model, also while it is offloaded.

        The tensors are live unless the model is offloaded: before the first call of ``train``, whoever overwrites them,
        and the weights by ``load_weights``, restores a state.
        """
        ...

    def load_numbers(self, numbers: Mapping[str, float]) -> None:
        """Set the numbers of the training state, and the learning rate that follows from them."""
        ...

    def memory_usage(self) -> MemoryUsage:
        """Return the bytes of weights, gradients and optimizer state on this rank."""
        ...

    def offload(self, keeps: bool = True, changed: bool = True) -> None:
        """Move weights and optimizer state to host memory and free them on the device, until ``reload``.

        keeps:    False where whoever reloads overwrites all weights before they are read, so that none are copied.
        changed:  False where nothing has changed them since they were reloaded: host memory has their copy.
        """
        ...

    def reload(self) -> None:
        """Move back to the device the tensors that ``offload`` moved to host memory."""
        ...

    def close(self) -> None:
        """Free the model and whatever its library has started. No method may be called afterwards."""
        ...


def moments(values: Tensor, weights: Tensor | None = None) -> Tensor:
    """Return the weight, weighted sum and weighted sum of squares of ``values``: float64 (3,), without a gradient.

    ``weights``: of the shape of ``values``; None: 1 each.
    """
    values = values.detach().double()
    weights = torch.ones_like(values) if weights is None else weights.double()
    return torch.stack([weights.sum(), (weights * values).sum(), (weights * values * values).sum()])


def add_moments(total: Moments, part: Moments) -> None:
    """Add ``part`` to ``total``, in place; names that ``total`` lacks are new."""
    for name, value in part.items():
        total[name] = total[name] + value if name in total else value
