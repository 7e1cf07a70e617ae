"""The face of the core: names that parts of this package and of others need, without torch.

What a run can do without imports them from here and from ``flexrlhf.api.engine``. Provisional until 0.1.0. A name is
loaded when it is first used, so that a part loads no more than it needs.
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Mapping
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from flexrlhf.cli.errors import print_error
    from flexrlhf.cli.options import (
        ConfigOption,
        Devices,
        Force,
        Nnodes,
        NodeRank,
        Overrides,
        PlacementRatio,
        Price,
        RdzvEndpoint,
        RunOptions,
        complete_config,
        with_options,
    )
    from flexrlhf.cli.planning import check_memory, plan_runs
    from flexrlhf.cli.working import working
    from flexrlhf.config.algorithms.grpo import GrpoSpec
    from flexrlhf.config.algorithms.policy import PolicySpec
    from flexrlhf.config.axes import (
        AXES,
        OF_COPIES,
        OF_EXPERTS,
        OF_PARTS,
        OF_REPLICA,
        OUTER,
        RARE,
        Axis,
        ParallelDims,
    )
    from flexrlhf.config.code_checks import definitions
    from flexrlhf.config.code_loading import python_command
    from flexrlhf.config.data_settings import MOST_TOKENS
    from flexrlhf.config.engines import TORCH, EngineFacts, Package
    from flexrlhf.config.environment_settings import EnvironmentSpec
    from flexrlhf.config.job_secret import JobSecret
    from flexrlhf.config.model_families import Families, ModelFamily
    from flexrlhf.config.model_names import FoundModel
    from flexrlhf.config.model_settings import Head, LoraSpec, ModelSpec
    from flexrlhf.config.number_settings import SettingDifference
    from flexrlhf.config.output_path import OutputPath
    from flexrlhf.config.output_settings import LOGGERS, MlflowSpec, WandbSpec
    from flexrlhf.config.placement_settings import ClusterSpec, PlacementMap
    from flexrlhf.config.plugins import load_plugin
    from flexrlhf.config.presets.filling import PEERS
    from flexrlhf.config.proxies import Address
    from flexrlhf.config.ratio_vector import read_vector
    from flexrlhf.config.secrets import hidden, is_secret_name, without_secrets
    from flexrlhf.config.spec import RolloutSpec, Spec
    from flexrlhf.config.spec_file import apply_override, load_spec
    from flexrlhf.config.strict_model import StrictModel
    from flexrlhf.config.user_paths import instead_of
    from flexrlhf.config.yaml_io import read_yaml
    from flexrlhf.data.files import is_present
    from flexrlhf.data.hub import HubName
    from flexrlhf.data.quickstart import config_paths, prepare_corpus
    from flexrlhf.display.live_display import live_display
    from flexrlhf.display.plain_lines import rate, restarts_text
    from flexrlhf.environments.base import EpisodeCall, EpisodeReply, ProgramTurn, Turn
    from flexrlhf.environments.episodes import Episodes
    from flexrlhf.environments.tool_schemas import EnvironmentTools
    from flexrlhf.errors import (
        Interrupted,
        Preempted,
        RankFailure,
        RunStopped,
        SettingError,
        UserError,
        either,
        nearest,
        one_line,
        shown,
    )
    from flexrlhf.launch.job import Job, Launcher
    from flexrlhf.launch.lifetime import LAUNCHER, end_with_launcher, quiet_torch
    from flexrlhf.launch.preparation import checked_job, prepare_job
    from flexrlhf.launch.rank_factory import RankFactory
    from flexrlhf.launch.shared_directories import DirectoryFacts
    from flexrlhf.launch.terms import Sides, Terms
    from flexrlhf.memory.budget import Compute, SequenceLengths, Sizing
    from flexrlhf.memory.engine_bytes import EngineBytes
    from flexrlhf.memory.packed_rows import PackedPass, TextGroup, TextPacking, Unit
    from flexrlhf.memory.rank_memory import RankMemory
    from flexrlhf.memory.states import State, Units, with_fused_layers
    from flexrlhf.metrics import METRICS, Ends, Outcome, Triple
    from flexrlhf.operators.columns import Column, Lengths
    from flexrlhf.operators.graph import CallKind, Graph, Operator, OperatorKind, TrainPart
    from flexrlhf.operators.outcomes import RowAccount
    from flexrlhf.placement.cluster import Cluster
    from flexrlhf.placement.devices import DeviceClass
    from flexrlhf.placement.hosts import HostPort, Hosts
    from flexrlhf.placement.layout import BatchShape, Layout
    from flexrlhf.placement.place import Degrees
    from flexrlhf.placement.placed import ModelName, PlacedModel
    from flexrlhf.placement.placement import Placement
    from flexrlhf.placement.rollout import PagedCache, rollout_settings
    from flexrlhf.placement.transfer import Primitive, Transfer
    from flexrlhf.plan.algorithm_graph import make_graph
    from flexrlhf.plan.engine_checks import check_operators, check_settings
    from flexrlhf.plan.gpu_warnings import gpu_warnings
    from flexrlhf.plan.input_checks import check_runs
    from flexrlhf.plan.model_checks import check_device, check_packages, check_placed_model
    from flexrlhf.plan.models import model_shapes, without_device_sizes
    from flexrlhf.plan.node_traffic import NodeBytes
    from flexrlhf.plan.pipeline import ResolvedSpec, make_plan, make_plans
    from flexrlhf.plan.plan import Plan
    from flexrlhf.plan.schedule_text import schedule_rows
    from flexrlhf.plan.size_rules import MODEL_RULES
    from flexrlhf.plan.suggestions import check_fits, lack_text
    from flexrlhf.rewards.worker_calls import task_scorer
    from flexrlhf.runs.fingerprints import Fingerprints
    from flexrlhf.runs.free_space import DiskDemand
    from flexrlhf.runs.logger import LoggedRun, RunLogger
    from flexrlhf.runs.resume import AUTO, Resumption, RunOrder, resume_runs
    from flexrlhf.runs.run_directory import RunDirectory
    from flexrlhf.signals import Ending, StopSignal, handled
    from flexrlhf.strategies.instructions import Eval, Instruction, Move, Run, Sync, WorkKind
    from flexrlhf.strategies.strategy import Strategy
    from flexrlhf.text import bytes_text, counted, rank_marks, ranks_text, shortened, span_of, table
    from flexrlhf.timeline import Span, Trace
    from flexrlhf.user_code.call_failures import ServerGone
    from flexrlhf.user_code.process_directories import process_directory
    from flexrlhf.user_code.processes import exit_text
    from flexrlhf.weights.decoder_sizes import DecoderSizes, Sizes
    from flexrlhf.weights.families import model_sizes
    from flexrlhf.weights.model_shape import ModelShape
    from flexrlhf.weights.parameters import ParameterName, Parameters, count_elements
    from flexrlhf.weights.shapes import model_shape, read_config
    from flexrlhf.weights.shards import elements_on_rank


def homes(file: str) -> Mapping[str, str]:
    """Return the module of each name that ``file``, a module of the face, imports for type checkers."""
    body = ast.parse(Path(file).read_text()).body
    (block,) = (node.body for node in body if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING")
    imports = (node for node in block if isinstance(node, ast.ImportFrom))
    return {alias.name: str(node.module) for node in imports for alias in node.names}


def loader(module: str, file: str) -> Callable[[str], Any]:
    """Return the ``__getattr__`` of a module of the face (PEP 562)."""
    found = homes(file)

    def load(name: str) -> Any:
        if name not in found:
            raise AttributeError(f"module {module!r} has no attribute {name!r}")
        return getattr(import_module(found[name]), name)

    return load


if not TYPE_CHECKING:
    __getattr__ = loader(__name__, __file__)
