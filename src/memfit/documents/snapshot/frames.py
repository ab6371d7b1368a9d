"""What the frames of a recorded stack say: at which place of a step it was, the operator that asked, and the program's own line."""

from __future__ import annotations

import re
from typing import Any, Literal, NamedTuple, get_args

from memfit.documents.snapshot.origins import LABELS, Origin, made_for, of_both
from memfit.documents.snapshot.shape import text_of
from memfit.explain.frames import library
from memfit.nouns.tape import Role

Place = Literal["forward", "backward", "zero_grad", "optimizer", "move", "cublas", "held", ""]
# (place, is it said by a file's path or by a function's name, the words), the first that a frame has decides
PLACES: tuple[tuple[Place, str, tuple[str, ...]], ...] = (
    ("cublas", "name", ("getCurrentCUDABlasHandle", "getCUDABlasLtWorkspace", "parseChosenWorkspaceSize")),
    ("zero_grad", "name", ("zero_grad",)),
    ("optimizer", "filename", ("torch/optim/", "bitsandbytes/optim")),
    ("backward", "name", ("torch::autograd::Engine", "_engine_run_backward", "run_backward")),
    ("move", "name", ("_apply", "convert", "load_state_dict", "from_pretrained", "_load_from_state_dict")),
)
_RANK: dict[Place, int] = {row[0]: rank for rank, row in enumerate(PLACES)}
CALLED = "torch/nn/modules/module.py"  # calls a module's forward
MAX_LABEL = 200
_NODE = re.compile(r"(\w+Backward\d*)::apply\(|::(AccumulateGrad)\b")  # a backward's own thread has no Python frames
_OPERATOR = re.compile(r"at::_ops::(\w+?)(?:_[A-Z]\w*)?::(?:call|redispatch)\b")  # without the overload's name
_MAKERS = re.compile(r"_?(?:new_)?(?:empty|resize|scalar_tensor)")  # an operator calls them for its output


class Said(NamedTuple):
    """One frame: `line` is "file.py:12"; `own`: of no library."""

    place: Place = ""
    name: str = ""
    line: str = ""
    own: bool = False
    operator: str = ""
    made: Origin = ""


class Reader:
    """Reads stacks, each of their frames once: stacks share them."""

    def __init__(self) -> None:
        self._said: dict[int, tuple[Said, object]] = {}  # by identity, which lasts as long as the frame
        self._cpp = False

    @property
    def without(self) -> Place:
        """The place of what has no stack: where all frames are Python's (stacks="python"), a backward's own thread has none."""
        return "backward" if self._said and not self._cpp else ""

    def read(self, frames: object) -> tuple[Place, str]:
        """(the place of a step, "function: operator (file.py:12)"): the program's innermost line, what asks there; else any's."""
        if not isinstance(frames, list | tuple):
            return "", ""
        place: Place = "forward" if frames else ""
        rank = len(PLACES)
        own = inner = None
        operator = ""
        made: Origin = ""
        for frame in frames:
            said = self._of(frame)
            if said.place and _RANK[said.place] < rank:
                place, rank = said.place, _RANK[said.place]
            operator = operator or (said.operator if own is None else "")
            made = of_both(made, said.made) if own is None else made
            if said.name:
                own = own or (said if said.own else None)
                inner = inner or said
        if place == "forward" and made in ("file", "copy"):
            place = "held"  # by nothing that a pass does
        elif place == "forward" and made == "module":  # made on the card
            place = "move"
        found = own or inner or Said()
        return place, _label(found._replace(name=LABELS.get(made, found.name)), operator)

    def _of(self, frame: object) -> Said:
        known = self._said.get(id(frame))
        if known is None:
            known = self._said[id(frame)] = (_said(frame), frame)
            self._cpp |= not known[0].line
        return known[0]


def told(frames: object) -> tuple[Role, str] | None:
    """The role and label that this program writes in the place of a stack."""
    if not isinstance(frames, list | tuple) or len(frames) != 1 or not isinstance(frames[0], dict):
        return None
    role, line = frames[0].get("filename"), frames[0].get("line")
    known: Role | None = next((r for r in get_args(Role) if line == 0 and r == role), None)
    return (known, text_of(frames[0].get("name", ""))) if known else None


def of_library(path: str) -> bool:
    """No file of the program's own; PyTorch's where it was built."""
    return library(path) or "/torch/" in path


def _label(said: Said, operator: str) -> str:
    if not said.line:
        return said.name
    return f"{said.name}: {operator} ({said.line})" if operator else f"{said.name} ({said.line})"


def _said(frame: Any) -> Said:
    if not isinstance(frame, dict):
        return Said()
    name, path = text_of(frame.get("name", "")), text_of(frame.get("filename", "")).replace("\\", "/")
    texts = {"name": name, "filename": path}
    place: Place = next((row[0] for row in PLACES if any(word in texts[row[1]] for word in row[2])), "")
    if path.endswith("swa_utils.py"):  # averages are no states of an optimizer
        place = ""
    if place == "move" and "/torch/" not in path and "/transformers/" not in path:
        place = ""
    if not path.endswith((".py", ">")):
        node, operator = _NODE.search(name), _OPERATOR.match(name)
        made = operator[1] if operator and not _MAKERS.match(operator[1]) else ""
        return Said(place, node[1] or node[2] if node else "", operator=made)
    # stacks="python" tell no operators, but the functions of PyTorch that call them
    called = name if "/torch/" in path and name != "forward" and not path.endswith(CALLED) else ""
    line = f"{path.rsplit('/', 1)[-1]}:{frame.get('line', 0)}"
    return Said(place, name, line, not of_library(path), called, made_for(path, name))
