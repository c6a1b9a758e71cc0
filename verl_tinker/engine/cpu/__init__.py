"""Everything that knows that a machine has no GPU. The rest of the engine does not ask."""
