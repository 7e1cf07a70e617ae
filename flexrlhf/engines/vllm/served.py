"""vLLM's own engine behind ``flexrlhf serve-model``: requests join the ones under way."""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Sequence
from itertools import count
from pathlib import Path
from typing import Any

from transformers import AutoConfig

from flexrlhf.api import UserError
from flexrlhf.api.engine import Sampling

_ENVIRONMENT = {"VLLM_NO_USAGE_STATS": "1", "VLLM_LOGGING_LEVEL": "ERROR", "VLLM_WORKER_MULTIPROC_METHOD": "spawn"}
CPU_CACHE_BYTES = 1 << 30
"""Memory of the KV cache on CPUs, of which vLLM would take a share of all memory."""
MOST_LIKELIEST = 20


class VllmSampler:
    """Model in a process of vLLM's. Noise is vLLM's: of equal seeds, not as of a run.

    vocabulary:  number of token ids
    positions:   most tokens of a sequence
    """

    def __init__(self, model: Path, tokenizer: Path, device: str, most_rows: int) -> None:
        """Start the engine. Raises UserError if vLLM refuses the model."""
        os.environ.update({name: value for name, value in _ENVIRONMENT.items() if name not in os.environ})
        from vllm.engine.arg_utils import AsyncEngineArgs
        from vllm.v1.engine.async_llm import AsyncLLM

        config = AutoConfig.from_pretrained(model)
        arguments: dict[str, Any] = {
            "model": str(model),
            "tokenizer": str(tokenizer),
            # vLLM's auto would compute float32 weights in 16 bits
            "dtype": config.dtype or "auto",
            "max_num_seqs": most_rows,
            "max_logprobs": MOST_LIKELIEST,
            # else temperature and so on of the model's files would be used
            "generation_config": "vllm",
        }
        if device == "cpu":
            arguments |= {"enforce_eager": True, "kv_cache_memory_bytes": CPU_CACHE_BYTES}

        async def start() -> Any:
            return AsyncLLM.from_engine_args(AsyncEngineArgs(**arguments))

        self._loop, self._numbers = asyncio.new_event_loop(), count()
        threading.Thread(target=self._loop.run_forever, name="vLLM", daemon=True).start()
        try:
            self._engine = self._await(start())
        except (ValueError, RuntimeError, OSError, ImportError) as error:
            raise UserError(
                f"{model}: vLLM cannot load it ({str(error).splitlines()[0]}); --engine transformers"
            ) from None
        self.vocabulary: int = config.get_text_config().vocab_size
        self.positions: int | None = self._engine.model_config.max_model_len

    def sample(self, prompt: Sequence[int], sampling: Sampling, most: int) -> list[int]:
        """Return at most ``most`` tokens behind a prompt, with the end token. Raises RuntimeError."""
        settings = {
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "top_k": sampling.top_k,
            "seed": sampling.seed,
            "stop": list(sampling.stop),
            "stop_token_ids": list(sampling.eos_token_ids),
        }
        found = self._generate(prompt, most, **settings)
        return list(found.outputs[0].token_ids)

    def scores(self, ids: Sequence[int], likeliest: int) -> list[tuple[int, dict[int, float]]]:
        """Return each token after the first and the likeliest behind all, with log-probs: its own, the likeliest."""
        found = self._generate(ids, 1, temperature=0.0, prompt_logprobs=likeliest, logprobs=max(1, likeliest))
        (last,) = found.outputs[0].token_ids
        places = [*zip(ids[1:], found.prompt_logprobs[1:], strict=True), (last, found.outputs[0].logprobs[0])]
        return [(token, {other: each.logprob for other, each in place.items()}) for token, place in places]

    def close(self) -> None:
        """End vLLM's process."""
        self._engine.shutdown()
        self._loop.call_soon_threadsafe(self._loop.stop)
        # it would be shut down once more when Python ends, without its modules
        self._engine = None

    def _generate(self, ids: Sequence[int], most: int, **settings: Any) -> Any:
        """Return vLLM's output. Raises RuntimeError if its engine fails."""
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind
        from vllm.v1.engine.exceptions import EngineDeadError, EngineGenerateError

        parameters = SamplingParams(max_tokens=most, output_kind=RequestOutputKind.FINAL_ONLY, **settings)

        async def generate() -> Any:
            prompt = {"prompt_token_ids": list(ids)}
            async for output in self._engine.generate(prompt, parameters, str(next(self._numbers))):
                last = output
            return last

        try:
            return self._await(generate())
        except (EngineDeadError, EngineGenerateError) as error:
            raise RuntimeError(f"vLLM: {error}") from None

    def _await(self, work: Any) -> Any:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result()
