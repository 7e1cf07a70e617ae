"""Who sits where: ratios to ranks, rows to ranks, routes between them. Pure Python."""
