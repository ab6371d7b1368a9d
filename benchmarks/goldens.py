"""Hold traces of Megatron-LM to the memory that NVIDIA's own tests recorded.

usage: python benchmarks/goldens.py [CSV] --megatron DIR [--transformer-engine DIR] [--only TEXT] [--answer NAME=VALUE]
                                    [--jobs N] [--list]

The CSV has a row for each functional test of Megatron-LM and each environment that it was recorded in: the test's
arguments, and the highest and the current allocated bytes of the last rank. DIR is a clone of Megatron-LM. Each case is
traced once, as `memfit trace --ranks last -- torchrun ... pretrain_gpt.py ...` with mock data, and what Megatron-LM
itself logs of its memory is compared with the nearest environment. The interpreter needs PyTorch, einops and pybind11,
and Megatron-LM compiles its index of samples with a C++ compiler.

Most tests use layers of Transformer Engine. Its Python is a checkout of version 2.17 (--transformer-engine DIR; not
built), or is installed; onnxscript and pydantic, which it imports, must be there. Its kernels are memfit's stand-in.

Prints the cases, what does not run and why, and the bars; exits with 1 where a bar is missed.
"""

from __future__ import annotations

import argparse
import csv
import importlib.util
import json
import os
import random
import struct
import subprocess
import sys
import tempfile
from array import array
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
DATA = HERE.parents[1] / "shared" / "data" / "parallel" / "megatron_golden.csv"
HIGHEST, CURRENT = "mem-max-allocated-bytes", "mem-allocated-bytes"
# of a row that does not say how many: NVIDIA's tests run on one DGX, or on machines of four GB200 (`_1node`: on one)
GPUS, GPUS_OF_ONE_NODE = 8, 4
PATIENCE = 900  # seconds for one case
EVEN = "routing=balanced"  # of experts, without a second trace with an uneven one
STEPS = 2  # the first makes the optimizer's states, the second has them from its start
# Left out: files that are not there (data, tokenizers, checkpoints), and what logs to a service.
_FILES = (
    "--data-path", "--vocab-file", "--merge-file", "--tokenizer-type", "--tokenizer-model", "--tiktoken-pattern",
    "--save", "--load", "--tensorboard-dir", "--data-cache-path", "--no-mmap-bin-files", "--use-checkpoint-args",
    "--async-save", "--use-persistent-ckpt-worker", "--async-ckpt-use-cpu-shm", "--async-strategy",
    "--wandb-project", "--wandb-exp-name", "--wandb-save-dir", "--wandb-entity", "--mock-data", "--vocab-size",
    "--log-energy", "--exit-duration-in-mins",
)  # fmt: skip
_GPT2 = 50256  # the tests' byte-pair vocabulary without its end of text, which NullTokenizer adds
_SCRIPTS = {  # family -> the script that its tests run; others need several models or an environment of their own
    "gpt": "pretrain_gpt.py", "moe": "pretrain_gpt.py", "mixtral": "pretrain_gpt.py", "nemotron": "pretrain_hybrid.py",
    "t5": "examples/t5/pretrain_t5.py", "bert": "examples/bert/pretrain_bert.py", "multimodal-llava": "pretrain_vlm.py",
}  # fmt: skip
# family whose datasets have no mock -> (its tokenizer, words of the vocabulary of bert-large-cased and -uncased)
_MASKED = {"t5": ("BertWordPieceCase", 28996), "bert": ("BertWordPieceLowerCase", 30522)}
# of the data for these: nine in 100,000 documents have to be some, for a split of T5's tests
_DOCUMENTS, _SENTENCES, _TOKENS = 24_000, 2, 32
_CARDS = (("h100", "h100"), ("a100", "a100-80gb"), ("gb200", "gb200"))  # (part of an environment's name, card)


@dataclass(frozen=True, slots=True)
class Case:
    """One functional test. recorded: environment -> (highest, current) allocated bytes of the last rank."""

    family: str
    name: str
    arguments: dict[str, Any]
    variables: dict[str, Any]
    recorded: dict[str, tuple[int, int]]
    nodes: int = 1
    per_node: int = GPUS

    @property
    def local(self) -> bool:
        """Return whether its layers are Megatron-LM's own; Transformer Engine's are the default."""
        return bool(self.arguments.get("--transformer-impl") == "local")

    @property
    def moe(self) -> bool:
        return "--num-experts" in self.arguments

    @property
    def fp8(self) -> bool:
        return "--fp8-format" in self.arguments

    @property
    def divisible(self) -> bool:
        """Return whether its parallel groups, those of experts too, divide its cards."""
        tensor, pipeline, context, expert, of_expert = (
            int(self.arguments.get(f"--{name}-parallel-size", 0))
            for name in ("tensor-model", "pipeline-model", "context", "expert-model", "expert-tensor")
        )
        tensor, pipeline = max(tensor, 1), max(pipeline, 1)
        cards, experts = self.nodes * self.per_node, max(expert, 1) * (of_expert or tensor)
        return not (cards % (tensor * pipeline * max(context, 1)) or cards % (experts * pipeline))

    @property
    def card(self) -> str:
        """Return the card to trace it on: an H100 where the test was recorded on one."""
        return next((card for part, card in _CARDS if any(part in name for name in self.recorded)), "a100-80gb")


def read_cases(path: Path, only: str = "") -> list[Case]:
    """Read the cases whose name contains `only`."""
    csv.field_size_limit(1 << 30)
    rows = defaultdict(list)
    with path.open(newline="") as file:
        for row in csv.DictReader(file):
            if only in row["case"] and row[f"{HIGHEST}.max"]:  # some recorded only what is alive after a step
                rows[row["family"], row["case"]].append(row)
    return [_case(family, name, found) for (family, name), found in rows.items()]


def _case(family: str, name: str, rows: Sequence[dict[str, str]]) -> Case:
    recorded = {row["env"]: (_bytes(row[f"{HIGHEST}.max"]), _bytes(row[f"{CURRENT}.max"])) for row in rows}
    best = max(rows, key=lambda row: ("h100" in row["env"], bool(row["nodes"])))
    return Case(
        family, name, json.loads(best["all_args"]), json.loads(best["env_vars"] or "{}"), recorded,
        int(best["nodes"] or 1), int(best["gpus_per_node"] or (GPUS_OF_ONE_NODE if name.endswith("_1node") else GPUS)),
    )  # fmt: skip


def _bytes(text: str) -> int:
    return int(float(text or 0))


# --- the command line ---


def words(case: Case, folder: Path) -> list[str]:
    """Return Megatron-LM's arguments of a case, with mock data, or with what `write_data` has written to `folder`."""
    found: list[str] = []
    for name, value in case.arguments.items():
        if name not in _FILES:
            found += [name, *_values(value)]
    found += ["--tensorboard-dir", "tensorboard"]
    if case.family in _MASKED:
        tokenizer, _ = _MASKED[case.family]
        vocabulary, data = (str(folder / name) for name in ("vocabulary.txt", "data"))
        return [*found, "--data-path", data, "--vocab-file", vocabulary, "--tokenizer-type", tokenizer]
    vocabulary = str(int(case.arguments.get("--vocab-size", _GPT2 + 1)) - 1)
    return [*found, "--mock-data", "--tokenizer-type", "NullTokenizer", "--vocab-size", vocabulary]


def write_data(family: str, folder: Path) -> None:
    """Write one random document many times as Megatron-LM's indexed dataset, and a vocabulary, where mocks lack."""
    if family not in _MASKED:
        return
    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    _, size = _MASKED[family]
    (folder / "vocabulary.txt").write_text("\n".join([*special, *(f"word{n}" for n in range(size - len(special)))]))
    count, chance = _DOCUMENTS * _SENTENCES, random.Random(0)
    document = array("i", (chance.randrange(len(special), size) for _ in range(_SENTENCES * _TOKENS)))
    tokens = document * _DOCUMENTS
    (folder / "data.bin").write_bytes(tokens.tobytes())
    starts = array("q", (n * _TOKENS * tokens.itemsize for n in range(count)))
    documents = array("q", range(0, count + 1, _SENTENCES))
    head = b"MMIDIDX\0\0" + struct.pack("<QBQQ", 1, 4, count, len(documents))  # version 1 of int32 tokens
    lengths = array("i", [_TOKENS] * count)
    (folder / "data.idx").write_bytes(head + lengths.tobytes() + starts.tobytes() + documents.tobytes())


def _values(value: Any) -> list[str]:
    """Return the words after an argument: none for a flag, several for a list, which is written [a b]."""
    if value is True:
        return []
    text = str(value)
    if text.startswith("["):
        return text.strip("[]").split()
    return [text] if text.startswith("(") else text.split()


def command(case: Case, folder: Path = Path("DATA"), answers: Sequence[str] = ()) -> list[str]:
    """Return the whole command that traces the last rank of a case. folder: where its data lies."""
    cards = case.nodes * case.per_node
    return [
        sys.executable, "-m", "memfit", "trace", "--gpu", f"{cards}x{case.card}", "--gpus-per-node", str(case.per_node),
        "--ranks", "last", "--steps", str(STEPS), "--json",
        *(word for answer in answers or (EVEN,) for word in ("--answer", answer)), "--",
        "torchrun", "--nnodes", str(case.nodes), "--nproc_per_node", str(case.per_node), _SCRIPTS[case.family],
        *words(case, folder),
    ]  # fmt: skip


def why_not(case: Case, megatron: Path, engine: Path | None = None) -> str:
    """Return why a case cannot be traced here; '' if it can."""
    arguments = case.arguments
    script = _SCRIPTS.get(case.family)
    if script is None or "--perform-rl-step" in arguments or "--export-kd-cfg" in arguments:
        return "several models, or reinforcement learning with its own environment"
    if not (megatron / script).is_file():
        return f"this Megatron-LM has no {script}"
    if not case.local and engine is None and importlib.util.find_spec("transformer_engine") is None:
        return "layers of Transformer Engine, which is not installed (--transformer-engine DIR)"
    if not case.divisible:
        return "needs more cards than one machine has, and how many it ran on is not recorded"
    if left := [name for name, value in arguments.items() if name not in _FILES and "${" in str(value)]:
        return f"needs files: {', '.join(left)}"
    return ""


# --- one case ---


@dataclass(frozen=True, slots=True)
class Answer:
    """What a case's trace gave: (highest, current) allocated bytes after each iteration, or why there is none."""

    case: Case
    iterations: tuple[tuple[int, int], ...] = ()
    reason: str = ""

    @property
    def traced(self) -> tuple[int, int]:
        """Return the highest of each figure over the iterations, as the recorded ones are."""
        return max(high for high, _ in self.iterations), max(now for _, now in self.iterations)

    @property
    def nearest(self) -> str:
        """Return the environment whose highest allocated bytes are nearest."""
        return min(self.case.recorded, key=lambda name: abs(self.case.recorded[name][0] - self.traced[0]))

    @property
    def error(self) -> float:
        """Return the difference from the nearest environment, as a part of it."""
        recorded = self.case.recorded[self.nearest][0]
        return (self.traced[0] - recorded) / recorded


def trace(case: Case, megatron: Path, engine: Path | None = None, answers: Sequence[str] = ()) -> Answer:
    """Trace a case in processes of its own. engine: a checkout of Transformer Engine, whose Python it then uses.

    answers: values that a trace lacks, as for `memfit trace --answer`.
    """
    with tempfile.TemporaryDirectory(prefix="goldens-") as name:
        folder = Path(name)
        log = folder / "log"
        log.touch()
        write_data(case.family, folder)
        variables = {name: str(value) for name, value in case.variables.items() if "${" not in str(value)}
        try:
            variables |= {"PYTHONPATH": str(megatron)}  # for scripts that lie deeper
            done = run(command(case, folder, answers), megatron, log, engine, variables)
        except subprocess.TimeoutExpired:
            return Answer(case, reason=f"took longer than {PATIENCE} seconds")
        iterations = logged(log.read_text())
    if len(iterations) < STEPS:
        return Answer(case, reason=failure(done.stderr) or f"trained {len(iterations)} of {STEPS} steps")
    return Answer(case, iterations)


def run(
    words: Sequence[str], folder: Path, log: Path, engine: Path | None, variables: Mapping[str, str]
) -> subprocess.CompletedProcess[str]:
    """Run memfit in a folder; what Megatron-LM logs of its memory goes to `log`. engine: as for `trace`."""
    path = [str(HERE / "golden_process"), str(HERE.parent / "src")]
    path += [
        part for part in (engine and str(engine), variables.get("PYTHONPATH"), os.environ.get("PYTHONPATH")) if part
    ]
    environment = {
        **os.environ, **variables,
        "PYTHONPATH": os.pathsep.join(path), "GOLDENS_LOG": str(log), "NO_VCS_VERSION": "1",
    }  # fmt: skip
    return subprocess.run(words, cwd=folder, env=environment, capture_output=True, text=True, timeout=PATIENCE)


def is_engine(folder: Path) -> bool:
    """Return whether a folder is a checkout of Transformer Engine."""
    return (folder / "transformer_engine" / "pytorch").is_dir()


def logged(text: str) -> tuple[tuple[int, int], ...]:
    """Return the (highest, current) bytes of each iteration of a log."""
    steps: dict[int, dict[str, int]] = defaultdict(dict)
    for line in text.splitlines():
        step, name, value = json.loads(line)
        steps[step][name] = value
    return tuple((found[HIGHEST], found[CURRENT]) for _, found in sorted(steps.items()) if len(found) > 1)


def failure(text: str) -> str:
    """Return the line in which memfit says why it stopped."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    said = [line for line in lines if line.startswith(("error:", "memfit: error"))]
    return (said or lines or [""])[-1][:200]


# --- bars ---


@dataclass(frozen=True, slots=True)
class Bar:
    """A requirement: the part `share` of the cases it is about is within `within` of the nearest environment."""

    name: str
    about: Callable[[Case], bool]
    within: float
    share: float


BARS = (
    Bar("local dense", lambda case: case.local and not case.moe, 0.001, 1.0),
    Bar("bf16", lambda case: "--bf16" in case.arguments and not (case.fp8 or case.moe), 0.005, 0.9),
    Bar("fp8", lambda case: case.fp8, 0.02, 1.0),
    Bar("experts", lambda case: case.moe and not case.fp8, 0.01, 1.0),
)
LEFT_OUT = 0.15  # of all rows may not run


def judged(answers: Sequence[Answer]) -> Iterator[tuple[str, bool]]:
    """Yield a line for each bar about these cases, and whether it is met. One whose cases do not run is not."""
    for bar in BARS:
        about = [answer for answer in answers if bar.about(answer.case)]
        if not about:
            continue
        found = [abs(answer.error) <= bar.within for answer in about if answer.iterations]
        met = bool(found) and sum(found) >= bar.share * len(found)
        needed = f"{bar.share:.0%} within {bar.within:.1%}"
        yield f"| {bar.name} | {needed} | {sum(found)} of {len(found)} | {verdict(met)} |", met
    rows, out = (sum(len(a.case.recorded) for a in chosen) for chosen in (answers, [a for a in answers if a.reason]))
    met = out <= LEFT_OUT * rows
    yield f"| rows that do not run | at most {LEFT_OUT:.0%} | {out} of {rows} | {verdict(met)} |", met


def verdict(met: bool) -> str:
    return "met" if met else "MISSED"


def show(answers: Sequence[Answer]) -> bool:
    """Print the tables; return whether all bars are met."""
    print("| case | environment | recorded | traced | difference | current, recorded | traced |")
    print("|---|---|---:|---:|---:|---:|---:|")
    for answer in answers:
        if answer.iterations:
            high, now = answer.case.recorded[answer.nearest]
            print(
                f"| {answer.case.name} | {answer.nearest} | {high:,} | {answer.traced[0]:,} | {answer.error:+.4%} "
                f"| {now:,} | {answer.traced[1]:,} |"
            )
    reasons = Counter[str]()
    for answer in answers:
        reasons[answer.reason] += len(answer.case.recorded) if answer.reason else 0
    print("\n| rows that do not run | reason |\n|---:|---|")
    for reason, number in reasons.most_common():
        if number:
            print(f"| {number} | {reason} |")
    print("\n| bar | wanted | found | |\n|---|---|---|---|")
    lines = list(judged(answers))
    print("\n".join(line for line, _ in lines))
    return all(met for _, met in lines)


def main() -> int:
    """Trace the cases, print the tables; 1 where a bar is missed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("csv", nargs="?", type=Path, default=DATA)
    parser.add_argument("--megatron", type=Path, required=True, help="a clone of Megatron-LM")
    parser.add_argument("--transformer-engine", type=Path, help="a checkout of Transformer Engine 2.17")
    parser.add_argument("--only", default="", help="cases whose name contains this")
    parser.add_argument("--answer", action="append", default=[], help="as for memfit trace: routing=1.1")
    parser.add_argument("--jobs", type=int, default=1, help="cases at a time")
    parser.add_argument("--list", action="store_true", help="print the command of each case, or why it has none")
    options = parser.parse_args()
    cases, megatron = read_cases(options.csv, options.only), options.megatron.resolve()
    if not cases:
        parser.error(f"no case of {options.csv} contains {options.only!r}")
    if not (megatron / "megatron" / "core").is_dir():
        parser.error(f"{megatron} is no clone of Megatron-LM")
    engine = options.transformer_engine and options.transformer_engine.resolve()
    if engine and not is_engine(engine):
        parser.error(f"{engine} is no checkout of Transformer Engine")
    reasons = [why_not(case, megatron, engine) for case in cases]
    if options.list:
        for case, reason in zip(cases, reasons, strict=True):
            print(f"{case.name}: {reason or ' '.join(command(case))}")
        return 0

    def answer(case: Case, reason: str) -> Answer:
        found = Answer(case, reason=reason) if reason else trace(case, megatron, engine, options.answer)
        if not reason:
            print(f"{case.name}: {found.reason or f'{found.error:+.4%}'}", file=sys.stderr, flush=True)
        return found

    with ThreadPoolExecutor(options.jobs) as pool:
        answers = list(pool.map(answer, cases, reasons))
    return 0 if show(answers) else 1


if __name__ == "__main__":
    sys.exit(main())
