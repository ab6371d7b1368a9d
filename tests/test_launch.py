"""Job files: they parse, start the right number of processes, and carry GPUs, host RAM and the allocator's settings."""

from __future__ import annotations

import argparse
import ast
import json
import re
import shlex
import shutil
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from conftest import Ran
from memfit.catalogue import cards
from memfit.closed_form.host_memory import IMPORTED, PROCESS
from memfit.clusters import TARGETS, files
from memfit.clusters.skypilot import ACCELERATORS
from memfit.clusters.spec import spec_of
from memfit.documents import recipe_file
from memfit.errors import BadInput
from memfit.frameworks import process_layout, targets
from memfit.frameworks.accelerate import environment
from memfit.frameworks.process_layout import ACCELERATE_FILE
from memfit.frameworks.recipe_toml import plan_of
from memfit.nouns.job import Recipe, RecipeFile, Training
from memfit.nouns.plan import Plan
from plans import make_plan

CONF = "expandable_segments:True"
SHARDED = Recipe(method="lora", num_gpus=16, shard="parameters", checkpointing="full", alloc_conf=CONF)


def planned(recipe: Recipe = SHARDED, gpu: str = "h100") -> Plan:
    return plan_of(RecipeFile(model="llama-2-7b", recipe=recipe, gpu=gpu, data="rows.jsonl"), cards.find_gpu(gpu))


@pytest.fixture
def written(tmp_path: Path) -> Path:
    path = tmp_path / "recipe.toml"
    file = RecipeFile(model="llama-2-7b", recipe=SHARDED, gpu="h100", data="rows.jsonl")
    path.write_text(recipe_file.dumps(file))
    return path


@pytest.mark.parametrize("key", TARGETS)
@pytest.mark.parametrize("nodes", [1, 2])
def test_every_target_carries_what_the_plan_knows(key: str, nodes: int) -> None:
    spec = spec_of(planned(), nodes)
    files = TARGETS[key].write(spec)
    text = files[TARGETS[key].file]
    assert spec.gpus == 16 // nodes and spec.host_bytes > spec.gpus * PROCESS
    for word in (CONF, "PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", str(spec.host_gib), str(spec.gpus), "train.py"):
        assert word in text, word
    assert "H100" in text.splitlines()[0] + text  # the first lines say what was planned


@pytest.mark.parametrize("key", ["torchrun", "slurm"])
def test_scripts_are_shell(key: str, tmp_path: Path) -> None:
    plan = replace(planned(SHARDED), recipe=SHARDED.but(alloc_conf="it's; $(false)"))
    for name, text in TARGETS[key].write(spec_of(plan, 2, hours=4)).items():
        (tmp_path / name).write_text(text)
        done = subprocess.run(["bash", "-n", str(tmp_path / name)], capture_output=True, text=True, check=False)
        assert (done.returncode, done.stderr) == (0, "")
        settings = [line for line in text.splitlines() if line.startswith("export ")]
        shown = subprocess.run(
            ["bash", "-c", "\n".join(settings) + '\nprintf %s "$PYTORCH_ALLOC_CONF"'],
            capture_output=True,
            text=True,
            check=True,
        )
        assert shown.stdout == "it's; $(false)"


def test_slurm_asks_for_what_is_needed() -> None:
    spec = spec_of(planned(), 2, hours=12)
    lines = TARGETS["slurm"].write(spec)["job.sbatch"].splitlines()
    asked = dict(line.removeprefix("#SBATCH --").split("=", 1) for line in lines if line.startswith("#SBATCH"))
    assert asked["nodes"] == "2" and asked["gpus-per-node"] == "8" and asked["ntasks-per-node"] == "1"
    assert asked["mem"] == f"{spec.host_gib}G" and asked["time"] == "12:00:00"
    assert lines.index("#!/bin/bash") == 0  # sbatch reads its settings up to the first command
    assert max(i for i, x in enumerate(lines) if x.startswith("#SBATCH")) < lines.index("set -euo pipefail")


def test_a_trainjob_has_the_shape_of_kubeflow() -> None:
    spec = spec_of(planned(), 2, image="me/mine:1")
    files = TARGETS["kubernetes"].write(spec)
    job: dict[str, Any] = yaml.safe_load(files["trainjob.yaml"])
    assert (job["apiVersion"], job["kind"]) == ("trainer.kubeflow.org/v1alpha1", "TrainJob")
    trainer = job["spec"]["trainer"]
    assert set(trainer) <= {"image", "command", "args", "env", "numNodes", "resourcesPerNode", "numProcPerNode"}
    assert (trainer["numNodes"], trainer["numProcPerNode"], trainer["image"]) == (2, 8, "me/mine:1")
    for kind in ("requests", "limits"):
        assert trainer["resourcesPerNode"][kind] == {"memory": f"{spec.host_gib}Gi", "nvidia.com/gpu": 8}
    assert {"name": "PYTORCH_ALLOC_CONF", "value": CONF} in trainer["env"]
    secret = {"secretKeyRef": {"name": "huggingface", "key": "HF_TOKEN", "optional": True}}
    assert trainer["env"].pop() == {"name": "HF_TOKEN", "valueFrom": secret}
    assert trainer["env"].pop(0)["name"] == "JOBSET_UID"
    assert all(isinstance(pair["value"], str) for pair in trainer["env"])  # Kubernetes refuses anything else
    (patch,) = job["spec"]["runtimePatches"]
    (node,) = patch["trainingRuntimeSpec"]["template"]["spec"]["replicatedJobs"]
    pod = node["template"]["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    assert (node["name"], container["name"], container["volumeMounts"][0]["mountPath"]) == ("node", "node", "/dev/shm")
    assert pod["volumes"][0]["name"] == container["volumeMounts"][0]["name"]
    assert pod["volumes"][0]["emptyDir"] == {"medium": "Memory", "sizeLimit": "24Gi"}  # of the 8 processes' host memory
    assert spec.shared_gib < spec.host_gib
    assert "COPY requirements.txt" in files["Dockerfile"]
    assert not any(mark in files["trainjob.yaml"] for mark in ("&id", "*id"))
    assert "docker push me/mine:1" in files["trainjob.yaml"].splitlines()[1]


def test_a_sky_task_has_the_shape_of_skypilot() -> None:
    spec = spec_of(planned(), 2)
    text = TARGETS["skypilot"].write(spec)["sky.yaml"]
    assert "setup: |\n  pip install -r requirements.txt\n" in text
    task = yaml.safe_load(text)
    assert task["resources"] == {"accelerators": "H100:8", "memory": f"{spec.host_gib}+"} and task["num_nodes"] == 2
    assert task["envs"]["PYTORCH_ALLOC_CONF"] == CONF and "torchrun" in task["run"]
    with pytest.raises(BadInput, match="accelerator"):
        TARGETS["skypilot"].write(spec_of(planned(Recipe(method="lora"), "rtx-4080")))


def test_every_sky_name_is_in_skypilots_catalog() -> None:
    """Its GPUs, from catalogs/v8/common/accelerators.csv of skypilot-org/skypilot-catalog at d4d53f0."""
    names = (Path(__file__).parent / "data" / "skypilot_accelerators.txt").read_text().splitlines()
    assert set(ACCELERATORS) <= {gpu.short for gpu in cards.list_gpus()}
    assert set(ACCELERATORS.values()) <= set(names)


def test_offloading_is_in_the_host_memory() -> None:
    plain = Recipe(precision="bf16-master", num_gpus=8, shard="parameters")
    more = spec_of(planned(plain.but(offload="optimizer"))).host_bytes - spec_of(planned(plain)).host_bytes
    assert more > 6_700_000_000 * 12  # master copy and two states in fp32


def test_the_first_process_has_room_for_what_it_gathers() -> None:
    """FSDP2 saves whole: one process holds every optimizer state, or the weights. 16-bit weights are read in place."""
    recipe = Recipe(precision="bf16", num_gpus=8, shard="parameters")
    parameters, own = 6_738_415_616, 8 * PROCESS + IMPORTED
    assert spec_of(planned(recipe)).host_bytes - own == pytest.approx(parameters * 4, rel=0.001)  # two bf16 states
    assert spec_of(planned(recipe.but(method="lora"))).host_bytes - own == pytest.approx(parameters * 2, rel=0.02)
    single = spec_of(planned(recipe.but(method="lora", shard="none"))).host_bytes - own
    assert single < parameters * 0.05 * 8  # adapters alone: the pages of the file are shared
    wide = recipe.but(precision="fp32", shard="none")
    assert spec_of(planned(wide)).host_bytes - own == pytest.approx(parameters * 4 * 8, rel=0.001)  # each a copy


@pytest.mark.parametrize(
    ("model", "task"), [("qwen3-0.6b", "dpo"), ("bert-base-uncased", "classification"), ("whisper-tiny", "speech")]
)
def test_a_job_runs_the_script_of_any_task_that_a_formula_counts(
    model: str, task: str, ran: Ran, tmp_path: Path
) -> None:
    written, job = tmp_path / "run", tmp_path / "job"
    assert ran("plan", model, "--task", task, "--gpu", "l4", "--no-trace", "--out", written)[0] == 0
    assert ran("launch", written / "recipe.toml", "--target", "slurm", "--out", job)[0] == 0
    assert (job / "train.py").read_text() == (written / "train.py").read_text()
    assert recipe_file.read(job / "recipe.toml").task == task


def test_gpus_that_cannot_be_dealt_out_are_refused() -> None:
    for nodes in (0, 3, -1):
        with pytest.raises(BadInput, match="divided"):
            spec_of(planned(), nodes)


@pytest.mark.parametrize(("shard", "kind"), [("none", "llama"), ("parameters", "llama"), ("parameters", "qwen3_5")])
def test_the_environment_is_that_of_accelerate(shard: Any, kind: str, tmp_path: Path) -> None:
    """Against accelerate's own launcher, reading the file that the export writes."""
    pytest.importorskip("accelerate")
    from accelerate.commands.config.config_args import load_config_from_file
    from accelerate.commands.launch import launch_command_parser
    from accelerate.utils.launch import prepare_multi_gpu_env

    recipe = Recipe(method="lora", precision="bf16-mixed", num_gpus=2, shard=shard)
    plan = make_plan(recipe)
    job = replace(plan.job, architecture=replace(plan.job.architecture, model_type=kind))
    targets.write(targets.export(replace(plan, job=job)), tmp_path)
    config = load_config_from_file(str(tmp_path / ACCELERATE_FILE))
    words = ["--num_processes", "2", "--num_machines", "1", "--dynamo_backend", "no", "--mixed_precision", "bf16"]
    if config.fsdp_config:
        words += ["--use_fsdp", *(w for k, v in config.fsdp_config.items() for w in (f"--{k}", str(v)))]
    theirs = prepare_multi_gpu_env(launch_command_parser().parse_args([*words, "train.py"]))
    ours = environment(recipe, kind, tmp_path)
    assert ours and {name: theirs.get(name) for name in ours} == ours
    assert ("FSDP_TRANSFORMER_CLS_TO_WRAP" in ours) == (kind in process_layout.BLOCKS)


def test_deepspeed_finds_its_file(tmp_path: Path) -> None:
    found = environment(Recipe(num_gpus=2, shard="optimizer"), "llama", tmp_path)
    assert found["ACCELERATE_DEEPSPEED_CONFIG_FILE"] == str(tmp_path / "ds_config.json")
    assert (found["ACCELERATE_USE_DEEPSPEED"], found["ACCELERATE_DEEPSPEED_ZERO3_INIT"]) == ("true", "false")


# ---- inputs, output, compilers

BACKENDS = {
    "plain": Recipe(method="lora", loss="fused"),
    "fsdp": Recipe(method="lora", num_gpus=4, shard="parameters"),
    "deepspeed": Recipe(precision="bf16-master", num_gpus=4, shard="gradients", offload="optimizer"),
}
INPUTS = {"hub": (), "data": ("data",), "model": ("model",), "all": ("data", "eval-data", "model")}
CONFIG = {"model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_size": 64, "intermediate_size": 128,
          "num_hidden_layers": 2, "num_attention_heads": 4,
          "vocab_size": 300, "max_position_embeddings": 256}  # fmt: skip


@pytest.fixture
def here(tmp_path: Path) -> dict[str, str]:
    """Inputs of this machine, whose path has to be quoted."""
    folder = tmp_path / "o'brien's files"
    (folder / "model.v2").mkdir(parents=True)
    (folder / "model.v2" / "config.json").write_text(json.dumps(CONFIG))
    for name in ("rows.jsonl", "eval.csv"):
        (folder / name).write_text('{"text": "a"}\n')
    paths = {"data": folder / "rows.jsonl", "eval-data": folder / "eval.csv", "model": folder / "model.v2"}
    return {name: str(path) for name, path in paths.items()}


def parsed(script: str, words: list[str]) -> argparse.Namespace:
    """The words, read by the parser of the exported train.py."""
    body = [n for n in ast.parse(script).body if isinstance(n, ast.Assign) or getattr(n, "name", "") == "arguments"]
    wanted = [n for n in body if isinstance(n, ast.FunctionDef) or isinstance(n.value, ast.Constant)]
    names: dict[str, Any] = {"argparse": argparse, "__doc__": ""}
    exec(compile(ast.Module(wanted, []), "train.py", "exec"), names)
    return names["arguments"](words)  # type: ignore[no-any-return]


def told(key: str, files: dict[str, str], environment: dict[str, str], tmp_path: Path) -> list[str]:
    """What train.py is given: by the list of the container, else by the shell itself, with a torchrun that says it."""
    if key == "kubernetes":
        first, *words = yaml.safe_load(files["trainjob.yaml"])["spec"]["trainer"]["args"]
        assert first == "train.py"
        return [*words, "--epochs", "3"]
    said = started(key, files, tmp_path)
    return said[said.index("train.py") + 1 :]


def started(key: str, files: dict[str, str], tmp_path: Path, **more: str) -> list[str]:
    """What torchrun is given by the shell itself, in the environment of the cluster."""
    for name in ("torchrun", "srun", "scontrol"):
        # as since Slurm 22.05: the cores of a task are those that srun itself is told
        run = {
            "srun": '[[ $1 == --cpus-per-task=8 ]] || exit 9; shift; "$@"',
            "scontrol": "echo first",
            "torchrun": 'printf "%s\\0" "$@"',
        }[name]
        (tmp_path / name).write_text(f"#!/bin/bash\n{run}\n")
        (tmp_path / name).chmod(0o755)
    script = yaml.safe_load(files["sky.yaml"])["run"] if key == "skypilot" else files[TARGETS[key].file]
    (tmp_path / "script").write_text(script)
    ours = {"ARGS": "--epochs 3"} if key == "skypilot" else {}
    variables = {
        "PATH": f"{tmp_path}:/bin:/usr/bin",
        "SLURM_SUBMIT_DIR": str(tmp_path),
        "SLURM_JOB_ID": "1",
        "SLURM_CPUS_PER_TASK": "8",
        "HEAD": "first",
    }
    variables |= {
        "SLURM_NNODES": "2",
        "SLURM_JOB_NODELIST": "a",
        "SKYPILOT_NODE_IPS": "10.0.0.1",
        "SKYPILOT_NUM_NODES": "2",
        "SKYPILOT_TASK_ID": "sky-2026-01-02-03-04-05-678901_mine_1",
    }
    words = ["bash", str(tmp_path / "script"), *([] if ours else ["--epochs", "3"])]
    done = subprocess.run(words, env=variables | ours | more, capture_output=True, text=True, check=True)
    return done.stdout.split("\0")[:-1]


# the numbers by which clusters tell one job from another
JOBS = {
    "slurm": [{"SLURM_JOB_ID": "101"}, {"SLURM_JOB_ID": "102"}],
    "skypilot": [{"SKYPILOT_TASK_ID": f"sky-2026-01-02-03-04-05-678901_mine_{number}"} for number in (1, 2)],
    "torchrun": [{}, {"PORT": "29501"}],
}


@pytest.mark.parametrize("key", JOBS)
@pytest.mark.parametrize("nodes", [1, 2])
def test_two_jobs_on_one_machine_do_not_meet(key: str, nodes: int, tmp_path: Path) -> None:
    files = TARGETS[key].write(spec_of(planned(), nodes))
    jobs = [started(key, files, tmp_path, **job) for job in JOBS[key]]
    where = [words[words.index("--rdzv-endpoint") + 1] for words in jobs]
    if nodes == 1:
        assert where == ["localhost:0"] * 2  # each takes a port that is free
        return
    ports = [int(place.rpartition(":")[2]) for place in where]
    assert len(set(ports)) == 2 and all(1024 < port < 32768 for port in ports)
    assert started(key, files, tmp_path, **JOBS[key][0]) == jobs[0]  # as every node of it says
    names = {words[words.index("--rdzv-id") + 1] for words in jobs}
    assert len(names) == (1 if key == "torchrun" else 2)  # nobody numbers what is started by hand


MANAGED = "sky-managed-2026-01-02-03-04-05-678901_mine_7-0"  # docs.skypilot.co, environment-variables
# what a cluster says of a job when it is started again: with the first start's variables it is submitted
AGAIN = {
    "slurm": ({"SLURM_JOB_ID": "7"}, {"SLURM_JOB_ID": "7", "SLURM_RESTART_COUNT": "1"}),
    "skypilot": ({"SKYPILOT_TASK_ID": MANAGED}, {"SKYPILOT_TASK_ID": MANAGED}),
}


@pytest.mark.parametrize("key", AGAIN)
@pytest.mark.parametrize("backend", BACKENDS)
def test_a_job_that_is_started_again_goes_on_where_it_was(key: str, backend: str, tmp_path: Path) -> None:
    plan = planned(BACKENDS[backend])
    files = targets.export(plan) | TARGETS[key].write(spec_of(plan))
    first, again = (trained(key, files, tmp_path, **told) for told in AGAIN[key])
    assert first.output == again.output and True in again.resume and first.epochs == 3
    other = trained(key, files, tmp_path, **{name: value.replace("7", "8") for name, value in AGAIN[key][0].items()})
    assert other.output != first.output  # nothing of the first is taken for its own
    if key == "slurm":
        assert not first.resume and not other.resume
        assert not trained(key, files, tmp_path, SLURM_RESTART_COUNT="0").resume
    else:
        mine = trained(key, files, tmp_path, OUTPUT="/bucket", **AGAIN[key][1])
        assert mine.output == f"/bucket/{MANAGED}"
        once = trained(key, files, tmp_path)  # sky launch recovers nothing
        assert (once.output, once.resume) == ("output", [])


def test_a_restarted_job_goes_on_from_its_own_checkpoint_else_from_the_one_it_was_given(tmp_path: Path) -> None:
    script = targets.export(planned())["train.py"]
    body = [n for n in ast.parse(script).body if getattr(n, "name", "") in ("checkpoint_of", "last_checkpoint")]
    names: dict[str, Any] = {"argparse": argparse, "Path": Path}
    exec(
        compile(ast.Module([ast.parse("from __future__ import annotations").body[0], *body], []), "train.py", "exec"),
        names,
    )
    output = tmp_path / "output"

    def begin(*words: str) -> str | None:
        found: str | None = names["checkpoint_of"](parsed(script, ["--output", str(output), *words]))
        return found

    for words in (["--resume", "given/checkpoint-9", "--resume"], ["--resume", "--resume", "given/checkpoint-9"]):
        assert begin(*words) == "given/checkpoint-9"  # it was stopped before it saved anything
    assert begin("--resume") is None and begin() is None
    for step in (2, 10):
        (output / f"checkpoint-{step}").mkdir(parents=True)
        (output / f"checkpoint-{step}" / "trainer_state.json").touch()
    assert begin("--resume", "given/checkpoint-9", "--resume") == str(output / "checkpoint-10")
    assert begin("--resume", "given/checkpoint-9") == "given/checkpoint-9" and begin() is None


def trained(key: str, files: dict[str, str], tmp_path: Path, **more: str) -> argparse.Namespace:
    """What train.py understands of what the job's script tells it."""
    words = started(key, files, tmp_path, **more)
    return parsed(files["train.py"], words[words.index("train.py") + 1 :])


def test_a_restarted_pod_goes_on_where_its_job_was() -> None:
    """Kubernetes puts $(NAME) of the container's environment into its args; JobSet labels every pod of a job alike."""
    plan = planned()
    files = targets.export(plan) | TARGETS["kubernetes"].write(spec_of(plan))
    trainer = yaml.safe_load(files["trainjob.yaml"])["spec"]["trainer"]
    fields = {e["name"]: e["valueFrom"]["fieldRef"]["fieldPath"] for e in trainer["env"] if "fieldRef" in str(e)}
    assert fields == {"JOBSET_UID": "metadata.labels['jobset.sigs.k8s.io/jobset-uid']"}
    given = parsed(files["train.py"], [word.replace("$(JOBSET_UID)", "4a1b") for word in trainer["args"][1:]])
    assert (given.output, given.resume) == ("/workspace/output/4a1b", [True])
    claim, pod = yaml.safe_load(files["output.yaml"]), yaml.safe_load(files["fetch.yaml"])
    assert pod["spec"]["volumes"][0]["persistentVolumeClaim"]["claimName"] == claim["metadata"]["name"]


def test_a_job_does_not_end_with_another_of_its_machine(tmp_path: Path) -> None:
    """Two launch.sh by torchrun itself: the second goes on when the first, which began before it, has ended."""
    pytest.importorskip("torch")
    script = TARGETS["torchrun"].write(spec_of(planned(BACKENDS["plain"])))["launch.sh"]
    trains = "import pathlib, sys, time\nmine, other = map(pathlib.Path, sys.argv[1:])\nmine.touch()\n"
    # with an end, where none comes
    trains += "for _ in range(1200):\n    if other.exists():\n        break\n    time.sleep(0.05)\n"
    env = {"PATH": f"{Path(sys.executable).parent}:/bin:/usr/bin", "OMP_NUM_THREADS": "1", "HOME": str(tmp_path)}
    jobs = []
    for mine, other in (("a", "b"), ("b", "ended")):
        folder = tmp_path / f"job {mine}"
        folder.mkdir()
        (folder / "launch.sh").write_text(script)
        (folder / "train.py").write_text(trains)
        words = ["bash", str(folder / "launch.sh"), str(tmp_path / mine), str(tmp_path / other)]
        jobs.append(subprocess.Popen(words, env=env, stderr=subprocess.PIPE, text=True))
        for _ in range(1200):
            if (tmp_path / mine).exists() or jobs[-1].poll() is not None:
                break
            time.sleep(0.05)
    first = jobs[0].communicate(timeout=120)[1]
    (tmp_path / "ended").touch()
    second = jobs[1].communicate(timeout=120)[1]
    assert [job.returncode for job in jobs] == [0, 0], first + second


@pytest.mark.parametrize("key", TARGETS)
@pytest.mark.parametrize("local", INPUTS)
@pytest.mark.parametrize("backend", BACKENDS)
def test_train_py_is_told_where_the_job_has_its_inputs(
    key: str, local: str, backend: str, here: dict[str, str], tmp_path: Path
) -> None:
    recipe = BACKENDS[backend]
    mine = {name: here[name] for name in INPUTS[local]}
    names = {"model": "smollm2-135m", "data": "org/rows", "eval-data": "org/held-out"} | mine
    training = Training(eval_data=names["eval-data"])
    file = RecipeFile(model=names["model"], recipe=recipe, gpu="h100", data=names["data"], training=training)
    plan = plan_of(file, cards.find_gpu("h100"))
    assert process_layout.backend(recipe) == backend
    spec = spec_of(plan, 1 if backend == "plain" else 2)
    assert spec.inputs == mine
    files = targets.export(plan) | TARGETS[key].write(spec)
    given = parsed(files["train.py"], told(key, files, spec.environment, tmp_path))
    reads = {"model": given.model, "data": given.data, "eval-data": given.eval_data}
    assert given.epochs == 3
    head = [line for line in files[TARGETS[key].file].splitlines() if line.startswith("# ")]
    for name, value in reads.items():
        if name not in mine:
            assert value == (names[name] if name != "model" else plan.job.architecture.name)
        elif key == "skypilot":
            assert yaml.safe_load(files["sky.yaml"])["file_mounts"][value] == mine[name]
        elif key == "kubernetes":
            assert carried(head, tmp_path)[value.removeprefix("/workspace/")] == mine[name]
        else:
            assert value == mine[name] and any(mine[name] in line and "every node" in line for line in head)
    assert reads["data"].endswith(".jsonl") == ("data" in mine)  # train.py reads by the ending


def carried(head: list[str], tmp_path: Path) -> dict[str, str]:
    """What the commands of the head put beside the Dockerfile, by running them."""
    found = {}
    for line in head:
        if " cp -" not in line or "kubectl" in line:
            continue
        subprocess.run(["bash", "-c", line.removeprefix("# ")], cwd=tmp_path, check=True)
        words = shlex.split(line)
        found[words[-1]] = words[-2].removesuffix("/.")
        source, copy = Path(found[words[-1]]), tmp_path / words[-1]
        assert (copy / "config.json").exists() if source.is_dir() else copy.read_text() == source.read_text()
    return found


@pytest.mark.parametrize("nodes", [1, 4])
def test_output_outlives_the_pod(nodes: int) -> None:
    spec = spec_of(planned(BACKENDS["fsdp"]), nodes)
    files = TARGETS["kubernetes"].write(spec)
    claim, pod, job = (yaml.safe_load(files[name]) for name in ("output.yaml", "fetch.yaml", "trainjob.yaml"))
    assert claim["kind"] == "PersistentVolumeClaim"
    assert claim["spec"]["accessModes"] == ["ReadWriteOnce" if nodes == 1 else "ReadWriteMany"]
    assert claim["spec"]["resources"]["requests"] == {"storage": f"{spec.output_gib}Gi"}
    (node,) = job["spec"]["runtimePatches"][0]["trainingRuntimeSpec"]["template"]["spec"]["replicatedJobs"]
    trains = node["template"]["spec"]["template"]["spec"]
    for each in (pod["spec"], trains):
        claimed = [
            v["name"]
            for v in each["volumes"]
            if v.get("persistentVolumeClaim") == {"claimName": claim["metadata"]["name"]}
        ]
        assert len(claimed) == 1
        mounts = {m["name"]: m["mountPath"] for m in each["containers"][0]["volumeMounts"]}
        assert set(mounts) == {v["name"] for v in each["volumes"]} and mounts[claimed[0]] == "/workspace/output"
    assert "WORKDIR /workspace\n" in files["Dockerfile"]
    assert files["trainjob.yaml"].count(f"{pod['metadata']['name']}:/workspace/output") == 1  # what kubectl cp reads
    assert TARGETS["kubernetes"].submit == ("kubectl", "apply", "-f", "output.yaml", "-f", "trainjob.yaml")


def test_output_has_room_for_every_checkpoint_that_is_kept() -> None:
    """save_total_limit=2 and the one being written, each with AdamW's two states; then the model."""
    parameters = 6_738_415_616
    plain = Recipe(precision="bf16")
    assert spec_of(planned(plain)).output_bytes == pytest.approx(parameters * (3 * (2 + 4) + 2), rel=0.001)
    master = spec_of(planned(BACKENDS["deepspeed"]))  # 16-bit weights twice, fp32 master and states
    assert master.output_bytes == pytest.approx(parameters * (3 * (4 + 12) + 2), rel=0.001)
    for key in targets.SCRIPTS:
        assert "save_total_limit=2," in targets.SCRIPTS[key](planned(plain))["train.py"]
    lora = spec_of(planned(plain.but(method="lora")))
    assert lora.output_bytes < parameters and lora.output_gib >= 1
    disk = yaml.safe_load(TARGETS["skypilot"].write(master)["sky.yaml"])["resources"]["disk_size"]
    assert disk > master.output_gib + parameters * 2 / 2**30
    assert "disk_size" not in TARGETS["skypilot"].write(lora)["sky.yaml"]


@pytest.mark.parametrize("gpu", ["h100", "mi300x"])
@pytest.mark.parametrize("backend", BACKENDS)
def test_images_bring_compilers(gpu: str, backend: str) -> None:
    spec = spec_of(planned(BACKENDS[backend], gpu))
    lines = TARGETS["kubernetes"].write(spec)["Dockerfile"].splitlines()
    packages = next(line for line in lines if "apt-get" in line)
    assert "build-essential" in packages  # Triton's launchers, DeepSpeed's operators
    assert ("python:" in lines[0]) != ("python3-dev" in packages)  # Python.h once
    assert ("-devel" in lines[0] or "-complete" in lines[0]) == (backend == "deepspeed")  # nvcc, hipcc
    torch = [i for i, line in enumerate(lines) if "whl/rocm" in line]
    assert bool(torch) == (gpu == "mi300x") and all(
        i < lines.index("RUN pip install -r requirements.txt") for i in torch
    )
    task = yaml.safe_load(TARGETS["skypilot"].write(spec)["sky.yaml"])
    assert task["resources"].get("image_id") == (
        f"docker:{lines[0].removeprefix('FROM ')}" if backend == "deepspeed" else None
    )
    assert "build-essential" in task["setup"]
    for key in ("slurm", "torchrun"):
        assert any("g++" in line for line in TARGETS[key].notes(spec)) == (backend == "deepspeed")


@pytest.mark.parametrize("gpu", ["h100", "mi300x"])
@pytest.mark.parametrize("key", ["slurm", "torchrun"])
def test_a_compiler_is_named_by_the_card_s_maker(key: str, gpu: str) -> None:
    spec = spec_of(planned(BACKENDS["deepspeed"], gpu))
    said = "\n".join([*TARGETS[key].notes(spec), *TARGETS[key].write(spec).values()])
    found = {word for word in ("nvcc", "CUDA_HOME", "hipcc", "ROCM_HOME") if word in said}
    assert found == ({"nvcc", "CUDA_HOME"} if gpu == "h100" else {"hipcc", "ROCM_HOME"})


@pytest.mark.parametrize("key", TARGETS)
@pytest.mark.parametrize("backend", ["fsdp", "deepspeed"])
def test_several_machines_are_started_by_the_job_alone(key: str, backend: str) -> None:
    """accelerate.yaml speaks of one machine; what DeepSpeed is told is the same on all of them."""
    plan = planned(BACKENDS[backend])
    one, two = (files(spec_of(plan, nodes), TARGETS[key]) for nodes in (1, 2))
    assert yaml.safe_load(one[ACCELERATE_FILE])["num_machines"] == 1 and ACCELERATE_FILE not in two
    assert ("ds_config.json" in one) == ("ds_config.json" in two) == (backend == "deepspeed")
    assert f"    accelerate launch --config_file {ACCELERATE_FILE} train.py\n" in one["train.py"]
    assert f"    {TARGETS[key].line}\n" in two["train.py"] and "accelerate launch" not in two["train.py"]
    assert one["train.py"].partition('"""\n')[2] == two["train.py"].partition('"""\n')[2]


def test_an_image_is_quoted_where_it_is_typed() -> None:
    spec = spec_of(planned(BACKENDS["plain"]), image="my image; true")
    (line,) = [line for line in TARGETS["kubernetes"].notes(spec) if line.startswith("docker build")]
    assert shlex.split(line)[:4] == ["docker", "build", "-t", "my image; true"]
    job = yaml.safe_load(TARGETS["kubernetes"].write(spec)["trainjob.yaml"])
    assert job["spec"]["trainer"]["image"] == "my image; true"


@pytest.mark.parametrize("where", ["its folder", "another job's folder", "a copy", "a copy, edited since", "nowhere"])
def test_a_slurm_job_finds_its_folder(tmp_path: Path, where: str) -> None:
    """Slurm runs a copy of the script (here with a path of its own) in the folder that sbatch was typed in."""
    job, typed = tmp_path / "job's", tmp_path / "typed in"
    script = TARGETS["slurm"].write(spec_of(planned(BACKENDS["plain"]), folder=str(job)))["job.sbatch"]
    typed.mkdir()
    if not where.startswith("a copy"):  # which was taken to a machine that has no such folder
        job.mkdir()
        (job / "job.sbatch").write_text(script)
    others = {"another job's folder": "another", "a copy": script, "a copy, edited since": script + "# later\n"}
    if where in others:
        (typed / "job.sbatch").write_text(others[where])
    spool = tmp_path / "slurm_script"
    spool.write_text("srun() { pwd; }\n" + script)
    for place in (job, typed):
        if (place / "job.sbatch").exists() and (place / "job.sbatch").read_text() == script:
            (place / "job.sbatch").write_text(spool.read_text())
    env = {
        "PATH": "/bin:/usr/bin",
        "SLURM_SUBMIT_DIR": str(job if where == "its folder" else typed),
        "SLURM_JOB_ID": "1",
    }
    env |= {"SLURM_CPUS_PER_TASK": "8", "SLURM_NNODES": "1", "SLURM_JOB_NODELIST": "a"}
    done = subprocess.run(["bash", str(spool)], env=env, cwd=tmp_path, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == str(typed if where.startswith("a copy") else job)


@pytest.mark.parametrize("key", TARGETS)
def test_a_model_of_the_hub_may_want_a_token(key: str, here: dict[str, str]) -> None:
    local = plan_of(RecipeFile(model=here["model"], recipe=BACKENDS["plain"], gpu="h100"), cards.find_gpu("h100"))
    for spec, wanted in ((spec_of(planned(BACKENDS["plain"], "h100")), True), (spec_of(local), False)):
        files = TARGETS[key].write(spec)
        assert any("HF_TOKEN" in line for line in TARGETS[key].notes(spec)) == wanted
        assert ("HF_TOKEN" in files[TARGETS[key].file]) == wanted


def test_links_are_named_where_they_would_not_be_copied(here: dict[str, str]) -> None:
    (Path(here["model"]) / "tokenizer.json").symlink_to(here["data"])
    plan = plan_of(RecipeFile(model=here["model"], recipe=BACKENDS["plain"], gpu="h100"), cards.find_gpu("h100"))
    spec = spec_of(plan)
    assert any("links" in line for line in TARGETS["skypilot"].notes(spec))
    assert any("cp -RL" in line for line in TARGETS["kubernetes"].notes(spec))


# ---- the command


@pytest.mark.parametrize("key", TARGETS)
def test_launch_writes_and_does_not_overwrite(ran: Ran, written: Path, tmp_path: Path, key: str) -> None:
    words = ("launch", written, "--target", key, "--nodes", 2, "--out", tmp_path / "job")
    code, out, err = ran(*words)
    assert code == 0 and TARGETS[key].file in out and " ".join(TARGETS[key].submit) in err
    assert "rows.jsonl is not on this machine" in err and "names no data" not in err
    head = (tmp_path / "job" / TARGETS[key].file).read_text().splitlines()
    said = [line.removeprefix("note: ") for line in err.splitlines()[1:-1]]
    assert said and {f"# {line}" for line in said} <= set(head)  # what is told is in the file as well
    names = {path.name for path in (tmp_path / "job").iterdir()}
    assert {"train.py", "recipe.toml", "requirements.txt", TARGETS[key].file} <= names
    code, _, err = ran(*words)
    assert code == 2 and "--force" in err
    written.write_text(written.read_text().replace('data = "rows.jsonl"\n', ""))
    assert "train.py reads data.jsonl" in ran(*words, "--force")[2]


def test_what_is_launched_trains_by_the_recipes_training(ran: Ran, written: Path, tmp_path: Path) -> None:
    written.write_text(written.read_text() + "\n[training]\nlearning_rate = 1e-3\nmax_steps = 7\n")
    words = ("launch", written, "--target", "slurm", "--force", "--out", tmp_path / "job")
    assert ran(*words)[0] == 0
    script = (tmp_path / "job" / "train.py").read_text()
    assert "LEARNING_RATE = 0.001 " in script and "MAX_STEPS = 7 " in script and "EPOCHS = 1\n" in script
    assert ran(*words, "--epochs", "2.5", "--eval-data", "held-out.jsonl")[0] == 0
    script = (tmp_path / "job" / "train.py").read_text()
    assert "EPOCHS = 2.5\n" in script and "MAX_STEPS" not in script and 'EVAL_DATA = "held-out.jsonl"' in script
    told = Training(learning_rate=1e-3, epochs=2.5, eval_data="held-out.jsonl")
    assert recipe_file.read(tmp_path / "job" / "recipe.toml").training == told


def test_a_batch_that_is_not_trained_and_data_that_is_nowhere_are_said(ran: Ran, written: Path, tmp_path: Path) -> None:
    text = written.read_text()
    written.write_text(text.replace("[recipe]", "effective_batch = 4\n\n[recipe]"))
    words = ("launch", written, "--target", "slurm", "--force", "--out", tmp_path / "job")
    code, _, err = ran(*words)
    assert code == 0 and "effective_batch is 4" in err and "trains 16 " in err
    assert "trains 16 " in ran("estimate", "--from", written)[2]
    assert "trains 16 " in ran("export", written, "--out", tmp_path / "trl", "--force")[2]
    written.write_text(text)
    assert "effective_batch" not in ran(*words)[2]
    code, _, err = ran(*words, "--eval-data", "nowhere")
    assert code == 2 and "no file nowhere" in err
    assert ran(*words, "--eval-data", "owner/rows")[0] == 0


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--out", "x"), "--target"),
        (("--target", "slurm", "--out", "x", "--epochs", "0"), "--epochs must be"),
        (("--target", "slurm"), "--out"),
        (("--target", "lsf", "--out", "x"), "known: torchrun"),
        (("--target", "slurm", "--nodes", "5", "--out", "x"), "divided"),
        (("--target", "torchrun", "--hours", "5", "--out", "x"), "--hours is for --target slurm, not torchrun"),
        (("--target", "kubernetes", "--hours", "5", "--out", "x"), "--hours is for --target slurm, not kubernetes"),
        (("--target", "slurm", "--image", "a/b", "--out", "x"), "--image is for --target kubernetes, not slurm"),
        (("--target", "skypilot", "--image", "a/b", "--out", "x"), "--image is for --target kubernetes, not skypilot"),
        (("--target", "skypilot", "--out", "x", "--gpu", "rtx-4080", "--force"), "accelerator"),
    ],
)
def test_bad_input_is_refused_with_a_hint(
    ran: Ran, written: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, words: tuple[str, ...], said: str
) -> None:
    monkeypatch.chdir(tmp_path)
    code, out, err = ran("launch", written, *words)
    assert (code, out) == (2, "") and said in err and "hint:" in err
    assert not (tmp_path / "x").exists()


def test_a_recipe_for_so_much_memory_asks_for_a_card(ran: Ran, written: Path, tmp_path: Path) -> None:
    recipe = tmp_path / "recipe.toml"
    recipe.write_text(re.sub(r'(?m)^gpu = ".*"$', 'gpu = "custom"', written.read_text()))
    for command in ("launch", "export"):
        code, _, err = ran(
            command, recipe, "--target", "slurm" if command == "launch" else "trl", "--out", tmp_path / "x"
        )
        assert code == 2 and "names no GPU" in err and "--gpu rtx-4090" in err
        assert (
            ran(
                command,
                recipe,
                "--gpu",
                "h100",
                "--target",
                "slurm" if command == "launch" else "trl",
                "--out",
                tmp_path / command,
            )[0]
            == 0
        )


@pytest.mark.parametrize("command", ["launch", "export", "train"])
@pytest.mark.parametrize(("asked", "count"), [("4xh100", 4), ("1 x h100", 1), ("h100:32", 32)])
def test_another_number_of_cards_is_another_plan(
    ran: Ran, written: Path, tmp_path: Path, command: str, asked: str, count: int
) -> None:
    target = {"launch": ("--target", "slurm"), "export": ("--target", "trl"), "train": ("--cpu",)}[command]
    words = (command, written, *target, "--out", tmp_path / "x", "--gpu")
    code, out, err = ran(*words, asked)
    assert (code, out) == (2, "") and "and the recipe is for 16" in err and not (tmp_path / "x").exists()
    assert f"hint: --gpu h100 keeps them; memfit plan llama-2-7b --gpu {count}xh100 --out run/" in err
    if command != "train":  # which would begin
        assert ran(*words, "16xh200")[0] == 0


def test_a_model_is_no_recipe(ran: Ran, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for asked, wanted in (
        ("meta-llama/Llama-3.1-8B", "memfit plan meta-llama/Llama-3.1-8B"),
        ("a.toml", "check the path"),
    ):
        code, _, err = ran("launch", asked, "--target", "slurm", "--out", "x")
        assert code == 2 and f"there is no file {asked}" in err and wanted in " ".join(err.split())


def test_submitting_runs_the_clusters_own_command(
    ran: Ran, written: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = ("launch", written, "--target", "slurm", "--nodes", 2, "--out", tmp_path / "job", "--submit")
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    code, _, err = ran(*words)
    assert code == 2 and "no sbatch" in err and not (tmp_path / "job").exists()
    (tmp_path / "bin").mkdir()
    fake = tmp_path / "bin" / "sbatch"
    said = "echo Submitted batch job 7"
    fake.write_text(
        f"#!{shutil.which('sh', path='/bin:/usr/bin')}\npwd > submitted; echo $1 >> submitted; {said}; exit 3\n"
    )
    fake.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:/bin:/usr/bin")
    assert ran(*words)[0] == 3  # as sbatch says
    assert (tmp_path / "job" / "submitted").read_text().split() == [str(tmp_path / "job"), "job.sbatch"]
    everything = [sys.executable, "-m", "memfit", *map(str, words), "--force"]
    for more, answers in (((), False), (("--json",), True)):
        done = subprocess.run([*everything, *more], capture_output=True, text=True, check=False)
        assert done.returncode == 3 and ("Submitted batch job 7" in done.stderr) == answers
        if answers:
            assert json.loads(done.stdout)["command"] == "sbatch job.sbatch"
        else:
            assert done.stdout.splitlines()[-1] == "Submitted batch job 7"
