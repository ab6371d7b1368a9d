"""Compares every catalogued model with the real one, built on the meta device by transformers: names, shapes, traits.

python benchmarks/check_families.py              # all, about half a minute; exit status 1 on any difference
python benchmarks/check_families.py qwen3-8b ... # some
python benchmarks/check_families.py --write      # and store the real totals in src/memfit/catalogue/models.json
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
import transformers

from memfit import catalogue
from memfit.models.families import DIALECTS, FAMILIES, architecture
from memfit.nouns.architecture import Architecture

INDEX = Path(catalogue.__file__).parent / "models.json"
# Model code that lives in the checkpoint's repository: compared with published counts only (see the index's notes)
REMOTE = ("QWenLMHeadModel", "ChatGLMForConditionalGeneration", "BaichuanForCausalLM", "InternLM2ForCausalLM")
RENAMED = {"MPTForCausalLM": "MptForCausalLM"}


def build(config: dict[str, Any]) -> Any:
    """The real model, without storage."""
    values = dict(config)
    made = transformers.AutoConfig.for_model(values.pop("model_type"), **values)
    name = config["architectures"][0]
    with torch.device("meta"):
        return getattr(transformers, RENAMED.get(name, name))(made)


def shapes_of(model: Architecture) -> dict[str, tuple[int, ...]]:
    """Full parameter names and shapes as memfit sees them."""
    outside = (*model.embedding, *model.final, *model.head, *model.tower)
    shapes = {w.name: w.shape for w in outside}
    for name, layer in zip(model.layer_names, model.layers, strict=True):
        shapes |= {f"{name}.{w.name}": w.shape for w in layer.weights}
    return shapes


def compare(config: dict[str, Any], name: str) -> tuple[list[str], int]:
    """(differences, the real total)."""
    real, mine = build(config), architecture(config, name)
    total = sum(p.numel() for p in real.parameters())
    every = {n: tuple(p.shape) for n, p in real.named_parameters(remove_duplicate=False)}  # tied ones by each name
    unique = dict(real.named_parameters())
    found = shapes_of(mine)
    wrong = [f"not in the model: {n} {s}" for n, s in found.items() if every.get(n) != s]
    tied = {id(p): n for n, p in real.named_parameters(remove_duplicate=False) if n in found}
    wrong += [f"missing: {n} {tuple(p.shape)}" for n, p in unique.items() if id(p) not in tied]
    if mine.parameters != total:
        wrong.append(f"total {mine.parameters:,}, really {total:,}")
    softmax = [layer for layer in mine.layers if layer.attention.kind in ("softmax", "mla")]
    supports = bool(getattr(real, "_supports_sdpa", False))
    if any(layer.attention.sdpa != supports for layer in softmax):
        wrong.append(f"sdpa trait is not {supports}")
    if len({id(layer) for layer in mine.layers}) != len(set(mine.layers)):
        wrong.append("equal layers are not one object")
    return wrong, total


def check_defaults() -> list[str]:
    """Every default in the tables must be the config class's own."""
    wrong = []
    for kind, dialect in DIALECTS.items():
        try:
            made = transformers.AutoConfig.for_model(kind)
        except ValueError:
            continue  # model code of a repository
        for key, value in dialect.defaults.items():
            written = dialect.aliases.get(key, key)
            real = vars(made).get(written, vars(made).get(key, value))  # not getattr: some values vary by layer
            # a class may overwrite its declared default after reading the others
            if value not in (real, getattr(type(made), written, real)):
                wrong.append(f"{kind}: {written} is {value!r} here, {real!r} in transformers")
    return wrong


def write_totals(totals: dict[str, int]) -> None:
    """Stores the real totals in the index, one entry a line."""
    rows = json.loads(INDEX.read_text(encoding="utf-8"))
    for row in rows:
        row["parameters"] = totals.get(row["stem"], row["parameters"])
    text = "[\n" + ",\n".join(json.dumps(row) for row in rows) + "\n]\n"
    with tempfile.NamedTemporaryFile("w", dir=INDEX.parent, delete=False, encoding="utf-8") as file:
        file.write(text)
    Path(file.name).replace(INDEX)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("stems", nargs="*")
    parser.add_argument("--write", action="store_true")
    options = parser.parse_args()
    totals: dict[str, int] = {}
    failures = 0
    for entry in catalogue.entries():
        if (options.stems and entry.stem not in options.stems) or entry.family not in FAMILIES:
            continue
        if entry.architecture in REMOTE:
            print(f"skip  {entry.stem}: not in transformers")
            continue
        wrong, totals[entry.stem] = compare(catalogue.config(entry), entry.stem)
        if totals[entry.stem] != entry.parameters and not options.write:
            wrong.append(f"index says {entry.parameters}, really {totals[entry.stem]}")
        failures += bool(wrong)
        for line in wrong[:5]:
            print(f"WRONG {entry.stem}: {line}")
    defaults = [] if options.stems else check_defaults()
    for line in defaults:
        print(f"WRONG default {line}")
    print(f"{len(totals)} models compared, {failures} wrong; {len(defaults)} wrong defaults")
    if options.write:
        write_totals(totals)
    return 1 if failures or defaults else 0


if __name__ == "__main__":
    sys.exit(main())
