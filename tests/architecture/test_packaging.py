"""The images are built with the steps that are tested."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import yaml

from tests.support.tree import repository


def test_the_image_installs_as_the_makefile_does_and_copies_every_package() -> None:
    makefile = (repository() / "Makefile").read_text()
    dockerfile = (repository() / "docker" / "Dockerfile").read_text()
    assert "-c constraints.txt torch" in makefile
    assert "torch" not in dockerfile.partition("RUN pip install")[2], "the server and the client need none"
    for text in (makefile, dockerfile):
        assert "-c constraints.txt" in text
    declared = (repository() / "pyproject.toml").read_text().split("[tool.setuptools.packages.find]")[1].split("]")[0]
    packages = re.findall(r'"(\w+)\*"', declared)
    for package in packages:
        assert f"COPY {package} {package}\n" in dockerfile, package
    for source in re.findall(r"^COPY (?!--from)(.+) \S+$", dockerfile, re.MULTILINE):
        for name in source.split():
            assert (repository() / name).exists(), name


def test_compose_runs_commands_the_cli_has() -> None:
    """Both services, a volume that stays, health checks."""
    from objectcache.cli.main import make_parser

    compose = yaml.safe_load((repository() / "docker" / "compose.yaml").read_text())
    assert set(compose["services"]) == {"gateway", "storage-server"}
    for service in compose["services"].values():
        assert "healthcheck" in service
        assert service["volumes"] == ["objects:/var/lib/objectcache"]
        assert make_parser().parse_args(service["command"]).command
    assert "objects" in compose["volumes"]
    assert compose["services"]["storage-server"]["devices"] == ["/dev/userfaultfd:/dev/userfaultfd"]


def test_the_compose_file_over_minio_runs_commands_the_cli_has() -> None:
    """tests/integration/test_compose.py runs them."""
    from objectcache.cli.main import make_parser

    compose = yaml.safe_load((repository() / "docker" / "compose.minio.yaml").read_text())
    assert set(compose["services"]) == {"minio", "objectcache", "make-bucket"}
    options = make_parser().parse_args(compose["services"]["objectcache"]["command"])
    assert (options.upstream, options.disk_bytes) == ("http://minio:9000", 20_000_000_000)
    assert "minio" not in str(compose["services"]["minio"].get("ports", "")), "MinIO is not published"


def test_readme_names_only_make_targets_that_exist() -> None:
    makefile = (repository() / "Makefile").read_text()
    for target in set(re.findall(r"`make ([a-z-]+)`|^make ([a-z-]+)$", (repository() / "README.md").read_text(), re.M)):
        name = target[0] or target[1]
        assert re.search(rf"^{name}:", makefile, re.MULTILINE), name


@pytest.mark.parametrize(
    "command", ["serve", "storage-server", "gateway", "scrub", "compact", "doctor", "calibrate theta"]
)
def test_help_starts_with_what_is_needed_and_what_the_command_is_for(
    command: str, capsys: pytest.CaptureFixture[str]
) -> None:
    from objectcache.cli.main import run

    with pytest.raises(SystemExit):
        run([*command.split(), "--help"])
    usage, what, *_ = capsys.readouterr().out.split("\n\n")
    assert usage.startswith(f"usage: objectcache {command} ")
    assert usage.endswith("[options]")
    assert not what.startswith("options:")


def test_an_installation_without_a_checkout_says_that_it_has_no_benchmarks(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The wheel has none: their beds need what no server needs."""
    from objectcache.cli import main as cli

    monkeypatch.setattr(cli, "__file__", str(tmp_path / "objectcache" / "cli" / "main.py"))
    assert cli.run(["bench", "aggregate", "--smoke"]) == 2
    assert "checkout" in capsys.readouterr().err


def test_bench_has_its_own_help(capsys: pytest.CaptureFixture[str]) -> None:
    from objectcache.cli.main import run

    with pytest.raises(SystemExit) as left:
        run(["bench", "aggregate", "--help"])
    assert left.value.code == 0
    assert "--smoke" in capsys.readouterr().out


def test_no_optional_group_of_a_pattern_is_possessive() -> None:
    """Where it fails half-way, Python 3.11.2 does not go back: records of large bodies were passed over."""
    product = ("descriptors", "gateway", "nixl_client", "objectcache", "storage_server")
    modules = [path for folder in product for path in (repository() / folder).rglob("*.py")]
    assert [path for path in modules if ")?+" in path.read_text()] == []
