"""The command line: a bad input is one sentence on stderr and exit code 2, and nothing is written."""

from __future__ import annotations

import json
import os
import shlex
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml
from click.testing import Result
from refusal_rows import CommandRow, command_rows
from small_runs import PPO, TINY, plan_of
from typer.testing import CliRunner

from flexrlhf.cli import app
from flexrlhf.cli.run import check_scores
from flexrlhf.errors import RunStopped
from flexrlhf.guideline.simulation.compare import Comparison, TimePair
from flexrlhf.guideline.simulation.simulation_text import format_comparison

Invoke = Callable[..., Result]
A100 = ("--set", "cluster={nodes: [{devices: 2, class: A100-80G}]}", "--placement-ratio", "[1,1,0.5,0.5]")
COMMANDS = [("plan",), ("run", "--dry-run"), ("run",)]


@pytest.fixture
def invoke(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Invoke:
    """Runs the command line in an empty directory with ``a.yaml`` in it."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a.yaml").write_text(yaml.safe_dump(PPO))
    (tmp_path / "prompts.jsonl").write_text('{"prompt": "hello", "response": "world"}\n')

    def call(*arguments: str) -> Result:
        return CliRunner().invoke(app, [*arguments])

    return call


def files(directory: Path) -> set[str]:
    return {str(path.relative_to(directory)) for path in directory.rglob("*")}


def refused(result: Result) -> str:
    """The sentence, without the program's name."""
    assert result.exit_code == 2, result.output
    # a plan is printed before models and data are read
    assert result.stdout == "" or result.stdout.startswith("test: ")
    assert result.stderr.startswith("flexrlhf: ")
    assert result.stderr.count("\n") == 1
    assert "Traceback" not in result.stderr
    return result.stderr.removeprefix("flexrlhf: ").strip()


@pytest.mark.parametrize(
    ("row", "line"),
    [
        pytest.param(row, line, id=line[:150], marks=[pytest.mark.full] * (turn > 0))
        for row in command_rows()
        for turn, line in enumerate(row.lines)
    ],
)
def test_a_command_line_is_refused_with_this_sentence(
    row: CommandRow, line: str, invoke: Invoke, tmp_path: Path
) -> None:
    """FLEXRLHF_UPDATE_SNAPSHOTS=1 writes the sentences of refused_commands.yaml anew."""
    for name, text in row.files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    before = files(tmp_path)
    message = refused(invoke(*shlex.split(line)))
    if os.environ.get("FLEXRLHF_UPDATE_SNAPSHOTS") == "1":
        row.write(message)
    else:
        assert message == row.sentence
    assert files(tmp_path) == before


def test_a_run_without_any_score_has_not_ended_well() -> None:
    plan, failed = (
        plan_of(None, 1, "reward=[{model: reward}, {url: 'http://127.0.0.1:9/score'}]"),
        {"score_failed": 1.0},
    )
    with pytest.raises(RunStopped, match="^test: no response of the run had a score.* mend reward.url, whose"):
        check_scores(plan, [failed, failed])
    for rows in ([failed, {"score_failed": 0.75}], [{"nll": 1.0}], []):
        check_scores(plan, rows)


def test_a_link_to_nothing_is_named_and_not_suggested(invoke: Invoke) -> None:
    Path("one.yaml").symlink_to("two.yaml")
    assert (
        refused(invoke("plan", "one.yaml")) == "config one.yaml: no such file: a link to two.yaml, which is not there"
    )


def test_a_long_word_is_shown_without_its_middle(invoke: Invoke) -> None:
    assert " ... xxx" in refused(invoke("plan", "x" * 5000))


def test_without_a_word_the_help_is_printed(invoke: Invoke) -> None:
    assert "Train:" in invoke().output


def test_a_link_to_itself_is_no_data_file(invoke: Invoke, tmp_path: Path) -> None:
    (tmp_path / "prompts.jsonl").unlink()
    (tmp_path / "prompts.jsonl").symlink_to("prompts.jsonl")
    assert "there is no data file prompts.jsonl" in refused(invoke("run", "--dry-run", "a.yaml"))


def test_a_missing_data_file_is_named_with_its_neighbours(invoke: Invoke, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    for path, end in [
        ("zzz.jsonl", "; the current directory has prompts.jsonl"),
        ("empty/a.jsonl", "; empty has none"),
    ]:
        said = refused(invoke("run", "--dry-run", "a.yaml", "--set", f"data.path={path}"))
        assert said == f"there is no data file {path}{end}"


def test_planning_before_data_exists_says_that_it_is_not_checked(invoke: Invoke) -> None:
    present = invoke("plan", "a.yaml")
    assert present.exit_code == 0 and "exist" not in present.stdout
    for path, why in [("zzz.jsonl", "does not exist yet"), ("org/rows", "is not in the cache of the Hub yet")]:
        absent = invoke("plan", "a.yaml", "--set", f"data.path={path}", "--set", "eval.path=other.jsonl")
        assert absent.exit_code == 0, absent.output
        assert absent.stdout.splitlines()[-2:] == [
            f"test: data: {path} {why}, so its rows are not checked",
            "test: eval: other.jsonl does not exist yet, so its rows are not checked",
        ]


def test_a_plan_with_every_setting_is_the_plan_without(invoke: Invoke, tmp_path: Path) -> None:
    gpus = ("--set", "cluster={nodes: [{devices: 8, class: A100-80G}]}", "--set", "models.actor.init=qwen2.5-7b")
    chosen = invoke("plan", "a.yaml", *gpus, "-o", "full.yaml").stdout
    line, _, text = chosen.removesuffix("written to full.yaml\n").partition("\n\n")
    text = "".join(each for each in text.splitlines(keepends=True) if "rollout.engine: auto is vllm" not in each)
    assert line.startswith("test: placement, which is not written, is [1,1,1,1], co-located, ")
    assert " by figures of the device classes\n  with " in line and "zero: 2 of actor" in line
    assert invoke("plan", "full.yaml").stdout == text
    assert invoke("plan", "a.yaml", *gpus, "-o", "full.yaml").exit_code == 0
    assert "was not written by this command" in refused(invoke("plan", "full.yaml", "-o", "a.yaml"))
    (tmp_path / "b.yaml").write_text((tmp_path / "a.yaml").read_text().replace("test", "other"))
    assert refused(invoke("plan", "a.yaml", "b.yaml", "-o", "c.yaml")) == "--output: goes with one config, found 2"


@pytest.mark.parametrize("command", COMMANDS[:2])
def test_a_tokenizer_needs_an_end_token_and_a_policy_valid_ones(
    command: tuple[str, ...], invoke: Invoke, tmp_path: Path, tokenizer: str
) -> None:
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text(json.dumps(TINY))
    (tmp_path / "model" / "generation_config.json").write_text('{"eos_token_id": "x"}')
    words = (*command, "a.yaml", "--set", tokenizer)
    said = refused(invoke(*words, "--set", "models.actor={path: model}"))
    assert said.startswith("models.actor.path model: eos_token_id in generation_config.json must be a token id")
    settings = tmp_path / "tokenizer" / "tokenizer_config.json"
    settings.write_text(json.dumps(json.loads(settings.read_text()) | {"eos_token": None}))
    assert refused(invoke(*words)) == "data.tokenizer tokenizer: it has no end-of-sequence token"


@pytest.mark.parametrize("text", ['{"version": 1}', "null", "[" * 100_000, '{"added_tokens": 3}'], ids=range(4))
def test_a_damaged_tokenizer_is_refused(text: str, invoke: Invoke, tmp_path: Path, tokenizer: str) -> None:
    (tmp_path / "tokenizer" / "tokenizer.json").write_text(text)
    assert "data.tokenizer tokenizer: " in refused(invoke("run", "--dry-run", "a.yaml", "--set", tokenizer))


def test_a_pipe_is_no_model(invoke: Invoke, tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text(json.dumps(TINY))
    os.mkfifo(tmp_path / "model" / "model.safetensors")
    assert "is a pipe or a device" in refused(invoke("plan", "a.yaml", "--set", "models.actor={path: model}"))


def test_a_dry_run_prints_the_plan_and_writes_nothing(invoke: Invoke, tmp_path: Path, tokenizer: str) -> None:
    before = files(tmp_path)
    for command in (("plan",), ("run", "--dry-run", "--set", tokenizer)):
        result = invoke(*command, "a.yaml", "--devices", "2", "--placement-ratio", "[1,1,0.5,0.5]")
        assert result.exit_code == 0
        assert "interleaving on 2 devices" in result.stdout
        assert "#.  run" in result.stdout
    assert files(tmp_path) == before


def test_without_a_config_the_quick_start_is_planned(invoke: Invoke, tmp_path: Path) -> None:
    before = files(tmp_path)
    result = invoke("plan", "--placement-ratio", "[1,1,0.5,0.5]")
    assert result.exit_code == 0
    heads = [line for line in result.stdout.splitlines() if line.startswith("quickstart-")]
    assert ["sft" in heads[0], "reward" in heads[1], "interleaving" in heads[2]] == [True] * 3
    assert files(tmp_path) == before


def write_run(path: Path, name: str, **changes: object) -> None:
    path.write_text(yaml.safe_dump(PPO | {"name": name} | changes))


def test_runs_of_one_command_share_their_ranks(invoke: Invoke, tmp_path: Path) -> None:
    write_run(tmp_path / "b.yaml", "other", cluster={"devices": 3})
    message = refused(invoke("plan", "a.yaml", "b.yaml"))
    assert all(words in message for words in ("test 1", "other 3", "--devices"))
    assert invoke("plan", "a.yaml", "b.yaml", "--devices", "2").exit_code == 0


def test_a_later_run_may_use_the_model_of_an_earlier_one(invoke: Invoke, tmp_path: Path) -> None:
    models = {"actor": {"path": "runs/test/actor"}, "reward": {"init": dict(TINY)}}
    write_run(tmp_path / "b.yaml", "other", models=models)
    assert invoke("plan", "a.yaml", "b.yaml").exit_code == 0
    assert "runs/test/actor" in refused(invoke("plan", "b.yaml", "a.yaml"))


def test_a_vector_is_for_the_runs_that_have_so_many_models(invoke: Invoke, tmp_path: Path) -> None:
    (tmp_path / "sft.yaml").write_text(
        yaml.safe_dump(PPO | {"name": "sft", "algorithm": {"name": "sft"}, "models": {"actor": {"init": dict(TINY)}}})
    )
    result = invoke("plan", "sft.yaml", "a.yaml", "--devices", "2", "--placement-ratio", "[1,1,0.5,0.5]")
    assert result.exit_code == 0
    assert "sft: sft, co-located" in result.stdout
    assert "test: ppo, interleaving" in result.stdout
    assert "entries" in refused(invoke("plan", "sft.yaml", "a.yaml", "--placement-ratio", "[1,1]"))


@pytest.fixture
def two_runs(tmp_path: Path) -> tuple[str, str]:
    """An SFT run, which has an actor alone, and the PPO run."""
    raw = PPO | {"name": "sft", "algorithm": {"name": "sft"}, "models": {"actor": {"init": dict(TINY)}}}
    (tmp_path / "sft.yaml").write_text(yaml.safe_dump(raw))
    return "sft.yaml", "a.yaml"


def test_a_setting_of_a_model_is_for_the_runs_that_have_it(invoke: Invoke, two_runs: tuple[str, str]) -> None:
    result = invoke("plan", *two_runs, "--set", "models.reward.init.hidden_size=16", "--set", "models.actor.zero=3")
    assert result.exit_code == 0, result.output
    assert "models.actor.zero" in refused(invoke("plan", *two_runs, "--set", "models.actor.zero=1"))
    assert "models.reward.tp" in refused(invoke("plan", *two_runs, "--set", "models.reward.tp=2", "--devices", "3"))


def test_a_setting_of_a_model_that_no_run_has_is_refused(invoke: Invoke, two_runs: tuple[str, str]) -> None:
    message = refused(invoke("plan", *two_runs, "--set", "models.rewrd.zero=3"))
    assert "unknown key 'rewrd' (did you mean 'reward'?)" in message
    assert "sft has no reward" in refused(invoke("plan", "sft.yaml", "--set", "models.reward={path: x}"))
    assert "sft has no reward" in refused(invoke("plan", *two_runs, "--set", "sft:models.reward={path: x}"))


SHARED = ("--set", "models.actor.lora={}", "--set", "models.ref.share=actor")


@pytest.mark.parametrize("configs", [("a.yaml",), (("sft.yaml", "a.yaml")), pytest.param(("a.yaml", "sft.yaml"))])
def test_a_vector_has_no_entry_for_a_shared_reference(
    configs: tuple[str, ...], invoke: Invoke, two_runs: tuple[str, str]
) -> None:
    result = invoke("plan", *configs, *SHARED, "--devices", "2", "--placement-ratio", "[1,1,0.5]")
    assert result.exit_code == 0, result.output
    assert "test: ppo, interleaving on 2 devices" in result.stdout


def test_a_later_run_starts_from_adapters_and_from_the_best_model(invoke: Invoke, tmp_path: Path) -> None:
    write_run(
        tmp_path / "b.yaml", "other", models={"actor": {"path": "runs/test/actor"}, "reward": {"init": dict(TINY)}}
    )
    result = invoke("plan", "a.yaml", "b.yaml", "--set", "test:models.actor.lora={}")
    assert result.exit_code == 0, result.output
    best = ("plan", "a.yaml", "b.yaml", "--set", "other:models.actor.path=runs/test/actor-best")
    assert "runs/test/actor-best: no such directory" in refused(invoke(*best))
    evaluated = ("--set", "test:eval.path=e.jsonl", "--set", "test:save.best=eval_reward_mean")
    result = invoke(*best, *evaluated)
    assert result.exit_code == 0, result.output


# --- errors in data, before any rank starts


@pytest.fixture
def tokenizer(tmp_path: Path) -> str:
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = {word: index for index, word in enumerate(("<pad>", "<end>", "hello", "world", "<unk>"))}
    inner = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    inner.pre_tokenizer = pre_tokenizers.Whitespace()
    fast = PreTrainedTokenizerFast(tokenizer_object=inner, eos_token="<end>", pad_token="<pad>", unk_token="<unk>")
    fast.save_pretrained(tmp_path / "tokenizer")
    return "data.tokenizer=tokenizer"


DATA = [
    ("no file", None, (), ("prompts.jsonl", "no data file")),
    ("no rows", "", (), ("prompts.jsonl", "no rows")),
    ("missing column", '{"prompt": "hello"}\n{"text": "hello"}\n', (), ("row 2", "'prompt'", "'text'")),
    ("unknown form", '{"text": "hello"}\n', (), ("row 1", "'prompt'", "'text'")),
    ("not JSON", '{"prompt": "hello"}\n{\n', (), ("line 2", "not JSON")),
    ("long prompt", '{"prompt": "hello hello hello hello hello"}\n', (), ("row 1", "5 tokens", "max_prompt_tokens=4")),
    (
        "small vocabulary",
        '{"prompt": "hello"}\n',
        ("--set", "models.actor.init.vocab_size=3"),
        ("models.actor", "3", "5"),
    ),
    ("no tokenizer", '{"prompt": "hello"}\n', ("--set", "data.tokenizer=nowhere"), ("data.tokenizer nowhere",)),
    ("no template", '{"messages": [{"role": "user", "content": "hello"}]}\n', (), ("row 1", "no chat template")),
    (
        "no file of a template",
        '{"prompt": "hello"}\n',
        ("--set", "data.chat_template=no.jinja"),
        ("data.chat_template",),
    ),
    ("evaluation set", '{"prompt": "hello"}\n', ("--set", "eval.path=held_out.jsonl"), ("held_out.jsonl",)),
]


@pytest.mark.parametrize(("text", "arguments", "words"), [case[1:] for case in DATA], ids=[case[0] for case in DATA])
def test_bad_data_is_one_sentence_before_anything_is_written(
    text: str | None, arguments: tuple[str, ...], words: tuple[str, ...], invoke: Invoke, tmp_path: Path, tokenizer: str
) -> None:
    if text is None:
        (tmp_path / "prompts.jsonl").unlink()
    else:
        (tmp_path / "prompts.jsonl").write_text(text)
    before = files(tmp_path)
    message = refused(invoke("run", "a.yaml", "--set", tokenizer, *arguments))
    assert all(word in message for word in words), message
    assert files(tmp_path) == before


def test_a_plan_checks_that_rows_have_the_columns_of_rules(invoke: Invoke, tmp_path: Path) -> None:
    rule = ("--set", "models.reward=null", "--set", "models.critic={init: " + json.dumps(TINY) + "}")
    rule += ("--set", "reward={rule: exact_answer, answer: reward_model.ground_truht}")
    row = {"prompt": "hello", "reward_model": {"style": "rule", "ground_truth": "world"}}
    (tmp_path / "prompts.jsonl").write_text(json.dumps(row))
    message = refused(invoke("plan", "a.yaml", *rule))
    assert "reward.answer: 'reward_model.ground_truht', no column of prompts.jsonl" in message
    assert "(did you mean 'reward_model.ground_truth'?)" in message
    corrected = (*rule[:-1], rule[-1].replace("truht", "truth"))
    assert invoke("plan", "a.yaml", *corrected).exit_code == 0


@pytest.mark.parametrize(
    ("words", "environment"), [((), {"TORCHELASTIC_RUN_ID": "1"}), (("--nnodes", "2", "--rdzv-endpoint", "a:1"), {})]
)
def test_a_placement_is_not_chosen_by_several_processes(
    words: tuple[str, ...], environment: dict[str, str], invoke: Invoke, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    auto = ("run", "a.yaml", "--devices", "2", "--set", "placement=auto", "--dry-run", *words)
    sentence = refused(invoke(*auto))
    assert sentence.startswith("placement: auto of test would be chosen by each of several processes")
    assert "`flexrlhf advise CONFIG -o FILE`" in sentence


@pytest.mark.parametrize("error", [-1e-6, 0.0, 1e-6])
def test_no_error_is_a_negative_zero(error: float) -> None:
    step = TimePair(1.0, 1.0 + error)
    assert ", error +0.0%" in format_comparison(Comparison((), step, range(1), Counter(), Counter()), "a run")


def test_a_simulation_takes_a_mean(invoke: Invoke) -> None:
    result = invoke("simulate", "a.yaml", *A100, "--mean-response", "3")
    assert "and 3 of the response" in result.stdout, result.output
