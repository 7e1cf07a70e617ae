"""A run on its ranks: launch, worker, trainer, and what a rank writes."""
