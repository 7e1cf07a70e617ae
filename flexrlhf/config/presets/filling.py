"""Filling in of a preset where the YAML writes nothing: settings of the algorithm, and of trained models' optimizers.

Written settings win, down to single keys of a mapping.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any, Literal, TypeGuard, get_args

from flexrlhf.config.presets.table import MiniBatchesOf, Peer, PeerTrainer, WarmUp, read_peer

Like = Literal["verl", "openrlhf", "trl", "deepspeed-chat", "safe-rlhf", "dr-grpo", "dapo"]


@cache
def _peer(like: str) -> Peer:
    return read_peer(Path(__file__).with_name(f"{like}.yaml"))


class _Peers(Mapping[str, Peer]):
    """Peers by name, each read from its file on first use."""

    def __getitem__(self, like: str) -> Peer:
        if like not in get_args(Like):
            raise KeyError(like)
        return _peer(like)

    def __iter__(self) -> Iterator[str]:
        return iter(get_args(Like))

    def __len__(self) -> int:
        return len(get_args(Like))


PEERS: Mapping[str, Peer] = _Peers()
DERIVED_ROLES = ("critic", "cost_critic")
"""Trained roles that a YAML may leave out, since they start from others."""


def trainer_of(like: str, algorithm: str) -> PeerTrainer:
    """Return the trainer of ``like`` for ``algorithm``. Raises ValueError if it has none, with those that it has."""
    trainers = PEERS[like].trainers
    if algorithm not in trainers:
        raise ValueError(f"like: {like} has no trainer for {algorithm}; it has {', '.join(trainers)}")
    return trainers[algorithm]


def filled_algorithm(written: Mapping[str, Any], defaults: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings of ``algorithm`` with its preset filled in. Raises ValueError for one that does not exist.

    defaults:  the algorithm's own, by name, with its ``name``.
    """
    trainer = trainer_of(written["like"], defaults["name"])
    own = {cell.key.partition(".")[2]: cell.value for cell in trainer.cells if cell.key.startswith("algorithm.")}
    settings = {key: _over(value, written[key]) if key in written else value for key, value in own.items()}
    if isinstance(written.get("kl"), Mapping):
        settings["kl"] = _penalty(trainer, own.get("kl"), written["kl"])
    sizes = _sizes({**defaults, **settings, **written})
    resolved = {key: _number(value, sizes) for key, value in settings.items()}
    return {**written, **{key: value for key, value in resolved.items() if value is not _UNKNOWN}}


def filled_models(raw: Mapping[str, Any], algorithm: Mapping[str, Any]) -> dict[str, Any]:
    """Return ``models`` of a YAML with the preset's optimizers filled in.

    raw:        the YAML.
    algorithm:  its algorithm, of which ``like`` is a preset, with all settings that the warm-up depends on.
    """
    models, updates = dict(raw["models"]), _updates_per_step(algorithm)
    # of a run whose length is given in passes over its data: plan/epochs.py
    steps = raw.get("steps", 100 if raw.get("epochs") is None else None)
    shared = models["all"].get("optimizer") if isinstance(models.get("all"), Mapping) else None
    of_all = shared if isinstance(shared, Mapping) else {}
    for role, cells in _by_role(trainer_of(algorithm["like"], algorithm["name"])).items():
        written = models.get(role)
        if written is None and role in DERIVED_ROLES:
            written = {}
        if not isinstance(written, Mapping) or not isinstance(written.get("optimizer", {}), Mapping):
            continue
        preset = {key: _updates(value, steps, updates) for key, value in cells.items()}
        known = {key: value for key, value in preset.items() if value is not _UNKNOWN}
        models[role] = {**written, "optimizer": {**known, **of_all, **written.get("optimizer", {})}}
    return _with_router_loss(models, trainer_of(algorithm["like"], algorithm["name"]))


def _with_router_loss(models: dict[str, Any], trainer: PeerTrainer) -> dict[str, Any]:
    """Return ``models`` with the loss of a mixture's routers, of a trained model whose family is known by its name."""
    if trainer.routers is None:
        return models
    _, role, key = trainer.routers.key.split(".")
    model, shared = models.get(role), models.get("all")
    if not isinstance(model, Mapping) or any(key in each for each in (model, shared) if isinstance(each, Mapping)):
        return models
    value = trainer.router_loss(model)
    return models if value is None else {**models, role: {**model, key: value}}


def _updates_per_step(algorithm: Mapping[str, Any]) -> int | None:
    """Return the optimizer steps of a step; None if a setting that they follow from is not valid."""
    mini_batches, epochs = algorithm.get("num_mini_batches"), algorithm.get("epochs")
    return mini_batches * epochs if _is_count(mini_batches) and _is_count(epochs) else None


_UNKNOWN = object()
"""In the place of a number that does not follow, because another setting is not valid."""


def _over(value: Any, written: Any) -> Any:
    """Return ``written`` over ``value``, key by key where both are mappings."""
    if not (isinstance(value, Mapping) and isinstance(written, Mapping)):
        return written
    return {**value, **{key: _over(value.get(key), each) for key, each in written.items()}}


def _penalty(trainer: PeerTrainer, default: Any, written: Mapping[str, Any]) -> dict[str, Any]:
    """Return a KL penalty that the YAML writes in part. ``default``: the peer's, or None."""
    first = default["place"] if isinstance(default, Mapping) else next(iter(trainer.penalties), None)
    place = written.get("place", first)
    return {**({"place": place} if place else {}), **trainer.penalties.get(str(place), {}), **written}


def _sizes(settings: Mapping[str, Any]) -> tuple[int, int] | None:
    """Return prompts of a step and samples of a prompt; None if one is not valid."""
    sizes = settings["prompts_per_step"], settings.get("samples_per_prompt", 1)
    return sizes if all(_is_count(size) for size in sizes) else None


def _is_count(value: Any) -> TypeGuard[int]:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 1


def _number(value: Any, sizes: tuple[int, int] | None) -> Any:
    if not isinstance(value, MiniBatchesOf):
        return value
    return _UNKNOWN if sizes is None else value.number(*sizes)


def _updates(value: Any, steps: Any, updates: int | None) -> Any:
    if not isinstance(value, WarmUp):
        return value
    return value.number(steps, updates) if _is_count(steps) and updates is not None else _UNKNOWN


def _by_role(trainer: PeerTrainer) -> dict[str, dict[str, Any]]:
    """Return the preset's settings of optimizers by role."""
    found: dict[str, dict[str, Any]] = {}
    for cell in trainer.cells:
        if cell.key.startswith("models."):
            _, role, _, name = cell.key.split(".")
            found.setdefault(role, {})[name] = cell.value
    return found


def trained_roles(like: str, algorithm: str) -> tuple[str, ...]:
    """Return the roles whose optimizers a preset sets."""
    return tuple(_by_role(trainer_of(like, algorithm)))
