"""Which placement to use: the published rules, an exact search, and the usual placements of the field beside them.

Every answer is a Spec that was planned and simulated like any other; what does not fit is told with its reason.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from fractions import Fraction
from pathlib import Path
from time import perf_counter
from typing import Literal

from flexrlhf.errors import UserError
from flexrlhf.guideline.advice.per_call import PPO_CALLS, PerCall
from flexrlhf.guideline.advice.proposals import Allowed, Vector, in_chunks, settle, spec_of, vector_ranks
from flexrlhf.guideline.advice.rules import Rule, Ruling, guideline
from flexrlhf.guideline.advice.space import FORBIDDEN, Space, make_space, with_schedule
from flexrlhf.guideline.costs.calls import CostModel, Links
from flexrlhf.guideline.costs.transformer import Transformer
from flexrlhf.guideline.search.branch import search
from flexrlhf.guideline.search.found import Result
from flexrlhf.guideline.search.problem import Assignment
from flexrlhf.guideline.simulation.pricing import TextLengths, transformer_of_shape
from flexrlhf.guideline.simulation.simulate import Simulation, simulate
from flexrlhf.guideline.systems.steps import usual_steps
from flexrlhf.guideline.systems.tasks import ACTOR, CRITIC, REF, REWARD, Task
from flexrlhf.plan import Plan, make_plan
from flexrlhf.spec import Spec
from flexrlhf.spec_file import dump_spec

Method = Literal["guideline", "search", "usual"]
CHUNKED = 3
"""Plans of a search that are tried in chunks, too."""
GAP = 0.01
"""Share of its time by which what the search returns may miss the fastest plan."""


@dataclass(frozen=True)
class Candidate:
    """A placement that was thought of. ``spec``: None where no settings of it fit. ``why``: one line each."""

    method: Method
    name: str
    spec: Spec | None
    why: tuple[str, ...] = ()


@dataclass(frozen=True)
class Answer:
    """A candidate that fits. ``peak``: bytes on the fullest device; ``share``: of that device's memory."""

    candidate: Candidate
    plan: Plan
    simulation: Simulation
    peak: float
    share: float

    @property
    def seconds(self) -> float:
        return self.simulation.seconds


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
        """What to use: the fastest that trains as the spec asks for. Raises UserError when nothing fits."""
        if not self.answers:
            reasons = "; ".join(dict.fromkeys(f"{item.candidate.name}: {item.reason}" for item in self.refused[:3]))
            raise UserError(f"no placement of these models fits the devices ({reasons}); use more or larger devices")
        return next((answer for answer in self.answers if not _is_staler(answer, self)), self.answers[0])


def _is_staler(answer: Answer, advice: Advice) -> bool:
    """Whether it trains one batch behind though others need not."""
    lags = {other.plan.spec.schedule.lag for other in advice.answers}
    return answer.plan.spec.schedule.lag > min(lags)


def advise(
    spec: Spec, costs: CostModel, lengths: TextLengths | None = None, seconds_limit: float = 10.0, on_paper: bool = True
) -> Advice:
    """``spec``: its placement and what it does not say of models are open. ``seconds_limit``: of all searches."""
    began = perf_counter()
    plain = with_schedule(make_space(spec.model_copy(update={"placement": None}), costs, lengths), 1, 0)
    spaces = list(_spaces(plain))
    shadowed = [space for _, space in spaces if space.has_shadows]
    ruling = guideline(plain, shadowed[0] if shadowed else None)
    share = seconds_limit / (len(spaces) + on_paper)
    searches = tuple(Searched(label, search(space.problem(), share, GAP)) for label, space in spaces)
    found = [_found(space, label, item.result) for (label, space), item in zip(spaces, searches, strict=True)]
    judged = [judge(item, costs, lengths) for item in (_ruled(ruling), *found, *usual(plain))]
    answers = sorted((item for item in judged if isinstance(item, Answer)), key=lambda answer: answer.seconds)
    paper = _paper(plain, share) if on_paper else None
    refused = tuple(item for item in judged if isinstance(item, Refused))
    field = _field(plain) if on_paper else {}
    return Advice(tuple(answers), refused, ruling.rules, searches, paper, field, perf_counter() - began)


def _spaces(plain: Space) -> Iterator[tuple[str, Space]]:
    """The spaces that are searched."""
    yield "without shadows", plain
    if plain.graph.can_shadow and plain.pool.num_devices > 1:
        shadowed = replace(plain, has_shadows=True)
        yield "with shadows", shadowed
        yield "with shadows, lag 1", with_schedule(shadowed, 1, 1)


def _found(space: Space, label: str, result: Result) -> Candidate:
    if not result.is_feasible or result.seconds >= FORBIDDEN:
        return Candidate("search", label, None)
    _, cut, assignment = in_chunks(space, [plan.assignment for plan in result.best[:CHUNKED]])
    return Candidate("search", label, spec_of(cut, assignment))


def _ruled(ruling: Ruling) -> Candidate:
    spec = None if ruling.assignment is None else spec_of(ruling.space, ruling.assignment)
    return Candidate("guideline", ruling.strategy, spec, tuple(rule.name for rule in ruling.rules))


def usual(space: Space) -> Iterator[Candidate]:
    """The placements of the field, in the engines of this spec: DeepSpeed-Chat's, OpenRLHF's, HybridFlow's split and
    the symmetric heuristic of ReaL's comparison."""
    roles, one = space.roles.all, Fraction(1)
    everywhere = (one,) * len(roles)
    yield _settled(space, "co-located ZeRO-3", everywhere, lambda member, model: model.zero == 3 and model.tp == 1)
    yield _settled(space, "standalone", (one / len(roles),) * len(roles))
    if len(roles) == 4:
        yield _settled(space, "split", (one / 2,) * len(roles))
    widest = min(8, space.pool.per_node)
    yield _settled(space, f"symmetric, tp {widest}", everywhere, lambda member, model: model.tp == widest)


def _settled(space: Space, name: str, vector: Vector, allowed: Allowed | None = None) -> Candidate:
    ranks = _ranks(space, vector)
    assignment: Assignment | None = None if ranks is None else settle(space, ranks, allowed)
    spec = None if assignment is None else spec_of(space, assignment)
    return Candidate("usual", name, spec)


def _ranks(space: Space, vector: Vector) -> Mapping[str, tuple[int, ...]] | None:
    return vector_ranks(space, vector)


def judge(candidate: Candidate, costs: CostModel, lengths: TextLengths | None) -> Answer | Refused:
    """Plan and simulate a candidate, as ``run`` would."""
    if candidate.spec is None:
        return Refused(candidate, "no settings that it allows fit into memory")
    try:
        plan = make_plan(candidate.spec)
    except UserError as error:
        return Refused(candidate, str(error))
    peak, share = _fullest(plan)
    if share > 1:
        return Refused(candidate, f"needs {peak / 1e9:.0f} GB on a device, {share:.0%} of its memory")
    return Answer(candidate, plan, simulate(plan, costs, lengths), peak, share)


def _fullest(plan: Plan) -> tuple[float, float]:
    """Bytes on the device whose memory is filled most, and how far."""
    shares = [
        (memory.peak_bytes / size if (size := plan.cluster.memory_bytes(memory.rank)) else 0.0, memory.peak_bytes)
        for memory in plan.memories
    ]
    share, peak = max(shares)
    return float(peak), share


def _field(space: Space) -> dict[str, float | None]:
    """For algorithms with PPO's roles on devices of one class."""
    if set(space.roles.all) != {ACTOR, CRITIC, REF, REWARD} or len(space.devices) > 1:
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
        role: transformer_of_shape(shape, role, is_adapted=bool(shape.adapters)) for role, shape in space.shapes.items()
    }


def _paper(space: Space, seconds: float) -> Searched | None:
    """ReaL's space, for algorithms with its six calls."""
    if set(space.roles.all) != {call.role for call in PPO_CALLS}:
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
        f"# {candidate.method}: {candidate.name}; {seconds:.2f} s a step as simulated, {answer.peak / 1e9:.0f} GB",
        "# models come with sizes alone (init): give the path of their weights instead, and of the data",
    ]
    has_sizes = any(answer.plan.model(role).init is not None for role in answer.plan.graph.roles)
    assert candidate.spec is not None, "what was simulated has a spec"
    try:
        path.write_text("\n".join([*head[: 1 + has_sizes], dump_spec(candidate.spec)]))
    except OSError as error:
        raise UserError(f"--output {path}: cannot be written ({error.strerror})") from None
