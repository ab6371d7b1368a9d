"""The container image a recipe needs: Triton compiles its launchers with gcc as it runs, DeepSpeed its operators with g++ and nvcc."""

from __future__ import annotations

from dataclasses import dataclass

from memfit.clusters.spec import Spec


@dataclass(frozen=True, slots=True)
class Image:
    """A base image, what apt adds to it, and what is run before requirements.txt is installed."""

    base: str
    packages: str
    before: tuple[str, ...] = ()


# PyPI's torch is CUDA's; the image's is from here, so that requirements.txt finds it there
_ROCM = ("pip install torch --index-url https://download.pytorch.org/whl/rocm7.2",)
# (platform, DeepSpeed) -> image. DeepSpeed builds operators by torch.utils.cpp_extension at run time (deepspeed.ai/tutorials/
# advanced-install). Its CPU Adam is C++ alone in 0.19.8 (op_builder/cpu/cpu_adam.py); CUDA operators, and in older ones the import
# (fp_quantizer.py's is_compatible), want nvcc, of the very CUDA that PyTorch has: builder.py forgives other minor versions up to CUDA 12
# only. An image of PyTorch has both, and its torch satisfies requirements.txt. Python's slim image brings Python.h, the others do not.
IMAGES: dict[tuple[str, bool], Image] = {
    ("cuda", False): Image("python:3.12-slim", "build-essential"),
    ("cuda", True): Image("pytorch/pytorch:2.13.0-cuda13.0-cudnn9-devel", "build-essential python3-dev"),
    ("rocm", False): Image("python:3.12-slim", "build-essential", _ROCM),
    ("rocm", True): Image("rocm/dev-ubuntu-24.04:7.2-complete", "build-essential python3-dev python3-pip", _ROCM),
}


def image_of(spec: Spec) -> Image:
    """The image of a job on an NVIDIA or AMD card."""
    return IMAGES[spec.gpu.platform, spec.deepspeed]


def dockerfile(spec: Spec) -> str:
    """The Dockerfile: packages first, what changes last."""
    image = image_of(spec)
    lines = [
        f"FROM {image.base}",
        "# a container is no shared system: pip may install beside the distribution's packages",
        "ENV PIP_BREAK_SYSTEM_PACKAGES=1 PIP_NO_CACHE_DIR=1",
        "# compilers: Triton and DeepSpeed build as they run",
        f"RUN apt-get update && apt-get install -y --no-install-recommends {image.packages} && rm -rf /var/lib/apt/lists/*",
        "WORKDIR /workspace",
        "COPY requirements.txt .",
        *(f"RUN {line}" for line in image.before),
        "RUN pip install -r requirements.txt",
        "COPY . .",
    ]
    return "\n".join(lines) + "\n"
