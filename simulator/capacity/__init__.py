"""How many replicas keep the targets of a load, under which policy, and what that costs.

>>> from simulator.capacity import parse_targets
>>> parse_targets("ttft=0.5,tpot=0.05,p=0.9")
Targets(ttft_s=0.5, tpot_s=0.05, share=0.9)
"""

from simulator.capacity.plan import plan
from simulator.targets import Targets, parse_targets

__all__ = ["Targets", "parse_targets", "plan"]
