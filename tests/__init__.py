"""Tests of autopar; the folders mirror the package."""
