"""Words of a shell script and what they expand to: quotes, variables, arrays, arithmetic, plain substitutions.

A text that only a shell would know is marked as unknown and travels on, so that it can be refused where it is used.
"""

from __future__ import annotations

import ast
import fnmatch
import operator
import os
import re
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from memfit.errors import BadInput

RANK, LOCAL_RANK, NODE_RANK = "\ue010", "\ue011", "\ue012"  # stand for each process's own number
# around the text of what is unknown, and for its blanks; private code points occur in no script
_OPEN, _CLOSE, _SPACE = "\ue000", "\ue001", "\ue003"
_UNKNOWN = re.compile(f"{_OPEN}([^{_OPEN}{_CLOSE}]*){_CLOSE}")
_SPLIT = "\ue002"  # between fields of an expansion that stays several words
_EMPTY = "\ue004"  # in place of an empty "$@" or "${A[@]}", which is no word where it stands alone
_OPERATOR = re.compile(r"&&|\|\||;;|&>>?|[0-9]*(?:>>|>&|<&|<<<|<<-?|>\||[<>])|[;&|()\n]")
ASSIGNED = re.compile(r"([A-Za-z_]\w*)(\[\w+\])?(\+?)=(.*)", re.DOTALL)
_NAME = re.compile(r"[A-Za-z_]\w*")
# how scripts count the numbers of CUDA_VISIBLE_DEVICES
_COUNTED = re.compile(
    r"""echo\s+(\S+)\s*\|\s*(?:tr\s+['"]?,['"]?\s+['"]?(?:\\n|\s)['"]?\s*\|\s*wc\s+-[lw]"""
    r"""|awk\s+-F\s?['"]?,['"]?\s+'\{\s*print\s+NF;?\s*\}')\s*"""
)
_DEVICES = re.compile(r"nvidia-smi\b.*\bwc\b|device_count\(\)|nvidia-smi\s.*--query-gpu=count")


def unknown(text: str) -> str:
    """Return the mark of a value that only a shell would know."""
    return f"{_OPEN}{_SPACE.join(plain(text).split())}{_CLOSE}"  # no blanks, at which it would be split


def is_unknown(text: str) -> bool:
    """Return whether a text holds something that only a shell would know."""
    return _OPEN in text


def plain(text: str) -> str:
    """Return a text as the script has it, without marks."""
    return _UNKNOWN.sub(r"\1", text).replace(_SPACE, " ")


def for_rank(text: str, environment: Mapping[str, str]) -> str:
    """Return a text with the numbers of the process whose environment is given in place of their marks."""
    for mark, name in ((RANK, "RANK"), (LOCAL_RANK, "LOCAL_RANK"), (NODE_RANK, "NODE_RANK")):
        text = text.replace(mark, environment.get(name, "0"))
    return text


def export(environment: dict[str, str], name: str, value: str, notes: list[str]) -> None:
    """Set a variable of an environment; one whose value is unknown is left out, with a note."""
    if is_unknown(value):
        environment.pop(name, None)
        notes.append(f"{name} is not set: {plain(value)} is not run")
    else:
        environment[name] = value


@dataclass(frozen=True, slots=True)
class Token:
    """A word as it is written, with its quotes, or an operator."""

    text: str
    line: int
    operator: bool = False


def tokens_of(text: str, name: str) -> list[Token]:
    """Split a script into raw words and operators."""
    found: list[Token] = []
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
            found.append(Token(word, line, operator=True))
            at = match.end()
            line += word == "\n"
            if word.rstrip("-").endswith("<<"):
                raise BadInput(
                    f"{name}, line {line}: a here-document is not understood", hint="type the command itself"
                )
        else:
            end = _end(text, at, "", name, line)
            found.append(Token(text[at:end], line))
            line += text.count("\n", at, end)
            at = end
    return found


# what ends a text -> what opens another one inside it, and what ends that; "" is the end of a word
_INSIDE = {
    "": {"'": "'", '"': '"', "`": "`", "$(": ")", "${": "}", "=(": ")", _OPEN: _CLOSE},
    '"': {"$(": ")", "${": "}"},
    ")": {"'": "'", '"': '"', "`": "`", "(": ")"},
    "}": {'"': '"', "{": "}"},
}
_PLAIN = ("'", _CLOSE)  # end texts in which a backslash is one


def _end(text: str, at: int, closed: str, name: str, line: int) -> int:
    """Return the position behind the text at `at` that `closed` ends; quotes, $( ) and arrays in it are skipped."""
    ends = [closed]
    while at < len(text):
        char, inside = text[at], ends[-1]
        if char == inside:
            at += 1
            ends.pop()
            if not ends:
                return at
        elif char == "\\" and inside not in _PLAIN:
            at += 2
        elif not inside and char in " \t\r\n;&|()<>":
            return at
        elif inside == ")" and char == "#" and text[at - 1] in " \t\n":  # a comment between the words of an array
            at = text.find("\n", at) if "\n" in text[at:] else len(text)
        elif opened := next((mark for mark in _INSIDE.get(inside, ()) if text.startswith(mark, at)), ""):
            ends.append(_INSIDE[inside][opened])
            at += len(opened)
        else:
            at += 1
    if ends[-1]:
        opened = {")": "(", "}": "{"}.get(ends[-1], ends[-1])
        raise BadInput(f"{name}, line {line}: {opened} is not closed", hint="bash stops there too")
    return len(text)


class ShellState:
    """The variables, arrays, arguments and folder of a script that is read, and what its words expand to."""

    def __init__(self, name: str, arguments: list[str], environment: dict[str, str], folder: str, devices: int) -> None:
        self.name, self.arguments, self.folder, self.devices = name, arguments, folder, devices
        self.environment = environment
        self.variables: dict[str, str] = {}
        self.arrays: dict[str, list[str]] = {"BASH_SOURCE": arguments[:1]}
        self.notes: list[str] = []
        self.all_exported = False

    def refuse(self, what: str, line: int) -> BadInput:
        return BadInput(
            f"{self.name}, line {line}: {plain(what)[:120]} is not understood: memfit runs no shell",
            hint="type the command that it comes to: memfit trace --gpu l4 -- torchrun ... train.py",
        )

    def assign(self, match: re.Match[str], given: dict[str, str] | None, line: int) -> None:
        """Make an assignment: NAME=value, NAME+=value, NAME=(words), or one for a single command (`given`)."""
        name, index, plus, raw = match.groups()
        if index:
            raise self.refuse(match[0], line)
        if raw.startswith("("):
            inner = tokens_of(raw[1:-1], self.name)
            words = [word for token in inner if not token.operator for word in self.fields(token)]
            self.arrays[name] = [*self.arrays.get(name, []), *words] if plus else words
            return
        value = self.text(raw, line)
        if given is not None:
            self.put(given, name, value)
            return
        if plus and name in self.arrays:
            raise self.refuse(match[0], line)
        self.set(name, f"{self.value(name) or ''}{value}" if plus else value)

    def set(self, name: str, value: str) -> None:
        """Set a variable, which is exported if it was."""
        self.arrays.pop(name, None)
        self.variables[name] = value
        if name in self.environment or self.all_exported:
            self.put(self.environment, name, value)

    def put(self, environment: dict[str, str], name: str, value: str) -> None:
        """Export a variable."""
        export(environment, name, value, self.notes)

    def value(self, name: str) -> str | None:
        """Return the value of a variable; None if it is not set."""
        if name in self.arrays:
            return self.arrays[name][0] if self.arrays[name] else None
        if name in self.variables:
            return self.variables[name]
        return self.environment.get(name)

    # --- expansions ---

    def text(self, raw: str, line: int) -> str:
        """Return a raw word as one text."""
        return " ".join(self.fields(Token(raw, line), split=False))

    def fields(self, token: Token, split: bool = True) -> list[str]:
        """Expand a raw word into its fields, as the shell splits them."""
        raw, line = token.text, token.line
        fields: list[str] = []
        current, quoted = "", False
        at = 0
        if raw == "~" or raw.startswith("~/"):
            current, at = self.environment.get("HOME", raw[0]), 1

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
                end = _end(raw, at + 1, '"', self.name, line)
                inside = self._quoted(raw[at + 1 : end - 1], line)
                quoted = quoted or inside != _EMPTY
                add(inside.replace(_EMPTY, ""), whole=True)
                at = end
            elif char == _OPEN:
                end = raw.index(_CLOSE, at) + 1
                current, at = current + raw[at:end], end
            elif raw.startswith("$'", at):
                end = raw.index("'", at + 2)
                current += raw[at + 2 : end].encode("latin-1", "backslashreplace").decode("unicode_escape")
                quoted, at = True, end + 1
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
            end = _end(raw, at + 1, "`", self.name, line)
            return self._substitution(raw[at + 1 : end - 1], line), end
        if raw.startswith("$((", at):
            end = _end(raw, at + 2, ")", self.name, line)
            return self._arithmetic(raw[at + 3 : end - 2], line), end
        if raw.startswith("$(", at):
            end = _end(raw, at + 2, ")", self.name, line)
            return self._substitution(raw[at + 2 : end - 1], line), end
        if raw.startswith("${", at):
            end = _end(raw, at + 2, "}", self.name, line)
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
            return _SPLIT.join(values) if values else _EMPTY
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
            value = joined if words else _EMPTY if inside_quotes and index == "@" and not rest else None
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
            chosen = self.text(operand, line) if absent else value or ""
            if kind == "=" and absent:
                self.set(name, chosen)
            return chosen
        if kind in "+?":
            return value or "" if kind == "?" else "" if absent else self.text(operand, line)
        if is_unknown(value or ""):
            return unknown(f"${{{inner}}}")
        pattern, _, new = self.text(operand, line).partition("/") if kind == "/" else (self.text(operand, line), "", "")
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
        try:
            return str(_computed(ast.parse(text.strip(), mode="eval").body))
        except (SyntaxError, ZeroDivisionError, KeyError):
            raise self.refuse(f"$(({inner}))", line) from None

    def _substitution(self, inner: str, line: int) -> str:
        """Return what a command would print, for the few whose answer is plain; else the mark of an unknown text."""
        if _DEVICES.search(inner):
            return str(self.devices)
        if match := _COUNTED.fullmatch(inner):
            counted = self.text(match[1], line)
            return unknown(f"$({inner})") if is_unknown(counted) else str(counted.count(",") + 1)
        try:
            tokens = _without_redirections(tokens_of(inner, self.name))
            words = [word for token in tokens for word in self.fields(token)]
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


def _computed(node: ast.expr) -> int:
    """Return the value of an expression of whole numbers as C computes it: a quotient is cut off towards zero."""
    if isinstance(node, ast.Constant) and type(node.value) is int:
        return node.value
    if isinstance(node, ast.UnaryOp):
        return _SIGNS[type(node.op)] * _computed(node.operand)
    if not isinstance(node, ast.BinOp):
        raise KeyError(type(node).__name__)
    left, right = _computed(node.left), _computed(node.right)
    if isinstance(node.op, ast.Div | ast.Mod):
        quotient = abs(left) // abs(right) * (1 if (left < 0) == (right < 0) else -1)
        return quotient if isinstance(node.op, ast.Div) else left - quotient * right
    return _ARITHMETIC[type(node.op)](left, right)


def _expr(words: list[str]) -> str | None:
    """Return what `expr` prints for whole numbers and + - * / %; None for anything else."""
    try:
        return str(_computed(ast.parse(" ".join(words), mode="eval").body))
    except (SyntaxError, KeyError, ZeroDivisionError, RecursionError):
        return None


_SIGNS: dict[type[ast.unaryop], int] = {ast.USub: -1, ast.UAdd: 1}
_ARITHMETIC: dict[type[ast.operator], Callable[[int, int], int]] = {
    ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul,
}  # fmt: skip


def redirects(token: Token) -> bool:
    """Return whether a token is followed by the name of a file, as in `> log` and `2>&1`."""
    return token.operator and (token.text[-1] in "<>" or token.text.endswith((">&", "<&", ">|")))


def _without_redirections(tokens: list[Token]) -> list[Token]:
    """Return the tokens of one line without `> file` and `2>&1`."""
    before = [None, *tokens]
    pairs = zip(before, tokens, strict=False)
    return [t for b, t in pairs if t.text != "\n" and not redirects(t) and not (b is not None and redirects(b))]


def _basename(_: ShellState, words: list[str]) -> str | None:
    name = Path(words[0]).name if words else ""
    return name.removesuffix(words[1]) if len(words) == 2 else name if words else None


def _resolved(script: ShellState, words: list[str]) -> str | None:
    return str(Path(script.folder, words[0]).resolve()) if len(words) == 1 else None


def _date(script: ShellState, words: list[str]) -> str | None:
    if not words:
        return time.strftime("%c")
    return time.strftime(words[0][1:]) if len(words) == 1 and words[0].startswith("+") else None


# program -> what it prints
_ANSWERS: dict[str, Callable[[ShellState, list[str]], str | None]] = {
    "pwd": lambda script, words: script.folder,
    "dirname": lambda script, words: str(Path(words[0]).parent) if len(words) == 1 else None,
    "basename": _basename,
    "realpath": _resolved,
    "readlink": _resolved,
    "date": _date,
    "expr": lambda script, words: _expr(words),
    "nproc": lambda script, words: str(os.cpu_count() or 1),
    "hostname": lambda script, words: "localhost",
    "whoami": lambda script, words: os.environ.get("USER", "root"),
    "echo": lambda script, words: " ".join(words),
    **dict.fromkeys(  # eval "$(conda shell.bash hook)" defines the function conda
        ("conda", "mamba", "micromamba"), lambda script, words: "" if "hook" in words else None
    ),
}
