"""A page in a thread of the tests: it listens on a free port of this machine."""

from __future__ import annotations

import http.client
import json
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from memfit.errors import BadInput
from memfit.reading import bounds

TOKEN = "a-token-of-the-tests"


AHEAD: list[str] = []  # the files that this process read ahead


def stub(kind: str, question: dict[str, str], tell: Any) -> dict[str, Any]:
    """Answer at once, or slowly, with progress or with much memory where the question asks for it."""
    if kind == "warm":
        return {}
    if kind == "ahead":
        AHEAD.append(question["file"])
        while Path(question["part"]).exists():  # until the file is whole, or is given up
            time.sleep(0.01)
        return {}
    if question.get("take"):
        with suppress(BadInput), bounds.memory(1, "it", "hint"):
            return {"taken": len(bytes(int(question["take"])))}
    for step in range(int(question.get("steps", 0))):
        tell(f"step {step}", 0.1)
        time.sleep(0.1)
    if question.get("mark"):
        with Path(question["mark"]).open("a", encoding="utf-8") as file:
            file.write("done\n")
    return {"kind": kind, **question, "ahead": "\n".join(AHEAD)}


@dataclass
class Served:
    """A server that listens, and one way to ask it."""

    port: int

    def ask(self, path: str, method: str = "GET", body: bytes | None = None, **headers: str) -> tuple[int, Any, bytes]:
        """Return status, headers and body of one request; headers replace the usual ones, '' leaves one out."""
        said = {"Host": f"127.0.0.1:{self.port}", "X-Memfit-Token": TOKEN} | {
            name.replace("_", "-"): value for name, value in headers.items()
        }
        wire = http.client.HTTPConnection("127.0.0.1", self.port, timeout=30)
        try:
            wire.putrequest(method, path, skip_host=True, skip_accept_encoding=True)
            for name, value in said.items():
                if value:
                    wire.putheader(name, value)
            if body is not None:
                wire.putheader("Content-Length", str(len(body)))
            wire.endheaders(body)
            answer = wire.getresponse()
            return answer.status, answer.headers, answer.read()
        finally:
            wire.close()

    def json(self, path: str, **headers: str) -> Any:
        """Return the JSON of an answer."""
        return json.loads(self.ask(path, **headers)[2])


@contextmanager
def served(
    answerer: Any, shell: str = "<p>shell</p>", static: dict[str, str] | None = None, followed: Path | None = None
) -> Iterator[Served]:
    """Run the page on a free port for the length of the block."""
    import uvicorn

    from memfit.page.app import make_app

    listening = socket.socket()
    listening.bind(("127.0.0.1", 0))
    port = listening.getsockname()[1]
    app = make_app(answerer, shell, static or {"page.js": "export {}"}, TOKEN, port, processes=1, followed=followed)
    server = uvicorn.Server(uvicorn.Config(app, log_level="error"))
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listening]})
    thread.start()
    until = time.monotonic() + 30
    while not server.started and time.monotonic() < until:
        time.sleep(0.01)
    try:
        yield Served(port)
    finally:
        server.should_exit = True
        thread.join(20)
        listening.close()
