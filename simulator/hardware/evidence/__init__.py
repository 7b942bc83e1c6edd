"""What others measured of single passes on GPUs: figures, with source and licence named."""

from simulator.hardware.evidence.llama_cpp import LLAMA_CPP
from simulator.hardware.evidence.papers import GAMMATUNE
from simulator.hardware.evidence.qwen import QWEN
from simulator.hardware.evidence.runs import Run, Study

STUDIES: tuple[Study, ...] = (GAMMATUNE, *QWEN, *LLAMA_CPP)

__all__ = ["STUDIES", "Run", "Study"]
