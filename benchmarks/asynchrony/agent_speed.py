"""Seconds a step of an agent of up to 20 turns on 2 + 2 ranks, by the order of rows, lag and cuts, run and predicted.

    python -m benchmarks.asynchrony.agent_speed DIRECTORY [--variants NAME ...] [--steps N] [--processes N] [--cap S]

REINFORCE++ of a small Llama with the episodes of ``row_lives.py``, a published trace: times are divided by
``SECONDS_SCALE``, tokens by ``TOKENS_SCALE``, so that decoding takes as long in comparison with replies as there: 10 ms
a token. The free-running loop, which has no exact form here, is by the events of ``row_lives.py``, with its speeds.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import mean, median
from typing import Any

import yaml

from benchmarks.asynchrony import traced_agent
from benchmarks.asynchrony.row_lives import MOST_TURNS, PROMPT, RULES, Rule, Speeds, run_rules
from benchmarks.asynchrony.row_lives import ROWS as TRACE_ROWS
from benchmarks.asynchrony.row_table import Life
from flexrlhf.config.spec_file import load_spec
from flexrlhf.data.quickstart.corpus import build_tokenizer
from flexrlhf.timeline import Trace

SECONDS_SCALE, TOKENS_SCALE = 20.0, 50.0
ROWS, LONGEST, SEGMENT, MOST_SEGMENTS = 16, 1000, 80, 8
SPEEDS = Speeds()
TOKEN_SECONDS = TOKENS_SCALE / SECONDS_SCALE
"""Scale of the time of a token."""
SHAPE: dict[str, Any] = {"model_type": "llama", "hidden_size": 128, "intermediate_size": 128, "num_hidden_layers": 1}
SHAPE |= {"num_attention_heads": 2, "max_position_embeddings": 2048, "tie_word_embeddings": False}


@dataclass(frozen=True)
class Variant:
    """A way to run the episodes.

    order:   of rows.
    lag:     batches by which training is behind.
    is_cut:  whether rows are carried to the next step at cuts.
    caches:  of carried rows.
    carries: whether these do not await late replies.
    """

    name: str
    order: str
    lag: int
    is_cut: bool = False
    caches: str = "renewed"
    carries: bool = False

    @property
    def fill(self) -> int:
        """Steps until as many rows are in flight as later."""
        return 1 + self.lag + 3 * self.is_cut

    @property
    def rule(self) -> Rule:
        """The same by events."""
        life = Life(tokens=round(SEGMENT * TOKENS_SCALE), cuts=MOST_SEGMENTS - 1, as_ended=True)
        own, by_turns, keeps = life if self.is_cut else Life(), self.order == "planned", self.caches == "kept"
        return Rule(self.name, own, self.lag, by_turns=by_turns, keeps=keeps, carries=self.carries)


VARIANTS = (
    Variant("turns, lag 0", "planned", 0),
    Variant("turns, lag 1", "planned", 1),
    Variant("free, lag 0", "free", 0),
    Variant("free, lag 2", "free", 2),
    Variant("free and cuts, lag 0", "free", 0, True),
    Variant("free and cuts, lag 2", "free", 2, True),
    Variant("free, cuts and kept caches, lag 0", "free", 0, True, "kept"),
    Variant("free, cuts and kept caches, lag 2", "free", 2, True, "kept"),
    Variant("free, cuts, late replies carried, lag 0", "free", 0, True, carries=True),
    Variant("free, cuts, late replies carried, lag 2", "free", 2, True, carries=True),
    Variant("free, cuts, caches kept, late replies carried, lag 2", "free", 2, True, "kept", carries=True),
)


@dataclass(frozen=True)
class Measured:
    """Figures of a run.

    seconds:   of training on as many rows as a step takes.
    idle:      share of the time in which ranks that generate make no pass.
    computed:  tokens of passes of generation, padding included, for each one that is sampled.
    once:      the same, for each one that has to be computed: sampled, of a prompt or of a reply.
    account:   of rows.
    load:      of the machine, at the end.
    """

    seconds: float
    idle: float
    computed: float
    once: float
    account: str
    load: float


def write_inputs(directory: Path) -> None:
    """Write a tokenizer of numbers, prompts, and the code of the model."""
    directory.mkdir(parents=True, exist_ok=True)
    numbers = range(1, traced_agent.MOST_TOKENS + 1)
    build_tokenizer(["".join(map(traced_agent.word, numbers))], directory / "tokenizer")
    (directory / "prompts.jsonl").write_text("".join(json.dumps({"prompt": "n001"}) + "\n" for _ in range(640)))
    (directory / "model").mkdir(exist_ok=True)
    shutil.copy(Path(__file__).with_name("countdown_model.py"), directory / "model")


def write_config(directory: Path, variant: Variant, steps: int, processes: int, cap: float) -> Path:
    """Write the YAML of a run and return its path. ``cap``: deadline of a reply in the trace's seconds."""
    name = variant.name.replace(",", "").replace(" ", "-")
    passes = directory / f"passes-{name}"
    shutil.rmtree(passes, ignore_errors=True)
    passes.mkdir()
    decoding, each = (TOKEN_SECONDS * value for value in SPEEDS.step)
    model = {
        **SHAPE,
        "vocab_size": traced_agent.MOST_TOKENS + 4,
        **{"pad_token_id": 0, "eos_token_id": 1, "bos_token_id": 2},
        "auto_map": {"AutoModelForCausalLM": f"{directory / 'model'}--countdown_model.CountdownLlama"},
        **{"step_seconds": decoding, "row_seconds": each, "token_seconds": TOKEN_SECONDS / SPEEDS.prefill},
        "passes": str(passes),
    }
    environment = {
        "path": f"{Path(traced_agent.__file__)}:TracedAgent",
        "options": {"seconds_scale": SECONDS_SCALE, "tokens_scale": TOKENS_SCALE, "cap": cap},
        **{"max_turns": MOST_TURNS, "processes": processes},
    }
    cuts = {"segment_tokens": SEGMENT, "max_segments": MOST_SEGMENTS, "groups": "as-ended", "caches": variant.caches}
    raw = {
        "name": name,
        "algorithm": {"name": "reinforce++", "kl": None, "prompts_per_step": ROWS, "samples_per_prompt": 1},
        # the policy is to go on counting
        "models": {"actor": {"init": model, "trust_remote_code": True, "optimizer": {"learning_rate": 1e-12}}},
        "environment": environment,
        "data": {
            "path": str(directory / "prompts.jsonl"),
            "tokenizer": str(directory / "tokenizer"),
            "max_prompt_tokens": round(PROMPT / TOKENS_SCALE),
            "max_response_tokens": LONGEST,
        },
        "cluster": {"devices": 4, "device": "cpu"},
        "placement": {"actor.shadow": 0.5, "actor": 0.5},
        "schedule": {"lag": variant.lag},
        "rollout": {
            "order": variant.order,
            **(cuts if variant.is_cut else {}),
            **({"late_replies": "carry"} if variant.carries else {}),
        },
        # predictions sample from the episodes of a run
        "samples": {"count": ROWS},
        "steps": variant.fill + steps + variant.lag,
        "runs": str(directory / "runs"),
    }
    path = directory / f"{name}.yaml"
    path.write_text(yaml.safe_dump(raw))
    return path


def command(*words: str) -> str:
    done = subprocess.run([sys.executable, "-m", "flexrlhf", *words], check=True, stdout=subprocess.PIPE, text=True)
    return done.stdout


def measure(config: Path, variant: Variant, steps: int) -> Measured:
    """Run; return figures of the time from the end of the training of step ``fill`` on."""
    output = command("run", str(config))
    spec = load_spec(config)
    rows = [json.loads(line) for line in (spec.directory / "metrics.jsonl").read_text().splitlines()]
    ends = dict.fromkeys(range(len(rows)), 0.0)
    for span in Trace.read(spec.directory / "timeline.json").spans:
        if span.kind == "run" and span.label.startswith("train_actor"):
            ends[span.step] = max(ends[span.step], span.end)
    first, last = variant.fill - 1, variant.fill - 1 + steps
    trained = sum(row["rows_trained"] for row in rows[first + 1 : last + 1])
    passes = [read_passes(path) for path in Path(str(config.parent), f"passes-{spec.name}").glob("*.txt")]
    generating = [each for each in passes if any(count for *_, count in each)]
    # the last pass is the last backward pass
    origin = max(end for each in passes for _, end, *_ in each) - max(ends.values())
    borders = [origin + ends[step] for step in (first, last)]
    busy = sum(max(0.0, min(end, borders[1]) - max(start, borders[0])) for each in generating for start, end, _ in each)
    seconds = ends[last] - ends[first]
    sampled = sum(row["rows_trained"] * row["response_length"] for row in rows)
    read = sum(row["rows_trained"] * (row["reply_length_mean"] + PROMPT / TOKENS_SCALE) for row in rows)
    computed = sum(count for each in generating for *_, count in each)
    account = next(line.strip() for line in output.splitlines() if line.strip().startswith("rows: "))
    return Measured(
        seconds * ROWS / trained,
        1 - busy / len(generating) / seconds,
        computed / sampled,
        computed / (sampled + read),
        account.removeprefix("rows: "),
        os.getloadavg()[0],
    )


def read_passes(path: Path) -> list[tuple[float, ...]]:
    """Return begin and end of the passes of a process, and their tokens, 0 of passes that do not generate."""
    return [tuple(map(float, line.split())) for line in path.read_text().splitlines()]


def predict(config: Path, base: Path) -> float:
    """Return the predicted time of a step by the times and lengths of the run ``base``."""
    found = re.search(r"([0-9.]+) (ms|s) a step", command("simulate", str(config), "--from", str(base)))
    assert found is not None, "simulate prints it"
    return float(found[1]) / (1000 if found[2] == "ms" else 1)


def predictions(configs: Mapping[Variant, Path]) -> Iterator[tuple[str, float]]:
    """Yield the predicted time of each variant but the first of an order of rows, whose run it is predicted by."""
    base = dict[str, Path]()
    for variant, config in configs.items():
        if variant.order in base:
            yield variant.name, predict(config, base[variant.order])
        base.setdefault(variant.order, load_spec(config).directory)


def by_events(rules: Sequence[Rule], rows: int, cap: float) -> dict[str, float]:
    """Return the time of a step with so many ``rows`` by events, by name."""
    found = run_rules(rules, cap, 24, 2, rows)
    return {rule.name: mean(each.seconds for each in all) / SECONDS_SCALE for rule, all in found}


def report(found: Mapping[str, Sequence[Measured]], predicted: Mapping[str, float], cap: float) -> Iterator[str]:
    """Yield the lines of the table."""
    rules, loop = [*(each.rule for each in VARIANTS if each.name in found), RULES[-1]], RULES[-1].name
    small, large = (by_events(rules, rows, cap) for rows in (ROWS, TRACE_ROWS))
    yield (
        f"| rows | s / step | predicted | by events | x {loop} | of {TRACE_ROWS} rows, by events | idle | "
        f"computed / sampled | / necessary | account | load |"
    )
    yield "|---" * 11 + "|"
    for name, all in found.items():
        seconds, last = median(each.seconds for each in all), all[-1]
        every = f" ({', '.join(f'{each.seconds:.1f}' for each in all)})" if len(all) > 1 else ""
        forecast = f"{predicted[name]:.1f} ({predicted[name] / seconds - 1:+.0%})" if name in predicted else "-"
        yield (
            f"| {name} | {seconds:.1f}{every} | {forecast} | {small[name]:.1f} | {seconds / small[loop]:.2f} | "
            f"{large[name] / large[loop]:.2f} | {median(each.idle for each in all):.0%} | {last.computed:.2f} | "
            f"{last.once:.2f} | {last.account} | {max(each.load for each in all):.0f} |"
        )
    yield f"| {loop} | | | {small[loop]:.1f} | 1.00 | 1.00 | | | | | |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("directory", type=Path)
    parser.add_argument("--variants", nargs="+", choices=[each.name for each in VARIANTS])
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--steps", type=int, default=3, help="measured steps of a run")
    parser.add_argument("--processes", type=int, default=32, help="of environments")
    parser.add_argument("--cap", type=float, default=15.0, help="deadline of a reply in the trace's seconds")
    options = parser.parse_args()
    directory = options.directory.resolve()
    write_inputs(directory)
    chosen = [each for each in VARIANTS if not options.variants or each.name in options.variants]
    found = defaultdict[str, list[Measured]](list)
    configs = dict[Variant, Path]()
    for _ in range(options.rounds):
        for variant in chosen:
            configs[variant] = write_config(directory, variant, options.steps, options.processes, options.cap)
            found[variant.name].append(measure(configs[variant], variant, options.steps))
            print(variant.name, found[variant.name][-1], flush=True)
    print("\n".join(report(found, dict(predictions(configs)), options.cap)))


if __name__ == "__main__":
    main()
