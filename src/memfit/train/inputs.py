"""What a run reads, known again by its content: a run that is resumed must find the data and the model that it began with."""

from __future__ import annotations

from collections.abc import Callable
from hashlib import blake2b
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO

from memfit.errors import BadInput
from memfit.units import KIB, MIB

if TYPE_CHECKING:
    from memfit.nouns.plan import Plan

OF_A_MODEL = ("*.json", "*.model", "*.txt", "*.jinja", "*.safetensors", "*.bin")
LARGE = 64 * MIB  # bytes: of larger weights samples are read, they may be hundreds of gigabytes
SAMPLES, SAMPLE = 64, 64 * KIB  # how many, spread evenly, and of how many bytes


def digests(plan: Plan) -> dict[str, str]:
    """Path -> digest of everything on this machine that the plan's training reads; what is on the Hub has none."""
    job = plan.job
    read = {name: _of_file for name in (job.dataset, job.training.eval_data) if name and Path(name).is_file()}
    model = job.architecture.name
    return {name: of(Path(name)) for name, of in read.items()} | (
        {model: _of_model(Path(model))} if Path(model).is_dir() else {}
    )


def check_unchanged(plan: Plan, began: dict[str, str], tell: Callable[[str], None]) -> None:
    """Raises BadInput where data or model are not those the run `began` with: it would skip samples or train them twice.

    Other evaluation data only make losses that cannot be compared: `tell` says so.
    """
    job = plan.job
    for name, before in began.items():
        path = Path(name)
        if not path.exists():
            raise BadInput(f"{name}, which the run reads, is gone", hint="put it back; what was trained is safe")
        if (_of_model if path.is_dir() else _of_file)(path) == before:
            continue
        if name == job.training.eval_data != job.dataset:
            tell(f"{name} has changed since the run began: its evaluation losses cannot be compared with earlier ones")
            continue
        what = "the model" if path.is_dir() else "the data"
        raise BadInput(
            f"{name} has changed since the run began",
            hint=f"put {what} back as it was, or start a new run: --out DIR for another folder, --force for this one",
        )


def _of_file(path: Path) -> str:
    found = blake2b(digest_size=16)
    with path.open("rb") as file:
        while part := file.read(MIB):
            found.update(part)
    return found.hexdigest()


def _of_model(folder: Path) -> str:
    """Of its configuration, tokenizer and weights, by name; not of what else lies there."""
    found = blake2b(digest_size=16)
    for path in sorted({path for pattern in OF_A_MODEL for path in folder.glob(pattern) if path.is_file()}):
        size = path.stat().st_size
        found.update(f"{path.name} {size}\n".encode())
        if size <= LARGE:
            found.update(path.read_bytes())
            continue
        with path.open("rb") as file:
            for at in range(SAMPLES):
                found.update(_sample(file, (size - SAMPLE) * at // (SAMPLES - 1)))
    return found.hexdigest()


def _sample(file: BinaryIO, offset: int) -> bytes:
    file.seek(offset)
    return file.read(SAMPLE)
