"""``flexrlhf data`` and the lines of ``plan``: rows of a file, how many the limits drop or cut, and which are
trained on."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml
from click.testing import Result
from small_runs import TINY
from test_data import FIXTURES, WordTokenizer, write_jsonl
from typer.testing import CliRunner

from flexrlhf.cli import app
from flexrlhf.data.chat import DEFAULT_CHAT, ChatFormat
from flexrlhf.data.examples import DataCounts, LoadedExamples, TokenLimits
from flexrlhf.data.files import read_rows
from flexrlhf.data.forms import ALPACA_TEMPLATES
from flexrlhf.data.inspection import Inspection
from flexrlhf.data.quickstart.corpus import build_tokenizer
from flexrlhf.data.row_layout import RowLayout
from flexrlhf.errors import UserError
from flexrlhf.operators.graph import Needs
from flexrlhf.plan.data_report import DataReport, quantile
from flexrlhf.plan.run_data import DataSource

REAL_DATA = Path(__file__).parents[3] / "shared" / "data"
ROWS = [{"prompt": "a b", "response": "c d e"}, {"prompt": "a b c d", "response": "e"}, {"prompt": "a", "response": ""}]
LIMITS = TokenLimits(max_prompt=3, max_response=3, long_prompts="drop")


def inspect(path: Path, needs: Needs = "responses", limits: TokenLimits = LIMITS, **further: Any) -> Inspection:
    settings = {"form": "auto", "layout": RowLayout(), "tokenizer": WordTokenizer(), "chat": DEFAULT_CHAT, **further}
    return Inspection.of(str(path), needs=needs, limits=limits, **settings)


def source(path: Path, needs: Needs = "responses", key: str = "data") -> DataSource:
    return DataSource(key, str(path), "auto", needs)


def report_text(source: DataSource, found: Inspection, decode: Any) -> str:
    return DataReport(source, found.counts).whole(found, decode)


# --- counts


def test_counts_are_of_all_rows_before_any_is_cut(tmp_path: Path) -> None:
    """bos counts with the prompt, the end token with the response; a row that is dropped has no response to cut."""
    counts = inspect(write_jsonl(tmp_path / "a.jsonl", *ROWS)).counts
    assert (counts.form, counts.num_rows, counts.prompts) == ("prompt", 3, (3, 5, 2))
    assert counts.responses == ((4,), (2,), (1,))
    assert (counts.num_long, counts.kept_responses, counts.num_cut) == (1, (4, 1), 1)


@pytest.mark.parametrize("long_prompts", ["drop", "truncate-left", "truncate-right"])
def test_a_run_counts_dropped_and_cut_rows(tmp_path: Path, long_prompts: Any) -> None:
    path = write_jsonl(tmp_path / "a.jsonl", *ROWS)
    loaded = LoadedExamples.load(
        path,
        needs="responses",
        tokenizer=WordTokenizer(),
        max_prompt_tokens=3,
        max_response_tokens=3,
        long_prompts=long_prompts,
    )
    assert loaded.counts == inspect(path, limits=TokenLimits(3, 3, long_prompts)).counts
    assert loaded.counts.num_rows - len(loaded.examples) == (loaded.counts.num_long if long_prompts == "drop" else 0)
    assert sum(not all(example.finished) for example in loaded.examples) == loaded.counts.num_cut


@pytest.mark.parametrize("share", [0.5, 0.95])
def test_quantiles_bound_their_share(share: float) -> None:
    for lengths in ([3], [1, 2], [5, 1, 4, 4, 2], list(range(100))):
        bound = quantile(lengths, share)
        assert bound in lengths and sum(each <= bound for each in lengths) >= share * len(lengths)
    assert quantile([], share) == 0


def test_some_rows_stand_for_a_large_file(tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "a.jsonl", *({"prompt": "a " * number} for number in range(1, 11)))
    found = inspect(path, needs="prompts", max_rows=5)
    assert found.counts.prompts == (2, 4, 6, 8, 10) and found.counts.num_rows == 10
    assert "10 rows (5 of them counted), 4 of 5 (80.0%) prompts left out" in DataReport(source(path), found.counts).line


# --- rows that cannot be used, and those that repeat others


def test_every_bad_row_is_counted_and_the_first_is_named(tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "a.jsonl", ROWS[0], {"prompt": 3}, {"prompt": "a"}, ROWS[0])
    found = inspect(path)
    assert list(found.counts.bad.items()) == [
        (2, "'prompt' must be a string, found a number"),
        (3, "needs the column 'response', but has the keys 'prompt'"),
    ]
    assert len(found.counts.prompts) == 2


def test_duplicates_are_counted(tmp_path: Path) -> None:
    other = {**ROWS[0], "response": "another"}
    path = write_jsonl(tmp_path / "a.jsonl", ROWS[0], other, ROWS[0], ROWS[1], ROWS[0])
    same = inspect(path)
    assert (same.repeated_prompts, same.repeated_rows, same.equal_pairs) == (3, 2, 0)
    pairs = [{"prompt": "a", "chosen": "b", "rejected": "b"}, {"prompt": "b", "chosen": "b", "rejected": "c"}]
    assert inspect(write_jsonl(tmp_path / "b.jsonl", *pairs), "pairs").equal_pairs == 1
    texts = inspect(write_jsonl(tmp_path / "c.jsonl", {"text": "a"}, {"text": "b"}, {"text": "b"}))
    assert (texts.repeated_prompts, texts.repeated_rows) == (0, 1), "texts have no prompt that could repeat"


def test_prompts_of_one_token_are_counted_as_repeated(tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "a.jsonl", *({"question": "q", "chosen": text, "rejected": "c"} for text in "ab"))
    found = inspect(path, "pairs", tokenizer=WordTokenizer(bos_token_id=None))
    assert (found.counts.prompts, found.repeated_prompts) == ((1, 1), 1)


def test_unread_names_and_unknown_tokens_are_counted(tmp_path: Path) -> None:
    @dataclass
    class Knowing(WordTokenizer):
        """Knows the words of one letter."""

        unk_token_id: int = 99

        def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
            ids = super().encode(text, add_special_tokens=add_special_tokens)
            words = {index: word for word, index in self.ids.items()}
            return [99 if len(words.get(token, "")) > 1 or words.get(token) == "\U0010fffd" else token for token in ids]

    further = [{"source": "web"}, {"source": "book", "level": 1}, {}]
    texts = [
        {"prompt": "a b", "response": "c xyz"},
        {"prompt": "uvw", "response": "xyz"},
        {"prompt": "a", "response": "b"},
    ]
    path = write_jsonl(tmp_path / "a.jsonl", *(text | more for text, more in zip(texts, further, strict=True)))
    counts = inspect(path, tokenizer=Knowing()).counts
    assert counts.unread == {"column 'source'": 2, "column 'level'": 1} and counts.unknown == (1, 2)
    assert DataReport(source(path), counts).line.endswith("0 of 3 responses cut, 3 of 14 (21.4%) tokens unknown")
    assert not list(DataReport(source(path), counts).warnings())
    line = "data: these are not read: column 'source' (2 rows), column 'level' (1 row)"
    assert DataReport(source(path), counts).unread_line == line
    tokenizer = Knowing(ids={"<unk>": 99})
    report = report_text(source(path), inspect(path, tokenizer=tokenizer), tokenizer.decode)
    assert "  3 of 14 (21.4%) tokens, in 2 of 3 (66.7%) rows, are the tokenizer's unknown token" in report
    assert f"  {line}\n" in report
    same = LoadedExamples.load(path, needs="responses", tokenizer=Knowing(), max_prompt_tokens=3, max_response_tokens=1)
    assert (same.counts.unread, same.counts.unknown) == (counts.unread, counts.unknown), "before any is cut"
    assert not inspect(path).counts.unknown, "of a tokenizer that knows all"


BAD = [
    '{"prompt": 3, "response": "a"}',
    '{"prompt": "a", "response": "b"}',
    "no JSON",
    '["a"]',
    '{"prompt": "a b c d e f", "response": "b"}',
    '{"prompt": "c"}',
    '{"prompt": 4, "response": "a"}',
    '{"prompt": "b", "response": "b"}',
]


def test_rows_that_cannot_be_read_are_left_out_by_reason(tmp_path: Path) -> None:
    """The first of them, too, and lines that are no JSON; the examples are those of a file without them."""
    path, clean = tmp_path / "a.jsonl", tmp_path / "b.jsonl"
    path.write_text("\n".join(BAD))
    clean.write_text("\n".join(BAD[place] for place in (1, 4, 7)))
    limits = TokenLimits(4, 9, "drop", "drop")
    settings = {"max_prompt_tokens": 4, "max_response_tokens": 9, "long_prompts": "drop", "needs": "responses"}
    loaded, expected = (
        LoadedExamples.load(each, tokenizer=WordTokenizer(), bad_rows=bad_rows, **settings)  # type: ignore[arg-type]
        for each, bad_rows in ((path, "drop"), (clean, "error"))
    )
    assert loaded.examples == expected.examples and len(loaded.examples) == 2
    counts = inspect(path, limits=limits).counts
    assert loaded.counts == counts and (counts.num_rows, sorted(counts.bad)) == (8, [1, 3, 4, 6, 7])
    assert DataReport(source(path), counts).line == (
        f"data: {path}: form prompt, 8 rows, 5 of 8 (62.5%) cannot be read, 1 of 3 (33.3%) prompts left out, "
        "0 of 2 responses cut"
    )
    _, warning = DataReport(source(path), counts).warnings()
    assert warning == (
        "data: 5 of 8 (62.5%) rows cannot be read and are left out: 2 rows, such as row 1: 'prompt' must be a string, "
        "found a number; row 3: not JSON (Expecting value at column 1); row 4: a row must be a JSON object, found a "
        "list; row 6: needs the column 'response', but has the keys 'prompt'"
    )
    tokenizer = WordTokenizer()
    text = report_text(source(path), inspect(path, limits=limits, tokenizer=tokenizer), tokenizer.decode)
    assert "rows that cannot be read: 5, left out\n    2 rows, such as row 1: 'prompt' must" in text
    some = inspect(path, limits=limits, max_rows=4).counts
    assert (len(some.bad), len(some.prompts)) == (3, 1) and "(4 of them counted)" in DataReport(source(path), some).line
    for command_limits in (limits, TokenLimits(4, 9)):
        (tmp_path / "c.jsonl").write_text(BAD[0])
        with pytest.raises(UserError, match="row 1: .prompt. must be a string"):
            LoadedExamples.load(
                tmp_path / "c.jsonl", tokenizer=WordTokenizer(), bad_rows=command_limits.bad_rows, **settings
            )  # type: ignore[arg-type]


# --- lines and warnings


def counted(num_long: int, num_cut: int, long_prompts: Any = "drop", number: int = 100) -> DataCounts:
    """Rows of which so many prompts, and so many responses of the others, are over a limit of 8."""
    prompts = [9] * num_long + [5] * (number - num_long)
    responses = [(5,)] * (number - num_cut) + [(20,)] * num_cut
    return DataCounts("prompt", number, tuple(prompts), tuple(responses), TokenLimits(8, 8, long_prompts))


@pytest.mark.parametrize(
    ("counts", "line"),
    [
        (counted(0, 0), "100 rows, 0 of 100 prompts left out, 0 of 100 responses cut"),
        (counted(26, 50), "100 rows, 26 of 100 (26.0%) prompts left out, 50 of 74 (67.6%) responses cut"),
        (
            counted(3, 6, "truncate-left"),
            "100 rows, 3 of 100 (3.0%) prompts truncated, 6 of 100 (6.0%) responses cut",
        ),
    ],
)
def test_a_line_has_the_counts(counts: DataCounts, line: str) -> None:
    assert DataReport(source(Path("a.jsonl")), counts).line == f"data: a.jsonl: form prompt, {line}"


def test_more_than_one_in_twenty_is_warned_of() -> None:
    assert list(DataReport(source(Path("a")), counted(5, 4)).warnings()) == []
    prompts, responses = DataReport(source(Path("a"), key="eval"), counted(6, 6)).warnings()
    assert prompts == (
        "eval: 6 of 100 (6.0%) prompts have more than data.max_prompt_tokens 8 and are left out; 95% have at most 9"
    )
    assert responses == (
        "eval: 6 of 94 (6.4%) responses have more than data.max_response_tokens 8 and are cut, without an end token; "
        "95% have at most 20"
    )


# --- the report


def decode_with(tokenizer: WordTokenizer) -> Any:
    return lambda ids: tokenizer.decode(ids)


def test_the_report_shows_rows_as_a_run_has_them(tmp_path: Path) -> None:
    path, tokenizer = write_jsonl(tmp_path / "a.jsonl", *ROWS), WordTokenizer()
    text = report_text(source(path), inspect(path, tokenizer=tokenizer), tokenizer.decode)
    assert text.splitlines()[1:] == [
        "  rows that cannot be read: 0",
        "  rows with the prompt of an earlier one: 0, its responses, too: 0",
        "",
        "tokens of prompts: median 3, 95% at most 5, longest 5, limit 3",
        "  0-3  ########################################  2",
        "  4-5  ####################                      1  over the limit",
        "",
        "tokens of responses: median 2, 95% at most 4, longest 4, limit 3",
        "  0-3  ########################################  2",
        "  4-4  ####################                      1  over the limit",
        "",
        "row 1: 3 tokens of prompt, 3 of response",
        "  prompt   | <bos> a b",
        "  response #  c d e",
        "  response is cut after 3 of 4 tokens: no end token",
        "",
        "row 3: 2 tokens of prompt, 1 of response",
        "  prompt   | <bos> a",
        "  response #  <eos>",
        "",
        "  # trained on, | not",
    ]


def test_the_mask_of_a_chat_is_seen_without_colours(tmp_path: Path, tokenizers: dict[str, Any]) -> None:
    """Every character of both turns of the assistant stands behind #, and no other one does."""
    turns = [("user", "Hi"), ("assistant", "Hello\nyou"), ("user", "2+2?"), ("assistant", "4")]
    path = write_jsonl(
        tmp_path / "a.jsonl", {"messages": [{"role": role, "content": content} for role, content in turns]}
    )
    tokenizer, roomy = tokenizers["smollm2"], TokenLimits(500, 500)
    found = inspect(path, tokenizer=tokenizer, limits=roomy)
    lines = report_text(source(path), found, tokenizer.decode).splitlines()
    marked = "".join(line[13:] for line in lines if re.match(r"  response # ", line))
    others = "".join(line[13:] for line in lines if re.match(r"  \w+ +\| ", line))
    assert marked.replace("\\n", "\n") == "Hello\nyou<|im_end|>\n4<|im_end|>\n"
    assert "2+2?<|im_end|>" in others and "Hello" not in others
    ((_, row),) = found.samples
    whole = tokenizer.decode([*row.prompt, *row.responses[0].ids])
    assert sorted((marked + others).replace("\\n", "\n")) == sorted(whole)


def test_rows_that_train_on_no_end_are_said(tmp_path: Path, tokenizers: dict[str, Any]) -> None:
    messages = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}]
    path = write_jsonl(tmp_path / "a.jsonl", {"messages": messages}, {"messages": messages})
    plain = ChatFormat(template="{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}")
    for chat, number in ((plain, 1), (DEFAULT_CHAT, 0)):
        settings = {"tokenizer": tokenizers["smollm2"], "chat": chat, "form": "auto", "layout": RowLayout()}
        found = Inspection.of(str(path), needs="responses", limits=TokenLimits(500, 500), **settings)
        said = "data: 2 of 2 (100.0%) rows train on no token that ends a response (<|im_end|>), so a policy"
        assert sum(each.startswith(said) for each in DataReport(source(path), found.counts).warnings()) == number
        report = report_text(source(path), found, tokenizers["smollm2"].decode)
        assert (said.removeprefix("data: ") in report) == bool(number)


def test_texts_that_a_terminal_would_obey_are_escaped(tmp_path: Path) -> None:
    class Characters(WordTokenizer):
        def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
            return [ord(character) for character in text]

    path = write_jsonl(tmp_path / "a.jsonl", {"prompt": "a\x1b[31m\rb" + "c" * 2000 + "d\n"})
    found = inspect(path, needs="prompts", tokenizer=Characters(), limits=TokenLimits(5000, 5))
    text = report_text(source(path, "prompts"), found, lambda ids: "".join(map(chr, ids)))
    assert r"| a\x1b[31m\rbccc" in text and text.endswith("ccd\\n") and "more characters) ... ccc" in text
    assert "; the response is sampled" in text and "\x1b" not in text


# --- commands


def write_config(directory: Path, **data: Any) -> str:
    """A small SFT on a data file, with a tokenizer of the words of the fixtures."""
    if not (directory / "tokenizer").is_dir():
        texts = [str(value) for row in read_rows(FIXTURES / "alpaca.json") for value in row.values()]
        build_tokenizer([*texts, *ALPACA_TEMPLATES.values()], directory / "tokenizer")
    config = {
        "name": "small",
        "algorithm": {"name": "sft", "prompts_per_step": 2},
        "models": {"actor": {"init": TINY}},
        "data": {"tokenizer": str(directory / "tokenizer"), **data},
        "cluster": {"devices": 1},
    }
    (directory / "small.yaml").write_text(yaml.safe_dump(config))
    return str(directory / "small.yaml")


def call(*arguments: str) -> Result:
    return CliRunner().invoke(app, [*arguments])


def counted_directly(path: Path, directory: Path, longest: int, cut_at: int) -> tuple[int, int, int, int, str]:
    """Rows, prompts over the limit, responses of the others, and those over the limit: by the template itself; and the
    share of unknown tokens."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(directory / "tokenizer")
    rows = json.loads(path.read_text())
    prompts = [
        ALPACA_TEMPLATES["with_input" if row["input"] else "without_input"].format(
            instruction=row["instruction"], input=row["input"]
        )
        for row in rows
    ]
    kept = [len(tokenizer(prompt).input_ids) <= longest for prompt in prompts]
    ends = [len(tokenizer(row["output"], add_special_tokens=False).input_ids) + 1 for row in rows]
    cut = sum(end > cut_at for end, is_kept in zip(ends, kept, strict=True) if is_kept)
    ids = [token for text in (*prompts, *(row["output"] for row in rows)) for token in tokenizer(text).input_ids]
    # the tokenizer writes bos before each text, and a response has an end token instead
    unknown = ids.count(tokenizer.unk_token_id)
    share = f", {unknown} of {len(ids)} ({unknown / len(ids):.1%}) tokens unknown" if unknown else ""
    return len(rows), kept.count(False), kept.count(True), cut, share


@pytest.mark.parametrize(
    ("folder", "longest", "cut_at"), [(FIXTURES, 50, 4), (REAL_DATA, 64, 64)], ids=["fixtures", "real"]
)
def test_alpaca_is_dropped_and_cut_with_counts(folder: Path, longest: int, cut_at: int, tmp_path: Path) -> None:
    """Both by ``data`` and by ``plan``, which warns of rows that are dropped or cut."""
    path = folder / "alpaca.json"
    if not path.is_file():
        pytest.skip("the data folder is not next to the repository")
    limits = {"max_prompt_tokens": longest, "max_response_tokens": cut_at, "long_prompts": "drop"}
    config = write_config(tmp_path, path=str(path), **limits)
    rows, long, kept, cut, unknown = counted_directly(path, tmp_path, longest, cut_at)
    expected = (
        f"small: data: {path}: form instruction, {rows} rows, {long} of {rows} ({long / rows:.1%}) prompts left out, "
        f"{cut} of {kept} ({cut / kept:.1%}) responses cut{unknown}"
    )
    assert long and cut
    inspected, planned = call("data", config), call("plan", config)
    assert (inspected.exit_code, planned.exit_code) == (0, 0), inspected.output + planned.output
    assert inspected.stdout.startswith(f"{expected}\n") and inspected.stdout.count("\nrow ") == 3
    assert planned.stdout.endswith(f"\n\n{expected}\n")
    warnings = [line for line in planned.stderr.splitlines() if "have more than data.max_" in line]
    assert len(warnings) == (long > 0.05 * rows) + (cut > 0.05 * kept) and warnings


def test_bad_rows_end_the_command_with_a_sentence(tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "a.jsonl", {"prompt": "a", "response": "b"}, {"prompt": 3}, {"prompt": "c"})
    config = write_config(tmp_path, path=str(path))
    result = call("data", config)
    assert (
        result.exit_code == 2
        and (
            "  rows that cannot be read: 2\n"
            "    row 2: 'prompt' must be a string, found a number\n"
            "    row 3: needs the column 'response', but has the keys 'prompt'\n"
        )
        in result.stdout
    )
    (line,) = result.stderr.splitlines()
    assert line == (
        f"flexrlhf: small: data: {path}, row 2: 'prompt' must be a string, found a number; 2 of 3 rows cannot be read"
    )
    missing = call("data", config, "--set", f"data.path={path}.l")
    assert missing.exit_code == 2 and "there is no data file" in missing.stderr


def test_prompts_that_stop_a_run_stop_data_and_plan(tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "a.jsonl", {"prompt": "the " * 9, "response": "b"}, {"prompt": "a", "response": "b"})
    config = write_config(tmp_path, path=str(path), max_prompt_tokens=8)
    for command in ("data", "plan"):
        result = call(command, config)
        assert result.exit_code == 2 and result.stderr.count("\n") == 1, command
        assert "1 of 2 prompts have more than data.max_prompt_tokens=8 tokens, the longest 11" in result.stderr
    dropped = call("plan", config, "--set", "data.long_prompts=drop")
    assert dropped.exit_code == 0 and "1 of 2 (50.0%) prompts left out" in dropped.stdout


def test_a_run_that_takes_its_tokenizer_from_an_earlier_one_is_counted_with_that_ones(tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "a.jsonl", {"prompt": "the a", "response": "a"})
    first = write_config(tmp_path, path=str(path))
    raw = yaml.safe_load(Path(first).read_text())
    later = tmp_path / "later.yaml"
    models = {"actor": {"path": f"{tmp_path}/runs/small/actor"}}
    later.write_text(yaml.safe_dump(raw | {"name": "later", "models": models, "data": {"path": str(path)}}))
    runs = ("--set", f"runs={tmp_path}/runs")
    for command in ("data", "plan"):
        result = call(command, first, str(later), *runs)
        lines = [line for line in result.stdout.splitlines() if f": data: {path}: form prompt, 1 rows" in line]
        assert [line.partition(":")[0] for line in lines] == ["small", "later"], result.output
    alone = call("data", first, "--set", f"data.tokenizer={tmp_path}/nowhere")
    assert alone.exit_code == 2 and "small: data.tokenizer" in alone.stderr and "no such directory" in alone.stderr
