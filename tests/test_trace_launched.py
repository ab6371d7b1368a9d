"""Scripts that `accelerate launch` starts: traced with the settings of its file."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

pytest.importorskip("accelerate")

from memfit import cli
from memfit.errors import BadInput
from memfit.nouns.tape import Alloc, Tape
from memfit.virtual.scripts.launched import by_accelerate, launcher_file, processes_of, variables
from memfit.virtual.scripts.script import trace_script

pytestmark = pytest.mark.filterwarnings("ignore")

SCRIPT = """
import torch
from accelerate import Accelerator

accelerator = Accelerator()
model = torch.nn.Sequential(*[torch.nn.Linear(1024, 1024) for _ in range(4)])
model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters()))
for _ in range(3):
    with accelerator.autocast():
        loss = model(torch.randn(8, 1024, device=accelerator.device)).square().mean()
    accelerator.backward(loss)
    optimizer.step()
    optimizer.zero_grad()
"""
FSDP = """
distributed_type: FSDP
num_processes: 4
num_machines: 1
mixed_precision: bf16
fsdp_config:
  fsdp_version: 2
  fsdp_auto_wrap_policy: SIZE_BASED_WRAP
  fsdp_min_num_params: 1000
"""
SAGEMAKER = """
compute_environment: AMAZON_SAGEMAKER
distributed_type: DATA_PARALLEL
mixed_precision: bf16
ec2_instance_type: ml.p3.2xlarge
iam_role_name: a role
region: us-east-1
"""
PLAIN = "distributed_type: 'NO'\nnum_processes: 1\nmixed_precision: bf16\n"


def _folder(folder: Path, config: str, name: str = "accelerate.yaml") -> tuple[Path, Path]:
    (folder / "train.py").write_text(SCRIPT)
    (folder / name).write_text(config)
    return folder / "train.py", folder / name


def _states(tape: Tape) -> int:
    return sum(e.size for e in tape.events if isinstance(e, Alloc) and e.role == "optimizer_states")


def test_the_file_shards_what_a_plain_run_keeps_whole(tmp_path: Path) -> None:
    script, file = _folder(tmp_path, FSDP)
    whole, _ = trace_script(script, [], "l4")
    sharded, outcome = trace_script(script, [], "l4", world_size=4, command=by_accelerate(script, file))
    assert _states(whole) > 3.9 * _states(sharded) > 0
    assert any("accelerate launch --config_file" in line for line in outcome.assumed)
    assert "ACCELERATE_USE_FSDP" not in os.environ and "ACCELERATE_MIXED_PRECISION" not in os.environ


def test_the_variables_are_those_of_accelerate(tmp_path: Path) -> None:
    _, file = _folder(tmp_path, FSDP)
    told = variables(("--config_file", str(file)))
    assert processes_of(file) == 4
    assert (told["ACCELERATE_USE_FSDP"], told["FSDP_VERSION"], told["ACCELERATE_MIXED_PRECISION"]) == (
        "true",
        "2",
        "bf16",
    )
    assert not {"MASTER_PORT", "OMP_NUM_THREADS", "PATH"} & set(told)
    _, plain = _folder(tmp_path, PLAIN, "plain.yaml")
    assert processes_of(plain) == 1 and variables(("--config_file", str(plain)))["ACCELERATE_MIXED_PRECISION"] == "bf16"
    assert "ACCELERATE_USE_FSDP" not in variables(("--config_file", str(plain)))


def test_the_file_beside_a_script_is_taken(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    script, file = _folder(tmp_path, FSDP)
    assert launcher_file(script) == file
    assert cli.main(["trace", str(script), "--gpu", "l4"]) == 0
    out, err = capsys.readouterr()
    assert "rank 0 of 4" in out and f"accelerate launch --config_file {file}" in " ".join(err.split())
    assert cli.main(["trace", str(script), "--gpu", "8xl4"]) == 2
    assert "starts 4 processes, not 8" in capsys.readouterr().err


def test_a_file_that_is_named_goes_before_the_one_beside(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    script, _ = _folder(tmp_path, FSDP)
    _, plain = _folder(tmp_path, PLAIN, "plain.yaml")
    assert cli.main(["trace", str(script), "--gpu", "l4", "--from", str(plain)]) == 0
    assert "rank 0 of" not in capsys.readouterr().out


@pytest.mark.parametrize(
    "text", ["nonsense: 1\n", "method = 'lora'\n", "[1, 2", "", "num_processes: many\n", SAGEMAKER]
)
def test_what_accelerate_cannot_read_is_said(text: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    script, file = _folder(tmp_path, text, "other.yaml")
    with pytest.raises(BadInput, match=r"other\.yaml"):
        variables(("--config_file", str(file)))
    assert cli.main(["trace", str(script), "--gpu", "l4", "--from", str(file)]) == 2
    assert "hint:" in capsys.readouterr().err
    assert cli.main(["trace", str(script), "--gpu", "l4", "--from", str(tmp_path / "none.yaml")]) == 2
