"""Prompts, demonstrations and preference pairs from data files, and the quick start's corpus."""
