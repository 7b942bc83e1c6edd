"""What a draft would propose at every position of an output: the trace, checked and drawn."""
