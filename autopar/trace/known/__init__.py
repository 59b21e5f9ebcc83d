"""What can be computed while a model is traced on tensors without data: numbers, masks, positions."""
