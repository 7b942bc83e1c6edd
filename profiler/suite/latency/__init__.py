"""The suite's cells: which passes and rounds of a pair are timed, and in what order."""
