"""Jobs of verl."""
