"""The rollout engine on vLLM: the same tokens as a plain loop over a transformers model, whatever is around it."""

from __future__ import annotations

import multiprocessing
import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
import torch.distributed as dist
from forked import run_ranks
from scripted_rows import ScriptedRows, random_delays
from small_models import in_segments, peak_bytes
from torch import Tensor
from torch.testing._internal.distributed import fake_pg  # noqa: F401  registers the backend
from transformers import AutoModelForCausalLM

from flexrlhf.placement.placement import Placement

pytest.importorskip("vllm")

from vllm.v1.core.sched.scheduler import Scheduler  # noqa: E402
from vllm_models import (  # noqa: E402
    CUT,
    END,
    GPT_OSS,
    LENGTHS,
    MISTRAL,
    MIXTRAL,
    OLMOE,
    ONE_KEY_HEAD,
    QWEN2,
    QWEN2_MOE,
    QWEN3,
    QWEN3_MOE,
    SEED,
    engine_context,
    flat,
    other_weights,
    placed,
    prompts,
    sampling,
)

from flexrlhf.config.model_settings import LoraSpec  # noqa: E402
from flexrlhf.config.spec import SyncSpec  # noqa: E402
from flexrlhf.engines.base import Batch, Engine, Sampling  # noqa: E402
from flexrlhf.engines.host_offload import storage_bytes  # noqa: E402
from flexrlhf.engines.models import load_model  # noqa: E402
from flexrlhf.engines.sampling import gumbel_noise  # noqa: E402
from flexrlhf.engines.vllm.engine import VllmEngine  # noqa: E402
from flexrlhf.engines.vllm.instance import model_directory  # noqa: E402
from flexrlhf.engines.vllm.restarts import RolloutProcessError  # noqa: E402
from flexrlhf.memory.budget import Compute, SequenceLengths, Sizing  # noqa: E402
from flexrlhf.memory.engine_bytes import model_state  # noqa: E402
from flexrlhf.operators.columns import Lengths  # noqa: E402
from flexrlhf.runs.model_directory import ModelDirectory  # noqa: E402
from flexrlhf.weights.shapes import model_shape  # noqa: E402

Columns = dict[str, Tensor]
RESPONSE = LENGTHS.response
PLAIN = {"temperature": 0.7, "top_p": 0.8, "top_k": 5, "min_tokens": 3}


@pytest.fixture(scope="module")
def engine() -> Iterator[VllmEngine]:
    made = VllmEngine(engine_context(placed()))
    yield made
    made.close()


@pytest.fixture(scope="module")
def seeded() -> Iterator[VllmEngine]:
    """Engine with vLLM's own noise."""
    made = VllmEngine(engine_context(placed(noise="engine")))
    yield made
    made.close()


# --- the reference: one row after the other, without a cache


def reference(model: torch.nn.Module, batch: Batch, sampling: Sampling) -> Columns:
    rows = [response(model, batch, number, sampling) for number in range(len(batch))]
    out = {name: torch.zeros(len(batch), RESPONSE) for name in ("tokens", "rollout_logprobs")}
    for number, (tokens, logprobs) in enumerate(rows):
        out["tokens"][number, : len(tokens)] = torch.tensor(tokens)
        out["rollout_logprobs"][number, : len(tokens)] = torch.tensor(logprobs)
    out["tokens"] = out["tokens"].int()
    out["response_mask"] = torch.tensor([[int(t < len(tokens)) for t in range(RESPONSE)] for tokens, _ in rows])
    out["finished"] = torch.tensor([int(is_finished(tokens, sampling)) for tokens, _ in rows])
    return out


@torch.no_grad()
def response(model: Any, batch: Batch, number: int, sampling: Sampling) -> tuple[list[int], list[float]]:
    text = batch["prompts"][number][batch["prompt_mask"][number].bool()].long()
    tokens: list[int] = []
    logprobs: list[float] = []
    while len(tokens) < RESPONSE and not is_finished(tokens, sampling):
        scores = model(torch.cat([text, torch.tensor(tokens, dtype=torch.int64)])[None]).logits[0, -1].double()
        if len(tokens) < sampling.min_tokens:
            scores[list(sampling.eos_token_ids)] = -torch.inf
        scores = cut(scores / (sampling.temperature or 1.0), sampling)
        noise = gumbel_noise(sampling.seed, sampling.step, batch.rows[number : number + 1], len(tokens), len(scores))
        tokens.append(int((scores + noise[0] * (sampling.temperature > 0)).argmax()))
        logprobs.append(float(scores.log_softmax(0)[tokens[-1]]))
    return tokens, logprobs


def cut(scores: Tensor, sampling: Sampling) -> Tensor:
    """The ``top_k`` likeliest, and of these as many of the likeliest as make up ``top_p``."""
    order = scores.argsort(descending=True)[: sampling.top_k or None]
    before = scores[order].softmax(0).cumsum(0).roll(1)
    before[0] = 0
    kept = order[before < sampling.top_p]
    return torch.full_like(scores, -torch.inf).index_copy(0, kept, scores[kept])


def is_finished(tokens: Sequence[int], sampling: Sampling) -> bool:
    if not tokens:
        return False
    text = sampling.decode(tokens) if sampling.decode else ""
    return tokens[-1] in sampling.eos_token_ids or any(stop in text for stop in sampling.stop)


def check(generated: Columns, batch: Batch, expected: Columns) -> None:
    for name in ("finished", "response_mask"):
        assert torch.equal(generated[name].long(), expected[name]), name
    assert torch.equal(generated["tokens"][:, : LENGTHS.prompt], batch["prompts"])
    assert torch.equal(generated["tokens"][:, LENGTHS.prompt :], expected["tokens"])
    assert torch.equal(generated["attention_mask"], torch.cat([batch["prompt_mask"], generated["response_mask"]], 1))
    difference = (generated["rollout_logprobs"] - expected["rollout_logprobs"]).abs().max()
    assert difference <= 1e-4, float(difference)
    types = {"tokens": torch.int32, "rollout_logprobs": torch.float32}
    assert all(tensor.dtype == types.get(name, torch.uint8) for name, tensor in generated.items())


def same(one: Columns, other: Columns) -> bool:
    """The same responses; log-probs by the rounding of other batches."""
    exact = all(torch.equal(one[name], other[name]) for name in one if name != "rollout_logprobs")
    return exact and torch.allclose(one["rollout_logprobs"], other["rollout_logprobs"], rtol=0, atol=1e-4)


def joined(parts: Sequence[Columns]) -> Columns:
    return {name: torch.cat([part[name] for part in parts]) for name in parts[0]}


def letters(tokens: Sequence[int]) -> str:
    return "".join(chr(ord("a") + token % 26) for token in tokens)


# --- sampled responses


@pytest.mark.parametrize(
    "changes",
    [
        {"temperature": 0.0},
        {},
        {"temperature": 0.7},
        PLAIN,
        {"temperature": 0.0, "min_tokens": RESPONSE},
        {"eos_token_ids": (END, 5, 17, 23, 31, 40, 44, 50, 63, 70, 77, 81, 90, 99, 150)},
        {"stop": ("a", "xy"), "decode": letters},
    ],
    ids=["greedy", "whole", "sharper", "cut", "long", "ends", "stop"],
)
def test_responses_equal_a_plain_loop(engine: VllmEngine, changes: dict[str, Any]) -> None:
    how, batch = sampling(**changes), prompts(8)
    expected = reference(load_model(placed(), SEED), batch, how)
    check(engine.generate(batch, how), batch, expected)
    assert expected["finished"].any() or changes.get("min_tokens") or not changes.get("stop")


@pytest.mark.parametrize(
    "init",
    # the other tests have Llama, and Qwen2's biases on two ranks; Mistral's weights are fused as Llama's, dense layers
    # with norms of heads are one of two in a model with experts
    [
        *(pytest.param(init, marks=pytest.mark.full) for init in (QWEN2, QWEN3, MISTRAL, QWEN2_MOE, OLMOE, GPT_OSS)),
        QWEN3_MOE,
        MIXTRAL,
    ],
    ids=lambda init: init["model_type"],
)
def test_families(init: dict[str, Any]) -> None:
    model, batch = placed(init), prompts(4)
    own = load_model(model, SEED)
    made = VllmEngine(engine_context(model))
    check(made.generate(batch, sampling()), batch, reference(own, batch, sampling()))
    sizes = {name: tensor.numel() for name, tensor in made.weights().items()}
    shape = model_shape("actor", model.settings)
    assert shape is not None
    assert sizes == {name: part.num_elements for name, part in shape.parts_on(model, 0).items()}
    assert all(torch.equal(tensor, made.weights()[name]) for name, tensor in own.named_parameters())
    changed = other_weights(model)
    made.load_weights(flat(changed))
    check(made.generate(batch, sampling()), batch, reference(changed, batch, sampling()))
    made.close()


def test_files_with_a_value_head_are_read_as_a_policy(tmp_path: Path) -> None:
    model, batch = placed(), prompts(4)
    trunk = load_model(replace(model, head="both"), SEED + 1)
    ModelDirectory(tmp_path / "trunk").save({n: w.detach() for n, w in trunk.named_parameters()}, trunk.config)
    settings = model.settings.model_copy(update={"path": str(tmp_path / "trunk"), "init": None})
    made = VllmEngine(engine_context(replace(model, settings=settings)))
    check(made.generate(batch, sampling()), batch, reference(load_model(model, SEED + 1), batch, sampling()))
    assert "score.weight" not in made.weights()
    made.close()


def test_every_rank_writes_the_initial_weights() -> None:
    """Transformers' own ``save_pretrained`` writes on rank 0 of the world alone."""
    context = engine_context(placed(MIXTRAL, ranks=(1,)))
    expected = load_model(context.placed, SEED)
    dist.init_process_group("fake", rank=1, world_size=2, store=dist.HashStore())
    try:
        with model_directory(context) as directory:
            found = AutoModelForCausalLM.from_pretrained(directory)
    finally:
        dist.destroy_process_group()
    weights = dict(found.named_parameters())
    assert all(torch.equal(weight, weights[name]) for name, weight in expected.named_parameters())


@pytest.mark.parametrize("noise", ["engine", "exact"])
def test_responses_do_not_depend_on_the_batch(engine: VllmEngine, seeded: VllmEngine, noise: str) -> None:
    made, batch, how = engine if noise == "exact" else seeded, prompts(10), sampling(**PLAIN)
    whole = made.generate(batch, how)
    for size in (5, 1):
        parts = [made.generate(batch.select(slice(i, i + size)), how) for i in range(0, 10, size)]
        assert same(whole, joined(parts)), size
    assert not same(whole, made.generate(batch, sampling(**{**PLAIN, "step": 3})))
    assert not same(whole, made.generate(batch, sampling(**{**PLAIN, "seed": 8})))


@pytest.mark.parametrize("noise", ["engine", "exact"])
def test_ids_that_are_padding_are_not_sampled(engine: VllmEngine, seeded: VllmEngine, noise: str) -> None:
    made, batch = engine if noise == "exact" else seeded, prompts(10)
    for changes in ({}, {"temperature": 0.0}, {"top_k": 5}):
        whole, part = (made.generate(batch, sampling(**changes, num_ids=limit)) for limit in (None, 12))
        sampled = [each["tokens"][:, -RESPONSE:][each["response_mask"].bool()] for each in (whole, part)]
        assert int(sampled[0].max()) >= 12 > int(sampled[1].max())


@pytest.mark.parametrize("noise", ["exact", pytest.param("engine", marks=pytest.mark.full)])
def test_rows_that_are_put_back_sample_the_same_tokens(noise: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A cache with ten pages admits five rows, each of which grows to five pages."""
    lengths, batch = Lengths(prompt=40, response=100), prompts(8, samples_per_prompt=2)
    how = sampling(eos_token_ids=(END, 5, 17), min_tokens=60)
    found, put_back = [], list[str]()
    preempt = Scheduler._preempt_request

    def counted(scheduler: Scheduler, request: Any, *others: Any, **named: Any) -> None:
        put_back.append(request.request_id)
        preempt(scheduler, request, *others, **named)

    monkeypatch.setattr(Scheduler, "_preempt_request", counted)
    for tokens in (16 * 160, 320):
        model = placed(kv_tokens=tokens, noise=noise)
        made = VllmEngine(replace(engine_context(model), lengths=lengths))
        found.append(made.generate(batch, how))
        sizes = [made._vllm.engine.vllm_config.scheduler_config.max_num_seqs, len(put_back)]
        assert sizes == [40, 0] if tokens > 320 else sizes[0] == 5 and sizes[1] > 3, sizes
        made.close()
    assert same(*found)
    assert found[0]["response_mask"].sum(1).unique().numel() > 3


@pytest.mark.parametrize("kv_tokens", [320, pytest.param(16 * 160, marks=pytest.mark.full)])
def test_generation_takes_at_most_its_planned_memory(kv_tokens: int) -> None:
    """The cache has all rows, or two of full length, so that rows are computed again."""
    lengths, model = Lengths(prompt=40, response=100), placed(kv_tokens=kv_tokens)
    shape = model_shape("actor", model.settings)
    assert shape is not None
    texts = SequenceLengths(lengths.prompt, lengths.response)
    sizing = Sizing(Placement((model,), 1), {"actor": shape}, texts, SyncSpec())
    (phase,) = sizing.phases(Compute("generate", model.name, 16), 0)
    made = VllmEngine(replace(engine_context(model), lengths=lengths))
    how, batch = sampling(min_tokens=100, top_p=0.9), prompts(16)
    made.generate(batch, how)
    (caches,) = made._vllm.engine.collective_rpc("caches")
    assert storage_bytes(caches) <= sizing.kv_bytes(model)
    assert peak_bytes(lambda: made.generate(batch, replace(how, step=9))) <= phase.part_bytes
    made.close()


def test_samples_of_a_prompt_are_rows_of_their_own(engine: VllmEngine) -> None:
    batch = prompts(3, samples_per_prompt=4)
    generated = engine.generate(batch, sampling())
    check(generated, batch, reference(load_model(placed(), SEED), batch, sampling()))
    responses = generated["tokens"][:, LENGTHS.prompt :].view(3, 4, RESPONSE)
    assert all(len({tuple(response) for response in responses[prompt].tolist()}) > 1 for prompt in range(3))


def test_no_rows(engine: VllmEngine) -> None:
    generated = engine.generate(prompts(4).select(slice(0, 0)), sampling())
    assert {name: tuple(tensor.shape) for name, tensor in generated.items()} == {
        "tokens": (0, LENGTHS.prompt + RESPONSE),
        "attention_mask": (0, LENGTHS.prompt + RESPONSE),
        "response_mask": (0, RESPONSE),
        "finished": (0,),
        "rollout_logprobs": (0, RESPONSE),
    }


@pytest.mark.parametrize(
    "changes",
    [{}, PLAIN, {"eos_token_ids": tuple(range(40)), "min_tokens": 3}, {"stop": ("a", "xy"), "decode": letters}],
    ids=["whole", "cut", "ends", "stop"],
)
def test_segments_are_the_response_that_is_generated_whole(engine: VllmEngine, changes: dict[str, Any]) -> None:
    how, batch = sampling(**changes), prompts(4, samples_per_prompt=2)
    whole = engine.generate(batch, how)
    for tokens in (1, RESPONSE // 3, RESPONSE - 1):
        assert same(in_segments(engine.generate, batch, how, tokens, RESPONSE), whole), tokens


# --- rows that go on inside one call


def turns(rows: Batch, how: Sampling, seed: int, longest: int = 20) -> ScriptedRows:
    """Rows with up to 4 turns of 1 to 4 tokens, and replies after up to ``longest`` questions."""
    return ScriptedRows(rows, how, RESPONSE, 4, random_delays(seed, longest), lambda row, turn: 1 + (row + turn) % 4)


def advanced(engine: VllmEngine, rows: ScriptedRows, how: Sampling) -> Columns:
    before = engine.num_requests
    engine.advance(rows, how)
    assert not rows.out and engine.num_requests - before == sum(rows.batches)
    return rows.columns()


def assert_same_turns(one: Columns, other: Columns) -> None:
    assert all(torch.equal(one[name], other[name]) for name in ("tokens", "sampled"))
    assert torch.allclose(one["logprobs"], other["logprobs"], rtol=0, atol=1e-4)


@pytest.mark.parametrize("changes", [{}, {"stop": ("a", "xy"), "decode": letters}], ids=["plain", "stop"])
def test_rows_go_on_in_any_order_of_replies(engine: VllmEngine, changes: dict[str, Any]) -> None:
    """As in rounds, in which each turn waits for the slowest reply."""
    how, batch = sampling(**changes), prompts(6, samples_per_prompt=2)
    expected = turns(batch, how, 0, longest=0)
    Engine.advance(engine, expected, how)
    for seed in range(3):
        assert_same_turns(advanced(engine, turns(batch, how, seed), how), expected.columns())


def test_other_rows_go_on_while_a_slow_one_is_decoded(engine: VllmEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    steps, step = [], engine._vllm.engine.step
    monkeypatch.setattr(engine._vllm.engine, "step", lambda: steps.append(1) or step())
    how, batch = sampling(eos_token_ids=()), prompts(6)
    found = []

    def slow(row: int, turn: int) -> int:
        return RESPONSE - 1 if row == 2 and turn == 0 else 1

    for advance in (VllmEngine.advance, Engine.advance):
        rows = ScriptedRows(batch, how, RESPONSE, 4, lambda row, turn: 0, slow)
        steps.clear()
        advance(engine, rows, how)
        found.append((len(steps), rows.columns()))
    (one_by_one, columns), (in_rounds, expected) = found
    assert_same_turns(columns, expected)
    assert one_by_one < in_rounds == RESPONSE - 1 + 3


# --- batches ahead


def test_rows_ahead_are_decoded_together(engine: VllmEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    steps = []
    step = engine._vllm.engine.step
    monkeypatch.setattr(engine._vllm.engine, "step", lambda: steps.append(1) or step())
    batch, how = prompts(6), sampling(eos_token_ids=(END, 5, 17, 23, 31, 40))
    thirds = [batch.select(slice(i, i + 2)) for i in range(0, 6, 2)]
    before = engine.num_requests
    apart = joined([engine.generate(third, how) for third in thirds])
    num_apart = len(steps)
    together = [engine.generate(third, how, thirds[number + 1 :]) for number, third in enumerate(thirds)]
    assert same(apart, joined(together))
    assert len(steps) - num_apart < 0.6 * num_apart
    assert engine.num_requests == before + 12


def test_rows_of_another_step_are_other_requests(engine: VllmEngine) -> None:
    first, second = prompts(4), prompts(4, first=4)
    fresh = engine.generate(second, sampling(step=3))
    engine.generate(first, sampling(), [second])
    assert same(fresh, engine.generate(second, sampling(step=3)))
    assert not same(fresh, engine.generate(second, sampling()))


# --- weights


def test_new_weights_count_at_once(engine: VllmEngine) -> None:
    changed, batch, how = other_weights(placed()), prompts(4), sampling()
    old = engine.generate(batch, how)
    kept = {name: tensor.clone() for name, tensor in engine.weights().items()}
    engine.load_weights(flat(changed))
    # the same prompts, whose keys and values were kept
    generated = engine.generate(batch, how)
    check(generated, batch, reference(changed, batch, how))
    assert not same(old, generated)
    engine.load_weights(kept)
    assert same(old, engine.generate(batch, how))


def test_weights_do_not_change_under_a_request(engine: VllmEngine) -> None:
    first, second = prompts(4), prompts(4, first=4)
    engine.generate(first, sampling(), [second])
    with pytest.raises(AssertionError, match="between"):
        engine.load_weights({})
    engine.generate(second, sampling())


def test_offloaded_memory_is_free_and_comes_back(engine: VllmEngine) -> None:
    batch, before = prompts(4), engine.memory_usage()
    generated = engine.generate(batch, sampling())
    engine.offload()
    (parameters,), (caches,) = (engine._vllm.engine.collective_rpc(which) for which in ("parameters", "caches"))
    assert {tensor.untyped_storage().nbytes() for tensor in (*parameters, *caches)} == {0}
    offloaded = engine.memory_usage()
    assert offloaded.weights == before.weights and offloaded.host >= before.weights and not before.host
    engine.reload()
    assert engine.memory_usage() == before
    # a sync comes first, without the memory of the cache; an engine may sleep again after it
    assert storage_bytes(caches) == 0 < storage_bytes(parameters)
    engine.offload()
    engine.reload()
    assert same(generated, engine.generate(batch, sampling()))
    assert storage_bytes(caches) > 0


def test_weights_that_a_sync_brings_leave_no_copy(engine: VllmEngine) -> None:
    batch, before = prompts(4), engine.memory_usage()
    weights = {name: values.clone() for name, values in engine.weights().items()}
    generated = engine.generate(batch, sampling())
    engine.offload(keeps=False)
    assert engine.memory_usage() == before
    engine.reload()
    # so that weights that are not overwritten are noticed
    for values in engine.weights().values():
        values.fill_(torch.nan)
    engine.load_weights(weights)
    assert same(generated, engine.generate(batch, sampling()))


# --- errors that stop the job


def everything() -> dict[str, Any]:
    state = numpy.random.get_state()
    return {
        "environment": dict(os.environ),
        "generators": (torch.get_rng_state().tolist(), random.getstate(), state[1].tolist(), state[2]),
        "functions": (torch.set_num_threads, torch.Event, torch.cuda.Stream, torch.Tensor.pin_memory, dist.new_group),
        "settings": (torch.get_num_threads(), torch.get_default_dtype(), torch.get_float32_matmul_precision()),
        "processors": os.sched_getaffinity(0),
        "groups": list(dist.distributed_c10d._world.pg_names.values()),
        "world": dist.GroupMember.WORLD,
    }


def test_the_process_is_left_as_it_was() -> None:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    group = dist.new_group([0])
    before = everything()
    made = VllmEngine(engine_context(placed()))
    kept = everything()
    made.generate(prompts(2), sampling())
    other = VllmEngine(engine_context(placed(noise="engine")))
    other.generate(prompts(2), sampling())
    made.generate(prompts(2), sampling())
    made.close()
    other.generate(prompts(2), sampling())
    other.close()
    after = everything()
    number = torch.ones(1)
    dist.all_reduce(number, group=group)
    dist.all_reduce(number)
    dist.destroy_process_group()
    assert {name for name in before if before[name] != after[name]} == set()
    assert {name for name in before if before[name] != kept[name]} == {"groups"}


# --- a separate process


def in_shared_memory() -> set[str]:
    return set(os.listdir("/dev/shm"))


def is_running(pid: int) -> bool:
    stat = Path(f"/proc/{pid}/stat")
    return stat.exists() and stat.read_text().rpartition(")")[2].split()[0] not in "XZ"


def comes(about: Callable[[], bool], seconds: float = 20) -> bool:
    deadline = time.monotonic() + seconds
    while not about() and time.monotonic() < deadline:
        time.sleep(0.05)
    return about()


# --- adapters that are not merged


@pytest.mark.parametrize("process", ["inline", pytest.param("child", marks=pytest.mark.full)])
def test_adapters_alone_change_the_policy(process: str, tmp_path: Path) -> None:
    """One of three layers that vLLM fuses has an adapter, with 3 of the 8 rows that vLLM allocates; it starts with the
    ones of a directory."""
    lora = LoraSpec(rank=3, alpha=5, targets=("q_proj", "o_proj", "up_proj", "down_proj"))
    plain, batch = placed(QWEN2, process=process), prompts(4)
    load_model(plain, SEED).save_pretrained(tmp_path / "base")
    source = {"init": None, "path": str(tmp_path / "base"), "lora": lora}
    model = replace(plain, settings=plain.settings.model_copy(update=source))
    shape = model_shape("actor", model.settings)
    assert shape is not None
    adapted, trained = shape.with_adapters("actor", lora), load_model(model, SEED)
    with torch.no_grad():
        for name, parameter in trained.named_parameters():
            if name in adapted.adapters:
                parameter.copy_(0.3 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(1)))
    stored = {name: each.detach() for name, each in trained.named_parameters() if name in adapted.adapters}
    ModelDirectory(tmp_path / "adapters").save_adapters(stored, model.settings)
    start = {"path": str(tmp_path / "adapters"), "lora": lora.model_copy(update={"new": False})}
    model = replace(model, settings=model.settings.model_copy(update=start))
    made, expected = VllmEngine(engine_context(model)), reference(trained, batch, sampling())
    check(made.generate(batch, sampling()), batch, expected)
    sizes = {name: tuple(tensor.shape) for name, tensor in made.weights().items()}
    assert sizes == dict(adapted.parameters)
    assert made.memory_usage().weights == model_state(model, adapted, 0).weights
    made.load_weights({name: torch.zeros_like(each) for name, each in stored.items()})
    before = reference(load_model(plain, SEED), batch, sampling())
    check(made.generate(batch, sampling()), batch, before)
    assert not same(expected, before)
    made.load_weights({name: tensor for name, tensor in flat(trained).items() if name in adapted.adapters})
    check(made.generate(batch, sampling()), batch, expected)
    if process == "inline":
        made.offload()
        assert {tensor.untyped_storage().nbytes() for tensor in made.weights().values()} == {0}
        made.reload()
        check(made.generate(batch, sampling()), batch, expected)
    made.close()


@pytest.fixture(scope="module")
def child() -> Iterator[VllmEngine]:
    before = in_shared_memory()
    made = VllmEngine(engine_context(placed(process="child", max_restarts=0)))
    yield made
    made.close()
    assert comes(lambda: in_shared_memory() <= before), in_shared_memory() - before


def test_a_child_generates_the_same(child: VllmEngine) -> None:
    model, batch, how = load_model(placed(), SEED), prompts(8), sampling(**PLAIN)
    assert child.child_pid is not None and is_running(child.child_pid)
    expected = reference(model, batch, how)
    check(child.generate(batch, how), batch, expected)
    kept = {name: tensor.clone() for name, tensor in child.weights().items()}
    assert all(torch.equal(tensor, kept[name]) for name, tensor in model.named_parameters())
    changed = other_weights(placed())
    child.load_weights(flat(changed))
    check(child.generate(batch, how), batch, reference(changed, batch, how))
    child.load_weights(kept)
    check(child.generate(batch, how), batch, expected)
    stopped = sampling(stop=("a", "xy"), decode=letters)
    check(child.generate(batch, stopped), batch, reference(load_model(placed(), SEED), batch, stopped))


def test_rows_go_on_in_a_child(child: VllmEngine, engine: VllmEngine) -> None:
    how, batch = sampling(), prompts(6)
    expected = advanced(engine, turns(batch, how, 1), how)
    assert_same_turns(advanced(child, turns(batch, how, 2), how), expected)


def test_a_child_decodes_by_itself(child: VllmEngine) -> None:
    first, second = prompts(2), prompts(8, first=2)
    child.generate(first, sampling(), [second])
    outputs = child._vllm.engine.engine_core.outputs_queue
    # steps that were not requested
    assert comes(lambda: outputs.qsize() >= RESPONSE // 2)
    check(child.generate(second, sampling()), second, reference(load_model(placed(), SEED), second, sampling()))


def test_a_child_that_is_killed_is_named(child: VllmEngine) -> None:
    """The last test with this child."""
    assert child.child_pid is not None
    threading.Timer(0.3, os.kill, (child.child_pid, signal.SIGKILL)).start()
    began = time.monotonic()
    with pytest.raises(RolloutProcessError) as error:
        for step in range(100_000):
            child.generate(prompts(4), sampling(step=step))
    assert time.monotonic() - began < 10
    assert str(error.value) == f"actor.rollout: the vLLM process {child.child_pid} ended (killed by SIGKILL)"
    with pytest.raises(RolloutProcessError, match="SIGKILL"):
        child.generate(prompts(4), sampling())


@contextmanager
def killed_at_start(number: int) -> Iterator[list[int]]:
    """Kill the first children that vLLM starts inside, and yield their ids."""
    killed: list[int] = []
    ended = threading.Event()

    def watch() -> None:
        while len(killed) < number and not ended.wait(0.01):
            for process in multiprocessing.active_children():
                if process.name.startswith("EngineCore") and process.pid is not None and process.pid not in killed:
                    killed.append(process.pid)
                    process.kill()

    thread = threading.Thread(target=watch, daemon=True)
    thread.start()
    try:
        yield killed
    finally:
        ended.set()
        thread.join()


def test_a_child_that_is_killed_while_it_starts_is_named() -> None:
    with killed_at_start(1) as killed, pytest.raises(RolloutProcessError) as error:
        VllmEngine(engine_context(placed(process="child", max_restarts=0)))
    expected = f"actor.rollout: the vLLM process {killed[0]} ended while it started (killed by SIGKILL)"
    assert str(error.value) == expected


@pytest.mark.full
def test_children_that_end_while_they_start_are_replaced(capfd: pytest.CaptureFixture[str]) -> None:
    """Killed ones, and ones with an error of vLLM, which is named."""
    batch = prompts(3)
    with killed_at_start(2) as killed:
        made = VllmEngine(engine_context(placed(process="child", max_restarts=2)))
    check(made.generate(batch, sampling()), batch, reference(load_model(placed(), SEED), batch, sampling()))
    assert made.num_restarts == 2
    made.close()
    said = capfd.readouterr().err
    for number, each in enumerate(killed, 1):
        assert f"the vLLM process {each} ended while it started (killed by SIGKILL); restart {number} of 2\n" in said
    context = replace(engine_context(placed(process="child", max_restarts=1)), kv_bytes=1)
    with pytest.raises(RolloutProcessError, match=r"\(exit code 1\): ValueError: .*after 1 restart "):
        VllmEngine(context)


# by default one that is killed in a run is replaced (tests/distributed/test_rollout.py)
@pytest.mark.full
def test_a_child_that_does_not_respond_is_replaced(capfd: pytest.CaptureFixture[str]) -> None:
    """Stopped when it may have decoded half of the rows; the next one has its weights, and generates all."""
    seconds = 240.0
    context = replace(engine_context(placed(process="child", max_restarts=1)), timeout_seconds=seconds)
    made, changed = VllmEngine(context), other_weights(placed())
    made.load_weights(flat(changed))
    batch, later = prompts(3, seed=1), prompts(8, first=3, seed=2)
    ahead = later.select(slice(0, 4))
    check(made.generate(batch, sampling(), [ahead]), batch, reference(changed, batch, sampling()))
    first = made.child_pid
    assert first is not None
    os.kill(first, signal.SIGSTOP)
    check(made.generate(later, sampling()), later, reference(changed, later, sampling()))
    assert made.num_requests == len(batch) + len(later) and made.num_restarts == 1
    assert made.child_pid != first and not is_running(first)
    sentence = f"actor.rollout: the vLLM process {first} has not responded for {seconds / 4:g} s; restart 1 of 1"
    assert sentence in capfd.readouterr().err
    made.close()


@pytest.mark.full
def test_rows_that_a_killed_child_had_go_on_in_the_next_one(engine: VllmEngine) -> None:
    """The ones that were received are not generated again."""
    how, batch = sampling(), prompts(8, samples_per_prompt=2)
    made, rows = VllmEngine(engine_context(placed(process="child", max_restarts=1))), turns(batch, how, 1)
    due, first = rows.due, made.child_pid
    assert first is not None

    def due_after_a_kill(wait: bool) -> Batch | None:
        if rows.out and sum(rows.batches) > len(batch) and made.child_pid == first:
            os.kill(first, signal.SIGKILL)
        return due(wait)

    rows.due = due_after_a_kill
    found = advanced(made, rows, how)
    assert made.num_restarts == 1 and made.child_pid != first
    assert_same_turns(found, advanced(engine, turns(batch, how, 2), how))
    made.close()


@pytest.mark.full
def test_a_child_ends_with_its_rank() -> None:
    before = in_shared_memory()
    script = Path(__file__).with_name("vllm_ranks.py")
    done = subprocess.run([sys.executable, script], stdout=subprocess.PIPE, text=True, timeout=200)
    assert done.returncode == -signal.SIGKILL
    assert comes(lambda: not is_running(int(done.stdout)))
    assert comes(lambda: in_shared_memory() <= before), in_shared_memory() - before


# --- tensor parallel and pipeline stages


# the equality suite runs engines of two ranks by default
@pytest.mark.full
def test_ranks_of_a_job_generate_as_one(tmp_path: Path) -> None:
    """Ranks 0 and 1 have a stage each, 2 and 3 a part of every layer, but for its one key-value head; then all four
    have both."""
    run_ranks("vllm_ranks", tmp_path, number=4)
    found = [torch.load(tmp_path / f"rank-{rank}.pt") for rank in range(4)]
    batch, expected = prompts(8), []
    for init in (CUT, ONE_KEY_HEAD):
        model = load_model(placed(init), SEED)
        of_steps = [reference(model, batch, sampling(step=step)) for step in range(2)]
        expected.append([*of_steps, reference(other_weights(placed(init)), batch, sampling())])
    for rank, (pair, together) in enumerate(found):
        for (responses, is_as_planned), rows in ((pair, expected[rank // 2]), (together, expected[0])):
            assert is_as_planned
            for response, tokens in zip(responses, rows, strict=True):
                check(response, batch, tokens)
    for first, second, part in ((0, 1, 0), (2, 3, 0), (0, 1, 1), (0, 2, 1), (0, 3, 1)):
        assert_equal(found[first][part][0], found[second][part][0])


def assert_equal(responses: list[Columns], others: list[Columns]) -> None:
    """All ranks of an engine return the same results."""
    for one, other in zip(responses, others, strict=True):
        assert all(torch.equal(one[name], other[name]) for name in one)
