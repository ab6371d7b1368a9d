"""memfit explain as a command: what it reads, what it refuses, and how remedies are shown."""

from __future__ import annotations

import gzip
import io
import json
import pickle
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from rich.console import Console

from memfit import cli
from memfit.explain import Evidence
from memfit.nouns.finding import Finding, Remedy
from memfit.report.explain import explain_view
from memfit.units import GIB

NOW = (
    "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 23.64 GiB "
    "of which 1.20 GiB is free."
)
Captured = pytest.CaptureFixture[str]


def run(capsys: Captured, *words: str) -> tuple[int, str, str]:
    code = cli.main(["explain", *words])
    return code, *capsys.readouterr()


@pytest.mark.parametrize(
    "text", ["my training run ran out of memory, what now", "CUDA OOM again", "there was not enough memory"]
)
def test_who_says_that_memory_ran_out_is_not_told_otherwise(text: str, tmp_path: Path, capsys: Captured) -> None:
    (tmp_path / "log").write_text(text)
    code, out, _ = run(capsys, str(tmp_path / "log"))
    assert code == 4 and "not known" in out.lower().replace("-", " ")


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"step 1 loss 2.31\nstep 2 loss 2.20\ndone\n", "no out-of-memory in it"),
        (b'Traceback (most recent call last):\n  File "train.py", line 3, in <module>\nKeyError: 1\n',
         "no out-of-memory in it"),
        (b"note: there is no NVIDIA driver in this machine\nKeyError: 1\nmemfit watch, train.py, 24 s, no card\n",
         "no out-of-memory in it"),
        (b"\x7fELF\x02\x01\0\0 orphan process", "is a binary file"),
    ],
)  # fmt: skip
def test_where_nothing_ran_out_there_is_nothing_to_explain(
    content: bytes, said: str, tmp_path: Path, capsys: Captured
) -> None:
    path = tmp_path / "train.log"
    path.write_bytes(content)
    code, out, err = run(capsys, str(path))
    assert (code, out) == (2, "") and said in err and "hint: give the log" in err


@pytest.mark.parametrize("encoding", ["utf-16", "utf-8-sig"])  # as Windows' shells write what a program prints
def test_a_log_is_read_as_windows_writes_it(encoding: str, tmp_path: Path, capsys: Captured) -> None:
    path = tmp_path / "train.log"
    path.write_text(NOW, encoding=encoding)
    assert json.loads(run(capsys, str(path), "--json")[1])["messages"][0]["tried"] == 2 * GIB


def test_a_log_is_read_as_logrotate_packs_it(tmp_path: Path, capsys: Captured) -> None:
    path = tmp_path / "train.log.gz"
    packed = gzip.compress((NOW + "\n" + "epoch 1\n" * 1000).encode())
    path.write_bytes(packed)
    assert json.loads(run(capsys, str(path), "--json")[1])["messages"][0]["tried"] == 2 * GIB
    path.write_bytes(packed[:-20])
    code, out, err = run(capsys, str(path))
    assert (code, out) == (2, "") and "hint:" in err


@pytest.mark.parametrize("message", [NOW, "epoch 1\n" * 99 + NOW])
def test_a_message_in_place_of_a_file_has_a_hint_that_works(message: str, capsys: Captured) -> None:
    code, out, err = run(capsys, message)
    assert (code, out) == (2, "")
    hint = err.partition("hint: ")[2].strip()
    command = hint.replace("memfit", f"{shlex.quote(sys.executable)} -m memfit")
    said = subprocess.run(command, shell=True, capture_output=True, text=True, check=False)
    assert said.returncode in (0, 4) and "2.00 GiB" in said.stdout


def test_a_log_is_explained_on_a_page_too(tmp_path: Path, capsys: Captured) -> None:
    (tmp_path / "train.log").write_text(f"    attn_weights = eager_attention_forward(q, k)\n{NOW}")
    code, out, _ = run(capsys, str(tmp_path / "train.log"), "--html", str(tmp_path / "x.html"))
    html = (tmp_path / "x.html").read_text()
    assert code == 0 and "train.log" in out and "train.log" in html and "<h2>What to change</h2>" in html
    assert ">saves<" not in html  # nothing is priced without a model


def test_the_next_plan_may_change_what_the_planner_changed(tmp_path: Path, capsys: Captured) -> None:
    (tmp_path / "train.log").write_text(f"    attn_weights = eager_attention_forward(q, k)\n{NOW}")
    words = ["--model", "llama-2-7b", "--gpu", "a100-40gb", "--method", "lora", "--attention", "eager"]
    said = run(capsys, str(tmp_path / "train.log"), *words, "--sequence-length", "8k")[1]
    planner = next(line for line in said.splitlines() if line.startswith("planner:"))
    following = next(line for line in said.splitlines() if "memfit plan" in line)
    assert "attention sdpa" in planner and "--attention" not in following
    assert "--method lora" in following and "--sequence-length 8192" in following


def test_without_a_model_the_answer_says_how_to_price_it(tmp_path: Path, capsys: Captured) -> None:
    (tmp_path / "train.log").write_text(NOW)
    assert "--model MODEL --gpu CARD" in run(capsys, str(tmp_path / "train.log"))[1]


def test_a_run_that_made_all_logits_had_no_fused_loss(tmp_path: Path, capsys: Captured) -> None:
    log = tmp_path / "train.log"
    log.write_text(
        '  File "/venv/site-packages/transformers/loss/loss_utils.py", line 60, in ForCausalLMLoss\n'
        f"    logits = logits.float()\n{NOW}"
    )
    code, out, err = run(capsys, str(log), "--model", "qwen2.5-0.5b", "--micro-batch", "4", "--json")
    (fused, *_) = json.loads(out)["findings"][0]["remedies"]
    assert code == 0 and "--trainer transformers" in err
    assert fused["change"] == [["loss", "fused"]] and fused["saves"] > 2 * GIB
    assert "transformers:" not in run(capsys, str(log), "--model", "qwen2.5-0.5b", "--loss", "fused")[2]


def test_a_remedy_that_saves_nothing_is_named_as_such() -> None:
    remedies = (Remedy("this", "no cost", (), 3 * GIB), Remedy("that", "no cost", (), 0))
    finding = Finding("capacity", "too much", (), (), remedies, "likely", "")
    out = io.StringIO()
    Console(file=out, width=100).print(explain_view("log", Evidence(), [finding]))
    shown = out.getvalue()
    assert "saves nothing in the run as described: that" in shown and " 0 B" not in shown and "3.00 GiB" in shown


@pytest.mark.parametrize(
    ("text", "asked"),
    [
        ("it ran out of memory", ("when it failed", "whole message", "traceback")),
        ("CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 23.69 GiB of which 1.2 GiB is "
         "free. in evaluation_loop",
         ("traceback",)),
        ('File "train.py", line 3, in main\n    loss.backward()\ntorch.OutOfMemoryError: CUDA out of memory.',
         ("whole message",)),
        ("rank 3 exited with exit code -9. Killed", ("when it failed",)),  # leaves neither sizes nor frames
        ("slurmstepd: error: Detected 1 oom-kill event(s). Killed", ()),  # says its cause itself
    ],
)  # fmt: skip
def test_what_a_report_lacks_is_asked_for(
    text: str, asked: tuple[str, ...], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "log.txt").write_text(text)
    cli.main(["explain", str(tmp_path / "log.txt")])
    said = " ".join(capsys.readouterr().out.split()).partition("would show more: ")[2]
    assert [word in said for word in ("when it failed", "whole message", "traceback")] == [
        word in asked for word in ("when it failed", "whole message", "traceback")
    ]
    cli.main(["explain", str(tmp_path / "log.txt"), "--json"])
    assert len(json.loads(capsys.readouterr().out)["lacks"]) == len(asked)


PROCESSES = (
    "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 20.00 MiB. GPU 0 has a total capacity of 79.15 GiB "
    "of which 15.12 MiB is free. Process 3021 has {} memory in use. Process 77120 has {} memory in use. Of the "
    "allocated memory 15.80 GiB is allocated by PyTorch, and 310.22 MiB is reserved by PyTorch but unallocated."
)


@pytest.mark.parametrize(
    ("first", "second", "other"), [("62.40 GiB", "16.71 GiB", 3021), ("16.71 GiB", "62.40 GiB", 77120)]
)
def test_the_other_process_is_the_one_that_is_not_ours(
    first: str, second: str, other: int, tmp_path: Path, capsys: Captured
) -> None:
    (tmp_path / "log.txt").write_text(PROCESSES.format(first, second))
    _, out, _ = run(capsys, str(tmp_path / "log.txt"))
    assert "OTHER-PROCESS" in out and f"62.4 GiB of the card are held by process {other}" in out


@pytest.mark.parametrize("asked", ["86.00 MiB", "512.00 MiB"])
def test_a_card_full_of_tensors_is_not_in_pieces(asked: str, tmp_path: Path, capsys: Captured) -> None:
    (tmp_path / "log.txt").write_text(
        f"torch.OutOfMemoryError: CUDA out of memory. Tried to allocate {asked}. GPU 0 has a total capacity of 23.64 "
        "GiB of which 42.06 MiB is free. Of the allocated memory 23.05 GiB is allocated by PyTorch, and 70.41 MiB is "
        "reserved by PyTorch but unallocated."
    )
    code, out, _ = run(capsys, str(tmp_path / "log.txt"))
    assert (
        code == 4
        and "NOT KNOWN" in out
        and "tensors of this process fill 98% of the card" in out
        and "gradient_checkpointing" in out
    )
    assert "FRAGMENTATION" not in out and "expandable" not in out


@pytest.mark.parametrize(
    ("text", "remedy", "not_so"),
    [
        ("ValueError: The model's max seq len (131072) is larger than the maximum number of tokens that can be stored "
         "in KV cache (28512).",
         "a larger gpu_memory_utilization", "a smaller vllm_gpu_memory"),
        ("RuntimeError: DataLoader worker (pid 71) is killed by signal: Bus error. It is possible that dataloader's "
         "workers are out of shared memory. Please try to raise your shared memory limit.", "--shm-size", "sbatch"),
        ("slurmstepd: error: Detected 1 oom-kill event(s). Some of your processes may have been killed by the cgroup "
         "out-of-memory handler.",
         "sbatch --mem", "--shm-size"),
        ("OOM when allocating tensor with shape[32,512,128,128] and type float on "
         "/job:localhost/replica:0/task:0/device:GPU:0 by allocator GPU_0_bfc [Op:Conv2D]",
         "TensorBoard's profiler", "_record_memory_history"),
        ("jaxlib.xla_extension.XlaRuntimeError: RESOURCE_EXHAUSTED: Out of memory while trying to allocate 17179869184 "
         "bytes.",
         "jax.profiler.save_device_memory_profile", "_record_memory_history"),
        ("RuntimeError: MPS backend out of memory (MPS allocated: 17.85 GB, other allocations: 384.00 KB, max allowed: "
         "18.13 GB). Tried to allocate 1.50 GB on private pool.", "torch.mps", "_record_memory_history"),
    ],
)  # fmt: skip
def test_a_message_that_asks_for_something_gets_it(
    text: str, remedy: str, not_so: str, tmp_path: Path, capsys: Captured
) -> None:
    (tmp_path / "log.txt").write_text(text)
    _, out, _ = run(capsys, str(tmp_path / "log.txt"))
    assert remedy in out and not_so not in out


def test_scores_of_attention_are_recognised_by_their_size(tmp_path: Path, capsys: Captured) -> None:
    (tmp_path / "log.txt").write_text(
        "ColossalAI Llama2 7B, batch_size=16, max_length=4096, flash attention off, in forward. CUDA out of memory. "
        "Tried to allocate 32.00 GiB (GPU 6; 79.20 GiB total capacity; 54.76 GiB already allocated; 22.56 GiB free; "
        "55.44 GiB reserved in total by PyTorch)"
    )
    _, out, _ = run(capsys, str(tmp_path / "log.txt"))
    assert "ATTENTION" in out and "32.0 GiB are 16 x 32 heads x 4,096 x 4,096 x 4 B" in out


FOREACH = (
    'Traceback (most recent call last):\n  File "run.py", line 20, in main\n    optimizer.step()\n'
    '  File "/x/site-packages/torch/optim/adamw.py", line 600, in _multi_tensor_adamw\n'
    "    torch._foreach_sqrt(exp_avg_sqs)\n"
    "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 224.00 MiB. GPU 0 has a total capacity of 44.53 GiB "
    "of which 58.94 MiB is free. Of the allocated memory 43.90 GiB is allocated by PyTorch, and 90.20 MiB is reserved "
    "by PyTorch but unallocated."
)


def test_the_run_that_is_priced_is_said_and_is_the_one_that_failed(tmp_path: Path, capsys: Captured) -> None:
    (tmp_path / "log.txt").write_text(FOREACH)
    _, out, err = run(capsys, str(tmp_path / "log.txt"), "--model", "llama-3.2-3b", "--gpu", "l40s")
    said = " ".join(err.split())
    assert "--optimizer adamw-foreach: the step that failed" in said and "computed for full fine-tuning" in said
    fused = next(line for line in out.splitlines() if "adamw_torch_fused" in line)
    assert "GiB" in fused and "saves nothing" not in out
    _, _, err = run(
        capsys, str(tmp_path / "log.txt"), "--model", "llama-3.2-3b", "--gpu", "l40s", "--optimizer", "adamw"
    )
    assert "adamw-foreach" not in err


def test_a_recipe_that_does_not_fit_is_not_sold_as_one_that_does(tmp_path: Path, capsys: Captured) -> None:
    (tmp_path / "log.txt").write_text(NOW)
    _, out, _ = run(capsys, str(tmp_path / "log.txt"), "--model", "qwen2.5-7b", "--gpu", "rtx-4090", "--method", "full")
    told = " ".join(out.split())
    assert "planner:" not in told or "too much for the card" in told
    _, out, _ = run(capsys, str(tmp_path / "log.txt"), "--model", "qwen2.5-0.5b", "--gpu", "rtx-4090")
    assert "too much for the card" not in out


def test_one_change_has_one_price(tmp_path: Path, capsys: Captured) -> None:
    layer = "/x/site-packages/transformers/models/llama/modeling_llama.py"
    trace = (
        f'Traceback (most recent call last):\n  File "{layer}", line 7, in forward\n'
        "    hidden_states = self.mlp(hidden_states)\n"
    )
    small = NOW.replace("2.00 GiB", "344.00 MiB").replace("1.20 GiB", "211.00 MiB")
    (tmp_path / "log.txt").write_text(trace + small)
    for method in ("lora", "full"):
        _, out, _ = run(
            capsys, str(tmp_path / "log.txt"), "--model", "llama-3.1-8b", "--gpu", "rtx-4090", "--method", method
        )
        priced = next(line for line in out.splitlines() if line.startswith("gradient_checkpointing=True"))
        whole = next(line for line in out.splitlines() if line.startswith("planner: checkpointing full:"))
        size = " ".join(whole.split()[3:5])
        assert size in priced and ("(enough)" in priced) == ("too much" not in whole)
    assert "memfit plan llama-3.1-8b --gpu rtx-4090 --method full" in out


@pytest.mark.parametrize(
    "code",
    [
        "scores = q @ k.transpose(-2, -1)",
        "att = torch.matmul(query, key.transpose(2, 3))",
        "s = torch.einsum('bhqd,bhkd->bhqk', q, k)",
    ],
)
def test_attention_written_by_hand_is_known_by_its_product(code: str, tmp_path: Path, capsys: Captured) -> None:
    (tmp_path / "log.txt").write_text(
        f'Traceback (most recent call last):\n  File "train.py", line 40, in attn\n    {code}\n'
        "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 20.00 GiB. GPU 0 has a total capacity of "
        "39.39 GiB of which 12.00 GiB is free."
    )
    _, out, _ = run(capsys, str(tmp_path / "log.txt"))
    assert "ATTENTION" in out and "train.py:40" in out


def test_what_a_log_has_on_is_priced_as_on(tmp_path: Path, capsys: Captured) -> None:
    """A run with LoRA and ZeRO-3 is no full fine-tune on one card, and is not told to do what it does."""

    def told(log: str, *flags: str) -> str:
        (tmp_path / "log").write_text(f"{log}\n{NOW}\n")
        _, out, err = run(capsys, str(tmp_path / "log"), "--model", "qwen2.5-7b", "--gpu", "rtx-4090", *flags)
        return " ".join(f"{out} {err}".split())

    lora = "gradient_checkpointing=True\noptim=adamw_bnb_8bit\nLoraConfig(r=16)"
    assert "computed for LoRA r16" in told(lora) and "AdamW 8-bit" in told(lora)
    assert "computed for full fine-tuning" in told(lora, "--method", "full")  # a flag stands over the log
    zero = told("world_size: 4\nzero_stage: 3\nLoraConfig(r=16)")
    assert "on 4 GPUs" in zero and "shard parameters" in zero and "shard the weights" not in zero
    assert "computed for full fine-tuning" in told("finetuning_type: full\nlora_rank: 8")


def test_a_snapshot_without_a_tensor_shows_no_cause(tmp_path: Path, capsys: Captured) -> None:
    failed = {"action": "oom", "addr": 0, "size": 512, "stream": 0, "device_free": 0}
    (tmp_path / "oom.pickle").write_bytes(pickle.dumps({"segments": [], "device_traces": [[failed]]}))
    code, out, _ = run(capsys, str(tmp_path / "oom.pickle"))
    assert code == 4 and out.splitlines()[2].startswith("NOT KNOWN")
