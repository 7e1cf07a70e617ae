"""Stop strings: whether the last token of a response completes one."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from flexrlhf.engines.base import Sampling

_REPLACEMENT = "\ufffd"
"""Character that decoders write for bytes that are no character, or not yet."""


def completes_stop(response: Sequence[int], sampling: Sampling) -> bool:
    """Return whether the last token of ``response`` completes a stop string, where those before it completed none.

    As in vLLM a stop string counts only if it is completed after the first ``min_tokens`` tokens.
    """
    decode = sampling.decode
    assert decode is not None, "stop strings are searched in decoded text"
    if len(response) <= sampling.min_tokens:
        return False
    first = _start_of_tail(response, decode, max(map(len, sampling.stop)))
    text, early = decode(response[first:]), response[first : sampling.min_tokens]
    num_early = len(decode(early).rstrip(_REPLACEMENT)) if early else 0
    return any(text.find(stop, max(0, num_early - len(stop) + 1)) >= 0 for stop in sampling.stop)


def _start_of_tail(response: Sequence[int], decode: Callable[[Sequence[int]], str], longest: int) -> int:
    """Return the start of a tail of ``response`` that contains any stop string which its last token completes.

    ``longest``: characters of the longest stop string. At the start of a tail decoders may drop a space or find no
    character; then the tail is doubled.
    """
    width = longest + 8
    while width < len(response):
        before = decode(response[-width:-1])
        if len(before) > longest and _REPLACEMENT not in before:
            return len(response) - width
        width *= 2
    return 0
