"""The engine by iteration once more, compiled: for thousands of requests that arrive by themselves.

In an open system every arrival and every end is a change of the batch, so that spans are short and
what they save goes into their own making.  Here nothing is saved: `loop` goes iteration by
iteration, as `simulator.serving.engine` and `simulator.serving.scheduler` do and in their order,
over arrays that `engine` fills once, and `prices` reads the latency table as
`simulator.serving.cost` does.  numba turns both into machine code where it is installed
(``pip install '.[fast]'``); without it, spans serve.
"""
