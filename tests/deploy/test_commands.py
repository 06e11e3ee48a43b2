"""What images, units, the chart and the operator's pods run is taken by our own command line."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from tests.deploy.images import (
    DEPLOY,
    compose,
    entry,
    environment,
    instructions,
    stages,
    unit,
)
from tests.fleet.kubernetes.fleets import Manifest, fleet, pool
from tests.fleet.kubernetes.test_reconciliation import made, observed
from tests.integrations.test_epp_chart import VARIANTS as EPP_VARIANTS
from tests.integrations.test_epp_chart import rendered
from tests.lib.source_tree import ROOT

from pigou.cli import main
from pigou.fleet.kubernetes.reconciliation import reconcile
from pigou.gateway.auth.keys import make_key

Parse = Callable[[Sequence[str], dict[str, str]], Any]


class Reached(Exception):
    """A command has all of its options, and would start."""


@pytest.fixture
def parse(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Parse:
    """Return what runs `pigou ...` until it would load a model, listen or connect."""

    def reached(*_: Any, **__: Any) -> None:
        raise Reached

    for place in (
        "pigou.worker.process.import_module", "pigou.fleet.serve.Serving.run",
        "pigou.fleet.kubernetes.operator.FleetOperator.__init__",
    ):  # fmt: skip
        monkeypatch.setattr(place, reached)
    monkeypatch.setattr("pigou.runtime.resources.prepare_environment", lambda threads: None)
    monkeypatch.setattr("pigou.logs.configure", lambda *_, **__: None)
    monkeypatch.chdir(tmp_path)

    def run(command: Sequence[str], variables: dict[str, str]) -> None:
        assert Path(command[0]).name == "pigou", command
        with monkeypatch.context() as patched:
            for name, value in variables.items():
                patched.setenv(name, value)
            with pytest.raises(Reached):
                main(command[1:])

    return run


def keys_file(folder: Path) -> None:
    (folder / "keys").write_text(make_key("me")[1] + "\n")


@pytest.mark.parametrize("target", ["gateway", "worker"])
def test_an_image_runs_as_a_user_and_has_a_health_check(target: str) -> None:
    words = [word for word, _ in stages()[target]]
    users = [rest for word, rest in stages()[target] if word == "USER"]
    assert users[-1] not in ("root", "0")
    assert "HEALTHCHECK" in words
    assert words.index("USER") < words.index("ENTRYPOINT")


def test_what_the_dockerfile_copies_exists() -> None:
    for word, rest in instructions():
        if word == "COPY" and not rest.startswith("--from"):
            for source in rest.split()[:-1]:
                assert (ROOT / source).exists(), source


@pytest.mark.parametrize("target", ["gateway", "worker"])
def test_an_image_s_entry_is_taken_with_what_it_asks_for(
    target: str, parse: Parse, tmp_path: Path
) -> None:
    keys_file(tmp_path)
    command, arguments = entry(target)
    needs = {"PIGOU_SERVE_API_KEYS_FILE": "keys"} if target == "gateway" else {
        "PIGOU_FLEET_SECRET": "s" * 32}  # fmt: skip
    parse([*command, *arguments], {**environment(target), **needs})
    for word, rest in stages()[target]:
        if word == "RUN" and rest.startswith("pigou "):
            with pytest.raises(SystemExit) as ended:
                main([*shlex.split(rest)[1:], "--help"])
            assert ended.value.code == 0
    text = (DEPLOY / "Dockerfile").read_text()
    assert all(name in text for name in needs), "the Dockerfile says what its entry needs"


def test_an_entry_without_what_it_asks_for_is_refused(parse: Parse) -> None:
    """Else the tests above would pass for whatever a file has."""
    for target in ("gateway", "worker"):
        command, arguments = entry(target)
        with pytest.raises(SystemExit):
            parse([*command, *arguments], {})
        with pytest.raises(SystemExit):
            parse([*command, "--no-such-option"], {"PIGOU_FLEET_SECRET": "s" * 32})


@pytest.mark.parametrize(
    ("name", "options"),
    [("pigou", ""), ("pigou-worker", "registry: nats://nats.internal:4222/pigou\n")],
)
def test_a_unit_s_command_is_taken(name: str, options: str, parse: Parse, tmp_path: Path) -> None:
    command, variables, credentials = unit(name)
    for credential in credentials:
        (tmp_path / credential).write_text("s" * 32)
    path = next(word for word in command if word.endswith(".yaml"))
    (tmp_path / "options.yaml").write_text(options)
    places = {path: str(tmp_path / "options.yaml"), "%d/": f"{tmp_path}/"}
    for place, ours in places.items():
        command = [word.replace(place, ours) for word in command]
    parse(command, variables)


def parse_pods(manifests: Sequence[Manifest], parse: Parse, folder: Path) -> int:
    """Parse the commands of all containers of workloads; return their number."""
    variables = {
        "POD_NAME": "p", "POD_IP": "10.0.0.1", "PIGOU_FLEET_SECRET": "s" * 32,
        "KUBERNETES_SERVICE_HOST": "10.0.0.2", "KUBERNETES_SERVICE_PORT": "443",
    }  # fmt: skip
    keys_file(folder)
    count = 0
    for manifest in manifests:
        template = manifest.get("spec", {}).get("template", {}).get("spec", {})
        for container in template.get("containers", ()):
            command = [*container.get("command", ()), *container.get("args", ())]
            if "pigou" not in command[:1]:
                continue
            for name, value in {**variables, "/etc/pigou/keys/keys": f"{folder}/keys"}.items():
                command = [
                    word.replace(f"$({name})", value).replace(name, value)
                    if name.startswith("/") else word.replace(f"$({name})", value)
                    for word in command
                ]  # fmt: skip
            assert "$(" not in " ".join(command)
            given = {each["name"]: each["value"] for each in container.get("env", ())
                     if "value" in each}  # fmt: skip
            parse(command, variables | given)
            count += 1
    return count


def test_commands_of_the_operator_s_pods_are_taken(parse: Parse, tmp_path: Path) -> None:
    slo = {"ttftSeconds": 0.5, "itlSeconds": 0.05}
    planned = {"apiKeysSecret": "keys", "args": ["--on", "kubernetes", "--planner", "price"]}
    scaled = pool("decode", None, gpusPerReplica=0, minReplicas=1, maxReplicas=2)
    body = fleet(pool("prefill", 1, gpusPerReplica=0), scaled, slo=slo, gateway=planned)
    pods = made(reconcile(observed(body)), "Deployment")
    assert parse_pods(pods, parse, tmp_path) == 3


@pytest.mark.helm
def test_commands_of_the_chart_are_taken(parse: Parse, tmp_path: Path) -> None:
    helm = pytest.importorskip("helm_python.chart", reason="helm-python-sdk is not installed")
    pages = helm.Chart.load(str(DEPLOY / "helm" / "pigou")).render({}, name="r", namespace="n")
    import yaml

    manifests = [m for text in pages.values() for m in yaml.safe_load_all(text)
                 if isinstance(m, dict) and m.get("kind")]  # fmt: skip
    body = next(m for m in manifests if m["kind"] == "PigouFleet")
    pods = made(reconcile(observed(body)), "Deployment")
    assert parse_pods([*manifests, *pods], parse, tmp_path) == 4


@pytest.mark.helm
@pytest.mark.parametrize("values", EPP_VARIANTS)
def test_commands_of_the_picker_s_chart_are_taken(
    values: dict[str, Any], parse: Parse, tmp_path: Path
) -> None:
    helm = pytest.importorskip("helm_python.chart", reason="helm-python-sdk is not installed")
    manifests = rendered(helm, values).values()
    assert parse_pods(list(manifests), parse, tmp_path) == 1


def test_services_of_the_compose_file_are_of_the_images_and_reach_each_other() -> None:
    services = compose()["services"]
    for name, service in services.items():
        target = service["build"]["target"]
        assert target == ("gateway" if name == "gateway" else "worker")
        assert (DEPLOY / service["build"]["context"] / service["build"]["dockerfile"]).is_file()
        assert set(service["networks"]) <= set(compose()["networks"])
        assert set(service["secrets"]) <= set(compose()["secrets"])
        for word in service["command"]:
            if "/run/secrets/" in word:
                assert word.rpartition("/")[2] in service["secrets"], word
    port = dict(stages()["worker"])["EXPOSE"]
    attached = [w for w in services["gateway"]["command"] if w.startswith("--attach=")]
    assert [w.removeprefix("--attach=http://") for w in attached] == [
        f"{name}:{port},role={name}" for name in ("prefill", "decode")
    ]
