"""Tests of `make gpu`: one rank over NCCL, several ranks of one GPU over gloo, every installed engine.

With FLEXRLHF_TEST_DEVICE=cpu the same tests run on CPU ranks, except tests of the device itself.
"""

from __future__ import annotations

import time

import pytest
import torch
from cases import DEVICE, Case
from comparison import deviations
from launcher import Launches, params
from test_memory_measured import outcome_of
from test_precision import LIMITS

from flexrlhf.config.model_settings import ModelSpec
from flexrlhf.engines.base import Batch, Sampling
from flexrlhf.engines.decoding import Decoding
from flexrlhf.engines.host_offload import HostOffload
from flexrlhf.engines.models import load_model, use_kernels
from flexrlhf.engines.pass_settings import PassSettings
from flexrlhf.engines.sampling import gumbel_noise
from flexrlhf.operators.columns import Lengths
from flexrlhf.placement.layout import Layout
from flexrlhf.placement.placed import ModelName, PlacedModel
from flexrlhf.timeline import Timeline
from flexrlhf.trainer.flight_record import DeviceClock

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(900)]
EQUAL = [
    Case("two", "co-located", 1),
    Case("sft-adapters", "all", 1),
    # messages between ranks, weights to shadows, shards and models that take turns
    Case("streaming", "six-chunks", 2),
    Case("two", "co-located", 2, "torch-3"),
    Case("two", "co-located", 2, "tp"),
    Case("two", "co-located", 2, "deepspeed-3"),
    Case("four", "tight", 2),
    Case("grpo", "halves", 2),
    Case("four", "co-located", 1, rollout="vllm"),
]
WIDE = {
    "model_type": "llama",
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "vocab_size": 128,
}
"""Heads of 64, which every kernel of attention has."""
BF16 = [Case("sft", "all", 2, compute) for compute in ("bf16", "bf16-torch-3", "bf16-deepspeed-2")]


@pytest.fixture
def cuda() -> torch.device:
    if DEVICE != "cuda":
        pytest.skip("no CUDA device")
    return torch.device("cuda", 0)


@pytest.mark.parametrize("case", params(EQUAL))
def test_float32_equals_the_reference_on_the_cpu(launches: Launches, case: Case) -> None:
    first = next((d for d in deviations(launches.outcome(case)) if not d.size <= d.limit), None)
    assert first is None, f"{case.name}: {first}"


@pytest.mark.parametrize("case", params(BF16))
def test_bfloat16_on_forced_tokens_stays_near_float32(launches: Launches, case: Case) -> None:
    found = [d for d in deviations(launches.outcome(case)) if d.quantity in LIMITS]
    assert len(found) >= 9
    far = [d for d in found if not d.size <= LIMITS[d.quantity]]
    assert not far, f"{case.name}: {far[0].quantity} of step {far[0].step} is {far[0].size:.1e} off"


def test_planned_memory_is_allocated_memory(launches: Launches) -> None:
    outcome = outcome_of(launches.assets, "torch", 3)
    for rank, memory in enumerate(outcome.plan.memories):
        planned = memory.peak_bytes if DEVICE == "cuda" else memory.process_bytes
        measured = outcome.trace["otherData"]["peak_bytes"][str(rank)]
        print(f"rank {rank}: peak {planned / 1e6:.0f} MB planned, {measured / 1e6:.0f} MB measured")
        assert abs(measured - planned) < 0.25 * planned, (rank, planned, measured)


KERNELS = {
    "eager": {"attention": "eager"},
    "flex_attention": {"attention": "flex_attention"},
    "flash_attn": {"attention": "flash_attention_2", "dtype": "bfloat16"},
    "liger_kernel": {"liger": True},
    "compile": {"compile": True},
}


@pytest.mark.parametrize("name", KERNELS)
def test_kernels_equal_sdpa(name: str, cuda: torch.device) -> None:
    if name in ("flash_attn", "liger_kernel"):
        pytest.importorskip(name)
    tokens = torch.arange(96, device=cuda).view(2, 48) % WIDE["vocab_size"]
    mask = torch.ones_like(tokens)
    mask[0, :5] = 0
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    found = []
    for settings in ({}, KERNELS[name]):
        spec = ModelSpec(init=WIDE, **settings)
        model = load_model(PlacedModel(ModelName("actor"), Layout((0,)), True, spec, head="causal"), 0)
        model.to(cuda, torch.bfloat16 if "dtype" in KERNELS[name] else torch.float32)
        use_kernels(model, spec)
        logits = model(input_ids=tokens, attention_mask=mask, position_ids=positions, use_cache=False).logits[:, 5:]
        logits.float().square().mean().backward()
        found.append((logits.float(), model.model.layers[0].mlp.up_proj.weight.grad.float()))
    for plain, other in zip(*found, strict=True):
        assert distance(other, plain) < (2e-2 if "dtype" in KERNELS[name] else 1e-4)


def test_noise_is_that_of_the_cpu(cuda: torch.device) -> None:
    """Sampling by the kernel, if Triton finds a C compiler."""
    rows, positions = torch.tensor([0, 3, 77, 2**40]), torch.tensor([0, 5, 13, 4000])
    found = gumbel_noise(5, 9, rows.to(cuda), positions.to(cuda), 2500).cpu()
    torch.testing.assert_close(found, gumbel_noise(5, 9, rows, positions, 2500), rtol=1e-14, atol=1e-14)


def test_decoding_by_graphs_samples_the_same_tokens(cuda: torch.device) -> None:
    """With rows that end, slots that are refilled, and samples of one prompt."""
    lengths, spec = Lengths(prompt=24, response=80), ModelSpec(init=WIDE)
    model = load_model(PlacedModel(ModelName("actor"), Layout((0,)), False, spec, head="causal"), 0).to(cuda)
    generator = torch.Generator().manual_seed(0)
    read = torch.randint(1, lengths.prompt + 1, (24, 1), generator=generator).repeat_interleave(2, 0)
    mask = torch.arange(lengths.prompt) >= lengths.prompt - read
    tokens = torch.arange(mask.numel()).view(mask.shape) // (2 * lengths.prompt) * 7 % WIDE["vocab_size"]
    columns = {"prompts": (tokens * mask).int().to(cuda), "prompt_mask": mask.to(cuda, torch.uint8)}
    batch = Batch(columns, torch.arange(len(mask), device=cuda), 2)
    sampling = Sampling(seed=0, step=0, temperature=1.0, eos_token_ids=tuple(range(16)), pad_token_id=0)
    found = []
    for graphs in (False, True):
        settings = PassSettings(lengths, 256, shares=True, slots=True, graphs=graphs)
        decoding = Decoding(model, batch, sampling, lengths.response, settings)
        with torch.no_grad():
            assert all(decoding.calls(10))
        found.append(decoding.columns())
    assert int(found[0]["finished"].sum()) > 0
    for name in ("tokens", "response_mask"):
        assert torch.equal(found[0][name], found[1][name]), name
    assert distance(found[1]["rollout_logprobs"], found[0]["rollout_logprobs"]) < 1e-4


def distance(one: torch.Tensor, two: torch.Tensor) -> float:
    return float((one - two).norm() / two.norm())


def test_offloaded_tensors_leave_the_device_and_come_back(cuda: torch.device) -> None:
    whole = torch.arange(1_000_000, dtype=torch.float32, device=cuda)
    part, expected, before = whole[10:20], whole.cpu(), torch.cuda.memory_allocated()
    host_offload = HostOffload(cuda)
    host_offload.offload([whole, part])
    assert torch.cuda.memory_allocated() <= before - whole.numel() * 4
    assert torch.equal(host_offload.readable(part), expected[10:20])
    host_offload.reload()
    assert torch.equal(whole.cpu(), expected)
    part.fill_(7)
    assert whole[10:20].tolist() == [7.0] * 10


def test_a_span_lasts_as_long_as_the_device_works(cuda: torch.device) -> None:
    """A kernel that waits is queued at once; the following span begins when it ends."""
    timeline, began = Timeline(0, 10, DeviceClock(cuda)), time.time()
    waits = timeline.open("run", "waits", 0, None)
    torch.cuda._sleep(1_000_000_000)
    timeline.close(waits)
    queued = time.time() - began
    follows = timeline.open("run", "follows", 0, None)
    torch.zeros(1, device=cuda)
    timeline.close(follows)
    first, second = timeline.take()
    seconds = first.end - first.start
    assert seconds > 0.2 and seconds > 2 * queued
    assert first.end <= second.start + 1e-3 and second.end - second.start < seconds / 2


def test_runs_record_spans_in_order_on_the_device(launches: Launches) -> None:
    spans = launches.outcome(EQUAL[0]).spans
    assert all(span["dur"] >= 0 for span in spans)
    runs = sorted((span for span in spans if span["cat"] == "run"), key=lambda span: span["ts"])
    # one stream executes one after the other; microseconds are rounded
    assert all(one["ts"] + one["dur"] <= two["ts"] + 2 for one, two in zip(runs, runs[1:], strict=False))
