"""Elastic agent of one machine: it starts the ranks, restarts them after a failure, and ends them with the others.

torch's agent watches the processes of its own machine; this one also ends them when another node's have failed or when
its launcher is lost, so that all nodes count the same attempts and end with the same sentence.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any

import torch.distributed as dist
from torch.distributed.elastic.agent.server.api import RunResult, Worker, WorkerGroup, WorkerSpec, WorkerState
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, LogsSpecs, SubprocessContext
from torch.distributed.elastic.multiprocessing.errors import ProcessFailure
from torch.distributed.elastic.multiprocessing.subprocess_handler import SubprocessHandler

from flexrlhf.launch.failures import Failure, root_cause
from flexrlhf.launch.node_watch import NodeWatch
from flexrlhf.launch.rank_factory import RankFactory
from flexrlhf.launch.rendezvous import NodeRendezvous

EXIT_BARRIER_SECONDS = 60.0
SHUTDOWN_SECONDS = 10
"""Time that ranks have to end after SIGTERM."""


class _ForkedRank(SubprocessHandler):
    """Rank as torch's agent handles processes, forked by a factory."""

    def __init__(self, factory: RankFactory, command: Sequence[str], variables: dict[str, str], rank: int) -> None:
        self._factory = factory
        super().__init__(command[0], tuple(command[1:]), variables, None, None, rank, None)

    def _popen(self, args: tuple[str, ...], env: dict[str, str]) -> Any:
        return self._factory.fork(args, env, f"rank {env['RANK']}")


class _ForkedRanks(SubprocessContext):
    """Ranks of this machine, forked by a factory."""

    def __init__(
        self,
        factory: RankFactory,
        command: Sequence[str],
        variables: Mapping[int, dict[str, str]],
        logs_specs: LogsSpecs,
    ) -> None:
        super().__init__("rank", command[0], dict.fromkeys(variables, ()), dict(variables), logs_specs)
        self._factory, self._command = factory, command

    def _start(self) -> None:
        for rank, variables in self.envs.items():
            self.subprocess_handlers[rank] = _ForkedRank(self._factory, self._command, variables, rank)

    def _close(self, death_sig: signal.Signals, timeout: int = SHUTDOWN_SECONDS) -> None:
        # the agent waits 30 s; torch 2.13 alone has a setting
        super()._close(death_sig, min(timeout, SHUTDOWN_SECONDS))


ReportFailures = Callable[[Mapping[int, ProcessFailure]], list[Failure]]
"""Records the failed ranks of this machine and returns their failures."""


class RankAgent(LocalElasticAgent):
    """Agent whose ranks fail and restart together with the ranks of the other nodes.

    cause:  the failure that ended the last attempt; None while there is none.
    """

    def __init__(
        self,
        spec: WorkerSpec,
        rendezvous: NodeRendezvous,
        factory: RankFactory,
        directory: str,
        make_watch: Callable[[dist.Store], NodeWatch],
        report: ReportFailures,
    ) -> None:
        """Start nothing yet.

        spec:        of the ranks; its entry point is a module
        rendezvous:  with the other nodes, which counts the attempts
        factory:     forks them
        directory:   for the errors of ranks
        make_watch:  makes the watch over the nodes of an attempt, with its store
        """
        super().__init__(spec, DefaultLogsSpecs(directory), "spawn", EXIT_BARRIER_SECONDS)
        self.cause: Failure | None = None
        self._meeting, self._factory, self._make_watch, self._report = rendezvous, factory, make_watch, report
        self._watch: NodeWatch | None = None

    def close(self, failure: Failure | None = None) -> None:
        """Stop watching the other nodes. ``failure``: why this one ends, which they then read."""
        if self._watch is not None:
            if failure is not None:
                self._watch.publish(failure)
            self._watch.close()

    def _start_workers(self, worker_group: WorkerGroup) -> dict[int, Any]:
        self.cause = None
        store = worker_group.store
        assert store is not None, "ranks start after the rendezvous"
        self._watch = self._make_watch(store)
        spec = worker_group.spec
        variables = {
            each.local_rank: rank_variables(worker_group, each, self._meeting.attempt) for each in worker_group.workers
        }
        self._pcontext = _ForkedRanks(self._factory, (spec.entrypoint, *spec.args), variables, self._logs_specs)
        self._pcontext.start()
        return self._pcontext.pids()

    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        if any(map(_has_failed, self._pids)):
            self._resume_stopped()
        result = super()._monitor_workers(worker_group)
        assert self._watch is not None
        if result.state == WorkerState.FAILED:
            self._conclude(self._report(result.failures))
        elif result.state == WorkerState.HEALTHY and (problem := self._watch.problem()) is not None:
            self._resume_stopped()
            self._shutdown(signal.SIGTERM)
            # the ranks of this node were ended, and have failed in no way of their own
            self._report({})
            self._conclude([problem])
            return RunResult(state=WorkerState.FAILED)
        return result

    def _restart_workers(self, worker_group: WorkerGroup) -> None:
        assert self.cause is not None, "an attempt that has not failed is not restarted"
        if worker_group.group_rank == 0:
            restart = f"restart {self._meeting.attempt + 1} of {worker_group.spec.max_restarts}"
            print(f"flexrlhf: {self.cause.sentence}; {restart}", file=sys.stderr, flush=True)
        super()._restart_workers(worker_group)

    @property
    def _pids(self) -> list[int]:
        return [] if self._pcontext is None else list(self._pcontext.pids().values())

    def _resume_stopped(self) -> None:
        """Let ranks that were stopped take the signal that ends them; the agent would wait for half a minute."""
        for pid in self._pids:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGTERM)
                os.kill(pid, signal.SIGCONT)

    def _conclude(self, failures: list[Failure]) -> None:
        """Find the cause of the failure of this attempt with the other nodes.

        An error of the user is not retried, and without node 0's store the nodes cannot meet again.
        """
        assert self._watch is not None
        self._watch.publish(root_cause(failures))
        self.cause = root_cause([*failures, *self._watch.settle()])
        self._watch.publish(self.cause)
        self._watch.close()
        if self.cause.kind == "user" or self._watch.is_store_closed:
            self._remaining_restarts = 0


def rank_variables(group: WorkerGroup, worker: Worker, attempt: int) -> dict[str, str]:
    """Return the variables of a rank, which are torchrun's. ``attempt``: its number, from 0."""
    assert group.master_addr is not None and group.master_port is not None, "ranks start after the rendezvous"
    variables = {
        "RANK": worker.global_rank,
        "WORLD_SIZE": worker.world_size,
        "LOCAL_RANK": worker.local_rank,
        "LOCAL_WORLD_SIZE": group.spec.local_world_size,
        "MASTER_ADDR": group.master_addr,
        "MASTER_PORT": group.master_port,
        "TORCHELASTIC_RESTART_COUNT": attempt,
        "TORCHELASTIC_MAX_RESTARTS": group.spec.max_restarts,
        "TORCHELASTIC_USE_AGENT_STORE": True,
        "TORCH_NCCL_ASYNC_ERROR_HANDLING": os.environ.get("TORCH_NCCL_ASYNC_ERROR_HANDLING", "1"),
    }
    return {name: str(value) for name, value in variables.items()}


def _has_failed(pid: int) -> bool:
    """Return whether a child has ended with an error. The agent reads its exit code later."""
    try:
        state = os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except ChildProcessError:
        return False
    return state is not None and not (state.si_code == os.CLD_EXITED and state.si_status == 0)
