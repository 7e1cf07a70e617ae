"""Python code of the user, by reference: ``path/to/file.py:name`` or ``module:name``."""
