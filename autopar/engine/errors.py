"""What the engine refuses: malformed numbers, and problems too large for the algorithm asked."""

from __future__ import annotations

from autopar.errors import AutoparError


class ProblemError(AutoparError):
    """The numbers handed to the engine contradict each other; the message names the entry and what is allowed."""


class TooWide(AutoparError):
    """A table of variable elimination would pass the bound; `entries` is its size. `relaxed_entries` gives a bound."""

    def __init__(self, variable: int, entries: int, max_entries: int) -> None:
        super().__init__(
            f"eliminating variable {variable} needs a table of {entries} entries; at most {max_entries} are allowed. "
            "Raise max_entries, give relaxed_entries for a bound, or solve this graph with label_ilp."
        )
        self.entries = entries
