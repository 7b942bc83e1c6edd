"""Reading scrapes of a server's ``/metrics``; whose they are, the names say.

One scrape counts from the server's start; two, before and after, count between them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path

from traces.errors import FileError
from traces.importers.base import Options
from traces.importers.scrapes.drafts import read_drafts
from traces.importers.scrapes.sglang import read_sglang
from traces.importers.scrapes.tensorrt_llm import read_tensorrt_llm
from traces.importers.totals import Totals
from traces.store.text import read_text

SERVERS: Mapping[str, Callable[[Sequence[Path]], Totals]] = {
    "vllm:spec_decode_": partial(read_drafts, server="vllm"),
    "llamacpp:spec_decode_": partial(read_drafts, server="llamacpp"),
    "sglang:spec_": read_sglang,
    "trtllm_spec_decode_": read_tensorrt_llm,
}
"""How the names of a server's metrics of speculation begin, and who reads them."""


class Prometheus:
    """``/metrics`` of vLLM, SGLang, TensorRT-LLM or llama.cpp's server."""

    name = "prometheus"
    summary = (
        "/metrics of vLLM, SGLang, TensorRT-LLM or llama.cpp's server; two files: before and after"
    )
    takes: tuple[str, ...] = ()

    def sniff(self, text: str) -> bool:
        return bool(_servers(text)) and not text.lstrip().startswith(("{", "["))

    def read(self, files: Sequence[Path], options: Options) -> Totals:
        del options
        found = [_servers(read_text(file)) for file in files]
        if len(found[-1]) != 1 or any(other != found[-1] for other in found):
            told = sorted({name for names in found for name in names}) or ["none"]
            raise FileError(
                f"{files[-1]}: expected /metrics of one server with speculative decoding switched "
                f"on, whose names begin with {' or '.join(SERVERS)}; found {', '.join(told)}"
            )
        return SERVERS[found[-1][0]](files)


def _servers(text: str) -> list[str]:
    lines = text.splitlines()
    return [begin for begin in SERVERS if any(line.startswith(begin) for line in lines)]
