"""Run trainings of image models by hand-written loops: GPUMemNet's on ImageNet, torchao's of its optimizers."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor

from published.case import NotCovered
from published.rows import Row
from published.traced.encoders import trained

# torchvision's wheel finds no CPU build of its operators beside PyTorch's, and registers two by name all the same
_OPERATORS = [torch.library.Library("torchvision", "DEF")]
for _name in ("nms", "qnms"):
    _OPERATORS[0].define(f"{_name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")

import timm  # noqa: E402
import torchvision  # noqa: E402

PACKAGES = ("torchvision", "timm")
STEPS = 3
CLASSES = {"gpumemnet": 1000, "ao": 45}  # ImageNet, resisc45


def run(row: Row) -> None:
    """Train and, as both scripts do after an epoch, evaluate."""
    model, pixels = built(row)
    if row.group == "gpumemnet":
        model.to("cuda")
        with torch.no_grad():
            model.eval()
            model(torch.rand(2, 3, pixels, pixels, device="cuda"))  # torchsummary's pass over two samples
        _plain(row, model, pixels)
    else:
        _torchao(row, model, pixels)


def built(row: Row) -> tuple[Any, int]:
    """The model, and the width of its images in pixels. Raises NotCovered."""
    classes = CLASSES[row.group]
    name = row.model.rpartition("/")[2].split()[-1]
    if row.group == "ao":
        if "vit" not in name:
            raise NotCovered(f"{row.model} under torchao's scripts")
        words = {"img_size": 224} if "dinov2" in name else {}
        return timm.create_model(name, pretrained=False, num_classes=classes, **words), 224
    if name == "Xception":
        return timm.create_model("xception", pretrained=False, num_classes=classes), 224
    if name == "inception_v3":
        return torchvision.models.inception_v3(
            weights=None, aux_logits=False, num_classes=classes, init_weights=False
        ), 299
    return getattr(torchvision.models, name)(weights=None, num_classes=classes), 224


def _batches(row: Row, pixels: int, classes: int) -> list[tuple[Tensor, Tensor]]:
    count = row.number("micro_batch", 1)
    return [(torch.zeros(count, 3, pixels, pixels), torch.randint(classes, (count,))) for _ in range(STEPS)]


def _plain(row: Row, model: Any, pixels: int) -> None:
    """GPUMemNet's loop (Test_Pipeline/cnn_models)."""
    batches = _batches(row, pixels, CLASSES["gpumemnet"])
    trained(model, batches)
    criterion = torch.nn.CrossEntropyLoss()
    model.eval()
    with torch.no_grad():
        for images, labels in batches:
            inputs, targets = images.to("cuda"), labels.to("cuda")
            outputs = model(inputs)
            criterion(outputs, targets)


def _torchao(row: Row, model: Any, pixels: int) -> None:
    """benchmarks/benchmark_low_bit_adam.py."""
    narrow = row.weight_dtype == "bf16"
    if row.checkpointing == "on":
        model.set_grad_checkpointing()
    if narrow:
        model.bfloat16()
    model.to("cuda")
    if "compile" in row.framework:
        model.compile(fullgraph=True)
    optimizer = _optimizer(row.optimizer)(model.parameters(), lr=1e-4, weight_decay=0)
    amp = partial(torch.autocast, "cuda", dtype=torch.bfloat16, enabled=not narrow)
    model.train()
    batches = _batches(row, pixels, 45)
    for images, labels in batches:
        inputs = images.bfloat16() if narrow else images
        with amp():
            loss = torch.nn.functional.cross_entropy(model(inputs.to("cuda")), labels.to("cuda"))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    model.eval()
    with torch.no_grad():
        for images, _ in batches:
            inputs = images.bfloat16() if narrow else images
            with amp():
                model(inputs.to("cuda")).argmax(1)


def _optimizer(name: str) -> Any:
    """The optimizer of a row of torchao's tables. Raises NotCovered."""
    if name.startswith("bnb"):
        import bitsandbytes

        return bitsandbytes.optim.AdamW8bit
    if name.startswith("torchao"):
        from torchao.prototype import low_bit_optim

        return getattr(low_bit_optim, name.split()[1])
    if name.endswith("offload: none"):
        return partial(torch.optim.AdamW, fused=True)
    if "CPUOffloadOptimizer" in name:
        from torchao.prototype import low_bit_optim

        words = {"offload_gradients": True} if "offload_gradients" in name else {}
        return partial(
            low_bit_optim.CPUOffloadOptimizer, optimizer_class=partial(torch.optim.AdamW, fused=True), **words
        )
    raise NotCovered(f"optimizer {name}")
