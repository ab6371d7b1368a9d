"""Trace Automodel's recipes for Gemma 3n: `python -m published.traced.automodel CSV`; timm and torchvision are needed.

FinetuneRecipeForVLM of commit f7b98a299 (April 2026), whose golden values these are: bf16 weights and states, eager
attention, frozen towers, a loss over fp32 logits, AdamW, and FSDP2 over the children of every ModuleList under a root
that stays gathered (components/distributed/parallelizer.py). That commit does not read the key `freeze_embeddings`.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from memfit.allocator.replay import replay
from memfit.catalogue.cards import find_gpu
from memfit.virtual.observer import Observer
from memfit.virtual.virtual_gpu import virtual_gpu
from published.automodel import DATA, MODELS, RANKS, known, rows, tokens

STEPS = 2  # the second has the optimizer's states
RANK, SCALE = 8, 4.0  # of the adapters
FROZEN = ("vision", "audio")
PLAIN = (*FROZEN, "visual", "image_encoder", "lm_head")  # modules without adapters
IMAGE, PIXELS = 256, 768  # tokens and pixels of an image
# torchvision's wheel finds no CPU build of its operators beside PyTorch's
_OPERATORS = torch.library.Library("torchvision", "DEF")
for _name in ("nms", "qnms"):
    _OPERATORS.define(f"{_name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")


def main(path: Path) -> None:
    """Trace the rows one by one, each in a process of its own; what is known already stays."""
    made = known()
    for row in rows(path):
        if row["case"] in made:
            continue
        command = [sys.executable, "-m", "published.traced.automodel", "--row", MODELS[row["case"]], str(tokens(row))]
        made[row["case"]] = int(subprocess.run(command, stdout=subprocess.PIPE, check=True).stdout.splitlines()[-1])
        print(f"{row['case']}: {made[row['case']] / 2**30:.2f} GiB", flush=True)
        DATA.write_text(json.dumps(dict(sorted(made.items())), indent=1) + "\n", encoding="utf-8")


def allocated(method: str, length: int) -> int:
    """Return the most bytes that rank 0 has allocated in a step."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
    from transformers import AutoConfig, AutoModelForImageTextToText

    gpu = find_gpu("h100")
    with virtual_gpu(gpu, world_size=RANKS, launched=True, capacity=None) as card:
        config = AutoConfig.for_model("gemma3n")  # the defaults are those of E4B
        with torch.device("meta"):
            model: Any = AutoModelForImageTextToText.from_config(
                config, dtype=torch.bfloat16, attn_implementation="eager"
            )
        for name, weight in model.named_parameters():
            weight.requires_grad_(method == "full" and not any(part in name for part in FROZEN))
        if method == "lora":
            _adapt(model)
        observer = Observer(card)
        with observer.watching():
            kept = torch.bfloat16
            policy = MixedPrecisionPolicy(kept, kept, kept, cast_forward_inputs=True)
            words: dict[str, Any] = {"mesh": init_device_mesh("cuda", (RANKS,)), "mp_policy": policy}
            _shard(model, words)
            fully_shard(model, **words, reshard_after_forward=False)
            model.to_empty(device="cuda")
            if method == "lora":
                model.lm_head.weight = model.get_input_embeddings().weight  # tie_weights() after loading
            model.train()
            trained = [weight for weight in model.parameters() if weight.requires_grad]
            optimizer = torch.optim.AdamW(trained, lr=1e-5, betas=(0.9, 0.95), weight_decay=0.01)
            for _ in range(STEPS):
                _step(model, length, config.image_token_id)
                torch.nn.utils.clip_grad_norm_(trained, 1.0, foreach=True)
                optimizer.step()
                optimizer.zero_grad(set_to_none=True)
        tape = observer.tape({})
    return replay(tape.events, capacity=gpu.total_bytes - gpu.context_bytes).peak.allocated


def _shard(module: nn.Module, words: Mapping[str, Any]) -> None:
    """apply_fsdp2_sharding_recursively: the last of a list stays gathered after its forward."""
    from torch.distributed.fsdp import fully_shard

    if not isinstance(module, nn.ModuleList):
        for child in module.children():
            _shard(child, words)
        return
    for place, child in enumerate(module):
        fully_shard(child, **words, reshard_after_forward=place < len(module) - 1)


class _Adapted(nn.Module):
    """LinearLoRA of components/_peft/lora.py."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        like: dict[str, Any] = {"bias": False, "dtype": linear.weight.dtype, "device": "meta"}
        self.weight, self.bias = linear.weight, linear.bias
        self.lora_A = nn.Linear(linear.in_features, RANK, **like)
        self.lora_B = nn.Linear(RANK, linear.out_features, **like)

    def forward(self, x: Tensor) -> Tensor:
        """The linear layer's output with the adapter's."""
        made: Tensor = functional.linear(x, self.weight, self.bias) + self.lora_B(self.lora_A(x) * SCALE)
        return made


def _adapt(model: Any) -> None:
    # accelerate's init_empty_weights makes two parameters of a tied one. With adapters the checkpoint is loaded, and
    # the weights tied, after they are sharded: the root then gathers both. Without, they are tied again before.
    model.lm_head.weight = nn.Parameter(torch.empty_like(model.lm_head.weight), requires_grad=False)
    for name, module in list(model.named_modules()):
        if isinstance(module, nn.Linear) and not any(part in name for part in PLAIN):
            parent, _, leaf = name.rpartition(".")
            setattr(model.get_submodule(parent), leaf, _Adapted(module))


def _step(model: Any, length: int, image: int) -> None:
    """Forward and backward of one sample with one image."""
    ids, plain = (torch.zeros(1, length, dtype=torch.long) for _ in range(2))
    ids[:, 4 : 4 + IMAGE] = image
    mask, pixels = torch.ones_like(plain), torch.zeros(1, 3, PIXELS, PIXELS)
    given = {"input_ids": ids, "attention_mask": mask, "token_type_ids": plain, "pixel_values": pixels}
    out = model(**{name: value.cuda() for name, value in given.items()})
    loss = _summed(out.logits.view(-1, out.logits.size(-1)), plain.view(-1).cuda())
    (loss / length * RANKS).backward()


def _summed(logits: Tensor, labels: Tensor) -> Tensor:
    """MaskedCrossEntropy, whose fp32 logits are gone when it returns."""
    return functional.cross_entropy(logits.float(), labels, reduction="sum")


if __name__ == "__main__":
    if sys.argv[1] == "--row":
        print(allocated(sys.argv[2], int(sys.argv[3])))
    else:
        main(Path(sys.argv[1]))
