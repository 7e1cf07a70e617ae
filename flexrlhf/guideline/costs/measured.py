"""The measured cost model: times of ``flexrlhf profile`` on this machine, scaled to shapes that it has not measured.

A call costs a fixed part, which grows with the layers (each is launched) and with the weights that are read, and a part
that grows with the rows, in proportion to the floating-point operations of a token. Rows of passes are those that would
have as many computed tokens as are computed, whether sequences are packed or not. What crosses between nodes takes as
long as on this machine, or longer by the network: as measured, else the cluster's ``network_gb_s``, taken as reached.
Whatever was not measured (pipeline stages, other tensor-parallel sizes) comes from the analytic model.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise
from pathlib import Path

from flexrlhf.config.engines import facts_of
from flexrlhf.guideline.costs.analytic import AnalyticCosts
from flexrlhf.guideline.costs.cost_model import Call, Cost, Links, Mesh, Traffic, Transformer
from flexrlhf.guideline.costs.environment_times import EnvironmentTimes
from flexrlhf.guideline.costs.links import AS_GIVEN, WITHIN
from flexrlhf.guideline.costs.measurements import LinearTime, Measurements, ModelTimes, Point, read_measurements
from flexrlhf.guideline.costs.training import replica_sum_seconds
from flexrlhf.placement.devices import DeviceClass
from flexrlhf.placement.routes import Primitive

WORTHWHILE = 0.25
"""Share of ended rows from which on decoding drops them (engines/decoding.py)."""
LAUNCHED = 0.5
"""Share of the time of a call without rows that is launching, at least."""
OPTIMIZER_BYTES = 44
"""Bytes read and written for a trained parameter in an optimizer step: sum, clip, AdamW in float32."""


def load_costs(path: Path | str, ranks: int | None = None) -> MeasuredCosts:
    """Return the costs of a run with ``ranks`` on the measured machine; None: as many as were measured."""
    measured = read_measurements(path)
    return MeasuredCosts(measured, slowdown(measured, ranks or measured.machine.ranks))


def slowdown(measured: Measurements, ranks: int) -> float:
    """Return how much longer calls take with ``ranks`` at work than with as many as in the profile."""
    busy, cores = measured.machine.ranks, measured.machine.cores
    contention = measured.contention
    if ranks in contention and busy in contention:
        return contention[ranks] / contention[busy]
    # beyond what was measured: the cores are shared
    return max(1.0, ranks / cores) / max(1.0, busy / cores)


@dataclass(frozen=True)
class Curve:
    """Seconds by rows: straight between measured points, and beyond them the line through the last two.

    points:  of one kind of call.
    width:   computed tokens that count as a row; None: rows are as measured.
    """

    points: tuple[Point, ...]
    width: int | None = None

    def seconds(self, rows: float) -> float:
        known = _rising(self.points, self.width)
        if len(known) == 1:
            return known[0][1] * max(1.0, rows / known[0][0])
        (x0, y0), (x1, y1) = next((pair for pair in pairwise(known) if rows <= pair[1][0]), (known[-2], known[-1]))
        line = y0 + (y1 - y0) * (rows - x0) / (x1 - x0)
        # fewer rows never take longer for each than in proportion: the fixed part is not negative
        return max(line, y0 * min(1.0, rows / x0))

    @property
    def fixed(self) -> float:
        """Time of a call with next to no rows."""
        return min(self.seconds(0), self.points[0].seconds)


def _rising(points: Sequence[Point], width: int | None) -> list[tuple[float, float]]:
    """Return (rows of ``width`` tokens, seconds) that never decrease: noise may make a call of more rows the shorter
    one.
    """
    ordered = sorted(points, key=lambda point: point.rows)
    rows = [point.rows if point.tokens is None or width is None else point.tokens / width for point in ordered]
    return list(zip(rows, accumulate((point.seconds for point in ordered), max), strict=True))


@dataclass(frozen=True)
class ShapeRatio:
    """A model relative to the measured one.

    layers:      layers of a stage
    flops:       operations of a token on one rank
    more_bytes:  additional bytes of weights on each rank (a difference, not a ratio)
    """

    layers: float
    flops: float
    more_bytes: float

    def seconds(self, curve: Curve, rows: float, bytes_s: float, item_bytes: float = 1.0) -> float:
        """Return the time of a call on ``rows``. ``item_bytes``: bytes moved for each byte of weights."""
        grown = (curve.seconds(rows) - curve.fixed) * self.flops
        launched = curve.fixed * self.layers
        # most of the fixed part of a small model is launching; its weights were read from caches
        return grown + max(LAUNCHED * launched, launched + self.more_bytes * item_bytes / bytes_s)


def token_flops(model: Transformer, width: float) -> float:
    """Return the floating-point operations of one token in a forward pass over ``width`` tokens."""
    attention = 2 * model.layers * model.heads * model.head_dim * width
    return 2 * (model.layers * model.layer_parameters + model.head_parameters) + attention


def shrinking_batch(rows: float, responses: Sequence[float]) -> Iterator[tuple[float, float]]:
    """Yield (decoding steps, rows decoded in each) as responses end and their rows are dropped; ``responses``: a
    sample."""
    ordered, kept, done = sorted(responses), rows, 0.0
    for index, length in enumerate(ordered):
        left = rows * (len(ordered) - index) / len(ordered)
        if left < 0.5:
            return
        if left <= (1 - WORTHWHILE) * kept:
            kept = left
        if length > done:
            yield length - done, kept
            done = length


@dataclass(frozen=True)
class MeasuredCosts:
    """CostModel of one machine. ``slowdown``: how much longer its calls take than measured.

    Calls on a slower class take longer by its ``relative_speed``.
    """

    measured: Measurements
    slowdown: float = 1.0

    def call(self, call: Call, mesh: Mesh) -> Cost:
        times = self._nearest(call, mesh)
        if times is None:
            return AnalyticCosts().call(call, mesh)
        seconds_of = {"generate": self._generate, "forward": self._forward, "train": self._train}[call.kind]
        parts = seconds_of(call, mesh, times)
        longer = self.slowdown / mesh.device.relative_speed
        scaled = {name: seconds * longer for name, seconds in parts.items()}
        around = self.measured.bookkeeping if call.kind == "forward" else self.measured.statistics
        return Cost(scaled | self._parallel(call, mesh, times) | {"bookkeeping": around})

    def combine(self, rows: int, width: float) -> Cost:
        if not self.measured.combine:
            return AnalyticCosts().combine(rows, width)
        compute = Curve(self.measured.combine).seconds(rows) * self.slowdown
        return Cost({"compute": compute, "bookkeeping": self.measured.statistics})

    def move(self, primitive: Primitive, traffic: Traffic, links: Links) -> Cost:
        if primitive == "none":
            return Cost()
        line, here = self.measured.moves.get(primitive), Traffic(traffic.total, 0, traffic.messages)
        seconds = AnalyticCosts().move(primitive, here, links).seconds
        if line is not None:
            seconds = line.seconds(here.total, here.messages)
        return Cost({primitive: max(seconds, self._network(traffic, links))})

    def sync(self, traffic: Traffic, gathered: Traffic, num_tensors: int, links: Links) -> Cost:
        line, here = self.measured.sync, Traffic(traffic.total, 0, traffic.messages)
        if line is None:
            parts = AnalyticCosts().sync(here, gathered, num_tensors, links).parts
            return Cost({**parts, "send": max(parts["send"], self._network(traffic, links))})
        reduce = self.measured.reduce
        gather = reduce.seconds(gathered.within) if gathered.within and reduce else 0.0
        send = max(line.seconds(traffic.total, num_tensors), self._network(traffic, links))
        return Cost({"gather": gather, "send": send})

    def _network(self, traffic: Traffic, links: Links) -> float:
        """Return the time of the bytes that cross between nodes."""
        return AS_GIVEN.message(traffic.across, self.measured.network_gb_s or links.node_gb_s)

    def switch(self, size: int, device: DeviceClass) -> Cost:
        return Cost({"host": self.measured.switch.seconds(size)})

    def save(self, size: int) -> Cost:
        return Cost({"write": self.measured.save.seconds(size)})

    def environment(self, name: str) -> EnvironmentTimes | None:
        return next((times for times in self.measured.environments if times.name == name), None)

    def _nearest(self, call: Call, mesh: Mesh) -> ModelTimes | None:
        """Return the measured model most like that of ``call``, with such calls in its engine."""
        candidates = [times for times in self.measured.models if _has_times(times, call)]

        def distance(times: ModelTimes) -> tuple[bool, bool, float, bool]:
            size = math.log(call.model.parameters / times.model.parameters)
            return times.model.head != call.model.head, times.tp != mesh.tp, abs(size), times.item != call.item

        return min(candidates, key=distance, default=None)

    def _ratio(self, call: Call, mesh: Mesh, times: ModelTimes) -> ShapeRatio:
        here, there = mesh.tp * mesh.pp, times.tp
        width = times.width if call.kind == "generate" or times.row is None else times.row
        flops = token_flops(call.model, call.row_width) / token_flops(times.model, width) * there / here
        read = call.weight_share * call.item * call.model.parameters / here
        more = read - times.item * times.model.parameters / there
        return ShapeRatio(call.model.layers / mesh.pp / times.model.layers, flops, more)

    def _forward(self, call: Call, mesh: Mesh, times: ModelTimes) -> dict[str, float]:
        passes = call.updates * call.passes_per_update
        rows = call.computed_tokens / passes / times.width
        ratio, curve = self._ratio(call, mesh, times), Curve(times.forward, times.width)
        return {"compute": passes * ratio.seconds(curve, rows, self.measured.memory_bytes_s)}

    def _generate(self, call: Call, mesh: Mesh, times: ModelTimes) -> dict[str, float]:
        ratio, bytes_s = self._ratio(call, mesh, times), self.measured.memory_bytes_s
        rounds = max(1, -(-call.rows // call.decode_rows))
        rows, prompts = call.rows / rounds, call.prompts / rounds
        prefill = ratio.seconds(Curve(times.prefill, times.prompt), prompts * call.prompt / times.prompt, bytes_s)
        curve = Curve(times.step)
        steps = [
            (number, ratio.seconds(curve, kept, bytes_s)) for number, kept in shrinking_batch(rows, call.responses)
        ]
        # the first token comes with the prompt
        decode = sum(number * seconds for number, seconds in steps) - (steps[0][1] if steps else 0.0)
        # of a verification only the time of one step is known, as if its tokens were computed at once
        each = 1.0 if call.speculation is None else call.speculation.steps + call.speculation.drafting
        return {"prefill": rounds * prefill, "decode": rounds * max(0.0, decode) * each}

    def _train(self, call: Call, mesh: Mesh, times: ModelTimes) -> dict[str, float]:
        dp = mesh.dp if mesh.dp in times.train else min(times.train)
        rows = call.computed_tokens / call.updates / times.width
        ratio, curve = self._ratio(call, mesh, times), Curve(times.train[dp], times.width)
        written = OPTIMIZER_BYTES / call.item * call.model.trained_parameters / call.model.parameters
        update = ratio.seconds(curve, rows, self.measured.memory_bytes_s, written)
        gradients = call.updates * self._reduce(call, mesh, times, dp)
        passes = call.passes_per_update
        # measured were updates of one pass: each further one is launched, forwards and twice as much backwards
        launched = 3 * Curve(times.forward, times.width).fixed * ratio.layers if times.forward else 0.0
        again = self._forward(call, mesh, times)["compute"] if call.recompute == "full" and times.forward else 0.0
        return {"compute": call.updates * (update + (passes - 1) * launched) + again, "gradients": gradients}

    def _reduce(self, call: Call, mesh: Mesh, times: ModelTimes, dp: int) -> float:
        """Return the time of one sum of gradients over replicas, beyond the part that measured steps include."""
        line, ranks = self.measured.reduce, self.measured.machine.ranks
        if mesh.dp == 1:
            return 0.0
        size = 4 * call.model.trained_parameters / (mesh.tp * mesh.pp)
        if line is None:
            seconds = AnalyticCosts().call(call, mesh).parts.get("gradients", 0.0) / call.updates
            return max(seconds, self._replica_sum(size, mesh))
        included = 4 * times.model.trained_parameters / times.tp
        measured = _over(line, size, mesh.dp, ranks) - (_over(line, included, dp, ranks) if dp > 1 else 0.0)
        return max(0.0, measured, self._replica_sum(size, mesh))

    def _replica_sum(self, size: float, mesh: Mesh) -> float:
        gb_s = self.measured.network_gb_s or mesh.links.node_gb_s
        reached = replace(mesh, links=replace(mesh.links, node_gb_s=gb_s))
        return replica_sum_seconds(size, reached, (WITHIN, AS_GIVEN)) if mesh.spans_nodes else 0.0

    def _parallel(self, call: Call, mesh: Mesh, times: ModelTimes) -> dict[str, float]:
        """Return the analytic time of communication inside a replica, bubbles and gathered weights."""
        if mesh.tp == times.tp and mesh.pp == 1 and mesh.zero != 3:
            return {}
        parts = AnalyticCosts().call(call, mesh).parts
        return {name: parts[name] for name in ("tensor parallel", "gather", "bubble", "pipeline") if parts.get(name)}


def _has_times(times: ModelTimes, call: Call) -> bool:
    match call.kind:
        case "generate":
            decode_alike = facts_of(times.engine).transformers_modules and facts_of(call.engine).transformers_modules
            return bool(times.step) and (times.engine == call.engine or decode_alike)
        case "forward":
            return bool(times.forward) and times.engine == call.engine
        case "train":
            return bool(times.train) and times.engine == call.engine


def _over(line: LinearTime, size: float, ranks: int, measured: int) -> float:
    """Return the time of a sum of ``size`` bytes over ``ranks``, from sums over ``measured``: a ring's bytes,
    2 (n - 1) / n."""
    share = ((ranks - 1) / ranks) / ((measured - 1) / measured)
    return line.seconds(size * share)
