"""Write the corpus of hostile pickles beside this file (`python tests/data/pickles/make.py`): none may do anything."""

from __future__ import annotations

import struct
from pathlib import Path

HERE = Path(__file__).parent
P4 = b"\x80\x04"
SYSTEM = b"\x8c\x02os\x8c\x06system"  # two short texts
ARGS = b"\x8c\x04true\x85"  # ("true",)


def q(number: int) -> bytes:
    return struct.pack("<Q", number)


CORPUS: dict[str, bytes] = {
    # opcodes that find a class or function, or call one
    "global": b"\x80\x02cos\nsystem\n(S'true'\ntR.",
    "stack_global": P4 + SYSTEM + b"\x93" + ARGS + b"R.",
    "inst": b"\x80\x02(S'true'\nios\nsystem\n.",
    "obj": b"\x80\x02(cos\nsystem\nS'true'\no.",
    "newobj": P4 + SYSTEM + b"\x93)\x81.",
    "newobj_ex": P4 + SYSTEM + b"\x93)}\x92.",
    "ext1": P4 + b"\x82\x01.",
    "ext2": P4 + b"\x83\x01\x01.",
    "ext4": P4 + b"\x84\x01\x01\x00\x00.",
    "reduce_of_text": P4 + b"\x8c\x06system" + ARGS + b"R.",
    "build_on_a_dict": P4 + b"}\x8c\x08segmentsb.",
    "persistent": b"\x80\x02P1\n.",
    "binary_persistent": P4 + b"\x8c\x01xQ.",
    "buffer": b"\x80\x05\x97.",
    "readonly_buffer": b"\x80\x05\x97\x98.",
    "hidden_in_a_snapshot": P4 + b"}\x8c\x08segments]" + SYSTEM + b"\x93" + ARGS + b"Ras.",
    "hidden_as_a_key": P4 + b"}" + SYSTEM + b"\x93" + ARGS + b"RNs.",
    "eval_in_builtins": b"\x80\x02cbuiltins\neval\n(S'1'\ntR.",
    "getattr_chain": b"\x80\x02cbuiltins\ngetattr\n(cbuiltins\n__import__\nS'__self__'\ntR.",
    # recursion
    "list_in_itself": P4 + b"]\x94h\x00a.",
    "dict_in_itself": P4 + b"}\x94\x8c\x08segmentsh\x00s.",
    "segments_are_the_file": P4 + b"}\x94(\x8c\x08segments]\x94h\x00a\x8c\x0ddevice_traces]u.",
    "deep_tuples": P4 + b")" + b"\x85" * 50_000 + b".",
    "deep_lists": P4 + b"]" * 50_000 + b"a" * 49_999 + b".",
    # more than the file explains
    "memo_bomb": P4 + b"Nr\xff\xff\xff\xff.",
    "memo_laughs": P4 + b"]\x94"
    + b"".join(b"](" + b"h" + bytes([n]) + (b"h" + bytes([n])) * 9 + b"e\x94" for n in range(40)) + b".",
    "doubling_tuples": P4 + b")" + b"2\x86" * 5_000 + b".",
    # gigantic lengths
    "text_of_32_tib": P4 + b"\x8d" + q(1 << 45) + b"x.",
    "bytes_of_32_tib": P4 + b"\x8e" + q(1 << 45) + b"x.",
    "bytearray_of_32_tib": b"\x80\x05\x96" + q(1 << 45) + b"x.",
    "negative_bytes": b"\x80\x02T" + struct.pack("<i", -1) + b".",
    "long_of_2_gib": b"\x80\x02\x8b" + struct.pack("<i", (1 << 31) - 1) + b"x.",
    "frame_of_16_eib": P4 + b"\x95" + q((1 << 64) - 1) + b"N.",
    "digits": b"\x80\x02I" + b"9" * 200_000 + b"\n.",
    # broken
    "empty_stack": P4 + b"0.",
    "no_stop": P4 + b"N",
    "unknown_opcode": P4 + b"\xff.",
    "protocol_255": b"\x80\xffN.",
    "not_utf_8": P4 + b"\x8c\x02\xff\xfe.",
    "unhashable_key": P4 + b"}]Ns.",
    "mark_alone": P4 + b"(.",
    "missing_memo": P4 + b"h\x07.",
}  # fmt: skip


def main() -> None:
    """Write every file."""
    for name, content in CORPUS.items():
        (HERE / f"{name}.pickle").write_bytes(content)


if __name__ == "__main__":
    main()
