"""One rank of a run: its place among the others, its loaded models, and its outlets."""

from __future__ import annotations

import gc
from collections.abc import Callable
from dataclasses import dataclass

from flexrlhf.comm.world import Groups, Wait, World
from flexrlhf.data.turn_tokens import ReadReply, TurnTokens
from flexrlhf.display.events import EventSender
from flexrlhf.engines.copy_streams import CopyStreams
from flexrlhf.placement.placed import ModelName
from flexrlhf.plan.plan import Plan
from flexrlhf.plan.run_data import RunData
from flexrlhf.plan.run_tokenizer import load_tokenizer
from flexrlhf.runs.run_directory import RunDirectory
from flexrlhf.runs.run_files import RunFiles
from flexrlhf.trainer.episode_turns import EnvironmentCaller, make_environment_caller, open_log
from flexrlhf.trainer.flight_record import FlightRecord
from flexrlhf.trainer.loaded_models import LoadedModel, load_models
from flexrlhf.trainer.memory_meter import MemoryMeter, ModelsOnRank, ReportMemory, connected_memory, memory_in_use
from flexrlhf.trainer.response_text import ResponseText
from flexrlhf.trainer.stop_requests import StopRequests
from flexrlhf.trainer.text_operators import ExternalScorers, make_external_scorers


@dataclass(frozen=True)
class RankContext:
    """Arguments of the parts of a trainer.

    plan:       of the run; every rank has the same.
    data:       examples of the run and its special tokens.
    files:      of the run, on machines with directories of their own.
    world:      rank, device and store.
    flight:     record of the instructions of this rank, and its waits.
    meter:      counts its memory.
    stops:      requests to end the run before its last step.
    events:     to the display of the run.
    groups:     process groups of the plan.
    models:     placed models that are loaded on this rank.
    copies:     streams of their copies to host memory and back.
    scorers:    functions, services and rules that score responses.
    decode:     tokens to text, special tokens included.
    text:       tokens of a response to the text that scores and stop strings read.
    turns:      tokens around replies of environments; None without any.
    environments: caller of the environments of this rank's rows; None without any.
    start_bytes:  the most memory before the first instruction, by ``load`` and ``resume``.
    report_memory: displays memory in use next to the planned one, on rank 0 with a GPU.
    """

    plan: Plan
    data: RunData
    files: RunFiles
    world: World
    flight: FlightRecord
    meter: MemoryMeter
    stops: StopRequests
    events: EventSender
    groups: Groups
    models: dict[ModelName, LoadedModel]
    copies: CopyStreams
    scorers: ExternalScorers
    decode: Callable[..., str]
    text: ResponseText
    turns: TurnTokens | None
    environments: EnvironmentCaller | None
    start_bytes: dict[str, int]
    report_memory: ReportMemory

    @property
    def rank(self) -> int:
        return self.world.rank

    @property
    def read_reply(self) -> ReadReply | None:
        """Messages of the tokens of a reply; None without an environment."""
        return None if self.turns is None else self.turns.messages

    @property
    def directory(self) -> RunDirectory:
        """Directory of the run."""
        return RunDirectory(self.plan.spec.directory)

    @property
    def wait(self) -> Wait:
        """Waits for communication, with a deadline and an error that names the ranks that are missing."""
        return self.flight.progress.wait

    def show(self, what: str, step: int | None = None) -> None:
        """Display that this rank does ``what``."""
        self.events.do(self.plan.spec.name, what, step)

    def ends_after(self, turn: int) -> bool:
        """Return whether the run ends after a round of the list, by a request to stop."""
        spec = self.plan.spec
        if not spec.checkpoint.on_signal:
            return False
        moment = f"{spec.name}/{turn}"
        with self.flight.progress.deadline(tuple(range(self.world.size))):
            if self.models:
                return self.stops.decide(moment)
            # a rank without models would decide all rounds before the others begin
            return self.stops.follow(moment, spec.timeout_seconds * len(self.plan.schedule.instructions))

    def close(self) -> None:
        """Free the models, the scorers, and the process groups."""
        for model in self.models.values():
            model.engine.close()
        self.models.clear()
        self.scorers.close()
        if self.environments is not None:
            self.environments.close()
        # models keep groups in cycles of hooks and closures
        gc.collect()
        self.world.close_groups(self.groups, self.plan.spec.timeout_seconds)


def open_rank(
    plan: Plan,
    data: RunData,
    files: RunFiles,
    world: World,
    flight: FlightRecord,
    meter: MemoryMeter,
    stops: StopRequests,
    events: EventSender,
    first_step: int = 0,
) -> RankContext:
    """Connect this rank to the others and load its models. ``first_step``: of this start of the run."""
    meter.reset_peak()
    groups = world.make_groups(plan.groups, plan.spec.timeout_seconds)
    if world.rank == 0 and (found := meter.in_use()) is not None:
        events.note(plan.spec.name, connected_memory(plan, world.rank, *found))

    def report(moment: str, loaded: ModelsOnRank) -> None:
        if world.rank == 0 and (found := meter.in_use()) is not None:
            here = {name: not (each.is_offloaded or each.is_released) for name, each in loaded.items()}
            events.note(plan.spec.name, memory_in_use(plan, world.rank, moment, here, *found))

    tokenizer = load_tokenizer(data.tokenizer, data.is_trusted)
    decode = tokenizer.decode
    log = open_log(plan, files, world, first_step)
    if log is not None and log.num_found and world.rank == 0:
        events.note(plan.spec.name, f"{log.num_found} replies of environments since the last checkpoint are used again")
    turns = None if plan.spec.environment is None else plan.data.turn_tokens(tokenizer)
    environments = make_environment_caller(plan, world, turns, decode, log)
    if environments is not None and environments.settings != plan.spec.environment and world.rank == 0:
        form = environments.settings.tool_format
        events.note(plan.spec.name, f"calls of tools are read as {form}, as the chat template writes them")
    text = ResponseText.of(plan.spec, tokenizer, (data.pad_token_id, *data.eos_token_ids))
    readers = () if turns is None else (turns.messages, turns.reset_messages)
    scorers = make_external_scorers(plan.graph, plan.spec, text, *readers)
    copies = CopyStreams(world.device, plan.spec.debug)
    models = load_models(plan, world, groups, flight.progress.wait, data.pad_token_id, copies, report)
    report("models are loaded", models)
    start_bytes = {"load": meter.peak()}
    meter.reset_peak()
    return RankContext(
        plan,
        data,
        files,
        world,
        flight,
        meter,
        stops,
        events,
        groups,
        models,
        copies,
        scorers,
        decode,
        text,
        turns,
        environments,
        start_bytes,
        report,
    )
