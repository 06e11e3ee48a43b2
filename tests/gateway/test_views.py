"""What each key sees of the fleet, of the metrics and of the decisions: no tenant sees another."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from tests.gateway.metric_rules import complaints, promtool_complaints
from tests.gateway.stub import Fleet, Script, Stub, serving
from typer.testing import CliRunner

from pigou.cli import build
from pigou.config import ConfigError, ControlConfig
from pigou.gateway.auth.keys import Keys, make_key
from pigou.request import Role

TEXT = "/v1/completions"
TENANTS = ("ann", "bob", "root")


class Caller:
    """Asks a gateway with the keys of three tenants; `root` has an administrator's."""

    def __init__(self, folder: Path) -> None:
        made = {name: make_key(name, admin=name == "root") for name in TENANTS}
        self.secrets = {name: secret for name, (secret, _) in made.items()}
        path = folder / "keys"
        path.write_text("".join(line + "\n" for _, line in made.values()))
        self.keys = Keys.read(path)

    async def call(
        self, fleet: Fleet, who: str, path: str, body: Any = None
    ) -> tuple[int, str, dict[str, str]]:
        headers = {"authorization": f"Bearer {self.secrets[who]}"} if who else {}
        method = "GET" if body is None else "POST"
        async with (
            aiohttp.ClientSession(headers=headers) as session,
            session.request(method, fleet.url + path, json=body) as response,
        ):
            told = {name.lower(): value for name, value in response.headers.items()}
            return response.status, await response.text(), told

    async def decide(self, fleet: Fleet, who: str) -> str:
        """Return the id of a decision that a request of this tenant made."""
        status, _, headers = await self.call(fleet, who, TEXT, {"prompt": "x" * 40})
        assert status == 200
        return headers["x-pigou-decision"]


@pytest.fixture
def caller(tmp_path: Path) -> Caller:
    return Caller(tmp_path)


async def test_a_tenant_sees_its_own_decisions_and_an_admin_all(caller: Caller) -> None:
    async with serving(Stub("a"), keys=caller.keys) as fleet:
        ids = {who: [await caller.decide(fleet, who) for _ in range(3)] for who in TENANTS}
        for who in ("ann", "bob"):
            _, page, _ = await caller.call(fleet, who, "/decisions?limit=2")
            assert [each["id"] for each in json.loads(page)["decisions"]] == ids[who][:0:-1]
            for other in TENANTS:
                status, page, _ = await caller.call(fleet, who, f"/decisions/{ids[other][0]}")
                assert status == (200 if other == who else 404)
                assert other == who or "candidates" not in page
        _, page, _ = await caller.call(fleet, "root", "/decisions")
        assert {each["id"] for each in json.loads(page)["decisions"]} == {
            id for own in ids.values() for id in own
        }
        assert (await caller.call(fleet, "root", f"/decisions/{ids['ann'][0]}"))[0] == 200


async def test_anothers_decision_and_an_unknown_one_get_the_same_answer(caller: Caller) -> None:
    async with serving(Stub("a"), keys=caller.keys) as fleet:
        id = await caller.decide(fleet, "ann")
        unknown = ("0" if id[0] != "0" else "1") + id[1:]
        status, page, _ = await caller.call(fleet, "bob", f"/decisions/{id}")
        other, blank, _ = await caller.call(fleet, "bob", f"/decisions/{unknown}")
        assert (status, page.replace(id, "")) == (other, blank.replace(unknown, ""))


async def test_metrics_name_no_tenant_to_another(caller: Caller) -> None:
    async with serving(Stub("a"), keys=caller.keys) as fleet:
        for who in ("ann", "bob"):
            await caller.decide(fleet, who)
        assert (await caller.call(fleet, "", "/metrics"))[0] == 401
        _, page, _ = await caller.call(fleet, "ann", "/metrics")
        samples = [line for line in page.splitlines() if line and not line.startswith("#")]
        assert 'pigou_generation_tokens_total{model_name="stub",tenant="ann"} 5.0' in samples
        assert all('tenant="ann"' in line for line in samples)
        _, page, _ = await caller.call(fleet, "root", "/metrics")
        assert 'tenant="ann"' in page
        assert 'tenant="bob"' in page
        assert "pigou_requests_total" in page


async def test_open_metrics_are_for_all_and_have_the_sums_of_tenants_without_their_names(
    caller: Caller,
) -> None:
    async with serving(Stub("a"), keys=caller.keys, open_metrics=True) as fleet:
        for who in ("ann", "ann", "bob"):
            await caller.decide(fleet, who)
        status, page, _ = await caller.call(fleet, "", "/metrics")
        assert status == 200
        assert '\npigou_generation_tokens_total{model_name="stub"} 15.0\n' in page
        assert "pigou_requests_total" in page
        assert "ann" not in page
        assert 'tenant="ann"' in (await caller.call(fleet, "root", "/metrics"))[1]


async def test_the_workers_are_for_an_admin_and_usage_is_ones_own(caller: Caller) -> None:
    async with serving(Stub("a"), keys=caller.keys) as fleet:
        await caller.decide(fleet, "ann")
        status, page, _ = await caller.call(fleet, "ann", "/workers")
        assert (status, json.loads(page)["error"]["type"]) == (403, "PermissionDeniedError")
        assert "--admin" in page
        assert (await caller.call(fleet, "root", "/workers"))[0] == 200
        used = {who: json.loads((await caller.call(fleet, who, "/usage"))[1]) for who in TENANTS}
        assert used["ann"] == {"tenant": "ann", "admin": False, "prompt_tokens": 40.0,
                               "generation_tokens": 5.0}  # fmt: skip
        assert used["bob"]["generation_tokens"] == 0
        assert used["root"]["admin"]
        assert (await caller.call(fleet, "", "/usage"))[0] == 401


async def test_without_keys_everybody_sees_everything(caller: Caller) -> None:
    async with serving(Stub("a")) as fleet:
        id = await caller.decide(fleet, "")
        for path in ("/workers", "/metrics", "/usage", "/decisions", f"/decisions/{id}"):
            assert (await caller.call(fleet, "", path))[0] == 200


async def test_no_page_of_a_tenant_names_another(caller: Caller) -> None:
    paths = ("/", "/health", "/ping", "/version", "/metrics", "/workers", "/usage", "/decisions",
             "/v1/models", "/nowhere")  # fmt: skip
    async with serving(Stub("a"), keys=caller.keys) as fleet:
        for who in ("ann", "root"):
            await caller.decide(fleet, who)
        for path in paths:
            _, page, headers = await caller.call(fleet, "bob", path)
            assert not any(name in page + str(headers) for name in ('"ann"', '="root')), path


@pytest.mark.parametrize("suffix", [".yaml", ""])
def test_pigou_key_makes_an_admins_entry(suffix: str, tmp_path: Path) -> None:
    options = ["--yaml"] if suffix else []
    made = CliRunner().invoke(build(["key", "version"]), ["key", "ops", "--admin", *options])
    assert made.exit_code == 0, made.output
    secret = made.stderr.rpartition(" ")[2].strip()
    path = tmp_path / f"keys{suffix}"
    path.write_text(("keys:\n" if suffix else "") + made.stdout)
    found = Keys.read(path).find(f"Bearer {secret}")
    assert found is not None
    assert (found.tenant, found.admin) == ("ops", True)


@pytest.mark.parametrize("ending", [":Admin", ":root", "::admin", ":admin:admin"])
def test_a_line_with_another_mark_than_admin_is_refused(ending: str, tmp_path: Path) -> None:
    path = tmp_path / "keys"
    path.write_text(make_key("ops")[1] + ending)
    with pytest.raises(ConfigError, match="line 1"):
        Keys.read(path)


async def test_probes_and_scrapes_are_no_work(caller: Caller) -> None:
    async with serving(Stub("p", Role.PREFILL)) as fleet:
        pages = ("/health", "/ping", "/metrics", "/workers", "/plan", "/diagnosis", "/costs",
                 "/costs/1", "/decisions/1", "/traces", "/traces/1", "/v1/models/x")  # fmt: skip
        for path in pages:
            await caller.call(fleet, "", path)
        _, page, _ = await caller.call(fleet, "", "/metrics")
        assert "pigou_requests_shed_total 0.0" in page.replace('{model_name="stub"}', "")
        assert "pigou_requests_inflight 0.0" in page.replace('{model_name="stub"}', "")
        assert 'pigou_requests_total{model_name="stub",route="/health",status="503"} 1.0' in page
        assert 'route="other"' not in page, "`other` is work that is passed on"


async def test_unknown_query_parameters_are_refused_but_of_probes_and_scrapes(
    caller: Caller,
) -> None:
    pages = ("/costs", "/costs/1", "/decisions", "/decisions/1", "/diagnosis", "/history",
             "/plan", "/traces", "/traces/1", "/usage", "/workers")  # fmt: skip
    async with serving(Stub("a")) as fleet:
        for path in pages:
            status, page, _ = await caller.call(fleet, "", f"{path}?tenannt=ann")
            assert status == 400, path
            assert "tenannt" in page
        assert (await caller.call(fleet, "", "/history?since=nan"))[0] == 400
        for path in ("/metrics?name[]=up", "/ping?t=1", "/decisions?limit=2", "/history?since=0"):
            assert (await caller.call(fleet, "", path))[0] == 200, path


async def test_requests_that_are_refused_for_want_of_room_are_shed() -> None:
    stub = Stub("a", script=Script(status=503))
    async with serving(stub, Stub("b", script=Script(status=503))) as fleet:
        async with (
            aiohttp.ClientSession() as session,
            session.post(fleet.url + TEXT, json={"prompt": "x"}) as response,
        ):
            assert response.status == 503
        assert fleet.metrics.shed._value.get() == 1


async def test_the_gateways_metrics_keep_promtools_rules(caller: Caller) -> None:
    async with serving(Stub("a"), control=ControlConfig(policy="toll")) as fleet:
        await caller.decide(fleet, "")
        _, page, _ = await caller.call(fleet, "", "/metrics")
    assert complaints(page) == []
    assert "pigou_build_info{" in page
    assert 'pigou_time_to_first_token_seconds_bucket{le="600.0",model_name="stub"}' in page
    if (told := promtool_complaints(page)) is None:
        pytest.skip("promtool is not installed (Debian: prometheus)")
    assert told == []


@pytest.mark.parametrize(
    ("page", "words"),
    [
        ("# HELP pigou:x X.\n# TYPE pigou:x gauge\npigou:x 1\n", "begins with pigou_"),
        ("# HELP pigou_x X.\n# TYPE pigou_x untyped\npigou_x 1\n", "type unknown"),
        ("# TYPE pigou_x gauge\npigou_x 1\n", "no help text"),
        ("# HELP pigou_x_total X.\n# TYPE pigou_x_total gauge\npigou_x_total 1\n", "ends in"),
        ("# HELP pigou_x_ms X.\n# TYPE pigou_x_ms gauge\npigou_x_ms 1\n", "no base units"),
        ("# HELP pigou_x_gauge X.\n# TYPE pigou_x_gauge gauge\npigou_x_gauge 1\n", "its type"),
    ],
)
def test_the_rules_find_what_breaks_them(page: str, words: str) -> None:
    assert any(words in each for each in complaints(page))
