"""Parallel training written by hand with what torch has, to compare emitted modules with."""
