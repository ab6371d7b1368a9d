"""memfit page: open the page on this machine."""

from __future__ import annotations

import gc
import secrets
import signal
import socket
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

from memfit.cli import terminal
from memfit.cli.flags import CARD, COMMON, TASK, Argument, Flag, takes, typed
from memfit.errors import BadInput

EXAMPLES = (
    "memfit page",
    "memfit page llama-3.1-8b --gpu rtx-4090 --no-open",
    "memfit page --follow memfit-watch.jsonl",
)
MODEL = Argument("model", "a model that the page begins with", "MODEL")
PORT = Flag("port", int, "Port of this machine. Default: 8787, or a free one where it is taken.", "N")
OPEN = Flag("open", bool, "Open a browser. Default: where this machine has a display.")
FOLLOW = Flag("follow", str, "Show a watched run as its log grows, over the prediction.", "LOG")
USUAL_PORT = 8787


@takes(*CARD, TASK[0], FOLLOW, PORT, OPEN, *COMMON, argument=MODEL)
def run(model: str | None = None, **flags: Any) -> int:
    """Open a local page that answers as the commands do.

    It listens on this machine alone, loads nothing from elsewhere, and writes no file unless you type a folder.
    """
    try:
        import uvicorn

        from memfit.page.app import make_app
    except ModuleNotFoundError:
        from memfit.extras import MissingExtra

        raise MissingExtra("the page", "page") from None
    from urllib.parse import urlencode

    from memfit.cli.page_answers import answered
    from memfit.cli.web_files import page_files

    followed = _followed(flags["follow"])
    listening = _listening(flags["port"])
    port, token = listening.getsockname()[1], secrets.token_urlsafe(24)
    shell, static = page_files()
    app = make_app(answered, shell_of(shell, followed), static, token, port, followed=followed)
    asked = typed(flags, (*CARD, TASK[0]))
    question = {name.removeprefix("--"): value for name, value in zip(asked[::2], asked[1::2], strict=True)}
    begin = {"token": token, **({"model": model} if model else {}), **question}
    if followed:
        begin["view"] = "timeline"
    address = f"http://127.0.0.1:{port}/?{urlencode(begin)}"
    if flags["json"]:
        terminal.show_json({"address": address})
        sys.stdout.flush()
    else:
        print(address, flush=True)
        terminal.note("the page is open to this machine alone; Ctrl-C ends it")
    terminal.open_browser(address, flags["open"])
    config = uvicorn.Config(app, log_level="warning", access_log=False, server_header=False)
    gc.enable()  # a command of half a second does without it
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))  # uvicorn raises it again when it has ended
    with suppress(KeyboardInterrupt):
        uvicorn.Server(config).run(sockets=[listening])
    return 0


def _followed(name: str | None) -> Path | None:
    """Return the log to follow, which need not exist yet. Raises BadInput for what cannot be one."""
    if not name:
        return None
    from memfit.documents import watch_log

    path, problem = Path(name).absolute(), ""
    with suppress(FileNotFoundError):
        if not path.is_file():
            problem = "is no file" if path.exists() else "lies in no folder" if not path.parent.is_dir() else ""
        elif (head := path.open("rb").read(64)) and not watch_log.known(head):
            problem = "is no log of memfit watch"
    if problem:
        raise BadInput(f"{name} {problem}", hint="--follow memfit-watch.jsonl")
    return path


def _listening(port: int | None) -> socket.socket:
    """Return a socket on this machine's own address. Raises BadInput for a port that was asked for and is taken."""
    if port is not None and not 1 <= port <= 65535:
        raise BadInput(f"--port must be from 1 to 65535, not {port}", hint=f"--port {USUAL_PORT}")
    for number in [port] if port else [USUAL_PORT, 0]:
        made = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
        made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            made.bind(("127.0.0.1", number))
            made.listen(256)
        except OSError as error:
            made.close()
            if number == (port or 0):
                problem = f"port {number} cannot be used: {error.strerror or error}"
                raise BadInput(problem, hint="leave --port out for a free one") from None
            continue
        return made
    raise AssertionError("a port of 0 is always free")


def shell_of(template: str, followed: Path | None = None) -> str:
    """Return the page's HTML with the models, cards and tasks to choose from, and the name of the run that it shows."""
    from html import escape

    from memfit.catalogue.cards import list_gpus
    from memfit.models.hub import list_models
    from memfit.report.words import visible
    from memfit.tables.tasks import TASKS

    def options(rows: list[tuple[str, str]]) -> str:
        return "".join(f'<option value="{escape(value, quote=True)}">{escape(text)}</option>' for value, text in rows)

    models = options([(entry.id, entry.stem) for entry in list_models()])
    cards = options([(gpu.short, gpu.name) for gpu in list_gpus()])
    tasks = options([(row.key, f"{row.key}: {row.title}") for row in TASKS.values()])
    name = escape(visible(followed.name), quote=True) if followed else ""
    template = template.replace("<!--FOLLOWED-->", name)
    return template.replace("<!--MODELS-->", models).replace("<!--CARDS-->", cards).replace("<!--TASKS-->", tasks)
