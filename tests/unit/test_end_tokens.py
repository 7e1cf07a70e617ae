"""Tokens that end a response, and files that are saved with a policy."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer, GenerationConfig

from benchmarks.peers.chat_tokenizers import FAMILIES
from flexrlhf.config.model_settings import ModelSpec
from flexrlhf.data.chat import ChatFormat, ChatTemplate
from flexrlhf.data.encoding import EncodedResponse, RowEncoder
from flexrlhf.data.forms import TextExample
from flexrlhf.data.messages import Message
from flexrlhf.errors import UserError
from flexrlhf.plan.run_tokenizer import end_tokens, saved_template, usage_files

OWN = "{% for message in messages %}{{ message['content'] }}<|eot_id|>{% endfor %}"
TURN_ENDS = {
    **dict.fromkeys(("smollm2", "qwen2_5"), "<|im_end|>"),
    **{"llama3": "<|eot_id|>", "mistral": "</s>", "gemma": "<end_of_turn>"},
}


@pytest.mark.parametrize("name", FAMILIES)
def test_the_end_of_a_turn_ends_a_response(name: str, tokenizers: Any) -> None:
    tokenizer = tokenizers[name]
    ids = [tokenizer.eos_token_id, tokenizer.convert_tokens_to_ids(TURN_ENDS[name])]
    assert end_tokens(tokenizer, ChatFormat(), None) == tuple(dict.fromkeys(ids))


def test_a_template_without_an_end_adds_none(tokenizers: Any) -> None:
    tokenizer = tokenizers["llama3"]
    silent = "{{ raise_exception('no') }}", "{% for m in messages %}{{ m.content }}\n{% endfor %}", "<|eot_id|>"
    for template in silent:
        assert end_tokens(tokenizer, ChatFormat(template=template), None) == (tokenizer.eos_token_id,)
        assert ChatTemplate(tokenizer, template).turn_end in ("", "\n")


@pytest.mark.parametrize(("listed", "added"), [([4, 7, 1], (4, 7)), (9, (9,)), (None, ()), (1, ())])
def test_all_ids_of_the_generation_config_end_a_response(
    listed: object, added: tuple[int, ...], tokenizers: Any, tmp_path: Path
) -> None:
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": listed}))
    tokenizer = tokenizers["llama3"]
    assert end_tokens(tokenizer, ChatFormat(template="{{ 1 }}"), ModelSpec(path=str(tmp_path))) == (1, *added)


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
        end_tokens(tokenizers["llama3"], ChatFormat(), ModelSpec(path=str(tmp_path)))
    assert sentence in str(caught.value)


ASKED, ANSWERED = Message("user", "Name two primes."), Message("assistant", "Two and three.")
CHAT = (ASKED, ANSWERED, Message("user", "Thanks a lot!"), Message("assistant", "You are right."))
BEGUN = "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
UNENDED = {
    "nowhere": "{% for m in messages %}### {{ m.role }}: {{ m.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}### assistant: {% endif %}",
    "not behind the chat": "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}"
    "{% if not loop.last or m.role == 'user' %}<|im_end|>\n{% endif %}{% endfor %}" + BEGUN,
    "behind the markers": "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.role == 'assistant' %}"
    "{% generation %}{{ m.content }}{% endgeneration %}{% else %}{{ m.content }}{% endif %}<|im_end|>\n{% endfor %}"
    + BEGUN,
    "at the next turn": "{% for m in messages %}{{ '<|endoftext|>' if m.role == 'user' else '<|im_start|>' }}\n"
    "{{ m.content }}{% endfor %}{% if add_generation_prompt %}<|im_start|>{% endif %}",
}
"""Templates by where they write an end of turn."""


def trained(tokenizer: Any, response: EncodedResponse) -> str:
    pairs = zip(response.ids, response.is_trained, strict=True)
    return str(tokenizer.decode([token for token, is_trained in pairs if is_trained]))


@pytest.mark.parametrize("where", UNENDED)
def test_a_template_that_ends_no_turn_is_named_and_is_remedied(where: str, tokenizers: Any) -> None:
    """In chats and pairs, by the token that follows a turn if it ends responses, as a role's does in GLM's template."""
    tokenizer, template = tokenizers["qwen2_5"], UNENDED[where]
    ends = tuple(tokenizer.convert_tokens_to_ids(["<|im_end|>", "<|endoftext|>"]))
    for row in (
        TextExample("", turns=CHAT[:1], completions=(CHAT[1:],)),
        TextExample("", turns=CHAT[:1], completions=((ANSWERED,), (CHAT[3],))),
    ):
        unended = RowEncoder(tokenizer, ChatFormat(template=template, ends=ends), 1000).encode(row)
        (remark,) = unended.remarks
        named = {"nowhere": "eos", "at the next turn": "<|endoftext|>"}.get(where, "<|im_end|>")
        assert "no token that ends a response (<|im_end|>, <|endoftext|>)" in remark
        assert f"data.end_token={named} has" in remark
        ended = RowEncoder(tokenizer, ChatFormat(template=template, ends=ends, end=named), 1000).encode(row)
        token = "<|im_end|>" if named == "eos" else named
        for response, completion in zip(ended.responses, row.completions, strict=True):
            answers = [each.content for each in completion if each.role == "assistant"]
            pieces = [each.strip() for each in trained(tokenizer, response).split(token)]
            assert pieces == [*answers, ""] and token * 2 not in tokenizer.decode(response.ids)
        assert ended.remarks == () and ended.prompt == unended.prompt


def test_an_end_that_is_set_is_saved_and_ends_responses(tokenizers: Any, tmp_path: Path) -> None:
    tokenizer = tokenizers["llama3"]
    chat = ChatFormat(template=UNENDED["nowhere"], end="<|eot_id|>")
    eot = tokenizer.convert_tokens_to_ids("<|eot_id|>")
    assert end_tokens(tokenizer, chat, None) == (tokenizer.eos_token_id, eot)
    template = saved_template(tokenizer, chat)
    messages = [{"role": each.role, "content": each.content} for each in CHAT]
    text = tokenizer.apply_chat_template(messages, chat_template=template, tokenize=False)
    assert text.count("<|eot_id|>\n") == 2 and text == ChatTemplate(tokenizer, template, end="<|eot_id|>").chat(CHAT)
    begun = tokenizer.apply_chat_template(messages, chat_template=template, continue_final_message=True, tokenize=False)
    assert begun.endswith("You are right.")
    with pytest.raises(
        UserError, match=r"data.end_token '<\|eot\|>' is no special token of the tokenizer \(did you mean"
    ):
        ChatTemplate(tokenizer, end="<|eot|>")


def test_a_saved_policy_is_used_as_it_was_trained(tokenizers: Any, tmp_path: Path) -> None:
    """Its directory has the run's template, also in a later run, and the tokens that end its responses."""
    origin = tmp_path / "origin"
    origin.mkdir()
    (origin / "generation_config.json").write_text('{"eos_token_id": 9, "temperature": 0.6, "do_sample": true}')
    policy, tokenizer = ModelSpec(path=str(origin)), tokenizers["llama3"]
    saved = tmp_path / "saved"
    tokenizer.save_pretrained(saved)
    for name, text in usage_files(OWN, policy, end_tokens(tokenizer, ChatFormat(template=OWN), policy), 3).items():
        (saved / name).write_text(text)
    settings = GenerationConfig.from_pretrained(saved)
    assert settings.eos_token_id == [1, 9, tokenizer.convert_tokens_to_ids("<|eot_id|>")]
    assert (settings.temperature, settings.do_sample, settings.pad_token_id) == (0.6, True, 3)
    assert AutoTokenizer.from_pretrained(saved).chat_template == OWN
    assert usage_files(None, None, (1,), 0) == {}
