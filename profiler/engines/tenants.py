"""Schedulers in addition to an engine's own: loads take turns in it, each as if it were alone.

Written against vLLM 0.32: a runner takes requests out of its batch that a scheduler's plan leaves
out, and in again when they are planned (v1/worker/gpu_model_runner.py, ``_update_states``).
"""

from __future__ import annotations

import itertools
from collections.abc import Container, Iterator, Sequence
from contextlib import contextmanager
from typing import Any


@contextmanager
def lent(core: Any, blocks: Sequence[int]) -> Iterator[list[Any]]:
    """Yield schedulers like that of vLLM's engine `core`, each with that many blocks of its own.

    Those blocks of the cache are no longer the core's scheduler's until the block is left.  None
    of its requests may be running.
    """
    pool = _pool(core.scheduler)
    first = pool.num_gpu_blocks - sum(blocks)
    schedulers = [_like(core) for _ in blocks]
    ends = itertools.accumulate(blocks, initial=first)
    for scheduler, (begin, end) in zip(schedulers, itertools.pairwise(ends), strict=True):
        _keep_only(_pool(scheduler), range(begin, end))
    held = _keep_only(pool, range(first))
    try:
        yield schedulers
    finally:
        pool.free_blocks(held)


def _like(core: Any) -> Any:
    """Another scheduler with all that `core` gave its own."""
    from vllm.v1.core.kv_cache_utils import resolve_kv_cache_block_sizes

    own = core.scheduler
    block_size, hash_block_size = resolve_kv_cache_block_sizes(
        own.kv_cache_config, core.vllm_config
    )
    return type(own)(
        vllm_config=core.vllm_config, kv_cache_config=own.kv_cache_config,
        structured_output_manager=core.structured_output_manager,
        include_finished_set=own.finished_req_ids_dict is not None, log_stats=core.log_stats,
        block_size=block_size, hash_block_size=hash_block_size,
    )  # fmt: skip


def _pool(scheduler: Any) -> Any:
    return scheduler.kv_cache_manager.block_pool


def _keep_only(pool: Any, ids: Container[int]) -> list[Any]:
    """Take all blocks from an idle pool but those; what was taken."""
    every = pool.get_new_blocks(pool.get_num_free_blocks())
    pool.free_blocks([block for block in every if block.block_id in ids])
    return [block for block in every if block.block_id not in ids]
