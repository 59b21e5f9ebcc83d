"""Offline search jobs: files that ask for many plans, and the processes that find them."""
