"""Command lines as they are typed: what they start, on how many processes, and what is refused by name."""

from __future__ import annotations

import json
import os
import shlex
import shutil
import subprocess
import sys
import sysconfig
import venv
from collections.abc import Callable
from pathlib import Path

import pytest

from conftest import Ran
from memfit.errors import BadInput
from memfit.reading.environments import shebang
from memfit.reading.shell_words import LOCAL_RANK, RANK, for_rank
from memfit.virtual.scripts.command_line import (
    CommandLine,
    names_program,
    parse,
    starts_training,
)
from memfit.virtual.scripts.launchers import ACCELERATE, DEEPSPEED, TORCHRUN
from memfit.virtual.scripts.relaunch import Relaunch, no_children

Reads = Callable[..., CommandLine]
PROGRAMS = ("torchrun", "accelerate", "deepspeed", "trl", "llamafactory-cli", "axolotl", "tune", "litgpt")
FILES = (
    "train.py", "pretrain_gpt.py", "main.py", "run_clm.py", "examples/accelerate/fsdp_config.yaml", "ds.json",
    "trl/scripts/sft.py",
)  # fmt: skip


@pytest.fixture
def reads(tmp_path: Path) -> Reads:
    """Return a parser of command lines in a folder with an environment that has the usual programs."""
    binaries = tmp_path / "env" / "bin"
    binaries.mkdir(parents=True)
    (tmp_path / ".conda" / "envs").mkdir(parents=True)
    (tmp_path / ".conda" / "envs" / "llm").symlink_to(tmp_path / "env")
    for name in ("python", "python3", *PROGRAMS):
        (binaries / name).write_text(f"#!{binaries}/python\n")
        (binaries / name).chmod(0o755)
    for name in FILES:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("num_processes: 8\nnum_machines: 1\n" if name.endswith(".yaml") else "")

    def read(command: str, cards: int | None = None, devices: int = 1) -> CommandLine:
        environment = {"PATH": str(binaries), "HOME": str(tmp_path)}
        return parse(shlex.split(command), environment, str(tmp_path), devices).on(cards, "h100")

    return read


# command -> launcher, processes a node, nodes, entry, and the last of its arguments; from the READMEs and scripts of
# nanoGPT, nanochat, transformers, TRL, accelerate, DeepSpeedExamples, LLaMA-Factory, torchtitan, Megatron-LM
STARTED = (
    ("python train.py config/train_shakespeare_char.py", "", 1, 1, "train.py", "config/train_shakespeare_char.py"),
    ("torchrun --standalone --nproc_per_node=8 train.py config/train_gpt2.py", "torchrun", 8, 1, "train.py",
     "config/train_gpt2.py"),
    ("torchrun --nproc_per_node=8 --nnodes=2 --node_rank=0 --master_addr=123.456.123.456 --master_port=1234 train.py",
     "torchrun", 8, 2, "train.py", ""),
    ("torchrun --standalone --nproc_per_node=8 -m scripts.base_train -- --depth=20 --run=d20", "torchrun", 8, 1,
     "-m scripts.base_train", "--run=d20"),
    ("PYTORCH_ALLOC_CONF=expandable_segments:True torchrun --nproc_per_node=8 --rdzv_backend c10d"
     " --rdzv_endpoint=localhost:0 --local-ranks-filter 0 --role rank --tee 3 -m torchtitan.train --module llama3"
     " --config llama3_8b", "torchrun", 8, 1, "-m torchtitan.train", "llama3_8b"),
    ("python -m torch.distributed.run --nproc-per-node 4 --nnodes 2:3 run_clm.py --bf16", "torchrun", 4, 2,
     "run_clm.py", "--bf16"),
    ("python -m torch.distributed.launch --nproc_per_node 2 --use_env run_clm.py", "torchrun", 2, 1, "run_clm.py", ""),
    ("PET_NPROC_PER_NODE=4 torchrun --nno 2 train.py", "torchrun", 4, 2, "train.py", ""),
    ("accelerate launch --config_file=examples/accelerate/fsdp_config.yaml run_clm.py --block_size 1024", "accelerate",
     8, 1, "run_clm.py", "1024"),
    ("accelerate launch --multi_gpu --mixed_precision fp16 --num_processes 16 --num_machines 2 --machine_rank 0"
     " --main_process_ip 10.0.0.1 -m axolotl.cli.train x.yml", "accelerate", 8, 2, "-m axolotl.cli.train", "x.yml"),
    ("python -m accelerate.commands.launch --num_processes=2 --use_fsdp --fsdp_version 2 trl/scripts/sft.py --lr 1e-5",
     "accelerate", 2, 1, "trl/scripts/sft.py", "1e-5"),
    ("deepspeed --num_gpus 4 --module training.main --deepspeed", "deepspeed", 4, 1, "-m training.main", "--deepspeed"),
    ("deepspeed --include localhost:0,1 --master_port 29501 main.py --zero_stage 3", "deepspeed", 2, 1, "main.py", "3"),
    ("NCCL_DEBUG=INFO deepspeed --num_nodes 2 --num_gpus 8 main.py", "deepspeed", 8, 2, "main.py",
     f"--local_rank={LOCAL_RANK}"),
    ("srun -N2 --ntasks-per-node=8 --gpus-per-node 8 -p gpu -J gpt python -u pretrain_gpt.py --bf16", "srun", 8, 2,
     "pretrain_gpt.py", "--bf16"),
    ("srun --ntasks 4 --nodes 4 torchrun --nnodes 4 --nproc_per_node 8 pretrain_gpt.py", "torchrun", 8, 4,
     "pretrain_gpt.py", ""),
    ("mpirun --allow-run-as-root -np 16 -npernode 8 --mca btl self -x A=B python main.py", "mpirun", 8, 2, "main.py",
     ""),
    ("env -u LD_PRELOAD OMP_NUM_THREADS=4 nohup time -p numactl --cpunodebind=0 -m 0 python -um nanochat.train", "",
     1, 1, "-m nanochat.train", ""),
    ("nsys profile -w true -t cuda,nvtx -o out --capture-range=cudaProfilerApi python -O train.py --profile", "", 1, 1,
     "train.py", "--profile"),
    ("nsys profile -t cuda -f true sudo -E xvfb-run -a python train.py", "", 1, 1, "train.py", ""),
    ("mpirun -np 16 -H a:8,b:8 --bind-to none python main.py", "mpirun", 8, 2, "main.py", ""),
    ("srun -N 2 --ntasks-per-node 1 bash -lc 'torchrun --nnodes $SLURM_NNODES --node_rank $SLURM_NODEID"
     " --nproc_per_node 8 main.py --nodes $SLURM_NTASKS'", "torchrun", 8, 2, "main.py", "2"),
    ("conda run --no-capture-output -n llm torchrun --nproc_per_node 2 train.py", "torchrun", 2, 1, "train.py", ""),
    ("VIRTUAL_ENV=env poetry run python train.py", "", 1, 1, "train.py", ""),
    ("python -W ignore -OOu -X dev -mnanochat.train -um x", "", 1, 1, "-m nanochat.train", "x"),
    ("timeout -s KILL 3h nice -n 5 taskset -c 0-7 python -m cProfile -o out train.py", "", 1, 1, "train.py", ""),
    ("bash -c 'cd . && exec torchrun --nproc_per_node=2 train.py 2>&1 | tee log'", "torchrun", 2, 1, "train.py", ""),
    ("FORCE_TORCHRUN=1 llamafactory-cli train examples/train_lora/llama3_lora_sft.yaml", "", 1, 1,
     "llamafactory-cli train", "examples/train_lora/llama3_lora_sft.yaml"),
    ("tune run --nproc_per_node 2 lora_finetune_distributed --config llama3_1/8B_lora", "", 1, 1, "tune run",
     "llama3_1/8B_lora"),
)  # fmt: skip


@pytest.mark.parametrize(("command", "launcher", "processes", "nodes", "name", "last"), STARTED)
def test_a_command_line_starts_what_a_shell_would(
    reads: Reads, command: str, launcher: str, processes: int, nodes: int, name: str, last: str
) -> None:
    run = reads(command)
    assert (run.launcher, run.processes, run.nodes) == (launcher, processes, nodes)
    assert run.name == name or run.entry == name
    assert (run.args or ("",))[-1] == last
    assert not run.unknown and Path(run.python).parent.parts[-2:] == ("env", "bin")


def test_the_environment_is_the_one_of_the_command(reads: Reads) -> None:
    run = reads("env A=1 B=2 CUDA_VISIBLE_DEVICES=0,1,2 python -O train.py")
    assert (run.environment["A"], run.environment["B"], run.devices, run.options) == ("1", "2", 3, ("-O",))
    task = reads("srun -n 4 python train.py")
    third = {"RANK": "3", "LOCAL_RANK": "3"}
    here = task.environment | {name: for_rank(value, third) for name, value in task.variables.items()}
    assert (here["SLURM_PROCID"], here["SLURM_NTASKS"]) == ("3", "4")
    assert for_rank(f"{RANK}:{LOCAL_RANK}", {"RANK": "9", "LOCAL_RANK": "1"}) == "9:1"


# --- numbers of cards ---


@pytest.mark.parametrize(
    ("command", "cards", "processes"),
    [
        ("deepspeed main.py", 8, 8),  # one a card
        ("deepspeed main.py", None, 1),
        ("torchrun --nproc_per_node gpu train.py", 4, 4),
        ("torchrun --nnodes 2 --nproc_per_node auto train.py", 16, 8),
        ("accelerate launch train.py", 8, 8),
        ("CUDA_VISIBLE_DEVICES=0,1 torchrun --nproc_per_node gpu train.py", None, 2),
        ("torchrun --nnodes 1:4 --nproc_per_node 2 train.py", 6, 2),  # of an elastic job, three nodes
    ],
)
def test_processes_that_are_counted_by_cards(reads: Reads, command: str, cards: int | None, processes: int) -> None:
    assert reads(command, cards).processes == processes


@pytest.mark.parametrize("command", ["torchrun --nproc_per_node 8 train.py", "deepspeed --num_gpus 8 main.py"])
def test_processes_and_cards_have_to_agree(reads: Reads, command: str) -> None:
    with pytest.raises(BadInput, match="starts 8 processes, and 4 cards") as caught:
        reads(command, 4)
    better = caught.value.hint.partition(", or ")[2]
    assert reads(f"{better} train.py", 4).processes == 4


def test_hosts_of_deepspeed_and_defaults_of_accelerate(reads: Reads, tmp_path: Path) -> None:
    (tmp_path / "hosts").write_text("# ours\nworker-0 slots=4\nworker-1 slots=4\n")
    assert (run := reads("deepspeed -H hosts main.py")).processes * run.nodes == 8
    assert (run := reads("deepspeed -H hosts --include worker-1:0,2 main.py")).processes * run.nodes == 2
    default = tmp_path / ".cache" / "huggingface" / "accelerate" / "default_config.yaml"
    default.parent.mkdir(parents=True)
    default.write_text("num_processes: 6\nnum_machines: 3\n")
    assert (run := reads("accelerate launch train.py")).processes == 2 and run.nodes == 3


# --- what is ignored, unknown or refused ---


def test_arguments_are_ignored_by_name_or_said(reads: Reads) -> None:
    run = reads("torchrun --rdzv_backend c10d --tomorrow 3 --afresh --max-restarts 2 train.py --tomorrow")
    assert run.ignored == ("torchrun --rdzv_backend", "torchrun --max-restarts")
    assert run.unknown == ("torchrun --tomorrow", "torchrun --afresh")
    assert run.args == ("--tomorrow",)


@pytest.mark.parametrize(
    ("command", "named"),
    [
        ("python -c 'import torch'", "python -c"),
        ("python", "python by itself"),
        ("docker run -it image python train.py", "docker"),
        ("conda run -n other python train.py", "conda"),
        ("hatch run python train.py", "hatch"),
        ("uv run train.py", ".venv"),
        ("conductor train.py", "conductor"),
        ("torchrun --nproc_per_node many train.py", "many"),
        ("torchrun missing.py", "missing.py"),
        ("srun --container-image nemo python train.py", "container"),
        ("nsys stats report", "nsys stats"),
        ("torchrun --no-python torchrun train.py", "torchrun"),
        ("accelerate launch --num_processes 3 --num_machines 2 train.py", "3 processes"),
        ("A=B", "nothing"),
    ],
)
def test_what_is_not_understood_is_refused_by_name(reads: Reads, command: str, named: str) -> None:
    with pytest.raises(BadInput, match=named) as caught:
        reads(command)
    assert caught.value.hint


# --- shell scripts ---

SHELL = """#!/bin/bash
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1   # torchrun starts the others
set -euo pipefail
export OMP_NUM_THREADS=4 STAMP=$(curl example.com)
NGPU=${NGPU:-"8"}
head_node=$(scontrol show hostnames $SLURM_JOB_NODELIST | head -n 1)
HERE=$( cd "$(dirname "${BASH_SOURCE[0]}")" >/dev/null 2>&1 && pwd )
OUT=${1:-$HERE/out}
if [[ -n "$OUT" && ! -d $OUT ]]; then
    mkdir -p $OUT
elif [ $NGPU -gt 8 ]; then
    exit 1
fi
ARGS=(
    --micro-batch-size $((16 / NGPU)) # of all
    --name "two words"
)
ARGS+=(--save "$OUT")
LOG="> unused"; : ${LR:=3e-4}
RUN="torchrun --nproc_per_node ${NGPU} --nnodes=$SLURM_NNODES \\
  --rdzv_endpoint $head_node:29500"
later() { python never.py; }
python prepare.py
srun $RUN pretrain_gpt.py \\
    ${ARGS[@]} --lr $LR "$@" > $OUT/log 2>&1 &
wait
"""


def test_a_shell_script_is_read_without_a_shell(reads: Reads, tmp_path: Path) -> None:
    (tmp_path / "train.sh").write_text(SHELL)
    run = reads("NGPU=4 bash train.sh 'a dir' --bf16", devices=8)
    assert (run.launcher, run.processes, run.nodes, run.entry) == ("torchrun", 4, 2, "pretrain_gpt.py")
    assert run.args == (
        "--micro-batch-size", "4", "--name", "two", "words", "--save", "a", "dir", "--lr", "3e-4", "a dir", "--bf16",
    )  # fmt: skip
    assert run.environment["OMP_NUM_THREADS"] == "4" and "STAMP" not in run.environment
    assert any("python prepare.py" in note for note in run.notes) and any("STAMP" in note for note in run.notes)
    assert reads("./train.sh").processes == 8


EXPANDED = (
    'A="x y"; python train.py $A "$A" \'$A\' a"b"c\\ d "" $NONE "$NONE" end',
    'python train.py $# $1 "$1" ${2-none} ${2:-} "$@" $* "a${1}b" \'$1\'',
    "P=a/b.tar.gz; python train.py ${P%.*} ${P%%.*} ${P#*/} ${P##*/} ${P/a/z} ${P//a/z} ${#P} ${P:+set} ${Q:+set}",
    "[ -f train.py ] && X=1 || X=2; [ -d train.py ] || Y=3\npython train.py $X $Y",
    "[ -n $NONE ] && A=1; [ -z $NONE ] && B=2; [[ -n $NONE ]] || C=3; E='-z x'; [ $E ] || D=4\n"
    "python train.py $A $B $C $D",
    'if [ "$1" == "given" ] && [ $# -ge 1 ]; then A=1; elif true; then A=2; else A=3; fi; python train.py $A',
    'if [[ -z "$NONE" && "$1" != x* ]]; then\n  A=(1 "2 3")\nelse\n  A=()\nfi\n'
    'python train.py ${A[@]} "${A[@]}" "${A[0]}" ${#A[@]}',
    'if ! [ -n "$NONE" ]; then N=0; else N=8; fi\npython train.py $N $((N + 3 * (2 - 7) / 2)) $((10%4))',
    'E=()\npython train.py ${E[@]} "${E[@]}" "x${E[*]}" end',
    "CMD='python train.py --a \"b c\"'\neval $CMD --b 2>&1 | cat",
    "C='python train.py --a \"b c\"'\n$C --b > /dev/stdout 2>/dev/null",
    "python train.py a \\\n  --b=1 \\\n  # --c\npython3 -V > /dev/null || true",
    "A=(--x 1 # one\n  --y 'a b'\n)\nA+=(--z)\nB=\"${A[*]}\"\nB+=' more'\npython train.py $B",
    'export X=1 Y="a b"; X=2; unset Y; python train.py $X ${Y-unset} ${Z:=new} $Z',
    "set -e -o pipefail; set -- q 'r s'; shift; python train.py \"$@\" $1",
    'python $(dirname "$0")/train.py $(dirname a) $(dirname a/) $(dirname /)',
    "V=abc; D=$(dirname a/b/c)/$(basename $V/x.py .py); python train.py ${D} `echo back` \"$(echo in 'side  q')\"",
    'cd sub && python ../train.py "$(pwd)" $PWD | tee /dev/null',
    "f() { python never.py; }\npython train.py ~ ~/x a~ \"~\" '#' a#b \"\\$1 \\\\\" $'x' {}",
    "D=(cd sub; D=x; false) || { A=1; B=(2 3); } 2>&1\n(A=4; cd sub; (true); python ../train.py $A $B) | cat",
    "export CUDA_VISIBLE_DEVICES=4,5,6\nN=$(echo $CUDA_VISIBLE_DEVICES | awk -F',' '{print NF}')\n"
    "python train.py $N $(echo $CUDA_VISIBLE_DEVICES | tr ',' '\\n' | wc -l)",
    "while_=1; done_=2; python train.py $while_ if then fi ${done_}; exit 0; python never.py",
)


@pytest.mark.parametrize("text", EXPANDED)
def test_words_are_expanded_as_bash_does(reads: Reads, tmp_path: Path, text: str) -> None:
    """The stub of python prints what bash gives it."""
    if (bash := shutil.which("bash")) is None:
        pytest.skip("no bash here")
    (tmp_path / "sub").mkdir()
    (tmp_path / "train.sh").write_text(text)
    binaries = tmp_path / "env" / "bin"
    (binaries / "python").write_text('#!/bin/sh\nshift\nfor word; do printf "%s\\0" "$word"; done\n')
    environment = {"PATH": f"{binaries}:{os.environ['PATH']}", "HOME": str(tmp_path)}
    done = subprocess.run(
        [bash, "train.sh", "given"], env=environment, cwd=tmp_path, capture_output=True, text=True, check=True
    )
    assert list(reads("bash train.sh given").args) == done.stdout.split("\0")[:-1]


def test_a_script_prepares_the_shell_and_activates_an_environment(reads: Reads, tmp_path: Path) -> None:
    other = tmp_path / "miniconda3" / "envs" / "other" / "bin"
    shutil.copytree(tmp_path / "env" / "bin", other)
    (tmp_path / ".bashrc").write_text("case $- in *i*) ;; *) return;; esac\n")
    (tmp_path / "train.sh").write_text(
        "source ~/.bashrc\nsource $(conda info --base)/etc/profile.d/conda.sh\n"
        'eval "$(conda shell.bash hook)"\nconda activate other\npython train.py'
    )
    assert Path(reads("bash train.sh").python).parent == other
    (tmp_path / "train.sh").write_text("export FIRST=$SLURM_PROCID\n[ $FIRST -eq 0 ] && A=yes\npython train.py $A")
    task = reads("srun -n 4 bash train.sh")
    assert task.args == ("yes",) and for_rank(task.variables["FIRST"], {"RANK": "3"}) == "3"


def test_cards_and_cores_are_counted_for_a_script(reads: Reads, tmp_path: Path) -> None:
    (tmp_path / "train.sh").write_text(
        "N=$(nvidia-smi -L | wc -l)\ntorchrun --nproc_per_node $N train.py $(nproc --all)"
    )
    run = reads("bash train.sh", devices=8)
    assert (run.processes, run.args) == (8, (str(os.cpu_count()),))


@pytest.mark.parametrize(
    ("text", "line", "named"),
    [
        ("\nfor lr in 1 2; do python train.py $lr; done", 2, "for"),
        ("while true; do python train.py; done", 1, "while"),
        ("case $1 in a) python train.py;; esac", 1, "case"),
        ("run() { python train.py; }\nrun", 2, "run"),
        ("cat <<EOF > x\nEOF\npython train.py", 1, "here-document"),
        ("if [ $(curl x) = y ]; then A=1; fi\npython train.py", 1, "curl x"),
        ("\nsource missing.sh\npython train.py", 2, "missing.sh"),
        ("shift $(curl x)\npython train.py", 1, "shift"),
        ("[[ $0 =~ '(' ]] && python train.py", 1, r"\("),
        ("conda activate other\npython train.py", 1, "conda activate"),
        ("((N = 1))\npython train.py", 1, r"\("),
    ],
)
def test_shell_that_is_not_understood_is_refused_with_its_line(
    reads: Reads, tmp_path: Path, text: str, line: int, named: str
) -> None:
    (tmp_path / "train.sh").write_text(text)
    with pytest.raises(BadInput, match=f"line {line}.*{named}"):
        reads("bash train.sh")


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("python train.py --out $(curl x)", "curl x"),
        ("torchrun --nproc_per_node $(curl x) train.py", "curl x"),
        ("torchrun train.py\ntorchrun main.py", "more than once"),
        ("COUNT=8\nread -p size COUNT\ntorchrun --nproc_per_node $COUNT train.py", "COUNT"),
        ("echo done", "starts no training"),
        ('[ -z "$1" ] && exit 2\npython train.py', "exit code 2"),
        ("bash train.sh", "starts itself"),
    ],
)
def test_a_script_that_cannot_be_followed_is_refused(reads: Reads, tmp_path: Path, text: str, named: str) -> None:
    (tmp_path / "train.sh").write_text(text)
    with pytest.raises(BadInput, match=named):
        reads("bash train.sh")


# --- programs and their interpreters ---


def test_the_interpreter_is_found_by_the_first_lines(tmp_path: Path) -> None:
    program = tmp_path / "tool"
    long = "#!/bin/sh\n'''exec' \"/a long/path/python3\" \"$0\" \"$@\"\n' '''\nimport sys\n"
    for text, found in (
        ("#!/venv/bin/python3.12\n", "/venv/bin/python3.12"), ("#!/usr/bin/env python\n", "python"),
        ("#!/usr/bin/env -S python -u\n", "python"), (long, "/a long/path/python3"), ("import sys\n", ""),
    ):  # fmt: skip
        program.write_text(text)
        assert shebang(program) == found


@pytest.mark.parametrize(
    ("words", "starts"),
    [
        (["torchrun", "train.py"], True), (["/env/bin/accelerate", "launch", "train.py"], True),
        ([sys.executable, "-m", "torch.distributed.run", "train.py"], True), (["accelerate", "config"], False),
        ([sys.executable, "train.py"], False), (["git", "log"], False), ([], False),
    ],
)  # fmt: skip
def test_launchers_are_told_from_other_children(words: list[str], starts: bool) -> None:
    assert starts_training(words) == starts


def test_programs_are_told_from_models_without_two_dashes() -> None:
    words = ("python", "python3.12", "bash", "sbatch", "torchrun", "accelerate", "uv", "nsys", "llama-2-7b", "trainer")
    assert [names_program(word) for word in words] == [True] * 8 + [False] * 2


def test_the_tables_know_every_argument_of_the_installed_launchers() -> None:
    """An argument that a newer release adds needs its row."""
    run = pytest.importorskip("torch.distributed.run")
    launch = pytest.importorskip("accelerate.commands.launch")
    for options, parser in ((TORCHRUN, run.get_args_parser()), (ACCELERATE, launch.launch_command_parser())):
        for action in parser._actions:
            names = {name.lstrip("-").replace("_", "-") for name in action.option_strings} - {"h", "help"}
            if action.nargs == 0 or type(action).__name__ == "check_env":
                assert names <= set(options.switches), action
            elif not options.open:
                assert names <= set(options.values), action
    assert DEEPSPEED.values["num-gpus"] == "processes"


# --- traced, as a user types it ---

TRAIN = """
import os, sys, torch
import torch.distributed as dist

if "WORLD_SIZE" in os.environ:
    dist.init_process_group("nccl")
width = int(sys.argv[1])
model = torch.nn.Linear(width, width).cuda()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(3):
    model(torch.randn(8, width, device="cuda")).sum().backward()
    optimizer.step()
"""
TOOL = """
import subprocess, sys
from pathlib import Path
subprocess.run(["torchrun", "--nproc_per_node", "2", str(Path(__file__).with_name("train.py")), *sys.argv[1:]])
"""


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    pytest.importorskip("torch")
    (tmp_path / "pkg").mkdir()
    for name in ("train.py", "pkg/train.py"):
        (tmp_path / name).write_text(TRAIN)
    (tmp_path / "pkg" / "__init__.py").write_text("")
    (tmp_path / "tool").write_text(f"#!{sys.executable}\n{TOOL}")
    (tmp_path / "tool").chmod(0o755)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", str(Path(sys.executable).parent), prepend=os.pathsep)
    return tmp_path


def test_a_shell_script_is_traced_to_its_verdict(project: Path, ran: Ran) -> None:
    (project / "train.sh").write_text("W=1024\ntorchrun --fancy 3 --nproc_per_node 4 -m pkg.train $W")
    code, out, err = ran("trace", "--gpu", "h100", "--json", "--", "bash", "train.sh")
    found = json.loads(out)
    assert code == 5 and found["verdict"] == "not_judged", err
    assert [one["key"] for one in found["not_understood"]] == ["torchrun --fancy"]
    assert found["peak"]["requested"] > 2 * 4 * 1024**2 and found["steps"] == 3
    assert any("rank" in note for note in found["notes"])  # of the four, only these are traced


def _by_elastic() -> None:
    from torch.distributed import run

    run.run(run.get_args_parser().parse_args(["--nproc-per-node", "4", "train.py", "7"]))


def _by_accelerate() -> None:
    from accelerate.commands.launch import launch_command, launch_command_parser

    launch_command(launch_command_parser().parse_args(["--num_processes", "4", "--use_fsdp", "train.py", "7"]))


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("start", "launcher"),
    [
        (lambda: subprocess.run(["torchrun", "--nproc_per_node", "4", "train.py", "7"]), "torchrun"),
        (lambda: subprocess.check_call("torchrun --nproc_per_node 4 train.py 7", shell=True), "torchrun"),
        (lambda: os.execvp("torchrun", ["torchrun", "--nproc_per_node", "4", "train.py", "7"]), "torchrun"),
        (lambda: subprocess.run("cd . && exec torchrun --nproc_per_node 4 train.py 7", shell=True), "torchrun"),
        (lambda: os.system("accelerate launch --num_processes 4 --use_fsdp train.py 7"), "accelerate"),
        (_by_elastic, "torchrun"),
        (_by_accelerate, "accelerate"),
    ],
)
def test_what_a_program_would_launch_is_traced_instead(
    project: Path, start: Callable[[], None], launcher: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("accelerate")
    run = parse(["./tool"])
    monkeypatch.setenv("FROM_TOOL", "1")
    with no_children(run), pytest.raises(Relaunch) as caught:
        start()
    made = caught.value.run.on(None, "h100")
    assert (made.launcher, made.processes, made.entry, made.args[-1]) == (launcher, 4, "train.py", "7")
    assert made.environment["FROM_TOOL"] == "1"
    assert launcher == "torchrun" or "--use_fsdp" in (made.settings or ())
    with no_children(run):
        assert subprocess.run("echo torchrun; exit 3", shell=True).returncode == 3


@pytest.mark.nightly
def test_a_program_that_starts_a_launcher_ends_in_the_training(project: Path, ran: Ran) -> None:
    code, out, err = ran("trace", "--gpu", "h100", "--", "./tool", "512")
    assert code == 0 and "rank 0 of 2" in out and "2 x H100" in out, err


def test_an_environment_with_torch_alone_traces_a_plain_script(project: Path, ran: Ran) -> None:
    """Neither memfit's own dependencies nor transformers are there."""
    where = project / "env"
    venv.create(where, symlinks=True)
    packages = next((where / "lib").glob("python*")) / "site-packages"
    for pattern in ("torch", "torch-*", "torchgen", "functorch", "typing_extensions*", "sympy", "mpmath", "networkx",
                    "jinja2", "markupsafe", "filelock", "fsspec", "numpy*"):  # fmt: skip
        for path in Path(sysconfig.get_paths()["purelib"]).glob(pattern):
            (packages / path.name).symlink_to(path)
    command = ["env", "-u", "PYTHONPATH", "env/bin/python", "train.py", "256"]
    code, out, err = ran("trace", "--gpu", "l4", "--", *command)
    assert code == 0 and "FITS" in out, err
    (packages / "torch").unlink()
    next(packages.glob("torch-*")).unlink()
    code, _, err = ran("trace", "--gpu", "l4", "--", *command)
    assert code == 2 and "has no PyTorch" in err


def test_a_module_is_a_whole_command(ran: Ran) -> None:
    code, _, err = ran("trace", "--gpu", "h100", "-m", "pkg.train", "--", "512")
    assert code == 2 and "-- python -m pkg.train 512" in err
