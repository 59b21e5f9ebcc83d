"""The captured list of operators made functional, canonical and splittable."""
