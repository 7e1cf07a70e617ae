"""``flexrlhf import``: launches with settings in a file, files of other systems, secrets, and files without an end."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from flexrlhf.cli import app
from flexrlhf.config.yaml_io import read_yaml
from flexrlhf.errors import UserError
from flexrlhf.imports.translate import translated
from flexrlhf.imports.translation import Translation

A100 = "A100-80G"
RECIPE = """model_name_or_path: Qwen/Qwen2.5-1.5B-Instruct
dataset_name: org/questions
use_vllm: true
learning_rate: 2.0e-06
num_generations: 8
max_completion_length: 512
per_device_train_batch_size: 8
gradient_accumulation_steps: 4
"""
ZERO = (
    "distributed_type: DEEPSPEED\ndeepspeed_config: {zero_stage: 3, offload_optimizer_device: cpu}\nnum_processes: 4\n"
)
OPTIONS = "--config recipe.yaml --learning_rate 1e-5 --beta 0.04"
VERL = (
    "python3 -m verl.trainer.main_ppo algorithm.adv_estimator=grpo actor_rollout_ref.model.path=Qwen/Qwen2.5-7B "
    "data.train_files=/r/t data.train_batch_size=128 actor_rollout_ref.rollout.n=8 trainer.nnodes=1"
)


@pytest.fixture
def files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A directory with a recipe of TRL and a file of accelerate; it is the current one."""
    monkeypatch.chdir(tmp_path)
    Path("recipe.yaml").write_text(RECIPE)
    Path("zero.yaml").write_text(ZERO)
    return tmp_path


def read(name: str, text: str) -> Translation:
    """Write a job file and return its translation."""
    Path(name).write_text(text)
    return translated(Path(name), A100)


def imported(name: str, text: str) -> str:
    """Write a job file; return all that its import prints and writes."""
    Path(name).write_text(text)
    results = [CliRunner().invoke(app, ["import", name, *more]) for more in ([], ["-o", "out.yaml"])]
    assert all(each.exit_code in (0, 2) for each in results), results
    written = Path("out.yaml").read_text() if Path("out.yaml").is_file() else ""
    return "".join(each.stdout + each.stderr for each in results) + written


LAUNCHES = {
    f"accelerate launch --config_file zero.yaml --num_processes=4 src/grpo.py {OPTIONS}": (16, 3, "deepspeed"),
    f"ACCELERATE_LOG_LEVEL=info accelerate launch --config_file=zero.yaml trl/scripts/grpo.py {OPTIONS}": (
        *(16, 3, "deepspeed"),
    ),
    f"accelerate launch --use_deepspeed --zero_stage 2 --num_processes 4 grpo.py {OPTIONS}": (16, 2, "deepspeed"),
    f"torchrun --nproc_per_node 4 -m trl.scripts.grpo {OPTIONS}": (16, 0, "torch"),
    f"uv run python scripts/grpo.py {OPTIONS}": (4, 0, "torch"),
    f"deepspeed --num_gpus=4 grpo.py {OPTIONS} --deepspeed ds_zero3.json": (16, 3, "deepspeed"),
    "python grpo.py recipe.yaml --learning_rate 1e-5 --beta 0.04": (4, 0, "torch"),
    f"accelerate launch --config_file zero.yaml scripts/run_grpo.py {OPTIONS}": (16, 3, "deepspeed"),
}


@pytest.mark.parametrize("command", LAUNCHES)
def test_devices_and_options_of_a_launch_come_before_its_file(files: Path, command: str) -> None:
    out = read("job.sh", command)
    keys = ("algorithm.prompts_per_step", "models.all.zero", "models.all.engine")
    assert tuple(map(out.value, keys)) == LAUNCHES[command]
    keys = ("models.actor.optimizer.learning_rate", "algorithm.kl.coefficient", "algorithm.name")
    assert tuple(map(out.value, keys)) == (1e-5, 0.04, "grpo")


def test_the_trainer_is_of_the_script_or_of_the_settings_and_never_of_the_name(files: Path) -> None:
    Path("main.py").write_text("from trl import RLOOConfig, TrlParser\nparser = TrlParser((RLOOConfig,))\n")
    assert read("job.sh", f"python main.py {OPTIONS}").value("algorithm.name") == "rloo"
    assert read("dpo.yaml", RECIPE).value("algorithm.name") == "grpo"
    plain = "model_name_or_path: Qwen/Qwen2.5-1.5B\nlearning_rate: 1e-5\nmax_length: 1024\n"
    for name in ("a.yaml", "x_kto.yaml"):
        out = read(name, plain)
        assert out.value("algorithm.name") == "sft"
        assert [each.setting.text for each in out.left_out if each.setting.key == "trainer"] == ["sft, assumed"]
    Path("b.yaml").write_text(plain)
    assert translated(Path("b.yaml"), A100, {"trainer": "reward"}).value("algorithm.name") == "reward"


FOREIGN = (
    "model_name_or_path: Qwen/Qwen2.5-7B\nstage: dpo\nfinetuning_type: lora\nlearning_rate: 1e-5\nbf16: true\n",
    "base_model: a/b\nadapter: lora\nmicro_batch_size: 2\nlearning_rate: 1e-5\n",
    "model: a/b\ntrain_type: lora\nper_device_train_batch_size: 1\n",
    "model_name_or_path: a/b\nuse_slow_tokenizer: true\nlearning_rate: 5e-6\n",
    "model_name_or_path: a/b\nmodel: {max_seq_length: 2048}\nmax_steps: 60\n",
    "model_name_or_path: a/b\nmax_epochs: 1\n",
)


@pytest.mark.parametrize("text", FOREIGN)
def test_files_of_other_systems_are_no_jobs(files: Path, text: str) -> None:
    with pytest.raises(UserError, match="no job of a known system"):
        read("dpo.yaml", text)


def test_a_file_that_hydra_reads_is_read_under_the_overrides(files: Path) -> None:
    Path("config").mkdir()
    Path("config/mine.yaml").write_text("data: {train_batch_size: 64, max_prompt_length: 77}\n")
    out = read("job.sh", f"{VERL} --config-name=mine")
    assert (out.value("algorithm.prompts_per_step"), out.value("data.max_prompt_tokens")) == (128, 77)
    out = read("job.sh", f"{VERL} --config-path=/c --config-name other")
    assert {each.setting.key: each.matters for each in out.left_out}["config-name"]


def test_arguments_that_set_nothing_are_listed(files: Path) -> None:
    out = read("job.sh", f"{VERL} stray ~actor_rollout_ref.actor.kl_loss_coef --config-dir=/c\n")
    listed = {(each.setting.key, each.setting.text) for each in out.left_out}
    assert {("argument", "stray"), ("argument", "~actor_rollout_ref.actor.kl_loss_coef")} <= listed
    assert ("--config-dir", "/c") in listed


SECRETS = (
    f"{VERL} +trainer.hf_token=s3cret +reward.url=https://u:s3cret@h/x?api_key=s3cret",
    f"HF_TOKEN=s3cret {VERL} trainer.experiment_name=$HF_TOKEN",
    f"export WANDB_API_KEY=s3cret\nX=$WANDB_API_KEY\n{VERL} +a.b=$X",
    f"""export X=s3cret\nif [[ $HF_TOKEN == s3cret || -f x ]]; then :; fi\n{VERL} +a.hf_token=$(get s3cret)""",
    f"{VERL.replace('/r/t', 'https://u:s3cret@h/t')}",
    f"{VERL.replace('Qwen/Qwen2.5-7B', 'https://u:s3cret@h/a-vl')}",
    f"""{VERL} '+a.b={{"env_vars": {{"WANDB_API_KEY": "s3cret"}}}}' --token s3cret""",
    "deepspeed --module openrlhf.cli.train_sft --pretrain meta-llama/Llama-3.2-3B --use_wandb s3cret --max_len 99",
    "trl sft --model_name_or_path Qwen/Qwen2.5-1.5B --dataset_name x --hub_token s3cret --max_steps hf_" + "s3cret" * 4,
)


@pytest.mark.parametrize("text", SECRETS)
def test_secrets_of_a_job_are_in_no_output(files: Path, text: str) -> None:
    assert "s3cret" not in imported("job.sh", text)


@pytest.mark.parametrize("odd", ["\x1b[2J\x07", "\x7f", "\x9b2J", "\u2028", "\u202e", "\r"])
def test_control_characters_are_escaped_and_the_yaml_reads_back(files: Path, odd: str) -> None:
    quoted = repr(f"a{odd}b")
    python = (
        f"from trl import SFTConfig, SFTTrainer\nargs = SFTConfig(max_length=99, run_name={quoted}, own={quoted})\n"
        f"t = SFTTrainer(model='Qwen/Qwen2.5-1.5B', args=args, train_dataset=load_dataset({quoted}))\n"
    )
    for name, text in (("job.py", python), ("job.sh", f"{VERL} trainer.project_name='a{odd}b' 'b{odd}c'")):
        Path("out.yaml").unlink(missing_ok=True)
        shown = imported(name, text)
        assert all(each.isprintable() or each == "\n" for each in shown)
        assert read_yaml(Path("out.yaml").read_text())["name"] == "job"


NEMO = "cluster: {num_nodes: 1, gpus_per_node: 8}\npolicy: {model_name: Qwen/Qwen2.5-1.5B}\ngrpo: {max_num_steps: X}\n"
CALLS = "from trl import SFTConfig, SFTTrainer\nSFTTrainer('Qwen/Qwen2.5-1.5B', args=SFTConfig(max_steps=5, own=v9))\n"
ENDLESS: dict[str, tuple[str, str]] = {
    "a text times a number": ("job.yaml", NEMO.replace("X", "${mul:aaaaaaaa,900000000}")),
    "squares": (
        "job.yaml",
        NEMO.replace("X", "${a40}")
        + "".join(f"a{i + 1}: '${{mul:${{a{i}}},${{a{i}}}}}'\n" for i in range(40))
        + "a0: 9999\n",
    ),
    "texts": ("job.yaml", NEMO + "".join(f"a{i + 1}: {f'${{a{i}}}' * 4}\n" for i in range(20)) + "a0: aaaaaaaa\n"),
    "sections": (
        "job.yaml",
        NEMO
        + "".join(f"a{i + 1}: {{p: '${{a{i}}}', q: '${{a{i}}}', r: '${{a{i}}}'}}\n" for i in range(9))
        + "a0: {x: 1}\n",
    ),
    "nested": ("job.yaml", NEMO.replace("X", "${oc.select:" * 300 + "x" + "}" * 300)),
    "assignments": ("job.py", "".join(f"w{i} = {i}\n" for i in range(4_000)) + CALLS),
    "lists": ("job.py", "v0 = [1]\n" + "".join(f"v{i + 1} = [{f'v{i}, ' * 8}]\n" for i in range(9)) + CALLS),
    "commands": ("job.py", f'"""\n{"python x.py " * 1500}\n"""\n{CALLS}'),
    "settings": ("job.yaml", NEMO + "".join(f"b{i}: {i}\n" for i in range(6_000))),
    "digits": ("job.sh", f"{VERL} data.max_response_length={'9' * 5000}"),
    "brackets": ("job.py", f"v9 = {'-' * 5000}1\n{CALLS}"),
}


@pytest.mark.timeout(60)
@pytest.mark.parametrize("name", ENDLESS)
def test_files_that_grow_without_an_end_are_read_or_refused(files: Path, name: str) -> None:
    try:
        read(*ENDLESS[name])
    except UserError as error:
        assert "\n" not in str(error)


def test_files_that_a_file_is_based_on_are_read_once_each(files: Path) -> None:
    for number in range(9):
        Path(f"d{number}.yaml").write_text(f"defaults: [{', '.join([f'd{number + 1}.yaml'] * 10)}]\n")
    Path("d9.yaml").write_text(NEMO.replace("X", "7"))
    assert read("job.yaml", "defaults: [d0.yaml, other, _self_]\n").value("steps") == 7
    assert "defaults" in [each.setting.key for each in translated(Path("job.yaml")).left_out]
    Path("a.yaml").write_text("defaults: b.yaml")
    Path("b.yaml").write_text("defaults: a.yaml")
    with pytest.raises(UserError, match="MAX_BASES"):
        translated(Path("a.yaml"))


VALUES: dict[str, Any] = {
    "data.train_batch_size": ("-1", "0", "512.7", "abc", "nan"),
    "actor_rollout_ref.rollout.n": ("-1", "0", "true"),
    "actor_rollout_ref.actor.optim.lr": ("-1", "inf"),
    "actor_rollout_ref.model.lora_rank": ("-4", "8.5"),
    "actor_rollout_ref.actor.use_kl_loss": ("maybe", "5"),
    "own.switch": ("auto", "0", "none"),
}


@pytest.mark.parametrize("key", VALUES)
def test_values_that_cannot_be_used_are_listed_with_an_effect(files: Path, key: str) -> None:
    for value in VALUES[key]:
        out = read("job.sh", f"{VERL} {key}={value}")
        assert [each.matters for each in out.left_out if each.setting.key == key] == [True], value
