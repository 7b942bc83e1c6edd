"""What a run in simulated time leaves behind: metrics, rows, timelines and figures."""
