"""Placement: models on ranks by ratios, rows on ranks by layouts, routes between layouts. Pure Python."""
