"""Two steps on every form and kind of data; several sources under two placements, and resumed."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import datasets
import pyarrow
import pyarrow.parquet
import pytest
import yaml
from commands import start
from tokenizers import ByteLevelBPETokenizer
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedTokenizerFast

from flexrlhf.data.files import read_rows
from flexrlhf.metrics import METRICS

FORMS = Path(__file__).parents[1] / "fixtures" / "forms"
COMMIT = "0123456789abcdef0123456789abcdef01234567"
Raw = dict[str, Any]
SHAPE = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2} | {
    "vocab_size": 400,
    "max_position_embeddings": 256,
}
TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}<{{ message['role'] }}>{{ message['content'] }}"
    "{% if message['role'] == 'assistant' %}{{ eos_token }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
SUM = {"rule": "exact_answer", "answer": "reward_model.ground_truth"}
RUNS: list[tuple[str, str, Raw]] = [
    ("sft", "prompt_response.jsonl", {}),
    ("sft", "prompt_completion.jsonl", {}),
    ("sft", "prompt_chat.jsonl", {}),
    ("sft", "messages.jsonl", {"system": "Be kind."}),
    ("sft", "sharegpt.jsonl", {}),
    ("sft", "alpaca.json", {"long_prompts": "truncate-left", "max_prompt_tokens": 32}),
    ("sft", "question.jsonl", {"template": "{question}\nEnd with #### and the number."}),
    ("sft", "openrlhf.jsonl", {}),
    ("sft", "own_columns.csv", {"columns": {"prompt": "problem", "response": "solution"}}),
    ("sft", "text.jsonl", {}),
    ("sft", "saved", {}),
    ("sft", "acme/sums:test", {}),
    ("dpo", "pairs.jsonl", {}),
    ("dpo", "pairs_hh.jsonl", {"long_prompts": "truncate-right", "max_prompt_tokens": 16}),
    ("dpo", "pairs_chat.jsonl", {}),
    ("dpo", "pairs_chat_implicit.jsonl", {}),
    ("dpo", "sharegpt_pairs.json", {}),
    ("grpo", "prompt.jsonl", {}),
    ("grpo", "messages.jsonl", {}),
    ("grpo", "verl.parquet", {"reward": SUM}),
    ("grpo", "openrlhf.jsonl", {"reward": {"rule": "exact_answer", "answer": "label"}}),
]
"""Algorithm, data, further settings of data and the reward."""
MIXED = {
    "sources": [{"path": "verl.parquet", "weight": 2}, {"path": "question.jsonl", "weight": 1, "system": "Be kind."}]
}
EVALUATION = {"path": "own_columns.csv", "form": "prompt", "columns": {"prompt": "problem"}, "every": 4}
LENGTH = {"rule": "length", "target_tokens": 4}


def write_inputs(directory: Path) -> None:
    """Write the fixtures, tables of them, a Hub cache with a data set and a model, and the tokenizer."""
    rows = {path.name: read_rows(path) for path in sorted(FORMS.iterdir())}
    for name in rows:
        (directory / name).write_bytes((FORMS / name).read_bytes())
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows["verl.jsonl"]), directory / "verl.parquet")
    datasets.Dataset.from_list(rows["prompt_completion.jsonl"]).save_to_disk(directory / "saved")
    texts = [json.dumps(row, ensure_ascii=False) for each in rows.values() for row in each]
    bpe = ByteLevelBPETokenizer()
    bpe.train_from_iterator(texts, vocab_size=400, special_tokens=["<pad>", "<eos>", "<bos>"])
    bpe.save(str(directory / "bpe.json"))
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_file=str(directory / "bpe.json"), pad_token="<pad>", eos_token="<eos>", bos_token="<bos>"
    )
    tokenizer.chat_template = TEMPLATE
    sums = cached(directory, "datasets--acme--sums")
    for split in ("train", "test"):
        (sums / f"{split}.jsonl").write_bytes((FORMS / "question.jsonl").read_bytes())
    model = cached(directory, "models--acme--tiny")
    tokenizer.save_pretrained(model)
    AutoModelForCausalLM.from_config(LlamaConfig(**SHAPE)).save_pretrained(model)


def cached(directory: Path, name: str) -> Path:
    repository = directory / "hub" / name
    (repository / "refs").mkdir(parents=True)
    (repository / "refs" / "main").write_text(COMMIT)
    (repository / "snapshots" / COMMIT).mkdir(parents=True)
    return repository / "snapshots" / COMMIT


def run_of(name: str, algorithm: str, data: Raw, placement: object = None, steps: int = 2, **settings: Any) -> Raw:
    sampled = {"samples_per_prompt": 2, "kl": None} if algorithm == "grpo" else {}
    return {
        "name": name,
        "algorithm": {"name": algorithm, "prompts_per_step": 4, **sampled},
        "models": {"actor": {"path": "acme/tiny", "optimizer": {"learning_rate": 1e-3}}},
        "reward": LENGTH if algorithm == "grpo" else None,
        "data": {"max_prompt_tokens": 160, "max_response_tokens": 8} | data,
        "placement": placement,
        "cluster": {"devices": 2, "device": "cpu"},
        "steps": steps,
        **settings,
    }


def runs_of_forms() -> list[Raw]:
    raws = []
    for algorithm, path, settings in RUNS:
        name = f"{algorithm}-{path.replace('/', '-').replace(':', '-')}"
        reward = {"reward": settings["reward"]} if "reward" in settings else {}
        data = {"path": path} | {key: value for key, value in settings.items() if key != "reward"}
        raws.append(run_of(name, algorithm, data, **reward))
    return raws


def runs_of_sources() -> list[Raw]:
    disaggregated = {"actor.shadow": 0.5, "actor": 0.5}
    return [
        run_of("mixed", "grpo", MIXED, steps=4, eval=EVALUATION),
        run_of("mixed-disaggregated", "grpo", MIXED, disaggregated, steps=4, eval=EVALUATION),
    ]


def command(directory: Path, *words: str) -> tuple[int, str]:
    """Exit status and output of a command; without a connection, with the cache of the test."""
    with pytest.MonkeyPatch.context() as patch:
        for name, value in (("HF_HOME", directory), ("HF_HUB_CACHE", directory / "hub"), ("HF_HUB_OFFLINE", "1")):
            patch.setenv(name, str(value))
        # libraries read these variables while they are loaded
        process = start([*words], directory, is_forked=False)
    out, _ = process.communicate(timeout=280)
    return process.returncode, out


def metrics(directory: Path, name: str) -> list[Raw]:
    lines = (directory / "runs" / name / "metrics.jsonl").read_text().splitlines()
    return [{key: value for key, value in json.loads(line).items() if key not in METRICS.times} for line in lines]


def launch(directory: Path, raws: list[Raw]) -> None:
    """Run all of them in one command."""
    paths = [directory / f"{raw['name']}.yaml" for raw in raws]
    for path, raw in zip(paths, raws, strict=True):
        path.write_text(yaml.safe_dump(raw))
    status, out = command(directory, "run", *map(str, paths))
    assert status == 0, out[-3000:]


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("forms")
    write_inputs(path)
    launch(path, runs_of_sources())
    return path


@pytest.mark.full
def test_every_form_is_trained_on(directory: Path) -> None:
    raws = runs_of_forms()
    launch(directory, raws)
    for raw in raws:
        steps = metrics(directory, raw["name"])
        assert len(steps) == 2, raw["name"]
        values = [value for step in steps for value in step.values() if not isinstance(value, str)]
        assert all(map(math.isfinite, values)), raw["name"]
        # if all samples of a prompt have one score there is no gradient
        assert raw["algorithm"]["name"] == "grpo" or all(step["actor_grad_norm"] > 0 for step in steps), raw["name"]


def check_same(one: list[Raw], other: list[Raw]) -> None:
    for step, same in zip(one, other, strict=True):
        for key, value in step.items():
            if not isinstance(value, str):
                assert same[key] == pytest.approx(value, rel=1e-5, abs=1e-6), key


def test_several_sources_are_the_same_under_two_placements(directory: Path) -> None:
    check_same(metrics(directory, "mixed"), metrics(directory, "mixed-disaggregated"))


@pytest.mark.full
def test_a_resumed_run_continues_the_order_of_sources(directory: Path) -> None:
    launch(directory, [run_of("mixed-first", "grpo", MIXED, eval=EVALUATION, checkpoint={"every": 1})])
    resume = ("run", "mixed-first.yaml", "--resume", "auto", "--set", "steps=4")
    shares = "data.sources=[{path: verl.parquet}, {path: question.jsonl}]"
    status, out = command(directory, *resume, "--dry-run", "--set", shares)
    assert status == 2 and "data.sources.0.weight was 2 and is 1 now" in out, out
    status, out = command(directory, *resume)
    assert status == 0, out[-3000:]
    check_same(metrics(directory, "mixed"), metrics(directory, "mixed-first"))


def test_models_of_the_hub_are_saved_with_their_commit(directory: Path) -> None:
    config = yaml.safe_load((directory / "runs" / "mixed" / "config.yaml").read_text())
    assert config["models"]["actor"]["path"] == f"acme/tiny@{COMMIT}"
    assert (directory / "runs" / "mixed" / "actor" / "tokenizer.json").is_file()
