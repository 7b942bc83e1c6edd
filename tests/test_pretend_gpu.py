"""The pretended GPU: it refuses what CUDA refuses, and counts what makes the host wait."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from tests.pretend_gpu import CUDA, PretendedError, PretendedGPU, pretended


@pytest.fixture
def gpu() -> Iterator[PretendedGPU]:
    with pretended() as device:
        yield device


def test_what_cuda_refuses_is_refused(gpu: PretendedGPU) -> None:
    here, there = torch.ones(3, device="cuda"), torch.ones(3)
    assert here.device == (here + 1).device == here[:2].device == here.new_zeros(1).device == CUDA
    assert there.device.type == here.cpu().device.type == "cpu"
    with pytest.raises(PretendedError, match="at least two devices"):
        here + there
    with pytest.raises(PretendedError, match="at least two devices"):
        torch.cat([here, there])
    assert (here * torch.tensor(2.0)).device == CUDA  # a number may lie on the host
    with pytest.raises(TypeError, match="can't convert cuda"):
        here.numpy()
    with pytest.raises(TypeError, match="can't convert cuda"):
        __import__("numpy").asarray(here)
    with pytest.raises(PretendedError, match="generator"):
        torch.rand(2, generator=torch.Generator(), device="cuda")
    assert torch.rand(2, generator=torch.Generator("cuda"), device="cuda").device == CUDA


@pytest.mark.parametrize("inference", [False, True])
def test_what_makes_the_host_wait_is_counted(gpu: PretendedGPU, inference: bool) -> None:
    here = torch.arange(4, device="cuda")
    for wait in (
        here.tolist, lambda: int(here[0]), lambda: bool((here > 2).any()),
        lambda: here[here > 1], here.nonzero, here.cpu, lambda: here[here[1]],
        lambda: torch.tensor([1], device="cuda"), lambda: torch.zeros(1).to("cuda"),
        lambda: torch.zeros(1).to("cuda", non_blocking=True), lambda: here.new_tensor([1]),
        lambda: here[:1].copy_(torch.ones(1)), lambda: torch.ones(1).copy_(here[:1]),
        lambda: here.__setitem__(0, torch.tensor(1)), lambda: here[torch.tensor([0])],
    ):  # fmt: skip
        with gpu.counted() as waits, torch.inference_mode(inference):
            wait()
        assert len(waits) == 1, waits
    with gpu.counted() as waits:
        torch.zeros(1).pin_memory().to("cuda", non_blocking=True)
        here.masked_fill(here > 1, 0).index_select(0, here[:1])
        torch.where(here > 1, -torch.inf, here.float()).softmax(-1)
    assert not waits


def test_a_capture_may_not_wait_and_replays_its_own_buffers(gpu: PretendedGPU) -> None:
    given = torch.zeros(2, device="cuda")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        made = given * 2 + 1
    assert made.isnan().all()
    given.copy_(torch.tensor([1.0, 5.0], device="cuda"))
    graph.replay()
    assert made.tolist() == [3, 11]
    for wrong in (made.tolist, made.cpu, torch.cuda.synchronize, lambda: given[made > 0]):
        with pytest.raises(PretendedError, match="capturing"), torch.cuda.graph(graph):
            wrong()


def test_graphs_of_one_pool_lose_what_they_computed_to_each_other(gpu: PretendedGPU) -> None:
    given = torch.ones(2, device="cuda")
    pool, graphs, made = torch.cuda.graph_pool_handle(), [], []
    for factor in (2, 3, 5):
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=pool if factor != 5 else None):
            made.append(given * factor)
        graphs.append(graph)
    for number in (0, 1, 1, 0, 1):
        graphs[2].replay()
        graphs[number].replay()
        assert made[number].tolist() == [(2, 3)[number]] * 2
        assert made[1 - number].isnan().all()
        assert made[2].tolist() == [5, 5]
