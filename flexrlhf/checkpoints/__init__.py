"""Checkpoints: files from which a run goes on under any placement, number of ranks, engine and ZeRO stage."""
