"""Plans: from a spec to what every rank does and needs, and the text of it."""
