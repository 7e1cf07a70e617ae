"""Engine on PyTorch's own FSDP2 and tensor parallelism."""
