"""Files of a run: its directory, manifest, checkpoints and models, and how another run goes on from them."""
