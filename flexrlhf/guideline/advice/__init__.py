"""Which placement to use: rules, search, the usual placements; from a request to a YAML."""
