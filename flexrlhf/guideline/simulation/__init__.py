"""A plan on paper: its instructions priced, the trainer's loop played, a run compared with it."""
