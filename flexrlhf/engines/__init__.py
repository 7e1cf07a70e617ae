"""Engines, which compute placed models. ``capabilities`` is pure; each engine's folder imports its library."""
