"""The results of a run in simulated time: metrics, rows, timelines and figures."""
