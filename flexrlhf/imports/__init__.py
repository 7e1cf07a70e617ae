"""Job files of other systems, translated into a YAML: read as text, never executed."""
