"""A run: a directory, what is done in it, and how it is opened again."""
