"""Bounds of rendering chats: a template comes with a model, and may write, or take, without end."""

from __future__ import annotations

import resource
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from flexrlhf.errors import UserError
from flexrlhf.text import bytes_text

MOST_BYTES = 2**30
"""Most memory in which a template renders a chat."""
MOST_CHARACTERS = 2**24
"""Longest chat as text, more than any model reads: a tokenizer takes a hundred times its bytes."""
_STATM = Path("/proc/self/statm")


def checked_length(text: str) -> str:
    """Return a chat as text. Raises UserError if it is too long."""
    if len(text) > MOST_CHARACTERS:
        raise UserError(f"the chat template writes {len(text)} characters for one chat, more than {MOST_CHARACTERS}")
    return text


@contextmanager
def bounded_memory() -> Iterator[None]:
    """Let this process take at most MOST_BYTES more in the body, which raises MemoryError beyond. On Linux alone."""
    if sys.platform != "linux":
        yield
        return
    used = int(_STATM.read_bytes().partition(b" ")[0]) * resource.getpagesize()
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    limit = used + MOST_BYTES
    resource.setrlimit(resource.RLIMIT_AS, (limit if soft == resource.RLIM_INFINITY else min(soft, limit), hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))


@contextmanager
def one_sentence() -> Iterator[None]:
    """Turn an error of a template, or in it, into a UserError."""
    from jinja2 import TemplateError, TemplateSyntaxError

    try:
        yield
    except TemplateSyntaxError as error:
        raise UserError(f"the chat template is no Jinja: {error.message}, in its line {error.lineno}") from None
    except (TemplateError, TypeError, ValueError, LookupError, AttributeError, ArithmeticError) as error:
        reason = " ".join(str(error).split()) or type(error).__name__
        raise UserError(f"the chat template refuses the turns: {reason:.300}") from None
    except MemoryError:
        raise UserError(f"the chat template takes more than {bytes_text(MOST_BYTES)} of memory for one chat") from None
