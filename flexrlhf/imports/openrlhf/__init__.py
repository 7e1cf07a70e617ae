"""Jobs of OpenRLHF."""
