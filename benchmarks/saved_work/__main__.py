"""FLOPs and time that are saved: padding, copies of a prompt, and log-probs that another pass computes.

    python -m benchmarks.saved_work [--data DIRECTORY]

One rank with one thread, 3.3 million parameters, float32, the default ``micro_batch_tokens``. Every row of the table
does the same work in both ways, in turns; times are medians, and FLOPs are counted while the passes run, once. Saved
work:

* padding: of hh-rlhf's sequences (``--data`` has hh_pairs.jsonl.gz of ``make real``), or of sequences with
exponentially distributed lengths of about the same means: prompts of 129 tokens, up to 512, and responses of 40, up to
128. ``pack_texts`` is compared with itself turned off, which is one sequence in a row, sorted, without a gap; and with
rows of the longest prompt and response of a pass, in the order of the batch, which no setting computes any more. *
masks, by attention that takes lengths: training passes, with FLOPs of attention alone. * copies of a
prompt, by ``share_prompts``: two prompts of 512 tokens, 8 responses of 64 tokens to each. * log-probs, by
``rollout.logprobs``: a step of PPO on some of the sequences, and one of GRPO with 8 samples of a prompt, by the
trainer, with one mini-batch and one epoch.
"""

from __future__ import annotations

import argparse
import gc
from collections.abc import Iterator, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

import torch

from benchmarks.peers.speed.workloads import SMALL
from benchmarks.saved_work.costs import HEADER, SavedWork
from benchmarks.saved_work.passes import GROUPS, SAMPLES, masks, padding, prompts
from benchmarks.saved_work.runs import StepRuns
from benchmarks.saved_work.texts import LONGEST, Text, dialogue_texts, sampled_texts
from flexrlhf.operators.columns import Lengths

NUM_TEXTS = 16
NUM_STEP_TEXTS = 8
"""Sequences in a step of PPO, which has two trained models and two others."""
RESPONSE = 40
"""Tokens of a response of PPO: random weights seldom end one before."""


def main() -> None:
    """Measure and print row by row."""
    options = _options()
    torch.set_num_threads(1)
    count = options.texts
    texts = dialogue_texts(options.data, count, SMALL["vocab_size"]) if options.data else sampled_texts(count)
    print(f"{count} sequences, {_mean([text.prompt for text in texts])} + {_mean([text.response for text in texts])}\n")
    print(HEADER)
    for row in rows(texts, options.rounds):
        print(row.line(), flush=True)
    # a rank freezes its objects, which libraries report as leaks at the exit
    gc.unfreeze()


def _mean(lengths: Sequence[int]) -> str:
    return f"{sum(lengths) / len(lengths):.0f} tokens (at most {max(lengths)})"


def rows(texts: Sequence[Text], rounds: int) -> Iterator[SavedWork]:
    """Yield the table."""
    for tokens in (128, 512, 2048, 8192):
        yield from masks(tokens, rounds)
    yield from padding(texts, rounds)
    yield from prompts(rounds)
    of_step = [max(2, text.prompt) for text in texts[:NUM_STEP_TEXTS]]
    with TemporaryDirectory() as directory:
        ppo = StepRuns("ppo", Path(directory), of_step, Lengths(LONGEST.prompt, RESPONSE))
        grpo = StepRuns("grpo", Path(directory), [GROUPS.prompt], GROUPS, SAMPLES)
        for runs in (ppo, grpo):
            yield runs.saved(steps=2, rounds=max(1, rounds - 1))


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.saved_work",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--data", type=Path, help="directory with hh_pairs.jsonl.gz")
    parser.add_argument("--texts", type=int, default=NUM_TEXTS, help="sequences of a mini-batch")
    parser.add_argument("--rounds", type=int, default=3, help="measured runs of each way")
    return parser.parse_args()


if __name__ == "__main__":
    main()
