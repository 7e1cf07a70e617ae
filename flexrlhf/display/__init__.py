"""Display of a run while it is going: events of rank 0, as plain lines or on a terminal."""
