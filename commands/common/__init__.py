"""What commands share: inputs, output, rankings and sources."""
