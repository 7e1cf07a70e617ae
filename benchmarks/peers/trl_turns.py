"""Token ids and loss masks of chats with tools by flexrlhf and by TRL's GRPO trainer, for four chat templates.

    pip install trl==1.16.0                   # in a separate environment that also has flexrlhf
    python -m benchmarks.peers.trl_turns [--record FILE] [--tokenizer FAMILY=DIRECTORY ...]

TRL's side is its trainer's own loop: ``GRPOTrainer._generate`` parses the turns, runs the tools and writes their
results behind them; only sampling is replaced, by turns of a script. ``--record`` writes its ids and masks to a file,
which ``tests/unit/test_trl_turns.py`` reads where TRL is not installed. Exits with 1 if an id or a mask differs, except
for ``REPLACED``.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from transformers import AutoTokenizer
from transformers.utils import get_json_schema

from benchmarks.peers.chat_tokenizers import TOOL_FAMILIES, build_chat_tokenizer
from flexrlhf.data.chat import ChatFormat
from flexrlhf.data.encoding import RowEncoder
from flexrlhf.data.examples import Example
from flexrlhf.data.forms import TextExample
from flexrlhf.data.messages import Message
from flexrlhf.data.turn_tokens import TurnTokens
from flexrlhf.environments.tool_calls import ToolCall, parse_calls

BRIDGED = ("qwen3",)
"""Families whose templates write an earlier turn in another way."""
REPLACED = {("qwen3", 9)}
"""Family and script whose prompt differs: TRL has a template of its own for Qwen3, which writes empty thoughts into
earlier turns of the assistant."""


def add(a: int, b: int) -> int:
    """Add two integers.

    Args:
        a: The first one.
        b: The second one.
    """
    return a + b


def look_up(word: str, language: str = "en") -> str:
    """Look a word up in a dictionary.

    Args:
        word: The word to look up.
        language: Its language. (choices: ["en", "de", "zh"])
    """
    pages = {"prime": "prime: a number of two divisors\n  e.g. 2, 3", "Ärger": "Ärger 🙂 — 生气", "": ""}
    return pages[word]


TOOLS: tuple[Callable[..., Any], ...] = (add, look_up)
Calls = list[dict[str, Any]]


@dataclass(frozen=True)
class Script:
    """One chat: the turns of its prompt, and turns of the policy.

    prompt:    roles and contents
    turns:     content of each turn, and the calls behind it
    is_split:  whether the policy samples turns in other tokens than the tokenizer makes of their text
    """

    prompt: tuple[tuple[str, str], ...]
    turns: tuple[tuple[str, tuple[ToolCall, ...]], ...]
    is_split: bool = False


def _sum(a: int, b: int) -> ToolCall:
    return ToolCall("add", {"a": a, "b": b})


def _page(word: str) -> ToolCall:
    return ToolCall("look_up", {"word": word})


USER = ("user", "Name the capital of France.")
SYSTEM = ("system", "You are a helpful assistant.")
SCRIPTS = (
    Script((USER,), (("", (_sum(2, 3),)), ("It is 5.", ()))),
    Script((SYSTEM, USER), (("", (_sum(2, 3),)), ("", (_sum(5, 8),)), ("13, please.", ()))),
    Script((USER,), (("", (_page("prime"),)), ("Two and three are primes.", ()))),
    Script((USER,), (("", (_page("Ärger"),)), ("", (_page("prime"),)), ("", (_sum(-1, 1),)), ("Ärger: 生气 🙂", ()))),
    Script((SYSTEM, USER), (("", (_sum(1, 2), _sum(3, 4))), ("3, 7", ()))),
    Script((USER,), (("", (_page("nowhere"),)), ("No such word.", ()))),
    Script((USER,), (("", (ToolCall("subtract", {"a": 1}),)), ("", (_sum(1, 1),)), ("2", ()))),
    Script((USER,), (("", (_page(""),)), ("Nothing.\n\n", ()))),
    Script((USER,), (("", (_sum(2, 3),)), ("", (_page("prime"),)), ("Five is one.", ())), is_split=True),
    Script((SYSTEM, USER, ("assistant", "Paris."), ("user", "Thanks a lot!")), (("", (_sum(7, 7),)), ("14", ()))),
)
"""Results of several lines, empty, of other scripts, of calls that fail; several calls; chats of several exchanges."""


@dataclass(frozen=True)
class TrainedIds:
    """Token ids of an episode.

    prompt:  of its prompt, as a digest
    ids:     behind the prompt
    mask:    for each of them "1" if it is trained on, else "0"
    """

    prompt: str
    ids: list[int]
    mask: str


def turn_ids(name: str, tokenizer: Any, script: Script) -> list[list[int]]:
    """Return the turns of the policy in the format of a family, as it samples them."""
    texts = [_turn_text(name, content, calls) for content, calls in script.turns]
    encode = tokenizer.encode
    found = [[token for c in text for token in encode(c, add_special_tokens=False)] for text in texts]
    whole = [encode(text, add_special_tokens=False) for text in texts]
    return [[*ids, tokenizer.eos_token_id] for ids in (found if script.is_split else whole)]


def _form(name: str) -> str:
    return "llama3" if name == "llama3_1" else "hermes"


def _turn_text(name: str, content: str, calls: Sequence[ToolCall]) -> str:
    if _form(name) == "llama3":
        # of several calls the family writes one
        return content + "".join(json.dumps({"name": c.name, "parameters": c.arguments}) for c in calls[:1])
    written = [f"<tool_call>\n{json.dumps({'name': c.name, 'arguments': c.arguments})}\n</tool_call>" for c in calls]
    thoughts = "<think>\n\n</think>\n\n" * (name == "qwen3")
    return thoughts + "\n".join([*([content] if content else []), *written])


def by_flexrlhf(name: str, tokenizer: Any) -> list[TrainedIds]:
    """Return the episodes of all scripts, by the run's own parts."""
    chat = ChatFormat(tools=tuple(map(get_json_schema, TOOLS)))
    tokens, encoder = TurnTokens(tokenizer, chat, name in BRIDGED), RowEncoder(tokenizer, chat, sys.maxsize)
    return [_episode(tokens, encoder, tokenizer, name, script) for script in SCRIPTS]


def _episode(tokens: TurnTokens, encoder: RowEncoder, tokenizer: Any, name: str, script: Script) -> TrainedIds:
    turns = tuple(Message(*turn) for turn in script.prompt)
    prompt = encoder.encode(TextExample("", turns=turns)).prompt
    assert tokens.prompt(Example(prompt, (), (), turns=turns), ()) == prompt
    ids: list[int] = []
    mask = ""
    for turn in turn_ids(name, tokenizer, script):
        ids, mask = ids + turn, mask + "1" * len(turn)
        calls, errors = parse_calls(tokenizer.decode(turn[:-1]), _form(name))
        assert not errors, errors
        if calls:
            reply = tokens.reply([("tool", _result(call)) for call in calls], is_ended=True)
            ids, mask = ids + list(reply), mask + "0" * len(reply)
    return TrainedIds(_digest(prompt), ids, mask)


def _digest(ids: Sequence[int]) -> str:
    return hashlib.sha256(json.dumps([int(token) for token in ids]).encode()).hexdigest()[:16]


def _result(call: ToolCall) -> str:
    """Return the result of a call as TRL writes it."""
    tools = {tool.__name__: tool for tool in TOOLS}
    if call.name not in tools:
        return str({"error": f"Tool {call.name} not found."})
    try:
        return str(tools[call.name](**call.arguments))
    except KeyError as error:
        return str({"error": str(error)})


def by_trl(name: str, tokenizer: Any) -> list[TrainedIds]:
    """Return the episodes of all scripts, by the loop of TRL's trainer."""
    from datasets import Dataset
    from transformers import LlamaConfig, LlamaForCausalLM
    from trl import GRPOConfig, GRPOTrainer

    class Scripted(GRPOTrainer):  # type: ignore[misc]
        """Trainer that samples the turns of a script."""

        turns: list[list[int]]

        def _generate_single_turn(self, prompt_ids: Any, *_: Any, **__: Any) -> Any:
            assert len(prompt_ids) == 1
            return [list(self.turns.pop(0))], None

    def zero(completions: list[Any], **_: Any) -> list[float]:
        return [0.0] * len(completions)

    size = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=len(tokenizer), max_position_embeddings=100_000, **size))
    rows = Dataset.from_list([{"prompt": [{"role": "user", "content": "none"}]}])
    common: dict[str, Any] = {"report_to": [], "use_cpu": True, "bf16": False, "max_completion_length": 50_000}
    episodes = []
    with TemporaryDirectory() as directory:
        arguments = GRPOConfig(output_dir=directory, per_device_train_batch_size=2, num_generations=2, **common)
        trainer = Scripted(model, zero, arguments, rows, processing_class=tokenizer, tools=list(TOOLS))
        trainer._sync_tool_dicts, trainer._async_tool_dicts = [{tool.__name__: tool for tool in TOOLS}], [{}]
        for script in SCRIPTS:
            trainer.turns = turn_ids(name, tokenizer, script)
            prompt = [{"role": role, "content": content} for role, content in script.prompt]
            found = trainer._generate([prompt])
            episodes.append(TrainedIds(_digest(found[0][0]), list(found[1][0]), "".join(map(str, found[2][0]))))
            assert not trainer.turns, "TRL has found no call in a turn"
    return episodes


def compare(name: str, label: str, tokenizer: Any) -> tuple[list[TrainedIds], bool]:
    """Print a row of the table; return TRL's episodes, and whether ours are the same."""
    ours, theirs = by_flexrlhf(name, tokenizer), by_trl(name, tokenizer)
    pairs = list(zip(ours, theirs, strict=True))
    equal = [[getattr(a, part) == getattr(b, part) for a, b in pairs] for part in ("prompt", "ids", "mask")]
    sizes = sum(len(each.ids) for each in theirs), sum(each.mask.count("1") for each in theirs)
    print(f"| {label} | {len(pairs)} | {' | '.join(map(str, (*sizes, *map(sum, equal))))} |")
    is_same = all(all(each) or (name, number) in REPLACED for number, each in enumerate(zip(*equal, strict=True)))
    return theirs, is_same


def main() -> int:
    """Compare the families, and the tokenizers that the command names as NAME=DIRECTORY."""
    parser = argparse.ArgumentParser(description="Token ids and loss masks of chats with tools by flexrlhf and TRL.")
    parser.add_argument("--record", type=Path, help="file for TRL's ids and masks")
    parser.add_argument(
        "--tokenizer", nargs="*", default=[], help="family=directory of a tokenizer; its template is used"
    )
    arguments = parser.parse_args()
    recorded: dict[str, Any] = {"trl": version("trl")}
    results = []
    print("| | chats | tokens behind prompts | trained on | equal prompts | equal ids behind them | equal masks |")
    print("|---|---|---|---|---|---|---|")
    for name in TOOL_FAMILIES:
        with TemporaryDirectory() as directory:
            theirs, is_same = compare(name, name, build_chat_tokenizer(name, Path(directory)))
        results.append(is_same)
        recorded[name] = [asdict(each) for each in theirs]
    for each in arguments.tokenizer:
        name, _, path = each.partition("=")
        results.append(compare(name, each, AutoTokenizer.from_pretrained(path))[1])
    if arguments.record:
        arguments.record.write_text(json.dumps(recorded, separators=(",", ":")) + "\n")
    return 0 if all(results) else 1


if __name__ == "__main__":
    sys.exit(main())
