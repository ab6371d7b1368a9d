"""The enumerations of `transformer_engine_torch`, with the values of Transformer Engine 2.17's headers."""

from __future__ import annotations

from enum import IntEnum
from typing import Any

import torch

_LAYOUTS = (
    "SB3HD SBH3D SBHD_SB2HD SBHD_SBH2D SBHD_SBHD_SBHD BS3HD BSH3D BSHD_BS2HD BSHD_BSH2D BSHD_BSHD_BSHD T3HD TH3D "
    "THD_T2HD THD_TH2D THD_THD_THD SBHD_BSHD_BSHD BSHD_SBHD_SBHD THD_BSHD_BSHD THD_SBHD_SBHD "
    "Paged_KV_BSHD_BSHD_BSHD Paged_KV_BSHD_SBHD_SBHD Paged_KV_SBHD_BSHD_BSHD Paged_KV_SBHD_SBHD_SBHD "
    "Paged_KV_THD_BSHD_BSHD Paged_KV_THD_SBHD_SBHD BHSD_BHSD_BHSD"
)
_VALUES: dict[str, dict[str, int] | str] = {
    "DType": {
        "kByte": 0, "kInt32": 2, "kFloat32": 4, "kFloat16": 5, "kBFloat16": 6, "kFloat8E4M3": 7, "kFloat8E5M2": 8,
        "kFloat4E2M1": 10,
    },
    "NVTE_Bias_Type": "NVTE_NO_BIAS NVTE_PRE_SCALE_BIAS NVTE_POST_SCALE_BIAS NVTE_ALIBI",
    "NVTE_Mask_Type": "NVTE_NO_MASK NVTE_PADDING_MASK NVTE_CAUSAL_MASK NVTE_PADDING_CAUSAL_MASK "
    "NVTE_CAUSAL_BOTTOM_RIGHT_MASK NVTE_PADDING_CAUSAL_BOTTOM_RIGHT_MASK",
    "NVTE_Softmax_Type": "NVTE_VANILLA_SOFTMAX NVTE_OFF_BY_ONE_SOFTMAX NVTE_LEARNABLE_SOFTMAX",
    "NVTE_QKV_Format": "NVTE_SBHD NVTE_BSHD NVTE_THD NVTE_BSHD_2SBHD NVTE_SBHD_2BSHD NVTE_THD_2BSHD NVTE_THD_2SBHD "
    "NVTE_BHSD NVTE_QKV_Format_NOT_SET",
    "NVTE_QKV_Layout": " ".join(f"NVTE_{name}" for name in _LAYOUTS.split()),
    "NVTE_Fused_Attn_Backend": {
        "NVTE_No_Backend": -1, "NVTE_F16_max512_seqlen": 0, "NVTE_F16_arbitrary_seqlen": 1, "NVTE_FP8": 2,
    },
    "Float8BlockScaleTensorFormat": "GEMM_READY COMPACT INVALID",
    "CommOverlapType": "RS AG",
    "CommOverlapAlgo": "BULK_OVERLAP_AG BULK_OVERLAP_RS SPLIT_PIPELINED_AG_P2P SPLIT_PIPELINED_RS "
    "SPLIT_PIPELINED_RS_P2P ATOMIC_GEMM_RS ATOMIC_GEMM_AG_P2P ATOMIC_GEMM_RS_P2P EXTERNAL_BULK_OVERLAP_AG",
    "FP8FwdTensors": "GEMM1_INPUT GEMM1_WEIGHT GEMM1_OUTPUT GEMM2_INPUT GEMM2_WEIGHT GEMM2_OUTPUT GEMM3_INPUT "
    "GEMM3_WEIGHT GEMM3_OUTPUT",
    "FP8BwdTensors": "GRAD_OUTPUT1 GRAD_INPUT1 GRAD_OUTPUT2 GRAD_INPUT2 GRAD_OUTPUT3 GRAD_INPUT3",
    "NVTERoutingMapFormat": "BYTEMAP BITMAP_U8",
}  # fmt: skip


def _made(name: str, values: dict[str, int] | str) -> Any:
    if isinstance(values, str):
        values = {member: i for i, member in enumerate(values.split())}
    return IntEnum(name, values, module="transformer_engine_torch")


ENUMS: dict[str, Any] = {name: _made(name, values) for name, values in _VALUES.items()}
_DTYPES = {
    0: torch.uint8, 2: torch.int32, 4: torch.float32, 5: torch.float16, 6: torch.bfloat16,
    7: torch.float8_e4m3fn, 8: torch.float8_e5m2,
}  # fmt: skip


def torch_dtype(dtype: Any) -> torch.dtype:
    """Return PyTorch's dtype for one of PyTorch's or Transformer Engine's."""
    return dtype if isinstance(dtype, torch.dtype) else _DTYPES[int(dtype)]


def layout_name(layout: int) -> str:
    """Return a layout of queries, keys and values as its formats: SBHD_SBHD_SBHD, SBH3D."""
    return str(ENUMS["NVTE_QKV_Layout"](int(layout)).name).removeprefix("NVTE_").removeprefix("Paged_KV_")
