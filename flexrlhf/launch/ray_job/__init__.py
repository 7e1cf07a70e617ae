"""Ranks as actors of a Ray cluster: their placement groups, what an actor does, and the driver's loop over them."""
