"""The dashboard's web server: the page, its live stream, `/status.json`, `/metrics` and `/healthz`. Read-only."""

import asyncio
import contextlib
import errno
import hashlib
import ipaddress
import mimetypes
import os
import socket
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

import uvicorn
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from tscale.dashboard.events import Broadcaster
from tscale.dashboard.guard import Guard, is_loopback_name
from tscale.dashboard.metrics import render_metrics
from tscale.dashboard.source import SourceSet, SourceState
from tscale.dashboard.view import render_history, render_view
from tscale.protocol.errors import BadInput, PortInUse

STATIC_DIR = Path(__file__).parent / "static"
DEFAULT_HOST = "127.0.0.1"
DEFAULT_PORT = 8787
MAX_CONNECTIONS = 256
GRACEFUL_STOP_S = 1
STUCK_AFTER_S = 30.0
_WILDCARDS = frozenset({"0.0.0.0", "::"})


@dataclass(frozen=True)
class AppConfig:
    """`loopback`: bound to this machine only, so the Host header is checked; `allowed_hosts`: further names it has."""

    loopback: bool = True
    allowed_hosts: tuple[str, ...] = ()
    tick_s: float = 0.5
    heartbeat_s: float = 15.0
    max_streams: int = 64


class Watch:
    """The newest state of all sources, looked at once per tick whatever the number of visitors."""

    def __init__(self, sources: SourceSet) -> None:
        self._sources = sources
        self._shown: object = None
        self.states: tuple[SourceState, ...] = ()
        self.chosen: SourceState | None = None

    async def tick(self) -> bytes | None:
        """Look at the files; the rendered view if it differs from the last one, else None."""
        now_unix_s = time.time()
        self.states = await asyncio.to_thread(self._sources.poll, now_unix_s, time.monotonic())
        self.chosen = self._sources.choose(self.states)
        chosen_id = None if self.chosen is None else self.chosen.source_id
        shown = (chosen_id, [(state.source_id, state.label, state.revision, state.fresh) for state in self.states])
        if shown == self._shown:
            return None
        self._shown = shown
        return self.render(now_unix_s)

    def render(self, now_unix_s: float) -> bytes:
        return render_view(self.states, self.chosen, now_unix_s)

    def find(self, source_id: str | None) -> SourceState | None:
        """The source with that id; without an id the one the page shows by itself."""
        if source_id is None:
            return self.chosen
        return next((state for state in self.states if state.source_id == source_id), None)


def create_app(sources: SourceSet, config: AppConfig) -> tuple[Starlette, Broadcaster]:
    """The ASGI app, and the broadcaster behind `/events` so that the server can end its streams when it stops."""
    watch = Watch(sources)
    broadcaster = Broadcaster(watch.tick, config.tick_s, config.heartbeat_s, config.max_streams)

    @contextlib.asynccontextmanager
    async def lifespan(_: Starlette) -> AsyncIterator[None]:
        async with asyncio.TaskGroup() as group:
            producer = group.create_task(broadcaster.run())
            yield
            producer.cancel()

    app = Starlette(
        routes=[*_static_routes(), *_live_routes(watch, broadcaster)],
        middleware=[Middleware(Guard, loopback=config.loopback, allowed_hosts=config.allowed_hosts)],
        lifespan=lifespan,
    )
    return app, broadcaster


def _static_routes() -> list[Route]:
    """The page's files, read once: `/` and `/static/<name>`."""
    routes = []
    for item in sorted(STATIC_DIR.iterdir()):
        endpoint = _static_endpoint(item.name, item.read_bytes())
        routes.append(Route("/" if item.name == "index.html" else f"/static/{item.name}", endpoint))
    return routes


def _static_endpoint(name: str, body: bytes) -> Callable[[Request], Awaitable[Response]]:
    media_type = mimetypes.guess_type(name)[0] or "text/plain"
    if name.endswith(".js"):
        media_type = "text/javascript"
    etag = f'"{hashlib.blake2s(body, digest_size=12).hexdigest()}"'
    headers = {"Cache-Control": "no-cache", "ETag": etag}

    async def serve_file(request: Request) -> Response:
        if request.headers.get("if-none-match") == etag:
            return Response(status_code=304, headers=headers)
        return Response(body, media_type=media_type, headers=headers)

    return serve_file


def _live_routes(watch: Watch, broadcaster: Broadcaster) -> list[Route]:
    async def events(request: Request) -> Response:
        headers = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}
        if request.method == "HEAD":
            return Response(media_type="text/event-stream", headers=headers)
        if broadcaster.full:
            return Response("Too many live views are open.\n", 503, {"Retry-After": "5"}, "text/plain")
        return StreamingResponse(broadcaster.stream(), media_type="text/event-stream", headers=headers)

    async def view(_: Request) -> Response:
        return Response(watch.render(time.time()), media_type="application/json")

    async def history(request: Request) -> Response:
        state = watch.find(request.query_params.get("node"))
        if state is None:
            return JSONResponse({"problem": "There is no such node."}, 404)
        return Response(render_history(state), media_type="application/json")

    async def status(request: Request) -> Response:
        state = watch.find(request.query_params.get("node"))
        if state is None or state.snapshot is None:
            problem = "There is no status yet." if state is None else state.problem
            return JSONResponse({"problem": problem}, 503, {"Retry-After": "2"})
        return Response(state.snapshot.to_json(), media_type="application/json")

    async def metrics(_: Request) -> Response:
        return Response(render_metrics(watch.states), headers={"Content-Type": CONTENT_TYPE_LATEST})

    async def healthz(_: Request) -> Response:
        last = broadcaster.last_tick_mono_s
        ok = last is not None and time.monotonic() - last < STUCK_AFTER_S
        fresh = sum(state.fresh for state in watch.states)
        return JSONResponse({"ok": ok, "nodes": len(watch.states), "fresh_nodes": fresh}, 200 if ok else 503)

    endpoints = {
        "/events": events,
        "/view.json": view,
        "/history.json": history,
        "/status.json": status,
        "/metrics": metrics,
        "/healthz": healthz,
    }
    return [Route(path, endpoint) for path, endpoint in endpoints.items()]


class DashboardServer(uvicorn.Server):
    """uvicorn's server, ending open streams at once and returning from a signal instead of raising it again."""

    def __init__(self, config: uvicorn.Config, broadcaster: Broadcaster) -> None:
        super().__init__(config)
        self._broadcaster = broadcaster

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        self._broadcaster.close()
        await super().shutdown(sockets)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        self.force_exit = self.should_exit
        self.should_exit = True


def open_socket(host: str, port: int) -> socket.socket:
    """A listening TCP socket (port 0: any free one). Raises PortInUse or BadInput with one clear line."""
    if not 0 <= port <= 65535:
        raise BadInput(f"port {port} is not a port: give one from 1 to 65535, or 0 for any free one")
    try:
        family, kind, proto, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
    except (OSError, UnicodeError):
        raise BadInput(f"{host!r} is not an address of this machine: give an IP address or 'localhost'") from None
    listener = socket.socket(family, kind, proto)
    try:
        if os.name == "posix":  # elsewhere the option lets two programs share one port
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        listener.listen(128)
    except OSError as error:
        listener.close()
        if error.errno in (errno.EADDRINUSE, errno.EACCES):
            why = "in use" if error.errno == errno.EADDRINUSE else "not open to this user"
            raise PortInUse(
                f"port {port} on {host} is {why}: give another --port, or --port 0 for a free one"
            ) from None
        raise BadInput(f"can't listen on {host}: {error.strerror}") from None
    listener.setblocking(False)
    return listener


def is_loopback_host(host: str) -> bool:
    """Whether a server bound to `host` is reachable from this machine only."""
    return is_loopback_name(host.lower())


def page_url(host: str, port: int) -> str:
    """The address to open in a browser on this machine."""
    name = "127.0.0.1" if host in _WILDCARDS or not host else host
    with contextlib.suppress(ValueError):
        if ipaddress.ip_address(name).version == 6:
            name = f"[{name}]"
    return f"http://{name}:{port}/"


def serve(
    paths: Sequence[Path],
    host: str = DEFAULT_HOST,
    port: int = DEFAULT_PORT,
    allowed_hosts: Sequence[str] = (),
    on_ready: Callable[[str], None] | None = None,
) -> None:
    """Serve the page over the status files under `paths` until SIGINT or SIGTERM; both end it within two seconds.

    `on_ready` is called once with the page's address when the port is open. Raises PortInUse or BadInput before that.
    """
    listener = open_socket(host, port)
    url = page_url(host, listener.getsockname()[1])
    config = AppConfig(loopback=is_loopback_host(host), allowed_hosts=tuple(allowed_hosts))
    app, broadcaster = create_app(SourceSet(paths), config)
    server_config = uvicorn.Config(
        app,
        log_config=None,
        log_level="warning",
        access_log=False,
        server_header=False,
        proxy_headers=False,
        ws="none",
        limit_concurrency=MAX_CONNECTIONS,
        timeout_graceful_shutdown=GRACEFUL_STOP_S,
        h11_max_incomplete_event_size=16 << 10,
    )

    with listener:
        if on_ready is not None:
            on_ready(url)
        DashboardServer(server_config, broadcaster).run(sockets=[listener])
