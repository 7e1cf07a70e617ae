"""Rollout engine on vLLM."""
