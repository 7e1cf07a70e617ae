"""How one placed model may compute on a mesh: its settings, each with the seconds of its calls and its bytes.

Bytes are those that ``placement.memory`` counts for a plan, so what the search takes ``flexrlhf plan`` accepts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache, partial
from typing import Any, Literal, TypeVar

from flexrlhf.config.spec import Head, ModelSpec, RolloutSpec, ShadowSpec, Spec, SyncSpec
from flexrlhf.config.strict_model import StrictModel
from flexrlhf.engines.capabilities import SERVES
from flexrlhf.guideline.costs.cost_model import CostModel, Links, Mesh
from flexrlhf.guideline.search.problem import Option
from flexrlhf.guideline.simulation.pricing import CallMaker, row_patterns, side_of
from flexrlhf.guideline.simulation.scoring_time import cost_beside
from flexrlhf.memory.budget import Compute, SequenceLengths, Sizing
from flexrlhf.memory.states import State
from flexrlhf.operators.graph import OperatorKind
from flexrlhf.placement.devices import DeviceClass
from flexrlhf.placement.layout import BatchShape, Layout
from flexrlhf.placement.names import ModelName
from flexrlhf.placement.placed import PlacedModel, Placement
from flexrlhf.placement.rollout import padded_row, rollout_settings
from flexrlhf.weights.shapes import ModelShape

T = TypeVar("T")

CallKind = OperatorKind | Literal["switch"]
"""What a placed model does on its devices: an operator, or on the way to its host's memory and back."""
TENSOR_PARALLEL = (1, 2, 4, 8)
PASS_TOKENS = (0, 8192, 32768)
"""Padded tokens of a micro-batch that are tried; at least one prompt's."""
DECODE_SHARES = (1, 2, 4, 8, 16, 32, 64)
"""All rows decoded together, half of them, a fourth ..."""
CACHE_SHARES = (1, 2, 4, 8, 16, 32)
"""The same of what a rollout engine's cache has room for, which is there all the time."""


@dataclass(frozen=True)
class Work:
    """One call of a placed model: of its operator what seconds follow from. ``asked``: the section whose sources are
    asked for scores. ``texts``: of a row."""

    kind: CallKind
    mini_batches: range
    asked: str = ""
    texts: int = 1


@dataclass(frozen=True)
class Member:
    """A placed model before it has a place. ``calls``: in schedule order."""

    name: ModelName
    trained: bool
    calls: tuple[Work, ...]
    head: Head = "causal"

    @property
    def role(self) -> str:
        return self.name.role

    @property
    def kinds(self) -> tuple[CallKind, ...]:
        return tuple(dict.fromkeys(call.kind for call in self.calls if call.kind not in ("combine", "score")))

    @property
    def sleeps(self) -> bool:
        """Whether it is in host memory while anything else works."""
        return "switch" in self.kinds

    @property
    def is_rollout(self) -> bool:
        return self.name.is_rollout

    @property
    def is_shadow(self) -> bool:
        return bool(self.name.copy)


@dataclass(frozen=True)
class Place:
    """``size`` devices of one class, ``per_node`` of them in each node."""

    size: int
    per_node: int
    device: DeviceClass

    @property
    def links(self) -> Links:
        return Links(self.device.link_gb_s, self.device.node_gb_s)


@dataclass(frozen=True)
class Chooser:
    """Makes the options of members of ``spec``, whose models are resolved."""

    spec: Spec
    shapes: Mapping[str, ModelShape]
    batch: BatchShape
    costs: CostModel
    maker: CallMaker
    _known: dict[object, tuple[Option, ...]] = field(default_factory=dict)
    _parts: dict[object, Any] = field(default_factory=dict)

    def options(self, member: Member, place: Place) -> tuple[Option, ...]:
        """Those that differ; none where no replica would have a row, or the class has not the type of the weights."""
        base = self.spec.models.of(member.role)
        if base is not None and base.dtype == "bfloat16" and not place.device.bf16:
            return ()
        if (member, place) not in self._known:
            found = (self._option(member, place, model) for model in self._models(member, place))
            self._known[member, place] = tuple(option for option in found if option is not None)
        return self._known[member, place]

    def _models(self, member: Member, place: Place) -> Iterator[PlacedModel]:
        """The member as a placed model on the first devices, once for each of its settings."""
        base = self.spec.models.of(member.role)
        assert base is not None, f"{member.role} is resolved"
        for zero, tp in self._splits(member, place, base):
            layout = _layout(place.size, tp)
            if layout.dp > self.batch.num_prompts:
                continue
            if member.is_rollout:
                rollout = self.spec.rollout.model_copy(update={"tp": tp})
                for settings in self._rollouts(base, layout, rollout):
                    yield PlacedModel(member.name, layout, False, settings, rollout)
            else:
                plain = (base.of_shadow if member.is_shadow else base).model_copy(update={"zero": zero, "tp": tp})
                yield from self._matched(
                    member,
                    place,
                    PlacedModel(member.name, layout, member.trained, plain, head=member.head),
                )

    def _splits(self, member: Member, place: Place, base: ModelSpec) -> Iterator[tuple[int, int]]:
        serves = SERVES["vllm" if member.is_rollout else (base.of_shadow if member.is_shadow else base).engine]
        for tp in self._tensor_parallel(member, place, base, serves.tp):
            for zero in self._stages(member, base, serves.zero):
                if zero == 0 or tp < place.size:
                    yield zero, tp

    def _tensor_parallel(self, member: Member, place: Place, base: ModelSpec, can: bool) -> Iterator[int]:
        """Sizes that the place and the heads let be; of those that the YAML says, where it says one."""
        sizes, said = self.shapes[member.role].sizes, self._said(member, base, "tp")
        tried = TENSOR_PARALLEL if can and base.lora is None and sizes is not None else (1,)
        for tp in tried if said is None else (said,):
            whole = sizes is None or not (sizes.heads % tp or sizes.kv_heads % tp or sizes.ffn % tp)
            if whole and place.size % tp == 0 and tp <= place.per_node:
                yield tp

    def _stages(self, member: Member, base: ModelSpec, stages: Sequence[int]) -> tuple[int, ...]:
        said = self._said(member, base, "zero")
        if said is not None:
            return (said,)
        if not member.trained:
            return tuple(stage for stage in stages if stage in (0, 3))
        # DeepSpeed keeps no float32 gradients at stage 0 in 16 bits
        least = 1 if base.engine == "deepspeed" and base.dtype != "float32" else 0
        return tuple(stage for stage in stages if stage >= least)

    def _said(self, member: Member, base: ModelSpec, setting: str) -> int | None:
        """What the YAML says of a setting of this copy; None: it is open."""
        section: StrictModel | None = base
        if member.is_shadow:
            section = self.spec.rollout if member.is_rollout else base.shadow
        if section is None or setting not in section.model_fields_set:
            return None
        value: int | None = getattr(section, setting)
        return value

    def _rollouts(self, base: ModelSpec, layout: Layout, rollout: RolloutSpec) -> Iterator[ModelSpec]:
        """With room for the keys and values of more or fewer rows."""
        room = [padded_row(self.spec) * rows for rows in self._shared(layout, CACHE_SHARES)]
        for tokens in room if rollout.kv_tokens is None else [rollout.kv_tokens]:
            kept = rollout.model_copy(update={"kv_tokens": tokens})
            yield rollout_settings(base, layout, self.spec.model_copy(update={"rollout": kept}))

    def _shared(self, layout: Layout, shares: Sequence[int]) -> list[int]:
        """Rows of a replica, and parts of them."""
        most = max(map(sum, row_patterns(self.batch, layout, self.batch.mini_batches)))
        return sorted({max(1, most // share) for share in shares})

    def _matched(self, member: Member, place: Place, plain: PlacedModel) -> Iterator[PlacedModel]:
        """``plain`` with as many rows in passes and in decoding as go into the same bytes.

        What is left beside the states each call has alone: one that needs less than another is slower for nothing.
        """
        passes = [_with(plain, change) for change in self._passes(member, plain)]
        decodes = [_with(plain, change) for change in self._decodes(member, plain)]
        if len(decodes) < 2:
            yield from (_with(model, change) for model in passes for change in self._decodes(member, plain))
            return
        passed = {model: self._besides(member, place, model, {"forward", "train"}) for model in passes}
        decoded = {model: self._besides(member, place, model, {"generate"}) for model in decodes}
        known = set[tuple[PlacedModel, PlacedModel]]()
        for room in sorted({size for _, size in (*passed.values(), *decoded.values())}):
            pair = _quickest(passed, room), _quickest(decoded, room)
            if pair[0] is not None and pair[1] is not None and (pair[0], pair[1]) not in known:
                known.add((pair[0], pair[1]))
                yield _with(pair[0], {"generate_tokens": pair[1].settings.generate_tokens})

    def _passes(self, member: Member, model: PlacedModel) -> Iterator[dict[str, object]]:
        """Rows of a pass, and whether activations are computed again."""
        texts, fixed = self.spec.data, self._fixed(member)
        row = (texts.max_prompt_tokens + texts.max_response_tokens) * self.batch.samples_per_prompt
        most = max(self._shared(model.layout, (1,)))
        rows = sorted({min(max(1, tokens // row), most) for tokens in PASS_TOKENS})
        tried = [row * number for number in rows] if "micro_batch_tokens" not in fixed else [0]
        for tokens in tried:
            change: dict[str, object] = {"micro_batch_tokens": tokens} if tokens else {}
            yield change
            if member.trained and "activation_checkpointing" not in fixed:
                yield {**change, "activation_checkpointing": True}

    def _decodes(self, member: Member, model: PlacedModel) -> list[dict[str, object]]:
        """Rows decoded together."""
        if "generate" not in member.kinds or "generate_tokens" in self._fixed(member):
            return [{}]
        width = self.spec.data.max_prompt_tokens + self.spec.data.max_response_tokens
        return [{"generate_tokens": width * rows} for rows in self._shared(model.layout, DECODE_SHARES)]

    def _fixed(self, member: Member) -> set[str]:
        """Settings that the YAML says of this copy."""
        base = self.spec.models.of(member.role)
        assert base is not None, f"{member.role} is resolved"
        section = (base.shadow or ShadowSpec()) if member.is_shadow else base
        return {name for name in section.model_fields_set if getattr(section, name) is not None}

    def _besides(self, member: Member, place: Place, model: PlacedModel, kinds: set[str]) -> tuple[float, int]:
        """Seconds of all calls of ``kinds``, and the most bytes of one besides what rests."""
        found = [(seconds, size) for kind, seconds, size in self._calls(member, place, model) if kind in kinds]
        return sum(seconds for seconds, _ in found), max((size for _, size in found), default=0)

    def _option(self, member: Member, place: Place, model: PlacedModel) -> Option | None:
        state, calls = self._state(model, self._common(model, place)), list(self._calls(member, place, model))
        seconds, most = tuple(seconds for _, seconds, _ in calls), max(size for _, _, size in calls)
        side = self.once(("side", self._common(model, place)), lambda: side_of(model, place.per_node))
        if member.sleeps:
            return Option(seconds, 0, state.resting + most, side, model.settings)
        return Option(seconds, state.resting, most, side, model.settings)

    def _common(self, model: PlacedModel, place: Place) -> object:
        """What states follow from."""
        where = place.size, place.per_node, place.device.name
        return model.role, model.trained, where, model.layout.tp, model.settings.zero, _kept_tokens(model)

    def _calls(self, member: Member, place: Place, model: PlacedModel) -> Iterator[tuple[CallKind, float, int]]:
        """Kind, seconds and bytes besides what rests, of each call."""
        common, layout, zero = self._common(model, place), model.layout, model.settings.zero
        mesh = Mesh(place.device, place.links, layout.dp, layout.tp, 1, place.per_node, zero)
        for call in member.calls:
            kind = call.kind
            if kind == "switch":
                yield kind, self.costs.switch(self._state(model, common).offloaded, place.device).seconds, 0
                continue
            rows, key = self._most_rows(model, kind, call.mini_batches), (common, kind, _matters(kind, model.settings))
            seconds = self.once(("seconds", key, call), partial(self._seconds, model, mesh, kind, call))
            yield kind, seconds, self.once(("bytes", key, rows), partial(self._bytes, model, common, kind, rows))

    def once(self, key: object, make: Callable[[], T]) -> T:
        """What ``make`` gave the first time: settings share most of what they cost."""
        if key not in self._parts:
            self._parts[key] = make()
        found: T = self._parts[key]
        return found

    def _seconds(self, model: PlacedModel, mesh: Mesh, kind: OperatorKind, work: Work) -> float:
        rows = row_patterns(self.batch, model.layout, work.mini_batches)
        if kind == "combine" or kind == "score":
            most, width = max(map(sum, rows)), self.maker.lengths.width
            return cost_beside(self.costs, self.spec, work.asked, most, width).seconds
        held = [each for each in rows if any(each)]
        return self.costs.call(self.maker.call(kind, model, self.shapes[model.role], held, work.texts), mesh).seconds

    def _state(self, model: PlacedModel, common: object) -> State:
        state = self.once(("state", common), lambda: self._sizing(model).state(model, 0))
        assert isinstance(state, State), "shapes are known"
        return state

    def _most_rows(self, model: PlacedModel, kind: OperatorKind, batches: range) -> int:
        """Of one pass or of those decoded together, where settings let in no more."""
        held = row_patterns(self.batch, model.layout, batches)
        most = max(map(max if kind == "train" else sum, held))
        if kind == "generate":
            return self._texts.rows_decoded(model.settings.generate_tokens, most)
        return self._texts.rows_within(model.settings.micro_batch_tokens, most)

    def _bytes(self, model: PlacedModel, common: object, kind: OperatorKind, rows: int) -> int:
        """What a call takes at the most besides what rests."""
        if kind == "combine" or kind == "score":
            return 0
        state, phases = self._state(model, common), self._sizing(model).phases(Compute(kind, model.name, rows), 0)
        return max(phase.besides + (state.training - state.resting) * phase.trains for phase in phases)

    def _sizing(self, model: PlacedModel) -> Sizing:
        shapes = {model.role: self.shapes[model.role]}
        return Sizing(Placement((model,), len(model.ranks)), shapes, self._texts, SyncSpec())

    @cached_property
    def _texts(self) -> SequenceLengths:
        data = self.spec.data
        return SequenceLengths(data.max_prompt_tokens, data.max_response_tokens, self.batch.samples_per_prompt)


def _with(model: PlacedModel, change: Mapping[str, object]) -> PlacedModel:
    return replace(model, settings=model.settings.model_copy(update=dict(change))) if change else model


def _quickest(found: Mapping[PlacedModel, tuple[float, int]], room: int) -> PlacedModel | None:
    """Of those whose bytes go into ``room``."""
    fitting = [model for model, (_, size) in found.items() if size <= room]
    return min(fitting, key=lambda model: found[model][0], default=None)


def _kept_tokens(model: PlacedModel) -> int | None:
    """Of a rollout engine, whose cache is there all the time."""
    return None if model.rollout is None else model.settings.generate_tokens


@lru_cache(maxsize=1024)
def _layout(size: int, tp: int) -> Layout:
    """On the first devices."""
    return Layout(tuple(range(size)), tp)


def _matters(kind: OperatorKind, settings: ModelSpec) -> tuple[object, ...]:
    """Of the settings that options of one mesh differ by, those that a call of ``kind`` depends on."""
    if kind == "generate":
        return (settings.generate_tokens,)
    return settings.micro_batch_tokens, kind == "train" and settings.activation_checkpointing
