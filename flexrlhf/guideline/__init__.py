"""What a plan will cost, before it runs: time of instructions, simulated timelines, and which placement to use."""
