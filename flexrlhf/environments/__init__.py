"""Environments: replies to the policy's turns, in worker processes."""
