"""Random damage to a YAML file: to its data, and to its text."""

from __future__ import annotations

from random import Random
from typing import Any

from odd_values import damaged, mutated, places_of, value_at

from flexrlhf.config.yaml_io import write_yaml

RAW = (
    *("9" * 5000, "1e999999", "0x" + "f" * 4000, "!!int x", "!!float x", "!!binary x", "!!timestamp x", "!!bool x"),
    *(
        "!!python/object/apply:os.system [id]",
        "!!python/name:os.system",
        "!!python/tuple [1]",
        "!!set {a, b}",
        "!!omap x",
    ),
    *("&a [*a]", "&a {x: *a}", "*nowhere", "<<", "{<<: 3}", "{<<: [1]}", "{<<: {a: 1}}", "? [a]", "{? [a, b] : c}"),
    *(
        "[" * 5000,
        "{a: " * 200,
        "[" * 300 + "]" * 300,
        "- " * 300 + "a",
        '"\\ud800"',
        '"\\x00"',
        '"\\',
        "'",
        "|",
        ">-\n  a",
    ),
    *(
        "%YAML 9.9",
        "--- a",
        "...",
        "@",
        "`",
        "\t",
        "a: b: c",
        "2001-01-01",
        "1:30:00",
        "0o17",
        "1_000",
        ".inf",
        ".nan",
        "=",
    ),
    *("1e999999999", "'1e999999999'", "'1/1e9'"),
)
"""Texts that replace a value."""
LAUGHS = "l0: &l0 [a, b]\n" + "".join(f"l{n}: &l{n} [" + ", ".join([f"*l{n - 1}"] * 9) + "]\n" for n in range(1, 12))
"""A short text of many billion values."""
MARKS = tuple("{}[]:,&*!%@`|>'\"#-?\t\x00\x07\ufeff\u2028\x85 ")


def mutated_yaml(rng: Random, raw: dict[str, Any]) -> tuple[bytes, str]:
    """Return the bytes of a damaged file and a description of the damage."""
    kind = rng.randrange(10)
    if kind < 5:
        tree = mutated(rng, raw)
        return write_yaml(tree).encode(), f"data {tree}"
    text = write_yaml(raw)
    if kind == 5:
        content = damaged(rng, text.encode())
        return content, f"bytes {content[:200]!r}"
    text = _with_raw_value(rng, text) if kind < 8 else _with_damaged_line(rng, text)
    return text.encode(errors="surrogatepass"), f"text {text}"


def _with_raw_value(rng: Random, text: str) -> str:
    """``text`` with one value replaced by another string."""
    lines = text.split("\n")
    at = rng.choice([number for number, line in enumerate(lines) if line.strip()])
    value = rng.choice(RAW)
    key, colon, _ = lines[at].partition(": ")
    lines[at] = f"{key}: {value}" if colon else f"{lines[at]} {value}"
    return "\n".join(lines)


def _with_damaged_line(rng: Random, text: str) -> str:
    lines = text.split("\n")
    at = rng.randrange(len(lines) - 1)
    match rng.randrange(8):
        case 0:
            lines[at] = "\t" + lines[at]
        case 1:
            del lines[at]
        case 2:
            lines.insert(at, lines[at])
        case 3:
            lines[at] = " " * rng.randint(1, 3) + lines[at]
        case 4:
            place = rng.randrange(len(lines[at]) + 1)
            lines[at] = lines[at][:place] + rng.choice(MARKS) + lines[at][place:]
        case 5:
            lines.insert(0, LAUGHS)
            key, deeper = lines[at + 1].partition(":")[0], rng.choice(("*l11", "{a: *l11}", "[*l11]"))
            lines[at + 1] = f"{key}: {deeper}"
        case 6:
            lines = lines[:at]
        case _:
            lines[at] = lines[at].partition(":")[0]
    return "\n".join(lines)


def odd_setting(rng: Random, raw: dict[str, Any]) -> str:
    """An override of the command line, mostly of a setting that there is."""
    place = rng.choice(list(places_of(raw)))
    key = ".".join(str(part) for part in place)
    value = rng.choice((*RAW, str(value_at(raw, rng.choice(list(places_of(raw)))))))
    return rng.choice((f"{key}={value}", f"{key}={value}", f"{key}.{key}={value}", f"{key}", f"={value}", f"{key}.=1"))
