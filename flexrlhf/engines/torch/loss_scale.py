"""Dynamic loss scale for float16."""

from __future__ import annotations

import torch
from torch import Tensor


class LossScale:
    """Factor of the loss that keeps float16 gradients from underflow (Micikevicius et al. 2018, section 3.2).

    It is halved when a gradient overflows, and doubled after ``GROWTH_INTERVAL`` steps without one. Disabled it is 1.
    """

    GROWTH_INTERVAL = 2000

    def __init__(self, enabled: bool) -> None:
        self.factor = 2.0**16 if enabled else 1.0
        self.is_enabled = enabled
        self.good_steps = 0

    def allows(self, norm: Tensor) -> bool:
        """Return whether the update with a gradient of this norm () may be made, and adapt the factor.

        Raises FloatingPointError when no smaller factor can help.
        """
        if torch.isfinite(norm):
            self.good_steps += 1
            if self.is_enabled and self.good_steps % self.GROWTH_INTERVAL == 0:
                self.factor *= 2
            return True
        if not self.is_enabled or self.factor <= 1:
            raise FloatingPointError("the gradient is not finite; the weights were left as they were")
        self.factor, self.good_steps = self.factor / 2, 0
        return False
