"""The guides' commands as written, with the folders, hosts and ports that they name, in a file system and a network of
their own.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.support.requests import OWNER
from tests.support.tree import repository

GUIDES = repository() / "docs" / "guides"
TIMEOUT_S = 500
PROGRAMS = ("aws", "curl", "docker", "mpiexec", "objectcache", "pip", "vllm")
NOT_RUN = {
    "objectcache calibrate": "minutes: tests/bench/test_calibrate*.py run them at small sizes",
    "docker compose": "no Docker engine: tests/integration/test_compose.py takes the file's steps",
    "mpiexec": "tests/integration/test_cluster_mpi.py starts members so",
    "objectcache llama-cpp": "tests/engines/test_llama_cpp.py starts it so",
    "pip install '.[ucx]'": "tests/integration/test_wheel.py installs the extras",
    "vllm serve": "tests/engines start vLLM with these options",
}
"""Commands that another test starts, and which one that is, or why none does."""

ROOT_TREE = """
set -eu -o pipefail
ip link set lo up
for host in 1 2 7 9; do ip address add 10.0.0.$host/32 dev lo; done
mkdir root
mount -t tmpfs none root
for each in /*; do
    if [ -L "$each" ]; then cp -a "$each" root/
    elif [ -d "$each" ]; then mkdir "root$each"; mount --rbind "$each" "root$each"
    fi
done
mount -t tmpfs none root/var
mount -t tmpfs none root/tmp
mkdir -p "root$PWD"
mount --bind "$PWD" "root$PWD"
mkdir -p "root$REPOSITORY"
mount --bind "$REPOSITORY" "root$REPOSITORY"
printf '127.0.0.1 localhost\\n10.0.0.9 minio\\n' > hosts
mount --bind hosts root/etc/hosts
mkdir -p root/scratch/kv
chmod 700 root/scratch/kv
exec chroot root bash "$PWD/guides.sh"
"""
FUNCTIONS = """
set -eu -o pipefail
servers=
trap 'for each in $servers; do kill $each 2>/dev/null || true; done; wait' EXIT
up() {  # NAME: its log says that it listens
    timeout 60 bash -c "until grep -q 'listening on' $1.log; do sleep 0.05; done" || { cat $1.log; exit 1; }
}
down() { for each in $servers; do kill $each; done; wait; servers=; }
said() { printf '== %s\\n' "$*"; }
"""


def commands(page: str) -> list[str]:
    """The commands of a guide's code, whole where they go on in the next line."""
    found: list[str] = []
    text, is_code = "", False
    for line in (GUIDES / page).read_text().splitlines():
        if line.startswith("```"):
            is_code = not is_code
        elif is_code or line.startswith("    "):
            text += line.strip() + "\n"
            if not line.endswith("\\"):
                found.append(text.rstrip())
                text = ""
    return [each for each in found if re.sub(r"^(\w+=\S+ )*", "", each).split(" ")[0] in PROGRAMS]


def all_commands() -> list[str]:
    return [each for page in sorted(GUIDES.glob("*.md")) for each in commands(page.name)]


def the(page: str, start: str) -> str:
    """The one command of the page that begins so."""
    (found,) = {each for each in commands(page) if each.startswith(start)}
    return found


def served(name: str, command: str) -> str:
    """The command in the background, until `down`."""
    return f'{{ exec {command}\n}} > {name}.log 2>&1 & servers="$servers $!"\nup {name}'


SERVE, S3 = "objectcache serve", "aws --endpoint-url http://127.0.0.1:9000 s3"
MINIO = served("minio", f"{SERVE} --host 10.0.0.9 --port 9000 --data ./minio")
ENGINE = "python -m bench.beds.canned_engines --no-events --port 8000 --host"
SCRIPT = [
    "said a cache, as eviction.md and vllm.md start it",
    served("eviction", the("eviction.md", SERVE)),
    "objectcache du kv-cache && objectcache mb notes",
    f"{S3} cp guides.sh s3://notes/guides.sh",
    the("upgrade.md", "aws "),
    "cmp backup/guides.sh guides.sh",
    the("scheduling.md", "curl "),
    "down",
    served("vllm", the("vllm.md", SERVE)),
    "objectcache du kv-cache",
    "down",
    "said its directory, without a server",
    "ln -s /var/kv DIR",
    the("durability.md", "objectcache scrub"),
    the("durability.md", "objectcache compact"),
    "said in front of a service, and of a directory",
    MINIO,
    "objectcache mb --endpoint http://minio:9000 notes",
    served("upstream", the("upstream.md", SERVE)),
    f"{S3} cp guides.sh s3://notes/guides.sh",
    "objectcache get --endpoint http://minio:9000 notes/guides.sh there.sh && cmp there.sh guides.sh",
    "down",
    served("shared", the("shared-files.md", SERVE)),
    f"objectcache mb notes && {S3} cp guides.sh s3://notes/guides.sh",
    "ls /scratch/kv/writers && objectcache doctor --upstream file:///scratch/kv",
    "down",
    "rm -r /cache",
    "said a cluster",
    "{ exec etcd --data-dir etcd --listen-client-urls http://10.0.0.1:2379 --listen-peer-urls http://127.0.0.1:0"
    ' --advertise-client-urls http://10.0.0.1:2379; } > etcd.log 2>&1 & servers="$servers $!"',
    "timeout 30 bash -c 'until curl -s -o health http://10.0.0.1:2379/health; do sleep 0.05; done'",
    MINIO.replace("./minio", "./minio --host 10.0.0.9"),
    "head -c 32 /dev/urandom | base64 > secret && chmod 600 secret",
    served("member", the("cluster.md", "objectcache storage-server")),
    served("gateway", the("cluster.md", "objectcache gateway")),
    "objectcache cluster status http://127.0.0.1:9000",
    f"{S3} cp s3://notes/guides.sh again.sh && cmp again.sh guides.sh",
    "down",
    "said a router",
    served("store", f"{SERVE} --host 10.0.0.9 --port 9000 --data ./store"),
    "mkfifo held && exec 9<> held",  # engines serve until their input ends
    *(f'{ENGINE} 10.0.0.{host} < held > engine{host}.log 2>&1 & servers="$servers $!"' for host in (1, 2)),
    served("router", the("orchestrator.md", "objectcache orchestrator")),
    the("orchestrator.md", "curl "),
]


def test_each_command_of_a_guide_is_run_here_or_elsewhere() -> None:
    run = "\n".join(SCRIPT)
    left = [each for each in all_commands() if each not in run]
    assert [each for each in left if not any(start in each for start in NOT_RUN)] == []


@pytest.mark.slow
@pytest.mark.timeout(TIMEOUT_S + 20)
def test_the_guides_commands_run_as_they_are_written(tmp_path: Path) -> None:
    unshare = ["unshare", "--user", "--map-root-user", "--net", "--mount"]
    if shutil.which("ip") is None or shutil.which("etcd") is None:
        pytest.skip("without etcd or iproute2")
    if subprocess.run([*unshare, "true"], capture_output=True).returncode:
        pytest.skip("this host gives its tests no network of their own")
    lines = [f"cd {tmp_path}", FUNCTIONS, *SCRIPT, "echo all is run"]
    (tmp_path / "guides.sh").write_text("\n".join(lines) + "\n")
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("AWS_", "OBJECTCACHE_"))}
    environment |= {
        "HOME": str(tmp_path),
        "PATH": f"{repository()}/.venv/bin:{environment['PATH']}",
        "PYTHONPATH": str(repository()),
        "REPOSITORY": str(repository()),
        "AWS_DEFAULT_REGION": "us-east-1",
    }
    for prefix in ("AWS", "OBJECTCACHE_UPSTREAM"):
        environment |= {f"{prefix}_ACCESS_KEY_ID": OWNER[0], f"{prefix}_SECRET_ACCESS_KEY": OWNER[1]}
    command = [*unshare, "bash", "-c", ROOT_TREE]
    ended = subprocess.run(
        command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=TIMEOUT_S, check=False
    )
    logs = "".join(f"\n{file.name}:\n{file.read_text()}" for file in sorted(tmp_path.glob("*.log")))
    assert ended.returncode == 0, ended.stdout + ended.stderr + logs
    assert ended.stdout.rstrip().endswith("all is run"), ended.stdout
