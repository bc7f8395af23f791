"""The routes: what each answers, that nothing but reading is possible, and whom the server answers to."""

import asyncio
import contextlib
import json
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from tscale.dashboard.app import AppConfig, create_app, is_loopback_host, open_socket, page_url
from tscale.dashboard.events import Broadcaster
from tscale.dashboard.guard import host_name, is_loopback_name
from tscale.dashboard.source import SourceSet
from tscale.protocol.errors import BadInput, PortInUse
from tscale.protocol.status import StatusSnapshot

EXAMPLE = (Path(__file__).parents[2] / "helpers" / "status_example.json").read_text(encoding="utf-8")
LOCAL = "http://127.0.0.1:8787"
PATHS = ["/", "/static/app.js", "/view.json", "/history.json", "/status.json", "/metrics", "/healthz", "/nowhere"]

Visit = Callable[[httpx.AsyncClient, Broadcaster], Awaitable[None]]


@contextlib.asynccontextmanager
async def running(paths: list[Path], config: AppConfig) -> AsyncIterator[tuple[httpx.AsyncClient, Broadcaster]]:
    app, broadcaster = create_app(SourceSet(paths), config)
    async with app.router.lifespan_context(app):
        async with asyncio.timeout(20):
            while broadcaster.last_tick_mono_s is None:
                await asyncio.sleep(0)
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url=LOCAL) as client:
            yield client, broadcaster


def visit(test: Visit, paths: list[Path], config: AppConfig | None = None) -> None:
    async def scenario() -> None:
        async with running(paths, config or AppConfig()) as (client, broadcaster):
            await asyncio.wait_for(test(client, broadcaster), 20)

    asyncio.run(scenario())


@pytest.fixture
def example(tmp_path: Path) -> Path:
    path = tmp_path / "status.json"
    path.write_text(EXAMPLE, encoding="utf-8")
    return path


def test_every_answer_carries_the_security_headers(example: Path) -> None:
    async def check(client: httpx.AsyncClient, _: Broadcaster) -> None:
        for path in PATHS:
            for answer in (await client.get(path), await client.head(path), await client.post(path)):
                csp = answer.headers["content-security-policy"]
                assert "default-src 'self'" in csp
                assert "frame-ancestors 'none'" in csp
                assert "unsafe" not in csp
                assert answer.headers["x-content-type-options"] == "nosniff"
                assert answer.headers["referrer-policy"] == "no-referrer"
                assert "access-control-allow-origin" not in answer.headers
                assert "cache-control" in answer.headers

    visit(check, [example])


def test_nothing_but_get_and_head_is_answered(example: Path) -> None:
    async def check(client: httpx.AsyncClient, _: Broadcaster) -> None:
        for path in [*PATHS, "/events"]:
            for method in ("POST", "PUT", "PATCH", "DELETE", "OPTIONS", "TRACE", "CONNECT", "BREW"):
                answer = await client.request(method, path)
                assert answer.status_code == 405, (method, path)
                assert answer.headers["allow"] == "GET, HEAD"
        head = await client.head("/events")
        assert (head.status_code, head.headers["content-type"].split(";")[0]) == (200, "text/event-stream")

    visit(check, [example])


def test_status_json_is_the_snapshot_without_addresses(example: Path) -> None:
    async def check(client: httpx.AsyncClient, _: Broadcaster) -> None:
        answer = await client.get("/status.json")
        snapshot = StatusSnapshot.from_json(answer.content)
        assert snapshot.round.number == 4259
        for path in PATHS:
            text = (await client.get(path)).text
            assert "192.0.2.7" not in text
            assert "/home/ahab" not in text
        assert (await client.get("/status.json?node=nobody")).status_code == 503

    visit(check, [example])


def test_the_view_leaves_the_history_to_its_own_route(example: Path) -> None:
    async def check(client: httpx.AsyncClient, _: Broadcaster) -> None:
        view = (await client.get("/view.json")).json()
        (source,) = view["sources"]
        assert view["auto"] == source["id"]
        assert "history" not in source["snapshot"]["training"]
        history = (await client.get("/history.json", params={"node": source["id"]})).json()
        assert history == json.loads(EXAMPLE)["training"]["history"]
        assert source["snapshot"]["recent"] == history[-6:]
        assert (await client.get("/history.json?node=nobody")).status_code == 404

    visit(check, [example])


def test_metrics_come_from_the_same_snapshot(example: Path) -> None:
    async def check(client: httpx.AsyncClient, _: Broadcaster) -> None:
        answer = await client.get("/metrics")
        assert answer.headers["content-type"].startswith("text/plain")
        plain = json.loads(EXAMPLE)
        node = {"peer": plain["node"]["peer_id"], "swarm": plain["swarm_id"]}
        samples = [sample for family in text_string_to_metric_families(answer.text) for sample in family.samples]

        def value(name: str, **more: str) -> float:
            (found,) = [sample.value for sample in samples if (sample.name, sample.labels) == (name, {**node, **more})]
            return found

        assert value("tscale_round") == 4259
        assert (value("tscale_peers", state="alive"), value("tscale_peers", state="gone")) == (5, 1)
        assert value("tscale_contributions_total", result="missed") == 1
        screened = [value("tscale_screened_total", reason=reason) for reason in ("against_the_others", "too_large")]
        assert screened == [3, 1]
        assert (value("tscale_activity", activity="training"), value("tscale_activity", activity="alone")) == (1, 0)
        assert value("tscale_loss_nats", split="heldout") == plain["training"]["loss_heldout"]
        assert value("tscale_transfer_bytes_total", direction="up") == plain["transfer"]["up_bytes"]
        assert "queequeg" not in answer.text

    visit(check, [example])


def test_without_a_status_every_route_still_answers(tmp_path: Path) -> None:
    async def check(client: httpx.AsyncClient, _: Broadcaster) -> None:
        codes = {path: (await client.get(path)).status_code for path in PATHS}
        assert codes["/status.json"] == 503
        assert codes["/nowhere"] == codes["/history.json"] == 404
        assert codes["/"] == codes["/view.json"] == codes["/metrics"] == codes["/healthz"] == 200
        assert (await client.get("/view.json")).json()["sources"] == []
        assert (await client.get("/healthz")).json() == {"ok": True, "nodes": 0, "fresh_nodes": 0}

    visit(check, [tmp_path / "none"])


def test_static_files_are_fixed_and_cached_by_content(example: Path) -> None:
    async def check(client: httpx.AsyncClient, _: Broadcaster) -> None:
        page = await client.get("/")
        assert page.headers["content-type"] == "text/html; charset=utf-8"
        again = await client.get("/", headers={"If-None-Match": page.headers["etag"]})
        assert (again.status_code, again.content) == (304, b"")
        for name, kind in (("app.js", "text/javascript"), ("app.css", "text/css"), ("favicon.svg", "image/svg+xml")):
            answer = await client.get(f"/static/{name}")
            assert answer.headers["content-type"].split(";")[0] == kind
        for path in ("/static/", "/static/../app.py", "/static/%2e%2e/app.py", "/static/..%2fapp.py", "/app.py"):
            assert (await client.get(path)).status_code == 404

    visit(check, [example])


@pytest.mark.parametrize(
    ("host", "code"),
    [
        ("localhost:8787", 200),
        ("LOCALHOST", 200),
        ("127.0.0.1:9000", 200),
        ("[::1]:8787", 200),
        ("tscale.localhost:8787", 200),
        ("evil.example", 421),
        ("127.0.0.1.evil.example:8787", 421),
        ("localhost.evil.example", 421),
        ("192.0.2.1:8787", 421),
        ("", 421),
        ("run.example.org", 421),
    ],
)
def test_a_loopback_server_answers_only_as_this_machine(example: Path, host: str, code: int) -> None:
    async def check(client: httpx.AsyncClient, _: Broadcaster) -> None:
        assert (await client.get("/status.json", headers={"Host": host})).status_code == code

    visit(check, [example])


def test_further_names_are_allowed_when_given_and_any_when_bound_to_all(example: Path) -> None:
    async def proxied(client: httpx.AsyncClient, _: Broadcaster) -> None:
        assert (await client.get("/", headers={"Host": "run.example.org"})).status_code == 200
        assert (await client.get("/", headers={"Host": "other.example.org"})).status_code == 421

    async def public(client: httpx.AsyncClient, _: Broadcaster) -> None:
        assert (await client.get("/", headers={"Host": "192.0.2.1:8787"})).status_code == 200

    visit(proxied, [example], AppConfig(allowed_hosts=("Run.example.org",)))
    visit(proxied, [example], AppConfig(loopback=False, allowed_hosts=("run.example.org",)))
    visit(public, [example], AppConfig(loopback=False))


def test_other_sites_may_link_here_but_not_read_or_hold_streams(example: Path) -> None:
    async def check(client: httpx.AsyncClient, _: Broadcaster) -> None:
        cross = {"Sec-Fetch-Site": "cross-site"}
        assert (await client.get("/events", headers={**cross, "Sec-Fetch-Mode": "cors"})).status_code == 403
        assert (await client.get("/", headers={**cross, "Sec-Fetch-Mode": "navigate"})).status_code == 200

    visit(check, [example])


def test_too_many_streams_are_refused(example: Path) -> None:
    async def check(client: httpx.AsyncClient, broadcaster: Broadcaster) -> None:
        stream = broadcaster.stream()
        await anext(stream)
        answer = await client.get("/events")
        assert (answer.status_code, answer.headers["retry-after"]) == (503, "5")

    visit(check, [example], AppConfig(max_streams=1))


def test_names_in_host_headers() -> None:
    assert host_name("[::1]:80") == "::1"
    assert host_name("Example.org:80") == "example.org"
    assert host_name("::1") == "::1"
    assert is_loopback_name("127.8.9.1")
    assert not is_loopback_name("0.0.0.0")
    assert not is_loopback_name("")
    assert is_loopback_host("Localhost")
    assert not is_loopback_host("::")


def test_a_port_in_use_is_one_clear_line() -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        with pytest.raises(PortInUse, match=f"port {port} on 127.0.0.1 is in use: give another --port") as caught:
            open_socket("127.0.0.1", port)
    assert caught.value.exit_code == 4
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(("host", "port"), [("127.0.0.1", 70000), ("no such host", 0), ("192.0.2.1", 0), ("a" * 70, 0)])
def test_a_bad_address_is_one_clear_line(host: str, port: int) -> None:
    with pytest.raises(BadInput) as caught:
        open_socket(host, port)
    assert "\n" not in str(caught.value)


def test_the_address_of_the_page() -> None:
    with open_socket("127.0.0.1", 0) as listener:
        assert listener.getsockname()[1] > 0
    assert page_url("127.0.0.1", 8787) == "http://127.0.0.1:8787/"
    assert page_url("::1", 80) == "http://[::1]:80/"
    assert page_url("0.0.0.0", 80) == "http://127.0.0.1:80/"
    assert page_url("localhost", 80) == "http://localhost:80/"
