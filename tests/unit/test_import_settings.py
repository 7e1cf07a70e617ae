"""``flexrlhf import``: settings of each system that have a counterpart, and ones that are listed with their effect."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from flexrlhf.config.spec import Spec
from flexrlhf.errors import UserError
from flexrlhf.imports.translate import translated
from flexrlhf.imports.translation import Translation
from flexrlhf.plan.epochs import with_epochs
from flexrlhf.plan.pipeline import make_plan

VERL = (
    "python3 -m verl.trainer.main_ppo algorithm.adv_estimator=grpo data.train_files=t.parquet data.train_batch_size=64"
    " actor_rollout_ref.model.path=Qwen/Qwen2.5-1.5B actor_rollout_ref.actor.ppo_mini_batch_size=64"
    " actor_rollout_ref.rollout.n=8 trainer.nnodes=1 trainer.n_gpus_per_node=8 "
)
VERL_SFT = "torchrun --nproc_per_node 4 -m verl.trainer.sft_trainer model.path=Qwen/Qwen2.5-0.5B "
OPENRLHF = (
    "python3 -m openrlhf.cli.train_ppo_ray --pretrain Qwen/Qwen2.5-7B --actor_num_nodes 1 --actor_num_gpus_per_node 8"
    " --colocate_all_models --vllm_num_engines 8 --advantage_estimator group_norm --n_samples_per_prompt 8"
    " --rollout_batch_size 32 --train_batch_size 256 --prompt_data t.jsonl "
)
OPENRLHF_DPO = "deepspeed --num_gpus 4 --module openrlhf.cli.train_dpo --pretrain Qwen/Qwen2.5-1.5B --dataset a/b "
CHAT = "deepspeed --num_gpus 4 main.py --data_path a/b --model_name_or_path Qwen/Qwen2.5-0.5B --zero_stage 2 "
TRL = "model_name_or_path: Qwen/Qwen2.5-0.5B\ndataset_name: org/rows\nper_device_train_batch_size: 4\n"
GRPO = f"{TRL}num_generations: 4\nmax_completion_length: 512\n"
NEMO = """
SECTION: {max_num_steps: 20, num_prompts_per_step: 8, num_generations_per_prompt: 4, normalize_rewards: true, OWN}
policy:
  model_name: Qwen/Qwen2.5-1.5B
  train_global_batch_size: 16
  max_total_sequence_length: 1024
  dtensor_cfg: {enabled: true, LORA}
  generation: {backend: vllm, max_new_tokens: 512}
data: {train: {data_path: a.jsonl}, DATA}
cluster: {num_nodes: 1, gpus_per_node: 8}
"""
AREAL = """
experiment_name: math
rollout: {backend: "vllm:d4"}
gconfig: {n_samples: 8, max_new_tokens: 1024}
actor: {backend: "fsdp:d4", path: Qwen/Qwen2.5-1.5B, reward_norm: {mean_level: group, std_level: group}}
train_dataset: {batch_size: 128, path: openai/gsm8k}
"""
SCRIPT = """
from trl import GRPOConfig, GRPOTrainer
from helpers import rounded
{imports}

def lengths(completions, **kwargs):
    return [rounded(len(each)) for each in completions]

trainer = GRPOTrainer(
    model="Qwen/Qwen2-0.5B", reward_funcs={functions}, train_dataset=rows,
    args=GRPOConfig(num_generations=4, max_steps=3, {settings})
)
trainer.train()
"""
ATTENTION = ["q_proj", "k_proj", "v_proj", "o_proj"]


def nemo(section: str = "grpo", own: str = "", lora: str = "", data: str = "", more: str = "") -> str:
    parts = {"SECTION": section, "OWN": own, "LORA": lora, "DATA": data}
    text = NEMO
    for name, value in parts.items():
        text = text.replace(name, value)
    return text.replace(", }", "}") + more


def script(functions: str, imports: str = "", settings: str = "") -> str:
    return SCRIPT.format(functions=functions, imports=imports, settings=settings)


Case = tuple[str, str, dict[str, Any], tuple[str, ...]]
LENGTHS: dict[str, Case] = {
    "verl": ("a.sh", f"{VERL}trainer.total_epochs=15", {"epochs": 15, "steps": None}, ()),
    "verl with both": ("a.sh", f"{VERL}trainer.total_epochs=1 trainer.total_training_steps=5", {"steps": 5}, ()),
    "verl's sft": ("a.sh", f"{VERL_SFT}trainer.total_epochs=2", {"epochs": 2}, ()),
    "trl": ("a.yaml", f"{GRPO}num_train_epochs: 0.5\nmax_steps: -1\n", {"epochs": 0.5, "steps": None}, ()),
    "trl with both": ("a.yaml", f"{GRPO}num_train_epochs: 2\nmax_steps: 7\n", {"epochs": None, "steps": 7}, ()),
    "openrlhf": ("a.sh", f"{OPENRLHF}--num_episodes 4 --max_epochs 2", {"epochs": 4, "algorithm.epochs": 2}, ()),
    "openrlhf's dpo": ("a.sh", f"{OPENRLHF_DPO}--max_epochs 3", {"epochs": 3, "algorithm.epochs": None}, ()),
    "nemo-rl": ("a.yaml", nemo("sft", "max_num_epochs: 3").replace("20", "1000000"), {"epochs": 3, "steps": None}, ()),
    "areal": ("a.yaml", f"{AREAL}total_train_epochs: 5", {"epochs": 5}, ()),
    "deepspeed-chat": ("a.sh", f"{CHAT}--num_train_epochs 2", {"epochs": 2}, ()),
    "episodes": (
        "a.sh",
        "accelerate launch --num_processes 2 ppo.py --model_name_or_path Qwen/Qwen2.5-0.5B --dataset_name a/b "
        "--per_device_train_batch_size 4 --total_episodes 650",
        {"steps": 82, "algorithm.prompts_per_step": 8},
        (),
    ),
    "no warm-up": ("a.sh", f"{CHAT}--num_warmup_steps 0", {"models.actor.optimizer.warmup_steps": 0}, ()),
    "a share of an unknown number": (
        "a.yaml",
        f"{GRPO}num_train_epochs: 2\nwarmup_ratio: 0.1\n",
        {"models.actor.optimizer.warmup_steps": None},
        ("warmup_ratio",),
    ),
    "a warm-up of more than 100 steps": (
        "a.yaml",
        f"{GRPO}num_train_epochs: 2\nwarmup_steps: 150\n",
        {"models.actor.optimizer.warmup_steps": 150},
        (),
    ),
}
RUNS: dict[str, Case] = {
    "verl without": (
        "a.sh",
        f"{VERL}data.val_files=v.parquet trainer.test_freq=-1 trainer.save_freq=-1",
        {"eval.path": None, "checkpoint": (None, None)},
        (),
    ),
    "trl": (
        "a.yaml",
        f"{GRPO}max_steps: 9\nseed: 3\ndata_seed: 4\nreport_to: [wandb, swanlab]\nrun_name: my run\nsave_steps: 20\n"
        "save_total_limit: 3\neval_strategy: steps\neval_steps: 5\ndataset_test_split: val\n",
        {
            "seed": 3,
            "loggers": [{"name": "wandb"}],
            "name": "my-run",
            "checkpoint": (20, 3),
            "eval.path": "org/rows:val",
            "eval.every": 5,
        },
        ("data_seed",),
    ),
    "verl": (
        "a.sh",
        f"{VERL}trainer.total_training_steps=9 trainer.logger=['console','wandb'] trainer.project_name=p data.seed=5"
        " trainer.experiment_name=e data.val_files=v.parquet trainer.test_freq=5 trainer.save_freq=10"
        " trainer.max_actor_ckpt_to_keep=1 trainer.val_before_train=False",
        {
            "seed": 5,
            "loggers": [{"name": "wandb", "project": "p"}],
            "name": "e",
            "checkpoint": (10, 1),
            "eval.path": "v.parquet",
            "eval.every": 5,
            "eval.before": False,
            "eval.temperature": 0,
        },
        (),
    ),
    "openrlhf": (
        "a.sh",
        f"{OPENRLHF}--use_wandb 0123abcd --wandb_project p --wandb_run_name r --seed 9 --save_steps 7 --max_ckpt_num 2"
        " --eval_dataset v.jsonl --eval_steps 3 --eval_temperature 0.3 --eval_n_samples_per_prompt 2",
        {
            "seed": 9,
            "loggers": [{"name": "wandb", "project": "p"}],
            "name": "r",
            "checkpoint": (7, 2),
            "eval.every": 3,
            "eval.temperature": 0.3,
            "eval.samples_per_prompt": 2,
        },
        (),
    ),
    "nemo-rl": (
        "a.yaml",
        nemo(
            own="seed: 4, val_period: 10, val_at_start: true",
            data="validation: {data_path: v.jsonl}",
            more="logger: {wandb_enabled: false, mlflow_enabled: true, mlflow: {experiment_name: x}}\n"
            "checkpointing: {enabled: true, save_period: 10, keep_top_k: 3}\n",
        ),
        {
            "seed": 4,
            "loggers": [{"name": "mlflow", "experiment": "x"}],
            "checkpoint": (10, 3),
            "eval.path": "v.jsonl",
            "eval.every": 10,
            "eval.before": True,
            "rollout.special_tokens": "skip",
        },
        (),
    ),
    "areal": (
        "a.yaml",
        f"{AREAL}seed: 6\ntrial_name: t\nvalid_dataset: {{path: v.jsonl}}\nevaluator: {{freq_steps: 5}}\n"
        "saver: {freq_steps: 20}\nstats_logger: {wandb: {mode: offline, project: p}}\n",
        {
            "seed": 6,
            "name": "t",
            "loggers": [{"name": "wandb", "project": "p", "mode": "offline"}],
            "eval.every": 5,
            "save.every": 20,
        },
        (),
    ),
    "deepspeed-chat": (
        "a.sh",
        f"{CHAT}--seed 8 --enable_tensorboard",
        {"seed": 8, "loggers": [{"name": "tensorboard"}]},
        (),
    ),
}
PENALTIES: dict[str, Case] = {
    "of a version with a sign": (
        "a.sh",
        f"{VERL}algorithm.kl_ctrl.kl_coef=0.005 trainer.default_hdfs_dir=null",
        {"algorithm.kl.place": "reward", "algorithm.kl.coefficient": 0.005},
        (),
    ),
    "of no known version": (
        "a.sh",
        f"{VERL}algorithm.kl_ctrl.kl_coef=0.005",
        {"algorithm.kl.place": None},
        ("algorithm.kl_ctrl.kl_coef",),
    ),
    "of a later one": (
        "a.sh",
        f"{VERL}algorithm.kl_ctrl.kl_coef=0.005 algorithm.use_kl_in_reward=False trainer.default_hdfs_dir=null",
        {"algorithm.kl.place": None},
        (),
    ),
    "TRL's before 0.16": (
        "a.yaml",
        f"{GRPO}num_processes: 3\nmax_steps: 9\nuse_vllm: true\nvllm_device: auto\n",
        {
            "algorithm.kl.coefficient": 0.04,
            "algorithm.kl.corrected": False,
            "algorithm.importance.level": None,
            "algorithm.temperature": 0.9,
            "algorithm.prompts_per_step": 3,
            "placement.actor\0rollout.ranks": [3],
            "data.max_response_tokens": 512,
        },
        (),
    ),
    "processes on two machines": (
        "a_dpo.yaml",
        f"{TRL}num_processes: 16\nnum_machines: 2\n",
        {"algorithm.prompts_per_step": 64, "cluster.nodes": [{"count": 2, "devices": 8}]},
        (),
    ),
}
ROWS: dict[str, Case] = {
    "verl": (
        "a.sh",
        f"{VERL}data.prompt_key=chat +data.apply_chat_template_kwargs.enable_thinking=False data.train_max_samples=10",
        {"data.columns": {"prompt": "chat", "answer": "reward_model.ground_truth"}},
        ("data.apply_chat_template_kwargs.enable_thinking", "data.train_max_samples"),
    ),
    "verl's sft": (
        "a.sh",
        f"{VERL_SFT}data.prompt_key=extra data.prompt_dict_keys=['q'] data.response_key=extra"
        " data.response_dict_keys=['a']",
        {"data.columns": {"prompt": "extra.q", "response": "extra.a"}, "data.chat": "always"},
        (),
    ),
    "openrlhf": (
        "a.sh",
        f"{OPENRLHF}--input_key q --label_key gold --apply_chat_template --remote_rm_url http://h:5000/s,http://i:5000/s"
        " --entropy_loss_coef 0.001 --reward_clip_range -5 5 --max_samples 9",
        {
            "data.columns": {"input": "q", "label": "gold"},
            "data.chat": "always",
            "reward": {"url": ["http://h:5000/s", "http://i:5000/s"]},
            "algorithm.entropy_coefficient": 0.001,
            "algorithm.reward_clip": 5,
        },
        ("--max_samples",),
    ),
    "openrlhf's dpo": (
        "a.sh",
        f"{OPENRLHF_DPO}--prompt_key q --chosen_key a --rejected_key b --input_template 'Q: {{}}'"
        " --tokenizer_chat_template t",
        {"data.columns": {"prompt": "q", "chosen": "a", "rejected": "b"}, "data.template": "Q: {q}"},
        ("--tokenizer_chat_template",),
    ),
    "trl": (
        "a_sft.yaml",
        f"{TRL}dataset_config: main\ndataset_train_split: train_sft\ndataset_text_field: body\neos_token: <|im_end|>\n",
        {"data.path": "org/rows:main:train_sft", "data.columns": {"text": "body"}, "data.end_token": "<|im_end|>"},
        (),
    ),
    "a recipe of TRL": (
        "a.yaml",
        f"{GRPO}dataset_prompt_column: problem\nsystem_prompt: Think.\n"
        "chat_template_kwargs: {enable_thinking: false}\n",
        {"data.columns": {"prompt": "problem"}, "data.system": "Think."},
        ("chat_template_kwargs.enable_thinking",),
    ),
    "nemo-rl": (
        "a.yaml",
        nemo(data="prompt_file: p.txt, input_key: q, output_key: a"),
        {"data.columns": {"prompt": "q", "answer": "a"}},
        ("data.prompt_file",),
    ),
}
ADAPTERS: dict[str, Case] = {
    "nemo-rl": (
        "a.yaml",
        nemo(
            lora="lora_cfg: {enabled: true, exclude_modules: ['*mlp*'], match_all_linear: true, dim: 8, dropout: 0.1}"
        ),
        {"models.actor.lora.targets": ATTENTION},
        ("policy.dtensor_cfg.lora_cfg.dropout",),
    ),
    "verl": (
        "a.sh",
        f"{VERL}actor_rollout_ref.model.lora_rank=8 actor_rollout_ref.model.exclude_modules=.*visual.*",
        {"models.actor.lora.targets": None},
        ("actor_rollout_ref.model.exclude_modules",),
    ),
    "a mixture of experts": (
        "a.sh",
        VERL.replace("Qwen2.5-1.5B", "Qwen3-30B-A3B")
        + "actor_rollout_ref.model.lora_rank=8 actor_rollout_ref.model.target_modules=['q_proj','gate_proj','up_proj']",
        {"models.actor.lora.targets": ["q_proj", "gate_up_proj"]},
        (),
    ),
    "verl's names of Megatron": (
        "a.sh",
        f"{VERL}actor_rollout_ref.model.lora.rank=8 actor_rollout_ref.model.lora.dropout=0.1"
        " actor_rollout_ref.model.lora.target_modules=['linear_qkv','linear_proj']",
        {"models.actor.lora.targets": ATTENTION},
        ("actor_rollout_ref.model.lora.dropout",),
    ),
    "trl": (
        "a_sft.yaml",
        f"{TRL}use_peft: true\nlora_r: 16\nlora_alpha: 8\nuse_rslora: true\nlora_dropout: 0.1\n"
        "lora_target_modules: [q_proj, lm_head]\nlora_modules_to_save: [embed_tokens]\n",
        {"models.actor.lora.targets": ["q_proj"], "models.actor.lora.alpha": 32},
        ("lora_target_modules", "lora_dropout", "lora_modules_to_save"),
    ),
    "openrlhf": (
        "a.sh",
        f"{OPENRLHF_DPO}--lora_rank 8 --lora_dropout 0.1",
        {"models.actor.lora.rank": 8},
        ("--lora_dropout",),
    ),
}
SCORES: dict[str, Case] = {
    "trl.rewards": (
        "a.py",
        script(
            "[accuracy_reward, think_format_reward]", "from trl.rewards import accuracy_reward, think_format_reward"
        ),
        {"data.columns": {"answer": "solution"}},
        (),
    ),
    "made while the job runs": ("a.py", script("[lambda completions, **_: [0]]"), {}, ("reward_funcs",)),
    "names of a recipe": ("a.yaml", f"{GRPO}reward_funcs: [format, code]\n", {}, ("reward_funcs",)),
    "a module": (
        "a.yaml",
        f"{GRPO}reward_funcs: [my.rewards.own]\nreward_weights: [0.5]\n",
        {"reward": {"function": "my.rewards:own", "weight": 0.5}},
        (),
    ),
    "verl": (
        "a.sh",
        f"{VERL}custom_reward_function.path=s.py",
        {"reward": {"function": "s.py:compute_score"}, "data.columns": {"ground_truth": "reward_model.ground_truth"}},
        (),
    ),
    "openrlhf": (
        "a.sh",
        f"{OPENRLHF}--remote_rm_url s.py --label_key gold",
        {"reward": {"function": "s.py:reward_func"}, "data.columns": {"labels": "gold"}},
        (),
    ),
    "openrlhf's agent": ("a.sh", f"{OPENRLHF}--agent_func_path s.py", {}, ("--agent_func_path",)),
    "areal": ("a.yaml", f"{AREAL}reward_fn_path: a.b.c\n", {}, ("reward_fn_path",)),
}
MODELS: dict[str, Case] = {
    "trl": (
        "a_sft.yaml",
        f"{TRL}fp16: true\noptim: paged_adamw_8bit\nmodel_revision: main\npacking: true\nshuffle_dataset: false\n",
        {"models.all.dtype": "float16"},
        ("optim", "packing", "shuffle_dataset"),
    ),
    "trl's revision": (
        "a_sft.yaml",
        f"{TRL}model_revision: v2\ntrust_remote_code: true\n".replace("Qwen/Qwen2.5-0.5B", "some/model"),
        {"models.actor.path": "some/model@v2", "models.actor.trust_remote_code": True},
        (),
    ),
    "verl": (
        "a.sh",
        f"{VERL}actor_rollout_ref.actor.fsdp_config.dtype=float16 actor_rollout_ref.actor.fsdp_config.model_dtype=bf16"
        " actor_rollout_ref.rollout.dtype=bfloat16 data.shuffle=False trainer.v1.trainer_mode=separate_async",
        {"models.all.dtype": "float16", "rollout.dtype": "bfloat16"},
        ("actor_rollout_ref.actor.fsdp_config.model_dtype", "data.shuffle", "trainer.v1.trainer_mode"),
    ),
    "verl's critic": (
        "a.sh",
        f"{VERL}critic.model.path=Qwen/Qwen2.5-1.5B critic.ppo_epochs=2 critic.loss_agg_mode=x".replace("grpo", "gae"),
        {"algorithm.name": "ppo"},
        ("critic.ppo_epochs", "critic.loss_agg_mode"),
    ),
}
CASES = {
    f"{kind}, {name}": case
    for kind, cases in {
        "length": LENGTHS,
        "run": RUNS,
        "penalty": PENALTIES,
        "rows": ROWS,
        "models": MODELS,
        "adapters": ADAPTERS,
        "scores": SCORES,
    }.items()
    for name, case in cases.items()
}


def job(folder: Path, file: str, text: str) -> Translation:
    (folder / file).write_text(text)
    return translated(folder / file)


@pytest.mark.parametrize("name", CASES)
def test_a_setting_is_written_or_listed_with_its_effect(tmp_path: Path, name: str) -> None:
    file, text, expected, listed = CASES[name]
    out = job(tmp_path, file, text)
    checkpoints = out.value("checkpoint.every"), out.value("checkpoint.keep_last")
    assert {key: checkpoints if key == "checkpoint" else out.value(key) for key in expected} == expected
    effects = {each.setting.key for each in out.left_out if each.matters}
    assert set(listed) <= effects
    assert not {"trainer.save_freq", "trainer.test_freq", "per_device_eval_batch_size"} & effects
    assert "0123abcd" not in out.text()
    Spec.parse(out.tree(), file)


@pytest.mark.parametrize("imports", ["from own import good", "from own import other as good"])
def test_functions_of_a_script_are_named(tmp_path: Path, imports: str) -> None:
    """Of its own file and of one next to it, with their weights."""
    (tmp_path / "own.py").write_text("def good(completions): ...\ndef other(completions): ...\n")
    out = job(tmp_path, "train.py", script("[lengths, good]", imports, "reward_weights=[1, 0.5]"))
    name = "other" if "other" in imports else "good"
    assert out.value("reward") == [
        {"function": f"{tmp_path}/train.py:lengths"},
        {"function": f"{tmp_path}/own.py:{name}", "weight": 0.5},
    ]
    assert not [each for each in out.left_out if "reward" in each.setting.key and each.matters]


def test_epochs_without_rows_are_one_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    out = job(tmp_path, "a.sh", f"{OPENRLHF}--num_episodes 2")
    spec = Spec.parse(out.tree(), "a.sh")
    with pytest.raises(UserError, match=r"epochs are counted in rows: .*t\.jsonl.*; or give steps$"):
        with_epochs(spec)
    (tmp_path / "t.jsonl").write_text('{"input": "1 + 1?"}\n' * 48)
    counted, _ = with_epochs(spec)
    assert counted.steps == 3
    make_plan(counted)


def test_the_preset_has_a_share_of_its_own(tmp_path: Path) -> None:
    """OpenRLHF's of the steps that planning counts."""
    for share, listed in ((0.03, False), (0.1, True)):
        out = job(tmp_path, "a.sh", f"{OPENRLHF}--num_episodes 2 --lr_warmup_ratio {share}")
        assert ("--lr_warmup_ratio" in {each.setting.key for each in out.left_out if each.matters}) is listed


def test_megatron_has_no_evaluation_that_samples(tmp_path: Path) -> None:
    evaluated = f"{VERL}data.val_files=v.parquet trainer.test_freq=5 trainer.total_training_steps=9"
    assert job(tmp_path, "a.sh", evaluated).value("eval.every") == 5
    out = job(tmp_path, "a.sh", f"{evaluated} actor_rollout_ref.actor.strategy=megatron")
    assert not [key for key in out.lines if key.startswith("eval.")]
    assert "which Megatron does not here" in out.report()
    listed = {each.setting.key for each in out.left_out}
    assert {"data.val_files", "trainer.test_freq"} <= listed
    make_plan(Spec.parse(out.tree(), "a.sh"))
