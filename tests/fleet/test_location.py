"""Labels of a worker's node: told by the worker or by who attaches it, known to the router."""

from __future__ import annotations

from typing import Any

import pytest
from tests.fleet.harness import SLEEP, running

from pigou.config import ConfigError, ControlConfig
from pigou.control.plane import ControlPlane
from pigou.fleet.config import AttachedWorker
from pigou.fleet.probe import _location
from pigou.gateway.plane_driver import PlaneDriver
from pigou.gateway.proxy.upstream import Engine, Upstream
from pigou.placement.topology import read_location
from pigou.request import UNKNOWN_LOCATION, Location, Role, Worker


def test_a_location_is_read_from_its_labels() -> None:
    assert read_location("host=a,rack=r,zone=z") == Location("a", "r", "z")
    assert read_location("zone=z,host=a") == Location("a", "", "z")
    assert read_location("") == UNKNOWN_LOCATION


@pytest.mark.parametrize("text", ["rack=r", "host=", "host=a,host=b", "row=3,host=a", "a"])
def test_a_location_that_is_none_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="location"):
        read_location(text)


def test_who_attaches_a_server_may_say_where_it_is() -> None:
    spec = AttachedWorker.parse("http://h:1,role=decode,host=a,rack=r", 0)
    assert (spec.host, spec.rack, spec.zone) == ("a", "r", "")
    with pytest.raises(ConfigError, match="without its host="):
        AttachedWorker.parse("http://h:1,rack=r", 0)


@pytest.mark.parametrize("value", [None, 3, {"rack": "r"}, {"host": 4, "rack": "r"}, []])
def test_what_is_no_location_is_unknown(value: Any) -> None:
    assert _location(value) == UNKNOWN_LOCATION


async def test_the_router_knows_what_a_worker_says_of_its_node() -> None:
    arguments = (*SLEEP, "--location", "host=a,rack=r,zone=z")
    async with running(0, 0, 1, arguments=arguments) as (serving, client):
        row = (await client.workers())["both-0"]
        assert (row["host"], row["rack"], row["zone"]) == ("a", "r", "z")
        (worker,) = serving.plane_driver.plane.state.workers
        assert worker.location == Location("a", "r", "z")


def labelled(**hosts: str) -> PlaneDriver:
    """A driver of workers that are up, by id and host; those named p... prefill alone."""
    driver = PlaneDriver(ControlPlane(ControlConfig()))
    for id, host in hosts.items():
        role = Role.PREFILL if id.startswith("p") else Role.BOTH
        worker = Worker(id, "http://h:1", role, location=Location(host))
        driver.upstreams[id] = Upstream(worker, Engine(stock=False, model="m"), "")
        driver._hosts[id] = host
    return driver


async def test_a_request_avoids_the_host_of_the_worker_that_failed_it() -> None:
    driver = labelled(a="x", b="x", c="y", p="x")
    assert driver.exclude_hosts(frozenset({"a"})) == {"a", "b", "p"}
    del driver.upstreams["a"]
    assert driver.exclude_hosts(frozenset({"a"})) == {"a", "b", "p"}


async def test_a_host_is_not_avoided_where_nobody_else_decodes_or_labels_lack() -> None:
    assert labelled(a="x", b="x", p="y").exclude_hosts(frozenset({"a"})) == {"a"}
    assert labelled(a="", b="").exclude_hosts(frozenset({"a"})) == {"a"}
