"""The head without logits in memory: equal to log_softmax in value and gradient, whole or split, in flat memory."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from itertools import accumulate, product
from pathlib import Path
from typing import Any, get_args

import pytest
import torch
import torch.distributed as dist
from forked import run_ranks
from torch import Tensor, nn
from torch.autograd.graph import Node
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.profiler import ProfilerActivity, profile
from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig, PreTrainedModel

from flexrlhf.engines.base import EntropyUse
from flexrlhf.engines.language_head import LanguageHead, token_logprobs, use_language_head

MODES: tuple[EntropyUse, ...] = get_args(EntropyUse)
ROWS, HIDDEN, VOCABULARY = 23, 12, 40


@dataclass(frozen=True)
class Scores:
    """Log-probs, entropies and gradients of their weighted sum; None if there is none."""

    logprobs: Tensor
    entropy: Tensor
    by_hidden: Tensor | None
    by_weight: Tensor | None


Function = Callable[[Tensor, Tensor, Tensor, float, EntropyUse], tuple[Tensor, Tensor]]


def plain(hidden: Tensor, weight: Tensor, targets: Tensor, temperature: float, entropy: EntropyUse) -> Any:
    """Definition of ``token_logprobs``, with all logits at once."""
    logits = hidden @ weight.t()
    scaled = (logits.to(torch.promote_types(logits.dtype, torch.float32)) / temperature).log_softmax(-1)
    picked = scaled.gather(1, targets[:, None]).squeeze(1)
    if entropy == "none":
        return picked, torch.zeros_like(picked)
    with torch.set_grad_enabled(entropy == "gradient"):
        return picked, -(scaled.exp() * scaled).sum(1)


def chunked(chunk_elements: int, group: dist.ProcessGroup | None = None) -> Function:
    def function(
        hidden: Tensor, weight: Tensor, targets: Tensor, temperature: float, entropy: EntropyUse
    ) -> tuple[Tensor, Tensor]:
        return token_logprobs(hidden, weight, targets, temperature, entropy, chunk_elements, group)

    return function


@dataclass(frozen=True)
class Case:
    """Arguments of a head and the factors of the loss, all sampled with one seed."""

    hidden: Tensor
    weight: Tensor
    targets: Tensor
    factors: Tensor
    """(2, N): of the log-probs and of the entropies."""
    temperature: float = 0.7

    def to(self, dtype: torch.dtype) -> Case:
        return replace(self, hidden=self.hidden.to(dtype), weight=self.weight.to(dtype))

    def scores(self, function: Function, entropy: EntropyUse, frozen: str = "") -> Scores:
        """``frozen``: "hidden" or "weight" is not to have a gradient."""
        hidden = self.hidden.clone().requires_grad_(frozen != "hidden")
        weight = self.weight.clone().requires_grad_(frozen != "weight")
        logprobs, spread = function(hidden, weight, self.targets, self.temperature, entropy)
        loss = (logprobs * self.factors[0]).sum() + (spread * self.factors[1]).sum()
        loss.backward()
        return Scores(logprobs.detach(), spread.detach(), hidden.grad, weight.grad)


def case_of(rows: int = ROWS, vocabulary: int = VOCABULARY, hidden: int = HIDDEN, seed: int = 0) -> Case:
    generator = torch.Generator().manual_seed(seed)
    return Case(
        torch.randn(rows, hidden, generator=generator),
        torch.randn(vocabulary, hidden, generator=generator),
        torch.randint(vocabulary, (rows,), generator=generator),
        torch.randn(2, rows, generator=generator),
    )


def distance(a: Tensor | None, b: Tensor | None) -> float:
    """||a - b|| / ||b||."""
    assert a is not None and b is not None and a.shape == b.shape
    a, b = a.detach().double(), b.detach().double()
    return float((a - b).norm() / b.norm().clamp(min=1e-300))


def assert_close(found: Scores, expected: Scores, tolerance: float) -> None:
    for name in vars(expected):
        a, b = getattr(found, name), getattr(expected, name)
        assert (a is None) == (b is None), name
        assert a is None or distance(a, b) <= tolerance, f"{name}: {distance(a, b):.1e}"


# --- the function


@pytest.mark.parametrize("entropy", MODES)
@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("rows_per_chunk", [0, 1, 7, 23, 1000])
def test_values_and_gradients_equal_log_softmax(entropy: EntropyUse, temperature: float, rows_per_chunk: int) -> None:
    """Chunks that divide the rows, that do not, that are more than all rows, and less than one."""
    for dtype, tolerance in ((torch.float32, 1e-6), (torch.float64, 1e-14)):
        case = replace(case_of().to(dtype), temperature=temperature)
        found = case.scores(chunked(rows_per_chunk * VOCABULARY + 3), entropy)
        assert found.logprobs.dtype == found.entropy.dtype == dtype
        assert_close(found, case.scores(plain, entropy), tolerance)


def test_gradients_equal_finite_differences() -> None:
    case = case_of(rows=5, vocabulary=7, hidden=3).to(torch.float64)
    leaves = (case.hidden.requires_grad_(), case.weight.requires_grad_())
    assert torch.autograd.gradcheck(lambda h, w: token_logprobs(h, w, case.targets, 0.7, "gradient", 14), leaves)


def test_entropy_has_a_gradient_in_its_mode_alone() -> None:
    case = case_of()
    value, gradient = (case.scores(chunked(100), mode) for mode in ("value", "gradient"))
    assert_close(replace(value, entropy=torch.zeros(ROWS)), case.scores(chunked(100), "none"), 1e-6)
    assert distance(value.entropy, gradient.entropy) < 1e-6
    assert distance(value.by_hidden, gradient.by_hidden) > 0.1
    hidden = case.hidden.requires_grad_()
    assert not token_logprobs(hidden, case.weight, case.targets, entropy="value")[1].requires_grad


@pytest.mark.parametrize("frozen", ["hidden", "weight"])
def test_frozen_weights_get_no_gradient(frozen: str) -> None:
    case = case_of()
    found = case.scores(chunked(100), "gradient", frozen)
    assert (found.by_hidden is None) == (frozen == "hidden")
    assert (found.by_weight is None) == (frozen == "weight")
    assert_close(found, case.scores(plain, "gradient", frozen), 1e-6)


@pytest.mark.parametrize("entropy", MODES)
def test_bfloat16_models(entropy: EntropyUse) -> None:
    """The logits are the same, so values are; gradients pass through products rounded to 8 bits, here as there."""
    case = case_of(rows=200).to(torch.bfloat16)
    found, expected = case.scores(chunked(7 * VOCABULARY), entropy), case.scores(plain, entropy)
    assert found.logprobs.dtype == torch.float32
    assert found.by_hidden is not None and found.by_hidden.dtype == torch.bfloat16
    assert found.by_weight is not None and found.by_weight.dtype == torch.bfloat16
    assert distance(found.logprobs, expected.logprobs) <= 1e-6
    assert distance(found.entropy, expected.entropy) <= 1e-6
    assert distance(found.by_hidden, expected.by_hidden) <= 2**-8
    assert distance(found.by_weight, expected.by_weight) <= 2**-8


def test_the_gradient_of_a_bfloat16_weight_is_summed_in_float32() -> None:
    """One row per chunk: 3000 summands of one sign in bfloat16 would stop growing at some 256 of them."""
    rows = 3000
    case = Case(torch.ones(rows, 4), torch.zeros(8, 4), torch.zeros(rows, dtype=torch.int64), torch.ones(2, rows))
    found = case.to(torch.bfloat16).scores(chunked(8), "none").by_weight
    assert distance(found, case.scores(plain, "none").by_weight) <= 2**-8


def test_masked_rows_leave_nothing() -> None:
    case = case_of()
    mask = (torch.arange(ROWS) % 3 > 0).float()
    masked = replace(case, factors=case.factors * mask)
    found = masked.scores(chunked(100), "gradient")
    assert found.by_hidden is not None and not found.by_hidden[mask == 0].any()
    other = replace(masked, targets=case.targets.where(mask > 0, 0)).scores(chunked(100), "gradient")
    assert torch.equal(found.by_hidden, other.by_hidden)
    assert torch.equal(found.by_weight, other.by_weight)


def test_no_rows() -> None:
    found = case_of(rows=0).scores(chunked(100), "gradient")
    assert found.logprobs.shape == found.entropy.shape == (0,)
    assert found.by_hidden is not None and found.by_hidden.shape == (0, HIDDEN)
    assert found.by_weight is not None and not found.by_weight.any()


def test_large_logits_stay_finite() -> None:
    case = case_of()
    found = replace(case, hidden=case.hidden * 1000).scores(chunked(100), "gradient")
    assert all(tensor.isfinite().all() for tensor in vars(found).values())


def test_the_uniform_distribution_by_hand() -> None:
    case = replace(case_of(vocabulary=4), weight=torch.zeros(4, HIDDEN))
    logprobs, entropy = token_logprobs(case.hidden, case.weight, case.targets, entropy="value")
    assert logprobs.tolist() == pytest.approx([-math.log(4)] * ROWS)
    assert entropy.tolist() == pytest.approx([math.log(4)] * ROWS)


def saved(node: Node | None) -> tuple[Tensor | None, ...]:
    tensors: tuple[Tensor | None, ...] = node.saved_tensors
    return tensors


def test_backward_keeps_the_weight_itself_and_nothing_of_its_size() -> None:
    case = case_of()
    weight = nn.Parameter(case.weight)
    logprobs, _ = token_logprobs(case.hidden, weight, case.targets, entropy="gradient")
    kept = [tensor for tensor in saved(logprobs.grad_fn) if tensor is not None]
    assert [tensor is weight for tensor in kept].count(True) == 1
    assert all(tensor is weight or tensor.numel() <= case.hidden.numel() for tensor in kept)


# --- memory


def allocations(work: Callable[[], object]) -> list[int]:
    """Bytes of tensors that ``work`` took (positive) and gave back (negative), in order."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True, acc_events=True) as profiled:
        work()
    events = [event for event in profiled.profiler.kineto_results.events() if event.name() == "[memory]"]
    return [event.nbytes() for event in sorted(events, key=lambda event: event.start_ns())]


def peak(changes: Iterable[int]) -> int:
    return max(accumulate(changes))


@dataclass(frozen=True)
class Memory:
    """Peak of forward and backward without the gradient of the weight, and how often its size was allocated."""

    elements: float
    like_the_weight: int


def memory_of(function: Function, vocabulary: int, entropy: EntropyUse, frozen: bool = False) -> Memory:
    case = case_of(rows=64, vocabulary=vocabulary, hidden=16)
    hidden, weight = case.hidden.requires_grad_(), case.weight.requires_grad_(not frozen)

    def work() -> None:
        logprobs, spread = function(hidden, weight, case.targets, 0.7, entropy)
        (logprobs + spread).sum().backward()

    changes = allocations(work)
    others = [change for change in changes if abs(change) != weight.nbytes]
    return Memory(peak(others) / weight.itemsize, changes.count(weight.nbytes))


def test_the_peak_is_counted() -> None:
    def work() -> None:
        for _ in range(3):
            big = torch.zeros(2**16)
            del big
        kept = torch.zeros(2**16)
        kept.exp()

    assert peak(allocations(work)) == 2 * 4 * 2**16


@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.parametrize("entropy", MODES)
def test_memory_does_not_grow_with_the_vocabulary(entropy: EntropyUse, frozen: bool) -> None:
    """16 times the vocabulary: the plain path takes 16 times the memory, the chunks as much as before."""
    chunk = 2**17
    small, large = (memory_of(chunked(chunk), vocabulary, entropy, frozen) for vocabulary in (2**12, 2**16))
    assert large.elements == pytest.approx(small.elements, rel=0.2)
    assert large.elements < (1.2 if entropy == "none" else 2.2) * chunk
    assert small.like_the_weight == large.like_the_weight == (0 if frozen else 1)
    small, large = (memory_of(plain, vocabulary, entropy, frozen) for vocabulary in (2**12, 2**16))
    assert large.elements == pytest.approx(16 * small.elements, rel=0.1)


# --- the head in a model

WIDTH = 5
SIZES = {"vocab_size": 64, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2}
HEADS = {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 8, "max_position_embeddings": 64}
BATCH = torch.randint(64, (3, 11), generator=torch.Generator().manual_seed(5))
TARGETS = BATCH[:, -WIDTH:].flatten()
PLACES = torch.arange(BATCH.numel()).view(3, 11)[:, -WIDTH - 1 : -1].flatten()
"""Positions that predict the last tokens."""


def tiny(model_type: str = "llama", tied: bool = False) -> PreTrainedModel:
    config = AutoConfig.for_model(model_type, **SIZES, **HEADS, tie_word_embeddings=tied)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        model: PreTrainedModel = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    # as initialised, all responses are about as likely
    with torch.no_grad():
        model.get_input_embeddings().weight.mul_(20)
    model.generation_config = GenerationConfig()
    return model


def with_head(
    model: PreTrainedModel, chunk_elements: int = 200, group: dist.ProcessGroup | None = None
) -> tuple[PreTrainedModel, LanguageHead]:
    head = use_language_head(model, chunk_elements, group)
    assert head is not None and model.lm_head is head
    return model, head


def scored(model: PreTrainedModel, head: LanguageHead, entropy: EntropyUse = "gradient") -> Tensor:
    with head.scoring(PLACES, TARGETS, 0.7, entropy):
        scores: Tensor = model(BATCH).logits
    return scores.view(len(BATCH), WIDTH, 2)


def scored_plainly(model: PreTrainedModel) -> Tensor:
    logits = model(BATCH, logits_to_keep=WIDTH + 1).logits[:, :-1].flatten(0, 1)
    weight, targets = torch.eye(SIZES["vocab_size"]), BATCH[:, -WIDTH:].flatten()
    return torch.stack(plain(logits, weight, targets, 0.7, "gradient"), -1).view(len(BATCH), WIDTH, 2)


def loss_of(scores: Tensor) -> Tensor:
    """Sines: a loss that weighs every entry differently."""
    return (scores * torch.arange(scores.numel()).view_as(scores).sin()).sum()


def gradients(model: PreTrainedModel) -> dict[str, Tensor]:
    return {name: parameter.grad.clone() for name, parameter in model.named_parameters()}


def generated(model: PreTrainedModel) -> Tensor:
    settings = GenerationConfig(max_new_tokens=12, do_sample=False, pad_token_id=0, eos_token_id=63)
    tokens: Tensor = model.generate(BATCH, attention_mask=torch.ones_like(BATCH), generation_config=settings)
    return tokens


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("model_type", ["llama", "mistral", "qwen2", "qwen3"])
def test_the_head_scores_as_the_model_does(model_type: str, tied: bool) -> None:
    """Every gradient of the model, with tied embeddings too."""
    plainly, (model, head) = tiny(model_type, tied), with_head(tiny(model_type, tied))
    expected, found = scored_plainly(plainly), scored(model, head)
    assert found.shape == (3, WIDTH, 2) and found.dtype == torch.float32
    assert distance(found, expected) <= 1e-6
    loss_of(expected).backward()
    loss_of(found).backward()
    for name, gradient in gradients(plainly).items():
        assert distance(gradients(model)[name], gradient) <= 5e-6, name


@pytest.mark.parametrize("tied", [False, True])
def test_the_head_is_the_same_parameter_under_the_same_name(tied: bool) -> None:
    plainly = tiny(tied=tied)
    names, state, weight = list(dict(plainly.named_parameters())), list(plainly.state_dict()), plainly.lm_head.weight
    model, head = with_head(plainly)
    assert head.weight is weight
    assert model.get_output_embeddings() is head
    assert (model.get_input_embeddings().weight is weight) == tied
    assert list(dict(model.named_parameters())) == names
    assert list(model.state_dict()) == state


def test_logits_are_as_before_and_have_a_gradient() -> None:
    plainly, (model, _) = tiny(), with_head(tiny())
    expected, found = plainly(BATCH).logits, model(BATCH).logits
    assert torch.equal(found, expected)
    expected.square().sum().backward()
    found.square().sum().backward()
    assert all(torch.equal(gradient, gradients(model)[name]) for name, gradient in gradients(plainly).items())


def test_generation_is_as_before() -> None:
    model, head = with_head(tiny())
    expected = generated(tiny())
    assert torch.equal(generated(model), expected)
    scored(model, head)
    assert torch.equal(generated(model), expected)
    assert len(expected[:, 11:].unique()) > 3, "a model that always generates the same proves nothing"


def test_a_request_ends_with_its_context() -> None:
    model, head = with_head(tiny())
    with pytest.raises(IndexError), head.scoring(PLACES, TARGETS, 1.0):
        model(BATCH[:1])
    assert model(BATCH).logits.shape == (3, 11, 64)
    with (
        pytest.raises(AssertionError, match="inside"),
        head.scoring(PLACES, TARGETS, 1.0),
        head.scoring(PLACES, TARGETS, 1.0),
    ):
        pass


def test_a_head_without_rows() -> None:
    _, head = with_head(tiny())
    with head.scoring(PLACES[:0], TARGETS[:0], 1.0, "gradient"):
        scores = head(torch.zeros(0, WIDTH + 1, 16))
    assert scores.shape == (0, 2)
    scores.sum().backward()
    assert head.weight.grad is not None and not head.weight.grad.any()


@pytest.mark.parametrize("model_type", ["gemma2", "cohere"])
def test_families_that_change_the_logits_keep_their_head(model_type: str) -> None:
    model = tiny(model_type)
    head = model.lm_head
    assert use_language_head(model, 100) is None
    assert model.lm_head is head


def test_a_head_with_a_bias_and_no_head_are_left_alone() -> None:
    model = tiny()
    model.lm_head = nn.Linear(16, 64)
    assert use_language_head(model, 100) is None
    assert use_language_head(model.model, 100) is None


# --- split over ranks


def split_scores(rank: int, group: dist.ProcessGroup) -> dict[str, Scores]:
    """Every rank with its half of the vocabulary: whole columns, and this rank's rows of the weight's gradient."""
    found = {}
    for entropy, rows, chunk in product(MODES, (ROWS, 0), (1, 100, 10**6)):
        case = case_of(rows)
        part = replace(case, weight=case.weight.chunk(2)[rank])
        found[f"{entropy} {rows} {chunk}"] = part.scores(chunked(chunk, group), entropy)
    return found


def split_model(group: dist.ProcessGroup) -> dict[str, Any]:
    """A model whose head alone is split."""
    model = tiny()
    model.lm_head.weight = nn.Parameter(model.lm_head.weight.detach().chunk(2)[group.rank()])
    model, head = with_head(model, group=group)
    scores = scored(model, head)
    loss_of(scores).backward()
    grads = {name: parameter.grad for name, parameter in model.named_parameters()}
    rows = [torch.empty_like(grads["lm_head.weight"]) for _ in range(2)]
    dist.all_gather(rows, grads["lm_head.weight"])
    grads["lm_head.weight"] = torch.cat(rows)
    return {
        **{"scores": scores.detach(), "gradients": grads},
        **{"logits": model(BATCH).logits, "tokens": generated(model)},
    }


def fsdp_model(mesh: DeviceMesh, tied: bool) -> dict[str, Any]:
    """A sharded model: weights that the head reads are freed after forward and gathered again for backward."""
    model, head = with_head(tiny(tied=tied))
    if not tied:
        fully_shard(head, mesh=mesh, reshard_after_forward=True)
    fully_shard(model, mesh=mesh, reshard_after_forward=True)
    scores = scored(model, head)
    loss_of(scores).backward()
    grads = {name: parameter.grad.full_tensor() for name, parameter in model.named_parameters()}
    return {"scores": scores.detach(), "gradients": grads}


def rank_main(directory: Path) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    mesh = DeviceMesh("cpu", [0, 1])
    result = {
        "split": {name: vars(scores) for name, scores in split_scores(rank, mesh.get_group()).items()},
        "model": split_model(mesh.get_group()),
        "fsdp": {tied: fsdp_model(mesh, tied) for tied in (False, True)},
    }
    torch.save(result, directory / f"{rank}.pt")
    # a rank that leaves while the other one still reads from it ends that one
    dist.barrier()
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """Results of two ranks, in one launch."""
    directory = tmp_path_factory.mktemp("ranks")
    run_ranks("test_head", directory, number=2)
    return [torch.load(directory / f"{rank}.pt") for rank in range(2)]


@pytest.mark.parametrize("chunk", [1, 100, 10**6])
@pytest.mark.parametrize("rows", [ROWS, 0])
@pytest.mark.parametrize("entropy", MODES)
def test_a_split_vocabulary_scores_as_a_whole_one(
    entropy: EntropyUse, rows: int, chunk: int, ranks: list[dict[str, Any]]
) -> None:
    expected = case_of(rows).scores(plain, entropy)
    for rank, result in enumerate(ranks):
        assert expected.by_weight is not None
        part = replace(expected, by_weight=expected.by_weight.chunk(2)[rank])
        assert_close(Scores(**result["split"][f"{entropy} {rows} {chunk}"]), part, 1e-6)


def test_a_model_with_a_split_head_is_the_same_model(ranks: list[dict[str, Any]]) -> None:
    plainly = tiny()
    expected = scored_plainly(plainly)
    loss_of(expected).backward()
    for result in ranks:
        found = result["model"]
        assert distance(found["scores"], expected) <= 1e-6
        for name, gradient in gradients(plainly).items():
            assert distance(found["gradients"][name], gradient) <= 5e-6, name
        assert distance(found["logits"], plainly(BATCH).logits) <= 1e-6
        assert not found["logits"].requires_grad
        assert torch.equal(found["tokens"], generated(plainly))


@pytest.mark.parametrize("tied", [False, True])
def test_a_head_whose_weight_is_freed_between_forward_and_backward(tied: bool, ranks: list[dict[str, Any]]) -> None:
    """Both ranks have the same rows, so that their mean gradient equals one rank's."""
    plainly = tiny(tied=tied)
    expected = scored_plainly(plainly)
    loss_of(expected).backward()
    for result in ranks:
        found = result["fsdp"][tied]
        assert distance(found["scores"], expected) <= 1e-6
        for name, gradient in gradients(plainly).items():
            assert distance(found["gradients"][name], gradient) <= 5e-6, name


# --- on a GPU


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_on_a_gpu_as_on_the_cpu(dtype: torch.dtype) -> None:
    """16-bit weights get their gradient from 16-bit products with float32 sums, which CUDA alone has."""
    case = case_of(rows=200).to(dtype)
    there = replace(case, **{name: getattr(case, name).cuda() for name in ("hidden", "weight", "targets", "factors")})
    found = there.scores(chunked(7 * VOCABULARY), "gradient")
    on_cpu = Scores(**{name: tensor.cpu() for name, tensor in vars(found).items()})
    assert_close(on_cpu, case.scores(plain, "gradient"), 1e-5 if dtype == torch.float32 else 2**-7)


if __name__ == "__main__":
    rank_main(Path(sys.argv[1]))
