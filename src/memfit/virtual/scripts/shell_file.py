"""Read a shell script that starts a training, without a shell: variables, arrays, simple conditions, continuations.

Nothing is run. A command substitution whose value is plain ($(pwd), $(nproc), a count of cards) is computed; any
other is an unknown text, which may stand where it changes nothing (an address, the name of a log) and is refused by
name where it would be used. Loops, `case` and functions that are called are refused with their line.
"""

from __future__ import annotations

import fnmatch
import os
import re
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from memfit.errors import BadInput

_OPEN, _CLOSE, _SPACE = (
    "\ue000",
    "\ue001",
    "\ue003",
)  # around the text of what is unknown; private code points occur in no script
_UNKNOWN = re.compile(f"{_OPEN}([^{_CLOSE}]*){_CLOSE}")
_SPLIT = "\ue002"  # between fields of an expansion that stays several words
_OPERATOR = re.compile(r"&&|\|\||;;|&>>?|[0-9]*(?:>>|>&|<&|<<<|<<-?|>\||[<>])|[;&|()\n]")
_ASSIGNED = re.compile(r"([A-Za-z_]\w*)(\[\w+\])?(\+?)=(.*)", re.DOTALL)
_NAME = re.compile(r"[A-Za-z_]\w*")
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
     "sinfo", "kill", "pkill", "rm", "umask", "read")
)  # fmt: skip
_BLOCKS = {"if": "fi", "for": "done", "while": "done", "until": "done", "select": "done", "case": "esac", "{": "}"}
_WORDS = ("then", "elif", "else", "fi", "do", "done", "esac", "}")
_DEVICES = re.compile(r"nvidia-smi\b.*\bwc\b|device_count\(\)|nvidia-smi\s.*--query-gpu=count")


def unknown(text: str) -> str:
    """Return the mark of a value that only a shell would know."""
    return f"{_OPEN}{_SPACE.join(plain(text).split())}{_CLOSE}"  # no blanks, at which it would be split


def is_unknown(text: str) -> bool:
    return _OPEN in text


def plain(text: str) -> str:
    """Return a text as the script has it, without marks."""
    return _UNKNOWN.sub(r"\1", text).replace(_SPACE, " ")


@dataclass(frozen=True, slots=True)
class Simple:
    """One command of a script: its words, where it stands, and the environment and folder that it has there."""

    words: list[str]
    line: int
    environment: dict[str, str] = field(default_factory=dict)
    folder: str = ""
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class _Token:
    text: str  # raw, with quotes
    line: int
    operator: bool = False


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
    script.run(_tokens(text, name))
    return script.commands


# --- words ---


def _tokens(text: str, name: str) -> list[_Token]:
    """Split a script into raw words and operators."""
    found: list[_Token] = []
    at, line = 0, 1
    while at < len(text):
        char = text[at]
        if text.startswith("\\\n", at):
            at, line = at + 2, line + 1
        elif char in " \t\r":
            at += 1
        elif char == "#":
            end = text.find("\n", at)
            at = len(text) if end < 0 else end
        elif match := _OPERATOR.match(text, at):
            word = match[0]
            found.append(_Token(word, line, operator=True))
            at = match.end()
            line += word == "\n"
            if word.rstrip("-").endswith("<<"):
                raise BadInput(
                    f"{name}, line {line}: a here-document is not understood", hint="type the command itself"
                )
        else:
            end = _word_end(text, at, name, line)
            found.append(_Token(text[at:end], line))
            line += text.count("\n", at, end)
            at = end
    return found


def _word_end(text: str, at: int, name: str, line: int) -> int:
    """Return the end of the raw word that begins at `at`; quotes, $( ) and arrays belong to it."""
    start = at
    while at < len(text):
        char = text[at]
        if char == "\\":
            at += 2
        elif char in "'\"`":
            at = _closed(text, at, char, name, line)
        elif char == _OPEN:
            at = text.index(_CLOSE, at) + 1
        elif text.startswith(("$(", "${"), at):
            at = _balanced(text, at + 1, name, line)
        elif char == "(" and text[at - 1] == "=" and at > start:
            at = _balanced(text, at, name, line)
        elif char in " \t\r\n;&|()<>":
            break
        else:
            at += 1
    return min(at, len(text))


def _closed(text: str, at: int, quote: str, name: str, line: int) -> int:
    """Return the end of a quoted text."""
    at += 1
    while at < len(text) and text[at] != quote:
        if quote != "'" and text[at] == "\\":
            at += 2
        elif quote == '"' and text.startswith(("$(", "${"), at):
            at = _balanced(text, at + 1, name, line)
        else:
            at += 1
    if at >= len(text):
        raise BadInput(f"{name}, line {line}: {quote} is not closed", hint="bash stops there too")
    return at + 1


def _balanced(text: str, at: int, name: str, line: int) -> int:
    """Return the end of what the bracket at `at` opens."""
    opened, closed = text[at], {"(": ")", "{": "}"}[text[at]]
    depth = 0
    while at < len(text):
        char = text[at]
        if char == "\\":
            at += 2
            continue
        if char in "'\"`" and (opened == "(" or char == '"'):
            at = _closed(text, at, char, name, line)
            continue
        if char == "#" and opened == "(" and text[at - 1] in " \t\n":  # a comment between the words of an array
            at = text.find("\n", at) if "\n" in text[at:] else len(text)
            continue
        depth += (char == opened) - (char == closed)
        at += 1
        if not depth:
            return at
    raise BadInput(f"{name}, line {line}: {opened} is not closed", hint="bash stops there too")


# --- the script ---


class _Stopped(Exception):
    """The script ends here: exit, or the replacement of its process by exec."""


class _Script:
    """The state of a script that is read: variables, folder, and the commands found so far."""

    def __init__(self, name: str, arguments: list[str], environment: dict[str, str], folder: str, devices: int) -> None:
        self.name, self.arguments, self.folder, self.devices = name, arguments, folder, devices
        self.environment = environment
        self.variables: dict[str, str] = {}
        self.arrays: dict[str, list[str]] = {"BASH_SOURCE": arguments[:1]}
        self.functions: set[str] = set()
        self.notes: list[str] = []
        self.commands: list[Simple] = []
        self._all_exported = False
        self._tokens: list[_Token] = []
        self._at = 0

    def refuse(self, what: str, line: int) -> BadInput:
        return BadInput(
            f"{self.name}, line {line}: {plain(what)[:120]} is not understood: memfit runs no shell",
            hint="type the command that it comes to: memfit trace --gpu l4 -- torchrun ... train.py",
        )

    def run(self, tokens: list[_Token]) -> None:
        """Read the tokens to their end."""
        self._tokens, self._at = tokens, 0
        try:
            self._list((), True)
        except _Stopped:
            return

    # --- statements ---

    def _peek(self) -> _Token | None:
        return self._tokens[self._at] if self._at < len(self._tokens) else None

    def _next(self) -> _Token:
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
            elif not token.operator and token.text in ends:
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
        if token.operator:
            raise self.refuse(token.text.strip() or "an empty command", token.line)
        if token.text == "!":
            self._at += 1
            return not self._statement(active)
        if token.text == "if":
            return self._if(active)
        if token.text in _BLOCKS:
            if active and token.text != "{":
                raise self.refuse(f"{token.text} ... {_BLOCKS[token.text]}", token.line)
            self._skip_block()
            return True
        if token.text == "function" or self._is_function():
            return self._function()
        return self._simple(active)

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
        raw: list[_Token] = []
        while (token := self._peek()) is not None:
            if token.operator:
                if token.text[-1] in "<>" or token.text.endswith((">&", "<&", ">|", "<<<")) or token.text[0] == "&>":
                    self._at += 2  # the file's name
                    continue
                if token.text.startswith("&>"):
                    self._at += 2
                    continue
                if token.text in ("(", ")") and raw and raw[0].text == "[[":
                    raise self.refuse("a group in [[ ]]", token.line)
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

    def _execute(self, raw: list[_Token]) -> bool:
        line = raw[0].line
        if raw[0].text in ("[", "[[", "test"):
            return self._test(raw)
        given: dict[str, str] = {}
        index = 0
        while index < len(raw) and (match := _ASSIGNED.fullmatch(raw[index].text)):
            self._assign(match, given if self._has_command(raw) else None, line)
            index += 1
        words = [word for token in raw[index:] for word in self._fields(token)]
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
        if head == "python" and "-c" in words[:3]:
            self.notes.append(f"{self.name}, line {line}, is not run: python -c")
            return True
        if Path(head).name not in _HARMLESS or (head == "env" and len(words) > 1):
            environment = {**self.environment, **given}
            self.commands.append(Simple(words, line, environment, self.folder, tuple(self.notes)))
        if head == "exec":
            raise _Stopped
        return True

    def _has_command(self, raw: list[_Token]) -> bool:
        return any(not _ASSIGNED.fullmatch(token.text) for token in raw)

    def _assign(self, match: re.Match[str], given: dict[str, str] | None, line: int) -> None:
        """Make an assignment: NAME=value, NAME+=value, NAME=(words), or one for a single command (`given`)."""
        name, index, plus, raw = match.groups()
        if index:
            raise self.refuse(match[0], line)
        if raw.startswith("("):
            inner = _tokens(raw[1:-1], self.name)
            words = [word for token in inner if not token.operator for word in self._fields(token)]
            self.arrays[name] = [*self.arrays.get(name, []), *words] if plus else words
            return
        value = self._text(raw, line)
        if given is not None:
            self._put(given, name, value)
            return
        if plus and name in self.arrays:
            raise self.refuse(match[0], line)
        self.set(name, f"{self.value(name) or ''}{value}" if plus else value)

    def set(self, name: str, value: str) -> None:
        """Set a variable, which is exported if it was."""
        self.arrays.pop(name, None)
        if name in self.environment or self._all_exported:
            self._put(self.environment, name, value)
            self.variables[name] = value
        else:
            self.variables[name] = value

    def _put(self, environment: dict[str, str], name: str, value: str) -> None:
        """Export a variable; one whose value is unknown is left out, with a note."""
        if is_unknown(value):
            environment.pop(name, None)
            self.notes.append(f"{name} is not set: {plain(value)} is not run")
        else:
            environment[name] = value

    def value(self, name: str) -> str | None:
        """Return the value of a variable; None if it is not set."""
        if name in self.arrays:
            return self.arrays[name][0] if self.arrays[name] else None
        if name in self.variables:
            return self.variables[name]
        return self.environment.get(name)

    # --- builtins ---

    def _export(self, words: list[str], raw: list[_Token], line: int) -> bool:
        """Export variables; also declare, local, readonly and typeset."""
        for token in raw:
            if token.text.startswith("-"):
                continue
            match = _ASSIGNED.fullmatch(token.text)
            name = match[1] if match else token.text
            if match:
                self._assign(match, None, line)
            if (value := self.value(name)) is not None:
                self._put(self.environment, name, value)
        return True

    def _declare(self, words: list[str], raw: list[_Token], line: int) -> bool:
        for token in raw:
            if match := _ASSIGNED.fullmatch(token.text):
                self._assign(match, None, line)
        return True

    def _set_options(self, words: list[str], raw: list[_Token], line: int) -> bool:
        if "--" in words:
            self.arguments[1:] = words[words.index("--") + 1 :]
        self._all_exported = self._all_exported or any(re.fullmatch(r"-\w*a\w*", word) for word in words)
        return True

    def _unset(self, words: list[str], raw: list[_Token], line: int) -> bool:
        for name in words:
            self.variables.pop(name, None)
            self.environment.pop(name, None)
            self.arrays.pop(name, None)
        return True

    def _cd(self, words: list[str], raw: list[_Token], line: int) -> bool:
        place = next((word for word in words if not word.startswith("-")), "~")
        if is_unknown(place):
            raise self.refuse(f"cd {place}", line)
        self.folder = os.path.normpath(Path(self.folder, Path(place).expanduser()))
        return True

    def _shift(self, words: list[str], raw: list[_Token], line: int) -> bool:
        del self.arguments[1 : 1 + int(words[0] if words else 1)]
        return True

    def _source(self, words: list[str], raw: list[_Token], line: int) -> bool:
        """Read a sourced file; an environment's activate puts its programs first."""
        if not words or is_unknown(words[0]):
            raise self.refuse(f"source {' '.join(words)}", line)
        path = Path(self.folder, Path(words[0]).expanduser())
        if path.name == "activate" and (path.parent / "python").exists():
            self._put(self.environment, "VIRTUAL_ENV", str(path.parent.parent))
            self._put(self.environment, "PATH", f"{path.parent}{os.pathsep}{self.environment.get('PATH', '')}")
            return True
        if not path.is_file():
            raise self.refuse(f"source {words[0]}, which does not exist,", line)
        inside, self.name = self.name, words[0]
        self._within(_tokens(path.read_text(errors="replace"), words[0]))
        self.name = inside
        return True

    def _eval(self, words: list[str], raw: list[_Token], line: int) -> bool:
        self._within([_Token(t.text, line, t.operator) for t in _tokens(" ".join(words), self.name)])
        return True

    def _within(self, tokens: list[_Token]) -> None:
        """Read other tokens in the place of one command."""
        outside = self._tokens, self._at
        self._tokens, self._at = tokens, 0
        self._list((), True)
        self._tokens, self._at = outside

    def _exit(self, words: list[str], raw: list[_Token], line: int) -> bool:
        if words and words[0] not in ("0", "$?") and not is_unknown(words[0]):
            raise BadInput(
                f"{self.name} ends at line {line} with exit code {words[0][:40]}", hint="give it the arguments it needs"
            )
        raise _Stopped

    def _activated(self, words: list[str], raw: list[_Token], line: int) -> bool:
        """Refuse conda's own shell functions, which look for an environment by its name."""
        if words[:1] == ["activate"]:
            raise BadInput(
                f"{self.name}, line {line}: conda activate {' '.join(words[1:])} is not followed",
                hint="activate the environment before memfit, and leave the line out",
            )
        return True

    # --- conditions ---

    def _test(self, raw: list[_Token]) -> bool:
        """Evaluate [ ... ], [[ ... ]] or test ..."""
        line = raw[0].line
        inner = raw[1:] if raw[0].text == "test" else raw[1:-1]
        if raw[0].text != "test" and raw[-1].text not in ("]", "]]"):
            raise self.refuse(" ".join(token.text for token in raw), line)
        alternatives: list[bool] = [True]
        part: list[_Token] = []
        for token in [*inner, _Token("&&", line, operator=True)]:
            if token.text in ("&&", "||", "-a", "-o"):
                alternatives[-1] = self._condition(part, line) and alternatives[-1]
                part = []
                if token.text in ("||", "-o"):
                    alternatives.append(True)
            elif token.text != "\n":
                part.append(token)
        return any(alternatives)

    def _condition(self, tokens: list[_Token], line: int) -> bool:
        shown = " ".join(token.text for token in tokens)
        # an unquoted variable without a value leaves no word, as in a shell
        words = [self._text(t.text, line) for t in tokens]
        negated = words[:1] == ["!"]
        words = words[1:] if negated else words
        if any(is_unknown(word) for word in words):
            raise self.refuse(f"[ {shown} ]", line)
        if len(words) == 1:
            good = bool(words[0])
        elif len(words) == 2 and words[0] in _UNARY:
            good = _UNARY[words[0]](words[1], self)
        elif len(words) == 3 and words[1] in _BINARY:
            try:
                good = _BINARY[words[1]](words[0], words[2])
            except ValueError:
                raise self.refuse(f"[ {shown} ]", line) from None
        else:
            raise self.refuse(f"[ {shown} ]", line)
        return good != negated

    # --- expansions ---

    def _text(self, raw: str, line: int) -> str:
        """Return a raw word as one text."""
        return " ".join(self._fields(_Token(raw, line), split=False))

    def _fields(self, token: _Token, split: bool = True) -> list[str]:
        """Expand a raw word into its fields, as the shell splits them."""
        raw, line = token.text, token.line
        fields: list[str] = []
        current, quoted = "", False
        at = 0
        if raw == "~" or raw.startswith("~/"):
            current, at = str(Path("~").expanduser()), 1

        def add(value: str, whole: bool) -> None:
            nonlocal current
            parts = value.split(_SPLIT) if whole or not split else re.split(rf"[ \t\n{_SPLIT}]+", value)
            for number, part in enumerate(parts):
                if number:
                    if current or quoted:
                        fields.append(current)
                    current = ""
                current += part

        while at < len(raw):
            char = raw[at]
            if char == "\\":
                current += "" if raw[at + 1 : at + 2] == "\n" else raw[at + 1 : at + 2]
                at += 2
            elif char == "'":
                end = raw.index("'", at + 1)
                current, quoted, at = current + raw[at + 1 : end], True, end + 1
            elif char == '"':
                end = _closed(raw, at, '"', self.name, line)
                inside = self._quoted(raw[at + 1 : end - 1], line)
                quoted = quoted or inside != _SPLIT
                add("" if inside == _SPLIT else inside, whole=True)
                at = end
            elif char == _OPEN:
                end = raw.index(_CLOSE, at) + 1
                current, at = current + raw[at:end], end
            elif char in "$`":
                value, at = self._expansion(raw, at, line, inside_quotes=False)
                add(value, whole=False)
            else:
                current += char
                at += 1
        if current or quoted:
            fields.append(current)
        return fields

    def _quoted(self, raw: str, line: int) -> str:
        """Expand the inside of double quotes."""
        found, at = "", 0
        while at < len(raw):
            if raw[at] == "\\" and raw[at + 1 : at + 2] in ('"', "\\", "$", "`", "\n"):
                found += raw[at + 1].replace("\n", "")
                at += 2
            elif raw[at] in "$`":
                value, at = self._expansion(raw, at, line, inside_quotes=True)
                found += value
            else:
                found += raw[at]
                at += 1
        return found

    def _expansion(self, raw: str, at: int, line: int, inside_quotes: bool) -> tuple[str, int]:
        """Return the value of the expansion at `at`, and the position behind it."""
        if raw[at] == "`":
            end = _closed(raw, at, "`", self.name, line)
            return self._substitution(raw[at + 1 : end - 1], line), end
        if raw.startswith("$((", at):
            end = _balanced(raw, at + 1, self.name, line)
            return self._arithmetic(raw[at + 3 : end - 2], line), end
        if raw.startswith("$(", at):
            end = _balanced(raw, at + 1, self.name, line)
            return self._substitution(raw[at + 2 : end - 1], line), end
        if raw.startswith("${", at):
            end = _balanced(raw, at + 1, self.name, line)
            return self._parameter(raw[at + 2 : end - 1], line, inside_quotes), end
        if match := _NAME.match(raw, at + 1):
            return self._plain_value(match[0]), match.end()
        special = raw[at + 1 : at + 2]
        if special and special in "@*#?$!0123456789-":
            return self._special(special, inside_quotes), at + 2
        return "$", at + 1

    def _plain_value(self, name: str) -> str:
        if name == "RANDOM":
            return "12345"
        if name in ("PWD", "OLDPWD") and name not in self.variables:
            return self.folder
        return self.value(name) or ""

    def _special(self, name: str, inside_quotes: bool) -> str:
        values = self.arguments[1:]
        if name == "@" and inside_quotes:
            return _SPLIT.join(values) if values else _SPLIT
        if name in "@*":
            return " ".join(values)
        if name == "#":
            return str(len(values))
        if name.isdigit():
            return self.arguments[int(name)] if int(name) < len(self.arguments) else ""
        return {"?": "0", "$": "1", "!": "1", "-": ""}[name]

    def _parameter(self, inner: str, line: int, inside_quotes: bool) -> str:
        """Return the value of ${inner}."""
        match = re.match(r"(#?)([A-Za-z_]\w*|[0-9]+|[@*#])(\[([^\]]*)\])?(.*)", inner, re.DOTALL)
        if match is None or inner.startswith("!"):
            raise self.refuse(f"${{{inner}}}", line)
        length, name, _, index, rest = match.groups()
        value: str | None
        if index is not None and index in "@*":
            words = self.arrays.get(name, [v] if (v := self.value(name)) is not None else [])
            if length:
                return str(len(words))
            joined = _SPLIT.join(words) if inside_quotes and index == "@" else " ".join(words)
            value = joined if words else _SPLIT if inside_quotes else None
        elif index is not None:
            if not index.lstrip("-").isdigit():
                raise self.refuse(f"${{{inner}}}", line)
            held = self.arrays.get(name, [])
            value = held[int(index)] if -len(held) <= int(index) < len(held) else None
        elif name in "@*#" or name.isdigit():
            value = (
                self._special(name, inside_quotes) if not name.isdigit() or int(name) < len(self.arguments) else None
            )
        else:
            value = self._plain_value(name) if name in ("RANDOM", "PWD") else self.value(name)
        if length:
            return str(len(value or ""))
        return self._modified(name, value, rest, inner, line)

    def _modified(self, name: str, value: str | None, rest: str, inner: str, line: int) -> str:
        """Apply what follows a parameter's name: a default, a prefix or suffix to remove, a replacement."""
        if not rest:
            return value or ""
        match = re.match(r"(:?[-=+?]|##?|%%?|//?)(.*)", rest, re.DOTALL)
        if match is None:
            raise self.refuse(f"${{{inner}}}", line)
        operator, operand = match.groups()
        absent = value is None or (operator[0] == ":" and not value)
        kind = operator[-1]
        if kind == "?" and absent:
            raise BadInput(f"{self.name}, line {line}: {name} is not set", hint=f"{name}=VALUE bash {self.name}")
        if kind in "-=":
            chosen = self._text(operand, line) if absent else value or ""
            if kind == "=" and absent:
                self.set(name, chosen)
            return chosen
        if kind in "+?":
            return value or "" if kind == "?" else "" if absent else self._text(operand, line)
        if is_unknown(value or ""):
            return unknown(f"${{{inner}}}")
        pattern, _, new = (
            self._text(operand, line).partition("/") if kind == "/" else (self._text(operand, line), "", "")
        )
        text = value or ""
        if kind == "/":
            return text.replace(pattern, new, -1 if operator == "//" else 1)
        cuts = range(len(text) + 1) if operator in ("#", "%%") else range(len(text), -1, -1)
        for cut in cuts:
            kept, removed = (text[cut:], text[:cut]) if kind == "#" else (text[:cut], text[cut:])
            if fnmatch.fnmatchcase(removed, pattern):
                return kept
        return text

    def _arithmetic(self, inner: str, line: int) -> str:
        """Return the value of $((inner)): whole numbers with + - * / % and brackets."""
        text = re.sub(r"\$?\{?([A-Za-z_]\w*)(\[@\])?\}?", lambda m: self.value(m[1]) or "0", self._quoted(inner, line))
        if is_unknown(text):
            return unknown(f"$(({inner}))")
        if not re.fullmatch(r"[\d\s+*/%()-]+", text) or "**" in text:
            raise self.refuse(f"$(({inner}))", line)
        try:
            return str(int(eval(text.replace("//", "/").replace("/", "//"), {"__builtins__": {}})))
        except (SyntaxError, ZeroDivisionError, TypeError):
            raise self.refuse(f"$(({inner}))", line) from None

    def _substitution(self, inner: str, line: int) -> str:
        """Return what a command would print, for the few whose answer is plain; else the mark of an unknown text."""
        if _DEVICES.search(inner):
            return str(self.devices)
        try:
            tokens = _without_redirections(_tokens(inner, self.name))
            words = [word for token in tokens for word in self._fields(token)]
        except (BadInput, ValueError):
            return unknown(f"$({inner})")
        if [t.text for t in tokens[2:]] == ["&&", "pwd"] and tokens[0].text == "cd" and not is_unknown(words[1]):
            return os.path.normpath(Path(self.folder, words[1]))
        if any(token.operator for token in tokens) or any(map(is_unknown, words)) or not words:
            if words[:2] == ["scontrol", "show"]:
                return "localhost"
            return unknown(f"$({inner})")
        answer = _ANSWERS.get(words[0])
        found = answer(self, [w for w in words[1:] if not w.startswith("-")]) if answer else None
        return unknown(f"$({inner})") if found is None else found


def _without_redirections(tokens: list[_Token]) -> list[_Token]:
    """Return the tokens of one line without `> file` and `2>&1`."""
    kept: list[_Token] = []
    redirected = False
    for token in tokens:
        if redirected or token.text == "\n":
            redirected = False
        elif token.operator and (token.text.endswith(("<", ">", ">&", "<&", ">|")) or token.text.startswith("&>")):
            redirected = True
        else:
            kept.append(token)
    return kept


def _of_path(change: Callable[[str], str]) -> Callable[[_Script, list[str]], str | None]:
    return lambda script, words: change(words[0]) if len(words) == 1 else None


def _resolved(script: _Script, words: list[str]) -> str | None:
    return str(Path(script.folder, words[0]).resolve()) if len(words) == 1 else None


def _date(script: _Script, words: list[str]) -> str | None:
    if not words:
        return time.strftime("%c")
    return time.strftime(words[0][1:]) if len(words) == 1 and words[0].startswith("+") else None


# program -> what it prints
_ANSWERS: dict[str, Callable[[_Script, list[str]], str | None]] = {
    "pwd": lambda script, words: script.folder,
    "dirname": _of_path(os.path.dirname),
    "basename": _of_path(os.path.basename),
    "realpath": _resolved,
    "readlink": _resolved,
    "date": _date,
    "nproc": lambda script, words: str(os.cpu_count() or 1),
    "hostname": lambda script, words: "localhost",
    "whoami": lambda script, words: os.environ.get("USER", "root"),
    "echo": lambda script, words: " ".join(words),
}
_BUILTINS: dict[str, Callable[[_Script, list[str], list[_Token], int], bool]] = {
    "export": _Script._export, "declare": _Script._declare, "local": _Script._declare, "readonly": _Script._declare,
    "typeset": _Script._declare, "set": _Script._set_options, "unset": _Script._unset, "cd": _Script._cd,
    "pushd": _Script._cd, "shift": _Script._shift, "source": _Script._source, ".": _Script._source,
    "exit": _Script._exit, "return": _Script._exit, "eval": _Script._eval, "conda": _Script._activated,
    "mamba": _Script._activated, "micromamba": _Script._activated, "alias": lambda *_: True,
    "true": lambda *_: True, "false": lambda *_: False, ":": lambda *_: True,
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
