"""Compare the search for placements with Metropolis-Hastings on the same tables, for PPO in the space of ReaL.

``python -m benchmarks.placement_search``. Six parts, one for each model call (ReaL: Mei et al., MLSys 2025): generate,
reward, ref and critic inference, actor and critic training; weights are sent from a trained part to the one that uses
them. Options of a mesh: all dp * tp * pp that equal its size, micro-batches in powers of two, ZeRO 1 and 3 for
training. ``--space shadows`` and ``--space ratios``: a part for each placed model of the placement ratios instead.
"""

from __future__ import annotations

import argparse
import math
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from time import perf_counter

from benchmarks.fast_walk import overlaps_of, play
from flexrlhf.config.axes import ParallelDims
from flexrlhf.guideline.costs.analytic import AnalyticCosts
from flexrlhf.guideline.costs.cost_model import Call, Links, Mesh, Traffic, Transformer
from flexrlhf.guideline.costs.relations import Relation, mesh_relation
from flexrlhf.guideline.search.branch_and_bound import search
from flexrlhf.guideline.search.link_table import LinkTable
from flexrlhf.guideline.search.part_table import PartTable
from flexrlhf.guideline.search.problem import (
    DevicePool,
    LinkEnd,
    LinkSeconds,
    MeshShape,
    Option,
    SearchPart,
    SearchProblem,
    SearchSync,
    SearchTask,
)
from flexrlhf.guideline.search.result import SearchResult
from flexrlhf.guideline.search.tables import Tables, tables_of
from flexrlhf.operators.graph import CallKind
from flexrlhf.placement.devices import DeviceClass

DEVICE = DeviceClass.KNOWN["A100-80G"]
LINKS = Links(DEVICE.link_gb_s, DEVICE.node_gb_s)
PER_NODE, PROMPT, RESPONSE = 8, 1024, 1024
USABLE = 0.9
"""Fraction of a device's memory that a plan may use."""
MODELS = {
    "7b": Transformer(32, 4096, 11008, 32, 32, 128, 32000),
    "70b": Transformer(80, 8192, 28672, 64, 8, 128, 32000),
}
Layout = tuple[int, int, int]
"""(dp, tp, pp)."""


@dataclass(frozen=True)
class Settings:
    layout: Layout
    micro_batches: int
    zero: int = 0


@dataclass(frozen=True)
class Model:
    """A model to place. ``kinds``: its calls. ``rows``: rows of a step."""

    shape: Transformer
    kinds: tuple[CallKind, ...]
    rows: int

    @property
    def is_trained(self) -> bool:
        return "train" in self.kinds

    def options(self, shape: MeshShape) -> list[Option]:
        return [self._option(shape, settings) for settings in self._settings(shape.size)]

    def _settings(self, size: int) -> Iterator[Settings]:
        for layout in layouts(size, self.shape.layers, self.rows):
            for micro_batches in powers(-(-self.rows // layout[0])):
                for zero in (1, 3) if self.is_trained else (0,):
                    yield Settings(layout, micro_batches, zero)

    def _option(self, shape: MeshShape, settings: Settings) -> Option:
        resting = resting_bytes(self, settings)
        active = max(active_bytes(kind, self, settings) for kind in self.kinds)
        seconds = tuple(self._seconds(kind, shape, settings) for kind in self.kinds)
        return Option(seconds, resting, active, settings.layout, settings)

    def _seconds(self, kind: CallKind, shape: MeshShape, settings: Settings) -> float:
        dp, tp, pp = settings.layout
        rows = -(-self.rows // dp)
        micro = -(-rows // settings.micro_batches)
        engine = "vllm" if kind == "generate" else "megatron"
        width = PROMPT + RESPONSE
        call = Call(kind, self.shape, engine, rows, PROMPT, (RESPONSE,), width, micro_rows=micro, decode_rows=micro)
        mesh = Mesh(DEVICE, LINKS, dp, ParallelDims(tp, pp), shape.per_node, settings.zero)
        return AnalyticCosts().call(call, mesh).seconds


def powers(limit: int) -> Iterator[int]:
    """Powers of two up to ``limit``."""
    value = 1
    while value <= limit:
        yield value
        value *= 2


def layouts(size: int, layers: int, rows: int) -> Iterator[Layout]:
    """Layouts of ``size`` devices: tensor-parallel groups stay in a node, a replica has at least one row."""
    for tp in powers(min(PER_NODE, size)):
        for pp in (pp for pp in range(1, layers + 1) if size % (tp * pp) == 0 and layers % pp == 0):
            if size // (tp * pp) <= rows:
                yield size // (tp * pp), tp, pp


def resting_bytes(model: Model, settings: Settings) -> float:
    """Bytes of a device all the time: 18 of a trained parameter, of which ZeRO 1 shards 14 over the data-parallel group
    and ZeRO 3 all; 2 of another."""
    dp, tp, pp = settings.layout
    shard = model.shape.parameters / (tp * pp)
    if not model.is_trained:
        return 2 * shard
    return 18 * shard / dp if settings.zero == 3 else 4 * shard + 14 * shard / dp


def active_bytes(kind: CallKind, model: Model, settings: Settings) -> float:
    """Bytes of a call in addition: keys and values; activations at the borders of layers and inside one; logits in
    32 bits; gathered weights."""
    dp, tp, pp = settings.layout
    shape, tokens = model.shape, -(-model.rows // (dp * settings.micro_batches)) * (PROMPT + RESPONSE)
    logits = 4 * tokens * shape.head_parameters / shape.hidden / tp
    if kind == "generate":
        return 2 * shape.parameters / (tp * pp) * (settings.zero == 3) + shape.kv_bytes() / (tp * pp) * tokens
    gathered = 4 * shape.layer_parameters / tp if settings.zero == 3 else 0
    borders = 2 * tokens * shape.hidden * shape.layers / pp if kind == "train" else 0
    return gathered + borders + (34 if kind == "train" else 8) * tokens * shape.hidden / tp + logits


def sync_seconds(model: Transformer) -> LinkSeconds:
    """Time of a sync in seconds: every device of the destination receives its shard once, unless both meshes and
    layouts are equal."""

    @cache
    def seconds(source: LinkEnd, to: LinkEnd, relation: Relation) -> float:
        if source == to and relation == "same":
            return 0.0
        assert isinstance(to.layout, tuple)
        _, tp, pp = to.layout
        size = model.parameters * 2
        shard = size // (tp * pp)
        if relation == "same" and not to.shape.spans_nodes:
            traffic = Traffic(shard, 0, 2)
        else:
            senders = -(-source.shape.size // PER_NODE)
            receivers = -(-to.shape.size // PER_NODE)
            traffic = Traffic(shard, max(size * receivers // senders // 8, shard * to.shape.per_node), 4)
        return AnalyticCosts().sync(traffic, Traffic(0, 0), model.layers * 9 // pp, LINKS).seconds

    return seconds


def rows_of(num_devices: int) -> int:
    """Number of prompts of a step: 512, in large clusters one for each device."""
    return max(512, num_devices)


def pool_of(num_devices: int) -> DevicePool:
    return DevicePool.of(num_devices, PER_NODE, USABLE * DEVICE.memory_gb * 1e9)


def by_calls(num_devices: int, actor: str, critic: str) -> SearchProblem:
    """PPO in the space of ReaL: a part for each call."""
    large, small, rows = MODELS[actor], MODELS[critic].as_scorer(), rows_of(num_devices)
    kinds: dict[str, tuple[Transformer, CallKind]] = {
        "generate": (large, "generate"),
        "reward": (small, "forward"),
        "ref": (large, "forward"),
        "values": (small, "forward"),
        "train actor": (large, "train"),
        "train critic": (small, "train"),
    }
    parts = tuple(SearchPart(name, Model(model, (kind,), rows).options) for name, (model, kind) in kinds.items())
    scored = ("scores", "ref_logprobs", "values")
    calls = (
        SearchTask("generate", "generate"),
        SearchTask("scores", "reward", ("generate",)),
        SearchTask("ref_logprobs", "ref", ("generate",)),
        SearchTask("values", "values", ("generate",)),
        SearchTask("train_actor", "train actor", scored),
        SearchTask("train_critic", "train critic", scored),
        SearchSync("train_actor", "generate", sync_seconds(large)),
        SearchSync("train_critic", "values", sync_seconds(small)),
    )
    return SearchProblem(pool_of(num_devices), parts, calls)


def by_ratios(num_devices: int, actor: str, critic: str) -> SearchProblem:
    """PPO in the space of four placement ratios: all calls of a role on one mesh."""
    large, small, rows = MODELS[actor], MODELS[critic].as_scorer(), rows_of(num_devices)
    parts = (
        SearchPart("actor", Model(large, ("generate", "forward", "train"), rows).options),
        SearchPart("critic", Model(small, ("forward", "train"), rows).options),
        SearchPart("ref", Model(large, ("forward",), rows).options),
        SearchPart("reward", Model(small, ("forward",), rows).options),
    )
    return SearchProblem(pool_of(num_devices), parts, _ppo_calls("actor", "critic", 0))


def by_shadows(num_devices: int, actor: str, critic: str) -> SearchProblem:
    """PPO in the space of six: shadows generate and infer while training is one step behind."""
    large, small, rows = MODELS[actor], MODELS[critic].as_scorer(), rows_of(num_devices)
    parts = (
        SearchPart("actor.shadow", Model(large, ("generate", "forward"), rows).options),
        SearchPart("critic.shadow", Model(small, ("forward",), rows).options),
        SearchPart("actor", Model(large, ("train",), rows).options),
        SearchPart("critic", Model(small, ("train",), rows).options),
        SearchPart("ref", Model(large, ("forward",), rows).options),
        SearchPart("reward", Model(small, ("forward",), rows).options),
    )
    syncs = (
        SearchSync("train_actor", "actor.shadow", sync_seconds(large)),
        SearchSync("train_critic", "critic.shadow", sync_seconds(small)),
    )
    return SearchProblem(pool_of(num_devices), parts, (*_ppo_calls("actor.shadow", "critic.shadow", 1), *syncs))


def _ppo_calls(generates: str, values: str, lag: int) -> tuple[SearchTask, ...]:
    scored = ("logprobs", "ref_logprobs", "scores", "values")
    return (
        SearchTask("generate", generates),
        SearchTask("logprobs", generates, ("generate",)),
        SearchTask("ref_logprobs", "ref", ("generate",)),
        SearchTask("scores", "reward", ("generate",)),
        SearchTask("values", values, ("generate",)),
        SearchTask("train_actor", "actor", scored, lag),
        SearchTask("train_critic", "critic", scored, lag),
    )


SPACES = {"calls": by_calls, "ratios": by_ratios, "shadows": by_shadows}


def describe(result: SearchResult) -> str:
    lines = [
        f"  space {result.space:.2e} plans ({result.meshes})",
        f"  evaluated {result.evaluated}, pruned by memory {result.pruned_by_memory}, "
        f"by bound {result.pruned_by_bound}",
        f"  {result.seconds:.4f} s, proven at least {result.bound:.4f} s, gap {result.gap:.3%}, "
        f"{result.wall_seconds:.2f} s of search",
    ]
    for choice in result.assignment:
        lines.append(f"    {choice.part:13s} {choice.start}+{choice.size} {choice.option.settings}")
    for rejected in result.rejected[-2:]:
        lines.append(f"  rejected {rejected.seconds:.4f} s: {rejected.reason}")
    return "\n".join(lines)


Spot = tuple[int, int]
"""A part's start and its option's position."""


@dataclass
class Metropolis:
    """Random walk of ReaL: change one part's option, accept by exp(-beta (new - old)).

    Times of calls and links are looked up, as in the search.

    tables:  the problem.
    seed:    seed of the random generator.
    alpha:   factor on the time of assignments that do not fit.
    beta:    inverse temperature, for times relative to the first assignment.
    """

    tables: Tables
    seed: int = 0
    alpha: float = 3.0
    beta: float = 100.0

    def __post_init__(self) -> None:
        parts = self.tables.parts
        self.sizes = [part.size.tolist() for part in parts]
        self.call_seconds = [part.seconds.tolist() for part in parts]
        self.memory = [list(zip(part.resting.tolist(), part.active.tolist(), strict=True)) for part in parts]
        self.ends = [part.end.tolist() for part in parts]
        self.meshes = [self._meshes(part) for part in parts]

    def run(self, seconds_limit: float) -> tuple[float, int]:
        """Best seconds, and the number of assignments that were timed."""
        rng, ended, tried = random.Random(self.seed), perf_counter() + seconds_limit, 1
        plan = [self._greedy(part) for part in range(len(self.meshes))]
        begun = cost = self._seconds(plan) * (1 if self._fits(plan) else self.alpha)
        best = cost if self._fits(plan) else math.inf
        while perf_counter() < ended:
            new, tried = self._changed(plan, rng), tried + 1
            value = self._seconds(new)
            if self._fits(new):
                best = min(best, value)
            else:
                value *= self.alpha
            if value <= cost or rng.random() < math.exp(-self.beta * (value - cost) / begun):
                plan, cost = new, value
        return best, tried

    def _changed(self, plan: Sequence[Spot], rng: random.Random) -> list[Spot]:
        part = rng.randrange(len(plan))
        start, shape = rng.choice(self.meshes[part])
        options = self.tables.parts[part].options_of(shape)
        return [*plan[:part], (start, rng.randrange(options.start, options.stop)), *plan[part + 1 :]]

    def _meshes(self, part: PartTable) -> list[tuple[int, int]]:
        """(start, shape) of meshes on which the part has options."""
        has_options = [part.first[shape] < part.first[shape + 1] for shape in range(len(self.tables.shapes))]
        return [(start, shape) for (start, _), shape in self.tables.shape_at.items() if has_options[shape]]

    def _greedy(self, part: int) -> Spot:
        """Fastest spot of the part by itself."""
        table = self.tables.parts[part]
        option = int(table.seconds.sum(axis=1).argmin())
        return next(start for start, shape in self.meshes[part] if shape == table.shape[option]), option

    def _spans(self, plan: Sequence[Spot]) -> list[tuple[int, int]]:
        return [(start, start + self.sizes[part][option]) for part, (start, option) in enumerate(plan)]

    def _seconds(self, plan: Sequence[Spot]) -> float:
        graph, spans = self.tables.graph, self._spans(plan)
        links = [self._link(table, plan, spans) for table in self.tables.links]
        seconds = [
            self.call_seconds[parts[0]][plan[parts[0]][1]][column] if column >= 0 else 0.0
            for parts, column in zip(graph.parts, graph.column, strict=True)
        ]
        for table, taken in zip(self.tables.links, links, strict=True):
            if table.link.call >= 0:
                seconds[table.link.call] = taken
        return play(graph, seconds, links, overlaps_of(spans))

    def _link(self, table: LinkTable, plan: Sequence[Spot], spans: Sequence[tuple[int, int]]) -> float:
        a, b = table.link.source, table.link.to
        (start, end), (other, other_end) = spans[a], spans[b]
        relation = mesh_relation(start, end - start, other, other_end - other)
        source, to = self.ends[a][plan[a][1]], self.ends[b][plan[b][1]]
        return table.link.seconds(table.source.ends[source], table.to.ends[to], relation)

    def _fits(self, plan: Sequence[Spot]) -> bool:
        spans = self._spans(plan)
        for point, _ in spans:
            needs = [self.memory[p][plan[p][1]] for p, (start, end) in enumerate(spans) if start <= point < end]
            used = sum(resting for resting, _ in needs) + max(active for _, active in needs)
            if used > self.tables.memory_of(point):
                return False
        return True


def arguments_of() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--devices", type=int, nargs="*", default=[8, 64, 1024, 16384])
    parser.add_argument("--space", choices=SPACES, default="calls")
    parser.add_argument("--actor", choices=MODELS, help="default: 7b on a node, else 70b")
    parser.add_argument("--critic", choices=MODELS, default="7b")
    parser.add_argument("--gap", type=float, help="default: 0 on a node, else 0.01")
    parser.add_argument("--limit", type=float, default=60.0, help="search time in seconds")
    parser.add_argument("--metropolis", type=float, default=10.0, help="seconds for Metropolis-Hastings; 0: none")
    return parser.parse_args()


def main() -> None:
    arguments = arguments_of()
    for devices in arguments.devices:
        actor = arguments.actor or ("7b" if devices <= PER_NODE else "70b")
        gap = arguments.gap if arguments.gap is not None else 0.0 if devices <= PER_NODE else 0.01
        print(f"{devices} devices, actor {actor}, critic {arguments.critic}")
        began = perf_counter()
        problem = SPACES[arguments.space](devices, actor, arguments.critic)
        tables = tables_of(problem)
        stated, kept = [sum(part.num_stated) for part in tables.parts], [len(part.options) for part in tables.parts]
        print(f"  tables in {perf_counter() - began:.2f} s; options by shape: stated {stated}, kept {kept}")
        print(describe(search(problem, arguments.limit, gap)), flush=True)
        if arguments.metropolis:
            best, tried = Metropolis(tables).run(arguments.metropolis)
            print(f"  Metropolis-Hastings: {best:.4f} s after {arguments.metropolis:.0f} s, {tried} plans", flush=True)


if __name__ == "__main__":
    main()
