"""A real server around the engine: its process, a client, and what its iterations took.

`process` starts ``vllm serve``, `client` sends it requests, `record` runs inside it and writes
down what its engine does, `log` reads that, `share` says what the server adds to the engine, and
`loads` runs loads with all of these.
"""
