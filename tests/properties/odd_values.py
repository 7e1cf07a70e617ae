"""Values that no setting expects, and mutations of nested data with them."""

from __future__ import annotations

from collections.abc import Iterator
from copy import deepcopy
from random import Random
from typing import Any

Path = tuple[Any, ...]


def nested(depth: int) -> Any:
    """A list in a list in a list ..."""
    value: Any = []
    for _ in range(depth):
        value = [value]
    return value


NUMBERS = (
    0,
    -1,
    1,
    2,
    3,
    7,
    0.5,
    -0.5,
    1e-308,
    1e308,
    10**6,
    2**31,
    2**63 - 1,
    2**63,
    2**64,
    -(2**63),
    10**30,
    10**4000,
)
SPECIAL_NUMBERS = (float("inf"), float("-inf"), float("nan"))
TEXTS = (
    *(
        "",
        " ",
        "null",
        "true",
        "1/3",
        "1/0",
        "-1/3",
        "1e400",
        "nan",
        "[1",
        "{",
        "*",
        "%",
        "a b",
        "a\nb",
        "\t",
        "-",
        "--set",
    ),
    *("\ud800", "half \udfff", "\x00", "a\x00b", "\x1b[31mred", "\u202eleft", "数据", "é", "😀", "\u2028", "\ufeff"),
    *("x" * 300, "x" * 100_000, "9" * 5000, ".", "..", "/", "~", "../..", "/dev/null", "/dev/zero", "/proc/self/mem"),
    *("a.yaml", "runs", "http://", "file:///etc/passwd", "a:b:c", "a=b", "${HOME}", "%s %d {0}", "'", '"', "\\"),
)
CONTAINERS = ([], {}, [[]], [None], [{}], {"a": 1}, {1: 2}, {None: None}, {True: []}, {"": ""}, [1] * 2000)
DEPTHS = (5, 50, 150)
"""Depth of nested lists; writers of YAML or JSON accept no more."""


def odd_value(rng: Random) -> Any:
    """A value of any type."""
    kind = rng.randrange(10)
    if kind < 4:
        return rng.choice(NUMBERS)
    if kind == 4:
        return rng.choice(SPECIAL_NUMBERS)
    if kind < 8:
        return rng.choice(TEXTS)
    return rng.choice((None, True, False, deepcopy(rng.choice(CONTAINERS)), nested(rng.choice(DEPTHS))))


def mutated(rng: Random, tree: Any) -> Any:
    """``tree`` with one or two mutations: keys dropped, renamed and added, values replaced, moved and wrapped.

    Half of them change one number or text alone, which gets further than another type does.
    """
    tree = deepcopy(tree)
    if rng.random() < 0.5:
        return _with_other_value(rng, tree)
    for _ in range(rng.choice((1, 1, 1, 2))):
        tree = _mutated_once(rng, tree)
    return tree


def _mutated_once(rng: Random, tree: Any) -> Any:
    places = list(places_of(tree))
    if not places:
        return odd_value(rng)
    place = rng.choice(places)
    parent, key = value_at(tree, place[:-1]), place[-1]
    match rng.randrange(8):
        case 0:
            del parent[key]
        case 1 if isinstance(parent, dict):
            parent[misspelt(rng, str(key))] = parent.pop(key)
        case 2 if isinstance(parent, dict):
            parent[rng.choice((*TEXTS, 1, None, 0.5, True))] = odd_value(rng)
        case 3:
            parent[key] = deepcopy(value_at(tree, rng.choice(places)))
        case 4:
            parent[key] = rng.choice(([parent[key]], {"a": parent[key]}, str(parent[key]), {str(key): parent[key]}))
        case _:
            parent[key] = odd_value(rng)
    return tree


def _with_other_value(rng: Random, tree: Any) -> Any:
    """``tree`` with one number or string replaced."""
    places = [place for place in places_of(tree) if isinstance(value_at(tree, place), int | float | str)]
    if not places:
        return odd_value(rng)
    place = rng.choice(places)
    parent, value = value_at(tree, place[:-1]), value_at(tree, place)
    if isinstance(value, bool):
        parent[place[-1]] = not value
    elif isinstance(value, str):
        parent[place[-1]] = rng.choice((value_at(tree, rng.choice(places)), misspelt(rng, value), rng.choice(TEXTS)))
    else:
        parent[place[-1]] = rng.choice((value + 1, value - 1, 2 * value, 10 * value, -value, rng.choice(NUMBERS)))
    return tree


def places_of(tree: Any, before: Path = ()) -> Iterator[Path]:
    """Keys from the root to every value; the first 50 of a long list."""
    items: list[tuple[Any, Any]] = []
    if isinstance(tree, dict):
        items = list(tree.items())
    elif isinstance(tree, list):
        items = list(enumerate(tree))[:50]
    for key, value in items:
        yield (*before, key)
        if len(before) < 20:
            yield from places_of(value, (*before, key))


def value_at(tree: Any, place: Path) -> Any:
    for key in place:
        tree = tree[key]
    return tree


def misspelt(rng: Random, word: str) -> str:
    """``word`` with one letter missing, repeated or swapped, or in capitals."""
    at = rng.randrange(max(1, len(word)))
    return rng.choice(
        (word[:at] + word[at + 1 :], word[:at] + word[at : at + 1] * 2 + word[at + 1 :], word[:at] + "_" + word[at:])
        + (word[:at] + word[at + 1 : at + 2] + word[at : at + 1] + word[at + 2 :], word.upper(), word + "s")
    )


def damaged(rng: Random, content: bytes) -> bytes:
    """Bytes of a file that is cut, has other bytes in it, is in another encoding, or is something else."""
    content = content or b"\x00"
    at = rng.randrange(len(content))
    match rng.randrange(9):
        case 0:
            return content[:at]
        case 1:
            return content[:at] + rng.randbytes(rng.choice((1, 4, 40))) + content[at:]
        case 2:
            return (
                content[:at] + bytes([content[at] ^ 1 << rng.randrange(8)]) + content[at + 1 :] if content else b"\x00"
            )
        case 3:
            return b""
        case 4:
            return rng.randbytes(rng.choice((1, 8, 1000)))
        case 5:
            return content.decode("latin-1").encode(rng.choice(("utf-16", "utf-32", "utf-8-sig", "utf-7")))
        case 6:
            return content[:at] + rng.choice(ODD_BYTES) + content[at:]
        case 7:
            return content[at:] + content[:at]
        case _:
            return rng.choice(OTHER_FILES)


ODD_BYTES = (
    b"\x00",
    b"\t",
    b"\xff\xfe",
    b"\xed\xa0\x80",
    b"\n\n",
    b"\r",
    b"{",
    b"]",
    b'"',
    b"\\",
    b"9" * 5000,
    b"[" * 3000,
)
OTHER_FILES = (
    b"<html>503 Service Unavailable</html>",
    b"version https://git-lfs.github.com/spec/v1\noid sha256:1\nsize 9\n",
    b"\x1f\x8b\x08\x00",
    b"PK\x03\x04",
    b"null",
    b"[]",
    b"{}",
    b"[" * 100_000,
    b'{"a":' * 100_000,
    b"\n" * 1000,
    b" ",
)
