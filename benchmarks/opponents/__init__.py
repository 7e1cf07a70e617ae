"""Recommendations of ``flexrlhf advise`` against placements and settings outside its search."""
