"""A plan as another framework's settings, where that framework can run it."""
