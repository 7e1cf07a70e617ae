"""How the systems of the field place and run the calls of a step: what published steps are compared with."""
