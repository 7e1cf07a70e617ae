"""Token ids and loss masks of chats by flexrlhf and by TRL's trainers, token by token, for five chat templates.

    pip install trl==1.9.0                    # in a separate environment that also has flexrlhf
    python -m benchmarks.peers.trl_chat [--tokenizer DIRECTORY ...]

TRL's side is the data set that ``SFTTrainer`` and ``DPOTrainer`` have prepared for training, with ``max_length: null``.
For chats of several turns TRL masks by ``{% generation %}`` markers alone (``assistant_only_loss``): it has templates
with markers for some families, and the script gives it one for the others. Exits with 1 if ids differ, or masks do
in more than the line end that TRL's template of Qwen2.5 counts to the assistant.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from datasets import Dataset
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM
from trl import DPOConfig, DPOTrainer, SFTConfig, SFTTrainer
from trl.chat_template_utils import get_training_chat_template

from benchmarks.peers.chat_tokenizers import FAMILIES, build_chat_tokenizer
from flexrlhf.data.chat import ChatFormat
from flexrlhf.data.examples import Example, LoadedExamples
from flexrlhf.operators.graph import Needs

MARKED = {
    "smollm2": (
        "{% for message in messages %}{% if loop.first and messages[0]['role'] != 'system' %}"
        "{{ '<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n' }}"
        "{% endif %}{{ '<|im_start|>' + message['role'] + '\n' }}"
        "{% if message['role'] == 'assistant' %}{% generation %}{{ message['content'] + '<|im_end|>' + '\n' }}"
        "{% endgeneration %}{% else %}{{ message['content'] + '<|im_end|>' + '\n' }}{% endif %}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
    ),
    "mistral": (
        "{{ bos_token }}{% for message in messages %}{% if message['role'] == 'user' %}"
        "{{ '[INST] ' + message['content'] + ' [/INST]' }}{% else %}{% generation %}"
        "{{ message['content'] + eos_token }}{% endgeneration %}{% endif %}{% endfor %}"
    ),
}
"""Templates with markers of families that TRL has none for."""
CONTENTS = (
    ("What is the capital of France?", "The capital of France is Paris."),
    ("Name two primes, please.", "2 and 3.\n\n```python\nprint(2, 3)\n```"),
    ("  Spaces, a tab\tand a line\n\nend.  ", "\nBegins and ends with a line end.\n"),
    ("Wie heißt du? 你好 🙂", "Ich heiße Ärger — 再见 🙂."),
    ("One word", "Yes"),
    ("", "An answer to nothing."),
)
NO_SYSTEM = ("mistral", "gemma")
Ids = list[int]


@dataclass(frozen=True)
class Prepared:
    """One text of a trainer: its ids, and which of them count for the loss."""

    ids: Ids
    mask: list[bool]


def question(index: int) -> dict[str, str]:
    """Return a user's turn."""
    return {"role": "user", "content": CONTENTS[index % len(CONTENTS)][0]}


def reply(index: int) -> dict[str, str]:
    """Return an assistant's turn."""
    return {"role": "assistant", "content": CONTENTS[index % len(CONTENTS)][1]}


def chats(name: str) -> Iterator[list[dict[str, str]]]:
    """Yield chats of one to three exchanges, with and without a system prompt."""
    for first in range(len(CONTENTS)):
        for count in (1, 2, 3):
            turns = [turn for i in range(first, first + count) for turn in (question(i), reply(i))]
            yield turns
            if name not in NO_SYSTEM:
                yield [{"role": "system", "content": "Answer in French."}, *turns]


def rows_of(name: str, kind: str) -> list[dict[str, Any]]:
    """Return the rows of a comparison: a response of one turn, a whole chat, or a pair of responses."""
    whole = list(chats(name))
    match kind:
        case "completion":
            return [{"prompt": chat[:-1], "completion": chat[-1:]} for chat in whole]
        case "messages":
            return [{"messages": chat} for chat in whole]
    return [
        {"prompt": chat[:-1], "chosen": chat[-1:], "rejected": [reply(index + 1)]} for index, chat in enumerate(whole)
    ]


def by_trl(kind: str, rows: list[dict[str, Any]], tokenizer: Any, directory: str) -> list[Prepared]:
    """Return the trained tokens of TRL's trainer; for a pair the chosen response, then the rejected one."""
    size = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1}
    model, ref = (LlamaForCausalLM(LlamaConfig(vocab_size=len(tokenizer), **size)) for _ in range(2))
    common: dict[str, Any] = {"output_dir": directory, "max_length": None, "report_to": [], "use_cpu": True}
    data = Dataset.from_list(rows)
    if kind == "pairs":
        arguments = DPOConfig(**common, bf16=False)
        dpo = DPOTrainer(model, ref, args=arguments, train_dataset=data, processing_class=tokenizer)
        return [
            Prepared(row["prompt_ids"] + row[key], [False] * len(row["prompt_ids"]) + [True] * len(row[key]))
            for row in dpo.train_dataset
            for key in ("chosen_ids", "rejected_ids")
        ]
    settings = SFTConfig(**common, bf16=False, assistant_only_loss=kind == "messages")
    sft = SFTTrainer(model, args=settings, train_dataset=data, processing_class=tokenizer)
    return [Prepared(row["input_ids"], [label != -100 for label in row["labels"]]) for row in sft.train_dataset]


def by_flexrlhf(rows: list[dict[str, Any]], needs: Needs, tokenizer: Any, template: str | None) -> list[Prepared]:
    """Return the examples of ``load_examples`` from a file with the rows."""
    with TemporaryDirectory() as directory:
        file = Path(directory) / "rows.jsonl"
        file.write_text("".join(json.dumps(row) + "\n" for row in rows))
        examples = LoadedExamples.load(
            file,
            needs=needs,
            tokenizer=tokenizer,
            max_prompt_tokens=100_000,
            max_response_tokens=100_000,
            chat=ChatFormat("auto", template),
        ).examples
    return [_prepared(example, number) for example in examples for number in range(len(example.responses))]


def _prepared(example: Example, number: int) -> Prepared:
    ids = [*example.prompt, *example.responses[number]]
    return Prepared(ids, [False] * len(example.prompt) + list(example.is_trained(number)))


def compare(label: str, ours: Sequence[Prepared], theirs: Sequence[Prepared], tokenizer: Any, expected: str) -> bool:
    """Print a row of the table; return whether ids are equal and masks differ only in ``expected`` strings."""
    same_ids = len(ours) == len(theirs) and all(a.ids == b.ids for a, b in zip(ours, theirs, strict=True))
    differing: set[str] = set()
    count = 0
    for a, b in zip(ours, theirs, strict=False):
        places = [i for i, (x, y) in enumerate(zip(a.mask, b.mask, strict=False)) if x != y]
        count += len(places)
        differing |= {tokenizer.decode([a.ids[i]]) for i in places}
    is_same = same_ids and differing <= ({expected} if expected else set())
    tokens, masked = sum(len(a.ids) for a in ours), sum(sum(a.mask) for a in ours)
    differences = f"{count} ({', '.join(map(repr, sorted(differing)))})" if count else "0"
    print(f"| {label} | {len(ours)} | {tokens} | {masked} | {'equal' if same_ids else 'DIFFERENT'} | {differences} |")
    return is_same


def compare_family(name: str, tokenizer: Any, directory: str) -> list[bool]:
    """Compare all kinds of rows of one tokenizer."""
    results = []
    kinds: tuple[tuple[str, Needs], ...] = (("completion", "responses"), ("pairs", "pairs"))
    for kind, needs in kinds:
        rows = rows_of(name, kind)
        ours, theirs = by_flexrlhf(rows, needs, tokenizer, None), by_trl(kind, rows, tokenizer, directory)
        results.append(compare(f"{name}, {kind}", ours, theirs, tokenizer, ""))
    rows, own = rows_of(name, "messages"), tokenizer.chat_template
    marked = MARKED.get(name) or get_training_chat_template(tokenizer)
    tokenizer.chat_template = marked
    theirs = by_trl("messages", rows, tokenizer, directory)
    tokenizer.chat_template = own
    results.append(
        compare(f"{name}, messages, markers", by_flexrlhf(rows, "responses", tokenizer, marked), theirs, tokenizer, "")
    )
    line_end = "\n" if name == "qwen2_5" else ""
    prefix = by_flexrlhf(rows, "responses", tokenizer, None)
    results.append(compare(f"{name}, messages, prefix rule", prefix, theirs, tokenizer, line_end))
    return results


def main() -> int:
    """Compare the five families, and the tokenizers that the command names as NAME=DIRECTORY."""
    parser = argparse.ArgumentParser(description="Token ids and loss masks of chats by flexrlhf and by TRL.")
    parser.add_argument("--tokenizer", nargs="*", default=[], help="family=directory of a real tokenizer")
    named = dict(each.split("=", 1) for each in parser.parse_args().tokenizer)
    print("| | samples | tokens | trained on | ids | mask tokens that differ |\n|---|---|---|---|---|---|")
    results = []
    with TemporaryDirectory() as directory:
        for name in FAMILIES:
            results += compare_family(name, build_chat_tokenizer(name, Path(directory) / name), directory)
        for name, path in named.items():
            results += compare_family(name, AutoTokenizer.from_pretrained(path), directory)
    return 0 if all(results) else 1


if __name__ == "__main__":
    sys.exit(main())
