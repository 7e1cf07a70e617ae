"""Other engines' own code next to this project's. Not part of the tests: it needs their packages."""
