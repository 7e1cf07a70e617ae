"""Choice of the strategy: the one that matches a placement."""

from __future__ import annotations

from types import ModuleType

from flexrlhf.config.spec import Spec
from flexrlhf.errors import UserError
from flexrlhf.placement.placed import Placement
from flexrlhf.strategies import colocated, disaggregated, interleaving

STRATEGIES: dict[str, ModuleType] = {module.NAME: module for module in (colocated, interleaving, disaggregated)}


def choose_strategy(spec: Spec, placement: Placement) -> str:
    """Return the name of the strategy that matches. Raises UserError where ``schedule.strategy``, lag or sync
    contradict it.
    """
    name = next(name for name, module in STRATEGIES.items() if module.matches(placement))
    if spec.schedule.strategy not in (None, name):
        raise UserError(
            f"schedule.strategy: {spec.schedule.strategy!r} contradicts the placement, which means {name!r}; "
            f"remove it or change the placement"
        )
    if name != disaggregated.NAME and spec.schedule.lag:
        raise UserError(f"schedule.lag: 1 needs shadow models (a disaggregated placement), found {name}; use lag 0")
    if name != disaggregated.NAME and spec.sync.every != 1:
        raise UserError(
            f"sync.every: {spec.sync.every} needs shadow models (a disaggregated placement), found {name}; use 1"
        )
    return name
