"""The Observer: follows training code on the card and records phases, roles, and the module of every allocation."""

from __future__ import annotations

import functools
import re
import sys
import warnings
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from types import CodeType, FrameType
from typing import Any
from weakref import WeakKeyDictionary, WeakSet

import torch
from torch import Tensor
from torch._C import _functorch as functorch
from torch.nn.modules import module as hooks
from torch.optim import optimizer as optimizers
from torch.utils._python_dispatch import _get_current_dispatch_mode

from memfit.nouns.tape import (
    AFTER_BACKWARD,
    AFTER_STEP,
    BACKWARD,
    FORWARD,
    GENERATION,
    OPTIMIZER_STEP,
    Phase,
    Role,
    Tape,
)
from memfit.virtual.device.card import Card
from memfit.virtual.device.ledger import BROADCAST, BUCKET, BUCKET_SIZES, GATHERED, GATHERING, REDUCING, WARM_UP
from memfit.virtual.device.memory import node_name
from memfit.virtual.device.values import base, tensors
from memfit.virtual.inference import caller
from memfit.virtual.patching import patched, when_imported
from memfit.virtual.repeated_steps import SECTION

# labels of what these operators allocate where parameters are sharded (torch.distributed.fsdp)
_SHARDED = {"split_with_sizes_copy": GATHERED, "storage.resize_": GATHERED, "_chunk_cat": REDUCING}
# the code of the function that PyTorch puts around each optimizer's step, and that calls the hooks
_STEP = next(c for c in optimizers.Optimizer.profile_hook_step.__code__.co_consts if isinstance(c, CodeType))
_NUMBER = re.compile(r"\d+")
_DDP = (BROADCAST, BUCKET, BUCKET_SIZES, WARM_UP)
# the role that follows from a label alone
_ROLES: dict[str, Role] = {
    "cuBLAS workspace": "workspace", GATHERING: "temporaries", REDUCING: "temporaries", GATHERED: "temporaries",
}  # fmt: skip


def _common(one: str, other: str) -> str:
    """Return the title of a storage that two gradients share: layers.0 for layers.0.a and layers.0.b."""
    if other == one or other.startswith(one + "."):
        return one
    shared = [a for a, b in zip(one.split("."), other.split("."), strict=False) if a == b]
    return ".".join(shared) or "gradients of several modules"


class EnoughSteps(BaseException):
    """The requested steps are done. It is not an Exception, so no training loop catches it."""


class _Engine:
    """PyTorch's autograd engine, whose passes are observed also where code calls the engine itself.

    backward: observes a pass that adds gradients to the weights; returning: one that returns them.
    """

    def __init__(self, backward: Any, returning: Any) -> None:
        self._real = torch.autograd.Variable._execution_engine
        self._backward, self._returning = backward(self._real.run_backward), returning(self._real.run_backward)

    def run_backward(self, *args: Any, **kwargs: Any) -> Any:
        # torch.autograd.grad returns the gradients in place of adding them to the leaves
        adding = kwargs.get("accumulate_grad", args[-1] if len(args) > 6 else False)
        return (self._backward if adding else self._returning)(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._real, name)


class Observer:
    """Marks the card's ledger while training code runs, and reads the finished tape.

    steps: optimizer steps after which EnoughSteps is raised (None: never).
    """

    def __init__(self, card: Card, steps: int | None = None) -> None:
        self.card = card
        self.steps, self.done = steps, 0
        self.stepped: WeakKeyDictionary[Any, int] = WeakKeyDictionary()  # optimizer -> its share of `done`
        self._depth = 0
        self._names: dict[int, str] = {}
        self._roots: WeakSet[torch.nn.Module] = WeakSet()
        self._tensor_names: dict[int, str] = {}  # id of a parameter -> its name
        self._roles: dict[int, Role] = {}
        self._titles: dict[int, str] = {}  # labels of tagged allocations, in place of the operator that made them
        self._loaded = 0  # allocations before the first forward pass
        self._began = 0  # number of the first allocation of the forward passes that wait for a backward
        # whether the modules of these passes are in training mode; None: no pass waits for a backward
        self._waiting: bool | None = None
        self._run: set[int] = set()  # root modules that ran in the current pass
        self._in_backward = self._learned = False  # _learned: whether a backward pass has run
        self._returned = False  # whether a pass has returned gradients, which code may give to the weights itself
        self._path: list[str] = []
        self._alike: dict[int, int] = {}  # id of a module -> how many have its type, and its name but for numbers
        self._kept_roots: WeakKeyDictionary[Any, type] = WeakKeyDictionary()  # roots that ran for a backward pass
        self._count = 1  # how many of them have the type of the one that runs
        self._layers: list[int] = []  # of each module of the path: how many alike keep what they make for one backward
        self._stepping: Any = None  # the optimizer whose step is running
        self.reads: list[Counter[str]] = []  # unknown values read by the beginning of each section
        self.mark("load", "load")

    def mark(self, phase: Phase, instant: str) -> None:
        """Mark that an instant begins."""
        self.card.settle()
        self.card.ledger.mark(phase, instant)

    def section(self) -> None:
        """Mark that a section of a loop begins, which `repeated_steps` may play again."""
        self.mark(self.phase, SECTION)
        self.reads.append(Counter(self.card.answers.reads))

    def restarted(self) -> None:
        """Forget earlier backward passes, as a new process would: a step before the first one only makes states."""
        self._learned = self._returned = False

    @property
    def phase(self) -> Phase:
        """The phase that training is in."""
        return "step" if self.done else "first_step"

    @contextmanager
    def watching(self) -> Iterator[Observer]:
        """Hook every module, optimizer and backward pass of the process."""
        with ExitStack() as stack:
            stack.enter_context(warnings.catch_warnings())
            # PyTorch warns of the hooks below
            warnings.filterwarnings("ignore", "Using `torch.compile\\(module\\)` when there are global hooks")
            for handle in (
                hooks.register_module_forward_pre_hook(self._enter),
                hooks.register_module_forward_hook(self._leave, always_call=True),
                optimizers.register_optimizer_step_pre_hook(self._before_step),
                optimizers.register_optimizer_step_post_hook(self._after_step),
            ):
                stack.callback(handle.remove)
            stack.enter_context(patched(torch.nn.Module, {"compile": self._compile(torch.nn.Module.compile)}))
            stack.enter_context(patched(torch.autograd, {"backward": self._backward(torch.autograd.backward)}))
            stack.enter_context(patched(torch.autograd.Variable, {"_execution_engine": self._engine()}))
            stack.enter_context(when_imported({"torch.distributed.pipelining.stage": self._split_backward}))
            alike = {"layers": lambda: self._layers[-1] if self._layers else 1}
            stack.enter_context(patched(self.card.ledger, {"place": self._place, **alike}))
            yield self

    # --- hooks ---

    def _engine(self) -> _Engine:
        return _Engine(self._backward, self._returning)

    def _split_backward(self, module: Any) -> Any:
        """Observe the two halves of a backward pass that zero-bubble schedules run, by torch.autograd.grad."""
        halves = ("stage_backward_input", "stage_backward_weight")
        return patched(module, {name: self._backward(getattr(module, name)) for name in halves})

    def _enter(self, module: torch.nn.Module, inputs: Any) -> None:
        if torch.compiler.is_compiling():  # else Dynamo would guard what this code reads, and recompile every block
            return
        if not self._depth and not self._in_backward and _learns_or_computes(module, inputs):
            self._begin_forward(module, inputs)
        self._path.append(self._names.get(id(module), type(module).__name__))
        self._layers.append(self._alike_of(module) if _keeps() else 1)
        self._depth += 1

    def _alike_of(self, module: torch.nn.Module) -> int:
        """Return how many modules like one all roots like its own have: schedules call parts of a model alone."""
        if not self._depth:
            self._kept_roots[module] = type(module)
            self._count = list(self._kept_roots.values()).count(type(module))
        return self._count * self._alike.get(id(module), 1)

    def _leave(self, module: torch.nn.Module, _: Any, __: Any) -> None:
        if torch.compiler.is_compiling():
            return
        self._depth -= 1
        self._path.pop()
        self._layers.pop()

    def _compile(self, real: Any) -> Any:
        """Wrap Module.compile so that the compiled call is observed from outside."""

        @functools.wraps(real)
        def compile(module: torch.nn.Module, *args: Any, **kwargs: Any) -> None:
            real(module, *args, **kwargs)
            compiled: Any = module._compiled_call_impl

            def call(*inputs: Any, **words: Any) -> Any:
                if torch.compiler.is_compiling():
                    return compiled(*inputs, **words)
                self._enter(module, inputs)
                try:
                    return compiled(*inputs, **words)
                finally:
                    self._leave(module, inputs, None)

            module._compiled_call_impl = call

        return compile

    def _begin_forward(self, module: torch.nn.Module, inputs: Any) -> None:
        root = getattr(module, "_orig_mod", module)  # the module inside torch.compile's wrapper
        if root not in self._roots:
            self._roots.add(root)
            named = dict(root.named_modules())
            self._names |= {id(m): name or type(m).__name__ for name, m in named.items()}
            kinds = {id(m): (type(m), _NUMBER.sub("", name)) for name, m in named.items()}
            counts = Counter(kinds.values())
            self._alike |= {number: counts[kind] for number, kind in kinds.items()}
        self.card.settle()
        if not self.done and not self._loaded:  # what is alive after loading belongs to the model
            for t in tensors(inputs):
                self._tag(t, "temporaries", "")  # the first batch
            self._tag_loaded()
            self._loaded = len(self.card.ledger.blocks)
        for name, p in root.named_parameters():
            self._tensor_names[id(p)] = name
            self._tag(p, "parameters", name)
            self._tag(p.grad, "gradients", f"gradient of {name}")
        graph = torch.is_grad_enabled()
        if graph and (self._waiting is None or (root.training and not self._waiting)):
            self._began, self._waiting = len(self.card.ledger.blocks), root.training
        again = id(root) in self._run or not self._run
        self._run = {id(root)} if again else self._run | {id(root)}
        phase, instant = (self.phase, FORWARD) if graph and root.training else self._without_training(root)
        self._mark_forward(phase, again, instant)

    def _without_training(self, root: torch.nn.Module) -> tuple[Phase, str]:
        """Return the phase and the instant of a pass that keeps nothing for a backward, or runs in evaluation mode."""
        part, instant = caller()
        return self.phase if part == "training" or (instant == GENERATION and not part) else "eval", instant

    def _mark_forward(self, phase: Phase, new: bool, instant: str) -> None:
        """Mark a new pass. A further part of a pass, such as the next layer of a loop or the next token, is marked
        where its phase or its purpose differs.
        """
        if self.card.ledger.marks[-1][1:] != (phase, instant) or (new and instant != GENERATION):
            self.mark(phase, instant)

    def _backward(self, real: Any, learns: bool = True) -> Any:
        def backward(*args: Any, **kwargs: Any) -> Any:
            if self._in_backward:  # reentrant checkpointing runs a nested backward for every block
                return real(*args, **kwargs)
            self.card.settle()
            self._tag_live("activations", self._began)  # made in the forward and alive now: saved for this backward
            self.mark(self.phase, BACKWARD)
            self._in_backward, self._learned = True, self._learned or learns
            self._waiting, self._run = None, set()
            try:
                made = real(*args, **kwargs)
            finally:
                self._in_backward = False
            self.mark(self.phase, AFTER_BACKWARD)
            return made

        return backward

    def _returning(self, real: Any) -> Any:
        """Observe a pass that returns gradients. One whose own graph is kept, such as a penalty's, belongs to the
        forward pass, and what a compiler traces to no pass.
        """
        pass_ = self._backward(real, learns=False)

        def returning(*args: Any, **kwargs: Any) -> Any:
            self._returned = True
            kept = kwargs.get("create_graph", args[3] if len(args) > 3 else False)
            ran = _get_current_dispatch_mode() is None and self.card.ledger.marks[-1][1] != "eval"
            return (pass_ if ran and not kept else real)(*args, **kwargs)

        return returning

    def _before_step(self, optimizer: Any, _: Any, __: Any) -> None:
        for group in optimizer.param_groups:
            for p in group["params"]:
                if id(p) not in self._tensor_names:  # no module was observed: compiled code called it
                    self._tag(p, "parameters", "a weight")
                self._tag(p.grad, "gradients", f"gradient of {self._tensor_names.get(id(p), 'a tensor')}")
                self._learned = self._learned or (self._returned and p.grad is not None)
        self._stepping = optimizer
        if self._learned and not within_a_step():
            self.mark(self.phase, OPTIMIZER_STEP)

    def _after_step(self, optimizer: Any, _: Any, __: Any) -> None:
        self._tag_states(optimizer)
        self._stepping = None
        if within_a_step():
            return
        self._waiting, self._run = None, set()
        if not self._learned:  # DeepSpeed while loading and FSDP2 while resuming step once to create the states
            return
        self.mark(self.phase, AFTER_STEP)
        self.stepped[optimizer] = self.stepped.get(optimizer, 0) + 1
        self.done += 1
        if self.steps is not None and self.done >= self.steps:
            raise EnoughSteps

    # --- roles and labels ---

    def _tag_states(self, optimizer: Any) -> None:
        for p, state in optimizer.state.items():
            name = self._tensor_names.get(id(p), "a tensor")
            for key, held in state.items() if isinstance(state, dict) else [("state", state)]:
                for t in tensors(held):
                    self._tag(t, "optimizer_states", f"{key} of {name}")

    def _tag(self, t: Tensor | None, role: Role, title: str) -> None:
        share = getattr(t, "_local_tensor", None)  # this rank's part of a DTensor
        t = t if share is None else share
        while t is not None and functorch.is_functorch_wrapped_tensor(t):  # within vmap and grad
            t = functorch.get_unwrapped(t)
            self._learned = True  # a function transform differentiates without calling backward
        if t is not None and t.is_cuda:
            number = self.card.ledger.number_at.get(base(t))
            if number is not None:
                earlier = share is not None and role == "gradients" and self._titles.get(number)
                self._roles[number] = role
                self._titles[number] = _common(earlier, title) if earlier else title

    def _tag_loaded(self) -> None:
        """Tag what is alive before the first pass as parameters."""
        self._tag_live("parameters")

    def _tag_live(self, role: Role, since: int = 0) -> None:
        """Give a role to live allocations from number `since` on that have none."""
        for number in self.card.ledger.number_at.values():
            if number >= since:
                self._roles.setdefault(number, role)

    def _place(self) -> str:
        """Return where in the model an allocation happens: the innermost module, or the node of the backward."""
        if self._path:
            return self._path[-1]
        node = torch._C._current_autograd_node() if self._in_backward else None
        if node is None:
            return ""
        return f"backward of {node_name(node).removesuffix('0').removesuffix('Backward')}"

    # --- the result ---

    def tape(self, about: dict[str, str]) -> Tape:
        """Return what happened as a Tape."""
        self.card.settle()
        if self._stepping is not None:  # the step ended in an error
            self._tag_states(self._stepping)
        ledger, roles, titles = self.card.ledger, self._roles, self._titles
        if ledger.refused and self._waiting is not None and ledger.marks[-1][1] != "eval":
            self._tag_live("activations", self._began)  # it failed before a backward could show what the forward saved
        sharded = _SHARDED if GATHERING in ledger.labels else {}

        def named(number: int) -> tuple[Role, str]:
            place, label = ledger.places[number], ledger.labels[number]
            if label in _DDP:  # also where gradients are views of a bucket
                return "gradients" if roles.get(number) == "gradients" else "temporaries", label
            label = sharded.get(label, label)
            role = _ROLES.get(label) or roles.get(number, "temporaries")
            return role, sys.intern(titles.get(number) or (f"{place}: {label}" if place else label))

        return Tape(tuple(ledger.events(named)), "traced", about)


def _keeps() -> bool:
    """Return whether what is made now stays on the card until its backward pass: it is neither evaluated, checkpointed,
    offloaded, nor made a second time."""
    hooks = torch._C._autograd._top_saved_tensors_default_hooks(True)
    return torch.is_grad_enabled() and hooks is None and torch._C._current_autograd_node() is None


def within_a_step() -> bool:
    """Return whether the optimizer whose hook asks is stepped by another's step: a container's, such as torchtitan's,
    or a wrapper's, such as ZeroRedundancyOptimizer's. Read from the stack: a step that fails calls no hook at its end.
    """
    frame: FrameType | None = sys._getframe(1)
    steps = 0
    while frame is not None:
        steps += frame.f_code is _STEP
        frame = frame.f_back
    return steps > 1


def _learns_or_computes(module: torch.nn.Module, inputs: Any) -> bool:
    """Return whether a module has weights or works on the card; transforms of pictures are modules without either."""
    return any(t.is_cuda for t in tensors(inputs)) or next(module.parameters(), None) is not None
