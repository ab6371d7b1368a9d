"""Who may talk to the page: requests to this machine's own address, from its own origin, with the token of the start.

Every answer carries a strict Content-Security-Policy: no script, style, picture or connection but the page's own.
"""

from __future__ import annotations

from collections.abc import Sequence
from hmac import compare_digest
from urllib.parse import parse_qs, urlsplit

from starlette.datastructures import Headers, MutableHeaders
from starlette.responses import PlainTextResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src 'self' data:; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
HEADERS = {
    "content-security-policy": POLICY, "x-content-type-options": "nosniff", "referrer-policy": "no-referrer",
    "x-frame-options": "DENY", "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin", "permissions-policy": "camera=(), microphone=(), geolocation=()",
}  # fmt: skip
OPEN = "/static/"  # memfit's own files, which say nothing of the user
LONGEST = 1 << 16  # bytes of a question


class Guard:
    """Middleware that refuses what is not the user's own page, before anything is read."""

    def __init__(self, app: ASGIApp, token: str, hosts: Sequence[str]) -> None:
        self.app, self.token, self.hosts = app, token, set(hosts)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on, or refuse it."""
        if scope["type"] == "lifespan":
            await self.app(scope, receive, send)
            return
        if scope["type"] != "http":  # nothing speaks WebSocket here
            return

        async def guarded(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                for name, value in HEADERS.items():
                    headers[name] = value
                headers.setdefault("cache-control", "no-store")
            await send(message)

        if reason := self._refused(scope):
            status, text = reason
            await PlainTextResponse(text + "\n", status)(scope, receive, guarded)
            return
        await self.app(scope, receive, guarded)

    def _refused(self, scope: Scope) -> tuple[int, str] | None:
        headers = Headers(scope=scope)
        if headers.get("host", "") not in self.hosts:
            return 421, "this is memfit's page of another machine or port"
        origin = headers.get("origin")
        if origin is not None and urlsplit(origin).netloc not in self.hosts:
            return 403, "another site may not ask here"
        if headers.get("sec-fetch-site", "none") not in ("same-origin", "none"):
            return 403, "another site may not ask here"
        if scope["method"] not in ("GET", "HEAD", "POST"):
            return 405, "only questions are answered here"
        if len(scope["query_string"]) > LONGEST:
            return 414, "the question is too long"
        if not scope["path"].startswith(OPEN) and not self._known(scope, headers):
            return 403, "open the address that memfit page printed: it ends in a token"
        return None

    def _known(self, scope: Scope, headers: Headers) -> bool:
        given = headers.get("x-memfit-token", "")
        if not given and scope["method"] != "POST":  # an address can be typed, a save cannot
            given = parse_qs(scope["query_string"].decode("latin-1")).get("token", [""])[0]
        return compare_digest(given.encode("utf-8", "replace"), self.token.encode())
