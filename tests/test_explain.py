"""memfit explain: messages of every version read to the byte, signs read in context, remedies checked and priced."""

from __future__ import annotations

import io
import json
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, get_args

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import explain_snapshots
import oom_cases
from memfit import cli
from memfit.catalogue import Entry, config
from memfit.catalogue.cards import list_gpus
from memfit.documents import codec
from memfit.documents.snapshot import read
from memfit.explain import Evidence, explain, messages, read_text, wanted
from memfit.explain.evidence import SURE
from memfit.explain.history.reading import memory_of
from memfit.explain.memory import holders, unnumbered
from memfit.explain.remedies import ALREADY, BESIDE_VLLM, EXPANDABLE, REMEDIES
from memfit.explain.text.figures import card_of, vocabulary
from memfit.explain.text.signs import SIGNS
from memfit.models.hub import list_models
from memfit.nouns.finding import CAUSES, Cause
from memfit.nouns.job import RECIPE_FIELDS
from memfit.nouns.tape import Alloc, Free, Mark, Oom, Tape
from memfit.units import GIB, MIB

ROOT = Path(__file__).resolve().parents[1]
SNAPSHOT = ROOT / "tests" / "data" / "snapshots" / "plain-full.pickle.gz"


def g(number: float) -> int:
    return int(number * GIB)


def m(number: float) -> int:
    return int(number * MIB)


NOW = (
    "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 23.64 GiB "
    "of which 1.20 GiB is free. Including non-PyTorch memory, this process has 22.43 GiB memory in use. Of the "
    "allocated memory 21.50 GiB is allocated by PyTorch, and 300.50 MiB is reserved by PyTorch but unallocated. If "
    "reserved but unallocated memory is large try setting PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True to avoid "
    "fragmentation."
)
MESSAGES: dict[str, tuple[str, dict[str, Any]]] = {
    "1.x": ("RuntimeError: CUDA out of memory. Tried to allocate 20.00 MiB (GPU 0; 8.00 GiB total capacity; 7.20 GiB "
            "already allocated; 0 bytes free; 7.30 GiB reserved in total by PyTorch) If reserved memory is >> "
            "allocated memory try setting max_split_size_mb",
            {"kind": "cuda", "tried": m(20), "total": g(8), "allocated": g(7.2), "free": 0, "reserved": g(7.3),
             "unallocated": g(7.3) - g(7.2), "advises_expandable": True}),
    "1.3": ("CUDA out of memory. Tried to allocate 1.12 MiB (GPU 0; 11.91 GiB total capacity; 5.52 GiB already "
            "allocated; 2.06 MiB free; 184.00 KiB cached)",
            {"tried": m(1.12), "total": g(11.91), "free": m(2.06), "unallocated": 184 * 1024,
             "reserved": g(5.52) + 184 * 1024}),
    "2.0 several": ("CUDA out of memory. Tried to allocate 64.00 MiB (GPU 2; 31.75 GiB total capacity; 28.28 GiB "
                    "already allocated; 1.95 GiB free; 29.00 GiB reserved in total by PyTorch)",
                    {"tried": m(64), "total": g(31.75), "free": g(1.95), "allocated": g(28.28)}),
    "2.1 misspelt": ("CUDA out of memory. Tried to allocate 9.47 GiB. GPU 0 has a total capacty of 14.75 GiB of which "
                     "3.78 GiB is free. Process 4711 has 10.96 GiB memory in use. Of the allocated memory 10.50 GiB is "
                     "allocated by PyTorch, and 300.00 MiB is reserved by PyTorch but unallocated.",
                     {"tried": g(9.47), "total": g(14.75), "free": g(3.78), "others": ((4711, g(10.96)),),
                      "allocated": g(10.5)}),
    "now": (NOW, {"tried": g(2), "total": g(23.64), "free": g(1.2), "in_process": g(22.43), "allocated": g(21.5),
                  "unallocated": m(300.5), "reserved": g(21.5) + m(300.5), "advises_expandable": True}),
    "private pools": ("CUDA out of memory. Tried to allocate 2.00 MiB. GPU 1 has a total capacity of 79.15 GiB of "
                      "which 1.00 MiB is free. Process 1 has 40.00 GiB memory in use. Including non-PyTorch memory, "
                      "this process has 39.00 GiB memory in use. 70.00 GiB allowed; Of the allocated memory 30.00 GiB "
                      "is allocated by PyTorch, with 4.50 GiB allocated in private pools (e.g., CUDA Graphs), and 1.00 "
                      "GiB is reserved by PyTorch but unallocated.",
                      {"private": g(4.5), "allowed": g(70), "others": ((1, g(40)),), "in_process": g(39),
                       "unallocated": g(1)}),
    "hip": ("torch.OutOfMemoryError: HIP out of memory. Tried to allocate 1.50 GiB. GPU 0 has a total capacity of "
            "191.98 GiB of which 500.00 MiB is free. Of the allocated memory 180.00 GiB is allocated by PyTorch, and "
            "2.00 GiB is reserved by PyTorch but unallocated.",
            {"kind": "hip", "tried": g(1.5), "total": g(191.98), "free": m(500), "allocated": g(180)}),
    "xpu": ("XPU out of memory. Tried to allocate 4.00 GiB. GPU 0 has a total capacity of 15.91 GiB. Of the allocated "
            "memory 12.00 GiB is allocated by PyTorch, and 100.00 MiB is reserved by PyTorch but unallocated.",
            {"kind": "xpu", "tried": g(4), "total": g(15.91), "allocated": g(12)}),
    "mps": ("RuntimeError: MPS backend out of memory (MPS allocated: 17.85 GB, other allocations: 384.00 KB, max "
            "allowed: 18.13 GB). Tried to allocate 1.50 GB on private pool.",
            {"kind": "mps", "tried": g(1.5), "allocated": g(17.85), "total": g(18.13)}),
    "tensorflow": ("OOM when allocating tensor with shape[32,512,128,128] and type float on "
                   "/job:localhost/replica:0/task:0/device:GPU:0 by allocator GPU_0_bfc [Op:Conv2D]",
                   {"kind": "tensorflow", "tried": g(1), "total": None}),
    "jax": ("jaxlib.xla_extension.XlaRuntimeError: RESOURCE_EXHAUSTED: Out of memory while trying to allocate "
            "17179869184 bytes.", {"kind": "jax", "tried": g(16)}),
    "cuda error": ("RuntimeError: CUDA error: out of memory\nCUDA kernel errors might be reported",
                   {"kind": "driver", "tried": None}),
    "cuda driver": ("RuntimeError: CUDA driver error: out of memory", {"kind": "driver"}),
    "cublas": ("RuntimeError: CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`",
               {"kind": "cublas"}),
    "cudnn": ("RuntimeError: cuDNN error: CUDNN_STATUS_ALLOC_FAILED", {"kind": "cudnn"}),
    "nccl": ("torch.distributed.DistBackendError: NCCL error in: ProcessGroupNCCL.cpp:2251, unhandled cuda error\n"
             "Last error:\nCuda failure 2 'out of memory'", {"kind": "nccl"}),
    "bitsandbytes": ("Error out of memory at line 380 in file /src/csrc/pythonInterface.cpp", {"kind": "bitsandbytes"}),
    "vllm": ("ValueError: No available memory for the cache blocks. Try increasing `gpu_memory_utilization` when "
             "initializing the engine.", {"kind": "vllm"}),
    "vllm free": ("ValueError: Free memory on device (10.1/79.1 GiB) on startup is less than desired GPU memory "
                  "utilization (0.9, 71.2 GiB).", {"kind": "vllm"}),
    "cpu": ("RuntimeError: [enforce fail at alloc_cpu.cpp:117] err == 0. DefaultCPUAllocator: can't allocate memory: "
            "you tried to allocate 94371840 bytes. Error code 12", {"kind": "host", "tried": 94371840}),
    "killed": ("Loading checkpoint shards:  50%\nKilled\n", {"kind": "host"}),
    "elastic": ("torch.distributed.elastic.multiprocessing.api: failed (exitcode: -9) local_rank: 3 (pid: 1207)",
                {"kind": "host"}),
    "deepspeed": ("[launch.py:321:sigkill_handler] exits with return code = -9", {"kind": "host"}),
}  # fmt: skip


@pytest.mark.parametrize("name", MESSAGES)
def test_a_message_is_read_to_the_byte(name: str) -> None:
    text, wanted = MESSAGES[name]
    found = messages(text)[0]
    assert {key: getattr(found, key) for key in wanted} == wanted


@pytest.mark.parametrize(
    "name", ["vlm", "dpo", "grpo", "fsdp_train", "logits", "load_model", "eval", "save_pretrained", "kv_cache"]
)
def test_what_a_script_is_called_tells_nothing(name: str) -> None:
    def answer(script: str) -> list[tuple[str, str]]:
        text = (
            "Traceback (most recent call last):\n"
            f'  File "/home/u/{script}.py", line 40, in <module>\n    main()\n'
            f'  File "/home/u/{script}.py", line 20, in forward\n    return self.fc2(torch.relu(self.fc1(x)))\n{NOW}'
        )
        return [(finding.cause, finding.confidence) for finding in explain(read_text(text))]

    assert answer(name) == answer("x")


def test_the_same_message_of_many_ranks_is_read_once_the_fullest_first() -> None:
    found = messages("\n".join(["CUDA error: out of memory", NOW, NOW, NOW]))
    assert [x.kind for x in found] == ["cuda", "driver"]


@settings(deadline=None)
@given(st.text(max_size=2000))
def test_no_text_breaks_it(text: str) -> None:
    found = explain(read_text("CUDA out of memory. Tried to allocate " + text))
    assert found[0].cause in CAUSES and found[0].remedies


@given(st.sampled_from(sorted(MESSAGES)), st.integers(0, 400))
def test_a_cut_message_gives_what_it_has(name: str, length: int) -> None:
    text, wanted = MESSAGES[name]
    for found in messages(text[:length])[:1]:
        for key in ("tried", "total", "allocated"):
            assert getattr(found, key) in (None, wanted.get(key, getattr(found, key)))


def test_pathological_repeats_are_read_in_one_pass() -> None:
    assert messages("1" * 200_000 + " GiB " + "Process " * 50_000) == ()
    assert read_text("x" * 2_000_000 + ".py:1 in f").frames == ()
    for part in ("a.", "load", "model_", "gpu ", "[1, ", "memory increas "):
        assert explain(read_text(part * 30_000))


# ---- tables --------------------------------------------------------------------------------------------------------


def test_every_cause_has_words_and_remedies() -> None:
    assert set(REMEDIES) == set(CAUSES) == set(get_args(Cause))
    assert all(REMEDIES.values())


def test_every_priced_remedy_changes_fields_a_recipe_has() -> None:
    changed = {name for rows in REMEDIES.values() for row in rows for name, _ in row.change}
    assert changed <= set(RECIPE_FIELDS)


@pytest.mark.parametrize("number", range(len(SIGNS)))
def test_every_sign_says_something_and_is_in_small_letters(number: int) -> None:
    sign = SIGNS[number]
    assert sign.words or sign.at
    assert 0 < sign.weight <= SURE
    escapes = ("\\W", "\\S", "\\D", "\\B")
    for words in (*sign.words, sign.never):
        bare = words
        for escape in escapes:
            bare = bare.replace(escape, "")
        assert bare == bare.lower()


# ---- what is concluded ---------------------------------------------------------------------------------------------


def frame(path: str, line: int, function: str, code: str) -> str:
    return f'  File "{path}", line {line}, in {function}\n    {code}\n'


LIB = "/usr/lib/python3.12/site-packages/"
TRACE = "Traceback (most recent call last):\n" + frame("/home/me/train.py", 41, "<module>", "trainer.train()")
CASES: dict[str, tuple[str, Cause]] = {
    "cross entropy": (TRACE + frame(LIB + "transformers/loss/loss_utils.py", 67, "ForCausalLMLoss",
                                    "loss = fixed_cross_entropy(logits, shift_labels)")
                      + frame(LIB + "transformers/loss/loss_utils.py", 36, "fixed_cross_entropy",
                              "loss = nn.functional.cross_entropy(source, target)") + NOW, "logits"),
    "eval gather": (TRACE + frame(LIB + "transformers/trainer.py", 4300, "evaluation_loop", "all_preds.add(logits)")
                    + frame(LIB + "transformers/trainer_pt_utils.py", 120, "nested_concat",
                            "return torch_pad_and_concatenate(tensors, new_tensors)") + NOW, "eval-logits"),
    "adam": (TRACE + frame(LIB + "torch/optim/adamw.py", 600, "_multi_tensor_adamw",
                           "exp_avg_sq_sqrt = torch._foreach_sqrt(device_exp_avg_sqs)") + NOW, "optimizer-step"),
    "adam init": (TRACE + frame(LIB + "torch/optim/adamw.py", 150, "_init_group",
                                'state["exp_avg"] = torch.zeros_like(p)') + NOW, "optimizer-states"),
    "resume": (TRACE + frame(LIB + "transformers/trainer.py", 3300, "_load_optimizer_and_scheduler",
                             'torch.load(os.path.join(checkpoint, "optimizer.pt"), map_location=map_location)') + NOW,
               "resume-states"),
    "save": (TRACE + frame(LIB + "torch/distributed/fsdp/_state_dict_utils.py", 300, "_full_pre_state_dict_hook",
                           "_unshard_fsdp_state_params(module)") + NOW, "save-gather"),
    "eager": (TRACE + frame(LIB + "transformers/models/llama/modeling_llama.py", 190, "eager_attention_forward",
                            "attn_weights = nn.functional.softmax(attn_weights, dim=-1)") + NOW, "attention"),
    "replicas": (TRACE + frame(LIB + "torch/nn/parallel/data_parallel.py", 190, "forward",
                               "outputs = self.parallel_apply(replicas, inputs, module_kwargs)") + NOW,
                 "data-parallel"),
    "fragmented": ("CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 79.15 GiB of which "
                   "1.00 GiB is free. Including non-PyTorch memory, this process has 78.00 GiB memory in use. Of the "
                   "allocated memory 57.00 GiB is allocated by PyTorch, and 20.50 GiB is reserved by PyTorch but "
                   "unallocated.", "fragmentation"),
    "another process": ("CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 23.64 GiB of "
                        "which 1.00 GiB is free. Process 4711 has 14.00 GiB memory in use. Including non-PyTorch "
                        "memory, this process has 8.60 GiB memory in use. Of the allocated memory 8.00 GiB is "
                        "allocated by PyTorch, and 100.00 MiB is reserved by PyTorch but unallocated.",
                        "other-process"),
    "contexts of ranks": ("CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 15.90 GiB of "
                          "which 10.00 MiB is free. "
                          + "".join(f"Process {n} has 871.00 MiB memory in use. " for n in range(7))
                          + "Including non-PyTorch memory, this process has 9.00 GiB memory in use. Of the allocated "
                          "memory 8.00 GiB is allocated by PyTorch, and 100.00 MiB is reserved by PyTorch but "
                          "unallocated.", "ranks-on-one-gpu"),
    "windows": ("CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 12.00 GiB of which 0 "
                "bytes is free. Process 17 has 17179869184.00 GiB memory in use. Of the allocated memory 11.00 GiB is "
                "allocated by PyTorch, and 100.00 MiB is reserved by PyTorch but unallocated.", "spill"),
    "nccl": ("CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 79.15 GiB of which 1.00 "
             "GiB is free. Including non-PyTorch memory, this process has 78.00 GiB memory in use. Of the allocated "
             "memory 70.00 GiB is allocated by PyTorch, and 200.00 MiB is reserved by PyTorch but unallocated.",
             "nccl"),
    "ZeRO's states": (TRACE + frame(LIB + "deepspeed/runtime/zero/stage3.py", 367, "_setup_for_real_optimizer",
                                    "self.initialize_optimizer_states()")
                      + "training a 6B model on 8 * 3090 24G, zero-3\n" + NOW, "optimizer-states"),
    "merging": ("Merging 4bit and LoRA weights to 16bit...\n[/usr/lib/unsloth/save.py](https://localhost:8080/#) in "
                "_merge_lora(layer, name)\n" + NOW, "merge"),
    "rich's frames": ("│ /x/site-packages/transformers/trainer.py:2348 in _save_checkpoint │\n"
                      "│ undo_layout(self.state.CxB, int8)\n" + NOW, "merge"),
    "DDP's buckets": (TRACE + frame(LIB + "torch/nn/parallel/distributed.py", 798, "__init__", "self._ddp_init_helper(")
                      + frame(LIB + "torch/nn/parallel/distributed.py", 1096, "_ddp_init_helper",
                              "self.reducer = dist.Reducer(")
                      + "torch.cuda.OutOfMemoryError: CUDA out of memory. Tried to allocate 51.77 GiB (GPU 4; 79.14 "
                      "GiB total capacity; 51.83 GiB already allocated; 26.74 GiB free; 51.84 GiB reserved in total "
                      "by PyTorch)", "replicated"),
    "generating": (TRACE + frame(LIB + "transformers/generation/utils.py", 3200, "_sample",
                                 "outputs = model_forward(**model_inputs, return_dict=True)")
                   + frame(LIB + "transformers/cache_utils.py", 450, "update",
                           "self.key_cache[layer_idx] = torch.cat([self.key_cache[layer_idx], key_states], dim=-2)")
                   + NOW, "eval-generate"),
    "host": (MESSAGES["elastic"][0], "host-ram"),
    "nvidia-smi": ("".join(f"|    {gpu}   N/A  N/A   {pid}      C   .../bin/python3   {size}MiB |\n"
                           for gpu, pid, size in ((5, 26598, 2885), (5, 26599, 1387), (6, 26599, 2889))),
                   "ranks-on-one-gpu"),
    "before 1.4": (MESSAGES["1.3"][0], "other-process"),
    "before 1.4, many": ("DDP on 8x K80: " + MESSAGES["1.3"][0], "ranks-on-one-gpu"),
    "alike processes": ("CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 79.15 GiB of "
                        "which 1.00 GiB is free. Process 1 has 26.00 GiB memory in use. Process 2 has 25.00 GiB memory "
                        "in use. Process 3 has 26.00 GiB memory in use.", "ranks-on-one-gpu"),
    "reserved against allocated": ("reserved 14,060 MiB, allocated 266 MiB at cycle 100", "fragmentation"),
    "four bytes a weight": ("Mistral-7B from_pretrained takes 28 GB", "wrong-dtype"),
    "tokens times words": ("SFT of Llama-3-8B, batch 4, seq 8192: CUDA out of memory. Tried to allocate 15.66 GiB",
                           "logits"),
    "a card's name": ("full fine-tune of a 13B model on one RTX 3090: out of memory", "capacity"),
    "vllm": (MESSAGES["vllm"][0], "inference-engine"),
    "peft and checkpointing": ("RuntimeError: element 0 of tensors does not require grad and does not have a grad_fn",
                               "input-grads"),
    "arithmetic": ("full fine-tune of Qwen2.5-32B with ZeRO-3 on 8x A800 80GB: CUDA out of memory", "capacity"),
    "nothing": ("CUDA error: out of memory", "not-known"),
    "another text": ("all is well: epoch 3, loss 0.1", "not-known"),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_the_cause_is_named(name: str) -> None:
    text, cause = CASES[name]
    assert explain(read_text(text))[0].cause == cause


PIECES = (
    "Tried to allocate 900.00 MiB. GPU 0 has a total capacity of 24.00 GiB of which 100.00 MiB is free. Of the "
    "allocated memory 22.00 GiB is allocated by PyTorch, and 960.00 MiB is reserved by PyTorch but unallocated."
)


@pytest.mark.parametrize(
    ("text", "confidence"), [(CASES["adam"][0], "likely"), (f"CUDA out of memory. {PIECES}", "possible")]
)
def test_who_asked_last_and_a_few_pieces_are_no_certainty(text: str, confidence: str) -> None:
    """The step asks for a weight's bytes where the card is full; what filled it stands nowhere."""
    assert explain(read_text(text))[0].confidence == confidence


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ('  File "/home/me/train.py", line 41, in main\n    loss.backward()',
         ("/home/me/train.py", 41, "main", "loss.backward()")),
        ("File ~/work/train.py:41, in main(args, **kwargs)", ("~/work/train.py", 41, "main", "")),
        ("[/usr/lib/train.py](https://localhost:8080/#) in main(args)\n", ("/usr/lib/train.py", 0, "main", "")),
        ("│ /home/me/train.py:41 in main                       │", ("/home/me/train.py", 41, "main", "")),
        ("[rank1]:   File \"train.py\", line 41, in main", ("train.py", 41, "main", "")),
    ],
)  # fmt: skip
def test_frames_are_read_as_every_shell_prints_them(text: str, wanted: tuple[str, int, str, str]) -> None:
    (found,) = read_text(text).frames
    assert (found.path, found.line, found.function, found.code) == wanted
    assert found.short == ("train.py:41" if wanted[1] else "train.py")


def test_cards_are_as_large_as_in_the_catalogue() -> None:
    cards = [
        gpu for gpu in list_gpus() if not gpu.name.startswith(("Apple", "GH200 144"))
    ]  # Apple's names say host memory
    known = {gpu.name: (card_of(gpu.name.lower()), gpu.total_bytes) for gpu in cards}
    assert all(said in (0, pytest.approx(total, rel=0.09)) for said, total in known.values())
    assert sum(said > 0 for said, _ in known.values()) > 30
    assert (card_of("tesla v100"), card_of("8x a100")) == (g(32), g(80))  # of two sizes the larger


@pytest.mark.parametrize("entry", list_models(), ids=lambda entry: entry.id)
def test_vocabularies_are_as_large_as_in_the_catalogue(entry: Entry) -> None:
    words = vocabulary(Evidence(text=entry.id.lower()))
    told = config(entry)
    said = told.get("text_config", told).get("vocab_size", 0)
    assert words in (0, pytest.approx(said, rel=0.002))


def test_most_models_of_the_catalogue_have_a_known_vocabulary() -> None:
    assert sum(vocabulary(Evidence(text=entry.id.lower())) > 0 for entry in list_models()) > 60


def test_words_that_stand_far_apart_say_nothing_together() -> None:
    text = "fsdp " + "step done " * 600 + " no contiguous nothing: memory doubled after upgrading"
    assert explain(read_text(text))[0].cause != "fsdp-wrap"


ARGUMENTS = (ROOT / "tests" / "data" / "training_arguments.txt").read_text()  # what transformers prints of a run


@pytest.mark.parametrize("name", ["cross entropy", "adam", "adam init", "resume", "eager", "replicas", "fragmented"])
def test_settings_that_are_not_set_say_nothing(name: str) -> None:
    text, cause = CASES[name]
    alone, among = explain(read_text(text))[0], explain(read_text(f"{ARGUMENTS}\n{text}"))[0]
    assert (among.cause, among.confidence) == (cause, alone.confidence)


def test_the_line_is_the_users_own() -> None:
    found = explain(read_text(CASES["cross entropy"][0]))[0]
    assert (found.line, found.confidence) == ("train.py:41", "certain")


def test_two_loud_causes_leave_no_certainty() -> None:
    both = CASES["fragmented"][0] + "\nvLLM engine, gpu_memory_utilization=0.9"
    assert {f.confidence for f in explain(read_text(both))} <= {"likely", "possible"}


@pytest.mark.parametrize(
    ("text", "cause"),
    [  # a setting, a sum that assumes how it trains, a framework's name: told in words, beside a message's numbers
        (f"trainer: sft, fsdp: full_shard, state_dict_type: FULL_STATE_DICT\n{NOW}", "save-gather"),
        (f"llama-7b full, adamw, zero-2, 8x 24GB\n{NOW}", "capacity"),
        (f"GRPO with vllm and sleep mode\n{NOW}", "inference-engine"),
        (f"losses.append(loss)\n{NOW}", "leak"),
    ],
)
def test_what_was_only_said_is_never_certain(text: str, cause: Cause) -> None:
    found = explain(read_text(text))[0]
    assert (found.cause, found.confidence) == (cause, "likely")


BACKWARD = (
    TRACE
    + frame(LIB + "transformers/trainer.py", 3800, "training_step", "self.accelerator.backward(loss)")
    + frame(LIB + "torch/autograd/graph.py", 825, "_engine_run_backward",
            "return Variable._execution_engine.run_backward(")
)  # fmt: skip
OF_LOGITS = (
    "CUDA out of memory. Tried to allocate 7.83 GiB. GPU 0 has a total capacity of 23.64 GiB of which 3.10 GiB is free."
)


@pytest.mark.parametrize(
    ("model", "words", "confidence", "why"),
    [
        (
            "model: meta-llama/Llama-3.2-1B\n",
            0,
            "likely",
            "16,384 tokens x 128,256 tokens of the vocabulary x 4 B, 33% of the card",
        ),
        ("", 128_256, "likely", "16,384 tokens x 128,256 tokens of the vocabulary x 4 B, 33% of the card"),
        ("", 0, "possible", "one request of 33% of the card"),
    ],
)
def test_one_large_request_of_a_language_model_is_its_logits(model: str, words: int, confidence: str, why: str) -> None:
    found = explain(replace(read_text(model + BACKWARD + OF_LOGITS), vocabulary=words))[0]
    assert (found.cause, found.confidence) == ("logits", confidence)
    assert why in found.evidence[0].text


def test_offloading_is_no_loading() -> None:
    text = "GRPO with vllm colocate, offload_model, offload_optimizer: out of memory in the rollout"
    assert explain(read_text(text))[0].cause == "inference-engine"


@pytest.mark.parametrize(
    ("more", "instead"),
    [
        ("", EXPANDABLE),
        ("\nPYTORCH_CUDA_ALLOC_CONF=expandable_segments:True python train.py", ALREADY),
        ("\ntrl GRPO with vllm colocate", BESIDE_VLLM),
    ],
)
def test_pytorchs_own_hint_is_checked_before_it_is_repeated(more: str, instead: Any) -> None:
    text = (
        CASES["fragmented"][0]
        + " try setting PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True to avoid fragmentation."
        + more
    )
    found = next(f for f in explain(read_text(text)) if f.cause == "fragmentation")
    assert found.remedies[0] == instead


def test_remedies_are_priced_by_whoever_knows() -> None:
    found = explain(
        read_text(CASES["cross entropy"][0]), price=lambda remedy: 7 if dict(remedy.change).get("loss") else None
    )
    assert [r.saves for r in found[0].remedies] == [7, None]


def test_the_shortfall_is_what_was_missing() -> None:
    assert read_text(NOW).shortfall == g(2) - g(1.2)
    assert Evidence().shortfall is None


# ---- the command ---------------------------------------------------------------------------------------------------


def run(capsys: pytest.CaptureFixture[str], *args: str) -> tuple[int, str, str]:
    code = cli.main(["explain", *args])
    return code, *capsys.readouterr()


def test_a_log_is_explained_and_priced(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    log = tmp_path / "train.log"
    log.write_text(CASES["cross entropy"][0])
    code, out, _ = run(capsys, str(log), "--model", "qwen2.5-0.5b", "--gpu", "rtx-4090", "--trainer", "transformers")
    assert code == 0
    assert "LOGITS  certain" in out and "train.py:41" in out and "GiB (enough)" in out


def test_the_planner_answers_the_shortfall(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from memfit.planner.next_lower_recipe import LEARNED

    log = tmp_path / "train.log"
    log.write_text(NOW)
    run_of = (
        str(log),
        "--model",
        "qwen2.5-0.5b",
        "--gpu",
        "rtx-4090",
        "--trainer",
        "transformers",
        "--micro-batch",
        "4",
    )
    _, out, _ = run(capsys, *run_of, "--json")
    found = json.loads(out)
    assert found["recipe"]["saves"] >= found["shortfall"] > 0
    changed = dict(found["recipe"]["change"])
    assert changed and not changed.keys() & set(LEARNED)
    assert changed.get("micro_batch", 4) * changed.get("accumulation", 1) == 4
    assert "planner: " in run(capsys, *run_of)[1]


def test_standard_input_is_read(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys, "stdin", SimpleNamespace(buffer=io.BytesIO(NOW.encode())))
    code, out, _ = run(capsys, "-", "--json")
    document = json.loads(out)
    assert code == 4 and document["schema"] == "memfit.explain/1" and document["findings"][0]["cause"] == "not-known"
    assert document["messages"][0]["tried"] == g(2) and document["shortfall"] == g(2) - g(1.2)
    assert codec.dumps(codec.loads(out)) + "\n" == out


def test_a_tape_is_no_text(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys, "stdin", SimpleNamespace(buffer=io.BytesIO(b"\x1f\x8b\x08rest")))
    code, out, err = run(capsys, "-")
    assert (code, out) == (2, "") and "through a pipe" in err and "memfit explain FILE" in err


def test_json_with_a_message_in_it_is_a_log(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "pod.json"
    path.write_text(json.dumps({"level": "error", "text": NOW}))
    assert run(capsys, str(path))[0] == 4


def test_a_snapshot_is_explained_with_its_holders(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run(capsys, str(SNAPSHOT), "--json")
    found = json.loads(out)
    assert code in (0, 4) and found["source"] == "history"
    assert sum(h["bytes"] for h in found["findings"][0]["holders"]) > 0


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (b"", "is empty"),
        (b"\x80\x04cos\nsystem\n.", "GLOBAL"),
        (None, "cannot read"),
        (b'{\n  "schema": "memfit.plan/1", "phase": "resume"}', "memfit.plan/1, no log"),
        (b'{"schema":"memfit.watched/1"}', ".jsonl"),
        (b'schema = 1\n[job]\nmodel = "x"\n[recipe]\nmethod = "lora"\n', "is a recipe"),
        (b'{"case": {"model": "x"}, "phases": ["resume"]}', "JSON without an out-of-memory"),
    ],
)
def test_bad_input_is_one_line_and_a_hint(
    content: bytes | None, says: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "x"
    if content is not None:
        path.write_bytes(content)
    code, out, err = run(capsys, str(path))
    assert (code, out) == (2, "") and says in err and "hint:" in err and err.count("\n") == 2


def test_a_page_overwrites_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    page, log = tmp_path / "x.html", tmp_path / "log"
    log.write_text(NOW)
    for kind in (SNAPSHOT, log):
        page.unlink(missing_ok=True)
        assert run(capsys, str(kind), "--html", str(page))[0] in (0, 4)
        before = page.read_bytes()
        assert run(capsys, str(kind), "--html", str(page))[0] == 2 and page.read_bytes() == before


# ---- the benchmark -------------------------------------------------------------------------------------------------


HEAD = "id,repo,framework,model,hardware,config,oom_message,phase,cause_class,cause,fix,cause_basis\n"


def test_the_benchmark_reads_no_answer(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "x.csv"
    path.write_text(
        HEAD + "1,a/b,x,y,z,c,OOM,,logits_ce,cross_entropy of logits,fused loss,stated\n"
        "2,a/b,x,y,z,use_cache,OOM,,use_cache,-,-,-\n"
    )
    one, two = oom_cases.scored(path)
    assert (one.first.cause, two.first.cause) == ("not-known", "kv-cache")
    assert oom_cases.main([str(path)]) == 0  # nothing is wrong and certain
    assert "| logits | 1 | 0 | not-known |" in capsys.readouterr().out


# most rows are somebody's words, which are not interpreted; these shares quote a frame, a message, a setting or sizes
@pytest.mark.parametrize(
    ("name", "least"), [("oom_cases", 0.44), ("oom_cases_later", 0.31), ("oom_cases_held_out", 0.30)]
)
def test_reports_get_their_cause_and_none_a_wrong_certainty(name: str, least: float) -> None:
    named, wrong, text = oom_cases.summary(oom_cases.scored(oom_cases.DATA / f"{name}.csv"))
    assert named >= least and wrong == 0, text


WORDS_ALONE = (
    "we train a small network on one card and keep the losses of all steps to plot them later, the memory in use grows "
    "a little with each step and after some thousand steps the run stops: out of memory",
    "it runs out of memory only when evaluation is enabled, a few steps later",
    "the second rank also puts a context on the first card, out of memory",
    "CUDA out of memory",
)


@pytest.mark.parametrize("text", WORDS_ALONE)
def test_words_alone_show_no_cause_and_the_log_is_asked_for(text: str) -> None:
    (finding,) = explain(read_text(text))
    assert finding.cause == "not-known" and "memfit explain on the log" in finding.remedies[0].text


def test_three_causes_at_most_and_what_would_tell_them_apart() -> None:
    text = (
        CASES["fragmented"][0]
        + "\nGRPOConfig(use_vllm=True, num_generations=8), dpo, modules_to_save=[lm_head], losses.append(loss)"
    )
    evidence = read_text(text)
    found = explain(evidence)
    assert len(found) == 3 and found[0].confidence != "certain" and wanted(evidence, found)


def test_every_class_of_the_collection_is_a_cause() -> None:
    assert set(oom_cases.CLASSES.values()) <= set(CAUSES)


# ---- from tapes ----------------------------------------------------------------------------------------------------


def test_layers_are_one_place() -> None:
    assert unnumbered("layers.3.mlp.0: mm (a2.py:7)") == "layers.*.mlp.*: mm (a2.py:7)"
    assert unnumbered("0: addmm") == "*: addmm"


def test_what_is_alive_when_memory_runs_out_is_grouped_and_measured() -> None:
    step = [
        Mark("step", "forward"),
        *(Alloc(10 + i, 20 * MIB, "activations", f"layers.{i}.mlp: mm (x.py:5)") for i in range(3)),
    ]
    tape = Tape(
        (Mark("load", "load"), Alloc(0, 40 * MIB, "parameters", "w (x.py:1)"), *step, Free(10), Oom(60 * MIB)),
        "measured",
        {"capacity": str(120 * MIB)},
    )  # fmt: skip
    found = memory_of(tape)
    assert (found.requested, found.reserved, found.asked, found.phase, found.turn) == (
        80 * MIB,
        80 * MIB,
        60 * MIB,
        "step",
        0,
    )
    assert [(x.role, x.module, x.line, x.bytes, x.count) for x in holders(found.groups)] == [
        ("parameters", "w", "x.py:1", 40 * MIB, 1), ("activations", "layers.*.mlp: mm", "x.py:5", 40 * MIB, 2),
    ]  # fmt: skip
    assert found.floors == (40 * MIB,) and found.peaks == (100 * MIB,)


def test_a_tape_that_never_failed_is_told_at_its_highest() -> None:
    tape = Tape((Alloc(0, MIB), Alloc(1, 5 * MIB), Free(1), Alloc(2, 2 * MIB)), "traced")
    found = memory_of(tape)
    assert (found.requested, found.asked, found.capacity) == (6 * MIB, 0, None)


def test_an_empty_tape_has_nobody() -> None:
    assert memory_of(Tape((), "traced")).groups == ()


def test_a_leak_is_found_in_a_snapshot_by_its_stacks(tmp_path: Path) -> None:
    explain_snapshots.big(tmp_path / "x.pickle", 12)
    first = explain(Evidence(memory=memory_of(read(tmp_path / "x.pickle"))))[0]
    assert (first.cause, first.confidence) == ("leak", "certain")
    assert first.line.startswith("model_")
