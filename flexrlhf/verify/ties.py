"""Ties: tokens at which two runs part because rounding decides.

A token is the argmax of log-probs + noise. Two runs that part at a token have the same text before it, so each has
recorded the log-prob of its own choice under the same distribution; the noise is a function of (seed, step, row,
position).
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from flexrlhf.engines.sampling import gumbel_noise
from flexrlhf.runs.recorded_columns import RecordedColumn
from flexrlhf.verify.deviation import Tie

Columns = Mapping[str, RecordedColumn]
SAMPLED = ("rollout_logprobs", "logprobs")
"""Columns with the log-probs of sampled tokens, the nearest to the distribution that they were sampled from first."""


def find_tie(first: Columns, second: Columns, seed: int, step: int, num_prompt_tokens: int, limit: float) -> Tie | None:
    """Return the tie where every response that differs parts at a token whose margin is at most ``limit``."""
    tokens = [run.get("tokens") for run in (first, second)]
    sampled = [next((run[name] for name in SAMPLED if name in run), None) for run in (first, second)]
    if tokens[0] is None or tokens[1] is None or sampled[0] is None or sampled[1] is None:
        return None
    margins: dict[int, float] = {}
    for row in sorted(tokens[0].values.keys() & tokens[1].values.keys()):
        one, other = tokens[0].values[row], tokens[1].values[row]
        places = (one != other).nonzero().flatten().tolist()
        if not places:
            continue
        position = places[0] - num_prompt_tokens
        if position < 0:
            return None
        noise = _noise(seed, step, row, position, int(one[places[0]]), int(other[places[0]]))
        chosen = [float(run.values[row][position]) for run in (sampled[0], sampled[1])]
        margins[row] = abs(chosen[0] + noise[0] - chosen[1] - noise[1])
    if not margins or max(margins.values()) > limit:
        return None
    return Tie(step, tuple(margins), max(margins.values()))


def _noise(seed: int, step: int, row: int, position: int, *tokens: int) -> list[float]:
    """Return the noise of ``tokens`` at one place; that of a token does not depend on the vocabulary's size."""
    noise = gumbel_noise(seed, step, torch.tensor([row]), position, max(tokens) + 1)[0]
    return [float(noise[token]) for token in tokens]
