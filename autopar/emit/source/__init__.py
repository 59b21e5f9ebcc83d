"""Stages as Python files that a person can read and edit: written from a plan, and run in place of its own code."""
