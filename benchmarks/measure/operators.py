"""What single operators allocate, on the real card or on a virtual one like it; `--against` holds the two together.

usage: python benchmarks/measure/operators.py OUT.jsonl [--virtual h100] [--only TEXT]
       python benchmarks/measure/operators.py --against benchmarks/measured/operators-h100-2026-11-26.jsonl.gz OUT.jsonl

Every operator runs twice; what each run allocates and frees is read from the card's memory history, where blocks of
unlikely sizes mark the borders. A line of the file is one operator: its name and the blocks of both runs in order,
n for an allocation of n bytes (requested) and -n for its release.
"""

from __future__ import annotations

import argparse
import gzip
import json
import random
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import nullcontext
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parent), str(HERE.parents[1] / "src")]

import torch  # noqa: E402
from torch import nn  # noqa: E402
from torch.nn import functional as F  # noqa: E402, N812

MOST = 200  # blocks of a run that are written
BIG = 1 << 20  # elements
BORDER = 7_000_001  # bytes of the block before the first operator's first run; one more for each border
Run = Callable[[], Any]
Case = tuple[str, Callable[[], Run]]
FLOATS = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
aten = torch.ops.aten

# family -> (channels in, out, kernel, stride, padding, size of the input, groups), and the batches it is tried with
CONVOLUTIONS: dict[str, tuple[list[tuple[int, int, Any, Any, Any, Any, int]], tuple[int, ...]]] = {
    "resnet": ([
        (3, 64, 7, 2, 3, 224, 1), (64, 64, 1, 1, 0, 56, 1), (64, 64, 3, 1, 1, 56, 1), (64, 256, 1, 1, 0, 56, 1),
        (256, 128, 1, 1, 0, 56, 1), (128, 128, 3, 2, 1, 56, 1), (256, 512, 1, 2, 0, 56, 1), (256, 256, 3, 1, 1, 14, 1),
        (512, 512, 3, 1, 1, 7, 1), (512, 2048, 1, 1, 0, 7, 1),
    ], (8, 64)),
    "unet": ([
        (4, 320, 3, 1, 1, 64, 1), (320, 320, 3, 1, 1, 64, 1), (320, 320, 3, 2, 1, 64, 1), (320, 640, 3, 1, 1, 32, 1),
        (640, 640, 3, 1, 1, 32, 1), (640, 1280, 3, 1, 1, 16, 1), (1280, 1280, 3, 1, 1, 8, 1),
        (2560, 1280, 3, 1, 1, 8, 1), (1920, 640, 3, 1, 1, 32, 1), (960, 320, 3, 1, 1, 64, 1), (320, 4, 3, 1, 1, 64, 1),
        (320, 640, 1, 1, 0, 32, 1), (320, 320, 3, 1, 1, 128, 1), (1280, 1280, 3, 1, 1, 32, 1),
    ], (1, 4, 16)),
    "vae": ([
        (3, 128, 3, 1, 1, 512, 1), (128, 128, 3, 1, 1, 512, 1), (128, 128, 3, 2, 0, 513, 1),
        (128, 256, 3, 1, 1, 256, 1),
        (256, 256, 3, 1, 1, 256, 1), (512, 512, 3, 1, 1, 128, 1), (512, 512, 3, 1, 1, 64, 1), (512, 8, 3, 1, 1, 64, 1),
        (128, 128, 3, 1, 1, 1024, 1), (256, 256, 3, 1, 1, 512, 1), (128, 3, 3, 1, 1, 512, 1), (8, 8, 1, 1, 0, 64, 1),
    ], (1, 2)),
    "patch": ([
        (3, 768, 16, 16, 0, 224, 1), (3, 1024, 14, 14, 0, 336, 1), (3, 1152, 14, 14, 0, 384, 1),
        (3, 96, 4, 4, 0, 224, 1),
        (16, 1536, 2, 2, 0, 128, 1),
    ], (8, 64)),
    "depthwise": ([
        (96, 96, 7, 1, 3, 56, 96), (384, 384, 7, 1, 3, 14, 384), (144, 144, 3, 2, 1, 112, 144),
        (240, 240, 5, 1, 2, 28, 240), (256, 256, 3, 1, 1, 28, 32),
    ], (8, 64)),
    "conv1d": ([
        (80, 1280, (3,), (1,), (1,), (3000,), 1), (1280, 1280, (3,), (2,), (1,), (3000,), 1),
        (128, 1280, (3,), (1,), (1,), (3000,), 1), (384, 384, (3,), (2,), (1,), (3000,), 1),
        (1, 512, (10,), (5,), (0,), (160000,), 1), (512, 512, (3,), (2,), (0,), (31999,), 1),
        (512, 512, (2,), (2,), (0,), (1000,), 1), (768, 768, (128,), (1,), (64,), (499,), 16),
        (2048, 2048, (4,), (1,), (3,), (2048,), 2048),
    ], (1, 8)),
    # Whisper's two layers, tiny to large, at the batches between and above
    "whisper": ([
        (inside, outside, (3,), (stride,), (1,), (3000,), 1)
        for width in (384, 512, 768, 1024, 1280)
        for inside, outside, stride in ((80 if width < 1280 else 128, width, 1), (width, width, 2))
    ], (2, 4, 12, 16, 32)),
    "conv3d": ([
        (3, 1280, (2, 14, 14), (2, 14, 14), (0, 0, 0), (2, 14, 14), 1),
        (16, 128, (3, 3, 3), (1, 1, 1), (0, 1, 1), (7, 60, 90), 1),
        (128, 128, (3, 3, 3), (1, 1, 1), (0, 1, 1), (7, 120, 180), 1),
        (512, 512, (3, 3, 3), (1, 1, 1), (0, 1, 1), (5, 60, 90), 1),
    ], (1, 2)),
}  # fmt: skip


def drawn(count: int, seed: int = 7) -> list[tuple[int, int, Any, Any, Any, Any, int]]:
    """Return convolutions at random, for formulas that were found on the others to be tried on."""
    draw, rows = random.Random(seed), []
    channels = (3, 16, 24, 48, 64, 96, 100, 128, 160, 192, 256, 320, 384, 480, 512, 640, 768, 960, 1024)
    while len(rows) < count:
        kernel, size = (
            draw.choice((1, 1, 3, 3, 3, 5, 7)),
            draw.choice((7, 12, 14, 16, 28, 32, 48, 56, 64, 96, 112, 160)),
        )
        inside, outside = draw.choice(channels), draw.choice(channels[1:])
        if inside * size * size <= 1 << 22 and outside * size * size <= 1 << 22:
            rows.append((inside, outside, kernel, draw.choice((1, 1, 2)), kernel // 2, size, 1))
    return rows


CONVOLUTIONS["drawn"] = (drawn(60), (2, 12))


def pair(size: Any) -> tuple[int, ...]:
    """Return a size in every dimension."""
    return size if isinstance(size, tuple) else (size, size)


def convolution(row: tuple[Any, ...], batch: int, dtype: torch.dtype, last: bool, benchmark: bool, part: str) -> Run:
    """Prepare one pass of a convolution. part: forward, input or weight (gradients), both."""
    inside, outside, kernel, stride, padding, size, groups = row
    kernel, stride, padding, size = map(pair, (kernel, stride, padding, size))
    torch.backends.cudnn.benchmark = benchmark
    layout = {4: torch.channels_last, 5: torch.channels_last_3d}.get(len(size) + 2) if last else None
    words: dict[str, Any] = {"device": "cuda", "dtype": dtype}
    x = torch.zeros(batch, inside, *size, **words)
    weight = torch.zeros(outside, inside // groups, *kernel, **words)
    if layout is not None:
        x, weight = x.to(memory_format=layout), weight.to(memory_format=layout)
    ones = [1] * len(size)
    args = (list(stride), list(padding), ones, False, [0] * len(size), groups)
    if part == "forward":
        return lambda: aten.convolution(x, weight, None, *args)
    grad = torch.zeros_like(aten.convolution(x, weight, None, *args))
    mask = [part in ("input", "both"), part in ("weight", "both"), False]
    return lambda: aten.convolution_backward(grad, x, weight, None, *args, mask)


def convolutions() -> Iterator[Case]:
    """Yield every pass of every convolution of the table, by dtype and layout, and some with autotuning."""
    for family, (rows, batches) in CONVOLUTIONS.items():
        layouts = (False, True) if family not in ("conv1d", "whisper") else (False,)
        for row, batch, dtype, last, tuned in product(rows, batches, FLOATS, layouts, (False, True)):
            if tuned and (dtype != "fp16" or batch != batches[0] or last):
                continue
            batch += tuned  # PyTorch tunes no shape for which it already has a plan
            size, kernel = ("x".join(map(str, pair(n))) for n in (row[5], row[2]))
            shape = f"{family} {row[0]}>{row[1]} k{kernel} s{pair(row[3])[0]} {size} g{row[6]} b{batch}"
            for part in ("forward", "input", "weight", "both"):
                name = f"{dtype} {'last' if last else 'first'}{' tuned' if tuned else ''} {part}"
                yield f"convolution {shape} {name}", partial(convolution, row, batch, FLOATS[dtype], last, tuned, part)


def gradients(out: torch.Tensor, xs: list[torch.Tensor]) -> None:
    """Run a backward pass, and wait for autograd's thread: it may hold the gradients for longer, as it needs Python."""
    found: tuple[Any, ...] = torch.autograd.grad(out, xs, torch.ones_like(out), allow_unused=True)
    until = time.monotonic() + 0.1
    while any(g is not None and g._use_count() > 1 for g in found) and time.monotonic() < until:
        time.sleep(0.0001)


def through(function: Callable[..., Any], *shapes: tuple[int, ...], dtype: str = "bf16", frozen: int = 0) -> Run:
    """Prepare a forward and a backward pass. frozen: so many of the last tensors take no gradient."""
    xs = [torch.ones(shape, device="cuda", dtype=FLOATS[dtype]) for shape in shapes]
    for x in xs[: len(xs) - frozen]:
        x.requires_grad_()

    def run() -> None:
        out = function(*xs)
        out = out[0] if isinstance(out, tuple) else out
        gradients(out, [x for x in xs if x.requires_grad])

    return run


def forward(function: Callable[..., Any], *makers: Callable[[], torch.Tensor]) -> Run:
    """Prepare a pass without gradients. makers: of the inputs."""
    xs = [make() for make in makers]

    def run() -> Any:
        with torch.no_grad():
            return function(*xs)

    return run


def of(*shape: int, dtype: str = "bf16") -> Callable[[], torch.Tensor]:
    """Return a maker of ones of floating point."""
    return lambda: torch.ones(shape, device="cuda", dtype=FLOATS[dtype])


def whole(*shape: int, high: int = 100, dtype: torch.dtype = torch.int64) -> Callable[[], torch.Tensor]:
    """Return a maker of whole numbers below `high`, a tenth of them distinct."""

    def make() -> torch.Tensor:
        count = 1
        for n in shape:
            count *= n
        return (torch.arange(count, device="cuda") % high).to(dtype).view(shape)

    return make


def module(build: Callable[[], nn.Module], *shape: int, dtype: str = "bf16") -> Run:
    """Prepare a module's forward and backward pass."""
    made = build().to("cuda", FLOATS[dtype])
    return through(lambda x: made(x), shape, dtype=dtype)


def trained(build: Callable[[], nn.Module], make: Callable[[], torch.Tensor], dtype: str = "bf16") -> Run:
    """Prepare a module's forward and backward pass with respect to its weights."""
    made, x = build().to("cuda", FLOATS[dtype]), make()

    def run() -> None:
        out = made(x)
        out = out[0] if isinstance(out, tuple) else out
        gradients(out, list(made.parameters()))

    return run


def attention(
    queries: int, keys: int, heads: int, groups: int, width: int, causal: bool, mask: str, dtype: str, batch: int = 2
) -> Run:
    """Prepare scaled_dot_product_attention as transformers calls it."""
    given = {
        "none": None,
        "bool": torch.ones(2, 1, queries, keys, device="cuda", dtype=torch.bool) if mask == "bool" else None,
        "float": torch.zeros(2, 1, queries, keys, device="cuda", dtype=FLOATS[dtype]) if mask == "float" else None,
        "trained": torch.zeros(2, heads, queries, keys, device="cuda", dtype=FLOATS[dtype], requires_grad=True)
        if mask == "trained"
        else None,
    }[mask]
    return through(
        lambda q, k, v: F.scaled_dot_product_attention(
            q, k, v, attn_mask=given, is_causal=causal, enable_gqa=heads != groups
        ),
        (batch, heads, queries, width), (batch, groups, keys, width), (batch, groups, keys, width), dtype=dtype,
    )  # fmt: skip


def optimizer(**words: Any) -> Run:
    """Prepare a step of AdamW over forty weights."""
    weights = [nn.Parameter(torch.ones(512, 512, device="cuda")) for _ in range(40)]
    adam = torch.optim.AdamW(weights, **words)
    for weight in weights:
        weight.grad = torch.ones_like(weight)
    return adam.step


FLOATING: tuple[tuple[str, Callable[[str], Run]], ...] = (
    ("layer_norm", lambda d: module(lambda: nn.LayerNorm(1024), 8, 512, 1024, dtype=d)),
    ("layer_norm trained", lambda d: trained(lambda: nn.LayerNorm(1024), of(8, 512, 1024, dtype=d), d)),
    ("rms_norm", lambda d: module(lambda: nn.RMSNorm(1024), 8, 512, 1024, dtype=d)),
    ("group_norm", lambda d: module(lambda: nn.GroupNorm(32, 320), 4, 320, 64, 64, dtype=d)),
    ("group_norm trained", lambda d: trained(lambda: nn.GroupNorm(32, 320), of(4, 320, 64, 64, dtype=d), d)),
    ("batch_norm", lambda d: module(lambda: nn.BatchNorm2d(256), 32, 256, 56, 56, dtype=d)),
    ("batch_norm trained", lambda d: trained(lambda: nn.BatchNorm2d(256), of(32, 256, 56, 56, dtype=d), d)),
    ("batch_norm last", lambda d: trained(
        lambda: nn.BatchNorm2d(256),
        lambda: of(32, 256, 56, 56, dtype=d)().to(memory_format=torch.channels_last), d)),
    ("batch_norm 1d", lambda d: trained(lambda: nn.BatchNorm1d(512), of(4096, 512, dtype=d), d)),
    ("instance_norm", lambda d: module(lambda: nn.InstanceNorm2d(64), 8, 64, 128, 128, dtype=d)),
    ("max_pool", lambda d: module(lambda: nn.MaxPool2d(3, 2, 1), 32, 64, 112, 112, dtype=d)),
    ("avg_pool", lambda d: module(lambda: nn.AvgPool2d(2), 32, 64, 112, 112, dtype=d)),
    ("adaptive_pool", lambda d: module(lambda: nn.AdaptiveAvgPool2d(1), 32, 2048, 7, 7, dtype=d)),
    ("nearest", lambda d: through(lambda x: F.interpolate(x, scale_factor=2.0), (4, 320, 32, 32), dtype=d)),
    ("bilinear", lambda d: through(
        lambda x: F.interpolate(x, scale_factor=2.0, mode="bilinear"), (4, 320, 32, 32), dtype=d)),
    ("bicubic", lambda d: through(
        lambda x: F.interpolate(x, (37, 37), mode="bicubic"), (1, 768, 16, 16), dtype=d)),
    ("softmax", lambda d: through(lambda x: x.softmax(-1), (2, 16, 1024, 1024), dtype=d)),
    ("log_softmax fp32", lambda d: through(lambda x: x.log_softmax(-1, torch.float32), (2048, 32000), dtype=d)),
    ("cross_entropy", lambda d: through(
        lambda x: F.cross_entropy(x, whole(2048, high=32000)()), (2048, 32000), dtype=d)),
    ("cross_entropy smooth", lambda d: through(
        lambda x: F.cross_entropy(x, whole(2048, high=32000)(), label_smoothing=0.1), (2048, 32000), dtype=d)),
    ("cross_entropy none", lambda d: through(
        lambda x: F.cross_entropy(x, whole(2048, high=32000)(), reduction="none"), (2048, 32000), dtype=d)),
    ("cross_entropy images", lambda d: through(
        lambda x: F.cross_entropy(x, whole(4, 128, 128, high=150)()), (4, 150, 128, 128), dtype=d)),
    ("logsumexp", lambda d: through(lambda x: x.logsumexp(-1), (2048, 32000), dtype=d)),
    ("gather", lambda d: through(
        lambda x: x.gather(-1, whole(2048, 1, high=32000)()), (2048, 32000), dtype=d)),
    ("scatter_add", lambda d: through(
        lambda x: torch.zeros_like(x).scatter_add(0, whole(4096, 1024, high=4096)(), x), (4096, 1024),
        dtype=d)),
    ("index_select", lambda d: through(
        lambda x: x.index_select(0, whole(8192, high=4096)()), (4096, 1024), dtype=d)),
    ("index", lambda d: through(lambda x: x[whole(8192, high=4096)()], (4096, 1024), dtype=d)),
    ("index_add", lambda d: through(
        lambda x: torch.zeros_like(x).index_add(0, whole(4096, high=512)(), x), (4096, 1024), dtype=d)),
    ("embedding", lambda d: trained(lambda: nn.Embedding(32000, 1024), whole(8, 512, high=32000), d)),
    ("embedding long", lambda d: trained(lambda: nn.Embedding(32000, 1024), whole(8, 4096, high=32000), d)),
    ("embedding short", lambda d: trained(lambda: nn.Embedding(512, 768), whole(8, 256, high=512), d)),
    ("embedding padded", lambda d: trained(
        lambda: nn.Embedding(32000, 1024, padding_idx=0), whole(8, 512, high=32000), d)),
    ("embedding_bag", lambda d: trained(
        lambda: nn.EmbeddingBag(32000, 64, mode="sum"), whole(512, 16, high=32000), d)),
    ("cumsum", lambda d: through(lambda x: x.cumsum(-1), (512, 4096), dtype=d)),
    ("cumsum flat", lambda d: forward(lambda x: x.cumsum(0), of(BIG, dtype=d))),
    ("cumprod", lambda d: forward(lambda x: x.cumprod(-1), of(512, 4096, dtype=d))),
    ("topk", lambda d: through(lambda x: x.topk(8, -1)[0], (4096, 64), dtype=d)),
    ("topk wide", lambda d: forward(lambda x: x.topk(50, -1), of(64, 128000, dtype=d))),
    ("topk flat", lambda d: forward(lambda x: x.topk(1000), of(BIG, dtype=d))),
    ("sort", lambda d: forward(lambda x: x.sort(-1), of(64, 128000, dtype=d))),
    ("sort small", lambda d: forward(lambda x: x.sort(-1), of(4096, 512, dtype=d))),
    ("sort flat", lambda d: forward(lambda x: x.sort(), of(BIG, dtype=d))),
    ("argsort stable", lambda d: forward(lambda x: x.argsort(stable=True), of(BIG, dtype=d))),
    ("median", lambda d: forward(lambda x: x.median(-1), of(64, 4096, dtype=d))),
    ("kthvalue", lambda d: forward(lambda x: x.kthvalue(5, -1), of(64, 4096, dtype=d))),
    ("mode", lambda d: forward(lambda x: x.mode(-1), of(64, 1024, dtype=d))),
    ("max", lambda d: through(lambda x: x.max(-1)[0], (4096, 1024), dtype=d)),
    ("max all", lambda d: forward(lambda x: x.max(), of(BIG, dtype=d))),
    ("argmax", lambda d: forward(lambda x: x.argmax(-1), of(2048, 32000, dtype=d))),
    ("argmax all", lambda d: forward(lambda x: x.argmax(), of(BIG, dtype=d))),
    ("var", lambda d: through(lambda x: x.var(-1), (4096, 1024), dtype=d)),
    ("var all", lambda d: forward(lambda x: x.var(), of(BIG, dtype=d))),
    ("std_mean", lambda d: forward(lambda x: torch.std_mean(x), of(BIG, dtype=d))),
    ("norm", lambda d: forward(lambda x: torch.linalg.vector_norm(x), of(4 * BIG, dtype=d))),
    ("sum middle", lambda d: forward(lambda x: x.sum(1), of(64, 512, 1024, dtype=d))),
    ("sum first", lambda d: forward(lambda x: x.sum((0, 1)), of(64, 512, 1024, dtype=d))),
    ("sum images", lambda d: forward(lambda x: x.sum((0, 2, 3)), of(16, 320, 64, 64, dtype=d))),
    ("mean images", lambda d: forward(lambda x: x.mean((2, 3)), of(16, 2048, 7, 7, dtype=d))),
    ("sum all fp32", lambda d: forward(lambda x: x.sum(dtype=torch.float32), of(4 * BIG, dtype=d))),
    ("any", lambda d: forward(lambda x: x.isnan().any(), of(4 * BIG, dtype=d))),
    ("nonzero", lambda d: forward(lambda x: x.nonzero(), of(1024, 1024, dtype=d))),
    ("where one", lambda d: forward(lambda x: torch.where(x > 0), of(1024, 1024, dtype=d))),
    ("masked_select", lambda d: forward(lambda x: x[x > 0], of(1024, 1024, dtype=d))),
    ("masked_fill", lambda d: through(lambda x: x.masked_fill(x > 2, 0.0), (2048, 4096), dtype=d)),
    ("histc", lambda d: forward(lambda x: x.float().histc(100), of(BIG, dtype=d))),
    ("quantile", lambda d: forward(lambda x: x.float().quantile(0.5), of(BIG, dtype=d))),
    ("multinomial", lambda d: forward(lambda x: x.softmax(-1).multinomial(1), of(64, 32000, dtype=d))),
    ("dropout", lambda d: through(lambda x: F.dropout(x, 0.1), (4096, 4096), dtype=d)),
    ("gelu", lambda d: through(lambda x: F.gelu(x), (4096, 4096), dtype=d)),
    ("silu mul", lambda d: through(lambda x, y: F.silu(x) * y, (4096, 4096), (4096, 4096), dtype=d)),
    ("glu", lambda d: through(lambda x: F.glu(x), (4096, 4096), dtype=d)),
    ("prelu", lambda d: trained(nn.PReLU, of(4096, 4096, dtype=d), d)),
    ("linear", lambda d: trained(lambda: nn.Linear(1024, 4096), of(8, 512, 1024, dtype=d), d)),
    ("linear odd", lambda d: trained(lambda: nn.Linear(1023, 4097), of(8, 512, 1023, dtype=d), d)),
    ("matmul", lambda d: through(lambda x, y: x @ y, (2, 16, 1024, 64), (2, 16, 64, 1024), dtype=d)),
    ("matmul broadcast", lambda d: through(lambda x, y: x @ y, (8, 512, 1024), (1024, 64), dtype=d)),
    ("einsum", lambda d: through(
        lambda x, y: torch.einsum("bhnd,bhmd->bhnm", x, y), (2, 16, 256, 64), (2, 16, 256, 64), dtype=d)),
    ("baddbmm", lambda d: through(
        lambda b, x, y: torch.baddbmm(b, x, y), (32, 256, 256), (32, 256, 64), (32, 64, 256), dtype=d)),
    ("bilinear layer", lambda d: through(
        lambda x, y, w: F.bilinear(x, y, w), (512, 64), (512, 64), (32, 64, 64), dtype=d)),
    ("cdist", lambda d: through(lambda x, y: torch.cdist(x.float(), y.float()), (512, 64), (512, 64), dtype=d)),
    ("cosine", lambda d: through(
        lambda x, y: F.cosine_similarity(x, y), (4096, 768), (4096, 768), dtype=d)),
    ("normalize", lambda d: through(lambda x: F.normalize(x), (4096, 768), dtype=d)),
    ("pixel_shuffle", lambda d: through(lambda x: F.pixel_shuffle(x, 2), (4, 256, 64, 64), dtype=d)),
    ("unfold", lambda d: through(lambda x: F.unfold(x, 3, padding=1), (4, 64, 56, 56), dtype=d)),
    ("pad reflect", lambda d: through(
        lambda x: F.pad(x, (1, 1, 1, 1), mode="reflect"), (4, 64, 56, 56), dtype=d)),
    ("grid_sample", lambda d: through(
        lambda x, g: F.grid_sample(x, g, align_corners=False), (4, 64, 56, 56), (4, 56, 56, 2), dtype=d)),
    ("roll", lambda d: through(lambda x: x.roll((3, 3), (1, 2)), (8, 56, 56, 96), dtype=d)),
    ("cat", lambda d: through(lambda x, y: torch.cat([x, y], 1), (8, 512, 768), (8, 77, 768), dtype=d)),
    ("repeat_interleave", lambda d: through(lambda x: x.repeat_interleave(4, 1), (2, 8, 512, 128), dtype=d)),
    ("lstm", lambda d: trained(
        lambda: nn.LSTM(256, 512, 2, batch_first=True), of(32, 128, 256, dtype=d), d)),
    ("lstm both ways", lambda d: trained(
        lambda: nn.LSTM(256, 256, 1, batch_first=True, bidirectional=True), of(32, 128, 256, dtype=d), d)),
    ("gru", lambda d: trained(
        lambda: nn.GRU(256, 512, 2, batch_first=True, dropout=0.1), of(32, 128, 256, dtype=d), d)),
    ("rnn", lambda d: trained(lambda: nn.RNN(256, 512, 1), of(128, 32, 256, dtype=d), d)),
    ("transposed", lambda d: trained(
        lambda: nn.ConvTranspose2d(256, 128, 2, 2), of(8, 256, 64, 64, dtype=d), d)),
    ("transposed k4", lambda d: trained(
        lambda: nn.ConvTranspose2d(256, 128, 4, 2, 1), of(8, 256, 64, 64, dtype=d), d)),
    ("convolution bias", lambda d: trained(
        lambda: nn.Conv2d(320, 320, 3, padding=1), of(4, 320, 64, 64, dtype=d), d)),
    ("mish", lambda d: through(lambda x: F.mish(x), (4096, 1024), dtype=d)),
    ("smooth_l1", lambda d: through(
        lambda x, y: F.smooth_l1_loss(x, y), (4096, 1024), (4096, 1024), dtype=d)),
    ("bce", lambda d: through(
        lambda x, y: F.binary_cross_entropy_with_logits(x, y), (4096, 1024), (4096, 1024), dtype=d, frozen=1)),
    ("kl_div", lambda d: through(
        lambda x, y: F.kl_div(x, y, reduction="batchmean"), (512, 32000), (512, 32000), dtype=d, frozen=1)),
    ("mse", lambda d: through(lambda x, y: F.mse_loss(x, y), (4, 4, 128, 128), (4, 4, 128, 128), dtype=d)),
    ("foreach norm", lambda d: forward(
        lambda *xs: torch._foreach_norm(list(xs)), *[of(1024, 1024, dtype=d)] * 40)),
    ("clip", lambda d: forward(
        lambda *xs: torch.nn.utils.get_total_norm(list(xs)), *[of(1024, 1024, dtype=d)] * 40)),
)  # fmt: skip


OTHERS: tuple[Case, ...] = (
    ("sort int64", lambda: forward(lambda x: x.sort(), whole(BIG))),
    ("sort int32", lambda: forward(lambda x: x.sort(), whole(BIG, dtype=torch.int32))),
    ("unique", lambda: forward(lambda x: x.unique(), whole(BIG))),
    ("unique counts", lambda: forward(lambda x: x.unique(return_counts=True, return_inverse=True), whole(BIG))),
    ("unique_consecutive", lambda: forward(lambda x: x.unique_consecutive(), whole(BIG))),
    ("bincount", lambda: forward(lambda x: x.bincount(minlength=64), whole(BIG, high=64))),
    ("one_hot", lambda: forward(lambda x: F.one_hot(x, 64), whole(16384, high=64))),
    ("cumsum int", lambda: forward(lambda x: x.cumsum(0), whole(BIG))),
    ("cumsum rows int", lambda: forward(lambda x: x.cumsum(-1), whole(64, 4096))),
    ("sum bool", lambda: forward(lambda x: (x > 3).sum(), whole(BIG))),
    ("sum int", lambda: forward(lambda x: x.sum(), whole(BIG))),
    ("sum int32", lambda: forward(lambda x: x.sum(), whole(BIG, dtype=torch.int32))),
    ("sum int rows", lambda: forward(lambda x: x.sum(-1), whole(64, 4096))),
    ("max int", lambda: forward(lambda x: x.max(), whole(BIG))),
    ("equal", lambda: forward(lambda x, y: (x == y).all(), whole(BIG), whole(BIG))),
    ("nonzero bool", lambda: forward(lambda x: (x > 3).nonzero(), whole(1024, 1024))),
    ("randperm", lambda: forward(lambda: torch.randperm(BIG, device="cuda"))),
    ("randperm small", lambda: forward(lambda: torch.randperm(1000, device="cuda"))),
    ("repeat_interleave counts", lambda: forward(
        lambda x: torch.repeat_interleave(x, torch.ones_like(x)), whole(4096))),
    ("searchsorted", lambda: forward(torch.searchsorted, whole(4096, high=4096), whole(BIG))),
    ("isin", lambda: forward(lambda x, y: torch.isin(x, y), whole(65536), whole(64))),
    ("tril", lambda: forward(lambda x: x.tril(), of(2048, 2048, dtype="fp32"))),
    ("fft", lambda: through(lambda x: torch.fft.rfft(x).abs(), (64, 16000), dtype="fp32")),
    ("stft", lambda: forward(lambda x: torch.stft(
        x, 400, 160, window=torch.hann_window(400, device="cuda"), return_complex=True),
        of(8, 160000, dtype="fp32"))),
    ("qr", lambda: forward(lambda x: torch.linalg.qr(x), of(512, 512, dtype="fp32"))),
    ("svd", lambda: forward(lambda x: torch.linalg.svd(x), of(256, 256, dtype="fp32"))),
    ("svdvals", lambda: forward(lambda x: torch.linalg.svdvals(x), of(256, 256, dtype="fp32"))),
    ("cholesky", lambda: forward(
        lambda x: torch.linalg.cholesky(x), lambda: torch.eye(512, device="cuda"))),
    ("solve", lambda: forward(
        lambda x, y: torch.linalg.solve(x, y), lambda: torch.eye(512, device="cuda"), of(512, 64, dtype="fp32"))),
    ("inverse", lambda: forward(lambda x: torch.linalg.inv(x), lambda: torch.eye(512, device="cuda"))),
    ("eigh", lambda: forward(lambda x: torch.linalg.eigh(x), lambda: torch.eye(256, device="cuda"))),
    ("ctc", lambda: through(lambda x: F.ctc_loss(
        x.log_softmax(-1), whole(8, 50, high=31)() + 1, torch.full((8,), 499, device="cuda"),
        torch.full((8,), 50, device="cuda")), (499, 8, 32), dtype="fp32")),
    ("ctc host", lambda: through(lambda x: F.ctc_loss(
        x.log_softmax(-1), (whole(8, 50, high=31)() + 1).cpu().int(), torch.full((8,), 499, dtype=torch.int32),
        torch.full((8,), 50, dtype=torch.int32)), (499, 8, 32), dtype="fp32")),
    ("scaled_mm", lambda: forward(
        lambda x, y, a, b: torch._scaled_mm(x, y.t(), a, b, out_dtype=torch.bfloat16),
        lambda: of(1024, 1024)().to(torch.float8_e4m3fn), lambda: of(4096, 1024)().to(torch.float8_e4m3fn),
        of(1, dtype="fp32"), of(1, dtype="fp32"))),
    ("grouped_mm", lambda: forward(
        lambda x, y, o: torch._grouped_mm(x, y, offs=o), of(4096, 1024), of(8, 1024, 2048),
        lambda: torch.arange(512, 4097, 512, device="cuda", dtype=torch.int32))),
    ("adamw fused", lambda: optimizer(fused=True)),
    ("adamw foreach", lambda: optimizer(foreach=True)),
    ("adamw loop", lambda: optimizer(foreach=False)),
)  # fmt: skip


def operators() -> Iterator[Case]:
    """Yield operators that people train with, other than convolutions."""
    for dtype in FLOATS:
        for heads, groups, width in ((16, 16, 64), (32, 8, 128), (8, 8, 80), (16, 16, 72), (8, 4, 256), (12, 12, 96)):
            for queries, keys, causal, mask in (
                (1024, 1024, True, "none"), (1024, 1024, False, "none"), (1024, 1024, False, "bool"),
                (1024, 1024, False, "float"), (1500, 1500, False, "none"), (448, 1500, False, "none"),
                (4096, 77, False, "none"), (577, 577, False, "none"), (256, 256, False, "trained"),
            ):  # fmt: skip
                yield (
                    f"attention {dtype} {heads}/{groups}x{width} {queries}x{keys} {'causal' if causal else ''} {mask}",
                    partial(attention, queries, keys, heads, groups, width, causal, mask, dtype),
                )
        for name, make in FLOATING:
            yield f"{name} {dtype}", partial(make, dtype)
    for heads, groups, width in ((32, 8, 128), (64, 8, 128), (128, 8, 128), (16, 16, 64), (128, 128, 192)):
        for length, keys in ((8192, 8192), (16384, 16384), (32768, 32768), (4096, 32768), (8192, 16384)):
            for causal in {length == keys, False}:
                yield (
                    f"attention long {heads}/{groups}x{width} {length}x{keys} {'causal' if causal else ''}",
                    partial(attention, length, keys, heads, groups, width, causal, "none", "bf16", 1),
                )
    yield from OTHERS


# --- record ---


def border(index: int) -> None:
    """Mark a border in the card's memory history."""
    torch.empty(BORDER + index, dtype=torch.uint8, device="cuda")


def record(cases: Iterable[Case], seconds: float = 600) -> Iterator[dict[str, Any]]:
    """Run operators twice on the card that `cuda` is, for so many seconds; yield a line for each."""
    end = time.monotonic() + seconds
    torch.ones(64, 64, device="cuda") @ torch.ones(64, 64, device="cuda")
    names: list[tuple[str, str]] = []
    torch.cuda.memory._record_memory_history("all", context=None, max_entries=4_000_000)
    for name, make in cases:
        if time.monotonic() > end:
            break
        index, error = 3 * len(names), ""
        try:
            run = make()
            border(index)
            for _ in range(2):
                index += 1
                run()
                border(index)
            del run
        except Exception as problem:
            error = (str(problem).strip().splitlines() or [type(problem).__name__])[0][:200]
        torch.backends.cudnn.benchmark = False
        names.append((name, error))
    blocks: dict[int, list[int]] = {}
    now = -1
    for entry in torch.cuda.memory._snapshot()["device_traces"][0]:
        size, action = int(entry["size"]), entry["action"]
        if BORDER <= size < BORDER + 3 * len(names):
            now = size - BORDER
        elif action in ("alloc", "free_completed"):
            blocks.setdefault(now, []).append(size if action == "alloc" else -size)
    for i, (name, error) in enumerate(names):
        runs = [blocks.get(3 * i + j, []) for j in range(2)]
        yield {"name": name, "peaks": list(map(peak, runs)), "runs": [r[:MOST] for r in runs], "error": error}


def rows(path: Path) -> list[dict[str, Any]]:
    """Return the operators of a file that was written here; one that ends in .gz begins with a line about the card."""
    if path.suffix == ".gz":
        return [json.loads(line) for line in gzip.decompress(path.read_bytes()).splitlines()[1:]]
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def peak(blocks: list[int]) -> int:
    """Return the most bytes that a run held at once beyond what it began with."""
    held = most = 0
    for size in blocks:
        held += size
        most = max(most, held)
    return most


def against(real: Path, ours: Path) -> int:
    """Print the operators whose blocks differ; return how many."""
    theirs, mine = ({row["name"]: row for row in rows(path)} for path in (real, ours))
    differ = 0
    for name, row in theirs.items():
        other = mine.get(name)
        if other is None:
            continue
        if row.get("error") or other.get("error"):
            differ += 1
            print(f"{name}: {row.get('error') or other.get('error')}")
        elif row["runs"][1] != other["runs"][1]:
            differ += 1
            (a, b), (most, ours_most) = (row["runs"][1], other["runs"][1]), (row["peaks"][1], other["peaks"][1])
            extra = sorted({n for n in a if n > 0 and a.count(n) > b.count(n)}, reverse=True)[:4]
            ghost = sorted({n for n in b if n > 0 and b.count(n) > a.count(n)}, reverse=True)[:4]
            print(f"{name}: peak {most:,} measured, {ours_most:,} traced; only measured {extra}, only traced {ghost}")
    both = len(theirs.keys() & mine.keys())
    print(f"{both - differ} of {both} operators allocate the same blocks in the same order")
    return differ


def main() -> int:
    """Run the command line. Exits with 1 if an operator differs."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path, nargs="?", help="file that is written")
    parser.add_argument("--virtual", metavar="GPU", help="on a virtual card of that name")
    parser.add_argument("--only", default="", help="operators whose name contains this")
    parser.add_argument("--seconds", type=float, default=600, help="start no operator after that; default: 600")
    parser.add_argument("--against", nargs=2, type=Path, metavar=("REAL", "VIRTUAL"))
    asked = parser.parse_args()
    if asked.against:
        return 1 if against(*asked.against) else 0
    if asked.out is None:
        parser.error("name the file to write, or --against")
    card: Any = nullcontext()
    if asked.virtual:
        from memfit.virtual.virtual_gpu import virtual_gpu

        card = virtual_gpu(asked.virtual)
    cases = ((name, make) for name, make in (*operators(), *convolutions()) if asked.only in name)
    with card:
        lines = [json.dumps(row) for row in record(cases, asked.seconds)]
    asked.out.write_text("\n".join(lines) + "\n", encoding="utf-8")
    print(f"{len(lines)} operators in {asked.out}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
