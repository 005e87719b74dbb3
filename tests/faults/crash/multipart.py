"""The steps of multipart uploads: begun, filled, copied into, listed, completed and aborted, also rounds later."""

from __future__ import annotations

from urllib.parse import quote, urlencode

from tests.faults.crash.client import error_code, tree
from tests.faults.crash.model import SentPart, Upload
from tests.faults.crash.versions import PART_BYTES_MIN, Piece, Version, md5, multipart_etag, pairs
from tests.faults.crash.world import BUCKET
from tests.faults.crash.writer import SLOW_CHANCE, Writer, headers_for

UPLOADS_MAX = 4
PART_NUMBER_MAX = 5


class Multipart:
    """Uploads of one writer."""

    def __init__(self, writer: Writer) -> None:
        self._writer = writer
        self._world = writer.world
        self._rng = writer.rng
        writer.add_steps([(2, self._create), (5, self._part), (1, self._copied_part), (3, self._complete)])
        writer.add_steps([(0.7, self._abort), (0.7, self._use_ended)])

    def _open(self) -> Upload | None:
        uploads = [one for one in self._world.uploads[self._writer.index] if not one.is_ending]
        return self._rng.choice(uploads) if uploads else None

    def _create(self) -> None:
        if len(self._world.uploads[self._writer.index]) >= UPLOADS_MAX:
            return
        key = self._rng.choice(self._writer.keys)
        metadata, tags = self._writer.new_metadata(), self._writer.new_tags()
        self._world.begun.append(key)
        headers = {"content-type": "application/x-crash"} | headers_for(metadata, tags)
        reply = self._writer.carry_out(
            "create-upload", {}, lambda: self._writer.client.call("POST", key, "uploads=", headers=headers)
        )
        if reply is not None:
            self._world.begun.remove(key)
            upload_id = tree(reply).findtext("UploadId") or ""
            self._world.uploads[self._writer.index].append(Upload(key, upload_id, metadata, tags))

    def _part(self) -> None:
        """A part other than the last has 5 MiB at least: only number 1 is so large, and the last is any of the rest."""
        upload = self._open()
        if upload is None:
            return
        number = self._rng.choice((1, 1, 2, 3, PART_NUMBER_MAX))
        big = number == 1 and self._rng.random() < 0.3
        piece, body = self._writer.new_piece(PART_BYTES_MIN if big else self._rng.choice((0, 1, 40_000, 300_001)))
        slowly = self._rng if body and self._rng.random() < SLOW_CHANCE else None
        self._send(upload, number, SentPart(piece, md5(body)), {}, body, slowly=slowly is not None)

    def _copied_part(self) -> None:
        upload = self._open()
        sources = [(key, one) for key, one in self._writer.present() if one.nbytes > 0 and len(one.pieces) == 1]
        if upload is None or not sources:
            return
        key, version = self._rng.choice(sources)
        first = self._rng.randrange(version.nbytes)
        last = self._rng.randrange(first, min(version.nbytes, first + 600_000))
        (whole,) = version.pieces
        piece = Piece(whole.seed, last - first + 1, whole.start + first)
        headers = {
            "x-amz-copy-source": quote(f"/{BUCKET}/{key}"),
            "x-amz-copy-source-range": f"bytes={first}-{last}",
        }
        self._send(upload, self._rng.choice((2, 4)), SentPart(piece, md5(piece.body())), headers, b"", slowly=False)

    def _send(
        self, upload: Upload, number: int, part: SentPart, headers: dict[str, str], body: bytes, *, slowly: bool
    ) -> None:
        before = upload.parts.get(number, [None])
        upload.parts[number] = [*before, part]
        query = f"partNumber={number}&uploadId={quote(upload.upload_id)}"
        reply = self._writer.carry_out(
            "part",
            {},
            lambda: self._writer.client.call(
                "PUT", upload.key, query, body=body, headers=headers, slowly=self._rng if slowly else None
            ),
        )
        if reply is not None:
            upload.parts[number] = [part]

    def _complete(self) -> None:
        upload = self._open()
        if upload is None or not self._is_sure(upload.key):
            return
        parts = list(upload.sure_parts().items())
        while len(parts) > 1 and parts[0][1].piece.nbytes < PART_BYTES_MIN:
            parts.pop(self._rng.randrange(len(parts) - 1) if self._rng.random() < 0.3 else 0)
        while len(parts) > 2:  # number 1 is the only one that may be large enough
            parts.pop()
        if not parts:
            return
        version = Version(
            tuple(part.piece for _, part in parts),
            multipart_etag([part.etag for _, part in parts]),
            pairs(upload.metadata),
            pairs(upload.tags),
            "application/x-crash",
        )
        items = "".join(f'<Part><PartNumber>{n}</PartNumber><ETag>"{part.etag}"</ETag></Part>' for n, part in parts)
        body = f"<CompleteMultipartUpload>{items}</CompleteMultipartUpload>".encode()
        upload.is_ending, upload.ending = True, version
        query = f"uploadId={quote(upload.upload_id)}"
        reply = self._writer.carry_out(
            "complete",
            {upload.key: version},
            lambda: self._writer.client.call("POST", upload.key, query, body=body),
        )
        if reply is not None:
            self._world.end(self._writer.index, upload)

    def _is_sure(self, key: str) -> bool:
        history = self._writer.journal.histories.get(key)
        return history is None or history.is_sure

    def _abort(self) -> None:
        upload = self._open()
        if upload is None:
            return
        upload.is_ending = True
        query = f"uploadId={quote(upload.upload_id)}"
        reply = self._writer.carry_out("abort", {}, lambda: self._writer.client.call("DELETE", upload.key, query))
        if reply is not None:
            self._world.end(self._writer.index, upload)

    def _use_ended(self) -> None:
        """An upload that was completed or aborted takes no part."""
        for upload in self._rng.sample(self._world.ended, min(1, len(self._world.ended))):
            query = urlencode({"partNumber": 1, "uploadId": upload.upload_id})
            reply = self._writer.client.call("PUT", upload.key, query, body=b"late")
            if error_code(reply) != "NoSuchUpload":
                self._writer.journal.fail(
                    self._writer.name, f"upload {upload.upload_id} is over and takes parts: {reply.status}"
                )
