"""From one list of operators to a chain of layers."""
