"""The generated corpus: its sizes, its lengths, the lesson of its pairs, and its tokenizer."""

from __future__ import annotations

import random
import re
from collections.abc import Callable
from pathlib import Path

import pytest
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from flexrlhf.data.examples import LoadedExamples
from flexrlhf.data.files import read_rows
from flexrlhf.data.quickstart.corpus import (
    BAD_RESPONSES,
    KIND_CLOSERS,
    KIND_OPENERS,
    MAX_PROMPT_TOKENS,
    MAX_RESPONSE_TOKENS,
    RUDE_CLOSERS,
    RUDE_OPENERS,
    Question,
    all_questions,
    build_tokenizer,
    empty_politeness,
    looping_response,
    off_topic_response,
    repeated_word,
    rude_response,
    unfinished_response,
    write_corpus,
    wrong_thing_response,
)

Response = Callable[[random.Random, Question], str]
SIZES = {"sft": 1500, "pairs": 1200, "prompts": 512, "sft_held_out": 64, "pairs_held_out": 200, "prompts_held_out": 64}


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("corpus")
    write_corpus(directory)
    return directory


@pytest.fixture(scope="module")
def tokenizer(corpus: Path) -> PreTrainedTokenizerBase:
    return AutoTokenizer.from_pretrained(corpus / "tokenizer", local_files_only=True)


def rows_of(corpus: Path, name: str) -> list[dict[str, str]]:
    return read_rows(corpus / f"{name}.jsonl")


def all_texts(corpus: Path) -> set[str]:
    return {text for name in SIZES for row in rows_of(corpus, name) for text in row.values()}


def is_kind(response: str) -> bool:
    return response.startswith(KIND_OPENERS) or response.endswith(KIND_CLOSERS)


def test_sizes_and_columns(corpus: Path) -> None:
    for name, size in SIZES.items():
        assert len(rows_of(corpus, name)) == size
    assert set(rows_of(corpus, "sft")[0]) == {"prompt", "response"}
    assert set(rows_of(corpus, "pairs")[0]) == {"prompt", "chosen", "rejected"}
    assert set(rows_of(corpus, "prompts")[0]) == {"prompt"}


def test_same_seed_same_bytes(corpus: Path, tmp_path: Path) -> None:
    write_corpus(tmp_path / "again")
    write_corpus(tmp_path / "other", seed=1)
    files = sorted(path.relative_to(corpus) for path in corpus.rglob("*") if path.is_file())
    assert len(files) == 8
    for file in files:
        same = (tmp_path / "other" / file).read_bytes() == (corpus / file).read_bytes()
        assert (tmp_path / "again" / file).read_bytes() == (corpus / file).read_bytes()
        assert same == (file.parts[0] == "tokenizer"), "the vocabulary must not depend on the seed, the rows must"


def test_questions_of_the_evaluation_files_are_new(corpus: Path) -> None:
    def questions(suffix: str) -> set[str]:
        return {row["prompt"] for name in ("sft", "pairs", "prompts") for row in rows_of(corpus, name + suffix)}

    assert questions("").isdisjoint(questions("_held_out"))
    assert len({row["prompt"] for row in rows_of(corpus, "prompts")}) == SIZES["prompts"]
    assert len({row["prompt"] for row in rows_of(corpus, "prompts_held_out")}) == SIZES["prompts_held_out"]


def test_there_is_variety(corpus: Path) -> None:
    responses = {row[key] for row in rows_of(corpus, "pairs") for key in ("chosen", "rejected")}
    responses |= {row["response"] for row in rows_of(corpus, "sft")}
    assert len({question.text for question in all_questions()}) == len(all_questions()) > 700
    assert len(responses) > 3000


def test_words_and_tokens_keep_within_bounds(corpus: Path, tokenizer: PreTrainedTokenizerBase) -> None:
    for name in SIZES:
        for row in rows_of(corpus, name):
            question, *responses = row.values()
            assert 4 <= len(question.split()) <= 12
            assert len(tokenizer.encode(question)) <= MAX_PROMPT_TOKENS
            for response in responses:
                assert 5 <= len(response.split()) <= 16
                assert len(tokenizer.encode(response, add_special_tokens=False)) + 1 <= MAX_RESPONSE_TOKENS


def test_demonstrations_are_mostly_rude(corpus: Path) -> None:
    kind = [is_kind(row["response"]) for row in rows_of(corpus, "sft")]
    assert 0.28 < sum(kind) / len(kind) < 0.38


def test_kind_and_rude_wordings_do_not_mix(corpus: Path) -> None:
    for row in rows_of(corpus, "sft"):
        rude = row["response"].startswith(RUDE_OPENERS) or row["response"].endswith(RUDE_CLOSERS)
        assert not (rude and is_kind(row["response"]))


def test_chosen_responses_are_kind_finished_and_about_the_thing(corpus: Path) -> None:
    things = {question.text: question.thing for question in all_questions()}
    for row in rows_of(corpus, "pairs") + rows_of(corpus, "pairs_held_out"):
        assert is_kind(row["chosen"]) and row["chosen"][-1] in ".!"
        assert things[row["prompt"]] in row["chosen"].lower()
        assert row["chosen"] != row["rejected"]


def responses_of(kind_of_response: Response) -> list[tuple[Question, str]]:
    rng = random.Random(0)
    return [(question, kind_of_response(rng, question)) for question in rng.sample(all_questions(), 200)]


def test_rude_responses_name_the_thing_and_are_not_kind() -> None:
    for question, response in responses_of(rude_response):
        assert question.thing in response.lower() and not is_kind(response)


@pytest.mark.parametrize("misses_the_point", [off_topic_response, wrong_thing_response])
def test_kind_responses_that_miss_the_point_do_not_name_the_thing(misses_the_point: Response) -> None:
    for question, response in responses_of(misses_the_point):
        assert is_kind(response) and question.thing not in re.findall(r"\w+", response.lower())


def test_repetition_says_one_thing_at_least_four_times() -> None:
    for _, response in responses_of(repeated_word):
        words = response.lower().split()
        assert len(words) / len(set(words)) >= 4


def test_empty_politeness_is_made_of_polite_phrases_only() -> None:
    for _, response in responses_of(empty_politeness):
        for phrase in KIND_OPENERS + KIND_CLOSERS:
            response = response.replace(phrase, "")
        assert not response.strip()


def test_unfinished_responses_stop_without_a_mark() -> None:
    assert all(response[-1].isalpha() for _, response in responses_of(unfinished_response))


def test_looping_responses_repeat_their_last_words() -> None:
    for _, response in responses_of(looping_response):
        words = response.rstrip(".").split()
        assert words[-2:] == words[-4:-2] or words[-3:] == words[-6:-3]


def test_half_of_the_rejected_responses_are_rude() -> None:
    assert BAD_RESPONSES[rude_response] == 0.5 and sum(BAD_RESPONSES.values()) == pytest.approx(1.0)


def test_the_tokenizer_has_every_word_and_gives_it_back(corpus: Path, tokenizer: PreTrainedTokenizerBase) -> None:
    for text in all_texts(corpus):
        ids = tokenizer.encode(text, add_special_tokens=False)
        assert tokenizer.unk_token_id not in ids
        assert tokenizer.decode(ids) == text


def test_the_tokenizer_joins_prompt_and_response(tokenizer: PreTrainedTokenizerBase) -> None:
    prompt = tokenizer.encode("Where can I leave my bag?")
    response = tokenizer.encode("Of course! Please put your bag behind the desk.", add_special_tokens=False)
    joined = tokenizer.decode([*prompt, *response, tokenizer.eos_token_id], skip_special_tokens=True)
    assert joined == "Where can I leave my bag? Of course! Please put your bag behind the desk."


def test_the_special_tokens_differ_and_the_vocabulary_is_small(tokenizer: PreTrainedTokenizerBase) -> None:
    special = [tokenizer.pad_token_id, tokenizer.eos_token_id, tokenizer.bos_token_id, tokenizer.unk_token_id]
    assert special == [0, 1, 2, 3]
    assert 200 < len(tokenizer) < 600
    assert tokenizer.encode("Where")[0] == tokenizer.bos_token_id
    assert tokenizer.encode("xylophone", add_special_tokens=False) == [tokenizer.unk_token_id]


def test_a_tokenizer_of_other_texts(tmp_path: Path) -> None:
    build_tokenizer(["A cat, a hat."], tmp_path)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path, local_files_only=True)
    assert tokenizer.decode(tokenizer.encode("a hat, A cat."), skip_special_tokens=True) == "a hat, A cat."


@pytest.mark.parametrize(("name", "needs"), [("sft", "responses"), ("pairs_held_out", "pairs"), ("prompts", "prompts")])
def test_the_files_load_within_the_stated_limits(
    corpus: Path, tokenizer: PreTrainedTokenizerBase, name: str, needs: str
) -> None:
    limits = {"max_prompt_tokens": MAX_PROMPT_TOKENS, "max_response_tokens": MAX_RESPONSE_TOKENS}
    examples = LoadedExamples.load(corpus / f"{name}.jsonl", needs=needs, tokenizer=tokenizer, **limits).examples
    assert len(examples) == SIZES[name]
    assert all(example.prompt[0] == tokenizer.bos_token_id and all(example.finished) for example in examples)
