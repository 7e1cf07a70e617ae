"""Decoding: responses equal a plain loop's whatever other rows are in the batch, and ended rows stop costing."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from heapq import heapreplace
from threading import Barrier, Thread

import pytest
import torch
from host_reads import host_reads
from small_models import ONE_RANK, TINY, context_of, placed
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, DynamicCache, GenerationConfig, PreTrainedModel

from flexrlhf.comm.reduce import RankGroup
from flexrlhf.engines import decoding
from flexrlhf.engines.base import Batch, Sampling
from flexrlhf.engines.decoding import Decoding
from flexrlhf.engines.language_head import LanguageHead, use_language_head
from flexrlhf.engines.pass_settings import PassSettings
from flexrlhf.engines.passes import Passes
from flexrlhf.engines.readout import Readout
from flexrlhf.engines.sampling import completes_stop, gumbel_noise
from flexrlhf.engines.slots import rows_of_pass
from flexrlhf.engines.waves import growing_cache
from flexrlhf.memory.activations import CACHE_COLUMNS
from flexrlhf.operators.columns import Lengths

LENGTHS, NUM_ROWS, VOCABULARY = Lengths(prompt=7, response=12), 20, 32
ENDS = (1, 2, 3)
IN_SLOTS = PassSettings(LENGTHS, 8192, shares=True, slots=True)
IN_WAVES = replace(IN_SLOTS, slots=False)


def letters(tokens: Sequence[int]) -> str:
    return "".join(chr(ord("A") + token) for token in tokens)


PLAIN = Sampling(seed=3, step=2, temperature=1.0, eos_token_ids=ENDS, pad_token_id=0, decode=letters)
STOPS = tuple(letters([a, b]) for a in range(4, 32, 2) for b in range(4, 32))
SAMPLINGS = {
    "plain": PLAIN,
    "cold": replace(PLAIN, temperature=0.3),
    "greedy": replace(PLAIN, temperature=0.0),
    "top p": replace(PLAIN, top_p=0.6),
    "top k": replace(PLAIN, top_k=5),
    "least": replace(PLAIN, min_tokens=4),
    "greedy and least": replace(PLAIN, temperature=0.0, eos_token_ids=tuple(range(16)), min_tokens=3),
    "stop": replace(PLAIN, stop=STOPS),
    "all": replace(PLAIN, temperature=1.3, top_p=0.9, top_k=20, min_tokens=3, stop=STOPS),
}


def model_of(kind: str = "llama", **changes: object) -> PreTrainedModel:
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**{**TINY, "model_type": kind, **changes}))
    model.generation_config = GenerationConfig()
    return model.eval().requires_grad_(False)


def passes_of(model: PreTrainedModel, rows_together: int = NUM_ROWS, dp: RankGroup | None = None) -> Passes:
    """``replicas``: in lockstep with them."""
    head = model.lm_head if isinstance(model.lm_head, LanguageHead) else None
    of_rollout = placed(generate_tokens=rows_together * (LENGTHS.prompt + LENGTHS.response))
    readout = Readout("causal", head, LENGTHS, 1.0)
    laid_out = PassSettings.of(context_of(of_rollout, lengths=LENGTHS), model.config)
    return Passes(model, model, readout, of_rollout.settings, laid_out, dp or ONE_RANK, lockstep=dp)


@pytest.fixture(scope="module")
def model() -> PreTrainedModel:
    model = model_of()
    use_language_head(model)
    return model


@pytest.fixture(scope="module")
def prompts() -> Batch:
    """Prompts of 1 to 7 tokens, in no order."""
    generator = torch.Generator().manual_seed(1)
    lengths = torch.randint(1, LENGTHS.prompt + 1, (NUM_ROWS, 1), generator=generator)
    mask = (torch.arange(LENGTHS.prompt) >= LENGTHS.prompt - lengths).to(torch.uint8)
    tokens = torch.randint(4, VOCABULARY, mask.shape, generator=generator, dtype=torch.int32) * mask
    return Batch({"prompts": tokens, "prompt_mask": mask}, torch.arange(40, 40 + NUM_ROWS), 1)


def shuffled(batch: Batch, order: Tensor) -> Batch:
    return Batch({name: column[order] for name, column in batch.columns.items()}, batch.rows[order], 1)


def assert_same(first: dict[str, Tensor], second: dict[str, Tensor]) -> None:
    """Log-probs of float32 may round in another way in another batch."""
    assert first.keys() == second.keys()
    for name, column in first.items():
        assert column.dtype == second[name].dtype, name
        assert torch.allclose(column.double(), second[name].double(), atol=1e-5, rtol=0), name


# --- definition of a response


@dataclass
class Response:
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    finished: bool = False


def plain_response(model: PreTrainedModel, prompt: list[int], row: int, sampling: Sampling) -> Response:
    """Token by token, without padding or cache."""
    response = Response()
    while len(response.tokens) < LENGTHS.response and not response.finished:
        position = len(response.tokens)
        logits = model(input_ids=torch.tensor([prompt + response.tokens])).logits[0, -1].double()
        allowed = allowed_tokens(logits, sampling, position)
        scores = torch.full_like(logits, -torch.inf)
        scores[allowed] = logits[allowed] / (sampling.temperature or 1.0)
        noise = gumbel_noise(sampling.seed, sampling.step, torch.tensor([row]), position, len(logits))[0]
        token = int((scores + noise * bool(sampling.temperature)).argmax())
        response.tokens.append(token)
        response.logprobs.append(float(scores.log_softmax(0)[token]))
        response.finished = token in sampling.eos_token_ids or has_stop(response.tokens, sampling)
    return response


def allowed_tokens(logits: Tensor, sampling: Sampling, position: int) -> list[int]:
    """The likeliest tokens that top-k and top-p leave; greedy decoding uses neither."""
    banned = sampling.eos_token_ids if position < sampling.min_tokens else ()
    order = [token for token in logits.argsort(descending=True).tolist() if token not in banned]
    if not sampling.temperature:
        return order
    order = order[: sampling.top_k or None]
    shares = (logits[order] / sampling.temperature).softmax(0).cumsum(0).tolist()
    return order[: 1 + sum(share < sampling.top_p for share in shares[:-1])]


def has_stop(tokens: list[int], sampling: Sampling) -> bool:
    """Whether the letters, one per token, contain a stop string that ends after the first ``min_tokens``."""
    ends = range(sampling.min_tokens + 1, len(tokens) + 1)
    return any(letters(tokens[:end]).endswith(stop) for stop in sampling.stop for end in ends)


@pytest.mark.parametrize("sampling", SAMPLINGS.values(), ids=SAMPLINGS)
def test_responses_equal_a_plain_loop(model: PreTrainedModel, prompts: Batch, sampling: Sampling) -> None:
    columns = passes_of(model, rows_together=7).generate(prompts, sampling)
    lengths = columns["response_mask"].sum(1).tolist()
    assert int(columns["finished"].sum()) > 0 and len(set(lengths)) > 3
    for place, length in enumerate(lengths):
        prompt = prompts["prompts"][place][prompts["prompt_mask"][place].bool()].tolist()
        response = plain_response(model, prompt, int(prompts.rows[place]), sampling)
        padding = LENGTHS.response - length
        assert columns["tokens"][place].tolist() == prompts["prompts"][place].tolist() + response.tokens + [0] * padding
        assert columns["response_mask"][place].tolist() == [1] * len(response.tokens) + [0] * padding
        assert bool(columns["finished"][place]) == response.finished
        logprobs = columns["rollout_logprobs"][place].tolist()
        assert logprobs == pytest.approx(response.logprobs + [0.0] * padding, abs=1e-5)
    assert torch.equal(columns["attention_mask"], torch.cat([prompts["prompt_mask"], columns["response_mask"]], 1))
    types = {name: column.dtype for name, column in columns.items()}
    assert types["tokens"] == torch.int32 and types["rollout_logprobs"] == torch.float32
    assert {types[name] for name in ("attention_mask", "response_mask", "finished")} == {torch.uint8}


def test_the_noise_and_every_setting_matter(model: PreTrainedModel, prompts: Batch) -> None:
    """Else the comparison above would show little."""
    responses = [passes_of(model).generate(prompts, sampling)["tokens"] for sampling in SAMPLINGS.values()]
    assert not any(torch.equal(a, b) for i, a in enumerate(responses) for b in responses[:i])


@pytest.mark.parametrize(
    ("kind", "changes"),
    [
        ("mistral", {"sliding_window": 4}),
        # with sinks, and windows in every other layer
        ("gpt_oss", {"sliding_window": 4, "num_local_experts": 4, "num_experts_per_tok": 2, "head_dim": 4}),
        ("gpt2", {"n_embd": 16, "n_layer": 2, "n_head": 2}),
        ("qwen3", {}),
        # with a recurrent state in some layers
        ("lfm2", {"layer_types": ["conv", "full_attention"]}),
        ("jamba", {"attn_layer_period": 2, "attn_layer_offset": 1, "num_experts": 1, "mamba_d_state": 4}),
        ("falcon_h1", {"mamba_d_ssm": 32, "mamba_n_heads": 2, "mamba_d_head": 16, "mamba_d_state": 4}),
    ],
)
def test_other_kinds_of_caches(prompts: Batch, kind: str, changes: dict[str, object]) -> None:
    model = model_of(kind, **changes)
    columns = passes_of(model, rows_together=7).generate(prompts, PLAIN)
    for place in range(NUM_ROWS):
        prompt = prompts["prompts"][place][prompts["prompt_mask"][place].bool()].tolist()
        response = plain_response(model, prompt, int(prompts.rows[place]), PLAIN)
        inside = columns["response_mask"][place].bool()
        assert columns["tokens"][place, LENGTHS.prompt :][inside].tolist() == response.tokens


def test_a_pad_token_may_be_a_token_like_any_other(model: PreTrainedModel, prompts: Batch) -> None:
    """Also one that ends responses: a response's length defines which tokens belong to it."""
    plain = passes_of(model).generate(prompts, PLAIN)
    inside = plain["response_mask"].bool()
    for pad in (7, ENDS[0]):
        other = passes_of(model).generate(prompts, replace(PLAIN, pad_token_id=pad))
        responses = other["tokens"][:, LENGTHS.prompt :]
        assert (responses[inside] == pad).any() and (responses[~inside] == pad).all()
        assert torch.equal(responses[inside], plain["tokens"][:, LENGTHS.prompt :][inside])
        assert all(torch.equal(other[name], plain[name]) for name in plain if name != "tokens")


def test_no_prompts_need_no_call(model: PreTrainedModel, prompts: Batch) -> None:
    with calls_of(model) as calls:
        columns = passes_of(model).generate(prompts.select(slice(0, 0)), PLAIN)
    assert not calls
    width = LENGTHS.prompt + LENGTHS.response
    assert {name: tuple(column.shape) for name, column in columns.items()} == {
        "tokens": (0, width),
        "attention_mask": (0, width),
        "response_mask": (0, LENGTHS.response),
        "finished": (0,),
        "rollout_logprobs": (0, LENGTHS.response),
    }


# --- rows of one batch


@contextmanager
def calls_of(model: PreTrainedModel) -> Iterator[list[tuple[int, int]]]:
    """Rows and tokens of every call of ``model``."""
    calls: list[tuple[int, int]] = []

    def note(module: torch.nn.Module, args: object, kwargs: dict[str, Tensor]) -> None:
        calls.append(tuple(kwargs["input_ids"].shape))

    handle = model.register_forward_pre_hook(note, with_kwargs=True)
    yield calls
    handle.remove()


@pytest.mark.parametrize("name", ["plain", "all"])
@pytest.mark.parametrize("rows_together", [1, 3, 7, 100])
def test_responses_do_not_depend_on_how_many_are_decoded_together(
    model: PreTrainedModel, prompts: Batch, rows_together: int, name: str
) -> None:
    together = passes_of(model).generate(prompts, SAMPLINGS[name])
    assert_same(passes_of(model, rows_together).generate(prompts, SAMPLINGS[name]), together)


@pytest.mark.parametrize("size", [1, 4, 10])
def test_responses_do_not_depend_on_how_rows_are_handed_over(model: PreTrainedModel, prompts: Batch, size: int) -> None:
    passes, sampling = passes_of(model), SAMPLINGS["all"]
    pieces = [passes.generate(prompts.select(slice(i, i + size)), sampling) for i in range(0, NUM_ROWS, size)]
    whole = passes.generate(prompts, sampling)
    assert_same({name: torch.cat([piece[name] for piece in pieces]) for name in whole}, whole)


def test_responses_follow_their_rows_in_any_order(model: PreTrainedModel, prompts: Batch) -> None:
    passes, sampling = passes_of(model, rows_together=6), SAMPLINGS["all"]
    order = torch.randperm(NUM_ROWS, generator=torch.Generator().manual_seed(2))
    whole = passes.generate(prompts, sampling)
    assert_same(passes.generate(shuffled(prompts, order), sampling), {name: c[order] for name, c in whole.items()})


def test_responses_do_not_depend_on_padding_of_all_prompts(model: PreTrainedModel, prompts: Batch) -> None:
    wider = {name: torch.nn.functional.pad(column, (3, 0)) for name, column in prompts.columns.items()}
    responses = []
    for columns in (prompts.columns, wider):
        decoding = Decoding(model, Batch(columns, prompts.rows, 1), PLAIN, LENGTHS.response, IN_SLOTS)
        assert all(decoding.calls(NUM_ROWS))
        responses.append(decoding.columns()["tokens"][:, -LENGTHS.response :])
    assert torch.equal(*responses)


@pytest.mark.parametrize("settings", [IN_SLOTS, IN_WAVES], ids=["slots", "waves"])
def test_rows_with_prompts_of_like_lengths_are_decoded_together(
    model: PreTrainedModel, prompts: Batch, settings: PassSettings
) -> None:
    """A pass reads the prompts; the last token of each is read in slots with the sampled tokens."""
    lengths = sorted(prompts["prompt_mask"].sum(1).tolist(), reverse=True)
    passes, later = passes_of(model, rows_together=5), int(settings.slots)
    passes.pass_settings = settings
    with calls_of(model) as calls:
        passes.generate(prompts, replace(PLAIN, eos_token_ids=(10**6,)))
    period, reads = LENGTHS.response + later, [length - later for length in lengths]
    firsts = range(0, NUM_ROWS, 5)
    assert calls[::period] == [(sum(read > 0 for read in reads[first : first + 5]), reads[first]) for first in firsts]
    assert len(calls) == NUM_ROWS // 5 * period


@pytest.mark.parametrize("settings", [IN_SLOTS, IN_WAVES], ids=["slots", "waves"])
@pytest.mark.parametrize("between", [1, 3])
def test_the_host_looks_for_ended_rows_every_few_tokens(
    model: PreTrainedModel, prompts: Batch, between: int, settings: PassSettings, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The host reads nothing else while tokens are sampled, and responses do not depend on it."""
    expected, found = passes_of(model).generate(prompts, PLAIN), {}
    monkeypatch.setattr(decoding, "tokens_between_looks", lambda device: between)

    def decode() -> None:
        rows = Decoding(model, prompts, PLAIN, LENGTHS.response, settings)
        assert all(rows.calls(NUM_ROWS))
        found.update(rows.columns())

    reads = host_reads(torch.no_grad()(decode))
    assert_same(found, expected)
    looks = reads.pop(
        "decoding.py: ended = live.ended.tolist()"
        if settings.slots
        else "decoding.py: num_left = len(live.ended) - int(live.ended.sum())"
    )
    assert looks <= LENGTHS.response / between
    # of a call, and in waves rows that are dropped; transformers looks at the mask of a wave in every pass
    assert max(count for line, count in reads.items() if "masking_utils" not in line) <= 3, reads
    assert settings.slots <= (not any("masking_utils" in line for line in reads))


def test_ended_rows_are_left_out_of_a_wave(
    model: PreTrainedModel, prompts: Batch, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Less than a quarter of the rows in a call has ended, and nothing comes out differently than with all rows."""
    sampling = replace(PLAIN, eos_token_ids=tuple(range(1, 9)))
    passes = passes_of(model)
    passes.pass_settings = IN_WAVES
    with calls_of(model) as calls:
        columns = passes.generate(prompts, sampling)
    lengths = columns["response_mask"].sum(1)
    assert len(calls) == int(lengths.max())
    left = [int((lengths > position).sum()) for position in range(len(calls))]
    assert all(rows * 0.75 < some <= rows for (rows, _), some in zip(calls, left, strict=True))
    assert sum(rows for rows, _ in calls) < 0.6 * NUM_ROWS * len(calls)
    monkeypatch.setattr(decoding, "_DROP_SHARE", 2.0)
    with calls_of(model) as calls:
        assert_same(passes.generate(prompts, sampling), columns)
    assert {rows for rows, _ in calls} == {NUM_ROWS}


def test_slots_take_new_rows_as_rows_end(model: PreTrainedModel, prompts: Batch) -> None:
    """So no row waits for a longer one, and no call has more rows than live ones need."""
    sampling = replace(PLAIN, eos_token_ids=tuple(range(1, 9)))
    # a pass over prompts is wider than one over sampled tokens
    longer = shuffled(prompts, (prompts["prompt_mask"].sum(1) > 2).nonzero().squeeze(1))
    with calls_of(model) as calls:
        columns = passes_of(model, rows_together=4).generate(longer, sampling)
    rows = [rows for rows, width in calls if width == 1]
    lengths = columns["response_mask"].sum(1)
    slots = [0] * 4
    for place in longer["prompt_mask"].sum(1).argsort(descending=True, stable=True):
        heapreplace(slots, slots[0] + int(lengths[place]))
    assert len(rows) == max(slots)
    assert rows == [rows_of_pass(sum(step < end for end in slots), 4) for step in range(max(slots))]
    with calls_of(model) as calls:
        passes_of(model).generate(longer, sampling)
    live = [int((lengths > position).sum()) for position in range(int(lengths.max()))]
    assert [rows for rows, width in calls if width == 1] == [rows_of_pass(rows, len(longer)) for rows in live]


def test_a_pass_has_few_numbers_of_rows() -> None:
    """So few graphs are recorded, and no pass has more rows than slots."""
    lives = (1, 2, 3, 5, 9, 16, 17, 24, 25, 60)
    assert [rows_of_pass(live, 60) for live in lives] == [1, 2, 4, 8, 16, 16, 24, 24, 32, 60]


# --- samples of one prompt


@pytest.mark.parametrize("rows_together", [4, 7, 100])
@pytest.mark.parametrize("kind", ["llama", "mistral"])
def test_samples_of_one_prompt_read_it_once(prompts: Batch, kind: str, rows_together: int) -> None:
    """Also if a prompt's rows are decoded apart, rows end early, and layers have a window. A row copies the prompt
    of one that is in its slot still."""
    model = model_of(kind, **({"sliding_window": 4} if kind == "mistral" else {}))
    samples = 5
    longer_than_two = (prompts["prompt_mask"].sum(1) > 2).nonzero().squeeze(1)
    groups = longer_than_two[: NUM_ROWS // samples].repeat_interleave(samples)
    columns = {name: column[groups] for name, column in prompts.columns.items()}
    apart = Batch(columns, prompts.rows, 1)
    with calls_of(model) as calls:
        shared = passes_of(model, rows_together).generate(replace(apart, samples_per_prompt=samples), PLAIN)
    assert_same(shared, passes_of(model, rows_together).generate(apart, PLAIN))
    prefills = [rows for rows, width in calls if width > 1]
    if kind == "llama":
        assert sum(prefills) == NUM_ROWS // samples
        return
    longest_first = prompts["prompt_mask"][groups].sum(1).argsort(descending=True, stable=True)
    assert prefills == [len(groups[places].unique()) for places in longest_first.split(rows_together)]


def test_samples_read_their_prompt_one_by_one_if_set(model: PreTrainedModel, prompts: Batch) -> None:
    columns = {name: column[:1].expand(6, -1) for name, column in prompts.columns.items()}
    samples = Batch(columns, prompts.rows[:6], 6)
    passes = passes_of(model)
    shared = passes.generate(samples, PLAIN)
    passes.pass_settings = replace(passes.pass_settings, shares=False)
    with calls_of(model) as calls:
        assert_same(passes.generate(samples, PLAIN), shared)
    assert calls[0][0] == 6


LONG = (520, 500, 70, 60, 55, 40, 30, 20, 10, 8, 3, 1)
"""Tokens of prompts that are read in several passes."""


@pytest.mark.parametrize("samples", [1, 3])
@pytest.mark.parametrize("kind", ["llama", "mistral"])
def test_prompts_of_other_lengths_are_read_apart(kind: str, samples: int) -> None:
    """And decoded together, as by themselves. If layers have a window, one pass reads all of them."""
    model = model_of(kind, max_position_embeddings=1024, **({"sliding_window": 4} if kind == "mistral" else {}))
    order = torch.randperm(len(LONG), generator=torch.Generator().manual_seed(1))
    lengths = torch.tensor(LONG)[order].repeat_interleave(samples)[:, None]
    mask = (torch.arange(max(LONG)) >= max(LONG) - lengths).to(torch.uint8)
    tokens = torch.arange(4, 4 + max(LONG)).remainder(VOCABULARY - 4).add(4).int().expand(len(mask), -1) * mask
    rows = Batch({"prompts": tokens, "prompt_mask": mask}, torch.arange(len(mask)), samples)
    sampling = replace(PLAIN, eos_token_ids=(7, 8, 9))

    def responses(num_rows: int) -> dict[str, Tensor]:
        settings = IN_SLOTS if kind == "llama" else IN_WAVES
        decoding = Decoding(model, rows, sampling, LENGTHS.response, settings)
        assert all(decoding.calls(num_rows))
        return decoding.columns()

    with calls_of(model) as calls:
        together = responses(len(rows))
    prefills = calls[: next(place for place, (_, width) in enumerate(calls) if width == 1)]
    # in slots the last token of each is read later, and one prompt has no other
    assert sum(count for count, _ in prefills) == len(LONG) - (kind == "llama")
    computed = sum(count * width for count, width in prefills) / sum(LONG)
    assert computed < 1.4 if kind == "llama" else len(prefills) == 1
    assert all(count <= len(rows) and width == 1 for count, width in calls[len(prefills) :])
    assert_same(together, responses(1))


def test_columns_of_the_cache_are_appended_in_place(model: PreTrainedModel) -> None:
    """Space grows by blocks up to the limit; reordered rows are copies that grow by themselves."""
    limit = CACHE_COLUMNS + 9
    ours, plain = growing_cache(model.config, limit), DynamicCache(config=model.config)
    generator = torch.Generator().manual_seed(0)
    order = torch.tensor([2, 0, 0, 1, 2])
    spaces = []
    for column in range(limit - 4):
        if column == 40:
            for cache in (ours, plain):
                cache.reorder_cache(order)
        rows, width = (3 if column < 40 else 5), (5 if column == 0 else 1)
        new = torch.randn(2, rows, 2, width, 4, generator=generator)
        (keys, values), expected = ours.update(*new, 0), plain.update(*new, 0)
        assert torch.equal(keys, expected[0]) and torch.equal(values, expected[1])
        assert keys.untyped_storage().nbytes() <= rows * 2 * limit * 4 * 4
        spaces.append(keys.data_ptr())
    assert ours.get_seq_length() == plain.get_seq_length() == limit
    assert len(set(spaces[:40])) == len(set(spaces[40:])) == 1


# --- ranks in lockstep


@dataclass(frozen=True)
class Together(RankGroup):
    """Threads instead of ranks. ``values``: the last one of each."""

    barrier: Barrier
    values: list[int]

    def largest(self, number: int, device: torch.device) -> int:
        self.values[self.ranks[0]] = number
        self.barrier.wait(20)
        result = max(self.values)
        self.barrier.wait(20)
        return result


def in_lockstep(work: Sequence[Callable[[RankGroup], None]]) -> None:
    barrier, values = Barrier(len(work)), [0] * len(work)
    ranks = [Together(None, (rank,), lambda *_: None, barrier, values) for rank in range(len(work))]
    threads = [Thread(target=one, args=(rank,)) for one, rank in zip(work, ranks, strict=True)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)


@pytest.mark.parametrize("parts", [(20, 0), (13, 7), (1, 19, 0), (0, 0)], ids=str)
def test_ranks_in_lockstep_call_equally_often(prompts: Batch, parts: tuple[int, ...]) -> None:
    """Ranks with fewer rows, shorter responses or none at all make idle calls with one row; responses stay the same."""
    models = [model_of() for _ in parts]
    firsts = [sum(parts[:rank]) for rank in range(len(parts))]
    batches = [prompts.select(slice(first, first + size)) for first, size in zip(firsts, parts, strict=True)]
    results: list[dict[str, Tensor]] = [{} for _ in parts]
    counts = [0] * len(parts)

    def work(rank: int) -> Callable[[RankGroup], None]:
        def run(dp: RankGroup) -> None:
            with calls_of(models[rank]) as calls:
                results[rank] = passes_of(models[rank], 6, dp).generate(batches[rank], PLAIN)
            counts[rank] = len(calls)

        return run

    in_lockstep([work(rank) for rank in range(len(parts))])
    alone = []
    for model, batch, result in zip(models, batches, results, strict=True):
        with calls_of(model) as calls:
            assert_same(result, passes_of(model, 6).generate(batch, PLAIN))
        alone.append(len(calls))
    assert counts == [max(alone)] * len(parts)


# --- stop strings


def text_of(tokens: Sequence[int]) -> str:
    """Bytes, as tokens of many vocabularies are; 256 and above are special tokens, which are left out."""
    return bytes(token for token in tokens if token < 256).decode("utf-8", errors="replace")


def plain_stop(tokens: list[int], sampling: Sampling) -> int | None:
    """After how many tokens: the text, decoded character by character as bytes complete it, ends in a stop string."""
    text = ""
    for count in range(1, len(tokens) + 1):
        before, text = text, text_of(tokens[:count]).rstrip("\ufffd")
        for end in range(len(before) + 1, len(text) + 1):
            if count > sampling.min_tokens and text[:end].endswith(sampling.stop):
                return count
    return None


@pytest.mark.parametrize("min_tokens", [0, 3, 25])
@pytest.mark.parametrize("stop", [("b",), ("aé",), ("é €", "ba"), ("a" * 12, "€€é", "é a€ ")], ids=str)
def test_a_response_ends_with_the_token_that_completes_a_stop_string(stop: tuple[str, ...], min_tokens: int) -> None:
    """Characters of one to three bytes, special tokens between their bytes, and responses much longer than them."""
    rng = random.Random(0)
    sampling = replace(PLAIN, stop=stop, min_tokens=min_tokens, decode=text_of)
    found = []
    for _ in range(60):
        words = rng.choices(["a", "é", "€", " ", *stop], [4, 4, 4, 2, *[0.1] * len(stop)], k=80)
        tokens = [t for byte in "".join(words).encode() for t in ([byte, 256] if rng.random() < 0.2 else [byte])]
        counts = [count for count in range(1, len(tokens) + 1) if completes_stop(tokens[:count], sampling)]
        found.append(counts[0] if counts else None)
        assert found[-1] == plain_stop(tokens, sampling)
    assert any(found)


def test_stop_strings_of_a_later_turn_count_from_the_fewest_tokens_of_the_response() -> None:
    tokens, sampling = list(b"abcabc"), replace(PLAIN, stop=("bc",), min_tokens=4, decode=text_of)
    assert completes_stop(tokens, sampling, first=3)
    assert not completes_stop(tokens[:5], sampling, first=3)
    assert not completes_stop(tokens, replace(sampling, min_tokens=6), first=3)


def test_only_the_end_of_a_long_response_is_decoded() -> None:
    decoded: list[int] = []

    def decode(tokens: Sequence[int]) -> str:
        decoded.append(len(tokens))
        return letters(tokens)

    assert not completes_stop([4] * 10_000, replace(PLAIN, stop=("BC",), decode=decode))
    assert max(decoded) < 20


def test_stop_strings_need_text(model: PreTrainedModel, prompts: Batch) -> None:
    with pytest.raises(AssertionError, match="decoded text"):
        passes_of(model).generate(prompts, replace(PLAIN, stop=("A",), decode=None))
