"""The quantisation table: payload, block scales and extra tensors of a weight in exact bytes, and bitsandbytes' names.

Source: bitsandbytes 0.49 (functional.py, nn/modules.py), measured on its CUDA build.
"""

from __future__ import annotations

from dataclasses import dataclass

from memfit.errors import UnknownName

QLORA_BASE = "nf4-double"  # how the base of QLoRA is stored where nothing else is asked for


@dataclass(frozen=True, slots=True, kw_only=True)
class Quantization:
    """How one weight matrix is stored."""

    key: str
    title: str
    bits: int  # payload bits per element
    block: int = 0  # elements per first-level scale
    scale_bytes: int = 4  # bytes of a first-level scale
    second_block: int = 0  # first-level scales per second-level scale (double quantisation)
    per_tensor: int = 0  # bytes of tables kept with every tensor
    per_row: int = 0  # bytes per output row
    zero_bits: int = 0  # bits of a zero point per block
    kind: str = ""  # `bnb_4bit_quant_type`
    images: bool = False  # of SimpleTuner, for the denoisers of images and videos alone

    @property
    def double(self) -> bool:
        """Return whether the scales are quantised too (`bnb_4bit_use_double_quant`)."""
        return bool(self.second_block)

    def payload(self, numel: int) -> int:
        """Return the bytes of the packed elements alone."""
        return -(-numel * self.bits // 8)

    def scales(self, numel: int, rows: int) -> int:
        """Return the bytes that decoding the payload needs: block scales, tables, row scales."""
        total = self.per_tensor + self.per_row * rows
        if self.block:
            blocks = -(-numel // self.block)
            total += blocks * self.scale_bytes + blocks * self.zero_bits // 8
            if self.second_block:
                total += -(-blocks // self.second_block) * 4
        return total

    def tensors(self, numel: int, rows: int) -> tuple[int, ...]:
        """Return the bytes of each tensor a quantised weight is stored in."""
        blocks = -(-numel // self.block) if self.block else 0
        parts = [self.payload(numel), blocks * self.scale_bytes, self.per_tensor, self.per_row * rows]
        parts.append(blocks * self.zero_bits // 8)
        if self.second_block:
            parts.append(-(-blocks // self.second_block) * 4)
        return tuple(p for p in parts if p)

    def passing(self, numel: int, width: int) -> tuple[int, ...]:
        """Return the bytes of each tensor that exists only while a weight of `width` bytes per element is quantised."""
        if not self.block:
            return numel * width, numel * 2  # LLM.int8() rounds an fp16 copy
        scales = -(-numel // self.block) * 4
        return (numel * width, *((scales, scales) if self.double else ()))  # in fp32, and less their mean

    def bytes(self, numel: int, rows: int) -> int:
        """Return the bytes on the card."""
        return self.payload(numel) + self.scales(numel, rows)


QUANTIZATIONS: dict[str, Quantization] = {
    row.key: row
    for row in (
        Quantization(key="nf4", title="4-bit NormalFloat", kind="nf4", bits=4, block=64, per_tensor=64),
        Quantization(key="nf4-double", title="4-bit NormalFloat, scales quantised too", kind="nf4", bits=4, block=64,
                     scale_bytes=1, second_block=256, per_tensor=64 + 1024 + 4),
        Quantization(key="fp4", title="4-bit float", kind="fp4", bits=4, block=64, per_tensor=64),
        Quantization(key="int8", title="LLM.int8()", bits=8, per_row=4),
        Quantization(key="fp8-torchao", title="torchao's fp8, products too", bits=8, per_tensor=4, images=True),
        Quantization(key="fp8w-torchao", title="torchao's fp8 of weights", bits=8, per_row=4, images=True),
        Quantization(key="int8-sdnq", title="SDNQ's 8 bits, rotated", bits=8, per_row=4, images=True),
    )
}  # fmt: skip

# formats of downloaded checkpoints; no flag chooses them. Source: auto-gptq 0.5.1, group 128
CHECKPOINTS: dict[str, Quantization] = {
    row.key: row
    for row in (
        Quantization(key="gptq-int4", title="GPTQ, 4 bits", bits=4, block=128, scale_bytes=2, zero_bits=4),
        Quantization(key="gptq-int8", title="GPTQ, 8 bits", bits=8, block=128, scale_bytes=2, zero_bits=8),
    )
}


def four_bit(kind: str, double: bool) -> Quantization | None:
    """Return the row of a bitsandbytes 4-bit type; with `double` the one with quantised scales, if there is one."""
    rows = [row for row in QUANTIZATIONS.values() if row.kind == kind]
    return next((row for row in rows if row.double == double), rows[0] if rows else None)


def quantization(key: str) -> Quantization:
    """Return the row of a quantisation. Raises UnknownName."""
    if key not in QUANTIZATIONS:
        raise UnknownName("quantization", key, QUANTIZATIONS)
    return QUANTIZATIONS[key]
