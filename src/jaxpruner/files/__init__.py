"""Files: written whole or not at all, locked, read with errors that name them; trees of arrays on the way there."""
