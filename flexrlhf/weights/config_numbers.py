"""Numbers of a Hugging Face config with which a model computes nothing, or nothing finite; transformers takes them."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any, TypeGuard

from flexrlhf.errors import shown

Range = tuple[Callable[[float], bool], str]
"""Whether a number is valid, and the valid ones in words."""
_POSITIVE: Range = (lambda value: 0 < value < math.inf, "a finite number above 0")
_NOT_NEGATIVE: Range = (lambda value: 0 <= value < math.inf, "a finite number, at least 0")
_FINITE: Range = (lambda value: abs(value) < math.inf, "a finite number")
_COUNT: Range = (lambda value: value >= 1, "at least 1")
_SHARE: Range = (lambda value: 0 <= value < 1, "a number from 0 on, below 1")
_PART: Range = (lambda value: 0 < value <= 1, "a number above 0, at most 1")
_RANGES: dict[str, Range] = {
    **dict.fromkeys(
        ("rms_norm_eps", "layer_norm_eps", "layer_norm_epsilon", "norm_eps", "norm_epsilon", "initializer_range"),
        _NOT_NEGATIVE,
    ),
    **dict.fromkeys(("attention_dropout", "hidden_dropout", "resid_pdrop", "embd_pdrop", "attn_pdrop"), _SHARE),
    **dict.fromkeys(("rope_theta", "rotary_emb_base", "rope_local_base_freq", "max_position_embeddings"), _POSITIVE),
    **dict.fromkeys(("sliding_window",), _COUNT),
    "partial_rotary_factor": _PART,
}
"""Settings of a model."""
_OF_ROPE: dict[str, Range] = {
    **dict.fromkeys(("rope_theta", "factor", "attention_factor", "beta_fast", "beta_slow"), _POSITIVE),
    **dict.fromkeys(("low_freq_factor", "high_freq_factor", "original_max_position_embeddings"), _POSITIVE),
    **dict.fromkeys(("mscale", "mscale_all_dim"), _FINITE),
    **dict.fromkeys(("long_factor", "short_factor"), _POSITIVE),
    "partial_rotary_factor": _PART,
}
"""Settings of its rotary embeddings."""
_IN_ORDER = (("low_freq_factor", "high_freq_factor"), ("beta_slow", "beta_fast"))
"""Settings of rotary embeddings of which the first is less than the second."""
ROPES = ("rope_parameters", "rope_scaling")


def wrong_number(config: Mapping[str, Any]) -> str | None:
    """Return the first number of a config that is not valid, and which ones are; None if all are.

    Values of other types are left to transformers, which refuses them.
    """
    ignored = ("sliding_window",) if config.get("use_sliding_window") is False else ()
    ranges = {key: each for key, each in _RANGES.items() if key not in ignored}
    found = [*_wrong("", config, ranges), *_wrong_ropes(config)]
    if not found and isinstance(config.get("text_config"), Mapping):
        return wrong_number(config["text_config"])
    return found[0] if found else None


def _wrong_ropes(config: Mapping[str, Any]) -> Iterator[str]:
    """Yield the wrong numbers of rotary embeddings, also where layers of each type have their own."""
    for name in ROPES:
        rope = config.get(name)
        for key, part in {name: rope, **(rope if isinstance(rope, Mapping) else {})}.items():
            if isinstance(part, Mapping):
                prefix = name if key == name else f"{name}.{key}"
                yield from _wrong(f"{prefix}.", part, _OF_ROPE)
                for less, more in _IN_ORDER:
                    low, high = part.get(less), part.get(more)
                    if _is_number(low) and _is_number(high) and low >= high:
                        yield f"{prefix}.{less} {low}: expected less than {more}, {high}"
                yield from _wrong_factors(prefix, part, config)


def _wrong_factors(prefix: str, rope: Mapping[str, Any], config: Mapping[str, Any]) -> Iterator[str]:
    """Yield the lists of factors of another length than half of the rotary part of a head."""
    hidden, heads = config.get("hidden_size"), config.get("num_attention_heads")
    head = config.get("qk_rope_head_dim") or config.get("head_dim")
    if head is None and _is_whole(hidden) and _is_whole(heads):
        head = hidden // heads
    share = rope.get("partial_rotary_factor", config.get("partial_rotary_factor", 1.0))
    if not _is_whole(head) or not _is_number(share):
        return
    for key in ("short_factor", "long_factor"):
        factors, expected = rope.get(key), int(head * share) // 2
        if isinstance(factors, list) and len(factors) != expected:
            yield f"{prefix}.{key} of {len(factors)} numbers: expected {expected}, half of the rotary part of a head"


def _is_whole(value: Any) -> TypeGuard[int]:
    return isinstance(value, int) and not isinstance(value, bool) and value > 0


def _wrong(prefix: str, values: Mapping[str, Any], ranges: Mapping[str, Range]) -> Iterator[str]:
    for key, (is_valid, expected) in ranges.items():
        value = values.get(key)
        for each in value if isinstance(value, list) else [value]:
            if _is_number(each) and not is_valid(each):
                yield f"{prefix}{key} {shown(each)}: expected {expected}"


def _is_number(value: Any) -> TypeGuard[int | float]:
    return isinstance(value, int | float) and not isinstance(value, bool)
