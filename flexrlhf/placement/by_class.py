"""Device classes of models whose ratios count devices of several: training takes the class with more memory and speed.

FlexRLHF maps models by the capacity of devices (section IV-B): training and generation on the newer class, reference
and reward on the older one (table III). The order of the nodes has no part in it, and ranks keep their numbers.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from fractions import Fraction

from flexrlhf.config.placement_settings import PlacementMap
from flexrlhf.errors import UserError
from flexrlhf.placement.cluster import Cluster
from flexrlhf.placement.placed import ModelName
from flexrlhf.placement.ratios import Roles, assign_ranks, has_shadows


def on_classes(request: PlacementMap, roles: Roles, cluster: Cluster) -> tuple[PlacementMap, str]:
    """Return ``request`` with a class for each model whose ratio counts devices of several, and a sentence on them.

    A ratio counts all of these devices if every model then fits into a class, else the devices of the model's class.
    ``request`` itself, and no sentence: if the ratios count devices of one class, may span classes, or fit neither way.
    """
    entries = request.models.items()
    open_ratios = {ModelName(n): e.ratio for n, e in entries if e.ratio is not None and e.on is None}
    pinned = {cluster.resolve_class(entry.on) for _, entry in entries if entry.on is not None}
    sizes = {name: len(cluster.ranks_on(name)) for name in cluster.classes_by_strength if name not in pinned}
    if len(sizes) < 2 or not open_ratios or request.span_classes or request.train_share is not None:
        return request, ""
    for counts_all in (True, False):
        shares = _Shares(open_ratios, sizes, counts_all)
        homes = _homes(shares, roles)
        if homes is None:
            continue
        own = {n: {"on": home, "ratio": Fraction(shares.count(n, home), sizes[home])} for n, home in homes.items()}
        models = {n: entry.model_copy(update=own.get(ModelName(n), {})) for n, entry in entries}
        mapped = request.model_copy(update={"models": models})
        try:
            assign_ranks(mapped, roles, cluster)
        except UserError:
            continue
        return mapped, _sentence(homes, cluster, counts_all)
    return request, ""


@dataclass(frozen=True)
class _Shares:
    """Ratios of models, and the devices that they count.

    sizes:       devices of each class, the one with most memory and speed first.
    counts_all:  whether a ratio counts the devices of all classes, else those of the model's class.
    """

    ratios: Mapping[ModelName, Fraction]
    sizes: Mapping[str, int]
    counts_all: bool

    def count(self, name: ModelName, home: str) -> int:
        """Return the devices of a model on class ``home``; 0: its ratio is no whole number, or more than there are."""
        devices = self.ratios[name] * (sum(self.sizes.values()) if self.counts_all else self.sizes[home])
        return int(devices) if devices.denominator == 1 and 0 < devices <= self.sizes[home] else 0


def _homes(shares: _Shares, roles: Roles) -> dict[ModelName, str] | None:
    """Return the class of each model; None if one fits none.

    Trained models take the strongest class. Shadows, which share no device with them, take the strongest that has room
    next to training; other models one without training, if there is any.
    """
    strongest = next(iter(shares.sizes))
    homes = {name: strongest for name in shares.ratios if name in roles.trained}
    counts = [shares.count(name, strongest) for name in homes]
    if 0 in counts:
        return None
    free = dict(shares.sizes)
    if has_shadows(shares.ratios):
        free[strongest] -= max(counts, default=0)
    for name in sorted((each for each in shares.ratios if each not in homes), key=lambda each: not each.copy):
        fitting = [home for home, room in free.items() if 0 < shares.count(name, home) <= room]
        if not fitting:
            return None
        others = list(homes.values())
        homes[name] = fitting[0] if name.copy else min(fitting, key=lambda e: (e == strongest, others.count(e)))
    return homes


def _sentence(homes: Mapping[ModelName, str], cluster: Cluster, counts_all: bool) -> str:
    """Return where models are, and why."""
    classes = [name for name in cluster.classes_by_strength if name in homes.values()]
    placed = [f"{', '.join(n for n, home in homes.items() if home == name)} on {name}" for name in classes]
    differ = len({cluster.strength(name) for name in cluster.classes}) > 1
    why = "with most memory times speed" if differ else "the first, as nothing known of the classes differs"
    ratios = "" if counts_all else "; a ratio counts the devices of the model's class, else not all would fit into one"
    return f"{'; '.join(placed)}: models that train take {classes[0]}, {why}{ratios}; `on:` pins a model"
