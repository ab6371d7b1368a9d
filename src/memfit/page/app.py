"""The page's routes: the shell, memfit's own scripts and styles, and the answers to questions as JSON."""

from __future__ import annotations

import asyncio
import base64
import json
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl, urlencode

from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from memfit.page.drops import DropError, Drops, plain
from memfit.page.guard import Guard
from memfit.page.workers import Answerer, Workers

# questions that the pool answers, and those that get a process of their own
SHORT = ("plan", "estimate", "sweep", "cards", "timeline", "compare", "learn")
LONG = ("trace", "explain", "compare", "watched", "lanes", "data")
LONGEST_BODY, SLOWEST_BODY = 1 << 20, 20.0  # bytes, seconds
LARGEST_FILE, SLOWEST_PIECE = 8 << 30, 30.0  # bytes of a dropped file, seconds without a piece of it
TYPES = {"css": "text/css", "js": "text/javascript", "html": "text/html", "svg": "image/svg+xml"}


def make_app(
    answerer: Answerer, shell: str, static: Mapping[str, str], token: str, port: int, processes: int | None = None,
    followed: Path | None = None,
) -> Starlette:  # fmt: skip
    """Return the application.

    shell: the page's HTML; static: name -> text of what it loads; port: where it listens; followed: the log of a
    watched run, which the page shows as it grows.
    """
    state: dict[str, Workers] = {}
    drops = Drops(LARGEST_FILE, SLOWEST_PIECE)

    def question_of(request: Request) -> dict[str, str]:
        return _question(request.query_params, drops)

    @asynccontextmanager
    async def life(app: Starlette) -> AsyncIterator[None]:
        state["workers"] = Workers(answerer, processes)
        yield
        state["workers"].close()
        drops.close()

    async def index(request: Request) -> Response:
        return Response(shell, media_type="text/html")

    async def own_file(request: Request) -> Response:
        name = request.path_params["name"]
        if name not in static:
            return Response("no such file\n", 404, media_type="text/plain")
        kind = TYPES[name.rsplit(".", 1)[-1]]
        return Response(static[name], media_type=kind, headers={"cache-control": "no-cache"})

    async def ask(request: Request) -> Response:
        kind = request.path_params["kind"]
        if kind not in SHORT:
            return JSONResponse({"error": f"nothing answers {kind}"}, 404)
        return _json(await state["workers"].ask(kind, question_of(request)))

    async def long(request: Request) -> Response:
        kind, question = request.path_params["kind"], question_of(request)
        if kind not in LONG or (kind == "data" and "data" not in question):
            return JSONResponse({"error": f"nothing answers {kind}"}, 404)
        if keys := request.query_params.getlist("file"):
            paths = [drops.path(key) for key in keys]
            if None in paths:
                return JSONResponse({"error": "the file is not here any more", "hint": "drop it again"}, 422)
            question["file"] = "\n".join(map(str, paths))
        found = state["workers"].stream(kind, question, keep="file" not in question)

        async def lines() -> AsyncIterator[bytes]:
            try:
                async for said in found:
                    yield json.dumps(said).encode() + b"\n"
            finally:
                await found.aclose()  # type: ignore[attr-defined]

        return StreamingResponse(lines(), media_type="application/x-ndjson")

    async def follow(request: Request) -> Response:
        """Answer with the followed run if its log has changed since `seen`, else with nothing."""
        if followed is None:
            return JSONResponse({"error": "this page follows no run", "hint": "memfit page --follow LOG"}, 404)
        now = await asyncio.to_thread(_state_of, followed)
        if now == request.query_params.get("seen"):
            return Response(status_code=204)
        question = {name: value for name, value in question_of(request).items() if name != "seen"}
        found = await state["workers"].do("watched", {**question, "file": str(followed)})
        return JSONResponse({**found, "seen": now})

    async def drop(request: Request) -> Response:
        size = int(request.headers.get("content-length", 0))
        try:
            name = await drops.take(
                request.query_params.get("name", ""), request.stream(),
                lambda path, part: state["workers"].read_ahead(path, part, size),
            )  # fmt: skip
        except DropError as problem:
            return JSONResponse(
                {
                    "error": str(problem),
                    "hint": "in a terminal, memfit explain FILE and memfit plan --data FILE read it",
                },
                413,
            )
        return JSONResponse({"file": name})

    async def files(request: Request) -> Response:
        found = await state["workers"].ask("files", question_of(request))
        if "error" in found:
            return _json(found)
        headers = {"content-disposition": 'attachment; filename="memfit-run.zip"'}
        return Response(base64.b64decode(found["zip"]), media_type="application/zip", headers=headers)

    async def save(request: Request) -> Response:
        body = await _body(request)
        if body is None:
            return JSONResponse({"error": "the request is too large or too slow"}, 413)
        with suppress(ValueError):
            given = json.loads(body)
            if isinstance(given, dict) and "file" not in given and all(isinstance(v, str) for v in given.values()):
                return _json(await state["workers"].do("save", _question(given, drops)))
        return JSONResponse({"error": "the request is not JSON of texts"}, 400)

    routes = [
        Route("/", index), Route("/static/{name}", own_file), Route("/ask/{kind}", ask), Route("/long/{kind}", long),
        Route("/drop", drop, methods=["POST"]), Route("/follow", follow),
        Route("/files", files), Route("/save", save, methods=["POST"]),
    ]  # fmt: skip
    hosts = [f"{name}:{port}" for name in ("127.0.0.1", "localhost", "[::1]")]
    return Starlette(
        routes=routes, lifespan=life, middleware=[Middleware(Guard, token=token, hosts=hosts)],
        exception_handlers={GoneError: gone},
    )  # fmt: skip


class GoneError(Exception):
    """Dropped data that the page does not have any more; its text is the name of the file."""


def gone(request: Request, problem: Exception) -> Response:
    """Answer a question about data that are gone, such as that of an address which was shared."""
    hint = "choose the file again under Data, or plan without it"
    return JSONResponse({"error": f"{problem} is not here any more", "hint": hint}, 422)


def _question(words: Mapping[str, str], drops: Drops) -> dict[str, str]:
    """Return the words of a question, with the path of its data in place of the key that a browser has of them.

    `file` is none of them: a path is only ever that of a dropped file. Raises GoneError.
    """
    found = {name: value for name, value in words.items() if name not in ("token", "file") and value}
    if key := found.get("data"):
        path = drops.path(key)
        if path is None:
            raise GoneError(plain(found.get("data-name", "the training file")))
        found["data"] = str(path)
    if kept := found.get("against"):
        found["against"] = urlencode(_question({**dict(parse_qsl(kept)), "against": ""}, drops))
    return found


def _state_of(path: Path) -> str:
    """Return what changes when a file is written to."""
    with suppress(OSError):
        found = path.stat()
        return f"{found.st_ino}-{found.st_size}-{found.st_mtime_ns}"
    return "none"


def _json(found: dict[str, Any]) -> Response:
    return JSONResponse(found, 422 if "error" in found else 200)


async def _body(request: Request) -> bytes | None:
    """Return a body; None where it is too large, or comes too slowly."""
    read = bytearray()
    try:
        async with asyncio.timeout(SLOWEST_BODY):
            async for piece in request.stream():
                read += piece
                if len(read) > LONGEST_BODY:
                    return None
    except (TimeoutError, ClientDisconnect):
        return None
    return bytes(read)
