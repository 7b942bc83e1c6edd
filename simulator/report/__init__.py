"""One self-contained HTML page about a run, to hand to a colleague."""
