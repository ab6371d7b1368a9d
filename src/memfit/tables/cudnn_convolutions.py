"""Workspaces of cuDNN's convolutions, found in 3,188 passes that were measured on an H100 (benchmarks/measured).

cuDNN's kernels read and write NHWC, with channels in multiples of 16 bytes. A workspace holds copies of the operands
that lie otherwise, the result included, and what the kernel needs: descriptors and counters of at most a kilobyte, and
partial sums in fp32 where the work of one tile is split across multiprocessors. Copies follow from the shapes. cuDNN's
heuristic decides on splits; where it splits some passes of a kind and others not, the size returned is the most that
passes of that kind took. On another card all of this is an assumption.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from typing import Literal

Sizes = tuple[int, ...]
Dtype = Literal["fp32", "fp16", "bf16"]  # fp32 on tensor cores, as TF32
Part = Literal["forward", "input", "weight"]  # the pass: the result, the gradient of the input, that of the weight

TILE = 65_536  # bytes of a tile of partial sums, 128 x 128 in fp32
ALIGNMENT = 16  # bytes at the end of the copies
PERSISTENT = 131  # bytes of a kernel that walks over more tiles than two for each multiprocessor
COUNTERS = 159  # bytes of the counters of a split weight pass, and 4 more for every piece of a tile
NARROW_COUNTERS = 128  # the same where the input's channels are padded
# for results of 128 channels and so many tiles at most, what a forward pass in fp32 takes
NARROW_SPLITS = (
    (128, 0), (400, 131), (512, 6_292_003), (1024, 131), (2048, 2_097_411), (4096, 4_194_659), (8192, 6_292_003),
)  # fmt: skip
PLANE_ROWS = 50_000  # positions from which a forward pass in fp32 with one tap and a stride writes NCHW
LONG_WEIGHT = {2: 16_384, 4: 3_072}  # products of a weight from which a weight pass is split
PIECE = {2: 6_144, 4: 768}  # products of a piece at least
SHORT_PIECE = 256  # the same where channels are padded
UNEVEN_WEIGHT = {2: 3_932_895, 4: 4_326_087}  # bytes of a weight pass of 320 channels, which fill no tiles evenly
STEM, STEM_PIECES = 1 << 19, 8  # products of a weight from which a kernel of fp16 takes a stem, and its pieces
LARGE_WEIGHT = 7_864_723  # bytes of a weight pass in 16 bits that has tiles for many waves
PRODUCT = {2: 272, 4: 256}  # bytes that a weight pass takes which is a matrix product of NHWC operands
DEPTHWISE_PIECES = 8  # partial sums of a depthwise weight pass for each sample, in 16 bits, channels in steps of 32
DEPTHWISE = {False: 1_074_958, True: 9_938_551}  # bytes of those in fp32; large kernels read copies padded to four


WIDE = 512  # channels of a result from which a forward or input pass is split
LONG, LONGER = 4_608, 11_520  # products of a result from which one is split, and split into more
# pass, dtype -> for results of so many tiles at most, the bytes of partial sums and counters if LONG, and if LONGER
SPLITS: dict[tuple[Part, Dtype], tuple[tuple[int, int, int], ...]] = {
    ("forward", "bf16"): (
        (10, 1_311_679, 1_311_679), (20, 0, 2_621_759), (64, 0, 0), (80, 2_621_759, 3_932_799), (128, 0, 0),
        (160, 5_243_199, 7_864_959), (256, 0, 0), (320, 7_340_303, 14_680_559), (512, 0, 0),
        (640, 5_243_203, 7_864_963),
    ),
    ("forward", "fp16"): (
        (10, 1_311_679, 1_311_679), (20, 0, 3_932_799), (256, 0, 0), (320, 0, 14_680_559), (512, 0, 0),
        (640, 7_864_963, 7_864_963),
    ),
    ("forward", "fp32"): (
        (10, 1_966_719, 1_966_719), (20, 1_439, 7_864_959), (128, 0, 0), (160, 7_864_959, 7_864_959), (256, 0, 0),
        (320, 14_680_559, 14_680_559), (512, 0, 0), (640, 7_864_963, 7_864_963),
    ),
    ("input", "bf16"): (
        (40, 0, 0), (80, 3_932_799, 3_932_799), (128, 0, 0), (160, 131, 7_864_959), (512, 131, 131),
        (640, 5_243_203, 5_243_203),
    ),
    ("input", "fp16"): (
        (40, 0, 0), (80, 3_932_799, 3_932_799), (128, 0, 0), (160, 131, 7_864_959), (512, 131, 131),
        (640, 7_864_963, 7_864_963),
    ),
    ("input", "fp32"): (
        (10, 7_864_743, 7_864_743), (16, 3_539_535, 3_539_535), (20, 13_107_799, 13_107_799),
        (40, 7_864_959, 15_729_279), (80, 15_729_279, 15_729_279), (120, 0, 0), (160, 7_864_959, 7_864_959),
        (256, 0, 0), (320, 14_680_559, 14_680_559), (640, 131, 131), (1688, 131, 14_680_563),
    ),
}  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Convolution:
    """A convolution in one layout. A transposed one is described as the convolution that it is the gradient of."""

    batch: int
    inside: int  # channels of the input
    outside: int  # channels of the output
    groups: int
    kernel: Sizes
    stride: Sizes
    size: Sizes  # of the input
    out: Sizes  # size of the output
    dtype: Dtype
    last: bool  # whether operands and results lie as NHWC

    @property
    def itemsize(self) -> int:
        """Return the bytes of an element."""
        return 4 if self.dtype == "fp32" else 2

    @property
    def taps(self) -> int:
        """Return the positions of the kernel."""
        return prod(self.kernel)

    @property
    def pointwise(self) -> bool:
        """Return whether it is a matrix product: a kernel of one position that visits all."""
        return self.taps == prod(self.stride) == 1

    @property
    def patches(self) -> bool:
        """Return whether kernels do not overlap, as in the embedding of patches."""
        return self.kernel == self.stride and self.taps > 1

    def product(self, part: Part) -> tuple[int, int, int]:
        """Return rows, columns and summed elements of the matrix product that a pass is."""
        if part == "forward":
            return self.batch * prod(self.out), self.outside, self.inside * self.taps
        if part == "input":
            return self.batch * prod(self.size) // prod(self.stride), self.inside, self.outside * self.taps
        return self.outside, self.inside * self.taps, self.batch * prod(self.out)

    def copied(self, x: bool, y: bool, w: bool, channels: tuple[int, int] | None = None) -> int:
        """Return the bytes of copies of input, output and weight. channels: of input and output, padded."""
        inside, outside = channels or (self.inside, self.outside)
        return self.itemsize * (
            x * self.batch * inside * prod(self.size)
            + y * self.batch * outside * prod(self.out)
            + w * outside * (inside // self.groups) * self.taps
        )


def workspace(c: Convolution, part: Part, multiprocessors: int) -> int:
    """Return the bytes of the workspace of a pass, 0 for none."""
    if c.groups > 1:
        return _grouped(c, part)
    if c.pointwise and (c.last or prod(c.out) % (16 // c.itemsize) == 0):  # a matrix product reads NCHW as it lies
        return _pointwise(c, multiprocessors) if part == "weight" else 0
    if _direct(c, part):
        return 0
    if part == "weight" and _winograd(c):
        return 9 * c.copied(True, True, False) // 4 + 4 * c.copied(False, False, True)
    return _transposed(c, part, multiprocessors)


def _transposed(c: Convolution, part: Part, multiprocessors: int) -> int:
    """Return the workspace of a kernel that works in NHWC."""
    channels = _channels(c, part)
    split = _split_weight(c, channels, multiprocessors) if part == "weight" else _split(c, part, multiprocessors)
    return _copies(c, part, channels) + split


def _up(a: int, b: int) -> int:
    return -(-a // b)


def _direct(c: Convolution, part: Part) -> bool:
    """Return whether a kernel reads operands of very few channels as they lie."""
    if c.inside > 4:
        return False
    small = c.patches and c.taps <= 16
    if c.itemsize == 2:
        few = small or (c.kernel == (3, 3) and c.batch <= 2)
        return part == "forward" and few and not (c.last and c.dtype == "bf16" and not c.patches)
    if part == "forward":
        return not c.last and ((small and not _plane(c)) or len(c.kernel) == 3 or c.size[0] == 1)
    return not c.last if part == "input" else c.inside < 4 and c.kernel in ((3, 3), (1, 10))


def _plane(c: Convolution) -> bool:
    """Return whether a kernel of fp32 takes patches of one channel, padded to four, and writes NCHW.

    Not measured: wavelet transforms of PEFT's WaveFT on an L40S reserve what this gives, to 4 of 12,384 MiB.
    """
    return c.itemsize == 4 and c.inside == 1 and c.patches and len(c.kernel) == 2 and c.size[0] > 1 and not c.last


def _winograd(c: Convolution) -> bool:
    """Return whether a weight pass transforms tiles of 4 x 4 to 6 x 6, and weights of 3 x 3 too."""
    odd = 128 < c.inside == c.outside and c.outside % 128 != 0
    return c.dtype == "fp32" and not c.last and c.kernel == (3, 3) and prod(c.stride) == 1 and odd and c.batch <= 8


def _channels(c: Convolution, part: Part) -> tuple[int, int]:
    """Return the channels of input and output that a kernel works on."""
    step = 16 // c.itemsize
    inside, outside = (_up(channels, step) * step for channels in (c.inside, c.outside))
    if c.inside <= 4 and part == "forward":
        if c.dtype == "fp16" and not c.patches and len(c.kernel) == 2 and c.size[0] > 1:
            inside = 4
        elif c.dtype == "fp32" and (c.last or not (c.patches or c.kernel == (3, 3))):
            inside = c.inside
    elif c.inside <= 4 and part == "input" and c.patches and len(c.kernel) == 2:
        inside = c.inside
    elif c.inside <= 4 and part == "weight" and _large_stem(c):
        inside = 4
    return inside, outside


def _large_stem(c: Convolution) -> bool:
    """Return whether a kernel for four channels takes the weight pass of a network's first convolution."""
    return c.dtype == "fp16" and c.kernel == (7, 7) and c.batch * prod(c.out) >= STEM


def _copies(c: Convolution, part: Part, channels: tuple[int, int]) -> int:
    """Return the bytes of copies of the operands."""
    few = c.inside <= 4
    x, y = (not c.last or padded != plain for padded, plain in zip(channels, (c.inside, c.outside), strict=True))
    if part == "input" and c.last and ((c.patches and (few or c.itemsize == 4)) or (c.itemsize == 4 and c.inside % 4)):
        x = y = True
    elif c.itemsize == 4 and part == "forward" and few:
        x, y = True, y and (c.last or c.kernel != (3, 3))
    elif c.itemsize == 4 and c.last and part == "input":
        y = y or c.outside <= 8
    elif c.itemsize == 4 and c.last and part == "weight" and few:
        x = y = True
    if not (x or y):
        return 0
    if part == "forward" and _plane(c):
        return c.copied(True, False, False, channels)
    if c.itemsize == 4 and part == "forward" and c.taps == 1 and c.batch * prod(c.out) >= PLANE_ROWS:
        return c.copied(True, False, True) + ALIGNMENT  # writes NCHW
    w = c.taps > 1 or channels != (c.inside, c.outside)
    return c.copied(x, y, w, channels) + ALIGNMENT


def _split(c: Convolution, part: Part, multiprocessors: int) -> int:
    """Return what a forward or input pass takes beside copies."""
    rows, columns, length = c.product(part)
    tiles = _up(rows, 128) * _up(columns, 128)
    if length >= LONG and columns >= WIDE:
        for most, long, longer in SPLITS[part, c.dtype]:
            if tiles <= most:
                return longer if length >= LONGER else long
    if c.dtype == "fp32" and part == "forward" and columns == 128 and c.inside > 16 and len(c.kernel) == 2:
        for most, size in NARROW_SPLITS:
            if tiles <= most:
                return size
    down, across = (256, 64) if c.dtype == "bf16" else (128, 256)
    return PERSISTENT if _up(rows, down) * _up(columns, across) > 2 * multiprocessors else 0


def _split_weight(c: Convolution, channels: tuple[int, int], multiprocessors: int) -> int:
    """Return what a weight pass takes beside copies."""
    inside, outside = channels
    columns, length, half = inside * c.taps, c.batch * prod(c.out), c.itemsize == 2
    one, wave = 4 * outside * columns, multiprocessors * TILE  # bytes of the gradient in fp32, and of a tile each
    if outside <= 8:
        return wave // 2 + COUNTERS if length >= LONG_WEIGHT[c.itemsize] else 0
    if inside != c.inside or inside <= 4:
        if c.patches and not half:
            return NARROW_COUNTERS
        most = STEM_PIECES if _large_stem(c) else max((2 if c.patches else 0.75) * wave // one, 3)
        pieces = min(int(most), length // SHORT_PIECE)
        return one * pieces + NARROW_COUNTERS if length >= 2048 else 0
    if inside <= 16:
        return one * min(2 * wave // one, length // SHORT_PIECE) + COUNTERS
    side = 64 if outside <= 64 else 128
    tiles = _up(outside, side) * _up(columns, side)
    if tiles > 3 * multiprocessors:
        large = half and tiles > 6 * multiprocessors and outside % 256 == 0 and length >= LONG_WEIGHT[2] // 4
        return LARGE_WEIGHT if large else PERSISTENT
    if half and outside % 256 == 0:
        tiles = outside // 256 * _up(columns, side)
    counters = COUNTERS + 4 * tiles * max(multiprocessors // tiles, 1)
    if length < LONG_WEIGHT[c.itemsize]:
        return 0
    if tiles * (6 if half and outside % 256 == 0 else 2) <= multiprocessors:
        pieces = multiprocessors // (tiles + half * tiles % 2)
        return one * (pieces if side == 64 else min(pieces, length // PIECE[c.itemsize])) + counters
    if outside % 128 and tiles * 4 <= 3 * multiprocessors:
        return UNEVEN_WEIGHT[c.itemsize]
    return wave + counters if not half and tiles * 4 <= 5 * multiprocessors else 0


def _pointwise(c: Convolution, multiprocessors: int) -> int:
    """Return the workspace of a weight pass that is a matrix product."""
    one, length, wave = 4 * c.inside * c.outside, c.batch * prod(c.out), multiprocessors * TILE
    if not c.last:  # a product and a result in fp32 for each sample
        return min(c.batch * one, _transposed(c, "weight", multiprocessors))
    if c.itemsize == 4:
        return min(2 * wave, multiprocessors * one) + PRODUCT[4]
    if length < LONG_WEIGHT[2]:
        return 0
    return min(wave, one * (16 if length < wave // 128 else multiprocessors)) + PRODUCT[2]


def _grouped(c: Convolution, part: Part) -> int:
    """Return the workspace of a convolution in groups."""
    each, half = c.inside // c.groups, c.itemsize == 2
    copies = 0 if c.last else c.copied(True, True, True) + ALIGNMENT
    if each == 1:
        if part != "weight" or c.size[0] == 1:
            return 0
        if half:
            return copies or 4 * DEPTHWISE_PIECES * c.batch * _up(c.inside, 32) * 32 * c.taps
        large = c.taps >= 49 and prod(c.out) > 196
        return 4 * large * c.copied(True, True, False) + DEPTHWISE[large]
    if c.taps >= 64 and part != "weight":  # the embedding of positions in wav2vec 2.0
        if part == "forward" and half:
            return c.itemsize * c.outside * c.taps
        return c.copied(True, True, True) // 2 + NARROW_COUNTERS if half or part == "forward" else 0
    if part == "weight" and (each & (each - 1) or not half):
        padded = (1 << (each - 1).bit_length()) * c.groups
        return c.copied(True, True, True, (padded, padded)) + ALIGNMENT
    return copies
