"""The language of package, tests and documents: the words of the field, one name per thing, docstrings that begin with
the thing or a verb."""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

import flexrlhf

PACKAGE = Path(flexrlhf.__file__).parent
ROOT = PACKAGE.parent
FILES = {str(file.relative_to(PACKAGE)): file for file in sorted(PACKAGE.rglob("*.py"))}
DOCUMENTS = {str(file.relative_to(ROOT)): file for file in (*ROOT.glob("*.md"), *ROOT.glob("docs/*.md"))}
WRITTEN = {name: file for name, file in DOCUMENTS.items() if file.stem != "reference"}
"""Documents that are not generated from the package."""
TESTS = {
    str(file.relative_to(ROOT)): file
    for folder in ("tests/distributed", "tests/emulate", "tests/engines", "tests/properties", "benchmarks")
    for file in sorted((ROOT / folder).rglob("*.py"))
}
MOST = 0.2
"""Largest rate of a word in ``WORDS`` or ``SYNTAX``, per 1,000 lines."""
WORDS = {
    "told": "given, reported, computed",
    "tells?": "returns, reports",
    "besides?": "next to, on the same ranks as, in addition to",
    "held": "stored, on (a rank); memory usage",
    "asked": "requested, called",
    "asks?": "requires, needs, calls",
    "wants?": "requires",
    "wanted": "requested, required",
    "drawn": "sampled",
    "draws?": "samples",
    "answers?": "response",
    "held.out": "evaluation set",
    "residents?": "loaded model",
    "surroundings": "operator context",
    "whereabouts": "rank progress",
    "parking": "host offload",
    "parked": "offloaded",
    "away": "offloaded",
    "foretold": "predicted",
    "on paper": "predicted, planned",
    "remed(?:y|ies)": "suggestions",
    "knows?": "receives, stores, depends on",
}
"""Word → the words of the field for it (CONTRIBUTING, language)."""
SYNTAX = {
    "those of": 'the thing itself: "the optimizer states of frozen models"',
    "seconds of": "time, duration",
}
"""Phrase → its replacement, in tests and written documents."""
ALIAS = re.compile(r"_?[A-Z]\w*[a-z]\w*")
"""Name of a type: in words that begin with a capital."""
INTERFACE = re.compile(r"held_out_scores|held_bytes|(exact|extract|score)_answer|(<|&lt;)/?answer>|[\"`.]answer\b")
"""Names that users type and that files of a run contain. They stay, and do not count."""
STARTS = """
also as at before behind beside besides by for from he her his how if in into it its on or she so some such that their
them these they this those to too until upon what when where which who whoever whom whose with within without of
"""
NO_START = frozenset(STARTS.split())
"""Words that begin no docstring: it begins with a verb, or with the name of what it describes."""


def occurrences(pattern: str, text: str) -> int:
    """How often a word stands in ``text``, which is in small letters, as a word or as a part of a name."""
    return len(re.findall(rf"(?<![a-z])(?:{pattern})(?![a-z])", text))


def docstrings(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Line and text of the docstrings of a module, its classes and its functions."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef):
            text = ast.get_docstring(node)
            if text:
                yield getattr(node, "lineno", 1), text


@cache
def text_of(file: Path) -> str:
    """Text of a file in small letters, without names that stay."""
    return INTERFACE.sub("", file.read_text()).lower()


@cache
def tree_of(file: Path) -> ast.Module:
    return ast.parse(file.read_text())


def first_word(text: str) -> str:
    return re.split(r"[^A-Za-z`'_]+", text.strip(), maxsplit=1)[0].lower()


@pytest.mark.parametrize("word", WORDS)
@pytest.mark.parametrize("files", [FILES, TESTS, DOCUMENTS], ids=["package", "tests", "documents"])
def test_words_of_our_own_are_rare(files: dict[str, Path], word: str) -> None:
    assert_rare(files, word, WORDS[word])


@pytest.mark.parametrize("phrase", SYNTAX)
@pytest.mark.parametrize("files", [TESTS, WRITTEN], ids=["tests", "documents"])
def test_phrases_of_our_own_are_rare(files: dict[str, Path], phrase: str) -> None:
    assert_rare(files, phrase, SYNTAX[phrase])


def test_tests_name_things_instead_of_what() -> None:
    assert_rare(TESTS, "what", "the result, the settings, ...")


def assert_rare(files: dict[str, Path], word: str, instead: str) -> None:
    texts = {name: text_of(file) for name, file in files.items()}
    lines = sum(text.count("\n") for text in texts.values())
    found = {name: count for name, text in texts.items() if (count := occurrences(word, text))}
    rate = 1000 * sum(found.values()) / lines
    assert rate <= MOST, f"{word!r} {rate:.2f} times in 1,000 lines, instead of: {instead}; {found}"


def types_of(tree: ast.Module) -> Iterator[str]:
    """Names of classes, and of the types that a module has a name for; options of a command are named as its
    parameters."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ClassDef):
            yield node.name
    for node in tree.body:
        match node:
            case ast.Assign([ast.Name(name)], value) if ALIAS.fullmatch(name) and not isinstance(value, ast.Call):
                if "typer." not in ast.unparse(value):
                    yield name


def test_no_name_of_a_type_is_defined_twice() -> None:
    places: dict[str, list[str]] = defaultdict(list)
    for name, file in FILES.items():
        for found in types_of(tree_of(file)):
            places[found].append(name)
    assert {name: files for name, files in places.items() if len(files) > 1} == {}


def test_names_of_types_are_found() -> None:
    text = "Row = dict[str, int]\nT = TypeVar('T')\nMOST = 3\nPath = Annotated[str, typer.Option()]\nclass A: ..."
    assert [*types_of(ast.parse(text))] == ["A", "Row"]


def test_docstrings_begin_with_a_verb_or_a_noun() -> None:
    found = [(name, *docstring) for name, file in FILES.items() for docstring in docstrings(tree_of(file))]
    assert [f"{name}:{line}: {text[:60]}" for name, line, text in found if first_word(text) in NO_START] == []


@pytest.mark.parametrize(
    ("text", "rare", "start"),
    [
        ("Told the replicas", 1, True),
        ("toldest untold", 0, True),
        ("is_told", 1, True),
        ("Of the replicas.", 0, False),
        ("Return the replicas.", 0, True),
        ("``rows`` of a mini-batch.", 0, True),
    ],
)
def test_the_rules_have_teeth(text: str, rare: int, start: bool) -> None:
    assert occurrences("told", text.lower()) == rare
    assert (first_word(text) not in NO_START) == start
