"""Jobs of TRL."""
