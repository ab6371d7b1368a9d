"""Reproduce real changes of libraries by `memfit diff`: the bytes on both sides, and the file that decides.

An old environment is a folder of `pip install --target`, which `--install` makes; the new one is that of this
interpreter. Cases without their folder are left out and said. The exit status is 1 if a case that ran does not name
its file, or moves in the other direction.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

JOBS = Path(__file__).parent / "upgrade_jobs"


@dataclass(frozen=True)
class Case:
    """A change. old, new: folders; "" is this interpreter. label: part of the tensor that moves. grows: its sign."""

    title: str
    command: tuple[str, ...]
    old: str
    new: str
    file: str
    label: str
    grows: bool
    gpu: str = "l4"


_HTTP = ("httpx", "httpcore", "h11", "anyio", "sniffio", "certifi", "idna")
_REQUESTS = ("requests", "urllib3", "charset_normalizer", "certifi", "idna")
INSTALLED = {
    "transformers-4.49": ("transformers==4.49.0", "tokenizers==0.21.4", "huggingface_hub==0.36.0", *_REQUESTS),
    "transformers-4.57": ("transformers==4.57.1", "tokenizers==0.22.2", "huggingface_hub==0.36.0", *_REQUESTS),
    "trl-0.24": (
        "trl==0.24.0",
        "transformers==5.5.0",
        "accelerate==1.11.0",
        "peft==0.18.1",
        "tokenizers==0.22.2",
        "huggingface_hub==1.33.0",
        *_HTTP,
    ),
    "accelerate-1.11": ("accelerate==1.11.0",),
    "bitsandbytes-0.43.1": ("bitsandbytes==0.43.1",),
    "bitsandbytes-0.43.2": ("bitsandbytes==0.43.2",),
}
CASES = (
    Case("copies of the logits in fp32", ("sft_logits.py",), "trl-0.24", "", "trl/trainer/sft_trainer.py",
         "copy", grows=False),
    Case("experts fused at load", ("fused_experts.py", "{model}"), "transformers-4.57", "",
         "transformers/core_model_loading.py", "cat", grows=True),
    Case("fp32 copies of frozen weights under FSDP2", ("torchrun", "--nproc_per_node", "2", "frozen_fsdp2.py"),
         "accelerate-1.11", "", "accelerate/utils/fsdp_utils.py", "frozen.weight", grows=False, gpu="2xl4"),
    Case("the width that RMSNorm saves", ("rms_norm.py",), "transformers-4.49", "transformers-4.57",
         "transformers/models/olmo2/modeling_olmo2.py", "k_norm: mul", grows=True),
    Case("inputs that frozen 4-bit layers save", ("frozen_4bit.py",), "bitsandbytes-0.43.1", "bitsandbytes-0.43.2",
         "bitsandbytes/autograd/_functions.py", "mlp: mul", grows=False),
)  # fmt: skip


def found(case: Case, environments: Path, model: str) -> dict:
    """Return the document of `memfit diff`."""
    sides = [
        str(environments / name) if name else str(Path(sys.executable).parent.parent) for name in (case.old, case.new)
    ]
    words = [word.format(model=model) for word in case.command]
    at = next(number for number, word in enumerate(words) if word.endswith(".py"))
    what = ["--", *words] if at else [words[0], "--", *words[1:]]
    line = ["diff", "--json", "--env", sides[0], "--env", sides[1], "--gpu", case.gpu, *what]
    done = subprocess.run(
        [sys.executable, "-m", "memfit", *line], cwd=JOBS, capture_output=True, text=True, check=False
    )
    if done.returncode not in (0, 3, 4, 5):
        raise SystemExit(f"{case.title}: {done.stderr}")
    return json.loads(done.stdout)


def told(case: Case, document: dict) -> bool:
    """Print a case's row, and return whether the file and the direction are as expected."""
    rows = [row for row in document["tensors"] if case.label in row["label"]]
    added = sum(row["head"] - row["base"] for row in rows)
    places = [place for place in document["places"] if place["file"] == case.file]
    versions = {v["library"]: f"{v['base']} -> {v['head']}" for v in document["versions"]}
    library = case.file.partition("/")[0]
    sizes = " -> ".join(f"{document[side]['need'] / 2**20:,.0f}" for side in ("base", "head"))
    moved = f"{added / 2**20:+,.0f} MiB of {case.label}"
    print(f"{case.title}: {library} {versions.get(library)}, {sizes} MiB reserved, {moved}")
    for place in places[:2]:
        print(f"  {place['added'] / 2**20:+,.0f} MiB at {place['file']}:{place['line']}: {place['code']}")
    return bool(places) and added != 0 and (added > 0) == case.grows


def main() -> int:
    """Run the cases whose environments exist."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("environments", type=Path, help="the folder of the old environments")
    parser.add_argument("--install", action="store_true", help="make those that are missing, by pip")
    asked = parser.parse_args()
    environments = asked.environments.absolute()
    good = True
    with tempfile.TemporaryDirectory() as folder:
        subprocess.run([sys.executable, JOBS / "fused_experts.py", "--write", folder], check=True)
        for case in CASES:
            for name in filter(None, (case.old, case.new)):
                line = ["install", "-q", "--no-deps", "--target", str(environments / name), *INSTALLED[name]]
                if asked.install and not (environments / name).is_dir():
                    subprocess.run([sys.executable, "-m", "pip", *line], check=True)
            missing = [n for n in (case.old, case.new) if n and not (environments / n).is_dir()]
            if missing:
                print(f"{case.title}: left out, without {', '.join(missing)}")
            else:
                good = told(case, found(case, environments, folder)) and good
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
