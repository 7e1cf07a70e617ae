"""Engine on Megatron-Core: tensor-parallel parts, pipeline stages and replicas, on any ranks."""

from warnings import filterwarnings

# its modules recommend libraries and settings
filterwarnings("ignore", category=UserWarning, module="megatron")
