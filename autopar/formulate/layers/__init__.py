"""What may be chosen inside layers, and its prices as tables that the engine eliminates."""
