"""Tokens/s of decoding by transformers in waves, in slots, and in slots by CUDA graphs, of the same responses."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import replace

import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from benchmarks.gpu.machine import ON_CPU, ON_GPU, device_name
from benchmarks.gpu.results import Found
from flexrlhf.engines.base import Batch, Sampling
from flexrlhf.engines.decoding import Decoding, tokens_between_looks
from flexrlhf.engines.language_head import use_language_head
from flexrlhf.engines.pass_settings import PassSettings
from flexrlhf.operators.columns import Lengths

SAMPLES = 4


def of_decoding() -> Iterator[Found]:
    """Responses whose lengths differ much, by all rows at a time, and by a quarter of them."""
    # as in runs: it plans for each number of keys
    torch.backends.cuda.enable_cudnn_sdp(False)
    device = torch.device(device_name())
    is_gpu = device.type == "cuda"
    lengths = Lengths(prompt=256, response=512) if is_gpu else Lengths(prompt=32, response=48)
    rows = 128 if is_gpu else 32
    model, batch = _model(is_gpu, device), _prompts(rows, lengths.prompt, device)
    vocabulary = model.config.vocab_size
    # about geometric, the mean a quarter of the longest
    ends = tuple(range(4 * vocabulary // lengths.response))
    sampling = Sampling(seed=0, step=0, temperature=1.0, eos_token_ids=ends, pad_token_id=0)
    slots = PassSettings(lengths, 16384, shares=True, dtype=model.dtype, slots=True)
    ways = {"waves": replace(slots, slots=False), "slots": slots}
    ways |= {"slots, CUDA graphs": replace(slots, graphs=True)} if is_gpu else {}
    for together in (rows, rows // 4):
        first: Tensor | None = None
        for name, settings in ways.items():
            columns, seconds, calls = _generated(model, batch, sampling, settings, together)
            mask = columns["response_mask"].bool()
            tokens = int(mask.sum())
            texts = columns["tokens"][:, lengths.prompt :].where(mask, -1)
            first = texts if first is None else first
            # of 16-bit numbers ties are frequent, and a response goes on from another token
            others = int((texts != first).any(1).sum())
            found = (
                f"{tokens / seconds:.0f} tokens/s, {1e3 * seconds / calls:.2f} ms a pass, {calls} passes, a look every "
                f"{tokens_between_looks(device)}, {others} of {rows} responses differ, mean {tokens / rows:.0f} tokens"
            )
            figures = {"tokens_s": tokens / seconds, "seconds": seconds, "passes": calls, "others": others}
            yield f"decoding of {rows} rows, {together} at a time, {name}", found, figures


def _model(is_gpu: bool, device: torch.device) -> PreTrainedModel:
    """Return a model of 0.5 B parameters, on a CPU of 3 M."""
    config = ON_GPU.large[1] if is_gpu else ON_CPU.large[0]
    dtype = torch.bfloat16 if is_gpu else torch.float32
    torch.manual_seed(0)
    with device:
        model: PreTrainedModel = AutoModelForCausalLM.from_config(AutoConfig.for_model(**config), dtype=dtype)
    use_language_head(model)
    return model.eval().requires_grad_(False)


def _prompts(rows: int, longest: int, device: torch.device) -> Batch:
    generator = torch.Generator().manual_seed(0)
    lengths = torch.randint(longest // 4, longest + 1, (rows // SAMPLES, 1), generator=generator)
    mask = (torch.arange(longest) >= longest - lengths).to(torch.uint8)
    tokens = torch.randint(1000, 2000, mask.shape, generator=generator, dtype=torch.int32) * mask
    columns = {"prompts": tokens, "prompt_mask": mask}
    repeated = {name: column.repeat_interleave(SAMPLES, 0).to(device) for name, column in columns.items()}
    return Batch(repeated, torch.arange(rows, device=device), SAMPLES)


@torch.no_grad()
def _generated(
    model: PreTrainedModel, batch: Batch, sampling: Sampling, settings: PassSettings, together: int
) -> tuple[dict[str, Tensor], float, int]:
    """Return responses, and the time and model calls of a generation, after a few tokens that warm up."""
    seconds, calls, columns = 0.0, 0, dict[str, Tensor]()
    for most in (8, settings.lengths.response):
        began = time.perf_counter()
        limited = batch.with_columns({"most_tokens": torch.full_like(batch.rows, most)})
        decoding = Decoding(model, limited, sampling, settings.lengths.response, settings)
        calls = sum(decoding.calls(together))
        columns = {name: column.cpu() for name, column in decoding.columns().items()}
        seconds = time.perf_counter() - began
    return columns, seconds, calls
