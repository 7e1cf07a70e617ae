"""Rows of a data file as prompts, demonstrations and preference pairs."""
