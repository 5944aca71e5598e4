# SPDX-License-Identifier: Apache-2.0
"""Shrink NVIDIA's libnccl to the code of one GPU architecture, so that a machine without a network can be sent it.

    pip download --no-deps --only-binary=:all: nvidia-nccl-cu13==2.30.7 && unzip nvidia_nccl_cu13-*.whl
    python -m tools.gpu_day.shrink_nccl nvidia/nccl/lib/libnccl.so.2 90 .gpu_day/libnccl.so.2.xz

The device code of other architectures, and what only a linker of device code reads, become zeros, which compress to
nothing: 252 MB become 22 MB, 14 MB after `strip --strip-debug`. Nothing moves, so the library loads as before.
"""

from __future__ import annotations

import lzma
import struct
import sys
from collections.abc import Iterator
from pathlib import Path

LINKED, LINKABLE = b".nv_fatbin", b"__nv_relfatbin"  # ELF sections with device code
MAGIC = 0xBA55ED50  # a fat binary begins with it: NVIDIA's fatbinary_section.h
MACHINE_CODE = 2  # kind of an image; 1: PTX


def main() -> None:
    source, architecture, target = Path(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3])
    library = bytearray(source.read_bytes())
    kept = 0
    for name, begin, end in sections(library):
        if name in (LINKED, LINKABLE):
            for kind, arch, first, size in images(library, begin, end):
                if name == LINKED and (kind, arch) == (MACHINE_CODE, architecture):
                    kept += size
                else:
                    library[first : first + size] = bytes(size)
    if not kept:
        raise SystemExit(f"{source} has no machine code for sm_{architecture}")
    target.parent.mkdir(parents=True, exist_ok=True)
    target.write_bytes(lzma.compress(bytes(library), preset=3))
    print(
        f"{target}: {target.stat().st_size / 1e6:.1f} MB, with {kept / 1e6:.1f} MB of code for sm_{architecture}"
    )


def sections(library: bytearray) -> Iterator[tuple[bytes, int, int]]:
    """Yield (name, first byte, end) of every section of a 64-bit ELF file."""
    (table,) = struct.unpack_from("<Q", library, 0x28)
    size, count, names = struct.unpack_from("<HHH", library, 0x3A)
    entries = [struct.unpack_from("<IIQQQQ", library, table + size * i) for i in range(count)]
    for name, _, _, _, offset, length in entries:
        start = entries[names][4] + name
        yield bytes(library[start : library.index(0, start)]), offset, offset + length


def images(library: bytearray, begin: int, end: int) -> Iterator[tuple[int, int, int, int]]:
    """Yield (kind, architecture, first byte, size) of every image of the fat binaries between two places."""
    place = begin
    while place < end:
        magic, _, header, size = struct.unpack_from("<IHHQ", library, place)
        if magic != MAGIC:  # padding
            place += 8
            continue
        image, place = place + header, place + header + size
        while image < place:
            kind, _, header, size = struct.unpack_from("<HHIQ", library, image)
            (architecture,) = struct.unpack_from("<I", library, image + 28)
            yield kind, architecture, image + header, size
            image += header + size


if __name__ == "__main__":
    main()
