"""The face of the core for parts that need torch: the contract of an engine and its passes, ranks, messages."""

from __future__ import annotations

from typing import TYPE_CHECKING

from flexrlhf.api import loader

if TYPE_CHECKING:
    from flexrlhf.comm.reduce import RankGroup
    from flexrlhf.comm.store import Notice
    from flexrlhf.comm.world import World, as_world, new_group
    from flexrlhf.engines.attention import SharedAttention
    from flexrlhf.engines.base import (
        Batch,
        Engine,
        EngineContext,
        Loss,
        MemoryUsage,
        Moments,
        RowSource,
        Sampling,
        StateTensor,
        Totals,
        TrainingState,
        add_moments,
    )
    from flexrlhf.engines.experts import ExpertSplit, has_experts
    from flexrlhf.engines.host_offload import HostOffload, Lender, storage_bytes
    from flexrlhf.engines.language_head import LanguageHead
    from flexrlhf.engines.loss_passes import LossPasses
    from flexrlhf.engines.micro_batch import MicroBatch
    from flexrlhf.engines.models import DTYPES, frozen_files, load_frozen, read_adapters
    from flexrlhf.engines.non_finite import NonFiniteStep
    from flexrlhf.engines.optimizers import ScheduledOptimizer
    from flexrlhf.engines.pass_settings import PassSettings
    from flexrlhf.engines.passes import Passes
    from flexrlhf.engines.readout import Computed, PassRequest, Readout
    from flexrlhf.engines.routing import use_float32_routers
    from flexrlhf.engines.sampling import completes_stop, gumbel_noise
    from flexrlhf.engines.skeletons import Skeleton
    from flexrlhf.launch.devices import choose_device
    from flexrlhf.launch.failures import FailureReporter
    from flexrlhf.launch.joined_rank import joined_rank, limit_threads
    from flexrlhf.launch.local import LocalLauncher
    from flexrlhf.launch.rendezvous import NodeRendezvous
    from flexrlhf.launch.start import end_between_attempts, launch, run_on_ranks
    from flexrlhf.runs.model_directory import ModelDirectory
    from flexrlhf.runs.recorded_columns import RecordedColumn, RecordedColumns
    from flexrlhf.trainer.bare_rank import BareRank
    from flexrlhf.trainer.loaded_models import LoadedModel
    from flexrlhf.trainer.stop_requests import StopRequests


if not TYPE_CHECKING:
    __getattr__ = loader(__name__, __file__)
