"""Published RLHF systems: their placements, engines and constants, and ReaL's space of one placement per call."""
