"""Submodules that can't be traced, each as one operator."""
