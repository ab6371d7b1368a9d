"""Facts from the frames of a stack: the part of a step, the operator that allocated, the user's line, the purpose.

Stacks are a snapshot's (lists of dicts, C++ frames among them); `made_for` is also used for the frames of a running
program.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, Literal, NamedTuple, get_args

from memfit.documents.snapshot.shape import shaped, text_of
from memfit.explain.frames import library
from memfit.nouns.tape import Role

Place = Literal["forward", "backward", "zero_grad", "optimizer", "move", "cublas", "held", ""]
# (place, whether a file's path or a function's name shows it, the words); the first that a frame has decides
PLACES: tuple[tuple[Place, str, tuple[str, ...]], ...] = (
    ("cublas", "name", ("getCurrentCUDABlasHandle", "getCUDABlasLtWorkspace", "parseChosenWorkspaceSize")),
    ("zero_grad", "name", ("zero_grad",)),
    ("optimizer", "filename", ("torch/optim/", "bitsandbytes/optim")),
    ("backward", "name", ("torch::autograd::Engine", "_engine_run_backward", "run_backward")),
    ("move", "name", ("_apply", "convert", "load_state_dict", "from_pretrained", "_load_from_state_dict")),
)
_RANK: dict[Place, int] = {row[0]: rank for rank, row in enumerate(PLACES)}
CALLED = "torch/nn/modules/module.py"  # calls a module's forward
Origin = Literal["", "module", "file", "copy", "cache"]
# (purpose, where the library's function lies, its names; none: any of them); the first that a function matches decides
MADE_FOR: tuple[tuple[Origin, str, frozenset[str]], ...] = (
    ("module", "transformers/", frozenset(["from_pretrained", "from_config"])),
    ("module", "torch/nn/modules/", frozenset(
        ["__init__", "_apply", "convert", "to_empty", "load_state_dict", "reset_parameters"],
    )),
    ("file", "torch/serialization.py", frozenset()),
    ("file", "safetensors/", frozenset()),
    ("copy", "/copy.py", frozenset(["deepcopy", "_reconstruct", "_deepcopy_dict"])),
    ("cache", "transformers/cache_utils.py", frozenset()),
)  # fmt: skip
# what a label begins with
LABELS: dict[Origin, str] = {"file": "torch.load", "copy": "deepcopy", "cache": "DynamicCache"}
MAX_LABEL = 200
LAST_LINE = 1 << 31  # of a file
_NODE = re.compile(r"\b(\w+Backward\d*)::apply\(|::(AccumulateGrad)\b")  # a backward's own thread has no Python frames
_OPERATOR = re.compile(r"at::_ops::(\w+?)(?:_[A-Z]\w*)?::(?:call|redispatch)\b")  # without the overload's name
_MAKERS = re.compile(r"_?(?:new_)?(?:empty|resize|scalar_tensor)")  # an operator calls them for its output
Stacks = dict[tuple[str, ...], int]
DEEPEST = 60  # calls that are kept of a whole stack, from the outermost
UNKNOWN: tuple[str, ...] = ("no stack recorded",)


# --- what a library's function makes tensors for ---


def made_for(path: str, name: str) -> Origin:
    """Return what a function makes tensors for; its path has forward slashes."""
    return next((made for made, part, names in MADE_FOR if part in path and (not names or name in names)), "")


def of_both(found: Origin, further_out: Origin) -> Origin:
    """Return the inner frame's purpose; what is loaded or copied for a module counts as the module's."""
    return "module" if further_out == "module" else found or further_out


# --- the frames of one stack ---


class FrameFacts(NamedTuple):
    """Facts from one frame. `line` is "file.py:12"; `own`: it belongs to no library."""

    place: Place = ""
    name: str = ""
    line: str = ""
    own: bool = False
    operator: str = ""
    made: Origin = ""


class Reader:
    """Reads stacks, and each frame that they share only once."""

    def __init__(self) -> None:
        # by id; the frame is kept, so that its id stays unique
        self._known: dict[int, tuple[FrameFacts, object]] = {}
        self._cpp = False

    @property
    def without(self) -> Place:
        """The place of an allocation without a stack: where only Python frames are recorded, the backward has none."""
        return "backward" if self._known and not self._cpp else ""

    def read(self, frames: object) -> tuple[Place, str]:
        """Return (the part of the step, "function: operator (file.py:12)").

        The line is the user's innermost one, else the innermost of any; the operator is the one that it called.
        """
        if not isinstance(frames, list | tuple):
            return "", ""
        place: Place = "forward" if frames else ""
        rank = len(PLACES)
        own = inner = None
        operator = ""
        made: Origin = ""
        for frame in frames:
            facts = self._of(frame)
            if facts.place and _RANK[facts.place] < rank:
                place, rank = facts.place, _RANK[facts.place]
            operator = operator or (facts.operator if own is None else "")
            made = of_both(made, facts.made) if own is None else made
            if facts.name:
                own = own or (facts if facts.own else None)
                inner = inner or facts
        if place == "forward" and made in ("file", "copy"):
            place = "held"  # a pass makes no such tensors
        elif place == "forward" and made == "module":  # made on the card
            place = "move"
        found = own or inner or FrameFacts()
        return place, _label(found._replace(name=LABELS.get(made, found.name)), operator)

    def _of(self, frame: object) -> FrameFacts:
        known = self._known.get(id(frame))
        if known is None:
            known = self._known[id(frame)] = (_facts(frame), frame)
            self._cpp |= not known[0].line
        return known[0]


def written_role(frames: object) -> tuple[Role, str] | None:
    """Return the role and label that memfit writes in the place of a stack."""
    if not isinstance(frames, list | tuple) or len(frames) != 1 or not isinstance(frames[0], dict):
        return None
    role, line = frames[0].get("filename"), frames[0].get("line")
    known: Role | None = next((r for r in get_args(Role) if line == 0 and r == role), None)
    return (known, text_of(frames[0].get("name"))) if known else None


def of_library(path: str) -> bool:
    """Is this file a library's, or PyTorch's in the folder where it was built?"""
    return library(path) or "/torch/" in path


def _label(facts: FrameFacts, operator: str) -> str:
    if not facts.line:
        return facts.name
    return f"{facts.name}: {operator} ({facts.line})" if operator else f"{facts.name} ({facts.line})"


def path_of(frame: Mapping[str, Any]) -> str:
    """Return the file of a frame, with forward slashes."""
    return text_of(frame.get("filename"), end=True).replace("\\", "/")


def line_of(frame: Mapping[str, Any]) -> int:
    """Return the line of a frame, 0 where it has none."""
    line = frame.get("line")
    return line if isinstance(line, int) and 0 <= line <= LAST_LINE else 0


def _facts(frame: Any) -> FrameFacts:
    if not isinstance(frame, dict):
        return FrameFacts()
    name, path = text_of(frame.get("name")), path_of(frame)
    texts = {"name": name, "filename": path}
    place: Place = next((row[0] for row in PLACES if any(word in texts[row[1]] for word in row[2])), "")
    if path.endswith("swa_utils.py"):  # weight averages are no optimizer states
        place = ""
    if place == "move" and "/torch/" not in path and "/transformers/" not in path:
        place = ""
    if not path.endswith((".py", ">")):
        node, operator = _NODE.search(name), _OPERATOR.match(name)
        made = operator[1] if operator and not _MAKERS.match(operator[1]) else ""
        return FrameFacts(place, node[1] or node[2] if node else "", operator=made)
    # stacks="python" have no operators, but the functions of PyTorch that call them
    called = name if "/torch/" in path and name != "forward" and not path.endswith(CALLED) else ""
    line = f"{path.rsplit('/', 1)[-1]}:{line_of(frame)}"
    return FrameFacts(place, name, line, not of_library(path), called, made_for(path, name))


# --- whole stacks ---


def stacks_of(data: Any, device: int) -> Stacks:
    """Return the bytes of one card in use at the end of a snapshot, by stack, outermost call first.

    Its history is not looked at. Raises BadInput for what is no snapshot.
    """
    segments = shaped({**data, "device_traces": []}).segments
    found: Stacks = {}
    names: dict[int, tuple[str, ...]] = {}  # by identity of the frames' list: blocks share them
    for segment in segments:
        for block in segment.blocks if segment.device == device else ():
            if block.state == "inactive":
                continue
            known = names.get(id(block.frames))
            stack = names.setdefault(id(block.frames), _names(block.frames)) if known is None else known
            found[stack] = found.get(stack, 0) + block.size
    return found


def _names(frames: Any) -> tuple[str, ...]:
    if not isinstance(frames, list | tuple):
        return UNKNOWN
    named = [_name(frame) for frame in reversed(frames) if isinstance(frame, dict)]
    return tuple(name for name in named if name)[:DEEPEST] or UNKNOWN


def _name(frame: dict[str, Any]) -> str:
    """Return "forward (model.py:7)"; "" for a frame of C++."""
    path = path_of(frame)
    if not path.endswith(".py"):
        return ""
    return f"{text_of(frame.get('name'))} ({path.rsplit('/', 1)[-1]}:{line_of(frame)})"[:MAX_LABEL]
