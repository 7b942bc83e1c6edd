"""Operator timings of Vidur and LLMServingSim: what of a file becomes which row."""

from __future__ import annotations

import gzip
from pathlib import Path

import numpy as np
import pytest

from tests.conftest import Run
from traces.errors import DraftsimError, FileError
from traces.importers.base import Options
from traces.importers.registry import import_log, looks_like
from traces.operators.dense import LAUNCH_S, fused_s
from traces.operators.devices import DEVICES
from traces.operators.shapes import find_architecture
from traces.operators.table import OPERATOR_COLUMNS, OperatorTable, rows_of
from traces.store.files import read_latency
from traces.store.operators import read_operators, write_operators

MLP = (
    "time_stats.emb.median,time_stats.input_layernorm.median,time_stats.attn_pre_proj.median,"
    "time_stats.attn_rope.median,time_stats.attn_post_proj.median,"
    "time_stats.post_attention_layernorm.median,time_stats.mlp_up_proj.median,"
    "time_stats.mlp_act.median,time_stats.mlp_down_proj.median,time_stats.add.median,"
    "num_tokens,num_tensor_parallel_workers\n"
    "0.003,0.004,0.065,0.005,0.025,0.006,0.116,0.004,0.060,0.002,1,1\n"
    "0.003,0.004,0.020,0.005,0.009,0.006,0.031,0.004,0.019,0.002,1,4\n"
)


def placed(folder: Path, name: str, text: str, packed: bool = False) -> Path:
    path = folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(gzip.compress(text.encode()) if packed else text.encode())
    return path


def table(name: str, *files: Path, **options: str) -> OperatorTable:
    found = import_log(name, files, Options(**options))
    assert isinstance(found, OperatorTable)
    return found


def seconds(found: OperatorTable, **of: object) -> list[float]:
    return [float(s) for s in found.of(**of)["seconds"]]


@pytest.mark.parametrize("packed", [False, True])
def test_vidurs_layer_by_folder_and_by_name(tmp_path: Path, packed: bool) -> None:
    path = placed(tmp_path, "a100/Llama-2-7b-hf/mlp.csv", MLP, packed)
    assert looks_like(path) == ["vidur"]
    found = table("auto", path)
    assert found.devices == ["a100-80gb"]
    assert found.models == [("llama-2-7b", 1), ("llama-2-7b", 4)]
    assert seconds(found, operator="qkv", tensor_parallel=1) == pytest.approx([65e-6])
    # Both norms of a layer, at their mean.
    norm = found.of(operator="norm", tensor_parallel=4)
    assert norm["per_layer"].tolist() == [2]
    assert norm["seconds"].tolist() == pytest.approx([5e-6])
    assert found.of(operator="embedding")["per_layer"].tolist() == [0, 0]
    # Another device's name begins this one's; the second folder names no known device.
    assert table("vidur", placed(tmp_path, "a100_40gb/llama-2-7b/mlp.csv", MLP)).devices == [
        "a100-40gb"
    ]
    with pytest.raises(FileError, match="name the GPU with --device"):
        table("vidur", placed(tmp_path, "h100_pcie/llama-2-7b/mlp.csv", MLP))
    bare = placed(tmp_path, "mlp.csv", MLP)
    with pytest.raises(FileError, match="name the GPU with --device"):
        table("vidur", bare)
    with pytest.raises(FileError, match="name it with --model"):
        table("vidur", bare, device="h100")
    assert table("vidur", bare, device="h100", model="llama-3-8b").models[0] == ("llama-3-8b", 1)


def test_all_reduce_within_one_machine_alone(tmp_path: Path) -> None:
    text = (
        "time_stats.all_reduce.min,time_stats.all_reduce.median,num_workers,size,devices_per_node\n"
        "0.010,0.043,2,2048,2\n0.030,0.050,2,2048,1\n0.4,0.401,4,42008576,4\n"
    )
    found = table("vidur", placed(tmp_path, "a100_dgx/all_reduce.csv", text))
    assert found.rows[["tensor_parallel", "size", "mode"]].to_numpy().tolist() == [
        [2, 2048, "a100_dgx"], [4, 42008576, "a100_dgx"],
    ]  # fmt: skip
    assert seconds(found) == pytest.approx([10e-6, 400e-6])
    assert "1 messages between machines" in found.meta["left_out"][0]


def test_norms_timed_launch_by_launch_are_corrected(tmp_path: Path) -> None:
    text = (
        "layer_name,input,kv_cache,tp_size,latency(ns)\n"
        "input_layernorm,1,0,1,17200\ninput_layernorm,2048,0,1,382200\nrope,1,0,1,25500\n"
        "post_layernorm,1,0,1,18200\nattn,1,0,1,6700\nq_proj,1,0,1,45800\nlm_head,1,0,1,1184800\n"
    )
    found = table("llmservingsim", placed(tmp_path, "RTX3090/Llama-3.1-8B/tp1/layers.csv", text))
    assert set(found.rows["operator"]) == {"norm", "rope", "q", "lm_head"}  # attn is a stub
    shape, device = find_architecture("llama-3.1-8b"), DEVICES["rtx-3090"]
    norm = found.of(operator="norm", tokens=1)
    assert norm["measured"].tolist() == [0]
    assert norm["seconds"].tolist() == pytest.approx([LAUNCH_S + 4 * 4096 * 2 / (0.8 * 936e9)])
    rope = fused_s("rope", shape, device, np.ones(1)).tolist()
    assert seconds(found, operator="rope") == pytest.approx(rope)
    assert found.of(operator="q")["measured"].tolist() == [1]
    assert seconds(found, operator="q") == pytest.approx([45.8e-6])


def test_the_older_attention_holds_the_cache_of_all_sequences(tmp_path: Path) -> None:
    names = "time_stats.attn_prefill.median,time_stats.attn_decode.median"
    text = (
        f"{names},num_tensor_parallel_workers,batch_size,prefill_chunk_size,kv_cache_size,is_prefill\n"
        "0.186,,1,1,1024,1024,True\n,0.1573,1,16,0,8192,False\n,0.0031,1,256,0,128,False\n"
    )
    found = table("llmservingsim", placed(tmp_path, "A6000/Llama-3.1-8B/tp1/attention.csv", text))
    assert found.rows[["tokens", "context", "batch", "batch_context"]].to_numpy().tolist() == [
        [1024, 0, 0, 0], [0, 0, 16, 512],
    ]  # fmt: skip
    assert set(found.rows["operator"]) == {"attention_unsplit"}


def test_skew_is_summed_over_iterations(tmp_path: Path) -> None:
    text = "n,pc,kp,kv_big,kv_mean,t_mean_us,t_max_us,t_skew_us\n32,0,0,512,140,129,321,153\n"
    path = placed(tmp_path, "RTX4090/Llama-3.1-8B/tp1/skew.csv", text)
    assert seconds(table("llmservingsim", path)) == pytest.approx([51e-6])
    placed(tmp_path, "RTX4090/Llama-3.1-8B/meta.yaml", "measurement_iterations: 5\n")
    found = table("llmservingsim", path)
    assert seconds(found) == pytest.approx([153e-6 / 5])
    assert found.rows["longest"].tolist() == [512]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("layer,tokens,time_us\nqkv_proj,1,x\n", "row 1: time_us is x, expected a number"),
        (
            "layer,tokens,time_us\nqkv_proj,1,9\nqkv_proj,1.5,9\n",
            "row 2: tokens is 1.5, expected a whole number from 0",
        ),
        ("layer,tokens,time_us\nqkv_proj,1,0\n", "row 1: time_us is 0, expected a number above 0"),
        (
            "layer_name,input,tp_size,latency(ns)\nattn,0,1,0\nq_proj,2.5,1,900\n",
            "row 2: input is 2.5, expected a whole number",  # a stub is left out, and counts
        ),
        (
            "branch,prefill_chunk,n_decode,kv_decode,step_us,saved_us\nfull,0,1,64,0,0\n",
            "row 1: step_us is 0, expected a number above 0",
        ),
        ("layer,tokens,time_us\nwhat,1,3\n", "unknown operator(s) what"),
        (
            "layer_name,input,tp_size,latency(ns)\nq_proj,1,0,900\n",
            "row 1: tp_size is 0, expected a whole number from 1",
        ),
        (
            "branch,prefill_chunk,n_decode,kv_decode,step_us,saved_us\nfull,0,1,64,9,-\n",
            "row 1: saved_us is -, expected a number",
        ),
        ("time_stats.attn_prefill.median,batch_size\n0.1,1\n", "is no profile of LLMServingSim"),
        ("layer,tokens,time_us\n", "holds no timings"),
        ("a,b\n1,2\n", "is no profile of LLMServingSim"),
    ],
)
def test_damaged_profiles_are_refused(tmp_path: Path, text: str, said: str) -> None:
    path = placed(tmp_path, "RTX4090/Llama-3.1-8B/tp1/dense.csv", text)
    with pytest.raises(FileError) as error:
        table("llmservingsim", path)
    assert said in str(error.value)
    assert str(path) in str(error.value)


def test_a_truncated_archive_is_refused(tmp_path: Path) -> None:
    path = placed(tmp_path, "a100/phi-2/mlp.csv.gz", MLP, packed=True)
    path.write_bytes(path.read_bytes()[:60])
    with pytest.raises(FileError, match="truncated"):
        table("vidur", path)


def test_operator_tables_are_written_and_read(tmp_path: Path, run: Run) -> None:
    path = placed(tmp_path, "a100/Llama-2-7b-hf/mlp.csv", MLP)
    out = tmp_path / "ops.parquet"
    done = run("import", "vidur", path, "--out", out)
    assert "18 timings on a100-80gb" in done.err
    again, first = read_operators(out), table("vidur", path)
    assert again.rows.equals(first.rows)
    assert again.meta == first.meta
    nowhere = rows_of(device=["h100"], operator=["qkv"], tensor_parallel=[0], seconds=[1e-5])
    with pytest.raises(DraftsimError, match="has operators on 0 GPUs, expected 1 or more"):
        OperatorTable(nowhere, {})
    bad = OperatorTable(rows_of(device=["h100"], operator=["qkv"], seconds=[1e-5]), {})
    write_operators(bad, out)
    assert list(read_operators(out).rows.columns) == list(OPERATOR_COLUMNS)
    with pytest.raises(FileError, match="is an operator table, not a latency table"):
        read_latency(out)


@pytest.mark.parametrize("kind", ["vidur", "llmservingsim"])
def test_every_shared_profile_is_read(kind: str, shared_data: Path) -> None:
    folder = shared_data / "gpu_ops" / kind
    if not folder.is_dir():
        pytest.skip("needs others' operator timings in ../shared/data/gpu_ops")
    files = sorted(f for f in folder.rglob("*.csv*") if "bench" not in f.parts)
    assert len(files) > 10
    for file in files:
        found = table(kind, file)
        assert len(found.rows) > 20, file
        assert found.devices[0] in DEVICES, file


@pytest.mark.parametrize(
    ("before", "after", "said"),
    [
        ("0.002,1,4", "0.002,1.5,4", "row 2: num_tokens is 1.5, expected a whole number"),
        ("0.002,1,4", "0,1,4", "row 2: time_stats.add.median is 0.0, expected a number above 0"),
    ],
)
def test_vidurs_counts_are_whole_and_its_times_positive(
    tmp_path: Path, before: str, after: str, said: str
) -> None:
    path = placed(tmp_path, "a100/Llama-2-7b-hf/mlp.csv", MLP.replace(before, after))
    with pytest.raises(FileError) as error:
        table("vidur", path)
    assert str(error.value).startswith(f"{path}: {said}")


def test_a_mean_of_tokens_may_have_a_fraction(tmp_path: Path) -> None:
    text = "n,pc,kp,kv_big,kv_mean,t_skew_us\n32,0,0,512,140.5,153\n"
    found = table("llmservingsim", placed(tmp_path, "RTX4090/Llama-3.1-8B/tp1/skew.csv", text))
    assert seconds(found, operator="attention") == pytest.approx([51e-6])
