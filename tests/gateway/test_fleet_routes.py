"""Who may change the fleet: an administrator, and never a tenant."""

from __future__ import annotations

from pathlib import Path

import aiohttp
from tests.gateway.stub import Stub, serving

from pigou.gateway.auth.keys import Keys, make_key

CALLS = (
    ("POST", "/workers", {"role": "decode"}),
    ("POST", "/workers/a/drain", None),
    ("POST", "/workers/a/flip", {"role": "prefill"}),
    ("DELETE", "/workers/a?now=true", None),
)


async def test_only_an_administrator_changes_the_fleet(tmp_path: Path) -> None:
    made = {name: make_key(name, admin=name == "root") for name in ("ann", "root")}
    path = tmp_path / "keys"
    path.write_text("".join(line + "\n" for _, line in made.values()))
    # This gateway changes nothing at all: who may is told so.
    expected = {"": 401, "ann": 403, "root": 409}
    async with serving(Stub("a"), keys=Keys.read(path)) as fleet:
        for who, status in expected.items():
            headers = {"authorization": f"Bearer {made[who][0]}"} if who else {}
            async with aiohttp.ClientSession(headers=headers) as session:
                for method, route, body in CALLS:
                    async with session.request(method, fleet.url + route, json=body) as response:
                        assert response.status == status, (who, method, route)
                        message = (await response.json())["error"]["message"]
                        assert "--admin" in message or who != "ann"
