"""The environment of tools.yaml: a calculator that the policy calls by an expression before an equals sign."""

from __future__ import annotations

import ast
import operator
import re

OPERATIONS = {ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.Div: operator.truediv}
SPELLINGS = str.maketrans({"x": "*", "×": "*", "÷": "/", "$": "", ",": ""})


class Calculator:
    """One problem. An episode with a call of the problem's numbers, or of earlier results, receives half a point."""

    def reset(self, question: str, **columns: object) -> None:
        """Begin an episode."""
        self._numbers = {float(number.replace(",", "")) for number in re.findall(r"\d[\d,]*(?:\.\d+)?", question)}
        self.reward = 0.0

    def calculate(self, expression: str) -> str:
        """Write an expression and =, and receive its value.

        Args:
            expression: Numbers, + - * / and brackets.
        """
        tree = ast.parse(expression.translate(SPELLINGS).strip(), mode="eval")
        value = _value(tree.body)
        if {node.value for node in ast.walk(tree) if isinstance(node, ast.Constant)} <= self._numbers:
            self.reward = 0.5
            self._numbers.add(value)
        return f"{value:g}"


def _value(node: ast.expr) -> float:
    match node:
        case ast.Constant(value=int() | float() as number):
            return float(number)
        case ast.UnaryOp(op=ast.USub(), operand=operand):
            return -_value(operand)
        case ast.BinOp(left=left, op=kind, right=right) if type(kind) in OPERATIONS:
            return float(OPERATIONS[type(kind)](_value(left), _value(right)))
    raise ValueError(f"{ast.unparse(node)} is no arithmetic")
