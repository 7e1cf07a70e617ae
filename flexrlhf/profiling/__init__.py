"""``flexrlhf profile``: measurements on this machine for the cost model, with the engines that a run has."""
