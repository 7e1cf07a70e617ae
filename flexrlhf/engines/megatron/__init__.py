"""Engine on Megatron-Core: tensor-parallel parts, pipeline stages and replicas, on any ranks."""
