"""The serving loop in machine code: `loop` over the arrays of `arrays`, driven by `engine`."""
