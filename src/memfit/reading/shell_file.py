"""Read a shell script that starts a training, without a shell: variables, arrays, simple conditions, continuations.

Nothing is run. A command substitution whose value is plain ($(pwd), $(nproc), a count of cards) is computed; any
other is an unknown text, which may stand where it changes nothing (an address, the name of a log) and is refused by
name where it would be used. Loops, `case` and functions that are called are refused with their line.
"""

from __future__ import annotations

import fnmatch
import os
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from memfit.errors import BadInput
from memfit.reading.environments import activate, conda_environment
from memfit.reading.shell_words import (
    ASSIGNED,
    ShellState,
    Token,
    for_rank,
    is_unknown,
    plain,
    redirects,
    tokens_of,
    unknown,
)

_SBATCH = re.compile(
    r"#SBATCH\s+(?:--(?P<long>[\w-]+)(?:[= ]\s*(?P<value>\S+))?|-(?P<short>\w)\s*(?P<short_value>\S+))"
)
# option of sbatch -> variables of the job that hold it; sbatch(1)
_JOB = {
    "nodes": ("SLURM_NNODES", "SLURM_JOB_NUM_NODES"), "N": ("SLURM_NNODES", "SLURM_JOB_NUM_NODES"),
    "ntasks": ("SLURM_NTASKS", "SLURM_NPROCS"), "n": ("SLURM_NTASKS", "SLURM_NPROCS"),
    "ntasks-per-node": ("SLURM_NTASKS_PER_NODE",), "gpus-per-node": ("SLURM_GPUS_ON_NODE", "SLURM_GPUS_PER_NODE"),
    "gres": ("SLURM_GPUS_ON_NODE",), "cpus-per-task": ("SLURM_CPUS_PER_TASK",), "c": ("SLURM_CPUS_PER_TASK",),
}  # fmt: skip
_OF_JOB = {"SLURM_NODEID": "0", "SLURM_PROCID": "0", "SLURM_LOCALID": "0", "SLURM_NODELIST": "localhost",
           "SLURM_JOB_NODELIST": "localhost", "SLURM_JOB_ID": "1", "SLURM_JOBID": "1"}  # fmt: skip
# commands that start no training and change nothing that one reads
_HARMLESS = frozenset(
    ("echo", "printf", "mkdir", "ls", "cat", "date", "nvidia-smi", "module", "ulimit", "sleep", "wait", "trap", "which",
     "hostname", "pwd", "type", "head", "tail", "touch", "chmod", "tee", "df", "free", "env", "printenv", "whoami",
     "sync", "clear", "pip", "pip3", "git", "wandb", "huggingface-cli", "hf", "nvcc", "lscpu", "scontrol", "squeue",
     "sinfo", "kill", "pkill", "rm", "umask")
)  # fmt: skip
# files that prepare a user's shell, or define conda and module; what they export is in the environment already
_PROFILES = (".bashrc", ".bash_profile", ".profile", ".zshrc", "profile", "conda.sh", "mamba.sh", "modules.sh")
_BLOCKS = {"if": "fi", "for": "done", "while": "done", "until": "done", "select": "done", "case": "esac", "{": "}"}
_GROUPS = {"{": "}", "(": ")"}
_WORDS = ("then", "elif", "else", "fi", "do", "done", "esac", "}")


@dataclass(frozen=True, slots=True)
class Simple:
    """One command of a script: its words, where it stands, and the environment and folder that it has there."""

    words: list[str]
    line: int
    environment: dict[str, str] = field(default_factory=dict)
    folder: str = ""
    notes: tuple[str, ...] = ()


def read_shell(
    text: str, name: str, arguments: Sequence[str], environment: dict[str, str], folder: str, devices: int = 1
) -> list[Simple]:
    """Return the commands that a script runs, without those that start nothing. arguments: $0, $1 ...

    devices: cards of this machine, for scripts that count them. Raises BadInput that names the line and what is not
    understood.
    """
    script = _Script(name, list(arguments), dict(environment), folder, devices)
    if _SBATCH.search(text):
        script.environment = {**_OF_JOB, **script.environment}
        for found in _SBATCH.finditer(text):
            value = found["value"] or found["short_value"] or ""
            for variable in _JOB.get(found["long"] or found["short"] or "", ()):
                script.environment[variable] = value.rpartition(":")[2]
    script.run(tokens_of(text, name))
    return script.commands


class _Stopped(Exception):
    """The script ends here: exit, or the replacement of its process by exec."""


class _Script(ShellState):
    """A script that is read: where it stands, and the commands found so far."""

    def __init__(self, name: str, arguments: list[str], environment: dict[str, str], folder: str, devices: int) -> None:
        super().__init__(name, arguments, environment, folder, devices)
        self.functions: set[str] = set()
        self.commands: list[Simple] = []
        self._tokens: list[Token] = []
        self._at = 0
        self._opened = 0  # how many ( ) are around what is read

    def run(self, tokens: list[Token]) -> None:
        """Read the tokens to their end."""
        self._tokens, self._at = tokens, 0
        try:
            self._list((), True)
        except _Stopped:
            return

    # --- statements ---

    def _peek(self) -> Token | None:
        return self._tokens[self._at] if self._at < len(self._tokens) else None

    def _next(self) -> Token:
        token = self._tokens[self._at]
        self._at += 1
        return token

    def _list(self, ends: tuple[str, ...], active: bool) -> bool:
        """Read commands up to one of the words; return whether the last one succeeded, as far as is known."""
        good = True
        while (token := self._peek()) is not None:
            if token.operator and token.text in ("\n", ";", "&"):
                self._at += 1
            elif token.operator and token.text in ("&&", "||", "|"):
                self._at += 1
                connector = token.text
                while (following := self._peek()) is not None and following.text == "\n":
                    self._at += 1
                runs = active and (good if connector == "&&" else not good if connector == "||" else True)
                done = self._statement(runs)
                good = done if runs and connector != "|" else good
            elif token.text in ends:
                return good
            else:
                good = self._statement(active)
        if ends:
            line = self._tokens[-1].line if self._tokens else 1
            raise self.refuse(f"a block without its '{ends[-1]}'", line)
        return good

    def _statement(self, active: bool) -> bool:
        token = self._peek()
        if token is None:
            return True
        if token.text in _GROUPS:
            return self._group(active)
        if token.operator:
            raise self.refuse(token.text.strip() or "an empty command", token.line)
        if token.text == "!":
            self._at += 1
            return not self._statement(active)
        if token.text == "if":
            return self._if(active)
        if token.text in _BLOCKS:
            if active:
                raise self.refuse(f"{token.text} ... {_BLOCKS[token.text]}", token.line)
            self._skip_block()
            return True
        if token.text == "function" or self._is_function():
            return self._function()
        return self._simple(active)

    def _group(self, active: bool) -> bool:
        """Read the commands of { ... } or ( ... ), which leaves folder and variables as they were."""
        opened = self._next()
        if opened.text == "(" and (token := self._peek()) is not None and token.text == "(":
            raise self.refuse("(( ))", opened.line)
        outside = self.folder, dict(self.variables), dict(self.environment), dict(self.arrays)
        self._opened += opened.text == "("
        good = self._list((_GROUPS[opened.text],), active)
        self._opened -= opened.text == "("
        self._next()
        while (token := self._peek()) is not None and redirects(token):
            self._at += 2  # with the name of the file
        if opened.text == "(":
            self.folder, self.variables, self.environment, self.arrays = outside
        return good

    def _if(self, active: bool) -> bool:
        self._next()
        taken = False
        while True:
            line = self._tokens[min(self._at, len(self._tokens) - 1)].line
            tested = active and not taken
            count = len(self.commands)
            good = self._list(("then",), tested)
            if tested and len(self.commands) > count:
                raise self.refuse(f"if {' '.join(self.commands[-1].words)}", line)
            self._next()
            runs = tested and good
            self._list(("elif", "else", "fi"), runs)
            taken = taken or runs
            word = self._next().text
            if word == "else":
                self._list(("fi",), active and not taken)
                word = self._next().text
            if word == "fi":
                return True

    def _skip_block(self) -> None:
        """Skip a block that is not run, with the blocks in it."""
        ends = [_BLOCKS[self._next().text]]
        while ends and self._at < len(self._tokens):
            token = self._next()
            if token.operator:
                continue
            if token.text == ends[-1]:
                ends.pop()
            elif token.text in _BLOCKS and self._starts_command(self._at - 1):
                ends.append(_BLOCKS[token.text])

    def _starts_command(self, at: int) -> bool:
        before = self._tokens[at - 1] if at else None
        return before is None or before.operator or before.text in _WORDS

    def _is_function(self) -> bool:
        after = self._tokens[self._at + 1 : self._at + 3]
        return [token.text for token in after] == ["(", ")"]

    def _function(self) -> bool:
        """Skip the definition of a function; to call it is refused."""
        if self._peek() and self._tokens[self._at].text == "function":
            self._at += 1
        self.functions.add(self._next().text)
        while (token := self._peek()) is not None and token.text in ("(", ")", "\n"):
            self._at += 1
        if (token := self._peek()) is not None and token.text in _BLOCKS:
            self._skip_block()
        return True

    def _simple(self, active: bool) -> bool:
        """Read one command with its assignments and redirections."""
        raw: list[Token] = []
        while (token := self._peek()) is not None:
            if token.operator:
                if redirects(token):
                    self._at += 2  # with the name of the file
                    continue
                if token.text in ("(", ")") and raw and raw[0].text == "[[":
                    raise self.refuse("a group in [[ ]]", token.line)
                if token.text == ")" and self._opened:
                    break
                if token.text in ("(", ")"):
                    if active:
                        raise self.refuse("( )", token.line)
                    self._at += 1
                    continue
                if raw and raw[0].text == "[[" and raw[-1].text != "]]" and token.text in ("&&", "||", "<", ">", "\n"):
                    raw.append(self._next())
                    continue
                break
            raw.append(self._next())
        return self._execute(raw) if active and raw else True

    def _execute(self, raw: list[Token]) -> bool:
        line = raw[0].line
        if raw[0].text in ("[", "[[", "test"):
            return self._test(raw)
        given: dict[str, str] = {}
        index = 0
        while index < len(raw) and (match := ASSIGNED.fullmatch(raw[index].text)):
            self.assign(match, given if self._has_command(raw) else None, line)
            index += 1
        words = [word for token in raw[index:] for word in self.fields(token)]
        if not words:
            return True
        head = words[0]
        if is_unknown(head):
            raise self.refuse(head, line)
        if head in self.functions:
            raise self.refuse(f"the function {head}", line)
        builtin = _BUILTINS.get(head)
        if builtin:
            return builtin(self, words[1:], raw[index + 1 :], line)
        if Path(head).name.startswith("python") and any(word in ("-c", "-V", "--version") for word in words[1:3]):
            self.notes.append(f"{self.name}, line {line}, is not run: {' '.join(words[:2])}")
            return True
        if Path(head).name not in _HARMLESS or (head == "env" and len(words) > 1):
            environment = {**self.environment, **given}
            self.commands.append(Simple(words, line, environment, self.folder, tuple(self.notes)))
        if head == "exec":
            raise _Stopped
        return True

    def _has_command(self, raw: list[Token]) -> bool:
        return any(not ASSIGNED.fullmatch(token.text) for token in raw)

    # --- builtins ---

    def _export(self, words: list[str], raw: list[Token], line: int) -> bool:
        """Export variables."""
        for token in raw:
            if token.text.startswith("-"):
                continue
            match = ASSIGNED.fullmatch(token.text)
            name = match[1] if match else token.text
            if match:
                self.assign(match, None, line)
            if (value := self.value(name)) is not None:
                self.put(self.environment, name, value)
        return True

    def _declare(self, words: list[str], raw: list[Token], line: int) -> bool:
        """Assign variables by declare, local, readonly or typeset."""
        for token in raw:
            if match := ASSIGNED.fullmatch(token.text):
                self.assign(match, None, line)
        return True

    def _read(self, words: list[str], raw: list[Token], line: int) -> bool:
        """Make the variables that read sets unknown."""
        for name in [word for word in words if word.isidentifier()] or ["REPLY"]:
            self.set(name, unknown(f"${name}, which is read from a terminal,"))
        return True

    def _set_options(self, words: list[str], raw: list[Token], line: int) -> bool:
        if "--" in words:
            self.arguments[1:] = words[words.index("--") + 1 :]
        self.all_exported = self.all_exported or any(re.fullmatch(r"-\w*a\w*", word) for word in words)
        return True

    def _unset(self, words: list[str], raw: list[Token], line: int) -> bool:
        for name in words:
            self.variables.pop(name, None)
            self.environment.pop(name, None)
            self.arrays.pop(name, None)
        return True

    def _cd(self, words: list[str], raw: list[Token], line: int) -> bool:
        place = next((word for word in words if not word.startswith("-")), self.environment.get("HOME", "."))
        if is_unknown(place):
            raise self.refuse(f"cd {place}", line)
        self.folder = os.path.normpath(Path(self.folder, place))
        return True

    def _shift(self, words: list[str], raw: list[Token], line: int) -> bool:
        count = words[0] if words else "1"
        if not count.isdigit():
            raise self.refuse(f"shift {count}", line)
        del self.arguments[1 : 1 + int(count)]
        return True

    def _source(self, words: list[str], raw: list[Token], line: int) -> bool:
        """Read a sourced file; an environment's activate puts its programs first."""
        if words and (name := Path(plain(words[0])).name) in _PROFILES:
            self.notes.append(f"{self.name}, line {line}, is not run: source {name}")
            return True
        if not words or is_unknown(words[0]):
            raise self.refuse(f"source {' '.join(words)}", line)
        path = Path(self.folder, words[0])
        if path.name == "activate" and len(words) == 2:  # conda's before it had its own function
            return self._conda(words, raw, line)
        if path.name == "activate" and (path.parent / "python").exists():
            activate(self.environment, path.parent.parent)
            return True
        if not path.is_file():
            raise self.refuse(f"source {words[0]}, which does not exist,", line)
        inside, self.name = self.name, words[0]
        self._within(tokens_of(path.read_text(errors="replace"), words[0]))
        self.name = inside
        return True

    def _eval(self, words: list[str], raw: list[Token], line: int) -> bool:
        self._within([Token(t.text, line, t.operator) for t in tokens_of(" ".join(words), self.name)])
        return True

    def _within(self, tokens: list[Token]) -> None:
        """Read other tokens in the place of one command."""
        outside = self._tokens, self._at
        self._tokens, self._at = tokens, 0
        self._list((), True)
        self._tokens, self._at = outside

    def _exit(self, words: list[str], raw: list[Token], line: int) -> bool:
        if words and words[0] not in ("0", "$?") and not is_unknown(words[0]):
            raise BadInput(
                f"{self.name} ends at line {line} with exit code {words[0][:40]}", hint="give it the arguments it needs"
            )
        raise _Stopped

    def _conda(self, words: list[str], raw: list[Token], line: int) -> bool:
        """Activate a conda environment, by its name or its folder."""
        if words[:1] != ["activate"] and Path(words[0] if words else "").name != "activate":
            return True
        found = conda_environment(words[1] if len(words) > 1 else "base", self.environment)
        if found is None:
            raise BadInput(
                f"{self.name}, line {line}: conda activate {plain(' '.join(words[1:]))} finds no such environment",
                hint="activate the environment before memfit, and leave the line out",
            )
        activate(self.environment, found)
        return True

    # --- conditions ---

    def _test(self, raw: list[Token]) -> bool:
        """Evaluate [ ... ], [[ ... ]] or test ..."""
        line = raw[0].line
        splits = raw[0].text != "[["
        inner = raw[1:] if raw[0].text == "test" else raw[1:-1]
        if raw[0].text != "test" and raw[-1].text not in ("]", "]]"):
            raise self.refuse(" ".join(token.text for token in raw), line)
        alternatives: list[bool] = [True]
        part: list[Token] = []
        for token in [*inner, Token("&&", line, operator=True)]:
            if token.text in ("&&", "||", "-a", "-o"):
                alternatives[-1] = self._condition(part, line, splits) and alternatives[-1]
                part = []
                if token.text in ("||", "-o"):
                    alternatives.append(True)
            elif token.text != "\n":
                part.append(token)
        return any(alternatives)

    def _condition(self, tokens: list[Token], line: int, splits: bool) -> bool:
        """Evaluate one condition. splits: as in [ ], where an unquoted word without a value is none."""
        shown = " ".join(token.text for token in tokens)
        words = [w for t in tokens for w in (self.fields(t) if splits else [self.text(t.text, line)])]
        negated = words[:1] == ["!"]
        words = words[1:] if negated else words
        if any(is_unknown(word) for word in words):
            raise self.refuse(f"[ {shown} ]", line)
        words = [for_rank(word, {}) for word in words]  # what the first task does
        if len(words) == 1:
            good = bool(words[0])
        elif len(words) == 2 and words[0] in _UNARY:
            good = _UNARY[words[0]](words[1], self)
        elif len(words) == 3 and words[1] in _BINARY:
            try:
                good = _BINARY[words[1]](words[0], words[2])
            except (ValueError, re.error):
                raise self.refuse(f"[ {shown} ]", line) from None
        else:
            raise self.refuse(f"[ {shown} ]", line)
        return good != negated


_BUILTINS: dict[str, Callable[[_Script, list[str], list[Token], int], bool]] = {
    "export": _Script._export, "declare": _Script._declare, "local": _Script._declare, "readonly": _Script._declare,
    "typeset": _Script._declare, "set": _Script._set_options, "unset": _Script._unset, "cd": _Script._cd,
    "pushd": _Script._cd, "shift": _Script._shift, "source": _Script._source, ".": _Script._source,
    "exit": _Script._exit, "return": _Script._exit, "eval": _Script._eval, "read": _Script._read,
    "conda": _Script._conda, "mamba": _Script._conda, "micromamba": _Script._conda,
    "alias": lambda *_: True, "true": lambda *_: True, "false": lambda *_: False, ":": lambda *_: True,
}  # fmt: skip
_UNARY: dict[str, Callable[[str, _Script], bool]] = {
    "-z": lambda text, _: not text, "-n": lambda text, _: bool(text),
    "-f": lambda text, script: Path(script.folder, text).is_file(),
    "-d": lambda text, script: Path(script.folder, text).is_dir(),
    "-e": lambda text, script: Path(script.folder, text).exists(),
    "-s": lambda text, script: Path(script.folder, text).is_file() and Path(script.folder, text).stat().st_size > 0,
    "-x": lambda text, script: os.access(Path(script.folder, text), os.X_OK),
    "-v": lambda text, script: script.value(text) is not None,
}  # fmt: skip
_BINARY: dict[str, Callable[[str, str], bool]] = {
    "=": fnmatch.fnmatchcase, "==": fnmatch.fnmatchcase, "!=": lambda a, b: not fnmatch.fnmatchcase(a, b),
    "=~": lambda a, b: bool(re.search(b, a)), "-eq": lambda a, b: int(a) == int(b),
    "-ne": lambda a, b: int(a) != int(b), "-lt": lambda a, b: int(a) < int(b), "-le": lambda a, b: int(a) <= int(b),
    "-gt": lambda a, b: int(a) > int(b), "-ge": lambda a, b: int(a) >= int(b),
}  # fmt: skip
