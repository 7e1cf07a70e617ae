"""Parameters of a model by name and shape, the part of each that a rank stores, and how weights are resharded."""
