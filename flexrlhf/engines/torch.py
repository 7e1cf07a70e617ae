"""The engine on plain PyTorch and transformers: replicated data parallel, micro-batches by token budget, KV cache."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor
from torch.nn.functional import pad
from transformers import GenerationConfig, LogitsProcessorList, PreTrainedModel

from flexrlhf.comm.reduce import Replicas
from flexrlhf.engines.base import Batch, EntropyUse, Loss, Moments, Outputs, Sampling, Totals, add_moments, moments
from flexrlhf.engines.micro_batch import MicroBatch, micro_batches
from flexrlhf.engines.sampling import GumbelProcessor
from flexrlhf.operators.columns import Column, Lengths, Quantity
from flexrlhf.spec import ModelSpec


class TorchEngine:
    """One replica of a model. ``trained``: it owns an AdamW, and gradients are summed over ``replicas``."""

    def __init__(
        self,
        model: PreTrainedModel,
        spec: ModelSpec,
        lengths: Lengths,
        replicas: Replicas,
        temperature: float,
        trained: bool,
    ) -> None:
        self.config = model.config
        self._model = model
        self._lengths = lengths
        self._replicas = replicas
        self._temperature = temperature
        self._budget = spec.micro_batch_tokens
        self._generate_tokens = spec.generate_tokens
        self._max_grad_norm = spec.optimizer.max_grad_norm
        self._parameters = [parameter for _, parameter in sorted(model.named_parameters())]
        model.requires_grad_(trained)
        self._optimizer = self._make_optimizer(spec) if trained else None

    def _make_optimizer(self, spec: ModelSpec) -> torch.optim.AdamW:
        settings = spec.optimizer
        return torch.optim.AdamW(
            self._parameters,
            lr=settings.learning_rate,
            betas=settings.betas,
            eps=settings.eps,
            weight_decay=settings.weight_decay,
        )

    def weights(self) -> dict[str, Tensor]:
        return dict(self._model.named_parameters())

    @torch.no_grad()
    def load_weights(self, weights: Mapping[str, Tensor]) -> None:
        own = self.weights()
        for name, tensor in weights.items():
            own[name].copy_(tensor)

    def close(self) -> None:
        del self._model, self._optimizer, self._parameters

    @torch.no_grad()
    def generate(self, batch: Batch, sampling: Sampling) -> dict[str, Tensor]:
        prompts, prompt_mask = batch["prompts"].long(), batch["prompt_mask"]
        answers = prompts.new_full((len(batch), self._lengths.response), sampling.pad_token_id)
        num_rows = max(1, self._generate_tokens // (self._lengths.prompt + self._lengths.response))
        for start in range(0, len(batch), num_rows):
            part = slice(start, start + num_rows)
            drawn = self._decode(prompts[part], prompt_mask[part].long(), batch.rows[part], sampling)
            answers[part, : drawn.shape[1]] = drawn
        is_end = torch.isin(answers, answers.new_tensor(sampling.eos_token_ids))
        # a token is part of the answer when no end came before it; the pad token may be an end token or a real one
        response_mask = (is_end.cumsum(1) - is_end.long() == 0).to(torch.uint8)
        return {
            "tokens": torch.cat([prompts, answers.where(response_mask.bool(), sampling.pad_token_id)], 1).int(),
            "attention_mask": torch.cat([prompt_mask, response_mask], 1),
            "response_mask": response_mask,
            "finished": is_end.any(1).to(torch.uint8),
        }

    def _decode(self, prompts: Tensor, mask: Tensor, rows: Tensor, sampling: Sampling) -> Tensor:
        first = int(mask.int().argmax(1).min())
        prompts, mask = prompts[:, first:], mask[:, first:]
        out = self._model.generate(
            prompts,
            attention_mask=mask,
            generation_config=GenerationConfig(
                do_sample=False,
                max_new_tokens=self._lengths.response,
                eos_token_id=list(sampling.eos_token_ids),
                pad_token_id=sampling.pad_token_id,
                use_cache=True,
            ),
            logits_processor=LogitsProcessorList([GumbelProcessor(sampling, rows, prompts.shape[1])]),
        )
        return out[:, prompts.shape[1] :]

    @torch.no_grad()
    def forward(self, batch: Batch, column: Column) -> Tensor:
        assert column.quantity is not None, f"{column.name} is not computed by a model"
        parts = [self._compute(piece, column.quantity).quantity for piece in self._pieces(batch)]
        if parts:
            return torch.cat(parts)
        width = self._lengths.width(column)
        return torch.zeros((0,) if width is None else (0, width), device=batch.rows.device)

    def train(self, batch: Batch, loss: Loss) -> Moments:
        assert self._optimizer is not None, "this placed model is not trained"
        totals = self._totals(batch)
        self._optimizer.zero_grad()
        statistics: Moments = {name: self._parameters[0].new_zeros(3, dtype=torch.float64) for name in loss.statistics}
        for piece in self._pieces(batch):
            value, part = loss.function(self._compute(piece, loss.quantity, loss.entropy), piece.batch, totals)
            value.backward()
            add_moments(statistics, part)
        statistics["grad_norm"] = moments(self._reduce_gradients()[None])
        self._optimizer.step()
        return statistics

    def _pieces(self, batch: Batch) -> list[MicroBatch]:
        return list(micro_batches(batch, self._lengths, self._budget))

    def _totals(self, batch: Batch) -> Totals:
        mask = batch["response_mask"].double()
        counts = torch.stack([mask.sum(), (mask.sum(1) > 0).double().sum(), mask.new_tensor(len(batch))])
        tokens, sequences, rows = self._replicas.sum(counts).tolist()
        return Totals(tokens, sequences, rows / batch.samples_per_prompt)

    def _reduce_gradients(self) -> Tensor:
        """Sum the gradients over the replicas as one vector and clip it; return the global norm before clipping."""
        grads = [torch.zeros_like(p) if p.grad is None else p.grad for p in self._parameters]
        flat = self._replicas.sum(torch.cat([grad.reshape(-1) for grad in grads]))
        norm = torch.linalg.vector_norm(flat)
        if not torch.isfinite(norm):
            raise FloatingPointError("the gradient is not finite; the weights were left as they were")
        if self._max_grad_norm is not None:
            flat *= (self._max_grad_norm / (norm + 1e-6)).clamp(max=1.0)
        for parameter, part in zip(self._parameters, flat.split([p.numel() for p in self._parameters]), strict=True):
            parameter.grad = part.view_as(parameter)
        return norm

    def _compute(self, piece: MicroBatch, quantity: Quantity, entropy: EntropyUse = "none") -> Outputs:
        match quantity:
            case "logprobs":
                return self._logprobs(piece, entropy)
            case "values":
                return Outputs(self._values(piece))
            case "scores":
                return Outputs(self._scores(piece))

    def _logprobs(self, piece: MicroBatch, entropy: EntropyUse) -> Outputs:
        """Log-probs (n, R) of the response tokens under softmax(logits / T); 0 outside the response."""
        width = piece.response_width
        out = self._model(
            input_ids=piece.tokens,
            attention_mask=piece.attention_mask,
            position_ids=piece.position_ids,
            logits_to_keep=width + 1,
        )
        scaled = (out.logits[:, :-1].float() / self._temperature).log_softmax(-1)
        mask = piece.attention_mask[:, -width:]
        picked = scaled.gather(-1, piece.tokens[:, -width:, None]).squeeze(-1) * mask
        spread = None
        if entropy != "none":
            with torch.set_grad_enabled(entropy == "gradient"):
                spread = self._widen(-(scaled.exp() * scaled).sum(-1) * mask, self._lengths.response)
        return Outputs(self._widen(picked, self._lengths.response), spread)

    def _values(self, piece: MicroBatch) -> Tensor:
        """Values (n, R+1): entry t is that of the state before response token t, the last that after the whole text."""
        width = piece.response_width + 1
        values = self._head(piece)[:, -width:] * piece.attention_mask[:, -width:]
        return self._widen(values, self._lengths.response + 1)

    def _scores(self, piece: MicroBatch) -> Tensor:
        """The head's output (n,) at the last token of the text, known from the mask."""
        mask = piece.attention_mask
        last = mask.shape[1] - 1 - mask.flip(1).argmax(1)
        return self._head(piece).gather(1, last[:, None]).squeeze(1)

    def _head(self, piece: MicroBatch) -> Tensor:
        """The scalar head at every position (n, width). The model's own forward looks for the pad token to pool."""
        base = getattr(self._model, self._model.base_model_prefix)
        out = base(input_ids=piece.tokens, attention_mask=piece.attention_mask, position_ids=piece.position_ids)
        scores: Tensor = self._model.score(out.last_hidden_state).squeeze(-1).float()
        return scores

    @staticmethod
    def _widen(tensor: Tensor, width: int) -> Tensor:
        return pad(tensor, (0, width - tensor.shape[1]))
