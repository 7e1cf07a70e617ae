"""The command line: a bad input is one sentence on stderr and exit code 2, and nothing is written."""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml
from click.testing import Result
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


BAD = [
    ("unknown key", ("--set", "algorithm.num_minibatches=2"), ("'num_minibatches'", "'num_mini_batches'")),
    ("unknown algorithm", ("--set", "algorithm.name=pop"), ("algorithm", "pop", "ppo")),
    ("ratio outside (0, 1]", ("--placement-ratio", "[1,1,1.5,1]"), ("ref", "(0, 1]", "1.5")),
    ("ratio of 0", ("--placement-ratio", "[1,1,0,1]"), ("ref", "(0, 1]", "0")),
    ("not whole devices", ("--placement-ratio", "[1,1,0.3,1]", "--devices", "4"), ("0.3", "1.2 of 4", "0.25", "0.5")),
    ("wrong vector length", ("--placement-ratio", "[1,1,1]"), ("4 [actor", "6 [actor.shadow", "3 entries")),
    ("no vector", ("--placement-ratio", "half"), ("--placement-ratio half", "such as 1,1,0.5,0.5")),
    (
        "half a vector",
        ("--placement-ratio", "[1,", "1,", "0.5]"),
        ("--placement-ratio [1,", "in one word", "in quotes"),
    ),
    ("entries as words", ("--placement-ratio", "1", "1", "0.5]"), ("config 1: ", "--placement-ratio 1,1,0.5,0.5")),
    ("no reading", ("--placement-ratio", "[1,1,1,1,1,1]", "--devices", "2"), ("fits no split of 2", "nearest")),
    ("no such override", ("--set", "other:steps=1"), ("'other'", "test")),
    ("malformed override", ("--set", "steps"), ("--set steps", "key=value")),
    ("missing model", ("--set", "models.actor={path: nowhere}"), ("models.actor.path nowhere", "no such directory")),
    ("not a model", ("--set", "models.actor={path: .}"), ("models.actor.path", "config.json")),
    ("mixture of experts", ("--set", "models.actor.init.num_local_experts=8"), ("models.actor", "mixture-of-experts")),
    ("more devices than nodes", ("--devices", "3", "--set", "cluster.nodes=[{devices: 2}]"), ("devices 3", "hold 2")),
    ("rank not there", ("--set", "placement={actor: 1, critic: 1, ref: {ranks: [9]}, reward: 1}"), ("rank 9", "ref")),
    ("lag without shadows", ("--set", "schedule.lag=1"), ("schedule.lag", "shadow", "co-located")),
    ("period without shadows", ("--set", "sync.every=2"), ("sync.every", "shadow", "co-located")),
    ("other strategy", ("--set", "schedule.strategy=disaggregated"), ("schedule.strategy", "'co-located'")),
    (
        "segments",
        ("--set", "rollout.segment_tokens=999"),
        ("segment_tokens: 999", "cuts nothing", "use less, or null"),
    ),
    ("most segments of none", ("--set", "rollout.max_segments=2"), ("max_segments 2", "give segment_tokens")),
    ("chunks", ("--set", "schedule.num_chunks=3"), ("num_chunks 3", "num_mini_batches 1")),
    ("engine", ("--set", "models.actor.engine=vllm"), ("models.actor.engine", "vllm", "torch", "rollout.engine")),
    ("stage", ("--set", "models.actor.zero=1"), ("models.actor.zero", "stage 1", "0, 2 or 3", "engine deepspeed")),
    ("no such stage", ("--set", "models.actor.zero=4"), ("models.actor.zero", "0, 1, 2 or 3", "found 4")),
    ("tp and devices", ("--devices", "3", "--set", "models.ref.tp=2"), ("models.ref.tp", "2", "3 devices", "1 or 3")),
    ("tp and heads", ("--devices", "4", "--set", "models.ref.tp=4"), ("models.ref.tp", "4", "2 heads", "1 or 2")),
    (
        "unknown",
        ("--set", "models.actor.whatever=2"),
        ("models.actor: unknown key 'whatever'", "known: ", "tp, trust_remote_code"),
    ),
    ("offload", ("--set", "models.actor.offload_optimizer=true"), ("models.actor.offload_optimizer", "deepspeed")),
    (
        "adapters",
        ("--set", "models.actor.lora={targets: [q_prj]}"),
        ("models.actor.lora.targets", "'q_prj'", "'q_proj'"),
    ),
    ("adapters of ref", ("--set", "models.ref.lora={}"), ("models.ref.lora", "not trained", "remove")),
    ("no base to share", ("--set", "models.ref.share=actor"), ("models.ref.share", "no lora", "models.actor.lora")),
    (
        "expression",
        ("--set", "reward=[{model: reward}, {rule: format, pattern: '('}]"),
        ("reward.1.pattern", "no regular expression"),
    ),
    (
        "function without a name",
        ("--set", "reward=[{model: reward}, {function: d/rw.py}]"),
        ("reward.1.function", "path/to/file.py:name"),
    ),
    (
        "no address",
        ("--set", "reward=[{model: reward}, {url: 'http://[::1'}]"),
        ("reward.1.url", "expected an address such as"),
    ),
    (
        "port of a service",
        ("--set", "reward=[{model: reward}, {url: 'http://a:99999/score'}]"),
        ("reward.1.url", "use 1 to 65535", "found 'http://a:99999/score'"),
    ),
    (
        "port of a logger",
        ("--set", "loggers=[{name: mlflow, tracking_uri: 'http://a:0'}]"),
        ("loggers.0.tracking_uri: no such port, use 1 to 65535, found 'http://a:0'"),
    ),
    (
        "rotary embeddings",
        ("--set", "models.reward.init.rope_scaling={rope_type: lama3}"),
        ("models.reward: transformers has no rope_type 'lama3'", "'llama3'", "use default, "),
    ),
    (
        "activation",
        ("--set", "models.actor.init.hidden_act=sillu"),
        ("models.actor: transformers has no hidden_act 'sillu'", "'silu'"),
    ),
    (
        "padding",
        ("--set", "models.actor.init.pad_token_id=9223372036854775808"),
        ("models.actor: transformers cannot load it", "Padding_idx"),
    ),
    (
        "activation of another family",
        ("--set", "models.ref.init={model_type: gpt2, n_embd: 8, n_layer: 1, n_head: 2, activation_function: x}"),
        ("models.ref: transformers has no activation_function 'x'",),
    ),
    ("family", ("--set", "models.reward.init.model_type=llamma"), ("no model_type 'llamma'", "'llama'")),
    ("input in a run", ("--set", "data.path=runs/test/a.jsonl"), ("data.path", "starts afresh")),
    ("workers", ("--set", "reward=[{function: 'f.py:f', workers: 100000}]"), ("workers", "1024", "100000")),
    ("too many steps", ("--set", "steps=99999999999999999999"), ("steps", "99999999999999999999")),
    (
        "positions",
        ("--set", "models.actor.init.max_position_embeddings=8"),
        ("exceed the 8 positions of models.actor", "max_prompt_tokens"),
    ),
    (
        "two values",
        ("--set", "models.actor={init: {model_type: llama}, engine: deepspeed, config: {gradient_clipping: 2}}"),
        ("models.actor.config.gradient_clipping", "models.actor.optimizer.max_grad_norm", "remove"),
    ),
    (
        "no bfloat16",
        ("--set", "models.ref.dtype=bfloat16", "--set", "cluster.nodes=[{devices: 1, class: V100-32G}]"),
        ("models.ref.dtype", "V100-32G", "float16 or float32"),
    ),
]


# by default one of the commands refuses each
@pytest.mark.parametrize(
    ("arguments", "words", "command"),
    [
        pytest.param(*case[1:], command, id=f"{case[0]}-{' '.join(command)}", marks=[pytest.mark.full] * (turn > 0))
        for number, case in enumerate(BAD)
        for turn, command in enumerate((*COMMANDS[number % 3 :], *COMMANDS[: number % 3]))
    ],
)
def test_a_bad_setting_is_one_sentence(
    arguments: tuple[str, ...], words: tuple[str, ...], command: tuple[str, ...], invoke: Invoke, tmp_path: Path
) -> None:
    before = files(tmp_path)
    message = refused(invoke(*command, "a.yaml", *arguments))
    assert all(word in message for word in words), message
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


@pytest.mark.parametrize("command", COMMANDS, ids=" ".join)
def test_a_missing_config_is_named_with_the_nearest(command: tuple[str, ...], invoke: Invoke) -> None:
    assert "b.yaml: no such file; the current directory has a.yaml" in refused(invoke(*command, "b.yaml"))
    (Path("a-long-name.yaml")).write_text("")
    assert "(did you mean 'a-long-name.yaml'?)" in refused(invoke(*command, "a-long-nmae.yaml"))


def test_a_link_to_nothing_is_named_and_not_suggested(invoke: Invoke) -> None:
    Path("one.yaml").symlink_to("two.yaml")
    assert (
        refused(invoke("plan", "one.yaml")) == "config one.yaml: no such file: a link to two.yaml, which is not there"
    )


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (("plan", "--devicse", "2"), "plan: no such option: --devicse (Possible options: --devices, --price)"),
        (
            ("plan", "--actor-model-path", ""),
            "plan: invalid value: --actor-model-path is empty; see flexrlhf plan --help",
        ),
        (("run", "a.yaml", "--dry-run", "--accept-changes"), "--accept-changes: goes with --resume"),
        (("run", "a.yaml", "--dry-run", "--preflight"), "--preflight and --dry-run exclude each other"),
        (("run", "a.yaml", "--resume="), "run: invalid value: --resume is empty"),
        (("report", " "), "report: invalid value: an argument is empty"),
        (("schema", "-o", "/dev/full"), "the output cannot be written (No space left on device)"),
        (("--version=3",), "option '--version' does not take a value; see flexrlhf --help"),
        (("plna",), "no such command 'plna' (did you mean 'plan'?); see flexrlhf --help"),
        (
            ("plan", "--devices", "0"),
            "'--devices': must be greater than or equal to 1, found '0'; see flexrlhf plan --help",
        ),
        (
            ("plan", "--devices", "two"),
            "plan: invalid value for '--devices': expected a whole number, found 'two'; see",
        ),
        (("simulate", "--set"), "simulate: option '--set' requires an argument; see flexrlhf simulate --help"),
        (("export", "runs/a"), "export: missing option '--output' / '-o'; see flexrlhf export --help"),
        (("plan", "a\nb\x1b[31m"), r"config a b\x1b[31m: no such file"),
        (("plan", "x" * 5000), " ... xxx"),
        (("plan", "/proc/self/mem"), "config /proc/self/mem: cannot be read (Input/output error)"),
        (("run", "a.yaml", "--dry-run", "--resume", "yes"), "--resume yes: no such directory; give auto, a run's "),
        (("run", "a.yaml", "--dry-run", "--resume", "nowhere"), "--resume nowhere: no such directory; give auto"),
    ],
)
def test_a_command_line_that_cannot_be_is_one_sentence(words: tuple[str, ...], sentence: str, invoke: Invoke) -> None:
    assert sentence in refused(invoke(*words))


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
def test_a_model_without_a_tokenizer_is_refused_by_the_setting_that_names_it(
    command: tuple[str, ...], invoke: Invoke, tmp_path: Path
) -> None:
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text(json.dumps(TINY))
    for settings, expected in [
        ((), "models.actor.path model: no tokenizer in it (no tokenizer.json); copy one there, or name one in data.to"),
        (("--set", "data.tokenizer=model"), "data.tokenizer model: no tokenizer in it (no tokenizer.json); copy one t"),
    ]:
        words = (*command, "a.yaml", "--set", "data.path=prompts.jsonl", "--set", "models.actor={path: model}")
        assert refused(invoke(*words, *settings)).startswith(expected)


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


@pytest.mark.parametrize("command", COMMANDS, ids=" ".join)
def test_a_directory_is_no_config(command: tuple[str, ...], invoke: Invoke) -> None:
    assert refused(invoke(*command, ".")) == "config .: a directory; give a YAML file"


@pytest.mark.parametrize("text", ["a: [1", "- 1\n", "", "steps: 3\n", "name: \t\n x"])
def test_a_file_that_is_no_config_is_refused(text: str, invoke: Invoke, tmp_path: Path) -> None:
    (tmp_path / "a.yaml").write_text(text)
    assert "a.yaml" in refused(invoke("plan", "a.yaml"))


def test_a_missing_model_directory_is_named_with_a_near_one_only(invoke: Invoke, tmp_path: Path) -> None:
    for name in ("opt", "llama-small"):
        (tmp_path / name).mkdir()

    def message(name: str) -> str:
        return refused(invoke("plan", "a.yaml", "--set", f"models.actor={{path: {tmp_path / name}}}"))

    assert message("nope").endswith("has llama-small, opt")
    assert f"(did you mean '{tmp_path / 'llama-small'}'?)" in message("lama-small")


def test_a_model_directory_without_json_is_refused(invoke: Invoke, tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text("{")
    assert "models.actor.path model" in refused(invoke("plan", "a.yaml", "--set", "models.actor={path: model}"))


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


def test_runs_of_one_command_need_their_own_names(invoke: Invoke) -> None:
    assert "different names" in refused(invoke("plan", "a.yaml", "a.yaml"))


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


def test_adapters_without_a_base_model_are_refused(invoke: Invoke, tmp_path: Path) -> None:
    (tmp_path / "adapters").mkdir()
    (tmp_path / "adapters" / "adapter_config.json").write_text('{"peft_type": "LORA"}')
    message = refused(invoke("plan", "a.yaml", "--set", "models.actor={path: adapters}"))
    assert message == (
        "models.actor.path adapters: contains adapters, and their base model None is no directory here; correct "
        "base_model_name_or_path in adapter_config.json, or merge them with `flexrlhf export --merge-adapters`"
    )


def test_several_machines_need_an_endpoint(invoke: Invoke, tmp_path: Path) -> None:
    before = files(tmp_path)
    assert "--rdzv-endpoint" in refused(invoke("run", "a.yaml", "--devices", "2", "--nnodes", "2"))
    # without --nnodes each machine would train by itself
    said = refused(invoke("run", "a.yaml", "--devices", "2", "--rdzv-endpoint", "a:1"))
    assert said == "--rdzv-endpoint a:1: goes with --nnodes of 2 or more, found 1"
    assert files(tmp_path) == before


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


@pytest.mark.parametrize(("text", "words"), [(case[1], case[3]) for case in DATA[1:5]], ids=[c[0] for c in DATA[1:5]])
def test_a_plan_checks_the_rows_of_data_that_exists(
    text: str, words: tuple[str, ...], invoke: Invoke, tmp_path: Path
) -> None:
    (tmp_path / "rows.jsonl").write_text(text)
    for settings in (("data.path=rows.jsonl",), ("eval.path=rows.jsonl",)):
        message = refused(invoke("plan", "a.yaml", "--set", *settings))
        assert all(word.replace("prompts.jsonl", "rows.jsonl") in message for word in words), message
    (tmp_path / "rows.jsonl").unlink()
    assert invoke("plan", "a.yaml", "--set", "data.path=rows.jsonl").exit_code == 0


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


def test_a_model_without_a_tokenizer_is_refused(invoke: Invoke) -> None:
    assert "data.tokenizer" in refused(invoke("run", "a.yaml"))


def test_a_model_with_experts_on_disk_is_refused_by_name(invoke: Invoke, tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text(json.dumps({"model_type": "granitemoe", "num_local_experts": 8}))
    message = refused(invoke("plan", "a.yaml", "--set", "models.reward={path: model}"))
    assert all(word in message for word in ("models.", "granitemoe", "num_local_experts"))


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


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (("-o", "nodir/trace.json"), "--output nodir/trace.json: cannot be written"),
        (("-o", "."), "--output .: a directory; give a file, such as trace.json"),
        (("--against", "nope"), "--against nope: no such file"),
        (("--lengths", "metrics.jsonl"), 'expected numbers of tokens in it, found [2.0, "x"]'),
        (
            ("--mean-response", "9"),
            "--mean-response 9: longer than responses may be; data.max_response_tokens of test is 8",
        ),
        (
            ("--mean-response", "2", "--lengths", "2"),
            "--mean-response 2: not together with --lengths 2",
        ),
    ],
)
def test_options_of_a_simulation_are_checked_first(
    words: tuple[str, ...], sentence: str, invoke: Invoke, tmp_path: Path
) -> None:
    lines = ({"response_length": 2.0}, {"response_length": "x"})
    (tmp_path / "metrics.jsonl").write_text("\n".join(map(json.dumps, lines)))
    assert sentence in refused(invoke("simulate", "a.yaml", *A100, *words))


def test_a_simulation_takes_a_mean(invoke: Invoke) -> None:
    result = invoke("simulate", "a.yaml", *A100, "--mean-response", "3")
    assert "and 3 of the response" in result.stdout, result.output
