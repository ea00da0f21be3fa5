"""The few files of a vLLM wheel that hold the other libraries' kernels.

    pip download --no-deps --only-binary=:all: --python-version 3.12 \\
        --platform manylinux_2_28_x86_64 -d wheels vllm==0.24.0
    python -m tools.peers.unpack wheels/vllm-0.24.0-*.whl peers.zip

The wheel is 279 MB, the zip 9 MB; `tools.peers.gpu --vllm` takes either, or a folder. The second
argument is a folder to copy the files to, or a zip file to pack them in.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from zipfile import ZIP_LZMA, BadZipFile, ZipFile

FLASH_MLA_LIBRARY = "vllm/_flashmla_C.abi3.so"
FLASH_MLA = "vllm/third_party/flashmla/flash_mla_interface.py"
FA3_LIBRARY = "vllm/vllm_flash_attn/_vllm_fa3_C.abi3.so"
FA3 = "vllm/vllm_flash_attn/flash_attn_interface.py"
TRITON = "vllm/v1/attention/ops/triton_decode_attention.py"
FILES = (FLASH_MLA_LIBRARY, FLASH_MLA, FA3_LIBRARY, FA3, TRITON)


def unpack(wheel: Path, target: Path) -> list[str]:
    """Copies what the wheel has of `FILES`, to a folder or into a zip file; their names.

    Raises:
        OSError, BadZipFile: the wheel can't be read, or the target not written.
    """
    with ZipFile(wheel) as archive:
        found = [name for name in FILES if name in archive.namelist()]
        if target.suffix == ".zip":
            with ZipFile(target, "w", ZIP_LZMA) as packed:
                for name in found:
                    packed.writestr(name, archive.read(name), ZIP_LZMA)
        else:
            archive.extractall(target, found)
    return found


@contextmanager
def opened(path: Path) -> Iterator[Path]:
    """A folder with the files of a wheel, a zip file or such a folder; it may go afterwards."""
    if path.is_dir():
        yield path
        return
    with TemporaryDirectory() as folder:
        unpack(path, Path(folder))
        yield Path(folder)


def main(arguments: list[str]) -> int:
    if len(arguments) != 2:
        print(__doc__, file=sys.stderr)
        return 2
    wheel, target = map(Path, arguments)
    try:
        found = unpack(wheel, target)
    except (OSError, BadZipFile) as error:
        print(f"{wheel} can't be unpacked: {error}", file=sys.stderr)
        return 1
    missing = sorted({*FILES} - {*found})
    print(f"{len(found)} files are in {target}")
    if missing:
        print(f"missing in {wheel}: {', '.join(missing)}", file=sys.stderr)
    return 1 if missing else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
