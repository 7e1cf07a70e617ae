"""Jobs of NeMo-RL."""
