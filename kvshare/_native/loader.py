"""Find, load and check the patched libllama.

It is loaded once per process, by importing `llama_cpp` with `LLAMA_CPP_LIB_PATH` set: its ordinary
bindings and ours then share one handle, and there is never a second libllama. What is searched, in
this order: the explicit argument, `KVSHARE_LIBRARY` in the environment, the library that `llama_cpp`
holds already if it is a patched one, the cached build.
"""

from __future__ import annotations

import ctypes
import importlib
import importlib.metadata
import logging
import os
import struct
import sys
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvshare import build, patches
from kvshare._native import signatures
from kvshare.errors import AbiMismatchError, LibraryError, LibraryNotFoundError, LibraryUnpatchedError

ENVIRONMENT = "KVSHARE_LIBRARY"

logger = logging.getLogger("kvshare.llama")
logger.addHandler(logging.NullHandler())  # quiet unless the program configures logging

_lock = threading.RLock()
_loaded: Library | None = None

# enum ggml_log_level; CONT goes on with the level of the line before
_LEVELS = {1: logging.DEBUG, 2: logging.INFO, 3: logging.WARNING, 4: logging.ERROR}
_LEVEL_CONT = 5

# Elf64_Ehdr: e_phoff, e_shoff, e_phentsize, e_phnum, e_shentsize, e_shnum
_ELF_HEADER = struct.Struct("<32xQQ6xHHHH2x")
# Elf64_Phdr: p_type, p_offset, p_filesz
_ELF_SEGMENT = struct.Struct("<I4xQ16xQ16x")
_PT_LOAD = 1


@dataclass(frozen=True)
class Library:
    """The loaded library.

    Attributes:
        path: the file of libllama.
        found_by: `argument`, `environment`, `llama_cpp` or `build`.
        llama: the module `llama_cpp.llama_cpp`, bindings of llama.h.
        lib: the ctypes handle that both bindings use.
        abi: ABI number of the library.
        upstream: llama.cpp commit that its patch series is made for.
        series: content id of its patch series.
    """

    path: Path
    found_by: str
    llama: Any
    lib: Any
    abi: int
    upstream: str
    series: str


def loaded() -> Library | None:
    """Return the library if this process has loaded it."""
    return _loaded


def find(path: str | os.PathLike[str] | None = None) -> Path:
    """Return the file that `load` would load, without loading it.

    Raises:
        LibraryNotFoundError: nothing there, or no cached build.
    """
    found, _ = _find(path, is_bound=False)
    assert found is not None
    return found


def load(path: str | os.PathLike[str] | None = None) -> Library:
    """Load the patched libllama, or return it if it is loaded.

    Args:
        path: libllama itself or the folder that holds it; None searches.

    Raises:
        LibraryNotFoundError: nothing there, or no cached build.
        LibraryUnpatchedError: a stock libllama, there or loaded already by `import llama_cpp`.
        AbiMismatchError: a patched libllama of another ABI, pin or patch series.
        LibraryError: another library is loaded already.
    """
    global _loaded
    with _lock:
        if _loaded is not None:
            if path is not None and _library_file(Path(path)).resolve() != _loaded.path.resolve():
                raise LibraryError(
                    f"cannot load {path}: this process uses {_loaded.path} already",
                    hint="one process holds one libllama; start another process",
                )
            return _loaded
        _loaded = _load(path)
        return _loaded


def backends(library: Library) -> list[str]:
    """Return the devices that the library can compute on, `NAME (description)`."""
    # symbols of libggml are found through the handle of libllama, which depends on it
    ggml = library.lib
    ggml.ggml_backend_dev_count.restype = ctypes.c_size_t
    ggml.ggml_backend_dev_get.restype = ctypes.c_void_p
    ggml.ggml_backend_dev_get.argtypes = [ctypes.c_size_t]
    for function in (ggml.ggml_backend_dev_name, ggml.ggml_backend_dev_description):
        function.restype, function.argtypes = ctypes.c_char_p, [ctypes.c_void_p]
    names = []
    for index in range(ggml.ggml_backend_dev_count()):
        device = ggml.ggml_backend_dev_get(index)
        name, description = (
            function(device).decode(errors="replace").strip()
            for function in (ggml.ggml_backend_dev_name, ggml.ggml_backend_dev_description)
        )
        names.append(f"{name} ({description})")
    return names


def _load(path: str | os.PathLike[str] | None) -> Library:
    module = sys.modules.get("llama_cpp.llama_cpp")
    wanted, found_by = _find(path, is_bound=module is not None)
    if module is None:
        assert wanted is not None
        _require_patched_file(wanted)
        module = _import_bindings(wanted)
    held = Path(module._lib._name)
    if not hasattr(module._lib, "llama_kv_share_get_abi"):
        raise LibraryUnpatchedError(
            f"`import llama_cpp` has loaded a stock libllama already: {held}",
            hint="call kvshare.load() before the first `import llama_cpp`, "
            "or set LLAMA_CPP_LIB_PATH to the folder of the patched library",
        )
    if wanted is not None and held.resolve() != wanted.resolve():
        raise LibraryError(
            f"`import llama_cpp` has loaded {held} already, wanted {wanted}",
            hint="call kvshare.load() before the first `import llama_cpp`",
        )
    return _bind(module, held, found_by)


def _find(path: str | os.PathLike[str] | None, *, is_bound: bool) -> tuple[Path | None, str]:
    if path is not None:
        return _library_file(Path(path)), "argument"
    if os.environ.get(ENVIRONMENT):
        return _library_file(Path(os.environ[ENVIRONMENT])), "environment"
    if is_bound:
        return None, "llama_cpp"
    info = build.find_build()
    if info is None:
        raise LibraryNotFoundError(
            "there is no patched libllama yet", hint="run `kvshare build` (about 4 minutes on two cores)"
        )
    return _library_file(info.lib_dir), "build"


def _library_file(path: Path) -> Path:
    file = path / "libllama.so" if path.is_dir() else path
    if not file.is_file():
        raise LibraryNotFoundError(
            f"no libllama at {file}",
            hint="name libllama.so or the folder that holds it, or run `kvshare build`",
        )
    return file


def _require_patched_file(file: Path) -> None:
    """Tell a stock or a broken library before it is loaded: a process cannot get rid of it again."""
    try:
        content = file.read_bytes()
    except OSError as error:
        raise LibraryError(f"cannot read {file}: {error.strerror}") from error
    if content[:4] != b"\x7fELF":
        raise LibraryError(f"{file} is not a shared library", hint="name libllama.so, or run `kvshare build`")
    # dlopen of a truncated file is a SIGBUS, not an error
    if (needed := _elf_nbytes(content)) > len(content):
        raise LibraryError(
            f"{file} is truncated: it has {len(content)} bytes and needs at least {needed}",
            hint="copy it again, or run `kvshare build`",
        )
    if b"\0llama_kv_share_get_abi\0" not in content:
        raise LibraryUnpatchedError(
            f"{file} does not carry the kvshare patch series",
            hint="run `kvshare patch apply CHECKOUT` and build it, or run `kvshare build`",
        )


def _elf_nbytes(content: bytes) -> int:
    """Return the size that an ELF file must have for its segments and tables to be there."""
    if len(content) < _ELF_HEADER.size or content[4:6] != b"\2\1":
        return _ELF_HEADER.size  # what is not 64-bit little-endian is left to dlopen
    phoff, shoff, phentsize, phnum, shentsize, shnum = _ELF_HEADER.unpack_from(content)
    ends: list[int] = [phoff + phentsize * phnum, shoff + shentsize * shnum]
    if phentsize >= _ELF_SEGMENT.size and ends[0] <= len(content):
        for at in range(phoff, ends[0], phentsize):
            kind, offset, filesz = _ELF_SEGMENT.unpack_from(content, at)
            if kind == _PT_LOAD:
                ends.append(offset + filesz)
    return max(ends)


def bindings_version() -> str | None:
    """Return the version of the installed llama-cpp-python, or None."""
    try:
        return importlib.metadata.version(patches.pin().package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _require_bindings() -> None:
    pin, found = patches.pin(), bindings_version()
    if found != pin.version:
        raise AbiMismatchError(
            f"{pin.package} {found} is installed, this kvshare needs {pin.version}"
            if found
            else f"{pin.package} is not installed",
            hint=f'CMAKE_ARGS="-DLLAMA_BUILD=OFF -DLLAVA_BUILD=OFF" pip install {pin.package}=={pin.version}',
        )


def _import_bindings(file: Path) -> Any:
    _require_bindings()
    # llama_cpp reads the variable once, while it is imported
    before = os.environ.get("LLAMA_CPP_LIB_PATH")
    os.environ["LLAMA_CPP_LIB_PATH"] = str(file.parent)
    try:
        return importlib.import_module("llama_cpp.llama_cpp")
    except (OSError, RuntimeError, FileNotFoundError) as error:
        hint = "run `kvshare doctor`"
        if "libcuda.so" in str(error):
            hint = "it was built with CUDA: install the NVIDIA driver, or build one without, `kvshare build`"
        raise LibraryError(f"cannot load {file}: {error}", hint=hint) from error
    finally:
        if before is None:
            del os.environ["LLAMA_CPP_LIB_PATH"]
        else:
            os.environ["LLAMA_CPP_LIB_PATH"] = before


def _bind(module: Any, path: Path, found_by: str) -> Library:
    lib = module._lib
    probe = lib.llama_kv_share_get_abi
    probe.restype, probe.argtypes = None, [ctypes.c_void_p]
    # room for any later version of the struct
    buffer = ctypes.create_string_buffer(4096)
    probe(buffer)
    abi = signatures.Abi.from_buffer(buffer)
    _require_abi(module, path, abi)
    for name, (restype, argtypes, errcheck) in signatures.FUNCTIONS.items():
        function = getattr(lib, name, None)
        if function is None:
            raise AbiMismatchError(f"{path} lacks {name}", hint="run `kvshare build`")
        function.restype, function.argtypes = restype, argtypes
        if errcheck is not None:
            function.library = lib
            function.errcheck = errcheck
    _redirect_log(module)
    module.llama_backend_init()
    return Library(
        path=path,
        found_by=found_by,
        llama=module,
        lib=lib,
        abi=int(abi.abi),
        upstream=abi.upstream.decode(),
        series=abi.series.decode(),
    )


def _require_abi(module: Any, path: Path, abi: signatures.Abi) -> None:
    expected = {
        "abi": signatures.ABI,
        "sizeof_abi": ctypes.sizeof(signatures.Abi),
        "sizeof_cparams": ctypes.sizeof(signatures.ContextParams),
        "sizeof_region": ctypes.sizeof(signatures.Region),
        "sizeof_range": ctypes.sizeof(signatures.Range),
        "sizeof_adopted": ctypes.sizeof(signatures.Adopted),
        "sizeof_issued": ctypes.sizeof(signatures.Issued),
        "sizeof_model_params": ctypes.sizeof(module.llama_model_params),
        "sizeof_context_params": ctypes.sizeof(module.llama_context_params),
        "sizeof_batch": ctypes.sizeof(module.llama_batch),
    }
    for name, value in expected.items():
        if getattr(abi, name) != value:
            raise AbiMismatchError(
                f"{path}: {name} is {getattr(abi, name)}, this kvshare needs {value}",
                hint="run `kvshare build`, and keep llama-cpp-python at the version that kvshare pins",
            )
    upstream = patches.pin().commit
    if abi.upstream.decode() != upstream:
        raise AbiMismatchError(
            f"{path} is llama.cpp {abi.upstream.decode()[:12]}, this kvshare needs {upstream[:12]}",
            hint="run `kvshare build`",
        )
    series = patches.series_id()
    if abi.series.decode() != series:
        raise AbiMismatchError(
            f"{path} carries patch series {abi.series.decode()[:12]}, this kvshare carries {series[:12]}",
            hint="run `kvshare build`; a checkout of your own: `kvshare patch reverse` with the old kvshare, "
            "then `kvshare patch apply`",
        )


class _LogRelay:
    """Pass llama.cpp's log on to `logging` under `kvshare.llama`, in whole lines."""

    def __init__(self) -> None:
        self.level = logging.DEBUG
        self.pending = ""

    def __call__(self, level: int, text: bytes, _user_data: Any) -> None:
        if level != _LEVEL_CONT:
            self.flush()
            self.level = _LEVELS.get(level, logging.DEBUG)
        self.pending += text.decode(errors="replace")
        if self.pending.endswith("\n"):
            self.flush()

    def flush(self) -> None:
        text, self.pending = self.pending.strip("\n"), ""
        if text.strip():
            logger.log(self.level, "%s", text)


_log_callback: Any = None


def _redirect_log(module: Any) -> None:
    global _log_callback
    _log_callback = module.llama_log_callback(_LogRelay())
    module.llama_log_set(_log_callback, ctypes.c_void_p(0))
