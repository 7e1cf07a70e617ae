"""Settings of a run: the schema of the YAML, presets, reading and writing of files."""
