"""Read the command line that starts a training, as it is typed, into what its processes run: no shell, no torch.

    parse(["torchrun", "--nproc_per_node", "8", "train.py", "--lr", "3e-4"], environment, folder)

Wrappers and launchers are taken off from the left by the tables of `launchers`, until a file or module of Python is
left. Whatever is not understood is refused by name, or listed in `unknown` where the training runs without it.
"""

from __future__ import annotations

import os
import re
import shlex
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal

from memfit.errors import BadInput
from memfit.reading.environments import (
    activate,
    conda_environment,
    find_program,
    project_environment,
    shebang,
)
from memfit.reading.shell_file import Simple, read_shell
from memfit.reading.shell_words import LOCAL_RANK, NODE_RANK, RANK, export, is_unknown, plain
from memfit.virtual.scripts.launchers import (
    ASKING,
    CONDA_RUN,
    LAUNCHERS,
    MODULE_WRAPPERS,
    MODULES,
    PROGRAMS,
    PYTHON,
    RUNNERS,
    UV_RUN,
    WRAPPERS,
    Options,
    Said,
    read_options,
)
from memfit.virtual.scripts.process_counts import COUNTED, whole_number

DEEPEST = 20  # commands within commands; more is a circle
_BY_RANK = re.compile(f"[{RANK}{LOCAL_RANK}{NODE_RANK}]")
_ASSIGNMENT = re.compile(r"[A-Za-z_]\w*=")
_PYTHON = re.compile(r"python(\d(\.\d+)?)?t?")
_CODE = re.compile(r"-m[\w.]*|-c")  # python's options after which no file follows: -m MODULE, -mMODULE, -c TEXT
_CLUSTER = re.compile(r"-[bBdEiIOPqsSuvx]\w.*")  # options of python without a value, of which several follow one dash
_TEXT = re.compile(r"-[a-z]*c")  # the option of a shell before a command: -c, -lc
SHELLS = ("sh", "bash", "zsh", "dash", "ksh", "sbatch")
# programs that run a training where memfit cannot follow -> why
_ELSEWHERE = {
    **dict.fromkeys(("docker", "podman", "singularity", "apptainer", "enroot"), "another file system"),
    **dict.fromkeys(("kubectl", "sky", "modal", "ray", "ssh", "pdsh", "mlflow", "wandb"), "another machine"),
    **dict.fromkeys(("conda", "mamba", "micromamba", "poetry", "pipenv", "pixi", "hatch", "pdm", "rye"),
                    "an environment that memfit cannot find by itself"),
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class CommandLine:
    """What a command line starts: a file or module of Python, its processes, and how they are made to look.

    python: the interpreter that owns it. environment: all variables that it gets from the shell; variables: those
    that the launcher adds in each process, with placeholders for ranks, beside torchrun's, which every rank has by its
    place. processes: on each node; 0 is one a card. devices: cards that CUDA_VISIBLE_DEVICES or the launcher shows on a
    node; 0 is all. settings: the arguments of accelerate launch, whose own code makes variables of them. ignored:
    arguments that change no memory. unknown: arguments of a launcher that memfit does not know.
    """

    python: str
    kind: Literal["file", "module"]
    entry: str
    args: tuple[str, ...] = ()
    options: tuple[str, ...] = ()  # of the interpreter
    environment: dict[str, str] = field(default_factory=dict)
    folder: str = ""
    launcher: str = ""
    processes: int = 1
    nodes: int = 1
    most_nodes: int = 1  # to which an elastic job grows
    devices: int = 0
    variables: dict[str, str] = field(default_factory=dict)
    settings: tuple[str, ...] | None = None
    bare: bool = False  # the interpreter is the one that `python` means on the PATH
    console: bool = False  # the file is a console script, which may start the training itself
    ignored: tuple[str, ...] = ()
    unknown: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()

    @property
    def world_size(self) -> int:
        """Return how many processes there are on all nodes."""
        return self.processes * self.nodes

    @property
    def name(self) -> str:
        """Return what the answer is headed with."""
        if self.console:
            return " ".join([Path(self.entry).name, *self.args[:1]])
        return f"-m {self.entry}" if self.kind == "module" else self.entry

    @property
    def shown(self) -> str:
        """Return the command that each process runs, for a note."""
        target = ["-m", self.entry] if self.kind == "module" else [self.entry]
        count = f" ({self.launcher})" if self.launcher else ""
        return shlex.join(["python", *target, *self.args[:4], *(["..."] if len(self.args) > 4 else [])]) + count

    def by_torchrun(self, processes: int, nodes: int, environment: dict[str, str]) -> CommandLine:
        """Return the command line that starts the same program by torchrun."""
        return replace(
            self, launcher="torchrun", processes=processes, nodes=nodes, environment=environment, variables={},
            devices=processes,
        )  # fmt: skip

    def on(self, cards: int | None, asked: str) -> CommandLine:
        """Return the command line with its number of processes settled. cards: their number, if it was given.

        Raises BadInput where both numbers are given and disagree. asked: the name of the card.
        """
        if not self.launcher:
            shown = min(self.devices or cards or 1, cards or self.devices or 1)
            return replace(self, devices=shown)
        per_node = self.processes or self.devices or max((cards or 1) // self.nodes, 1)
        # an elastic job (--nnodes 1:4) starts on the fewest, where shards are the largest, if no cards are named
        nodes = min(max((cards or 1) // per_node, self.nodes), max(self.most_nodes, self.nodes))
        total = per_node * nodes
        if cards is not None and cards != total:
            here = max(cards // self.nodes, 1)
            way = ASKING[self.launcher].format(per_node=here, total=cards)
            raise BadInput(
                f"{self.launcher} starts {total} process{'es' * (total > 1)}"
                f"{f' on {nodes} nodes' if nodes > 1 else ''}, and {cards} cards are named",
                hint=f"--gpu {total}x{asked}, or {self.launcher} {way}",
            )
        notes = self.notes
        if cards is None and self.most_nodes > nodes:
            notes += (f"{self.launcher} starts on {nodes} to {self.most_nodes} nodes: the fewest are traced",)
        return replace(self, processes=per_node, nodes=nodes, devices=self.devices or per_node, notes=notes)


def parse(
    words: Sequence[str], environment: Mapping[str, str] | None = None, folder: str | None = None, devices: int = 1
) -> CommandLine:
    """Return what a command line starts. devices: cards of a machine, for scripts that count them.

    Raises BadInput that names what is not understood.
    """
    reading = _Reading(dict(os.environ if environment is None else environment), folder or str(Path.cwd()), devices)
    return reading.command(list(words))


class _Reading:
    """The state while wrappers and launchers are taken off: environment, folder, number of processes."""

    def __init__(self, environment: dict[str, str], folder: str, devices: int) -> None:
        self.environment, self.folder, self.devices = environment, folder, devices
        self.python = ""  # of the launcher, or of uv's project
        self.found: dict[str, Any] = {}
        self.ignored: list[str] = []
        self.unknown: list[str] = []
        self.notes: list[str] = []
        self._depth = 0

    # --- commands, from the left ---

    def command(self, words: list[str]) -> CommandLine:
        """Return what the words start."""
        self._depth += 1
        if self._depth > DEEPEST:
            raise BadInput("the command line starts itself", hint="memfit trace --gpu l4 -- python train.py")
        while words and _ASSIGNMENT.match(words[0]):
            name, _, value = words.pop(0).partition("=")
            self._set(name, value)
        if not words:
            raise BadInput("the command line starts nothing", hint="memfit trace --gpu l4 -- python train.py")
        program = Path(plain(words[0])).name
        after = words[1] if len(words) > 1 else ""
        launcher = PROGRAMS.get(program) or PROGRAMS.get(f"{program} {after}")
        if launcher:
            return self._launched(launcher, words[1 if program in PROGRAMS else 2 :], words[0])
        if program == "env":
            return self._env(words[1:])
        if program == "uv":
            return self._uv(words[1:])
        if program in WRAPPERS:
            return self._wrapped(words)
        if program in SHELLS or _is_shell_file(words[0], self.folder):
            return self._shell(words if program in SHELLS else ["bash", *words])
        if _PYTHON.fullmatch(program):
            return self._python(words)
        if program.endswith(".py"):
            return self._end("file", words[0], words[1:], self._interpreter(shebang(self._path(words[0])) or "python"))
        if program in RUNNERS and after == "run":
            return self._run_within(program, words[2:])
        if program in _ELSEWHERE:
            raise _elsewhere(program)
        return self._console(words)

    def _set(self, name: str, value: str) -> None:
        export(self.environment, name, value, self.notes)

    def _env(self, words: list[str]) -> CommandLine:
        while words and (words[0].startswith("-") or "=" in words[0]):
            word = words.pop(0)
            if word in ("-u", "--unset") and words:
                self.environment.pop(words.pop(0), None)
            elif word in ("-i", "-", "--ignore-environment"):
                self.environment = {}
            elif word in ("-C", "--chdir") and words:
                self._enter(words.pop(0))
            elif word in ("-S", "--split-string") and words:
                words = [*shlex.split(words[0]), *words[1:]]
            elif word.startswith("-"):
                raise BadInput(f"env {word} is not understood", hint="env NAME=VALUE python train.py")
            else:
                name, _, value = word.partition("=")
                self._set(name, value)
        return self.command(words)

    def _enter(self, folder: str) -> None:
        self.folder = str(Path(self.folder, folder))

    def _wrapped(self, words: list[str]) -> CommandLine:
        program, rest = Path(words[0]).name, words[1:]
        row = WRAPPERS[program]
        if row.subcommands:
            if not rest or rest[0] not in row.subcommands:
                raise BadInput(
                    f"{program} {' '.join(rest[:1])} starts no training", hint=f"{program} {row.subcommands[0]} ..."
                )
            rest = rest[1:]
        said = self._read(program, rest, row.options)
        self.ignored.append(program)
        return self.command(said.rest[row.skipped :])

    def _read(self, program: str, words: Sequence[str], options: Options) -> Said:
        said = read_options(words, options, self.environment)
        self.ignored += [f"{program} {name}" for name in said.ignored]
        self.unknown += [f"{program} {name}" for name in said.unknown]
        unclear = next((value for _, value in said.meanings if is_unknown(value)), None)
        if unclear is not None:
            raise BadInput(f"{program}: {plain(unclear)} is not understood", hint="type the value itself")
        return said

    def _uv(self, words: list[str]) -> CommandLine:
        if words[:1] != ["run"]:
            raise BadInput(f"uv {' '.join(words[:1])} starts no training", hint="uv run python train.py")
        said = self._read("uv run", words[1:], UV_RUN)
        if folder := said.last("chdir"):
            self._enter(folder)
        found = project_environment(said.last("project") or self.folder, self.environment, said.says("active"))
        if found is None:
            raise BadInput("uv run: there is no .venv here or in a folder above", hint="uv sync")
        if said.says("packages"):
            self.unknown.append("uv run --with")
        activate(self.environment, found)
        target = said.rest
        if said.says("module"):
            return self.command(["python", "-m", *target])
        return self.command(["python", *target] if target and target[0].endswith(".py") else target)

    def _run_within(self, program: str, words: list[str]) -> CommandLine:
        """Read what `conda run -n NAME` or `poetry run` starts, in the environment that these would take."""
        said = self._read(program, words, RUNNERS[program])
        if folder := said.last("chdir"):
            self._enter(folder)
        if RUNNERS[program] is CONDA_RUN:
            found = conda_environment(said.last("environment", "base"), self.environment)
        else:
            found = project_environment(self.folder, self.environment, active=True)
        if found is None:
            raise _elsewhere(program)
        activate(self.environment, found)
        return self.command(said.rest)

    def _shell(self, words: list[str]) -> CommandLine:
        shell, rest = Path(words[0]).name, words[1:]
        while rest and rest[0].startswith("-") and not _TEXT.fullmatch(rest[0]):
            rest = rest[1:]
        if rest and _TEXT.fullmatch(rest[0]) and len(rest) > 1:
            name, text, arguments = f"{shell} -c", rest[1], rest[3:]
        elif rest:
            path = self._path(rest[0])
            if not path.is_file():
                raise BadInput(f"{rest[0]} does not exist", hint="give the path of a shell script")
            name, text, arguments = rest[0], path.read_text(errors="replace"), rest[1:]
        else:
            raise BadInput(f"{shell} starts nothing by itself", hint="bash train.sh")
        found = read_shell(
            text, name, [shell if _TEXT.fullmatch(rest[0]) else rest[0], *arguments], self.environment, self.folder,
            self.devices,
        )  # fmt: skip
        return self._last(found, name)

    def _last(self, commands: list[Simple], name: str) -> CommandLine:
        """Return what the training command of a shell script starts, in the environment that it has there.

        That is its only launcher, else the last command that starts Python. The others are not run, which is noted.
        """
        launching = [one for one in commands if _launcher_of(one.words)]
        training = launching or [one for one in commands if self._is_python(one.words)]
        if not training:
            raise BadInput(f"{name} starts no training", hint="memfit trace --gpu l4 -- python train.py")
        if len(launching) > 1:
            shown = ", ".join(f"line {one.line}: {plain(' '.join(one.words))[:60]}" for one in launching[:3])
            raise BadInput(
                f"{name} trains more than once ({shown})",
                hint="trace each command by itself: memfit trace --gpu l4 -- torchrun ...",
            )
        last = training[-1]
        for one in commands:
            if one is not last:
                self.notes.append(f"{name}, line {one.line}, is not run: {plain(' '.join(one.words))[:80]}")
        self.environment, self.folder = dict(last.environment), last.folder
        self.notes += last.notes
        return self.command(last.words)

    def _is_python(self, words: Sequence[str]) -> bool:
        """Return whether a command is Python, a console script or a shell script, perhaps behind wrappers."""
        for word in words[:4]:
            name = Path(plain(word)).name
            if _PYTHON.fullmatch(name) or name.endswith((".py", ".sh")) or name in (*SHELLS, "uv"):
                return True
            path = find_program(plain(word), self.environment, self.folder) if not is_unknown(word) else None
            if path and _PYTHON.fullmatch(Path(shebang(path)).name):
                return True
        return False

    # --- launchers ---

    def _launched(self, launcher: str, words: list[str], program: str, python: str = "") -> CommandLine:
        """Read the arguments of a launcher, and what its processes run."""
        said = self._read(launcher, words, LAUNCHERS[launcher])
        if launcher in ("srun", "mpirun"):
            self._tasks(launcher, said)
            return self.command(said.rest)
        python = python or self._owner(program)
        if not said.rest:
            raise BadInput(f"{launcher} starts nothing", hint=f"{launcher} {ASKING[launcher]} train.py".format(
                per_node=8, total=8))  # fmt: skip
        if "launcher" in self.found:
            outer = self.found["launcher"]
            if outer in ("torchrun", "accelerate", "deepspeed"):
                raise BadInput(f"{outer} starts {launcher}", hint=f"one launcher: {launcher} ...")
            self.notes.append(f"{outer} starts {launcher}, which says how many processes there are")
        self.found |= {"launcher": launcher, **COUNTED[launcher](said, self.environment, self.folder)}
        args = said.rest[2:] if said.rest[1:2] == ["--"] else said.rest[1:]  # argparse drops a -- behind the script
        crossed = {"CROSS_RANK": NODE_RANK, "CROSS_SIZE": str(self.found["nodes"])}  # deepspeed/launcher/launch.py
        self.environment |= crossed if launcher == "deepspeed" else {}
        if launcher == "deepspeed" and not said.says("no_local_rank"):
            args = [f"--local_rank={LOCAL_RANK}", *args]
        if program.endswith("torch.distributed.launch") and not said.says("use_env"):
            args = [f"--local-rank={LOCAL_RANK}", *args]
        if said.says("no_python"):
            return self.command([said.rest[0], *args])
        return self._end("module" if said.says("module") else "file", said.rest[0], args, python)

    def _tasks(self, launcher: str, said: Said) -> None:
        """Note the tasks that srun or mpirun starts, each of which may be a training process."""
        if folder := said.last("chdir"):
            self._enter(folder)
        if said.says("container"):
            raise BadInput(f"{launcher} runs the training in a container", hint="trace there: python train.py")
        exported = [v for meaning, value in said.meanings if meaning == "export" for v in value.split(",")]
        for name, equals, value in (one.partition("=") for one in exported):
            if equals:
                self._set(name, value)
        # srun's counts may come from the #SBATCH lines of its script
        nodes = whole_number(
            said.last("nodes") or self._allocated(launcher, "SLURM_JOB_NUM_NODES", "1"), f"{launcher} nodes"
        )
        each = said.last("processes") or self._allocated(launcher, "SLURM_NTASKS_PER_NODE", "")
        total = said.last("total") or ("" if each else self._allocated(launcher, "SLURM_NTASKS", ""))
        if total:
            count = whole_number(total, f"{launcher} tasks")
            nodes = whole_number(said.last("nodes") or "1", f"{launcher} nodes") if launcher == "mpirun" else nodes
            each = str(max(count // nodes, 1)) if not each or launcher == "srun" else each
            if launcher == "mpirun" and said.says("processes"):
                nodes = max(count // int(each), 1)
            elif launcher == "mpirun" and not said.says("nodes"):  # -H a:8,b:8
                nodes = max(min(len(said.last("hosts").split(",")), count), 1)
                each = str(count // nodes)
        processes = whole_number(each or "1", f"{launcher} tasks")
        size = str(processes * nodes)
        slurm = {
            "SLURM_PROCID": RANK, "SLURM_LOCALID": LOCAL_RANK, "SLURM_NODEID": NODE_RANK, "SLURM_NTASKS": size,
            "SLURM_NNODES": str(nodes), "SLURM_JOB_NUM_NODES": str(nodes),
        }  # fmt: skip
        openmpi = {
            "OMPI_COMM_WORLD_RANK": RANK, "OMPI_COMM_WORLD_LOCAL_RANK": LOCAL_RANK, "OMPI_COMM_WORLD_SIZE": size,
            "OMPI_COMM_WORLD_LOCAL_SIZE": str(processes),
        }  # fmt: skip
        self.environment |= slurm if launcher == "srun" else openmpi  # a shell script behind it may read them
        self.found |= {"launcher": launcher, "processes": processes, "nodes": nodes}

    def _allocated(self, launcher: str, name: str, default: str) -> str:
        return self.environment.get(name, default) if launcher == "srun" else default

    # --- Python ---

    def _python(self, words: list[str]) -> CommandLine:
        """Read `python [options] FILE | -m MODULE`."""
        python, words = self._interpreter(words[0]), [words[0], *_apart(words[1:])]
        at = next((i for i, word in enumerate(words[1:], 1) if _CODE.fullmatch(word)), len(words))
        said = self._read("python", words[1:at], PYTHON)
        self.found["options"] = tuple(said.own)
        if said.rest:  # a file comes before any -m, which is then the file's own
            return self._end("file", said.rest[0], [*said.rest[1:], *words[at:]], python)
        if at == len(words) or words[at] == "-c":
            what = "python -c" if at < len(words) else "python by itself"
            raise BadInput(f"{what} is not traced", hint="put the code into a file: python train.py")
        module, args = (words[at][2:], words[at + 1 :]) if words[at] != "-m" else ("", words[at + 1 :])
        if not module:
            if not args:
                raise BadInput("python -m names no module", hint="python -m package.train")
            module, args = args[0], args[1:]
        if launcher := MODULES.get(module) or MODULES.get(f"{module} {args[0] if args else ''}"):
            return self._launched(launcher, args if module in MODULES else args[1:], module, python)
        if row := MODULE_WRAPPERS.get(module):
            inner = self._read(f"-m {module}", args, row.options)
            return self._python([words[0], *inner.rest])
        return self._end("module", module, args, python)

    def _console(self, words: list[str]) -> CommandLine:
        """Read a console script: a Python file that the shebang's interpreter runs."""
        path = self._program(words[0])
        owner = shebang(path)
        if not owner or not _PYTHON.fullmatch(Path(owner).name):
            raise BadInput(
                f"{path} is not a Python program, so memfit cannot see what it starts",
                hint="name what it runs: memfit trace --gpu l4 -- python train.py",
            )
        self.found["console"] = True
        return self._end("file", str(path), words[1:], self._interpreter(owner))

    def _owner(self, program: str) -> str:
        """Return the interpreter of a launcher's console script."""
        return self._interpreter(shebang(self._program(program)) or "python")

    def _program(self, name: str) -> Path:
        path = find_program(name, self.environment, self.folder)
        if path is None:
            raise BadInput(
                f"there is no program '{plain(name)[:80]}' on the PATH",
                hint="activate the environment that has it, or name it with its folder",
            )
        return path

    def _interpreter(self, name: str) -> str:
        """Return the path of an interpreter: as named, on the PATH, or this one where there is none."""
        if self.python:
            return self.python
        path = find_program(name, self.environment, self.folder)
        if path is None and os.sep in name:
            raise BadInput(f"{name} does not exist", hint="give the path of a Python interpreter")
        venv = self.environment.get("VIRTUAL_ENV")
        self.found["bare"] = os.sep not in name and not (venv and path and path.is_relative_to(venv))
        return str(path) if path else sys.executable

    def _path(self, name: str) -> Path:
        return Path(self.folder, Path(name).expanduser())

    def _end(self, kind: Literal["file", "module"], entry: str, args: Iterable[str], python: str) -> CommandLine:
        args = tuple(args)
        unclear = next((word for word in (entry, *args) if is_unknown(word)), None)
        if unclear is not None:
            raise BadInput(f"{plain(unclear)} is not understood: memfit runs no shell", hint="type the value itself")
        if kind == "file" and not self._path(entry).is_file():
            if self._path(entry).is_dir():
                raise BadInput(f"{entry} is a folder", hint=f"python -m {Path(entry).name}, or one of its files")
            raise BadInput(f"{entry} does not exist", hint="paths are looked up from the current folder")
        by_rank = {name: value for name, value in self.environment.items() if _BY_RANK.search(value)}
        if self.found.get("launcher") not in ("srun", "mpirun"):  # a task of srun is a launcher, one on each node
            by_rank = {name: value.replace(RANK, NODE_RANK) for name, value in by_rank.items()}
            by_rank = {name: value.replace(LOCAL_RANK, "0") for name, value in by_rank.items()}
        self.environment = {name: value for name, value in self.environment.items() if name not in by_rank}
        shown = self.environment.get("CUDA_VISIBLE_DEVICES", "")
        if shown and "devices" not in self.found:
            self.found["devices"] = len(shown.split(","))
        return CommandLine(
            python=python, kind=kind, entry=entry, args=args, environment=self.environment, folder=self.folder,
            variables=by_rank,
            ignored=tuple(dict.fromkeys(self.ignored)), unknown=tuple(dict.fromkeys(self.unknown)),
            notes=tuple(dict.fromkeys(self.notes)), **self.found,
        )  # fmt: skip


def _elsewhere(program: str) -> BadInput:
    return BadInput(
        f"{program} runs the training in {_ELSEWHERE[program]}",
        hint="trace there what it runs: memfit trace --gpu l4 -- python train.py",
    )


def _launcher_of(words: Sequence[str]) -> str | None:
    """Return the launcher that the words name anywhere: torchrun behind numactl, accelerate launch."""
    names = [Path(word).name for word in words]
    pairs = (" ".join(pair) for pair in pairwise(names))
    return next((found for name in (*names, *pairs) if (found := PROGRAMS.get(name) or MODULES.get(name))), None)


def starts_training(words: Sequence[str]) -> bool:
    """Return whether a command is a launcher's, which a traced process must not start as a real child."""
    program = Path(words[0]).name if words else ""
    if _PYTHON.fullmatch(program) and "-m" in words[:-1]:
        at = words.index("-m") + 1
        return words[at] in MODULES or " ".join(words[at : at + 2]) in MODULES
    return program in PROGRAMS or " ".join([program, *words[1:2]]) in PROGRAMS


def names_program(word: str) -> bool:
    """Return whether a word alone is a program that `parse` knows by its name: Python, a launcher, a wrapper."""
    known = {*(program.partition(" ")[0] for program in PROGRAMS), *WRAPPERS, *SHELLS, "env", "uv"}
    return word in known or _PYTHON.fullmatch(word) is not None


def _is_shell_file(word: str, folder: str) -> bool:
    path = Path(folder, word)
    if not path.is_file():
        return False
    owner = Path(shebang(path)).name
    return owner in SHELLS or (word.endswith(".sh") and not owner)


def _apart(words: Sequence[str]) -> list[str]:
    """Return python's words with options that share a dash apart: -um MODULE is -u -m MODULE."""
    found: list[str] = []
    rest = iter(words)
    for word in rest:
        while _CLUSTER.fullmatch(word):
            found.append(word[:2])
            word = f"-{word[2:]}"
        found.append(word)
        if not word.startswith("-") or _CODE.fullmatch(word):
            break
        if word in ("-W", "-X"):
            found += [value for value in (next(rest, None),) if value is not None]
    return [*found, *rest]
