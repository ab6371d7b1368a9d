"""Remedies by cause: the setting to change, its cost, and the fields of a Recipe by which the planner prices it."""

from __future__ import annotations

import re
from collections.abc import Iterator

from memfit.explain.evidence import KEEPERS, Evidence
from memfit.explain.frames import CONVOLUTIONS
from memfit.nouns.finding import Cause, Remedy

MOST_PROCESSES = 8  # of a dataset's preparation, that a machine surely has memory for
NONE, SLOWER, QUALITY = "no cost", "slower", "changes what is learned"

FUSED = Remedy("fused loss: TRL 1.15+ has it by default, elsewhere use_liger_kernel=True", NONE, (("loss", "fused"),))
CHECKPOINTING = Remedy(
    "gradient_checkpointing=True", "about a quarter more time per step", (("checkpointing", "full"),)
)
BATCH_1 = Remedy("per_device_train_batch_size=1, and as many gradient_accumulation_steps", NONE, (("micro_batch", 1),))
EIGHT_BIT = Remedy('optim="adamw_bnb_8bit"', "negligible in most fine-tunes", (("optimizer", "adamw-8bit"),))
PAGED = Remedy('optim="paged_adamw_8bit": states move to host RAM when the card is full', "slower while they move")
FUSED_STEP = Remedy(
    'optim="adamw_torch_fused" (fused=True): no copy of all weights in the step', NONE, (("optimizer", "adamw"),)
)
LORA = Remedy("LoRA: peft_config=LoraConfig(...)", QUALITY, (("method", "lora"),))
QLORA = Remedy("QLoRA: a 4-bit base under LoRA", QUALITY, (("method", "qlora"), ("quantization", "nf4-double")))
SHARDED = Remedy(
    "shard the weights: ZeRO-3 or FSDP", "weights cross the links in every pass", (("shard", "parameters"),)
)
OFFLOADED = Remedy("optimizer states in host RAM: DeepSpeed offload_optimizer", SLOWER, (("offload", "optimizer"),))
FLASH = Remedy('attn_implementation="sdpa" or "flash_attention_2"', NONE, (("attention", "sdpa"),))
SMALLER = Remedy("smaller images, crops or clips", QUALITY)
SHORTER = Remedy("cut or filter the longest samples: max_length", "long samples lose their end")
EXPANDABLE = Remedy(
    "PYTORCH_ALLOC_CONF=expandable_segments:True (before torch 2.10: PYTORCH_CUDA_ALLOC_CONF)",
    NONE,
    (("alloc_conf", "expandable_segments:True"),),
)
MAX_SPLIT = Remedy(
    "PYTORCH_CUDA_ALLOC_CONF=max_split_size_mb:128 (torch 1.10 and later); torch 2.1 has expandable_segments:True", NONE
)
NEWER = Remedy(
    "a newer torch: 1.10 has max_split_size_mb, 2.1 has expandable_segments:True; this one has neither", NONE
)
SAME_SHAPES = Remedy("pad to a multiple, or to one length: fewer shapes, fewer holes", "some padding is computed")
ON_CPU = Remedy('torch.load(..., map_location="cpu"), and del it after load_state_dict', NONE)
LAUNCH = Remedy(
    "start with torchrun or accelerate launch, and torch.cuda.set_device(LOCAL_RANK) before anything else", NONE
)
SLEEP = Remedy("vllm_enable_sleep_mode=True: the engine gives its memory back while the model trains", SLOWER)
EVAL_1 = Remedy("per_device_eval_batch_size=1 (its default is 8)", SLOWER)
BF16 = Remedy('load with dtype=torch.bfloat16 (dtype="auto")', "none for a frozen base", (("precision", "bf16"),))

REMEDIES: dict[Cause, tuple[Remedy, ...]] = {
    "capacity": (SHARDED, EIGHT_BIT, OFFLOADED, LORA, QLORA),
    "oversized": (Remedy("a smaller batch or shorter samples, or the same work in pieces (chunks, eval_batch_size)",
        SLOWER),),
    "not-in-effect": (Remedy("see that the launcher passes the file: accelerate launch, deepspeed or torchrun on all "
        "cards, and the log names ZeRO or FSDP", NONE), Remedy("memfit trace on the command, to see what it really "
        "sets", NONE)),
    "activations": (CHECKPOINTING, BATCH_1, SHORTER),
    "logits": (FUSED, BATCH_1),
    "attention": (FLASH, BATCH_1),
    "kv-cache": (Remedy("use_cache=False in training", NONE),),
    "long-sample": (Remedy("put the longest batch first, so that it fails at once or not at all", NONE), SHORTER,
        BATCH_1),
    "image-tokens": (Remedy("limit the pixels: max_pixels, image_max_pixels", "less detail"), BATCH_1),
    "pairs": (SHORTER, BATCH_1, Remedy("a smaller max_length: it counts twice", "long pairs are cut")),
    "group-batch": (Remedy("fewer num_generations, or a smaller per_device_train_batch_size", QUALITY), FUSED),
    "reference-model": (Remedy("precompute_ref_log_probs=True, or train with LoRA: no second model", NONE), LORA),
    "optimizer-states": (EIGHT_BIT, SHARDED, OFFLOADED, LORA),
    "optimizer-step": (FUSED_STEP, EIGHT_BIT, SHARDED),
    "eval-logits": (Remedy("preprocess_logits_for_metrics=argmax, or prediction_loss_only=True", NONE),
        Remedy("eval_accumulation_steps=1: to the host after each batch", SLOWER)),
    "eval-batch": (EVAL_1,),
    "eval-generate": (Remedy("per_device_eval_batch_size=1, fewer max_new_tokens, or evaluate in a run of its own",
        SLOWER),),
    "eval-leftovers": (Remedy("optimizer.zero_grad(set_to_none=True) before, torch.cuda.empty_cache() around the "
        "evaluation", NONE), Remedy("per_device_eval_batch_size=1", SLOWER)),
    "eval-graph": (Remedy("with torch.no_grad(): around the evaluation", NONE),),
    "resume-states": (ON_CPU, EIGHT_BIT, BATCH_1),
    "stale-checkpoint": (ON_CPU, Remedy("del checkpoint; gc.collect(); torch.cuda.empty_cache()", NONE)),
    "save-gather": (Remedy("SHARDED_STATE_DICT, or offload_to_cpu=True with rank0_only=True", NONE),),
    "merge": (Remedy("merge on the CPU, in a process of its own", SLOWER),),
    "two-copies": (Remedy("keep one copy on the card: del the other, or leave it on the CPU", NONE),),
    "wrong-dtype": (BF16,),
    "kbit-upcast": (Remedy("embeddings_skip_upcast: true (axolotl), or cast the embeddings back to bf16", NONE),),
    "fsdp-upcast": (Remedy("count 4 bytes per trained weight: FSDP2 keeps them in fp32", NONE), EIGHT_BIT),
    "modules-to-save": (Remedy("trainable_token_indices, or LoRA on the embedding, instead of modules_to_save", NONE),),
    "dequantized": (Remedy("train from the 16-bit checkpoint, sharded (ZeRO-3, FSDP)", NONE), SHARDED),
    "quantize-peak": (Remedy("fewer loading workers, or a checkpoint that is quantised already", SLOWER),),
    "load-peak": (Remedy("fsdp_cpu_ram_efficient_loading: true, sync_module_states: true (QLoRA: "
        "qlora_sharded_model_loading)", NONE),),
    "replicated": (SHARDED, Remedy("no device_map in a sharded run", NONE)),
    "zero3-init": (Remedy("make the training arguments (HfDeepSpeedConfig) before from_pretrained", NONE),),
    "quantized-unsharded": (Remedy("bnb_4bit_quant_storage: bfloat16, so that FSDP shards the 4-bit weights", NONE),),
    "fsdp-wrap": (Remedy("wrap each layer: auto_wrap_policy TRANSFORMER_BASED_WRAP with its layer class", NONE),),
    "companion-models": (Remedy("compute latents and text embeddings once, then take the encoders off the card",
        "disk space"), QLORA),
    "ranks-on-one-gpu": (LAUNCH, ON_CPU),
    "data-parallel": (Remedy("torchrun (DDP) instead of python; or CUDA_VISIBLE_DEVICES=0", NONE),),
    "inference-engine": (Remedy("a smaller vllm_gpu_memory_utilization", "slower generation"), SLEEP),
    "other-process": (Remedy("see nvidia-smi, end the process that is left over", NONE),),
    "nccl": (Remedy("share one process group (mesh); NCCL_BUFFSIZE smaller", "slower links"),),
    "buckets": (Remedy("smaller reduce_bucket_size and allgather_bucket_size (5e7)", "slower links"),),
    "fragmentation": (EXPANDABLE, SAME_SHAPES),
    "leak": (Remedy("keep numbers, not tensors: loss.item(), .detach().cpu()", NONE),),
    "exception": (Remedy("handle it outside the except block, then gc.collect() and torch.cuda.empty_cache()", NONE),),
    "temporaries": (Remedy("work in place and one tensor at a time; del what is used up; no second list of all "
        "weights", NONE), Remedy("torch.no_grad() where no backward follows", NONE)),
    "host-ram": (Remedy("more host memory, or one process that loads for all: low_cpu_mem_usage", "larger machine"),),
    "spill": (Remedy("driver setting 'CUDA - Sysmem Fallback Policy: Prefer No Sysmem Fallback', then a smaller "
        "recipe", NONE),),
    "input-grads": (Remedy('model.enable_input_require_grads(), or gradient_checkpointing_kwargs={"use_reentrant": '
        'False}', NONE),),
    "not-known": (Remedy("memfit explain on a snapshot: torch.cuda.memory._record_memory_history(), then "
        "_dump_snapshot()", NONE),),
}  # fmt: skip

# the remedy for a leak by the kind of variable; that for "models" stands alone, the others are added
KEPT = {
    "graph": Remedy("call backward() on each loss instead of their sum: each call frees its graph", NONE),
    "state": Remedy("state.detach() between steps, or every few calls: its graph stays until the backward", QUALITY),
    "hook": Remedy("handle.remove() when the hook is no longer needed", NONE),
    "models": Remedy("del the model, its optimizer and whatever holds them before making the next; keep a "
        "state_dict() on the CPU", NONE),
}  # fmt: skip
# for copies and averages of weights, where .item() is no remedy
COPIES = (Remedy("keep one copy, on the CPU: {k: v.detach().cpu() for k, v in model.state_dict().items()}", NONE),)
SHOWN_LAST = (
    Remedy(
        "sys.last_value = sys.last_exc = sys.last_traceback = None, then gc.collect() and torch.cuda.empty_cache()",
        NONE,
    ),
)
FLOAT = Remedy(
    ".float() for the model and its data: numpy's floats have 64 bits, and so has what is computed with them", NONE
)
EARLIER = Remedy("start the recording before the model is made: torch.cuda.memory._record_memory_history()", NONE)
ASK_FOR_LOG = Remedy("run memfit explain on the log, with the whole error message and its traceback", NONE)
GIVE_BACK = Remedy(
    "torch.cuda.empty_cache() before the engine wakes up, and weights and optimizer offloaded again after a save",
    SLOWER,
)
UNPINNED = Remedy(
    "DataLoader(pin_memory=False); Trainer: dataloader_pin_memory=False; ultralytics: PIN_MEMORY=False",
    "slower copies to the card",
)
RELAXED = Remedy("UR_L0_ENABLE_RELAXED_ALLOCATION_LIMITS=1, which lifts the limit of 4 GB on Arc", SLOWER)
IN_PIECES = Remedy(
    "compute the metric batch by batch, or move each batch's outputs to the CPU (.cpu()) before they are joined", SLOWER
)
# (cause, pattern of the text, remedy) where a message needs another remedy than its cause usually does
BY_MESSAGE: tuple[tuple[Cause, str, Remedy], ...] = (
    ("inference-engine", r"on startup is less than desired", Remedy("a smaller gpu_memory_utilization, or end what "
        "else holds the card", "slower generation")),
    ("inference-engine", r"wake_up\b|resume_memory_occupation", GIVE_BACK),
    ("oversized", r"memory block with size larger than|\bxpu out of memory", RELAXED),
    ("oversized", r"validat|evaluat|metric|dim_zero_cat|all_?gather_for", IN_PIECES),
    ("host-ram", r"in pin memory thread|_utils/pin_memory\.py|\.pin_memory\(|pin_memory ?= ?true\)", UNPINNED),
    ("optimizer-states", r"bit16_groups|partition_of_fp32|fp32_groups", OFFLOADED),
    ("inference-engine", r"stored in (?:the )?kv cache|no available memory for the cache blocks|"
        r"available kv cache memory", Remedy("a larger gpu_memory_utilization, or a smaller max_model_len", NONE)),
    ("capacity", r"\bggml|llama_model_load|llama\.cpp", Remedy("fewer layers on the card (-ngl), a shorter context "
        "(-c), or a smaller quantisation", SLOWER)),
    # errors of allocators that torch.cuda.memory's history does not record
    ("not-known", r"oom when allocating tensor with shape", Remedy("the memory page of TensorBoard's profiler "
        "(tf.profiler.experimental.start) names the holders", NONE)),
    ("not-known", r"resource_?exhausted: out of memory", Remedy("jax.profiler.save_device_memory_profile(...), "
        "before the step that fails, names the holders", NONE)),
    ("not-known", r"mps backend out of memory", Remedy("print torch.mps.current_allocated_memory() and "
        "driver_allocated_memory() in each phase", NONE)),
    ("host-ram", r"shared memory|/dev/shm|\bshm\b|bus error",
        Remedy("more shared memory (docker run --shm-size=16g or --ipc=host), or fewer num_workers", NONE)),
    ("host-ram", r"slurm|oomkilled|cgroup|kubernetes|(?<!shared )memory limit",
        Remedy("a higher limit of the job: sbatch --mem, resources.limits.memory of the pod", "larger machine")),
)  # fmt: skip
# (remedy, pattern of the settings that show it is in use already, the stronger remedy to name instead, if any)
TAKEN: tuple[tuple[Remedy, re.Pattern[str], Remedy | None], ...] = tuple(
    (remedy, re.compile(words), stronger)
    for remedy, words, stronger in (
        (CHECKPOINTING, r"gradient_checkpointing\W{1,4}(?:true|on\b|yes|1\b)|gradient_checkpointing_enable\(", None),
        (BATCH_1, r"(?<!eval_)(?<!eval )(?:batch[_ ]size|micro_batch\w*|\bm?bs)\W{0,4}1\b(?![.,]?\d)", None),
        (EVAL_1, r"eval_batch_size\W{1,4}1\b(?![.,]?\d)", None),
        (EIGHT_BIT, r"adamw?_(?:bnb_)?8bit|adamw?8bit|bitsandbytes/optim|8-bit adam", PAGED),
        (FUSED_STEP, r"adamw_torch_fused|fused_adam|_fused_adamw?\b", None),
        (FUSED, r"use_liger\w*\W{1,4}true", None),
        (FLASH, r"attn_impl\w*\W{1,4}(?:flash|sdpa)", None),
        (LORA, r"loraconfig|get_peft_model|peftmodel|lora_(?:r|alpha|rank)\b|\bqlora\b", None),
        (QLORA, r"load_in_4bit\W{1,4}true|\bqlora\b|quant_type\W{1,4}nf4", None),
        (SHARDED, r"zero[-_ ]?(?:stage)?\W{0,4}3\b|\"stage\": 3|stage3\.py", None),
        (OFFLOADED, r"offload_optimizer\W{1,20}(?:cpu|device|true)|cpu offload: true|deepspeedcpuadam", None),
        (SLEEP, r"sleep_mode\W{1,4}true|wake_up\b|cumem_?allocator", None),
        (BF16, r"(?<!compute_)dtype\W{1,4}(?:torch\.)?(?:bf16|bfloat16|float16|fp16)", None),
    )
)  # fmt: skip
# a dump of all arguments of a full fine-tune names those of LoRA, too
_TRAINED_WHOLE = re.compile(r"finetuning_type\W{1,4}full|use_peft\W{1,4}false")
WSL2 = re.compile(r"microsoft-standard|\bwsl ?2?\b")
UNDER_WSL = Remedy("more memory for WSL2: [wsl2] memory= in %UserProfile%\\.wslconfig; it pins only a part of it", NONE)
# a progress bar of datasets with its processes, and how far it came
_PREPARING = re.compile(r"\(num_proc ?= ?(\d{1,4})\): +(\d{1,3})%")
_ESTIMATE = re.compile(r"estimated maximum model length is (\d+)")
# messages before torch 2.1, and before 1.5
_OLD = re.compile(r"reserved in total by pytorch|(?P<first>[gmk]i?b cached\b)")
_NOT_SO_OLD = re.compile(r"torch\W{0,3}v?2\.[1-9]")
ALREADY = Remedy("expandable segments are on already: the hint of the error message changes nothing", NONE)
BESIDE_VLLM = Remedy("no expandable segments here: vLLM's sleep mode in the same process cannot use them", NONE)


def remedies_of(cause: Cause, evidence: Evidence) -> tuple[Remedy, ...]:
    """Return the remedies that apply. The hint in PyTorch's own message is repeated only where it can help."""
    found = (EARLIER,) if cause == "not-known" and evidence.memory else REMEDIES[cause]
    special = tuple(remedy for of, words, remedy in BY_MESSAGE if of == cause and re.search(words, evidence.text))
    if special:
        found = special if cause in ("inference-engine", "capacity", "not-known") else (*special, *found)
    if cause == "not-known" and evidence.message and evidence.message.full:
        found = (*found, BATCH_1, CHECKPOINTING)
    if cause == "wrong-dtype" and any(root.is_double for root in evidence.roots):
        found = (FLOAT,)
    if cause == "host-ram":
        found = _of_the_host(found, evidence)
    if cause == "leak":
        found = _for_a_leak(found, evidence)
    if cause == "activations" and (most := evidence.root(*KEEPERS)) is not None and most.what == "state":
        found = (KEPT["state"], *found)
    if cause == "exception" and (error := evidence.root("exception")) is not None and error.name.startswith("sys."):
        found = SHOWN_LAST
    if cause == "activations" and SHORTER in found and _no_text(evidence):
        found = tuple(SMALLER if remedy is SHORTER else remedy for remedy in found)
    if EXPANDABLE in found and (why := not_expandable(evidence)) is not None:
        found = (why, *(remedy for remedy in found if remedy is not EXPANDABLE))
    if cause == "inference-engine" and (longest := _ESTIMATE.search(evidence.text)):
        fitting = f"max_model_len={longest[1]}, the largest that the engine estimates to fit"
        found = (*found, Remedy(fitting, "no longer prompts"))
    return tuple(dict.fromkeys(_not_taken(found, evidence.text))) or REMEDIES["not-known"]


def processes_of(text: str) -> int:
    """Return how many processes prepared the dataset when the log ends, by its last progress bar; 0 for none."""
    bars = _PREPARING.findall(text)
    return int(bars[-1][0]) if bars and int(bars[-1][1]) < 100 else 0


def _of_the_host(found: tuple[Remedy, ...], evidence: Evidence) -> tuple[Remedy, ...]:
    """Return the remedies for host memory: fewer processes where they filled it, no pinning where that failed."""
    if UNPINNED in found:
        return (UNPINNED, UNDER_WSL) if WSL2.search(evidence.text) else (UNPINNED, *REMEDIES["host-ram"][:1])
    if many := processes_of(evidence.text):
        fewer = max(min(many // 4, MOST_PROCESSES), 1)
        return (Remedy(f"num_proc={fewer} or fewer for the dataset (dataset_num_proc, preprocessing_num_workers) "
            f"instead of {many}", "slower preparation"), *found[:1])  # fmt: skip
    return found


def _no_text(evidence: Evidence) -> bool:
    """Does the model consist of convolutions? Then there are no tokens to cut."""
    labels = " ".join(group.module for group in evidence.memory.groups) if evidence.memory else ""
    return re.search(rf"{CONVOLUTIONS}|convolution", f"{evidence.failure} {labels}") is not None


def _for_a_leak(found: tuple[Remedy, ...], evidence: Evidence) -> tuple[Remedy, ...]:
    """Return the remedies by what is kept: models of earlier runs, or what the variable that keeps most holds."""
    if evidence.memory is not None and evidence.memory.repeated[0]:
        return (KEPT["models"],)
    most = evidence.root(*KEEPERS)
    if most is not None and most.copies:
        return COPIES
    return (*found, KEPT[most.what]) if most is not None and most.what in KEPT else found


def _not_taken(found: tuple[Remedy, ...], text: str) -> Iterator[Remedy]:
    """Yield the remedies that the text does not show in use, and the stronger one in place of those it shows."""
    taken = dict(_taken(text))
    for remedy in found:
        if remedy not in taken:
            yield remedy
        elif (stronger := taken[remedy]) is not None:
            yield stronger


def _taken(text: str) -> Iterator[tuple[Remedy, Remedy | None]]:
    """Yield the remedies that the text shows in use, each with the stronger one."""
    whole = (LORA, QLORA) if _TRAINED_WHOLE.search(text) else ()
    return ((remedy, stronger) for remedy, pattern, stronger in TAKEN if remedy not in whole and pattern.search(text))


def fields_in_use(text: str) -> dict[str, object]:
    """Return the fields of a Recipe that the remedies in use set. BF16 is a dtype to load in, which is no precision."""
    return {field: value for remedy, _ in _taken(text) if remedy is not BF16 for field, value in remedy.change}


def not_expandable(evidence: Evidence) -> Remedy | None:
    """Return why expandable segments, which PyTorch's message always suggests, cannot help; None where they can."""
    if "expandable_segments:true" in evidence.text or (evidence.memory and evidence.memory.expandable):
        return ALREADY
    if any(word in evidence.text for word in ("vllm", "sleep_mode", "cumemallocator")):
        return BESIDE_VLLM
    if (old := _OLD.search(evidence.text)) and not _NOT_SO_OLD.search(evidence.text):
        return NEWER if old["first"] else MAX_SPLIT
    return None
