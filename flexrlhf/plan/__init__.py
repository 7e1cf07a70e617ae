"""Plans: from a spec to the work and the memory of every rank, and its text."""
