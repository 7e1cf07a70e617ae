"""Libraries that read job files, which an extra installs: tree-sitter for shell scripts, OmegaConf for YAML."""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING, Any

from flexrlhf.errors import UserError

if TYPE_CHECKING:
    from tree_sitter import Parser

EXTRA = "import"


@cache
def bash_parser() -> Parser:
    """Return a parser of bash. Raises UserError if it is not installed."""
    try:
        import tree_sitter
        import tree_sitter_bash
    except ImportError as error:
        raise _missing(error, "shell scripts") from None
    return tree_sitter.Parser(tree_sitter.Language(tree_sitter_bash.language()))


def omega_conf() -> Any:
    """Return OmegaConf's class. Raises UserError if it is not installed."""
    try:
        from omegaconf import OmegaConf
    except ImportError as error:
        raise _missing(error, "YAML files of other systems") from None
    return OmegaConf


def _missing(error: ImportError, what: str) -> UserError:
    return UserError(
        f"import: {what} are read by {error.name}, which is not installed: pip install 'flexrlhf[{EXTRA}]'"
    )
