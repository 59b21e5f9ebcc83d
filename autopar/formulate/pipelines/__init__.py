"""Pipelines: where a model may be cut, what its stages can be, on which devices they stand."""
