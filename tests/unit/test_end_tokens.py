"""Tokens that end a response, and files that are saved with a policy."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer, GenerationConfig

from benchmarks.peers.chat_tokenizers import FAMILIES
from flexrlhf.config.model_settings import ModelSpec
from flexrlhf.data.chat import ChatTemplate
from flexrlhf.errors import UserError
from flexrlhf.plan.run_tokenizer import end_tokens, usage_files

OWN = "{% for message in messages %}{{ message['content'] }}<|eot_id|>{% endfor %}"
TURN_ENDS = {
    **dict.fromkeys(("smollm2", "qwen2_5"), "<|im_end|>"),
    **{"llama3": "<|eot_id|>", "mistral": "</s>", "gemma": "<end_of_turn>"},
}


@pytest.mark.parametrize("name", FAMILIES)
def test_the_end_of_a_turn_ends_a_response(name: str, tokenizers: Any) -> None:
    tokenizer = tokenizers[name]
    ids = [tokenizer.eos_token_id, tokenizer.convert_tokens_to_ids(TURN_ENDS[name])]
    assert end_tokens(tokenizer, None, None) == tuple(dict.fromkeys(ids))


def test_a_template_without_an_end_adds_none(tokenizers: Any) -> None:
    tokenizer = tokenizers["llama3"]
    silent = "{{ raise_exception('no') }}", "{% for m in messages %}{{ m.content }}\n{% endfor %}", "<|eot_id|>"
    for template in silent:
        assert end_tokens(tokenizer, template, None) == (tokenizer.eos_token_id,)
        assert ChatTemplate(tokenizer, template).turn_end() in ("", "\n")


@pytest.mark.parametrize(("listed", "added"), [([4, 7, 1], (4, 7)), (9, (9,)), (None, ()), (1, ())])
def test_all_ids_of_the_generation_config_end_a_response(
    listed: object, added: tuple[int, ...], tokenizers: Any, tmp_path: Path
) -> None:
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": listed}))
    tokenizer = tokenizers["llama3"]
    assert end_tokens(tokenizer, "{{ 1 }}", ModelSpec(path=str(tmp_path))) == (1, *added)


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ('{"eos_token_id": "</s>"}', "must be a token id or a list of them, found '</s>'"),
        ('{"eos_token_id": [1, true]}', "must be a token id or a list of them, found true"),
        ("[1]", "must contain an object"),
        ("{", "cannot be read as JSON"),
    ],
)
def test_a_broken_generation_config_is_one_sentence(text: str, sentence: str, tokenizers: Any, tmp_path: Path) -> None:
    (tmp_path / "generation_config.json").write_text(text)
    with pytest.raises(UserError, match="models.actor.path") as caught:
        end_tokens(tokenizers["llama3"], None, ModelSpec(path=str(tmp_path)))
    assert sentence in str(caught.value)


def test_a_saved_policy_is_used_as_it_was_trained(tokenizers: Any, tmp_path: Path) -> None:
    """Its directory has the run's template, also in a later run, and the tokens that end its responses."""
    origin = tmp_path / "origin"
    origin.mkdir()
    (origin / "generation_config.json").write_text('{"eos_token_id": 9, "temperature": 0.6, "do_sample": true}')
    policy, tokenizer = ModelSpec(path=str(origin)), tokenizers["llama3"]
    saved = tmp_path / "saved"
    tokenizer.save_pretrained(saved)
    for name, text in usage_files(OWN, policy, end_tokens(tokenizer, OWN, policy), 3).items():
        (saved / name).write_text(text)
    settings = GenerationConfig.from_pretrained(saved)
    assert settings.eos_token_id == [1, 9, tokenizer.convert_tokens_to_ids("<|eot_id|>")]
    assert (settings.temperature, settings.do_sample, settings.pad_token_id) == (0.6, True, 3)
    assert AutoTokenizer.from_pretrained(saved).chat_template == OWN
    assert usage_files(None, None, (1,), 0) == {}
