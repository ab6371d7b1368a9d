"""The runs behind the Ultra-Scale Playbook: nanotron's own trainer on random tokens.

The settings are those of scripts/scaling_benchmarks.py (commit e24d2483) over config_tiny_llama_bench.yaml of its
examples (branch nouamane/bench2). Rank 0 writes the source's figures (log_throughput in helpers.py); of a pipeline the
first rank of every stage is traced, because they wait for each other's messages.
"""

from __future__ import annotations

import os
import re
import tempfile
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
import yaml

from memfit.nouns.gpu import Gpu
from memfit.nouns.tape import Tape
from memfit.virtual.device import dispatch
from memfit.virtual.device.ledger import Ledger
from memfit.virtual.libraries import flash_attn, triton
from memfit.virtual.observer import Observer
from memfit.virtual.ranks.traced import RanksTask
from memfit.virtual.scripts.rank_processes import trace_ranks
from memfit.virtual.virtual_gpu import virtual_gpu
from published.case import NotCovered
from published.rows import Row

PACKAGES = ()
STEPS, VOCABULARY = 3, 131072  # the source reads its figures after the third step
# PyTorch of that time records what a collective uses on NCCL's stream (recordStream), so that freed tensors wait for
# the commands that were queued before. CUDA queues 1,024 of them ahead of the card, of all streams together under
# CUDA_DEVICE_MAX_CONNECTIONS=1, and kernels as large as these keep the queue full. Later releases keep the tensors
# until the main stream waits, which is at once.
LAUNCH_QUEUE = 1024
COMMANDS = 5  # of a collective: its kernel, and two events that the streams record and wait for (ProcessGroupNCCL.cpp)
COLLECTIVES = (
    "all_gather_into_tensor", "reduce_scatter_tensor", "all_reduce", "send", "recv", "isend", "irecv",
)  # fmt: skip
_SHARDING = re.compile(r"DP (?P<dp>\d+) PP (?P<pp>\d+) TP (?P<tp>\d+) \(REDUCE_SCATTER\) ZeRO-(?P<zero>\d)")
_MODEL = re.compile(
    r"\((?P<layers>\d+)L d(?P<width>\d+) ff(?P<inner>\d+) (?P<heads>\d+)h MHA, .*(?P<tied>untied|tied)\)"
)
_ENVIRONMENT = {"CUDA_DEVICE_MAX_CONNECTIONS": "1"}
_LAUNCHES_NOTHING = re.compile(r"aten\.(empty|new_empty|resize|set_|detach|alias)")


def tape(row: Row, gpu: Gpu) -> Tape:
    """Return the tape of rank 0. Raises NotCovered for a row that does not state its model or sharding."""
    sharding, model = _SHARDING.fullmatch(row.sharding), _MODEL.search(row.model)
    if not sharding or not model:
        raise NotCovered("the row does not state its model or its sharding")
    ways = {k: int(v) for k, v in sharding.groupdict().items()}
    with patch.dict(os.environ, _ENVIRONMENT), tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "run.yaml"
        path.write_text(yaml.safe_dump(_settings(row, ways, model)), encoding="utf-8")
        return _beside_stages(path, gpu, ways) if ways["pp"] > 1 else _alone(path, gpu, ways)


def _alone(path: Path, gpu: Gpu, ways: dict[str, int]) -> Tape:
    size = ways["dp"] * ways["tp"]
    ranks = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": str(size)}
    with (
        patch.dict(os.environ, ranks), virtual_gpu(gpu, world_size=size, capacity=None) as card,
        flash_attn.standing_in(),
    ):  # fmt: skip
        observer = Observer(card)
        with observer.watching(), _recording_streams(card.ledger):
            _train(str(path))
        return observer.tape({})


def _beside_stages(path: Path, gpu: Gpu, ways: dict[str, int]) -> Tape:
    script = path.with_name("train.py")
    script.write_text(f"from {__name__} import train_stage\n\ntrain_stage({str(path)!r})\n", encoding="utf-8")
    stage = ways["dp"] * ways["tp"]
    words = {"path": script, "args": [], "gpu": gpu, "capacity": None}
    firsts = tuple(range(0, ways["pp"] * stage, stage))
    found = trace_ranks(RanksTask(words, (), ways["pp"] * stage, ways["pp"] * stage, firsts))
    return next(trace.tape for trace in found.traces if trace.rank == 0)


def train_stage(path: str) -> None:
    """Train as this process's rank of a pipeline, on the open card."""
    with _recording_streams(dispatch._CARD[-1].ledger):
        _train(path)


def _train(path: str) -> None:
    from nanotron.dataloader import dummy_infinite_data_generator
    from nanotron.trainer import DistributedTrainer

    trainer = DistributedTrainer(path)
    model = trainer.unwrapped_model
    batches = dummy_infinite_data_generator(
        micro_batch_size=trainer.micro_batch_size, sequence_length=trainer.sequence_length,
        input_pp_rank=model.input_pp_rank, output_pp_rank=model.output_pp_rank, vocab_size=VOCABULARY, seed=42,
        parallel_context=trainer.parallel_context,
    )  # fmt: skip
    trainer.train({"Stable Training Stage": batches()})


@contextmanager
def _recording_streams(ledger: Ledger) -> Iterator[None]:
    """Let what a collective used wait, once it is freed, until LAUNCH_QUEUE commands more were queued."""
    used: set[int] = set()
    waiting: deque[tuple[int, int]] = deque()  # (commands queued when it was freed, number)
    launched, free, kernel, run = 0, Ledger.free, dispatch._handler, triton.Kernel.run

    def launch(commands: int = 1) -> None:
        nonlocal launched
        launched += commands
        while waiting and launched - waiting[0][0] >= LAUNCH_QUEUE:
            free(ledger, waiting.popleft()[1])

    def freed(of: Ledger, number: int) -> None:
        if number in used:
            used.discard(number)
            waiting.append((launched, number))
            launch()  # the allocator's own event
        else:
            free(of, number)

    def counted(op: Any) -> Any:
        handler = kernel(op)
        name = getattr(handler, "__qualname__", "")
        if handler is dispatch._view or "_delegated" in name or _LAUNCHES_NOTHING.match(str(op)):
            return handler

        def launching(*args: Any) -> Any:
            launch()
            return handler(*args)

        return launching

    def triton_launch(self: Any, *args: Any, **words: Any) -> None:
        launch()
        run(self, *args, **words)

    def collective(real: Any) -> Any:
        def call(*args: Any, **words: Any) -> Any:
            launch(COMMANDS)
            work = real(*args, **words)
            given = [t for t in (*args, *words.values()) if isinstance(t, torch.Tensor) and t.is_cuda]
            numbers = (ledger.number_at.get(t.untyped_storage().data_ptr()) for t in given)
            used.update(n for n in numbers if n is not None)
            return work

        return call

    own = {name: collective(getattr(dist, name)) for name in COLLECTIVES}
    with (
        patch.multiple(dist, **own), patch.object(Ledger, "free", freed), patch.object(dispatch, "_handler", counted),
        patch.object(triton.Kernel, "run", triton_launch), patch.dict(dispatch._HANDLERS, clear=True),
    ):  # fmt: skip
        yield
    for _, number in waiting:
        free(ledger, number)


def _settings(row: Row, sharding: dict[str, int], model: re.Match[str]) -> dict[str, Any]:
    """Return nanotron's configuration of a row. More micro-batches than stages and three repeat the last."""
    length, heads = row.number("seq_len"), int(model["heads"])
    return {
        "general": {"project": "ultrascale", "run": row.id, "seed": 42, "ignore_sanity_checks": True},
        "checkpoints": {"checkpoint_interval": 10000, "checkpoints_path": tempfile.gettempdir()},
        "data_stages": [{
            "name": "Stable Training Stage", "start_training_step": 1,
            "data": {"dataset": None, "num_loading_workers": 1, "seed": 42},
        }],
        "logging": {"iteration_step_info_interval": 1, "log_level": "warning", "log_level_replica": "warning"},
        "model": {
            "ddp_bucket_cap_mb": 25, "dtype": "bfloat16", "init_method": {"std": 0.02},
            "make_vocab_size_divisible_by": 1,
            "model_config": {
                "bos_token_id": 0, "eos_token_id": 0, "hidden_act": "silu", "hidden_size": int(model["width"]),
                "initializer_range": 0.02, "intermediate_size": int(model["inner"]), "is_llama_config": True,
                "max_position_embeddings": length, "num_attention_heads": heads,
                "num_hidden_layers": int(model["layers"]), "num_key_value_heads": heads, "pretraining_tp": 1,
                "rms_norm_eps": 1e-5, "tie_word_embeddings": model["tied"] == "tied", "use_cache": True,
                "vocab_size": VOCABULARY,
            },
        },
        "optimizer": {
            "accumulate_grad_in_fp32": True, "clip_grad": 1.0, "weight_decay": 0.01, "zero_stage": sharding["zero"],
            "learning_rate_scheduler": {
                "learning_rate": 3e-4, "lr_decay_steps": 13, "lr_decay_style": "cosine", "lr_warmup_steps": 2,
                "lr_warmup_style": "linear", "min_decay_lr": 1e-5,
            },
            "optimizer_factory": {
                "name": "adamW", "adam_beta1": 0.9, "adam_beta2": 0.95, "adam_eps": 1e-8, "torch_adam_is_fused": True,
            },
        },
        "parallelism": {
            "dp": sharding["dp"], "pp": sharding["pp"], "tp": sharding["tp"], "expert_parallel_size": 1,
            "pp_engine": "1f1b", "tp_mode": "REDUCE_SCATTER", "tp_linear_async_communication": True,
        },
        "tokenizer": {"tokenizer_name_or_path": "none"},
        "tokens": {
            "batch_accumulation_per_replica": min(row.number("grad_accum"), sharding["pp"] + 2),
            "sequence_length": length, "micro_batch_size": row.number("micro_batch"), "train_steps": STEPS,
            "val_check_interval": -1, "limit_test_batches": 0, "limit_val_batches": 0,
        },
    }  # fmt: skip
