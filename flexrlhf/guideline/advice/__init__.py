"""Choice of a placement: published rules, search and usual placements; from a request to a YAML."""
