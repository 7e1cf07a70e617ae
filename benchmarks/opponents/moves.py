"""Changes of a YAML that a user could type: placements, settings of models, rollouts and schedule; single or random."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass
from functools import cached_property
from random import Random
from typing import Any

from flexrlhf.config.engines import EngineFacts
from flexrlhf.config.model_settings import ModelSpec
from flexrlhf.config.spec import RolloutSpec, ScheduleSpec, Spec, SyncSpec
from flexrlhf.operators.graph import Graph
from flexrlhf.placement.devices import DeviceClass
from flexrlhf.plan.algorithm_graph import make_graph
from flexrlhf.plan.pipeline import make_plan

Raw = dict[str, Any]
Change = Mapping[str, Any]
"""Path → its value; None: the setting is left out."""
WHOLE = ("placement", "cluster", "init", "algorithm", "data", "parity")
"""Sections that change as a whole."""
DEFAULTS = {"models": ModelSpec(), "rollout": RolloutSpec(), "schedule": ScheduleSpec(), "sync": SyncSpec()}
POWERS = (1, 2, 4, 8, 16, 32)
TOKENS = (4096, 8192, 16384, 32768, 65536)
EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts")


def with_values(raw: Raw, change: Change) -> Raw:
    changed = deepcopy(raw)
    for path, value in change.items():
        *above, last = path.split(".")
        section = changed
        for key in above:
            section = section.setdefault(key, {})
        if value is None:
            section.pop(last, None)
        else:
            section[last] = value
    return changed


def changed_paths(old: Raw, new: Raw) -> dict[str, Any]:
    """Return the values of ``new`` that differ; None for one that ``old`` alone has."""
    before, after = dict(_leaves(old)), dict(_leaves(new))
    return {path: after.get(path) for path in {**before, **after} if before.get(path) != after.get(path)}


def shown(changes: Change) -> str:
    """Return changes as one text: a setting of several models once."""
    having: dict[tuple[str, str], list[str]] = {}
    for path, value in changes.items():
        section, _, key = path.rpartition(".")
        having.setdefault((key, str(value)), []).append(section.removeprefix("models."))
    return "; ".join(
        f"{'+'.join(filter(None, own))}{'.' * any(own)}{key}={value}" for (key, value), own in having.items()
    )


def _leaves(raw: Raw, above: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in raw.items():
        if isinstance(value, dict) and key not in WHOLE:
            yield from _leaves(value, f"{above}{key}.")
        else:
            yield f"{above}{key}", value


@dataclass(frozen=True)
class Moves:
    """Changes of YAMLs of one request.

    rng:    of all random choices.
    start:  the recommended YAML.
    spec:   the request.
    lag:    the largest lag that is allowed.
    """

    rng: Random
    start: Raw
    spec: Spec
    lag: int = 0

    @cached_property
    def graph(self) -> Graph:
        return make_graph(Spec.parse(deepcopy(self.start)))

    @property
    def total(self) -> int:
        return self.spec.cluster.num_devices

    @property
    def node(self) -> int:
        return self.spec.cluster.nodes[0].devices

    def singles(self, raw: Raw) -> list[Change]:
        """Return all single changes in a random order."""
        found = [*self._settings(raw), *self._placements(raw)]
        self.rng.shuffle(found)
        return found

    def random_change(self, start: Raw) -> Raw:
        """Return ``start`` with up to six settings and, more often than not, a placement sampled at random."""
        raw, is_moved = start, self.total > 1 and self.rng.random() < 0.6
        if is_moved:
            raw = with_values(raw, {"schedule.lag": None, "rollout.kv_tokens": None, **self.placement()})
        for _ in range(self.rng.randint(not is_moved, 6)):
            raw = with_values(raw, self.rng.choice(list(self._settings(raw))))
        return raw

    def placement(self) -> Change:
        """Sample a vector, with shadows or without, or ranks."""
        roles, total, chance = self.graph.roles, self.total, self.rng.random()
        if chance < 0.35:
            return {"placement": [self._ratio(self._count()) for _ in roles]}
        if chance < 0.6:
            side = self.rng.randint(1, total - 1) if self.rng.random() < 0.6 else total // 2
            trained = self.rng.choice((side, total))
            return {
                "placement": [self._ratio(trained if role in self.graph.trained else total - side) for role in roles]
            }
        if chance < 0.8 and self.graph.can_shadow:
            return self._with_shadows(self.rng.choice((self.rng.randint(1, total - 1), total // 2)))
        sizes = {role: self._count() for role in roles}
        step = self.rng.choice((1, min(self.node, total)))
        starts = {role: self.rng.randrange(0, total - size + 1, step) for role, size in sizes.items()}
        return {"placement": {role: _ranks(starts[role], size) for role, size in sizes.items()}}

    def _with_shadows(self, side: int) -> Change:
        """Return the placement with ``side`` devices for training, and the lag that it may have."""
        sizes = [self.total - side for _ in self.graph.trained]
        sizes += [side if role in self.graph.trained else self.total - side for role in self.graph.roles]
        return {"placement": list(map(self._ratio, sizes)), "schedule.lag": self.lag or None}

    def _ratio(self, count: int) -> Any:
        return 1 if count == self.total else f"{count}/{self.total}"

    def _count(self) -> int:
        total = self.total
        nodes = self.node * self.rng.randint(1, max(1, total // self.node))
        return max(1, self.rng.choice((total, total, total // 2, self.rng.randint(1, total), min(total, nodes))))

    def _placements(self, raw: Raw) -> Iterator[Change]:
        """Yield placements in which one model, or a side, has other ranks."""
        if self.total == 1:
            return
        ranks = _placed(raw)
        for name, mine in ranks.items():
            first, size = mine[0], len(mine)
            step = self.node if self.total > self.node else 2
            sizes = (size - 1, size + 1, size - step, size + step, size // 2, 2 * size, self.total)
            meshes = {(first, new) for new in sizes} | {(first + size - new, new) for new in sizes}
            meshes |= {(0, size), (self.total - size, size), (first - 1, size), (first + 1, size)}
            meshes |= {(other[0], len(other)) for other in ranks.values()} - {(first, size)}
            for start, new in sorted(meshes):
                if start >= 0 and new > 0 and start + new <= self.total:
                    yield {
                        "placement": {n: _ranks(start, new) if n == name else {"ranks": [*r]} for n, r in ranks.items()}
                    }
        for side in {self.total // 2, self.total // 4, 3 * self.total // 4} - {0}:
            trained = self.graph.trained
            yield {
                "placement": {
                    r: _ranks(0, side) if r in trained else _ranks(side, self.total - side) for r in self.graph.roles
                },
                "schedule.lag": None,
            }
        yield {"placement": [1] * len(self.graph.roles), "schedule.lag": None}
        if self.graph.can_shadow:
            yield self._with_shadows(self.total // 2)

    def _settings(self, raw: Raw) -> Iterator[Change]:
        roles = [role for role in raw["models"] if role != "all"]
        shared: dict[tuple[str, Any], list[str]] = {}
        for role in roles:
            for key, values in self._of_model(raw, role):
                for value in values:
                    if value != _value(raw, f"models.{role}.{key}"):
                        yield {f"models.{role}.{key}": value}
                        shared.setdefault((key, value), []).append(role)
        for (key, value), having in shared.items():
            if len(having) > 1:
                yield {f"models.{role}.{key}": value for role in having}
        for path, values in self._others(raw):
            yield from ({path: value} for value in values if value != _value(raw, path))

    def _of_model(self, raw: Raw, role: str) -> Iterator[tuple[str, Sequence[Any]]]:
        model = raw["models"][role]
        facts = EngineFacts.of(model.get("engine", "torch"))
        yield "zero", facts.zero
        yield "tp", POWERS[:4]
        if "pp" in facts.axes:
            yield "pp", POWERS[:5]
        if "cp" in facts.axes:
            yield "cp", POWERS[:4]
        if "ep" in facts.axes and any(key in model.get("init", {}) for key in EXPERTS):
            yield "ep", POWERS
        if facts.node:
            yield "shard", ("all", "node")
        tokens, row = _value(raw, f"models.{role}.micro_batch_tokens"), self.row
        yield "micro_batch_tokens", (2 * tokens, max(1, tokens // 2), tokens * 3 // 2, row, 2 * row, 3 * row, *TOKENS)
        if facts.transformers_modules:
            yield "tiled_mlp", (True, False)
        if role in self.graph.trained:
            yield "activation_checkpointing", (True, False)
            yield "offload_activations", (True, False)
        if facts.offload:
            yield from (("offload_optimizer", (True, False)), ("offload_parameters", (True, False)))
        if role == self.graph.generated and raw.get("rollout", {}).get("engine") == "transformers":
            decoded = _value(raw, f"models.{role}.generate_tokens")
            yield "generate_tokens", (2 * decoded, decoded // 2, decoded * 3 // 2)
        if "shadow" in model:
            yield from (("shadow.zero", facts.zero), ("shadow.tp", POWERS[:4]), ("shadow.micro_batch_tokens", TOKENS))

    @property
    def row(self) -> int:
        return self.spec.data.max_prompt_tokens + self.spec.data.max_response_tokens

    def _others(self, raw: Raw) -> Iterator[tuple[str, Sequence[Any]]]:
        if self.graph.generated is not None:
            yield "schedule.num_chunks", POWERS[:4]
            yield "sync.overlap", ("auto", True, False)
        rollout = raw.get("rollout", {})
        if rollout.get("engine", "transformers") != "transformers":
            yield from (("rollout.tp", POWERS), ("rollout.pp", POWERS[:4]), ("rollout.sleep", (True, False)))
            tokens = rollout.get("kv_tokens")
            sizes = () if tokens is None else (2 * tokens, tokens // 2, tokens * 5 // 4, tokens * 4 // 5, None)
            yield "rollout.kv_tokens", sizes or (8 * self.row, 32 * self.row, 128 * self.row)
        yield "cluster", (self.spec.written(short=True)["cluster"],)


def _ranks(start: int, size: int) -> Raw:
    return {"ranks": [*range(start, start + size)]}


def _value(raw: Raw, path: str) -> Any:
    """Return the value at a path, else its default."""
    section: Any = raw
    keys = path.split(".")
    for key in keys:
        section = section.get(key) if isinstance(section, dict) else None
    known = DEFAULTS.get(keys[0])
    return getattr(known, keys[-1], None) if section is None and len(keys) < 5 and "shadow" not in keys else section


def _placed(raw: Raw) -> dict[str, tuple[int, ...]]:
    """Return the ranks of each model that a placement names."""
    models = make_plan(Spec.parse(deepcopy(raw))).placement.models
    own = {model.name: model.ranks for model in models if not model.follows}
    apart = {m.name: m.ranks for m in models if m.follows and not set(m.ranks) & set(own.get(m.role, ()))}
    return {str(name): ranks for name, ranks in {**apart, **own}.items()}


def broad(moves: Moves, start: Raw, rollout: str | None, is_open: bool) -> Raw:
    """Sample lean settings for all models. ``rollout``: engine of generation, if another one than in ``start``.
    ``is_open``: whether trained models may have another engine."""
    rng, change = moves.rng, {}
    degrees = {key: rng.choice(POWERS[:4]) for key in ("tp", "cp")}
    if rng.random() < 0.5:
        degrees["cp"] = 1
    switches = {key: rng.random() < 0.6 for key in ("tiled_mlp", "offload_activations", "offload_parameters")}
    is_offloading = is_open and rng.random() < 0.4
    for role, model in ((role, model) for role, model in start["models"].items() if role != "all"):
        engine = (
            EngineFacts.offloading_engine()
            if is_offloading and role in moves.graph.trained
            else model.get("engine", "torch")
        )
        facts = EngineFacts.of(engine)
        own: Raw = {"zero": rng.choice((3, 3, 2)) if 3 in facts.zero else max(facts.zero), "tp": degrees["tp"]}
        own |= {"micro_batch_tokens": rng.choice((1, 2)) * moves.row, "engine": engine}
        own |= {"cp": degrees["cp"]} if "cp" in facts.axes else {}
        own |= {"tiled_mlp": switches["tiled_mlp"]} if facts.transformers_modules else {}
        own |= {"pp": rng.choice(POWERS[:4])} if "pp" in facts.axes else {}
        if facts.offload:
            own |= {"offload_optimizer": True, "offload_parameters": switches["offload_parameters"]}
        if role in moves.graph.trained:
            own |= {"activation_checkpointing": True, "offload_activations": switches["offload_activations"]}
        change |= {f"models.{role}.{key}": value for key, value in own.items()}
    if not all(DeviceClass.KNOWN[node.device_class].bf16 for node in moves.spec.cluster.nodes):
        change |= {f"models.{role}.dtype": "float16" for role in start["models"] if role != "all"}
    if rollout is not None:
        change |= {"rollout": {"engine": rollout}, f"models.{moves.graph.generated}.generate_tokens": 4 * moves.row}
    elif start.get("rollout", {}).get("engine") == "vllm":
        change |= {"rollout.tp": rng.choice(POWERS), "rollout.pp": rng.choice(POWERS[:4])}
    is_sampled = moves.total > 1 and rng.random() < 0.3
    change |= moves.placement() if is_sampled else {"placement": [1] * len(moves.graph.roles)}
    return with_values(start, change)
