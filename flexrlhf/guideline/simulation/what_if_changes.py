"""Changes of a run that ``simulate --what-if`` names: of its settings and devices, or of predicted costs alone."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import get_args

from flexrlhf.config.model_settings import Dtype
from flexrlhf.config.placement_settings import NodeSpec
from flexrlhf.config.reward_sources import ModelSource, RewardSource
from flexrlhf.config.spec import MAX_DEVICES, Spec
from flexrlhf.errors import UserError, either, nearest
from flexrlhf.guideline.costs.cost_model import Call, Transformer
from flexrlhf.guideline.costs.speculation import Speculation
from flexrlhf.guideline.simulation.pricing import UNKNOWN
from flexrlhf.placement.devices import GPUS_PER_NODE
from flexrlhf.plan.changes import SettingChange, changed_spec
from flexrlhf.plan.plan import Plan

EIGHT_BIT = "fp8"
MOST = 1_000_000
"""Largest factor, speed in GB/s and time in seconds; the inverse is the least."""
NO_SETTING = "not a setting of a run"


@dataclass(frozen=True)
class Change:
    """A change of a run.

    note:   what it is, with its assumptions
    spec:   changed settings
    call:   changed calls of generation
    eight:  tensors of the rollout engine in eight bits, ``weights`` or ``cache``
    """

    note: str
    spec: Callable[[Spec], Spec] = field(default=lambda spec: spec)
    call: Callable[[Call], Call] = field(default=lambda call: call)
    eight: frozenset[str] = frozenset()


def eight_bit_share(model: Transformer, item: int) -> float:
    """Return the bytes of a model whose matrices of layers have one byte a number, as a share of ``item`` for each."""
    return 1 - (1 - 1 / item) * model.layers * model.matrix_parameters / model.parameters


def read_changes(text: str) -> list[Callable[[Plan], Change]]:
    """Return the makers of the changes ``KEY=VALUE,KEY=VALUE``. Raises UserError for another text, or one key twice."""
    parts = text.split(",")
    keys = [part.partition("=")[0] for part in parts]
    twice = next((key for key in keys if keys.count(key) > 1), None)
    if twice in CHANGES:
        raise UserError(f"--what-if {text}: {twice} is there twice; give it once, or --what-if again for another run")
    return [read_change(part) for part in parts]


def read_change(text: str) -> Callable[[Plan], Change]:
    """Return the maker of the change ``KEY=VALUE``. Raises UserError for another text."""
    key, equals, value = text.partition("=")
    if not equals or key not in CHANGES:
        known = ", ".join(f"{each}=..." for each in CHANGES)
        raise UserError(f"--what-if {text}: no such change{nearest(key, CHANGES)}; known: {known}")
    return CHANGES[key](value, text)


def _rollout(value: str, text: str) -> Callable[[Plan], Change]:
    if value not in (EIGHT_BIT, *get_args(Dtype)):
        raise UserError(f"--what-if {text}: expected {either((EIGHT_BIT, *get_args(Dtype)))} after rollout=")
    return lambda plan: _rollout_type(value, plan)


def _rollout_type(value: str, plan: Plan) -> Change:
    rollout, role = plan.spec.rollout, _generated(plan)
    if not rollout.has_copy:
        raise UserError("generation uses the weights that are trained; rollout.engine vllm has a copy of them")
    current = rollout.dtype or plan.model(role).dtype
    if value == current:
        raise UserError(f"the rollout has {value} as planned")
    if value != EIGHT_BIT:
        typed = SettingChange("rollout.dtype", value)
        return Change(f"rollout.dtype: {value}", spec=lambda spec: changed_spec(spec, (typed,)))
    note = (
        f"{NO_SETTING}; matrices of layers are stored and read in one byte a number, embeddings, head, cache and syncs "
        f"as planned; products at the 16-bit rate, since device classes have no other"
    )
    return Change(
        note,
        call=lambda call: replace(call, weight_share=eight_bit_share(call.model, call.item)),
        eight=frozenset(("weights",)),
    )


def _cache(value: str, text: str) -> Callable[[Plan], Change]:
    if value != EIGHT_BIT:
        raise UserError(f"--what-if {text}: expected cache={EIGHT_BIT}")

    def change(plan: Plan) -> Change:
        if plan.spec.rollout.engine != "vllm":
            raise UserError(f"rollout.engine {plan.spec.rollout.engine} has no cache of another type; vllm has")
        note = (
            "rollout.config: {kv_cache_dtype: fp8}, which other predictions do not count; keys and values are stored "
            "and read in one byte a number, of as many tokens as planned"
        )
        return Change(note, call=lambda call: replace(call, cache_item=1), eight=frozenset(("cache",)))

    return change


def _generated(plan: Plan) -> str:
    if plan.graph.generated is None:
        raise UserError(f"{plan.spec.algorithm.name} generates nothing")
    return plan.graph.generated


def _speculative(value: str, text: str) -> Callable[[Plan], Change]:
    try:
        acceptance, *others = map(float, value.split(":"))
        drafted, cost = (*others, *(4.0, 0.05)[len(others) :])
    except ValueError:
        raise UserError(
            f"--what-if {text}: expected speculative=ACCEPTANCE[:TOKENS[:COST]], such as speculative=0.7:4:0.05"
        ) from None
    if not (0 <= acceptance <= 1 and drafted >= 1 and drafted == int(drafted) and cost >= 0):
        raise UserError(
            f"--what-if {text}: expected an acceptance rate from 0 to 1, a whole number of drafted tokens and a cost "
            f"of at least 0, such as speculative=0.7:4:0.05"
        )
    speculation = Speculation(acceptance, int(drafted), cost)
    note = (
        f"{NO_SETTING}; {drafted:g} drafted tokens, each accepted with probability {acceptance:g}: "
        f"{speculation.tokens:.3g} tokens a verification, (1 - a^(k+1)) / (1 - a) (Leviathan et al., 2023); drafting "
        f"one takes {cost:g} of a decoding step, the draft's memory is not counted"
    )

    def change(plan: Plan) -> Change:
        _generated(plan)
        return Change(note, call=lambda call: replace(call, speculation=speculation))

    return change


def _links(value: str, text: str, setting: str, figure: str) -> Callable[[Plan], Change]:
    factor, number = _number(value, text, "in GB/s, or a factor such as 2x")

    def change(plan: Plan) -> Change:
        nodes = plan.spec.cluster.nodes
        if not nodes:
            raise UserError("cluster.nodes is not written, whose links it would change")
        if setting == "network_gb_s" and plan.cluster.num_nodes == 1:
            raise UserError("all devices are in one node, whose network no step uses")
        known = [plan.cluster.figures_or(rank, UNKNOWN) for rank in _first_ranks(plan)]
        speeds = [number * getattr(each, figure) if factor else number for each in known]
        updates = [{setting: speed} for speed in speeds]
        shown = ", ".join(f"{speed:g}" for speed in dict.fromkeys(speeds))
        return Change(
            f"other hardware; cluster.nodes, {setting}: {shown}", spec=lambda spec: _with_nodes(spec, updates)
        )

    return change


def _first_ranks(plan: Plan) -> Iterator[int]:
    """Yield the first rank of each group of nodes."""
    rank = 0
    for node in plan.spec.cluster.nodes:
        yield rank
        rank += node.count * node.devices


def _with_nodes(spec: Spec, updates: Iterable[Mapping[str, float]]) -> Spec:
    """Return ``spec`` with changed settings of each group of nodes."""
    nodes = (node.model_copy(update=update) for node, update in zip(spec.cluster.nodes, updates, strict=True))
    return spec.model_copy(update={"cluster": spec.cluster.model_copy(update={"nodes": tuple(nodes), "devices": None})})


def _devices(value: str, text: str) -> Callable[[Plan], Change]:
    found = re.fullmatch(r"(\d{1,4})x", value)
    if found is None or int(found[1]) < 1:
        raise UserError(f"--what-if {text}: expected a whole factor such as devices=2x")
    times = int(found[1])

    def change(plan: Plan) -> Change:
        cluster = plan.spec.cluster
        total = times * cluster.num_devices
        if total > MAX_DEVICES:
            raise UserError(f"{total} devices are more than a plan may have, {MAX_DEVICES}")
        if not cluster.nodes:
            more = cluster.model_copy(update={"devices": total})
            return Change(f"--devices {total}", spec=lambda spec: spec.model_copy(update={"cluster": more}))
        updates = [_more(node, times) for node in cluster.nodes]
        note = f"cluster.nodes with {total} devices, settings as planned"
        return Change(note, spec=lambda spec: _with_nodes(spec, updates))

    return change


def _more(node: NodeSpec, times: int) -> dict[str, float]:
    """Return the settings of a group of nodes with more devices: in the node while it has room, else in more nodes."""
    is_one = node.count == 1 and node.devices * times <= GPUS_PER_NODE
    return {"devices": node.devices * times} if is_one else {"count": node.count * times}


def _reward(value: str, text: str) -> Callable[[Plan], Change]:
    _, seconds = _number(value.removesuffix("s"), text, "in seconds, such as reward=2s")

    def change(plan: Plan) -> Change:
        sections = {name: getattr(plan.spec, name) for name in ("reward", "cost")}
        called = {
            name: value for name, value in sections.items() if any(not isinstance(v, ModelSource) for v in value or ())
        }
        if not called:
            raise UserError("scores come from models alone, not from a service, function or rule")
        update = {name: tuple(_slower(source, seconds) for source in sources) for name, sources in called.items()}
        note = f"{' and '.join(called)}: {seconds:g} s for a call of each source that is no model (seconds)"
        return Change(note, spec=lambda spec: spec.model_copy(update=update))

    return change


def _slower(source: RewardSource, seconds: float) -> RewardSource:
    return source if isinstance(source, ModelSource) else source.model_copy(update={"seconds": seconds})


def _number(value: str, text: str, expected: str) -> tuple[bool, float]:
    """Return whether ``value`` is a factor, as 2x, and its number. Raises UserError for no number above 0."""
    try:
        number = float(value.removesuffix("x"))
    except ValueError:
        number = 0.0
    if not 0 < number < float("inf"):
        raise UserError(f"--what-if {text}: expected a number above 0 {expected}")
    if not 1 / MOST <= number <= MOST:
        raise UserError(f"--what-if {text}: expected a number from {1 / MOST:g} to {MOST:,} {expected}")
    return value.endswith("x"), number


CHANGES: Mapping[str, Callable[[str, str], Callable[[Plan], Change]]] = {
    "rollout": _rollout,
    "cache": _cache,
    "speculative": _speculative,
    "network": partial(_links, setting="network_gb_s", figure="node_gb_s"),
    "link": partial(_links, setting="link_gb_s", figure="link_gb_s"),
    "devices": _devices,
    "reward": _reward,
}
