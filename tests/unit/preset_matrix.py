"""What the trainers of other engines have by default, read from their sources a second time, setting by setting.

A row is a setting, a column an algorithm, a value as in the YAML; ``-``: the preset does not set it. Of 100 steps.
"""

from __future__ import annotations

from typing import Any

from flexrlhf.config.yaml_io import read_yaml

VERL = """
setting                 | ppo        | grpo                | rloo       | gspo                | reinforce++ | remax | sft
prompts_per_step        | 1024       | 1024                | 1024       | 1024                | 1024        | 1024  | 256
num_mini_batches        | 4          | 4                   | 4          | 4                   | 4           | 4     | 1
epochs                  | 1          | 1                   | 1          | 1                   | 1           | 1     | 1
rollouts_per_step       | 1          | 1                   | 1          | 1                   | 1           | 1     | -
freeze_actor_steps      | 0          | 0                   | 0          | 0                   | 0           | 0     | -
samples_per_prompt      | 1          | -                   | -          | -                   | 1           | 1     | -
temperature             | 1.0        | 1.0                 | 1.0        | 1.0                 | 1.0         | 1.0   | -
top_p                   | 1.0        | 1.0                 | 1.0        | 1.0                 | 1.0         | 1.0   | -
top_k                   | 0          | 0                   | 0          | 0                   | 0           | 0     | -
importance              | null       | null                | null       | null                | null        | null  | -
kl                      | null       | null                | null       | null                | null        | null  | -
clip_low                | 0.2        | 0.2                 | 0.2        | 0.2                 | 0.2         | 0.2   | -
clip_high               | 0.2        | 0.2                 | 0.2        | 0.2                 | 0.2         | 0.2   | -
dual_clip               | 3.0        | 3.0                 | 3.0        | null                | 3.0         | 3.0   | -
ratio                   | token      | token               | token      | sequence            | token       | token | -
entropy_coefficient     | 0.0        | 0.0                 | 0.0        | 0.0                 | 0.0         | 0.0   | -
loss_aggregation        | token-mean | token-mean          | token-mean | token-mean          | token-mean  | token-mean | token-mean
reward_clip             | null       | null                | null       | null                | null        | null  | -
normalise_scores        | none       | none                | none       | none                | none        | none  | -
truncation              | none       | none                | none       | none                | none        | none  | -
overlong                | null       | null                | null       | null                | null        | null  | -
dynamic_sampling        | -          | null                | null       | null                | -           | -     | -
baseline                | -          | mean                | others     | mean                | none        | -     | -
scale                   | -          | group               | none       | group               | -           | -     | -
gamma                   | 1.0        | -                   | -          | -                   | 1.0         | 1.0   | -
gae_lambda              | 1.0        | -                   | -          | -                   | -           | -     | -
value_clip              | 0.5        | -                   | -          | -                   | -           | -     | -
whiten                  | batch      | -                   | -          | -                   | batch       | none  | -
actor.name              | adamw      | adamw               | adamw      | adamw               | adamw       | adamw | adamw
actor.learning_rate     | 1e-6       | 1e-6                | 1e-6       | 1e-6                | 1e-6        | 1e-6  | 1e-3
actor.betas             | [0.9,0.999]| [0.9,0.999]         | [0.9,0.999]| [0.9,0.999]         | [0.9,0.999] | [0.9,0.999] | [0.9,0.999]
actor.eps               | 1e-8       | 1e-8                | 1e-8       | 1e-8                | 1e-8        | 1e-8  | 1e-8
actor.weight_decay      | 0.01       | 0.01                | 0.01       | 0.01                | 0.01        | 0.01  | 0.01
actor.schedule          | constant   | constant            | constant   | constant            | constant    | constant | constant
actor.warmup_steps      | 0          | 0                   | 0          | 0                   | 0           | 0     | 0
actor.max_grad_norm     | 1.0        | 1.0                 | 1.0        | 1.0                 | 1.0         | 1.0   | 1.0
critic.name             | adamw      | -                   | -          | -                   | -           | -     | -
critic.learning_rate    | 1e-5       | -                   | -          | -                   | -           | -     | -
critic.betas            | [0.9,0.999]| -                   | -          | -                   | -           | -     | -
critic.eps              | 1e-8       | -                   | -          | -                   | -           | -     | -
critic.weight_decay     | 0.01       | -                   | -          | -                   | -           | -     | -
critic.schedule         | constant   | -                   | -          | -                   | -           | -     | -
critic.warmup_steps     | 0          | -                   | -          | -                   | -           | -     | -
critic.max_grad_norm    | 1.0        | -                   | -          | -                   | -           | -     | -
"""
_K1 = "{place: reward, estimator: k1, coefficient: 0.01, value_clamp: 10.0, target_unit: token, horizon: 10000}"
_AFTER = "{place: advantages, estimator: k1, coefficient: 0.01, value_clamp: 10.0, target_unit: token, horizon: 10000}"
# of 1024 responses 8 mini-batches of 128, with a group of 8 eight times as many, of 4 four times; 3 % of the updates
OPENRLHF = f"""
setting                 | ppo        | grpo       | rloo       | gspo                | reinforce++ | sft   | reward | dpo
prompts_per_step        | 1024       | 1024       | 1024       | 1024                | 1024        | 128   | 128    | 128
num_mini_batches        | 8          | 64         | 32         | 64                  | 8           | 1     | 1      | 1
epochs                  | 1          | 1          | 1          | 1                   | 1           | 1     | 1      | 1
freeze_actor_steps      | 0          | 0          | 0          | 0                   | 0           | -     | -      | -
samples_per_prompt      | 1          | -          | -          | -                   | 1           | -     | -      | -
temperature             | 1.0        | 1.0        | 1.0        | 1.0                 | 1.0         | -     | -      | -
top_p                   | 1.0        | 1.0        | 1.0        | 1.0                 | 1.0         | -     | -      | -
importance              | null       | null       | null       | null                | null        | -     | -      | -
kl                      | {_K1}      | {_AFTER}   | {_AFTER}   | {_AFTER}            | {_K1}       | -     | -      | -
clip_low                | 0.2        | 0.2        | 0.2        | 0.2                 | 0.2         | -     | -      | -
clip_high               | 0.2        | 0.2        | 0.2        | 0.2                 | 0.2         | -     | -      | -
dual_clip               | null       | null       | null       | null                | null        | -     | -      | -
ratio                   | token      | token      | token      | sequence            | token       | -     | -      | -
entropy_coefficient     | 0.0        | 0.0        | 0.0        | 0.0                 | 0.0         | -     | -      | -
loss_aggregation        | token-mean | token-mean | token-mean | seq-mean-token-mean | token-mean  | token-mean | - | -
reward_clip             | 10.0       | null       | null       | null                | 10.0        | -     | -      | -
normalise_scores        | none       | none       | none       | none                | none        | -     | -      | -
truncation              | none       | none       | none       | none                | none        | -     | -      | -
overlong                | null       | null       | null       | null                | null        | -     | -      | -
dynamic_sampling        | -          | null       | null       | null                | -           | -     | -      | -
baseline                | -          | mean       | others     | mean                | none        | -     | -      | -
scale                   | -          | group      | none       | group               | -           | -     | -      | -
gamma                   | 1.0        | -          | -          | -                   | 1.0         | -     | -      | -
gae_lambda              | 1.0        | -          | -          | -                   | -           | -     | -      | -
value_clip              | 0.5        | -          | -          | -                   | -           | -     | -      | -
whiten                  | batch      | -          | -          | -                   | batch       | -     | -      | -
beta                    | -          | -          | -          | -                   | -           | -     | -      | 0.1
loss                    | -          | -          | -          | -                   | -           | -     | -      | sigmoid
label_smoothing         | -          | -          | -          | -                   | -           | -     | -      | 0.0
*.name                  | adamw      | adamw      | adamw      | adamw               | adamw       | adamw | adamw  | adamw
*.betas                 | [0.9,0.95] | [0.9,0.95] | [0.9,0.95] | [0.9,0.95]          | [0.9,0.95]  | [0.9,0.95] | [0.9,0.95] | [0.9,0.95]
*.eps                   | 1e-8       | 1e-8       | 1e-8       | 1e-8                | 1e-8        | 1e-8  | 1e-8   | 1e-8
*.weight_decay          | 0.0        | 0.0        | 0.0        | 0.0                 | 0.0         | 0.0   | 0.0    | 0.0
*.schedule              | cosine     | cosine     | cosine     | cosine              | cosine      | cosine | cosine | cosine
*.final_ratio           | 0.1        | 0.1        | 0.1        | 0.1                 | 0.1         | 0.1   | 0.1    | 0.1
*.warmup_steps          | 24         | 192        | 96         | 192                 | 24          | 3     | 3      | 3
*.max_grad_norm         | 1.0        | 1.0        | 1.0        | 1.0                 | 1.0         | 1.0   | 1.0    | 1.0
actor.learning_rate     | 1e-6       | 1e-6       | 1e-6       | 1e-6                | 1e-6        | 5e-6  | -      | 1e-5
critic.learning_rate    | 9e-6       | -          | -          | -                   | -           | -     | -      | -
reward.learning_rate    | -          | -          | -          | -                   | -           | -     | 9e-6   | -
"""
_TRL_KL = "{place: reward, estimator: k1, coefficient: 0.05, value_clamp: null}"
TRL = f"""
setting                 | ppo        | grpo       | gspo       | rloo               | sft        | reward | dpo
num_mini_batches        | 1          | 1          | 1          | 1                  | 1          | 1      | 1
epochs                  | 4          | 1          | 1          | 1                  | 1          | 1      | 1
samples_per_prompt      | 1          | 8          | 8          | 2                  | -          | -      | -
temperature             | 0.7        | 1.0        | 1.0        | 1.0                | -          | -      | -
top_p                   | 1.0        | 1.0        | 1.0        | 1.0                | -          | -      | -
top_k                   | 0          | 0          | 0          | 0                  | -          | -      | -
importance              | null       | null       | null       | null               | -          | -      | -
kl                      | {_TRL_KL}  | null       | null       | {_TRL_KL}          | -          | -      | -
clip_low                | 0.2        | 0.2        | 0.2        | 0.2                | -          | -      | -
clip_high               | 0.2        | 0.2        | 0.2        | 0.2                | -          | -      | -
dual_clip               | null       | null       | null       | null               | -          | -      | -
ratio                   | -          | token      | sequence   | token              | -          | -      | -
entropy_coefficient     | 0.0        | 0.0        | 0.0        | 0.0                | -          | -      | -
loss_aggregation        | token-mean | token-mean | token-mean | seq-mean-token-sum | token-mean | -      | -
reward_clip             | null       | null       | null       | null               | -          | -      | -
normalise_scores        | none       | none       | none       | none               | -          | -      | -
truncation              | none       | none       | none       | none               | -          | -      | -
overlong                | null       | null       | null       | null               | -          | -      | -
dynamic_sampling        | -          | null       | null       | null               | -          | -      | -
baseline                | -          | mean       | mean       | others             | -          | -      | -
scale                   | -          | group      | group      | none               | -          | -      | -
gamma                   | 1.0        | -          | -          | -                  | -          | -      | -
gae_lambda              | 0.95       | -          | -          | -                  | -          | -      | -
value_clip              | 0.2        | -          | -          | -                  | -          | -      | -
whiten                  | batch      | -          | -          | -                  | -          | -      | -
beta                    | -          | -          | -          | -                  | -          | -      | 0.1
loss                    | -          | -          | -          | -                  | -          | -      | sigmoid
label_smoothing         | -          | -          | -          | -                  | -          | -      | 0.0
*.name                  | adamw      | adamw      | adamw      | adamw              | adamw      | adamw  | adamw
*.betas                 | [0.9,0.999]| [0.9,0.999]| [0.9,0.999]| [0.9,0.999]        | [0.9,0.999]| [0.9,0.999] | [0.9,0.999]
*.eps                   | 1e-8       | 1e-8       | 1e-8       | 1e-8               | 1e-8       | 1e-8   | 1e-8
*.weight_decay          | 0.0        | 0.0        | 0.0        | 0.0                | 0.0        | 0.0    | 0.0
*.schedule              | linear     | linear     | linear     | linear             | linear     | linear | linear
*.warmup_steps          | 0          | 0          | 0          | 0                  | 0          | 0      | 0
*.max_grad_norm         | null       | 1.0        | 1.0        | 1.0                | 1.0        | 1.0    | 1.0
actor.learning_rate     | 3e-6       | 1e-6       | 1e-6       | 1e-6               | 2e-5       | -      | 1e-6
critic.learning_rate    | 3e-6       | -          | -          | -                  | -          | -      | -
reward.learning_rate    | -          | -          | -          | -                  | -          | 1e-4   | -
"""
DEEPSPEED_CHAT = """
setting                 | ppo        | sft        | reward     | dpo
num_mini_batches        | 1          | 1          | 1          | 1
epochs                  | 1          | 1          | 1          | 1
rollouts_per_step       | 1          | -          | -          | -
samples_per_prompt      | 1          | -          | -          | -
importance              | null       | -          | -          | -
kl                      | {place: reward, estimator: k1, coefficient: 0.1} | - | - | -
clip_low                | 0.2        | -          | -          | -
clip_high               | 0.2        | -          | -          | -
dual_clip               | null       | -          | -          | -
entropy_coefficient     | 0.0        | -          | -          | -
loss_aggregation        | token-mean | token-mean | -          | -
reward_clip             | 5.0        | -          | -          | -
normalise_scores        | none       | -          | -          | -
truncation              | none       | -          | -          | -
overlong                | null       | -          | -          | -
gamma                   | 1.0        | -          | -          | -
gae_lambda              | 0.95       | -          | -          | -
value_clip              | 0.2        | -          | -          | -
whiten                  | none       | -          | -          | -
beta                    | -          | -          | -          | 0.1
loss                    | -          | -          | -          | sigmoid
label_smoothing         | -          | -          | -          | 0.0
*.name                  | adamw      | adamw      | adamw      | adamw
*.betas                 | [0.9,0.95] | [0.9,0.95] | [0.9,0.95] | [0.9,0.95]
*.eps                   | 1e-8       | 1e-8       | 1e-8       | 1e-8
*.weight_decay          | 0.0        | 0.0        | 0.0        | 0.0
*.schedule              | cosine     | cosine     | cosine     | cosine
*.warmup_steps          | 100        | 0          | 0          | 0
*.max_grad_norm         | 1.0        | 1.0        | 1.0        | 1.0
actor.learning_rate     | 9.65e-6    | 1e-3       | -          | 1e-3
critic.learning_rate    | 5e-6       | -          | -          | -
reward.learning_rate    | -          | -          | 5e-5       | -
"""
SAFE_RLHF = """
setting                 | ppo                 | safe-rlhf           | sft        | reward     | dpo
num_mini_batches        | 1                   | 1                   | 1          | 1          | 1
epochs                  | 1                   | 1                   | 1          | 1          | 1
samples_per_prompt      | 1                   | 1                   | -          | -          | -
temperature             | 1.0                 | 1.0                 | -          | -          | -
top_p                   | 1.0                 | 1.0                 | -          | -          | -
importance              | null                | null                | -          | -          | -
kl                      | {place: reward, estimator: k1, coefficient: 0.02} | {place: reward, estimator: k1, coefficient: 0.02} | - | - | -
clip_low                | 0.2                 | 0.2                 | -          | -          | -
clip_high               | 0.2                 | 0.2                 | -          | -          | -
dual_clip               | null                | null                | -          | -          | -
entropy_coefficient     | 0.0                 | 0.0                 | -          | -          | -
loss_aggregation        | seq-mean-token-mean | seq-mean-token-mean | token-mean | -          | -
reward_clip             | 50.0                | 50.0                | -          | -          | -
normalise_scores        | none                | none                | -          | -          | -
truncation              | none                | none                | -          | -          | -
overlong                | null                | null                | -          | -          | -
ptx                     | null                | null                | -          | -          | -
gamma                   | 1.0                 | 1.0                 | -          | -          | -
gae_lambda              | 0.95                | 0.95                | -          | -          | -
value_clip              | 5.0                 | 5.0                 | -          | -          | -
whiten                  | none                | none                | -          | -          | -
lagrange                | -                   | {limit: 0.0, initial: 1.0, learning_rate: 0.1, maximum: null} | - | - | -
beta                    | -                   | -                   | -          | -          | 0.02
loss                    | -                   | -                   | -          | -          | sigmoid
label_smoothing         | -                   | -                   | -          | -          | 0.0
*.name                  | adamw               | adamw               | adamw      | adamw      | adamw
*.betas                 | [0.9, 0.95]         | [0.9, 0.95]         | [0.9,0.95] | [0.9,0.95] | [0.9,0.95]
*.eps                   | 1e-8                | 1e-8                | 1e-8       | 1e-8       | 1e-8
*.weight_decay          | 0.0                 | 0.0                 | 1e-6       | 1e-6       | 0.0
*.schedule              | cosine              | cosine              | cosine     | cosine     | cosine
*.warmup_steps          | 0                   | 0                   | 0          | 0          | 0
*.max_grad_norm         | 1.0                 | 1.0                 | 1.0        | 1.0        | 1.0
actor.learning_rate     | 1e-5                | 1e-5                | 2e-5       | -          | 2e-5
critic.learning_rate    | 5e-6                | 5e-6                | -          | -          | -
cost_critic.learning_rate | -                 | 5e-6                | -          | -          | -
reward.learning_rate    | -                   | -                   | -          | 2e-5       | -
"""
DAPO = """
setting                 | grpo
prompts_per_step        | 512
num_mini_batches        | 16
samples_per_prompt      | 16
dynamic_sampling        | {rounds: 3}
epochs                  | 1
temperature             | 1.0
top_p                   | 1.0
top_k                   | 0
clip_low                | 0.2
clip_high               | 0.28
dual_clip               | 10.0
entropy_coefficient     | 0.0
loss_aggregation        | token-mean
kl                      | null
overlong                | {penalty: 1.0, buffer_tokens: null}
truncation              | none
baseline                | mean
scale                   | group
*.name                  | adamw
*.learning_rate         | 1e-6
*.betas                 | [0.9, 0.999]
*.eps                   | 1e-8
*.weight_decay          | 0.1
*.schedule              | constant
*.warmup_steps          | 160
*.max_grad_norm         | 1.0
"""
DR_GRPO = """
setting                 | grpo
prompts_per_step        | 128
num_mini_batches        | 8
samples_per_prompt      | 8
epochs                  | 1
temperature             | 1.0
top_p                   | 1.0
kl                      | null
scale                   | none
baseline                | mean
loss_aggregation        | seq-mean-token-sum-norm
*.learning_rate         | 1e-6
*.schedule              | constant
"""
MATRICES = {
    "verl": VERL,
    "openrlhf": OPENRLHF,
    "trl": TRL,
    "deepspeed-chat": DEEPSPEED_CHAT,
    "safe-rlhf": SAFE_RLHF,
    "dapo": DAPO,
    "dr-grpo": DR_GRPO,
}
TRAINED = {
    "ppo": ("actor", "critic"),
    "safe-rlhf": ("actor", "critic", "cost_critic"),
    "reward": ("reward",),
}
"""Roles that ``*`` stands for, where it is not the actor alone."""


def expected(like: str) -> dict[tuple[str, str], Any]:
    """(algorithm, dotted key) → value of the matrix of ``like``."""
    head, *rows = (line.split("|") for line in MATRICES[like].strip().splitlines())
    algorithms = [name.strip() for name in head[1:]]
    found: dict[tuple[str, str], Any] = {}
    for name, *values in rows:
        assert len(values) == len(algorithms), name
        for algorithm, value in zip(algorithms, values, strict=True):
            if value.strip() != "-":
                found |= {(algorithm, key): read_yaml(value) for key in _keys(name.strip(), algorithm)}
    return found


def _keys(name: str, algorithm: str) -> list[str]:
    role, dot, setting = name.partition(".")
    if not dot:
        return [f"algorithm.{name}"]
    roles = TRAINED.get(algorithm, ("actor",)) if role == "*" else (role,)
    return [f"models.{each}.optimizer.{setting}" for each in roles]
