"""Size of the largest forward or training pass, bounded for texts of whatever lengths.

Engines lay texts out by ``memory/packed_rows.py``. A pass has as many computed tokens as its budget allows, or one text
where this alone is more, all texts of a prompt where a loss compares them; its rows are no wider than the widest that
is tried for its longest text.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from math import ceil

from flexrlhf.config.spec import ModelSpec
from flexrlhf.memory.packed_rows import WIDTHS, TextGroup, may_pack, units_of
from flexrlhf.weights.shapes import ModelShape


@dataclass(frozen=True)
class PassSize:
    """Bounds of a forward or training pass.

    tokens:     computed tokens: rows times their width.
    width:      tokens of a row.
    responses:  tokens of responses, whose log-probs are computed.
    packed:     whether rows have several texts, so that a mask separates these.
    total:      computed tokens of all passes of the call; None: any number.
    """

    tokens: int
    width: int
    responses: int
    packed: bool
    total: int | None = None

    def in_flight(self, passes: int, texts: int = 1) -> int:
        """Return the tokens of at most so many passes of calls with ``texts`` texts a row."""
        several = passes * self.tokens
        return several if self.total is None else max(self.tokens, min(several, texts * self.total))


def packs_texts(settings: ModelSpec, shape: ModelShape | None, longest: int) -> bool:
    """Whether passes of a model have several texts in a row. ``longest``: tokens of a text."""
    if shape is None or shape.sizes is None:
        return False
    return settings.pack_texts and may_pack(shape.sizes.family, settings.attention, shape.window, longest)


def shares_prompts(settings: ModelSpec) -> bool:
    """Whether samples of one prompt share a copy of it where texts are packed; encoded again, texts have no prompt."""
    return settings.share_prompts and not settings.retokenize


@lru_cache(maxsize=4096)
def largest_pass(
    prompt: int,
    response: int,
    samples: int,
    budget: int,
    rows: int | None,
    packs: bool,
    shares: bool,
    compares: bool = False,
) -> PassSize:
    """Return bounds of a pass of ``budget`` tokens.

    prompt, response:  tokens at most.
    samples:           texts of a prompt.
    rows:              texts of the call; None: any number.
    packs:             whether several texts are in a row.
    shares:            whether samples of a prompt then share a copy of it.
    compares:          whether all texts of a prompt are in one pass, because a loss compares them.
    """
    whole = TextGroup(prompt, (response,) * samples)
    shares = packs and shares
    units = units_of(whole, budget, shares, compares)
    rows_of_prompt = [part for unit in units for part in unit]
    longest_row = max(part.tokens for part in rows_of_prompt)
    tokens = max(budget, longest_row * max(map(len, units)))
    # shorter samples may share one row where the longest are divided; a prompt has a token at least
    answered = min(samples * response, max(budget, longest_row) - 1) if shares else response
    responses = tokens - tokens // (1 + answered)
    total = None
    if rows is not None:
        prompts = max(1, rows // samples)
        total = prompts * len(rows_of_prompt) * longest_row
        tokens, responses = min(tokens, total), min(responses, prompts * samples * response)
    if not packs:
        return PassSize(tokens, prompt + response, responses, packed=False, total=total)
    longest = whole.tokens if shares else prompt + response
    widest = min(ceil(WIDTHS[-1] * longest), max(budget, longest_row), tokens)
    return PassSize(tokens, max(widest, prompt + response), responses, packed=True, total=total)
