"""From a spec to a plan: what every rank does, what it takes, and how a person reads it."""
