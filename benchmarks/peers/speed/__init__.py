"""Step time of PPO and GRPO by flexrlhf and by TRL's trainers: same prompts, weights, lengths and settings."""
