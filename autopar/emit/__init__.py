"""From a plan and a model to the module that runs."""
