"""The nouns of `memfit diff`: one job in two environments, what moved, and the lines of libraries that decide it."""

from __future__ import annotations

from dataclasses import dataclass

from memfit.errors import EXIT_FITS
from memfit.nouns.check import EXITS, JobAnswer, JobDifference
from memfit.nouns.tape import Role


@dataclass(frozen=True, slots=True)
class VersionChange:
    """A library whose version differs; "" where an environment does not have it."""

    library: str
    base: str
    head: str


@dataclass(frozen=True, slots=True)
class LibraryPlace:
    """A line of an installed library that decides of bytes, in a function that the two environments have differently.

    file: relative to site-packages. code: the line's text. only_base: the line is that of the first environment, whose
    tensors the second no longer has. keeps: the function allocates nothing; it reads tensors that one side keeps.
    added: bytes of all tensors of which this line decides.
    """

    library: str
    file: str
    line: int
    function: str
    code: str
    only_base: bool
    versions: tuple[str, str]
    keeps: bool = False
    added: int = 0

    @property
    def place(self) -> str:
        """Return 'transformers/loss/loss_utils.py:46'."""
        return f"{self.file}:{self.line}"


@dataclass(frozen=True, slots=True)
class TensorChange:
    """The bytes of one kind of tensor at the worst instant: of a module, made by an operator.

    lines: file:line that allocate them, the innermost first, of the second environment, or of the first where only it
    has them. decided: None where no function that allocates or reads them differs between the environments.
    """

    role: Role
    label: str
    base: int
    head: int
    lines: tuple[str, ...] = ()
    decided: LibraryPlace | None = None

    @property
    def added(self) -> int:
        return self.head - self.base


@dataclass(frozen=True, slots=True)
class Upgrade:
    """One job in two environments. versions: those that differ among the libraries that allocate or train."""

    title: str
    card: str
    environments: tuple[str, str]
    versions: tuple[VersionChange, ...]
    base: JobAnswer
    head: JobAnswer
    difference: JobDifference
    tensors: tuple[TensorChange, ...]
    places: tuple[LibraryPlace, ...]

    @property
    def exit_code(self) -> int:
        """Return the exit code of the second environment's verdict; a leak there does not fit."""
        return EXITS["misfit"] if self.head.leaks else EXITS.get(self.head.verdict, EXIT_FITS)
