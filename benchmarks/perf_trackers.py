"""Run one workload of perf_traces.py: `python perf_trackers.py fsdp|memtracker-full|memtracker-lora`."""

from __future__ import annotations

import sys
import warnings
from typing import Any

SEQUENCE, STEPS, RANKS = 2048, 2, 1024


def fsdp() -> str:
    """Trace and replay two steps of full fine-tuning Llama 3.1 405B with FSDP2 and checkpointing, rank 0 of 1,024."""
    from memfit.allocator.replay import replay
    from memfit.catalogue.cards import find_gpu
    from memfit.models import hub
    from memfit.units import human
    from memfit.virtual.jobs import run
    from memfit.virtual.jobs.recipe import Setup
    from memfit.virtual.observer import Observer
    from memfit.virtual.virtual_gpu import virtual_gpu

    setup = Setup(
        config=hub.resolve_config("llama-3.1-405b"), trainer="torch", method="full", dtype="bf16", autocast="bf16",
        checkpointing="nonreentrant", sequence=SEQUENCE, steps=STEPS, load="meta", use_cache=False, world_size=RANKS,
        shard="parameters",
    )  # fmt: skip
    with virtual_gpu(find_gpu("h100"), capacity=None, world_size=RANKS) as card:
        observer = Observer(card)
        with observer.watching():
            run(setup, observer)
        tape = observer.tape({})
    return f"{human(replay(tape.events).peak.reserved)} reserved"


def memtracker(lora: bool) -> str:
    """Run PyTorch's own MemTracker over two such steps of Llama 2 7B, on fake tensors."""
    import torch
    import transformers
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.distributed._tools.mem_tracker import MemTracker
    from transformers.initialization import no_init_weights

    from memfit.models import hub

    given: dict[str, Any] = {k: v for k, v in hub.resolve_config("llama-2-7b").items() if k != "torch_dtype"}
    config = transformers.AutoConfig.for_model(given.pop("model_type"), **given)
    config.use_cache = False
    with FakeTensorMode(), no_init_weights():
        model: Any = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
        if lora:
            from peft import LoraConfig, get_peft_model

            model = get_peft_model(model, LoraConfig(r=16, target_modules="all-linear", task_type="CAUSAL_LM"))
            model.enable_input_require_grads()
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        model.train()
        optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], foreach=True)
        tracker = MemTracker()
        tracker.track_external(model, optimizer)
        ids = torch.zeros(1, SEQUENCE, dtype=torch.long)
        with tracker:
            for _ in range(STEPS):
                model(input_ids=ids, labels=ids).loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                tracker.reset_mod_stats()  # it refuses a second iteration otherwise
        found = tracker.get_tracker_snapshot("peak")
    total = sum(sizes["Total"] for sizes in found.values())
    return f"{total / 2**30:.1f} GiB of tensors"


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    print(fsdp() if sys.argv[1] == "fsdp" else memtracker(sys.argv[1].endswith("lora")))
