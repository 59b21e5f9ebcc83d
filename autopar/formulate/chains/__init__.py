"""The strategies of a model's layers over one mesh: the cheapest chains, their bounds and exact figures."""
