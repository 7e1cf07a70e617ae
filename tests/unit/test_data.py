"""Reading data files, the forms of their rows, their token ids, and the data order."""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from flexrlhf.data.examples import Example, LoadedExamples
from flexrlhf.data.files import Row, read_rows
from flexrlhf.data.forms import ALPACA_TEMPLATES, detect_form, text_of
from flexrlhf.data.order import step_indices
from flexrlhf.data.pairs import split_dialogues
from flexrlhf.data.row_layout import RowLayout
from flexrlhf.errors import UserError
from flexrlhf.operators.graph import Needs

FIXTURES = Path(__file__).parents[1] / "fixtures"
BOS, EOS, PAD = 1, 2, 0
RESPONSES = {"chosen": "yes", "rejected": "no"}


@dataclass
class WordTokenizer:
    """One id for each word between white space, counted up from 3. With special tokens bos is before a text."""

    bos_token_id: int | None = BOS
    eos_token_id: int | None = EOS
    pad_token_id: int | None = PAD
    ids: dict[str, int] = field(default_factory=dict)

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        ids = [self.ids.setdefault(word, len(self.ids) + 3) for word in text.split()]
        return [self.bos_token_id, *ids] if add_special_tokens and self.bos_token_id is not None else ids

    def decode(self, ids: Iterable[int]) -> str:
        words = {index: word for word, index in self.ids.items()} | {BOS: "<bos>", EOS: "<eos>"}
        return " ".join(words[index] for index in ids)


def load(path: Path, needs: Needs, tokenizer: WordTokenizer | None = None, **settings: object) -> list[Example]:
    limits = {"max_prompt_tokens": 1000, "max_response_tokens": 1000} | settings
    return LoadedExamples.load(path, needs=needs, tokenizer=tokenizer or WordTokenizer(), **limits).examples


def write_jsonl(path: Path, *rows: object) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def message(path: Path, needs: Needs, **settings: object) -> str:
    with pytest.raises(UserError) as caught:
        load(path, needs, **settings)
    return str(caught.value)


# --- files


def test_the_three_kinds_of_file_give_the_same_rows(tmp_path: Path) -> None:
    rows = [{"prompt": "one"}, {"prompt": "zwölf \u2028 line"}]
    lines = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
    (tmp_path / "a.jsonl").write_text(lines, encoding="utf-8")
    (tmp_path / "a.jsonl.gz").write_bytes(gzip.compress(lines.encode()))
    (tmp_path / "a.json").write_text(json.dumps(rows), encoding="utf-8")
    for name in ("a.jsonl", "a.jsonl.gz", "a.json"):
        assert read_rows(tmp_path / name) == rows


def test_rows_of_a_program_are_examples_as_a_file_has_them(tmp_path: Path) -> None:
    rows: list[Row] = [{"prompt": "one two", "answer": {"value": 2}}, {"question": "three", "answer": None}]
    settings = {"needs": "prompts", "max_prompt_tokens": 9, "max_response_tokens": 9, "with_columns": True}
    with pytest.raises(UserError, match="prompts of step 3, row 2: needs the column 'prompt'"):
        LoadedExamples.load("prompts of step 3", rows=rows, tokenizer=WordTokenizer(), **settings)  # type: ignore[arg-type]
    path = write_jsonl(tmp_path / "rows.jsonl", rows[0])
    both = [
        LoadedExamples.load(path, rows=given, tokenizer=WordTokenizer(), **settings).examples  # type: ignore[arg-type]
        for given in (None, rows[:1])
    ]
    read = Example.from_data(Example.to_data(both[1]))
    assert both[0] == both[1] == read and read[0].columns == both[0][0].columns and read[0].text == "one two"


def test_windows_line_ends_and_byte_order_mark_are_read(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'\xef\xbb\xbf{"prompt": "one"}\r\n{"prompt": "two"}\r\n')
    assert [row["prompt"] for row in read_rows(path)] == ["one", "two"]


def test_missing_file_names_the_nearest(tmp_path: Path) -> None:
    write_jsonl(tmp_path / "pairs.jsonl", {"prompt": "x"})
    with pytest.raises(UserError, match=r"no data file .*pair\.jsonl \(did you mean '.*/pairs\.jsonl'\?\)"):
        read_rows(tmp_path / "pair.jsonl")


def test_missing_folder_is_named(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"the directory .*nowhere does not exist"):
        read_rows(tmp_path / "nowhere" / "pairs.jsonl")


@pytest.mark.parametrize(
    ("name", "content", "expected"),
    [
        ("a.txt", b"prompt\nx\n", "its name must end in .jsonl, .jsonl.gz, .json, .csv or .parquet"),
        ("a.jsonl", b'{"prompt": "x"}\n{"prompt": \n', "a.jsonl, line 2: not JSON"),
        ("a.jsonl", b'{"prompt": "x"}\n\n{"prompt": "y"}\n', "a.jsonl, line 2: not JSON"),
        ("a.json", b'[\n{"prompt": "x"},\n}]', "a.json, line 3: not JSON"),
        ("a.jsonl", b'{"prompt": "x"}\n["y"]\n', "a.jsonl, row 2: a row must be a JSON object, found a list"),
        ("a.json", b'{"prompt": "x"}', "a.json must contain a list of objects, found an object"),
        ("a.jsonl", b"\n", "a.jsonl has no rows"),
        ("a.json", b"[]", "a.json has no rows"),
        ("a.jsonl.gz", b"not gzip", "cannot read"),
        ("a.jsonl", b"\xff\xfe", "cannot read"),
    ],
)
def test_unreadable_files_say_why(tmp_path: Path, name: str, content: bytes, expected: str) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(UserError) as caught:
        read_rows(tmp_path / name)
    assert expected in str(caught.value)


def test_truncated_gzip_is_a_user_error(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl.gz"
    path.write_bytes(gzip.compress(b'{"prompt": "x"}\n')[:-6])
    with pytest.raises(UserError, match="cannot read"):
        read_rows(path)


# --- forms


@pytest.mark.parametrize(
    ("columns", "form"),
    [
        (["prompt"], "prompt"),
        (["prompt", "response"], "prompt"),
        (["chosen", "rejected"], "pairs"),
        (["prompt", "chosen", "rejected"], "pairs"),
        (["instruction", "input", "output"], "instruction"),
        (["question", "answer"], "question"),
    ],
)
def test_detect_form(columns: list[str], form: str) -> None:
    assert detect_form(dict.fromkeys(columns, "x")) == form


def test_unknown_columns_are_named(tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "a.jsonl", {"text": "x", "label": 1})
    error = message(path, "prompts")
    assert "a.jsonl, row 1: needs the columns 'prompt'," in error and "has the keys 'text', 'label'" in error


def test_unknown_form_names_the_nearest() -> None:
    error = message(FIXTURES / "prompts.jsonl", "prompts", form="pair")
    assert "data.form=pair is not one of auto, prompt, messages," in error and "did you mean 'pairs'?" in error


def test_prompt_form_is_taken_as_it_is() -> None:
    text = text_of({"prompt": " a\n", "response": "b "}, "prompt")
    assert (text.prompt, text.responses) == (" a\n", ("b ",))
    assert text_of({"prompt": "a"}, "prompt").responses == ()


def test_instruction_form_uses_the_public_template() -> None:
    text = text_of({"instruction": "Add {x}.", "input": "1, 2", "output": "3"}, "instruction")
    assert text.prompt.endswith("### Instruction:\nAdd {x}.\n\n### Input:\n1, 2\n\n### Response:")
    assert text.responses == ("3",)
    for empty in ({}, {"input": ""}, {"input": None}):
        row = {"instruction": "Sing."} | empty
        assert text_of(row, "instruction").prompt == ALPACA_TEMPLATES["without_input"].format(instruction="Sing.")


def test_question_form() -> None:
    text = text_of({"question": "1+1?", "answer": "#### 2"}, "question")
    assert (text.prompt, text.responses) == ("1+1?\n", ("#### 2",))


def test_pairs_with_a_prompt_column_have_bare_responses() -> None:
    text = text_of({"prompt": "Hi", "chosen": "Hello", "rejected": "Hell"}, "pairs")
    assert (text.prompt, text.responses) == ("Hi", ("Hello", "Hell"))


START = "\n\nHuman: hi\n\nAssistant:"


@pytest.mark.parametrize(
    ("chosen", "rejected", "prompt"),
    [
        (f"{START} yes", f"{START} no", START),
        (f"{START} yes, sure", f"{START} yes, never", START),
        (f"{START} a\n\nHuman: b\n\nAssistant: c", f"{START} a\n\nHuman: b\n\nAssistant: d", None),
        (f"{START} a\n\nHuman: b\n\nAssistant: c", f"{START} a", START),
        (f"{START} a\n\nHuman: b\n\nAssistant: c", f"{START} a\n\nHuman: e\n\nAssistant: c", START),
        (f"{START} a", f"{START} a", START),
        (f"{START}", f"{START} a", START),
        ("good", "bad", ""),
    ],
)
def test_dialogues_are_split_after_their_last_common_turn(chosen: str, rejected: str, prompt: str | None) -> None:
    text = split_dialogues(chosen, rejected)
    assert text.prompt == (f"{START} a\n\nHuman: b\n\nAssistant:" if prompt is None else prompt)
    assert tuple(text.prompt + response for response in text.responses) == (chosen, rejected)


# --- examples


@pytest.mark.parametrize(
    ("name", "needs", "num_responses"),
    [
        ("prompts.jsonl", "prompts", 0),
        ("prompts.jsonl", "responses", 1),
        ("hh_pairs.jsonl.gz", "prompts", 0),
        ("hh_pairs.jsonl.gz", "responses", 1),
        ("hh_pairs.jsonl.gz", "pairs", 2),
        ("alpaca.json", "prompts", 0),
        ("alpaca.json", "responses", 1),
        ("question_answer.jsonl", "prompts", 0),
        ("question_answer.jsonl", "responses", 1),
    ],
)
def test_every_fixture_loads_for_what_it_can_serve(name: str, needs: Needs, num_responses: int) -> None:
    examples = load(FIXTURES / name, needs)
    assert len(examples) == 10
    for example in examples:
        assert example.prompt[0] == BOS and len(example.prompt) > 1
        assert len(example.responses) == len(example.finished) == num_responses
        assert all(response[-1] == EOS for response in example.responses) and all(example.finished)


def test_token_ids_spell_the_row() -> None:
    tokenizer = WordTokenizer()
    example = load(FIXTURES / "hh_pairs.jsonl.gz", "pairs", tokenizer)[1]
    spelled = "<bos> Human: Can you suggest a soup? Assistant: Sure, do you like carrots? Human: Yes, a lot. Assistant:"
    assert tokenizer.decode(example.prompt) == spelled
    assert tokenizer.decode(example.responses[0]) == "Then try carrot soup with ginger. <eos>"
    assert tokenizer.decode(example.responses[1]) == "I do not like soup. <eos>"


def test_responses_are_truncated_at_the_limit_that_counts_eos(tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "a.jsonl", *({"prompt": "p", "response": text} for text in ("a b", "a b c", "")))
    fits, cut, empty = load(path, "responses", max_response_tokens=3)
    assert len(fits.responses[0]) == 3 and fits.responses[0][-1] == EOS and fits.finished == (True,)
    assert len(cut.responses[0]) == 3 and EOS not in cut.responses[0] and cut.finished == (False,)
    assert empty.responses == ((EOS,),) and empty.finished == (True,)


def test_identical_responses_are_a_pair(tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "a.jsonl", {"prompt": "p", "chosen": "same", "rejected": "same"})
    assert load(path, "pairs")[0].responses == ((4, EOS), (4, EOS))


def test_responses_that_are_not_used_may_be_of_any_type(tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "a.jsonl", {"question": "1+1?", "answer": 2})
    assert len(load(path, "prompts")) == 1
    assert "row 1: 'answer' must be a string, found a number" in message(path, "responses")


def test_without_bos_the_prompt_starts_with_its_text(tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "a.jsonl", {"prompt": "one two"})
    assert load(path, "prompts", WordTokenizer(bos_token_id=None))[0].prompt == (3, 4)


def test_an_empty_prompt_before_an_episode_needs_bos(tmp_path: Path) -> None:
    """An environment adds the first message; nowhere else may a prompt be empty."""
    path, episode = write_jsonl(tmp_path / "a.jsonl", {"prompt": "p"}, {"prompt": ""}), RowLayout(is_episode=True)
    assert load(path, "prompts", layout=episode)[1].prompt == (BOS,)
    error = message(path, "prompts", layout=episode, tokenizer=WordTokenizer(bos_token_id=None))
    assert "row 2: the prompt is empty, and the tokenizer has no bos token" in error
    assert "row 2: the prompt is empty; the row has the keys 'prompt': name the" in message(path, "prompts")


def test_responses_need_eos() -> None:
    error = message(FIXTURES / "alpaca.json", "responses", tokenizer=WordTokenizer(eos_token_id=None))
    assert "the tokenizer has no eos token" in error


@pytest.mark.parametrize(
    ("rows", "needs", "expected"),
    [
        ([{"prompt": "p", "response": "r"}, {"prompt": "p", "id": 7}], "responses", ("'response'", "'prompt', 'id'")),
        ([{"instruction": "i"}], "responses", ("'output'", "'instruction'")),
        ([{"question": "q"}], "responses", ("'answer'", "'question'")),
        ([{"prompt": "p"}, {"text": "p"}], "prompts", ("'prompt'", "'text'")),
        ([{"prompt": "p"} | RESPONSES, {"chosen": "c"}], "pairs", ("'rejected'", "'chosen'")),
        ([{"prompt": "p", "response": "r"}], "pairs", ("'chosen' and 'rejected'", "'prompt', 'response'")),
        ([{"prompt": "p"}, {}], "prompts", ("'prompt'", "(none)")),
    ],
)
def test_missing_column_names_row_need_and_keys(
    tmp_path: Path, rows: list[dict[str, object]], needs: Needs, expected: tuple[str, str]
) -> None:
    error = message(write_jsonl(tmp_path / "a.jsonl", *rows), needs)
    needed, found = expected
    assert f"a.jsonl, row {len(rows)}: " in error
    assert needed in error and error.endswith(f"has the keys {found}")


@pytest.mark.parametrize(
    ("value", "found"),
    [(3, "a number"), (["a"], "a list"), ({"a": 1}, "an object"), (None, "null"), (True, "a boolean")],
)
def test_wrong_types_are_named(tmp_path: Path, value: object, found: str) -> None:
    path = write_jsonl(tmp_path / "a.jsonl", {"question": value})
    assert message(path, "prompts").endswith(f"row 1: 'question' must be a string, found {found}")


def test_long_prompts_are_an_error_with_suggestions_or_dropped(tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "a.jsonl", *({"prompt": " ".join("a" * n)} for n in (2, 4, 3, 9)))
    error = message(path, "prompts", max_prompt_tokens=4)
    assert "row 2: the prompt has 5 tokens, more than data.max_prompt_tokens=4" in error
    assert "2 of 4 rows are too long, the longest has 10 tokens" in error
    assert "set data.long_prompts=drop or a larger data.max_prompt_tokens" in error
    kept = load(path, "prompts", max_prompt_tokens=4, long_prompts="drop")
    assert [len(example.prompt) for example in kept] == [3, 4]


@pytest.mark.parametrize(
    ("long_prompts", "bos", "limit", "prompt"),
    [
        ("truncate-left", BOS, 4, "<bos> c d e"),
        ("truncate-right", BOS, 4, "<bos> a b c"),
        ("truncate-left", None, 4, "b c d e"),
        ("truncate-right", None, 4, "a b c d"),
        ("truncate-left", BOS, 1, "<bos>"),
        ("truncate-left", BOS, 6, "<bos> a b c d e"),
    ],
)
def test_long_prompts_are_truncated_on_either_side(
    tmp_path: Path, long_prompts: str, bos: int | None, limit: int, prompt: str
) -> None:
    tokenizer = WordTokenizer(bos_token_id=bos)
    path = write_jsonl(tmp_path / "a.jsonl", {"prompt": "a b c d e"}, {"prompt": "a"})
    first, second = load(path, "prompts", tokenizer, max_prompt_tokens=limit, long_prompts=long_prompts)
    assert tokenizer.decode(first.prompt) == prompt
    assert len(second.prompt) == (1 if bos is None else min(limit, 2))


def test_nothing_left_after_dropping() -> None:
    error = message(FIXTURES / "alpaca.json", "prompts", max_prompt_tokens=8, long_prompts="drop")
    assert "no prompt is left, as the shortest has" in error and "larger than 8" in error


# --- order


@pytest.mark.parametrize(("num_prompts", "num_examples"), [(4, 12), (5, 12), (12, 12), (7, 3), (1, 1), (9, 1)])
def test_every_example_comes_once_an_epoch(num_prompts: int, num_examples: int) -> None:
    stream = [i for step in range(num_examples * 3) for i in step_indices(7, step, num_prompts, num_examples)]
    assert len(stream) == num_examples * 3 * num_prompts
    for start in range(0, len(stream), num_examples):
        assert sorted(stream[start : start + num_examples]) == list(range(num_examples))


def test_the_order_does_not_depend_on_the_size_of_a_step() -> None:
    by_four = [i for step in range(15) for i in step_indices(0, step, 4, 10)]
    by_six = [i for step in range(10) for i in step_indices(0, step, 6, 10)]
    assert by_four == by_six
    assert step_indices(0, 9, 4, 10) == by_four[36:40]


def test_seeds_and_epochs_differ_and_the_order_is_fixed() -> None:
    first, second = step_indices(0, 0, 20, 20), step_indices(0, 1, 20, 20)
    assert first != second and first != step_indices(1, 0, 20, 20)
    assert step_indices(0, 0, 8, 8) == [0, 2, 1, 4, 6, 7, 3, 5]


# --- real data, where present


def test_a_text_of_pretraining_needs_no_bos(tmp_path: Path) -> None:
    """ModelLink texts stands the end token where the tokenizer has nothing for their start."""
    path = write_jsonl(tmp_path / "a.jsonl", {"text": "one two"})
    (example,) = load(path, "responses", tokenizer=WordTokenizer(bos_token_id=None), max_response_tokens=8)
    assert example.prompt == (EOS,) and len(example.responses[0]) == 3
