"""``flexrlhf import``: jobs in each system's form (``tests/fixtures/imports``) as YAML, by key, and their plans."""

from __future__ import annotations

import re
import shutil
import sys
from pathlib import Path
from random import Random
from typing import Any

import pytest
from typer.testing import CliRunner

from flexrlhf.cli import app
from flexrlhf.config.spec import Spec
from flexrlhf.config.spec_file import load_spec
from flexrlhf.config.yaml_io import read_yaml
from flexrlhf.errors import UserError
from flexrlhf.imports.settings import flat
from flexrlhf.imports.shell_words import bash_parser
from flexrlhf.imports.translate import translated
from flexrlhf.imports.translation import Translation
from flexrlhf.plan.pipeline import make_plan
from flexrlhf.plan.suggestions import check_fits

JOBS = Path(__file__).parents[1] / "fixtures" / "imports"
H100 = "H100-80G"
CHAT = {"1": "meta-llama/Llama-2-7b-hf", "2": "meta-llama/Llama-2-7b-hf"}

EXPECTED: dict[str, dict[str, Any]] = {
    "verl_grpo.sh": {
        "algorithm.name": "grpo",
        "algorithm.like": "verl",
        "algorithm.samples_per_prompt": 8,
        "algorithm.prompts_per_step": 512,
        "algorithm.num_mini_batches": 4,
        "algorithm.kl.place": "loss",
        "algorithm.kl.coefficient": 0.002,
        "algorithm.kl.estimator": "k3",
        "algorithm.clip_high": 0.28,
        "models.actor.init": "qwen2.5-7b",
        "models.actor.optimizer.learning_rate": 2e-6,
        "models.actor.offload_activations": True,
        "models.actor.tiled_mlp": True,
        "models.all.engine": "torch",
        "models.all.zero": 3,
        "models.all.activation_checkpointing": True,
        "models.all.micro_batch_tokens": 8192,
        "models.all.cp": 2,
        "models.all.context_parallel": "ulysses",
        "data.max_response_tokens": 3072,
        "data.sources": [{"path": "~/data/a.parquet"}, {"path": "~/data/b.parquet"}],
        "steps": 200,
        "cluster.nodes": [{"count": 2, "devices": 8, "class": H100}],
        "rollout.engine": "vllm",
        "rollout.special_tokens": "skip",
        "rollout.tp": 2,
    },
    "verl_off_policy.sh": {
        "algorithm.name": "gspo",
        "placement.actor.ranks": "0-5",
        "placement.actor.rollout.ranks": "6-7",
        "schedule.lag": 1,
        "sync.overlap": False,
        "models.actor.init": "qwen3-4b",
        "models.actor.lora.rank": 32,
        "data.max_prompt_tokens": 512,
    },
    "verl_experts.sh": {
        "models.actor.init": "qwen3-30b-a3b",
        "models.all.engine": "torch",
        "models.all.zero": 3,
        "models.actor.ep": 8,
        "models.ref.ep": 8,
        "models.actor.router_replay": "rollout",
        # layers over top-k, and layers
        "models.actor.router_aux_loss_coef": 0.01 * 48 / 8,
        "models.actor.router_z_loss_coef": 0.001 * 48,
        "rollout.engine": "transformers",
    },
    "verl_ppo.yaml": {
        "algorithm.name": "ppo",
        "algorithm.kl.place": "reward",
        "models.all.engine": "megatron",
        "models.all.tp": 2,
        "models.all.pp": 2,
        "models.critic.optimizer.learning_rate": 5e-6,
        "models.critic.init": "deepseek-llm-7b",
        "data.max_prompt_tokens": 1024,
        "data.max_response_tokens": 1024,
    },
    "openrlhf_ppo.sh": {
        "algorithm.name": "ppo",
        "algorithm.num_mini_batches": 4,
        "algorithm.kl.coefficient": 0.02,
        "models.actor.init": "llama-3.2-3b",
        "models.reward.init": "llama-3.2-1b",
        "models.all.engine": "deepspeed",
        "models.all.zero": 3,
        "data.max_prompt_tokens": 1024,
        "cluster.nodes": [{"count": 1, "devices": 8, "class": H100}],
        "placement.actor.ranks": "0-3",
        "placement.ref.ranks": "0-3",
        "placement.critic.ranks": "4-5",
        "placement.reward.ranks": "4-5",
        "placement.actor.rollout.ranks": "6-7",
        "schedule.lag": 1,
    },
    "openrlhf_before.sh": {
        "algorithm.name": "dpo",
        "algorithm.beta": 0.2,
        "algorithm.prompts_per_step": 64,
        "models.actor.init": "llama-3-8b",
        "models.actor.lora.rank": 16,
        "models.actor.optimizer.learning_rate": 5e-7,
        "models.all.offload_optimizer": True,
        "models.all.micro_batch_tokens": 2 * 2 * 4096,
        "models.all.dtype": "bfloat16",
        "cluster.nodes": [{"count": 1, "devices": 4, "class": H100}],
    },
    "trl_grpo.sh": {
        "algorithm.name": "grpo",
        "algorithm.like": "trl",
        "algorithm.prompts_per_step": 16 * 4 * 4 // 16,
        "algorithm.samples_per_prompt": 16,
        "algorithm.loss_aggregation": "seq-mean-token-sum-norm",
        "algorithm.scale": "none",
        "models.actor.optimizer.learning_rate": 1e-6,
        "models.all.engine": "deepspeed",
        "models.all.zero": 2,
        "reward": {"rule": "math"},
        "rollout.engine": "vllm",
    },
    "trl_grpo.yaml": {
        "algorithm.prompts_per_step": 16 * 4 * 8 // 16,
        "algorithm.truncation": "mask-loss",
        "algorithm.entropy_coefficient": 0.001,
        "algorithm.entropy_aggregation": "token-mean",
        "models.actor.lora.rank": 16,
        "models.actor.lora.targets": ["q_proj", "v_proj"],
        "models.actor.optimizer.learning_rate": 2e-6,
        "models.all.engine": "torch",
        "rollout.special_tokens": "skip",
    },
    "trl_sft.py": {
        "algorithm.name": "sft",
        "algorithm.prompts_per_step": 2 * 4 * 2,
        "models.actor.init": "qwen3-1.7b",
        "models.actor.lora.targets": ["q_proj", "v_proj"],
        "models.actor.optimizer.schedule": "cosine",
        "models.all.offload_activations": True,
        "models.all.zero": 3,
        "data.path": "some/conversations",
        "steps": 500,
    },
    "trl_async.py": {
        "algorithm.name": "grpo",
        "algorithm.prompts_per_step": 16 * 2 * 2 // 8,
        "algorithm.samples_per_prompt": 8,
        "models.all.micro_batch_tokens": 4096,
        "cluster.nodes": [{"count": 1, "devices": 4, "class": H100}],
        "placement.actor.ranks": "0-1",
        "placement.actor.rollout.ranks": "2-3",
        "schedule.lag": 2,
        "sync.every": 2,
        "rollout.engine": "vllm",
        "rollout.tp": 2,
        "steps": 200,
    },
    "nemo_async.sh": {
        "algorithm.name": "grpo",
        "algorithm.baseline": "others",
        "algorithm.prompts_per_step": 64,
        "algorithm.num_mini_batches": 2,
        "models.actor.init": "llama-3.1-8b",
        "models.actor.optimizer.learning_rate": 1e-6,
        "models.all.tp": 2,
        "models.all.cp": 2,
        "models.all.activation_checkpointing": True,
        "models.all.micro_batch_tokens": 4096,
        "data.max_prompt_tokens": 1024,
        "data.max_response_tokens": 3072,
        "steps": 40,
        "placement.actor.ranks": "0-15",
        "placement.ref.ranks": "0-15",
        "placement.actor.rollout.ranks": "16-23",
        "schedule.lag": 1,
        "rollout.tp": 4,
    },
    "areal_grpo.yaml": {
        "algorithm.name": "grpo",
        "algorithm.kl": None,
        "algorithm.clip_low": 0.4,
        "algorithm.num_mini_batches": 2,
        "algorithm.importance.level": "token",
        "models.actor.optimizer.betas": [0.9, 0.999],
        "models.all.micro_batch_tokens": 10240,
        "placement.actor.ranks": "0-3",
        "placement.actor.rollout.ranks": "4-7",
        "schedule.lag": 4,
        "rollout.tp": 2,
    },
    "deepspeed_chat.sh": {
        "algorithm.name": "ppo",
        "algorithm.like": "deepspeed-chat",
        "algorithm.prompts_per_step": 4 * 8 * 2,
        "algorithm.num_mini_batches": 2,
        "models.actor.init": "llama-2-7b",
        "models.all.zero": 3,
        "models.all.dtype": "float16",
        "models.critic.optimizer.learning_rate": 5e-6,
        "models.actor.lora.rank": 64,
        "models.actor.lora.alpha": 1,
        "models.actor.generate_tokens": 4 * 2 * 512,
        "models.critic.activation_checkpointing": False,
        "data.sources": [{"path": "some/dialogues"}, {"path": "other/dialogues"}],
        "rollout.engine": "torch",
        "rollout.tp": 2,
    },
}
"""Settings of each file's translation; the files have others, too."""

NO_COUNTERPART = {
    "verl_grpo.sh": "actor_rollout_ref.actor.fsdp_config.fsdp_size",
    "verl_experts.sh": "actor_rollout_ref.actor.megatron.pipeline_model_parallel_size",
    "openrlhf_ppo.sh": "--ds.ring_attn_size",
    "trl_sft.py": "warmup_steps",
}
"""A setting that changes results or time and is listed, by file."""


def job(name: str) -> Translation:
    return translated(JOBS / name, H100, CHAT if name == "deepspeed_chat.sh" else None)


@pytest.mark.parametrize("name", EXPECTED)
def test_a_job_is_translated_key_by_key_and_its_plan_fits(name: str) -> None:
    out = job(name)
    tree = read_yaml(out.text())
    assert tree == out.tree()
    leaves = dict(flat({key: value for key, value in tree.items() if key != "reward"})) | {"reward": tree.get("reward")}
    assert {key: leaves.get(key, "absent") for key in EXPECTED[name]} == EXPECTED[name]
    check_fits(make_plan(Spec.parse(tree, name)))


@pytest.mark.parametrize("name", EXPECTED)
def test_each_line_says_where_it_is_from(name: str) -> None:
    settings = job(name).text().partition("\n\n")[0].splitlines()
    without = [line for line in settings if not line.endswith(":") and "# " not in line]
    assert not without


@pytest.mark.parametrize("name", NO_COUNTERPART)
def test_a_setting_without_a_counterpart_is_listed(name: str) -> None:
    out = job(name)
    assert NO_COUNTERPART[name] in [each.setting.key for each in out.left_out if each.matters]
    assert NO_COUNTERPART[name] in out.report() and NO_COUNTERPART[name] in out.text()
    assert not out.is_whole


def test_activations_that_are_not_computed_again_stay_on_the_device(tmp_path: Path) -> None:
    """Of a critic, whose settings are its own."""
    words = (
        "python3 -m verl.trainer.main_ppo actor_rollout_ref.model.path=Qwen/Qwen3-4B critic.model.path=Qwen/Qwen3-4B"
    )
    of_critic = [f"critic.model.{name}=true" for name in ("enable_activation_offload", "tiled_mlp.enabled")]

    def critic(*settings: str) -> tuple[Any, ...]:
        (tmp_path / "job.sh").write_text(" ".join([words, *of_critic, *settings]))
        out = translated(tmp_path / "job.sh")
        assert out.value("models.actor.tiled_mlp") is None
        listed = {each.setting.key for each in out.left_out if each.matters}
        own = (out.value(f"models.critic.{name}") for name in ("offload_activations", "tiled_mlp"))
        return *own, "critic.model.enable_activation_offload" in listed

    assert critic() == (True, True, False)
    assert critic("critic.model.enable_gradient_checkpointing=false") == (None, True, True)
    assert critic("actor_rollout_ref.actor.strategy=megatron") == (None, None, False)


def test_settings_of_experts_have_counterparts_in_other_systems(tmp_path: Path) -> None:
    shutil.copytree(JOBS, tmp_path / "jobs")
    file = tmp_path / "jobs" / "nemo_async.yaml"
    text = file.read_text().replace("meta-llama/Llama-3.1-8B-Instruct", "Qwen/Qwen3-30B-A3B")
    text = text.replace("colocated: {enabled: false, ", "colocated: {enabled: true, ")
    for is_megatron in (True, False):
        section = "megatron_cfg: {enabled: true, expert_model_parallel_size: 16}\n  dtensor_cfg: {enabled: false, "
        added = section if is_megatron else "dtensor_cfg: {expert_parallel_size: 16, "
        replayed = f"router_replay: {{enabled: true}}\n  {added}"
        file.write_text(text.replace("dtensor_cfg: {", replayed))
        out = translated(file, H100)
        keys = ("models.all.engine", "models.actor.ep", "models.actor.router_replay", "rollout.engine")
        ranks = 8 if is_megatron else 4  # of 24 replicas, or of 12 with two context-parallel ranks each
        assert tuple(map(out.value, keys)) == ("torch", ranks, "rollout", "transformers"), is_megatron
    file.write_text(file.read_text().replace("colocated: {enabled: true, ", "colocated: {enabled: false, "))
    out = translated(file, H100)
    assert (out.value("models.actor.router_replay"), out.value("rollout.engine")) == (None, "vllm")
    assert "policy.router_replay.enabled" in {each.setting.key for each in out.left_out if each.matters}
    file = tmp_path / "jobs" / "areal_grpo.yaml"
    found = file.read_text().replace("Qwen/Qwen2.5-1.5B-Instruct", "Qwen/Qwen3-30B-A3B")
    file.write_text(found.replace("fsdp:d4", "megatron:(attn:d2p2t1|ffn:d1p2e2)"))
    out = translated(file, H100)
    assert (out.value("models.all.engine"), out.value("models.actor.ep")) == ("torch", 2)
    words = "deepspeed --module openrlhf.cli.train_sft --data.max_len 512 --data.dataset x --actor.aux_loss_coef 0.01"
    (tmp_path / "job.sh").write_text(f"{words} --actor.model_name_or_path allenai/OLMoE-1B-7B-0924")
    assert translated(tmp_path / "job.sh").value("models.actor.router_aux_loss_coef") == 0.01


@pytest.mark.parametrize(
    ("name", "flag", "expected"),
    [
        ("openrlhf_ppo.sh", "--train.full_determinism_enable", True),
        ("verl_grpo.sh", "actor_rollout_ref.actor.fsdp_config.full_determinism=True", True),
        ("verl_grpo.sh", "actor_rollout_ref.ref.fsdp_config.full_determinism=False", None),
    ],
)
def test_repeatable_training_is_repeatable_here(tmp_path: Path, name: str, flag: str, expected: bool | None) -> None:
    text, before = (JOBS / name).read_text(), "--ds.zero_stage" if "openrlhf" in name else "trainer.nnodes"
    (tmp_path / "job.sh").write_text(text.replace(before, f"{flag} {before}"))
    found = translated(tmp_path / "job.sh", H100)
    assert found.value("debug.deterministic") is expected
    listed = [each.matters for each in found.left_out if "determinism" in each.setting.key]
    assert listed == ([] if expected else [False])


@pytest.mark.parametrize("key", ["optim.lr", "ppo_mini_batch_size", "use_kl_loss", "trainer.nnodes", "rollout.n"])
def test_a_misspelt_setting_is_not_lost_in_silence(tmp_path: Path, key: str) -> None:
    text = (JOBS / "verl_grpo.sh").read_text()
    (tmp_path / "job.sh").write_text(text.replace(f"{key}=", f"{key}_x="))
    listed = [each.setting.key for each in translated(tmp_path / "job.sh").left_out if each.matters]
    assert any(name.endswith(f"{key}_x") for name in listed)


def test_adapters_that_training_goes_on_with_are_a_path() -> None:
    known = job("verl_off_policy.sh")
    assert "to train the adapters: path: checkpoints/sft" in known.text()
    assert "training goes on with the adapters in checkpoints/sft" in known.report()


def test_values_of_the_environment_are_named_and_can_be_given() -> None:
    assert "actor_rollout_ref.ref.strategy=$REF_STRATEGY" in job("verl_grpo.sh").text()
    without = job("verl_ppo.yaml")
    assert "its value is not in the file: DATA" in without.report()
    assert without.value("data.path") == "data/train.parquet"
    given = translated(JOBS / "verl_ppo.yaml", H100, {"DATA": "/rows"})
    assert given.value("data.path") == "/rows/train.parquet"
    assert translated(JOBS / "verl_grpo.sh", H100, {"TP": "4"}).value("rollout.tp") == 4


def test_devices_are_those_that_the_file_names_or_the_option_gives() -> None:
    named, given = translated(JOBS / "verl_grpo.sh"), translated(JOBS / "verl_grpo.sh", "A100-80G")
    assert named.value("cluster.nodes")[0]["class"] == H100
    assert given.value("cluster.nodes")[0]["class"] == "A100-80G"
    unnamed = translated(JOBS / "verl_off_policy.sh")
    assert "class" not in unnamed.value("cluster.nodes")[0]
    assert "--gpu-type" in unnamed.report()


def test_the_command_writes_a_yaml_that_others_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    shutil.copy(JOBS / "openrlhf_before.sh", "job.sh")
    words = ("import", "job.sh", "-o", "my.yaml", "--gpu-type", "h100-80g")
    first = CliRunner().invoke(app, [*words])
    assert first.exit_code == 0, first.output
    assert "written to my.yaml: flexrlhf plan my.yaml" in first.output
    assert load_spec("my.yaml").algorithm.name == "dpo"
    assert CliRunner().invoke(app, [*words]).exit_code == 0  # replaces its own file
    simulated = CliRunner().invoke(app, ["simulate", "my.yaml"])
    assert simulated.exit_code == 0 and "s a step" in simulated.output
    printed = CliRunner().invoke(app, ["import", "job.sh"])
    assert printed.exit_code == 0 and read_yaml(printed.stdout)["algorithm"]["name"] == "dpo"


WORDS = re.split(" ", rf"'' $X null [1,2] {{a:1}} -1 0 1e400 true $(date) ${{A nan \ é {'9' * 20}")


@pytest.mark.parametrize("name", EXPECTED)
def test_a_damaged_job_is_a_yaml_or_one_sentence(tmp_path: Path, name: str) -> None:
    shutil.copytree(JOBS, tmp_path / "jobs")
    random, text = Random(name), (JOBS / name).read_text()
    places = [match.span() for match in re.finditer(r"(?<=[= :])[\w./\"'${}-]+", text)]
    for _ in range(8):
        (start, end), word = random.choice(places), random.choice(WORDS)
        (tmp_path / "jobs" / name).write_text(text[:start] + word + text[end:])
        try:
            out = translated(tmp_path / "jobs" / name, None, CHAT)
        except UserError as error:
            assert "\n" not in str(error)
        else:
            assert read_yaml(out.text()) == out.tree()


WRONG = {
    ("job.sh", "echo hello"): "no job of a known system; known: verl, OpenRLHF, TRL, NeMo-RL, AReaL, DeepSpeed-Chat",
    ("job.yaml", "learning_rate: 1"): "no job of a known system",
    ("job.yaml", "a: [1"): "not YAML",
    ("job.yaml", "[1, 2]"): "expected a mapping at the top",
    ("job.yaml", "defaults: base.yaml\npolicy: {}\ncluster: {}"): "base.yaml is not there",
    ("job.py", "print(1)"): "no job of a known system",
    ("job.py", "def ("): "not Python",
    (
        "job.sh",
        "python -m openrlhf.cli.train_ppo_ray --actor.num_nodes 1",
    ): "a job needs a model, and the file has none",
    ("job.sh", "python -m openrlhf.cli.train_sft --pretrain $MODEL"): "give it by --var",
    (
        "job.sh",
        "python -m verl.trainer.main_ppo actor_rollout_ref.model.path=Qwen/Qwen2.5-VL-7B-Instruct",
    ): "reads images",
    ("job.sh", "trl gkd --model_name_or_path Qwen/Qwen3-8B"): "has no counterpart (distillation from a teacher)",
    ("job.sh", "uv run run_grpo.py --config other.yaml"): "its settings are in other.yaml, which is not there",
}


@pytest.mark.parametrize(("file", "text"), WRONG)
def test_a_file_that_is_no_job_is_one_sentence(tmp_path: Path, file: str, text: str) -> None:
    (tmp_path / file).write_text(text)
    with pytest.raises(UserError) as error:
        translated(tmp_path / file)
    assert WRONG[file, text] in str(error.value) and "\n" not in str(error.value)


@pytest.mark.parametrize(("module", "name"), [("tree_sitter_bash", "trl_grpo.sh"), ("omegaconf", "trl_grpo.yaml")])
def test_a_reader_that_is_not_installed_names_its_extra(
    monkeypatch: pytest.MonkeyPatch, module: str, name: str
) -> None:
    bash_parser.cache_clear()
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(UserError, match=r"pip install 'flexrlhf\[import\]'"):
        job(name)


def test_a_missing_file_and_a_wrong_variable_are_one_sentence(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no such file"):
        translated(tmp_path / "none.sh")
    result = CliRunner().invoke(app, ["import", str(JOBS / "verl_grpo.sh"), "--var", "TP"])
    assert result.exit_code == 2 and "expected NAME=VALUE" in result.output
