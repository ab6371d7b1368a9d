"""Launchers and the commands in front of them, one row each: which arguments count processes, which change no memory.

A launcher starts the processes of a job (torchrun, accelerate launch, deepspeed, srun, mpirun). A wrapper runs the
command behind it unchanged (nohup, numactl, nsys profile). The tables name every argument by what it says:
`processes` a node, `total` of all nodes, `nodes`, `devices` (numbers of cards) and so on; an argument
without a meaning changes no memory and is ignored by name. Options are listed without dashes, `_` written as `-`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import PurePath


def _named(text: str) -> dict[str, str]:
    """Return the options of "nnodes=nodes role ..." with their meanings."""
    return {name: meaning for name, _, meaning in (word.partition("=") for word in text.split())}


@dataclass(frozen=True, slots=True)
class Options:
    """The arguments of one program.

    open: options that are in neither table take a value and are the program's own affair (accelerate's settings become
    variables by its own code; profilers have hundreds). abbreviated: unique beginnings of names are accepted, as
    argparse does. variable: the prefix of environment variables that stand for options.
    """

    values: Mapping[str, str] = field(default_factory=dict)
    switches: Mapping[str, str] = field(default_factory=dict)
    open: bool = False
    abbreviated: bool = False
    variable: str = ""


@dataclass(slots=True)
class Said:
    """What the arguments of one program say: (meaning, value) pairs in their order, and the rest of the words."""

    meanings: list[tuple[str, str]] = field(default_factory=list)
    ignored: list[str] = field(default_factory=list)
    unknown: list[str] = field(default_factory=list)
    own: list[str] = field(default_factory=list)  # all words before the rest, as they were typed
    rest: list[str] = field(default_factory=list)

    def last(self, meaning: str, default: str = "") -> str:
        """Return the value of the last argument with this meaning."""
        return next((value for name, value in reversed(self.meanings) if name == meaning), default)

    def says(self, meaning: str) -> bool:
        return any(name == meaning for name, _ in self.meanings)


def read_options(words: Sequence[str], options: Options, environment: Mapping[str, str]) -> Said:
    """Separate a program's own arguments from the command or script behind them."""
    said = Said()
    if options.variable:
        for name, meaning in options.values.items():
            value = environment.get(options.variable + name.upper().replace("-", "_"))
            if value and meaning:
                said.meanings.append((meaning, value))
    index = 0
    while index < len(words) and words[index].startswith("-") and len(words[index]) > 1:
        word = words[index]
        index += 1
        if word == "--":
            break
        written, equals, value = word.partition("=")
        name = _full_name(written, options)
        if name in options.switches and not equals:
            if options.switches[name] or not options.open:
                _note(said, written, options.switches[name], "true")
            continue
        if name in options.values or options.open or not _attached(written, options):
            known = name in options.values or name in options.switches or options.open
            meaning = options.values.get(name, "")
            if not equals and (known or _takes_value(words, index)) and index < len(words):
                count = 2 if meaning == "pair" else 1
                value = " ".join(words[index : index + count])
                index += count
            if name in options.values:
                _note(said, written, "" if meaning == "pair" else meaning, value)
            elif known:
                said.ignored += [] if options.open else [written]
            else:
                said.unknown.append(word)
            continue
        name, value = written[1], written[2:] + equals + value  # -n8
        _note(said, f"-{name}", options.values[name], value)
    said.own, said.rest = list(words[:index]), list(words[index:])
    return said


def _note(said: Said, written: str, meaning: str, value: str) -> None:
    if meaning:
        said.meanings.append((meaning, value))
    else:
        said.ignored.append(written)


def _full_name(written: str, options: Options) -> str:
    name = written.lstrip("-").replace("_", "-")
    if not options.abbreviated or name in options.values or name in options.switches or not written.startswith("--"):
        return name
    longer = [known for known in (*options.values, *options.switches) if known.startswith(name)]
    return longer[0] if len(longer) == 1 else name


def _attached(written: str, options: Options) -> bool:
    """Return whether a short option has its value attached, as in -n8."""
    return not written.startswith("--") and len(written) > 2 and written[1] in options.values


def _takes_value(words: Sequence[str], index: int) -> bool:
    """Guess whether an option that is not known takes the next word: not if that is the script, or nothing is left."""
    return index < len(words) - 1 and not words[index].startswith("-") and PurePath(words[index]).suffix != ".py"


# --- launchers ---

TORCHRUN = Options(  # torch/distributed/run.py, get_args_parser
    values=_named(
        "nnodes=nodes nproc-per-node=processes node-rank rdzv-backend rdzv-endpoint rdzv-id rdzv-conf"
        " max-restarts monitor-interval start-method event-log-handler role log-dir r redirects t tee"
        " local-ranks-filter duplicate-stdout-filters duplicate-stderr-filters master-addr master-port local-addr"
        " logs-specs numa-binding signals-to-handle shutdown-timeout"
    ),
    switches=_named(
        "standalone m=module module=module no-python=no_python run-path use-env=use_env virtual-local-rank"
    ),
    abbreviated=True,
    variable="PET_",
)
ACCELERATE = Options(  # accelerate/commands/launch.py, launch_command_parser; allow_abbrev=False
    values=_named("num-processes=total num-machines=nodes machine-rank config-file=config gpu-ids=devices"),
    switches=_named(
        "m=module module=module no-python=no_python q quiet cpu multi-gpu tpu enable-cpu-affinity dynamo-use-fullgraph"
        " dynamo-use-dynamic dynamo-use-regional-compilation use-deepspeed use-fsdp use-parallelism-config"
        " use-megatron-lm same-network tpu-cluster no-tpu-cluster tpu-use-sudo downcast-bf16"
        " fp8-use-autocast-during-eval debug"
    ),
    open=True,
)
DEEPSPEED = Options(  # deepspeed/launcher/runner.py, parse_args
    values=_named(
        "H=hostfile hostfile=hostfile i=include include=include e=exclude exclude=exclude num-nodes=nodes"
        " num-gpus=processes num-accelerators=processes node-rank master-port master-addr launcher"
        " launcher-args min-elastic-nodes max-elastic-nodes enable-each-rank-log bind-core-list venv-script ssh-port"
    ),
    switches=_named(
        "module=module no-python=no_python no-local-rank=no_local_rank no-ssh-check no-ssh force-multi save-pid"
        " elastic-training bind-cores-to-rank"
    ),
    abbreviated=True,
)
SRUN = Options(  # srun(1)
    values=_named(
        "N=nodes nodes=nodes n=total ntasks=total ntasks-per-node=processes ntasks-per-gpu D=chdir chdir=chdir"
        " export=export container-image=container container-mounts container-workdir=container container-name=container"
        " A account p partition J job-name t time q qos c cpus-per-task cpus-per-gpu m distribution mem mem-per-cpu"
        " mem-per-gpu gres gpus G gpus-per-node gpus-per-task gpus-per-socket gpu-bind gpu-freq o output e error"
        " i input open-mode w nodelist x exclude C constraint cpu-bind mem-bind mpi signal threads-per-core hint"
        " reservation jobid W wait comment kill-on-bad-exit network het-group relative r switches S core-spec"
        " accel-bind bcast task-prolog task-epilog label-prefix license L tmp profile"
    ),
    switches=_named(
        "K u unbuffered l label v vv verbose Q quiet exclusive overlap exact O overcommit preserve-env E pty X"
        " disable-status no-kill Z no-allocate s oversubscribe export-all no-container-mount-home"
        " container-mount-home container-writable container-remap-root no-container-remap-root"
    ),
)
MPIRUN = Options(  # mpirun(1) of Open MPI, MPICH and Intel MPI
    values=_named(
        "n=total np=total c=total N=processes npernode=processes ppn=processes perhost=processes map-by=map x=export"
        " genv env H=hosts host=hosts hosts=hosts hostfile machinefile f bind-to rank-by output-filename wdir=chdir"
        " tag-output-to timeout mca=pair gmca=pair"
    ),
    switches=_named(
        "allow-run-as-root oversubscribe tag-output timestamp-output report-bindings nooversubscribe l v verbose q"
        " merge-stderr-to-stdout bind-to-none bind-to-core prepend-rank"
    ),
)
LAUNCHERS: dict[str, Options] = {
    "torchrun": TORCHRUN, "accelerate": ACCELERATE, "deepspeed": DEEPSPEED, "srun": SRUN, "mpirun": MPIRUN,
}  # fmt: skip
# program, or program and subcommand -> launcher
PROGRAMS = {
    "torchrun": "torchrun", "accelerate launch": "accelerate", "accelerate-launch": "accelerate",
    "deepspeed": "deepspeed", "ds": "deepspeed", "srun": "srun", "mpirun": "mpirun", "mpiexec": "mpirun",
    "mpiexec.hydra": "mpirun", "mpirun.openmpi": "mpirun",
}  # fmt: skip
# module, or module and subcommand, of `python -m` -> launcher
MODULES = {
    "torch.distributed.run": "torchrun", "torch.distributed.launch": "torchrun",
    "accelerate.commands.launch": "accelerate", "accelerate.commands.accelerate_cli launch": "accelerate",
    "deepspeed.launcher.runner": "deepspeed", "deepspeed": "deepspeed",
}  # fmt: skip
# launcher -> how its command line asks for `N` processes on this machine
ASKING = {
    "torchrun": "--nproc_per_node {per_node}", "accelerate": "--num_processes {total}",
    "deepspeed": "--num_gpus {per_node}", "srun": "--ntasks {total}", "mpirun": "-np {total}",
}  # fmt: skip

# --- wrappers ---


@dataclass(frozen=True, slots=True)
class Wrapper:
    """A command that runs the one behind it. skipped: words between its options and that command."""

    options: Options = field(default_factory=Options)
    skipped: int = 0
    subcommands: tuple[str, ...] = ()  # one of which follows


_PROFILER = Options(switches=_named("h help nvtx call-stack verbose quiet native gil subprocesses idle"), open=True)
WRAPPERS: dict[str, Wrapper] = {
    "nohup": Wrapper(),
    "exec": Wrapper(),
    "command": Wrapper(),
    "setsid": Wrapper(Options(switches=_named("c ctty f fork w wait"))),
    "time": Wrapper(Options(values=_named("f format o output"), switches=_named("p v a append portability verbose"))),
    "nice": Wrapper(Options(values=_named("n adjustment"), switches={str(n): "" for n in range(1, 20)})),
    "ionice": Wrapper(Options(values=_named("c n class classdata"), switches=_named("t"))),
    "stdbuf": Wrapper(Options(values=_named("i o e input output error"))),
    "unbuffer": Wrapper(Options(switches=_named("p"))),
    "timeout": Wrapper(
        Options(values=_named("s signal k kill-after"), switches=_named("foreground preserve-status v verbose")), 1
    ),
    "numactl": Wrapper(
        Options(
            values=_named("N m i C p membind cpunodebind interleave physcpubind preferred"),
            switches=_named("l localalloc a all"),
        )
    ),
    "taskset": Wrapper(Options(switches=_named("c cpu-list a all-tasks")), 1),
    "nsys": Wrapper(_PROFILER, subcommands=("profile", "launch")),
    "ncu": Wrapper(replace(_PROFILER, switches={**_PROFILER.switches, "f": "", "force-overwrite": ""})),
    "compute-sanitizer": Wrapper(_PROFILER),
    "sudo": Wrapper(
        Options(values=_named("u user g group C D chdir h host p prompt T"), switches=_named("E preserve-env H n S b"))
    ),
    "systemd-run": Wrapper(
        Options(values=_named("p property slice unit u E setenv uid gid"), switches=_named("user scope q t P G wait"))
    ),
    "xvfb-run": Wrapper(
        Options(values=_named("n server-num s server-args e error-file f"), switches=_named("a auto-servernum l"))
    ),
    "caffeinate": Wrapper(Options(values=_named("t w"), switches=_named("d i m s u"))),
    "py-spy": Wrapper(_PROFILER, subcommands=("record",)),
    "dumb-init": Wrapper(),
    "tini": Wrapper(Options(switches=_named("s g v"))),
}
# modules of `python -m` that run a script behind their own options
MODULE_WRAPPERS: dict[str, Wrapper] = {
    "cProfile": Wrapper(Options(values=_named("o s"))),
    "pdb": Wrapper(Options(values=_named("c"))),
    "debugpy": Wrapper(Options(values=_named("listen connect"), switches=_named("wait-for-client"))),
    "viztracer": Wrapper(Options(values=_named("o output-file"), open=True)),
}
CONDA_RUN = Options(  # conda run --help
    values=_named("n=environment name=environment p=environment prefix=environment cwd=chdir"),
    switches=_named("no-capture-output live-stream s v verbose dev debug-wrapper-scripts a attach"),
)
# programs whose `run` starts a command in an environment -> its options; a project's environment is .venv, or active
RUNNERS = {
    "conda": CONDA_RUN, "mamba": CONDA_RUN, "micromamba": CONDA_RUN, "poetry": Options(), "pipenv": Options(),
    "pdm": Options(values=_named("p=chdir project=chdir"), switches=_named("s")), "rye": Options(),
}  # fmt: skip
UV_RUN = Options(  # uv help run
    values=_named(
        "p=python python=python directory=chdir project=project env-file=env_file with=packages with-editable=packages"
        " with-requirements=packages extra group only-group no-group no-extra package index default-index"
        " extra-index-url find-links index-url i f cache-dir color config-file link-mode resolution prerelease"
        " upgrade-package P refresh-package reinstall-package exclude-newer python-preference allow-insecure-host"
    ),
    switches=_named(
        "m=module module=module s script active=active isolated=packages frozen locked no-sync all-extras all-groups"
        " dev no-dev only-dev exact q quiet v verbose offline no-project no-cache n U upgrade refresh reinstall"
        " no-env-file no-progress native-tls managed-python no-managed-python"
        " no-editable all-packages no-config no-default-groups"
    ),
)
PYTHON = Options(  # python --help
    values=_named("W=python X=python check-hash-based-pycs=python"),
    switches=_named("u b bb B d E=python i I=python O=python OO=python P=python q s=python S=python v vv x"),
)
