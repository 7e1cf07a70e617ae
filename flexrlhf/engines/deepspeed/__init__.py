"""The engine on DeepSpeed's ZeRO."""
