"""End a stage of training whose loader ran dry: its loops end at their next turn, and what follows them is traced.

A loop over a loader ends when the loader does. A loop that counts steps and calls `next()` itself would see an
exception that no real run raises; it gets further batches, and ends once it has trained with one. Loops that train, of
the script and of modules that are not installed, such as those beside it, are compiled with a test for that: their
bodies call `next`, `.backward` or `.step`, or a function of the file that does. Nothing else changes, no line moves.
"""

from __future__ import annotations

import ast
import builtins
import dis
import importlib.machinery
import inspect
import linecache
import runpy
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import lru_cache
from itertools import islice
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

from memfit._package import FOLDER
from memfit.virtual.patching import patched

_TRAINS = ("next", "__next__", "backward", "step")  # called in the body of a loop that trains
_OVER, _LOOP = "__memfit_turns__", "__memfit_loop__"
_BACKWARD = {number for name, number in dis.opmap.items() if "JUMP_BACKWARD" in name}  # by which loops turn


class Stages:
    """Numbers the stages that ended and the loops that began; a loop asks whether its stage ended since."""

    def __init__(self) -> None:
        self.now = 0
        self._ends: list[tuple[int, int]] = []  # when a stage ended; since when its loops had begun
        self._last = 0

    def tick(self) -> int:
        """Return the number of what begins or ends now."""
        self.now += 1
        return self.now

    def end(self, since: int = 0) -> None:
        """End the loops that are running now, of them those that began after `since`."""
        self._last = self.tick()
        self._ends.append((self._last, since))

    def over(self, began: int) -> bool:
        """Return whether the stage of a loop that began then has ended."""
        return self._last > began and any(ended > began > since for ended, since in self._ends)

    def turns(self, iterable: Any) -> Iterator[Any]:
        """Return an iterator over the turns of a `for` loop."""
        return _Turns(self, iter(iterable))

    def loop(self) -> Callable[[], bool]:
        """Return a test whether a `while` loop that begins now may go on."""
        began = self.tick()
        return lambda: not self.over(began)


class _Turns:
    """Passes on an iterator's items, of which it holds none, until a stage ends."""

    def __init__(self, stages: Stages, real: Iterator[Any]) -> None:
        self._stages, self._real, self._began = stages, real, stages.tick()

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        if self._stages.over(self._began):
            raise StopIteration
        return next(self._real)


# --- loops that can end ---


def _called(node: ast.AST) -> Iterator[str]:
    """Yield the names of all functions and methods that are called inside a node."""
    for part in ast.walk(node):
        if isinstance(part, ast.Call):
            name = getattr(part.func, "id", None) or getattr(part.func, "attr", None)
            if name:
                yield name


def _training_names(tree: ast.AST) -> set[str]:
    """Return names of functions of a file that train, directly or through others of the file."""
    functions = {n.name: set(_called(n)) for n in ast.walk(tree) if isinstance(n, ast.FunctionDef)}
    found = set(_TRAINS)
    while new := {name for name, calls in functions.items() if name not in found and calls & found}:
        found |= new
    return found


def _endless(loop: ast.For | ast.While) -> bool:
    """Return whether nothing but an exception ends a loop, so that nothing follows it: `while True` without a break."""
    if isinstance(loop, ast.While):
        ever = isinstance(loop.test, ast.Constant) and bool(loop.test.value)
    else:
        ever = isinstance(loop.iter, ast.Call) and next(_called(loop.iter), "") in ("count", "cycle", "repeat")
    return ever and not any(map(_breaks, loop.body))


def _breaks(node: ast.AST) -> bool:
    """Return whether a statement leaves the loop around it."""
    if isinstance(node, ast.Break | ast.Return):
        return True
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef | ast.Lambda):
        return False
    inner = isinstance(node, ast.For | ast.While | ast.AsyncFor)
    return any(_breaks(part) and not (inner and isinstance(part, ast.Break)) for part in ast.iter_child_nodes(node))


def _trains(loop: ast.For | ast.While, names: set[str]) -> bool:
    return not _endless(loop) and any(name in names for part in loop.body for name in _called(part))


class _EndableLoops(ast.NodeTransformer):
    """Puts the tests into the loops that train."""

    def __init__(self, names: set[str]) -> None:
        self._names = names
        self.changed = 0

    def visit_For(self, loop: ast.For) -> ast.For:
        trains = _trains(loop, self._names)
        self.generic_visit(loop)
        if trains:
            self.changed += 1
            loop.iter = ast.copy_location(_call(_OVER, loop.iter), loop.iter)
        return loop

    def visit_While(self, loop: ast.While) -> list[ast.stmt] | ast.While:
        trains = _trains(loop, self._names)
        self.generic_visit(loop)
        if not trains:
            return loop
        self.changed += 1
        name = f"__memfit_{self.changed}"
        began = ast.Assign([ast.Name(name, ast.Store())], _call(_LOOP))
        loop.test = ast.BoolOp(ast.And(), [_call(name), loop.test])
        return [ast.copy_location(began, loop), loop]


def _call(name: str, *args: ast.expr) -> ast.Call:
    return ast.Call(ast.Name(name, ast.Load()), list(args), [])


def may_train(code: CodeType) -> bool:
    """Return whether a loop of a compiled file may train: one that calls a training name, or a function that does.

    Python caches compiled files, whose names and jumps rule most of them out; only the others are parsed.
    """
    parts = list(_parts(code))
    used = [(part, {name for inner in _parts(part) for name in inner.co_names + inner.co_freevars}) for part in parts]
    found = set(_TRAINS)
    while new := {part.co_name for part, names in used if part.co_name not in found and names & found}:
        found |= new
    return any(names & found and not _BACKWARD.isdisjoint(part.co_code[::2]) for part, names in used)


def _parts(code: CodeType) -> Iterator[CodeType]:
    """Yield the code of a file, and of the functions, classes and comprehensions in it."""
    yield code
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _parts(constant)


def compiled(source: bytes | str, path: str, code: CodeType | None = None) -> CodeType:
    """Compile a file of the script with loops that can end. code: of the file as it is, where that is known."""
    tree = ast.parse(source, path)
    loops = _EndableLoops(_training_names(tree))
    changed = loops.visit(tree)
    if not loops.changed:
        return code or compile(source, path, "exec", dont_inherit=True)
    return compile(ast.fix_missing_locations(changed), path, "exec", dont_inherit=True)


@contextmanager
def loops_can_end(stages: Stages, changed: Callable[[str], bool]) -> Iterator[None]:
    """Compile the script, and by imports the files that are to be changed, with loops that can end."""
    loader = importlib.machinery.SourceFileLoader
    get_code, of_file = loader.get_code, runpy._get_code_from_file  # type: ignore[attr-defined]

    def own_code(self: Any, name: str) -> Any:
        path, code = self.get_filename(name), get_code(self, name)
        return compiled(self.get_data(path), path, code) if code and changed(path) and may_train(code) else code

    def run_code(*args: Any) -> Any:  # (file), or (name of the run, file) before Python 3.12, with a pair as result
        path = str(args[-1])
        if not path.endswith(".py"):
            return of_file(*args)
        code = compiled(Path(path).read_bytes(), path)
        return code if len(args) == 1 else (code, path)

    with ExitStack() as stack:
        stack.enter_context(patched(builtins, {_OVER: stages.turns, _LOOP: stages.loop}))
        stack.enter_context(patched(loader, {"get_code": own_code}))
        stack.enter_context(patched(runpy, {"_get_code_from_file": run_code}))
        yield


# --- whether a loader may simply end ---

_CATCHES = {"StopIteration", "Exception", "BaseException"}
_GENERATORS = inspect.CO_GENERATOR | inspect.CO_COROUTINE | inspect.CO_ASYNC_GENERATOR
Extent = tuple[int | None, int | None, int | None, int | None]  # line, last line, column, last column


def ends_quietly(frame: FrameType | None) -> bool:
    """Return whether a StopIteration raised to `frame` ends a loop or is caught, and so is no error of the script.

    A `for` loop, `list(loader)` and the like end with it. A call of `next(loader)` passes it on to its callers, of
    which one may catch it, or be a `__next__` of the script that a `for` loop calls. A generator ends with its loop, so
    whoever asks it for an item is looked at as well.
    """
    asked = False  # whether a call of next() was seen
    while frame is not None and "runpy" not in frame.f_code.co_filename:  # which runs the script
        code = frame.f_code
        if not code.co_filename.startswith(FOLDER):
            ended = _ended_at(frame, asked)
            if ended is None:
                asked = True
            elif ended and code.co_flags & inspect.CO_GENERATOR and not _starts_again(code.co_filename, frame.f_lineno):
                asked = False
            else:
                return ended
        frame = frame.f_back
    return not asked


def _ended_at(frame: FrameType, asked: bool) -> bool | None:
    """Return whether a StopIteration ends a loop here or is caught; None where it goes on to the caller.

    asked: it has come through a call of next().
    """
    code = frame.f_code
    if dis.opname[code.co_code[frame.f_lasti]] == "FOR_ITER":
        return True
    call = _calls(code.co_filename).get(_place(frame))
    asks = call is not None and _is_next(call)
    if call is None or not (asks or asked):
        return not asked
    if (asks and len(call.args) > 1) or _caught(code.co_filename, call, _CATCHES if asks else {"StopIteration"}):
        return True
    return False if code.co_flags & _GENERATORS else None  # Python would make a RuntimeError of it


@lru_cache(maxsize=64)
def _starts_again(filename: str, line: int) -> bool:
    """Return whether a loop that nothing ends is around a line, so that a generator goes on there: `while True`."""
    loops = (n for n in _tree(filename) if isinstance(n, ast.For | ast.While) and _endless(n))
    return any(loop.lineno < line <= (loop.end_lineno or line) for loop in loops)


def needs_an_item(frame: FrameType | None) -> bool:
    """Return whether a loop that gets no item at all would end in an UnboundLocalError, which no real run raises.

    It binds names that are read after it (`for x in loader: loss = ...` and then `return loss`) and that have no value
    yet. A loop inside a generator (tqdm) ends with the loop around it, so that one is looked at as well.
    """
    while frame is not None and "runpy" not in frame.f_code.co_filename:
        code = frame.f_code
        if not code.co_filename.startswith(FOLDER):
            if dis.opname[code.co_code[frame.f_lasti]] == "FOR_ITER":
                if _left_by_loop(code.co_filename, frame.f_lineno) - frame.f_locals.keys():
                    return True
                if not code.co_flags & inspect.CO_GENERATOR:
                    return False
            elif not code.co_flags & inspect.CO_GENERATOR:
                return False
        frame = frame.f_back
    return False


@lru_cache(maxsize=64)
def _left_by_loop(filename: str, line: int) -> frozenset[str]:
    """Return the names that only the loop at a line binds in its function and that are read after it."""
    parents = _tree(filename)
    loops = [n for n in parents if isinstance(n, ast.For) and n.lineno <= line <= (n.iter.end_lineno or line)]
    if not loops:
        return frozenset()
    loop: ast.AST = max(loops, key=lambda n: n.lineno)
    around: ast.AST = loop
    while around in parents and not isinstance(around, ast.FunctionDef | ast.AsyncFunctionDef):
        around = parents[around]
    last = loop.end_lineno or line  # type: ignore[attr-defined]
    names = [n for n in ast.walk(around) if isinstance(n, ast.Name)]
    bound = {n.id for n in ast.walk(loop) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)}
    read = {n.id for n in names if isinstance(n.ctx, ast.Load) and n.lineno > last}
    again = {n.id for n in names if isinstance(n.ctx, ast.Store) and n.lineno > last}
    return frozenset((bound & read) - again)


def _place(frame: FrameType) -> Extent:
    return next(islice(frame.f_code.co_positions(), frame.f_lasti // 2, None), (None, None, None, None))


@lru_cache(maxsize=32)
def _tree(filename: str) -> dict[ast.AST, ast.AST]:
    """Return the parent of each node of a source file; nothing for a file without source."""
    try:
        tree = ast.parse("".join(linecache.getlines(filename)))
    except SyntaxError:
        return {}
    return {child: node for node in ast.walk(tree) for child in ast.iter_child_nodes(node)}


@lru_cache(maxsize=32)
def _calls(filename: str) -> dict[Extent, ast.Call]:
    found = (node for node in _tree(filename) if isinstance(node, ast.Call))
    return {(n.lineno, n.end_lineno, n.col_offset, n.end_col_offset): n for n in found}


def _is_next(call: ast.Call) -> bool:
    return getattr(call.func, "id", None) == "next" or getattr(call.func, "attr", None) == "__next__"


def _caught(filename: str, call: ast.Call, kinds: set[str]) -> bool:
    """Return whether the function that makes a call catches a StopIteration of it, by one of these names.

    What catches every error around a whole training (`except Exception: cleanup(); raise`) waits for no StopIteration.
    """
    parents = _tree(filename)
    inside: ast.AST = call
    while (around := parents.get(inside)) is not None:
        if (
            isinstance(around, ast.Try)
            and inside in around.body
            and any(_catches(handler, kinds) for handler in around.handlers)
        ):
            return True
        if isinstance(around, ast.With) and any("suppress" in _called(item) for item in around.items):
            return True
        if isinstance(around, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            return False
        inside = around
    return False


def _catches(handler: ast.ExceptHandler, kinds: set[str]) -> bool:
    named = handler.type.elts if isinstance(handler.type, ast.Tuple) else [handler.type]
    return any(getattr(kind, "id", getattr(kind, "attr", "BaseException")) in kinds for kind in named)
