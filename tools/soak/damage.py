# SPDX-License-Identifier: Apache-2.0
"""Damage the bytes of a file at random, also in ways that know zip, gzip, tar, JSON and safetensors.

What lives here: bytes in, bytes out. What does not: which files are damaged and what reads them (readers.py).
Damage is *forged* where checksums were made again around it: then a reader has no means to notice another value.
"""

from __future__ import annotations

import contextlib
import gzip
import io
import json
import os
import pickle
import random
import re
import struct
import tarfile
import zipfile
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

MARK = "ESCAPED"  # in the names of all files that damage tries to have written
WORDS = [0, 1, 0x7F, 0x80, 0xFF, 2**15, 2**16 - 1, 2**31 - 1, 2**31, 2**32 - 2, 2**40, 2**63 - 1, 2**64 - 1]
NUMBERS = ["0", "-1", "1e999", "9" * 30, "9" * 5000, "NaN", "-0.0", "99999999", "2147483648"]
# JSON texts; the last one nests deeper than Python's parser goes
VALUES = [
    *("null", "true", "-1", "0", "1.5", "NaN", "Infinity", "1e308", "9" * 30, "1" + "0" * 400),
    *('""', '"x"', '"\\u0000"', "[]", "[[1]]", "{}", '{"x": 1}', "[null, 1]", "[" * 20000 + "]" * 20000),
]
NAMES = [f"../{MARK}", f"/{MARK}", "", "x" * 60000, "a\\b", "tensor_dict.npz", ".", "\u00e9\u2028"]
BOMB_BYTES = 1 << 30


class Evil:
    """Pickled, a call that writes a file."""

    def __reduce__(self) -> tuple[Any, ...]:
        return os.system, (f"touch {MARK}",)


@dataclass(frozen=True)
class Damaged:
    """Bytes after damage, how they came about, and whether checksums were made again."""

    content: bytes
    how: str
    is_forged: bool = False


def damage(content: bytes, other: bytes, rng: random.Random) -> Damaged:
    """Return ``content`` damaged in one way.

    Args:
        content: of a valid file.
        other: of another valid file of its kind.
        rng: decides.
    """
    aware = next((each for is_of, each in KINDS if is_of(content)), None)
    if aware is not None and rng.random() < 0.5:
        with contextlib.suppress(
            ValueError, KeyError, EOFError, zlib.error, zipfile.BadZipFile, tarfile.TarError
        ):
            return aware(content, other, rng)
    change = rng.choice(PLAIN)
    return Damaged(change(content, other, rng), change.__name__)


# ---- of any file -----------------------------------------------------------------------------------------


def truncate(content: bytes, other: bytes, rng: random.Random) -> bytes:
    return content[: rng.choice([0, 1, len(content) - 1, rng.randint(0, len(content))])]


def append(content: bytes, other: bytes, rng: random.Random) -> bytes:
    return content + rng.choice(
        [rng.randbytes(rng.randint(1, 600)), bytes(rng.randint(1, 600)), other, content]
    )


def flip(content: bytes, other: bytes, rng: random.Random) -> bytes:
    changed = bytearray(content)
    for _ in range(rng.choice([1, 1, 1, 2, 8]) if content else 0):
        changed[rng.randrange(len(changed))] ^= 1 << rng.randrange(8)
    return bytes(changed)


def _span(content: bytes, rng: random.Random) -> tuple[int, int]:
    start = rng.choice([0, rng.randint(0, len(content))])
    return start, min(len(content), start + rng.choice([1, 4, 30, rng.randint(1, 2000)]))


def overwrite(content: bytes, other: bytes, rng: random.Random) -> bytes:
    start, end = _span(content, rng)
    return content[:start] + rng.randbytes(end - start) + content[end:]


def zero(content: bytes, other: bytes, rng: random.Random) -> bytes:
    start, end = _span(content, rng)
    return content[:start] + bytes(end - start) + content[end:]


def duplicate(content: bytes, other: bytes, rng: random.Random) -> bytes:
    start, end = _span(content, rng)
    return content[:end] + content[start:end] + content[end:]


def cut(content: bytes, other: bytes, rng: random.Random) -> bytes:
    start, end = _span(content, rng)
    return content[:start] + content[end:]


def word(content: bytes, other: bytes, rng: random.Random) -> bytes:
    """Replace an aligned word, more often of the beginning, by an extreme number."""
    size, order = rng.choice([2, 4, 8]), rng.choice(["little", "big"])
    start = rng.randrange(1 + min(len(content), rng.choice([32, len(content)])) // size) * size
    number = rng.choice(WORDS) & ((1 << 8 * size) - 1)
    return content[:start] + number.to_bytes(size, order) + content[start + size :]  # type: ignore[arg-type]


def number(content: bytes, other: bytes, rng: random.Random) -> bytes:
    """Replace the digits of one number in text by another number."""
    found = [match.span() for match in re.finditer(rb"[0-9]+", content[:20000])]
    start, end = rng.choice(found) if found else (0, 0)
    return content[:start] + rng.choice(NUMBERS).encode() + content[end:]


def replace(content: bytes, other: bytes, rng: random.Random) -> bytes:
    makes = [
        lambda: rng.randbytes(rng.randint(0, 3000)),
        lambda: bytes(len(content)),
        lambda: pickle.dumps(Evil()),
    ]
    return rng.choice([*makes, lambda: b"PK\x05\x06" + bytes(18), lambda: b"{}", lambda: b"[]"])()


def swap(content: bytes, other: bytes, rng: random.Random) -> bytes:
    return other


PLAIN = (truncate, append, flip, flip, overwrite, zero, duplicate, cut, word, number, replace, swap)


# ---- JSON and safetensors --------------------------------------------------------------------------------


def change_json(content: bytes, other: bytes, rng: random.Random) -> Damaged:
    """Replace, remove or rename a value; of lines of JSON, in one of them."""
    lines = content.splitlines(keepends=True)
    if len(lines) > 1 and lines[0].rstrip().endswith(b"}"):
        chosen = rng.randrange(len(lines))
        lines[chosen] = _changed_json(lines[chosen], rng) + b"\n"
        return Damaged(b"".join(lines), "json line")
    return Damaged(_changed_json(content, rng), "json")


def _changed_json(content: bytes, rng: random.Random) -> bytes:
    root = [json.loads(content)]
    places: list[tuple[Any, Any]] = [(root, 0)]
    for holder, key in places:
        inner = holder[key]
        keys = inner if isinstance(inner, dict) else range(len(inner)) if isinstance(inner, list) else ()
        places += [(inner, each) for each in list(keys)[:40]]
    holder, key = rng.choice(places)
    action = rng.choice(["value", "value", "value", "remove", "rename", "swap"])
    mark = "\x01mark"
    if action == "remove" and holder is not root:
        del holder[key]
    elif action == "rename" and isinstance(holder, dict):
        holder[rng.choice(["x", "", "x" * 5000, f"../{MARK}"])] = holder.pop(key)
    elif action == "swap":
        there, where = rng.choice(places[1:] or places)
        holder[key] = json.loads(json.dumps(there[where]))
    else:
        holder[key] = mark
    return json.dumps(root[0]).replace(json.dumps(mark), rng.choice(VALUES)).encode() if root else b""


def change_safetensors(content: bytes, other: bytes, rng: random.Random) -> Damaged:
    """Change a value of the header, whose size is then right again."""
    size = int.from_bytes(content[:8], "little")
    head = _changed_json(content[8 : 8 + size], rng)
    return Damaged(len(head).to_bytes(8, "little") + head + content[8 + size :], "safetensors header")


# ---- gzip and tar ----------------------------------------------------------------------------------------


def zeros_deflated(num_bytes: int) -> bytes:
    """Return a raw deflate stream of so many zeros (whole MiB), made of one block again and again."""
    packer = zlib.compressobj(9, zlib.DEFLATED, -15)
    block = packer.compress(bytes(1 << 20)) + packer.flush(zlib.Z_FULL_FLUSH)
    return block * (num_bytes >> 20) + packer.flush(zlib.Z_FINISH)


def change_gzip(content: bytes, other: bytes, rng: random.Random) -> Damaged:
    """Change what is packed, or pack a GiB of zeros behind its beginning."""
    inner = gzip.decompress(content)
    if rng.random() < 0.1:
        head = content[:10] if rng.random() < 0.5 else b"\x1f\x8b\x08" + bytes(7)
        begin = inner[: rng.choice([0, 16, 512])]
        stored = b"\x00" + struct.pack("<HH", len(begin), len(begin) ^ 0xFFFF) + begin
        return Damaged(head + stored + zeros_deflated(BOMB_BYTES) + bytes(8), "gzip bomb", is_forged=True)
    changed = damage(inner, gzip.decompress(other), rng)
    return Damaged(gzip.compress(changed.content, 1), f"gzip of {changed.how}", is_forged=True)


def change_tar(content: bytes, other: bytes, rng: random.Random) -> Damaged:
    """Change a field of a member's header, whose checksum is then right again, or add members of odd kinds."""
    with tarfile.open(fileobj=io.BytesIO(content)) as archive:
        members = archive.getmembers()
    if rng.random() < 0.5:
        start = rng.choice(members).offset
        block = bytearray(content[start : start + 512])
        field, size = rng.choice([(0, 100), (124, 12), (124, 12), (136, 12), (156, 1), (257, 8), (345, 155)])
        values = [
            rng.randbytes(size),
            b"\xff" * size,
            b"\x80" + b"\xff" * size,
            b"7" * size,
            bytes(size),
            b"LKxgSV23",
        ]
        block[field : field + size] = rng.choice(values)[:size].ljust(size, b"\0")
        block[148:156] = b"%06o\0 " % (sum(block[:148]) + 256 + sum(block[156:]))
        return Damaged(content[:start] + bytes(block) + content[start + 512 :], "tar header", is_forged=True)
    made = tarfile.TarInfo(rng.choice([*NAMES, rng.choice(members).name]))
    made.type = rng.choice(
        [tarfile.REGTYPE, tarfile.SYMTYPE, tarfile.LNKTYPE, tarfile.CHRTYPE, b"L", b"x", b"S", b"?"]
    )
    made.size, made.linkname = rng.choice([0, 0, 512, 2**33 - 1]), f"../{MARK}"
    junk = rng.choice([bytes(1024), rng.randbytes(1024), b"30 path=../x\n" * 70])
    return Damaged(made.tobuf(tarfile.GNU_FORMAT) + junk + content, "tar member", is_forged=True)


# ---- zip -------------------------------------------------------------------------------------------------


@dataclass
class Member:
    """An entry of a zip file, with whatever sizes it claims."""

    name: str
    content: bytes
    method: int = 0
    packed: bytes | None = None
    claims: int | None = None  # bytes when unpacked; None: as many as there are

    def fields(self) -> tuple[bytes, bytes, bytes]:
        """Return what the local header and the directory have in common, the name, and the bytes."""
        packed, name = self.content if self.packed is None else self.packed, self.name.encode()
        size = len(self.content) if self.claims is None else self.claims
        sizes = (zlib.crc32(self.content), len(packed), size & 0xFFFFFFFF, len(name), 0)
        return struct.pack("<HHHHHLLLHH", 20, 0, self.method, 0, 33, *sizes), name, packed


def zip_of(members: list[Member]) -> bytes:
    """Return a zip file of these members."""
    body, directory = b"", b""
    for member in members:
        fields, name, packed = member.fields()
        directory += b"PK\x01\x02\x14\x00" + fields + struct.pack("<HHHLL", 0, 0, 0, 0, len(body)) + name
        body += b"PK\x03\x04" + fields + name + packed
    count = (len(members), len(members), len(directory), len(body), 0)
    return body + directory + b"PK\x05\x06" + struct.pack("<HHHHLLH", 0, 0, *count)


def change_zip(content: bytes, other: bytes, rng: random.Random) -> Damaged:
    """Change a member, its name or the sizes it claims; checksums are right again."""
    with zipfile.ZipFile(io.BytesIO(content)) as archive:
        members = [Member(name, archive.read(name)) for name in archive.namelist()]
    with zipfile.ZipFile(io.BytesIO(other)) as archive:
        others = {name: archive.read(name) for name in archive.namelist()}
    how = rng.choice(
        ["content", "content", "content", "name", "twice", "missing", "claims", "bomb", "deflated"]
    )
    place = rng.randrange(len(members))
    chosen = members[place]
    if how == "content":
        changed = damage(chosen.content, others.get(chosen.name, b""), rng)
        chosen.content, how = changed.content, f"content, {changed.how}"
    elif how == "name":
        chosen.name = rng.choice([*NAMES, rng.choice(members).name])
    elif how == "twice":
        members.append(Member(chosen.name, rng.choice(members).content))
    elif how == "missing":
        del members[place]
    elif how == "claims":
        chosen.claims = rng.choice(WORDS)
    elif how == "bomb":
        chosen.method, chosen.packed = 8, zeros_deflated(BOMB_BYTES)
        chosen.claims = rng.choice([None, BOMB_BYTES, 0, 1])
    else:
        packer = zlib.compressobj(9, zlib.DEFLATED, -15)
        chosen.method = rng.choice([8, 8, 12, 14, 99])
        chosen.packed = packer.compress(chosen.content) + packer.flush()
    return Damaged(zip_of(members), f"zip {how}", is_forged=True)


def _is_json(content: bytes) -> bool:
    return content[:1] in b"{[" and content[:1] != b""


KINDS: tuple[tuple[Callable[[bytes], bool], Callable[[bytes, bytes, random.Random], Damaged]], ...] = (
    (lambda content: content[:4] == b"PK\x03\x04", change_zip),
    (lambda content: content[:2] == b"\x1f\x8b", change_gzip),
    (lambda content: content[257:262] == b"ustar", change_tar),
    (lambda content: content[8:9] == b"{" and content[3:8] == bytes(5), change_safetensors),
    (_is_json, change_json),
)
