"""A page of the API is one file: its route, who may see it, its view and its metrics."""

from __future__ import annotations

import sys
from pathlib import Path

import aiohttp
import pytest
from tests.gateway.stub import Stub, serving

from pigou.gateway import api
from pigou.gateway.auth.keys import Keys, make_key

PAGE = """
from pigou.gateway.api.page import Access, APIPage, APIPages, json_response
from pigou.metric_rows import gauge_family


def pages(gateway):
    gateway.metrics.scrape(lambda: [gauge_family("pigou_upstreams", "Workers.", count())])

    def count():
        return len(gateway.plane_driver.upstreams)

    async def show(request):
        return json_response({"up": count()})

    return APIPages([APIPage("/upstreams/{id}", show, Access.ADMIN, ("x",))])
"""


async def test_a_new_file_is_a_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "upstreams.py").write_text(PAGE)
    monkeypatch.setattr(api, "__path__", [*api.__path__, str(tmp_path)])
    made = {name: make_key(name, admin=name == "root") for name in ("ann", "root")}
    (tmp_path / "keys").write_text("".join(f"{line}\n" for _, line in made.values()))
    answers = {}
    try:
        async with serving(Stub("a"), keys=Keys.read(tmp_path / "keys")) as fleet:
            for who, path in (("", ""), ("ann", ""), ("root", ""), ("root", "?y=1")):
                headers = {"authorization": f"Bearer {made[who][0]}"} if who else {}
                async with aiohttp.ClientSession(headers=headers) as session:
                    async with session.get(f"{fleet.url}/upstreams/1{path}") as response:
                        answers[who, path] = response.status
                    if path:
                        page = await (await session.get(f"{fleet.url}/metrics")).text()
    finally:
        sys.modules.pop("pigou.gateway.api.upstreams", None)
    assert answers == {("", ""): 401, ("ann", ""): 403, ("root", ""): 200, ("root", "?y=1"): 400}
    assert 'pigou_upstreams{model_name="stub"} 1.0' in page
    assert 'pigou_requests_total{model_name="stub",route="/upstreams/{id}",status="200"}' in page
