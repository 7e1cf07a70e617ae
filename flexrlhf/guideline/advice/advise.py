"""Which placement to use: the published rules, an exact search, and the usual placements of the field beside them.

Every answer is a Spec that was planned and simulated like any other; what does not fit is told with its reason.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import cached_property
from pathlib import Path
from time import perf_counter
from typing import Literal

from flexrlhf.config.spec import ModelSpec, Spec
from flexrlhf.config.spec_file import dump_spec
from flexrlhf.errors import UserError
from flexrlhf.guideline.advice.choices import Member
from flexrlhf.guideline.advice.per_call import PerCall
from flexrlhf.guideline.advice.proposals import (
    TOO_LARGE,
    Allowed,
    Vector,
    device_bytes,
    in_chunks,
    polished,
    seconds_of,
    settle,
    spec_of,
    vector_ranks,
)
from flexrlhf.guideline.advice.rules import Rule, Ruling, guideline
from flexrlhf.guideline.advice.space import USABLE, Space, is_allowed, make_space, with_schedule
from flexrlhf.guideline.costs.cost_model import CostModel, Links
from flexrlhf.guideline.costs.transformer import Transformer
from flexrlhf.guideline.search.branch import search
from flexrlhf.guideline.search.found import Result
from flexrlhf.guideline.search.problem import Assignment
from flexrlhf.guideline.simulation.pricing import TextLengths, transformer_of_shape
from flexrlhf.guideline.simulation.simulate import Simulation, simulate
from flexrlhf.guideline.systems.steps import usual_steps
from flexrlhf.guideline.systems.tasks import ACTOR, CRITIC, REF, REWARD, Task
from flexrlhf.plan.pipeline import make_plan
from flexrlhf.plan.plan import Plan
from flexrlhf.strategies import colocated, disaggregated, interleaving
from flexrlhf.text import bytes_text

Method = Literal["guideline", "search", "usual"]
CHUNKED = 3
"""Plans of a search that are tried in chunks, too."""
GAP = 0.01
"""Share of its time by which what the search returns may miss the fastest plan."""


@dataclass(frozen=True)
class Candidate:
    """A placement that was thought of. ``assignment``: in ``space``; None where nothing does, for ``reason``."""

    method: Method
    name: str
    space: Space
    assignment: Assignment | None
    reason: str = ""

    @cached_property
    def spec(self) -> Spec:
        assert self.assignment is not None, "a candidate without settings is refused"
        return spec_of(self.space, self.assignment)

    @property
    def strategy(self) -> str:
        if self.space.has_shadows:
            return disaggregated.NAME
        sizes = {choice.size for choice in self.assignment or ()}
        return colocated.NAME if sizes == {self.space.pool.num_devices} else interleaving.NAME


@dataclass(frozen=True)
class Whole:
    """A candidate as ``run`` and ``simulate`` see it."""

    plan: Plan
    simulation: Simulation


@dataclass(frozen=True)
class Answer:
    """A candidate that fits. ``seconds``: of a step. ``peak``: bytes on the fullest device, ``share`` of its memory."""

    candidate: Candidate
    seconds: float
    peak: float
    share: float
    known: Whole | None = None

    @cached_property
    def whole(self) -> Whole:
        """Made when it is asked for where it is not ``known``."""
        return self.known or whole_of(self.candidate)

    @property
    def plan(self) -> Plan:
        return self.whole.plan

    @property
    def simulation(self) -> Simulation:
        return self.whole.simulation

    @property
    def samples_per_second(self) -> float:
        return self.candidate.space.batch.num_rows / self.seconds

    @property
    def lag(self) -> int:
        return self.candidate.space.spec.schedule.lag


@dataclass(frozen=True)
class Refused:
    """A candidate that does not do."""

    candidate: Candidate
    reason: str


@dataclass(frozen=True)
class Searched:
    """``label``: of the space."""

    label: str
    result: Result


@dataclass(frozen=True)
class Advice:
    """``answers``: fastest first. ``on_paper``: ReaL's space, one placement for each call. ``field``: seconds of a step
    in systems of the field with their own engines; None where one does not fit."""

    answers: tuple[Answer, ...]
    refused: tuple[Refused, ...]
    rules: tuple[Rule, ...]
    searches: tuple[Searched, ...]
    on_paper: Searched | None
    field: Mapping[str, float | None]
    seconds: float

    @property
    def best(self) -> Answer:
        """What to use: the fastest that trains no further behind than it must. Raises UserError when nothing fits."""
        least = min((answer.lag for answer in self.answers), default=0)
        found = next((answer for answer in self.answers if answer.lag == least), None)
        if found is None:
            reasons = "; ".join(dict.fromkeys(f"{item.candidate.name}: {item.reason}" for item in self.refused[:3]))
            raise UserError(f"no placement of these models fits the devices ({reasons}); use more or larger devices")
        return found


def advise(
    spec: Spec, costs: CostModel, lengths: TextLengths | None = None, seconds_limit: float = 60.0, on_paper: bool = True
) -> Advice:
    """``spec``: its placement and what it does not say of models are open. ``seconds_limit``: of all searches."""
    began = perf_counter()
    asked = make_space(spec.model_copy(update={"placement": None}), costs, lengths)
    plain, spaces = with_schedule(asked, asked.spec.schedule.num_chunks, 0), list(_spaces(asked))
    shadowed = [space for _, space in spaces if space.has_shadows]
    ruling = guideline(plain, shadowed[0] if shadowed else None)
    # most searches end long before; the first ones may need most of the time
    searches = tuple(
        Searched(label, search(space.problem(), _left(began, seconds_limit), GAP)) for label, space in spaces
    )
    found = [_found(space, label, item.result) for (label, space), item in zip(spaces, searches, strict=True)]
    # a lag that is asked for leaves nothing without shadows
    others = [] if asked.spec.schedule.lag else [_ruled(ruling), *usual(plain)]
    answers, refused = _judged([_as_asked(candidate, asked) for candidate in (*found, *others)])
    paper = _paper(plain, _left(began, seconds_limit)) if on_paper else None
    field = _field(plain) if on_paper else {}
    return Advice(answers, refused, ruling.rules, searches, paper, field, perf_counter() - began)


def _left(began: float, seconds_limit: float) -> float:
    """Seconds that the next search may take."""
    return max(1.0, (seconds_limit - (perf_counter() - began)) / 2)


def _spaces(asked: Space) -> Iterator[tuple[str, Space]]:
    """The spaces that are searched: with the lag that the YAML says, else without and with one."""
    schedule, said = asked.spec.schedule, "lag" in asked.said
    if not (said and schedule.lag):
        yield "without shadows", with_schedule(asked, schedule.num_chunks, 0)
    if asked.graph.can_shadow and asked.pool.num_devices > 1:
        shadowed = replace(asked, has_shadows=True)
        for lag, label in ((0, "with shadows"), (1, "with shadows, lag 1")):
            if not said or lag == schedule.lag:
                yield label, with_schedule(shadowed, schedule.num_chunks, lag)


def _found(space: Space, label: str, result: Result) -> Candidate:
    if not result.is_feasible or not is_allowed(result.seconds):
        reason = TOO_LARGE if result.pruned_by_memory else "no placement of this kind is possible"
        return Candidate("search", label, space, None, reason)
    best = [polished(space, result.best[0].assignment), *(plan.assignment for plan in result.best[1:CHUNKED])]
    _, cut, assignment = in_chunks(space, best)
    return Candidate("search", label, cut, assignment)


def _as_asked(candidate: Candidate, asked: Space) -> Candidate:
    """Without what the YAML's strategy rules out."""
    wanted = asked.spec.schedule.strategy
    if wanted in (None, candidate.strategy) or candidate.assignment is None:
        return candidate
    return replace(candidate, assignment=None, reason=f"is {candidate.strategy}; schedule.strategy says {wanted}")


def _ruled(ruling: Ruling) -> Candidate:
    return Candidate("guideline", ruling.strategy, ruling.space, ruling.assignment, TOO_LARGE)


def usual(space: Space) -> Iterator[Candidate]:
    """The placements of the field, in the engines of this spec: DeepSpeed-Chat's, OpenRLHF's, HybridFlow's split and
    the symmetric heuristic of ReaL's comparison."""
    roles, one = space.roles.all, Fraction(1)
    everywhere = (one,) * len(roles)
    yield _settled(space, "co-located ZeRO-3", everywhere, _is_zero3)
    yield _settled(space, "standalone", (one / len(roles),) * len(roles))
    if is_ppo(space):
        yield _settled(space, "split", (one / 2,) * len(roles))
    widest = min(8, space.pool.per_node)
    yield _settled(space, f"symmetric, tp {widest}", everywhere, lambda member, settings: settings.tp == widest)


def _is_zero3(member: Member, settings: ModelSpec) -> bool:
    """Weights of a rollout engine are whole."""
    return member.is_rollout or (settings.zero == 3 and settings.tp == 1)


def _settled(space: Space, name: str, vector: Vector, allowed: Allowed | None = None) -> Candidate:
    ranks = vector_ranks(space, vector)
    if ranks is None:
        return Candidate("usual", name, space, None, "these shares are no whole devices, or of several classes")
    found = settle(space, ranks, allowed)
    return Candidate("usual", name, space, *((None, found) if isinstance(found, str) else (found, "")))


def _judged(candidates: Sequence[Candidate]) -> tuple[tuple[Answer, ...], tuple[Refused, ...]]:
    """Those that do, fastest first, and the others.

    Planned whole is what is told in full: what would be taken, and what the guideline says.
    """
    judged = [judge(item) if item.method == "guideline" else estimate(item) for item in candidates]
    answers = sorted((item for item in judged if isinstance(item, Answer)), key=lambda answer: answer.seconds)
    refused = [item for item in judged if isinstance(item, Refused)]
    least = min((answer.lag for answer in answers), default=0)
    for answer in list(answers):
        if answer.lag == least:
            checked = answer if answer.known is not None else judge(answer.candidate)
            if isinstance(checked, Answer):
                answers[answers.index(answer)] = checked
                break
            answers.remove(answer)
            refused.append(checked)
    return tuple(answers), tuple(refused)


def judge(candidate: Candidate) -> Answer | Refused:
    """Plan and simulate a candidate, as ``run`` would."""
    if candidate.assignment is None:
        return Refused(candidate, candidate.reason)
    try:
        whole = whole_of(candidate)
    except UserError as error:
        return Refused(candidate, str(error))
    peak, share = _fullest(whole.plan)
    if share > 1:
        return Refused(candidate, f"needs {bytes_text(int(peak))} on a device, {share:.0%} of its memory")
    return Answer(candidate, whole.simulation.seconds, peak, share, whole)


def whole_of(candidate: Candidate) -> Whole:
    """Raises UserError where it cannot be planned."""
    plan = make_plan(candidate.spec)
    return Whole(plan, simulate(plan, candidate.space.costs, candidate.space.lengths))


def estimate(candidate: Candidate) -> Answer | Refused:
    """As ``judge``, by what the search knows of a candidate."""
    if candidate.assignment is None:
        return Refused(candidate, candidate.reason)
    pool, chosen = candidate.space.pool, candidate.assignment
    used = {at: device_bytes(chosen, at) for at in {choice.start for choice in chosen}}
    memory = {at: pool.memory[pool.kinds_of(at, 1)[0]] / USABLE for at in used}
    fullest = max(used, key=lambda at: used[at] / memory[at])
    seconds = seconds_of(candidate.space, chosen)
    return Answer(candidate, seconds, used[fullest], used[fullest] / memory[fullest])


def _fullest(plan: Plan) -> tuple[float, float]:
    """Bytes on the device whose memory is filled most, and how far."""
    shares = [
        (memory.peak_bytes / size if (size := plan.cluster.memory_bytes(memory.rank)) else 0.0, memory.peak_bytes)
        for memory in plan.memories
    ]
    share, peak = max(shares)
    return float(peak), share


def is_ppo(space: Space) -> bool:
    """Whether it has PPO's four models, so its six calls: what other systems published plans and times of."""
    return set(space.roles.all) == {ACTOR, CRITIC, REF, REWARD}


def _field(space: Space) -> dict[str, float | None]:
    """For PPO on devices of one class."""
    if not is_ppo(space) or len(space.devices) > 1:
        return {}
    (device,) = space.devices.values()
    task = Task(
        models=_transformers(space),
        devices=space.pool.num_devices,
        device=device,
        links=Links(device.link_gb_s, device.node_gb_s),
        rows=space.batch.num_rows,
        prompt=space.lengths.prompt,
        responses=space.lengths.responses,
        minibatches=space.spec.algorithm.num_mini_batches * space.spec.algorithm.epochs,
        per_node=space.pool.per_node,
    )
    return {name: None if step is None else step.seconds for name, step in usual_steps(task).items()}


def _transformers(space: Space) -> dict[str, Transformer]:
    return {
        role: transformer_of_shape(shape, space.roles.heads[role], is_adapted=bool(shape.adapters))
        for role, shape in space.shapes.items()
    }


def _paper(space: Space, seconds: float) -> Searched | None:
    """ReaL's space, for PPO."""
    if not is_ppo(space):
        return None
    models = _transformers(space)
    algorithm = space.spec.algorithm
    problem = PerCall(
        models,
        space.devices,
        space.pool,
        space.costs,
        space.lengths,
        space.batch.num_rows,
        algorithm.num_mini_batches * algorithm.epochs,
        space.spec.models.actor.engine if space.spec.models.actor is not None else "torch",
        space.spec.rollout.engine,
    ).problem()
    return Searched("one placement for each call", search(problem, seconds, GAP))


def write_advised(answer: Answer, path: Path) -> None:
    """The YAML of ``answer``, with what it is from in a comment. Raises UserError where it cannot be written."""
    seconds, candidate = answer.seconds, answer.candidate
    head = [
        f"# {candidate.method}: {candidate.name}; {seconds:.2f} s a step as simulated, {bytes_text(int(answer.peak))}",
        "# models come with sizes alone (init): give the path of their weights instead, and of the data",
    ]
    models = candidate.spec.models
    roles = candidate.space.roles.all
    has_sizes = any((model := models.of(role)) is not None and model.init is not None for role in roles)
    try:
        path.write_text("\n".join([*head[: 1 + has_sizes], dump_spec(candidate.spec, short=True)]))
    except OSError as error:
        raise UserError(f"--output {path}: cannot be written ({error.strerror})") from None
