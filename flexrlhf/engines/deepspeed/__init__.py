"""Engine on DeepSpeed's ZeRO."""
