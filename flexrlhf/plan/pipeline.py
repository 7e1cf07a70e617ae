"""The planning pipeline: from a spec to a plan, in stages that runs, suggestions and the advisor's space share.

    spec ── of ──> models, roles ── place ──> placement ── plan ──> graph that runs, schedule, groups, memory

All of it is pure: the same spec gives the same plan on every rank, and no plan is sent between ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

from flexrlhf.config.engines import EngineFacts
from flexrlhf.config.model_settings import ModelSpec
from flexrlhf.config.output_settings import Switches
from flexrlhf.config.placement_settings import PlacementMap
from flexrlhf.config.spec import Spec
from flexrlhf.errors import UserError
from flexrlhf.memory.budget import Sizing
from flexrlhf.operators.columns import Column, Lengths
from flexrlhf.operators.graph import Graph
from flexrlhf.placement.cluster import Cluster
from flexrlhf.placement.groups import Group
from flexrlhf.placement.layout import BatchShape
from flexrlhf.placement.per_operator import place_operators
from flexrlhf.placement.place import place
from flexrlhf.placement.placement import Placement
from flexrlhf.placement.ratios import Roles
from flexrlhf.plan.algorithm_graph import check_evaluation, heads_of, make_graph
from flexrlhf.plan.attempts import with_attempts
from flexrlhf.plan.cache_size import with_residency
from flexrlhf.plan.engine_checks import check_operators
from flexrlhf.plan.episodes import with_episodes
from flexrlhf.plan.hub_names import with_snapshots
from flexrlhf.plan.kept_caches import check_kept_slots
from flexrlhf.plan.model_checks import check_models
from flexrlhf.plan.models import (
    model_shapes,
    resolve_models,
    roles_that_keep_starts,
    shares_reference,
    with_device_sizes,
    with_parity_limits,
    with_shared_reference,
    with_starts,
)
from flexrlhf.plan.operator_protocols import with_protocols
from flexrlhf.plan.plan import Plan
from flexrlhf.plan.rollout_engine import with_rollout, with_rollout_engine
from flexrlhf.plan.segments import with_segments
from flexrlhf.plan.tokenizers import check_tokenizers
from flexrlhf.strategies.instructions import Eval, Instruction, Move, Save, Sync
from flexrlhf.strategies.late_operators import combines_behind_training
from flexrlhf.strategies.schedule import Schedule
from flexrlhf.strategies.strategy import Strategy
from flexrlhf.weights.model_shape import ModelShape

SECOND_VLLM = "a process can have one vllm that sleeps, which an earlier run of this command is"
"""Why a later run of a command generates with transformers."""


@dataclass(frozen=True)
class ResolvedSpec:
    """A spec before its models are placed.

    spec:     every model of the graph is filled in, and the engine that generates.
    graph:    the algorithm's graph, which says which roles are placed and trained.
    cluster:  devices by rank.
    choice:   engine that ``rollout.engine: auto`` is, and why; empty if one is written, or there is no other.
    """

    spec: Spec
    graph: Graph
    cluster: Cluster
    choice: str = ""

    @classmethod
    def of(cls, spec: Spec, pending: Mapping[Path, ModelSpec] | None = None, obstacle: str = "") -> ResolvedSpec:
        """Make the graph of ``spec`` and fill in its models and the engine that generates.

        pending:   directory → model, for models that an earlier run of the command will write there.
        obstacle:  why vLLM cannot generate, if that follows from an earlier run.

        Raises UserError for models and settings that do not go with it.
        """
        spec = with_snapshots(spec)
        graph = make_graph(spec)
        if shares_reference(spec, graph):
            spec = with_shared_reference(spec)
            graph = make_graph(spec)
        check_evaluation(graph, spec)
        cluster = Cluster.of(spec.cluster)
        spec = with_device_sizes(resolve_models(spec, graph, pending), cluster)
        spec, choice = with_rollout_engine(spec, graph, cluster, pending or {}, obstacle)
        return cls(with_parity_limits(spec), graph, cluster, choice)

    @cached_property
    def roles(self) -> Roles:
        """Roles to place; the one that generates has a rollout engine where the spec names one."""
        rollout = self.graph.generated if self.spec.rollout.has_copy else None
        return Roles(self.graph.roles, self.graph.trained, heads_of(self.graph), rollout, self.graph.generated)

    def place(self) -> Placement:
        """Return the placed models. Raises UserError with the nearest placement that works."""
        if not isinstance(self.spec.placement, PlacementMap) or self.spec.placement.operators is None:
            return place(self.spec, self.roles, self.graph.can_shadow, self.cluster)
        entries = self.spec.operators
        shadowed = {each.role for each in self.graph.operators if each.name in entries and entries[each.name].shadow}
        calls = [operator for operator in self.placeable_graph(shadowed).operators if operator.call is not None]
        return place_operators(self.spec, calls, self.roles, self.cluster)

    def plan(
        self,
        placement: Placement,
        shapes: dict[str, ModelShape],
        known: Sizing | None = None,
        only: int | None = None,
    ) -> Plan:
        """Return the plan under ``placement``. Raises UserError if strategy or engines refuse it.

        ``known``: sizes of another plan, of which those of models that are the same are taken over.
        ``only``: the rank whose memory is wanted.
        """
        spec = self.spec
        strategy = Strategy.choose(spec, placement)
        graph = self.run_graph(placement)
        placement = with_starts(with_protocols(placement, graph, spec), roles_that_keep_starts(spec, graph))
        check_operators(graph, placement, is_evaluated=spec.eval is not None)
        lengths, on_gpus = self.run_lengths(shapes), spec.cluster.device != "cpu"
        generates = {placement.copy_for(each).name for each in graph.operators if each.kind == "generate"}
        check_models(placement, shapes, self.cluster, lengths, generates, on_gpus)
        batch = BatchShape.of(spec)
        instructions = tuple(Strategy.ALL[strategy].order(graph, placement, batch, spec))
        plan = Plan(
            spec=spec,
            cluster=self.cluster,
            graph=graph,
            placement=placement,
            strategy=strategy,
            schedule=Schedule(instructions, max((i.lag for i in instructions), default=0)),
            batch=batch,
            lengths=lengths,
            shapes=shapes,
            groups=tuple(_groups(placement, instructions, spec.debug)),
            choice=self.choice,
        )
        check_kept_slots(spec, plan.kept_slots, placement, shapes, lengths)
        if known is not None:
            plan.sizing.take_over(known)
        return with_residency(plan, only)

    def run_graph(self, placement: Placement) -> Graph:
        """Return the algorithm's graph as it runs under ``placement``: changed for shared weights, copies and rollout
        engines. Every rewrite of a graph is a line here, in ``placeable_graph`` or in ``make_graph``, which makes the
        graph whose models are placed.

        Raises UserError for settings of rollouts that do not go with the algorithm.
        """
        placed = replace(self, spec=placement.as_placed(self.spec))
        graph = placed.placeable_graph({model.role for model in placement.shadows})
        return combines_behind_training(graph, placement, self.spec.schedule.lag)

    def run_lengths(self, shapes: Mapping[str, ModelShape]) -> Lengths:
        """Return the padded lengths of the run, with the bytes of the experts that are recorded of a token."""
        lengths, role = self.spec.lengths, self.graph.generated
        model, shape = self.spec.models.of(role or ""), shapes.get(role or "")
        if model is None or not model.has_replay or shape is None or shape.sizes is None:
            return lengths
        experts = shape.sizes.experts
        if experts is None:
            return lengths
        item = Column.expert_bytes(experts.number)
        return replace(lengths, experts=shape.sizes.sparse_layers * experts.active * item)

    def placeable_graph(self, shadowed: Collection[str]) -> Graph:
        """Return the algorithm's graph with all operators that run, which may be placed one by one.

        ``shadowed``: roles that infer with shadows.
        """
        spec, graph = self.spec, self.graph
        # both copies store the same weights without a lag, and with a sync of unrounded weights after every step
        if not spec.schedule.lag and spec.sync.every == 1 and spec.sync.dtype is None:
            of_either = {each.name for each in graph.operators if each.either_copy and each.role in shadowed}
            trained = of_either - spec.operators.keys()
            operators = (replace(each, on_trained=each.on_trained or each.name in trained) for each in graph.operators)
            graph = replace(graph, operators=tuple(operators))
        graph = with_rollout(graph, spec, is_remote=graph.generated in shadowed)
        return with_attempts(with_segments(with_episodes(graph, spec), spec), spec)


def make_plan(spec: Spec, pending: Mapping[Path, ModelSpec] | None = None, obstacle: str = "") -> Plan:
    """Plan a run. ``pending``: directory → model, for models that an earlier run of the same command will write there.

    ``obstacle``: why vLLM cannot generate, if that follows from an earlier run. Raises UserError for everything that a
    user can mend: models, placement, strategy, engine.
    """
    resolved = ResolvedSpec.of(spec, pending, obstacle)
    check_tokenizers(resolved.spec, resolved.graph, pending or {})
    placement = resolved.place()
    plan = resolved.plan(placement, model_shapes(resolved.spec, resolved.graph, pending or {}))
    _check_warmup(plan)
    return plan


Choose = Callable[[Spec, Mapping[Path, ModelSpec], str], Spec]
"""Fills in settings that a spec leaves open before it is planned, from the spec, the models that earlier runs of the
command will write, by directory, and the reason why vLLM cannot generate."""


def make_plans(specs: Sequence[Spec], choose: Choose = lambda spec, pending, obstacle: spec) -> list[Plan]:
    """Return the plans of the runs of one command, which share their ranks.

    Models that an earlier run writes need not exist yet. Raises UserError.
    """
    pending: dict[Path, ModelSpec] = {}
    plans: list[Plan] = []
    for spec in specs:
        inline = {made.spec.rollout.engine for made in plans if made.spec.rollout.process == "inline"}
        obstacle = SECOND_VLLM if any(EngineFacts.of(engine).one_in_process for engine in inline) else ""
        made = make_plan(choose(spec, pending, obstacle), pending, obstacle)
        pending |= {path: made.model(role) for path, role in made.outputs.items()}
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


def _check_warmup(plan: Plan) -> None:
    for role in plan.graph.trained:
        steps = plan.model(role).optimizer.warmup_steps
        updates = plan.num_updates(role)
        if not updates:
            raise UserError(
                f"algorithm.freeze_actor_steps: {plan.graph.first_step(role)} of the run's {plan.spec.steps} steps, so "
                f"the {role} is never trained; use fewer than {plan.spec.steps}"
            )
        if steps >= updates:
            raise UserError(
                f"models.{role}.optimizer.warmup_steps: {steps} of the run's {updates} optimizer steps: the "
                f"learning rate never reaches its value; use fewer than {updates}"
            )


def _groups(placement: Placement, instructions: tuple[Instruction, ...], switches: Switches) -> list[Group]:
    """Return all groups in the order in which every rank creates them. A single rank needs none."""
    groups = [group for model in placement.models for group in Group.of_model(model)]
    for instruction in instructions:
        match instruction:
            case Move():
                groups.append(Group("move", instruction.ranks))
            case Eval():
                groups += [Group("move", move.ranks) for move in instruction.moves]
            case Sync():
                if not instruction.is_in_place:
                    groups.append(Group(f"sync {instruction.source}", instruction.ranks))
                groups += [Group(f"gather {instruction.source}", ranks) for ranks in instruction.gathers]
            case Save():
                groups.append(Group(f"gather {instruction.model}", instruction.ranks))
    apart, shares = switches.communicators == "apart", switches.communicators == "shared"
    return [
        replace(each, apart=apart, inside=each.inside and not shares)
        for each in dict.fromkeys(groups)
        if len(each.ranks) > 1 or each.alone
    ]
