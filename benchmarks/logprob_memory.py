"""Memory and time of token log-probs: all logits at once, and in chunks. Forward and backward, float32, one thread.

``python benchmarks/logprob_memory.py``. Peaks do not count the weight and its gradient, which both have.
"""

from __future__ import annotations

import os
import timeit
from collections.abc import Callable
from functools import partial
from itertools import accumulate

import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

from flexrlhf.engines.language_head import token_logprobs

ROWS, HIDDEN = 1024, 64
CHUNK_ELEMENTS = 2**22


def plain(hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    return (hidden @ weight.t()).float().log_softmax(-1).gather(1, targets[:, None])


def chunked(hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    return token_logprobs(hidden, weight, targets, chunk_elements=CHUNK_ELEMENTS)[0]


def train(function: Callable[..., Tensor], hidden: Tensor, weight: Tensor, targets: Tensor) -> None:
    torch.autograd.grad(function(hidden, weight, targets).sum(), (hidden, weight))


def peak_bytes(work: Callable[[], None], ignored: int) -> int:
    """Return the peak bytes of tensors, without tensors of exactly ``ignored`` bytes: the weight's gradient."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True, acc_events=True) as profiled:
        work()
    events = sorted(profiled.profiler.kineto_results.events(), key=lambda event: event.start_ns())
    changes = [event.nbytes() for event in events if event.name() == "[memory]"]
    return max(accumulate(change for change in changes if abs(change) != ignored))


def seconds(work: Callable[[], None]) -> float:
    return min(timeit.repeat(work, number=1, repeat=3))


def main() -> None:
    torch.set_num_threads(1)
    # the profiler writes a line at every start and stop
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")
    print(f"{'vocabulary':>10} {'plain MiB':>10} {'chunked MiB':>12} {'plain s':>9} {'chunked s':>10}")
    for vocabulary in (2**13, 2**15, 2**17):
        torch.manual_seed(0)
        hidden, weight = (torch.randn(size, HIDDEN, requires_grad=True) for size in (ROWS, vocabulary))
        targets = torch.randint(vocabulary, (ROWS,))
        works = [partial(train, function, hidden, weight, targets) for function in (plain, chunked)]
        peaks = [peak_bytes(work, weight.nbytes) / 2**20 for work in works]
        times = [seconds(work) for work in works]
        print(f"{vocabulary:>10} {peaks[0]:>10.1f} {peaks[1]:>12.1f} {times[0]:>9.2f} {times[1]:>10.2f}", flush=True)


if __name__ == "__main__":
    main()
