"""Speculative decoding: a draft model proposes tokens, and one step of the policy verifies them."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Speculation:
    """Speculative decoding of a call.

    acceptance:  probability that a drafted token is accepted, each independently of the others
    drafted:     tokens that are drafted for a verification
    draft_cost:  time of drafting one token, as a share of a decoding step
    """

    acceptance: float
    drafted: int = 4
    draft_cost: float = 0.05

    @property
    def tokens(self) -> float:
        """Expected tokens of a verification, (1 - a^(k + 1)) / (1 - a) (Leviathan et al., 2023, equation 1)."""
        return sum(self.acceptance**number for number in range(self.drafted + 1))

    @property
    def steps(self) -> float:
        """Verifications for each token."""
        return 1 / self.tokens

    @property
    def drafting(self) -> float:
        """Time of drafting for each token, in decoding steps."""
        return self.drafted * self.draft_cost / self.tokens
