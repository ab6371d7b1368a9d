"""Check a sample repository of four jobs, and four commits of which the effect is known; print what was found.

usage: python benchmarks/check.py [--schemas DIR]

The repository (tests/data/check_sample) has a script with transformers' Trainer, a script with TRL and its YAML, an
axolotl file and a command that starts FSDP2 on four cards. The first check, and one of the unchanged repository, are
timed. Each commit has to be found: the jobs that it changes with the line that does it and the bytes by role, the
others as the same to the byte. --schemas: a folder with sarif-schema-2.1.0.json (OASIS) and junit-10.xsd (Jenkins
xUnit plugin), against which jsonschema and xmlschema validate the reports.
"""

from __future__ import annotations

import json
import os
import resource
import shutil
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
SAMPLE = ROOT / "tests" / "data" / "check_sample"
FIRST, UNCHANGED = 60.0, 2.0  # seconds that a first check may take on quiet cores, and one of an unchanged repository
MIB = 1 << 20
LOGITS = 8 * 1024 * 32_000  # numbers in the Trainer's logits: sequences x tokens x vocabulary


@dataclass(frozen=True, slots=True)
class Commit:
    """A change of the sample: (file, old text, new text), and what it has to be found to do.

    lines: job -> (file, text of the line that is named). roles: (job, role) -> bytes that it adds, as counted by hand.
    """

    name: str
    edits: tuple[tuple[str, str, str], ...]
    lines: dict[str, tuple[str, str]] = field(default_factory=dict)
    roles: dict[tuple[str, str], int] = field(default_factory=dict)
    renamed: tuple[tuple[str, str], ...] = ()


COMMITS = (
    Commit(
        "keeps logits in fp32",
        (
            ("trainer.py", "logits = model(**inputs).logits\n", "logits = model(**inputs).logits.float()\n"),
            ("fsdp.py", "logits = model(tokens)\n", "logits = model(tokens).float()\n"),
        ),
        {"trainer": ("trainer.py", ".logits.float()"), "fsdp": ("fsdp.py", "model(tokens).float()")},
        # kept for the backward: log_softmax in 4 bytes and not 2, and three numbers: the loss, its weight, and its part
        {("trainer", "activations"): 2 * LOGITS + 3 * 2},
    ),
    Commit(
        "disables checkpointing",
        (
            ("trainer.py", "gradient_checkpointing=True", "gradient_checkpointing=False"),
            ("sft.yaml", "gradient_checkpointing: true", "gradient_checkpointing: false"),
            ("axolotl.yaml", "gradient_checkpointing: true", "gradient_checkpointing: false"),
            ("fsdp.py", "x = checkpoint(block, x, use_reentrant=False)", "x = block(x)"),
            ("fsdp.py", "from torch.utils.checkpoint import checkpoint\n", ""),
        ),
        {
            "trainer": ("trainer.py", "gradient_checkpointing=False"),
            "sft": ("sft.yaml", "gradient_checkpointing: false"),
            "axolotl": ("axolotl.yaml", "gradient_checkpointing: false"),
            "fsdp": ("fsdp.py", "x = block(x)"),
        },
    ),
    Commit(
        "doubles the rank",
        (("sft.yaml", "lora_r: 16", "lora_r: 32"), ("axolotl.yaml", "lora_r: 16", "lora_r: 32")),
        {"sft": ("sft.yaml", "lora_r: 32"), "axolotl": ("axolotl.yaml", "lora_r: 32")},
        # Llama 3.1 8B has 41,943,040 adapter weights at rank 16: as many more, with two states of 4 bytes each
        {("axolotl", "parameters"): 4 * 41_943_040, ("axolotl", "optimizer_states"): 8 * 41_943_040},
    ),
    Commit(
        "only renames",
        (
            ("trainer.py", "helpers", "sample_model"),
            ("sft.py", "helpers", "sample_model"),
            ("trainer.py", "OwnLoss", "TokenLoss"),
            ("fsdp.py", "self.up", "self.widen"),
            ("fsdp.py", "Block", "Layer"),
            ("sft.yaml", "output_dir: out", "output_dir: results"),
        ),
        renamed=(("helpers.py", "sample_model.py"),),
    ),
)


class Sample:
    """A copy of the sample repository, with a cache of its own."""

    def __init__(self, folder: Path) -> None:
        self.root, self.environment = folder / "repository", {**os.environ, "MEMFIT_CACHE": str(folder / "cache")}
        self.environment["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{self.environment.get('PATH', '')}"
        shutil.copytree(SAMPLE, self.root)
        self.git("init", "-q")
        self.commit("first")

    def git(self, *words: str) -> str:
        who = ("-c", "user.name=sample", "-c", "user.email=sample@localhost")
        return subprocess.run(["git", *who, *words], cwd=self.root, check=True, capture_output=True, text=True).stdout

    def commit(self, name: str) -> None:
        self.git("add", "-A")
        self.git("commit", "-q", "-m", name)

    def check(self, *words: str) -> tuple[dict[str, Any], float]:
        """Return the document of a check, and the seconds that it took: of the wall, or of the processors if fewer.

        Beside other work the wall says nothing; on quiet cores jobs run in parallel and it is the smaller one.
        """
        began, before = time.monotonic(), _processors()
        done = subprocess.run(
            [sys.executable, "-m", "memfit", "check", "--json", *words], cwd=self.root, env=self.environment,
            stdout=subprocess.PIPE, text=True,
        )  # fmt: skip
        return json.loads(done.stdout), min(time.monotonic() - began, _processors() - before)

    def made(self, commit: Commit) -> None:
        """Make a commit of the table on top of the first one."""
        for old, new in commit.renamed:
            self.git("mv", old, new)
        for file, old, new in commit.edits:
            path = self.root / file
            text = path.read_text()
            assert old in text, (file, old)
            path.write_text(text.replace(old, new))
        self.commit(commit.name)


def _processors() -> float:
    """Return the seconds of processor time of all processes that this one has started and waited for."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def faults(sample: Sample, commit: Commit, document: dict[str, Any]) -> list[str]:
    """Return what was not found as the table has it, and print what was found."""
    wrong = []
    for job in document["jobs"]:
        name, found = job["name"], job["difference"]
        if found is None:
            wrong.append(f"{commit.name}: {name} has no difference: {job['failure'] or job['no_difference']}")
            continue
        added = {role["role"]: role["head"] - role["base"] for role in found["roles"]}
        gap = found["head"] - found["base"]
        causes = [f"{one['file']}:{one['line']}: {one['code']}" for one in found["causes"]]
        print(f"  {name:8} {gap / MIB:+10.1f} MiB  {'; '.join(causes)}")
        if sum(added.values()) != gap:
            wrong.append(f"{commit.name}: the roles of {name} add up to {sum(added.values())}, not {gap}")
        if name not in commit.lines:
            if gap or any(added.values()) or found["head_need"] != found["base_need"] or causes:
                wrong.append(f"{commit.name}: {name} is not the same")
            continue
        file, text = commit.lines[name]
        lines = (sample.root / file).read_text().splitlines()
        number = next(n for n, line in enumerate(lines, 1) if text in line)
        if gap <= 0 or not causes or not causes[0].startswith(f"{file}:{number}:"):
            wrong.append(f"{commit.name}: {name} should name {file}:{number}")
        wrong += [
            f"{commit.name}: {role} of {name}: {added.get(role)} and not {size}"
            for (other, role), size in commit.roles.items()
            if other == name and added.get(role) != size
        ]
    return wrong


def run(schemas: Path | None = None) -> list[str]:
    """Run the benchmark; return what is wrong."""
    with tempfile.TemporaryDirectory(prefix="memfit-sample-") as name:
        sample = Sample(Path(name))
        first, seconds = sample.check()
        again, unchanged = sample.check()
        print(f"first check {seconds:.1f} s (to stay under {FIRST:.0f}), unchanged {unchanged:.2f} s ({UNCHANGED:.0f})")
        wrong = [] if all(job["verdict"] == "fits" for job in first["jobs"]) else ["a job of the sample does not fit"]
        wrong += [f"{job['name']} was judged again" for job in again["jobs"] if not job["kept"]]
        wrong += [f"unchanged took {unchanged:.1f} s"] if unchanged > UNCHANGED else []
        for commit in COMMITS:
            sample.made(commit)
            reports = ("--report", f"{name}/r.sarif", "--report", f"{name}/r.xml", "--force")
            document, seconds = sample.check("--base", "HEAD~1", *reports)
            print(f"{commit.name} ({seconds:.1f} s)")
            wrong += faults(sample, commit, document)
            if schemas:
                wrong += invalid(schemas, Path(name))
            sample.git("reset", "-q", "--hard", "HEAD~1")
        left = sample.git("status", "--short") + "".join(sample.git("worktree", "list").splitlines()[1:])
        return [*wrong, *([f"left behind: {left}"] if left else [])]


def invalid(schemas: Path, folder: Path) -> list[str]:
    """Return what the official schemas refuse in the reports of a folder."""
    import jsonschema
    import xmlschema

    schema = json.loads((schemas / "sarif-schema-2.1.0.json").read_text())
    validator = jsonschema.validators.validator_for(schema)(schema)
    wrong = [
        f"SARIF: {e.json_path}: {e.message}"
        for e in validator.iter_errors(json.loads((folder / "r.sarif").read_text()))
    ]
    junit = xmlschema.XMLSchema(str(schemas / "junit-10.xsd"))
    return wrong + [f"JUnit: {e.path}: {e.reason}" for e in junit.iter_errors(str(folder / "r.xml"))]


if __name__ == "__main__":
    told = sys.argv[1:]
    found = run(Path(told[told.index("--schemas") + 1]) if "--schemas" in told else None)
    print(*(found or ["all found"]), sep="\n")
    sys.exit(bool(found))
