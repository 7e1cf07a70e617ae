"""Bytes of activations, logits and key-value caches of Llama-like models, as transformers computes them with sdpa.

Korthikanti et al. (2022) count s*b*h*(34 + 5*a*s/h) bytes for each layer of a GPT in 16 bits. Here the same count is
made for gated MLPs, grouped queries and RMSNorm, whose inner part is float32; sdpa does not store the 5*a*s/h. Per
layer and token, with h hidden, f inner features, a heads, A = a * head_dim, K the same of key-value heads, w tokens in
a row and b bytes per number, autograd keeps

    two norms           2 * ((4 + 2b) * h + 4)    float32 input and its root, normalised, output
    attention           b * (2A + 2K) + 4a        q, k, v, output; log-sum-exp
    under a mask        4b * A + 4a + b * w       q, repeated k and v, output; log-sum-exp; the mask as numbers
    gated MLP           4b * f                    gate, its activation, up, product; gpt-oss's clamped one 7b * f
    Qwen3's head norms  (4 + b) * (A + K) + 4 * (a + heads of K)
    with sinks          4b * A + 4a               the same; masks are made once for all layers
    latent attention    b * (2A + a * (n + 2v)) + 4a, norms; n features of a head without angles, v of values
    adapters            b * rank for each; norms are counted as if they were trained

Megatron-Core has query, key and value in one tensor, of which attention keeps a view, cosines and sines in every layer,
and adds 0 to a half of the MLP: b * (3A + 3K + 4 * head_dim) and 5b * f. Under sequence parallelism its ranks
share the norms. A stage of a pipeline has its layers alone, the last one the last norm and the head. Adapters of a
fused layer have their matrices B in one with zeros, which autograd keeps, too.

Rows of several sequences under a mask come with one of numbers, b * w bytes a token, which layers do not copy.

tests/unit/test_memory.py compares this with the tensors that autograd keeps, the rest with the allocator's peaks.
"""

from __future__ import annotations

from dataclasses import dataclass

from flexrlhf.config.axes import ParallelDims
from flexrlhf.config.model_families import ModelFamily
from flexrlhf.config.model_settings import LoraSpec
from flexrlhf.memory.attention_bytes import AttentionBytes
from flexrlhf.weights.decoder_sizes import LatentSizes, Sizes
from flexrlhf.weights.parameters import ParameterName

_ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")
_EXPERTS = ("gate_up_proj", "down_proj")
CACHE = "KV cache"
NOISE_BYTES = 35
"""Bytes per row and vocabulary entry while one token is sampled with top-p, which sorts float32 next to float64 logits.
Without it, hash and noise need 24."""
CACHE_COLUMNS = 64
"""Columns by which the space of a KV cache grows."""
SLOT_TEXT_BYTES = 36
"""Bytes per place of a slot that keeps its row: the token, noted; tokens of contexts and their mask; and the new tokens
with their log-probs."""
SEQUENCE_COPIES = 6
"""Copies of a layer's input at most, where sequence parallelism gathers it and scatters its gradient, over gloo."""
OUTPUT_BYTES = 16
"""Bytes per token of the outputs of a pipeline's last stage, which the others receive: log-probs, entropy, values."""
CHOICE_BYTES = 44
"""Bytes of each choice of an expert for a token, and once more of its norm: number, weight, places in the order of
experts and back."""
IMBALANCE = 1.25
"""Tokens on the fullest of ranks that share experts, over those in the mean."""
PLACE_BYTES = 48
"""Bytes per token of a packed row: its id, position, sequence and prompt, and the places at which it is read."""


def larger(**parts: int) -> dict[str, int]:
    """Return the largest of parts that never exist at the same time."""
    name = max(parts, key=lambda name: parts[name])
    return {name: parts[name]}


@dataclass(frozen=True)
class Blocks:
    """Layers of one model on one tensor-parallel rank of a pipeline stage.

    item:      bytes of a number.
    dims:      ranks that share the model along each axis.
    lora:      low-rank adapters of linear layers.
    fused:     whether query, key and value are one linear layer, gate and up another, as Megatron-Core has them.
    sharers:   ranks that share the hidden states between layers (sequence parallelism).
    stage:     number of the stage.
    tiled:     whether MLPs are computed in tiles, and again in the backward pass.
    offloads:  whether the inputs of checkpointed layers are in host memory until the backward pass.
    expert_tp: of the tensor-parallel ranks those that each compute their own experts' tokens alone.
    is_ring:   whether keys and values travel around the context-parallel ranks.
    """

    sizes: Sizes
    item: int
    dims: ParallelDims = ParallelDims()
    lora: LoraSpec | None = None
    fused: bool = False
    sharers: int = 1
    stage: int = 0
    tiled: bool = False
    offloads: bool = False
    expert_tp: int = 1
    is_ring: bool = False

    def __hash__(self) -> int:
        # of a few fields: they are keys of tables
        return hash((self.dims, self.stage, self.tiled, self.offloads))

    @property
    def layers(self) -> int:
        """Layers of the stage."""
        return self.sizes.layers // self.dims.pp

    @property
    def is_last(self) -> bool:
        """Whether the stage has the last norm and the head."""
        return self.stage == self.dims.pp - 1

    @property
    def _adapted(self) -> tuple[str, ...]:
        if self.lora is None:
            return ()
        return self.lora.targets or (
            _ATTENTION if self.sizes.experts is not None else (*ParameterName.COLUMNWISE, *ParameterName.ROWWISE)
        )

    @property
    def _adapted_experts(self) -> tuple[str, ...]:
        """Weights of experts that have adapters."""
        return tuple(name for name in self._adapted if name in _EXPERTS) if self.sizes.experts is not None else ()

    @property
    def _narrow(self) -> int:
        """Features between the matrices of a layer's adapters."""
        return 0 if self.lora is None else self.lora.rank * len({*self._adapted} - {*self._adapted_experts})

    @property
    def _joined(self) -> int:
        """Bytes of the matrices B of a layer's adapters, with zeros where parts of a fused layer share one."""
        if self.lora is None or not self.fused:
            return 0
        groups = (
            (("q_proj", "k_proj", "v_proj"), self._query + 2 * self._key),
            (("gate_proj", "up_proj"), 2 * self.sizes.ffn),
        )
        entries = sum(outputs * len({*names} & {*self._adapted}) for names, outputs in groups)
        return self.item * self.lora.rank * entries // self.dims.tp

    @property
    def _query(self) -> int:
        return self.sizes.heads * self.sizes.head_dim

    @property
    def _key(self) -> int:
        return max(self.sizes.kv_heads, self.dims.tp) * self.sizes.head_dim

    def saved_by_layer(self, width: int, masks: bool = True, largest: bool = False) -> int:
        """Return the bytes per token that autograd keeps of one layer, for rows of ``width`` tokens under a mask; of an
        MLP in tiles its input alone, which is a norm's output. Where some layers have experts it is the mean over all,
        or the ``largest``.
        """
        sizes, item, tp = self.sizes, self.item, self.dims.tp
        norms = 2 * (self._norm + 4) // self.sharers
        query, key = self._query, self._key
        if sizes.latent is not None:
            attention = self._saved_by_latent(sizes.latent) + item * width
        elif sizes.sinks:
            attention = item * 4 * query + 4 * sizes.heads
        elif masks or self.fused:
            projected = 3 * query + 3 * key if self.fused else 4 * query
            attention = (item * projected + 4 * sizes.heads) // tp + (item * width if masks else 0)
        else:
            attention = self._by_lengths.saved
        if self.fused:
            attention += 4 * item * sizes.head_dim
        heads = ((4 + item) * (query + key) + 4 * (sizes.heads + sizes.kv_heads)) // tp
        if ModelFamily.of(sizes.family).head_norms == "all heads":
            heads = (4 + item) * (query + key) + 8
        mlp = 0 if self.tiled else self._saved_by_mlp(largest)
        return norms + attention + mlp + (heads if sizes.head_norms else 0) + item * self._narrow

    @property
    def _norm(self) -> int:
        """Bytes per token that autograd keeps of a norm, but for its root: float32 input, normalised, output; those of
        models with sinks are rounded after their weights."""
        return (4 + (4 if self.sizes.sinks else self.item) + self.item) * self.sizes.hidden

    def _made_masks(self, width: int) -> int:
        """Return the bytes per token of the masks of layers with a window and without, as numbers, which a pass makes
        once for all layers."""
        return 2 * self.item * width * self.sizes.sinks

    def _saved_by_latent(self, latent: LatentSizes) -> int:
        """Return the bytes per token that autograd keeps of latent attention: norms of latents, queries and keys with
        their rotary parts, keys and values as they are made, the output, log-sum-exp."""
        sizes, norms = self.sizes, (4 + 2 * self.item) * (latent.query + latent.key) + 8
        of_head = self.item * (2 * sizes.head_dim + latent.expanded + latent.value) + 4
        return norms + sizes.heads * of_head

    def _saved_by_mlp(self, largest: bool) -> int:
        """Return the bytes per token that autograd keeps of the MLP of a layer, or of its router and experts."""
        sizes, experts = self.sizes, self.sizes.experts
        dense = (4 + self.fused) * self.item * sizes.ffn // self.dims.tp
        if experts is None:
            return dense
        # frozen matrices need neither of their inputs, which adapters of theirs do
        adapted, (inputs, features) = self._adapted_experts, (2, 4) if self.lora is None else (1, 3)
        of_routed = features + ("down_proj" in adapted) + (3 if sizes.sinks else 0)
        hidden = (inputs + ("gate_up_proj" in adapted)) * sizes.hidden
        narrow = 0 if self.lora is None else self.lora.rank * len(adapted)
        inside = self.item * experts.active * (hidden + of_routed * experts.ffn + narrow)
        routed = self._on_fullest(inside, is_kept=True)
        shared = self.item * (features * experts.shared // self.dims.tp + sizes.hidden + 1) if experts.shared else 0
        sparse = routed + shared + 4 * experts.number + CHOICE_BYTES * (1 + experts.active)
        if largest:
            return max(sparse, dense if experts.dense else 0)
        return -(-(sizes.sparse_layers * sparse + len(experts.dense) * dense) // sizes.layers)

    def saved_outside_layers(self) -> int:
        """Return the bytes per token that autograd keeps outside layers: token ids, rotary angles, the last norm."""
        norm = self._norm - self.item * self.sizes.hidden + 4 if self.is_last else 0
        return 8 + 2 * self.item * self.sizes.head_dim + norm

    def forward_bytes(self, tokens: int, width: int, packed: bool = False, masks: bool = True) -> int:
        """Return the peak bytes of a pass without gradients over ``tokens`` in rows of ``width``: inside one layer, at
        its MLP or at its attention. ``packed``: rows have several sequences; ``masks``: attention reads a mask.

        An adapter's output exists in addition to that of its linear layer.
        """
        sizes, item, tp = self.sizes, self.item, self.dims.tp
        features = (3 + (self.lora is not None) + 2 * self.fused) * sizes.ffn // tp
        mlp = item * (features * self._mlp_tokens(tokens) + 4 * sizes.hidden * tokens)
        mlp = max(mlp if self._has_dense else 0, tokens * (self._expert_features + 4 * item * sizes.hidden))
        heads = (6 * self._query + 3 * self._key if self.fused else 4 * self._query + 2 * self._key) // tp
        attention = item * (heads + 4 * sizes.hidden) + 4 * sizes.heads // tp
        always = 2 * item * sizes.head_dim * (1 + self.fused) + self._copied
        if not masks:
            return max(mlp, tokens * self._attended) + tokens * (always + self._places)
        if packed:  # the mask is made from one of two numbers a place, before the first layer
            return max(mlp, tokens * max(attention, 2 * width)) + tokens * (always + self._given_mask(width))
        own_mask = 0 if sizes.sinks else item * width
        return max(mlp, tokens * (attention + own_mask)) + tokens * (always + width + self._made_masks(width))

    @property
    def _has_dense(self) -> bool:
        return self.sizes.experts is None or bool(self.sizes.experts.dense)

    @property
    def _expert_features(self) -> int:
        """Bytes per token inside experts, without gradients: inputs in their order, gate and up, the activation and the
        product; or outputs, weighted, and in the order of tokens."""
        sizes, experts = self.sizes, self.sizes.experts
        if experts is None:
            return 0
        outputs = 2 * (self.item + self._weighted_item) * sizes.hidden
        # an adapter's output is next to its weight's, when inputs are there in both orders
        hidden = (2 if self._adapted_experts else 1) * sizes.hidden
        inside = max(self.item * (hidden + (9 if sizes.sinks else 4) * experts.ffn), outputs)
        shared = 2 * self.item * sizes.hidden if experts.shared else 0
        return self._on_fullest(experts.active * (inside + CHOICE_BYTES)) + shared

    @property
    def _copied(self) -> int:
        """Bytes per token of hidden states that sequence parallelism gathers and scatters."""
        return SEQUENCE_COPIES * self.item * self.sizes.hidden if self.sharers > 1 else 0

    @property
    def _by_lengths(self) -> AttentionBytes:
        """Attention by lengths on this rank."""
        sizes, tp = self.sizes, self.dims.tp
        heads, kv_heads = sizes.heads // tp, max(1, sizes.kv_heads // tp)
        return AttentionBytes(heads, kv_heads, sizes.head_dim, self.item, self.dims.cp, self.is_ring)

    @property
    def _attended(self) -> int:
        """Bytes per token inside attention by lengths, and of hidden states; a fused layer has its output, too."""
        fused = (2 * self._query + self._key) // self.dims.tp if self.fused else 0
        return self._by_lengths.forward + self.item * (fused + 4 * self.sizes.hidden)

    @property
    def _places(self) -> int:
        """Bytes per token of the places of sequences, which each rank with a part of the rows has of all of them."""
        return PLACE_BYTES * self.dims.row_parts

    def train_bytes(
        self,
        tokens: int,
        width: int,
        recompute: bool,
        packed: bool = False,
        in_flight: int | None = None,
        masks: bool = True,
    ) -> int:
        """Return the bytes kept for the backward pass over ``tokens`` in rows of ``width``, and those that it needs in
        addition, without the head. ``packed``: rows have several sequences; ``in_flight``: tokens of all micro-batches
        whose backward pass is to come, where a pipeline has several; ``masks``: attention reads a mask.

        With ``recompute`` the input of every layer is kept, or of two of them, and all activations of one layer.
        """
        made = width if masks and not packed else 0
        if recompute:
            inputs = min(2, self.layers) if self.offloads else self.layers
            kept = inputs * self.item * self.sizes.hidden // self.sharers
        else:
            kept = self.layers * self.saved_by_layer(made, masks)
        given = self._places
        if masks:
            given = self._given_mask(width) if packed else self._made_masks(width)
        kept_in_all = (in_flight or tokens) * (kept + self.saved_outside_layers() + given)
        # a matrix of adapters' B is made in each pass; one more is the gradient
        matrices = 1 + (1 if recompute else self.layers * -(-(in_flight or tokens) // tokens))
        return kept_in_all + self.backward_bytes(tokens, made, recompute, masks) + matrices * self._joined

    def backward_bytes(self, tokens: int, width: int, recompute: bool, masks: bool = True) -> int:
        """Return the bytes that the backward pass of one layer needs in addition. ``width``: of a mask of its own."""
        if not recompute:
            return self._in_tiles(tokens, masks) if self.tiled else tokens * self._backward(masks)
        # in float32 a layer's first norm keeps its input, which is kept already
        known = self.item * self.sizes.hidden if self.item == 4 and not self.fused else 0
        kept = self.saved_by_layer(width, masks, largest=True) - known
        return tokens * kept + self._recomputed(tokens, width, masks)

    def host_bytes(self, tokens: int) -> int:
        """Return the bytes of the inputs of checkpointed layers in host memory, in a pass over ``tokens``."""
        return tokens * self.layers * self.item * self.sizes.hidden if self.offloads else 0

    def stage_bytes(self, tokens: int, in_flight: int) -> int:
        """Return the bytes of hidden states between stages: received and sent ones of all micro-batches in flight, and
        gradients of both of one; without gradients ``in_flight`` is 0.
        """
        if self.dims.pp == 1:
            return 0
        hidden = self.item * self.sizes.hidden // self.sharers
        return hidden * (2 * in_flight + 2 * tokens) + OUTPUT_BYTES * tokens

    def received_bytes(self, tokens: int) -> int:
        """Return the bytes of hidden states and their residual that a stage of vLLM receives for ``tokens``."""
        return 2 * self.item * self.sizes.hidden * tokens

    def _given_mask(self, width: int) -> int:
        """Return the bytes per token of the inputs of a pass of packed rows: a mask as numbers, which all layers
        read, and the places of its sequences.
        """
        return self.item * width + PLACE_BYTES

    def _backward(self, masks: bool) -> int:
        """Return the bytes per token of the backward pass itself: gradients of the widest activations.

        In 16 bits the last norm computes its own in float32, before the layers' activations are freed. Attention by
        lengths repeats keys, values and their gradients, when activations of the MLP exist no more.
        """
        ffn = self.sizes.ffn if self._has_dense else 0
        widest = self.item * max(ffn * (1 + self.fused), self._query) // self.dims.tp
        freed = self._saved_by_mlp(largest=True) if self.sizes.experts else 4 * self.item * ffn // self.dims.tp
        attended = 0 if masks else self._by_lengths.gradients - freed
        outside = 2 * widest if self.item == 4 else widest + 12 * self.sizes.hidden
        of_experts = self._expert_gradients() + (0 if self.item == 4 else 8 * self.sizes.hidden)
        return max(outside, attended, of_experts) + self._copied

    def _expert_gradients(self, again: bool = False) -> int:
        """Return the bytes per token of gradients inside experts: of outputs, weighted and not, in both orders; or of
        outputs and of gate and up. ``again``: outputs were just computed again, in the type of their weights."""
        sizes, experts, weighted = self.sizes, self.sizes.experts, self._weighted_item
        if experts is None:
            return 0
        outputs = (2 * weighted + self.item + 2 * again * (weighted - self.item)) * sizes.hidden
        features = 3 * experts.ffn if sizes.sinks else 3 * experts.ffn // 2
        inside = experts.active * max(outputs, self.item * (sizes.hidden + features))
        return self._on_fullest(inside)

    def _on_fullest(self, routed: int, is_kept: bool = False) -> int:
        """Return the bytes of ``routed`` tokens, which a token has at each of its experts, on the fullest of several
        ranks, and of its outputs as they are back; ``is_kept``: of its rank's own ones alone."""
        experts = self.sizes.experts
        if self.dims.expert_parts * self.expert_tp * self.sharers == 1 or experts is None:
            return routed
        if self.sharers > 1:  # any of them may get the tokens of all; own ones are sent and come back
            return routed + 2 * self.item * experts.active * self.sizes.hidden
        back = self.item * experts.active * self.sizes.hidden // (self.expert_tp if is_kept else 1)
        return int(IMBALANCE * routed / self.expert_tp) + back

    @property
    def _weighted_item(self) -> int:
        """Bytes of a number of experts' outputs after their weights, which Mixtral has in float32."""
        layout = ModelFamily.of(self.sizes.family).experts
        return 4 if layout is not None and layout.float32_sum else self.item

    def _recomputed(self, tokens: int, width: int, masks: bool) -> int:
        """Return the bytes of the backward pass itself where a layer is computed again."""
        mlp = self.item * self.sizes.ffn // self.dims.tp
        if self.fused:
            widest = self.item * max(2 * self.sizes.ffn * self._has_dense, self._query) // self.dims.tp
            attended = 0 if masks else self._by_lengths.gradients - 4 * mlp * self._has_dense
            inside = max(2 * widest, attended, self._expert_gradients(again=True))
            return tokens * (inside + self.item * width + self._copied)
        if self.tiled:
            return self._in_tiles(tokens, masks)
        if self.sizes.experts is not None:
            inside = self._expert_gradients(again=True) + self.item * self.sizes.hidden
            dense = 2 * mlp if self._has_dense else 0
            kept = self._saved_by_mlp(largest=True)
            return max(max(inside, dense) * tokens, self._behind_mlp(tokens, masks) - kept * tokens)
        # what the MLP keeps is freed before other parts of the layer compute their gradients
        return max(2 * mlp * tokens, self._behind_mlp(tokens, masks) - 4 * mlp * tokens)

    def _in_tiles(self, tokens: int, masks: bool) -> int:
        """Return the bytes of the backward pass of a layer with its MLP in tiles: of a tile what autograd keeps and its
        gradients, and the gradient of the MLP's input; or those behind the MLP.
        """
        tile = 7 * self.item * self.sizes.ffn // self.dims.tp * self._mlp_tokens(tokens)
        return max(tile + self.item * self.sizes.hidden * tokens, self._behind_mlp(tokens, masks))

    def _behind_mlp(self, tokens: int, masks: bool) -> int:
        """Return the bytes of gradients in a layer once those of its MLP are there: of a norm, in 16 bits in float32;
        or of attention's output, queries, keys and values, when one norm is done.
        """
        item, hidden = self.item, self.sizes.hidden
        norm = (8 if item == 4 else 16) * hidden
        gradients = 4 * item * self._query // self.dims.tp if masks else self._by_lengths.gradients
        return tokens * max(norm, gradients - (4 + 2 * item) * hidden)

    def _mlp_tokens(self, tokens: int) -> int:
        """Return the tokens whose MLP is computed at a time (``engines/tiled_mlp.py``)."""
        return min(tokens, self.sizes.hidden) if self.tiled else tokens

    def kv_bytes_per_token(self) -> int:
        """Return the bytes per token of keys and values of all layers of a stage."""
        return self.layers * self.sizes.cached_features * self.item // self.sizes.cache_parts(self.dims.tp)

    def decode_bytes(
        self, rows: int, prompt: int, response: int, read: int | None, graphs: bool = False, keeps: bool = False
    ) -> dict[str, int]:
        """Return bytes by name while ``rows`` are decoded together: the cache, and the larger of activations and
        logits.

        read:    tokens of a pass over prompts, for rows in slots; None: one pass reads all prompts of a wave.
        graphs:  whether passes are captured, which have memory of their own, and logits that stay.
        keeps:   whether rows in slots go on from their keys and values, as turns of episodes do.
        """
        cache, width = rows * self.kv_bytes_per_token(), prompt + response
        if read is None:
            # the cache grows by so many columns at a time, the first of them for the prompt and what follows it
            prefill = self.forward_bytes(rows * prompt, prompt) - cache * max(0, response - CACHE_COLUMNS)
            # one token in one layer: keys and values repeated for all heads; without groups, the keys
            repeated = 2 * self._query if self.sizes.kv_heads < self.sizes.heads else self._key
            if self.sizes.latent is not None:  # keys and values of all heads, made from latents, and keys once more
                repeated = self._query + self.sizes.heads * self.sizes.latent.expanded
            attended = rows * width * self.item * repeated // self.dims.tp
        else:
            prefill = self.forward_bytes(min(rows * prompt, max(read, prompt)), 0) + 16 * rows * prompt
            # ids of prompts; the mask; keys of a prompt that are copied to other slots, or of rows that move
            attended = rows * width * (self.item + 1)
            prefill = max(prefill, rows * prompt * self.item * self._key // self.dims.tp)
            if keeps:
                prefill = max(prefill, self._continued_bytes(rows, width, read))
        activations = max(prefill, attended + self.forward_bytes(rows, 1))
        logits = rows * self.sizes.vocabulary * (NOISE_BYTES + self.item)
        found = {CACHE: cache * width, **larger(activations=activations, logits=logits)}
        if keeps:
            found["texts in slots"] = SLOT_TEXT_BYTES * rows * width
        if graphs:
            captured = attended + self.forward_bytes(rows, 1) + 2 * rows * self.sizes.vocabulary * self.item
            found["CUDA graphs"] = captured
        return found

    def _continued_bytes(self, rows: int, width: int, read: int) -> int:
        """Return the bytes of a pass over replies to ``rows`` in slots of ``width`` tokens: a mask over all that their
        tokens may attend to, and keys and values of one layer, which are copied from the slots, and on GPUs repeated
        for the heads that share them.

        read:  tokens of a pass. One over replies has fewer, so that its mask is as large as their square, or one reply.
        """
        sizes, tokens = self.sizes, min(rows * width, max(min(read, 1 + read**2 // width), width))
        repeated = 2 * self._query if sizes.kv_heads < sizes.heads else 0
        attended = self.kv_bytes_per_token() // self.layers + self.item * repeated // self.dims.tp
        mask = tokens * width
        return max(mask * (1 + self.item), mask * self.item + rows * width * attended + self.forward_bytes(tokens, 0))

    def paged_decode_bytes(self, rows: int, step_tokens: int) -> dict[str, int]:
        """Return bytes by name while vLLM, whose cache has memory of its own, decodes ``rows`` together: the larger of
        the activations of a step and of logits.

        ``step_tokens``: most tokens of a step.
        """
        logits = rows * self.sizes.vocabulary * (NOISE_BYTES + self.item)
        return larger(activations=self.forward_bytes(step_tokens, 1), logits=logits)

    def head_bytes(self, tokens: int, chunk_bytes: int, train: bool) -> int:
        """Return the bytes of log-probs of ``tokens``: two chunks of float32 logits, hidden states and their gradient.

        A chunk has at least one row of the vocabulary.
        """
        rows = 4 * self.sizes.vocabulary // self.dims.tp
        chunk = min(max(chunk_bytes, rows), tokens * rows)
        hidden = (4 + 2 * self.item if train else self.item) * self.sizes.hidden
        return 2 * chunk + tokens * hidden

    def value_bytes(self, tokens: int) -> int:
        """Return the bytes of training a scalar head in addition: values, and its gradient for the hidden states."""
        return tokens * (self.item * self.sizes.hidden + 8)
