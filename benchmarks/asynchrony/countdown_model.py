"""Stand-in for a policy on an accelerator: a Llama that counts down to its end token, in passes as long as a device's.

Loaded by transformers as code of a model (``trust_remote_code``). A pass over one token of each row takes
``step_seconds`` and ``row_seconds`` for each row, other passes ``token_seconds`` for each token, and a backward pass
twice as long; computing on the host is part of that time. Passes are written to files in ``passes``.
"""

import os
import time
from pathlib import Path

import torch
from torch.nn.functional import one_hot
from transformers import LlamaForCausalLM, LlamaModel

CERTAIN = 25.0
"""Logit of the next token."""
OWN = 1e-3
"""Share of the real hidden states, so that logits depend on all weights."""
FIRST_NUMBER = 4
"""Token of the number 1, which the end token follows."""


class Delayed(torch.autograd.Function):
    """Identity, whose backward takes ``seconds`` and is written to ``file``."""

    @staticmethod
    def forward(ctx, values, seconds, file):
        ctx.seconds, ctx.file = seconds, file
        return values.view_as(values)

    @staticmethod
    def backward(ctx, gradient):
        start = time.time()
        time.sleep(ctx.seconds)
        record(ctx.file, start)
        return gradient, None, None


def record(file, start, count=0):
    """Write a pass from ``start`` until now, over ``count`` tokens for generation."""
    with file.open("a") as lines:
        lines.write(f"{start} {time.time()} {count}\n")


class CountdownTrunk(LlamaModel):
    """Decoder whose last hidden states name the number before that of their token, but for a small part."""

    def forward(self, input_ids=None, **further):
        config, start = self.config, time.time()
        out = super().forward(input_ids=input_ids, **further)
        is_decoding = input_ids.shape[1] == 1
        count = input_ids.numel()
        seconds = config.step_seconds + config.row_seconds * count if is_decoding else config.token_seconds * count
        time.sleep(max(0.0, start + seconds - time.time()))
        after = (input_ids - 1).where(input_ids > FIRST_NUMBER, config.eos_token_id)
        hidden = OWN * out.last_hidden_state
        hidden = hidden + one_hot(after, config.hidden_size).to(hidden)
        file = Path(config.passes, f"{os.getpid()}.txt")
        record(file, start, count if further.get("use_cache") else 0)
        out.last_hidden_state = Delayed.apply(hidden, 2 * seconds, file)
        return out


class CountdownLlama(LlamaForCausalLM):
    """Policy that counts down from the last number that it has read."""

    def __init__(self, config):
        super().__init__(config)
        self.model = CountdownTrunk(config)
        self.post_init()
        with torch.no_grad():
            self.lm_head.weight.copy_(CERTAIN * torch.eye(config.vocab_size, config.hidden_size))
