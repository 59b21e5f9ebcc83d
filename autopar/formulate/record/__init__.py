"""From a solved scenario to the plan record, and from a record back to its prices."""
