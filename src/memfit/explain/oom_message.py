"""Out-of-memory messages of every library and version as the noun Message: the request, and what the card held.

Each field has its own pattern, so that the sizes left in a cut or quoted message are read. Sizes are bytes.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from itertools import islice
from math import prod

from memfit.nouns.message import Kind, Message
from memfit.units import GIB, KIB, MIB

LONGEST = 4000  # characters that one message may take
ASKS = "tried to allocate"
APART = 300  # characters between the two halves of a message
MOST = 64  # messages read of one text: one per rank is usual

# how a message begins. Sources: CUDACachingAllocator.cpp (1.4 to 2.13), XPUCachingAllocator.cpp, MPSAllocator.mm,
# IPEX's allocator (at most 4 GB on Arc), CUDAException.h, NCCLUtils.hpp, bitsandbytes csrc/ops.cuh, vLLM's worker and
# KV cache checks, ggml-cuda.cu, TensorFlow's op_kernel.cc, XLA's bfc_allocator.cc, Triton's OutOfResources,
# torch.distributed.elastic, SYCL's unified runtime (UR_RESULT_ERROR_...)
BEGINS: tuple[tuple[Kind, str], ...] = (
    ("vllm", r"no available memory for the cache blocks|free memory on device.{0,80}on startup is less than"
             r"|larger than the maximum number of tokens that can be stored in kv cache|warming up sampler with"
             r"|to serve at least one request with the models?'?s? max seq len"),
    ("cublas", r"cublas_status_alloc_failed"),
    ("cudnn", r"cudnn_status_alloc_failed"),
    ("nccl", r"nccl\b[^\n]{0,200}out of memory|failed to cuda (?:host )?[cm]alloc|cuda failure (?:2 )?'out of memory'"),
    ("bitsandbytes", r"error out of memory at line \d+ in file"),
    ("mps", r"mps backend out of memory|invalid buffer size: [\d.]+ ?[kmgt]?i?b"),
    ("hip", r"\bhip(?: error:)? out of memory"),
    ("xpu", r"\bxpu out of memory|allocate memory block with size larger than"
            r"|(?:ur_result|ze_result|pi)_error_out_of_(?:device_memory|resources)"),
    ("driver", r"cuda (?:driver )?error: out of memory|cudaerrormemoryallocation|cuda_error_out_of_memory"
               r"|allocating [\d.]+ .ib on device \d+: cudamalloc failed"),
    ("tensorflow", r"oom when allocating tensor with shape"),
    ("jax", r"resource_?exhausted: out of memory"),
    ("on-chip", r"out of resources?: shared memory"),
    ("cuda", r"cuda out of memory|tried to allocate"),
    ("host", r"defaultcpuallocator: (?:can't allocate|not enough) memory|unable to allocate [\d.]+ .ib for an array"
             r"|\bmemoryerror\b|oom-kill|out of memory: killed process|\bsigkill\b|exit(?:ed| ?code|"
             r" status)?[ :(with]*-9\b"
             r"|exit(?:ed with)?(?: exit)?[ _]?code\W+137|signal 9\b|(?m:(?:^|[\])] ?)killed$)|return code = -9|"
             r"cannot allocate memory"),
)  # fmt: skip
# for lower-case text: three times as fast as ignoring case
_BEGIN = tuple((kind, re.compile(words)) for kind, words in BEGINS)
# a message whose beginning was cut off
_HALF = re.compile(
    r"ied to allocate [\d.]|\ballocate [\d.]+ .i?b\. gpu|has a total capac?i?ty of \d|[kmg]ib total capacity;|"
    r"is allocated by pytorch"
)
# every beginning of a message contains one of these; a long log is searched for them first, as bytes
WORDS = (
    b"out of memory", b"out_of_memory", b"tried to allocate", b"alloc_failed", b"memoryallocation", b"to cuda",
    b"available memory",
    b"on startup is less", b"stored in kv cache", b"warming up sampler", b"defaultcpuallocator",
    b"unable to allocate", b"memoryerror",
    b"oom-kill", b"killed", b"sigkill", b"signal 9", b"exit", b"return code", b"cannot allocate",
    b"at least one request",
    b"cudamalloc failed", b"invalid buffer size", b"allocate memory block",
    b"error_out_of_", b"out of resource", b"oom when allocating",
)  # fmt: skip
_SIZE = r"(\d{1,15}(?:\.\d{1,6})?) ?(bytes|[kmgt]i?b)"
_FIELDS: dict[str, str] = {
    "tried": rf"\ballocate (?:more than )?{_SIZE}|\({_SIZE} kv cache is needed|utilization \([\d.]+, {_SIZE}\)|"
             rf"allocating {_SIZE} on device|invalid buffer size: {_SIZE}",
    "total": rf"{_SIZE} total(?:;| |,|\))|total capac?i?ty of {_SIZE}|{_SIZE} total capacity|max allowed: {_SIZE}|"
             rf"\([\d.]+/{_SIZE}\) on startup",
    "free": rf"of which {_SIZE} is free|{_SIZE} free\b|{_SIZE} is free|available kv cache memory \({_SIZE}\)"
            r"|free memory on device[^(]{0,12}\((\d{1,5}\.\d{1,3})/[\d.]+ (gib)\)",
    "in_process": rf"this process has {_SIZE}",
    "allowed": rf"{_SIZE} allowed",
    "allocated": rf"{_SIZE} is allocated by pytorch|{_SIZE} already allocated|{_SIZE} allocated\b|"
                 rf"mps allocated: {_SIZE}",
    "private": rf"with {_SIZE} allocated in private pools",
    # "cached" of 1.0 to 1.3 leaves allocated bytes out
    "unallocated": rf"{_SIZE} (?:is )?reserved(?: by pytorch)?(?: but |-but-|-)unallocated|{_SIZE} cached",
    "reserved": rf"{_SIZE} reserved\b(?! ?(?:by pytorch )?(?:but|-))",
}  # fmt: skip
_FOUND = {name: re.compile(words, re.IGNORECASE) for name, words in _FIELDS.items()}
# one allocation may not be so large, whatever is free
_TOO_LARGE = re.compile(r"invalid buffer size|memory block with size larger than")
_PROCESS = re.compile(rf"process (\d+) has {_SIZE}(?: memory)? in use", re.IGNORECASE)
# TensorFlow prints the request as a shape
_SHAPE = re.compile(r"tensor with shape ?\[([\d, ]{1,80})\] and type (\w{1,16})")
_WIDTH = {"half": 2, "bfloat16": 2, "float": 4, "int32": 4, "double": 8, "int64": 8, "bool": 1, "uint8": 1, "int8": 1}
_FACTOR = {"b": 1, "k": KIB, "m": MIB, "g": GIB, "t": 1 << 40}
WSL = 1 << 60  # more bytes than any process has: Windows reports 17179869184 GiB where it does not know a size


def begun(text: str) -> Iterator[tuple[int, Kind]]:
    """Yield (position, kind) of every message that begins in a lower-case text, in order."""
    hits = (
        (hit.start(), order, hit, kind) for order, (kind, words) in enumerate(_BEGIN) for hit in words.finditer(text)
    )
    last, asked, end = -APART, True, 0  # asked: the current message has its request; end: of its first words
    for begin, _, hit, kind in sorted(hits, key=lambda row: row[:2]):
        if begin < end:
            continue
        end, asks = hit.end(), hit[0] == ASKS
        if asks and begin - last < APART and not asked:
            asked = True  # "CUDA out of memory. Tried to allocate": one message
            continue
        last, asked = begin, asks
        yield begin, kind


def messages(text: str) -> tuple[Message, ...]:
    """Return the messages in a text, those with most sizes first; the same message of several ranks counts once."""
    text = text.lower()
    starts = list(islice(begun(text), MOST))
    if not starts and (half := _HALF.search(text)):
        starts = [(half.start(), "cuda")]
    edges = [begin for begin, _ in starts] + [len(text)]
    read = (
        _message(kind, text[begin : min(edges[number + 1], begin + LONGEST)])
        for number, (begin, kind) in enumerate(starts)
    )
    return tuple(sorted(dict.fromkeys(read), key=lambda m: -m.facts))


def _message(kind: Kind, text: str) -> Message:
    sizes = {name: _size(match) for name, pattern in _FOUND.items() if (match := pattern.search(text))}
    reserved, unallocated, allocated = sizes.get("reserved"), sizes.get("unallocated"), sizes.get("allocated")
    if allocated is not None and reserved is None and unallocated is not None:
        sizes["reserved"] = allocated + unallocated
    elif allocated is not None and reserved is not None and unallocated is None:
        sizes["unallocated"] = max(reserved - allocated, 0)
    shape = _SHAPE.search(text)
    if shape and shape[2] in _WIDTH:
        sizes["tried"] = _WIDTH[shape[2]] * prod(int(size) for size in shape[1].split(",") if size.strip())
    others = tuple((int(m[1]), _bytes(m[2], m[3])) for m in _PROCESS.finditer(text))
    advises = "expandable_segments" in text or "max_split_size_mb" in text
    too_large = _TOO_LARGE.search(text) is not None
    return Message(kind, others=others, advises_expandable=advises, too_large=too_large, **sizes)


def _size(match: re.Match[str]) -> int:
    number, unit = [group for group in match.groups() if group is not None][:2]
    return _bytes(number, unit)


def _bytes(number: str, unit: str) -> int:
    return int(float(number) * _FACTOR[unit[0].lower()])
