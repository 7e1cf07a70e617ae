"""Scores are read at the same token as by the library that trained the model: plain transformers, OpenRLHF's rule and
heads of other names."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from small_models import LENGTHS, ONE_RANK, SEED, TINY, engine_of, placed
from torch import Tensor
from torch.distributed import HashStore
from transformers import AutoModelForSequenceClassification, LlamaConfig

from flexrlhf.config.model_settings import ModelSpec
from flexrlhf.engines.base import Batch, EngineContext
from flexrlhf.engines.model_ranks import ModelRanks
from flexrlhf.engines.scalar_head import saved_value_head
from flexrlhf.engines.torch.engine import TorchEngine
from flexrlhf.errors import UserError
from flexrlhf.operators.columns import COLUMNS
from flexrlhf.weights.shapes import model_shape

EOS, PAD, BOS = 2, 3, 1
SEQUENCES = [
    ([5, 6], [7, 8, EOS]),  # ends
    ([5, 6, 7, 8], [9, 10, 11, 12, 13, 14]),  # cut off
    ([4], [EOS]),  # an empty response
    ([6, EOS], [EOS]),  # two end tokens, one of the prompt
    ([9, 8, 7], [EOS, 5, EOS, EOS]),  # an end token inside, two at the end
    ([9, 8, 7, 6], [PAD, 5]),  # the padding token as text
]
"""Prompts and responses of several lengths."""


def save_model(directory: Path, **settings: Any) -> Path:
    """A small reward model with random weights, as transformers saves it."""
    torch.manual_seed(1)
    config = LlamaConfig(**{**TINY, "num_labels": 1, "bos_token_id": BOS, "eos_token_id": EOS, **settings})
    AutoModelForSequenceClassification.from_config(config, dtype=torch.float32).save_pretrained(directory)
    return directory


def batch_of(sequences: list[tuple[list[int], list[int]]]) -> Batch:
    """Rows as in the engine: prompts left-padded, responses right-padded, with a token that is no padding."""
    tokens = torch.full((len(sequences), LENGTHS.prompt + LENGTHS.response), 9, dtype=torch.int32)
    mask = torch.zeros_like(tokens, dtype=torch.uint8)
    for row, (prompt, response) in enumerate(sequences):
        first, last = LENGTHS.prompt - len(prompt), LENGTHS.prompt + len(response)
        tokens[row, first:last] = torch.tensor(prompt + response, dtype=torch.int32)
        mask[row, first:last] = 1
    return Batch({"tokens": tokens, "attention_mask": mask}, torch.arange(len(sequences)), 1)


def own_scores(path: Path, role: str = "reward") -> Tensor:
    engine = engine_of(role, head="scalar", path=str(path), micro_batch_tokens=24)
    return engine.forward(batch_of(SEQUENCES), [COLUMNS["scores"]])["scores"]


@torch.no_grad()
def plain_scores(path: Path, side: str = "right") -> Tensor:
    """Scores of plain transformers: all sequences in one padded batch; without a padding token one after the other."""
    model = AutoModelForSequenceClassification.from_pretrained(path, dtype=torch.float32).eval()
    pad = model.config.pad_token_id
    sequences = [torch.tensor(prompt + response) for prompt, response in SEQUENCES]
    if pad is None:
        return torch.stack([model(input_ids=text[None]).logits[0, 0] for text in sequences])
    width = max(map(len, sequences))
    ids, mask = torch.full((len(sequences), width), pad), torch.zeros(len(sequences), width, dtype=torch.int64)
    for row, text in enumerate(sequences):
        place = slice(0, len(text)) if side == "right" else slice(width - len(text), width)
        ids[row, place], mask[row, place] = text, 1
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    return model(input_ids=ids, attention_mask=mask, position_ids=positions).logits[:, 0]


@torch.no_grad()
def outputs(path: Path, text: list[int]) -> Tensor:
    """Output of the head after every token of ``text``."""
    model = AutoModelForSequenceClassification.from_pretrained(path, dtype=torch.float32).eval()
    return model.score(model.model(input_ids=torch.tensor([text])).last_hidden_state)[0, :, 0]


@pytest.mark.parametrize("side", ["right", "left"])
@pytest.mark.parametrize("pad", [EOS, PAD, None])
def test_scores_equal_plain_transformers(tmp_path: Path, pad: int | None, side: str) -> None:
    path = save_model(tmp_path / "reward", pad_token_id=pad)
    torch.testing.assert_close(own_scores(path), plain_scores(path, side), rtol=0, atol=1e-5)


def test_the_padding_token_decides_which_token_is_read(tmp_path: Path) -> None:
    path = save_model(tmp_path / "reward")
    scores = {}
    for pad in (EOS, PAD, None):
        change_config(path, pad_token_id=pad)
        scores[pad] = own_scores(path)
    differs = {pad: ((scores[pad] - scores[None]).abs() > 1e-4).tolist() for pad in (EOS, PAD)}
    assert differs == {EOS: [True, False, True, True, True, False], PAD: [False] * 6}


def test_a_text_of_padding_alone_is_read_at_its_first_token(tmp_path: Path) -> None:
    path = save_model(tmp_path / "reward", pad_token_id=EOS)
    scores = engine_of("reward", path=str(path)).forward(batch_of([([EOS], [EOS])]), [COLUMNS["scores"]])["scores"]
    torch.testing.assert_close(scores[0], outputs(path, [EOS, EOS])[0], rtol=0, atol=1e-5)


@pytest.mark.parametrize(("pad", "of_run"), [(EOS, PAD), (PAD, EOS), (None, EOS), (None, PAD)])
def test_a_trained_model_is_saved_so_that_transformers_reads_the_same(
    tmp_path: Path, pad: int | None, of_run: int
) -> None:
    path, model = save_model(tmp_path / "start", pad_token_id=pad), placed("critic", "scalar")
    model = replace(model, settings=ModelSpec(path=str(path)))
    engine = trained_engine(model, of_run)
    assert engine.config.pad_token_id == (of_run if pad is None else pad)
    saved = tmp_path / "saved"
    saved.mkdir()
    engine.config.save_pretrained(saved)
    save_file({name: tensor.detach().clone() for name, tensor in engine.weights().items()}, saved / "model.safetensors")
    scores = engine.forward(batch_of(SEQUENCES), [COLUMNS["scores"]])["scores"]
    torch.testing.assert_close(scores, plain_scores(saved), rtol=0, atol=1e-5)
    torch.testing.assert_close(scores, own_scores(saved), rtol=0, atol=1e-5)


def trained_engine(model: Any, pad_token_id: int) -> TorchEngine:
    return TorchEngine(
        EngineContext(
            placed=model,
            lengths=LENGTHS,
            temperature=1.0,
            seed=SEED,
            num_updates=10,
            ranks=ModelRanks(ONE_RANK, ONE_RANK),
            device=torch.device("cpu"),
            kv_bytes=0,
            store=HashStore(),
            pad_token_id=pad_token_id,
        )
    )


def change_config(path: Path, **settings: Any) -> None:
    file = path / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | settings))


def rename_head(path: Path, name: str, **further: Tensor) -> None:
    tensors = load_file(path / "model.safetensors")
    tensors[f"{name}.weight"] = tensors.pop("score.weight")
    save_file(tensors | further, path / "model.safetensors", metadata={"format": "pt"})


def test_a_model_of_openrlhf_is_read_at_the_last_token_and_normalised(tmp_path: Path) -> None:
    """OpenRLHF's rule: the last token in the mask, less the mean, divided by the deviation, both from its config."""
    path = save_model(tmp_path / "reward", pad_token_id=EOS)
    last = torch.stack([outputs(path, prompt + response)[-1] for prompt, response in SEQUENCES])
    change_config(path, normalize_reward=False, value_head_prefix="score")
    torch.testing.assert_close(own_scores(path), last, rtol=0, atol=1e-5)
    change_config(path, normalize_reward=True, mean=0.5, std=2.0)
    torch.testing.assert_close(own_scores(path), (last - 0.5) / 2.0, rtol=0, atol=1e-5)
    config = trained_engine(replace(placed("critic", "scalar"), settings=ModelSpec(path=str(path))), EOS).config
    assert (config.pad_token_id, config.normalize_reward, config.value_head_prefix) == (None, False, "score")


@pytest.mark.parametrize("name", ["v_head", "value_head", "reward_head", "score_head", "classifier"])
def test_a_head_of_another_name_is_read_at_the_last_token(tmp_path: Path, name: str) -> None:
    path = save_model(tmp_path / "reward", pad_token_id=EOS)
    last = torch.stack([outputs(path, prompt + response)[-1] for prompt, response in SEQUENCES])
    rename_head(path, name)
    torch.testing.assert_close(own_scores(path), last, rtol=0, atol=1e-5)
    head = saved_value_head(str(path))
    assert head is not None and head.shape == (1, TINY["hidden_size"])
    shape = model_shape("reward", ModelSpec(path=str(path)), "scalar", new_head=False)
    assert shape is not None and "score.weight" in shape.names and f"{name}.weight" not in shape.names


@pytest.mark.parametrize(
    ("labels", "name", "bias", "sentence"),
    [
        (2, "score", False, r"its head has 2 labels \(shape \[2, 16\]\); a model of scores has one"),
        (2, "classifier", False, r"its head has 2 labels"),
        (1, "v_head.summary", True, "its head has a bias, which a sequence classifier of transformers does not"),
        (1, "other_head", False, r"has no scalar head \(score.weight\), so its scores would be random"),
    ],
)
def test_heads_that_give_no_score_are_one_sentence(
    tmp_path: Path, labels: int, name: str, bias: bool, sentence: str
) -> None:
    path = save_model(tmp_path / "reward", num_labels=labels, id2label=None)
    rename_head(path, name, **({f"{name}.bias": torch.zeros(1)} if bias else {}))
    with pytest.raises(UserError, match=sentence):
        model_shape("reward", ModelSpec(path=str(path)), "scalar", new_head=False)
