"""The images are built with the steps that are tested."""

from __future__ import annotations

import re

import pytest
import yaml

from tests.support import repository


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
    from objectcache.cli import _parser

    compose = yaml.safe_load((repository() / "docker" / "compose.yaml").read_text())
    assert set(compose["services"]) == {"gateway", "storage-server"}
    for service in compose["services"].values():
        assert "healthcheck" in service
        assert service["volumes"] == ["objects:/var/lib/objectcache"]
        assert _parser().parse_args(service["command"]).command
    assert "objects" in compose["volumes"]
    assert compose["services"]["storage-server"]["devices"] == ["/dev/userfaultfd:/dev/userfaultfd"]


def test_readme_names_only_make_targets_that_exist() -> None:
    makefile = (repository() / "Makefile").read_text()
    for target in set(re.findall(r"`make ([a-z-]+)`|^make ([a-z-]+)$", (repository() / "README.md").read_text(), re.M)):
        name = target[0] or target[1]
        assert re.search(rf"^{name}:", makefile, re.MULTILINE), name


@pytest.mark.parametrize("command", ["serve", "storage-server", "gateway", "scrub", "compact", "calibrate"])
def test_help_starts_with_what_is_needed_and_what_the_command_is_for(
    command: str, capsys: pytest.CaptureFixture[str]
) -> None:
    from objectcache.cli import run

    with pytest.raises(SystemExit):
        run([command, "--help"])
    usage, what, *_ = capsys.readouterr().out.split("\n\n")
    assert usage.startswith(f"usage: objectcache {command} ")
    assert usage.endswith("[options]")
    assert not what.startswith("options:")


def test_bench_has_its_own_help(capsys: pytest.CaptureFixture[str]) -> None:
    from objectcache.cli import run

    with pytest.raises(SystemExit) as left:
        run(["bench", "aggregate", "--help"])
    assert left.value.code == 0
    assert "--smoke" in capsys.readouterr().out
