"""``flexrlhf profile``: measure on this machine what the cost model needs, with the engines that a run has."""
