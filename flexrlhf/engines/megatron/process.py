"""Parts of Megatron-Core that a process has once: a buffer, a random state, the classes of its optimizers."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import megatron.core.optimizer as optimizers
import torch
from megatron.core import parallel_state, tensor_parallel

RANDOM_STATE = "model-parallel-rng"
"""Name of the random state that layers fork under sequence parallelism."""


def prepare_process(seed: int) -> None:
    """Make the buffer for gathered activations, and a random state, on which no number depends: dropout is off."""
    if parallel_state._GLOBAL_MEMORY_BUFFER is None:
        parallel_state._set_global_memory_buffer()
    tracker = tensor_parallel.get_cuda_rng_tracker()
    if RANDOM_STATE not in tracker.get_states():
        tracker.add(RANDOM_STATE, seed)


def free_buffer() -> None:
    """Free the buffer for gathered activations, which no plan contains between calls."""
    parallel_state.get_global_memory_buffer().buffer.clear()


def mark_as_shard(parameter: Any) -> None:
    """Mark a parameter that is split over tensor-parallel ranks, of which the norm of all gradients counts each part.

    Megatron does so where it initialises weights.
    """
    parameter.tensor_model_parallel = True


@contextmanager
def torch_optimizers() -> Iterator[None]:
    """Make Megatron construct torch's optimizers, also where TransformerEngine or apex are installed.

    Theirs count updates elsewhere, and round in other places than those of the other engines.
    """
    before = optimizers.USING_PYTORCH_OPTIMIZER, optimizers.SGD
    optimizers.USING_PYTORCH_OPTIMIZER, optimizers.SGD = True, torch.optim.SGD
    try:
        yield
    finally:
        optimizers.USING_PYTORCH_OPTIMIZER, optimizers.SGD = before
