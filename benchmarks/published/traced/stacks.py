"""Name the releases that run a row: the earliest installable that know its model, and the current ones."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

from published.rows import Row

_FABRIC = ("lightning==2.3.0", "lightning_utilities==0.15.3", "torchmetrics==1.9.0", "jsonargparse==4.53.0")
_FABRIC += ("bitsandbytes==0.42.0", "setuptools==75.8.0")
# what the Hub's client and datasets needed before they changed to another HTTP library
_HTTP = ("requests==2.32.5", "urllib3==2.5.0", "charset_normalizer==3.4.3", "idna==3.10", "certifi==2025.8.3")
_HTTP += ("aiohttp==3.12.15", "multidict==6.6.4", "yarl==1.20.1", "frozenlist==1.7.0", "propcache==0.3.2")
_HTTP += ("aiosignal==1.4.0", "attrs==25.3.0", "aiohappyeyeballs==2.6.1")
_RECENT = ("lightning==2.6.6", "lightning_utilities==0.15.3", "torchmetrics==1.9.0", "jsonargparse==4.53.0")

_TRANSFORMERS_438 = (
    "transformers==4.38.2", "tokenizers==0.15.2", "huggingface_hub==0.23.5", *_HTTP, "accelerate==0.27.2",
    "peft==0.8.2", "bitsandbytes==0.42.0", "setuptools==75.8.0",
)  # fmt: skip
_TRANSFORMERS_449 = (
    "transformers==4.49.0", "tokenizers==0.21.4", "huggingface_hub==0.36.0", *_HTTP, "accelerate==1.4.0",
    "peft==0.14.0", "datasets==3.2.0", "bitsandbytes==0.42.0", "setuptools==75.8.0",
)  # fmt: skip

# name -> what is installed, without dependencies, in a folder before the development environment's packages
STACKS: dict[str, tuple[str, ...]] = {
    "litgpt 0.3.0": ("litgpt==0.3.0", *_FABRIC),
    "litgpt 0.4.3": ("litgpt==0.4.3", *_FABRIC),
    "litgpt 0.4.8": ("litgpt==0.4.8", *_FABRIC),
    "litgpt 0.4.13": ("litgpt==0.4.13", *_FABRIC),
    "litgpt 0.5.13": ("litgpt==0.5.13", *_RECENT),
    "torchtune 0.6.1": ("torchtune==0.6.1", "torchao==0.9.0", "torchdata==0.11.0", "omegaconf==2.4.0"),
    "transformers 4.38": _TRANSFORMERS_438,
    "transformers 4.49": _TRANSFORMERS_449,
    "transformers 4.57": (
        "transformers==4.57.1",
        "peft==0.18.1",
        "tokenizers==0.22.2",
        "huggingface_hub==0.36.0",
        *_HTTP,
    ),
    "peft 2025-06": (
        "transformers==4.52.4",
        "peft==0.15.2",
        "tokenizers==0.21.4",
        "huggingface_hub==0.36.0",
        *_HTTP,
    ),
    # the releases nearest to the commits that PEFT's comparison ran on in June and July 2026
    "peft 2026-07": (
        "transformers==5.13.1",
        "peft==0.20.0",
        "tokenizers==0.22.2",
        "huggingface_hub==1.5.0",
        "httpx==0.28.1",
        "httpcore==1.0.9",
        "anyio==4.11.0",
        "h11==0.16.0",
        "idna==3.10",
        "certifi==2025.8.3",
        "sniffio==1.3.1",
        "diffusers==0.38.0",
        "importlib_metadata==8.7.0",
        "zipp==3.23.0",
        "pillow==12.0.0",
        "regex==2025.11.3",
        "requests==2.32.5",
        "urllib3==2.5.0",
        "charset_normalizer==3.4.3",
    ),
    "accelerate 1.13": ("accelerate==1.13.0", "liger-kernel==0.7.0"),  # of TRL's benchmark in April 2026
    # flash-attn's Python of 2.6 belongs beside it, whose setup builds CUDA kernels unless it is told not to
    # (FLASH_ATTENTION_SKIP_CUDA_BUILD=TRUE)
    "nanotron 2025-02": (
        "nanotron @ git+https://github.com/huggingface/nanotron@e24d2483",
        "dacite==1.9.2",
        "einops==0.8.1",
    ),
    "torchtitan 2024-12": ("torchtitan @ git+https://github.com/pytorch/torchtitan@9dec370ad",),
    # what torchao measured before it published in March 2025; torchao itself was of 28 February
    "torchtitan 2025-02": (
        "torchtitan @ git+https://github.com/pytorch/torchtitan@b291ad662",
        "torchao==0.10.0",
        "torchdata==0.11.0",
        "tiktoken==0.12.0",
    ),
    # SimpleTuner itself lies beside it on the path: its package requires what no step of a trace needs
    "simpletuner 2026-08": (
        "torchao==0.17.0",
        "sdnq==0.2.8",
        "lycoris-lora==3.4.0",
        "torch-optimi==0.3.3",
        "optimum-quanto==0.2.7",
        "toml==0.10.2",
        "einops==0.8.2",
        "peft-singlora==0.2.0",
    ),
    "liger 0.8": ("liger-kernel==0.8.5",),
    "liger 0.4.2": (*_TRANSFORMERS_449, "liger-kernel==0.4.2"),
    "timm 1.0": ("timm==1.0.31", "torchvision==0.29.1", "pillow==12.0.0", "torchao==0.9.0", "bitsandbytes==0.50.2"),
    "torchao 0.5": ("torchao==0.5.0",),
    "transformers 5.23": (),
}

# source, model -> its own stack: litgpt from 0.3.0 (April 2024) on, the first release that has the model's config
OWN: tuple[tuple[str, str, str], ...] = (
    ("litgpt", r"Llama-3\.2", "litgpt 0.4.13"), ("litgpt", r"gemma-2-|Llama-3\.1", "litgpt 0.4.8"),
    ("litgpt", r"Phi-3", "litgpt 0.4.3"), ("litgpt", r"", "litgpt 0.3.0"),
    ("torchtune", r"", "torchtune 0.6.1"), ("hfdoc", r"", "transformers 4.49"), 
    ("peftimg", r"", "peft 2026-07"), ("peft", r"", "transformers 4.57"),
    ("trlbench", r"", "accelerate 1.13"), ("titan", r"", "torchtitan 2024-12"),
    ("ultrascale", r"", "nanotron 2025-02"),
    ("fsdpqlora", r"Llama-2 architecture", "transformers 4.38"), ("fsdpqlora", r"", "transformers 5.23"),
    ("gpumemnet", r"", "timm 1.0"), ("ao", r"Llama2", "torchao 0.5"), ("ao", r"", "timm 1.0"),
    ("op", r"", "liger 0.4.2"),
)  # fmt: skip
CURRENT: tuple[tuple[str, str], ...] = (
    ("litgpt", "litgpt 0.5.13"), ("torchtune", "torchtune 0.6.1"),
    ("hfdoc", "transformers 5.23"), ("peft", "transformers 5.23"), ("trlbench", "liger 0.8"),
    ("op", "liger 0.8"),
)  # fmt: skip


def own(row: Row) -> str:
    """The stack nearest to the row's."""
    if row.group == "peft" and (row.version("transformers") >= (5,) or "bdlora" in row.notes):
        return "peft 2026-07"
    if row.group == "peft" and (0, 15) <= row.version("peft") < (0, 16):
        return "peft 2025-06"
    if "torchtitan 0.0.2" in row.framework_version:
        return "torchtitan 2025-02"
    return next(
        stack for source, model, stack in OWN if row.group.split("_")[0] == source and re.search(model, row.model)
    )


def current(row: Row) -> str | None:
    """The stack of today; None where the row's own is that."""
    return next((stack for source, stack in CURRENT if row.group.split("_")[0] == source), None)


def folder(stack: str, root: Path) -> Path:
    """Where a stack is installed, installing it the first time."""
    at = root / stack.replace(" ", "-")
    at.mkdir(parents=True, exist_ok=True)
    if STACKS[stack] and not any(at.iterdir()):
        command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", str(at), *STACKS[stack]]
        subprocess.run(command, check=True)
    return at
