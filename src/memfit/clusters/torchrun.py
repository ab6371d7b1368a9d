"""launch.sh: one script that is started on every node, by hand or by whatever starts things there."""

from __future__ import annotations

from memfit.clusters.spec import PORT, Spec

FILE = "launch.sh"


def notes(spec: Spec) -> tuple[str, ...]:
    """What must be so where it runs."""
    beside = f"a second job on these nodes at the same time: PORT={PORT + 1} on each of them"
    return (*spec.needs(apart=False), *([beside] if spec.nodes > 1 else []))


def write(spec: Spec) -> dict[str, str]:
    """The script. HEAD names the first node; with one node nothing need be said."""
    where = f"${{HEAD:?set HEAD to the name of the first node}}:${{PORT:-{PORT}}}"
    lines = [
        "#!/bin/bash",
        f"# {spec.head}",
        f"# on each of {spec.nodes} node(s) with {spec.gpus} GPU(s) and {spec.host_gib} GiB of free host memory:",
        f"#     {'' if spec.nodes == 1 else 'HEAD=first-node '}bash {FILE}",
        *(f"# {line}" for line in notes(spec)),
        "set -euo pipefail",
        'cd "$(dirname "$0")"',
        *spec.exports(),
        spec.torchrun(str(spec.nodes), where, spec.name, '"$@"'),  # what train.py takes
    ]
    return {FILE: "\n".join(lines) + "\n"}
