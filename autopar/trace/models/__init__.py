"""Models by specification: dims, shipped names, transformers configurations, functions in files."""
