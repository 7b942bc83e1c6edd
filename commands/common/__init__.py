"""The code that commands share: inputs, output, rankings and sources."""
