"""memfit explain by numbers: requests no card serves, who holds most, the run's own estimate, memfit's own output.

Each kind has the log that was explained wrongly, and logs of other libraries and sizes that it stands for.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from memfit import cli
from memfit.explain import explain, read_text
from memfit.explain.evidence import Estimate, Evidence
from memfit.explain.memory import Group, Memory
from memfit.nouns.finding import Cause, Finding
from memfit.units import GIB, MIB, human

Captured = pytest.CaptureFixture[str]
LIB = "/env/lib/python3.11/site-packages/"
TRACE = "Traceback (most recent call last):\n"
DRIVER = "RuntimeError: CUDA error: out of memory\nCUDA kernel errors might be asynchronously reported\n"


def frame(path: str, function: str, code: str) -> str:
    return f'  File "{path}", line 7, in {function}\n    {code}\n'


def oom(tried: str, total: str, free: str, allocated: str, process: str = "", kind: str = "CUDA") -> str:
    """Return a message of PyTorch; `process` is all that this process holds."""
    own = f"Including non-PyTorch memory, this process has {process} memory in use. " if process else ""
    return (
        f"torch.OutOfMemoryError: {kind} out of memory. Tried to allocate {tried}. GPU 0 has a total capacity of "
        f"{total} of which {free} is free. {own}Of the allocated memory {allocated} is allocated by PyTorch, and "
        "300.00 MiB is reserved by PyTorch but unallocated."
    )


def first(text: str) -> Finding:
    return explain(read_text(text))[0]


def evidence_of(finding: Finding) -> str:
    return " ".join(proof.text for proof in finding.evidence)


def remedies_of(finding: Finding) -> str:
    return " ".join(remedy.text for remedy in finding.remedies)


# ---- one request ----------------------------------------------------------------------------------------------------

APU = "[ 4.97] amdgpu 0000:c5:00.0: amdgpu: VRAM: {}M 0x0000008000000000 - 0x00000097FFFFFFFF ({}M used)\n"
LIGHTNING = (
    "Epoch 0: 100%|##########| 3910/3910 [19:41<00:00,  3.31it/s]\n" + TRACE
    + frame(LIB + "pytorch_lightning/loops/evaluation_loop.py", "_evaluation_step", "self.trainer.call(hook)")
    + frame(LIB + "torchmetrics/retrieval/base.py", "compute", "preds = dim_zero_cat(self.preds)")
)  # fmt: skip
IPEX = (
    "RuntimeError: Current platform can NOT allocate memory block with size larger than 4GB! Tried to allocate {} "
    "(GPU  0; 15.56 GiB total capacity; 0 bytes already allocated; 0 bytes reserved in total by PyTorch)"
)
XPU = (
    "torch.OutOfMemoryError: XPU out of memory. Tried to allocate 5.00 GiB. GPU 0 has a total capacity of 15.56 GiB. "
    "Of the allocated memory {} is allocated by PyTorch, and 80.00 MiB is reserved by PyTorch but unallocated."
)


@pytest.mark.parametrize(
    ("text", "size"),
    [
        (oom("16.00 GiB", "15.24 GiB", "15.09 GiB", "0 bytes", kind="HIP"), 16.0),
        (oom("40.00 GiB", "23.65 GiB", "23.10 GiB", "0 bytes", "500.00 MiB"), 40.0),
        (LIGHTNING + "RuntimeError: Invalid buffer size: 261.94 GB", 261.94),
        (TRACE + frame("fit.py", "step", "y = x @ x.T") + "RuntimeError: Invalid buffer size: 18.63 GiB", 18.63),
        (IPEX.format("6.85 GiB"), 6.85),
        (XPU.format("6.10 GiB"), 5.0),
    ],
    ids=["HIP", "CUDA", "Metal in a metric", "Metal", "Arc, IPEX", "Arc, torch.xpu"],
)
def test_a_request_that_no_card_serves_is_named(text: str, size: float) -> None:
    found = first(text)
    assert (found.cause, found.evidence[-1].bytes) == ("oversized", int(size * GIB))
    assert found.remedies


@pytest.mark.parametrize(
    ("text", "cause"),
    [
        (XPU.format("13.10 GiB"), "not-known"),  # less is free than was requested
        (oom("1.50 GiB", "15.24 GiB", "1.10 GiB", "13.00 GiB", kind="HIP"), "not-known"),
        (TRACE + frame(LIB + "transformers/models/llama/modeling_llama.py", "eager_attention_forward",
                       "attn_weights = torch.matmul(query, key_states.transpose(2, 3)) * scaling")
         + oom("64.00 GiB", "79.15 GiB", "50.47 GiB", "28.02 GiB", "28.66 GiB"), "attention"),
        (TRACE + frame("fit.py", "main", "loss = F.cross_entropy(logits, y)")
         + frame(LIB + "torch/nn/functional.py", "cross_entropy", "return torch._C._nn.cross_entropy_loss(")
         + oom("92.00 GiB", "79.15 GiB", "50.47 GiB", "28.02 GiB", "28.66 GiB"), "logits"),
    ],
    ids=["a full Arc", "a full card", "scores", "logits larger than the card"],
)  # fmt: skip
def test_a_request_is_not_called_too_large_where_more_is_known(text: str, cause: Cause) -> None:
    assert first(text).cause == cause


@pytest.mark.parametrize(("aside", "offered", "said"), [(98304, "15.24 GiB", True), (65536, "62.20 GiB", False)])
def test_an_apu_counts_what_it_may_map_not_what_is_set_aside(aside: int, offered: str, said: bool) -> None:
    text = APU.format(aside, aside) + oom("80.00 GiB", offered, offered, "0 bytes", kind="HIP")
    found = first(text)
    assert found.cause == "oversized" and ("GTT" in evidence_of(found)) is said
    assert ("ttm.pages_limit" in remedies_of(found)) is said


def test_a_buffer_that_metal_refuses_names_where_and_when() -> None:
    found = first(LIGHTNING + "RuntimeError: Invalid buffer size: 261.94 GB")
    assert found.confidence == "certain" and "base.py:7 in the evaluation" in evidence_of(found)


# ---- weights alone --------------------------------------------------------------------------------------------------

FSDP1 = (
    frame(LIB + "torch/distributed/fsdp/_init_utils.py", "_move_module_to_device", "_move_states_to_device(params)")
    + frame(LIB + "torch/distributed/fsdp/_init_utils.py", "_move_states_to_device", "param.data = param.to(device)")
)  # fmt: skip
FSDP2 = frame(LIB + "torch/distributed/fsdp/_fully_shard/_fsdp_param.py", "_init_sharded_param", "p = p.to(device)")
FSDP2_LOADED = frame(
    LIB + "accelerate/utils/fsdp_utils.py", "fsdp2_load_full_state_dict", "full = torch.empty(shape, device=device)"
)
MOVED = (
    frame("run.py", "main", "net.to('cuda')")
    + frame(LIB + "torch/nn/modules/module.py", "_apply", "param_applied = fn(param)")
    + frame(LIB + "torch/nn/modules/module.py", "convert", "return t.to(")
)  # fmt: skip


@pytest.mark.parametrize(
    ("frames", "sizes", "cause"),
    [
        (FSDP1, ("448.00 MiB", "79.10 GiB", "201.00 MiB", "78.20 GiB", "78.80 GiB"), "load-peak"),
        (FSDP2, ("112.00 MiB", "39.39 GiB", "90.00 MiB", "38.60 GiB", "39.20 GiB"), "load-peak"),
        (MOVED, ("272.00 MiB", "15.77 GiB", "90.00 MiB", "12.90 GiB", "15.60 GiB"), "capacity"),
        (MOVED, ("136.00 MiB", "23.65 GiB", "40.00 MiB", "23.10 GiB", "23.50 GiB"), "capacity"),
    ],
)
def test_weights_that_fill_the_card_are_named_while_they_move(
    frames: str, sizes: tuple[str, ...], cause: Cause
) -> None:
    found = first(TRACE + frames + oom(*sizes))
    assert found.cause == cause and found.confidence != "certain"
    assert found.evidence[0].bytes == int(float(sizes[3].split()[0]) * GIB)


def test_loading_a_full_state_dict_is_not_saving_one() -> None:
    sizes = ("1.00 GiB", "79.10 GiB", "100.00 MiB", "77.60 GiB", "78.70 GiB")
    assert first(TRACE + FSDP2_LOADED + oom(*sizes)).cause == "load-peak"


@pytest.mark.parametrize(
    ("total", "free", "tensors", "process", "share"),
    [
        ("79.19 GiB", "219.06 MiB", "74.10 GiB", "78.97 GiB", "94%"),
        ("39.39 GiB", "150.00 MiB", "36.30 GiB", "39.20 GiB", "92%"),
        ("23.65 GiB", "150.00 MiB", "20.70 GiB", "23.40 GiB", "88%"),
    ],
)
def test_the_largest_holder_comes_before_a_small_remainder(
    total: str, free: str, tensors: str, process: str, share: str
) -> None:
    found = explain(read_text("[rank0]: " + oom("272.00 MiB", total, free, tensors, process)))
    assert "nccl" not in [f.cause for f in found] and share in found[0].evidence[0].text


@pytest.mark.parametrize(
    ("tensors", "process", "likely"), [("50.00 GiB", "78.00 GiB", False), ("20.00 GiB", "78.00 GiB", True)]
)
def test_a_large_remainder_is_named_and_likely_where_it_is_the_largest(
    tensors: str, process: str, likely: bool
) -> None:
    found = first(oom("2.00 GiB", "79.15 GiB", "1.00 GiB", tensors, process))
    assert found.cause == "nccl" and (found.confidence == "likely") is likely


# ---- the host -------------------------------------------------------------------------------------------------------

PIN_THREAD = (
    TRACE + frame("/home/u/yolo/engine/trainer.py", "_do_train", "for i, batch in pbar:")
    + frame(LIB + "torch/_utils.py", "reraise", "raise exception")
    + "RuntimeError: Caught RuntimeError in pin memory thread for device 0.\nOriginal " + TRACE
    + frame(LIB + "torch/utils/data/_utils/pin_memory.py", "do_one_step", "data = pin_memory(data, device)") + DRIVER
)  # fmt: skip
WSL = "Linux DESKTOP 5.15.153.1-microsoft-standard-WSL2 x86_64, RTX 3070 Ti\n"


@pytest.mark.parametrize(
    "text",
    [
        PIN_THREAD,
        "RuntimeError: Caught RuntimeError in pin memory thread for device 0.\n" + DRIVER,
        TRACE
        + frame("flexgen/backend.py", "copy_worker_func", "buf = torch.empty((1 << 30,), pin_memory=True)")
        + DRIVER,
        TRACE + frame("data.py", "load", "x = x.pin_memory()") + DRIVER,
    ],
    ids=["a DataLoader", "its last lines", "a pinned buffer", "a pinned tensor"],
)
@pytest.mark.parametrize("wsl", [True, False])
def test_pinned_memory_is_the_hosts(text: str, wsl: bool) -> None:
    found = first(text + WSL * wsl)
    assert found.cause == "host-ram" and "pin_memory=False" in remedies_of(found)
    assert (".wslconfig" in remedies_of(found)) is wsl


@pytest.mark.parametrize(
    ("text", "many"),
    [
        ('Loading checkpoint shards: 100%|##########| 3/3\nUnsloth: Tokenizing ["text"] (num_proc=196):  31%|###       '
         "| 1859/5939 [01:01<02:39, 25.61 examples/s]Killed\n", 196),
        ("Running tokenizer on dataset (num_proc=64):  12%|#1  | 12000/100000 [02:11<15:00, 97.5 examples/s]\nKilled\n",
         64),
        ("Map (num_proc=24):  45%|####5 | 45000/100000 [02:11<02:40, 340 examples/s]\n" + TRACE
         + frame(LIB + "datasets/utils/py_utils.py", "iflatmap_unordered", "raise RuntimeError(")
         + "RuntimeError: One of the subprocesses has abruptly died during map operation.To debug the error, disable "
         "multiprocessing.", 24),
    ],
    ids=["unsloth", "llama-factory", "datasets"],
)  # fmt: skip
def test_processes_of_a_dataset_fill_the_hosts_memory(text: str, many: int) -> None:
    found = first(text)
    assert found.cause == "host-ram" and f"instead of {many}" in found.remedies[0].text
    assert not any("low_cpu_mem_usage" in remedy.text for remedy in found.remedies[:1])


def test_a_dataset_that_was_finished_is_not_to_blame() -> None:
    text = "Map (num_proc=64): 100%|####| 5939/5939 [01:01<00:00]\nLoading checkpoint shards:  50%|##   | 2/4\nKilled\n"
    assert "num_proc" not in remedies_of(first(text)) and first(text).cause == "host-ram"


# ---- images and engines ---------------------------------------------------------------------------------------------

QWEN_VL = LIB + "transformers/models/qwen2_5_vl/modeling_qwen2_5_vl.py"
SDPA = "attn_output = F.scaled_dot_product_attention(q, k, v, attention_mask, dropout_p=0.0)"
SCORES = "attn_weights = torch.matmul(query, key.transpose(-1, -2)) * scaling"
VISION = {
    "unsloth": frame("/home/u/unsloth_compiled_cache/unsloth_compiled_module_qwen2_vl.py",
                     "VisionSdpaAttention_forward", SDPA),
    "a tower that is called": frame(QWEN_VL, "get_image_features", "image_embeds = self.visual(pixel_values, grid)")
    + frame(QWEN_VL, "forward", "hidden_states = blk(hidden_states)") + frame(QWEN_VL, "forward", SDPA),
    "SigLIP in LLaVA": frame(LIB + "transformers/models/llava/modeling_llava.py", "get_image_features",
                             "outputs = self.vision_tower(pixel_values, output_hidden_states=True)")
    + frame(LIB + "transformers/models/siglip/modeling_siglip.py", "eager_attention_forward", SCORES),
    "InternViT": frame("/home/u/internvl/modeling_intern_vit.py", "_naive_attn", "attn = (q * self.scale) @ k.mT"),
    "mllama": frame(LIB + "transformers/models/mllama/modeling_mllama.py", "forward",
                    "vision_outputs = self.vision_model(pixel_values=pixel_values)")
    + frame(LIB + "transformers/models/mllama/modeling_mllama.py", "forward", SDPA),
}  # fmt: skip


@pytest.mark.parametrize("frames", VISION.values(), ids=VISION)
@pytest.mark.parametrize(("tried", "free"), [("272.00 GiB", "60.47 GiB"), ("68.00 GiB", "60.47 GiB")])
def test_attention_over_the_patches_of_images_is_no_logits(frames: str, tried: str, free: str) -> None:
    found = first(TRACE + frames + oom(tried, "79.15 GiB", free, "18.02 GiB", "18.66 GiB"))
    assert found.cause == "image-tokens" and "max_pixels" in remedies_of(found)
    small = first(TRACE + frames + oom("64.00 MiB", "79.15 GiB", "20.00 MiB", "78.20 GiB", "78.90 GiB"))
    assert small.cause != "image-tokens" or small.confidence != "certain"  # who asked last need not be who filled it


def test_attention_of_the_language_model_is_not_over_patches() -> None:
    frames = frame(QWEN_VL, "forward", "outputs = self.language_model(inputs_embeds=embeds, visual_pos_masks=m)")
    frames += frame(QWEN_VL, "eager_attention_forward", SCORES)
    assert first(TRACE + frames + oom("40.00 GiB", "79.15 GiB", "20.00 GiB", "58.02 GiB")).cause == "attention"


@pytest.mark.parametrize(
    "text",
    [
        "(skyrl pid=7) Checkpoint saved at global_step_10\n(AsyncVLLMInferenceEngine pid=9) CUDA Error: out of memory "
        "at /workspace/csrc/cumem_allocator.cpp:62\n(AsyncVLLMInferenceEngine pid=9)     "
        'self.collective_rpc("wake_up", kwargs=dict(tags=tags))\n(AsyncVLLMInferenceEngine pid=9)     '
        "self.model_executor.wake_up(tags)\n",
        TRACE + frame(LIB + "sglang/srt/managers/scheduler.py", "resume_memory_occupation", "self.adapter.resume()")
        + DRIVER,
    ],
    ids=["vLLM", "SGLang"],
)  # fmt: skip
def test_an_engine_that_sleeps_already_is_not_told_to(text: str) -> None:
    found = first(text)
    assert found.cause == "inference-engine" and "empty_cache" in remedies_of(found)
    assert "enable_sleep_mode" not in remedies_of(found)


# ---- what a loop keeps ----------------------------------------------------------------------------------------------

FAILED = frame("net.py", "forward", "x = self.conv2(x)") + oom("64.00 MiB", "23.65 GiB", "40.00 MiB", "22.10 GiB")


@pytest.mark.parametrize(
    ("function", "code", "cause"),
    [
        ("main", "outputs.append(model(x.cuda()))", "leak"),
        ("fit", "history[epoch].extend(model(x))", "leak"),
        ("main", "total_loss += criterion(model(x), y)", "leak"),
        ("main", "self.loss_sum = self.loss_sum + loss_of(model, x)", "leak"),
        ("evaluate", "preds = torch.cat((preds, model(x)))", "eval-logits"),
        ("main", "total_loss += criterion(model(x), y).item()", "activations"),
        ("main", "outputs.append(model(x).cpu())", "activations"),
        ("forward", "hidden.append(layer(hidden[-1]))", "activations"),
        ("main", "x = x + layer(x)", "activations"),
    ],
)
def test_a_line_that_keeps_the_result_of_each_pass_is_named(function: str, code: str, cause: Cause) -> None:
    found = first(TRACE + frame("train.py", function, code) + FAILED)
    assert found.cause == cause and found.confidence != "certain"
    assert found.line == ("train.py:7" if cause != "activations" else "net.py:7")


# ---- the estimate of the run's own file ----------------------------------------------------------------------------

AXOLOTL = """base_model: Qwen/Qwen2.5-Coder-32B-Instruct
sequence_len: 4096
micro_batch_size: 1
gradient_accumulation_steps: 1
deepspeed: zero3.json
optimizer: adamw_torch_fused
bf16: true
flash_attention: true
datasets:
  - path: my.jsonl
    type: chat_template
num_epochs: 1
"""
ZERO3 = {
    "zero_optimization": {"stage": 3, "offload_optimizer": {"device": "cpu"}, "offload_param": {"device": "cpu"}},
    "bf16": {"enabled": True},
}
HELD = oom("272.00 MiB", "79.19 GiB", "219.06 MiB", "74.10 GiB", "78.97 GiB")


@pytest.mark.parametrize("checkpointing", [True, False])
def test_a_run_that_held_more_than_its_file_needs_had_a_setting_off(
    checkpointing: bool, tmp_path: Path, capsys: Captured
) -> None:
    (tmp_path / "run.log").write_text("[rank0]: " + HELD)
    (tmp_path / "zero3.json").write_text(json.dumps(ZERO3))
    (tmp_path / "axolotl.yaml").write_text(AXOLOTL + "gradient_checkpointing: true\n" * checkpointing)
    flags = ["--from", str(tmp_path / "axolotl.yaml"), "--gpu", "8xh100", "--json"]
    assert cli.main(["explain", str(tmp_path / "run.log"), *flags]) == 0
    found = json.loads(capsys.readouterr().out)["findings"][0]
    said = " ".join(proof["text"] for proof in found["evidence"])
    if checkpointing:
        assert found["cause"] == "not-in-effect" and found["evidence"][0]["bytes"] == int(74.1 * GIB) + 272 * MIB
        assert all(name in said for name in ("sharding", "offloading", "checkpointing"))
        cli.main(["estimate", *flags])
        need = json.loads(capsys.readouterr().out)["need"]
        assert need < 20 * GIB and human(need) in said  # the same number as the estimate gives
    else:  # the file itself needs more than the card has
        assert found["cause"] == "activations" and found["evidence"][0]["bytes"] > 79.19 * GIB


def test_a_file_that_is_not_understood_is_no_evidence(tmp_path: Path, capsys: Captured) -> None:
    (tmp_path / "run.log").write_text(HELD)
    (tmp_path / "zero3.json").write_text(json.dumps(ZERO3))
    (tmp_path / "axolotl.yaml").write_text(AXOLOTL + "gradient_checkpointing: true\nnever_heard_of_it: 3\n")
    flags = ["--from", str(tmp_path / "axolotl.yaml"), "--gpu", "8xh100", "--json"]
    cli.main(["explain", str(tmp_path / "run.log"), *flags])
    found = json.loads(capsys.readouterr().out)["findings"]
    assert "not-in-effect" not in [f["cause"] for f in found]
    assert not any("estimate" in proof["text"] for f in found for proof in f["evidence"])


def sized(need: float, *without: tuple[str, float]) -> Evidence:
    evidence = read_text(HELD)
    estimate = Estimate(int(need * GIB), without=tuple((name, int(size * GIB)) for name, size in without))
    return Evidence(evidence.text, evidence.messages, estimate=estimate)


@pytest.mark.parametrize(
    ("evidence", "named", "not_named"),
    [
        (sized(20, ("sharding", 130), ("checkpointing", 30)), "sharding was", "checkpointing was"),
        (sized(20, ("sharding", 130), ("checkpointing", 89)), "sharding or checkpointing was", "offloading"),
        (sized(20, ("checkpointing", 30)), "checkpointing was", "sharding"),  # none alone: all that there are
    ],
)
def test_only_settings_that_make_up_for_the_difference_are_named(
    evidence: Evidence, named: str, not_named: str
) -> None:
    found = explain(evidence)[0]
    assert found.cause == "not-in-effect" and named in evidence_of(found) and not_named not in evidence_of(found)


@pytest.mark.parametrize("need", [62.0, 74.0])
def test_an_estimate_near_what_was_held_blames_no_setting(need: float) -> None:
    found = explain(sized(need, ("sharding", 130)))
    assert "not-in-effect" not in [f.cause for f in found]
    assert found[0].evidence[-1].bytes == int(need * GIB)  # it is evidence all the same


# ---- memfit's own output --------------------------------------------------------------------------------------------

TRACED = """train.py on one GPU with 8.00 GiB · 7.5 GiB usable of 8.0 GiB
39 allocations, traced on a virtual card · PyTorch 2.13.0 · default allocator

DOES NOT FIT  out of memory in forward (first step), event 41
              CUDA out of memory. Tried to allocate 512 MiB. GPU has a total capacity of 8.00 GiB of which 310 MiB is \
free.

smallest: at least 7.71 GiB without expandable segments
note:     the run ended where memory ran out, so what it would have needed afterwards is not known
Traceback (most recent call last):
  File "train.py", line 8, in <module>
    x = layer(x)
torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 512.00 MiB. GPU 0 has a total capacity of 8.00 GiB of \
which 310.00 MiB is free. Of the allocated memory 7.20 GiB is allocated by PyTorch, and 13.78 MiB is reserved by \
PyTorch but unallocated.
note: out of memory at train.py:8: CUDA out of memory. Tried to allocate 512.00 MiB; a larger --gpu shows what the \
whole run needs
"""
EXPLAINED = """run.log · requested 272 MiB · card 79.2 GiB

NCCL  likely · communication buffers and contexts, which PyTorch's numbers do not show

evidence: CUDA out of memory. Tried to allocate 272.00 MiB

share one process group (mesh); NCCL_BUFFSIZE smaller  slower links

next: memfit explain run.log --model MODEL --gpu CARD
      memfit plan MODEL
"""


@pytest.mark.parametrize("own", [TRACED, EXPLAINED, EXPLAINED + TRACED])
def test_what_memfit_predicted_is_no_evidence(own: str, tmp_path: Path, capsys: Captured) -> None:
    (tmp_path / "run.log").write_text(own)
    assert cli.main(["explain", str(tmp_path / "run.log")]) == 2
    assert "--save-tape" in capsys.readouterr().err
    real = TRACE + frame("fit.py", "main", "loss.backward()") + HELD
    for text in (own + real, real + "\n" + own):
        (tmp_path / "run.log").write_text(text)
        cli.main(["explain", str(tmp_path / "run.log"), "--json"])
        found = json.loads(capsys.readouterr().out)
        assert (found["messages"][0]["tried"], found["earlier"]) == (272 * MIB, [])


# ---- most means more than half --------------------------------------------------------------------------------------


@pytest.mark.parametrize("share", [0.3, 0.45, 0.55, 0.9])
def test_most_of_a_peak_is_more_than_half(share: float) -> None:
    kept, rest = int(share * 100 * MIB), int((1 - share) * 100 * MIB)
    groups = (
        Group("activations", "mm (x.py:1)", kept, 1, kept, (0,), kept),
        Group("parameters", "w (x.py:2)", rest, 1, rest, (-1,)),
    )
    memory = Memory(kept + rest, kept + rest, kept + rest, None, 0, "step", "forward", groups, (rest,), (kept + rest,))
    for finding in explain(Evidence(memory=memory)):
        most = max((proof.bytes or 0 for proof in finding.evidence), default=0) / (kept + rest)
        assert ("most of" in finding.title) <= (most > 0.5)
