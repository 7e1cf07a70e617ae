"""How one placed model may compute on a mesh: its settings, each with the seconds of its calls and its bytes.

Bytes are those that ``placement.memory`` counts for a plan, so what the search takes ``flexrlhf plan`` accepts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, lru_cache, partial
from typing import Any, Literal, TypeVar

from flexrlhf.engines.catalogue import SERVES
from flexrlhf.guideline.costs.calls import CostModel, Links, Mesh
from flexrlhf.guideline.search.problem import Option
from flexrlhf.guideline.simulation.pricing import CallMaker, row_patterns, side_of
from flexrlhf.operators.graph import Kind
from flexrlhf.placement.devices import DeviceClass
from flexrlhf.placement.layout import BatchShape, Layout
from flexrlhf.placement.memory import Compute, Sizing, Texts
from flexrlhf.placement.placed import ROLLOUT, SHADOW, PlacedModel, Placement
from flexrlhf.placement.rollout import padded_row, rollout_settings
from flexrlhf.placement.shapes import ModelShape
from flexrlhf.placement.states import State
from flexrlhf.spec import ModelSpec, Spec, SyncSpec

T = TypeVar("T")

CallKind = Kind | Literal["switch"]
"""What a placed model does on its devices: an operator, or on the way to its host's memory and back."""
TENSOR_PARALLEL = (1, 2, 4, 8)
PASS_ROWS = (1, 4, 16, 64)
"""Rows of a micro-batch that are tried."""
DECODE_SHARES = (1, 4, 16)
"""All rows decoded together, a fourth of them, a sixteenth."""
CACHE_SHARES = (1, 2, 4, 8, 16)
"""The same of what a rollout engine's cache has room for, which is there all the time."""


@dataclass(frozen=True)
class Member:
    """A placed model before it has a place. ``is_apart``: on other devices than the copy that it follows. ``calls``:
    its operators' kinds and mini-batches, in schedule order."""

    name: str
    role: str
    trained: bool
    is_apart: bool
    calls: tuple[tuple[CallKind, range], ...]

    @property
    def kinds(self) -> tuple[CallKind, ...]:
        return tuple(dict.fromkeys(kind for kind, _ in self.calls if kind != "combine"))

    @property
    def sleeps(self) -> bool:
        """Whether it is in host memory while anything else works."""
        return "switch" in self.kinds

    @property
    def is_rollout(self) -> bool:
        return self.name.endswith(ROLLOUT)

    @property
    def is_shadow(self) -> bool:
        return self.name.endswith((SHADOW, ROLLOUT))


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
            if layout.dp <= self.batch.num_prompts:
                for settings in self._settings(member, base, layout, {"zero": zero, "tp": tp}):
                    rollout = self.spec.rollout.model_copy(update={"tp": tp}) if member.is_rollout else None
                    yield PlacedModel(member.name, member.role, layout, member.trained, settings, rollout)

    def _splits(self, member: Member, place: Place, base: ModelSpec) -> Iterator[tuple[int, int]]:
        serves = SERVES["vllm" if member.is_rollout else base.engine]
        for tp in self._tensor_parallel(member, place, base, serves.tp):
            for zero in self._stages(member, base, serves.zero):
                if zero == 0 or tp < place.size:
                    yield zero, tp

    def _tensor_parallel(self, member: Member, place: Place, base: ModelSpec, can: bool) -> Iterator[int]:
        if "tp" in base.model_fields_set and not member.is_shadow:
            yield base.tp
            return
        sizes = self.shapes[member.role].sizes
        for tp in TENSOR_PARALLEL if can and base.lora is None and sizes is not None else (1,):
            whole = sizes is None or not (sizes.heads % tp or sizes.kv_heads % tp or sizes.ffn % tp)
            if whole and place.size % tp == 0 and tp <= place.per_node:
                yield tp

    def _stages(self, member: Member, base: ModelSpec, stages: Sequence[int]) -> tuple[int, ...]:
        if "zero" in base.model_fields_set and not member.is_shadow:
            return (base.zero,)
        if not member.trained:
            return tuple(stage for stage in stages if stage in (0, 3))
        # DeepSpeed keeps no float32 gradients at stage 0 in 16 bits
        least = 1 if base.engine == "deepspeed" and base.dtype != "float32" else 0
        return tuple(stage for stage in stages if stage >= least)

    def _settings(
        self, member: Member, base: ModelSpec, layout: Layout, split: Mapping[str, int]
    ) -> Iterator[ModelSpec]:
        if member.is_rollout:
            yield from self._rollouts(base, layout, split["tp"])
            return
        plain = base.of_shadow if member.is_shadow else base
        for change in self._changes(member, base, layout):
            yield plain.model_copy(update={**split, **change})

    def _rollouts(self, base: ModelSpec, layout: Layout, tp: int) -> Iterator[ModelSpec]:
        """With room for the keys and values of more or fewer rows."""
        most = max(map(sum, row_patterns(self.batch, layout, self.batch.mini_batches)))
        room = sorted({padded_row(self.spec) * max(1, most // share) for share in CACHE_SHARES})
        for tokens in room if self.spec.rollout.kv_tokens is None else [self.spec.rollout.kv_tokens]:
            rollout = self.spec.rollout.model_copy(update={"tp": tp, "kv_tokens": tokens})
            yield rollout_settings(base, layout, self.spec.model_copy(update={"rollout": rollout}))

    def _changes(self, member: Member, base: ModelSpec, layout: Layout) -> Iterator[dict[str, object]]:
        """Rows of passes and of decoding, and whether activations are computed again."""
        texts = self.spec.data
        width = texts.max_prompt_tokens + texts.max_response_tokens
        most = max(map(sum, row_patterns(self.batch, layout, self.batch.mini_batches)))
        passes = [n for n in PASS_ROWS if n <= max(most, 1)]
        decoded = sorted({max(1, most // n) for n in DECODE_SHARES}) if "generate" in member.kinds else [0]
        for rows in passes:
            for together in decoded:
                for again in (False, True) if member.trained else (False,):
                    change: dict[str, object] = {"micro_batch_tokens": rows * width * self.batch.samples_per_prompt}
                    change |= {"generate_tokens": together * width} if together else {}
                    if again:
                        change["activation_checkpointing"] = True
                    yield {key: value for key, value in change.items() if key not in base.model_fields_set}

    def _option(self, member: Member, place: Place, model: PlacedModel) -> Option | None:
        shape, settings = self.shapes[member.role], model.settings
        mesh = Mesh(place.device, place.links, model.layout.dp, model.layout.tp, 1, place.per_node, model.settings.zero)
        common = member.role, member.trained, place, model.layout.tp, settings.zero, _kept_tokens(model)
        state = self.once(("state", common), lambda: self._state(model, shape))
        assert isinstance(state, State), "shapes are known"
        seconds, most = [], 0
        for kind, batches in member.calls:
            if kind == "switch":
                seconds.append(self.costs.switch(state.parked, place.device).seconds)
                continue
            rows, key = self._most_rows(model, kind, batches), (common, kind, _matters(kind, settings))
            timed = partial(self._seconds, model, shape, mesh, kind, batches)
            seconds.append(self.once(("seconds", key, batches), timed))
            most = max(most, self.once(("bytes", key, rows), partial(self._bytes, model, shape, state, kind, rows)))
        side = self.once(("side", common), lambda: side_of(model, place.per_node))
        if member.sleeps:
            return Option(tuple(seconds), 0, state.resting + most, side, settings)
        return Option(tuple(seconds), state.resting, most, side, settings)

    def once(self, key: object, make: Callable[[], T]) -> T:
        """What ``make`` gave the first time: settings share most of what they cost."""
        if key not in self._parts:
            self._parts[key] = make()
        found: T = self._parts[key]
        return found

    def _seconds(self, model: PlacedModel, shape: ModelShape, mesh: Mesh, kind: Kind, batches: range) -> float:
        rows = row_patterns(self.batch, model.layout, batches)
        if kind == "combine":
            return self.costs.combine(max(map(sum, rows)), self.maker.lengths.width).seconds
        call = self.maker.call(kind, model, shape, [each for each in rows if any(each)])
        return self.costs.call(call, mesh).seconds

    def _state(self, model: PlacedModel, shape: ModelShape) -> State | None:
        return self._sizing(model, shape).state(model, 0)

    def _most_rows(self, model: PlacedModel, kind: Kind, batches: range) -> int:
        """Of one pass or of those decoded together, where settings let in no more."""
        held = row_patterns(self.batch, model.layout, batches)
        most = max(map(max if kind == "train" else sum, held))
        if kind == "generate":
            return self._texts.rows_decoded(model.settings.generate_tokens, most)
        return self._texts.rows_within(model.settings.micro_batch_tokens, most)

    def _bytes(self, model: PlacedModel, shape: ModelShape, state: State, kind: Kind, rows: int) -> int:
        """What a call takes at the most besides what rests."""
        if kind == "combine":
            return 0
        phases = self._sizing(model, shape).phases(Compute(kind, model.name, rows), 0)
        return max(phase.besides + (state.training - state.resting) * phase.trains for phase in phases)

    def _sizing(self, model: PlacedModel, shape: ModelShape) -> Sizing:
        return Sizing(Placement((model,), len(model.ranks)), {model.role: shape}, self._texts, SyncSpec())

    @cached_property
    def _texts(self) -> Texts:
        data = self.spec.data
        return Texts(data.max_prompt_tokens, data.max_response_tokens, self.batch.samples_per_prompt)


def _kept_tokens(model: PlacedModel) -> int | None:
    """Of a rollout engine, whose cache is there all the time."""
    return None if model.rollout is None else model.settings.generate_tokens


@lru_cache(maxsize=1024)
def _layout(size: int, tp: int) -> Layout:
    """On the first devices."""
    return Layout(tuple(range(size)), tp)


def _matters(kind: Kind, settings: ModelSpec) -> tuple[object, ...]:
    """Of the settings that options of one mesh differ by, those that a call of ``kind`` depends on."""
    if kind == "generate":
        return (settings.generate_tokens,)
    return settings.micro_batch_tokens, kind == "train" and settings.activation_checkpointing
