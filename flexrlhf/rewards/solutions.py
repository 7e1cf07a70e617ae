"""Numbers and formulas in solutions and responses, as the rules ``gsm8k`` and ``math`` read them.

Worker processes load this: the standard library, and math-verify for formulas.
"""

from __future__ import annotations

import json
import re
import threading
from decimal import Decimal, InvalidOperation
from typing import Any

from flexrlhf.errors import shown
from flexrlhf.user_code.call_failures import CallFailure

FINAL = "####"
"""Stands in front of the final number in the data of GSM8K."""
_LATEX_GAP = r"(?:\\[,;:! ]|\{,\})"
"""Separator of thousands in LaTeX."""
_GAP = rf"(?:{_LATEX_GAP}|[ '’_])"
_DIGITS = rf"\d{{1,3}}(?:{_GAP}\d{{3}})+(?!\d)(?:\.\d+)?|[\d.,]+"
_MARK = r"(?:[\s*`=:(){}$€£¥₹]|\\[$()\[\]]|\\(?:boxed|text|mathrm|mathbf|textbf)\b)"
"""What may stand around a number: emphasis, delimiters, currencies."""
_NUMBER = rf"{_MARK}{{0,40}}([-+]?){_MARK}{{0,9}}([-+]?)({_DIGITS})"
_FINAL_NUMBER, _WHOLE_NUMBER = re.compile(FINAL + _NUMBER), re.compile(rf"{_NUMBER}(?:{_MARK}|[.%]|\\%)*")

_WIDTHS = {code: code - 0xFEE0 for code in range(0xFF01, 0xFF5F)} | dict.fromkeys(map(ord, "\u2212\u2013\ufe63"), "-")
_WIDTHS |= dict.fromkeys(map(ord, "\u00a0\u2007\u2009\u202f\u3000"), " ")
"""Characters of other widths, and dashes, to their usual form."""
_THOUSANDS = re.compile(rf"(?<![\d.])\d{{1,3}}(?:{_LATEX_GAP}\d{{3}})+(?!\d)")
_SYMBOLS = {"°": r"^\circ ", r"\langle": "(", r"\rangle": ")"}
_BOX = re.compile(r"\\boxed\{((?:[^{}]|\{(?:[^{}]|\{[^{}]*\})*\})*)\}")
_DELIMITED = re.compile(r"\\boxed\b|\\\(|\\\[|(?<!\\)\$.+?(?<!\\)\$", re.DOTALL)
_ANNOUNCED = re.compile(r"(?i)\banswer(?:\s+is\b|\s*[:=])+\s*(\S.*)")
_SENTENCE = re.compile(r"(?i)\b(?:is|are|was|were|has|have)\b")
_UNICODE = {
    **{"π": r"\pi ", "∞": r"\infty ", "≤": r"\le ", "≥": r"\ge ", "×": r"\times ", "÷": r"\div ", "·": r"\cdot "},
    **{"∪": r"\cup ", "∩": r"\cap ", "±": r"\pm ", "∈": r"\in ", "²": "^{2}", "³": "^{3}", "½": r"\frac{1}{2}"},
}
_REWRITTEN = (
    (re.compile(r"√(\d+|\w|\([^()]*\))"), r"\\sqrt{\1}"),
    # of one number: its exponent, a mixed fraction, a unit in words
    (re.compile(r"^([-+]?\d+(?:\.\d+)?)[eE]\+?(-?\d+)$"), r"\1 \\times 10^{\2}"),
    (re.compile(r"^([-+]?\d+) (\d+)/(\d+)$"), r"\1\\frac{\2}{\3}"),
    (
        re.compile(
            r"^([-+]?\d[\d.,/]*) ((?!percent|pct|hundred|thousand|[mb]illion)[A-Za-z]{2,}[A-Za-z ]*)(\^\{?\d\}?)?$"
        ),
        r"\1\\text{ \2}\3",
    ),
)
_SPACED_NUMBER = re.compile(rf"[-+]?\d{{1,3}}(?:{_GAP}\d{{3}})+(?:\.\d+)?")


def missing_solution(column: str) -> CallFailure:
    """Return the failure of a row without a solution."""
    return CallFailure("column", f"a row has no solution in its column {column!r}")


def unread_solution(column: str, solution: Any) -> CallFailure:
    """Return the failure of a row whose solution is none that its rule reads."""
    return CallFailure("solution", f"the solution {shown(solution)} in column {column!r} cannot be read by the rule")


def final_number(text: str) -> Decimal | None:
    """Return the last number after ``####``; None if there is none."""
    found = list(_FINAL_NUMBER.finditer(text.translate(_WIDTHS)))
    return _value(found[-1]) if found else None


def solution_number(text: str) -> Decimal | None:
    """Return the number of a solution: the last after ``####``, or all of a text without that; None of another one."""
    if FINAL in text:
        return final_number(text)
    found = _WHOLE_NUMBER.fullmatch(text.translate(_WIDTHS).strip())
    return None if found is None else _value(found)


def _value(number: re.Match[str]) -> Decimal | None:
    sign, inner, digits = number.groups()
    try:
        value = Decimal(re.sub(rf"{_GAP}|,", "", digits).removesuffix("."))
    except InvalidOperation:
        return None
    return -value if (sign == "-") != (inner == "-") else value


def solution_text(solution: Any) -> str:
    """Return a value of a column as text."""
    return solution if isinstance(solution, str) else json.dumps(solution, ensure_ascii=False)


def is_read(rule: str, solution: Any) -> bool:
    """Whether ``rule`` reads a solution: a number (gsm8k), or a formula (math)."""
    if rule == "gsm8k":
        return solution_number(solution_text(solution)) is not None
    return bool(parsed_solution(solution))


def parsed_solution(solution: Any) -> list[Any]:
    """Return the formula of a solution, and its text, by math-verify; an empty list if it has none.

    A solution without delimiters is LaTeX as a whole, unless it is a sentence: math-verify alone reads the first number
    of bare LaTeX.
    """
    return _parsed(_delimited(_unified(solution_text(solution))))


def parsed_response(response: str) -> list[Any]:
    """Return the answer of a response, and its text, by math-verify; an empty list if it has none."""
    return _parsed(_BOX.sub(lambda box: f"\\boxed{{{_rewritten(box[1])}}}", _unified(response)))


def _parsed(text: str) -> list[Any]:
    from math_verify import parse

    # its limit is a signal, which other threads do not get
    is_main = threading.current_thread() is threading.main_thread()
    found: list[Any] = parse(text, parsing_timeout=5 if is_main else None)
    return found


def _delimited(solution: str) -> str:
    """Return a solution with delimiters around its formula."""
    text = solution.rpartition(FINAL)[2].strip().removesuffix(".")
    if _DELIMITED.search(text):
        return text
    if (announced := _ANNOUNCED.search(text)) is not None:
        text = announced[1]
    elif _SENTENCE.search(text):
        return text
    return f"\\boxed{{{_rewritten(text.replace('$', ''))}}}"


def _unified(text: str) -> str:
    """Return ``text`` with one form of each sign, and without separators of thousands and dollars of LaTeX."""
    text = text.translate(_WIDTHS)
    for symbol, written in _SYMBOLS.items():
        text = text.replace(symbol, written)
    text = re.sub(r"\\\$\s*(?=[-+]?[\d.])", "", text)
    return _THOUSANDS.sub(lambda number: re.sub(_LATEX_GAP, "", number[0]), text)


def _rewritten(formula: str) -> str:
    """Return a formula in LaTeX: without characters of Unicode, and with a number as math-verify reads it."""
    text = formula.strip().removesuffix(".")
    if _SPACED_NUMBER.fullmatch(text):
        return re.sub(_GAP, "", text)
    for symbol, written in _UNICODE.items():
        text = text.replace(symbol, written)
    for pattern, written in _REWRITTEN:
        text = pattern.sub(written, text)
    return text
