"""Random damage to data files, to model directories and to checkpoints, in place."""

from __future__ import annotations

import gzip
import json
import os
import struct
from pathlib import Path
from random import Random
from typing import Any

from odd_values import damaged, mutated

from flexrlhf.data.files import read_rows


def damage_rows(rng: Random, path: Path) -> str:
    """Damage a data file: its bytes, its rows, or its kind. Returns a description."""
    kind = rng.choice((5, 9)) if path.suffix == ".parquet" else rng.randrange(10)
    if kind < 4:
        rows = read_rows(path)
        _write_rows(rng, path, _damaged_rows(rng, rows))
    elif kind < 6:
        path.write_bytes(damaged(rng, path.read_bytes()))
    elif kind < 8 and path.name.endswith(".gz"):
        path.write_bytes(gzip.compress(damaged(rng, gzip.decompress(path.read_bytes()))))
    elif kind < 8:
        path.write_text("\n".join(_lines_with_damage(rng, path.read_text().split("\n"))), errors="surrogatepass")
    else:
        return _replace(rng, path)
    return f"{path}: {path.read_bytes()[:300]!r}"


def _damaged_rows(rng: Random, rows: list[Any]) -> list[Any]:
    match rng.randrange(5):
        case 0:
            return [list(row.values()) for row in rows]
        case 1:
            at, key = rng.randrange(len(rows)), rng.choice(list(rows[0]))
            return [{**row, key: None} if number == at else row for number, row in enumerate(rows)]
        case 2:
            old, new = (
                rng.choice(list(rows[0])),
                rng.choice(("Prompt", "text", "chosen", "", "0", "\ud800", "num_tokens")),
            )
            return [{new if key == old else key: value for key, value in row.items()} for row in rows]
        case 3:
            return rows[:1] + [rng.choice((None, 1, "text", [], {}, float("nan")))] + rows[1:]
        case _:
            found = mutated(rng, rows)
            return found if isinstance(found, list) else []


def _write_rows(rng: Random, path: Path, rows: list[Any]) -> None:
    is_ascii = rng.random() < 0.5
    text = "".join(json.dumps(row, ensure_ascii=is_ascii) + "\n" for row in rows)
    if path.suffix == ".json":
        text = f"[{', '.join(text.rstrip().split(chr(10)))}]" if rng.random() < 0.8 else text
    content = text.encode(errors="surrogatepass")
    path.write_bytes(gzip.compress(content) if path.name.endswith(".gz") else content)


def _lines_with_damage(rng: Random, lines: list[str]) -> list[str]:
    at = rng.randrange(len(lines))
    match rng.randrange(6):
        case 0:
            return [*lines[:at], "", *lines[at:]]
        case 1:
            return [*lines[:at], lines[at][: len(lines[at]) // 2]]
        case 2:
            return [line.replace('"', "'") for line in lines]
        case 3:
            return [*lines[:at], lines[at] + ",", *lines[at + 1 :]]
        case 4:
            return [*lines[:at], lines[at] * 2, *lines[at + 1 :]]
        case _:
            return [*lines[:at], '{"prompt": ' + "9" * 5000 + "}", *lines[at:]]


def _replace(rng: Random, path: Path) -> str:
    """Replace a file by something else."""
    path.unlink()
    match rng.randrange(5):
        case 0:
            return f"{path}: removed"
        case 1:
            path.mkdir()
            return f"{path}: a directory"
        case 2:
            path.symlink_to(path.name)
            return f"{path}: a link to itself"
        case 3:
            path.symlink_to(rng.choice(("/dev/null", "/proc/self/mem", "nowhere")))
            return f"{path}: a link to {os.readlink(path)}"
        case _:
            os.mkfifo(path)
            return f"{path}: a pipe"


def damage_directory(rng: Random, directory: Path) -> str:
    """Damage one file of a model directory or a checkpoint. Returns a description."""
    path = rng.choice(sorted(each for each in directory.rglob("*") if each.is_file()))
    kind = rng.choice((5, 9)) if path.suffix == ".parquet" else rng.randrange(10)
    if kind < 6 and path.suffix == ".json":
        path.write_text(json.dumps(mutated(rng, json.loads(path.read_text()))))
    elif kind < 6 and path.suffix == ".safetensors":
        path.write_bytes(with_mutated_header(rng, path.read_bytes()))
    elif kind < 9:
        path.write_bytes(damaged(rng, path.read_bytes()))
    else:
        return _replace(rng, path)
    return f"{path}: {path.read_bytes()[:600]!r}"


def with_mutated_header(rng: Random, content: bytes) -> bytes:
    """A safetensors file that has another header."""
    (size,) = struct.unpack("<Q", content[:8])
    header = json.dumps(mutated(rng, json.loads(content[8 : 8 + size]))).encode()
    return struct.pack("<Q", len(header)) + header + content[8 + size :]


def damage_run(rng: Random, directory: Path) -> str:
    """Damage a row of a run's files, or a whole file. Returns a description."""
    path = rng.choice(sorted(directory.glob("*.jsonl")))
    if rng.random() < 0.4:
        return damage_directory(rng, directory)
    lines = path.read_text().splitlines()
    at = rng.randrange(len(lines))
    lines[at] = json.dumps(mutated(rng, json.loads(lines[at])))
    path.write_text("\n".join(lines) + "\n")
    return f"{path}: line {at} is {lines[at][:300]}"
