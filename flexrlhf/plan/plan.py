"""A run as data: everything that the ranks will do, known before a process starts.

``make_plan`` is pure: the same spec gives the same plan on every rank, and nobody sends a plan to anybody.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path

from flexrlhf.config.algorithms import PolicySpec
from flexrlhf.config.spec import ModelSpec, RolloutSpec, Spec
from flexrlhf.engines.capabilities import check_engines, check_models
from flexrlhf.errors import UserError
from flexrlhf.memory.budget import RankMemory, SequenceLengths, Sizing, rank_memory
from flexrlhf.memory.states import State
from flexrlhf.operators.columns import Lengths
from flexrlhf.operators.evaluation import check_evaluation
from flexrlhf.operators.graph import Graph
from flexrlhf.operators.registry import make_graph
from flexrlhf.operators.rollout import with_rollout
from flexrlhf.operators.sources import SECTIONS
from flexrlhf.placement.cluster import Cluster, make_cluster
from flexrlhf.placement.groups import Group, compute_groups
from flexrlhf.placement.layout import BatchShape
from flexrlhf.placement.names import ModelName
from flexrlhf.placement.placed import PlacedModel, Placement
from flexrlhf.placement.ratios import Roles, place
from flexrlhf.strategies.choice import STRATEGIES, choose_strategy
from flexrlhf.strategies.instructions import Eval, Instruction, Move, Run, Save, Sync
from flexrlhf.strategies.residency import Memory, with_residency
from flexrlhf.strategies.schedule import Schedule, later_chunks
from flexrlhf.strategies.workload import first_alike, workload
from flexrlhf.weights.lora import with_adapters
from flexrlhf.weights.reshard import sync_bytes
from flexrlhf.weights.shapes import ModelShape, model_shape


@dataclass(frozen=True)
class Plan:
    """``shapes``: parameter shapes by role; a role is absent when only loading the model can tell.

    ``offloaded``: rank → placed models that wait in host memory when the run starts.
    """

    spec: Spec
    cluster: Cluster
    graph: Graph
    placement: Placement
    strategy: str
    schedule: Schedule
    batch: BatchShape
    lengths: Lengths
    shapes: dict[str, ModelShape]
    groups: tuple[Group, ...]
    offloaded: Mapping[int, tuple[ModelName, ...]] = field(default_factory=dict)

    def with_residency(self) -> Plan:
        """This plan with Offload and Reload where models fit a device one after the other, but not together."""
        memory = Memory(self.sizing, self.cluster, self.batch)
        residency = with_residency(self.schedule.instructions, memory)
        schedule = replace(self.schedule, instructions=residency.instructions)
        return replace(self, schedule=schedule, offloaded=residency.offloaded)

    def model(self, role: str) -> ModelSpec:
        """The resolved settings of a role of the graph."""
        model = self.spec.models.of(role)
        assert model is not None, f"{role} is resolved"
        return model

    @property
    def temperature(self) -> float:
        """Of the sampling distribution; algorithms without generation have none and take the logits as they are."""
        return getattr(self.spec.algorithm, "temperature", 1.0)

    @property
    def outputs(self) -> dict[str, Path]:
        """Role → absolute directory of the model that the run writes."""
        return {role: (self.spec.directory / role).resolve() for role in self.graph.trained}

    def num_updates(self, role: str) -> int:
        """Optimizer steps of a trained model in the whole run."""
        algorithm = self.spec.algorithm
        steps = max(0, self.spec.steps - self.graph.first_step(role))
        return steps * algorithm.num_mini_batches * algorithm.epochs

    def ahead(self, run: Run) -> list[range]:
        """The mini-batches of the later chunks that the model of ``run``, which generates, may begin with already."""
        return later_chunks(self.schedule.instructions, run) if run.operator.kind == "generate" else []

    def move_bytes(self, move: Move, batch: BatchShape | None = None) -> int:
        """Bytes that cross between ranks when ``move`` runs once. ``batch``: of an evaluation, if it is in its list."""
        samples = (batch or self.batch).samples_per_prompt
        return sum(len(t.prompts) * samples * self.lengths.row_bytes(t.column) for t in move.transfers)

    def sync_bytes(self, sync: Sync) -> int | None:
        """Bytes that cross between ranks when ``sync`` runs once; None before an unknown architecture is loaded."""
        source, destination = self.placement[sync.source], self.placement[sync.destination]
        shape = self.shapes.get(source.role)
        if shape is None:
            return None
        return sync_bytes(source, destination, shape, sync.transfers, bucket_bytes(self.spec), self.spec.sync.checksum)

    def state(self, model: PlacedModel, rank: int) -> State | None:
        """What ``model`` holds on ``rank``; None before an unknown architecture is loaded."""
        return self.sizing.state(model, rank)

    @cached_property
    def sizing(self) -> Sizing:
        """What bytes follow from."""
        texts = SequenceLengths(self.lengths.prompt, self.lengths.response, self.batch.samples_per_prompt)
        return Sizing(self.placement, self.shapes, texts, self.spec.sync)

    def memory(self, rank: int) -> RankMemory:
        """Bytes on ``rank`` while the run lasts."""
        mine = self.schedule.for_rank(rank)
        return rank_memory(self.sizing, rank, workload(mine, self.placement, self.batch, rank))

    @cached_property
    def memories(self) -> tuple[RankMemory, ...]:
        """That of every rank; of ranks with the same work the first one's."""
        alike = first_alike(self.schedule.instructions, self.placement, self.batch, self.cluster)
        found = {rank: self.memory(rank) for rank in set(alike.values())}
        return tuple(replace(found[first], rank=rank) for rank, first in sorted(alike.items()))


def bucket_bytes(spec: Spec) -> int:
    return int(spec.sync.bucket_mb * 1e6)


def make_plan(spec: Spec, pending: Mapping[Path, ModelSpec] | None = None) -> Plan:
    """Plan a run. ``pending``: directory → model, for models that an earlier run of the same command will write there.

    Raises UserError for everything that a user can mend: models, placement, strategy, engine.
    """
    graph = make_graph(spec)
    check_evaluation(graph, spec)
    spec = resolve_models(spec, graph)
    cluster = make_cluster(spec.cluster)
    placement = place(spec, roles_of(graph, spec), graph.can_shadow, cluster)
    strategy = choose_strategy(spec, placement)
    graph = spread(graph, placement, spec)
    graph = with_rollout(graph, spec, is_remote=any(model.rollout is not None for model in placement.shadows))
    check_engines(graph, placement)
    shapes = model_shapes(spec, graph, pending or {})
    check_models(placement, shapes, cluster)
    batch = BatchShape(
        spec.algorithm.num_prompts,
        spec.algorithm.samples_per_prompt,
        spec.algorithm.num_mini_batches,
        spec.schedule.num_chunks,
    )
    lengths = Lengths(spec.data.max_prompt_tokens, spec.data.max_response_tokens)
    instructions = tuple(STRATEGIES[strategy].order(graph, placement, batch, spec))
    schedule = Schedule(instructions, max((i.lag for i in instructions), default=0))
    groups = tuple(_groups(placement, instructions))
    made = Plan(spec, cluster, graph, placement, strategy, schedule, batch, lengths, shapes, groups)
    _check_warmup(made)
    return made.with_residency()


def spread(graph: Graph, placement: Placement, spec: Spec) -> Graph:
    """``graph`` with what either copy may compute on the trained one, beside the inference copy that is at work.

    Both must hold the same weights then: no lag, and a sync behind every step.
    """
    shadowed = {model.role for model in placement.shadows}
    if spec.schedule.lag or spec.sync.every > 1:
        return graph
    return replace(
        graph,
        operators=tuple(
            replace(operator, on_trained=operator.on_trained or (operator.either_copy and operator.role in shadowed))
            for operator in graph.operators
        ),
    )


def roles_of(graph: Graph, spec: Spec) -> Roles:
    """What is to be placed; the role that generates has a rollout engine where one is asked for."""
    rollout = graph.generated if spec.rollout.engine != "transformers" else None
    return Roles(graph.roles, graph.trained, graph.heads, rollout)


def _check_warmup(made: Plan) -> None:
    for role in made.graph.trained:
        steps = made.model(role).optimizer.warmup_steps
        updates = made.num_updates(role)
        if not updates:
            raise UserError(
                f"algorithm.freeze_actor_steps: {made.graph.first_step(role)} of the run's {made.spec.steps} steps, so "
                f"the {role} is never trained; use fewer than {made.spec.steps}"
            )
        if steps >= updates:
            raise UserError(
                f"models.{role}.optimizer.warmup_steps: {steps} of the run's {updates} optimizer steps: the "
                f"learning rate never reaches its value; use fewer than {updates}"
            )


def make_plans(specs: Sequence[Spec]) -> list[Plan]:
    """Plan the runs of one command. They share their ranks; models that an earlier one writes need not exist yet."""
    pending: dict[Path, ModelSpec] = {}
    plans: list[Plan] = []
    for spec in specs:
        made = make_plan(spec, pending)
        pending |= {path: made.model(role) for role, path in made.outputs.items()}
        plans.append(made)
    sizes = {made.placement.num_ranks: made.spec.name for made in plans}
    if len(sizes) > 1:
        found = ", ".join(f"{name} {size}" for size, name in sizes.items())
        raise UserError(
            f"cluster: runs of one command share their ranks, found {found} devices; give all the same with --devices"
        )
    devices = {made.spec.cluster.device: made.spec.name for made in plans}
    if len(devices) > 1:
        found = ", ".join(f"{name} {device}" for device, name in devices.items())
        raise UserError(f"cluster.device: runs of one command share their ranks, found {found}; give all the same")
    names = [made.spec.name for made in plans]
    if len(set(names)) < len(names):
        raise UserError(f"name: runs of one command need different names, found {', '.join(names)}")
    return plans


def resolve_models(spec: Spec, graph: Graph) -> Spec:
    """Fill in ref (the actor's weights) and critics (those of what scores); refuse roles that nothing asks."""
    written = {role for role, model in spec.models if model is not None}
    shared = {role for role in written if _shares(spec, role, graph)}
    surplus = sorted(written - set(graph.roles) - shared)
    if surplus:
        raise UserError(f"models.{surplus[0]}: {_why_none(spec, surplus[0], graph)}")
    filled = dict(spec.models)
    # a critic starts from what scores, where that is a model
    origins = {"ref": "actor", "critic": "reward", "cost_critic": "cost"}
    for role in [role for role in origins if role in graph.roles]:
        origin = origins[role] if origins[role] in graph.roles else "actor"
        filled[role] = _weights_of(filled[role] or ModelSpec(), filled[origin])
    for role in graph.roles:
        if filled.get(role) is None:
            hint = f"; or say with {role}: where scores come from" if role in SECTIONS else ""
            raise UserError(f"models.{role}: missing; {spec.algorithm.name} needs {', '.join(graph.roles)}{hint}")
    models = spec.models.model_copy(update=filled)
    return spec.model_copy(update={"models": models, "rollout": _resolve_rollout(spec.rollout, filled["actor"])})


def _why_none(spec: Spec, role: str, graph: Graph) -> str:
    """Why this run has no such role."""
    section = next((name for name in SECTIONS if role == name or role.startswith(f"{name}_")), None)
    if section is not None and dict(spec)[section] is not None:
        return f"no source of {section} is this model; add {{model: {role}}} there, or remove it here"
    if role == "ref" and isinstance(spec.algorithm, PolicySpec) and spec.algorithm.kl is None:
        return "algorithm.kl is null, so nothing asks a reference model; give algorithm.kl, or remove it here"
    return f"{spec.algorithm.name} has no {role}; it has {', '.join(graph.roles)}"


def _resolve_rollout(rollout: RolloutSpec, actor: ModelSpec | None) -> RolloutSpec:
    """Fill in what the parity gate allows for the types of both sides."""
    parity = rollout.parity
    if rollout.engine == "transformers" or actor is None or parity is None:
        return rollout
    is_exact = (rollout.dtype or actor.dtype) == actor.dtype == "float32"
    limits = {"max_difference": 1e-3 if is_exact else 1.0, "mean_difference": 1e-4 if is_exact else 0.05}
    missing = {name: limit for name, limit in limits.items() if getattr(parity, name) is None}
    return rollout.model_copy(update={"parity": parity.model_copy(update=missing)})


def _shares(spec: Spec, role: str, graph: Graph) -> bool:
    """Whether ``role`` is another's base weights in this graph; refused where that is not possible."""
    model = spec.models.of(role)
    if model is None or model.share is None:
        return False
    owner = spec.models.of(model.share)
    if role != "ref":
        raise UserError(f"models.{role}.share: only ref can share the actor's weights, found it on {role}")
    if owner is None or owner.lora is None:
        raise UserError(
            f"models.ref.share: {model.share} has no lora, so its weights are trained themselves; "
            f"give models.{model.share}.lora or remove models.ref.share"
        )
    return any(operator.role == model.share and not operator.adapters for operator in graph.operators)


def _weights_of(model: ModelSpec, origin: ModelSpec | None) -> ModelSpec:
    if origin is None or model.path is not None or model.init is not None:
        return model
    return model.model_copy(update={"path": origin.path, "init": origin.init})


def model_shapes(spec: Spec, graph: Graph, pending: Mapping[Path, ModelSpec]) -> dict[str, ModelShape]:
    """Parameter shapes by role; a role is absent when only loading the model can tell."""
    shapes = {}
    for role in graph.roles:
        model = spec.models.of(role)
        assert model is not None, f"{role} is resolved"
        lora = model.lora
        while model.path is not None and Path(model.path).resolve() in pending:
            earlier = pending[Path(model.path).resolve()]
            if earlier.lora is not None:
                raise UserError(
                    f"models.{role}.path {model.path}: an earlier run writes adapters there, not a whole model; "
                    f"remove that run's lora or give another path"
                )
            model = earlier
        shape = model_shape(role, model, graph.heads[role])
        if shape is not None:
            shapes[role] = shape if lora is None else with_adapters(role, shape, lora)
    return shapes


def _groups(placement: Placement, instructions: tuple[Instruction, ...]) -> list[Group]:
    """All groups in the order in which every rank creates them. A single rank needs none."""
    groups = [group for model in placement.models for group in compute_groups(model)]
    for instruction in instructions:
        match instruction:
            case Move():
                groups.append(Group("move", instruction.ranks))
            case Eval():
                groups += [Group("move", move.ranks) for move in instruction.moves]
            case Sync():
                if not instruction.is_local:
                    groups.append(Group(f"sync {instruction.source}", instruction.ranks))
                groups += [Group(f"gather {instruction.source}", ranks) for ranks in instruction.gathers]
            case Save():
                groups.append(Group(f"gather {instruction.model}", instruction.ranks))
    return [group for group in dict.fromkeys(groups) if len(group.ranks) > 1 or group.alone]
