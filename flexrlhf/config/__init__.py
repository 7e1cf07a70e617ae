"""Everything that a user writes: the schema of the YAML, presets, reading and writing of files."""
