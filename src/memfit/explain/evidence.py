"""The noun Evidence: what a text, a traceback or a recorded history says, before anything is concluded from it."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal

from memfit.explain.clue import Clue
from memfit.explain.memory import Memory
from memfit.explain.oom_text import Message, messages

When = Literal[
    "", "load", "prepare", "forward", "loss", "backward", "optimizer", "eval", "predict", "save", "merge", "resume", "init"
]  # fmt: skip
MOST_TEXT = 8 << 20  # characters read of a log: its end, where it failed
NEAR = 12  # innermost frames that tell where it failed
MOST_FRAMES = 4000

# a frame of Python's own traceback; of IPython's and Colab's ("File x.py:12, in f(...)", "[x.py](link) in f(...)"); of rich's
_FRAME = re.compile(
    r'File "(?P<path>[^"\n]{1,400})", line (?P<line>\d{1,7}), in (?P<name>[^\n]{1,200})'
    r'(?:\n\s{2,}(?!File ")(?P<code>[^\n]{1,400}))?'
    r"|(?<![^\s\"\[│])(?P<path2>[^\s\"\[\]│:]{1,400}\.py)(?:\](?:\([^)\n]{0,200}\))?)?(?::(?P<line2>\d{1,7}))?,? in (?P<name2>\w[\w.<>]{0,200})"
)
INSTALLED = ("site-packages", "dist-packages", "/lib/python", "<frozen")  # where no user's own code lies
CUT = (
    "/torch/",
    "/transformers/",
    "/runpy.py",
    "memfit/virtual/",
    "memfit/live/",
)  # the same in paths that a report has cut

# (when, words of a frame's function or file, or of its code), innermost frame first; the first row that has one decides
FRAMES: tuple[tuple[When, str], ...] = (
    ("save", r"save_model|save_pretrained|_save_checkpoint|state_dict_hook|full_state_dict|save_checkpoint|fsdp_save"),
    ("merge", r"merge_and_unload|save_pretrained_merged|_merge\b|export_model"),
    ("resume", r"optim\S* load_state_dict|_load_optimizer|load_checkpoint|_load_from_checkpoint|optimizer\.pt"),
    ("predict", r"\bpredict\b|predict_with_generate"),
    ("eval", r"evaluation_loop|prediction_loop|prediction_step|\bevaluate\b|nested_concat|_maybe_log_save_evaluate|validat"),
    ("optimizer", r"torch/optim/|bitsandbytes/optim|optimizer\.step|adamw?\.py|_foreach_|exp_avg"),
    ("backward", r"autograd/__init__|_tensor\.py|\.backward\(|run_backward|_engine_run"),
    ("loss", r"cross_entropy|nll_loss|loss_utils|log_softmax|masked_ce|convert_to_fp32|logits\.float|compute_loss\b.*logits"),
    ("load", r"from_pretrained|load_pretrained|_load_state_dict_into|load_model|\.to\(device|\.cuda\(\)|_apply\b"),
    ("prepare", r"prepare_model_for_kbit|get_peft_model|fully_shard|_cast_adapter"),
    ("forward", r"\bforward\b|_call_impl"),
)  # fmt: skip
# the same in words, for reports and logs without a traceback
WORDS: tuple[tuple[When, str], ...] = (
    ("resume", r"phase: \S*\s*\S*\s*\S*resume|\bon resum|\bresum(?:e|ing)\b|resume_from_checkpoint|init_from.resume|after load\b"),
    ("merge", r"phase: merge|save_pretrained_merged|merge_and_unload|merg(?:e|ing) (?:the )?(?:adapter|lora|model)|export_dir"),
    ("save", r"phase: save|after a full epoch|(?:oom|memory|fail\w*) (?:at|on|in|while|when|during) (?:the )?(?:final )?sav|"
     r"saving (?:the )?(?:checkpoint|model)|modelcheckpoint|save_ckpt"),
    ("predict", r"phase: predict|trainer\.predict|do_predict"),
    ("eval", r"phase: eval|(?:oom|memory) (?:at|on|in|during) (?:the )?eval|during evaluation|trainer\.evaluate"),
    ("optimizer", r"phase: \S*optim|optimizer\.step|optimi[sz]er step"),
    ("load", r"phase: (?:load|start)|(?:oom|memory) (?:at|on|in|while|when|during) (?:the )?(?:model )?load|loading checkpoint shards"),
    ("prepare", r"phase: prepare|prepare_model_for_kbit_training"),
    ("init", r"phase: (?:init|probe|vllm)"),
    ("loss", r"phase: \S*loss|phase: logprobs"),
    ("backward", r"phase: backward|loss\.backward\(|(?:oom|memory) in \S* ?backward"),
    ("forward", r"phase: \S*forward"),
)  # fmt: skip
AROUND = ("save", "merge", "resume", "predict", "eval")
_AT = [(when, re.compile(words, re.IGNORECASE)) for when, words in FRAMES]
_IN = [(when, re.compile(words, re.IGNORECASE)) for when, words in WORDS]


def library(path: str) -> bool:
    """Is this file installed, rather than the user's own?"""
    return any(part in path.replace("\\", "/") for part in INSTALLED)


@dataclass(frozen=True, slots=True)
class Frame:
    """One line of a traceback."""

    path: str
    line: int
    function: str
    code: str = ""

    @property
    def library(self) -> bool:
        """It is not the user's own code."""
        return library(self.path) or any(part in self.path for part in CUT)

    @property
    def short(self) -> str:
        """train.py:41; train.py where the line is not said."""
        name = self.path.replace("\\", "/").rsplit("/", 1)[-1]
        return f"{name}:{self.line}" if self.line else name


@dataclass(frozen=True, slots=True)
class Root:
    """A variable of a failing program that keeps memory of the card: `what` says how."""

    name: str
    line: str  # "train.py:12": the line that puts the tensors there
    what: Literal["collection", "graph", "model", "tensor", "exception", "hook"]
    bytes: int
    count: int = 1
    wide: int = 0  # of a model: bytes of it in 32 bits


@dataclass(frozen=True, slots=True)
class Evidence:
    """All that is known of one out-of-memory. `text` is in small letters with single spaces; `memory` is what a recorded
    history ends with, `roots` who holds tensors in a live process."""

    text: str = ""
    messages: tuple[Message, ...] = ()
    frames: tuple[Frame, ...] = ()  # outermost first
    when: When = ""
    memory: Memory | None = None
    roots: tuple[Root, ...] = ()
    seen: tuple[Clue, ...] = ()  # what a watch of the run found already

    @property
    def message(self) -> Message | None:
        """The one that says most."""
        return self.messages[0] if self.messages else None

    @property
    def shortfall(self) -> int | None:
        """Bytes that were missing, at least."""
        m, memory = self.message, self.memory
        if memory is not None and memory.asked and memory.capacity is not None:
            return max(memory.asked - (memory.capacity - memory.allocated), 0)
        return max(m.tried - m.free, 0) if m and m.tried is not None and m.free is not None else None

    @property
    def line(self) -> str:
        """The innermost line of the user's own code."""
        return next((frame.short for frame in reversed(self.frames) if not frame.library), "")


def read_text(text: str, memory: Memory | None = None, roots: tuple[Root, ...] = ()) -> Evidence:
    """What a log, a traceback or a report says."""
    text = text[-MOST_TEXT:]
    frames = tuple(
        Frame(
            m["path"] or m["path2"],
            int(m["line"] or m["line2"] or 0),
            (m["name"] or m["name2"]).strip(),
            (m["code"] or "").strip(),
        )
        for m in list(_FRAME.finditer(text))[-MOST_FRAMES:]
    )
    flat = " ".join(text.split()).lower()
    return Evidence(flat, messages(text), frames, _when(frames, flat), memory, roots)


def _when(frames: tuple[Frame, ...], flat: str) -> When:
    """Where it failed: frames tell before words. What surrounds a forward pass (eval, save) stands far outside of it."""
    said = [f"{f.path} {f.function} {f.code}" for f in frames]
    for when, pattern in _AT:
        if any(pattern.search(line) for line in (said if when in AROUND else said[-NEAR:])):
            return when
    return next((when for when, pattern in _IN if pattern.search(flat)), "")
