"""What leaves the machine: files made to be shared hold no folder, user, token or secret of their machine."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest

CANARY = "canary"


def test_shared_files_name_no_folder_user_or_token(ran: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from memfit.catalogue import config, names

    home = tmp_path / f"{CANARY}-user"
    model = home / "models" / "tiny"
    model.mkdir(parents=True)
    entry = names.find("smollm2-135m")
    assert entry is not None
    (model / "config.json").write_text(json.dumps(dict(config(entry))))
    for name in ("USER", "HF_TOKEN", "WANDB_API_KEY"):
        monkeypatch.setenv(name, f"{CANARY}-{name}")
    monkeypatch.setenv("HOME", str(home))
    out, card = tmp_path / "out", ("--gpu", "l4")
    commands: list[tuple[object, ...]] = [
        ("plan", model, *card, "--no-trace", "--html", out / "plan.html"),
        ("estimate", model, *card, "--html", out / "estimate.html", "--save-tape", out / "a.tape.gz"),
        ("sweep", model, *card, "--over", "micro-batch=1..2", "--svg", out / "map.svg"),
        ("replay", out / "a.tape.gz", *card, "--html", out / "replay.html", "--snapshot", out / "a.pickle"),
        ("explain", out / "a.pickle", "--html", out / "explain.html"),
        ("compare", out / "a.tape.gz", out / "a.pickle", *card, "--html", out / "compare.html"),
    ]
    out.mkdir()
    for words in commands:
        code, _, err = ran(*words)
        assert code in (0, 4), (words, err)
    for path in out.iterdir():
        content = path.read_bytes()
        content = gzip.decompress(content) if path.name.endswith(".gz") else content
        assert CANARY.encode() not in content, path.name
    assert len(list(out.iterdir())) == 8
