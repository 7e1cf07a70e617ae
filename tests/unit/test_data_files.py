"""Kinds of data files: the same rows from each, and one sentence for each that cannot be read."""

from __future__ import annotations

import gzip
import importlib
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import datasets
import pyarrow
import pyarrow.parquet
import pytest

from flexrlhf.data import files
from flexrlhf.data.files import is_present, read_rows
from flexrlhf.data.forms import needed_text
from flexrlhf.errors import UserError

FORMS = Path(__file__).parents[1] / "fixtures" / "forms"
COMMIT = "0123456789abcdef0123456789abcdef01234567"
ROWS = [{"question": "One?", "answer": "1"}, {"question": "Two, or\nthree?", "answer": "2"}]


def error_of(path: Path | str) -> str:
    with pytest.raises(UserError) as caught:
        read_rows(path)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def write_parquet(path: Path, rows: list[dict[str, Any]]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path)
    return path


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A Hub cache of the test's own, without a connection."""
    cache = tmp_path / "cache"
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(cache))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "prepared")
    return cache


def put_in_cache(cache: Path, name: str, kind: str = "datasets") -> Path:
    """Make the cache's directory of a repository as huggingface_hub does; return where its files go."""
    directory = cache / f"{kind}--{name.replace('/', '--')}"
    (directory / "refs").mkdir(parents=True)
    (directory / "refs" / "main").write_text(COMMIT)
    snapshot = directory / "snapshots" / COMMIT
    snapshot.mkdir(parents=True)
    return snapshot


def test_all_kinds_give_the_same_rows(tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text(json.dumps(ROWS))
    long = "x" * 200_000
    (tmp_path / "long.csv").write_text(f"question\n{long}\n")
    assert read_rows(tmp_path / "long.csv") == [{"question": long}]
    (tmp_path / "a.csv").write_text('\ufeffquestion,answer\r\nOne?,1\r\n\r\n"Two, or\nthree?",2\r\n', newline="")
    write_parquet(tmp_path / "a.parquet", ROWS)
    whole = datasets.Dataset.from_list(ROWS)
    whole.save_to_disk(tmp_path / "saved")
    datasets.DatasetDict({"train": whole, "test": whole.select([1])}).save_to_disk(tmp_path / "splits")
    for name in ("a.json", "a.csv", "a.parquet", "saved", "splits", "splits:train"):
        assert read_rows(tmp_path / name) == ROWS, name
        assert is_present(tmp_path / name)
    assert read_rows(f"{tmp_path}/splits:test") == ROWS[1:]
    assert not is_present(tmp_path / "b.json") and not is_present(f"{tmp_path}/saved.csv")


def test_rows_of_a_saved_selection_are_those_selected(tmp_path: Path) -> None:
    """A selection is saved as all rows with their indices, which plain arrow files would not have."""
    datasets.Dataset.from_list(ROWS).select([1]).save_to_disk(tmp_path / "one")
    assert read_rows(tmp_path / "one") == ROWS[1:]


def test_nested_columns_of_parquet_keep_their_form(tmp_path: Path) -> None:
    rows = [json.loads(line) for line in (FORMS / "verl.jsonl").read_text().splitlines()]
    path = write_parquet(tmp_path / "train.parquet", rows)
    assert read_rows(path) == rows
    assert needed_text(read_rows(path)[0], "prompt", "prompts").turns[0].content == "One and one?"


def test_a_data_set_of_the_hubs_cache(own_cache: Path) -> None:
    snapshot = put_in_cache(own_cache, "acme/sums")
    write_parquet(snapshot / "data" / "train-00000-of-00001.parquet", ROWS)
    write_parquet(snapshot / "data" / "test-00000-of-00001.parquet", ROWS[1:])
    assert read_rows("acme/sums") == read_rows("acme/sums:train") == read_rows("acme/sums:default:train") == ROWS
    assert read_rows("acme/sums:test") == ROWS[1:]
    assert read_rows(f"acme/sums@{COMMIT}:test") == ROWS[1:]
    assert is_present("acme/sums:test") and not is_present("acme/products")
    assert error_of("acme/sums:tset") == (
        "acme/sums: it has no split 'tset' (did you mean 'test'?); it has train, test"
    )
    assert "acme/sums: BuilderConfig 'main' not found" in error_of("acme/sums:main:train")
    assert "a data set's name is org/name:config:split at most" in error_of("acme/sums:a:b:c")


def test_configs_of_a_data_set_are_those_of_its_card(own_cache: Path) -> None:
    snapshot = put_in_cache(own_cache, "acme/two")
    (snapshot / "README.md").write_text(
        "---\nconfigs:\n- config_name: a\n  data_files: a.jsonl\n- config_name: b\n  data_files: b.jsonl\n---\n"
    )
    for name, row in zip("ab", ROWS, strict=True):
        (snapshot / f"{name}.jsonl").write_text(json.dumps(row))
    assert read_rows("acme/two:a:train") == ROWS[:1]
    assert read_rows("acme/two:b:train") == ROWS[1:]
    assert "Config name is missing" in error_of("acme/two")


def test_a_name_that_is_not_in_the_cache() -> None:
    error = error_of("acme/nothing")
    assert error.startswith("data acme/nothing: neither a path here, nor in the Hub's cache, nor a dataset that can be")


def test_names_that_look_like_files_or_folders_are_paths(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "rows").mkdir()
    assert "there is no data file rows/train" in error_of("rows/train")
    assert "there is no data file other/train.jsonl" in error_of("other/train.jsonl")
    os.mkfifo("pipe.jsonl")
    assert error_of("pipe.jsonl") == "there is no data file pipe.jsonl: it is a pipe or a device"
    assert "rows is a directory, but none that save_to_disk of datasets has written" in error_of("rows")


@pytest.mark.parametrize(
    ("name", "content", "expected"),
    [
        ("a.csv", b"", "a.csv has no rows"),
        ("a.csv", b"question,answer\n", "a.csv has no rows"),
        ("a.csv", b"question,answer\nOne?\n", "line 2: the row ends here with 1 cells, the header has 2"),
        ("a.csv", b'question\n"One?\n', "line 2: not CSV (unexpected end of data)"),
        ("a.csv", b'question\n"One"?\n', "line 2: not CSV ('"),
        ("a.csv", b"question,question\n1,2\n", "a.csv: two columns have the name 'question'; rename one"),
        ("a.jsonl", b'{"a": {"b": 1}}\n{"a": {"b": 1, "b": 2}}', "line 2: cannot be read as JSON (two values of 'b')"),
        ("a.csv", b"a,b\n\xff", "byte 5 is no UTF-8; write the file in UTF-8"),
        ("a.parquet", b"PAR1", "cannot read"),
        ("a.parquet", b"", "cannot read"),
    ],
)
def test_unreadable_tables(tmp_path: Path, name: str, content: bytes, expected: str) -> None:
    (tmp_path / name).write_bytes(content)
    assert expected in error_of(tmp_path / name)


@pytest.mark.parametrize("name", ["a.jsonl", "a.jsonl.gz"])
def test_a_row_has_a_bound(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files, "ROW_BYTES", 100)
    rows = [{"prompt": "a" * 80}] * 3
    text = "".join(json.dumps(row) + "\n" for row in rows)
    path = tmp_path / name
    path.write_bytes(gzip.compress(text.encode()) if name.endswith("gz") else text.encode())
    assert read_rows(path) == rows
    text = json.dumps({"prompt": "a" * 300})
    path.write_bytes(gzip.compress(text.encode()) if name.endswith("gz") else text.encode())
    with pytest.raises(UserError, match=f"cannot read {path}: a row of it has more than 100 B"):
        read_rows(path)


def test_two_columns_of_parquet(tmp_path: Path) -> None:
    table = pyarrow.table([["a"], ["b"]], names=["prompt", "prompt"])
    pyarrow.parquet.write_table(table, tmp_path / "a.parquet")
    assert error_of(tmp_path / "a.parquet").endswith("a.parquet: two columns have the name 'prompt'; rename one")


def test_damaged_directories(tmp_path: Path) -> None:
    datasets.Dataset.from_list(ROWS).save_to_disk(tmp_path / "cut")
    next((tmp_path / "cut").glob("*.arrow")).write_bytes(b"ARROW1")
    assert error_of(tmp_path / "cut").startswith(f"cannot read {tmp_path / 'cut'}: ")
    datasets.Dataset.from_list(ROWS).save_to_disk(tmp_path / "state")
    (tmp_path / "state" / "state.json").write_text("{")
    assert error_of(tmp_path / "state").startswith(f"cannot read {tmp_path / 'state'}: ")
    datasets.Dataset.from_list(ROWS).save_to_disk(tmp_path / "whole")
    assert error_of(f"{tmp_path}/whole:test").endswith("whole:test: the directory has no splits; remove :test")


@pytest.mark.parametrize(("path", "package"), [("a.parquet", "pyarrow"), ("saved", "datasets")])
def test_an_absent_library_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, path: str, package: str) -> None:
    write_parquet(tmp_path / "a.parquet", ROWS)
    datasets.Dataset.from_list(ROWS).save_to_disk(tmp_path / "saved")
    found: Callable[..., Any] = importlib.import_module

    def without(name: str, *others: Any) -> Any:
        if name.partition(".")[0] == package:
            raise ModuleNotFoundError(f"No module named {package!r}")
        return found(name, *others)

    monkeypatch.setattr(importlib, "import_module", without)
    assert error_of(tmp_path / path) == (
        f"{tmp_path / path}: needs {package}, which is not installed: pip install 'flexrlhf[data]'"
    )


def test_keys_that_only_other_rows_of_a_table_have_are_absent(tmp_path: Path) -> None:
    """A table gives all its objects the same keys: a call would get the arguments of any other one, as null."""
    calls = [[{"arguments": {name: "x"}}] for name in ("town", "day")]
    rows = [{"messages": [{"role": "a", "calls": each}, {"role": "b"}], "truth": {"value": None}} for each in calls]
    assert read_rows(write_parquet(tmp_path / "a.parquet", rows)) == rows
