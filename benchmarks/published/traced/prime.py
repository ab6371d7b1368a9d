"""Trace prime-rl's trainers of January 2026 and keep what they reserve: `python -m published.traced.prime CSV [TEXT]`.

The step is that of src/prime_rl/trainer (rl/train.py, sft/train.py, model.py of commit d8f290ef0, which must be on
the path) on its fake data: its own output head, checkpointed blocks under FSDP2, and fp32 weights computed in bf16.
Its command compiles the blocks, which is left out here because nothing is compiled: transformers' flash attention
branches on the values of position ids, and Dynamo then gives up the whole checkpoint around it. Traced with compilation
and flash attention, two rows reserve the same bytes. Importing its package would load every model of its own, so that
only the head's module is.
"""

from __future__ import annotations

import importlib
import json
import logging
import subprocess
import sys
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from memfit.allocator.replay import replay
from memfit.catalogue import config as catalogued
from memfit.catalogue import names
from memfit.catalogue.cards import find_gpu
from memfit.nouns.alloc_settings import parse_alloc_conf
from memfit.virtual.observer import Observer
from memfit.virtual.virtual_gpu import virtual_gpu
from published.prime import CARDS, DATA, known, rows

SETTINGS = "expandable_segments:True"
STEPS = 3
LAYERS = "prime_rl.trainer.models.layers"
HEAD = f"{LAYERS}.lm_head"
RUNS = 4  # whose adapters are resident (--max-concurrent-runs)
TARGETS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
CHUNK = 2048  # entries of the vocabulary that the head of RL scores at a time (rl/config.py)


def main(path: Path, text: str = "") -> None:
    """Trace the rows one by one, each in a process of its own; what is known already stays."""
    made = known()
    for row in rows(path):
        if text not in row["file"] or row["file"] in made:
            continue
        command = [sys.executable, "-m", "published.traced.prime", "--row", json.dumps(row)]
        ran = subprocess.run(command, capture_output=True, text=True, check=False)
        if ran.returncode:
            print(f"{row['file']}: {ran.stderr.strip().splitlines()[-1]}", file=sys.stderr)
            continue
        made[row["file"]] = int(ran.stdout.splitlines()[-1])
        print(f"{row['file']}: {made[row['file']] / 2**30:.2f} of {row['peak_gib']} GiB", flush=True)
        DATA.write_text(json.dumps(dict(sorted(made.items())), indent=1) + "\n", encoding="utf-8")


def reserved(row: Mapping[str, str]) -> int:
    """Return the reserved bytes of rank 0's peak."""
    gpu, world = find_gpu(CARDS[row["device_name"]]), int(row["num_gpus"])
    with virtual_gpu(gpu, world_size=world, launched=True, capacity=None, alloc_conf=SETTINGS) as card:
        torch.backends.cuda.enable_cudnn_sdp(False)  # flash attention's own package ran, which saves the same tensors
        observer = Observer(card)
        with observer.watching():
            _train(row, world)
        tape = observer.tape({"alloc_conf": SETTINGS})
    room = gpu.total_bytes - gpu.context_bytes
    return replay(tape.events, capacity=room, settings=parse_alloc_conf(SETTINGS)).peak.reserved


def _train(row: Mapping[str, str], world: int) -> None:
    length, micro_batches = int(row["seq_len"]), int(row["micro_batches"])
    model = _model(row, world)
    trained = [] if row["lora_rank"] else list(model.parameters())  # no run exists whose adapters would be updated
    optimizer = torch.optim.AdamW(trained or [torch.zeros(1)], lr=1e-6, betas=(0.9, 0.999), weight_decay=0.01)
    step = _sampled if row["type"] == "rl" else _supervised
    for _ in range(STEPS):
        for _ in range(micro_batches):
            step(model, length, micro_batches)
        torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm=1.0)
        optimizer.step()
        model.zero_grad()


def _model(row: Mapping[str, str], world: int) -> Any:
    """setup_model of model.py: head, checkpoints and sharding, in this order."""
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
    from transformers import AutoConfig, AutoModelForCausalLM

    entry = names.find(row["model_name"])
    assert entry is not None
    with torch.device("meta"):
        config = AutoConfig.for_model(**catalogued(entry), use_cache=False)
        model: Any = AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation="sdpa")
    _bare()
    if row["lora_rank"]:
        _adapt(model, int(row["lora_rank"]), int(row["seq_len"]))
    importlib.import_module(HEAD).inject_prime_lm_head(model, chunk_size=CHUNK if row["type"] == "rl" else None)
    layers = model.model.layers
    for name, block in list(layers.named_children()):
        layers.register_module(name, checkpoint_wrapper(block, preserve_rng_state=False))
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    mesh = init_device_mesh("cuda", (world,))
    for part in (*layers, model):  # with tied embeddings, which both models have, the rest is one group
        fully_shard(part, mesh=mesh, mp_policy=policy, reshard_after_forward=True)
    model.to_empty(device="cuda")
    return model


def _adapt(model: Any, rank: int, length: int) -> None:
    """apply_lora_to_model of lora.py: adapters of all runs beside each linear layer; the first run has all tokens."""
    base, linear = (importlib.import_module(f"{LAYERS}.lora.{name}") for name in ("base", "multi_linear"))
    base.set_lora_num_tokens(torch.tensor([length] + [0] * (RUNS - 1), dtype=torch.int32).cuda(), reset_reference=True)
    base.set_multilora_scaling(torch.ones(RUNS, dtype=torch.bfloat16, device="cuda"), reset_reference=True)
    for name, module in list(model.named_modules()):
        parent, _, leaf = name.rpartition(".")
        if leaf in TARGETS:
            setattr(model.get_submodule(parent), leaf, linear.MultiLoRALinear(module, rank, RUNS))
    for name, weight in model.named_parameters():
        weight.requires_grad = "lora_A" in name or "lora_B" in name


def _bare() -> None:
    """Put prime-rl's packages in place without running what their __init__ imports."""
    found = find_spec("prime_rl")
    if found is None or not found.submodule_search_locations:
        raise ModuleNotFoundError("prime_rl is not on the path")
    root = Path(next(iter(found.submodule_search_locations)))
    inner = ("trainer", "models", "layers", "lora")
    for parts in ((), ("utils",), *(inner[:depth] for depth in range(1, len(inner) + 1))):
        bare = ModuleType(".".join(("prime_rl", *parts)))
        bare.__path__ = [str(root.joinpath(*parts))]
        sys.modules[bare.__name__] = bare
    log: Any = ModuleType("prime_rl.utils.logger")
    log.get_logger = lambda: logging.getLogger("prime_rl")
    sys.modules[log.__name__] = log


def _sampled(model: Any, length: int, _: int) -> None:
    """A micro-batch of rl/train.py: log-probabilities of one long sample, weighed by their ratio to the sampler's."""
    ids, positions = torch.zeros(1, length, dtype=torch.long).cuda(), torch.arange(length)[None].cuda()
    advantages, sampler = torch.zeros(1, length).cuda(), torch.zeros(1, length).cuda()
    labels = torch.cat([ids[:, 1:], torch.zeros(1, 1, dtype=torch.long, device="cuda")], dim=1)
    out = _head_output(model(input_ids=ids, position_ids=positions, labels=labels, temperature=1.0))
    score = out["logprobs"]
    ratio = torch.exp(score - sampler)
    (-((ratio * advantages).detach() * score).sum() / length).backward()


def _supervised(model: Any, length: int, micro_batches: int) -> None:
    """A micro-batch of sft/train.py: all logits in fp32, and torch's cross-entropy of them."""
    ids, positions = torch.zeros(1, length, dtype=torch.long).cuda(), torch.arange(length)[None].cuda()
    targets = torch.zeros(1, length, dtype=torch.long).cuda()
    out = _head_output(model(input_ids=ids, position_ids=positions, labels=None, temperature=None))
    logits = out["logits"]
    score = torch.nn.CrossEntropyLoss(reduction="none")
    loss = score(logits.view(-1, logits.shape[-1]), targets.view(-1)).mean()
    del logits
    (loss / micro_batches).backward()


def _head_output(out: Any) -> Any:
    return sys.modules[HEAD].cast_float_and_contiguous(out)


if __name__ == "__main__":
    if sys.argv[1] == "--row":
        print(reserved(json.loads(sys.argv[2])))
    else:
        main(Path(sys.argv[1]), *sys.argv[2:])
