"""Keep one comment on a pull request up to date: `python -m memfit.check.comment github memfit.md`.

Called in continuous integration behind `memfit check --report memfit.md`; GitHub and GitLab say in the environment
which request it is. Without a request or a token that may comment, nothing is sent, and the reason is printed.
"""

from __future__ import annotations

import json
import os
import sys
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from memfit.report.check_formats import MARKER

PAGE = 100  # comments of one answer
LONGEST = 60_000  # characters; GitHub takes 65,536
PATIENCE = 30  # seconds


@dataclass(frozen=True, slots=True)
class Host:
    """Where the comments of a request lie. one: the address of a comment, with {id}; update: the method that edits."""

    comments: str
    one: str
    update: str
    headers: Mapping[str, str]


def github(environment: Mapping[str, str]) -> Host | str:
    """Return the comments of a pull request on GitHub, or why there are none."""
    event = Path(environment.get("GITHUB_EVENT_PATH", ""))
    said: Any = json.loads(event.read_text()) if event.is_file() else {}
    number = said.get("pull_request", {}).get("number") or said.get("issue", {}).get("number")
    token = environment.get("GITHUB_TOKEN", "")
    if not number:
        return "this run is of no pull request"
    if not token:
        return "GITHUB_TOKEN is not set"
    issues = f"{environment['GITHUB_API_URL']}/repos/{environment['GITHUB_REPOSITORY']}/issues"
    headers = {"Authorization": f"Bearer {token}", "Accept": "application/vnd.github+json"}
    return Host(f"{issues}/{number}/comments", f"{issues}/comments/{{id}}", "PATCH", headers)


def gitlab(environment: Mapping[str, str]) -> Host | str:
    """Return the notes of a merge request on GitLab, or why there are none."""
    number, token = environment.get("CI_MERGE_REQUEST_IID", ""), environment.get("MEMFIT_GITLAB_TOKEN", "")
    if not number:
        return "this pipeline is of no merge request"
    if not token:
        return "MEMFIT_GITLAB_TOKEN, a project token with the scope api, is not set"
    project = f"{environment['CI_API_V4_URL']}/projects/{environment['CI_PROJECT_ID']}"
    notes = f"{project}/merge_requests/{number}/notes"
    return Host(notes, f"{notes}/{{id}}", "PUT", {"PRIVATE-TOKEN": token})


HOSTS = {"github": github, "gitlab": gitlab}


def comment(host: Host, text: str) -> str:
    """Edit the comment that carries the marker, or write a first one; return which was done."""
    body = {"body": text if len(text) <= LONGEST else text[:LONGEST] + "\n\n(shortened)\n"}
    for one in _comments(host):
        if str(one.get("body", "")).startswith(MARKER):
            if one["body"] == body["body"]:
                return "unchanged"
            _call(host, host.update, host.one.format(id=one["id"]), body)
            return "updated"
    _call(host, "POST", host.comments, body)
    return "written"


def _comments(host: Host) -> Iterator[dict[str, Any]]:
    for page in range(1, 100):
        found = _call(host, "GET", f"{host.comments}?{urllib.parse.urlencode({'per_page': PAGE, 'page': page})}")
        yield from found
        if len(found) < PAGE:
            return


def _call(host: Host, method: str, address: str, body: Any = None) -> Any:
    if not address.startswith(("https://", "http://")):
        raise urllib.error.URLError(f"{address} is no web address")
    data = None if body is None else json.dumps(body).encode()
    headers = {**host.headers, "Content-Type": "application/json", "User-Agent": "memfit"}
    asked = urllib.request.Request(address, data, headers, method=method)
    with urllib.request.urlopen(asked, timeout=PATIENCE) as answer:
        return json.loads(answer.read() or b"null")


def main() -> int:
    """Send the file that the command line names. A comment that fails is told, and fails no check."""
    if len(sys.argv) != 3 or sys.argv[1] not in HOSTS:
        print(f"usage: python -m memfit.check.comment {'|'.join(HOSTS)} FILE", file=sys.stderr)
        return 2
    try:
        text = Path(sys.argv[2]).read_text()
        host = HOSTS[sys.argv[1]](os.environ)
        print(f"comment: {host if isinstance(host, str) else comment(host, text)}", file=sys.stderr)
    except (OSError, KeyError, ValueError) as error:  # URLError is an OSError
        print(f"comment: not sent: {type(error).__name__}: {error}", file=sys.stderr)
    return 0


if __name__ == "__main__":
    sys.exit(main())
