"""What every request passes first: read-only methods, the Host header, and the headers of every answer."""

import ipaddress
from collections.abc import Iterable

from starlette.datastructures import Headers, MutableHeaders
from starlette.responses import PlainTextResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

CONTENT_SECURITY_POLICY = (
    "default-src 'self'; base-uri 'none'; form-action 'none'; object-src 'none'; frame-ancestors 'none'"
)

SECURITY_HEADERS = (
    ("Content-Security-Policy", CONTENT_SECURITY_POLICY),
    ("X-Content-Type-Options", "nosniff"),
    ("Referrer-Policy", "no-referrer"),
    ("X-Frame-Options", "DENY"),
    ("Cross-Origin-Opener-Policy", "same-origin"),
    ("Cross-Origin-Resource-Policy", "same-origin"),
)

_LOOPBACK_NAMES = frozenset({"localhost", "localhost."})


def host_name(host_header: str) -> str:
    """The name in a Host header, lower case, without port and brackets: `[::1]:8787` -> `::1`."""
    host = host_header.strip().lower()
    if host.startswith("["):
        return host[1:].partition("]")[0]
    return host.rpartition(":")[0] if host.count(":") == 1 else host


def is_loopback_name(name: str) -> bool:
    """Whether `name` can only mean this machine."""
    if name in _LOOPBACK_NAMES or name.endswith(".localhost"):
        return True
    try:
        return ipaddress.ip_address(name).is_loopback
    except ValueError:
        return False


class Guard:
    """ASGI middleware: GET and HEAD only, no foreign Host on a loopback bind, no use by other sites, safe headers.

    A page of another site can point its own name at 127.0.0.1 (DNS rebinding) and would then read this dashboard
    through the visitor's browser; the Host header gives it away. `loopback` says whether the server is bound to
    loopback, `allowed_hosts` names it may be called by besides (a reverse proxy's).
    """

    def __init__(self, app: ASGIApp, loopback: bool, allowed_hosts: Iterable[str] = ()) -> None:
        self._app = app
        self._loopback = loopback
        self._allowed_hosts = frozenset(host_name(host) for host in allowed_hosts)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return

        async def send_with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                for name, value in SECURITY_HEADERS:
                    headers[name] = value
                headers.setdefault("Cache-Control", "no-store")
            await send(message)

        refusal = self._refusal(scope)
        await (refusal or self._app)(scope, receive, send_with_headers)

    def _refusal(self, scope: Scope) -> PlainTextResponse | None:
        if scope["method"] not in ("GET", "HEAD"):
            return PlainTextResponse("This page is read-only.\n", 405, {"Allow": "GET, HEAD"})
        headers = Headers(scope=scope)
        if not self._host_allowed(headers.getlist("host")):
            return PlainTextResponse("This dashboard does not answer to that host name.\n", 421)
        if headers.get("sec-fetch-site") == "cross-site" and headers.get("sec-fetch-mode") != "navigate":
            return PlainTextResponse("Other sites may link to this page, not read it.\n", 403)
        return None

    def _host_allowed(self, hosts: list[str]) -> bool:
        if not self._loopback and not self._allowed_hosts:
            return True
        names = [host_name(host) for host in hosts]
        return len(names) == 1 and (names[0] in self._allowed_hosts or is_loopback_name(names[0]))
