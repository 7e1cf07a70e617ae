"""Jobs of AReaL."""
