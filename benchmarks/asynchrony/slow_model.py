"""Stand-in for a model on an accelerator: a Llama whose passes sleep for as long as a device would compute them.

Loaded by transformers as code of a model (``trust_remote_code``). While a device computes, its host's core is free, so
four ranks run on two cores without waiting for each other. A pass takes ``pass_seconds`` (weights are read), or
``token_seconds`` for each token if that is longer (the device computes); a backward pass twice as long. Ends of
responses follow the distribution of lengths in ``lengths_file``, by the position of a token alone.
"""

import json
import math
import time
from pathlib import Path

import torch
from transformers import LlamaForCausalLM, LlamaModel

CERTAIN = 20.0
"""Largest logit of the end token: its probability is then 1 - 1e-6."""
OWN = 1e-3
"""Share of the real hidden states, so that logits depend on all weights."""


class Delayed(torch.autograd.Function):
    """Identity, whose backward takes ``seconds``."""

    @staticmethod
    def forward(ctx, values, seconds):
        ctx.seconds = seconds
        return values.view_as(values)

    @staticmethod
    def backward(ctx, gradient):
        time.sleep(ctx.seconds)
        return gradient, None


class SlowTrunk(LlamaModel):
    """Decoder whose last hidden states are a function of the position but for a small part."""

    def __init__(self, config):
        super().__init__(config)
        self.cosines = _cosines(config)

    def forward(self, input_ids=None, position_ids=None, **further):
        config = self.config
        out = super().forward(input_ids=input_ids, position_ids=position_ids, **further)
        seconds = max(config.pass_seconds, config.token_seconds * input_ids.numel())
        time.sleep(seconds)
        # padding may have any position
        places = position_ids.clamp(max=config.max_position_embeddings - 1)
        cosine = self.cosines[places].to(out.last_hidden_state)
        angle = torch.stack([cosine, (1 - cosine**2).sqrt()], -1)
        hidden = OWN * out.last_hidden_state
        hidden = torch.cat([hidden[..., :2] + angle, hidden[..., 2:]], -1)
        out.last_hidden_state = Delayed.apply(hidden, 2 * seconds)
        return out


class SlowLlama(LlamaForCausalLM):
    """Policy whose responses have given lengths."""

    def __init__(self, config):
        super().__init__(config)
        self.model = SlowTrunk(config)
        self.post_init()
        with torch.no_grad():
            self.lm_head.weight[config.eos_token_id].zero_()[0] = CERTAIN


def _cosines(config):
    """Return, for each position, the cosine by which the end token's logit is ``CERTAIN`` times it."""
    lengths = json.loads(Path(config.lengths_file).read_text())
    logits = [-CERTAIN] * config.max_position_embeddings
    for token in range(max(lengths)):
        left = sum(length > token for length in lengths)
        share = sum(length == token + 1 for length in lengths) / left
        odds = share * (config.vocab_size - 1) / max(1 - share, 1e-9)
        # the token at this position is the one before
        logits[config.prompt_tokens - 1 + token] = min(CERTAIN, max(-CERTAIN, math.log(max(odds, 1e-9))))
    return torch.tensor(logits) / CERTAIN
