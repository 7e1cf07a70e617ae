"""Libraries that read job files, which an extra installs: tree-sitter for shell scripts, OmegaConf for YAML."""

from __future__ import annotations

from functools import cache
from importlib import import_module
from typing import TYPE_CHECKING, Any

from flexrlhf.api import UserError

if TYPE_CHECKING:
    from tree_sitter import Parser

EXTRA = "import"


@cache
def bash_parser() -> Parser:
    """Return a parser of bash. Raises UserError if it is not installed."""
    tree_sitter, bash = (_library(name, "shell scripts") for name in ("tree_sitter", "tree_sitter_bash"))
    parser: Parser = tree_sitter.Parser(tree_sitter.Language(bash.language()))
    return parser


def omega_conf() -> Any:
    """Return OmegaConf's class. Raises UserError if it is not installed."""
    return _library("omegaconf", "YAML files of other systems").OmegaConf


def _library(name: str, files: str) -> Any:
    try:
        return import_module(name)
    except ImportError as error:
        missing = f"{files} are read by {error.name}, which is not installed"
        raise UserError(f"import: {missing}: pip install 'flexrlhf[{EXTRA}]'") from None
