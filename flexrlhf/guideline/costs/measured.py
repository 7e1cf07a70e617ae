"""The measured cost model: times of the layers that ``flexrlhf profile`` measured on this machine, for any layout.

A pass is the sum of its layers (``layer_prices.py``): of a pipeline of its stages, the slowest for every micro-batch.
Tensor-parallel ranks that were too many to measure sum hidden states as fast as all measured ranks. An optimizer step
grows with the trained parameters and layers of a rank. What crosses between nodes takes as long as on this machine, or
longer by the network: as measured, else the cluster's ``network_gb_s``, taken as reached. Whatever was not measured
comes from the analytic model.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

from flexrlhf.api import DeviceClass, EngineFacts, Primitive
from flexrlhf.guideline.costs.analytic import AnalyticCosts
from flexrlhf.guideline.costs.cost_model import Call, Cost, Links, Mesh, Traffic, Transformer
from flexrlhf.guideline.costs.decode_phases import DecodePhase, decoding
from flexrlhf.guideline.costs.environment_times import EnvironmentTimes
from flexrlhf.guideline.costs.exchanges import parts_traffic
from flexrlhf.guideline.costs.layer_prices import Curve, LayerPrices, SlicedModel
from flexrlhf.guideline.costs.links import AS_GIVEN, WITHIN
from flexrlhf.guideline.costs.measurements import LinearTime, Measurements, ModelTimes, read_measurements
from flexrlhf.guideline.costs.profiles import DECODERS, profile_of
from flexrlhf.guideline.costs.training import layer_products, replica_sum_seconds

GRADIENT_BYTES = 4
"""Bytes of a trained parameter's gradient when it is summed over replicas and updates its weight."""


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
class MeasuredCosts:
    """CostModel of one machine. ``slowdown``: how much longer its calls take than measured.

    Calls on a slower class take longer by its ``relative_speed``.
    """

    measured: Measurements
    slowdown: float = 1.0

    def call(self, call: Call, mesh: Mesh) -> Cost:
        prices = self._nearest(call, mesh)
        if prices is None:
            return AnalyticCosts().call(call, mesh)
        seconds_of = {"generate": self._generate, "forward": self._forward, "train": self._train}[call.kind]
        longer = self.slowdown / mesh.device.relative_speed
        computed = {name: seconds * longer for name, seconds in seconds_of(call, mesh, prices).items()}
        around = self.measured.bookkeeping if call.kind == "forward" else self.measured.statistics
        cost = Cost(computed | self._exchanged(call, mesh, prices) | {"bookkeeping": around})
        return cost.after(self.call(call.counting, mesh), "routers") if call.counts_experts else cost

    def combine(self, rows: int, width: float) -> Cost:
        if not self.measured.combine:
            return AnalyticCosts().combine(rows, width)
        compute = Curve.of(self.measured.combine).seconds(rows) * self.slowdown
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

    @cached_property
    def _prices(self) -> tuple[LayerPrices, ...]:
        return tuple(LayerPrices(times, self.measured.memory_bytes_s) for times in self.measured.models)

    def _nearest(self, call: Call, mesh: Mesh) -> LayerPrices | None:
        """Return the layers of the measured model most like that of ``call``, with such calls in its engine."""
        candidates = [prices for prices in self._prices if _has_times(prices.times, call)]

        def distance(prices: LayerPrices) -> tuple[bool, bool, float, bool]:
            times = prices.times
            size = abs(math.log(call.model.parameters / times.model.parameters))
            is_sharded = mesh.zero >= 2 and mesh.num_shards > 1
            return times.model.head != call.model.head, (times.shards > 1) != is_sharded, size, times.item != call.item

        return min(candidates, key=distance, default=None)

    def _forward(self, call: Call, mesh: Mesh, prices: LayerPrices) -> dict[str, float]:
        passes = call.updates * call.passes_per_update
        stages = prices.of(_sliced(call, mesh)).stages("forward", call.computed_tokens / passes, mesh.dims.pp)
        return _through(stages, passes)

    def _generate(self, call: Call, mesh: Mesh, prices: LayerPrices) -> dict[str, float]:
        rounds = max(1, -(-call.rows // call.decode_rows))
        prompts, sliced = call.prompts / rounds, _sliced(call, mesh)
        prompt = prices.of(replace(sliced, width=call.prompt), prices.times.prompt)
        prefill, model = sum(prompt.stages("prefill", prompts * call.prompt)), prices.of(sliced, sliced.width)
        decode = sum(each.steps * model.step(each.rows, call.prompt + each.age) for each in _decoding(call, mesh))
        return {"prefill": rounds * prefill, "decode": decode}

    def _train(self, call: Call, mesh: Mesh, prices: LayerPrices) -> dict[str, float]:
        times, passes = prices.times, call.passes_per_update
        tokens, model = call.computed_tokens / call.updates / passes, prices.of(_sliced(call, mesh))
        stages = model.stages("train", tokens, mesh.dims.pp)
        if call.recompute == "full" or call.tiled_mlp:
            share = 1.0 if call.recompute == "full" else _mlp_share(call.model)
            again = share * call.model.layers / mesh.dims.pp * model.block("forward", tokens)
            stages = [stage + again for stage in stages]
        dp = mesh.copies if mesh.copies in times.update else min(times.update)
        update = times.update[dp].seconds(_trained_bytes(call, mesh), call.model.layers / mesh.dims.pp)
        parts = _through(stages, passes)
        parts |= {"optimizer": update, "gradients": self._reduce(call, mesh, dp)}
        if call.offload_activations:
            size = call.item * call.model.hidden * tokens * call.model.layers / mesh.dims.pp
            parts["host"] = 2 * passes * self.measured.switch.seconds(int(size))
        return {name: call.updates * seconds for name, seconds in parts.items()}

    def _reduce(self, call: Call, mesh: Mesh, dp: int) -> float:
        """Return the time of one sum of gradients over replicas, beyond the sum over ``dp`` that measured updates
        include."""
        line, ranks = self.measured.reduce, self.measured.machine.ranks
        if mesh.copies == 1:
            return 0.0
        size = _trained_bytes(call, mesh)
        if line is None:
            seconds = AnalyticCosts().call(call, mesh).parts.get("gradients", 0.0) / call.updates
            return max(seconds, self._replica_sum(size, mesh))
        measured = _over(line, size, mesh.copies, ranks) - (_over(line, size, dp, ranks) if dp > 1 else 0.0)
        return max(0.0, measured, self._replica_sum(size, mesh))

    def _replica_sum(self, size: float, mesh: Mesh) -> float:
        gb_s = self.measured.network_gb_s or mesh.links.node_gb_s
        reached = replace(mesh, links=replace(mesh.links, node_gb_s=gb_s))
        return replica_sum_seconds(size, reached, (WITHIN, AS_GIVEN)) if mesh.spans_nodes else 0.0

    def _exchanged(self, call: Call, mesh: Mesh, prices: LayerPrices) -> dict[str, float]:
        """Return the time of communication inside a replica, and of gathering weights that ZeRO-3 shards, as far as the
        measured layers do not include it."""
        line = None if mesh.spans_nodes else self.measured.reduce
        names, measured = ["gather"] if mesh.zero == 3 and prices.times.shards == 1 else [], dict[str, float]()
        for axis in mesh.dims.several():
            name, price = _EXCHANGED[axis.name]
            share = prices.unsummed(mesh.dims.tp) if axis.name == "tp" and mesh.dims.tp <= mesh.per_node else 1.0
            if line is None or price is None:
                names += [name] * (share > 0)
            elif share:
                measured[name] = share * price(self, call, mesh, line)
        analytic = AnalyticCosts().call(call, mesh).parts if names else {}
        return {name: analytic[name] for name in names if analytic.get(name)} | measured

    def _tensor_parallel(self, call: Call, mesh: Mesh, line: LinearTime) -> float:
        """Return the time of the sums of hidden states over tensor-parallel ranks: two in a layer forwards, and
        backwards one for each product, or for each fused group of products, that reads the same input."""
        token, ranks = call.item * call.model.hidden, self.measured.machine.ranks

        def sums(count: float, tokens: float) -> float:
            return count * _over(line, token * tokens, mesh.dims.tp, ranks)

        layers = call.model.layers
        if call.kind == "generate":
            rounds = max(1, -(-call.rows // call.decode_rows))
            prefill = sums(2 * layers, call.prompts / rounds * call.prompt)
            return rounds * prefill + sum(each.steps * sums(2 * layers, each.rows) for each in _decoding(call, mesh))
        backward = 2 if EngineFacts.of(call.engine).fused_layers else 4 + call.model.gated
        each = 2 + (backward if call.kind == "train" else 0) + (2 if call.recompute == "full" else 0)
        passes = call.updates * call.passes_per_update
        return passes * sums(each * layers, call.computed_tokens / passes)

    def _context_parallel(self, call: Call, mesh: Mesh, line: LinearTime) -> float:
        """Return the time of exchanges for attention over the ranks that share rows: as of sums of as many bytes, and
        of copies; nothing is hidden where ranks and messages share cores."""
        ranks, passes = self.measured.machine.ranks, call.updates * call.passes_per_update
        forward = 2 if call.kind == "train" and call.recompute == "full" else 1
        seconds = 0.0
        for each in [False] * forward + [True] * (call.kind == "train"):
            traffic, moved = parts_traffic(call, mesh, call.computed_tokens / passes, each)
            sent = line.per_byte * traffic.within * ranks / (2 * (ranks - 1))
            copied = moved / self.measured.memory_bytes_s * self.slowdown
            seconds += traffic.messages * line.start + sent + copied
        return passes * call.model.layers / mesh.dims.pp * seconds

    def _pipeline(self, call: Call, mesh: Mesh, line: LinearTime) -> float:
        """Return the time of activations, and of their gradients, from stage to stage, beyond the stages' own."""
        passes, hop = call.passes_per_update, self.measured.moves.get("point_to_point", line)
        tokens = call.computed_tokens / call.updates / passes
        hops = (passes + mesh.dims.pp - 2) * (2 if call.kind == "train" else 1)
        return call.updates * hops * hop.seconds(call.item * call.model.hidden * tokens / mesh.dims.tp, 1)


_MeasuredPrice = Callable[[MeasuredCosts, Call, Mesh, LinearTime], float]
_EXCHANGED: Mapping[str, tuple[str, _MeasuredPrice | None]] = {
    "tp": ("tensor parallel", MeasuredCosts._tensor_parallel),
    "pp": ("pipeline", MeasuredCosts._pipeline),
    "cp": ("context parallel", MeasuredCosts._context_parallel),
    "ep": ("expert parallel", None),
}
"""Axis → cause of the time of its exchanges, and function that prices them by measured sums; None: not measured."""


def _decoding(call: Call, mesh: Mesh) -> tuple[DecodePhase, ...]:
    """Return the decoding steps after the first token, which comes with the prompt."""
    return decoding(call, profile_of(DECODERS, call.engine).batching, mesh.dp).phases


def _sliced(call: Call, mesh: Mesh) -> SlicedModel:
    return SlicedModel(call.model, mesh.dims.tp, call.row_width, call.item)


def _mlp_share(model: Transformer) -> float:
    """Return the share of the MLP in the matrix products of a layer."""
    sizes = [each.share * each.m * each.groups * each.k * each.n for each in layer_products(model, 1, tokens=1)]
    return sum(sizes[2:]) / sum(sizes)


def _through(stages: Sequence[float], passes: float) -> dict[str, float]:
    """Return the time of ``passes`` micro-batches through a pipeline's stages: the slowest works all the time but for
    the first and the last one."""
    slowest = max(stages)
    parts = {"compute": passes * slowest}
    return parts | {"bubble": sum(stages) - slowest} if len(stages) > 1 else parts


def _trained_bytes(call: Call, mesh: Mesh) -> float:
    """Return the bytes of the trained parameters on a rank of the fullest stage, in float32."""
    model, facts = call.model, EngineFacts.of(call.engine)
    # only some engines split the embedding over tensor-parallel ranks
    whole = 0 if facts.vocabulary_multiple or model.adapters else model.hidden * model.vocabulary
    return GRADIENT_BYTES * (whole + (model.trained_parameters - whole) / mesh.dims.tp) / mesh.dims.pp


def _has_times(times: ModelTimes, call: Call) -> bool:
    if not times.measures(call.kind):
        return False
    alike = EngineFacts.of(times.engine).transformers_modules and EngineFacts.of(call.engine).transformers_modules
    return times.engine == call.engine or (call.kind == "generate" and alike)


def _over(line: LinearTime, size: float, ranks: int, measured: int) -> float:
    """Return the time of a sum of ``size`` bytes over ``ranks``, from sums over ``measured``: a ring's bytes,
    2 (n - 1) / n."""
    share = ((ranks - 1) / ranks) / ((measured - 1) / measured)
    return line.seconds(size * share)
