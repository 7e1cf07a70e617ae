"""Properties and speeds of a GPU, in a separate process: each row is printed as JSON once it is known.

    python -m benchmarks.gpu.measurements STAGE

If a measurement fails, or breaks the device for this process, earlier ones are kept.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Iterator

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from benchmarks.gpu.clock import TimeBudget, Unfinished
from benchmarks.gpu.communicators import of_one_rank
from benchmarks.gpu.decoding_speed import of_decoding
from benchmarks.gpu.machine import device_name
from benchmarks.gpu.results import Found, LeftOut, Row, printed_rows
from flexrlhf.config.placement_settings import ClusterSpec
from flexrlhf.engines.attention import PassAttention, attend
from flexrlhf.engines.language_head import token_logprobs
from flexrlhf.engines.sampling import gumbel_noise
from flexrlhf.launch.devices import why_no_gpu


def measured(stage: str, budget: TimeBudget) -> Iterator[Row | LeftOut]:
    """Run the measurements of a stage in a process of their own; yield a row for each that ended."""
    reason = ""
    try:
        printed = budget.run([sys.executable, "-m", __name__, stage])
    except Unfinished as error:
        printed, reason = error.printed, str(error)
    yield from printed_rows(stage, printed)
    if reason:
        yield LeftOut(stage, "later measurements", reason)


def of_device() -> Iterator[Found]:
    """Driver, CUDA, memory and the libraries that torch brings."""
    driver = (
        ClusterSpec.NVIDIA_DRIVER.read_text().splitlines()[0]
        if ClusterSpec.NVIDIA_DRIVER.is_file()
        else "none is loaded"
    )
    yield "driver", driver, {}
    if not torch.cuda.is_available():
        yield "GPU", why_no_gpu() or "none", {}
        return
    figures = torch.cuda.get_device_properties(0)
    free, total = torch.cuda.mem_get_info()
    found = f"{figures.name}, sm_{figures.major}{figures.minor}, {figures.multi_processor_count} multiprocessors"
    yield "GPU", f"{torch.cuda.device_count()} x {found}", {"count": torch.cuda.device_count()}
    yield "memory", f"{free / 1e9:.1f} of {total / 1e9:.1f} GB free with a context", {"free": free, "total": total}
    nccl = torch.cuda.nccl.version()  # type: ignore[no-untyped-call]
    cudnn = torch.backends.cudnn.version()  # type: ignore[no-untyped-call]
    libraries = {"CUDA": torch.version.cuda, "cuDNN": cudnn, "NCCL": nccl}
    yield "built for", ", ".join(f"{name} {version}" for name, version in libraries.items()), {}


def of_kernels() -> Iterator[Found]:
    """Kernels whose cost on a GPU was known only from others' reports."""
    is_gpu = device_name() == "cuda"
    yield from _attention(is_gpu)
    for width in (2048, 8192, 32768) if is_gpu else (256, 512):
        yield from _by_lengths(width, is_gpu)
    yield from _logprobs(is_gpu)
    vocabulary = 152_064 if is_gpu else 4096
    for rows in (64, 256):
        indices = torch.arange(rows, device=device_name())
        seconds = best_seconds(lambda: gumbel_noise(0, 0, indices, 3, vocabulary))  # noqa: B023
        yield f"exact noise, {rows} rows of {vocabulary}", f"{1e3 * seconds:.2f} ms", {"seconds": seconds}
    if is_gpu:
        yield from _copies()


def _attention(is_gpu: bool) -> Iterator[Found]:
    """Masked attention in bfloat16 of one key more in each call, as decoding has it."""
    rows, heads, first, calls = (32, 16, 256, 64) if is_gpu else (2, 4, 32, 16)
    for is_on in (False, True) if is_gpu else (False,):
        torch.backends.cuda.enable_cudnn_sdp(is_on)
        seconds = []
        for keys in range(first, first + calls):
            query = torch.randn(rows, heads, 1, 64, device=device_name(), dtype=torch.bfloat16)
            key = torch.randn(rows, heads, keys, 64, device=device_name(), dtype=torch.bfloat16)
            mask = torch.ones(rows, 1, 1, keys, device=device_name(), dtype=torch.bool)
            synchronize()
            began = time.perf_counter()
            scaled_dot_product_attention(query, key, key, attn_mask=mask)
            synchronize()
            seconds.append(time.perf_counter() - began)
        median = sorted(seconds[1:])[calls // 2]
        name = f"attention, {calls} growing lengths, cuDNN {'on' if is_on else 'off'}"
        yield name, f"{1e3 * median:.3f} ms each", {"seconds": median}
    torch.backends.cuda.enable_cudnn_sdp(False)


def _by_lengths(width: int, is_gpu: bool) -> Iterator[Found]:
    """Forward and backward attention of a row of 16 sequences, and of a prompt with 8 responses: by lengths, and under
    a mask, unless that has 2 GB."""
    dtype, heads = (torch.bfloat16, (14, 2)) if is_gpu else (torch.float32, (6, 2))
    inputs = [torch.randn(width, count, 64, device=device_name()).to(dtype) for count in (*heads, heads[1])]
    query, key, value = (tensor.requires_grad_() for tensor in inputs)
    part, half = width // 16, width // 2
    sequences = [(start, part) for start in range(0, width, part)]
    layouts = {
        "16 sequences": PassAttention.of(sequences, [], []),
        "8 responses": PassAttention.of([(0, half), *sequences[8:]], [(half, half)], [(0, half)]),
    }
    for name, attended in layouts.items():
        works: dict[str, Callable[[], Tensor]] = {"by lengths": lambda: attend(query, key, value, attended)}  # noqa: B023
        if width <= 8192:
            seen = torch.zeros(width, width, dtype=torch.bool, device=device_name())
            for spans in attended.parts:
                for (first, queries), (start, keys) in zip(spans.queries, spans.keys, strict=True):
                    seen[first : first + queries, start : start + keys] = True
            mask = torch.zeros(1, 1, width, width, dtype=dtype, device=device_name())
            mask.masked_fill_(~seen.tril(), torch.finfo(dtype).min)
            works["under a mask"] = lambda: _masked(query, key, value, mask)  # noqa: B023
        for way, work in works.items():
            seconds = best_seconds(lambda: torch.autograd.grad(work().sum(), (query, key, value)))  # noqa: B023
            yield f"attention of {name} in {width} tokens, {way}", f"{1e3 * seconds:.2f} ms", {"seconds": seconds}


def _masked(query: Tensor, key: Tensor, value: Tensor, mask: Tensor) -> Tensor:
    group = query.shape[1] // key.shape[1]
    keys, values = (each.transpose(0, 1)[None].repeat_interleave(group, 1) for each in (key, value))
    return scaled_dot_product_attention(query.transpose(0, 1)[None], keys, values, attn_mask=mask)


def _logprobs(is_gpu: bool) -> Iterator[Found]:
    """Log-probs of tokens, forward and backward, by how many logits exist at a time (``logits_mb``)."""
    tokens, hidden, vocabulary = (4096, 1536, 152_064) if is_gpu else (256, 64, 4096)
    dtype = torch.bfloat16 if is_gpu else torch.float32
    states = torch.randn(tokens, hidden, device=device_name()).to(dtype).requires_grad_()
    weight = torch.randn(vocabulary, hidden, device=device_name()).to(dtype).requires_grad_()
    targets = torch.randint(0, vocabulary, (tokens,), device=device_name())

    def work(megabytes: int) -> None:
        logprobs, _ = token_logprobs(states, weight, targets, chunk_elements=megabytes * 250_000)
        torch.autograd.grad(logprobs.sum(), (states, weight))

    for megabytes in (64, 512, 2048) if is_gpu else (1, 4):
        seconds = best_seconds(lambda: work(megabytes))  # noqa: B023
        name = f"log-probs of {tokens} tokens, logits_mb {megabytes}"
        yield name, f"{1e3 * seconds:.1f} ms", {"seconds": seconds}


def _copies() -> Iterator[Found]:
    """Transfers to host memory, as offloading makes them."""
    on_device = torch.empty(2**28, dtype=torch.uint8, device="cuda")
    for name in ("pageable", "pinned"):
        host = torch.empty(2**28, dtype=torch.uint8, pin_memory=name == "pinned")
        out, back = best_seconds(lambda: host.copy_(on_device)), best_seconds(lambda: on_device.copy_(host))  # noqa: B023
        rates = {"out": host.nbytes / out / 1e9, "back": host.nbytes / back / 1e9}
        yield f"copies, {name}", f"{rates['out']:.1f} GB/s out, {rates['back']:.1f} back", rates


def best_seconds(work: Callable[[], object], times: int = 5) -> float:
    """Return the time of ``work`` in seconds, the minimum of ``times`` after one that does not count."""
    found = []
    for _ in range(times + 1):
        synchronize()
        began = time.perf_counter()
        work()
        synchronize()
        found.append(time.perf_counter() - began)
    return min(found[1:])


def synchronize() -> None:
    """Wait until the GPU has done its work."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()


MEASUREMENTS = {"device": of_device, "nccl": of_one_rank, "kernels": of_kernels, "decoding": of_decoding}

if __name__ == "__main__":
    for row in MEASUREMENTS[sys.argv[1]]():
        print(json.dumps(row), flush=True)
