"""memfit explain on logs as programs print them: which cause, which is none, and which remedies are left."""

from __future__ import annotations

from pathlib import Path

import pytest

from memfit import cli
from memfit.explain import explain, read_text
from memfit.explain.text.figures import stated
from memfit.nouns.finding import Cause
from memfit.units import GIB, MIB

TRACE = "Traceback (most recent call last):\n"
OOM = (
    "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate {}. "
    "GPU 0 has a total capacity of {} of which {} is free. "
)
HELD = "Of the allocated memory {} is allocated by PyTorch, and {} is reserved by PyTorch but unallocated."
FULL = OOM.format("256.00 MiB", "23.65 GiB", "90.00 MiB") + HELD.format("22.90 GiB", "120.00 MiB")
OLD = (
    "RuntimeError: CUDA out of memory. Tried to allocate 900.00 MiB "
    "(GPU 0; 10.76 GiB total capacity; 6.01 GiB already allocated; 700.00 MiB free; "
)


def frame(path: str, function: str, code: str) -> str:
    return f'  File "{path}", line 7, in {function}\n    {code}\n'


# ---- in which nothing ran out ---------------------------------------------------------------------------------------

OTHERWISE = {
    "an error of shapes": "step 1 loss 2.9\nstep 2 loss 2.8\nGPU memory used 9.1 GiB\n"
                          "ValueError: Target size (torch.Size([4])) must be the same as input size",
    "an assertion on the card": TRACE + frame("fit.py", "<module>", "y = net(x)")
    + "RuntimeError: CUDA error: device-side assert triggered\nCUDA kernel errors might be asynchronously reported at "
    "some other API call, so the stacktrace below might be incorrect.",
    "an illegal access": TRACE + frame("fit.py", "step", "loss.backward()")
    + "RuntimeError: CUDA error: an illegal memory access was encountered",
    "a key": "Loading weights into memory: 14.2 GiB allocated\n" + TRACE + frame("fit.py", "main", "lr = conf['lr']")
    + "KeyError: 'lr'",
    "ctrl-c": " 31%|███  | 31/100 [00:31<01:10,  1.0s/it]^C" + TRACE + frame("fit.py", "main", "loss.backward()")
    + "KeyboardInterrupt",
    "success beside settings": "epoch 1 loss 0.5\nINFO expandable_segments is on to avoid CUDA out of memory errors\n"
                               "epoch 2 loss 0.4\nTraining completed",
    "a model that is saved": "epoch 1 loss 0.5\nepoch 2 loss 0.4\nsaving model, all done",
    "success": "{'loss': 0.71, 'epoch': 2.9}\n{'train_runtime': 812.0, 'train_loss': 0.9}\n"
               "Done. Peak GPU memory 17.3 GiB of 24 GiB.",
    "the time of a job": "slurmstepd: error: *** STEP 77.0 ON n3 CANCELLED AT 2025-02-03T04:00:00 DUE TO TIME "
                         "LIMIT ***\nsrun: error: n3: task 0: Killed",
    "a signal": "2025-02-03 04:00:00 worker ended\nChildFailedError: exitcode: -15, SIGTERM",
    "too few values": TRACE + frame("fit.py", "main", "a, b = batch")
    + "ValueError: not enough values to unpack (expected 2, got 1)",
}  # fmt: skip


@pytest.mark.parametrize("name", OTHERWISE)
def test_a_log_that_ended_otherwise_has_no_cause(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "run.log").write_text(OTHERWISE[name])
    code = cli.main(["explain", str(tmp_path / "run.log")])
    out, err = capsys.readouterr()
    assert (code, out) == (2, "") and "no out-of-memory in it" in err


@pytest.mark.parametrize(
    ("told", "cause"),
    [
        ("slurmstepd: error: Detected 1 oom_kill event in StepId=5.0.\n", "host-ram"),
        ("slurmstepd: error: Exceeded step memory limit at some point.\n", "host-ram"),
        (
            "W api.py:897] Sending process 101 closing signal SIGTERM\n"
            "E api.py:869] failed (exitcode: -9) local_rank: 1 (pid: 102)\n",
            "host-ram",
        ),
    ],
)
def test_a_log_beside_which_memory_is_told_of_has_one(told: str, cause: Cause) -> None:
    assert explain(read_text(told + OTHERWISE["an error of shapes"]))[0].cause == cause


# ---- what libraries print in every run -------------------------------------------------------------------------------

LAYER = "/env/lib/python3.11/site-packages/transformers/models/llama/modeling_llama.py"
ORDINARY = (
    TRACE + frame("train.py", "<module>", "trainer.train()")
    + frame("/env/lib/python3.11/site-packages/transformers/trainer.py", "training_step",
            "loss = self.compute_loss(model, inputs)")
    + frame(LAYER, "forward",
            "hidden_states = decoder_layer(hidden_states, past_key_values=past_key_values, use_cache=use_cache)")
    + frame(LAYER, "forward", "hidden_states, _ = self.self_attn(hidden_states)")
    + frame(LAYER, "forward", "attn_output, attn_weights = attention_interface(")
    + frame("/env/lib/python3.11/site-packages/transformers/integrations/sdpa_attention.py", "sdpa_attention_forward",
            "attn_output = torch.nn.functional.scaled_dot_product_attention(")
    + FULL
)  # fmt: skip
IN_EVERY_RUN = (
    "`use_cache=True` is incompatible with gradient checkpointing. Setting `use_cache=False`.",
    'LlamaConfig {\n  "use_cache": true,\n  "vocab_size": 128256\n}',
    "/env/lib/python3.11/site-packages/torch/utils/checkpoint.py:1399: UserWarning: torch.utils.checkpoint: the "
    "use_reentrant parameter should be passed explicitly. Starting in PyTorch 2.9, calling checkpoint without "
    "use_reentrant will raise an exception.",
    "gradient_checkpointing=True,\ngradient_checkpointing_kwargs={'use_reentrant': False},",
    'BitsAndBytesConfig {\n  "bnb_4bit_quant_storage": "uint8",\n  "load_in_4bit": true\n}',
    "NCCL version 2.21.5+cuda12.4",
    "LlamaForCausalLM(\n  (model): LlamaModel(\n    (embed_tokens): Embedding(128256, 4096)\n  )\n"
    "  (lm_head): Linear(in_features=4096, out_features=128256, bias=False)\n)",
    "`loss_type=None` was set in the config but it is unrecognized. Using the default loss: `ForCausalLMLoss`.",
    "the longest sample of the dataset has 2048 tokens",
    "Saving vocabulary of 32000 words, rank 0 of 8 process groups",
    "Saving vocabulary to out/vocab.json: BPE merge indices are not consecutive. Please check that the tokenizer is "
    "not corrupted!",
    "Detected DeepSpeed ZeRO-3: activating zero.init() for this model",
)  # fmt: skip


@pytest.mark.parametrize("line", IN_EVERY_RUN)
def test_what_is_printed_in_every_run_tells_nothing_of_this_one(line: str) -> None:
    alone, after = explain(read_text(ORDINARY))[0], explain(read_text(f"{line}\n{ORDINARY}"))[0]
    assert (after.cause, after.confidence) == (alone.cause, alone.confidence) == ("activations", "possible")


@pytest.mark.parametrize("prefix", ["", "[rank0]: ", "(RayTrainWorker pid=71) "])
def test_code_further_out_says_nothing_whoever_prints_it(prefix: str) -> None:
    """Python 3.13 prints all lines of a statement, torchrun and Ray put something before each."""
    lines = ORDINARY.replace(
        "decoder_layer(hidden_states, ", "decoder_layer(\n        hidden_states,\n        "
    ).splitlines()
    evidence = read_text("\n".join(prefix + line for line in lines))
    assert "past_key_values" not in evidence.relevant and "scaled_dot_product_attention(" in evidence.relevant
    assert [f.code for f in evidence.frames][-1] == "attn_output = torch.nn.functional.scaled_dot_product_attention("
    first = explain(evidence)[0]
    assert (first.cause, first.confidence, first.line) == ("activations", "possible", "train.py:7")


def test_the_wrapper_around_every_pass_in_16_bits_is_no_loss() -> None:
    path = "/env/lib/python3.11/site-packages/accelerate/utils/operations.py"
    wrapped = frame(path, "__call__", "return convert_to_fp32(self.model_forward(*args, **kwargs))")
    text = ORDINARY.replace(
        frame(LAYER, "forward", "hidden_states, _"), wrapped + frame(LAYER, "forward", "hidden_states, _")
    )
    text = ORDINARY.replace(TRACE, TRACE + wrapped)
    assert explain(read_text(text))[0].cause == "activations"
    inside = TRACE + wrapped + frame(path, "_convert_to_fp32", "return tensor.float()") + FULL
    assert explain(read_text(inside))[0].cause == "logits"


# ---- which cause ----------------------------------------------------------------------------------------------------

RANKS = "".join(
    f"Process {number} has {size} GiB memory in use. "
    for number, size in ((900, "29.60"), (901, "2.40"), (902, "2.40"), (903, "2.38"))
)
SMI = "".join(
    f"|    0   N/A  N/A     {pid}      C   python {name}     {size}MiB |\n"
    for pid, name, size in ((4012, "a.py", 17300), (9907, "b.py", 4100))
)
CAUSES: dict[str, tuple[str, Cause, str]] = {
    "a call has no shape": (TRACE + frame("fit.py", "main", "blend(net, views)") + FULL, "not-known", ""),
    "queries, keys and values": (TRACE + frame("fit.py", "main", "out = attend(q, k, v)") + FULL, "not-known", ""),
    "words of a vocabulary": (TRACE + frame("fit.py", "main", "h = project(x)  # (batch, seq, vocab_size)") + FULL,
                              "logits", "vocab_size"),
    "shapes of TensorFlow": ("OOM when allocating tensor with shape[32,512,128,128] and type float on "
                             "/job:localhost/replica:0/task:0/device:GPU:0", "not-known", ""),
    "DDP's start": (TRACE + frame("fit.py", "main", "model = DDP(model, device_ids=[local_rank])")
                    + frame("/env/lib/python3.11/site-packages/torch/distributed/utils.py", "_sync_module_states",
                            "_sync_params_and_buffers(process_group, module_states, broadcast_bucket_size, src)")
                    + FULL,
                    "replicated", "_sync_module_states"),
    "pinned memory": (TRACE + frame("/env/lib/python3.11/site-packages/deepspeed/runtime/zero/stage_1_and_2.py",
                                    "__init__", "self.single_partition_of_fp32_groups[i].pin_memory()")
                      + frame("/env/lib/python3.11/site-packages/deepspeed/accelerator/cuda_accelerator.py",
                              "pin_memory", "return tensor.pin_memory()") + "RuntimeError: CUDA error: out of memory",
                      "host-ram", "pin_memory"),
    "a classifier's loss": (TRACE + frame("fit.py", "main", "loss = F.cross_entropy(out, y)")
                            + frame("/env/lib/python3.11/site-packages/torch/nn/functional.py", "cross_entropy",
                                    "return torch._C._nn.cross_entropy_loss(") + FULL,
                            "logits", "cross_entropy"),
    "numbers of one": (TRACE + frame("gen.py", "call", "b = empty_strided_cuda((32768, 151936), (151936, 1))") + FULL,
                       "logits", "151936"),
    "more than the card": (OLD.replace("6.01", "17.40") + "17.60 GiB reserved in total by PyTorch)",
                           "spill", "17.4 GiB are allocated on a card of 10.8 GiB"),
    "ranks one after another": (OOM.format("100.00 MiB", "39.39 GiB", "20.00 MiB") + RANKS
                                + HELD.format("28.40 GiB", "300.00 MiB"), "ranks-on-one-gpu", "3 processes"),
    "all is another's": (
        frame("fit.py", "<module>", "torch.cuda.set_device(0)") + OOM.format("2.00 MiB", "15.77 GiB", "1.10 MiB")
        + "Process 5150 has 15.40 GiB memory in use. "
        "Including non-PyTorch memory, this process has 380.00 MiB memory in use. "
        + HELD.format("0 bytes", "0 bytes"), "other-process", "15.4 GiB of the card are held by process 5150"),
    "nvidia-smi's rows": (SMI + "RuntimeError: CUDA error: out of memory",
                          "other-process", "16.9 GiB of process 4012, 4.00 GiB of process 9907"),
    "ZeRO's copy in 32 bits": (
        "[INFO] [stage_1_and_2.py:149:__init__] Reduce bucket size 500000000\n" + TRACE
        + frame("/x/site-packages/deepspeed/runtime/zero/stage_1_and_2.py", "__init__",
                "p = self.bit16_groups[i].to(device).clone().float().detach()")
        + FULL, "optimizer-states", "float"),
    "a network of convolutions": (
        TRACE + frame("/x/site-packages/torchvision/models/vgg.py", "forward", "x = self.features(images)")
        + frame("/x/site-packages/torch/nn/functional.py", "batch_norm", "return torch.batch_norm(") + FULL,
        "activations", ""),
    "the build of a library": (" 1%| | 3/200 [00:10<11:00]CUDA Error: out of memory at "
                               "/home/someone/shared/server/zlab/git/lib/c.c line 9", "not-known", ""),
    "llama.cpp": ("ggml_backend_cuda_buffer_type_alloc_buffer: allocating 9000.00 MiB on device 0: "
                  "cudaMalloc failed: out of memory\n"
                  "llama_model_load: error loading model: unable to allocate CUDA0 buffer", "capacity", ""),
    "more than 16 bits": (
        "Using NVIDIA A100 MIG 2g.10gb\n" + TRACE
        + frame("run.py", "main", 'm = AutoModel.from_pretrained("org/tiny-2.4b")')
        + frame("/x/site-packages/torch/nn/modules/module.py", "_apply", "return t.to(device)")
        + OOM.format("64.00 MiB", "8.90 GiB", "20.00 MiB") + HELD.format("8.50 GiB", "30.00 MiB"),
        "wrong-dtype", "MIG slice of one (2g.10gb)"),
    "a loss of what failed": (
        TRACE + frame("fit.py", "main", "loss = F.cross_entropy(net(x), y)")
        + frame("/x/site-packages/torch/nn/modules/module.py", "_call_impl", "return forward_call(*args, **kwargs)")
        + frame("net.py", "forward", "x = self.conv2(x)") + FULL, "activations", "forward pass"),
    "a loss of what failed, told twice": (
        TRACE + frame("fit.py", "main", "total = weight * F.cross_entropy(run(net, x), y)")
        + frame("fit.py", "run", "return F.log_softmax(net(x), 1)")
        + frame("net.py", "forward", "x = self.conv2(x)") + FULL, "activations", "forward pass"),
    "a backward of a loss": (
        TRACE + frame("fit.py", "main", "F.cross_entropy(out, y).backward()")
        + frame("/x/site-packages/torch/_tensor.py", "backward", "torch.autograd.backward(") + FULL,
        "activations", "backward pass"),
    "the loss itself": (
        TRACE + frame("fit.py", "main", "loss = F.cross_entropy(net(x).float(), y)")
        + frame("/x/site-packages/torch/nn/functional.py", "cross_entropy",
                "return torch._C._nn.cross_entropy_loss(") + FULL, "logits", "cross_entropy"),
    "a block as large as logits": (
        TRACE
        + frame("fit.py", "main", "model(**batch)  # Qwen/Qwen2.5-7B, per_device_train_batch_size=8, max_length=4096")
        + frame("/x/site-packages/transformers/models/qwen2/modeling_qwen2.py", "forward",
                "hidden_states = self.mlp(hidden_states)")
        + OOM.format("1.16 GiB", "79.10 GiB", "500.00 MiB") + HELD.format("77.00 GiB", "600.00 MiB"), "capacity", ""),
    "a container's end": ("train-1 exited with code 137", "host-ram", ""),
    "a run that went on": (
        "step 1 loss 3.0\n"
        "WARNING: caught OutOfMemoryError: CUDA out of memory. Tried to allocate 1.00 GiB, retrying with batch size 6\n"
        "step 2 loss 2.9\nTraining finished", "activations", "the run went on after the error"),
}  # fmt: skip


@pytest.mark.parametrize("name", CAUSES)
def test_a_log_has_the_cause_that_it_shows(name: str) -> None:
    text, cause, said = CAUSES[name]
    found = explain(read_text(text))[0]
    assert found.cause == cause and said in " ".join(proof.text for proof in found.evidence)


@pytest.mark.parametrize(
    ("after", "said"),
    [
        ("Job finished at Wed May  1 10:00:00 UTC 2024\n", ""),  # the last line of a batch script
        ("wandb:   train_runtime 100\n", ""),
        ("step 2 loss 2.0\nstep 3 loss 1.9\n", "the run went on after the error"),
        ("step 2 loss 2.0\n" + TRACE + "ValueError: shapes do not match\n",
         "the run went on after it, and ended for another reason"),
    ],
)  # fmt: skip
def test_a_run_went_on_where_it_took_steps(after: str, said: str) -> None:
    proofs = [
        p.text
        for p in explain(read_text(TRACE + frame("fit.py", "step", "loss.backward()") + FULL + "\n" + after))[
            0
        ].evidence
    ]
    assert [text for text in proofs if "the run went on" in text] == ([said] if said else [])


def test_what_python_and_cuda_always_write_is_no_sign() -> None:
    ended = TRACE + frame("fit.py", "step", "loss.backward()") + FULL + "\nKeyboardInterrupt\n"
    assert all(found.cause != "other-process" for found in explain(read_text(ended)))
    always = (
        "RuntimeError: CUDA error: out of memory\nCUDA kernel errors might be asynchronously reported at some other "
        "API call, so the stacktrace below might be incorrect."
    )
    assert explain(read_text(always))[0].cause == "not-known"


@pytest.mark.parametrize(
    ("text", "length"),
    [
        ("max_seq_length=2048\nGenerate config GenerationConfig {\n  \"max_length\": 4096\n}\n", 2048),
        ("max_length=1024\nGeneration config GenerationConfig {\n  \"max_length\": 4096\n}\n", 1024),
        ("max_length: 4096\ncutoff_len: 1024\nmax_length: 4096\n", 1024),
        ("max_length=1000000\n", None),
    ],
)  # fmt: skip
def test_the_length_is_that_of_training(text: str, length: int | None) -> None:
    assert stated(read_text(text)).get("sequence_length") == length


def test_what_a_log_states_never_takes_the_explanation_away(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """FlashAttention 2 on a T4: the log says so, the card of the flags has no kernel for it."""
    (tmp_path / "run.log").write_text("attn_implementation=flash_attention_2\n" + FULL)
    words = ["explain", str(tmp_path / "run.log"), "--model", "smollm2-135m", "--gpu", "t4"]
    code = cli.main(words)
    out, err = capsys.readouterr()
    assert code in (0, 4) and "to change" in out and "does not run on this card" in err
    assert cli.main([*words, "--attention", "flash"]) == 2  # who types it is told


def test_ranks_are_not_called_a_foreign_process() -> None:
    others = [
        found for found in explain(read_text(CAUSES["ranks one after another"][0])) if found.cause == "other-process"
    ]
    assert all(found.confidence != "certain" for found in others)


def test_a_size_is_told_in_its_own_unit() -> None:
    found = explain(read_text("from_pretrained of a 2.4b model: after loading 8.94 GiB are in use"))[0]
    assert found.evidence[0].text == "8.94 GiB are 4 bytes for each of 2.4 B weights"


@pytest.mark.parametrize(
    ("text", "title", "remedy"),
    [
        (TRACE + frame("/x/torch/_inductor/runtime/triton_heuristics.py", "run", "launch()")
         + "OutOfResources: out of resource: shared memory, Required: 131072, Hardware limit: 101376. "
         "Reducing block sizes may help.",
         "on-chip memory", "num_stages"),
        (OOM.format("1.00 GiB", "79.11 GiB", "50.00 GiB") + "29.00 GiB allowed; "
         + HELD.format("28.50 GiB", "90.00 MiB"),
         "the limit that was set for this process", "set_per_process_memory_fraction"),
        (OOM.format("1.00 GiB", "79.11 GiB", "500.00 MiB")
         + "Of the allocated memory 76.00 GiB is allocated by PyTorch, with 30.00 GiB allocated in private pools "
         "(e.g., CUDA Graphs), and 900.00 MiB is reserved by PyTorch but unallocated.",
         "private pools", "fewer captured shapes"),
    ],
)  # fmt: skip
def test_what_is_no_cause_of_the_list_is_said_plainly(text: str, title: str, remedy: str) -> None:
    found = explain(read_text(text))[0]
    assert found.cause == "not-known" and title in found.title and remedy in found.remedies[0].text


# ---- messages -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ("...ied to allocate 3.25 GiB. GPU 1 has a total capacity of 39.5", {"tried": int(3.25 * GIB), "total": None}),
        ("has a total capacity of 39.50 GiB of which 1.00 GiB is free.", {"total": int(39.5 * GIB), "free": GIB}),
        ("ValueError: To serve at least one request with the models's max seq len (65536), (8.00 GiB KV cache is "
         "needed, which is larger than the available KV cache memory (3.50 GiB). Based on the available memory, the "
         "estimated maximum model length is 28672.",
         {"kind": "vllm", "tried": 8 * GIB, "free": int(3.5 * GIB)}),
        ("ValueError: Free memory on device (10.50/39.40 GiB) on startup is less than desired GPU memory utilization "
         "(0.9, 35.46 GiB).",
         {"kind": "vllm", "tried": int(35.46 * GIB), "total": int(39.4 * GIB), "free": int(10.5 * GIB)}),
        ("alloc_buffer: allocating 6282.99 MiB on device 0: cudaMalloc failed: out of memory",
         {"kind": "driver", "tried": int(6282.99 * MIB)}),
    ],
)  # fmt: skip
def test_numbers_are_read_of_halves_and_of_other_engines(text: str, wanted: dict[str, object]) -> None:
    (found,) = read_text(text).messages
    assert {name: getattr(found, name) for name in wanted} == wanted


# ---- what is set already --------------------------------------------------------------------------------------------

STEP = TRACE + frame(
    "/x/site-packages/bitsandbytes/optim/optimizer.py", "init_state", "state['state1'] = self.get_state_buffer(p)"
)
PIECES = OOM.format("2.00 GiB", "79.11 GiB", "1.00 GiB") + HELD.format("60.00 GiB", "17.00 GiB")


@pytest.mark.parametrize(
    ("text", "there", "not_there"),
    [
        (STEP + FULL, "paged_adamw_8bit", "adamw_bnb_8bit"),
        ("GRPOConfig(use_vllm=True, vllm_enable_sleep_mode=True)\n" + FULL,
         "vllm_gpu_memory_utilization", "sleep_mode"),
        ("GRPOConfig(use_vllm=True)\n" + FULL, "sleep_mode", "paged"),
        ("model max seq len: the available KV cache memory (3.50 GiB)... To serve at least one request with the "
         "model's max seq len (65536), 8.00 GiB KV cache is needed; the estimated maximum model length is 28672. Try "
         "increasing gpu_memory_utilization",
         "max_model_len=28672", "a smaller vllm"),
        ("TrainingArguments(gradient_checkpointing=True, per_device_train_batch_size=1, lr=1)\n" + TRACE
         + frame("/x/site-packages/torchvision/models/vgg.py", "forward", "x = f(x)") + FULL,
         "smaller images", "gradient_checkpointing"),
        (PIECES, "expandable_segments", "max_split"),
        (OLD + "9.80 GiB reserved in total by PyTorch)", "max_split_size_mb:128 (torch 1.10", "PYTORCH_ALLOC_CONF"),
        (OLD + "3.50 GiB cached)", "a newer torch", "PYTORCH"),
        ("torch 2.4, " + OLD + "9.80 GiB reserved in total by PyTorch)",
         "expandable_segments:True (before", "max_split"),
    ],
)  # fmt: skip
def test_what_is_set_already_or_cannot_be_is_no_remedy(text: str, there: str, not_there: str) -> None:
    remedies = " | ".join(remedy.text for remedy in explain(read_text(text))[0].remedies)
    assert there in remedies and not_there not in remedies
