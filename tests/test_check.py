"""memfit check: jobs of a repository, kept answers, another commit, reports, and the scripts of code hosts."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
import xml.etree.ElementTree as ET
from collections.abc import Callable, Iterator
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

import jsonschema
import pytest
import yaml

from conftest import Ran
from memfit.check import git
from memfit.check.causes import causes_of, key_lines
from memfit.check.difference import difference
from memfit.check.judges import Case, Judged, found
from memfit.documents import check_file
from memfit.nouns.check import CausePlace, CheckJob, CheckReport, JobAnswer, JobResult, PhaseShares, Share, parse_budget
from memfit.nouns.footprint import KEPT, WORKING, Levels
from memfit.nouns.plan import HostJudgement
from memfit.nouns.sample import Leak, LeakHolder
from memfit.report.check import cause_words, difference_words, problems
from memfit.report.check_formats import sarif
from memfit.units import GIB

ROOT = Path(__file__).resolve().parent.parent
DATA = ROOT / "tests" / "data"
MIB = 1 << 20

TRAIN = """\
import torch
from model import Net

net = Net().cuda()
optimizer = torch.optim.SGD(net.parameters())
history = []
for step in range(50):
    loss = net(torch.ones(1 << 15, 64, device="cuda")).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
"""
MODEL = """\
import torch


class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.up = torch.nn.Linear(64, 256)

    def forward(self, x):
        return torch.relu(self.up(x))
"""
AXOLOTL = (DATA / "check_sample" / "axolotl.yaml").read_text()
FORMULA = '[jobs.axolotl]\nconfig = "axolotl.yaml"\ngpu = "h100"\nbudget = "reserved < 36GiB"\n'


def _git(folder: Path, *words: str) -> str:
    who = ("-c", "user.name=sample", "-c", "user.email=sample@localhost")
    return subprocess.run(["git", *who, *words], cwd=folder, check=True, capture_output=True, text=True).stdout


Made = Callable[..., Path]


@pytest.fixture
def repository(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Made:
    """Make a repository with these files and one commit, and go there."""

    def make(**files: str) -> Path:
        folder = tmp_path / "repository"
        folder.mkdir()
        for name, text in files.items():
            (folder / name.replace("__", ".")).write_text(text)
        _git(folder, "init", "-q")
        _git(folder, "add", "-A")
        _git(folder, "commit", "-q", "-m", "first")
        monkeypatch.chdir(folder)
        monkeypatch.setenv("MEMFIT_CACHE", str(tmp_path / "cache"))
        return folder

    return make


def test_a_line_that_keeps_tensors_is_named_by_its_bytes_and_fails_the_check(repository: Made, ran: Ran) -> None:
    own = '[jobs.own]\ncommand = "python train.py"\ngpu = "l4"\n'
    folder = repository(train__py=TRAIN, model__py=MODEL, memfit__toml=own)
    kept = "    history.append(net(torch.ones(1 << 15, 64, device='cuda')))\n    optimizer.step()"
    (folder / "train.py").write_text("# the whole of it\n" + TRAIN.replace("    optimizer.step()", kept))
    code, out, _ = ran("check", "--json", "--report", "../r.sarif", "--report", "../r.xml")
    (job,) = json.loads(out)["jobs"]
    line = (folder / "train.py").read_text().splitlines().index(kept.splitlines()[0]) + 1
    assert (code, job["verdict"], job["exit_code"], job["kept"]) == (3, "fits", 3, False)
    assert job["leaks"][0]["holders"][0]["place"] == f"train.py:{line}"
    (result,) = json.loads(Path("../r.sarif").read_text())["runs"][0]["results"]
    place = result["locations"][0]["physicalLocation"]
    assert (result["ruleId"], place["artifactLocation"]["uri"], place["region"]["startLine"]) == (
        "grows",
        "train.py",
        line,
    )
    sarif = json.loads(Path("../r.sarif").read_text())
    assert _violations(sarif) == [] and _violations(sarif | {"runs": [{}]}) != []
    assert _violations_of_junit(Path("../r.xml")) == []
    shared = [out, *(Path(name).read_text() for name in ("../r.sarif", "../r.xml"))]  # they leave the machine
    assert not [text for text in shared if str(folder.parent) in text]
    again, out, _ = ran("check", "--json")
    assert (again, json.loads(out)["jobs"][0]["kept"]) == (3, True)
    assert _git(folder, "status", "--short").split() == ["M", "train.py"]
    case = Case(check_file.read(folder / "memfit.toml").jobs[0], folder)
    judged = found(case)
    assert judged is not None and isinstance(judged.answer, JobAnswer)
    for name, text in (("model.py", MODEL), ("torch.py", None)):  # imported by the job; would be imported by it
        (folder / name).write_text(MODEL + "\n")
        assert found(case) is None
        (folder / name).write_text(text) if text else (folder / name).unlink()
    assert found(case) is not None
    change = difference(case.job, _without(judged.answer, line), judged.answer, hunks=git.changes(folder, "HEAD"))
    assert [(one.place, one.added, one.found) for one in change.causes] == [
        (f"train.py:{line}", change.added, "allocates")
    ]
    assert change.added >= 32 * MIB  # 32,768 x 256 numbers of 4 bytes: the output of one step at least


def _without(answer: JobAnswer, line: int) -> JobAnswer:
    """Return an answer without what a line of train.py allocated."""
    phases = []
    for phase in answer.phases:
        shares = tuple(share for share in phase.shares if f"train.py:{line}" not in share.lines)
        less = sum(share.bytes for share in phase.shares) - sum(share.bytes for share in shares)
        levels = replace(phase.levels, reserved=phase.levels.reserved - less)
        phases.append(replace(phase, shares=shares, levels=levels))
    return replace(answer, phases=tuple(phases))


def test_keys_of_a_configuration_are_named_by_what_each_adds(repository: Made, ran: Ran) -> None:
    folder = repository(axolotl__yaml=AXOLOTL, memfit__toml=FORMULA)
    text = AXOLOTL.replace("lora_r: 16", "lora_r: 128").replace("micro_batch_size: 2", "micro_batch_size: 3")
    (folder / "axolotl.yaml").write_text("# another\n" + text)
    code, out, _ = ran(
        "check", "--json", "--base", "HEAD", "--report", "r.sarif", "--report", "r.xml", "--report", "r.md"
    )
    (job,) = json.loads(out)["jobs"]
    lines = (folder / "axolotl.yaml").read_text().splitlines()
    named = [(one["line"], one["code"], one["found"]) for one in job["difference"]["causes"]]
    expected = ("micro_batch_size: 3", "lora_r: 128")
    assert named == [(lines.index(text) + 1, text, "key") for text in expected]
    assert code == 3 and job["over_budget"][0]["bytes"] > 36 << 30
    moved = [one["label"] for one in job["difference"]["shares"]]
    assert not {KEPT, WORKING} & {*moved} and {"block, block input", "head, final_norm.fp32 copy"} <= {*moved}
    assert _violations(json.loads(Path("r.sarif").read_text())) == []
    assert _violations_of_junit(Path("r.xml")) == []
    assert "axolotl.yaml:" in Path("r.md").read_text()


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ('gpu = "l4', "TOML"),
        ("x = 1", "'x'"),
        ("", "no job"),
        ('[jobs.a]\ncomand = "x"\ngpu = "l4"', "did you mean command"),
        ('[jobs.a]\ngpu = "l4"', "command or a config"),
        ('[jobs.a]\ncommand = "python x.py"', "no card"),
        ('[jobs.a]\ncommand = "python \'x.py"\ngpu = "l4"', "command"),
        ('[jobs.a]\ncommand = "x"\ngpu = "l4"\nbudget = "less than 3"', "no budget"),
        ('[jobs.a]\ncommand = "x"\ngpu = "l4"\nbudget = "reserved < much"', "no size"),
        ('[jobs.a]\ncommand = "x"\ngpu = "l4"\nphases = ["steps"]', "first_step"),
        ('[jobs.a]\ncommand = "x"\ngpu = "l4"\nhost-memory = "64GiB"', "host-memory"),
        ('[jobs.a]\ncommand = "x"\ngpu = "l4"\nsteps = "two"', "steps"),
        ('[jobs.a]\ncommand = "x"\ngpu = "l4"\nfolder = "nowhere"', "nowhere"),
        ('[jobs]\na = 3', "no table"),
        ('[jobs."a\\nb"]\ncommand = "x"\ngpu = "l4"', "name"),
    ],
)  # fmt: skip
def test_a_wrong_file_is_one_line_and_a_hint(repository: Made, ran: Ran, text: str, named: str) -> None:
    repository(memfit__toml=text)
    code, out, err = ran("check")
    first, hint, *more = err.splitlines()
    assert (code, out, more) == (2, "", [])
    assert first.startswith("error: ") and hint.startswith("hint: ")
    assert named.replace("no size", "is not a size") in err


def test_what_cannot_be_done_is_refused(
    repository: Made, ran: Ran, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = repository(memfit__toml=FORMULA, axolotl__yaml=AXOLOTL)
    for words, named in (
        (["nojob"], "axolotl"),
        (["--base", "nosuch"], "nosuch"),
        (["--base", "--upload-pack=x"], "no commit"),
        (["--format", "xml"], "junit"),
        (["--json", "--format", "sarif"], "contradict"),
        (["--report", "x.txt"], ".sarif"),
        (["--report", "memfit.toml"], ".md"),
        (["--jobs", "0"], "--jobs"),
        (["--init"], "memfit.toml exists"),
        (["--file", "other.toml"], "other.toml"),
    ):
        code, _, err = ran("check", *words)
        assert code == 2 and named in err, (words, err)
    assert _git(folder, "worktree", "list").count("\n") == 1
    (tmp_path / "plain").mkdir()
    (tmp_path / "plain" / "memfit.toml").write_text(FORMULA)
    monkeypatch.chdir(tmp_path / "plain")
    code, _, err = ran("check", "--base", "HEAD")
    assert code == 2 and "git" in err
    code, out, _ = ran("check", "--format", "junit")  # its configuration is missing
    assert code == 2 and "<error " in out and _violations_of_junit(out) == []
    (tmp_path / "plain" / "memfit.toml").unlink()
    assert ran("check")[0] == 2
    assert ran("check", "--init")[0] == 2  # nothing here
    (tmp_path / "plain" / "sft.yaml").write_text(AXOLOTL)
    (tmp_path / "plain" / "train.py").write_text('loss.backward()\nif __name__ == "__main__":\n    main()\n')
    assert ran("check", "--init", "--gpu", "8xh100")[0] == 0
    jobs = {job.name: job for job in check_file.read(Path("memfit.toml")).jobs}
    assert (jobs["sft"].config, jobs["train"].command, jobs["sft"].gpu) == (
        "sft.yaml",
        ("python", "train.py"),
        "8xh100",
    )


def test_pyproject_holds_jobs_as_well(tmp_path: Path) -> None:
    (tmp_path / "pyproject.toml").write_text('[project]\nname = "x"\n')
    assert check_file.find(tmp_path) is None
    text = '[tool.memfit]\ngpu = "l4"\nhost-memory = "64GiB"\n[tool.memfit.jobs.a]\ncommand = "python a.py"\n'
    (tmp_path / "pyproject.toml").write_text(
        text + '[tool.memfit.jobs.b]\nconfig = "b.yaml"\nbudget = ["reserved <= 9GiB"]\n'
    )
    path = check_file.find(tmp_path)
    assert path is not None
    a, b = check_file.read(path).jobs
    assert (a.gpu, a.line, a.host_memory, b.line, b.host_memory) == ("l4", 4, "", 6, "64GiB")
    assert b.budgets[0].allows(9 << 30) and not parse_budget("reserved < 9GiB").allows(9 << 30)


def test_lines_of_another_commit_are_found_where_they_stand_now(tmp_path: Path) -> None:
    old = "".join(f"line {n}\n" for n in range(1, 21))
    (tmp_path / "a.py").write_text(old)
    _git(tmp_path, "init", "-q")
    _git(tmp_path, "add", "-A")
    _git(tmp_path, "commit", "-q", "-m", "first")
    _git(tmp_path, "mv", "a.py", "b.py")
    new = old.replace("line 3\n", "").replace("line 5\n", "line 5\nmore\nmore\n").replace("line 9\n", "changed\n")
    (tmp_path / "b.py").write_text(new)
    (tmp_path / "c.py").write_text("new\n")
    (tmp_path / "data.jsonl").write_text("{}\n")
    hunks = git.changes(tmp_path, "HEAD")
    moved = git.Moves(hunks, git.renamed(tmp_path, "HEAD"))
    where = new.splitlines()
    for number in (1, 2, 4, 5, 6, 8, 10, 20):
        file, _, line = moved(f"a.py:{number}").partition(":")
        assert (file, where[int(line) - 1]) == ("b.py", f"line {number}")
    assert moved("a.py:9") == f"b.py:{where.index('changed') + 1}"
    assert [hunk.file for hunk in hunks if hunk.covers("b.py", where.index("more") + 1)] == ["b.py"]
    assert any(hunk.base_file == "" and hunk.file == "c.py" for hunk in hunks)
    with git.worktree(tmp_path, git.commit_of(tmp_path, "HEAD")) as tree:
        assert (tree / "a.py").read_text() == old and not (tree / "c.py").exists()  # a part of the change
        assert (tree / "data.jsonl").is_symlink()


def test_only_names_that_change_are_no_difference() -> None:
    def answer(label: str, line: str) -> JobAnswer:
        shares = (Share("activations", label, 96, (line,)), Share("parameters", "small tensors", 4))
        levels = Levels(100, 100, 100, 100)
        return JobAnswer("x", "l4", "traced", "fits", 1000, 100, 1, (PhaseShares("step", "backward", levels, shares),))

    found = difference(CheckJob("x", "l4"), answer("up: addmm", "a.py:3"), answer("widen: addmm", "b.py:9"))
    assert found.same and found.shares == () and found.causes == ()


def test_changes_are_tried_line_by_line_and_named_also_where_a_line_goes(tmp_path: Path) -> None:
    def answer(size: int, host: int = 0) -> JobAnswer:
        told = HostJudgement("misfit" if host > GIB else "fits", host, GIB, "train", ()) if host else None
        shares = (Share("activations", "x", size), Share("fragmentation", "cache", 0))
        held = (Share("activations", "x", 0), Share("fragmentation", "cache", size))
        phases = tuple(
            PhaseShares(name, "x", Levels(size, size, size, size), what)
            for name, what in (("first_step", shares), ("step", held))
        )
        return JobAnswer("x", "l4", "traced", "misfit" if host > GIB else "fits", GIB, size, 1, phases, host=told)

    def needed(root: Path) -> int:
        said = yaml.safe_load((root / "a.yaml").read_text())
        kept = "del x" not in (root / "a.py").read_text()
        return int(said["width"] * said["depth"]) + 90 * kept

    first = {"a.yaml": "width: 10\ndepth: 10\n", "a.py": "x = 1\nfor _ in range(3):\n    del x\n    y = 1\n"}
    for name, text in first.items():
        (tmp_path / name).write_text(text)
    _git(tmp_path, "init", "-q")
    _git(tmp_path, "add", "-A")
    _git(tmp_path, "commit", "-q", "-m", "first")
    (tmp_path / "a.yaml").write_text("width: 20\ndepth: 13\n")
    (tmp_path / "a.py").write_text(first["a.py"].replace("    del x\n", ""))
    job, hunks = CheckJob("x", "l4", ("python", "a.py")), git.changes(tmp_path, "HEAD")
    with git.worktree(tmp_path, "HEAD") as tree:
        found = difference(job, answer(needed(tree)), answer(needed(tmp_path)), hunks=hunks)
        assert (found.phase, found.added) == ("first_step", 250)  # not the later one, in which it is all cache

        def causes(job: CheckJob) -> tuple[CausePlace, ...]:
            return causes_of(
                found, Case(job, tree), Case(job, tmp_path), git.changes(tmp_path, "HEAD"), {}, "HEAD",
                lambda cases: [Judged(answer(needed(case.root))) for case in cases], formula=False,
            )  # fmt: skip

        traced = causes(job)
        (tmp_path / "a.py").write_text(first["a.py"])
        (tmp_path / "a.yaml").write_text("depth: 10\n")
        (key,) = causes(CheckJob("x", "l4", config="a.yaml"))
    assert [(one.place, one.code, one.added) for one in traced] == [
        ("a.yaml:1", "width: 20", 100),
        ("a.py:2", "del x", 90),
        ("a.yaml:2", "depth: 13", 30),
    ]
    assert [one.removed for one in traced] == [False, True, False] and "removed" in cause_words(traced[1])
    assert (key.place, key.code, key.found, key.removed) == ("a.yaml:1", "width: 10", "key", True)
    more = difference(job, answer(1, GIB // 2), answer(1, 2 * GIB))
    (said,) = problems(JobResult(job, answer(1, 2 * GIB), difference=more))
    assert not more.same and "host RAM" in difference_words(more) and "does not fit 1.0 GiB of host RAM" in said


def test_keys_have_lines_in_every_format(tmp_path: Path) -> None:
    for name, text in (
        ("a.yaml", "a: 1\nb:\n  c: 2\n"),
        ("a.json", '{"a": 1,\n"b": {\n"c": 2}}'),
        ("a.toml", "a = 1\n\n[b]\nc = 2\n"),
    ):
        (tmp_path / name).write_text(text)
        lines = key_lines(tmp_path / name)
        assert (lines[("a",)], lines[("b", "c")]) == (1, 4 if name == "a.toml" else 3)
    (tmp_path / "bad.yaml").write_text("a: [")
    assert key_lines(tmp_path / "bad.yaml") == {}


# ---- code hosts --------------------------------------------------------------------------------------------------


class _Comments(BaseHTTPRequestHandler):
    """A code host: keeps the comments of one request."""

    comments: list[dict[str, Any]]

    def do_GET(self) -> None:
        self._answer(self.comments if "page=1" in self.path else [])

    def do_POST(self) -> None:
        self.comments.append({"id": len(self.comments) + 1, "body": self._body()})
        self._answer(self.comments[-1])

    def do_PATCH(self) -> None:
        self.comments[int(self.path.rpartition("/")[2]) - 1]["body"] = self._body()
        self._answer({})

    do_PUT = do_PATCH  # noqa: N815

    def _body(self) -> str:
        return str(json.loads(self.rfile.read(int(self.headers["Content-Length"])))["body"])

    def _answer(self, value: Any) -> None:
        self.send_response(200)
        self.end_headers()
        self.wfile.write(json.dumps(value).encode())

    def log_message(self, *_: Any) -> None:
        pass


@pytest.fixture
def host() -> Iterator[tuple[str, list[dict[str, Any]]]]:
    """The address of a code host, and its comments: one of somebody else at first."""
    comments: list[dict[str, Any]] = [{"id": 1, "body": "looks good"}]
    server = HTTPServer(("127.0.0.1", 0), type("Handler", (_Comments,), {"comments": comments}))
    Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}", comments
    server.shutdown()
    server.server_close()


def _programs(folder: Path) -> str:
    """Return a PATH on which memfit and python are those of this test."""
    folder.mkdir()
    for name, words in (("memfit", "-m memfit"), ("python", "")):
        (folder / name).write_text(f'#!/bin/sh\nexec {shlex.quote(sys.executable)} {words} "$@"\n')
        (folder / name).chmod(0o755)
    return f"{folder}{os.pathsep}{os.environ['PATH']}"


def test_the_scripts_of_code_hosts_keep_one_comment(
    repository: Made, host: tuple[str, list[dict[str, Any]]], tmp_path: Path
) -> None:
    folder = repository(axolotl__yaml=AXOLOTL, memfit__toml=FORMULA)
    address, comments = host
    base = _git(folder, "rev-parse", "HEAD").strip()
    (tmp_path / "event.json").write_text('{"pull_request": {"number": 7}}')
    action = yaml.safe_load((ROOT / "action.yml").read_text())["runs"]["steps"][-1]
    gitlab = yaml.safe_load((ROOT / "integrations" / "gitlab.yml").read_text())["memfit"]
    (hook,) = yaml.safe_load((ROOT / ".pre-commit-hooks.yaml").read_text())
    by_github = {
        "GITHUB_EVENT_PATH": str(tmp_path / "event.json"), "GITHUB_API_URL": address, "GITHUB_REPOSITORY": "a/b",
        "GITHUB_STEP_SUMMARY": str(tmp_path / "summary"), "GITHUB_TOKEN": "x", "MEMFIT_BASE": base, "MEMFIT_JOBS": "",
        "MEMFIT_SARIF": "memfit.sarif", "MEMFIT_COMMENT": "true",
    }  # fmt: skip
    by_gitlab = {
        "CI_API_V4_URL": address, "CI_PROJECT_ID": "3", "CI_MERGE_REQUEST_IID": "7", "MEMFIT_GITLAB_TOKEN": "x",
        "CI_MERGE_REQUEST_DIFF_BASE_SHA": base, "MEMFIT_JOBS": "",
    }  # fmt: skip
    path = {"PATH": _programs(tmp_path / "bin"), "MEMFIT_CACHE": str(tmp_path / "cache")}
    assert set(by_github) >= {name for name in action["env"] if name not in ("MEMFIT_CACHE", "GITHUB_TOKEN")}

    def run(script: str, said: dict[str, str]) -> int:
        words = ["bash", "--noprofile", "--norc", "-eo", "pipefail", "-c", script]  # as GitHub's runner has it
        return subprocess.run(words, cwd=folder, env={**os.environ, **path, **said}, capture_output=True).returncode

    assert run(action["run"], by_github) == 0 and len(comments) == 2
    (folder / "axolotl.yaml").write_text(AXOLOTL.replace("micro_batch_size: 2", "micro_batch_size: 16"))
    assert run(action["run"], by_github) == 3
    assert len(comments) == 2 and comments[0]["body"] == "looks good"
    assert "axolotl.yaml:" in comments[1]["body"] and comments[1]["body"] in (tmp_path / "summary").read_text()
    assert _violations(json.loads((folder / "memfit.sarif").read_text())) == []
    comments[1]["body"] = re.sub(r"GiB", "?", comments[1]["body"])  # of an earlier push
    assert run("\n".join(gitlab["script"]), by_gitlab) == 3
    assert len(comments) == 2 and "?" not in comments[1]["body"]
    assert _violations_of_junit(folder / gitlab["artifacts"]["reports"]["junit"]) == []
    assert run(hook["entry"], {}) == 3


# ---- schemas -----------------------------------------------------------------------------------------------------


def _violations(document: Any) -> list[str]:
    """Return what the part of SARIF's schema refuses in a document; the benchmark takes the whole schema."""
    schema = json.loads((DATA / "sarif-2.1.0-part.json").read_text())
    return [error.message for error in jsonschema.Draft7Validator(schema).iter_errors(document)]


def _violations_of_junit(report: Path | str) -> list[str]:
    """Return which elements and attributes of a report Jenkins' junit-10.xsd does not allow there."""
    name = "{http://www.w3.org/2001/XMLSchema}"
    top = ET.parse(DATA / "junit-10.xsd").getroot()
    elements = {e.get("name"): e for e in top.findall(f"{name}element")}
    pattern = top.find(f".//{name}pattern")
    assert pattern is not None

    def check(element: ET.Element) -> Iterator[str]:
        rule = elements.get(element.tag)
        if rule is None:
            yield f"unknown element {element.tag}"
            return
        allowed = {a.get("name"): a for a in rule.iter(f"{name}attribute")}
        yield from (f"{element.tag} has {key}" for key in element.attrib if key not in allowed)
        yield from (f"{element.tag} lacks {k}" for k, a in allowed.items() if a.get("use") and k not in element.attrib)
        for key, value in element.attrib.items():
            timed = key in allowed and allowed[key].get("type") == "SUREFIRE_TIME"
            if timed and not re.fullmatch(str(pattern.get("value")), value):
                yield f"{element.tag}.{key} is {value}"
        inside = {e.get("ref") for e in rule.iter(f"{name}element")}
        for child in element:
            yield from [f"{child.tag} in {element.tag}"] if child.tag not in inside else check(child)

    return list(check(ET.fromstring(report) if isinstance(report, str) else ET.parse(report).getroot()))


@pytest.mark.nightly
def test_the_sample_repository_and_its_four_commits() -> None:
    pytest.importorskip("trl")
    import check

    assert check.run() == []


def test_each_leak_stands_at_its_own_line() -> None:
    """SARIF placed every leak of a job at the line of the first."""
    kept = (LeakHolder("container", "kept", place, "", 1, GIB) for place in ("a.py:3", "b.py:7"))
    leaks = tuple(Leak(GIB, 1, 9, GIB, (holder,)) for holder in kept)
    answer = JobAnswer("x", "l4", "traced", "fits", GIB, 1, 1, (), leaks=leaks)
    report = CheckReport("memfit.toml", (JobResult(CheckJob("x", "l4", ("python", "a.py")), answer),))
    places = [one["locations"][0]["physicalLocation"] for one in sarif(report, "1")["runs"][0]["results"]]
    assert [(p["artifactLocation"]["uri"], p["region"]["startLine"]) for p in places] == [("a.py", 3), ("b.py", 7)]
